"""The mask that the flags of :mod:`shapes` say, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ring.schedule import mask as patterns
from ...ring.schedule.mask import UNLIMITED, BlockMask, Longformer, Mask
from .shapes import Pattern, refuse_without


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
    if documents is None:
        refuse_without("documents", "it draws their lengths", documents_seed=documents_seed)
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


def title(mask: Mask) -> str:
    """A mask in a few words."""
    words = ["causal" if mask.causal else ""]
    words.append(f"window {mask.window}" if mask.window != (UNLIMITED, UNLIMITED) else "")
    words.append(f"{len(mask.documents.boundaries) - 1:,} documents" if mask.documents is not None else "")
    words.append(f"prefix {mask.prefix:,}" if mask.prefix else "")
    words.append(f"keys used {mask.used}" if mask.used is not None else "")
    words.append(f"{mask.blocks.visible.float().mean():.1%} of blocks of {mask.blocks.block}" if mask.blocks else "")
    words.append(f"{sum(end - start for start, end in mask.global_tokens)} global tokens" if mask.global_tokens else "")
    return ", ".join(word for word in words if word) or "full"


def data(mask: Mask) -> dict[str, Any]:
    """For JSON: what is set, and whether it is causal."""
    told: dict[str, Any] = {"causal": mask.causal}
    if mask.window != (UNLIMITED, UNLIMITED):
        told["window_size"] = mask.window
    if mask.documents is not None:
        told["cu_seqlens"] = mask.documents.boundaries
    if mask.prefix:
        told["prefix_length"] = mask.prefix
    if mask.used is not None:
        told["seqused_k"] = mask.used
    if mask.blocks is not None:
        told["block_mask"] = {
            "block": mask.blocks.block,
            "blocks": mask.blocks.visible.shape,
            "seen": _seen(mask.blocks),
        }
    if mask.global_tokens:
        told["global_tokens"] = mask.global_tokens
    return told


def _seen(blocks: BlockMask) -> int:
    return int(blocks.visible.sum())
