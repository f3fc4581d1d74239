"""``ring_attention`` with any arguments together that mean something, as hypothesis draws them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringattn import Layout
from ringattn.ring.block_mask import BlockMask, longformer

from .layouts import block_masks, layouts
from .mask_cases import STRIDES, Case, check, in_blocks
from .ring_cases import inputs

pytestmark = pytest.mark.usefixtures("one_core")

SEEDS = (0, 1, 2**32, 2**63 + 5, 2**64 - 1)


@st.composite
def masks(draw: st.DrawFn, layout: Layout, keys: Layout, batch: int) -> dict[str, Any]:
    """Any arguments about intervals together."""
    reach = max(layout.reach, keys.reach)
    call: dict[str, Any] = {"causal": draw(st.booleans())}
    if call["causal"] and draw(st.booleans()):
        call["prefix_length"] = draw(st.integers(1, reach))
    if draw(st.booleans()):
        cuts = [0, *sorted(draw(st.lists(st.integers(0, reach), max_size=4))), reach]
        call["cu_seqlens"] = draw(st.sampled_from([cuts, torch.tensor(cuts)]))
    if draw(st.booleans()):
        used = draw(st.lists(st.integers(0, keys.reach), min_size=batch, max_size=batch))
        call["seqused_k"] = draw(st.sampled_from([used, torch.tensor(used)]))
    return call


@st.composite
def windows(draw: st.DrawFn, seqlen: int) -> dict[str, Any]:
    """Sides of any length, one of them or both."""
    side = st.integers(0, seqlen)
    left, right = draw(st.one_of(st.tuples(side, side), st.tuples(side, st.just(-1)), st.tuples(st.just(-1), side)))
    return {"window_size": (left, right)}


@st.composite
def longformers(draw: st.DrawFn, seqlen: int, stretches: int) -> dict[str, Any]:
    """A window and some stretches of global tokens."""
    edges = sorted(draw(st.sets(st.integers(0, seqlen), max_size=2 * stretches)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    return {"block_mask": longformer(2 * draw(st.integers(0, seqlen)), pairs)}


@st.composite
def scores(draw: st.DrawFn, heads: int, batch: int) -> dict[str, Any]:
    """Any arguments about scores together."""
    call: dict[str, Any] = {}
    if draw(st.booleans()):
        call["softmax_scale"] = draw(st.sampled_from([0.1, 0.6]))
    if draw(st.booleans()):
        call["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        slopes = torch.rand(draw(st.sampled_from([(heads,), (batch, heads)])))
        call["alibi_slopes"] = slopes
    if draw(st.booleans()):
        call |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9])), "dropout_seed": draw(st.sampled_from(SEEDS))}
    return call


@st.composite
def worlds(draw: st.DrawFn, world: int, tokens: int, block: int) -> tuple[Layout, Layout | None]:
    """Who holds what: queries anywhere, keys with them or elsewhere; runs of whole blocks where there is a block."""
    sizes = max(tokens // block, world)
    holding = layouts(max_seqlen=sizes, world=world).filter(lambda one: one.seqlen > 0)
    queries, keys = draw(holding), draw(st.none() | holding)
    later = draw(st.integers(0, 2)) if keys is not None else 0  # queries behind a cache
    short = draw(st.integers(0, block - 1))
    return tuple(  # type: ignore[return-value]
        None if one is None else in_blocks(one, block, one.seqlen * block - short, first)
        for one, first in ((queries, later), (keys, 0))
    )


@st.composite
def cases(draw: st.DrawFn, decoding: bool = False) -> Case:
    """A call of any shape on any ring; or one row and about one token per rank, as in ``decoding``."""
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    triton = draw(st.booleans() if decoding else st.sampled_from([False] * 6 + [True]))
    batch = 1 if decoding else 2
    block_mask = draw(st.sampled_from(["none", "none", "blocks", "longformer"]))
    world = draw(st.integers(1, 3 if triton else 4))
    block = 1 if block_mask != "blocks" else 16 if triton else draw(st.sampled_from([3, 4]))
    layout, kv_layout = draw(worlds(world, 1 if decoding else 24 if triton else 40, block))
    keys = kv_layout or layout
    reach = max(layout.reach, keys.reach)
    heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (2, 2)] if triton else [(1, 1), (3, 1), (4, 2), (2, 2)]))
    call = draw(masks(layout, keys, batch)) | draw(scores(heads[0], batch))
    if block_mask != "longformer" and draw(st.booleans()):
        call |= draw(windows(reach))
    if block_mask == "blocks":
        rows, columns = (-(-one.reach // block) for one in (layout, keys))
        call["block_mask"] = draw(block_masks(rows, columns, block))
    elif block_mask == "longformer":
        call |= draw(longformers(reach, 1 if triton else 2))
    dims = draw(st.sampled_from([(16, 16), (16, 16), (16, 8), (8, 16), (24, 5)]))
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    dtype = draw(st.sampled_from(dtypes[:2] if triton else dtypes))
    return Case(
        layout,
        inputs(reach, heads, dims, dtype, batch),
        call | {"backend": "triton" if triton else "aten"},
        kv_layout=kv_layout,
        sink=torch.randn(heads[0]) if draw(st.booleans()) else None,
        strides=draw(st.sampled_from([*STRIDES])),
        through_lse=draw(st.booleans()),
        ring={"chunks": draw(st.sampled_from([heads[1], 1])), "direction": draw(st.sampled_from([1, -1]))},
    )


def features(case: Case) -> dict[str, bool]:
    """What a case has of everything that a call can have."""
    call, q, v = case.call, case.whole["q"], case.whole["v"]
    pattern = call.get("block_mask")
    lengths = case.layout.lengths
    return {
        "causal": call["causal"],
        "window": "window_size" in call,
        "documents": "cu_seqlens" in call,
        "prefix": "prefix_length" in call,
        "padding": "seqused_k" in call,
        "blocks": isinstance(pattern, BlockMask),
        "longformer": pattern is not None and not isinstance(pattern, BlockMask),
        "sink": case.sink is not None,
        "scale": "softmax_scale" in call,
        "softcap": "softcap" in call,
        "alibi": "alibi_slopes" in call,
        "dropout": "dropout_p" in call,
        "through lse": case.through_lse,
        "Dv": q.shape[3] != v.shape[3],
        "grouped": q.shape[2] != v.shape[2],
        "keys of their own": case.kv_layout is not None,
        "uneven": max(lengths) - min(lengths) > 1,
        "idle ranks": 0 in lengths,
        "chunks": case.ring["chunks"] > 1,
        "other direction": case.ring["direction"] == -1,
        "packed": case.strides == "packed",
        "transposed": case.strides == "transposed",
        "float16": q.dtype == torch.float16,
        "bfloat16": q.dtype == torch.bfloat16,
        "triton": call["backend"] == "triton",
    }


APART = {
    ("window", "longformer"): "a Longformer mask has a window of its own, and refuses another",
    ("blocks", "longformer"): "both are the argument block_mask",
    ("packed", "transposed"): "a call is tried with one kind of strides",
    ("float16", "bfloat16"): "q, k and v have one dtype",
    ("bfloat16", "triton"): "Triton's interpreter takes bfloat16 for integers",
}
"""Pairs of features that mean nothing, and why."""


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_call(case: Case) -> None:
    check(case)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(cases(decoding=True))
def test_decoding(case: Case) -> None:
    check(case)


@pytest.mark.nightly
def test_every_pair_of_features() -> None:
    """Two thousand calls, and every two features together in at least twenty of them."""
    pairs: Counter[tuple[str, str]] = Counter()
    names: list[str] = []

    @settings(max_examples=2000, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    @given(cases())
    def any_call(case: Case) -> None:
        check(case)
        found = features(case)
        names[:] = found
        pairs.update(combinations([name for name in found if found[name]], 2))

    any_call()
    wanted = [pair for pair in combinations(names, 2) if pair not in APART]
    print("\n".join(f"{pairs[pair]:5} {' + '.join(pair)}" for pair in wanted))
    print("\n".join(f"    - {' + '.join(pair)}: {why}" for pair, why in APART.items()))
    assert not {pair: pairs[pair] for pair in wanted if pairs[pair] < 20}
    assert not any(pairs[pair] for pair in APART)
