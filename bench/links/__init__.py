"""Measures every transport over every edge of the ring."""
