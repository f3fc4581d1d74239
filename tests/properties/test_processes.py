"""Real processes over gloo: the ring, forward and backward, as a user's training job would call it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from ringattn import Layout, Ring, ring_attention, unshard
from ringattn.comm import GroupLike

from ..support.baselines import exact
from ..support.forked import FORKED
from ..support.nightly import rest_nightly
from ..support.ring_cases import LAYOUTS, inputs, run_ring


def start(rank: int, world: int, store: str, body: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        body(rank, world)
    finally:
        dist.destroy_process_group()


def in_processes(world: int, folder: Path, body: Callable[[int, int], None]) -> None:
    start_processes(
        start, args=(world, str(folder / "store"), body), nprocs=world, start_method=FORKED.get_start_method()
    )


def result(layout: Layout, rank: int, whole: dict[str, Tensor], group: GroupLike = None) -> list[Tensor]:
    q, k, v = (layout.shard(whole[name], rank).detach().requires_grad_() for name in "qkv")
    out = ring_attention(q, k, v, layout=layout, group=group, causal=True)
    assert isinstance(out, Tensor)
    out.backward(layout.shard(whole["dout"], rank))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def every_layout(rank: int, world: int) -> None:
    torch.manual_seed(1)
    whole = inputs(53)
    truth = exact(*(whole[name] for name in ("q", "k", "v", "dout")), causal=True)
    for make in LAYOUTS.values():
        layout = make(53, world)
        for got, name in zip(result(layout, rank, whole), ("out", "dq", "dk", "dv"), strict=True):
            torch.testing.assert_close(
                unshard(got, layout=layout, grad="slice").double(), getattr(truth, name), rtol=1e-5, atol=1e-5
            )


def same_bits_as_virtual_ranks(rank: int, world: int) -> None:
    torch.manual_seed(2)
    layout, whole = Layout.zigzag(40, world), inputs(40)
    del whole["dlse"]  # as in `result`
    alone = run_ring(layout, whole, causal=True)
    got = result(layout, rank, whole)
    for mine, theirs in zip(got, (alone.out, alone.dq, alone.dk, alone.dv), strict=True):
        assert torch.equal(mine, layout.shard(theirs, rank))


def groups_of_every_kind(rank: int, world: int) -> None:
    torch.manual_seed(3)
    whole = inputs(24)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    layout = Layout.zigzag(24, 2)
    expected = result(layout, rank % 2, whole, pairs["ring"])
    subgroups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    again = result(layout, rank % 2, whole, pairs["ring"].get_group())
    group = subgroups[rank // 2]
    third = result(layout, dist.get_rank(group), whole, group)
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(one, other)
    if rank < 2:  # the group [3, 2] keeps its own order of ranks
        assert all(torch.equal(one, other) for one, other in zip(expected, third, strict=True))
    with pytest.raises(ValueError, match="2 dimensions"):
        Ring(pairs)


@pytest.mark.parametrize("world", rest_nightly([2, 3, 5, 8], 2))
def test_every_layout(world: int, tmp_path: Path) -> None:
    in_processes(world, tmp_path, every_layout)


def test_same_bits_as_virtual_ranks(tmp_path: Path) -> None:
    in_processes(2, tmp_path, same_bits_as_virtual_ranks)


def test_groups_of_every_kind(tmp_path: Path) -> None:
    in_processes(4, tmp_path, groups_of_every_kind)
