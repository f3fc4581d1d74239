"""A user's own layout, a list of spans, and own mask pass every path that a named one passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import Documents, Layout, positions, ring_attention, shard, unshard
from ringattn.comm import GroupLike, LocalGroup
from ringattn.ring import BlockMask, Mask, schedule
from ringattn.tools.call import ShownCall
from ringattn.tools.show import text

from ..support.mask_cases import Case, check
from ..support.ring_cases import inputs, run_ranks

pytestmark = pytest.mark.usefixtures("one_core")
TOKENS, BLOCK = 64, 4
LAYOUT = Layout([[(0, 8), (48, 16)], [(8, 16)], [(32, 16)], [(24, 8)]])
MASK: Any = {"causal": True, "cu_seqlens": [0, 25, TOKENS], "block_mask": BlockMask(torch.rand(16, 16) > 0.3, BLOCK)}


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_call(mesh: tuple[int, int] | None) -> None:
    check(Case(LAYOUT, inputs(TOKENS), MASK | {"backend": "aten"}, mesh=mesh))


def attend(q: Tensor, k: Tensor, v: Tensor, group: GroupLike) -> Tensor:
    out = ring_attention(q, k, v, layout=LAYOUT, group=group, **MASK)
    assert isinstance(out, Tensor)
    return out


def compiled(*given: Any) -> Any:
    return torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)


def checkpointed(*given: Any) -> Any:
    return checkpoint(attend, *given, use_reentrant=False)


@pytest.mark.parametrize("function", [compiled, checkpointed])
@pytest.mark.parametrize("mesh", [False, True])
def test_compile_and_checkpoint(function: Callable[..., Tensor], mesh: bool) -> None:
    whole = inputs(TOKENS)

    def one(group: LocalGroup) -> None:
        members = group.mesh(2, 2) if mesh else group
        results = []
        for each in (attend, function):
            q, k, v = (shard(whole[name], layout=LAYOUT, group=members).requires_grad_() for name in "qkv")
            out = each(q, k, v, members)
            dout = shard(whole["dout"], layout=LAYOUT, group=members)
            results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
        assert all(map(torch.equal, *results))

    run_ranks(LAYOUT.world, one)


@pytest.mark.parametrize("mesh", [False, True])
def test_shard_and_positions(mesh: bool) -> None:
    whole = torch.randn(2, TOKENS, 3)

    def one(group: LocalGroup) -> None:
        members = group.mesh(2, 2) if mesh else group
        own = shard(whole, layout=LAYOUT, group=members)
        at = positions(TOKENS, layout=LAYOUT, group=members)
        assert own.equal(whole[:, at]) and at.equal(LAYOUT.positions(group.rank()))
        assert unshard(own, layout=LAYOUT, group=members, grad="slice").equal(whole)

    run_ranks(LAYOUT.world, one)


def test_show() -> None:
    mask = Mask(causal=True, documents=Documents(MASK["cu_seqlens"]), blocks=MASK["block_mask"])
    call = ShownCall(LAYOUT, "own", mask, 1, 1, 4, 2, 16, "bfloat16")
    assert str(schedule(LAYOUT, mask)) in text(call, ["own"])
