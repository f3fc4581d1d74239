"""Triton kernels and their jit helpers; the host code that launches them is one folder above."""
