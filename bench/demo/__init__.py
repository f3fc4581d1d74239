"""Trains a small decoder on one long document, sharded and whole, and compares."""
