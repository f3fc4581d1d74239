"""Code that the bench commands share: launching, timing, flags, errors against float64, output, provenance."""
