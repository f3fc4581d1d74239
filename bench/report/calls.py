"""Which call of ``ring_attention`` a case was of, where its words say that, for ``ringattn show``'s picture of it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...ring.schedule.layout import Documents, Layout
from ...ring.schedule.mask import UNLIMITED, Mask, longformer
from ..common import masks
from ..common.call import Call
from ..common.shapes import LayoutName, binary
from ..predict.rows import MASKS, mask_of
from .theme import Theme, themed

MOST_RANKS = 64
MOST_TOKENS = 2**18  # a picture of more looks the same and takes longer
MOST_SAID = 2**40
MOST_PICTURES = 24
DPI = 76
COLOURS = 96
PLAIN = (Mask(), Mask(causal=True))
"""Masks that look the same at every length."""
MOST_PARTS = 32  # of a mask, over all batch rows that differ: each takes as long as a mask of one

Kind = tuple[str, str, int, int, int]


class Wanted(NamedTuple):
    """A call that a picture is drawn of, and the names of the cases that are of it."""

    call: Call
    cases: tuple[str, ...]


def call_of(words: Mapping[str, Any]) -> Call | None:
    """The call that labels, arguments or a problem say: layout, world, tokens, mask. None where they say no ring.

    They come from a file, so that nothing but known names and numbers of a sensible size is taken. Heads and dtype
    change nothing of what is drawn, and are not read.
    """
    world, layout, seqlen = _whole(words.get("world"), MOST_RANKS), words.get("layout"), _seqlen(words)
    known = layout in [name.value for name in LayoutName]
    if world is None or world == 1 or seqlen is None or seqlen < world or not known:
        return None
    mask = _mask(words, seqlen)
    if mask is None or (seqlen > MOST_TOKENS and mask not in PLAIN):
        return None
    # the picture of many tokens is that of fewer, cut the same way
    tokens = seqlen if seqlen <= MOST_TOKENS else MOST_TOKENS // (2 * world) * (2 * world)
    held: Layout = getattr(Layout, str(layout))(tokens, world)
    nodes = _whole(words.get("nodes"), world // 2) or 1
    nodes = nodes if world % nodes == 0 else 1
    call = Call(held, str(layout), mask, 1, 1, heads=1, kv_heads=1, head_dim=128, dtype="bfloat16", nodes=nodes)
    try:
        _ = call.plan
    except ValueError:  # blocks that the shards are no runs of, documents of another length
        return None
    return call


def _whole(value: object, most: int) -> int | None:
    """A whole number from 1 to ``most``; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most else None


def _seqlen(words: Mapping[str, Any]) -> int | None:
    """Tokens in all, said so or per rank."""
    each = words.get("tokens", words.get("tokens per rank"))
    told, per_rank, world = (_whole(one, MOST_SAID) for one in (words.get("seqlen"), each, words.get("world")))
    return per_rank * world if told is None and per_rank is not None and world is not None else told


def _mask(words: Mapping[str, Any], seqlen: int) -> Mask | None:
    """The mask, by its name or by its parts; None where it is not told whole."""
    name, causal = words.get("mask"), words.get("causal")
    if words.get("block_mask") is not None:  # a file says how many blocks are seen, and not which
        return None
    try:
        used, stretches = _used(words, seqlen), _stretches(words, seqlen)
        if name is not None:
            known = isinstance(name, str) and name in MASKS and used is None and not stretches
            return mask_of(name, seqlen) if known else None
        window, ends, prefix = _window(words), words.get("cu_seqlens"), words.get("prefix_length")
        documents = None if ends is None else Documents(ends)
    except (ValueError, TypeError):
        return None
    if not isinstance(causal, bool) or window is None or (prefix is not None and _whole(prefix, seqlen) is None):
        return None
    if documents is not None and documents.seqlen != seqlen:
        return None
    mask = Mask(causal, window, documents, prefix or 0, used, global_tokens=stretches)
    return mask if len(mask.rows) * len(mask.parts) <= MOST_PARTS else None


def _used(words: Mapping[str, Any], seqlen: int) -> tuple[int, ...] | None:
    """Keys of each batch row; None where none are told.

    Raises:
        ValueError: what is told are no lengths, or many.
    """
    told = words.get("seqused_k")
    if told is None:
        return None
    if not _some(told) or not all(type(length) is int and 0 <= length <= seqlen for length in told):
        raise ValueError(f"seqused_k is {told!r}: it must be 1 to {MOST_PARTS} lengths of 0 to {seqlen}")
    return tuple(told)


def _stretches(words: Mapping[str, Any], seqlen: int) -> tuple[tuple[int, int], ...]:
    """Of global tokens; none where none are told.

    Raises:
        ValueError: what is told are no stretches of this length, or many.
    """
    told = words.get("global_tokens")
    if told is None:
        return ()
    if not _some(told) or not all(_whole(end, seqlen) for *_, end in told):
        raise ValueError(f"global_tokens is {told!r}: it must be 1 to {MOST_PARTS} stretches up to {seqlen}")
    return longformer(0, told).global_tokens


def _some(told: object) -> bool:
    return isinstance(told, list | tuple) and 0 < len(told) <= MOST_PARTS


def _window(words: Mapping[str, Any]) -> tuple[int, int] | None:
    """(left, right); without ends where none is told; None where what is told is no window."""
    told = words.get("window", words.get("window_size"))
    if told is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(told, list | tuple) or len(told) != 2:
        return None
    left, right = told
    whole = all(isinstance(side, int) and UNLIMITED <= side <= MOST_SAID for side in (left, right))
    return (left, right) if whole else None


def wanted(words: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Wanted]:
    """One call per layout, mask and world, with the cases that are of it; ``words`` are (case, what it says)."""
    found: dict[Kind, tuple[Call, dict[str, None]]] = {}
    for case, said in words:
        call = call_of(said)
        if call is not None:
            found.setdefault(kind(call), (call, {}))[1][case] = None
    return [Wanted(call, tuple(cases)) for call, cases in found.values()]


def kind(call: Call) -> Kind:
    """What makes the picture of a call: others with the same look alike."""
    seqlen = 0 if call.mask in PLAIN else call.layout.seqlen
    return call.layout_name, str(masks.data(call.mask)), seqlen, call.layout.world, call.nodes


def title(call: Call) -> str:
    """``zigzag, causal, 4 ranks on 2 nodes``: what its picture shows, with the length where the mask depends on it."""
    length = "" if call.mask in PLAIN else f" of {binary(call.layout.seqlen)} tokens"
    where = f" on {call.nodes} nodes" if call.nodes > 1 else ""
    return f"{call.layout_name}, {masks.title(call.mask)}{length}, {call.layout.world} ranks{where}"


def png(call: Call, theme: Theme) -> bytes:
    """The picture of a call; of few colours, which makes it a third as large."""
    from PIL import Image

    from ...tools.pictures import call_figure

    drawn, small = io.BytesIO(), io.BytesIO()
    with themed(theme):
        figure = call_figure(call, theme)
        # of all calls that look so, whatever their lengths and heads
        figure.suptitle(f"ranks compute {call.balance:.0%} of the time, if every hop lasts as long as its slowest rank")
        figure.savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, format="png", optimize=True)
    return small.getvalue()
