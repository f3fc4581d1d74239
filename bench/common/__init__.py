"""What benches share: launching, timing, flags, errors against float64, output, provenance."""
