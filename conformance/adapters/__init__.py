"""Ready adapters. Each file needs torch, its target and ``..standalone``, because reproductions contain both files."""
