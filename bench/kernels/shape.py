"""What ``bench kernels`` computes: one attention on one device, by the shape flags that all commands share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...kernels import Bounds
from ...reference.masks import Masks
from ...ring import Layout, Mask
from ...ring.args import Layouts, mask_of
from ...ring.schedule.mask import UNLIMITED, BlockMask, Longformer, visible_pairs
from ...ring.schedule.plan import plan
from ..common import masks
from ..common.flops import forward_flops
from ..common.masks import pattern_of
from ..common.shapes import Pattern
from ..ring.candidates import DTYPES


@dataclass(frozen=True)
class Shape:
    """One attention: its sizes and its mask."""

    seqlen: int
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    head_dim_v: int = 0  # that of q and k where it is 0
    dtype: str = "bfloat16"
    causal: bool = True
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    cu_seqlens: tuple[int, ...] | None = None
    prefix_length: int | None = None
    block_mask: Pattern | None = None
    batch: int = 1
    seqused_k: tuple[int, ...] | None = None

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @cached_property
    def layout(self) -> Layout:
        """All tokens on one rank."""
        return Layout.contiguous(self.seqlen, 1)

    @cached_property
    def pattern(self) -> BlockMask | Longformer | None:
        """What ``block_mask`` names."""
        return pattern_of(self.seqlen, self.block_mask)

    @cached_property
    def mask(self) -> Mask:
        """The mask.

        Raises:
            ValueError: its parts do not fit each other or the length.
        """
        return mask_of(
            Layouts(self.layout, self.layout), self.batch, causal=self.causal, window_size=self.window,
            cu_seqlens=self.cu_seqlens, seqused_k=self.seqused_k, prefix_length=self.prefix_length,
            block_mask=self.pattern,
        )  # fmt: skip

    @property
    def square(self) -> bool:
        """Full or causal and no more: what every library computes."""
        return self.mask in (Mask(), Mask(causal=True))

    def bounds(self, device: torch.device) -> tuple[Bounds, ...]:
        """As the kernels take the mask: one per launch, several where it has global tokens."""
        return tuple(hop_mask.bounds for hop_mask in plan(self.layout, self.mask, 0, 1, device).hop_masks[0])

    def options(self, device: torch.device) -> Masks:
        """As the reference takes the mask."""
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

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all batch rows."""
        positions = self.layout.positions(0)
        alike = 1 if self.mask.used is not None else self.batch  # where they differ all are counted together
        return alike * visible_pairs(self.mask, positions, positions)

    @property
    def flops(self) -> int:
        """Of a forward, on the visible area."""
        return forward_flops(self.pairs, heads=self.heads, head_dim=self.head_dim, head_dim_v=self.value_dim)

    @property
    def flash_flops(self) -> int | None:
        """As FlashAttention's tables count it: half the square of a causal one; None for other masks."""
        if not self.square:
            return None
        square = self.seqlen**2 // (2 if self.causal else 1)
        return forward_flops(
            square, heads=self.heads, head_dim=self.head_dim, head_dim_v=self.value_dim, batch=self.batch
        )

    @property
    def labels(self) -> dict[str, Any]:
        """What a number is of."""
        dims = {} if self.value_dim == self.head_dim else {"head_dim_v": self.value_dim}
        return {
            "dtype": self.dtype, "head_dim": self.head_dim, **dims, "mask": masks.title(self.mask),
            "seqlen": self.seqlen, "heads": f"{self.heads}/{self.kv_heads}",
        }  # fmt: skip

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q, k, v and dout."""
        sizes = [(self.heads, self.head_dim), (self.kv_heads, self.head_dim)]
        sizes += [(self.kv_heads, self.value_dim), (self.heads, self.value_dim)]
        q, k, v, dout = (
            torch.randn(self.batch, self.seqlen, *size, device=device, dtype=torch.float32).to(DTYPES[self.dtype])
            for size in sizes
        )
        return q, k, v, dout
