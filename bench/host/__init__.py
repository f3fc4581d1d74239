"""Measures the host's time to post one hop, next to the hop's compute time."""
