"""The call to predict: one attention, its layout and chunks, and the GPUs it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ...comm.topology.topology import Topology
from ...kernels import FULL, Bounds
from ...ring.buffers import chunk_runs
from ...ring.ring import check_slots
from ...ring.schedule.layout import Layout
from ...ring.schedule.mask import Mask
from ...ring.schedule.plan import HopMask, Plan, Positions, plan
from ...ring.schedule.schedule import KV_SLOTS, Schedule, schedule
from ..common.attention import DTYPES, AttentionConfig
from ..common.memory_table import RingForm, ring_parts
from .speed import TILE_ROWS, Area, full_area

CPU = torch.device("cpu")
NO_POSITIONS = Positions(Layout.uneven([0]), Layout.uneven([0]), Layout.uneven([0]), 0, CPU)
EQUAL_SHARDS = ("contiguous", "zigzag", "striped")
BALANCED = "balanced"
FLAT = "flat ring"


@dataclass(frozen=True)
class PredictedCall:
    """One ``ring_attention`` call and the GPUs that it runs on.

    Raises:
        ValueError: The ranks do not make equal nodes, or ``Ring`` does not take these chunks or slots.
    """

    tokens: int
    """Tokens per rank."""
    world: int
    layout: str | Layout = "zigzag"
    """One of ``EQUAL_SHARDS``, ``balanced`` (by ``speeds``), or a layout of ``tokens * world`` tokens."""
    mask: Mask = field(default_factory=lambda: Mask(causal=True))
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    nodes: int = 1
    """Machines with equal numbers of ranks, in rank order."""
    two_level: bool = True
    """Whether several nodes make a two-level ring; else one flat ring runs through all nodes."""
    chunks: int = 1
    slots: int = KV_SLOTS
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.world % self.nodes:
            fits = ", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0)
            raise ValueError(f"nodes is {self.nodes}: it must divide world, {self.world}, so use one of {fits}")
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks}: it must be at least 1")
        check_slots(self.slots, None, self.hops_per_turn)  # raise as Ring does

    @property
    def runs(self) -> int:
        """Runs of tokens that each shard is cut into."""
        return chunk_runs(self.chunks, self.kv_heads)

    @property
    def head_groups(self) -> int:
        """Groups of heads, each computed by its own launches."""
        return self.chunks // self.runs

    @property
    def per_node(self) -> int:
        """Ranks per node."""
        return self.world // self.nodes

    @property
    def is_two_level(self) -> bool:
        """True if rings inside the nodes and rings between the nodes make a two-level ring."""
        return self.nodes > 1 and self.per_node > 1 and self.two_level

    @property
    def name(self) -> str:
        """Name of the ring in tables."""
        return "two-level ring" if self.is_two_level else FLAT

    @property
    def hops_per_turn(self) -> int:
        """Hops in one turn of the flat ring, or of the ring inside a node."""
        return self.per_node if self.is_two_level else self.world

    @property
    def prefetch(self) -> int:
        """Hops by which K/V are requested ahead of compute: the default of ``Ring`` for these slots."""
        return check_slots(self.slots, None, self.hops_per_turn)[1]

    @cached_property
    def topology(self) -> Topology | None:
        """The grid of nodes and ranks of a two-level ring; None for a flat ring."""
        return Topology.grid(self.nodes, self.per_node) if self.is_two_level else None

    @property
    def seqlen(self) -> int:
        return self.tokens * self.world

    @property
    def itemsize(self) -> int:
        """Bytes per element of q, k and v."""
        return DTYPES[self.dtype].itemsize

    @cached_property
    def token_layout(self) -> Layout:
        """The layout by which the tokens are split over the ranks."""
        if isinstance(self.layout, Layout):
            return self.layout
        if self.layout == BALANCED:
            return Layout.balanced(self.seqlen, self.speeds, causal=self.mask.causal)
        layout: Layout = getattr(Layout, self.layout)(self.seqlen, self.world)
        return layout

    def plans(self) -> list[Plan]:
        """Return the plan of every rank; those of most plain calls have no bounds, which take long to compute."""
        ring_schedule = schedule(self.token_layout, self.mask, topology=self.topology, slots=self.slots)
        # few contiguous shards: not all keys are sent
        if self.is_plain and self.runs == 1 and {*ring_schedule.lengths} == {self.tokens}:
            return [self._plain_plan(ring_schedule, rank) for rank in range(self.world)]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # thousands of short searches: several threads would be slower
        try:
            call, runs = (self.token_layout, self.mask), self.runs
            return [plan(*call, rank, 1, CPU, self.topology, self.slots, runs=runs) for rank in range(self.world)]
        finally:
            torch.set_num_threads(threads)

    def _plain_plan(self, ring_schedule: Schedule, rank: int) -> Plan:
        hops = ring_schedule.hops(rank)
        return Plan(
            rank=rank,
            hops=hops,
            inner=ring_schedule.inner,
            hop_masks=tuple((HopMask(FULL, NO_POSITIONS, hop.shard),) if hop.computes else () for hop in hops),
            lengths=ring_schedule.lengths,
            max_shard_keys=self.tokens,
            send_index=None,
            last_launch_hop=max(hop.index for hop in hops if hop.computes),
            slots=self.slots,
            edges=((), ()),
            returns_early=ring_schedule.returns_early,
            dkv_returns={
                base.index + ring_schedule.active_ranges[base.shard][base.index // ring_schedule.inner][1]: base
                for base in hops[:: ring_schedule.inner]
                if base.dkv_from is not None
            },
        )

    def plain_launch_area(self, rank_offset: int, tokens: Any) -> Area:
        """Return the area of one launch of a plain call.

        ``rank_offset`` is negative for a shard of a lower rank, 0 for the own shard, else positive.
        ``tokens`` are those of a rank, a number or an array.
        """
        square = Area(tokens * tokens, tokens, tokens, tokens, 0)
        if not self.mask.causal or (self.layout == "contiguous" and rank_offset):
            return square
        if rank_offset == 0 or self.layout == "striped":
            below = full_area(tokens, causal=True)
            return below if rank_offset <= 0 else below._replace(pairs=below.pairs - tokens, longest=tokens - 1)
        # Zigzag: all rows see the first half of an earlier rank's keys. The later half of the rows sees all keys of a
        # later rank.
        return square._replace(pairs=tokens * tokens / 2, longest=tokens / 2 if rank_offset < 0 else tokens)

    def areas(self, tokens: Any = None) -> list[Area]:
        """Return the area of every part of the mask on one device that has all tokens; ``tokens`` is as above."""
        if self.mask == Mask(causal=self.mask.causal):
            return [full_area((self.tokens if tokens is None else tokens) * self.world, causal=self.mask.causal)]
        alone = replace(self, tokens=self.seqlen, world=1, nodes=1, layout="contiguous")
        return [bounds_area(part.bounds, self.seqlen, self.seqlen) for part in alone.plans()[0].hop_masks[0]]

    @cached_property
    def config(self) -> AttentionConfig:
        """The call as the functions of ``common/memory_table.py`` take it."""
        return AttentionConfig(
            self.seqlen, self.world, self.batch, self.heads, self.kv_heads, self.head_dim, self.dtype,
            self.mask.causal, str(self.layout), device="cuda",
        )  # fmt: skip

    @property
    def ring_form(self) -> RingForm:
        """The ring's settings that change its memory."""
        return RingForm(self.is_two_level, self.slots, self.wire_dtype, self.grad_wire_dtype)

    def memory(self, *, backward: bool = True) -> dict[str, int]:
        """Return the bytes of a rank by purpose, at the peak of a forward with or without a backward."""
        parts = ring_parts(self.config, self.ring_form, backward=backward)
        if not backward and self.head_groups > 1:
            parts["out of the chunks"] = self.batch * self.tokens * self.heads * self.head_dim * self.itemsize
        return parts

    @property
    def is_plain(self) -> bool:
        """True for equal shards (zigzag: of even length) and a full or causal mask."""
        plain = self.mask == Mask(causal=self.mask.causal)
        return plain and self.layout in EQUAL_SHARDS and (self.layout != "zigzag" or self.tokens % 2 == 0)


@lru_cache(1 << 15)
def bounds_area(bounds: Bounds, rows: int, keys: int) -> Area:
    """Return the area that ``bounds`` leave of a hop with this many query rows and keys."""
    share = 1.0
    if bounds.block_sparse is not None:  # the average share of visible keys
        visible_keys = float((bounds.block_sparse.ends - bounds.block_sparse.begins).sum()) * bounds.block_sparse.block
        share = min(visible_keys / max(rows * keys, 1), 1.0)
    if bounds.lo is None or bounds.hi is None or not rows:
        return Area(rows * keys * share, rows, keys, keys * share, 0)
    visible = (bounds.hi - bounds.lo).clamp(min=0).double()
    starts = torch.arange(0, rows, TILE_ROWS)
    ends = (starts + TILE_ROWS - 1).clamp(max=rows - 1)
    # Bounds never decrease, so a tile lies on an edge if its first and last rows differ.
    differ = (bounds.lo[starts] != bounds.lo[ends]) | (bounds.hi[starts] != bounds.hi[ends])
    edges = float(((ends - starts + 1) * (differ & (visible[ends] + visible[starts] > 0))).sum())
    visible *= share
    return Area(float(visible.sum()), rows, keys, float(visible.max()), edges)
