"""Finds the fastest tiles for a GPU, and with several GPUs what a ring's ranks share."""
