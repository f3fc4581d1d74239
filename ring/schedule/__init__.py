"""Layouts, masks and schedules: pure functions and data that do not import `comm`."""
