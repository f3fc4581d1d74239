"""A call of ``ring_attention`` as the arguments of a ``torch.library`` op, which takes tensors, numbers and text.

What changes from call to call travels as values: spans of a layout, boundaries of documents and blocks of a mask as CPU
tensors, so that other ones, and other numbers of them, are no new graph of torch.compile. A ring or a member of a
``LocalWorld``, which is no value, is named by a number, a process group by its name. The rest is a graph's constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import LocalGroup
from ..comm.numbers import of_number
from ..kernels import KernelConfig
from ..kernels.ops import pack_config, unpack_config
from ..kernels.scores import SEEDS
from .node import resolve_ring
from .ring import Ring
from .schedule.block_mask import BlockMask, Longformer
from .schedule.layout import Layout, LayoutLike
from .schedule.plan import PLANS

SCHEMA = (
    "Tensor? alibi_slopes, Tensor? layout, str? layout_name, Tensor? kv_layout, str? kv_layout_name, "
    "Tensor? cu_seqlens, Tensor? seqused_k, Tensor? blocks, SymInt block, SymInt[]? longformer, "
    "SymInt ring, SymInt member, str group, bool causal, SymInt[] window_size, float? softmax_scale, float softcap, "
    "float dropout_p, Tensor? dropout_seed, bool drawn, SymInt? prefix_length, str backend, int[]? tiles, str[] choices"
)


class Packed(NamedTuple):
    """A call besides q, k, v and the sink, as ``SCHEMA`` has it."""

    alibi_slopes: Tensor | None
    layout: Tensor | None
    layout_name: str | None
    kv_layout: Tensor | None
    kv_layout_name: str | None
    cu_seqlens: Tensor | None
    seqused_k: Tensor | None
    blocks: Tensor | None
    block: int  # positions per block; 0: as many as make equal ones
    longformer: list[int] | None  # the two sides of its window, then begin and end of its stretches
    ring: int
    member: int
    group: str
    causal: bool
    window_size: list[int]
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    dropout_seed: Tensor | None  # int64 []
    drawn: bool  # on every rank, and rank 0's counts
    prefix_length: int | None
    backend: str
    tiles: list[int] | None
    choices: list[str]


def pack(
    ring: Ring | None,
    group: Any,
    *,
    layout: LayoutLike,
    kv_layout: LayoutLike,
    window_size: tuple[int, int],
    dropout_p: float,
    dropout_seed: int | None,
    cu_seqlens: Iterable[int] | Tensor | None,
    seqused_k: Iterable[int] | Tensor | None,
    block_mask: Tensor | BlockMask | Longformer | None,
    config: KernelConfig | None,
    **plain: Any,
) -> Packed:
    """The arguments of ``ring_attention`` as those of an op."""
    blocks, block, longformer = _packed_mask(block_mask)
    is_local = isinstance(group, LocalGroup)
    drawn = bool(dropout_p) and dropout_seed is None
    tiles, choices = pack_config(config)
    return Packed(
        layout=layout.table if isinstance(layout, Layout) else None,
        layout_name=_layout_name(layout),
        kv_layout=kv_layout.table if isinstance(kv_layout, Layout) else None,
        kv_layout_name=_layout_name(kv_layout),
        cu_seqlens=_packed_numbers(cu_seqlens),
        seqused_k=_packed_numbers(seqused_k),
        blocks=blocks,
        block=block,
        longformer=longformer,
        ring=0 if ring is None else ring.number,
        member=group.number if is_local else 0,
        group="" if group is None or is_local else _name_of(group),
        window_size=list(window_size),
        dropout_p=dropout_p,
        # an op of torch's own, so that checkpointing repeats the number that it drew
        dropout_seed=torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
        if drawn
        else _packed_seed(dropout_seed),
        drawn=drawn,
        tiles=tiles,
        choices=choices,
        **plain,
    )


def _layout_name(layout: object) -> str | None:
    """Of what is neither a name nor a layout too, for the op to refuse."""
    return None if layout is None or isinstance(layout, Layout) else str(layout)


def _packed_mask(block_mask: Tensor | BlockMask | Longformer | None) -> tuple[Tensor | None, int, list[int] | None]:
    if isinstance(block_mask, Longformer):
        return None, 0, [*block_mask.window, *(edge for stretch in block_mask.global_tokens for edge in stretch)]
    if isinstance(block_mask, BlockMask):
        return block_mask.visible, block_mask.block, None
    return block_mask, 0, None


def _packed_numbers(numbers: Iterable[int] | Tensor | None) -> Tensor | None:
    if numbers is None or isinstance(numbers, Tensor):
        return numbers
    given = list(numbers)
    # fractions stay fractions, for the op to refuse
    return torch.tensor(given, dtype=None if any(isinstance(x, float) for x in given) else torch.int64, device="cpu")


def _packed_seed(seed: int | None) -> Tensor | None:
    if seed is None:
        return None
    if not isinstance(seed, int) or not 0 <= seed < SEEDS:  # signed, others would stand for seeds that there are
        raise ValueError(f"dropout_seed is {seed!r}: it must be 0 to 2^64 - 1")
    return torch.full((), seed - SEEDS if seed >= SEEDS // 2 else seed, dtype=torch.int64, device="cpu")


def _name_of(group: Any) -> str:
    whole = group if isinstance(group, dist.ProcessGroup) else group.get_group()  # of a one-dimensional DeviceMesh
    return str(whole.group_name)


def ring_of_call(packed: Packed, device: torch.device) -> Ring:
    """The ring that a call names.

    Raises:
        RuntimeError: it, or the group, is gone.
    """
    for what, number in (("ring", packed.ring), ("group", packed.member)):
        if number and of_number(number) is None:
            raise RuntimeError(f"the {what} of a compiled call is gone: keep it until its backward is done")
    group: Any = of_number(packed.member)
    if packed.group:
        c10d: Any = dist.distributed_c10d  # what functional collectives find a group by
        group = c10d._resolve_process_group(packed.group)
    ring: Any = of_number(packed.ring)
    return resolve_ring(ring, group, device)


def meaning(packed: Packed, sink: Tensor | None, seed: int | None) -> dict[str, Any]:
    """The arguments of ``settled``."""
    return {
        "layout": _unpacked_layout(packed.layout, packed.layout_name),
        "kv_layout": _unpacked_layout(packed.kv_layout, packed.kv_layout_name),
        "causal": packed.causal,
        "window_size": tuple(packed.window_size),
        "softmax_scale": packed.softmax_scale,
        "softcap": packed.softcap,
        "learnable_sink": sink,
        "alibi_slopes": packed.alibi_slopes,
        "dropout_p": packed.dropout_p,
        "dropout_seed": seed,
        "cu_seqlens": packed.cu_seqlens,
        "seqused_k": packed.seqused_k,
        "prefix_length": packed.prefix_length,
        "block_mask": _unpacked_mask(packed),
        "backend": packed.backend,
        "config": unpack_config(packed.tiles, packed.choices),
    }


def _unpacked_layout(table: Tensor | None, name: str | None) -> Layout | str | None:
    return name if table is None else _layout(table.numpy().tobytes())


@lru_cache(maxsize=PLANS)
def _layout(table: bytes) -> Layout:
    spans: list[list[tuple[int, ...]]] = []
    for rank, *span in torch.frombuffer(bytearray(table), dtype=torch.int64).view(-1, 4).tolist():
        spans.extend([] for _ in range(len(spans), rank + 1))
        spans[rank].append(tuple(span))
    return Layout(spans)


def _unpacked_mask(packed: Packed) -> Tensor | BlockMask | Longformer | None:
    if packed.longformer is not None:
        left, right, *edges = packed.longformer
        return Longformer((left, right), tuple(zip(edges[::2], edges[1::2], strict=True)))
    if packed.blocks is None or not packed.block:
        return packed.blocks
    if packed.blocks.device.type != "cpu" or not packed.blocks.numel():
        return BlockMask(packed.blocks, packed.block)  # which says why it refuses
    return _block_mask(packed.blocks.numpy().tobytes(), packed.blocks.shape[1], packed.block)


@lru_cache(maxsize=PLANS)
def _block_mask(visible: bytes, columns: int, block: int) -> BlockMask:
    return BlockMask(torch.frombuffer(bytearray(visible), dtype=torch.bool).view(-1, columns), block)
