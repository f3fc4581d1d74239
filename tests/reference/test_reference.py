"""The reference against PyTorch in float64, against loops, and its three forms against each other."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringattn import reference

from ..support.baselines import Results, exact, pytorch

HEADS = [(2, 2), (4, 2), (3, 1)]


def tensors(
    seqlen_q: int, seqlen_k: int, heads: int = 2, kv_heads: int = 1, dim: int = 5, dim_v: int = 3
) -> list[Tensor]:
    """q, k, v, dout, dlse: batch 2, float64."""
    shapes = [(seqlen_q, heads, dim), (seqlen_k, kv_heads, dim), (seqlen_k, kv_heads, dim_v), (seqlen_q, heads, dim_v)]
    made = [torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
    return [*made, torch.randn(2, heads, seqlen_q, dtype=torch.float64)]


def close(ours: Results | tuple[Tensor, ...], theirs: Results | tuple[Tensor, ...]) -> None:
    """Equal but for float64 rounding: some 1e3 operations of 1e-16 on numbers around 1."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_by_hand() -> None:
    q, k, v = torch.tensor([2.0]), torch.tensor([0.5, math.log(3) / 2 + 0.5]), torch.tensor([4.0, 8.0])
    out, lse = reference.attention(q.view(1, 1, 1, 1), k.view(1, 2, 1, 1), v.view(1, 2, 1, 1), softmax_scale=1.0)
    assert out.item() == pytest.approx((1 * 4 + 3 * 8) / 4)  # scores 1 and 1 + log 3: weights 1/4 and 3/4
    assert lse.item() == pytest.approx(1 + math.log(4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_dense_is_pytorchs(causal: bool, heads: int, kv_heads: int, softmax_scale: float | None) -> None:
    q, k, v, dout, dlse = tensors(9, 9, heads, kv_heads)
    seen = torch.ones(9, 9).tril().bool() if causal else None
    theirs = pytorch(q, k, v, dout, dlse, seen=seen, softmax_scale=softmax_scale)
    close(exact(q, k, v, dout, dlse, causal=causal, softmax_scale=softmax_scale), theirs)


def test_dense_is_sdpa_is_causal() -> None:
    q, k, v, _, _ = tensors(7, 7, 2, 2, 4, 4)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
    close((reference.attention(q, k, v, causal=True)[0],), (theirs.transpose(1, 2),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_result_is_float64_and_gradients_are_the_inputs_dtype(dtype: torch.dtype) -> None:
    leaves = [x.to(dtype).requires_grad_() for x in tensors(4, 4)[:3]]
    out, lse = reference.attention(*leaves)
    assert out.dtype == lse.dtype == torch.float64
    assert {x.dtype for x in torch.autograd.grad(out.sum(), leaves)} == {dtype}


@given(st.lists(st.integers(0, 12), max_size=8), st.lists(st.integers(0, 12), max_size=8))
def test_positions_against_loops(q_positions: list[int], k_positions: list[int]) -> None:
    q, k, v, _, _ = tensors(len(q_positions), len(k_positions))
    where: dict[str, Any] = {
        "q_positions": torch.tensor(q_positions).long(),
        "k_positions": torch.tensor(k_positions).long(),
    }
    out, lse = reference.attention(q, k, v, causal=True, **where)
    for i, p in enumerate(q_positions):
        keys = [j for j, other in enumerate(k_positions) if other <= p]
        scores = q[:, i] @ k[:, keys, 0].mT / math.sqrt(5)  # one key/value head, [B, H, keys]
        close((lse[:, :, i],), (scores.logsumexp(-1) if keys else torch.full_like(lse[:, :, i], -torch.inf),))
        close((out[:, i],), (scores.softmax(-1) @ v[:, keys, 0],))


def empty_rows() -> tuple[list[Tensor], dict[str, Any]]:
    """A call whose first two queries see nothing."""
    return tensors(4, 4), {"q_positions": torch.tensor([0, 1, 5, 9]), "k_positions": torch.tensor([2, 4, 6, 8])}


def test_rows_that_see_nothing() -> None:
    (q, k, v, dout, dlse), where = empty_rows()
    ours = exact(q, k, v, dout, dlse, causal=True, **where)
    assert ours.out[:, :2].count_nonzero() == 0
    assert (ours.lse[:, :, :2] == -torch.inf).all()
    assert ours.dq[:, :2].count_nonzero() == 0
    assert all(x.isfinite().all() for x in (ours.out, ours.lse[:, :, 2:], *ours[2:]))
    close(ours, pytorch(q, k, v, dout, dlse, seen=reference.visible(*where.values(), causal=True)))


def test_gradients_are_those_of_finite_differences() -> None:
    (q, k, v, _, _), where = empty_rows()

    def finite(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.attention(*leaves, causal=True, **where)
        return out, lse[:, :, 2:]

    assert torch.autograd.gradcheck(finite, [x.requires_grad_() for x in (q, k, v)])


def test_large_scores_do_not_overflow() -> None:
    q, k, v, _, _ = tensors(6, 6)
    for attention in (reference.attention, reference.blockwise.forward):
        out, lse = attention(q * 1e6, k, v, causal=True)
        assert out.isfinite().all()
        assert lse.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("block_q", "block_k"), [(1, 1), (3, 2), (16, 16)])
def test_blockwise_is_dense(causal: bool, heads: int, kv_heads: int, block_q: int, block_k: int) -> None:
    q, k, v, dout, dlse = tensors(7, 10, heads, kv_heads)
    mask: dict[str, Any] = {"q_positions": torch.randperm(12)[:7], "k_positions": torch.randperm(12)[:10]}
    call: dict[str, Any] = mask | {"causal": causal, "block_q": block_q, "block_k": block_k}
    out, lse = reference.blockwise.forward(q, k, v, **call)
    grads = reference.blockwise.backward(dout, q, k, v, out, lse, dlse=dlse, **call)
    close((out, lse, *grads), exact(q, k, v, dout, dlse, causal=causal, **mask))


def split(x: Tensor, owners: Tensor, world: int) -> list[Tensor]:
    """The tokens of every rank, on dimension 1."""
    return [x[:, owners == rank] for rank in range(world)]


def gather(shards: list[Tensor], owners: Tensor, dim: int) -> Tensor:
    """The tokens back in their order."""
    order = torch.cat([(owners == rank).nonzero().squeeze(-1) for rank in range(len(shards))])
    return torch.cat(shards, dim).index_select(dim, order.argsort())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [3, 11])
def test_ring_is_dense(causal: bool, world: int, length: int) -> None:
    """Whoever holds which token, shards without tokens included."""
    q, k, v, dout, dlse = tensors(length, length, 4, 2)
    owners = torch.randint(world, (length,))
    where = [(owners == rank).nonzero().squeeze(-1) for rank in range(world)]
    qs, ks, vs, douts = (split(x, owners, world) for x in (q, k, v, dout))
    dlses = [dlse[:, :, owners == rank] for rank in range(world)]
    outs, lses = reference.ring.forward(qs, ks, vs, q_positions=where, causal=causal)
    grads = reference.ring.backward(
        douts, qs, ks, vs, outs, lses, q_positions=where, dlse=dlses, causal=causal, softmax_scale=None
    )
    ours = (gather(outs, owners, 1), gather(lses, owners, 2), *(gather(x, owners, 1) for x in grads))
    close(ours, exact(q, k, v, dout, dlse, causal=causal))


def test_ring_between_different_lengths() -> None:
    q, k, v, dout, _ = tensors(6, 9)
    where = [torch.tensor([8, 4, 9]), torch.tensor([0, 2, 7])], [torch.arange(4), torch.arange(4, 9)]
    qs, douts = (list(torch.split(x, 3, 1)) for x in (q, dout))
    ks, vs = (list(torch.split(x, [4, 5], 1)) for x in (k, v))
    mask: dict[str, Any] = {"q_positions": where[0], "k_positions": where[1]}
    outs, lses = reference.ring.forward(qs, ks, vs, causal=True, softmax_scale=0.5, **mask)
    grads = reference.ring.backward(douts, qs, ks, vs, outs, lses, causal=True, softmax_scale=0.5, **mask)
    whole: dict[str, Any] = {name: torch.cat(lists) for name, lists in mask.items()}
    ours = (torch.cat(outs, 1), torch.cat(lses, 2), *(torch.cat(x, 1) for x in grads))
    close(ours, exact(q, k, v, dout, causal=True, softmax_scale=0.5, **whole))


@given(st.lists(st.integers(0, 9), max_size=4))
def test_merge_in_any_order_is_the_whole(cuts: list[int]) -> None:
    q, k, v, _, _ = tensors(3, 9)
    parts = [reference.attention(q, k[:, a:b], v[:, a:b]) for a, b in pairwise([0, *sorted(cuts), 9])]
    for order in (parts, parts[::-1]):
        merged = order[0]
        for part in order[1:]:
            merged = reference.ring.merge(merged, part)
        close(merged, reference.attention(q, k, v))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3, 4), (2, 3, 1, 4), (2, 3, 1, 4)], r"q has shape \[2, 3, 4\]"),
        ([(2, 3, 3, 4), (2, 3, 2, 4), (2, 3, 2, 4)], "k has 2 heads, q has 3"),
        ([(2, 3, 2, 4), (2, 3, 2, 5), (2, 3, 2, 4)], "batch and head dim"),
        ([(1, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)], "batch and head dim"),
        ([(2, 3, 2, 4), (2, 3, 2, 4), (2, 4, 2, 4)], "all but the head dim"),
    ],
)
def test_shapes_that_do_not_fit(shapes: list[tuple[int, ...]], message: str) -> None:
    for attention in (reference.attention, reference.blockwise.forward):
        with pytest.raises(ValueError, match=message):
            attention(*(torch.zeros(shape) for shape in shapes))


def test_a_mask_needs_positions_that_mean_something() -> None:
    q, k, v, _, _ = tensors(3, 4)
    with pytest.raises(ValueError, match="q has 3 tokens, k has 4"):
        reference.attention(q, k, v, causal=True)
    with pytest.raises(ValueError, match="both, or neither"):
        reference.attention(q, k[:, :3], v[:, :3], causal=True, q_positions=torch.arange(3))
    with pytest.raises(ValueError, match="q_positions has shape"):
        reference.attention(q, k, v, causal=True, q_positions=torch.arange(4), k_positions=torch.arange(4))
    with pytest.raises(ValueError, match="rank 0 has positions for 2 queries and 2 keys"):
        reference.ring.forward([q], [k], [v], q_positions=[torch.arange(2)])
    assert reference.attention(q, k, v)[0].shape == (2, 3, 2, 3)
