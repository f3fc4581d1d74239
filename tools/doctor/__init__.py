"""Checks that a machine, or a job, does what a ring needs."""
