"""PyTorch's attention in ``bench kernels``, backend by backend; and all contenders of a device, ours first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ... import reference
from ...reference.masks import by_batch
from ..common.memory import free_memory
from .contender import BACKWARD, FORWARD, OURS, Cannot, Contender, Given, Ready
from .ours import VARIANTS, aten_backend, triton_kernels
from .shape import Shape

DENSE_SHARE = 0.4  # of the free memory: what a backend that keeps every score may take
SCORES_KEPT = 4  # tensors of scores that the math backend has at once, in its backward


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
    return by_batch(reference.visible(positions, positions, **given.shape.options(given.device)))


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
    tiles = None
    if shape.causal or not shape.square:
        rows = None if shape.mask.used is None else shape.batch
        tiles = create_block_mask(sees(shape, device), rows, None, shape.seqlen, shape.seqlen, device=str(device))
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    leaves, dout = by_head(given)
    grouped = shape.heads != shape.kv_heads
    return differentiated(lambda: compiled(*leaves, block_mask=tiles, enable_gqa=grouped), leaves, dout)


def sees(shape: Shape, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as ``flex_attention`` takes it: of indices of batch row, head, query and key."""
    mask, positions = shape.mask, shape.layout.positions(0)
    if shape.square and shape.causal:
        return lambda batch, head, query, key: query >= key
    parts = [tuple(end.to(device) for end in part.interval(positions)) for part in mask.parts]
    used = None if mask.used is None else torch.tensor(mask.used, device=device)
    visible = None if mask.blocks is None else mask.blocks.visible.to(device)
    block = 1 if mask.blocks is None else mask.blocks.block

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = reduce(or_, ((lo[query] <= key) & (key < hi[query]) for lo, hi in parts))
        if used is not None:
            inside = inside & (key < used[batch])
        return inside if visible is None else inside & visible[query // block, key // block]

    return seen


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


def contenders(device: torch.device) -> list[Contender]:
    """All that there are for a device, ours first."""
    if device.type == "cuda":
        ours = [Contender(variant.name, partial(triton_kernels, variant)) for variant in VARIANTS]
        theirs = [Contender(name, partial(sdpa, backend)) for name, backend in GPU_SDPA.items()]
        return [*ours, *theirs, Contender(FLEX, flex)]
    theirs = [Contender(name, partial(sdpa, backend)) for name, backend in CPU_SDPA.items()]
    return [Contender(OURS, aten_backend), *theirs]
