"""The reference against PyTorch in float64, and against loops over pairs for masks and scores."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import reference
from ringattn.reference import fp8
from ringattn.reference.philox import counter_words, philox

from ..support.baselines import Results, exact, pytorch


def tensors(
    seqlen_q: int, seqlen_k: int, heads: int = 2, kv_heads: int = 1, dim: int = 5, dim_v: int = 3
) -> list[Tensor]:
    """Return q, k, v, dout and dlse in float64 with batch size 2."""
    shapes = [(seqlen_q, heads, dim), (seqlen_k, kv_heads, dim), (seqlen_k, kv_heads, dim_v), (seqlen_q, heads, dim_v)]
    made = [torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
    return [*made, torch.randn(2, heads, seqlen_q, dtype=torch.float64)]


def close(ours: Results | tuple[Tensor, ...], theirs: Results | tuple[Tensor, ...]) -> None:
    """Compare up to float64 rounding: about 1e3 operations of 1e-16 on numbers around 1."""
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("causal", "heads", "kv_heads", "softmax_scale"), [(False, 2, 2, None), (True, 4, 2, 0.3), (True, 3, 1, None)]
)
def test_dense_attention_equals_pytorch(causal: bool, heads: int, kv_heads: int, softmax_scale: float | None) -> None:
    q, k, v, dout, dlse = tensors(9, 9, heads, kv_heads)
    visible = torch.ones(9, 9).tril().bool() if causal else None
    theirs = pytorch(q, k, v, dout, dlse, visible=visible, softmax_scale=softmax_scale)
    close(exact(q, k, v, dout, dlse, causal=causal, softmax_scale=softmax_scale), theirs)


def test_rows_without_visible_keys() -> None:
    q, k, v, dout, dlse = tensors(4, 4)
    where: dict[str, Any] = {"q_positions": torch.tensor([0, 1, 5, 9]), "k_positions": torch.tensor([2, 4, 6, 8])}
    ours = exact(q, k, v, dout, dlse, causal=True, **where)
    assert ours.out[:, :2].count_nonzero() == ours.dq[:, :2].count_nonzero() == 0
    assert (ours.lse[:, :, :2] == -torch.inf).all()
    assert all(x.isfinite().all() for x in (ours.out, ours.lse[:, :, 2:], *ours[2:]))
    close(ours, pytorch(q, k, v, dout, dlse, visible=reference.visible(*where.values(), causal=True)))


def test_large_scores_do_not_overflow() -> None:
    q, k, v, _, _ = tensors(6, 6)
    assert all(x.isfinite().all() for x in reference.attention(q * 1e6, k, v, causal=True))


SHAPES: list[tuple[list[tuple[int, ...]], str]] = [
    ([(2, 3, 4), (2, 3, 1, 4), (2, 3, 1, 4)], r"q has shape \[2, 3, 4\]"),
    ([(2, 3, 1, 4), (2, 3, 1, 4), (2, 3, 4)], r"v has shape \[2, 3, 4\]"),
    ([(2, 3, 3, 4), (2, 3, 0, 4), (2, 3, 0, 4)], "k has 0 heads and q has 3"),
    ([(2, 3, 3, 4), (2, 3, 2, 4), (2, 3, 2, 4)], "k has 2 heads and q has 3"),
    ([(1, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)], "batch and head dim"),
    ([(2, 3, 2, 4), (2, 3, 2, 5), (2, 3, 2, 4)], "batch and head dim"),
    ([(2, 3, 2, 4), (2, 3, 2, 4), (2, 4, 2, 4)], "all but the head dim"),
    ([(2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 1, 4)], "all but the head dim"),
]
AT = torch.arange(4)
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"causal": True}, "q has 3 tokens and k has 4"),
    ({"alibi_slopes": torch.ones(2)}, "q has 3 tokens and k has 4"),
    ({"dropout_p": 0.5, "dropout_seed": 1}, "q has 3 tokens and k has 4"),
    ({"causal": True, "q_positions": AT[:3]}, "both, or neither"),
    ({"causal": True, "q_positions": AT, "k_positions": AT}, "q_positions has shape"),
    ({"dropout_p": 0.5, "q_positions": AT[:3], "k_positions": AT}, r"dropout_p is 0\.5 without dropout_seed"),
]


def test_refusals() -> None:
    for shapes, message in SHAPES:
        with pytest.raises(ValueError, match=message):
            reference.attention(*(torch.zeros(shape) for shape in shapes))
    q, k, v, _, _ = tensors(3, 4)
    for call, message in CALLS:
        with pytest.raises(ValueError, match=message):
            reference.attention(q, k, v, **call)
    unmasked = [reference.attention(q, k, v, q_positions=at)[0] for at in (None, AT[:3])]  # nothing depends on them
    assert torch.equal(*unmasked)


TOKENS = 12
BLOCKS = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (4, 2)},
    "window to the left": {"window_size": (3, -1)},
    "window to the right": {"window_size": (-1, 2)},
    "prefix": {"causal": True, "prefix_length": 5},
    "islands": {"causal": True, "islands": [(1, 4), (6, 11)]},
    "intervals": {
        "intervals": [(torch.arange(12) // 3, torch.arange(12) // 2), (torch.arange(12), torch.arange(12) + 1)]
    },
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

FEATURES |= {
    "window without causal": {"window_size": (3, 2), "islands": [(1, 9)], "prefix_length": 9},
    "padding on the left": {"leftpad_k": [2, 0]},
    "keys that are there": {"key_mask": torch.arange(2 * TOKENS).view(2, TOKENS) % 3 > 0},
    "documents by batch row": {"cu_seqlens": [[0, 5, TOKENS], [0, 2, 9, TOKENS]]},
    "dropout of later heads": FEATURES["dropout"] | {"first_head": 3},
}

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = {
    ((0,) * 4, (0,) * 2): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    PI: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}
"""Answers of philox4x32 with 10 rounds, from Random123's ``kat_vectors``."""


def test_philox_gives_the_known_answers() -> None:
    for (counter, key), expected in KNOWN_ANSWERS.items():
        assert tuple(int(word) for word in philox(counter_words(*counter), key)) == expected
        assert by_hand(list(counter), list(key)) == list(expected)


def by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Compute Philox4x32-10 with Python's unbounded integers."""
    for number in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        low, high = ((word + number * step) % 2**32 for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        counter = [b // 2**32 ^ counter[1] ^ low, b % 2**32, a // 2**32 ^ counter[3] ^ high, a % 2**32]
    return counter


def test_rounding_errors_and_special_blocks_of_fp8() -> None:
    """The largest error is half of the step between two codes. Blocks without a finite value have a scale, too."""
    values = [fp8.decode_code(code) for code in range(fp8.NAN_CODE)]
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    errors = [(high - low) / 2 for low, high in pairwise(values)]
    assert fp8.max_rounding_error(torch.tensor(middles)).tolist() == errors
    x = torch.tensor([[0.0, torch.inf], [torch.nan, -torch.inf], [2.0**-140, 0.0]])[None, :, None]
    codes, scales = fp8.quantize_blocks(x, 1)
    assert codes.tolist() == [[[[0, 0x7F]], [[0x7F, 0x7F]], [[0, 0]]]]
    assert scales.flatten().tolist() == [2.0**-126] * 3


def sees(call: dict[str, Any], row: int, p: int, key: int) -> bool:
    """Return whether a query sees a key, from the definition of each mask."""
    together = any(begin <= min(p, key) and max(p, key) < end for begin, end in call.get("islands", ()))
    if call.get("causal") and key > p and key >= call.get("prefix_length", 0) and not together:
        return False
    if "intervals" in call and not any(lo[p] <= key < hi[p] for lo, hi in call["intervals"]):
        return False
    left, right = (math.inf if side < 0 else side for side in call.get("window_size", (-1, -1)))
    whole = any(start <= x < end for start, end in call.get("global_tokens", ()) for x in (p, key))
    if not (-left <= key - p <= right or whole):
        return False
    edges = call.get("cu_seqlens", [0, TOKENS])
    edges = edges[row] if isinstance(edges[0], list) else edges
    if not any(a <= min(p, key) and max(p, key) < b for a, b in pairwise(edges)):
        return False
    if key < call.get("leftpad_k", [0, 0])[row] or ("key_mask" in call and not call["key_mask"][row, key]):
        return False
    if "seqused_k" in call and key >= call["seqused_k"][row]:
        return False
    return "block_mask" not in call or bool(call["block_mask"][p // call["block_size"]][key // call["block_size"]])


def score(call: dict[str, Any], row: int, head: int, p: int, key: int, product: float) -> float:
    """Return the score of one pair, from ``scale * q k^T``."""
    if "softcap" in call:
        product = call["softcap"] * math.tanh(product / call["softcap"])
    slopes = call.get("alibi_slopes", torch.zeros(head + 1))
    slope = float(slopes[head] if slopes.dim() == 1 else slopes[row, head])
    return product - slope * abs(p - key)


def factor(call: dict[str, Any], row: int, head: int, p: int, key: int) -> float:
    """Return the factor by which dropout multiplies one weight."""
    share, seed = call.get("dropout_p", 0.0), call.get("dropout_seed", 0)
    word = by_hand([p, key, call.get("first_head", 0) + head, row], [seed % 2**32, seed // 2**32])[0]
    return 0.0 if word < round(share * 2**32) else 1 / (1 - share)


def one_row(
    call: dict[str, Any], row: int, head: int, p: int, query: Tensor, keys: dict[int, tuple[Tensor, Tensor]]
) -> tuple[Tensor, float]:
    """Return out and lse of one query, with keys and values by position."""
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
    masks = {key: value for key, value in FEATURES[name].items() if key in reference.masks.MaskOptions.__annotations__}
    visible = reference.visible(at["q_positions"], at["k_positions"], **masks)
    expected_pairs = [
        [sees(masks, 1, p, key) for key in at["k_positions"].tolist()] for p in at["q_positions"].tolist()
    ]
    assert (visible[1] if visible.dim() == 3 else visible).tolist() == expected_pairs


@pytest.mark.parametrize("name", ["all", "longformer", "sink"])
def test_gradients_equal_finite_differences(name: str) -> None:
    q, k, v, _, _ = tensors(4, 5)
    at: dict[str, Any] = {"q_positions": torch.tensor([3, 6, 10, 1]), "k_positions": torch.tensor([6, 0, 4, 9, 3])}
    call = {**FEATURES[name], "learnable_sink": torch.randn(2, dtype=torch.float64)}

    def finite(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(leaves[0], leaves[1], leaves[2], **at, **call | {"learnable_sink": leaves[3]})

    assert torch.autograd.gradcheck(finite, [x.requires_grad_() for x in (q, k, v, call["learnable_sink"])])
