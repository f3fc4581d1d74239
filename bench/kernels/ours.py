"""Our kernels in ``bench kernels``: the variants of the Triton kernels, and the CPU's backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import (
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
from ...ring.aten import AtenBackward, AtenForward
from ..timing import Step
from .contender import BACKWARD, FORWARD, OURS, PARTS, PASSES, STATE, Cannot, Given, Ready

HOPPER_ARCH = 90


def halves(given: Given) -> list[tuple[slice, Bounds]]:
    """Keys and bounds of two hops that are together the whole; none where blocks say what is visible."""
    whole, middle = given.bounds, given.shape.seqlen // 2
    if whole.runs is not None or not middle:
        return []
    keys = [slice(0, middle), slice(middle, None)]
    if whole.lo is None or whole.hi is None:
        return [(near, whole) for near in keys]
    ends = [(x.clamp(max=middle), (x - middle).clamp(min=0)) for x in (whole.lo, whole.hi)]
    return [(near, Bounds(lo, hi)) for near, lo, hi in zip(keys, *ends, strict=True)]


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
    """A variant of the Triton kernels."""
    q, k, v, dout, limits = given.q, given.k, given.v, given.dout, given.bounds
    try:
        config = variant.config(q, v, full=limits.is_full)
        out, lse = attention_forward(q, k, v, bounds=limits, config=config)
        # a state of its own: the step continues it in place, again and again
        state = attention_forward(q, k, v, bounds=limits, final=False, config=config)
    except (ValueError, NotImplementedError, TypeError) as refused:
        raise Cannot(str(refused)) from None
    carried: tuple[Tensor, Tensor] | None = None
    for keys, seen in halves(given):
        last = keys.stop is None
        carried = attention_forward(q, k[:, keys], v[:, keys], bounds=seen, state=carried, final=last, config=config)
    steps: dict[str, Step] = {
        FORWARD: lambda: attention_forward(q, k, v, bounds=limits, config=config),
        STATE: lambda: attention_forward(q, k, v, bounds=limits, state=state, final=False, config=config),
    }
    if BACKWARD not in variant.passes:
        return Ready(_only(steps, variant.passes), [out], carried[0] if carried else None)
    try:
        grads = attention_backward(dout, q, k, v, out, lse, bounds=limits, config=config)
    except (ValueError, NotImplementedError) as refused:
        raise Cannot(str(refused)) from None
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
    q, k, v, dout, limits = given.q, given.k, given.v, given.dout, given.bounds
    scale = q.shape[-1] ** -0.5

    def forward() -> tuple[Tensor, Tensor]:
        work = AtenForward(q, softmax_scale=scale)
        work.fold(k, v, limits, final=True)
        return work.result()

    out, lse = forward()
    state = out.float(), lse.clone()

    def with_state() -> None:
        AtenForward(q, softmax_scale=scale, start=state).fold(k, v, limits, final=False)

    def backward() -> tuple[Tensor, ...]:
        work, into = AtenBackward(dout, q, out, lse, None, softmax_scale=scale), tuple(map(torch.empty_like, (k, v)))
        work.dq(k, v, limits, local=True, final=True)
        work.dkdv(k, v, limits, local=True, sums=None, into=into)
        return work.result(), *into

    carried = AtenForward(q, softmax_scale=scale)
    hops = halves(given)
    for keys, seen in hops:
        carried.fold(k[:, keys], v[:, keys], seen, final=keys.stop is None)
    steps: dict[str, Step] = {FORWARD: forward, STATE: with_state, BACKWARD: backward}
    return Ready(steps, [out, *backward()], carried.result()[0] if hops else None)
