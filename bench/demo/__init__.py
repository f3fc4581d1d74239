"""``ringattn demo``: trains with and without sharding, and compares every loss and gradient."""
