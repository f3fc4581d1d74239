"""Where kernels and comm meet: layouts, masks, schedules, the ring loop, autograd."""

from .attention import ring_attention
from .block_mask import BlockMask, Longformer, bigbird, fixed, longformer, strided
from .layout import Layout, Span
from .mask import Mask, bounds, visible_pairs
from .ring import Ring
from .schedule import Hop, Schedule, schedule
from .shards import positions, shard, unshard
from .trace import Trace
from .uses import Span as TraceSpan

__all__ = [
    "BlockMask",
    "Hop",
    "Layout",
    "Longformer",
    "Mask",
    "Ring",
    "Schedule",
    "Span",
    "Trace",
    "TraceSpan",
    "bigbird",
    "bounds",
    "fixed",
    "longformer",
    "positions",
    "ring_attention",
    "schedule",
    "shard",
    "strided",
    "unshard",
    "visible_pairs",
]
