"""The arguments of ``ring_attention`` in one record, from which everything else about them is derived.

An :class:`ArgSpec` states the values that an argument takes, what ranks compare, and how a torch.compile op carries it.
The signature of ``ring_attention`` and :class:`Options` repeat the list for readers and type checkers; a test compares
them with the record.
"""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

import torch
from torch import Tensor

from ..comm import GroupLike
from ..kernels import KernelConfig
from ..kernels.checks import MAX_SCALE, MIN_SCALE, MIN_SOFTCAP
from ..kernels.ops import pack_config, unpack_config
from ..kernels.scores import SEED_RANGE
from ..validators import FLAG, Validator, instance_validator, integer_between, optional, real_number, word_choice
from .local.protocol import LocalAttention
from .ring import Ring
from .row_packing import CuSeqlensLike, has_row_boundaries
from .schedule.intervals import Intervals
from .schedule.layout import MAX_POSITIONS, POSITIONS, Layout, LayoutLike
from .schedule.mask import NO_WINDOW, BlockMask, Longformer, read_ranges
from .schedule.plan import PLAN_CACHE_SIZE

IntervalsLike = Intervals | Sequence[tuple[Tensor, Tensor]]
FIRST_HEAD_LIMIT = 1 << 31  # upper limit of first_head, exclusive


class Compare(Enum):
    """Rule by which ranks compare an argument."""

    ALWAYS = "usually constant from batch to batch"
    CHANGING = "usually different in the next batch"
    OWN = "each rank may have its own value"


class ArgSpec(NamedTuple):
    """Specification of one argument: op schema, conversion to op arguments, valid values, and what ranks compare."""

    schema: str  # schema of the op arguments that carry it
    pack: Callable[[Any], Sequence[Any]] = lambda value: (value,)  # convert the argument to op arguments
    unpack: Callable[..., Any] = lambda value: value  # convert the op arguments back
    kind: Validator | None = None  # values that the argument takes, if they can be checked without other arguments
    compared_value: Callable[[Any], object] | None = None
    """Read the value that ranks compare from a prepared call; None: compare the argument itself."""
    compare_mode: Compare = Compare.ALWAYS


# --- conversion for the op -----------------------------------------------------------------------------------------


def _pack_layout(layout: object) -> tuple[Tensor | None, str | None]:
    """Return ``(table of spans, None)`` for a Layout, and ``(None, name)`` for a name.

    Other values become text, which :func:`.shards.resolve_layout` then refuses.
    """
    if isinstance(layout, Layout):
        return layout.table, None
    return None, None if layout is None else str(layout)


def _unpack_layout(table: Tensor | None, name: str | None) -> Layout | str | None:
    return name if table is None else _layout(table.numpy().tobytes())


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _layout(table: bytes) -> Layout:
    """Return the layout with this table of spans, int64 as bytes so that it can be cached."""
    spans: list[list[tuple[int, ...]]] = []
    for rank, *span in torch.frombuffer(bytearray(table), dtype=torch.int64).view(-1, 4).tolist():
        spans.extend([] for _ in range(len(spans), rank + 1))
        spans[rank].append(tuple(span))
    return Layout(spans)


def _pack_mask(block_mask: Tensor | BlockMask | Longformer | None) -> tuple[Tensor | None, int, list[int] | None]:
    """Return ``(blocks, block size, Longformer numbers)``; block size 0 stands for a tensor with blocks of equal size.

    The Longformer numbers are the two sides of the window, then start and end of every global range.
    """
    if isinstance(block_mask, Longformer):
        return None, 0, [*block_mask.window, *(edge for interval in block_mask.global_tokens for edge in interval)]
    if isinstance(block_mask, BlockMask):
        return block_mask.visible, block_mask.block, None
    return block_mask, 0, None


def _unpack_mask(
    blocks: Tensor | None, block: int, longformer: list[int] | None
) -> Tensor | BlockMask | Longformer | None:
    if longformer is not None:
        left, right, *edges = longformer
        return Longformer((left, right), tuple(zip(edges[::2], edges[1::2], strict=True)))
    if blocks is None or not block:
        return blocks
    if blocks.device.type != "cpu" or not blocks.numel():
        return BlockMask(blocks, block)  # raises with the reason
    return _block_mask(blocks.numpy().tobytes(), blocks.shape[1], block)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _block_mask(visible: bytes, columns: int, block: int) -> BlockMask:
    """Return the mask with these visible blocks, bool as bytes so that it can be cached."""
    return BlockMask(torch.frombuffer(bytearray(visible), dtype=torch.bool).view(-1, columns), block)


def _pack_intervals(intervals: IntervalsLike | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the ends ``[intervals, 2, positions]`` and the path positions of a prefix tree."""
    if intervals is None or isinstance(intervals, Intervals):
        return (None, None) if intervals is None else (intervals.table, intervals.path_positions)
    return torch.stack([torch.stack([*pair]) for pair in intervals]), None


def _unpack_intervals(table: Tensor | None, path_positions: Tensor | None) -> Intervals | None:
    return None if table is None else Intervals(table, path_positions)


def _pack_numbers(numbers: CuSeqlensLike | None) -> tuple[Tensor | None]:
    """Return lengths or boundaries as the one input of an op; pad shorter rows with empty documents."""
    if numbers is None or isinstance(numbers, Tensor):
        return (numbers,)
    values: list[Any] = list(numbers)
    if has_row_boundaries(values):  # pad shorter rows with empty documents
        longest = max(1, *map(len, values))
        values = [number for row in values for number in (*row, *[*row[-1:], 0][:1] * (longest - len(row)))]
        return (torch.tensor(values, device="cpu").view(-1, longest),)
    # Keep fractions, so that the op refuses them instead of rounding.
    dtype = None if any(isinstance(x, float) for x in values) else torch.int64
    return (torch.tensor(values, dtype=dtype, device="cpu"),)


def _pack_seed(seed: int | None) -> tuple[Tensor | None, bool]:
    """Return the given seed as an int64 tensor, and False because it was not drawn."""
    if seed is None:
        return None, False
    if not isinstance(seed, int) or not 0 <= seed < SEED_RANGE:  # as int64, other values would alias valid seeds
        raise ValueError(f"dropout_seed is {seed!r}: it must be an integer from 0 to 2^64 - 1")
    return torch.full((), signed_seed(seed), dtype=torch.int64, device="cpu"), False


def signed_seed(seed: int) -> int:
    """Return a 64-bit seed as a signed number, which fits an int64 tensor."""
    return seed - SEED_RANGE if seed >= SEED_RANGE // 2 else seed


# --- allowed values --------------------------------------------------------------------------------------------------


def _sides(window_size: Any) -> Any:
    """Replace None by -1 in a window or in one of its sides."""
    return (-1, -1) if window_size is None else [-1 if side is None else side for side in window_size]


def _read_window(window_size: Any) -> tuple[int, int]:
    left, right = _sides(window_size)
    return _SIDE.convert(left), _SIDE.convert(right)


_SIDE = integer_between(-1, MAX_POSITIONS)
_WINDOW = Validator("(left, right), each an integer from 0 to 2^62 - 1, or -1 or None for no limit", _read_window)
_CAP = real_number(
    "a number from 1e-8 to 1e30, or 0 or None for no cap", lambda cap: cap == 0 or MIN_SOFTCAP <= cap <= MAX_SCALE
)
_SOFTCAP = Validator(_CAP.expected, lambda cap: 0.0 if cap is None else _CAP.convert(cap))
_SCALE = optional(real_number("a number from 1e-30 to 1e30", lambda value: MIN_SCALE <= value <= MAX_SCALE))
_DROPOUT = real_number("a number in [0, 1)", lambda value: 0 <= value < 1)
_CONFIG = optional(instance_validator("a kernels.KernelConfig", KernelConfig))


def _shape_of_slopes(call: Any) -> list[int] | None:
    slopes = call.args.alibi_slopes
    return None if slopes is None else list(slopes.shape)


# --- the record ---------------------------------------------------------------------------------------------------


class AttentionArgs(NamedTuple):
    """Arguments of one ``ring_attention`` call as given, except q, k, v, ring and group."""

    layout: Annotated[
        LayoutLike,
        ArgSpec(
            "Tensor? layout, str? layout_name",
            _pack_layout,
            _unpack_layout,
            compared_value=attrgetter("layouts.queries"),
        ),
    ] = None
    causal: Annotated[bool, ArgSpec("bool causal", kind=FLAG, compared_value=attrgetter("mask.causal"))] = False
    window_size: Annotated[
        tuple[int | None, int | None] | None,
        ArgSpec(
            "SymInt[] window_size", lambda sides: (list(_sides(sides)),), tuple, _WINDOW, attrgetter("mask.window")
        ),
    ] = NO_WINDOW
    softmax_scale: Annotated[
        float | None, ArgSpec("float? softmax_scale", kind=_SCALE, compared_value=attrgetter("softmax_scale"))
    ] = None
    softcap: Annotated[float | None, ArgSpec("float? softcap", kind=_SOFTCAP)] = 0.0
    learnable_sink: Annotated[
        Tensor | None,
        ArgSpec("Tensor? learnable_sink", compared_value=lambda call: getattr(call.args.learnable_sink, "dtype", None)),
    ] = None
    alibi_slopes: Annotated[Tensor | None, ArgSpec("Tensor? alibi_slopes", compared_value=_shape_of_slopes)] = None
    dropout_p: Annotated[float, ArgSpec("float dropout_p", kind=_DROPOUT)] = 0.0
    dropout_seed: Annotated[
        int | None,
        ArgSpec(
            "Tensor? dropout_seed, bool drawn",  # drawn: every rank has drawn a seed, and rank 0's counts
            _pack_seed,
            lambda seed, drawn: None if seed is None else int(seed) if drawn else int(seed) % SEED_RANGE,
            kind=optional(integer_between(0, SEED_RANGE - 1)),
            compared_value=lambda call: (
                None if call.has_drawn_seed else call.args.dropout_seed
            ),  # None: rank 0 draws one
            compare_mode=Compare.CHANGING,
        ),
    ] = None
    first_head: Annotated[int, ArgSpec("SymInt first_head", kind=integer_between(0, FIRST_HEAD_LIMIT - 1))] = 0
    cu_seqlens: Annotated[
        CuSeqlensLike | None,
        ArgSpec(
            "Tensor? cu_seqlens",
            _pack_numbers,
            compared_value=attrgetter("mask.documents"),
            compare_mode=Compare.CHANGING,
        ),
    ] = None
    seqused_k: Annotated[
        Iterable[int] | Tensor | None,
        ArgSpec(
            "Tensor? seqused_k", _pack_numbers, compared_value=attrgetter("mask.used"), compare_mode=Compare.CHANGING
        ),
    ] = None
    key_mask: Annotated[Tensor | None, ArgSpec("Tensor? key_mask", compare_mode=Compare.CHANGING)] = None
    leftpad_k: Annotated[
        Iterable[int] | Tensor | None, ArgSpec("Tensor? leftpad_k", _pack_numbers, compare_mode=Compare.CHANGING)
    ] = None
    prefix_length: Annotated[
        int | None, ArgSpec("SymInt? prefix_length", kind=optional(POSITIONS), compared_value=attrgetter("mask.prefix"))
    ] = None
    islands: Annotated[
        Iterable[tuple[int, int]] | Tensor | None,
        ArgSpec(
            "Tensor? islands", _pack_numbers, compared_value=attrgetter("mask.islands"), compare_mode=Compare.CHANGING
        ),
    ] = None
    block_mask: Annotated[
        Tensor | BlockMask | Longformer | None,
        ArgSpec(
            "Tensor? blocks, SymInt block, SymInt[]? longformer",
            _pack_mask,
            _unpack_mask,
            compared_value=attrgetter("mask.blocks", "mask.global_tokens"),
        ),
    ] = None
    intervals: Annotated[
        IntervalsLike | None,
        ArgSpec(
            "Tensor? intervals, Tensor? path_positions",
            _pack_intervals,
            _unpack_intervals,
            compared_value=attrgetter("mask.intervals"),
            compare_mode=Compare.CHANGING,
        ),
    ] = None
    kv_layout: Annotated[
        LayoutLike,
        ArgSpec(
            "Tensor? kv_layout, str? kv_layout_name",
            _pack_layout,
            _unpack_layout,
            compared_value=attrgetter("layouts.keys"),
        ),
    ] = None
    align: Annotated[
        Literal["top-left", "bottom-right"] | None,
        ArgSpec("str? align", kind=optional(word_choice("top-left", "bottom-right"))),
    ] = None
    return_max_logits: Annotated[bool, ArgSpec("bool return_max_logits", kind=FLAG)] = False
    backend: Annotated[
        str | LocalAttention,
        # an object becomes text, which the op refuses, because a graph cannot hold objects
        ArgSpec("str backend", lambda backend: (str(backend),), compared_value=attrgetter("backend.name")),
    ] = "auto"
    config: Annotated[
        KernelConfig | None,
        ArgSpec("int[]? tiles, str[] choices", pack_config, unpack_config, kind=_CONFIG, compare_mode=Compare.OWN),
    ] = None


ARG_SPECS: dict[str, ArgSpec] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(AttentionArgs, include_extras=True).items()
}  # by argument name
_KINDS = {name: entry.kind for name, entry in ARG_SPECS.items() if entry.kind is not None}


class Options(TypedDict, total=False):
    """Keyword arguments of ``ring_attention`` that do not change the type of its result, for type checkers."""

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
    cu_seqlens: CuSeqlensLike | None
    seqused_k: Iterable[int] | Tensor | None
    key_mask: Tensor | None
    leftpad_k: Iterable[int] | Tensor | None
    prefix_length: int | None
    islands: Iterable[tuple[int, int]] | Tensor | None
    block_mask: Tensor | BlockMask | Longformer | None
    intervals: IntervalsLike | None
    kv_layout: LayoutLike
    align: Literal["top-left", "bottom-right"] | None
    backend: str | LocalAttention
    config: KernelConfig | None


KEYWORD_ALIASES = {
    "is_causal": "causal", "scale": "softmax_scale", "sm_scale": "softmax_scale", "process_group": "group",
    "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "seqlens_k": "seqused_k", "dropout": "dropout_p",
    "window": "window_size", "sinks": "learnable_sink", "s_aux": "learnable_sink", "logits_soft_cap": "softcap",
    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse", "return_max_logit": "return_max_logits",
    "attn_mask": "causal, window_size, cu_seqlens, key_mask or block_mask", "attention_mask": "key_mask",
    "key_padding_mask": "key_mask", "attn_bias": "alibi_slopes",
}  # fmt: skip
"""Argument names of PyTorch, FlashAttention and transformers, with the names in ``ring_attention``."""

UNNEEDED_KEYWORDS = ("max_seqlen_q", "max_seqlen_k", "enable_gqa", "deterministic")
"""Arguments of other libraries that ``ring_attention`` does not need."""


def unknown_keyword(name: str) -> TypeError:
    """Return the TypeError for an unknown keyword of ``ring_attention``, with the right keyword if there is one."""
    text = f"ring_attention() got an unexpected keyword argument {name!r}"
    if name in UNNEEDED_KEYWORDS:
        return TypeError(f"{text}. Omit it, because it is not needed here.")
    ours = KEYWORD_ALIASES.get(name) or next(iter(get_close_matches(name, Options.__annotations__, 1)), None)
    return TypeError(text if ours is None else f"{text}. Use {ours}.")


def take_args(local_vars: dict[str, Any]) -> AttentionArgs:
    """Return the arguments from the ``locals()`` of ``ring_attention``, which is cleared so that it keeps no tensor."""
    args = AttentionArgs(*[local_vars[name] for name in AttentionArgs._fields])
    local_vars.clear()
    return args


def check_args(args: AttentionArgs) -> AttentionArgs:
    """Check each argument on its own and return all in normal form; raise ValueError if an argument is invalid."""
    checked = {name: kind.check(name, getattr(args, name)) for name, kind in _KINDS.items()}
    islands = None if args.islands is None else read_ranges("islands", args.islands)
    return args._replace(**checked, islands=islands or None)


def pack_op_args(args: AttentionArgs) -> tuple[Any, ...]:
    """Return the arguments as the flat tuple of tensors, numbers and text that an op takes."""
    return tuple(part for name, entry in ARG_SPECS.items() for part in entry.pack(getattr(args, name)))


def unpack_op_args(packed: Iterable[Any]) -> AttentionArgs:
    """Invert :func:`pack_op_args`. Extra elements at the end of ``packed`` are ignored."""
    parts = iter(packed)
    return AttentionArgs(*[entry.unpack(*islice(parts, entry.schema.count(",") + 1)) for entry in ARG_SPECS.values()])
