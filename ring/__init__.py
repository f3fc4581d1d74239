"""Where kernels and comm meet: layouts, masks, schedules, the ring loop, autograd."""

from ..comm import GroupLike, single_rank
from .attention import ring_attention
from .ops import checkpoint_policy
from .partials import merge
from .ring import Ring
from .schedule.layout import Documents, Layout, LayoutLike, Span
from .schedule.mask import BlockMask, Longformer, Mask, bigbird, bounds, fixed, longformer, strided, visible_pairs
from .schedule.schedule import Hop, Schedule, schedule
from .session import Session
from .shards import positions, shard, unshard
from .trace import Span as TraceSpan
from .trace import Trace

__all__ = [
    "BlockMask",
    "Documents",
    "GroupLike",
    "Hop",
    "Layout",
    "LayoutLike",
    "Longformer",
    "Mask",
    "Ring",
    "Schedule",
    "Session",
    "Span",
    "Trace",
    "TraceSpan",
    "bigbird",
    "bounds",
    "checkpoint_policy",
    "fixed",
    "longformer",
    "merge",
    "positions",
    "ring_attention",
    "schedule",
    "shard",
    "single_rank",
    "strided",
    "unshard",
    "visible_pairs",
]
