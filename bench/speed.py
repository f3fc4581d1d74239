"""The kernels' speed beside PyTorch's own backends, on the same inputs, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels import (
    FULL,
    Bounds,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
)
from ..ring import Layout, Mask, bounds
from .candidates import DTYPES
from .cases import Number, distance
from .flops import BACKWARD_FLOPS, forward_flops, pairs_of
from .timing import Clock, Samples, Step, interleaved, repeats_within

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
RIVALS = {"float32": ("efficient",)}  # the fast backends take 16 bits alone
FAST = ("flash", "cudnn")
OURS = "ringattn"
# 16-bit results of two sums of the same terms: each is off by a few of its own roundings (2^-8 in bfloat16)
AGREE = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3}
BACKWARD_PARTS = ("delta", "dq", "dkdv")


def speed(
    device: torch.device,
    *,
    head_dim: int,
    causal: bool,
    seqlens: tuple[int, ...],
    heads: tuple[int, int] = (16, 16),
    dtype: str = "bfloat16",
    seconds: float = 1.5,
) -> Iterator[Number]:
    """Forward, forward with a carried state, and backward with its parts, for growing lengths; ``seconds`` on each."""
    clock = Clock(device)
    for seqlen in seqlens:
        labels: dict[str, Any] = {
            "dtype": dtype, "head_dim": head_dim, "mask": "causal" if causal else "full", "seqlen": seqlen,
            "heads": f"{heads[0]}/{heads[1]}",
        }  # fmt: skip
        q, k, v, dout = (
            torch.randn(1, seqlen, count, head_dim, device=device, dtype=torch.float32).to(DTYPES[dtype])
            for count in (heads[0], heads[1], heads[1], heads[0])
        )
        steps, results = our_steps(q, k, v, dout, causal)
        for backend in RIVALS.get(dtype, FAST):
            try:
                theirs, told = sdpa_steps(backend, q, k, v, dout, causal)
            except RuntimeError as error:
                yield Number("not there", None, "", {**labels, "by": backend}, note=str(error).splitlines()[0])
                continue
            steps |= theirs
            limit = AGREE[dtype]
            yield Number(
                "difference from ringattn", distance(results, told), "relative", {**labels, "by": backend}, limit
            )
        for step in steps.values():
            step()  # compiles, and lets cuDNN choose its plan
        one_round = sum(clock(step) for step in steps.values())
        taken = interleaved(steps, clock, warmup=1, repeats=repeats_within(seconds, one_round))
        pairs = pairs_of(seqlen, causal=causal)
        flops = forward_flops(pairs, heads=heads[0], head_dim=head_dim)
        yield from numbers(taken, flops, labels)


def our_steps(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[dict[str, Step], list[Tensor]]:
    """What to time, by ``<what>:<by>``, and the results that the others are compared with."""
    limits = causal_bounds(q, k) if causal else FULL
    out, lse = attention_forward(q, k, v, bounds=limits)
    grads = attention_backward(dout, q, k, v, out, lse, bounds=limits)
    delta = attention_delta(dout, out)
    # a state of its own: the step continues it in place, again and again
    state = attention_forward(q, k, v, bounds=limits, final=False)
    steps: dict[str, Step] = {
        "forward": lambda: attention_forward(q, k, v, bounds=limits),
        "forward with state": lambda: attention_forward(q, k, v, bounds=limits, state=state, final=False),
        "backward": lambda: attention_backward(dout, q, k, v, out, lse, bounds=limits),
        "delta": lambda: attention_delta(dout, out),
        "dq": lambda: attention_dq(dout, q, k, v, lse, delta, bounds=limits),
        "dkdv": lambda: attention_dkdv(dout, q, k, v, lse, delta, bounds=limits),
    }
    return {f"{what}:{OURS}": step for what, step in steps.items()}, [out, *grads]


def causal_bounds(q: Tensor, k: Tensor) -> Bounds:
    rows, keys = (Layout.contiguous(x.shape[1], 1).positions(0) for x in (q, k))
    return bounds(Mask(causal=True), rows, keys).to(q.device)


def sdpa_steps(
    backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool
) -> tuple[dict[str, Step], list[Tensor]]:
    """The same of one pinned SDPA backend, on contiguous ``[B, H, S, D]`` tensors, as it likes them.

    Raises:
        RuntimeError: the backend cannot do this here.
    """
    by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v, dout)]
    leaves, given = [x.requires_grad_() for x in by_head[:3]], by_head[3]
    grouped = q.shape[2] != k.shape[2]

    def attend() -> Tensor:
        with sdpa_kernel(SDPA[backend]):
            return scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=grouped)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    out = attend()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, given, retain_graph=True)

    results = [x.detach().transpose(1, 2) for x in (out, *backward())]
    return {f"forward:{backend}": forward, f"backward:{backend}": backward}, results


def numbers(taken: dict[str, Samples], flops: int, labels: dict[str, Any]) -> Iterator[Number]:
    """Milliseconds of every step; TFLOP/s of what computes a whole direction."""
    counted: dict[str, Callable[[float], float]] = {
        "forward": lambda seconds: flops / seconds / 1e12,
        "forward with state": lambda seconds: flops / seconds / 1e12,
        "backward": lambda seconds: BACKWARD_FLOPS * flops / seconds / 1e12,
    }
    for name, samples in taken.items():
        what, _, who = name.partition(":")
        told = {**labels, "by": who}
        yield Number(f"{what} time", samples.median * 1e3, "ms", told, spread=samples.spread)
        if what in counted:
            yield Number(what, counted[what](samples.median), "TFLOP/s", told, spread=samples.spread)


def brief(found: list[Number]) -> list[dict[str, Any]]:
    """A row per direction and shape, a column per implementation, in TFLOP/s."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number in found:
        if number.unit != "TFLOP/s":
            continue
        of = number.labels
        key = (number.name, of["head_dim"], of["mask"], of["seqlen"])
        shape = {"TFLOP/s": number.name, "D": of["head_dim"], "mask": of["mask"], "tokens": of["seqlen"]}
        row = rows.setdefault(key, shape | dict.fromkeys((OURS, *SDPA)))
        row[str(of["by"])] = None if number.value is None else round(number.value, 1)
    return list(rows.values())
