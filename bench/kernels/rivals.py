"""Who computes one attention on one device in ``bench kernels``: our kernels in their variants, and PyTorch's backends.

A contender is a name and a function that makes what to time of the inputs, and refuses what it does not compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ... import reference
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
from ..free_memory import free_memory
from ..timing import Step
from .shape import Shape

OURS = "ringattn"
FORWARD, STATE, BACKWARD = "forward", "forward with state", "backward"
PASSES = (FORWARD, STATE, BACKWARD)
PARTS = ("delta", "dq", "dkdv")  # of our backward
DENSE_SHARE = 0.4  # of the free memory: what a backend that keeps every score may take
HOPPER_ARCH = 90
SCORES_KEPT = 4  # tensors of scores that the math backend has at once, in its backward


class Cannot(Exception):
    """A contender does not compute this, or not here; the message says why."""


@dataclass(frozen=True)
class Given:
    """What every contender computes with."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def bounds(self) -> Bounds:
        return self.shape.bounds(self.device)


@dataclass
class Ready:
    """Steps to time, by what they compute, and the results: out, dq, dk and dv, or out alone."""

    steps: dict[str, Step]
    results: list[Tensor] = field(default_factory=list)
    carried: Tensor | None = None
    """Out of two hops, where there is a state to carry."""


class Contender(NamedTuple):
    """One implementation."""

    name: str
    make: Callable[[Given], Ready]

    @property
    def ours(self) -> bool:
        return self.name.partition(" ")[0] == OURS


# ours


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


# PyTorch's


def sdpa(backend: SDPBackend, given: Given) -> Ready:
    """One pinned backend of SDPA, on contiguous ``[B, H, S, D]`` tensors, as it likes them."""
    shape, grouped = given.shape, given.shape.heads != given.shape.kv_heads
    masked: dict[str, Any] = {"is_causal": shape.causal}
    if not shape.square:
        masked = {"attn_mask": dense_mask(backend, given)}
    if backend is SDPBackend.MATH:
        fits(given, SCORES_KEPT * given.q.element_size(), "scores")
    leaves, dout = by_head(given)

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], enable_gqa=grouped, **masked)

    return differentiated(attend, leaves, dout)


def dense_mask(backend: SDPBackend, given: Given) -> Tensor:
    """The mask as a tensor, for those that take one."""
    if backend not in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        raise Cannot("it takes full and causal masks alone")
    fits(given, 1 + given.q.element_size(), "mask", heads=1)
    positions = torch.arange(given.shape.seqlen, device=given.device)
    return reference.visible(positions, positions, **given.shape.options(given.device))


def fits(given: Given, nbytes: int, what: str, heads: int | None = None) -> None:
    """Refuse a square of so many bytes per head that takes too much of what is free."""
    shape = given.shape
    wanted = nbytes * shape.batch * (heads or shape.heads) * shape.seqlen**2
    free = free_memory(given.device)
    if wanted > DENSE_SHARE * free:
        raise Cannot(f"its {what} take {wanted / 1e9:.1f} GB: more than {DENSE_SHARE:.0%} of {free / 1e9:.1f} GB free")


def flex(given: Given) -> Ready:
    """``torch.nn.attention.flex_attention``, compiled; its mask as blocks of tiles."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, device = given.shape, given.device
    if device.type != "cuda":
        raise Cannot("its backward is compiled for a GPU alone")
    lo, hi = (end.to(device) for end in shape.mask.interval(shape.layout.positions(0)))
    pattern = None if shape.pattern is None else shape.pattern.visible.to(device)
    block = 1 if shape.pattern is None else shape.pattern.block

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if shape.square:
            return query >= key
        inside = (lo[query] <= key) & (key < hi[query])
        return inside if pattern is None else inside & pattern[query // block, key // block]

    whole = shape.square and not shape.causal
    tiles = None if whole else create_block_mask(seen, None, None, shape.seqlen, shape.seqlen, device=str(device))
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    leaves, dout = by_head(given)
    grouped = shape.heads != shape.kv_heads
    return differentiated(lambda: compiled(*leaves, block_mask=tiles, enable_gqa=grouped), leaves, dout)


def by_head(given: Given) -> tuple[list[Tensor], Tensor]:
    """q, k and v as leaves, and dout, ``[B, H, S, D]``."""
    *inputs, dout = (x.transpose(1, 2).contiguous() for x in (given.q, given.k, given.v, given.dout))
    return [x.requires_grad_() for x in inputs], dout


def differentiated(attend: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Ready:
    """Forward and backward of what autograd differentiates; its error is the reason why it cannot."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            out = attend()
            grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        except torch.AcceleratorError:
            raise  # nothing works on this device any more
        except (RuntimeError, NotImplementedError) as refused:
            reasons = [str(one.message).partition(" (Triggered")[0] for one in told] or [str(refused)]
            raise Cannot(" ".join(" ".join(reasons).split())[:200]) from None

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Ready({FORWARD: forward, BACKWARD: backward}, [x.detach().transpose(1, 2) for x in (out, *grads)])


GPU_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CPU_SDPA = {"ATen operator": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
FLEX = "flex_attention"


# contenders


def contenders(device: torch.device) -> list[Contender]:
    """All that there are for a device, ours first."""
    if device.type == "cuda":
        ours = [Contender(variant.name, partial(triton_kernels, variant)) for variant in VARIANTS]
        theirs = [Contender(name, partial(sdpa, backend)) for name, backend in GPU_SDPA.items()]
        return [*ours, *theirs, Contender(FLEX, flex)]
    theirs = [Contender(name, partial(sdpa, backend)) for name, backend in CPU_SDPA.items()]
    return [Contender(OURS, aten_backend), *theirs]
