"""One page of measured and predicted results, with its figures."""
