"""What a call keeps for its backward: the seed of dropout, given or drawn by rank 0 for all, and the slopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, ring_attention
from ringattn.comm import LocalGroup

TOKENS = 32
LAYOUT = Layout.zigzag(TOKENS, 2)


def weights(seeds: list[int | None], **call: Any) -> list[Tensor]:
    """All weights of each call, 0 where dropped, ``[H, S, S]``: every value is one column of the identity."""

    def calls(group: LocalGroup) -> list[Tensor]:
        zeros = torch.zeros(1, TOKENS // 2, 2, 16)
        values = LAYOUT.shard(torch.eye(TOKENS).expand(2, TOKENS, TOKENS).transpose(0, 1)[None], group.rank())
        given: dict[str, Any] = {"layout": LAYOUT, "group": group, "dropout_p": 0.5} | call
        made = [ring_attention(zeros, zeros, values, dropout_seed=seed, **given) for seed in seeds]
        return [out for out in made if isinstance(out, Tensor)]

    with LocalWorld(2) as world:
        parts = world.run(calls)
    return [LAYOUT.unshard(list(shards)).squeeze(0).transpose(0, 1) for shards in zip(*parts, strict=True)]


def test_a_seed_gives_the_same_weights() -> None:
    first, again, other = weights([3, 3, 4])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])  # another head drops others


def test_seeds_are_drawn_from_rank_0s_generator() -> None:
    torch.manual_seed(5)
    first, other = weights([None, None])
    torch.manual_seed(5)
    again, _ = weights([None, None])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_share_that_is_dropped(share: float) -> None:
    """Of 2,048 weights, within five standard deviations."""
    (got,) = weights([7], dropout_p=share)
    dropped = (got == 0).double().mean().item()
    assert abs(dropped - share) < 5 * (share * (1 - share) / got.numel()) ** 0.5
    torch.testing.assert_close(got[got > 0], torch.full_like(got[got > 0], 1 / (TOKENS * (1 - share))))


def test_the_backward_drops_what_the_forward_dropped() -> None:
    """out is linear in v: its gradient is the weights themselves, transposed."""
    k = torch.randn(1, TOKENS, 1, 16)
    v = torch.eye(TOKENS)[None, :, None, :].requires_grad_()
    out = ring_attention(k, k, v, dropout_p=0.5)
    assert isinstance(out, Tensor)
    (dv,) = torch.autograd.grad(out, v, torch.eye(TOKENS)[None, :, None, :])
    torch.testing.assert_close(dv[0, :, 0], out.detach()[0, :, 0].T)


def test_slopes_that_are_changed_before_the_backward_are_noticed() -> None:
    slopes = torch.tensor([0.5])
    x = torch.randn(1, 8, 1, 16, requires_grad=True)
    out = ring_attention(x, x, x, alibi_slopes=slopes)
    assert isinstance(out, Tensor)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
