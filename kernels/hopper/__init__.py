"""Gluon kernels for Hopper (sm_90), not yet run on a GPU; the host code that launches them is one folder above."""
