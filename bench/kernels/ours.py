"""Our kernels in ``bench kernels``: the variants of the Triton kernels, and the CPU's backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import (
    PLAIN,
    Bounds,
    KernelConfig,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    default_config,
)
from ...kernels.config import config_for
from ...ring.backends import backward_backends, forward_backends
from ...ring.buffers import MaskArgs, chunks_of
from ...ring.loop import ForwardBackend, add
from ..common.timing import Step
from .contender import BACKWARD, FORWARD, OURS, PARTS, PASSES, STATE, Cannot, Given, Ready

HOPPER_ARCH = 90


def halves(given: Given) -> list[tuple[slice, tuple[Bounds, ...]]]:
    """Keys and bounds of two hops that are together the whole; none where blocks say what is visible."""
    parts, middle, end = given.bounds, given.shape.seqlen // 2, given.shape.seqlen
    if not middle or any(part.runs is not None for part in parts):
        return []
    first, second = (tuple(_among(part, *keys) for part in parts) for keys in ((0, middle), (middle, end)))
    return [(slice(0, middle), first), (slice(middle, None), second)]


def _among(part: Bounds, start: int, end: int) -> Bounds:
    """The same of the keys ``[start, end)`` alone, counted from the first of them."""
    lo, hi, used = (None if x is None else x.clamp(start, end) - start for x in (part.lo, part.hi, part.used))
    return Bounds(lo, hi, used)


class Variant(NamedTuple):
    """Our Triton kernels, as they are launched without a config, or with these fields of one and no others."""

    name: str
    options: dict[str, Any] | None = None
    passes: tuple[str, ...] = PASSES  # what the options are about; the others are as they were
    parts: tuple[str, ...] = ()  # of its backward, timed one by one

    def config(self, q: Tensor, v: Tensor, *, full: bool) -> KernelConfig | None:
        """With tuned tiles where there are some; what was tuned beside them would change what the row is about."""
        if self.options is None:
            return None
        tuned = default_config(q, v, full=full)
        forward = tuned.forward
        if self.options.get("forward_kernel") == "hopper":  # which takes few tiles, the built-in one among them
            forward = config_for(HOPPER_ARCH, q.dtype, max(q.shape[-1], v.shape[-1])).forward
        return KernelConfig(forward, tuned.dq, tuned.dkdv, **self.options)


VARIANTS = [
    Variant(OURS, parts=PARTS),
    Variant(f"{OURS} hopper", {"forward_kernel": "hopper"}, (FORWARD, STATE)),
    Variant(f"{OURS} single pass", {"backward": "single_pass"}, (BACKWARD,)),
    Variant(f"{OURS} hopper single pass", {"backward": "hopper"}, (BACKWARD,)),
    Variant(f"{OURS} deterministic single pass", {"backward": "single_pass_deterministic"}, (BACKWARD,)),
    Variant(f"{OURS} longest first", {"order": "longest"}),
    Variant(f"{OURS} persistent", {"persistent": True, "sm_margin": 0}, (FORWARD, STATE)),  # alone
    Variant(f"{OURS} dkdv by descriptors", {"dkdv_epilogue": "descriptors"}, (BACKWARD,)),
    Variant(f"{OURS} packed heads", {"pack_gqa": True}, (FORWARD, STATE)),
]
"""Timed on a GPU, the default first. One line adds one; where its kernel does not run, its error is the reason told."""


def triton_kernels(variant: Variant, given: Given) -> Ready:
    """A variant of the Triton kernels; where the mask has several parts, as the ring launches it."""
    first, *others = given.bounds
    try:
        config = variant.config(given.q, given.v, full=first.is_full and not others)
        return ring_works("triton", given, config, variant.passes) if others else _entries(variant, given, config)
    except (ValueError, NotImplementedError, TypeError) as refused:
        raise Cannot(str(refused)) from None


def _entries(variant: Variant, given: Given, config: KernelConfig | None) -> Ready:
    """The kernels' own entries: one launch per pass, and each of the backward's by itself."""
    q, k, v, dout, (limits,) = given.q, given.k, given.v, given.dout, given.bounds
    out, lse = attention_forward(q, k, v, bounds=limits, config=config)
    # a state of its own: the step continues it in place, again and again
    state = attention_forward(q, k, v, bounds=limits, final=False, config=config)
    carried: tuple[Tensor, Tensor] | None = None
    for keys, (seen,) in halves(given):
        last = keys.stop is None
        carried = attention_forward(q, k[:, keys], v[:, keys], bounds=seen, state=carried, final=last, config=config)
    steps: dict[str, Step] = {
        FORWARD: lambda: attention_forward(q, k, v, bounds=limits, config=config),
        STATE: lambda: attention_forward(q, k, v, bounds=limits, state=state, final=False, config=config),
    }
    if BACKWARD not in variant.passes:
        return Ready(_only(steps, variant.passes), [out], carried[0] if carried else None)
    grads = attention_backward(dout, q, k, v, out, lse, bounds=limits, config=config)
    delta = attention_delta(dout, out)
    steps |= {
        BACKWARD: lambda: attention_backward(dout, q, k, v, out, lse, bounds=limits, config=config),
        "delta": lambda: attention_delta(dout, out),
        "dq": lambda: attention_dq(dout, q, k, v, lse, delta, bounds=limits, config=config),
        "dkdv": lambda: attention_dkdv(dout, q, k, v, lse, delta, bounds=limits, config=config),
    }
    return Ready(_only(steps, variant.passes + variant.parts), [out, *grads], carried[0] if carried else None)


def _only(steps: dict[str, Step], names: tuple[str, ...]) -> dict[str, Step]:
    return {name: step for name, step in steps.items() if name in names}


def aten_backend(given: Given) -> Ready:
    """Our CPU backend on one shard. Interpreted kernels are not timed."""
    return ring_works("aten", given)


def ring_works(
    backend: str, given: Given, config: KernelConfig | None = None, passes: tuple[str, ...] = PASSES
) -> Ready:
    """What the ring computes a hop by, on one shard: as many launches as the mask has parts."""
    q, k, v, dout, parts = given.q, given.k, given.v, given.dout, given.bounds
    chunks, how = chunks_of(1, q.shape[2], k.shape[2]), {"softmax_scale": q.shape[-1] ** -0.5, "config": config}

    def forward() -> tuple[Tensor, Tensor]:
        (work,) = forward_backends(backend, chunks, q, **how)
        fold(work, k, v, parts, final=True)
        return work.result()

    out, lse = forward()
    state = out.to(torch.float32, copy=True), lse.clone()  # of its own: it is continued in place, again and again

    def with_state() -> None:
        (work,) = forward_backends(backend, chunks, q, start=state, **how)
        fold(work, k, v, parts, final=False)

    def backward() -> tuple[Tensor, ...]:
        (work,) = backward_backends(backend, chunks, dout, q, out, lse, **how)
        into = torch.empty_like(k), torch.empty_like(v)
        for part in parts:
            work.dq(k, v, part, scores=PLAIN, local=True, final=part is parts[-1])
        add(work, (k, v), [MaskArgs(bounds=part, scores=PLAIN) for part in parts], local=True, accum=None, out=into)
        return work.result(), *into

    (carried,) = forward_backends(backend, chunks, q, **how)
    hops = halves(given)
    for keys, seen in hops:
        fold(carried, k[:, keys], v[:, keys], seen, final=keys.stop is None)
    steps: dict[str, Step] = {FORWARD: forward, STATE: with_state, BACKWARD: backward}
    grads = backward() if BACKWARD in passes else ()
    return Ready(_only(steps, passes), [out, *grads], carried.result()[0] if hops else None)


def fold(work: ForwardBackend, k: Tensor, v: Tensor, parts: Sequence[Bounds], *, final: bool) -> None:
    """The keys of one shard, part by part of the mask."""
    for part in parts:
        work.fold(k, v, part, scores=PLAIN, final=final and part is parts[-1])
