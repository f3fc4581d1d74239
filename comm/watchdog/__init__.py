"""Deadlines, preflight checks and telemetry: one thread per process, and what it knows."""
