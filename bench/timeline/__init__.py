"""Tells when each rank computed, sent, received and waited: the format, and how it is recorded."""
