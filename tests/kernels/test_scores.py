"""Score modifications, padded batch rows and block-sparse masks in the kernels, alone and together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import reference, ring_attention, single_rank
from ringattn.kernels import FULL, BlockSparseIndex, Bounds, KernelConfig, Scores, attention_backward, attention_forward
from ringattn.kernels.launch import dropout_counter
from ringattn.reference.philox import counter_words, philox

from ..support import kernel_cases
from ..support.baselines import ReferenceModifiers, Results, pytorch
from ..support.kernel_cases import (
    DTYPES,
    Inputs,
    Sizes,
    bounds_from,
    cycle_values,
    inputs,
    interval,
    magnitudes,
    narrow_keys,
    tiles,
    visible,
)
from ..support.tolerance import assert_as_exact_as_pytorch

pytestmark = [
    pytest.mark.usefixtures("poison"),
    # a hidden key that ALiBi favours has an infinite weight until the mask sets it to 0
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in (exp2|multiply|subtract)"),
]


def ours(x: Inputs, bounds: Bounds, scores: Scores, config: KernelConfig | None = None) -> Results:
    return kernel_cases.ours(x, bounds, config=config, scores=scores)


def modified_by(scores: Scores, x: Inputs) -> ReferenceModifiers:
    """Return the reference's modification of scores and weights."""
    if scores.q_positions is None or scores.k_positions is None:
        return ReferenceModifiers(scores.softcap)
    named = ("softcap", "alibi_slopes", "dropout_p", "dropout_seed", "first_head")
    options: Any = {name: value for name in named if (value := getattr(scores, name)) is not None}
    shape = (x.q.shape[0], x.q.shape[2], x.q.shape[1], x.k.shape[1])
    return ReferenceModifiers.from_scores(shape, scores.q_positions, scores.k_positions, options)


def compare(made: Results, x: Inputs, bounds: Bounds, scores: Scores) -> None:
    """Compare with PyTorch in the same dtype, or with the definition if PyTorch has no such operator."""
    pairs, modified = visible(bounds, x.q.shape[0], x.q.shape[1], x.k.shape[1])[:, 0], modified_by(scores, x)
    truth = pytorch(*(t.double() for t in x), visible=pairs, modified=modified)
    theirs = pytorch(*x, visible=pairs, modified=modified)
    sizes = magnitudes(x, truth, pairs, few_keys=True, modified=modified)
    for name, *results in zip(Results._fields, made, theirs, truth, strict=True):
        assert_as_exact_as_pytorch(name, *results, magnitude=sizes.get(name))


SLOPES = torch.tensor([1.25, 0.03125])
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "wide softcap": {"softcap": 50.0},
    "least softcap": {"softcap": 1e-8},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi by batch row": {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 0x9E3779B97F4A7C15},
    "nearly all dropped": {"dropout_p": 0.999, "dropout_seed": 3},
    "all": {"softcap": 3.0, "alibi_slopes": SLOPES, "dropout_p": 0.1, "dropout_seed": 17, "first_head": 2**16 + 4},
}
QUERIES, KEYS = 40, 45
SIZES = Sizes(queries=QUERIES, keys=KEYS, heads=2, batch=2)


def scores_of(name: str, queries: int = QUERIES, keys: int = KEYS) -> Scores:
    """Return the SCORES entry at positions with gaps and an arbitrary start."""
    return Scores(
        **SCORES[name],
        q_positions=(torch.arange(queries) * 2 + 31).to(torch.int32),
        k_positions=(torch.arange(keys) * 3).to(torch.int32),
    )


@pytest.mark.parametrize(
    ("name", "dtype", "kind"), cycle_values(SCORES, DTYPES, ["causal", "documents", "first rows blind", "full"])
)
def test_each_score_modification_is_exact(name: str, dtype: torch.dtype, kind: str) -> None:
    x, bounds = inputs(SIZES, dtype), interval(kind, QUERIES, KEYS)
    compare(ours(x, bounds, scores_of(name)), x, bounds, scores_of(name))


def pattern(queries: int, keys: int, block: int, share: float = 0.5) -> BlockSparseIndex:
    """Return random blocks whose first row of blocks sees nothing."""
    shown = torch.rand(-(-queries // block), -(-keys // block)) < share
    shown[:1] = False
    return BlockSparseIndex(shown, block)


@pytest.mark.parametrize(
    ("used", "block", "kind", "name", "config"),
    [
        ([32, 1], None, "full", "all", None),
        (None, 48, "causal", "all", None),  # not divisible by the default tile of 32
        (None, 32, "window", "plain", tiles(16, 32)),
    ],
)
def test_padded_batch_rows_and_blocks(
    used: list[int] | None, block: int | None, kind: str, name: str, config: KernelConfig | None
) -> None:
    """Head dims are in two parts, and the last block is partial."""
    queries, keys = (60, 62) if block == 48 else (QUERIES, KEYS)
    x = inputs(replace(SIZES, queries=queries, keys=keys, head_dim=96, head_dim_v=48))
    whole, scores = interval(kind, queries, keys), scores_of(name, queries, keys)
    bounds = Bounds(
        whole.lo, whole.hi, None if used is None else torch.tensor(used, dtype=torch.int32),
        None if block is None else pattern(queries, keys, block),
    )  # fmt: skip
    compare(ours(x, bounds, scores, config), x, bounds, scores)


def shards(x: Inputs, bounds: Bounds, scores: Scores, size: int) -> Iterator[tuple[Tensor, Tensor, Bounds, Scores]]:
    """Yield the keys in pieces of ``size`` with their bounds and scores."""
    assert scores.k_positions is not None
    for begin in range(0, x.k.shape[1], size):
        end = min(begin + size, x.k.shape[1])
        interval_part, index = narrow_keys(bounds, begin, end), bounds.block_sparse
        used = None if bounds.seqused_k is None else (bounds.seqused_k - begin).clamp(0, end - begin)
        if index is not None:
            index = BlockSparseIndex(index.visible[:, begin // index.block : -(-end // index.block)], index.block)
        local = replace(scores, k_positions=scores.k_positions[begin:end])
        yield x.k[:, begin:end], x.v[:, begin:end], Bounds(interval_part.lo, interval_part.hi, used, index), local


def test_score_modifications_shard_by_shard() -> None:
    """State and sums are carried, while positions and blocks belong to a shard."""
    x, whole, scores = inputs(SIZES), interval("causal", QUERIES, KEYS), scores_of("all")
    bounds = Bounds(whole.lo, whole.hi, torch.tensor([35, 45], dtype=torch.int32), pattern(QUERIES, KEYS, 16, 0.7))
    pieces = list(shards(x, bounds, scores, 32))
    state = None
    for k, v, shard_bounds, modified in pieces:
        state = attention_forward(
            x.q, k, v, bounds=shard_bounds, scores=modified, state=state, final=k is pieces[-1][0]
        )
    assert state is not None
    dq, by_shard = torch.zeros_like(x.q), []
    for k, v, shard_bounds, modified in pieces:
        dq, dk, dv = attention_backward(
            x.dout, x.q, k, v, *state, dlse=x.dlse, bounds=shard_bounds, scores=modified, dq=dq,
            dk=torch.zeros_like(k), dv=torch.zeros_like(v),
        )  # fmt: skip
        by_shard.append((dk, dv))
    dk, dv = (torch.cat(parts, 1) for parts in zip(*by_shard, strict=True))
    compare(Results(*state, dq, dk, dv), x, bounds, scores)


@pytest.mark.parametrize("name", ["all", "alibi by batch row"])
def test_chunks_of_heads_equal_all_heads(name: str) -> None:
    x, scores = inputs(SIZES), scores_of(name)
    whole, _ = attention_forward(*x[:3], scores=scores)
    halves = [
        attention_forward(x.q[:, :, chunk], x.k, x.v, scores=scores.slice_heads(chunk))[0]
        for chunk in (slice(0, 1), slice(1, 2))
    ]
    assert torch.equal(torch.cat(halves, 2), whole)


def test_seeds_and_thresholds_fit_their_words() -> None:
    for seed in (0, 5, 2**63 - 1, 2**63, 2**64 - 1):
        counter = dropout_counter(seed, 7 << 16 | 3)
        assert all(type(half) is float for half in counter)  # one compilation serves all floats
        *seed_halves, head_low, head_high = map(int, counter)
        assert sum(half << 16 * place for place, half in enumerate(seed_halves)) == seed
        assert (head_low, head_high) == (3, 7)
    for p, threshold in ((1 - 2**-40, 2**32 - 1), (0.3, 1_288_490_189), (2**-34, 0)):  # rounded, but still a word
        assert Scores(dropout_p=p).threshold == threshold


@pytest.mark.parametrize("p", [0, 1], ids=["at the threshold", "below the threshold"])
def test_dropout_keeps_a_word_equal_to_the_threshold(p: int) -> None:
    at, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, 1, 16)
    word = int(philox(counter_words(0, 0, 0, 0), (3, 0))[0])  # of the only weight
    options: Any = {"dropout_p": (word + p) / 2**32, "dropout_seed": 3}
    outs = [
        ring_attention(ones, ones, ones, group=single_rank(), backend=backend, **options)
        for backend in ("triton", "aten")
    ]
    outs.append(reference.attention(ones, ones, ones, q_positions=at, k_positions=at, **options)[0])
    expected = (1 - p) / (1 - options["dropout_p"])
    assert [out[0, 0, 0, 0].item() for out in outs] == pytest.approx([expected] * 3)


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.2499, 0.25, 100.0])
def test_softcap_is_accurate_in_fp32(x: float) -> None:
    """A single key makes lse equal to ``cap * tanh(x / cap)``; allow a few units in the last place."""
    q, k = torch.full((1, 1, 1, 16), x), torch.ones(1, 1, 1, 16) / 16
    for sign in (1.0, -1.0):
        _, lse = attention_forward(sign * q, k, k, scores=Scores(softcap=2.0), softmax_scale=1.0)
        assert lse.item() == pytest.approx(sign * 2 * math.tanh(x / 2), rel=8 * torch.finfo(torch.float32).eps)


@settings(max_examples=6)
@given(st.data())
def test_any_combination_of_scores_and_masks(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    block = data.draw(st.sampled_from([16, 32]))
    index = st.lists(st.integers(0, keys), min_size=queries, max_size=queries).map(sorted)
    lo, hi = torch.tensor(data.draw(index)), torch.tensor(data.draw(index))
    whole = bounds_from(lo, torch.maximum(lo, hi), keys) if data.draw(st.booleans()) else FULL
    used = torch.tensor(data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2)), dtype=torch.int32)
    bounds = Bounds(
        whole.lo, whole.hi, used if data.draw(st.booleans()) else None,
        pattern(queries, keys, block) if data.draw(st.booleans()) else None,
    )  # fmt: skip
    x = inputs(Sizes(queries, keys, heads=2, batch=2))
    scores = scores_of(data.draw(st.sampled_from(sorted(SCORES))), queries, keys)
    compare(ours(x, bounds, scores), x, bounds, scores)
