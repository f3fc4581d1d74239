"""Commands that inspect a machine (doctor), a schedule (show) or kernels (export) without benchmarking them."""
