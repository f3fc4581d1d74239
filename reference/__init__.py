"""Slow and obviously right: attention written from the papers, in float64. Needs torch only and imports none of ours.

:func:`attention` is the dense formula, :mod:`.fp8` the format by its table, :mod:`.philox` the random numbers of
dropout.
"""

from . import fp8, philox, scores
from .dense import attention
from .masks import visible

__all__ = ["attention", "fp8", "philox", "scores", "visible"]
