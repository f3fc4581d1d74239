"""Reference implementations in float64, written from the papers for clarity, not speed.

The folder needs only torch and imports nothing else of ringattn. :func:`attention` is the dense formula, :mod:`.fp8`
is the e4m3 format from its table, and :mod:`.philox` generates the random numbers of dropout.
"""

from . import fp8, philox, scores
from .dense import attention
from .masks import visible

__all__ = ["attention", "fp8", "philox", "scores", "visible"]
