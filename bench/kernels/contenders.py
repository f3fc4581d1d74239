"""Contenders of ``bench kernels``: implementations of one attention on one device.

A contender has a name and a function that takes inputs and returns steps to time, or raises if it cannot compute them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ... import reference
from ...kernels import (
    PLAIN,
    Bounds,
    KernelConfig,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    default_config,
)
from ...reference.masks import add_head_dim
from ...ring.backends import backward_backends, forward_backends
from ...ring.buffers import MaskArgs, split_heads
from ...ring.local.protocol import LocalAttention, LocalForward
from ...ring.local.registry import other_backends, resolve_backend
from ...ring.loop import partial_sums
from ...ring.schedule.plan import plan
from ..common.attention import AttentionConfig, check_backend
from ..common.cases import UnavailableError
from ..common.memory import free_memory
from ..common.timing import Step

OURS = "ringattn"
FORWARD, STATE, BACKWARD = "forward", "forward with state", "backward"
PASSES = (FORWARD, STATE, BACKWARD)
PARTS = ("delta", "dq", "dkdv")  # kernels of our backward
DENSE_SHARE = 0.4  # share of free memory for a backend that keeps all scores
SCORES_KEPT = 4  # score tensors alive at once in the math backend's backward


@dataclass(frozen=True)
class ContenderInputs:
    """The problem to compute, with q, k, v and dout, the same for every contender."""

    config: AttentionConfig
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        """The bounds of every launch on the whole sequence: one launch, or several if the mask has global tokens."""
        hop_masks = plan(self.config.token_layout, self.config.mask, 0, 1, self.device).hop_masks[0]
        return tuple(part.bounds for part in hop_masks)

    @property
    def key_halves(self) -> list[tuple[slice, tuple[Bounds, ...]]]:
        """The two halves of the keys, each with its bounds per launch; empty for block-sparse masks and one token."""
        parts, middle, end = self.bounds, self.config.seqlen // 2, self.config.seqlen
        if not middle or any(part.block_sparse is not None for part in parts):
            return []
        first, second = (tuple(_narrow_bounds(part, *keys) for part in parts) for keys in ((0, middle), (middle, end)))
        return [(slice(0, middle), first), (slice(middle, None), second)]


def _narrow_bounds(bounds: Bounds, start: int, end: int) -> Bounds:
    """Return bounds restricted to the keys ``[start, end)``, counted from ``start``."""
    lo, hi, used = (
        None if x is None else x.clamp(start, end) - start for x in (bounds.lo, bounds.hi, bounds.seqused_k)
    )
    return Bounds(lo, hi, used)


@dataclass
class PreparedContender:
    """Steps to time by pass, and the results to check: out, dq, dk and dv, or only out."""

    steps: dict[str, Step]
    results: list[Tensor] = field(default_factory=list)
    carried_out: Tensor | None = None
    """Out computed in two hops, if the contender can carry a state."""


class Contender(NamedTuple):
    """One implementation of attention."""

    name: str
    make: Callable[[ContenderInputs], PreparedContender]

    @property
    def is_ours(self) -> bool:
        return self.name.partition(" ")[0] == OURS


class TritonVariant(NamedTuple):
    """Our Triton kernels with some fields of a `KernelConfig`; without ``options`` they use the default config."""

    name: str
    options: dict[str, Any] | None = None
    passes: tuple[str, ...] = PASSES  # passes that the options change
    parts: tuple[str, ...] = ()  # kernels of the backward to time one by one

    def config(self, q: Tensor, v: Tensor, *, full: bool) -> KernelConfig | None:
        """Return tuned tiles with this variant's options alone; None without options. ``full`` means no mask."""
        if self.options is None:
            return None
        tuned = default_config(q, v, full=full)
        forward = None if self.options.get("forward_kernel") == "hopper" else tuned.forward  # it takes few tiles
        return KernelConfig(forward, tuned.dq, tuned.dkdv, **self.options)


VARIANTS = [
    TritonVariant(OURS, parts=PARTS),
    TritonVariant(f"{OURS} hopper", {"forward_kernel": "hopper"}, (FORWARD, STATE)),
    TritonVariant(f"{OURS} single pass", {"backward": "single_pass"}, (BACKWARD,)),
    TritonVariant(f"{OURS} hopper single pass", {"backward": "hopper"}, (BACKWARD,)),
    TritonVariant(f"{OURS} deterministic single pass", {"backward": "single_pass_deterministic"}, (BACKWARD,)),
    TritonVariant(f"{OURS} longest first", {"order": "longest"}),
    TritonVariant(f"{OURS} persistent", {"persistent": True, "sm_margin": 0}, (FORWARD, STATE)),  # nothing else runs
    TritonVariant(f"{OURS} forward by pointers", {"loads": "pointers"}, (FORWARD, STATE)),
    TritonVariant(f"{OURS} dkdv by descriptors", {"dkdv_epilogue": "descriptors"}, (BACKWARD,)),
    TritonVariant(f"{OURS} packed heads", {"pack_gqa": True}, (FORWARD, STATE)),
]
"""Variants timed on a GPU, default first. If a kernel does not run, its row shows the error."""


def triton_contender(variant: TritonVariant, given: ContenderInputs) -> PreparedContender:
    """Prepare a Triton variant as a ring launches it, and if it has ``parts`` also each kernel of its backward."""
    first, *others = given.bounds
    try:
        config = variant.config(given.q, given.v, full=first.is_full and not others)
        ready = local_kernel_contender("triton", given, config, variant.passes)
        if variant.parts and not others:
            ready.steps |= _parts_of_backward(given, first, config)
    except (ValueError, NotImplementedError, TypeError) as refused:
        raise UnavailableError(str(refused)) from None
    return ready


def _parts_of_backward(given: ContenderInputs, limits: Bounds, config: KernelConfig | None) -> dict[str, Step]:
    q, k, v, dout = given.q, given.k, given.v, given.dout
    out, lse = attention_forward(q, k, v, bounds=limits, config=config)
    delta = attention_delta(dout, out)
    return {
        "delta": lambda: attention_delta(dout, out),
        "dq": lambda: attention_dq(dout, q, k, v, lse, delta, bounds=limits, config=config),
        "dkdv": lambda: attention_dkdv(dout, q, k, v, lse, delta, bounds=limits, config=config),
    }


def local_kernel_contender(
    backend: str | LocalAttention, given: ContenderInputs, config: KernelConfig | None = None,
    passes: tuple[str, ...] = PASSES,
) -> PreparedContender:  # fmt: skip
    """Prepare a local kernel as a ring calls it on one shard; ``passes`` are the passes to time."""
    q, k, v, dout, parts = given.q, given.k, given.v, given.dout, given.bounds
    kernel = resolve_backend(backend, q.device)
    chunks, options = split_heads(1, q.shape[2], k.shape[2]), {"softmax_scale": q.shape[-1] ** -0.5, "config": config}

    def forward() -> tuple[Tensor, Tensor]:
        (work,) = forward_backends(kernel, chunks, q, **options)
        _fold(work, k, v, parts, final=True)
        return work.result()

    out, lse = forward()
    state = out.to(torch.float32, copy=True), lse.clone()  # copied, because the kernels update it in place

    def with_state() -> None:
        (work,) = forward_backends(kernel, chunks, q, start=state, **options)
        _fold(work, k, v, parts, final=False)

    def backward() -> tuple[Tensor, ...]:
        (work,) = backward_backends(kernel, chunks, dout, q, out, lse, **options)
        into = torch.empty_like(k), torch.empty_like(v)
        for part in parts:
            work.dq(k, v, part, scores=PLAIN, local=True, final=part is parts[-1])
        masks = [MaskArgs(bounds=part, scores=PLAIN) for part in parts]
        for mask, accum, target in partial_sums(masks, None, into):
            work.dkdv(k, v, **mask, local=True, accum=accum, out=target)
        return work.result(), *into

    (carried,) = forward_backends(kernel, chunks, q, **options)
    for keys, key_bounds in given.key_halves:
        _fold(carried, k[:, keys], v[:, keys], key_bounds, final=keys.stop is None)
    steps: dict[str, Step] = {FORWARD: forward, STATE: with_state, BACKWARD: backward}
    grads = backward() if BACKWARD in passes else ()
    steps = {name: step for name, step in steps.items() if name in passes}
    return PreparedContender(steps, [out, *grads], carried.result()[0] if given.key_halves else None)


def backend_contender(backend: str, given: ContenderInputs) -> PreparedContender:
    """Prepare a registered backend of another project, as a ring calls it."""
    check_backend(backend, given.config, given.device)
    return local_kernel_contender(backend, given)


def _fold(work: LocalForward, k: Tensor, v: Tensor, parts: Sequence[Bounds], *, final: bool) -> None:
    """Run ``work.fold`` on one shard once for each part of the mask; ``final`` if no other shard follows."""
    for part in parts:
        work.fold(k, v, part, scores=PLAIN, final=final and part is parts[-1])


def sdpa_contender(backend: SDPBackend, given: ContenderInputs) -> PreparedContender:
    """Prepare one pinned backend of SDPA on contiguous ``[B, H, S, D]`` tensors, its preferred format."""
    config = given.config
    options: dict[str, Any] = {"is_causal": True} if config.causal else {}
    if not config.is_plain:
        options = {"attn_mask": _dense_mask(backend, given)}
    if backend is SDPBackend.MATH:
        _check_square(given, SCORES_KEPT * given.q.element_size() * config.heads, "scores")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=config.heads != config.kv_heads, **options)

    return _autograd_contender(attend, given)


def _dense_mask(backend: SDPBackend, given: ContenderInputs) -> Tensor:
    """Return the mask as a bool tensor; raise ``UnavailableError`` for backends that take none."""
    if backend not in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        raise UnavailableError("it supports only full and causal masks")
    _check_square(given, 1 + given.q.element_size(), "mask")
    positions = torch.arange(given.config.seqlen, device=given.device)
    return add_head_dim(reference.visible(positions, positions, **given.config.reference_masks(given.device)))


def _check_square(given: ContenderInputs, nbytes: int, what: str) -> None:
    """Raise ``UnavailableError`` if ``what``, of ``nbytes`` per (query, key) pair, needs too much memory."""
    wanted = nbytes * given.config.batch * given.config.seqlen**2
    free = free_memory(given.device)
    if wanted > DENSE_SHARE * free:
        raise UnavailableError(
            f"its {what} would take {wanted / 1e9:.1f} GB, more than {DENSE_SHARE:.0%} of the free {free / 1e9:.1f} GB"
        )


def flex_contender(given: ContenderInputs) -> PreparedContender:
    """Prepare the compiled ``torch.nn.attention.flex_attention`` with a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    config, device = given.config, given.device
    if device.type != "cuda":
        raise UnavailableError("its backward compiles only for a GPU")
    options: dict[str, Any] = {"enable_gqa": config.heads != config.kv_heads}
    if config.causal or not config.is_plain:
        rows = None if config.mask.used is None else config.batch
        sizes = (rows, None, config.seqlen, config.seqlen)
        options["block_mask"] = create_block_mask(flex_mask_mod(config, device), *sizes, device=str(device))
    return _autograd_contender(partial(torch.compile(flex_attention, dynamic=False), **options), given)


def flex_mask_mod(config: AttentionConfig, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask as ``mask_mod`` of ``flex_attention``: a predicate of batch, head, query and key."""
    mask, positions = config.mask, torch.arange(config.seqlen)
    if config.is_plain and config.causal:
        return lambda batch, head, query, key: query >= key
    parts = [tuple(end.to(device) for end in part.interval(positions)) for part in mask.parts]
    used = None if mask.used is None else torch.tensor(mask.used, device=device)
    visible = None if mask.blocks is None else mask.blocks.visible.to(device)
    block = 1 if mask.blocks is None else mask.blocks.block

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = reduce(or_, ((lo[query] <= key) & (key < hi[query]) for lo, hi in parts))
        if used is not None:
            inside = inside & (key < used[batch])
        return inside if visible is None else inside & visible[query // block, key // block]

    return is_visible


def _autograd_contender(attend: Callable[..., Tensor], given: ContenderInputs) -> PreparedContender:
    """Prepare ``attend(q, k, v)`` and its backward on ``[B, H, S, D]``; UnavailableError if it fails."""
    *inputs, dout = (x.transpose(1, 2).contiguous() for x in (given.q, given.k, given.v, given.dout))
    leaves = [x.requires_grad_() for x in inputs]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = attend(*leaves)
            grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        except torch.AcceleratorError:
            raise  # the device is unusable
        except (RuntimeError, NotImplementedError) as refused:
            reasons = [str(warning.message).partition(" (Triggered")[0] for warning in caught] or [str(refused)]
            raise UnavailableError(" ".join(" ".join(reasons).split())[:200]) from None

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    results = [x.detach().transpose(1, 2) for x in (out, *grads)]
    return PreparedContender({FORWARD: forward, BACKWARD: backward}, results)


GPU_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CPU_SDPA = {"ATen operator": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def list_contenders(device: torch.device) -> list[Contender]:
    """Return all contenders for a device, ours first; on the CPU ours is the CPU backend, not interpreted kernels."""
    backends = [Contender(f"{name} backend", partial(backend_contender, name)) for name in other_backends(device)]
    if device.type == "cuda":
        ours = [Contender(variant.name, partial(triton_contender, variant)) for variant in VARIANTS]
        theirs = [Contender(name, partial(sdpa_contender, backend)) for name, backend in GPU_SDPA.items()]
        return [*ours, *theirs, Contender("flex_attention", flex_contender), *backends]
    theirs = [Contender(name, partial(sdpa_contender, backend)) for name, backend in CPU_SDPA.items()]
    return [Contender(OURS, partial(local_kernel_contender, "auto")), *theirs, *backends]
