"""Records when each rank computes, sends, receives and waits; and the timeline format."""
