"""The model case."""
