"""Batch rows that see different keys (documents, holes, padding), against dense masks in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Layout, ring_attention
from ringattn.conformance.cases import pairwise_cases
from ringattn.ring import BlockMask, longformer, prefix_tree
from ringattn.ring.args import AttentionArgs
from ringattn.ring.prepare import Layouts, extract_row_masks

from ..support.baselines import Results
from ..support.mask_cases import RingCase, check_case, compare_with_expected, expected_results, run_ring_case
from ..support.ring_cases import LAYOUTS, inputs

TOKENS, BATCH = 36, 3
SINK = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
HOLES = torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.6
AT = torch.arange(TOKENS)
HIDING: dict[str, dict[str, Any]] = {
    "documents": {"cu_seqlens": ((0, 36), (0, 7, 8, 8, 20, 36), (0, 30, 36))},
    "documents as a tensor": {"cu_seqlens": torch.tensor([[0, 7, 36], [0, 36, 36], [0, 1, 36]])},
    "left padding": {"leftpad_k": [5, 0, 20]},
    "left padding as a mask": {"key_mask": torch.tensor([[11], [36], [2]]) <= AT},
    "padding on both sides": {"leftpad_k": torch.tensor([5, 0, 20]), "seqused_k": [30, 36, 20]},
    "holes": {"key_mask": HOLES},
    "nothing": {"key_mask": torch.zeros(BATCH, TOKENS, dtype=torch.bool), "cu_seqlens": [0, 9, 36]},
    "all": {
        "key_mask": HOLES, "leftpad_k": [0, 3, 36], "seqused_k": [36, 20, 4],
        "cu_seqlens": [[0, 36], [0, 9, 36], [0, 36]],
    },
}  # fmt: skip
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (9, None), "softmax_scale": 0.4},
    "softcap": {"window_size": (5, 12), "softcap": 1.5},
    "ALiBi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
}


@pytest.mark.parametrize(
    ("hiding", "mask", "layout", "world", "sink"), pairwise_cases(HIDING, MASKS, LAYOUTS, [1, 2, 3], [False, True])
)
def test_rows_with_different_keys_are_exact(hiding: str, mask: str, layout: str, world: int, sink: bool) -> None:
    call = HIDING[hiding] | MASKS[mask]
    check_case(RingCase(LAYOUTS[layout](TOKENS, world), inputs(TOKENS, batch=BATCH), call, sink=SINK if sink else None))


@pytest.mark.parametrize(("hiding", "mesh"), [*zip(HIDING, [(2, 2), (1, 2), (2, 1), (1, 4)] * 2, strict=True)])
def test_rows_with_different_keys_over_a_mesh(hiding: str, mesh: tuple[int, int]) -> None:
    layout = Layout.zigzag(TOKENS, mesh[0] * mesh[1])
    call = HIDING[hiding] | {"causal": True, "window_size": (20, None)}
    check_case(RingCase(layout, inputs(TOKENS, batch=BATCH), call, sink=SINK, mesh=mesh))


@pytest.mark.parametrize(
    ("hiding", "more"),
    [
        ("all", {"strides": "transposed", "through_lse": False, "ring": {"chunks": 2}}),
        ("holes", {"strides": "packed", "ring": {"direction": -1, "slots": 2}}),
        ("left padding", {"grads": "kv"}),
    ],
)
def test_rows_with_different_keys_strides_and_ring_settings(hiding: str, more: dict[str, Any]) -> None:
    call = HIDING[hiding] | {"causal": True}
    check_case(RingCase(Layout.striped(TOKENS, 3), inputs(TOKENS, batch=BATCH), call, **more))


def test_ranks_without_queries_and_without_keys() -> None:
    hiding = HIDING["documents"] | {"key_mask": torch.tensor([[20], [20], [36]]) > AT, "leftpad_k": [20, 1, 36]}
    check_case(RingCase(Layout.uneven([0, 20, 16]), inputs(TOKENS, batch=BATCH), hiding | {"causal": True}, sink=SINK))


@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_calls_without_keys(backend: str) -> None:
    tensors = [torch.randn(2, tokens, 2, 8, requires_grad=True) for tokens in (6, 0, 0)]
    given: dict[str, Any] = {"layout": Layout([[(0, 6)]]), "kv_layout": Layout([[]]), "backend": backend}
    out, lse = ring_attention(*tensors, cu_seqlens=[[0, 3, 6], [0, 2, 6]], return_lse=True, **given)
    assert out.count_nonzero() == 0 and torch.equal(lse, torch.full((2, 2, 6), -torch.inf))
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert [grad.shape for grad in grads] == [x.shape for x in tensors] and grads[0].count_nonzero() == 0
    out = ring_attention(*tensors[1:2] * 3, cu_seqlens=[[0, 0], [0, 0]], backend=backend)
    assert out.shape == tensors[1].shape


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("call", [{}, {"key_mask": HOLES}])
def test_results_can_be_modified_in_place(call: dict[str, Any], backend: str) -> None:
    """The backward then raises like any torch function. With one head, unpacking lse copies nothing."""
    leaves = [x.requires_grad_() for name, x in inputs(TOKENS, (1, 1), batch=BATCH).items() if name in "qkv"]
    for number in range(2):
        result = ring_attention(*leaves, return_lse=True, backend=backend, **call)[number]
        before = result.detach().clone()
        result.mul_(2)
        assert torch.equal(result, 2 * before)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_rows_with_different_keys_in_the_kernels() -> None:
    whole = inputs(TOKENS, (4, 2), batch=BATCH)
    check_case(RingCase(Layout.zigzag(TOKENS, 2), whole, HIDING["all"] | {"causal": True, "backend": "triton"}))


def test_one_query_in_the_kernels() -> None:
    """Each row has one lse, which the kernels need contiguous."""
    whole = inputs(2, (4, 2), batch=2)
    tensors = [whole["q"][:, 1:], whole["k"], whole["v"]]
    given: dict[str, Any] = {"leftpad_k": [1, 0], "learnable_sink": SINK, "align": "bottom-right"}
    results = []
    for backend in ("triton", "aten"):
        leaves = [x.detach().requires_grad_() for x in tensors]
        made = ring_attention(*leaves, return_lse=True, backend=backend, **given)
        results.append([*made, *torch.autograd.grad(made, leaves, [torch.ones_like(x) for x in made])])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_left_padded_prompts_with_a_cache() -> None:
    """Generation aligns the last queries with the last keys, and rows start at different keys."""
    whole, hiding = inputs(TOKENS, batch=BATCH), HIDING["left padding"] | {"causal": True}
    q, k, v = whole["q"][:, -5:], whole["k"], whole["v"]
    out = ring_attention(q, k, v, align="bottom-right", **hiding)
    torch.testing.assert_close(out, ring_attention(whole["q"], k, v, **hiding)[:, -5:])
    with pytest.raises(ValueError, match="leftpad_k cannot be used with align='bottom-right' when there are 36"):
        ring_attention(whole["q"], k[:, :20], v[:, :20], align="bottom-right", **hiding)


@pytest.mark.parametrize("world", [1, 3])
def test_dropout_uses_positions_of_the_packed_sequence(world: int) -> None:
    """Results equal those of a sequence packed by hand, for any number of ranks."""
    call: dict[str, Any] = {"causal": True, "dropout_p": 0.4, "dropout_seed": 2**63}
    whole = inputs(TOKENS, batch=BATCH)
    ours, _ = run_ring_case(RingCase(Layout.zigzag(TOKENS, world), whole, call | HIDING["documents"] | HIDING["holes"]))
    ends = [row * TOKENS + end for row, own in enumerate(HIDING["documents"]["cu_seqlens"]) for end in own[1:]]
    left = HOLES.flatten().nonzero().flatten()
    packed = {name: x.flatten(0, 1)[None] for name, x in whole.items() if name != "dlse"}
    packed["dlse"] = whole["dlse"].transpose(0, 1).flatten(1)[None]
    by_hand = RingCase(
        Layout.contiguous(BATCH * TOKENS, 1),
        packed,
        call | {"cu_seqlens": [0, *ends]},
        kv_layout=Layout([[(p, 1) for p in left.tolist()]]),
    )
    assert ours.dk[~HOLES].count_nonzero() == 0
    rows = ours.out.flatten(0, 1)[None], ours.lse.transpose(0, 1).flatten(1)[None], ours.dq.flatten(0, 1)[None]
    compare_with_expected(expected_results(by_hand), Results(*rows, ours.dk[HOLES][None], ours.dv[HOLES][None]))


@pytest.mark.parametrize(
    ("rows", "plain"),
    [
        ({"cu_seqlens": [[0, 9, 36]] * BATCH}, {"cu_seqlens": [0, 9, 36]}),
        ({"cu_seqlens": torch.tensor([[0, 9, 36]] * BATCH)}, {"cu_seqlens": [0, 9, 36]}),
        ({"cu_seqlens": [[0, 9, 36], [0, 9, 9, 36], [0, 9, 36, 36]]}, {"cu_seqlens": [0, 9, 36]}),
        ({"key_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool), "leftpad_k": [0] * BATCH}, {}),
        ({"leftpad_k": [0] * BATCH, "seqused_k": [30, 9, 1]}, {"seqused_k": [30, 9, 1]}),
        ({"key_mask": torch.tensor([[36], [7], [0]]) > AT}, {"seqused_k": [36, 7, 0]}),
        ({"key_mask": torch.tensor([[36], [7], [0]]) > AT, "seqused_k": [30, 9, 1]}, {"seqused_k": [30, 7, 0]}),
    ],
)  # fmt: skip
def test_equal_rows_are_not_packed(rows: dict[str, Any], plain: dict[str, Any]) -> None:
    """Dropout shows it: a packed sequence would drop other weights."""
    q, k, v = (inputs(TOKENS, batch=BATCH)[name] for name in "qkv")
    drops: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": 3}
    ours, expected = (ring_attention(q, k, v, **(drops | call)) for call in (rows, plain))
    assert torch.equal(ours, expected)
    layout = Layout.contiguous(TOKENS, 1)
    assert extract_row_masks(AttentionArgs(**rows), Layouts(layout, layout), BATCH)[1] is None


def test_empty_lists_of_islands_are_no_islands() -> None:
    q, k, v = (inputs(TOKENS, batch=BATCH)[name] for name in "qkv")
    expected = ring_attention(q, k, v, causal=True, key_mask=HOLES)
    assert ring_attention(q, k, v, causal=True, key_mask=HOLES, islands=[]).equal(expected)
    tree = prefix_tree([TOKENS - 4, 2, 2], [-1, 0, 0]).intervals
    expected = ring_attention(q, k, v, causal=True, intervals=tree)
    assert ring_attention(q, k, v, causal=True, intervals=tree, islands=[]).equal(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (HIDING["documents"] | {"causal": True, "prefix_length": 3}, "prefix_length cannot be used with cu_seqlens,"),
        (HIDING["left padding"] | {"alibi_slopes": torch.ones(BATCH, 4)}, "alibi_slopes cannot be used with leftpad_k"),
        ({"cu_seqlens": [[0, 36], [0, 9, 40], [0, 36]]}, r"cu_seqlens\[1\] ends at 40: it must end at 36, the number"),
        ({"key_mask": HOLES[:, :-1]}, r"key_mask is torch.bool \[3, 35\]: it must be a bool tensor of shape \[3, 36\]"),
        ({"key_mask": HOLES.long()}, r"key_mask is torch.int64 \[3, 36\]: it must be a bool tensor"),
        ({"key_mask": HOLES.to("meta")}, "key_mask is on meta: it must be on the CPU"),
        ({"leftpad_k": [1, 2]}, "leftpad_k has 2 lengths: it must have 3, one per batch row"),
        ({"leftpad_k": [1, 2, 37]}, r"leftpad_k\[2\] is 37: it must be between 0 and 36, the number of keys"),
        ({"cu_seqlens": [[0, 36], [0, 36]]}, "cu_seqlens has 2 rows: it must have 3, one per batch row"),
        ({"cu_seqlens": [[0, 36], [0, 30], [0, 36]]}, r"cu_seqlens\[1\] ends at 30: it must end at 36"),
    ],
)  # fmt: skip
def test_refusals(call: dict[str, Any], message: str) -> None:
    tensors = [inputs(TOKENS, batch=BATCH)[name] for name in "qkv"]
    with pytest.raises(ValueError, match=message):
        ring_attention(*tensors, **call)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_mask", BlockMask(torch.eye(9).bool(), 4)),
        ("block_mask", longformer(4, [(0, 2)])),
        ("prefix_length", 3),
        ("islands", [(3, 5)]),
        ("intervals", [(AT, AT + 1)]),
        ("alibi_slopes", torch.ones(2, 4)),
    ],
)
def test_two_rows_are_refused_like_more(name: str, value: Any) -> None:
    tensors = [inputs(TOKENS, batch=2)[name] for name in "qkv"]
    with pytest.raises(ValueError, match=f"{name} cannot be used with key_mask, because batch rows"):
        ring_attention(*tensors, key_mask=HOLES[:2], causal=name in ("prefix_length", "islands"), **{name: value})


@pytest.mark.parametrize(
    "call",
    [
        {"causal": True, "prefix_length": 9},
        {"alibi_slopes": torch.rand(1, 4)},
        {"block_mask": longformer(4, [(0, 2)])},
        {"causal": True, "islands": [(3, 9)]},
        {"intervals": [(AT // 3, AT // 2 + 1)]},
    ],
)
def test_one_row_with_a_key_mask_takes_everything_except_blocks(call: dict[str, Any]) -> None:
    q, k, v = (inputs(TOKENS, batch=1)[name] for name in "qkv")
    visible_keys = HOLES[0].nonzero().flatten()
    layouts = {"layout": Layout.contiguous(TOKENS, 1), "kv_layout": Layout([[(p, 1) for p in visible_keys.tolist()]])}
    expected = ring_attention(q, k[:, visible_keys], v[:, visible_keys], **layouts, **call)  # type: ignore[call-overload]
    assert torch.equal(ring_attention(q, k, v, key_mask=HOLES[:1], **call), expected)
    with pytest.raises(ValueError, match="block_mask cannot be used with key_mask"):
        ring_attention(q, k, v, key_mask=HOLES[:1], **call | {"block_mask": BlockMask(torch.eye(9).bool(), 4)})
    if "islands" in call:
        with pytest.raises(ValueError, match=r"islands\[0\] is \(3, 9\): it must not extend past"):
            ring_attention(q, k, v, key_mask=HOLES[:1], **call | {"cu_seqlens": [[0, 5, 36]]})
