"""The arguments of ``ring_attention``: one list of them, and what they mean, checked at the door.

:class:`AttentionArgs` is the list: what an op of torch.compile carries (:mod:`.ops`) and what ranks compare
(:func:`compared`) are made from it. The signature is spelled out for readers, and a test holds it to the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from ..comm import GroupLike
from ..kernels import KernelConfig, Scores
from ..kernels.checks import TRANSPOSED, check_local, check_qkv, check_scale, check_tensor
from .backends import check_call
from .checked import check_autograd, checked
from .local.protocol import LocalAttention
from .local.registry import resolve_backend
from .ring import Ring
from .rows import Boundaries, PackedRows, Rows, is_by_row, lengths_of, packed_rows, rows_of
from .schedule.layout import Documents, Layout, LayoutLike, shifted
from .schedule.mask import UNLIMITED, BlockMask, Longformer, Mask
from .schedule.plan import Plan, plan
from .shards import resolve_layout
from .wire import wire_of

MOST_SCORED = 1 << 31  # positions that dropout and ALiBi count: the kernels' 32 bits
CHANGING = ("cu_seqlens", "seqused_k", "key_mask", "leftpad_k", "dropout_seed")
"""Arguments that are likely others in the next batch."""
BY_POSITION = ("cu_seqlens", "seqused_k", "prefix_length", "block_mask")
"""Arguments that have no one meaning where queries are counted from other positions than keys."""
OWN = ("config",)
"""Arguments that each rank chooses for itself."""


class AttentionArgs(NamedTuple):
    """A call of ``ring_attention`` besides q, k, v and its ring, as it was given."""

    layout: LayoutLike = None
    causal: bool = False
    window_size: tuple[int | None, int | None] | None = (UNLIMITED, UNLIMITED)
    softmax_scale: float | None = None
    softcap: float | None = 0.0
    learnable_sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    first_head: int = 0
    cu_seqlens: Boundaries | None = None
    seqused_k: Iterable[int] | Tensor | None = None
    key_mask: Tensor | None = None
    leftpad_k: Iterable[int] | Tensor | None = None
    prefix_length: int | None = None
    block_mask: Tensor | BlockMask | Longformer | None = None
    kv_layout: LayoutLike = None
    align: Literal["top-left", "bottom-right"] | None = None
    backend: str | LocalAttention = "auto"
    config: KernelConfig | None = None


class Options(TypedDict, total=False):
    """What ``ring_attention`` takes by name, for type checkers."""

    layout: LayoutLike
    ring: Ring | None
    group: GroupLike
    causal: bool
    window_size: tuple[int | None, int | None] | None
    softmax_scale: float | None
    softcap: float | None
    learnable_sink: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    first_head: int
    cu_seqlens: Boundaries | None
    seqused_k: Iterable[int] | Tensor | None
    key_mask: Tensor | None
    leftpad_k: Iterable[int] | Tensor | None
    prefix_length: int | None
    block_mask: Tensor | BlockMask | Longformer | None
    kv_layout: LayoutLike
    align: Literal["top-left", "bottom-right"] | None
    backend: str | LocalAttention
    config: KernelConfig | None


KEYWORDS = {
    "is_causal": "causal", "scale": "softmax_scale", "sm_scale": "softmax_scale", "process_group": "group",
    "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "seqlens_k": "seqused_k", "dropout": "dropout_p",
    "window": "window_size", "sinks": "learnable_sink", "s_aux": "learnable_sink", "logits_soft_cap": "softcap",
    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse",
    "attn_mask": "causal, window_size, cu_seqlens, key_mask or block_mask", "attention_mask": "key_mask",
    "key_padding_mask": "key_mask", "attn_bias": "alibi_slopes",
}  # fmt: skip
"""What arguments are called elsewhere: in PyTorch, flash-attention and transformers."""

NEEDLESS = ("max_seqlen_q", "max_seqlen_k", "enable_gqa", "deterministic")
"""Arguments of theirs that this package does without."""


def unknown_keyword(name: str) -> TypeError:
    """Return the error of a keyword that ``ring_attention`` does not have, with its own name for that."""
    text = f"ring_attention() got an unexpected keyword argument {name!r}"
    if name in NEEDLESS:
        return TypeError(f"{text}: leave it out, nothing here needs it")
    meant = KEYWORDS.get(name) or next(iter(get_close_matches(name, Options.__annotations__, 1)), None)
    return TypeError(text if meant is None else f"{text}: here it is {meant}")


class PreparedCall(NamedTuple):
    """What the forward and the backward need besides tensors."""

    ring: Ring
    number: int  # of the forward, among the ring's calls
    plan: Plan
    softmax_scale: float
    scores: Scores
    backend: LocalAttention
    config: KernelConfig | None
    rows: PackedRows | None
    """Where batch rows see different keys: q, k and v are to be packed."""


class Layouts(NamedTuple):
    """Who holds which queries, and which keys."""

    queries: Layout
    keys: Layout

    @property
    def reach(self) -> int:
        """One past the last position of either."""
        return max(self.queries.reach, self.keys.reach)


class Ranks(Protocol):
    """Whose layout it is."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """How many there are."""


def prepare_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: AttentionArgs,
    ring: Ring,
    *,
    number: int | None = None,
    drawn: bool = False,
    has_backward: bool | None = None,
) -> tuple[PreparedCall, Tensor | None]:
    """The call and its sink, checked here and, unless the forward has a ``number``, between the ranks.

    ``drawn``: every rank has drawn ``dropout_seed``, and rank 0's counts. ``has_backward``: None where a graph was
    compiled, which does not say.

    Raises:
        ValueError, NotImplementedError: as ``ring_attention``.
    """
    scale, backend = check(q, k, v, args, ring)
    layouts = layouts_of(q, k, args, ring)
    args, rows, said_of_rows = by_row(args, layouts, q.shape[0])
    mask = mask_of(layouts, q.shape[0], **args._asdict())
    held, packed = layouts, None
    if rows is not None:
        packed = packed_rows(rows, *layouts, ring.rank, q.device)
        held = Layouts(packed.queries, packed.keys)
    sink, scores = sink_of(q, args.learnable_sink), scores_of(q, args, held)
    check_call(backend, q, v, mask, scores, args, has_backward=has_backward, by_row=rows is not None)
    if number is None:
        fields, values = compared(
            q, k, v, args, layouts, mask, scores, scale, backend, drawn=drawn, has_backward=has_backward
        )
        number = ring._agree(fields, q.device, values | said_of_rows)
        if scores.dropout_p and (drawn or args.dropout_seed is None):
            scores = replace(scores, dropout_seed=ring._draw_seed(args.dropout_seed))
        ring.open(q.device)
    where = (ring.rank, ring.direction, q.device, ring.topology, ring.slots)
    if packed is not None:
        mask = replace(mask, documents=packed.documents)
    steps = plan(held.queries, mask, *where, kv_layout=held.keys)
    return PreparedCall(ring, number, steps, scale, scores, backend, ring.leaving_room(args.config), packed), sink


def compared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: AttentionArgs,
    layouts: Layouts,
    mask: Mask,
    scores: Scores,
    scale: float,
    backend: LocalAttention,
    *,
    drawn: bool,
    has_backward: bool | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks must have in common: what a layer keeps from batch to batch, and what is likely to change."""
    sink, slopes = args.learnable_sink, scores.alibi_slopes
    meant = args._asdict() | {
        "layout": layouts.queries,
        "causal": mask.causal,
        "window_size": mask.window,
        "softmax_scale": scale,
        "softcap": scores.softcap,
        "learnable_sink": None if sink is None else sink.dtype,
        "alibi_slopes": None if slopes is None else list(slopes.shape),
        "dropout_p": scores.dropout_p,
        "dropout_seed": None if drawn else args.dropout_seed,  # None: one is drawn
        "first_head": scores.first_head,
        "cu_seqlens": mask.documents,
        "seqused_k": mask.used,
        "prefix_length": mask.prefix,
        "block_mask": (mask.blocks, mask.global_tokens),
        "kv_layout": layouts.keys,
        "backend": backend.name,
    }
    fields = {
        "call": "forward",
        "batch size": q.shape[0],
        "heads": (q.shape[2], k.shape[2]),
        "head dim": (q.shape[3], v.shape[3]),
        "dtype": q.dtype,
        # before the layouts that a name and these numbers mean
        "tokens per rank": None if isinstance(args.layout, Layout) else q.shape[1],
        "keys per rank": None if any(isinstance(x, Layout) for x in (args.layout, args.kv_layout)) else k.shape[1],
        **{name: value for name, value in meant.items() if name not in (*CHANGING, *OWN)},
        "gradient": has_backward,
    }
    return fields, {name: meant[name] for name in CHANGING}


def check_tensors(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> None:
    """Refuse what is no tensor, before any attribute is read, or a DTensor; and transforms of functions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, may_be_meta=x is not q)
    check_local("learnable_sink", args.learnable_sink)  # of these the dispatcher would make another error
    check_local("alibi_slopes", args.alibi_slopes)
    check_autograd("ring_attention", q, k, v)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast floating tensors to autocast's dtype where it is on for their device, as SDPA does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, ring: Ring) -> tuple[float, LocalAttention]:
    """The scale and the backend of a call, once all that this rank can check alone has been checked."""
    check_qkv(q, k, v)
    check_autograd("ring_attention", q, k, v)
    softmax_scale, _ = checked(softmax_scale=args.softmax_scale, config=args.config)
    if ring.chunks > k.shape[2]:
        raise ValueError(f"chunks of the ring is {ring.chunks}, k has {k.shape[2]} heads: a chunk has at least one")
    wire_of(ring.wire_dtype, k.dtype)
    return check_scale(softmax_scale, q.shape[3]), resolve_backend(args.backend, q.device)


def layouts_of(q: Tensor, k: Tensor, args: AttentionArgs, ring: Ranks) -> Layouts:
    """The layouts of a call, checked against this rank's shards."""
    (align,) = checked(align=args.align)
    queries, kv_layout = _layout_of("q", "layout", args.layout, ring, q), args.kv_layout
    if align is not None and kv_layout is None and not isinstance(args.layout, Layout):
        kv_layout = args.layout
    if kv_layout is not None or (align is not None and ring.size == 1):
        layouts = Layouts(queries, _layout_of("k", "kv_layout", kv_layout, ring, k))
        return layouts if align is None else _aligned(layouts, align, args)
    if k.shape[1] != q.shape[1]:
        swapped = k.shape[2] == q.shape[2] and k.shape[1] and q.shape[1] % k.shape[1] == 0
        raise ValueError(
            f"k has {k.shape[1]} tokens, q has {q.shape[1]}: without kv_layout a rank's queries and keys are the same "
            "tokens; pass kv_layout to say at which positions the keys are, or with layouts by name align"
            f"{TRANSPOSED if swapped else ''}"
        )
    return Layouts(queries, queries)


def _aligned(layouts: Layouts, align: str, args: AttentionArgs) -> Layouts:
    """Layouts that both count from 0 as positions: the later ones of ``bottom-right`` end where the others do."""
    for name, layout in zip(("layout", "kv_layout"), layouts, strict=True):
        if layout.reach != layout.seqlen:
            raise ValueError(
                f"align is {align!r}, and {name} holds {layout.seqlen} of the positions 0 to {layout.reach - 1}: it "
                "says already where queries and keys are; leave align out, or count both from 0"
            )
    more = layouts.keys.seqlen - layouts.queries.seqlen
    if align == "top-left" or not more:
        return layouts
    for name in (*BY_POSITION, *(() if more > 0 else ("key_mask", "leftpad_k"))):
        if getattr(args, name) is not None:
            raise ValueError(
                f"{name} is given with align='bottom-right', {layouts.queries.seqlen} queries and "
                f"{layouts.keys.seqlen} keys: it speaks of positions, and conventions differ on whose; pass layout and "
                "kv_layout with the positions of both, without align"
            )
    if more > 0:
        return layouts._replace(queries=shifted(layouts.queries, more))
    return layouts._replace(keys=shifted(layouts.keys, -more))


def _layout_of(tensor: str, name: str, layout: LayoutLike, ring: Ranks, x: Tensor) -> Layout:
    rows = x.shape[1]
    seqlen = layout.seqlen if isinstance(layout, Layout) else rows * ring.size
    whole = resolve_layout(layout, seqlen, ring.size, name)
    if rows != whole.lengths[ring.rank]:
        swapped = TRANSPOSED if x.shape[2] == whole.lengths[ring.rank] else ""
        raise ValueError(
            f"{tensor} has {rows} tokens, {name} gives rank {ring.rank} {whole.lengths[ring.rank]}{swapped}"
        )
    return whole


def by_row(args: AttentionArgs, layouts: Layouts, batch: int) -> tuple[AttentionArgs, Rows | None, dict[str, Any]]:
    """``args`` without what tells batch rows apart, that, and what ranks compare of it; see :func:`.rows.rows_of`."""
    arguments = args.cu_seqlens, args.key_mask, args.leftpad_k, args.seqused_k
    if args.key_mask is None and args.leftpad_k is None and not is_by_row(args.cu_seqlens):
        return args, None, {}
    changes, rows, said = rows_of(*arguments, batch=batch, keys=layouts.keys.reach, length=layouts.reach)
    slopes, pattern = args.alibi_slopes, args.block_mask
    problems = {
        "block_mask": pattern is not None and (batch > 1 or not isinstance(pattern, Longformer)),
        "prefix_length": args.prefix_length is not None and batch > 1,
        "alibi_slopes": isinstance(slopes, Tensor) and slopes.dim() == 2 and batch > 1,
    }
    for name in (name for name, is_problem in problems.items() if rows is not None and is_problem):
        names = " and ".join(each for each, value in said.items() if value is not None)
        raise ValueError(
            f"{name} is given with {names}, by which batch rows see different keys: they are computed as one sequence "
            f"without what is hidden, and of each row alone {name} cannot speak there; call row by row, or leave it out"
        )
    return args._replace(**changes), rows, said


def mask_of(layouts: Layouts, batch: int, **options: Unpack[Options]) -> Mask:
    """The mask of a call, by those of its arguments that say something of it."""
    args = AttentionArgs(**options)  # type: ignore[misc]
    block_mask, seqused_k = args.block_mask, args.seqused_k
    cu_seqlens: Any = args.cu_seqlens
    is_causal, window, prefix = checked(
        causal=args.causal, window_size=args.window_size, prefix_length=args.prefix_length
    )
    documents = None if cu_seqlens is None else Documents(cu_seqlens)
    if documents is not None and documents.seqlen != layouts.reach:
        raise ValueError(f"cu_seqlens ends at {documents.seqlen}: it must end at {layouts.reach}, the number of tokens")
    used = None if seqused_k is None else lengths_of("seqused_k", seqused_k, batch, layouts.keys.reach)
    mask = Mask(is_causal, window, documents, _prefix(prefix, is_causal, layouts.reach), used)
    if isinstance(block_mask, Longformer):
        if window != (UNLIMITED, UNLIMITED):
            raise ValueError(
                f"window_size is {window} with the Longformer mask, which has its own: {block_mask.window}"
            )
        return replace(mask, window=block_mask.window, global_tokens=block_mask.global_tokens)
    return mask if block_mask is None else replace(mask, blocks=_blocks(block_mask, layouts))


def _blocks(block_mask: object, layouts: Layouts) -> BlockMask:
    made = block_mask if isinstance(block_mask, BlockMask) else _equal_blocks(block_mask, layouts.queries.reach)
    wanted = tuple(-(-layout.reach // made.block) for layout in layouts)
    if tuple(made.visible.shape) != wanted:
        raise ValueError(
            f"block_mask is {list(made.visible.shape)} blocks of {made.block} positions: for {layouts.queries.reach} "
            f"queries and {layouts.keys.reach} keys it must be {list(wanted)}"
        )
    for name, layout in zip(("layout", "kv_layout"), layouts, strict=True):
        made.check(name, layout)
    return made


def _equal_blocks(block_mask: object, reach: int) -> BlockMask:
    """A tensor alone says how many blocks there are, and so their size, where they are all of one."""
    check_local("block_mask", block_mask)
    if not isinstance(block_mask, Tensor) or block_mask.dim() != 2 or not len(block_mask):
        got = list(block_mask.shape) if isinstance(block_mask, Tensor) else type(block_mask).__name__
        raise ValueError(
            f"block_mask is {got}: it must be bool [query blocks, key blocks], a BlockMask or a Longformer"
        )
    if reach % len(block_mask):
        raise ValueError(
            f"block_mask has {len(block_mask)} blocks of queries for {reach}: where the last block is shorter, pass a "
            "BlockMask(visible, block), which says how long the others are"
        )
    return BlockMask(block_mask, reach // len(block_mask))


def _prefix(length: int | None, causal: bool, reach: int) -> int:
    if length is None:
        return 0
    if length > reach:
        raise ValueError(f"prefix_length is {length}: it must be 0 to {reach}, the number of tokens")
    if not causal:
        raise ValueError(f"prefix_length is {length} without causal: it says what a causal mask shows all the same")
    return length


def sink_of(q: Tensor, learnable_sink: Tensor | None) -> Tensor | None:
    """The sink logits of a call, one per query head."""
    if learnable_sink is None:
        return None
    check_tensor("learnable_sink", learnable_sink)
    if not learnable_sink.is_floating_point():
        raise ValueError(f"learnable_sink is {learnable_sink.dtype}: it must be a floating tensor [{q.shape[2]}]")
    if tuple(learnable_sink.shape) != (q.shape[2],) or learnable_sink.device != q.device:
        raise ValueError(
            f"learnable_sink is {list(learnable_sink.shape)} on {learnable_sink.device}: it must be "
            f"[{q.shape[2]}] on {q.device}, one logit per head of q"
        )
    return learnable_sink


def scores_of(q: Tensor, args: AttentionArgs, layouts: Layouts) -> Scores:
    """What becomes of the scores of a call; its seed is drawn later, where none is given."""
    alibi_slopes = args.alibi_slopes
    softcap, dropout_p, dropout_seed, first_head = checked(
        softcap=args.softcap, dropout_p=args.dropout_p, dropout_seed=args.dropout_seed, first_head=args.first_head
    )
    if alibi_slopes is not None and getattr(alibi_slopes, "requires_grad", False):
        raise ValueError("alibi_slopes requires a gradient, and there is none: pass alibi_slopes.detach()")
    if dropout_seed is not None and not dropout_p:
        raise ValueError(f"dropout_seed is {dropout_seed} with dropout_p 0: nothing is dropped")
    made = Scores(softcap, alibi_slopes, dropout_p, dropout_seed or 0, first_head)
    made.check(q.shape[0], q.shape[2], q.device)
    if made.by_position and layouts.reach > MOST_SCORED:
        name = "dropout_p" if dropout_p else "alibi_slopes"
        raise ValueError(f"layout reaches position {layouts.reach - 1}: with {name} positions must be below 2^31")
    return made
