"""The ring over gloo processes, forward and backward, as a training job calls it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout, Ring, ring_attention
from ringattn.comm import GroupLike

from ..support.nightly import rest_nightly
from ..support.rank_processes import group_results
from ..support.ring_cases import LAYOUTS, check_results, inputs, join_results, run_rank_of_ring, run_ring

TOKENS = 53
RINGS = {"striped": {"chunks": 3}}  # more chunks than key heads


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return inputs(TOKENS)


def result(layout: Layout, rank: int, whole: dict[str, Tensor], group: GroupLike = None) -> list[Tensor]:
    q, k, v = (layout.shard(whole[name], rank).detach().requires_grad_() for name in "qkv")
    out = ring_attention(q, k, v, layout=layout, group=group, causal=True)
    assert isinstance(out, Tensor)
    out.backward(layout.shard(whole["dout"], rank))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def parts_of_every_layout(rank: int) -> dict[str, list[Tensor]]:
    """Return one rank's results; every rank draws the same inputs."""
    world, whole = dist.get_world_size(), tokens()
    return {
        name: run_rank_of_ring(make(TOKENS, world), whole, None, rank, ring=RINGS.get(name), causal=True)
        for name, make in LAYOUTS.items()
    }


def groups_of_every_kind(rank: int) -> None:
    torch.manual_seed(3)
    whole = inputs(24)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    layout = Layout.zigzag(24, 2)
    expected = result(layout, rank % 2, whole, pairs["ring"])
    subgroups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    again = result(layout, rank % 2, whole, pairs["ring"].get_group())
    group = subgroups[rank // 2]
    third = result(layout, dist.get_rank(group), whole, group)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    if rank < 2:  # the group [3, 2] reverses the order of its ranks
        assert all(torch.equal(left, other) for left, other in zip(expected, third, strict=True))
    with pytest.raises(ValueError, match="2D DeviceMesh"):
        Ring(pairs)


@pytest.mark.parametrize("world", rest_nightly([2, 8], 2))
def test_every_layout_over_processes_is_exact(world: int) -> None:
    """The result equals that of virtual ranks bit for bit; tests/conformance has the other worlds."""
    ranks, whole = group_results(world, parts_of_every_layout), tokens()
    for name, make in LAYOUTS.items():
        layout = make(TOKENS, world)
        ours = join_results(layout, [parts[name] for parts in ranks])
        check_results(ours, whole, causal=True)
        assert all(map(torch.equal, ours, run_ring(layout, whole, ring=RINGS.get(name), causal=True)))


def test_groups_submeshes_and_subgroups_agree() -> None:
    group_results(4, groups_of_every_kind)
