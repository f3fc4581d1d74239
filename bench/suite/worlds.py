"""What a ring costs beside one launch: virtual ranks of one device against one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...comm import LocalGroup, LocalWorld
from ...kernels import FULL, attention_backward, attention_forward
from ...ring import Layout, ring_attention
from ..common.attention import BACKWARD_FLOPS, DTYPES, AttentionConfig, forward_flops, pairs_of
from ..common.timing import Clock, Samples, Step, interleaved
from ..kernels.speed import AGREE, causal_bounds
from ..ring.candidates import sdpa
from ..ring.memory import FP64, of_ours, of_whole, rows_of
from .cases import Number, demand_room, distance, taken_on
from .device_cases import synchronize

VIRTUAL, WHOLE = "LocalWorld", "one piece"
FORWARD, STEP = "forward", "forward and backward"
OVER = f", {VIRTUAL} over {WHOLE}"
MOST_TIMES = {FORWARD: (1.08, 1.04), STEP: (1.12, 1.06)}
"""What a ring of virtual ranks on one GPU may take, in times of one piece, and what it is to reach."""


def local_world(
    device: torch.device,
    *,
    world: int = 4,
    tokens: int = 8192,
    heads: tuple[int, int] = (32, 32),
    head_dim: int = 128,
    dtype: str = "bfloat16",
    repeats: int = 10,
) -> Iterator[Number]:
    """Causal attention, zigzag over virtual ranks of one device, against one piece: forward, forward and backward.

    On a GPU both are limited (`MOST_TIMES`): what the hops and the carried state cost beside one launch over all.
    """
    seqlen = world * tokens
    demand_room(
        device, seqlen, lambda many: taken_on(device, local_world_bytes(world, many, heads, head_dim, dtype)), "tokens"
    )
    layout = Layout.zigzag(seqlen, world)
    given = tuple(
        torch.randn(1, seqlen, count, head_dim, device=device).to(DTYPES[dtype])
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    # ranks keep their shards, as they do in a training step: cutting and joining are not timed
    shards = [tuple(layout.shard(x, rank) for x in given) for rank in range(world)]
    whole = OnePiece(*given)

    def forward(group: LocalGroup) -> Tensor:
        q, k, v, _ = shards[group.rank()]
        out = ring_attention(q, k, v, layout=layout, group=group, causal=True)
        assert isinstance(out, Tensor)
        return out

    def step(group: LocalGroup) -> tuple[Tensor, ...]:
        *inputs, dout = shards[group.rank()]
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ring_attention(*leaves, layout=layout, group=group, causal=True)
        assert isinstance(out, Tensor)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    labels = {
        "world": world, "tokens per rank": tokens, "dtype": dtype, "head_dim": head_dim,
        "layout": "zigzag", "mask": "causal",
    }  # fmt: skip
    with LocalWorld(world, device=device) as ranks:
        sharded = [layout.unshard(parts) for parts in zip(*ranks.run(step), strict=True)]
        yield Number("difference from one piece", distance(sharded, whole.step()), "relative", labels, AGREE[dtype])
        steps: dict[str, Step] = {
            f"{FORWARD}:{VIRTUAL}": lambda: ranks.run(forward),
            f"{FORWARD}:{WHOLE}": whole.forward,
            f"{STEP}:{VIRTUAL}": lambda: ranks.run(step),
            f"{STEP}:{WHOLE}": whole.step,
        }
        taken = interleaved(steps, Clock(device), repeats=repeats)
    once = forward_flops(pairs_of(seqlen, causal=True), heads=heads[0], head_dim=head_dim)
    for what, flops in ((FORWARD, once), (STEP, once * (1 + BACKWARD_FLOPS))):
        for by in (VIRTUAL, WHOLE):
            samples, told = taken[f"{what}:{by}"], {**labels, "by": by}
            yield Number(f"{what} time", samples.median * 1e3, "ms", told, spread=samples.spread)
            yield Number(what, flops / samples.median / 1e12, "TFLOP/s", told, spread=samples.spread)
        yield over_one_piece(what, taken, labels, limited=device.type == "cuda")


def local_world_bytes(world: int, seqlen: int, heads: tuple[int, int], head_dim: int, dtype: str) -> int:
    """Shards and rings of all ranks, one piece, and the results of both in float64, which are compared."""
    problem = AttentionConfig(
        seqlen, world, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype, device="cuda"
    )
    rows = rows_of(problem)
    compared = 2 * seqlen * rows.inputs // rows.item * FP64
    return world * of_ours(problem) + of_whole(problem) + compared


def over_one_piece(what: str, taken: Mapping[str, Samples], labels: Mapping[str, object], *, limited: bool) -> Number:
    """The time of virtual ranks in times of one piece."""
    ratio = taken[f"{what}:{VIRTUAL}"].median / taken[f"{what}:{WHOLE}"].median
    most, goal = MOST_TIMES[what]
    limit, note = (most, f"the goal is {goal}") if limited else (None, None)
    return Number(f"{what}{OVER}", ratio, "times", labels, limit, note=note)


class OnePiece:
    """The same with all tokens at once: our kernels in one launch each on a GPU, PyTorch's attention on the CPU."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self._inputs, self._dout = (q, k, v), dout
        self._on_gpu = q.device.type == "cuda"
        # once, as a ring keeps its own from call to call
        self._limits = causal_bounds(q, k) if self._on_gpu else FULL

    def forward(self) -> Tensor:
        q, k, v = self._inputs
        if not self._on_gpu:
            return sdpa(q, k, v, causal=True)
        out, _ = attention_forward(q, k, v, bounds=self._limits)
        synchronize(q.device)  # over when it returns, as LocalWorld.run is
        return out

    def step(self) -> tuple[Tensor, ...]:
        """Out, dq, dk and dv."""
        q, k, v = self._inputs
        if self._on_gpu:
            out, lse = attention_forward(q, k, v, bounds=self._limits)
            grads = attention_backward(self._dout, q, k, v, out, lse, bounds=self._limits)
            synchronize(q.device)
            return (out, *grads)
        leaves = [x.detach().requires_grad_() for x in self._inputs]
        out = sdpa(leaves[0], leaves[1], leaves[2], causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, self._dout))
