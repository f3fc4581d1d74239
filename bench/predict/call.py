"""What is predicted: one attention, how it is cut up, and on how many GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...comm.topology.topology import Topology
from ...kernels.checks import MAX_HEAD_DIM
from ...ring.ring import depth_of
from ...ring.schedule.layout import Layout
from ...ring.schedule.mask import Mask
from ...ring.schedule.plan import Plan, plan
from ...ring.schedule.schedule import KV_SLOTS
from ...ring.wire import grad_wire_of, wire_of
from .program import Form

CPU = torch.device("cpu")
NAMED = ("contiguous", "zigzag", "striped")
LAYOUTS = (*NAMED, "balanced")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Call:
    """One ``ring_attention``, forward and backward.

    Raises:
        ValueError: ranks that do not make equal nodes, heads that do not divide, an unknown layout or dtype, a head dim
            that kernels do not take, or slots and a prefetch that ``Ring`` does not.
    """

    tokens: int
    """Per rank."""
    world: int
    layout: str = "zigzag"
    mask: Mask = field(default_factory=lambda: Mask(causal=True))
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    nodes: int = 1
    """Machines of equally many ranks, in rank order."""
    two_level: bool = True
    """Whether the ring knows of the nodes; else one flat ring runs through all."""
    chunks: int = 1
    slots: int = KV_SLOTS
    prefetch: int | None = None
    direction: int = 1
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None
    speeds: tuple[float, ...] = ()
    """Of every rank, for the layout ``balanced``."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.world < 1:
            raise ValueError(f"{self.tokens} tokens on each of {self.world} GPUs: both must be at least 1")
        if self.nodes < 1 or self.world % self.nodes:
            fits = ", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0)
            raise ValueError(f"nodes is {self.nodes}: it must divide {self.world} GPUs, as {fits} do")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: it must be a multiple of kv_heads, {self.kv_heads}")
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}: it must be 1 to {MAX_HEAD_DIM}")
        if not 1 <= self.chunks <= self.kv_heads:
            raise ValueError(f"chunks is {self.chunks}: it must be 1 to kv_heads, {self.kv_heads}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}: it must be one of {', '.join(LAYOUTS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        if (self.layout == "balanced") != (len(self.speeds) == self.world):
            raise ValueError(f"speeds has {len(self.speeds)} entries: balanced takes one for each of {self.world} GPUs")
        depth_of(self.slots, self.prefetch, self.turn)  # what Ring takes is what is predicted

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.world // self.nodes

    @property
    def is_two_level(self) -> bool:
        """Whether the ring is one of rings."""
        return self.nodes > 1 and self.per_node > 1 and self.two_level

    @property
    def turn(self) -> int:
        """Hops of a turn of the ring, or of the inner ones."""
        return self.per_node if self.is_two_level else self.world

    @cached_property
    def topology(self) -> Topology | None:
        """The order of the ring; None where it is flat."""
        return Topology.grid(self.nodes, self.per_node) if self.is_two_level else None

    @property
    def seqlen(self) -> int:
        return self.tokens * self.world

    @cached_property
    def held(self) -> Layout:
        """Who holds which tokens."""
        if self.layout == "balanced":
            return Layout.balanced(self.seqlen, self.speeds, causal=self.mask.causal)
        made: Layout = getattr(Layout, self.layout)(self.seqlen, self.world)
        return made

    @cached_property
    def form(self) -> Form:
        """Shapes and settings, as the recorder takes them; the tokens are the mean of the ranks."""
        dtype, (_, prefetch) = DTYPES[self.dtype], depth_of(self.slots, self.prefetch, self.turn)
        wire, grad_wire = wire_of(self.wire_dtype, dtype), grad_wire_of(self.grad_wire_dtype)
        return Form(
            self.batch, self.tokens, self.heads, self.kv_heads, self.head_dim, dtype, self.chunks, prefetch, wire,
            grad_wire,
        )  # fmt: skip

    def plans(self) -> list[Plan]:
        """The plan of every rank, as the ring makes it."""
        held = self.held
        return [
            plan(held, self.mask, rank, self.direction, CPU, self.topology, self.slots) for rank in range(self.world)
        ]

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    @property
    def is_plain(self) -> bool:
        """Whether every rank does the same, or less than the last: equal shards of everything, or of a causal mask."""
        plain = self.mask == Mask(causal=self.mask.causal)
        return plain and self.layout in NAMED and (self.layout != "zigzag" or self.tokens % 2 == 0)
