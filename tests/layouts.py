"""Layouts to test with: the named ones, and any spans that hypothesis can think of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from ringattn.ring.layout import Layout
from ringattn.ring.mask import Mask

NAMES = ("contiguous", "zigzag", "striped")


def named(name: str, seqlen: int, world: int) -> Layout:
    made: Layout = getattr(Layout, name)(seqlen, world)
    return made


def of_owners(owners: list[int], world: int) -> Layout:
    """The token at position p on rank ``owners[p]``; any layout whatever."""
    return Layout([[(p, 1) for p, owner in enumerate(owners) if owner == rank] for rank in range(world)])


def small_layouts(max_seqlen: int, max_world: int) -> list[Layout]:
    """Every named layout of every size up to these."""
    return [
        named(name, seqlen, world)
        for name in NAMES
        for world in range(1, max_world + 1)
        for seqlen in range(max_seqlen + 1)
    ]


@st.composite
def layouts(draw: st.DrawFn, max_world: int = 8, max_seqlen: int = 48, world: int | None = None) -> Layout:
    """A partition of ``[0, seqlen)``: named, uneven or arbitrary; some ranks may hold nothing."""
    world = world or draw(st.integers(1, max_world))
    kind = draw(st.sampled_from([*NAMES, "uneven", "any"]))
    if kind == "uneven":
        return Layout.uneven(draw(st.lists(st.integers(0, max_seqlen // world), min_size=world, max_size=world)))
    if kind == "any":
        owners = draw(st.lists(st.integers(0, world - 1), max_size=max_seqlen))
        return of_owners(owners, world)
    return named(kind, draw(st.integers(0, max_seqlen)), world)


@dataclass(frozen=True)
class Window(Mask):
    """Another interval mask, to see that nothing depends on the one there is: a window inside documents of one size."""

    left: int = 3
    right: int = 0
    document: int = 1000

    def interval(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lo, hi = super().interval(positions)
        start = positions // self.document * self.document
        lo = torch.maximum(torch.maximum(lo, positions - self.left), start)
        hi = torch.minimum(torch.minimum(hi, positions + self.right + 1), start + self.document)
        return lo, hi


def sees(mask: Mask, query: int, key: int) -> bool:
    """What the masks say, for one pair."""
    if isinstance(mask, Window):
        near = query - mask.left <= key <= query + mask.right
        return near and query // mask.document == key // mask.document and (not mask.causal or key <= query)
    return not mask.causal or key <= query


def masks() -> st.SearchStrategy[Mask]:
    windows = st.builds(
        Window, causal=st.booleans(), left=st.integers(-2, 9), right=st.integers(-2, 9), document=st.integers(1, 30)
    )
    return st.one_of(st.builds(Mask, causal=st.booleans()), windows)
