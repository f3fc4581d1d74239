"""``shard``, ``unshard`` and ``positions`` as every rank calls them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringattn import Layout, positions, shard, unshard
from ringattn.comm import GroupLike, LocalGroup
from ringattn.ring.ring import default_ring

from ..support.ring_cases import run_ranks

WHOLE = torch.arange(60, dtype=torch.float64).view(3, 10, 2)
LAYOUTS: list[Layout] = [
    Layout.zigzag(10, 3),
    Layout.striped(10, 4),
    Layout.uneven([7, 0, 3]),
    Layout.contiguous(10, 1),
    Layout([[(0, 1), (7, 3)], [(1, 2)], [(5, 2)], [(3, 2)]]),
]


ON_A_MESH = [
    Layout.zigzag(10, 6),
    Layout.striped(10, 6),
    Layout.uneven([7, 0, 1, 2, 0, 0]),
    Layout([[(0, 1), (8, 2)], [(1, 1)], [], [(6, 2)], [(4, 2)], [(2, 2)]]),
]


@pytest.mark.parametrize(
    ("layout", "dim"), [*((layout, 1) for layout in LAYOUTS), *((LAYOUTS[0], dim) for dim in (0, 2, -1))]
)
def test_unshard_undoes_shard(layout: Layout, dim: int) -> None:
    whole = WHOLE.transpose(1, dim)

    def check(group: LocalGroup) -> None:
        own = shard(whole, layout=layout, group=group, dim=dim)
        assert torch.equal(own, whole.index_select(dim, positions(10, layout=layout, group=group)))
        joined = unshard(own.requires_grad_(), layout=layout, group=group, dim=dim, grad="sum")
        assert torch.equal(joined, whole)
        (gradient,) = torch.autograd.grad(joined, own, whole)
        torch.testing.assert_close(gradient, group.size() * own)

    run_ranks(layout.world, check)


@pytest.mark.parametrize(
    ("layout", "mesh"), [*((layout, None) for layout in LAYOUTS), *((layout, (2, 3)) for layout in ON_A_MESH)]
)
@pytest.mark.parametrize("grad", ["slice", "sum"])
def test_gradients_of_unshard_by_grad_mode(layout: Layout, mesh: tuple[int, int] | None, grad: str) -> None:
    """Rank r weighs its loss by r + 1: "slice" keeps the own gradient, "sum" adds all of them."""

    def check(group: LocalGroup) -> None:
        where: GroupLike = group if mesh is None else group.mesh(*mesh)
        x, at = WHOLE.clone().requires_grad_(), positions(10, layout=layout, group=where)
        own = shard(x, layout=layout, group=where)
        assert torch.equal(own, WHOLE[:, at]) and at.equal(layout.positions(group.rank()))
        whole = unshard(own, layout=layout, group=where, grad=grad)
        assert torch.equal(whole, WHOLE)
        (whole * WHOLE * (group.rank() + 1)).sum().backward()
        weight = sum(range(1, group.size() + 1)) if grad == "sum" else group.rank() + 1
        expected = weight * torch.zeros_like(WHOLE).index_copy_(1, at, WHOLE[:, at])
        assert x.grad is not None and torch.equal(x.grad, expected)

    run_ranks(layout.world, check)


def test_bad_arguments_of_shard_and_unshard_are_refused() -> None:
    calls: list[tuple[Callable[..., object], dict[str, Any], str]] = [
        (shard, {"layout": None}, "layout is None with 2 ranks"),
        (shard, {"layout": "zigzag", "dim": 0}, "layout is 'zigzag', which needs equal shards, but 2 does not divide"),
        (shard, {"layout": Layout.zigzag(12, 2)}, "x has 10 tokens along dim 1, but the layout is made for 12"),
        (unshard, {"layout": Layout.uneven([10, 9]), "grad": "slice"}, "x has 10 .* but layout has 9 for rank 1"),
    ]

    def check(group: LocalGroup) -> None:
        for call, arguments, message in calls:
            with pytest.raises(ValueError, match=message):
                call(WHOLE, group=group, **arguments)
        # Wait for all ranks even if the call is expected, because no transfer would reveal a difference.
        for _ in range(3):
            shard(WHOLE, layout="contiguous", group=group)
        with pytest.raises(ValueError, match=r"tokens differs between ranks \(rank 0: 10, rank 1: 8"):
            shard(WHOLE[:, 2 * group.rank() :], layout="contiguous", group=group)
        with pytest.raises(ValueError, match="shape differs between ranks"):
            unshard(WHOLE[:, :5, group.rank() :], layout="contiguous", group=group, grad="slice")

    run_ranks(2, check)


def test_unshard_ends_by_the_deadline() -> None:
    def fn(group: LocalGroup) -> None:
        unshard(WHOLE[:, :5], layout=Layout.contiguous(10, 2), group=group, grad="slice")
        watch = default_ring(group, WHOLE.device)._watch
        assert watch is not None
        with watch._lock:  # as the watchdog does, which may be polling now
            watch._posts.poll(time.monotonic())
        assert watch._posts.nbytes == 2 * WHOLE[:, :5].nbytes
        assert watch._posts.last_label == "unshard"

    run_ranks(2, fn)


def test_positions_returns_a_copy() -> None:
    layout = Layout.contiguous(8, 1)
    positions(8, layout=layout).zero_()
    assert positions(8, layout=layout).tolist() == list(range(8))
