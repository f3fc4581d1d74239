"""Measures whole rings in real processes, next to other methods for the same attention."""
