"""Export of kernels for C and C++ frameworks: cubins, a C launcher and a manifest."""
