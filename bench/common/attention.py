"""One attention problem as the flags describe it: sizes, mask, layout, inputs and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.json_files import read_object
from ...reference.masks import MaskOptions
from ...ring import Intervals, Layout, Mask, prefix_tree, ring_attention, single_rank, slices, visible_pairs
from ...ring.prepare import Layouts, mask_from_options
from ...ring.schedule import mask as patterns
from ...ring.schedule.mask import NO_WINDOW, BlockMask, Longformer, PositionRange, read_ranges
from .cases import UnavailableError
from .flags import DTYPE_BYTES, PatternFlag, count_noun, size_text

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
Tensors = tuple[Tensor, ...]

PROBE_TOKENS = 256
PACKED, PER_DOCUMENT = DOCUMENT_LAYOUTS = "packed", "per-document"  # names of Layout.packed, and zigzag per document
BACKWARD_FLOPS = 2.5  # times the forward's: five matrix products instead of two


@dataclass(frozen=True)
class AttentionConfig:
    """One attention problem, on one device or split over the ranks of a ring."""

    seqlen: int
    world: int = 1
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    layout: str = "zigzag"
    threads: int = 1  # CPU threads per process
    seed: int = 0
    device: str = "cpu"
    transport: str = "auto"
    head_dim_v: int = 0  # 0: the same as head_dim
    window: tuple[int, int] = NO_WINDOW
    cu_seqlens: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    prefix_length: int | None = None
    block_mask: PatternFlag | None = None
    islands: tuple[PositionRange, ...] | None = None
    intervals: Intervals | None = None

    @property
    def title(self) -> str:
        """Description such as ``causal, zigzag, 8k tokens over 4 ranks, B1 H8/8 D64 float32``."""
        ranks = count_noun(self.world, "rank")
        shape = f"B{self.batch} H{self.heads}/{self.kv_heads} D{self.head_dim} {self.dtype}"
        return f"{mask_label(self.mask)}, {self.layout}, {size_text(self.seqlen)} tokens over {ranks}, {shape}"

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @cached_property
    def token_layout(self) -> Layout:
        """The layout by which the tokens are split over the ranks."""
        return self.layout_by_name(self.layout)

    def layout_by_name(self, layout: str) -> Layout:
        """Return the layout with this name, for this number of tokens and ranks, and for these documents."""
        if layout == PACKED:
            masks, heads = [(Mask(self.causal, self.window), 1)], self.heads // self.kv_heads
            return Layout.packed(self.cu_seqlens or (0, self.seqlen), self.world, masks=masks, heads_per_kv_head=heads)
        if layout == PER_DOCUMENT:
            return Layout.zigzag(self.seqlen, self.world, self.cu_seqlens)
        result: Layout = getattr(Layout, layout)(self.seqlen, self.world)
        return result

    @cached_property
    def mask(self) -> Mask:
        """The mask; ValueError if its arguments do not fit each other or the sequence length."""
        return mask_from_options(
            Layouts(self.token_layout, self.token_layout), self.batch, causal=self.causal, window_size=self.window,
            cu_seqlens=self.cu_seqlens, seqused_k=self.seqused_k, prefix_length=self.prefix_length,
            block_mask=build_pattern(self.seqlen, self.block_mask), islands=self.islands, intervals=self.intervals,
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """True if the mask is plain full or plain causal, which every library computes."""
        return self.mask in (Mask(), Mask(causal=True))

    def reference_masks(self, device: torch.device) -> MaskOptions:
        """Return the mask as arguments of ``ringattn.reference.attention``."""
        mask = self.mask
        arguments = MaskOptions(causal=self.causal, window_size=mask.window, cu_seqlens=self.cu_seqlens)
        if self.prefix_length:
            arguments["prefix_length"] = self.prefix_length
        if mask.used is not None:
            arguments["seqused_k"] = mask.used
        if mask.islands:
            arguments["islands"] = mask.islands
        if mask.intervals is not None:
            arguments["intervals"] = [(lo, hi) for lo, hi in mask.intervals.table]
        if mask.global_tokens:
            arguments["global_tokens"] = mask.global_tokens
        if mask.blocks is not None:
            arguments |= MaskOptions(block_mask=mask.blocks.visible.to(device), block_size=mask.blocks.block)
        return arguments

    @property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """The shapes of q, k, v and dout."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        dims = (self.head_dim, self.head_dim, self.value_dim, self.value_dim)
        return [(self.batch, self.seqlen, *of) for of in zip(heads, dims, strict=True)]

    def tensors(self) -> Tensors:
        """Return random q, k, v and dout of the whole sequence on the CPU, equal on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in self.shapes)

    def random_shard(self, rank: int, device: torch.device) -> Tensors:
        """Return random q, k, v and dout of one rank's tokens on ``device``; every rank draws different numbers."""
        generator, length = torch.Generator(device).manual_seed(self.seed + rank), self.token_layout.lengths[rank]
        shapes = [(batch, length, *of) for batch, _, *of in self.shapes]
        options: dict[str, Any] = {"generator": generator, "device": device, "dtype": DTYPES[self.dtype]}
        return tuple(torch.randn(shape, **options) for shape in shapes)

    @cached_property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs, over all batch rows."""
        positions = torch.arange(self.seqlen)
        # With seqused_k the rows differ, and visible_pairs counts all of them.
        equal_rows = 1 if self.mask.used is not None else self.batch
        return equal_rows * visible_pairs(self.mask, positions, positions)

    @property
    def flops(self) -> int:
        """The FLOPs of one forward, counted on the visible pairs."""
        return forward_flops(self.pairs, heads=self.heads, head_dim=self.head_dim, head_dim_v=self.value_dim)

    @property
    def flash_flops(self) -> int | None:
        """The FLOPs as FlashAttention counts them (half the square if causal), or None for other masks."""
        if not self.is_plain:
            return None
        square = self.seqlen**2 // (2 if self.causal else 1)
        return forward_flops(
            square, heads=self.heads, head_dim=self.head_dim, head_dim_v=self.value_dim, batch=self.batch
        )


def forward_backward(attend: Callable[..., Any], inputs: Sequence[Tensor], *gradients: Tensor) -> Tensors:
    """Run ``attend(*inputs)`` and its backward; return its outputs and the gradient of every input.

    ``gradients`` are those of the outputs: dout, and dlse if ``attend`` also returns lse.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attend(*leaves)
    results = output if isinstance(output, tuple) else (output,)
    return (*(x.detach() for x in results), *torch.autograd.grad(results, leaves, gradients))


def check_backend(backend: str, problem: AttentionConfig, device: torch.device) -> None:
    """Raise UnavailableError if a backend does not compute a problem here, found by a small call on one rank."""
    small = replace(problem, seqlen=PROBE_TOKENS, world=1, batch=1)
    *qkv, dout = small.random_shard(0, device)
    attend: Any = partial(ring_attention, group=single_rank(), causal=problem.causal, backend=backend)
    try:
        forward_backward(attend, tuple(qkv), dout)
    except torch.AcceleratorError:
        raise  # the device is unusable
    except Exception as refused:
        raise UnavailableError(str(refused)) from None


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, cu_seqlens: Sequence[int] | None = None
) -> Tensor:
    """Compute PyTorch's attention on ``[B, S, H, D]``, of each document by itself if ``cu_seqlens`` is given."""
    if cu_seqlens is not None:
        lengths = [end - start for start, end in pairwise(cu_seqlens) if start < end]
        parts = zip(*(torch.split(x, lengths, 1) for x in (q, k, v)), strict=True)
        return torch.cat([sdpa_attention(*part, causal=causal) for part in parts], 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def forward_flops(pairs: int, *, heads: int, head_dim: int, head_dim_v: int | None = None, batch: int = 1) -> int:
    """Return ``2 * pairs * (D + Dv) * H * B``: the multiplications and additions of ``q k^T`` and ``p v``."""
    return 2 * pairs * (head_dim + (head_dim if head_dim_v is None else head_dim_v)) * heads * batch


def random_boundaries(seqlen: int, mean: int, seed: int) -> list[int]:
    """Draw document boundaries for lengths that are exponentially distributed around ``mean``, from 0 to ``seqlen``."""
    if mean < 1:
        raise ValueError(f"documents is {mean}: the mean length must be at least 1 token")
    generator, boundaries = torch.Generator().manual_seed(seed), [0]
    while boundaries[-1] < seqlen:
        length = int(torch.empty(()).exponential_(1 / mean, generator=generator).ceil())
        boundaries.append(min(boundaries[-1] + max(length, 1), seqlen))
    return boundaries


def document_boundaries(
    seqlen: int, cu_seqlens: Sequence[int] | None, documents: int | None, documents_seed: int | None
) -> Sequence[int] | None:
    """Return ``cu_seqlens``, or boundaries drawn with the mean length ``documents``, or None if both are None."""
    if documents is None and documents_seed is not None:
        raise ValueError("--documents-seed has no effect without --documents. Pass both, or neither.")
    if cu_seqlens is not None and documents is not None:
        raise ValueError("--cu-seqlens and --documents cannot be used together: pass only one")
    return random_boundaries(seqlen, documents, documents_seed or 0) if documents is not None else cu_seqlens


def build_pattern(seqlen: int, pattern: PatternFlag | None) -> BlockMask | Longformer | None:
    """Build the block mask that ``--block-mask`` asks for; Longformer's global tokens are the first ones."""
    if pattern is None:
        return None
    parameters = {"global_" if key == "global" else key: value for key, value in pattern.parameters.items()}
    if pattern.name == "longformer":
        stretches = [(0, parameters["global_"])] if parameters["global_"] else []
        return patterns.longformer(parameters["window"], stretches)
    result: BlockMask = getattr(patterns, pattern.name)(seqlen, **parameters)
    return result


def read_mask(path: Path | None, tokens: int) -> dict[str, Any]:
    """Return ``islands`` and ``intervals`` from the file that ``--mask`` names, for queries of ``tokens`` positions."""
    if path is None:
        return {}
    try:
        fields = read_object(path)
        made: dict[str, Any] = {}
        if "islands" in fields:
            made["islands"] = read_ranges("islands", fields.pop("islands"))
        if {*fields} == {"lengths", "parents"}:
            made["intervals"] = prefix_tree(**fields).intervals
        elif [*fields] == ["slices"]:
            made["intervals"] = slices(fields["slices"], tokens)
        elif [*fields] == ["intervals"]:
            made["intervals"] = Intervals(torch.tensor(fields["intervals"]))
        elif fields:
            raise ValueError(f"it has {', '.join(fields)}, and may have one of intervals, slices, lengths with parents")
    except (TypeError, ValueError, RuntimeError) as error:  # torch.tensor raises all of them
        raise ValueError(f"--mask is {path}: {error}") from None
    return made


def mask_label(mask: Mask) -> str:
    """Return a description such as ``causal, window (4096, 0)``, or ``full``."""
    words = ["causal" if mask.causal else ""]
    words.append(f"window {mask.window}" if mask.window != NO_WINDOW else "")
    words.append(f"{len(mask.documents.boundaries) - 1:,} documents" if mask.documents is not None else "")
    words.append(f"prefix {mask.prefix:,}" if mask.prefix else "")
    words.append(count_noun(len(mask.islands), "island") if mask.islands else "")
    words.append(count_noun(len(mask.intervals.table), "interval") if mask.intervals is not None else "")
    words.append(f"keys used {mask.used}" if mask.used is not None else "")
    words.append(f"{mask.blocks.visible.float().mean():.1%} of blocks of {mask.blocks.block}" if mask.blocks else "")
    words.append(f"{sum(end - start for start, end in mask.global_tokens)} global tokens" if mask.global_tokens else "")
    return ", ".join(word for word in words if word) or "full"


def mask_data(mask: Mask) -> dict[str, Any]:
    """Return the mask as JSON data: whether it is causal, and every other argument that is set."""
    blocks = mask.blocks
    data: dict[str, Any] = {
        "window_size": None if mask.window == NO_WINDOW else mask.window,
        "cu_seqlens": None if mask.documents is None else mask.documents.boundaries,
        "prefix_length": mask.prefix or None,
        "islands": mask.islands or None,
        "intervals": None if mask.intervals is None else repr(mask.intervals),
        "seqused_k": mask.used,
        "block_mask": None if blocks is None else {
            "block": blocks.block, "blocks": blocks.visible.shape, "seen": int(blocks.visible.sum()),
        },
        "global_tokens": mask.global_tokens or None,
    }  # fmt: skip
    return {"causal": mask.causal} | {name: value for name, value in data.items() if value is not None}
