"""Inputs, the plain formula, and one rank's call of a target. Reproductions contain this file, so it needs only torch.

A ``call`` has the attributes of ``TargetCall``, and ``whole`` has q, k, v, dout and dlse of the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

OUTPUTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv", "dsink")
Results = dict[str, Tensor]


class MisuseError(Exception):
    """Raised if a target does not return what the protocol asks for."""


def draw_whole(call: Any, seed: int) -> Results:
    """Return random q, k, v, dout and dlse of the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    heads = {"q": call.heads, "k": call.kv_heads, "v": call.kv_heads, "dout": call.heads}
    shapes = {name: (call.batch, call.tokens, count, call.head_dim) for name, count in heads.items()}
    whole = {name: torch.randn(shape, generator=generator).to(call.dtype) for name, shape in shapes.items()}
    return whole | {"dlse": torch.randn(call.batch, call.heads, call.tokens, generator=generator)}


def default_positions(call: Any) -> Tensor:
    """Return the positions of the tokens of ``call.rank`` in ``call.layout``."""
    whole = torch.arange(call.tokens)
    if call.layout == "striped":
        return whole[call.rank :: call.world]
    if call.layout == "zigzag":
        parts = whole.chunk(2 * call.world)
        return torch.cat([parts[call.rank], parts[2 * call.world - 1 - call.rank]])
    lengths: Any = uneven_lengths(call.world) if call.layout == "uneven" else call.tokens // call.world
    shard: Tensor = torch.split(whole, lengths)[call.rank]
    return shard


def uneven_lengths(world: int) -> list[int]:
    """Return the numbers of tokens of the ranks in the layout ``uneven``."""
    return [16 - 5 * (rank % 3) for rank in range(world)]


def token_dim(name: str) -> int:
    """Return the dimension of the tokens: 2 in lse and dlse, else 1."""
    return 2 if "lse" in name else 1


def number_documents(call: Any) -> Tensor:
    """Return the number of the document of every token, from 1."""
    return torch.bucketize(torch.arange(call.tokens), torch.tensor(call.cu_seqlens or (0,)), right=True)


def visible_keys(call: Any) -> Tensor:
    """Return which key each query sees, ``[1 or B, S, S]``."""
    document, key = number_documents(call), torch.arange(call.tokens)
    query, (left, right) = key[:, None], call.window_size
    visible = (document[:, None] == document)[None]
    if call.causal:
        visible = visible & ((key <= query) | (key < call.prefix_length))
    if left >= 0:
        visible = visible & (key >= query - left)
    if right >= 0:
        visible = visible & (key <= query + right)
    if call.seqused_k is not None:
        visible = visible & (key < torch.tensor(call.seqused_k)[:, None, None])
    return visible


def attend_plainly(
    whole: Results, call: Any, *, dtype: torch.dtype = torch.float64, factors: Tensor | float = 1.0,
    heads: Tensor | None = None, keys: Tensor | None = None,
) -> Results:  # fmt: skip
    """Return out, lse, their gradients, the weights, and ``blind``, the rows that see no key, by the plain formula.

    Args:
        whole: q, k, v, dout and dlse.
        call: the mask and the scores.
        dtype: dtype of every product and of the weights; scores and their sum are at least float32.
        factors: dropout factors of the weights.
        heads: key/value head of every query head; default: in groups.
        keys: True for the keys that may be visible; default: all.
    """
    leaves = [whole[name].detach().to(dtype).requires_grad_() for name in "qkv"]
    leaves += [] if call.sink is None else [call.sink.detach().to(dtype).requires_grad_()]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    heads = torch.arange(call.heads) // (call.heads // call.kv_heads) if heads is None else heads
    visible = visible_keys(call)[:, None] if keys is None else visible_keys(call)[:, None] & keys
    wide = torch.promote_types(dtype, torch.float32)
    scores = (q @ k[:, heads].mT * (call.softmax_scale or call.head_dim**-0.5)).to(wide)
    scores = call.softcap * torch.tanh(scores / call.softcap) if call.softcap else scores
    if call.alibi_slopes is not None:
        at = torch.arange(call.tokens)
        scores = (scores - call.alibi_slopes.double()[:, None, None] * (at[:, None] - at).abs()).to(wide)
    scores = scores.masked_fill(~visible, -math.inf)
    if call.sink is not None:
        sink = leaves[3][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(wide)], -1)
    blind = (scores == -math.inf).all(-1)
    scores = scores.masked_fill(blind[..., None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind, -math.inf)
    weights = scores.softmax(-1)[..., : call.tokens].masked_fill(blind[..., None], 0.0).to(dtype)
    weights = weights * torch.as_tensor(factors, dtype=dtype)
    out = (weights @ v[:, heads]).transpose(1, 2)
    grads = whole["dout"].to(dtype), whole["dlse"].to(wide).masked_fill(blind, 0.0) * call.needs_lse
    results = {"out": out, "lse": lse, "weights": weights, "blind": blind}
    results |= zip(GRADIENTS, torch.autograd.grad((out, lse), leaves, grads), strict=False)
    return {name: x.detach() for name, x in results.items()}


def run_target(attend: Callable[..., Any], whole: Results, call: Any, device: Any = "cpu") -> tuple[Results, list[str]]:
    """Call a target with one rank's tokens; return its results with gradients, and notes on what it changed.

    Raises:
        MisuseError: If it does not return ``out``, or ``(out, lse)``, of the tokens at ``call.positions``.
    """
    needs_grad = "gradients" in call.features
    shards = {name: x.index_select(token_dim(name), call.positions).to(device) for name, x in whole.items()}
    leaves = [shards[name].requires_grad_(needs_grad) for name in "qkv"]
    leaves += [] if call.sink is None else [call.sink.requires_grad_(needs_grad)]
    before = [x.detach().clone() for x in leaves]
    returned = attend(*leaves[:3], call)
    parts = [*returned][:2] if isinstance(returned, Sequence) else [returned]
    if not parts or not all(isinstance(x, Tensor) for x in parts):
        raise MisuseError(f"attend returned {type(returned).__name__}: it must return out or (out, lse)")
    if call.needs_lse and len(parts) < 2:
        raise MisuseError("attend returned no lse, though call.needs_lse is True. Leave `lse` out of its features.")
    batch, tokens, heads, _ = leaves[0].shape
    for name, x, shape in zip(OUTPUTS, parts, ([batch, tokens, heads], [batch, heads, tokens]), strict=False):
        if [*x.shape[:3]] != shape:
            raise MisuseError(f"{name} has shape {[*x.shape]}: it must start with {shape}")
    notes = [f"it changed {name}" for name, x, old in zip("qkvs", leaves, before, strict=False) if not x.equal(old)]
    results = {name: x.detach().clone() for name, x in zip(OUTPUTS, parts, strict=False)}
    if needs_grad:
        outs = parts[: 1 + call.needs_lse]
        for name in [name for name, x in zip(OUTPUTS, outs, strict=False) if not x.requires_grad]:
            raise MisuseError(f"{name} has no gradient. Leave `lse` or `gradients` out of its features.")
        grads = [shards[name].to(x.dtype) for name, x in zip(("dout", "dlse"), outs, strict=False)]
        gradients = torch.autograd.grad(outs, leaves, grads, materialize_grads=True)
        is_changed = not all(x.allclose(y, 0, 0, equal_nan=True) for x, y in zip(results.values(), parts, strict=True))
        notes += ["the backward changed its output"] * is_changed
        results |= zip(GRADIENTS, gradients, strict=False)
    return {name: x.detach().cpu() for name, x in results.items()}, notes
