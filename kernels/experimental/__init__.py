"""Kernels that no GPU has confirmed yet, and their host side: the single-pass backward, and Hopper's."""
