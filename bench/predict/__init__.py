"""Predicts the time of rings by running the real loops on a simulated clock."""
