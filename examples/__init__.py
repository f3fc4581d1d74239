"""Examples to copy; each file runs as it is."""
