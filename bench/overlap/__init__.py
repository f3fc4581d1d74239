"""Measures compute alone, communication alone, and both together."""
