"""What masks and scores the reference knows: against loops over pairs, PyTorch, and its three forms with each other."""

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
from ringattn.reference.philox import philox, words
from ringattn.reference.scores import kept

from ..support.baselines import exact
from .test_reference import close, gather, split, tensors

TOKENS = 12
BLOCKS = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (4, 2)},
    "prefix": {"causal": True, "prefix_length": 5},
    "documents": {"cu_seqlens": [0, 3, 3, 10, TOKENS]},
    "longformer": {"window_size": (2, 2), "global_tokens": [(0, 2), (7, 8)]},
    "padding": {"seqused_k": [7, 0]},
    "blocks": {"block_mask": BLOCKS, "block_size": 5},
    "sink": {"learnable_sink": torch.tensor([0.5, -torch.inf])},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.25, 0.5])},
    "alibi by batch row": {"alibi_slopes": torch.tensor([[0.25, 0.5], [1.0, 0.0]])},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 2**63 + 12345},
}
FEATURES["all"] = {name: value for feature in FEATURES.values() for name, value in feature.items()} | {
    "window_size": (8, 3)
}

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Of Random123's ``kat_vectors``, those of philox4x32 with 10 rounds."""


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox(words(*counter), key)) == expected
    assert by_hand(list(counter), list(key)) == list(expected)


def by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers, which have no end."""
    for number in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        low, high = ((word + number * step) % 2**32 for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        counter = [b // 2**32 ^ counter[1] ^ low, b % 2**32, a // 2**32 ^ counter[3] ^ high, a % 2**32]
    return counter


WORD = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=5), st.tuples(WORD, WORD))
def test_philox_of_any_counter(counters: list[tuple[int, ...]], key: tuple[int, int]) -> None:
    found = torch.stack(philox(words(*torch.tensor(counters).unbind(1)), key), 1)
    assert found.tolist() == [by_hand(list(counter), list(key)) for counter in counters]


def sees(call: dict[str, Any], row: int, p: int, key: int) -> bool:
    """The masks, one pair at a time and each in words of its own."""
    if call.get("causal") and key > p and key >= call.get("prefix_length", 0):
        return False
    left, right = (math.inf if side < 0 else side for side in call.get("window_size", (-1, -1)))
    whole = any(start <= x < end for start, end in call.get("global_tokens", ()) for x in (p, key))
    if not (-left <= key - p <= right or whole):
        return False
    if "cu_seqlens" in call and not any(a <= min(p, key) and max(p, key) < b for a, b in pairwise(call["cu_seqlens"])):
        return False
    if "seqused_k" in call and key >= call["seqused_k"][row]:
        return False
    return "block_mask" not in call or bool(call["block_mask"][p // call["block_size"]][key // call["block_size"]])


def score(call: dict[str, Any], row: int, head: int, p: int, key: int, product: float) -> float:
    """Of one pair, from ``scale * q k^T``."""
    if "softcap" in call:
        product = call["softcap"] * math.tanh(product / call["softcap"])
    slopes = call.get("alibi_slopes", torch.zeros(head + 1))
    slope = float(slopes[head] if slopes.dim() == 1 else slopes[row, head])
    return product - slope * abs(p - key)


def factor(call: dict[str, Any], row: int, head: int, p: int, key: int) -> float:
    """What dropout makes of one weight."""
    share, seed = call.get("dropout_p", 0.0), call.get("dropout_seed", 0)
    word = by_hand([p, key, head, row], [seed % 2**32, seed // 2**32])[0]
    return 0.0 if word < round(share * 2**32) else 1 / (1 - share)


def one_row(
    call: dict[str, Any], row: int, head: int, p: int, query: Tensor, keys: dict[int, tuple[Tensor, Tensor]]
) -> tuple[Tensor, float]:
    """Out and lse of one query, from the keys and values by position."""
    sink = float(call["learnable_sink"][head]) if "learnable_sink" in call else -math.inf
    total, out = math.exp(sink), torch.zeros(3, dtype=torch.float64)
    for position, (k, v) in keys.items():
        if sees(call, row, p, position):
            weight = math.exp(score(call, row, head, p, position, float(query @ k) / math.sqrt(len(k))))
            total += weight
            out += weight * factor(call, row, head, p, position) * v
    return (out / total, math.log(total)) if total else (out, -math.inf)


@pytest.mark.parametrize("name", FEATURES)
def test_features_against_loops_over_pairs(name: str) -> None:
    q, k, v, _, _ = tensors(5, 9)
    at: dict[str, Any] = {"q_positions": torch.randperm(TOKENS)[:5], "k_positions": torch.randperm(TOKENS)[:9]}
    out, lse = reference.attention(q, k, v, **at, **FEATURES[name])
    for row in range(2):
        keys = dict(zip(at["k_positions"].tolist(), zip(k[row, :, 0], v[row, :, 0], strict=True), strict=True))
        for head in range(2):
            for i, p in enumerate(at["q_positions"].tolist()):
                expected = one_row(FEATURES[name], row, head, p, q[row, i, head], keys)
                close((out[row, i, head], lse[row, head, i]), (expected[0], lse.new_tensor(expected[1])))


@pytest.mark.parametrize("name", FEATURES)
def test_visible_says_what_the_pairs_say(name: str) -> None:
    masks = {key: value for key, value in FEATURES[name].items() if key in reference.masks.Masks.__annotations__}
    at = torch.arange(TOKENS)
    seen = reference.visible(at, at, **masks)
    expected = [[[sees(masks, row, p, key) for key in range(TOKENS)] for p in range(TOKENS)] for row in range(2)]
    assert seen.shape == ((2, TOKENS, TOKENS) if "seqused_k" in masks else (TOKENS, TOKENS))
    assert seen.expand(2, -1, -1).tolist() == expected


@pytest.mark.parametrize("heads", [2, 8])
def test_alibi_is_sdpa_with_a_bias(heads: int) -> None:
    """With the slopes of the paper: 2^(-8 / H), and its powers."""
    q, k, v, _, _ = tensors(7, 7, heads, heads)
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    bias = torch.tensor([[[-float(slope) * abs(i - j) for j in range(7)] for i in range(7)] for slope in slopes])
    bias = bias.to(torch.float64).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    theirs = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    out, _ = reference.attention(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(out, theirs.transpose(1, 2), rtol=1e-6, atol=1e-6)  # the bias was made in fp32


def test_a_small_softcap_bounds_scores_and_a_large_one_does_nothing() -> None:
    q, k, v, _, _ = tensors(6, 6)
    _, lse = reference.attention(q * 1e6, k, v, softcap=0.5)
    assert (lse - math.log(6)).abs().max() <= 0.5
    torch.testing.assert_close(
        reference.attention(q, k, v, softcap=1e7), reference.attention(q, k, v), rtol=1e-9, atol=1e-9
    )


def test_padding_is_as_if_the_keys_were_not_there() -> None:
    q, k, v, _, _ = tensors(6, 6)
    ours = reference.attention(q, k, v, seqused_k=[4, 6])
    for row, used in enumerate((4, 6)):
        one = slice(row, row + 1)
        alone = reference.attention(q[one], k[one, :used], v[one, :used])
        close((ours[0][one], ours[1][one]), alone)


def test_blocks_are_sdpa_with_the_mask_spread_out() -> None:
    q, k, v, _, _ = tensors(12, 12, 2, 2)
    seen = torch.kron(BLOCKS.to(torch.uint8), torch.ones(4, 4, dtype=torch.uint8)).bool()
    theirs = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
    close((reference.attention(q, k, v, block_mask=BLOCKS, block_size=4)[0],), (theirs.transpose(1, 2),))


def test_a_sink_is_a_key_with_this_score_and_the_value_0() -> None:
    q, k, v, _, _ = tensors(6, 6, 2, 2)
    sink = torch.tensor([0.5, -1.0], dtype=torch.float64)
    keys, values = (torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 1)) for x in (k, v))
    bias = torch.nn.functional.pad(torch.zeros(1, 2, 6, 6, dtype=torch.float64), (0, 1))
    bias[..., -1] = sink[:, None]
    theirs = scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=bias)
    close((reference.attention(q, k, v, learnable_sink=sink)[0],), (theirs.transpose(1, 2),))


def test_dropout_is_fair_and_leaves_lse() -> None:
    q, k, v, _, _ = tensors(64, 64)
    at = torch.arange(64)
    factors = kept((2, 2, 64, 64), at, at, {"dropout_p": 0.25, "dropout_seed": 7})
    assert factors is not None
    count = factors.numel()
    dropped = int((factors == 0).sum())
    assert abs(dropped - count / 4) < 5 * math.sqrt(count * 3 / 16)  # five deviations of a binomial
    assert factors[factors > 0].unique().tolist() == [1 / 0.75]
    _, lse = reference.attention(q, k, v)
    assert torch.equal(reference.attention(q, k, v, dropout_p=0.25, dropout_seed=7)[1], lse)


def test_dropout_is_another_for_every_seed_head_and_batch_row() -> None:
    at = torch.arange(16)
    seeds = 0, 1, 1 << 32, (1 << 64) - 1  # words of the key that differ in either half
    found = [kept((2, 2, 16, 16), at, at, {"dropout_p": 0.5, "dropout_seed": seed}) for seed in seeds]
    masks = [mask for factors in found if factors is not None for row in factors for mask in row]
    assert len(masks) == 16
    assert not any(one.equal(other) for i, one in enumerate(masks) for other in masks[:i])


def test_dropout_follows_the_positions() -> None:
    at, some = torch.arange(16), torch.tensor([11, 3, 4])
    options: Any = {"dropout_p": 0.5, "dropout_seed": 3}
    whole, part = kept((1, 2, 16, 16), at, at, options), kept((1, 2, 3, 16), some, at, options)
    assert whole is not None and part is not None
    assert part.equal(whole[:, :, some])


def test_dropout_of_nearly_all() -> None:
    at = torch.arange(8)
    options: Any = {"dropout_p": 1 - 2**-40, "dropout_seed": 3}
    factors = kept((1, 1, 8, 8), at, at, options)  # the threshold is still a word of 32 bits
    assert factors is not None
    assert factors.count_nonzero() == 0


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_of_features_are_those_of_finite_differences(name: str) -> None:
    q, k, v, _, _ = tensors(4, 5)
    at: dict[str, Any] = {"q_positions": torch.tensor([3, 6, 10, 1]), "k_positions": torch.tensor([6, 0, 4, 9, 3])}
    call = dict(FEATURES[name])
    sink = call.pop("learnable_sink", torch.tensor([-torch.inf, -torch.inf])).to(torch.float64)

    def finite(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.attention(leaves[0], leaves[1], leaves[2], learnable_sink=sink, **at, **call)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(finite, [x.requires_grad_() for x in (q, k, v)])


def test_the_gradient_of_a_sink_is_that_of_finite_differences() -> None:
    q, k, v, _, _ = tensors(4, 4)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    call: Any = {"causal": True, "dropout_p": 0.3, "dropout_seed": 5, "softcap": 2.0}
    assert torch.autograd.gradcheck(lambda x: reference.attention(q, k, v, learnable_sink=x, **call), [sink])


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("block_q", "block_k"), [(1, 1), (3, 2), (16, 16)])
def test_blockwise_is_dense_with_every_feature(name: str, block_q: int, block_k: int) -> None:
    q, k, v, dout, dlse = tensors(7, 10)
    at: dict[str, Any] = {"q_positions": torch.randperm(TOKENS)[:7], "k_positions": torch.randperm(TOKENS)[:10]}
    call, tiles = dict(FEATURES[name]), dict[str, Any](block_q=block_q, block_k=block_k)
    out, lse = reference.blockwise.forward(q, k, v, **at, **call, **tiles)
    sink = call.pop("learnable_sink", None)
    truth = exact(q, k, v, dout, dlse, learnable_sink=sink, **at, **call)
    grads = reference.blockwise.backward(dout, q, k, v, out, lse, dlse=dlse, **at, **call, **tiles)
    close((out, lse, *grads), truth)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ring_is_dense_with_every_feature(world: int, name: str) -> None:
    q, k, v, dout, dlse = tensors(TOKENS, TOKENS, 2, 1)
    owners = torch.randint(world, (TOKENS,))
    where = [(owners == rank).nonzero().squeeze(-1) for rank in range(world)]
    qs, ks, vs, douts = (split(x, owners, world) for x in (q, k, v, dout))
    dlses, call = [dlse[:, :, owners == rank] for rank in range(world)], dict(FEATURES[name])
    outs, lses = reference.ring.forward(qs, ks, vs, q_positions=where, **call)
    sink = call.pop("learnable_sink", None)
    grads = reference.ring.backward(douts, qs, ks, vs, outs, lses, q_positions=where, dlse=dlses, **call)
    ours = (gather(outs, owners, 1), gather(lses, owners, 2), *(gather(x, owners, 1) for x in grads))
    close(ours, exact(q, k, v, dout, dlse, learnable_sink=sink, **call))


def test_what_depends_on_positions_needs_them() -> None:
    q, k, v, _, _ = tensors(3, 4)
    late: list[dict[str, Any]] = [
        {"alibi_slopes": torch.ones(2)},
        {"dropout_p": 0.5, "dropout_seed": 1},
        {"seqused_k": [3, 4]},
    ]
    for call in late:
        with pytest.raises(ValueError, match="q has 3 tokens, k has 4"):
            reference.attention(q, k, v, **call)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.5 without dropout_seed"):
        reference.attention(q, k[:, :3], v[:, :3], dropout_p=0.5)
