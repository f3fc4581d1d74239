"""Host time to post one hop, beside what the hop computes."""
