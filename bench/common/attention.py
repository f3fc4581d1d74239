"""One attention as the flags say it: its sizes, its mask, who holds which tokens, its inputs and its FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...reference.masks import Masks
from ...ring import Layout, Mask, visible_pairs
from ...ring.prepare import Layouts, mask_of
from ...ring.schedule import mask as patterns
from ...ring.schedule.mask import UNLIMITED, BlockMask, Longformer
from .flags import DTYPE_BYTES, Pattern, binary, counted

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
Tensors = tuple[Tensor, ...]

BACKWARD_FLOPS = 2.5  # five products of the forward's two


@dataclass(frozen=True)
class AttentionConfig:
    """One attention, over the ranks of a ring or on one device."""

    seqlen: int
    world: int = 1
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    layout: str = "zigzag"
    threads: int = 1  # per process
    seed: int = 0
    device: str = "cpu"
    transport: str = "auto"
    head_dim_v: int = 0  # that of q and k where it is 0
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    cu_seqlens: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    prefix_length: int | None = None
    block_mask: Pattern | None = None

    @property
    def title(self) -> str:
        """``causal, zigzag, 8k tokens over 4 ranks, B1 H8/8 D64 float32``."""
        ranks = counted(self.world, "rank")
        shape = f"B{self.batch} H{self.heads}/{self.kv_heads} D{self.head_dim} {self.dtype}"
        return f"{mask_title(self.mask)}, {self.layout}, {binary(self.seqlen)} tokens over {ranks}, {shape}"

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @cached_property
    def held(self) -> Layout:
        """Who holds which tokens."""
        return self.named(self.layout)

    def named(self, layout: str) -> Layout:
        """The tokens in another layout."""
        made: Layout = getattr(Layout, layout)(self.seqlen, self.world)
        return made

    @cached_property
    def mask(self) -> Mask:
        """The mask.

        Raises:
            ValueError: its parts do not fit each other or the length.
        """
        return mask_of(
            Layouts(self.held, self.held), self.batch, causal=self.causal, window_size=self.window,
            cu_seqlens=self.cu_seqlens, seqused_k=self.seqused_k, prefix_length=self.prefix_length,
            block_mask=pattern_of(self.seqlen, self.block_mask),
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Full or causal and no more: what every library computes."""
        return self.mask in (Mask(), Mask(causal=True))

    def options(self, device: torch.device) -> Masks:
        """The mask as the reference takes it."""
        mask = self.mask
        given = Masks(causal=self.causal, window_size=mask.window, cu_seqlens=self.cu_seqlens)
        if self.prefix_length:
            given["prefix_length"] = self.prefix_length
        if mask.used is not None:
            given["seqused_k"] = mask.used
        if mask.global_tokens:
            given["global_tokens"] = mask.global_tokens
        if mask.blocks is not None:
            given |= Masks(block_mask=mask.blocks.visible.to(device), block_size=mask.blocks.block)
        return given

    @property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """Of q, k, v and dout."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        dims = (self.head_dim, self.head_dim, self.value_dim, self.value_dim)
        return [(self.batch, self.seqlen, *of) for of in zip(heads, dims, strict=True)]

    def tensors(self) -> Tensors:
        """q, k, v and dout of the whole sequence, the same on every rank, on the CPU."""
        draw = torch.Generator().manual_seed(self.seed)
        return tuple(torch.randn(shape, generator=draw).to(DTYPES[self.dtype]) for shape in self.shapes)

    def drawn(self, rank: int, device: torch.device) -> Tensors:
        """q, k, v and dout of a rank's tokens, another draw on each rank, made where they are used."""
        draw, length = torch.Generator(device).manual_seed(self.seed + rank), self.held.lengths[rank]
        shapes = [(batch, length, *of) for batch, _, *of in self.shapes]
        options: dict[str, Any] = {"generator": draw, "device": device, "dtype": DTYPES[self.dtype]}
        return tuple(torch.randn(shape, **options) for shape in shapes)

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all batch rows."""
        positions = torch.arange(self.seqlen)
        alike = 1 if self.mask.used is not None else self.batch  # where they differ all are counted together
        return alike * visible_pairs(self.mask, positions, positions)

    @property
    def flops(self) -> int:
        """Of a forward, on the visible area."""
        return forward_flops(self.pairs, heads=self.heads, head_dim=self.head_dim, head_dim_v=self.value_dim)

    @property
    def flash_flops(self) -> int | None:
        """As FlashAttention's tables count it: half the square of a causal one; None for other masks."""
        if not self.is_plain:
            return None
        square = self.seqlen**2 // (2 if self.causal else 1)
        return forward_flops(
            square, heads=self.heads, head_dim=self.head_dim, head_dim_v=self.value_dim, batch=self.batch
        )


def forward_backward(attend: Callable[..., Any], inputs: Sequence[Tensor], *gradients: Tensor) -> Tensors:
    """What ``attend`` makes of q, k and v: out, or out and lse; then dq, dk and dv for the gradients of these."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    made = attend(*leaves)
    results = made if isinstance(made, tuple) else (made,)
    return (*(x.detach() for x in results), *torch.autograd.grad(results, leaves, gradients))


def forward_flops(pairs: int, *, heads: int, head_dim: int, head_dim_v: int | None = None, batch: int = 1) -> int:
    """``2 * pairs * (D + Dv) * H``: two operations per product and sum, of ``q k^T`` and of ``p v``.

    The backward counts ``BACKWARD_FLOPS`` times as much (five products instead of two).
    """
    return 2 * pairs * (head_dim + (head_dim if head_dim_v is None else head_dim_v)) * heads * batch


def packed(seqlen: int, mean: int, seed: int) -> list[int]:
    """Boundaries of documents of exponentially distributed lengths, the last one cut off at ``seqlen``.

    Raises:
        ValueError: no positive mean.
    """
    if mean < 1:
        raise ValueError(f"documents is {mean}: it must be at least 1, their mean length")
    generator, boundaries = torch.Generator().manual_seed(seed), [0]
    while boundaries[-1] < seqlen:
        length = int(torch.empty(()).exponential_(1 / mean, generator=generator).ceil())
        boundaries.append(min(boundaries[-1] + max(length, 1), seqlen))
    return boundaries


def boundaries_of(
    seqlen: int, cu_seqlens: Sequence[int] | None, documents: int | None, documents_seed: int | None
) -> Sequence[int] | None:
    """What ``--cu-seqlens`` or ``--documents`` say.

    Raises:
        ValueError: both of them, or a seed and no documents to draw.
    """
    if documents is None and documents_seed is not None:
        raise ValueError("--documents-seed is given without --documents: it draws their lengths")
    if cu_seqlens is not None and documents is not None:
        raise ValueError("--cu-seqlens and --documents are both given: pass one of them")
    return packed(seqlen, documents, documents_seed or 0) if documents is not None else cu_seqlens


def pattern_of(seqlen: int, pattern: Pattern | None) -> BlockMask | Longformer | None:
    """What ``--block-mask`` says; the global tokens of Longformer are the first ones.

    Raises:
        ValueError: the builder takes other values.
    """
    if pattern is None:
        return None
    given = {"global_" if key == "global" else key: value for key, value in pattern.parameters.items()}
    if pattern.name == "longformer":
        stretches = [(0, given["global_"])] if given["global_"] else []
        return patterns.longformer(given["window"], stretches)
    made: BlockMask = getattr(patterns, pattern.name)(seqlen, **given)
    return made


def mask_title(mask: Mask) -> str:
    """A mask in a few words."""
    words = ["causal" if mask.causal else ""]
    words.append(f"window {mask.window}" if mask.window != (UNLIMITED, UNLIMITED) else "")
    words.append(f"{len(mask.documents.boundaries) - 1:,} documents" if mask.documents is not None else "")
    words.append(f"prefix {mask.prefix:,}" if mask.prefix else "")
    words.append(f"keys used {mask.used}" if mask.used is not None else "")
    words.append(f"{mask.blocks.visible.float().mean():.1%} of blocks of {mask.blocks.block}" if mask.blocks else "")
    words.append(f"{sum(end - start for start, end in mask.global_tokens)} global tokens" if mask.global_tokens else "")
    return ", ".join(word for word in words if word) or "full"


def mask_data(mask: Mask) -> dict[str, Any]:
    """For JSON: what is set, and whether it is causal."""
    blocks = mask.blocks
    data: dict[str, Any] = {
        "window_size": None if mask.window == (UNLIMITED, UNLIMITED) else mask.window,
        "cu_seqlens": None if mask.documents is None else mask.documents.boundaries,
        "prefix_length": mask.prefix or None,
        "seqused_k": mask.used,
        "block_mask": None if blocks is None else {
            "block": blocks.block, "blocks": blocks.visible.shape, "seen": int(blocks.visible.sum()),
        },
        "global_tokens": mask.global_tokens or None,
    }  # fmt: skip
    return {"causal": mask.causal} | {name: value for name, value in data.items() if value is not None}
