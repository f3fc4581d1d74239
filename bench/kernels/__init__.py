"""Measures attention on one device, next to PyTorch's backends."""
