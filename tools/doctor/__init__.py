"""Checks of ``ringattn doctor``, which tell whether a ring works on this machine or in this job."""
