"""What one launch is asked to do: how much of the plane of queries and keys, and what it is for."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ...kernels import Bounds
from .program import Form

TILE_ROWS = 128  # query rows of one program of every kernel that these speeds are of


class Area(NamedTuple):
    """What one launch computes of the plane of queries and keys, for each head."""

    pairs: float
    """Visible (query, key) pairs."""
    rows: float
    """Query rows of the launch, seen or not: its state is theirs."""
    keys: float
    longest: float
    """Keys of the row that sees most: how long the last program runs."""
    edges: float
    """Rows of tiles whose rows end at different keys: those are masked."""

    def times(self, factor: float) -> Area:
        """The same picture, so many times as long each way."""
        return Area(self.pairs * factor**2, *(one * factor for one in self[1:]))


def area_of(bounds: Bounds, rows: int, keys: int) -> Area:
    """The area of one part of a hop."""
    share = 1.0 if bounds.runs is None else _share(bounds, rows, keys)
    if bounds.lo is None or bounds.hi is None or not rows:
        return Area(rows * keys * share, rows, keys, keys * share, 0)
    seen = (bounds.hi - bounds.lo).clamp(min=0).double()
    starts = torch.arange(0, rows, TILE_ROWS)
    ends = (starts + TILE_ROWS - 1).clamp(max=rows - 1)
    # neither end ever decreases: a tile of rows is on an edge where its first and its last row differ
    differ = (bounds.lo[starts] != bounds.lo[ends]) | (bounds.hi[starts] != bounds.hi[ends])
    edges = float(((ends - starts + 1) * (differ & (seen[ends] + seen[starts] > 0))).sum())
    seen *= share
    return Area(float(seen.sum()), rows, keys, float(seen.max()), edges)


def _share(bounds: Bounds, rows: int, keys: int) -> float:
    """Of a block-sparse pattern the part of the keys that a row sees, on average."""
    assert bounds.runs is not None
    seen = float((bounds.runs.ends - bounds.runs.begins).sum()) * bounds.runs.block
    return min(seen / max(rows * keys, 1), 1.0)


class Launch(NamedTuple):
    """What one launch is asked for."""

    what: str
    hop: int
    area: Area
    bounds: Bounds | None = None
    """None: only the area is known."""


class Device(Protocol):
    """What a launch costs somewhere."""

    @property
    def on_host(self) -> bool:
        """The host computes itself, one thing after the other."""

    @property
    def beside(self) -> float:
        """The part of its speed that a launch loses while a transfer runs beside it."""

    @property
    def alone(self) -> float:
        """The part of its time that a launch takes while no other rank computes: of a machine that ranks share."""

    def launch_seconds(self, launch: Launch, form: Form) -> float:
        """Seconds of one launch, for one chunk of heads."""


def whole(tokens: float, *, causal: bool) -> Area:
    """Attention of so many tokens on one device."""
    if causal:
        return Area(tokens * (tokens + 1) / 2, tokens, tokens, tokens, tokens)
    return Area(tokens * tokens, tokens, tokens, tokens, 0)
