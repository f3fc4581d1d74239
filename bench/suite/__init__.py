"""Runs everything a machine can measure, most important first, into one result folder."""
