"""Runs every benchmark that a machine can run, most important first, into one folder of results."""
