"""Ulysses x ring over gloo processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn import Layout, Ring, positions, ring_attention, shard, unshard
from ringattn.comm import GroupLike
from ringattn.ring import loop

from ..support.rank_processes import CallOutcome, call_outcome, group_results
from ..support.ring_cases import LAYOUTS, check_results, inputs, join_results, run_ranks

TOKENS, RANKS = 53, 4
HEADS = (4, 2)
SOON = 60.0  # seconds; deadlines are far longer


def mesh_of(ring: int, *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (ring, RANKS // ring), mesh_dim_names=names or None)


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return inputs(TOKENS, HEADS)


def part(layout: Layout, whole: dict[str, Tensor], group: GroupLike, rank: int) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of one rank's shard."""
    q, k, v = (layout.shard(whole[name], rank).requires_grad_() for name in "qkv")
    out, lse = ring_attention(q, k, v, layout=layout, group=group, causal=True, return_lse=True)
    grads = [layout.shard(whole["dout"], rank), layout.shard(whole["dlse"], rank, 2)]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), grads)]


def parts_of_every_layout(rank: int) -> dict[str, list[Tensor]]:
    whole, mesh = tokens(), mesh_of(2, "ring", "ulysses")
    for name, make in LAYOUTS.items():
        layout = make(TOKENS, RANKS)
        own = shard(whole["q"], layout=layout, group=mesh)
        assert own.equal(whole["q"][:, positions(TOKENS, layout=layout, group=mesh)]), name
        assert unshard(own, layout=layout, group=mesh, grad="sum").equal(whole["q"]), name
    return {name: part(make(TOKENS, RANKS), whole, mesh, rank) for name, make in LAYOUTS.items()}


def test_every_layout_over_a_mesh_is_exact() -> None:
    """The result equals that of virtual ranks bit for bit."""
    ranks, whole = group_results(RANKS, parts_of_every_layout), tokens()
    for name, make in LAYOUTS.items():
        layout = make(TOKENS, RANKS)
        ours = join_results(layout, [parts[name] for parts in ranks])
        check_results(ours, whole, causal=True)
        virtual = run_ranks(RANKS, lambda group, layout=layout: part(layout, whole, group.mesh(2, 2), group.rank()))  # type: ignore[misc]
        assert all(map(torch.equal, ours, join_results(layout, virtual)))


def refusals(rank: int) -> list[CallOutcome]:
    """Make calls with one rank's mistakes and with groups of a wrong kind, and valid calls in between."""
    x, mesh = torch.randn(1, 8, 4, 8), mesh_of(2)
    mine = torch.zeros(3) if rank == 3 else torch.zeros(4)
    attend = partial(ring_attention, x, x, x, layout="contiguous")
    calls: list[dict[str, Any]] = [{"learnable_sink": mine}, {"causal": rank == 1}]
    ends = [call_outcome(lambda call=call: attend(group=mesh, **call)) for call in calls]  # type: ignore[misc]
    other = mesh_of(2, "data", "ring")
    ends += [call_outcome(lambda: attend(group=other)), call_outcome(lambda: Ring(mesh))]
    assert unshard(attend(group=mesh), layout="contiguous", group=mesh, grad="slice").shape[1] == RANKS * 8
    ends.append(call_outcome(lambda: attend(group=mesh, learnable_sink=None if rank < 3 else mine)))
    mesh = mesh_of(2)
    for _ in range(5):  # until ranks expect the call and no longer compare it
        attend(group=mesh)
    ends.append(call_outcome(lambda: attend(group=mesh, causal=rank == 1)))
    return ends


def test_mistakes_of_one_rank_are_refused_on_the_whole_mesh() -> None:
    for sink, causal, names, ring, later, causal_later in group_results(RANKS, refusals):
        for kind, text, seconds in (sink, later):
            assert kind == "ValueError" and seconds < SOON
            assert "learnable_sink has shape [3] on cpu: it must have shape [4]" in text
        for kind, text, seconds in (causal, causal_later):
            assert kind == "ValueError" and seconds < SOON and "causal differs between ranks" in text
            assert "rank 1: True" in text  # the number in the mesh, even in the column of ranks 1 and 3
        assert names[0] == "ValueError" and "('data', 'ring')" in names[1] and "mesh['ring']" in names[1]
        assert ring[0] == "ValueError" and "2D DeviceMesh" in ring[1]


def out_of_memory(*_: object) -> None:
    raise MemoryError("of rank 3")


def failure_in_the_ring(rank: int) -> CallOutcome:
    """Fail on rank 3 between the exchanges; rank 2 waits in its row, rank 1 in its column, rank 0 for both."""
    x, mesh = torch.randn(1, 8, 4, 8), mesh_of(2)
    attend = partial(ring_attention, x, x, x, layout="contiguous", group=mesh)
    attend()
    if rank == 3:
        vars(loop)["forward"] = out_of_memory
    return call_outcome(attend)


def test_a_failure_in_the_ring_reaches_every_rank() -> None:
    for rank, (kind, text, seconds) in enumerate(group_results(RANKS, failure_in_the_ring)):
        assert kind == ("MemoryError" if rank == 3 else "TransportError")
        assert "of rank 3" in text
        assert rank == 3 or "rank 3: " in text
        assert seconds < SOON
