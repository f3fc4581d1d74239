"""Predicts rings that are not here: the loops that really run, on a clock that is only counted."""
