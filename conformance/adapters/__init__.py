"""Ready adapters. Each file needs only torch and its target, because reproductions contain it."""
