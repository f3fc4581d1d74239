"""Where kernels and comm meet: layouts, masks, schedules, the ring loop, autograd."""

from .attention import ring_attention
from .ring import Ring
from .schedule.block_mask import BlockMask, Longformer, bigbird, fixed, longformer, strided
from .schedule.layout import Layout, Span
from .schedule.mask import Mask, bounds, visible_pairs
from .schedule.schedule import Hop, Schedule, schedule
from .schedule.uses import Span as TraceSpan
from .shards import positions, shard, unshard
from .trace import Trace

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
