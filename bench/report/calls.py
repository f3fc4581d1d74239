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
MOST_SAID = 2**40
MOST_HEADS = 1024
MOST_PICTURES = 16
DPI = 76
COLOURS = 96

Kind = tuple[str, bool, tuple[int, int], int, int]


def call_of(words: Mapping[str, Any]) -> Call | None:
    """The call that labels, arguments or a problem say: layout, world, tokens, mask. None where they say none.

    They come from a file, so that nothing but known names and numbers of a sensible size is taken.
    """
    world, layout = _whole(words.get("world"), MOST_RANKS), words.get("layout")
    seqlen, each = _whole(words.get("seqlen"), MOST_SAID), _whole(words.get("tokens"), MOST_SAID)
    causal = words.get("causal", words.get("mask") == "causal")
    if world is None or layout not in [name.value for name in LayoutName] or not isinstance(causal, bool):
        return None
    seqlen = each * world if seqlen is None and each is not None else seqlen
    if seqlen is None or seqlen < world:
        return None
    # the picture of many tokens is that of fewer, cut the same way
    tokens = seqlen if seqlen <= MOST_TOKENS else MOST_TOKENS // (2 * world) * (2 * world)
    held: Layout = getattr(Layout, str(layout))(tokens, world)
    nodes = _whole(words.get("nodes"), world // 2) or 1
    heads = _whole(words.get("heads"), MOST_HEADS) or 1
    kv_heads = _whole(words.get("kv_heads"), heads) or heads
    dtype = words.get("dtype")
    return Call(
        held,
        str(layout),
        Mask(causal=causal, window=_window(words.get("window", words.get("window_size")))),
        direction=1,
        batch=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_whole(words.get("head_dim"), MOST_HEADS) or 128,
        dtype=dtype if isinstance(dtype, str) and dtype in DTYPE_BYTES else "bfloat16",
        nodes=nodes if world % nodes == 0 else 1,
    )


def _whole(value: object, most: int) -> int | None:
    """A whole number from 1 to ``most``; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most else None


def _window(told: object) -> tuple[int, int]:
    """(left, right), where it is that; else none."""
    if not isinstance(told, list | tuple) or len(told) != 2 or not all(isinstance(side, int) for side in told):
        return UNLIMITED, UNLIMITED
    left, right = (side if 0 <= side <= MOST_SAID else UNLIMITED for side in told)
    return left, right


def calls_of(words: Iterable[Mapping[str, Any]]) -> Iterator[Call]:
    """One call per layout, mask and world: the first that says it."""
    seen: set[Kind] = set()
    for one in words:
        call = call_of(one)
        if call is not None and kind(call) not in seen and len(seen) < MOST_PICTURES:
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
