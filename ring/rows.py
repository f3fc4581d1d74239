"""Batch rows that see different keys: one sequence of all rows, without the keys that are hidden.

Position p of row b is ``b * length + p`` there, and every row is a document of its own or several: the packed sequence
that one would make by hand. Hidden keys are not sent: who holds which keys is a layout of those that are left. So no
kernel knows of any of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.checks import check_local
from ..kernels.shared import Shared
from .schedule.layout import Documents, Layout, Span, whole_numbers
from .schedule.plan import PLANS

Boundaries = Iterable[int] | Sequence[Sequence[int]] | Tensor


class Rows(NamedTuple):
    """What tells batch rows apart; hashable."""

    documents: tuple[Documents, ...] | None
    """Of each row."""
    visible: bytes
    """bool ``[B, positions of keys]``."""
    batch: int
    length: int
    """Positions of a row."""


class PackedRows(NamedTuple):
    """The rows of a batch as one sequence, as one rank has it."""

    batch: int
    queries: Layout
    keys: Layout
    documents: Documents
    kept: Tensor | None
    """Which of this rank's keys, one row after the other, are visible, int64 on the device; None: all."""

    def pack(self, x: Tensor) -> Tensor:
        """``[B, S, H, D]`` as ``[1, B * S, H, D]``, a view where it can be."""
        return x.flatten(0, 1)[None]

    def pack_lse(self, lse: Tensor) -> Tensor:
        """``[B, H, S]`` as ``[1, H, B * S]``."""
        return lse.transpose(0, 1).flatten(1)[None].contiguous()

    def pack_keys(self, x: Tensor) -> Tensor:
        """The visible ones of ``[B, Sk, Hkv, D]`` as ``[1, keys, Hkv, D]``."""
        return self.pack(x) if self.kept is None else x.flatten(0, 1).index_select(0, self.kept)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """``[1, B * S, H, D]`` as ``[B, S, H, D]``."""
        return x.view(self.batch, x.shape[1] // self.batch, *x.shape[2:])

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """``[1, H, B * S]`` as ``[B, H, S]``."""
        return lse.view(lse.shape[1], self.batch, lse.shape[2] // self.batch).transpose(0, 1).contiguous()

    def unpack_keys(self, grad: Tensor, like: Tensor) -> Tensor:
        """The gradient of keys as that of ``like``; 0 for those that are hidden."""
        if self.kept is not None:
            grad = grad.new_zeros(like.shape).flatten(0, 1).index_copy_(0, self.kept, grad[0])
        return grad.view(like.shape)


def is_by_row(cu_seqlens: Boundaries | None) -> bool:
    """Whether boundaries are given for each batch row."""
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens.dim() == 2
    return isinstance(cu_seqlens, (list, tuple)) and len(cu_seqlens) > 0 and isinstance(cu_seqlens[0], (list, tuple))


def lengths_of(name: str, numbers: Iterable[int] | Tensor, batch: int, reach: int) -> tuple[int, ...]:
    """Numbers of keys, one per batch row: ValueError otherwise."""
    lengths = whole_numbers(name, numbers, "[B]")
    if len(lengths) != batch:
        raise ValueError(f"{name} has {len(lengths)} lengths: it must have {batch}, one per batch row")
    for row, length in enumerate(lengths):
        if not 0 <= length <= reach:
            raise ValueError(f"{name}[{row}] is {length}: it must be 0 to {reach}, the number of keys")
    return lengths


def rows_of(
    cu_seqlens: Boundaries | None,
    key_mask: Tensor | None,
    leftpad_k: Iterable[int] | Tensor | None,
    seqused_k: Iterable[int] | Tensor | None,
    *,
    batch: int,
    keys: int,
    length: int,
) -> tuple[dict[str, Any], Rows | None, dict[str, Any]]:
    """The arguments in words for all rows together, what such words cannot say, and what ranks compare of that.

    The words are ``cu_seqlens`` of one row and ``seqused_k``: they do where all rows have the same documents and no key
    is hidden in front of another. ``keys`` and ``length``: one past the last position of keys, and of all tokens.
    """
    documents = None if cu_seqlens is None else _documents(cu_seqlens, batch, length)
    used = None if seqused_k is None else lengths_of("seqused_k", seqused_k, batch, keys)
    left = None if leftpad_k is None else lengths_of("leftpad_k", leftpad_k, batch, keys)
    visible, at = torch.ones(batch, keys, dtype=torch.bool), torch.arange(keys)
    if key_mask is not None:
        visible = _checked_mask(key_mask, batch, keys)
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
    return plain, Rows(documents, visible.numpy().tobytes(), batch, length), compared


def _documents(cu_seqlens: Any, batch: int, length: int) -> tuple[Documents, ...]:
    by_row: Any = [Documents(row) for row in cu_seqlens] if is_by_row(cu_seqlens) else [Documents(cu_seqlens)] * batch
    if len(by_row) != batch:
        raise ValueError(f"cu_seqlens has {len(by_row)} rows: it must have {batch}, one per batch row, or be one list")
    made = []
    for row, boundaries in enumerate(by_row):
        if boundaries.seqlen != length:
            raise ValueError(
                f"cu_seqlens[{row}] ends at {boundaries.seqlen}: it must end at {length}, the number of tokens"
            )
        # without empty documents, by which rows of several lengths are filled up
        made.append(Documents(dict.fromkeys([*boundaries.boundaries]) if length else [0, 0]))
    return tuple(made)


def _checked_mask(key_mask: object, batch: int, keys: int) -> Tensor:
    check_local("key_mask", key_mask)
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, keys):
        got = f"{key_mask.dtype} {list(key_mask.shape)}" if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise ValueError(f"key_mask is {got}: it must be bool [{batch}, {keys}], True where a batch row has a key")
    if key_mask.device.type != "cpu":
        raise ValueError(f"key_mask is on {key_mask.device}: it must be on the CPU, since schedules are host data")
    return key_mask


def packed_rows(rows: Rows, queries: Layout, keys: Layout, rank: int, device: torch.device) -> PackedRows:
    """Return the layouts and documents of the sequence that all rows make, and this rank's keys in it.

    They are made once, and returned for work on the current stream of ``device``.
    """
    return _shared_rows(rows, queries, keys, rank, device).read()


@lru_cache(maxsize=PLANS)
def _shared_rows(rows: Rows, queries: Layout, keys: Layout, rank: int, device: torch.device) -> Shared[PackedRows]:
    whole = Documents([0, rows.length])
    documents, starts = rows.documents or (whole,) * rows.batch, range(0, rows.batch * rows.length, rows.length)
    ends = [start + end for start, row in zip(starts, documents, strict=True) for end in row.boundaries[1:]]
    # by numpy, because torch.frombuffer refuses an empty buffer: there may be no keys
    visible = torch.from_numpy(np.frombuffer(bytearray(rows.visible), np.bool_))
    visible = visible.view(rows.batch, len(rows.visible) // rows.batch)
    is_visible = visible[:, keys.positions(rank)].flatten()
    made = PackedRows(
        rows.batch,
        Layout(_repeated(spans, starts) for spans in queries.spans_per_rank),
        Layout(_visible(spans, starts, visible) for spans in keys.spans_per_rank),
        Documents([0, *ends]),
        None if is_visible.all() else is_visible.nonzero().flatten().to(device),
    )
    return Shared(made, (made.kept,))


def _repeated(spans: Sequence[Span], starts: Iterable[int]) -> Iterator[Span]:
    for start in starts:
        yield from (span._replace(start=start + span.start) for span in spans)


def _visible(spans: Sequence[Span], starts: Iterable[int], visible: Tensor) -> Iterator[Span]:
    """The spans of every row, cut where a key is hidden."""
    for start, row in zip(starts, visible, strict=True):
        for span in spans:
            edges = torch.zeros(span.length + 2, dtype=torch.int8)
            edges[1:-1] = row[span.start : span.stop : span.step]
            turns = edges.diff().nonzero().flatten().tolist()
            for begin, end in zip(turns[::2], turns[1::2], strict=True):
                yield Span(start + span.start + begin * span.step, end - begin, span.step)
