"""``ring_attention`` with every mask and score, alone and combined, over worlds, layouts and backends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, Ring, reference, ring_attention
from ringattn.comm import LocalGroup, Topology
from ringattn.conformance.cases import pairwise_cases
from ringattn.ring.schedule.layout import Documents
from ringattn.ring.schedule.mask import BlockMask, Mask, bigbird, fixed, longformer, strided
from ringattn.ring.schedule.visibility import sent_keys

from ..support.baselines import Results
from ..support.mask_cases import (
    RingCase,
    all_positions,
    check_case,
    compare_with_expected,
    expand_to_blocks,
    expected_results,
    run_ring_case,
    take_rank_tokens,
)
from ..support.nightly import rest_nightly
from ..support.ring_cases import LAYOUTS, inputs, run_ranks

pytestmark = pytest.mark.usefixtures("one_core")

TOKENS = 60
HEADS = {"aten": (4, 2), "triton": (2, 1)}  # fewer in the kernels, because the interpreter is slow
BLOCK = {"aten": 4, "triton": 16}  # a kernel's tile has at least 16 rows and must divide a block
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINK = torch.tensor([0.5, -torch.inf, 3.0, -2.0])

AT = torch.arange(TOKENS)
BLIND = (AT == 20) | (AT > 50)
INTERVALS = [
    (AT // 3, torch.where(BLIND, 0, AT // 3 + 4)),
    ((AT // 2 + 12).int(), (AT // 2 + 15).int()),
    (AT // 5 + 44, AT // 5 + 48),
]
"""Three disjoint intervals. Some queries see nothing of the first one, which is cut in two there."""

MASKS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (7, 2)},
    "window to the left": {"window_size": (5, -1)},
    "causal window": {"causal": True, "window_size": (9, 0)},
    "documents": {"cu_seqlens": [0, 7, 8, 8, 31, TOKENS]},
    "causal documents": {"causal": True, "cu_seqlens": torch.tensor([0, 13, 40, TOKENS])},
    "causal documents and window": {"causal": True, "cu_seqlens": [0, 13, 40, TOKENS], "window_size": (6, -1)},
    "islands": {"causal": True, "islands": [(3, 9), (20, 21), (21, 34), (55, TOKENS)]},
    "islands, window, documents": {
        "causal": True, "islands": [(3, 9), (21, 34)], "window_size": (11, -1), "cu_seqlens": [0, 15, 40, TOKENS],
    },
    "intervals": {"intervals": INTERVALS},
    "causal intervals in documents": {"causal": True, "intervals": INTERVALS, "cu_seqlens": [0, 13, 40, TOKENS]},
    "prefix": {"causal": True, "prefix_length": 23},
    "prefix and window": {"causal": True, "prefix_length": 23, "window_size": (17, -1)},
    "padding": {"seqused_k": [41, 0]},
    "causal padding": {"causal": True, "seqused_k": torch.tensor([60, 17])},
    "longformer": {"block_mask": longformer(8, [(0, 3)])},
    "causal longformer": {"causal": True, "block_mask": longformer(8, [(0, 3), (30, 32)])},
    "longformer in documents": {"cu_seqlens": [0, 25, TOKENS], "block_mask": longformer(6, [(4, 6), (40, 41)])},
}  # fmt: skip
PATTERNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "strided": lambda block: {"causal": True, "block_mask": strided(TOKENS, block, stride=2 * block)},
    "fixed": lambda block: {"causal": True, "block_mask": fixed(TOKENS, block, stride=3 * block, summary=block)},
    "bigbird": lambda block: {"block_mask": bigbird(TOKENS, block, window=1, global_=1, random=1)},
    "bigbird in documents": lambda block: PATTERNS["bigbird"](block) | {"cu_seqlens": [0, 25, TOKENS]},
}
SCORES: dict[str, dict[str, Any]] = {
    "scale": {"softmax_scale": 0.7},
    "softcap": {"softcap": 1.5},
    "least": {"softmax_scale": 1e-30, "softcap": 1e-8},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi by batch row": {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**63 + 5},
    "dropout of later heads": {"dropout_p": 0.3, "dropout_seed": 11, "first_head": 2**31 - 3},
    "all scores": {
        "causal": True, "softmax_scale": 0.4, "softcap": 3.0, "alibi_slopes": SLOPES, "dropout_p": 0.5,
        "dropout_seed": 7,
    },
}  # fmt: skip


FEATURES = [*MASKS, *PATTERNS, *SCORES]


def feature_call(name: str, block: int) -> dict[str, Any]:
    """Return the arguments of a feature; a pattern has blocks of ``block`` tokens."""
    return PATTERNS[name](block) if name in PATTERNS else (MASKS | SCORES)[name]


def layout_for(name: str, world: int, call: dict[str, Any]) -> Layout:
    """Return a layout by name; block masks get a layout of whole blocks."""
    pattern = call.get("block_mask")
    if not isinstance(pattern, BlockMask):
        return LAYOUTS[name](TOKENS, world)
    blocks = len(pattern.visible)
    few = name == "uneven" and blocks < 3 * world  # the other ranks of the uneven layout need three blocks each
    return expand_to_blocks(LAYOUTS["contiguous" if few else name](blocks, world), pattern.block, TOKENS)


def case_of(world: int, layout: str, call: dict[str, Any], **more: Any) -> RingCase:
    return of_layout(layout_for(layout, world, call), call, **more)


def of_layout(
    layout: Layout,
    call: dict[str, Any],
    *,
    sink: bool = False,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> RingCase:
    """Return a case with as many heads as tests of its backend use."""
    heads = HEADS.get(call.get("backend", "aten"), HEADS["aten"])
    if "alibi_slopes" in call:
        call = call | {"alibi_slopes": call["alibi_slopes"][..., : heads[0]].contiguous()}
    return RingCase(layout, inputs(TOKENS, heads, dims, dtype), call, sink=SINK[: heads[0]] if sink else None, **more)


LISTED = {
    "window", "causal window", "documents", "causal documents", "prefix", "causal padding", "scale", "softcap", "alibi",
    "dropout",
}  # fmt: skip
"""Features that the cases of tests/conformance/test_ours.py have."""
OTHERS = [name for name in FEATURES if name not in LISTED]


@pytest.mark.parametrize(("name", "layout", "world"), pairwise_cases(OTHERS, LAYOUTS, [1, 2, 3, 4]))
def test_each_other_feature_is_exact(name: str, layout: str, world: int) -> None:
    call = feature_call(name, BLOCK["aten"])
    check_case(case_of(world, layout, call | {"backend": "aten"}))


NUMBERED = [*enumerate(FEATURES)]


@pytest.mark.parametrize(("number", "name"), rest_nightly(NUMBERED, *NUMBERED[:-1]))
def test_each_feature_is_exact_in_runs_of_tokens(number: int, name: str) -> None:
    """Each case takes the next world, layout and ring; the kernels compute that with all scores."""
    backend = "triton" if name == "all scores" else "aten"
    call = feature_call(name, BLOCK[backend])
    ring = {"chunks": 3} if number % 3 else {"chunks": 3, "topology": Topology.grid(2, 2), "direction": -1}
    world = 2 + number % 3 if number % 3 else 4
    check_case(case_of(world, [*LAYOUTS][number % 4], call | {"backend": backend}, sink=number % 2 == 0, ring=ring))


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (8, 12), (12, 8)])
def test_masks_up_to_the_last_position_hide_nothing(queries: int, keys: int) -> None:
    """The last position is that of the queries or of the keys, whichever is later."""
    q, k, v = (torch.randn(1, tokens, 2, 16) for tokens in (queries, keys, keys))
    call: dict[str, Any] = {"layout": Layout.contiguous(queries, 1), "kv_layout": Layout.contiguous(keys, 1)}
    expected, end = ring_attention(q, k, v, **call), max(queries, keys)
    masks: list[dict[str, Any]] = [{"prefix_length": end}, {"islands": [(0, end)]}, {"cu_seqlens": [0, end]}]
    for mask in masks:
        out = ring_attention(q, k, v, causal="cu_seqlens" not in mask, **call | mask)
        torch.testing.assert_close(out, expected)
    padding = {"key_mask": torch.arange(keys)[None] > 1}, {"leftpad_k": [2]}, {"cu_seqlens": [[0, 2, end]]}
    mine, *others = (ring_attention(q, k, v, **call | hiding) for hiding in padding)
    assert mine.equal(others[0])
    torch.testing.assert_close(others[1][:, 2:], mine[:, 2:])


# tests/kernels covers the features themselves; here the ring must pass each of them on
LAUNCHED = (
    "islands", "intervals", "window", "causal documents", "prefix", "padding", "longformer", "bigbird in documents",
    "dropout", "least",
)  # fmt: skip
ON_KERNELS = [*zip(LAUNCHED, cycle(["contiguous", "striped", "zigzag"]))]
OTHER_ARGUMENTS = [ON_KERNELS[at] for at in (0, 6, 7, 8, 9)]
"""Features that give a kernel other arguments: several intervals, blocks, and scores."""


@pytest.mark.parametrize(("name", "layout"), rest_nightly(ON_KERNELS, *OTHER_ARGUMENTS))
def test_the_ring_passes_each_feature_to_the_kernels(name: str, layout: str) -> None:
    call = feature_call(name, BLOCK["triton"])
    check_case(case_of(2, layout, call | {"backend": "triton"}))


TOGETHER: list[dict[str, Any]] = [
    MASKS["causal documents and window"] | SCORES["softcap"] | {"seqused_k": [50, 29]},
    MASKS["prefix and window"] | SCORES["dropout"] | {"cu_seqlens": [0, 7, 8, 8, 31, TOKENS]},
    MASKS["causal longformer"] | SCORES["all scores"] | {"seqused_k": [50, 29], "prefix_length": 23},
    MASKS["longformer in documents"] | SCORES["alibi by batch row"] | {"softcap": 1.5},
    PATTERNS["bigbird in documents"](4) | SCORES["all scores"] | {"window_size": (17, 4), "seqused_k": [50, 29]},
    PATTERNS["strided"](4) | SCORES["dropout"] | {"prefix_length": 23, "window_size": (30, -1)},
    PATTERNS["bigbird"](4) | MASKS["padding"] | SCORES["alibi"],
    PATTERNS["strided"](4) | MASKS["islands"] | MASKS["intervals"] | SCORES["all scores"] | {"seqused_k": [50, 29]},
    MASKS["causal longformer"] | MASKS["islands"] | MASKS["intervals"] | {"prefix_length": 8},
]


@pytest.mark.parametrize(("number", "call"), [*enumerate(TOGETHER)])
@pytest.mark.parametrize("sink", [False, True])
def test_combined_features_are_exact(number: int, call: dict[str, Any], sink: bool) -> None:
    """Each case takes the next world and layout."""
    number += sink
    check_case(case_of(1 + number % 4, [*LAYOUTS][number % 3], call | {"backend": "aten"}, sink=sink))


@pytest.mark.parametrize("call", [
    pytest.param(TOGETHER[2], marks=pytest.mark.nightly, id="longformer"),
    pytest.param(TOGETHER[4] | PATTERNS["bigbird"](16), id="blocks"),
])  # fmt: skip
def test_combined_features_in_the_kernels(call: dict[str, Any]) -> None:
    check_case(case_of(2, "zigzag", call | {"backend": "triton"}, sink=True))


@pytest.mark.parametrize(
    ("name", "ring"),
    pairwise_cases(
        ["all scores", "causal documents", "longformer", "causal padding"],
        [{"chunks": 2}, {"topology": Topology.grid(2, 2)}, {"direction": -1, "prefetch": 0}],
    )[::2],
)
def test_features_with_other_ring_settings(name: str, ring: dict[str, Any]) -> None:
    check_case(case_of(4, "zigzag", (MASKS | SCORES)[name], sink=True, ring=ring))


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (3, 1)])  # two chunks share the heads evenly or unevenly, or tokens
def test_features_with_quantised_transfers(heads: tuple[int, int]) -> None:
    """K/V travel as fp8 and dK/dV as bfloat16; the reference uses the received keys."""
    ring = {"wire_dtype": torch.float8_e4m3fn, "grad_wire_dtype": torch.bfloat16, "chunks": 2}
    check_case(RingCase(Layout.zigzag(TOKENS, 3), inputs(TOKENS, heads), MASKS["causal documents"], ring=ring))


@pytest.mark.parametrize(
    "ring",
    [{}, {"chunks": 2, "direction": -1}, {"topology": Topology.grid(2, 2)}, {"chunks": 3}],
    ids=["flat", "chunks backwards", "two levels", "runs of tokens"],
)
def test_shards_that_are_sent_in_part(ring: dict[str, Any]) -> None:
    whole = inputs(TOKENS, heads=(2, 2))
    layout = Layout([[(0, 10), (30, 5)], [(10, 20)], [(35, 8)], [(43, 17)]])
    calls: list[dict[str, Any]] = [
        {"causal": True, "window_size": (4, 0)},
        {"cu_seqlens": [0, 7, 12, 26, 30, 38, 48, TOKENS]},
    ]
    for call in calls:
        case = RingCase(layout, whole, call | {"backend": "aten"}, ring=ring)
        documents = Documents(call["cu_seqlens"]) if "cu_seqlens" in call else None
        mask = Mask(call.get("causal", False), call.get("window_size", (-1, -1)), documents)
        assert 0 < sent_keys(layout, mask, layout).seqlen < TOKENS * 3 / 4
        check_case(case)


def test_a_row_that_sees_only_the_sink() -> None:
    sink, queries, keys = torch.tensor([0.25, -1.0]), Layout.contiguous(8, 2), Layout([[(4, 4)], []])
    call = {"window_size": (-1, 0), "causal": True}
    ours, _ = run_ring_case(RingCase(queries, inputs(8, heads=(2, 2)), call, kv_layout=keys, sink=sink))
    assert ours.out[:, :4].count_nonzero() == 0
    assert torch.equal(ours.lse[:, :, :4], sink[None, :, None].expand(2, 2, 4))


PACKED, TRANSPOSED = {"strides": "packed"}, {"strides": "transposed"}


@pytest.mark.parametrize(
    ("name", "backend", "tensors"),
    [
        ("causal padding", "aten", {"dtype": torch.bfloat16}),
        ("causal window", "triton", {"dtype": torch.float16} | PACKED),
        ("all scores", "aten", {"dtype": torch.float16} | PACKED),
        ("longformer", "aten", {"dtype": torch.bfloat16}),
        pytest.param("all scores", "triton", TRANSPOSED, marks=pytest.mark.nightly),
        ("all scores", "aten", {"dims": (8, 24)} | TRANSPOSED),
        ("causal window", "aten", {"dims": (5, 3)}),
        ("causal window", "triton", {"dims": (24, 16)}),
    ],
)
def test_dtypes_strides_and_different_head_dims(name: str, backend: str, tensors: dict[str, Any]) -> None:
    check_case(case_of(3, "zigzag", (MASKS | SCORES)[name] | {"backend": backend}, sink=True, **tensors))


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_an_expanded_dout(backend: str) -> None:
    """``out.sum().backward()`` gives a dout whose strides are all 0."""
    case = case_of(2, "striped", SCORES["all scores"] | {"backend": backend}, through_lse=False)
    case.whole["dout"].fill_(1.0)

    def summed(group: LocalGroup) -> Tensor:
        leaves = [take_rank_tokens(case.layout, case.whole[name], group.rank()).requires_grad_() for name in "qkv"]
        with Ring(group) as ring:
            out: Any = ring_attention(*leaves, layout=case.layout, ring=ring, **case.call)
            return torch.autograd.grad(out.sum(), leaves[:1])[0]

    parts = run_ranks(2, summed)
    ones, _ = run_ring_case(case)
    assert all(part.equal(take_rank_tokens(case.layout, ones.dq, rank)) for rank, part in enumerate(parts))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *product([None, "prefix and window", "longformer", "padding", "all scores"], ["aten"]),
        ("causal documents", "triton"),
    ],
)
def test_keys_with_another_layout(name: str | None, backend: str) -> None:
    """The last queries attend to a longer cache and one rank has no queries; also more queries than keys."""
    queries = Layout([[(40, 7)], [(47, 6), (55, 5)], []])
    call = (MASKS | SCORES).get(name or "", {}) | {"backend": backend}
    check_case(of_layout(queries, call, kv_layout=Layout.zigzag(TOKENS, 3)))
    if name in (None, "all scores"):
        check_case(of_layout(Layout.striped(TOKENS, 3), call, kv_layout=Layout.contiguous(31, 3), ring={"chunks": 3}))


def test_blocks_between_queries_and_longer_keys() -> None:
    """A plain tensor's block size is the number of query positions divided by its rows."""
    visible = torch.rand(8, 15) < 0.5
    queries, keys = (expand_to_blocks(Layout.striped(blocks, 2), 4, 4 * blocks) for blocks in (8, 15))
    case = RingCase(queries, inputs(TOKENS), {"block_mask": BlockMask(visible, 4)}, kv_layout=keys)
    ours, _ = run_ring_case(RingCase(queries, case.whole, {"block_mask": visible}, kv_layout=keys))
    assert all(our.equal(other) for our, other in zip(ours, check_case(case), strict=True))


@pytest.mark.parametrize(
    ("world", "layout", "backend"),
    [(1, "contiguous", "aten"), (3, "striped", "aten"), (4, "uneven", "aten"), (2, "zigzag", "triton")],
)
def test_dropout_keeps_the_same_weights_everywhere(world: int, layout: str, backend: str) -> None:
    """The identity as v makes out show the kept weights; the identity as dout makes dv show them."""
    tokens, heads, batch = 24, 2, 2
    identity = torch.eye(tokens)[None, :, None].expand(batch, -1, heads, -1).contiguous()
    whole = inputs(tokens, (heads, heads), (16, tokens)) | {"v": identity, "dout": identity}
    drops: Any = {"dropout_p": 0.4, "dropout_seed": 2**64 - 3}
    case = RingCase(LAYOUTS[layout](tokens, world), whole, drops | {"backend": backend}, through_lse=False)
    ours, _ = run_ring_case(case)
    at = all_positions(case.layout)
    factors = reference.scores.dropout_factors((batch, heads, tokens, tokens), at, at, drops)
    assert factors is not None
    assert torch.equal(ours.out != 0, factors.transpose(1, 2) != 0)
    assert torch.equal(ours.dv != 0, factors.mT.transpose(1, 2) != 0)


@pytest.mark.parametrize("world", [1, 2])
def test_shards_of_heads_drop_the_weights_of_the_whole_call(world: int) -> None:
    """Tensor parallelism: each half of the heads is a separate call."""
    layout, call = Layout.zigzag(TOKENS, world), MASKS["causal window"] | SCORES["dropout"]
    whole = inputs(TOKENS, (4, 2))
    halves = []
    for first in (0, 2):
        pairs = {name: x[:, :, first // 2 : first // 2 + 1] for name, x in whole.items() if name in "kv"}
        own = {name: whole[name][:, :, first : first + 2] for name in ("q", "dout")}
        half = pairs | own | {"dlse": whole["dlse"][:, first : first + 2]}
        halves.append(run_ring_case(RingCase(layout, half, call | {"first_head": first}))[0])
    joined = [torch.cat(parts, 1 if parts[0].dim() == 3 else 2) for parts in zip(*halves, strict=True)]
    compare_with_expected(expected_results(RingCase(layout, whole, call)), Results(*joined))
