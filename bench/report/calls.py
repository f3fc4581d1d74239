"""Which call of ``ring_attention`` a case was of, where its words say that, for ``ringattn show``'s picture of it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...ring.layout import Layout
from ...ring.mask import UNLIMITED, Mask
from .. import masks
from ..call import Call
from ..shapes import DTYPE_BYTES, LayoutName
from .theme import Theme, themed

MOST_RANKS = 64
MOST_TOKENS = 2**18  # a picture of more looks the same and takes longer
MOST_PICTURES = 16
DPI = 76
COLOURS = 96

Kind = tuple[str, bool, tuple[int, int], int, int]


def call_of(words: Mapping[str, Any]) -> Call | None:
    """The call that labels, arguments or a problem say: layout, world, tokens, mask. None where they say none.

    They come from a file, so that nothing but known names and numbers of a sensible size is taken.
    """
    world, layout = words.get("world"), words.get("layout")
    seqlen = words.get("seqlen")
    if seqlen is None and _count(words.get("tokens"), MOST_TOKENS) and _count(world, MOST_RANKS):
        seqlen = words["tokens"] * world
    causal = words.get("causal", words.get("mask") == "causal")
    if layout not in [name.value for name in LayoutName] or not isinstance(causal, bool):
        return None
    if not _count(world, MOST_RANKS) or not _count(seqlen, 2**40) or seqlen < world:
        return None
    # the picture of many tokens is that of fewer, cut the same way
    tokens = seqlen if seqlen <= MOST_TOKENS else MOST_TOKENS // (2 * world) * (2 * world)
    held: Layout = getattr(Layout, layout)(tokens, world)
    window = words.get("window", words.get("window_size"))
    sides = (UNLIMITED, UNLIMITED)
    if isinstance(window, list | tuple) and len(window) == 2 and all(isinstance(side, int) for side in window):
        sides = (max(int(window[0]), UNLIMITED), max(int(window[1]), UNLIMITED))
    heads, kv_heads, head_dim = (words.get(name) for name in ("heads", "kv_heads", "head_dim"))
    heads = heads if _count(heads, 1024) else 1
    dtype = words.get("dtype") if words.get("dtype") in DTYPE_BYTES else "bfloat16"
    return Call(
        held,
        layout,
        Mask(causal=causal, window=sides),
        1,
        1,
        heads,
        kv_heads if _count(kv_heads, heads) and heads % kv_heads == 0 else heads,
        head_dim if _count(head_dim, 1024) else 128,
        dtype,
        nodes if _count(nodes := words.get("nodes"), world // 2) and world % nodes == 0 else 1,
    )


def _count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def calls_of(words: Iterable[Mapping[str, Any]]) -> Iterator[Call]:
    """One call per layout, mask and world: the first that says it."""
    seen: set[Kind] = set()
    for one in words:
        call = call_of(one)
        if call is not None:
            if kind(call) not in seen and len(seen) < MOST_PICTURES:
                seen.add(kind(call))
                yield call


def kind(call: Call) -> Kind:
    """What makes the picture of a call: others with the same look alike."""
    return call.layout_name, call.mask.causal, call.mask.window, call.layout.world, call.nodes


def title(call: Call) -> str:
    """``zigzag, causal, 4 ranks on 2 nodes``: what its picture shows, whatever its length."""
    where = f" on {call.nodes} nodes" if call.nodes > 1 else ""
    return f"{call.layout_name}, {masks.title(call.mask)}, {call.layout.world} ranks{where}"


def png(call: Call, theme: Theme) -> bytes:
    """The picture of a call; of few colours, which makes it a third as large."""
    from PIL import Image

    from ..pictures import call_figure

    drawn, small = io.BytesIO(), io.BytesIO()
    with themed(theme):
        call_figure(call, theme).savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, format="png", optimize=True)
    return small.getvalue()
