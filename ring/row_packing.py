"""Batch rows that see different keys, packed into one sequence without the hidden keys.

Position p of row b becomes ``b * length + p``, and every row is one document or several. Hidden keys are not sent: the
layout of the keys leaves them out. Therefore the kernels need not know about rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.checks import check_not_dtensor
from ..kernels.shared_cache import SharedValue
from .schedule.layout import Documents, Layout, Span, whole_numbers
from .schedule.plan import PLAN_CACHE_SIZE

CuSeqlensLike = Iterable[int] | Sequence[Sequence[int]] | Tensor


class RowMasks(NamedTuple):
    """Per-row masks of a batch; hashable."""

    documents: tuple[Documents, ...] | None  # documents of each row
    visible: bytes  # bool ``[B, key positions]`` as bytes
    batch: int
    length: int  # number of positions per row


class PackedRows(NamedTuple):
    """The rows of a batch as one sequence, as this rank holds it."""

    batch: int
    queries: Layout
    keys: Layout
    documents: Documents
    visible_index: Tensor | None
    """Indices of this rank's visible keys in the packed rows, int64 on the device; None if all are visible."""

    def pack(self, x: Tensor) -> Tensor:
        """Return ``[B, S, H, D]`` as ``[1, B * S, H, D]``, a view if possible."""
        return x.flatten(0, 1)[None]

    def pack_lse(self, lse: Tensor) -> Tensor:
        """Return ``[B, H, S]`` as ``[1, H, B * S]``."""
        return lse.transpose(0, 1).flatten(1)[None].contiguous()

    def pack_keys(self, x: Tensor) -> Tensor:
        """Return the visible keys of ``[B, Sk, Hkv, D]`` as ``[1, keys, Hkv, D]``."""
        return self.pack(x) if self.visible_index is None else x.flatten(0, 1).index_select(0, self.visible_index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Return ``[1, B * S, H, D]`` as ``[B, S, H, D]``."""
        return x.view(self.batch, x.shape[1] // self.batch, *x.shape[2:])

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """Return ``[1, H, B * S]`` as ``[B, H, S]``."""
        return lse.view(lse.shape[1], self.batch, lse.shape[2] // self.batch).transpose(0, 1).contiguous()

    def unpack_keys(self, grad: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of packed keys in the shape of ``like``; 0 for hidden keys."""
        if self.visible_index is not None:
            grad = grad.new_zeros(like.shape).flatten(0, 1).index_copy_(0, self.visible_index, grad[0])
        return grad.view(like.shape)


def has_row_boundaries(cu_seqlens: CuSeqlensLike | None) -> bool:
    """Return True if boundaries are given per batch row."""
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens.dim() == 2
    return isinstance(cu_seqlens, (list, tuple)) and len(cu_seqlens) > 0 and isinstance(cu_seqlens[0], (list, tuple))


def lengths_per_row(name: str, numbers: Iterable[int] | Tensor, batch: int, reach: int) -> tuple[int, ...]:
    """Return the argument ``name`` as one number of keys per batch row.

    Raises:
        ValueError: there are not ``batch`` numbers, or one is not between 0 and ``reach``.
    """
    lengths = whole_numbers(name, numbers, "[B]")
    if len(lengths) != batch:
        raise ValueError(f"{name} has {len(lengths)} lengths: it must have {batch}, one per batch row")
    for row, length in enumerate(lengths):
        if not 0 <= length <= reach:
            raise ValueError(f"{name}[{row}] is {length}: it must be between 0 and {reach}, the number of keys")
    return lengths


def split_row_masks(
    cu_seqlens: CuSeqlensLike | None,
    key_mask: Tensor | None,
    leftpad_k: Iterable[int] | Tensor | None,
    seqused_k: Iterable[int] | Tensor | None,
    *,
    batch: int,
    keys: int,
    length: int,
) -> tuple[dict[str, Any], RowMasks | None, dict[str, Any]]:
    """Split the per-row arguments into arguments for all rows and the per-row masks that remain.

    No `RowMasks` are needed if all rows have the same documents and no hidden key precedes a visible one. Then
    ``cu_seqlens`` of one row and ``seqused_k`` describe the mask. ``keys`` and ``length`` are one past the last
    position of the keys and of all tokens.

    Returns:
        The arguments for all rows, the per-row masks or None, and the values that ranks compare.
    """
    documents = None if cu_seqlens is None else _documents(cu_seqlens, batch, length)
    used = None if seqused_k is None else lengths_per_row("seqused_k", seqused_k, batch, keys)
    left = None if leftpad_k is None else lengths_per_row("leftpad_k", leftpad_k, batch, keys)
    visible, at = torch.ones(batch, keys, dtype=torch.bool), torch.arange(keys)
    if key_mask is not None:
        visible = _check_key_mask(key_mask, batch, keys)
    if left is not None:
        visible = visible & (at >= torch.tensor(left)[:, None])
    counts = visible.sum(1)
    plain: dict[str, Any] = {"cu_seqlens": None, "seqused_k": None, "key_mask": None, "leftpad_k": None}
    if len(set(documents or ())) <= 1 and visible.equal(at < counts[:, None]):
        if documents:
            plain["cu_seqlens"] = documents[0].boundaries
        if used is not None or not visible.all():
            plain["seqused_k"] = tuple(map(min, used or [keys] * batch, counts.tolist()))
        return plain, None, {}
    compared: dict[str, Any] = {"cu_seqlens": documents, "seqused_k": used, "leftpad_k": left, "key_mask": None}
    if key_mask is not None:
        compared["key_mask"] = f"{int(key_mask.sum())} keys, {sha256(key_mask.numpy().tobytes()).hexdigest()[:16]}"
    if used is not None:
        visible = visible & (at < torch.tensor(used)[:, None])
    return plain, RowMasks(documents, visible.numpy().tobytes(), batch, length), compared


def _documents(cu_seqlens: Any, batch: int, length: int) -> tuple[Documents, ...]:
    """Return the documents of every batch row, without empty ones; raise ValueError if ``cu_seqlens`` does not fit."""
    by_row: Any = (
        [Documents(row) for row in cu_seqlens] if has_row_boundaries(cu_seqlens) else [Documents(cu_seqlens)] * batch
    )
    if len(by_row) != batch:
        raise ValueError(
            f"cu_seqlens has {len(by_row)} rows: it must have {batch}, one per batch row, or be one list for all rows"
        )
    documents = []
    for row, boundaries in enumerate(by_row):
        if boundaries.seqlen != length:
            raise ValueError(
                f"cu_seqlens[{row}] ends at {boundaries.seqlen}: it must end at {length}, the number of tokens"
            )
        # drop empty documents, which pad rows with fewer documents
        documents.append(Documents(dict.fromkeys([*boundaries.boundaries]) if length else [0, 0]))
    return tuple(documents)


def _check_key_mask(key_mask: object, batch: int, keys: int) -> Tensor:
    check_not_dtensor("key_mask", key_mask)
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, keys):
        got = f"{key_mask.dtype} {list(key_mask.shape)}" if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise ValueError(
            f"key_mask is {got}: it must be a bool tensor of shape [{batch}, {keys}], True where the row has the key"
        )
    if key_mask.device.type != "cpu":
        raise ValueError(
            f"key_mask is on {key_mask.device}: it must be on the CPU, because schedules are built on the host"
        )
    return key_mask


def pack_batch(rows: RowMasks, queries: Layout, keys: Layout, rank: int, device: torch.device) -> PackedRows:
    """Return the packed sequence as this rank holds it, ready on the current stream of ``device``. Cached."""
    return _cached_rows(rows, queries, keys, rank, device).read()


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _cached_rows(
    rows: RowMasks, queries: Layout, keys: Layout, rank: int, device: torch.device
) -> SharedValue[PackedRows]:
    whole = Documents([0, rows.length])
    documents, starts = rows.documents or (whole,) * rows.batch, range(0, rows.batch * rows.length, rows.length)
    ends = [start + end for start, row in zip(starts, documents, strict=True) for end in row.boundaries[1:]]
    # with numpy, because torch.frombuffer refuses an empty buffer, and there may be no keys
    visible = torch.from_numpy(np.frombuffer(bytearray(rows.visible), np.bool_))
    visible = visible.view(rows.batch, len(rows.visible) // rows.batch)
    is_visible = visible[:, keys.positions(rank)].flatten()
    made = PackedRows(
        rows.batch,
        Layout(_repeat_spans(spans, starts) for spans in queries.spans_per_rank),
        Layout(_visible_spans(spans, starts, visible) for spans in keys.spans_per_rank),
        Documents([0, *ends]),
        None if is_visible.all() else is_visible.nonzero().flatten().to(device),
    )
    return SharedValue(made, (made.visible_index,))


def _repeat_spans(spans: Sequence[Span], starts: Iterable[int]) -> Iterator[Span]:
    """Yield the spans of every row, moved to the start of the row."""
    for start in starts:
        yield from (span._replace(start=start + span.start) for span in spans)


def _visible_spans(spans: Sequence[Span], starts: Iterable[int], visible: Tensor) -> Iterator[Span]:
    """Yield the spans of every row, cut at hidden keys."""
    for start, row in zip(starts, visible, strict=True):
        for span in spans:
            edges = torch.zeros(span.length + 2, dtype=torch.int8)
            edges[1:-1] = row[span.start : span.stop : span.step]
            cuts = edges.diff().nonzero().flatten().tolist()
            for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
                yield Span(start + span.start + begin * span.step, end - begin, span.step)
