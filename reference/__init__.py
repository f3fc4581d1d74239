"""Slow and obviously right: attention written from the papers, in float64. Needs torch only and imports none of ours.

:func:`attention` is the dense formula, :mod:`.blockwise` FlashAttention-2's tiles, :mod:`.ring` a ring in one process,
:mod:`.fp8` the format by its table, :mod:`.philox` the random numbers of dropout.
"""

from . import blockwise, fp8, philox, ring, scores
from .dense import attention
from .masks import visible

__all__ = ["attention", "blockwise", "fp8", "philox", "ring", "scores", "visible"]
