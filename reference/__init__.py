"""Slow and obviously right: attention written from the papers, in float64. Needs torch only and imports none of ours.

:func:`attention` is the dense formula, :mod:`.blockwise` FlashAttention-2's tiles, :mod:`.ring` a ring in one process.
"""

from . import blockwise, ring
from .dense import attention
from .masks import visible

__all__ = ["attention", "blockwise", "ring", "visible"]
