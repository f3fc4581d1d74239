"""Nodes and links of the ranks, and the order of the ring through them."""
