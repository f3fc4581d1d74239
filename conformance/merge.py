"""The merge case: a function that merges ``(out, lse)`` parts of attention over different keys."""
