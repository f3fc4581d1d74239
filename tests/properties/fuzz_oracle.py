"""Attention and its gradients once more, head by head, in float64: what the reference itself is held against."""

from __future__ import annotations

from bisect import bisect_right
from itertools import product
from typing import Any

import numpy as np

from ringattn.ring.schedule.mask import BlockMask, Longformer

from ..support.baselines import Results
from ..support.mask_cases import Case, held

MOST_PAIRS = 20_000  # of query and key, over heads and batch rows: each takes some microseconds


def check_reference(case: Case, truth: Results) -> None:
    """The reference's results are the textbook's, up to the rounding of float64; of small cases without a wire."""
    batch, _, heads, _ = case.whole["q"].shape
    if batch * heads * case.layout.seqlen * case.keys.seqlen > MOST_PAIRS or "wire_dtype" in case.ring:
        return
    for name, ours, theirs in zip(Results._fields, attention(case), truth, strict=True):
        assert np.allclose(ours, theirs.numpy(), rtol=1e-9, atol=1e-9), f"the reference's {name} is not the textbook's"


def attention(case: Case) -> list[Any]:
    """Out, lse, dq, dk, dv: Vaswani et al. 2017, equation 1, with what the reference names too; its derivative."""
    rows, columns = held(case.layout).numpy(), held(case.keys).numpy()
    x = {name: whole.double().numpy() for name, whole in case.whole.items()}
    q, dout, dlse = x["q"][:, rows], x["dout"][:, rows], x["dlse"][:, :, rows] * case.through_lse
    k, v = x["k"][:, columns], x["v"][:, columns]
    made = out, lse, dq, dk, dv = [np.zeros(like.shape) for like in (dout, dlse, q, k, v)]
    call, heads, group = case.call, q.shape[2], q.shape[2] // k.shape[2]
    shown = [table(rows, columns, lambda i, j, row=b: sees(call, row, i, j)) > 0 for b in range(len(q))]
    scale, cap = call.get("softmax_scale", q.shape[3] ** -0.5), call.get("softcap") or np.inf
    slopes = (
        np.zeros((1, heads)) if call.get("alibi_slopes") is None else call["alibi_slopes"].numpy().reshape(-1, heads)
    )
    far = np.abs(rows[:, None] - columns[None, :])
    for b, h in product(range(len(q)), range(heads)):
        g, seen = h // group, shown[b]
        score = scale * q[b, :, h] @ k[b, :, g].T
        bent = np.tanh(score / cap)
        score = (score if cap == np.inf else cap * bent) - slopes[b % len(slopes), h].astype(float) * far
        sink = -np.inf if case.sink is None else float(case.sink[h])
        top = np.maximum(np.where(seen, score, -np.inf).max(1, initial=sink), -1e300)[:, None]
        weight = np.where(seen, np.exp(np.minimum(score - top, 0)), 0)
        total = weight.sum(1, keepdims=True) + np.exp(sink - top)
        weight /= np.where(total == 0, 1, total)
        factor = np.ones(far.shape)
        if share := call.get("dropout_p", 0.0):
            words = table(rows, columns, lambda i, j, at=(h, b): textbook(call["dropout_seed"], [i, j, *at]))
            factor = (words >= round(share * 2**32)) / (1 - share)
        with np.errstate(divide="ignore"):
            lse[b, h] = np.where(total == 0, -np.inf, np.log(total) + top)[:, 0]
        out[b, :, h] = weight * factor @ v[b, :, g]
        dweight = dout[b, :, h] @ v[b, :, g].T * factor
        delta = (weight * dweight).sum(1) - dlse[b, h]
        dscore = scale * weight * (dweight - delta[:, None]) * (1 - bent**2)
        dq[b, :, h] = dscore @ k[b, :, g]
        dk[b, :, g] += dscore.T @ q[b, :, h]
        dv[b, :, g] += (weight * factor).T @ dout[b, :, h]
    return made


def textbook(seed: int, counter: list[int]) -> int:
    """Philox4x32-10, Salmon et al., SC 2011, section 3.3, with Python's integers."""
    key, word = [seed % 2**32, seed >> 32], 2**32
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b // word ^ counter[1] ^ key[0], b % word, a // word ^ counter[3] ^ key[1], a % word]
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return counter[0]


def table(rows: Any, columns: Any, entry: Any) -> Any:
    entries = [entry(i, j) for i, j in product(rows.tolist(), columns.tolist())]
    return np.array(entries, float).reshape(len(rows), len(columns))


def sees(call: dict[str, Any], row: int, query: int, key: int) -> bool:
    """Whether every mask of a call shows a key to a query."""
    pattern, used = call.get("block_mask"), call.get("seqused_k")
    cuts = None if call.get("cu_seqlens") is None else [int(cut) for cut in call["cu_seqlens"]]
    left, right = call.get("window_size", (-1, -1))
    shown = False
    if isinstance(pattern, Longformer):
        left, right = pattern.window
        shown = any(start <= one < end for start, end in pattern.global_tokens for one in (query, key))
    blocks = pattern if isinstance(pattern, BlockMask) else None
    return (
        (not call["causal"] or key <= query or key < call.get("prefix_length", 0))
        and (shown or ((left < 0 or key >= query - left) and (right < 0 or key <= query + right)))
        and (cuts is None or bisect_right(cuts, query) == bisect_right(cuts, key))
        and (used is None or key < int(used[row]))
        and (blocks is None or bool(blocks.visible[query // blocks.block, key // blocks.block]))
    )
