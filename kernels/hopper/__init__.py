"""Gluon kernels for Hopper (sm_90), never run on a GPU yet; the host files that launch them are one folder above."""
