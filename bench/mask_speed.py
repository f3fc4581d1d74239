"""What a mask costs for what it lets through, on the CPU: ``python -m ringattn.bench.mask_speed``.

Forward and backward under a mask and under the causal one alone, in turns, in two processes of one thread each. The
ratio is that of the times over that of the visible pairs: 1 where a mask costs its share of the causal area.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..ring import Layout, Mask, Ring, ring_attention, visible_pairs
from ..ring.schedule.layout import Documents
from .common.launching import Member, launch, member, process_group, threads
from .common.masks import packed
from .common.timing import Clock, Samples, interleaved
from .ring.runs import Ranks

CPU = torch.device("cpu")

WORLD, HEADS, HEAD_DIM = 2, 4, 64
SEQLEN, REPEATS = 32_768, 5
WINDOW, MEAN_DOCUMENT = (1024, 0), 2048
CAUSAL = "causal"


class Row(NamedTuple):
    """One mask."""

    name: str
    times: Samples
    share: float
    """Of the visible pairs of the causal mask."""
    ratio: float
    """Time over that of the causal mask, over the share."""


def calls(seqlen: int) -> dict[str, dict[str, Any]]:
    """What is measured, by name: arguments of ``ring_attention`` beside ``causal``."""
    documents = packed(seqlen, MEAN_DOCUMENT, seed=0)
    return {
        CAUSAL: {},
        "window": {"window_size": WINDOW},
        "window, contiguous": {"window_size": WINDOW, "layout": Layout.contiguous(seqlen, WORLD)},
        "documents": {"cu_seqlens": documents},
        "documents, zigzag per document": {
            "cu_seqlens": documents,
            "layout": Layout.zigzag(seqlen, WORLD, cu_seqlens=documents),
        },
    }


def pairs(seqlen: int, call: dict[str, Any]) -> int:
    """Visible pairs of the whole sequence."""
    boundaries = call.get("cu_seqlens")
    documents = None if boundaries is None else Documents(boundaries)
    positions = torch.arange(seqlen)
    return visible_pairs(Mask(True, call.get("window_size", (-1, -1)), documents), positions, positions)


def step(call: dict[str, Any], seqlen: int, rank: int, ring: Ring) -> Callable[[], None]:
    """A forward and backward of one mask, of inputs made here: drawing them would take as long as a short window."""
    settings: dict[str, Any] = {"layout": Layout.zigzag(seqlen, WORLD), "ring": ring, "causal": True} | call
    shape = (1, settings["layout"].lengths[rank], HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape)

    def run() -> None:
        q.grad = k.grad = v.grad = None
        torch.autograd.backward(ring_attention(q, k, v, **settings), dout)

    return run


def measure(place: Member, seqlen: int, repeats: int, store: str | None = None) -> list[Row] | None:
    """One rank of the measurement; rows on rank 0."""
    everyone = calls(seqlen)
    with threads(1), process_group(place, store, device=CPU), Ring() as ring:
        steps = {name: step(call, seqlen, place.rank, ring) for name, call in everyone.items()}
        times = interleaved(steps, Clock(CPU, Ranks()), repeats=repeats)
    shares = {name: pairs(seqlen, call) / pairs(seqlen, everyone[CAUSAL]) for name, call in everyone.items()}
    whole = times[CAUSAL].median
    rows = [Row(name, one, shares[name], one.median / whole / shares[name]) for name, one in times.items()]
    return rows if place.rank == 0 else None


def spawned(store: str, seqlen: int, repeats: int) -> list[Row] | None:
    """The entry of the processes."""
    place = member()
    assert place is not None
    return measure(place, seqlen, repeats, store)


def main(seqlen: int = SEQLEN, repeats: int = REPEATS) -> None:
    """Print a line for each mask: of processes of its own, or of the ranks of a launcher, where rank 0 prints."""
    place = member()
    if place is not None and place.world != WORLD:
        raise SystemExit(f"there are {place.world} ranks: this takes {WORLD}, or none to start its own")
    rows = launch(WORLD, spawned, seqlen, repeats) if place is None else measure(place, seqlen, repeats)
    for row in rows or []:
        print(
            f"{row.name}: {row.times.median:.3f} s ± {row.times.spread:.1%}, {row.share:.2%} of the causal pairs, "
            f"{row.ratio:.2f} times their share"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
