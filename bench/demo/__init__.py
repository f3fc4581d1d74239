"""``ringattn demo``: trains sharded and whole, and compares every loss and every gradient."""
