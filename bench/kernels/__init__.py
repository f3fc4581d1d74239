"""Measures one device's attention beside PyTorch's backends."""
