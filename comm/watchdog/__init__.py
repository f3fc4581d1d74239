"""Deadlines, preflight checks and telemetry, all run by one thread per process."""
