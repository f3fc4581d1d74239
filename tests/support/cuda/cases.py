"""The cases of the stream-order proof: calls of all ranks, their inputs and their expected results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import Layout
from ringattn.comm import Topology
from ringattn.kernels import KernelConfig, Tile
from ringattn.kernels.config import is_single_pass
from ringattn.ring import BlockMask, Mask
from ringattn.ring.buffers import chunk_runs
from ringattn.ring.mesh import ring_layout, ulysses_layout
from ringattn.ring.schedule.visibility import cut_keys, sent_keys

from ..layouts import Window, build_layout
from ..move_cases import MoveCase
from . import kernels

HALO = (2, 1)  # positions before and after
HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 4, 8
GIVEN = ("q", "k", "v", "dout", "dlse")


class RecordedCall(NamedTuple):
    """One forward of every rank, optionally with its backward."""

    layout: Layout
    mask: Mask
    backward: bool = True
    hidden: tuple[int, ...] = ()  # positions where `key_mask` is False
    dropout: bool = False  # passes positions and a seed; the stand-ins drop nothing


@dataclass(frozen=True)
class Case:
    """Consecutive calls on one ring, and the arguments of that ring."""

    calls: tuple[RecordedCall, ...]
    transport: str = "nccl"
    dtype: torch.dtype = torch.float32
    ring: dict[str, Any] = field(default_factory=dict)  # arguments of Ring
    config: KernelConfig | None = None
    unshards: bool = False  # the calls unshard q and sum the ranks' gradients, instead of attention
    halos: bool = False  # the calls take the halo of q
    max_logits: bool = False  # the calls also return max_logits
    ulysses: int = 1  # Ulysses ranks; the ring has world / ulysses ranks
    streams: int = 1  # per rank, used by its calls in turn; nothing orders calls on different streams

    @property
    def world(self) -> int:
        return self.calls[0].layout.world

    def on_ring(self, call: RecordedCall) -> RecordedCall:
        """Return a call with the layout of the ring, whose ranks hold the tokens of several Ulysses ranks."""
        return call if self.ulysses == 1 else call._replace(layout=ring_layout(call.layout, self.ulysses))

    def chunks(self, call: RecordedCall) -> int:
        """Return the number of chunks of a call; by default 2 with a single-pass backward."""
        default = 2 if call.backward and is_single_pass(self.config) and self.on_ring(call).layout.world > 1 else 1
        return int(self.ring.get("chunks", default))

    def runs(self, call: RecordedCall) -> list[Layout]:
        """Return the keys of each run of tokens of all shards."""
        runs = chunk_runs(self.chunks(call), KV_HEADS // self.ulysses)
        return [run for run, _ in cut_keys(call.layout, call.mask, call.layout, runs)]

    def kernels(self, call: RecordedCall) -> tuple[str, ...]:
        """Return the kernels that a call launches once per chunk of a shard and mask part."""
        if self.unshards or self.halos:
            return ()
        if not call.backward:
            return ("forward_kernel",)
        if is_single_pass(self.config):
            return "forward_kernel", "single_pass_kernel"
        split = self.config is not None and self.config.dkdv_splits != 1
        return "forward_kernel", "dq_kernel", "dkdv_kernel", *(("reduce_kernel",) if split else ())


def inputs(case: Case, number: int) -> dict[str, Tensor]:
    """Return tensors of ones and twos, whose sums are exact in every wire dtype and differ from an empty slot's."""
    draw = torch.Generator().manual_seed(number)
    shapes = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM_V), "dout": (HEADS, DIM_V)}
    tokens = case.calls[number].layout.seqlen

    def drawn(*shape: int) -> Tensor:
        return torch.randint(1, 3, shape, generator=draw).float()

    tensors = {name: drawn(1, tokens, *shape).to(case.dtype) for name, shape in shapes.items()}
    return tensors | {"dlse": drawn(1, HEADS, tokens)}


def shard(case: Case, number: int, name: str, rank: int) -> Tensor:
    return case.calls[number].layout.shard(inputs(case, number)[name], rank, 2 if name == "dlse" else 1)


def visible_parts(call: RecordedCall, rank: int, keys: Tensor) -> int:
    """Count the parts of a mask in which any query of ``rank`` sees any of the keys, pair by pair."""
    positions = call.layout.positions(rank)
    blocks = call.mask.blocks
    shown_by_blocks = True if blocks is None else blocks.visible[positions // blocks.block][:, keys // blocks.block]
    limits = [(lo[:, None], hi[:, None]) for lo, hi in (part.interval(positions) for part in call.mask.parts)]
    return sum(bool(((keys >= lo) & (keys < hi) & shown_by_blocks).any()) for lo, hi in limits)


def available_keys(call: RecordedCall, rank: int, other: int) -> Tensor:
    """Return 1 for every key of shard ``other`` that ``rank`` holds or receives, and 0 for all others."""
    positions, sent = call.layout.positions(other), sent_keys(call.layout, call.mask, call.layout).positions(other)
    has_keys = ~torch.isin(positions, torch.tensor(call.hidden, dtype=torch.int64))
    return (has_keys if rank == other else has_keys & torch.isin(positions, sent)).float()


def key_weights(case: Case, call: RecordedCall, rank: int, other: int) -> Tensor:
    """Return how often ``rank`` computes with each key of shard ``other``."""
    positions, runs = call.layout.positions(other), [run.positions(other) for run in case.runs(call)]
    counts = sum(visible_parts(call, rank, run) * torch.isin(positions, run).float() for run in runs)
    return counts * available_keys(call, rank, other)


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return every rank's expected results, computed from mask, sent keys and stand-in kernels, without a schedule."""
    by_rank = [dict[str, Tensor]() for _ in range(case.world)]
    results = _unsharded if case.unshards else _with_halo if case.halos else _expected
    for number, call in enumerate(case.calls):
        for rank in range(case.world):
            by_rank[rank] |= results(case, number, call, rank)
    return by_rank


def _unsharded(case: Case, number: int, call: RecordedCall, rank: int) -> dict[str, Tensor]:
    weights = sum(range(1, case.world + 1))
    return {f"whole{number}": inputs(case, number)["q"], f"dq{number}": weights * shard(case, number, "q", rank)}


def _with_halo(case: Case, number: int, call: RecordedCall, rank: int) -> dict[str, Tensor]:
    """Return the pieces of a halo, and q times the weights of the ranks that have it in their pieces."""
    q, move = inputs(case, number)["q"], MoveCase("halo", [*HALO], call.layout)
    wanted = [[p for piece in move.wanted(other) for p in piece] for other in range(case.world)]
    whole = torch.cat([torch.where(torch.tensor(p is not None), q[:, [p or 0]], 0) for p in wanted[rank]], 1)
    weights = [sum((other + 1) * wanted[other].count(p) for other in range(case.world)) for p in range(q.shape[1])]
    dq = q * torch.tensor(weights)[:, None, None]
    return {f"whole{number}": whole, f"dq{number}": dq[:, call.layout.positions(rank)]}


def _expected(case: Case, number: int, call: RecordedCall, rank: int) -> dict[str, Tensor]:
    """Return the results of a rank's tokens, taken from those of its ring rank."""
    ring_rank, ulysses_rank = divmod(rank, case.ulysses)
    positions = ulysses_layout(call.layout, case.ulysses, ring_rank).positions(ulysses_rank)
    values = _expected_on_ring_rank(case, number, case.on_ring(call), ring_rank)
    results = {name: x.index_select(2 if name.startswith("lse") else 1, positions) for name, x in values.items()}
    return results | (_expected_max_logits(case, number, case.on_ring(call)) if case.max_logits else {})


def _expected_max_logits(case: Case, number: int, call: RecordedCall) -> dict[str, Tensor]:
    """Return the largest value that a stand-in of the forward computes, if each hop is one launch."""
    ranks, whole = range(call.layout.world), inputs(case, number)
    shards = [[call.layout.shard(whole[name], rank).float() for name in "kv"] for rank in ranks]
    pairs = [(key_weights(case, call, rank, other)[:, None, None], shards[other]) for rank in ranks for other in ranks]
    values = [kernels.keys(k * weights, v * weights) for weights, (k, v) in pairs if weights.any()]
    return {f"max{number}": kernels.per_head(torch.stack(values).amax(0), HEADS)[0]}


def _expected_on_ring_rank(case: Case, number: int, call: RecordedCall, rank: int) -> dict[str, Tensor]:
    """Return the expected results of one ring rank from the stand-in kernels' formulas."""
    ranks, whole = range(call.layout.world), inputs(case, number)
    q, k, v, dout, dlse = (
        [call.layout.shard(whole[name], other, 2 if name == "dlse" else 1).float() for other in ranks] for name in GIVEN
    )
    weights = [key_weights(case, call, rank, other)[:, None, None] for other in ranks]
    shards = [kernels.keys(k[other] * weights[other], v[other] * weights[other]) for other in ranks]
    total = kernels.per_head(sum(shards, torch.zeros(1, KV_HEADS)), HEADS)
    out = (total[:, None, :, None] * kernels.rows(q[rank])).expand(*q[rank].shape[:3], DIM_V)
    values = {f"out{number}": out.to(case.dtype), f"lse{number}": total[:, :, None].expand(1, HEADS, q[rank].shape[1])}
    if call.backward:
        part = total[:, None, :, None] * (2 * kernels.rows(dout[rank]) + dlse[rank].transpose(1, 2)[..., None])
        values[f"dq{number}"] = part.expand(q[rank].shape).to(case.dtype)
        for name, tensors, x in (("dk", q, k[rank]), ("dv", dout, v[rank])):
            by_rank = [key_weights(case, call, other, rank)[:, None, None] for other in ranks]
            parts = [(kernels.summed(tensors[other], KV_HEADS) + 5 * x) * by_rank[other] for other in ranks]
            values[f"{name}{number}"] = sum(parts, torch.zeros(x.shape)).to(case.dtype)
    return values


CAUSAL, FULL = Mask(causal=True), Mask()
WINDOW = Window(causal=True, left=9)  # over contiguous shards most hops are skipped
DOCUMENTS = Window(left=1, right=0, document=7)  # over a striped layout some shards only pass through
BOTH_SIDES = Mask(window=(9, 9))  # over contiguous shards K/V go to one neighbour, then directly to the other
NARROW = Mask(window=(2, 1))  # over contiguous shards most keys stay on their rank
GLOBAL = Mask(window=(4, 4), global_tokens=((0, 2),))  # several launches per hop


def _few_that_see_all(world: int, few: tuple[int, ...]) -> Case:
    """Return a case where ``few`` ranks see every shard, and the others only their own.

    For each shard, the first of the few on its way starts the dK/dV sums. Such a rank starts sums hop after hop
    without waiting for any.
    """
    visible = torch.eye(world, dtype=torch.bool)
    visible[list(few)] = True
    return Case((RecordedCall(Layout.contiguous(16 * world, world), Mask(blocks=BlockMask(visible, 16))),) * 2)


def _call(layout: str, world: int, mask: Mask = CAUSAL, tokens: int = 6, backward: bool = True) -> RecordedCall:
    return RecordedCall(build_layout(layout, tokens * world, world), mask, backward)


def _case(layout: str, world: int, mask: Mask = CAUSAL, tokens: int = 6, **ring: object) -> Case:
    return Case((_call(layout, world, mask, tokens),) * 2, ring=ring)


def _two_level(nodes: int, per_node: int, layout: str = "zigzag", mask: Mask = CAUSAL, **ring: Any) -> Case:
    return _case(layout, nodes * per_node, mask, topology=Topology.grid(nodes, per_node), **ring)


WORLDS = {f"world {world}": _case("zigzag", world) for world in range(1, 9)}

SKIPPED = {
    "contiguous": _case("contiguous", 5),
    "contiguous, other direction": _case("contiguous", 4, direction=-1),
    "window": _case("contiguous", 5, WINDOW, tokens=8),
    "documents": _case("striped", 5, DOCUMENTS, tokens=8),
    "window to both sides": _case("contiguous", 6, BOTH_SIDES, tokens=8),
    "window to both sides, other direction": _case("contiguous", 5, BOTH_SIDES, tokens=8, direction=-1),
    "window to both sides, two chunks, two slots": _case("contiguous", 6, BOTH_SIDES, tokens=8, chunks=2, slots=2),
    "keys that stay": _case("contiguous", 4, NARROW, tokens=8),
    "tokens that all see": _case("contiguous", 4, GLOBAL, tokens=8),
    "blocks, two ranks see all": _few_that_see_all(7, (3, 4)),
    "an uneven layout with an empty rank": Case((RecordedCall(Layout.uneven([7, 0, 5, 3]), CAUSAL),) * 2),
}

CHANGING = {
    "forward twice": Case((_call("contiguous", 4, backward=False),) * 2),
    "forward, then backward": Case((_call("zigzag", 3, backward=False), _call("zigzag", 3))),
    "full, contiguous, full": Case((_call("zigzag", 4, FULL), _call("contiguous", 4), _call("zigzag", 4, FULL))),
    "full, then a window to both sides": Case((_call("zigzag", 5, FULL, 3), _call("contiguous", 5, BOTH_SIDES, 8))),
    "full, then a longer window": Case((_call("zigzag", 4, FULL, 3), _call("contiguous", 4, WINDOW, 8))),
    "2 x 3, full, then documents": Case(
        (_call("zigzag", 6, FULL), _call("striped", 6, DOCUMENTS, 8)), ring={"topology": Topology.grid(2, 3)}
    ),
    "3 x 2, contiguous, then full": Case(
        (_call("contiguous", 6), _call("zigzag", 6, FULL)), ring={"topology": Topology.grid(3, 2)}
    ),
}

SETTINGS = {
    "full, other direction": _case("striped", 4, FULL, direction=-1),
    "two chunks": replace(_case("zigzag", 4, chunks=2), dtype=torch.bfloat16),
    "three runs of tokens": _case("zigzag", 4, chunks=3),
    "two groups of heads by two runs of tokens": _case("zigzag", 4, chunks=4, direction=-1),
    "fp8 by wire, three runs of tokens, keys that stay": _case(
        "contiguous", 4, NARROW, tokens=8, wire_dtype="float8_e4m3fn", chunks=3
    ),
    "two slots": _case("zigzag", 5, slots=2),
    "two slots, no prefetch": _case("zigzag", 5, slots=2, prefetch=0),
    "three slots, no prefetch": _case("zigzag", 5, slots=3, prefetch=0),
    "three slots, prefetch of one": _case("zigzag", 5, slots=3, prefetch=1),
    "four slots": _case("zigzag", 6, slots=4),
    "one slot": _case("zigzag", 2, slots=1),
    "bfloat16 by wire": _case("zigzag", 4, wire_dtype="bfloat16", grad_wire_dtype="bfloat16"),
    "fp8 by wire, two chunks": _case("zigzag", 4, wire_dtype="float8_e4m3fn", chunks=2),
    "bfloat16 by wire, skipped hops": _case("contiguous", 4, wire_dtype="bfloat16", grad_wire_dtype="bfloat16"),
}

TWO_LEVEL = {
    "2 x 4": _two_level(2, 4),
    "4 x 2": _two_level(4, 2),
    "2 x 4, full, two chunks": _two_level(2, 4, mask=FULL, chunks=2),
    "2 x 2, contiguous": _two_level(2, 2, "contiguous"),
    "2 x 2, other direction": _two_level(2, 2, direction=-1),
    "2 x 3, window": _two_level(2, 3, "contiguous", WINDOW),
    "2 x 4, window to both sides": _two_level(2, 4, "contiguous", BOTH_SIDES, tokens=8),
    "4 x 2, window to both sides": _two_level(4, 2, "contiguous", BOTH_SIDES, tokens=8),
    "2 x 2, keys that stay": _two_level(2, 2, "contiguous", NARROW, tokens=8, chunks=2),
    "2 x 2, bfloat16 by wire": _two_level(2, 2, wire_dtype="bfloat16", grad_wire_dtype="bfloat16"),
    "3 x 2, two slots": _two_level(3, 2, slots=2),
    "2 x 3, window, three runs of tokens": _two_level(2, 3, "contiguous", WINDOW, chunks=3),
    "2 x 2, three runs of tokens, bfloat16 by wire": _two_level(2, 2, chunks=3, grad_wire_dtype="bfloat16"),
}

UNEVEN = {
    "nodes of 3 and 2": _case("zigzag", 5, topology=Topology(((0, 1, 2), (3, 4)))),
    "nodes of 1 and 3, contiguous, two chunks, two slots": _case(
        "contiguous", 4, topology=Topology(((2,), (3, 1, 0))), chunks=2, slots=2
    ),
    "nodes of 2 and 1, unshard": replace(_case("zigzag", 3, topology=Topology(((0, 1), (2,)))), unshards=True),
    "2 x 2, unshard": replace(_two_level(2, 2), unshards=True),
}

EXCHANGES = {
    "unshard": replace(_case("zigzag", 3), unshards=True),
    "halo": replace(_case("zigzag", 3), halos=True),
    "halo, striped": replace(_case("striped", 3), halos=True),
    "largest logits": replace(_case("zigzag", 3), max_logits=True),
    "2 x 2 by heads, largest logits": replace(_case("zigzag", 4), ulysses=2, max_logits=True),
    "2 x 2 by heads": replace(_case("zigzag", 4), ulysses=2),
    "1 x 2 by heads, striped": replace(_case("striped", 2, FULL), ulysses=2),
}

HOLES = {"keys that a mask hides": Case((_call("zigzag", 4, FULL)._replace(hidden=(1, 7, 8, 23)),) * 2)}

TILE = Tile(16, 16, 4, 1)  # divides any block size
SINGLE_PASS, IN_TURN = (
    KernelConfig(TILE, TILE, TILE, backward=mode) for mode in ("single_pass", "single_pass_deterministic")
)
SPLIT = KernelConfig(TILE, TILE, TILE, dkdv_splits=2)
CONFIGS = (None, SINGLE_PASS, IN_TURN, SPLIT)

KERNELS = {
    "single pass": replace(_case("zigzag", 4, chunks=1), config=SINGLE_PASS),
    "single pass, two chunks": replace(_case("zigzag", 4, chunks=2), config=SINGLE_PASS, dtype=torch.bfloat16),
    "single pass, three runs of tokens": replace(_case("zigzag", 4, chunks=3), config=SINGLE_PASS),
    "single pass, skipped hops, two slots": replace(_case("contiguous", 4, slots=2, prefetch=0), config=SINGLE_PASS),
    "single pass, tokens that all see": Case((RecordedCall(Layout.contiguous(32, 4), GLOBAL),) * 2, config=SINGLE_PASS),
    "single pass in turn": replace(_case("zigzag", 4, chunks=1), config=IN_TURN),
    "single pass in turn, 2 x 2, contiguous": replace(_two_level(2, 2, "contiguous", chunks=1), config=IN_TURN),
    "parts of dK/dV": replace(_case("zigzag", 4), config=SPLIT),
    "parts of dK/dV, 2 x 2, two chunks": replace(_two_level(2, 2, chunks=2), config=SPLIT),
}

SPARSE = Mask(causal=True, blocks=BlockMask(torch.ones(4, 4, dtype=torch.bool).tril().roll(1, 0), 16))

CACHED = {
    "two streams": replace(_case("zigzag", 1), streams=2),
    "two streams, dropout": Case((_call("zigzag", 1)._replace(dropout=True),) * 2, streams=2),
    "two streams, blocks": Case((RecordedCall(Layout.contiguous(64, 1), SPARSE),) * 2, streams=2),
    "two streams, single pass in turn": replace(_case("zigzag", 1), config=IN_TURN, streams=2),
    "two streams, keys that a mask hides": Case((_call("zigzag", 1, FULL)._replace(hidden=(1, 4)),) * 2, streams=2),
    "two streams, keys that stay": Case((RecordedCall(Layout.contiguous(32, 4), NARROW),) * 2, streams=2),
    "two streams, three runs of tokens": Case(
        (RecordedCall(Layout.contiguous(48, 3), WINDOW),) * 2, streams=2, ring={"chunks": 3}
    ),
    "two streams, unshard": replace(_case("striped", 2), unshards=True, streams=2),
    "two streams, halo": replace(_case("striped", 2), halos=True, streams=2),
    "2 x 2 by heads, dropout": Case((_call("zigzag", 4)._replace(dropout=True),) * 2, ulysses=2),
}
"""Calls that share values cached on their device; with two streams, the cache is cleared after the last call.

The ring of a single rank has no slots, whose waits would order the streams.
"""

NCCL = WORLDS | SKIPPED | CHANGING | SETTINGS | TWO_LEVEL | UNEVEN | EXCHANGES | HOLES | KERNELS | CACHED
FEW = (
    "world 1", "world 2", "world 4", "contiguous", "contiguous, other direction", "window", "documents",
    "window to both sides", "blocks, two ranks see all", "forward twice", "full, contiguous, full",
    "full, then a longer window", "two chunks", "two slots, no prefetch", "fp8 by wire, two chunks",
    "three runs of tokens", "2 x 2, contiguous", "4 x 2", "single pass, two chunks", "single pass in turn",
    "parts of dK/dV",
)  # fmt: skip

CASES = {
    "nccl": NCCL,
    "nccl_one_sided": {name: replace(NCCL[name], transport="nccl_one_sided") for name in (*FEW, "unshard", "halo")},
    "local": {name: replace(NCCL[name], transport="local") for name in (*FEW, *CACHED)},
}
"""Cases by transport and name."""
