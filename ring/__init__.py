"""Where kernels and comm meet: layouts, masks, schedules, the ring loop, autograd."""

from ..comm import GroupLike
from .attention import ring_attention
from .ops import checkpoint_policy
from .ring import Ring
from .schedule.layout import Layout, Span
from .schedule.mask import BlockMask, Longformer, Mask, bigbird, bounds, fixed, longformer, strided, visible_pairs
from .schedule.schedule import Hop, Schedule, schedule
from .shards import positions, shard, unshard
from .trace import Span as TraceSpan
from .trace import Trace

__all__ = [
    "BlockMask",
    "GroupLike",
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
    "checkpoint_policy",
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
