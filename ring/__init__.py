"""Ring attention: layouts, masks, schedules, the ring loop and autograd, on top of `kernels` and `comm`."""

from ..comm import GroupLike, single_rank
from . import cpu as cpu
from .attention import ring_attention
from .local.protocol import LocalAttention, LocalBackward, LocalForward, Supports
from .local.rectangles import RectangleAttention
from .local.regions import rectangles
from .local.registry import register_backend
from .merge_states import merge
from .moves import halo, relayout, roll
from .ops import checkpoint_policy
from .prefix_tree import PrefixTree, prefix_tree
from .ring import Ring
from .schedule.intervals import Intervals
from .schedule.layout import Documents, Layout, LayoutLike, Span
from .schedule.mask import BlockMask, Longformer, Mask, bigbird, bounds, fixed, longformer, strided, visible_pairs
from .schedule.schedule import Hop, Schedule, schedule
from .schedule.slices import slices
from .session import Session
from .shards import positions, shard, unshard
from .trace import Trace
from .trace import TraceSpan as TraceSpan

__all__ = [
    "BlockMask",
    "Documents",
    "GroupLike",
    "Hop",
    "Intervals",
    "Layout",
    "LayoutLike",
    "LocalAttention",
    "LocalBackward",
    "LocalForward",
    "Longformer",
    "Mask",
    "PrefixTree",
    "RectangleAttention",
    "Ring",
    "Schedule",
    "Session",
    "Span",
    "Supports",
    "Trace",
    "TraceSpan",
    "bigbird",
    "bounds",
    "checkpoint_policy",
    "fixed",
    "halo",
    "longformer",
    "merge",
    "positions",
    "prefix_tree",
    "rectangles",
    "register_backend",
    "relayout",
    "ring_attention",
    "roll",
    "schedule",
    "shard",
    "single_rank",
    "slices",
    "strided",
    "unshard",
    "visible_pairs",
]
