"""ring_attention_pytorch's functions on ``ring_attention``: arguments, order of heads and tokens, and results.

The nightly cases are its assert scripts. They compare with its plain attention in one process, with repaired gradients.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout
from ringattn.integrations import ring_attention_pytorch as ours

from ..support.baselines import Results
from ..support.mask_cases import RingCase, compare_with_expected, expected_results
from ..support.nightly import rest_nightly
from ..support.rank_processes import group_results
from ..support.ring_cases import inputs, run_ranks
from ..support.tolerance import assert_as_exact_as_pytorch

TOKENS, WORLDS = 64, (1, 2, 4)


def held(rank: int, world: int, bucket_size: int | None) -> Tensor:
    """Return the tokens of a rank in the order of ``RingAttention``, or contiguous tokens without a bucket size."""
    whole = torch.arange(TOKENS)
    return (whole if bucket_size is None else whole.view(bucket_size, -1).T.flatten()).chunk(world)[rank]


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (3, 2), (4, 4)])
def test_neighbours_share_a_ring(rank: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "group_rank_size", lambda *_: (rank, 6))
    created = Mock()
    monkeypatch.setattr(dist, "new_group", created)
    ours._neighbours.cache_clear()
    assert ours._members(2, None) is ours._members(2, None) is created.return_value
    created.assert_called_once_with([first, first + 1], use_local_synchronization=True)
    assert ours._members(6, None) is ours._members(None, None) is None and ours._members(6, "six") == "six"  # type: ignore[arg-type]
    for wrong in (4, 0, 12):
        with pytest.raises(ValueError, match=f"ring_size is {wrong}: it must divide 6"):
            ours._members(wrong, None)
    with pytest.raises(ValueError, match="ring_size is 2 and group has 6 ranks"):
        ours._members(2, "six")  # type: ignore[arg-type]


def check(
    world: int, bucket_size: int | None, heads: tuple[int, int], call: dict[str, Any],
    function: Callable[..., Tensor] = ours.ring_flash_attn, mask: Tensor | None = None, **mine: Any,
) -> None:  # fmt: skip
    """Compare all ranks with float64."""
    whole, tokens = inputs(TOKENS, heads), [held(rank, world, bucket_size) for rank in range(world)]

    def of_rank(group: Any) -> list[Tensor]:
        own = tokens[group.rank()]
        leaves = [whole[name][:, own].requires_grad_() for name in "qkv"]
        arguments = {"striped_ring_attn": bucket_size is not None, "mask": None if mask is None else mask[:, own]}
        size = bucket_size if function is ours.ring_flash_attn and bucket_size else 7
        out = function(*leaves, bucket_size=size, ring_reduce_col=True, group=group, **arguments, **mine)
        return [out.detach(), *torch.autograd.grad(out, leaves, whole["dout"][:, own])]

    parts = run_ranks(world, of_rank)
    order = torch.cat(tokens).argsort()
    compare_by_key(whole, call | {"key_mask": mask}, [torch.cat(x, 1)[:, order] for x in zip(*parts, strict=True)])


def compare_by_key(whole: dict[str, Tensor], call: dict[str, Any], found: list[Tensor]) -> None:
    """Compare out and gradients with float64, where query heads are sorted by the key head that they read."""
    out, dq, dk, dv = found
    heads, kv_heads = whole["q"].shape[2], whole["k"].shape[2]
    by_key = torch.arange(heads).view(-1, kv_heads).T.flatten()
    theirs = whole | {name: whole[name][:, :, by_key] for name in ("q", "dout")}
    case = RingCase(Layout.contiguous(TOKENS, 1), theirs, call, through_lse=False)
    compare_with_expected(expected_results(case), Results(out[:, :, by_key], None, dq[:, :, by_key], dk, dv))  # type: ignore[arg-type]


@pytest.mark.parametrize("world", rest_nightly(WORLDS, 2, 4))
@pytest.mark.parametrize("bucket_size", [None, 1, 8, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (6, 1)])
def test_order_of_heads_and_tokens(heads: tuple[int, int], bucket_size: int | None, world: int) -> None:
    check(world, bucket_size, heads, {"causal": True}, causal=True)


MASK = torch.arange(TOKENS) < torch.tensor([[40], [64]])
HOLES = torch.arange(TOKENS) % torch.tensor([[3], [5]]) != 1


@pytest.mark.parametrize(
    ("call", "mine"),
    [
        ({}, {}),
        ({"softcap": 5.0}, {"softclamp_qk_sim": True, "softclamp_value": 5.0}),
        ({"causal": True, "window_size": (11, 0)}, {"causal": True, "max_lookback_seq_len": 11}),
        ({}, {"mask": MASK}),
        ({"causal": True}, {"causal": True, "mask": MASK}),
        ({}, {"mask": HOLES}),
    ],
    ids=["full", "softclamp", "lookback", "padding", "causal and padding", "holes"],
)
@pytest.mark.parametrize("bucket_size", [None, 8])
def test_arguments(bucket_size: int | None, call: dict[str, Any], mine: dict[str, Any]) -> None:
    check(2, bucket_size, (4, 2), call, **mine)


def test_on_a_gpu_a_rank_is_one_bucket() -> None:
    check(4, TOKENS // 4, (4, 2), {"causal": True}, ours.ring_flash_attn_cuda, causal=True)
    mask = torch.arange(8)[None] % 3 != 1
    by_position = ours.ring_flash_attn_cuda(Q, Q, Q, mask, True, 7, False, False, 3)
    assert by_position.equal(ours.ring_flash_attn(Q, Q, Q, mask, causal=True, max_lookback_seq_len=3))


def test_without_a_ring_and_cross_attention() -> None:
    q, k = torch.randn(1, 12, 4, 16), torch.randn(1, 20, 2, 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    keys = k.repeat(1, 1, 2, 1).transpose(1, 2)
    right = sdpa(q.transpose(1, 2), keys, keys).transpose(1, 2)
    torch.testing.assert_close(ours.ring_flash_attn(q, k, k), right)
    seen = torch.arange(20)[None] % 3 != 1
    right = sdpa(q.transpose(1, 2), keys, keys, attn_mask=seen).transpose(1, 2)
    for striped in (False, True):
        torch.testing.assert_close(ours.ring_flash_attn(q, k, k, seen, striped_ring_attn=striped), right)

    def of_rank(group: Any) -> Tensor:
        x = Q + group.rank()
        return ours.ring_flash_attn(x, x, x, group=group)

    for rank, out in enumerate(run_ranks(2, of_rank)):
        torch.testing.assert_close(out, ours.ring_flash_attn(Q + rank, Q + rank, Q + rank))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_zig_zag(kv_heads: int) -> None:
    whole, layout = inputs(TOKENS, (6, kv_heads)), Layout.zigzag(TOKENS, 4)

    def of_rank(group: Any) -> list[Tensor]:
        leaves = [layout.shard(whole[name], group.rank()).detach().requires_grad_() for name in "qkv"]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = ours.zig_zag_attn(q, k, v, causal=True, group=group).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(whole["dout"], group.rank()))]

    compare_by_key(whole, {"causal": True}, [layout.unshard(x) for x in zip(*run_ranks(4, of_rank), strict=True)])


@pytest.mark.parametrize("tokens", [31, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tree_attn_decode(dtype: torch.dtype, tokens: int) -> None:
    q, k, v = (torch.randn(2, 8, n, 64).to(dtype) for n in (1, tokens, tokens))

    def of_rank(group: Any) -> tuple[Tensor, Tensor]:
        own: Any = [x.chunk(3, 2)[group.rank()] for x in (k, v)] if group.rank() < 3 else [None, None]
        whole = ours.tree_attn_decode(q, k, v, group=group)
        return whole, ours.tree_attn_decode(q, own[0], own[1], shard_kv_seq=False, group=group)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    right = [sdpa(q, k, v), sdpa(q.double(), k.double(), v.double())]
    assert not ours.tree_attn_decode(q.requires_grad_(), k, v).requires_grad
    q = q.detach()
    for rank in run_ranks(4, of_rank):
        compare_with_theirs("whole sharded", [*rank], [right[0]] * 2, [right[1]] * 2)


def test_a_default_bucket_longer_than_the_sequence_is_clipped() -> None:
    torch.testing.assert_close(ours.ring_flash_attn(Q, Q, Q, striped_ring_attn=True), ours.ring_flash_attn(Q, Q, Q))


def test_zig_zag_on_one_rank_takes_any_number_of_tokens() -> None:
    assert ours.zig_zag_attn(ODD, ODD, ODD).shape == ODD.shape


Q = torch.randn(1, 8, 4, 16)
ODD = Q[:, :, :, :7].transpose(2, 3)  # [B, H, S, D]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.ring_flash_attn(Q, Q[:, :4], Q[:, :4], causal=True), "q has 8 tokens and k has 4.*causal=True"),
        (lambda: ours.ring_flash_attn(Q, Q[:, :4], Q[:, :4], ring_reduce_col=True), "k has 4.*ring_reduce_col=True"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, max_lookback_seq_len=4), "max_lookback_seq_len is 4 without causal"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, bucket_size=3, striped_ring_attn=True), "bucket_size is 3"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, ring_reduce_col=True, ring_size=2), "ring_size is 2: it must divide 1"),
        (lambda: ours.ring_flash_attn(Q, Q[:, :, :3], Q[:, :, :3]), "4"),
        (lambda: ours.tree_attn_decode(Q), "k is NoneType and v is NoneType with shard_kv_seq=True"),
        (lambda: ours.tree_attn_decode(Q, Q[:, :4], Q[:, :4]), "k has 4 heads and q has 8"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, causal=True, max_lookback_seq_len=-1), "max_lookback_seq_len is -1: it"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, bucket_size=None, striped_ring_attn=True), "bucket_size is None"),  # type: ignore[arg-type]
        (lambda: ours.ring_flash_attn(Q, Q, Q, softclamp_qk_sim=True, softclamp_value=0), "softclamp_value is 0: with"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, torch.zeros(1, 8)), r"mask is torch.float32 of shape \[1, 8\]"),
        (lambda: ours.ring_flash_attn(Q, Q, Q, torch.ones(8).bool()), r"mask is torch.bool of shape \[8\]: it must be"),
        (lambda: run_ranks(2, lambda group: ours.zig_zag_attn(ODD, ODD, ODD, group=group)), "q has 7 tokens"),
        (lambda: ours.zig_zag_attn(Q, Q, Q, attn_mask=Q), "attn_mask is given; pass causal=True"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call()


def theirs() -> Any:
    """Import the package without its warning that there is no GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ring_attention_pytorch.ring_attention
        import ring_attention_pytorch.zig_zag_attention
    return ring_attention_pytorch


@pytest.mark.nightly
def test_names_and_arguments_match_the_package() -> None:
    package = theirs()
    for name in ("tree_attn_decode", "ring_flash_attn", "ring_flash_attn_cuda", "zig_zag_attn"):
        home = package.zig_zag_attention if name == "zig_zag_attn" else package
        mine = [x for x in inspect.signature(getattr(ours, name)).parameters.values() if x.kind is not x.KEYWORD_ONLY]
        given = inspect.signature(inspect.unwrap(getattr(home, name))).parameters.values()
        assert [(x.name, x.default) for x in mine] == [(x.name, x.default) for x in given]


def compare_with_theirs(names: str, mine: list[Tensor], single: list[Tensor], double: list[Tensor]) -> None:
    """Check against their plain attention in fp32, by the same in float64."""
    for name, *three in zip(names.split(), mine, single, double, strict=True):
        assert_as_exact_as_pytorch(name, *three)


def repaired(ctx: Any, grads: Tensor, _: Any) -> tuple[Tensor, None, None]:
    """Return the gradient of their ``AllGatherAttention``, summed over the ranks that used the gathered tensor."""
    total = grads.contiguous()
    dist.all_reduce(total)
    return total.split(ctx.batch_sizes, dim=ctx.dim)[dist.get_rank()], None, None


def theirs_on_ours() -> Any:
    package = theirs()
    package.ring_attention.ring_flash_attn = ours.ring_flash_attn
    package.distributed.AllGatherFunction.backward = staticmethod(repaired)
    return package


MODULES = [*product((True, False), (True, False), (1, 2), (1, 2), (0, 1))]
"""Causal, striped, buckets per rank, batches that share the ranks, and how much longer each rank's batch is."""


def of_module(module: Any, dtype: torch.dtype, x: Tensor, dout: Tensor, ring_size: int) -> list[Tensor]:
    """Return output and gradients of the input and of the weights, the latter summed over ranks."""
    module, leaf = copy.deepcopy(module).to(dtype), x.to(dtype).requires_grad_()
    out = module(leaf, ring_size=ring_size if module.ring_attn else None)
    weights = [module.to_qkv[1].weight, module.to_out.weight]
    dx, *dweights = torch.autograd.grad(out, [leaf, *weights], dout.to(dtype))
    for dweight in dweights:
        dist.all_reduce(dweight)
    return [out.detach(), dx, *dweights]


def modules(rank: int) -> list[list[list[Tensor]]]:
    """Return results of their module on ringattn, and on their plain attention in fp32 and in float64."""
    package, results_by_case = theirs_on_ours(), list[list[list[Tensor]]]()
    for case, (causal, striped, buckets, shared, more) in enumerate(MODULES):
        if striped and not causal:
            continue
        torch.manual_seed(case)
        size = 32 // 4 * shared
        settings = {"dim": 8, "dim_head": 8, "num_grouped_query_heads": 2, "causal": causal, "use_cuda_kernel": False}
        ring = package.RingAttention(
            **settings, ring_attn=True, striped_ring_attn=striped, ring_seq_size=size, bucket_size=size // buckets,
            auto_shard_seq=True,
        )  # fmt: skip
        plain = package.RingAttention(**settings, ring_attn=False, force_regular_attn=True)
        plain.load_state_dict(ring.state_dict())
        torch.manual_seed(100 * case + rank)
        x, dout = torch.randn(2, 2 + more * rank, 31, 8)

        runs = ((ring, torch.float32), (plain, torch.float32), (plain, torch.float64))
        results_by_case.append([of_module(module, dtype, x, dout, 4 // shared) for module, dtype in runs])
    return results_by_case


@pytest.mark.nightly
def test_assert_attn() -> None:
    for rank in group_results(4, modules, patience=170):
        for runs in rank:
            compare_with_theirs("out dx dqkv dout", *runs)


def of_zig_zag(module: Any, x: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the output and input gradient of their module's layers around ``zig_zag_attn``."""
    package, leaf = theirs().zig_zag_attention, x.clone().requires_grad_()
    padded, remove_pad = package.zig_zag_pad_seq(leaf)
    sharded, gather = package.zig_zag_shard(padded, all_gather_batch=True)
    qkv = module.to_qkv(sharded.local_sequence).unflatten(-1, (-1, module.dim_head)).transpose(1, 2)
    out = ours.zig_zag_attn(*qkv.split(module.qkv_head_breakdown, 1), causal=True)
    whole = remove_pad(gather(module.to_out(out.transpose(1, 2).flatten(2))))
    return [whole.detach(), *torch.autograd.grad(whole, [leaf], dout)]


def zig_zag(rank: int) -> list[list[Tensor]]:
    package = theirs_on_ours()
    torch.manual_seed(0)
    module = package.RingAttention(
        dim=8, dim_head=16, num_grouped_query_heads=2, causal=True, force_regular_attn=True, use_cuda_kernel=False
    )
    torch.manual_seed(rank)
    x, dout = torch.randn(2, 2 + rank, 31, 8)
    made = [of_zig_zag(module, x, dout)]
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        out = copy.deepcopy(module).to(dtype)(leaf)
        made.append([out.detach(), *torch.autograd.grad(out, [leaf], dout.to(dtype))])
    return made


@pytest.mark.nightly
def test_assert_zig_zag() -> None:
    """Pass causal=True where their script passes no mask, because queries would see later tokens."""
    for made in group_results(4, zig_zag, patience=170):
        compare_with_theirs("out dx", *made)
