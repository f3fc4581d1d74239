"""Which ranks share a node, what joins two of them, and the order of the ring through them."""
