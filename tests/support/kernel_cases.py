"""Inputs, mask intervals of every kind and reference results for the kernel tests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import reference
from ringattn.kernels import (
    FULL,
    Bounds,
    KernelConfig,
    Scores,
    Tile,
    attention_backward,
    attention_dkdv,
    attention_dq,
    attention_forward,
)
from ringattn.reference.masks import add_head_dim

from . import baselines
from .baselines import PLAIN, ReferenceModifiers, Results
from .tolerance import assert_as_exact_as_pytorch

DEVICE: torch.device  # device of the kernels; `TRITON_INTERPRET=0 pytest tests/kernels` selects a GPU

DTYPES: tuple[torch.dtype, ...]  # dtypes to test; the interpreter cannot compute bfloat16


def __getattr__(name: str) -> Any:
    """Compute DEVICE and DTYPES lazily, because a look for a GPU would keep forked processes from using it."""
    if name not in ("DEVICE", "DTYPES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    device = torch.device("cuda" if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] == "0" else "cpu")
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if device.type == "cuda" else ()))
    return device if name == "DEVICE" else dtypes


@dataclass(frozen=True)
class Sizes:
    """Lengths that need two tiles of the interpreter's default size, the second one partial."""

    queries: int = 40
    keys: int = 40
    head_dim: int = 16
    head_dim_v: int | None = None
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def inputs(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return normal random tensors of these sizes in ``dtype``; ``dlse`` is fp32."""
    s, head_dim_v = sizes, sizes.head_dim_v or sizes.head_dim
    return Inputs(
        torch.randn(s.batch, s.queries, s.heads, s.head_dim).to(dtype),
        torch.randn(s.batch, s.keys, s.kv_heads, s.head_dim).to(dtype),
        torch.randn(s.batch, s.keys, s.kv_heads, head_dim_v).to(dtype),
        torch.randn(s.batch, s.queries, s.heads, head_dim_v).to(dtype),
        torch.randn(s.batch, s.heads, s.queries),
    )


def bounds_from(lo: Tensor, hi: Tensor, keys: int) -> Bounds:
    """Return ``Bounds`` with both vectors clamped to ``[0, keys]``."""
    return Bounds(lo.clamp(0, keys).to(torch.int32), hi.clamp(0, keys).to(torch.int32))


def cycle_values(cases: Iterable[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return each case once, with cycling values of ``others``, so that every value occurs at least once."""
    rows = []
    for i, case in enumerate(cases):
        row = list(case) if isinstance(case, tuple) else [case]
        for other in others:
            row.append(other[i % len(other)])
            i //= len(other)
        rows.append(tuple(row))
    return rows


def documents(lengths: list[tuple[int, int]]) -> Bounds:
    """Return bounds for documents of (queries, keys); a document without keys has rows that see nothing."""
    queries, keys = (torch.tensor(x) for x in zip(*lengths, strict=True))
    hi = keys.cumsum(0)
    return bounds_from((hi - keys).repeat_interleave(queries), hi.repeat_interleave(queries), int(hi[-1]))


def _intervals(queries: int, keys: int) -> dict[str, Bounds]:
    row, zero = torch.arange(queries), torch.zeros(queries, dtype=torch.int64)
    third, rest = (queries // 3, keys // 3), (queries - 2 * (queries // 3), keys - 2 * (keys // 3))
    return {
        "full": FULL,
        "causal": bounds_from(zero, row + 1, keys),
        "window": bounds_from(row - 9, row + 4, keys),
        "forward window": bounds_from(row + 2, row + 15, keys),  # the last rows' windows begin past the end
        "prefix": bounds_from(zero, (row + 1).clamp(min=keys // 2), keys),
        "documents": documents([third, rest, third]),
        "first rows blind": bounds_from(zero, row - queries // 2, keys),
        "middle rows blind": documents([(third[0], keys // 2), (third[0], 0), (rest[0], keys - keys // 2)]),
        "last rows blind": documents([(queries // 2, keys), (queries - queries // 2, 0)]),
        "all rows blind": bounds_from(zero, zero, keys),
    }


KINDS = tuple(_intervals(6, 6))


def interval(kind: str, queries: int, keys: int) -> Bounds:
    """Return bounds of one of ``KINDS``, such as causal or window, for these lengths."""
    return _intervals(queries, keys)[kind]


def narrow_keys(bounds: Bounds, begin: int, end: int) -> Bounds:
    """Return ``bounds`` restricted to the keys ``[begin, end)``."""
    if bounds.lo is None or bounds.hi is None:
        return bounds
    return bounds_from(bounds.lo - begin, bounds.hi - begin, end - begin)


def narrow_queries(bounds: Bounds, begin: int, end: int) -> Bounds:
    """Return ``bounds`` restricted to the queries ``[begin, end)``."""
    if bounds.lo is None or bounds.hi is None:
        return bounds
    return Bounds(bounds.lo[begin:end], bounds.hi[begin:end])


def row_ends(bounds: Bounds, queries: int, keys: int) -> list[tuple[int, int]]:
    """Return the interval ``(lo, hi)`` of visible keys of every query row."""
    if bounds.lo is None or bounds.hi is None:
        return [(0, keys)] * queries
    return list(zip(bounds.lo.tolist(), bounds.hi.tolist(), strict=True))


def dense_mask(bounds: Bounds, queries: int, keys: int) -> Tensor:
    """Return the intervals as a bool mask ``[queries, keys]``."""
    pairs = [[lo <= key < hi for key in range(keys)] for lo, hi in row_ends(bounds, queries, keys)]
    return torch.tensor(pairs, dtype=torch.bool).reshape(queries, keys)


def visible(bounds: Bounds, batch: int, queries: int, keys: int) -> Tensor:
    """Return the full mask ``[B, 1, queries, keys]`` with used lengths and block sparsity applied."""
    pairs = dense_mask(bounds, queries, keys).expand(batch, 1, queries, keys).clone()
    if bounds.seqused_k is not None:
        pairs &= torch.arange(keys) < bounds.seqused_k[:, None, None, None]
    if bounds.block_sparse is not None:
        rows, columns = (torch.arange(count) // bounds.block_sparse.block for count in (queries, keys))
        pairs &= bounds.block_sparse.visible[rows][:, columns]
    return pairs


def exact(x: Inputs, bounds: Bounds = FULL, softmax_scale: float | None = None) -> Results:
    """Return the float64 reference, computed for each query on the keys of its interval only."""
    q, k, v = leaves = [t.detach().to(torch.float64).requires_grad_() for t in (x.q, x.k, x.v)]
    parts, begin = [], 0
    for (lo, hi), rows in groupby(row_ends(bounds, q.shape[1], k.shape[1])):
        end = begin + len(list(rows))
        parts.append(reference.attention(q[:, begin:end], k[:, lo:hi], v[:, lo:hi], softmax_scale=softmax_scale))
        begin = end
    parts = parts or [reference.attention(q, k, v, softmax_scale=softmax_scale)]  # there are no rows
    out, lse = torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)
    gradients = torch.autograd.grad((out, lse), leaves, (x.dout.to(torch.float64), x.dlse.to(torch.float64)))
    return Results(out.detach(), lse.detach(), *gradients)


def pytorch(x: Inputs, bounds: Bounds = FULL, softmax_scale: float | None = None) -> Results:
    """Return PyTorch's attention, or zeros if no key is visible: its CPU kernel does not support zero keys."""
    pairs = dense_mask(bounds, x.q.shape[1], x.k.shape[1])
    if pairs.any():
        return baselines.pytorch(*x, visible=pairs, softmax_scale=softmax_scale)
    lse = torch.full_like(x.dlse, -torch.inf)
    return Results(torch.zeros_like(x.dout), lse, *(torch.zeros_like(t) for t in (x.q, x.k, x.v)))


def ours(
    x: Inputs, bounds: Bounds = FULL, softmax_scale: float | None = None, config: KernelConfig | None = None,
    scores: Scores | None = None,
) -> Results:  # fmt: skip
    """Run our forward and backward on the GPU or in the interpreter, and return the results on the CPU."""
    device = __getattr__("DEVICE")
    q, k, v, dout, dlse = (t.to(device) for t in x)
    scores = scores or Scores()
    moved_scores: dict[str, Any] = {name: t.to(device) for name, t in vars(scores).items() if isinstance(t, Tensor)}
    call: dict[str, Any] = {"softmax_scale": softmax_scale, "config": config, "scores": replace(scores, **moved_scores)}
    call["bounds"] = bounds.to(device)
    out, lse = attention_forward(q, k, v, **call)
    return Results(*(t.cpu() for t in (out, lse, *attention_backward(dout, q, k, v, out, lse, dlse=dlse, **call))))


def magnitudes(
    x: Inputs, truth: Results, pairs: Tensor, softmax_scale: float | None = None, *, few_keys: bool = False,
    modified: ReferenceModifiers = PLAIN,
) -> dict[str, float]:  # fmt: skip
    """Return the largest sum of absolute terms behind an entry of ``out`` and of each gradient.

    Rounding errors are relative to these sums. The terms cancel (``dS = P * (dP - delta)`` has either sign), and each
    term is rounded before the sum: once in the dtype, and once in fp32 in the exponent of P. The error in the exponent
    is relative to its own terms: score, bias and ``lse``. The derivative of a softcap, ``1 - tanh^2``, has an error
    relative to 1. Relative to the cancelled result, the largest error of a small sample would be a matter of luck, for
    PyTorch too.

    With ``few_keys``, rows see only one or two keys. Then ``dP`` and ``delta`` are nearly equal, and ``lse`` is nearly
    a score, which is itself a sum of products. Rounding is relative to the terms of all of these.
    """
    q, k, v, dout, out = (t.to(torch.float64).transpose(1, 2) for t in (*x[:4], truth.out))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores, lse = q @ k.mT * scale, truth.lse.unsqueeze(-1)
    exponent = torch.finfo(torch.float32).eps / torch.finfo(x.q.dtype).eps
    derivative = torch.ones(())
    if modified.softcap:
        tanh = torch.tanh(scores / modified.softcap)
        scores, derivative = modified.softcap * tanh, 1 - tanh**2 + exponent
    bias = torch.zeros(()) if modified.bias is None else modified.bias
    factors = torch.ones(()) if modified.factors is None else modified.factors
    p = (scores + bias - lse).exp().masked_fill(~add_head_dim(pairs), 0.0)
    size = lse.abs().nan_to_num(posinf=0.0)
    sizes = (q.abs() @ k.abs().mT * scale if few_keys else scores.abs()) + bias.abs() + size
    p *= 1 + exponent * sizes
    dp, delta, dlse = dout @ v.mT, (dout * out).sum(-1, keepdim=True), x.dlse.unsqueeze(-1)
    if few_keys:
        dp, delta = dout.abs() @ v.abs().mT, -(dout * out).abs().sum(-1, keepdim=True)
        dlse = dlse.abs()
    ds = scale * derivative * (p * (dp * factors - delta + dlse)).abs()
    p = p * factors
    terms = {"out": p @ v.abs(), "dq": ds @ k.abs(), "dk": ds.mT @ q.abs(), "dv": p.mT @ dout.abs()}
    terms |= {name: terms[name].unflatten(1, (-1, group)).sum(2) for name in ("dk", "dv")}
    if few_keys:
        terms["lse"] = torch.cat([sizes.masked_fill(~add_head_dim(pairs), 0.0), size], -1)
    return {name: sums.max().item() for name, sums in terms.items() if sums.numel()}


def compare(
    made: Results, x: Inputs, bounds: Bounds = FULL, softmax_scale: float | None = None, *, few_keys: bool = False
) -> None:
    """Check that results ``made`` of our kernels are as exact as PyTorch's attention in the same dtype."""
    truth, baseline = exact(x, bounds, softmax_scale), pytorch(x, bounds, softmax_scale)
    sizes = magnitudes(x, truth, dense_mask(bounds, x.q.shape[1], x.k.shape[1]), softmax_scale, few_keys=few_keys)
    for name, *results in zip(Results._fields, made, baseline, truth, strict=True):
        assert_as_exact_as_pytorch(name, *results, magnitude=sizes.get(name))


def check(
    x: Inputs, bounds: Bounds = FULL, softmax_scale: float | None = None, config: KernelConfig | None = None, *,
    few_keys: bool = False,
) -> None:  # fmt: skip
    """Run forward and backward once and compare both; set ``few_keys`` if rows see only one or two keys."""
    results = ours(x, bounds, softmax_scale, config)
    assert [results.out.dtype, results.lse.dtype, results.dq.dtype] == [x.q.dtype, torch.float32, x.q.dtype]
    compare(results, x, bounds, softmax_scale, few_keys=few_keys)


def tiles(block_q: int, block_k: int) -> KernelConfig:
    tile = Tile(block_q, block_k, 4, 1)
    return KernelConfig(tile, tile, tile)


def forward_hops(
    x: Inputs, bounds: Bounds, cuts: Sequence[int], *, final: bool = True, config: KernelConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward over key shards with carried state, which every later launch updates in place."""
    state: tuple[Tensor, Tensor] | None = None
    q, k, v = (t.to(__getattr__("DEVICE")) for t in x[:3])
    for number, (begin, end) in enumerate(pairwise(cuts), 2):
        last, shard_bounds = final and number == len(cuts), narrow_keys(bounds, begin, end).to(q.device)
        out, lse = attention_forward(
            q, k[:, begin:end], v[:, begin:end], bounds=shard_bounds, state=state, final=last, config=config
        )
        assert out.dtype == (x.q.dtype if last else torch.float32)
        if state is not None:
            assert lse is state[1]
            assert (out is state[0]) == (out.dtype == torch.float32)
        state = out, lse
    assert state is not None
    return state


def dkdv_of_shards(
    x: Inputs, bounds: Bounds, cuts: Sequence[int], lse: Tensor, delta: Tensor, config: KernelConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Compute dK and dV over query shards, with fp32 sums updated in place until the last shard."""
    sums: tuple[Tensor, Tensor] | None = None
    for begin, end in pairwise(cuts):
        rows, final_tensors = slice(begin, end), (torch.empty_like(x.k), torch.empty_like(x.v))
        into = final_tensors if end == cuts[-1] else sums or (final_tensors[0].float(), final_tensors[1].float())
        sums = attention_dkdv(
            x.dout[:, rows], x.q[:, rows], x.k, x.v, lse[:, :, rows].contiguous(), delta[:, :, rows].contiguous(),
            bounds=narrow_queries(bounds, begin, end), accum=sums, out=into, config=config,
        )  # fmt: skip
        assert sums[0] is into[0] and sums[1] is into[1]
    assert sums is not None
    return sums


def dq_of_shards(
    x: Inputs, bounds: Bounds, cuts: Sequence[int], lse: Tensor, delta: Tensor, config: KernelConfig | None = None
) -> Tensor:
    """Compute dQ over key shards, with an fp32 sum updated in place until the last shard."""
    dq: Tensor | None = None
    for begin, end in pairwise(cuts):
        into = torch.empty_like(x.q) if end == cuts[-1] else dq if dq is not None else torch.empty_like(x.q).float()
        made = attention_dq(
            x.dout, x.q, x.k[:, begin:end], x.v[:, begin:end], lse, delta,
            bounds=narrow_keys(bounds, begin, end).to(x.q.device), accum=dq, out=into, config=config,
        )  # fmt: skip
        assert made is into
        dq = made
    assert dq is not None
    return dq
