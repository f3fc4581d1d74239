"""Writes kernels as a C++ framework links them: cubin, C launcher, manifest."""
