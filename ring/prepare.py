"""Prepare a call: check its arguments, agree on them with the other ranks, and plan its transfers.

One :func:`prepare_call` serves a ring, a two-dimensional mesh and a torch.compile graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..kernels import KernelConfig, Scores
from ..kernels.checks import TRANSPOSE_HINT, check_not_dtensor, check_shapes, check_tensor
from ..kernels.config import is_single_pass
from ..validators import short_repr
from .adopted import find_adopted_kernel
from .arg_checks import check_autograd
from .args import ARG_SPECS, FIRST_HEAD_LIMIT, AttentionArgs, Compare, Options, check_args
from .backends import check_kernel_features
from .buffers import chunk_runs
from .local.protocol import LocalAttention
from .local.registry import resolve_backend
from .mesh import Ranks, Rings, ring_layout, ulysses_layout
from .ring import Ring
from .row_packing import PackedRows, RowMasks, has_row_boundaries, lengths_per_row, pack_batch, split_row_masks
from .schedule.intervals import Intervals, limit_paths
from .schedule.layout import Documents, Layout, LayoutLike, resolve_documents, shift_layout
from .schedule.mask import NO_WINDOW, UNLIMITED, BlockMask, Longformer, Mask, PositionRange
from .schedule.plan import Plan, plan
from .shards import resolve_layout
from .ulysses import Exchange, Shares, split_ulysses_heads
from .wire import resolve_wire

MAX_SCORED_POSITIONS = 1 << 31  # limit of positions with dropout or ALiBi, because the kernels use 32 bits
POSITION_ARGS = ("cu_seqlens", "seqused_k", "prefix_length", "islands", "block_mask", "intervals")
"""Arguments that are ambiguous if queries and keys are counted from different positions."""
_COMPARED_NAMES = {kind: [name for name, entry in ARG_SPECS.items() if entry.compare_mode is kind] for kind in Compare}


class Layouts(NamedTuple):
    """Layouts of the queries and of the keys."""

    queries: Layout
    keys: Layout

    @property
    def reach(self) -> int:
        """End of both layouts: the last position plus one."""
        return max(self.queries.reach, self.keys.reach)


@dataclass(eq=False)
class Call:
    """One call of ``ring_attention``: its arguments and, once prepared, everything that forward and backward need.

    ``number`` is None until the ranks have agreed on the call.
    """

    args: AttentionArgs
    ranks: Ranks
    compared_fields: Mapping[str, object]  # values that ranks compare besides the arguments
    has_drawn_seed: bool = False  # True if every rank has drawn a ``dropout_seed``; rank 0's counts
    number: int | None = None  # number of the forward among the calls of the ring
    exchange_number: int = 0  # number of the forward among the calls of the Ulysses ring
    has_backward: bool = False  # False in a graph, which does not know
    softmax_scale: float = field(init=False)
    backend: LocalAttention = field(init=False)
    config: KernelConfig | None = field(init=False)
    layouts: Layouts = field(init=False)
    mask: Mask = field(init=False)
    scores: Scores = field(init=False)
    sink: Tensor | None = field(init=False)
    chunks: int = field(init=False)
    plan: Plan = field(init=False)
    rows: PackedRows | None = None  # set if batch rows see different keys; q, k and v must then be packed
    exchange: Exchange | None = None  # exchange of heads for tokens, over a mesh

    @property
    def ring(self) -> Ring:
        """Ring that K/V move along."""
        return self.ranks.ring if isinstance(self.ranks, Rings) else self.ranks


def prepare_call(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check a call and plan its transfers. Agree on it with the other ranks, unless it has a ``number`` already.

    Over a mesh, the plan covers this ring: the tokens of all its ranks, and this rank's part of the heads.

    Raises:
        ValueError: as ``ring_attention``.
        NotImplementedError: as ``ring_attention``.
    """
    ring, ranks, args = call.ring, call.ranks, check_args(call.args)
    check_shapes(q, k, v)
    own_heads = own_kv_heads = slice(None)
    if isinstance(ranks, Rings):
        heads, kv_heads = split_ulysses_heads(q.shape[2], k.shape[2], ranks.ulysses.size)
        own_heads, own_kv_heads = heads[ranks.ulysses.rank], kv_heads[ranks.ulysses.rank]
    resolve_wire(ring.wire_dtype, k.dtype)
    call.softmax_scale = 1.0 / sqrt(q.shape[3]) if args.softmax_scale is None else args.softmax_scale
    call.backend = resolve_backend(args.backend, q.device)
    call.layouts = layouts = resolve_layouts(q, k, args, ranks)
    call.args, rows, fields_of_rows = extract_row_masks(args, layouts, q.shape[0])
    call.mask = mask = build_mask(layouts, q.shape[0], call.args)
    if isinstance(ranks, Rings):
        layouts = Layouts(*(ring_layout(layout, ranks.ulysses.size) for layout in layouts))
        tokens, keys = (ulysses_layout(layout, ranks.ulysses.size, ring.rank) for layout in call.layouts)
        call.exchange = Exchange(ranks, Shares(tokens, heads), Shares(keys, kv_heads))
    if rows is not None:
        call.rows = pack_batch(rows, *layouts, ring.rank, q.device)
        layouts, mask = Layouts(call.rows.queries, call.rows.keys), replace(mask, documents=call.rows.documents)
        _islands(call.args, layouts.queries.reach, mask.documents)
    call.sink, call.scores = check_sink(q, args.learnable_sink), build_scores(q, args, layouts)
    if isinstance(ranks, Rings) and args.first_head > FIRST_HEAD_LIMIT - q.shape[2]:
        raise ValueError(
            f"first_head is {args.first_head}: with {q.shape[2]} heads of q over a mesh it must be between 0 "
            f"and {FIRST_HEAD_LIMIT - q.shape[2]}, so that the last head of every rank stays below 2^31"
        )
    gradient = call.compared_fields.get("gradient")
    call.has_backward = bool(gradient[-1] if isinstance(gradient, tuple) else gradient)
    check_kernel_features(
        call.backend, q, v, call.mask, call.scores, args, has_backward=call.has_backward, by_row=rows is not None
    )
    if call.number is None:
        compare_call(call, q, k, v, fields_of_rows)
    if call.exchange is not None:
        call.scores = call.scores.slice_heads(own_heads)
        call.sink = None if call.sink is None else call.sink[own_heads]
    call.config = ring.with_sm_margin(args.config)
    # after the comparison, because each rank has its own choice; a graph does not know if it needs gradients
    needs_backward, by_row = gradient is None or call.has_backward, rows is not None
    if args.backend == "auto" and args.config is None:
        adopted = find_adopted_kernel(
            q, k, v, args, layouts, call.mask, call.scores, needs_backward=needs_backward, by_row=by_row
        )
        call.backend, call.config = adopted or (call.backend, call.config)
    call.chunks = ring.chunks or 1
    if needs_backward:
        call.chunks = ring._choose_chunks((q.dtype, q.shape[3]), is_single_pass(call.config))
    where = (ring.rank, ring.direction, q.device, ring.topology, ring.slots)
    runs = chunk_runs(call.chunks, k[:, :, own_kv_heads].shape[2])
    call.plan = plan(layouts.queries, mask, *where, kv_layout=layouts.keys, runs=runs)


def compare_call(call: Call, q: Tensor, k: Tensor, v: Tensor, row_fields: dict[str, Any]) -> None:
    """Compare a call with those of the other ranks, set its numbers, draw the dropout seed, and open the ring.

    ``row_fields`` are the values to compare from :func:`extract_row_masks`.
    """
    compared = {
        name: getattr(call.args, name) if e.compared_value is None else e.compared_value(call)
        for name, e in ARG_SPECS.items()
    }
    is_layout = [isinstance(layout, Layout) for layout in (call.args.layout, call.args.kv_layout)]
    fields = {
        "call": "forward",
        "batch size": q.shape[0],
        "heads": (q.shape[2], k.shape[2]),
        "head dim": (q.shape[3], v.shape[3]),
        "dtype": q.dtype,
        # compared before the layouts, which depend on a name and these numbers
        "tokens per rank": None if is_layout[0] else q.shape[1],
        "keys per rank": None if any(is_layout) else k.shape[1],
        **{name: compared[name] for name in _COMPARED_NAMES[Compare.ALWAYS]},
        **call.compared_fields,
    }
    values = {name: compared[name] for name in _COMPARED_NAMES[Compare.CHANGING]} | row_fields
    number = call.ranks._agree(fields, q.device, values)
    call.number, call.exchange_number = number if isinstance(number, tuple) else (number, 0)
    if call.scores.dropout_p and (call.has_drawn_seed or call.args.dropout_seed is None):
        call.scores = replace(call.scores, dropout_seed=call.ranks._draw_seed(call.args.dropout_seed))
    call.ring.open(q.device)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> None:
    """Raise if q, k or v is not an ordinary tensor, or inside a torch.func transform; must be the first check."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, may_be_meta=x is not q)
    if args.learnable_sink is not None:
        check_tensor("learnable_sink", args.learnable_sink)
    check_not_dtensor("alibi_slopes", args.alibi_slopes)  # otherwise the dispatcher raises a misleading error
    check_autograd("ring_attention", q, k, v)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast floating tensors to the autocast dtype if autocast is on for their device, as SDPA does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def resolve_layouts(q: Tensor, k: Tensor, args: AttentionArgs, ring: Ranks) -> Layouts:
    """Return the layouts of q and k, checked against the numbers of tokens of this rank's q and k."""
    queries, kv_layout, align = _resolve_shard_layout("q", "layout", args.layout, ring, q), args.kv_layout, args.align
    if align is not None and kv_layout is None and not isinstance(args.layout, Layout):
        kv_layout = args.layout
    if kv_layout is not None or (align is not None and ring.size == 1):
        layouts = Layouts(queries, _resolve_shard_layout("k", "kv_layout", kv_layout, ring, k))
        return layouts if align is None else _align_layouts(layouts, align, args)
    if k.shape[1] != q.shape[1]:
        swapped = k.shape[2] == q.shape[2] and k.shape[1] and q.shape[1] % k.shape[1] == 0
        raise ValueError(
            f"k has {k.shape[1]} tokens and q has {q.shape[1]}: without kv_layout they must have the same number. Pass "
            "kv_layout with the positions of the keys, or pass align if layout is a name"
            f"{TRANSPOSE_HINT if swapped else ''}"
        )
    return Layouts(queries, queries)


def _align_layouts(layouts: Layouts, align: str, args: AttentionArgs) -> Layouts:
    """Apply ``align`` to layouts that both count from 0: with ``bottom-right``, shift the shorter one to the end."""
    for name, layout in zip(("layout", "kv_layout"), layouts, strict=True):
        if layout.reach != layout.seqlen:
            raise ValueError(
                f"align is {align!r}, but {name} holds only {layout.seqlen} of the positions 0 to {layout.reach - 1}: "
                "omit align, or pass layouts that hold all positions from 0"
            )
    more = layouts.keys.seqlen - layouts.queries.seqlen
    if align == "top-left" or not more:
        return layouts
    for name in (*POSITION_ARGS, *(() if more > 0 else ("key_mask", "leftpad_k"))):
        if getattr(args, name) is not None:
            raise ValueError(
                f"{name} cannot be used with align='bottom-right' when there are {layouts.queries.seqlen} queries and "
                f"{layouts.keys.seqlen} keys, because their positions differ. Omit align, and pass layout and "
                "kv_layout with the positions of both."
            )
    if more > 0:
        return layouts._replace(queries=shift_layout(layouts.queries, more))
    return layouts._replace(keys=shift_layout(layouts.keys, -more))


def _resolve_shard_layout(tensor: str, name: str, layout: LayoutLike, ring: Ranks, x: Tensor) -> Layout:
    """Return the layout of all shards, checked against this rank's shard ``x``.

    ``tensor`` and ``name`` are the names of ``x`` and of the layout argument, for messages.
    """
    rows = x.shape[1]
    seqlen = layout.seqlen if isinstance(layout, Layout) else rows * ring.size
    resolved = resolve_layout(layout, seqlen, ring.size, name)
    length = resolved.lengths[ring.rank]
    if rows != length:
        swapped = TRANSPOSE_HINT if x.shape[2] == length else ""
        raise ValueError(f"{tensor} has {rows} tokens, but {name} has {length} for rank {ring.rank}{swapped}")
    return resolved


def extract_row_masks(
    args: AttentionArgs, layouts: Layouts, batch: int
) -> tuple[AttentionArgs, RowMasks | None, dict[str, Any]]:
    """Split off the mask arguments that let batch rows see different keys; see :func:`.row_packing.split_row_masks`.

    Returns:
        ``args`` with masks that are equal for all rows, the per-row masks (None if all rows see the same keys), and
        the values that ranks compare.
    """
    arguments = args.cu_seqlens, args.key_mask, args.leftpad_k, args.seqused_k
    if args.key_mask is None and args.leftpad_k is None and not has_row_boundaries(args.cu_seqlens):
        return args, None, {}
    changes, rows, compared = split_row_masks(*arguments, batch=batch, keys=layouts.keys.reach, length=layouts.reach)
    slopes, pattern = args.alibi_slopes, args.block_mask
    problems = {
        "block_mask": pattern is not None and (batch > 1 or not isinstance(pattern, Longformer)),
        "prefix_length": args.prefix_length is not None and batch > 1,
        "islands": args.islands is not None and batch > 1,
        "intervals": args.intervals is not None and batch > 1,
        "alibi_slopes": isinstance(slopes, Tensor) and slopes.dim() == 2 and batch > 1,
    }
    for name in (name for name, is_problem in problems.items() if rows is not None and is_problem):
        names = " and ".join(each for each, value in compared.items() if value is not None)
        raise ValueError(
            f"{name} cannot be used with {names}, because batch rows then see different keys and are packed into one "
            f"sequence. Call ring_attention for each row, or omit {name}."
        )
    return args._replace(**changes), rows, compared


def mask_from_options(layouts: Layouts, batch: int, **options: Unpack[Options]) -> Mask:
    """Return the mask that options of ``ring_attention`` describe."""
    return build_mask(layouts, batch, check_args(AttentionArgs(**options)))  # type: ignore[misc]


def build_mask(layouts: Layouts, batch: int, args: AttentionArgs) -> Mask:
    """Return the mask of checked arguments, or raise ValueError if they do not fit the layouts."""
    block_mask, used = args.block_mask, args.seqused_k
    cu_seqlens: Any = args.cu_seqlens
    window: Any = args.window_size
    documents = None if cu_seqlens is None else resolve_documents(cu_seqlens, layouts.reach)
    lengths = None if used is None else lengths_per_row("seqused_k", used, batch, layouts.keys.reach)
    intervals, window = _intervals(args, layouts, window)
    prefix = _prefix(args.prefix_length, args.causal, layouts.reach)
    islands = _islands(args, layouts.reach, documents)
    mask = Mask(args.causal, window, documents, prefix, used=lengths, islands=islands, intervals=intervals)
    if isinstance(block_mask, Longformer):
        if window != NO_WINDOW:
            raise ValueError(
                f"window_size is {window}, but the Longformer mask has its own, {block_mask.window}. Pass only one."
            )
        return replace(mask, window=block_mask.window, global_tokens=block_mask.global_tokens)
    return mask if block_mask is None else replace(mask, blocks=_blocks(block_mask, layouts))


def _intervals(args: AttentionArgs, layouts: Layouts, window: PositionRange) -> tuple[Intervals | None, PositionRange]:
    """Return the checked intervals and the window that remains. A prefix tree takes the window into its intervals."""
    if args.intervals is None:
        return None, window
    intervals = args.intervals if isinstance(args.intervals, Intervals) else Intervals(args.intervals)
    intervals.check_ends(layouts.queries.reach, layouts.keys.reach)
    if intervals.path_positions is None:
        return intervals, window
    for name in ("alibi_slopes", "islands", "prefix_length"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"{name} cannot be used with intervals of a prefix tree, which it does not follow. Call ring_attention "
                f"for each path, or omit {name}."
            )
    return limit_paths(intervals, window[0]) if window[0] != UNLIMITED else intervals, NO_WINDOW


def _blocks(block_mask: object, layouts: Layouts) -> BlockMask:
    """Return the argument ``block_mask`` as a `BlockMask`, or raise ValueError if it does not fit the layouts."""
    blocks = block_mask if isinstance(block_mask, BlockMask) else _equal_blocks(block_mask, layouts.queries.reach)
    expected = tuple(-(-layout.reach // blocks.block) for layout in layouts)
    if tuple(blocks.visible.shape) != expected:
        raise ValueError(
            f"block_mask has shape {list(blocks.visible.shape)} with blocks of {blocks.block} positions: for "
            f"{layouts.queries.reach} queries and {layouts.keys.reach} keys the shape must be {list(expected)}"
        )
    for name, layout in zip(("layout", "kv_layout"), layouts, strict=True):
        blocks.check_layout(name, layout)
    return blocks


def _equal_blocks(block_mask: object, reach: int) -> BlockMask:
    """Build a `BlockMask` from a tensor, whose number of rows gives the block size."""
    check_not_dtensor("block_mask", block_mask)
    if not isinstance(block_mask, Tensor) or block_mask.dim() != 2 or not len(block_mask):
        got = (
            f"a tensor of shape {list(block_mask.shape)}" if isinstance(block_mask, Tensor) else short_repr(block_mask)
        )
        raise ValueError(
            f"block_mask is {got}: it must be a bool tensor of shape [query blocks, key blocks], a BlockMask or a "
            "Longformer"
        )
    if reach % len(block_mask):
        raise ValueError(
            f"block_mask has {len(block_mask)} rows, which cannot divide {reach} queries into equal blocks. If the "
            "last block is shorter, pass BlockMask(visible, block)."
        )
    return BlockMask(block_mask, reach // len(block_mask))


def _prefix(length: int | None, causal: bool, reach: int) -> int:
    """Return the checked ``prefix_length``, 0 for None."""
    if length is None:
        return 0
    if length > reach:
        raise ValueError(f"prefix_length is {length}: it must be between 0 and {reach}, the number of tokens")
    if not causal:
        raise ValueError(f"prefix_length is {length} and causal is False: prefix_length needs causal=True")
    return length


def _islands(args: AttentionArgs, reach: int, documents: Documents | None) -> tuple[PositionRange, ...]:
    """Return the islands, () for None, or raise ValueError if they do not fit ``causal`` or the documents."""
    islands: tuple[PositionRange, ...] = args.islands or ()  # type: ignore[assignment]  # read by check_args
    if islands and not args.causal:
        raise ValueError(f"islands is given and causal is {args.causal}: islands needs causal=True")
    boundaries = (reach,) if documents is None else documents.boundaries
    for number, (begin, end) in enumerate(islands):
        stop = boundaries[min(bisect_right(boundaries, begin), len(boundaries) - 1)]
        if end > stop:
            raise ValueError(
                f"islands[{number}] is {(begin, end)}: it must not extend past the end of its document, {stop}"
            )
    return islands


def check_sink(q: Tensor, learnable_sink: Tensor | None) -> Tensor | None:
    """Return ``learnable_sink``, or raise ValueError if it is not one logit per query head on q's device."""
    if learnable_sink is None:
        return None
    if not learnable_sink.is_floating_point():
        raise ValueError(
            f"learnable_sink is {learnable_sink.dtype}: it must be a floating-point tensor of shape [{q.shape[2]}]"
        )
    if tuple(learnable_sink.shape) != (q.shape[2],) or learnable_sink.device != q.device:
        raise ValueError(
            f"learnable_sink has shape {list(learnable_sink.shape)} on {learnable_sink.device}: it must have shape "
            f"[{q.shape[2]}] on {q.device}, one logit per head of q"
        )
    return learnable_sink


def build_scores(q: Tensor, args: AttentionArgs, layouts: Layouts) -> Scores:
    """Return softcap, ALiBi and dropout of a call. A missing seed is drawn later."""
    alibi_slopes = args.alibi_slopes
    if alibi_slopes is not None and getattr(alibi_slopes, "requires_grad", False):
        raise ValueError("alibi_slopes requires a gradient, which is not computed. Pass alibi_slopes.detach().")
    if args.dropout_seed is not None and not args.dropout_p:
        raise ValueError(f"dropout_seed is {args.dropout_seed} with dropout_p 0. Pass dropout_p, or omit the seed.")
    scores = Scores(args.softcap or 0.0, alibi_slopes, args.dropout_p, args.dropout_seed or 0, args.first_head)
    scores.check_slopes(q.shape[0], q.shape[2], q.device)
    if scores.needs_positions and layouts.reach > MAX_SCORED_POSITIONS:
        name = "dropout_p" if args.dropout_p else "alibi_slopes"
        raise ValueError(f"layout reaches position {layouts.reach - 1}: with {name}, positions must be below 2^31")
    return scores
