"""Measures whole rings in real processes, beside other ways to the same attention."""
