"""One page of what was measured and predicted, and the pictures on it."""
