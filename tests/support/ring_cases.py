"""One ``ring_attention`` call on every rank of a ``LocalWorld``, with the results joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import GroupLike, LocalGroup

from .baselines import Results, exact, operator_lse, pytorch
from .tolerance import assert_as_exact_as_pytorch

CPU = torch.device("cpu")
T = TypeVar("T")

SPANS = Layout(
    [[(1, 9, 3), (40, 5)], [(0, 9, 3), (27, 13)], [(2, 9, 3), (45, 22)]]
)  # a layout without a name: 67 tokens on 3 ranks

LAYOUTS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "uneven": lambda seqlen, world: Layout.uneven([seqlen - 3 * (world - 1), *[3] * (world - 1)]),
}


def inputs(
    tokens: int, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16), dtype: torch.dtype = torch.float32,
    batch: int = 2,
) -> dict[str, Tensor]:  # fmt: skip
    """Return random q, k, v, dout and dlse of a whole sequence."""
    shapes = {"q": (heads[0], dims[0]), "k": (heads[1], dims[0]), "v": (heads[1], dims[1]), "dout": (heads[0], dims[1])}
    whole = {name: torch.randn(batch, tokens, *shape).to(dtype) for name, shape in shapes.items()}
    return whole | {"dlse": torch.randn(batch, heads[0], tokens)}


def run_ranks(world: int, function: Callable[[LocalGroup], T]) -> list[T]:
    with LocalWorld(world) as ranks:
        return ranks.run(function)


def run_ring(
    layout: Layout, whole: dict[str, Tensor], *, ring: Mapping[str, Any] | None = None, calls: int = 1, **call: Any
) -> Results:
    """Return out, lse and gradients of the whole sequence, computed by ``layout.world`` virtual ranks.

    Args:
        layout: layout of the sequence.
        whole: tensors of the whole sequence. Without ``dlse`` the backward gets none; zeros would give other last bits.
        ring: arguments of :class:`Ring`.
        calls: number of calls on one ring; the results are the last call's.
        **call: arguments of ``ring_attention``.
    """
    with LocalWorld(layout.world) as world:
        parts = world.run(
            lambda group: run_rank_of_ring(layout, whole, group, group.rank(), ring=ring, calls=calls, **call)
        )
    return join_results(layout, parts)


def run_rank_of_ring(
    layout: Layout, whole: dict[str, Tensor], group: GroupLike, rank: int, *, ring: Mapping[str, Any] | None = None,
    calls: int = 1, device: torch.device = CPU, mesh: GroupLike = None, **call: Any,
) -> list[Tensor]:  # fmt: skip
    """Return out, lse, dq, dk and dv of one rank's shard, computed on ``device`` and copied to the CPU.

    If there is a ``mesh``, ``group`` is its ring dimension.
    """
    q, k, v = (layout.shard(whole[name], rank).detach().to(device).requires_grad_() for name in "qkv")
    grads = [layout.shard(whole[x], rank, dim).to(device) for x, dim in (("dout", 1), ("dlse", 2)) if x in whole]
    with Ring(group, **(ring or {})) as open_ring:
        for _ in range(calls):
            out, lse = ring_attention(q, k, v, layout=layout, ring=open_ring, group=mesh, return_lse=True, **call)
            results = (out.detach(), lse.detach(), *torch.autograd.grad((out, lse)[: len(grads)], (q, k, v), grads))
        return [x.cpu() for x in results]


def join_results(layout: Layout, parts: Sequence[Sequence[Tensor]]) -> Results:
    joined = enumerate(zip(*parts, strict=True))
    return Results(*(layout.unshard(shards, 2 if i == 1 else 1) for i, shards in joined))


def check_ring(layout: Layout, whole: dict[str, Tensor], *, causal: bool, **call: Any) -> None:
    check_results(run_ring(layout, whole, causal=causal, **call), whole, causal=causal, **call)


def check_results(ours: Results, whole: dict[str, Tensor], *, causal: bool, **call: Any) -> None:
    """Check that results are as exact as PyTorch's."""
    tensors = [whole[name] for name in ("q", "k", "v", "dout", "dlse")]
    tokens = whole["q"].shape[1]
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril(0 if causal else tokens)
    theirs, truth = pytorch(*tensors, visible=visible), exact(*tensors, causal=causal)
    if call.get("backend") == "aten" and whole["q"].dtype != torch.float32:
        # The operator's own lse is less exact in 16 bit.
        theirs = theirs._replace(lse=operator_lse(whole["q"], whole["k"], visible, None, None))
    for name in Results._fields:
        assert_as_exact_as_pytorch(name, getattr(ours, name), getattr(theirs, name), getattr(truth, name))
