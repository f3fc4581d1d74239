"""Transfers by the copy engines of one node's GPUs, and how its processes find each other."""
