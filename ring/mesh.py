"""A group of two dimensions: which ranks make a ring, which exchange heads for tokens, and who holds what.

Of ``R x U`` ranks, rank ``r * U + u`` holds the shard of that number, as in a group of one dimension. The R ranks with
one u make a ring, where rank r stands for the tokens of all U ranks with that r.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import Group, GroupLike, resolve_mesh
from .ring import Ring, resolve_ring
from .schedule.layout import Layout
from .schedule.plan import PLANS

Mesh = tuple[Group, Group]
"""This rank's groups: along the ring, and along Ulysses."""


class Rings(NamedTuple):
    """This rank's two rings in a mesh."""

    ring: Ring
    ulysses: Ring

    @property
    def rank(self) -> int:
        """Among all ranks of the mesh."""
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.ring.size * self.ulysses.size

    @contextmanager
    def _entered(self, device: torch.device) -> Iterator[None]:
        """One call of both; what ends it early reaches the ranks of both dimensions."""
        with self.ulysses._entered(device), self.ring._entered(device):
            yield

    def _agree(
        self,
        fields: Mapping[str, object],
        device: torch.device,
        values: Mapping[str, object] | None = None,
        *,
        always: bool = False,
    ) -> tuple[int, int]:
        """Compare with all ranks of the mesh; the numbers of the call in the ring and in Ulysses' dimension."""
        number = self.ulysses._agree(fields, device, values, always=always)
        try:
            return self.ring._agree(fields, device, values, always=always), number
        except ValueError:  # a line of ranks that refused has said so in every ring that it crosses
            self.ulysses._call_off(self.ring)
            raise

    def _draw_seed(self, drawn: int | None = None) -> int:
        """Return the first rank's seed on every rank; ``drawn``: already, by every rank for itself."""
        if self.ulysses.rank:
            drawn = 0  # nobody takes it; virtual ranks share a generator, of which the first rank needs the next number
        return self.ulysses._draw_seed(self.ring._draw_seed(drawn))

    def _gather(self, value: object, what: str) -> list[object]:
        """Return the value of each rank of the mesh, in rank order."""
        of_ulysses: list[Any] = self.ulysses._gather(self.ring._gather(value, what), what)
        return [values[place] for place in range(self.ring.size) for values in of_ulysses]


def rings_of(mesh: Mesh, device: torch.device, ring: Ring | None = None) -> Rings:
    """Return the rings that calls with this mesh share.

    ``ring`` may be one of the first dimension, with settings of its own. The other ring takes its deadline from it, and
    what ends one of them ends both. Their errors name the ranks of the mesh.

    Raises:
        ValueError: it is of another group.
    """
    along_ring, along_ulysses = mesh
    ring = resolve_ring(ring, along_ring if ring is None else None, device)
    if ring.group is not along_ring:
        raise ValueError("ring is not of the first dimension of the mesh that group is: pass Ring(mesh['ring'])")
    rings = Rings(ring, ring.partner(along_ulysses))
    ring.name_ranks(range(rings.ulysses.rank, rings.size, rings.ulysses.size))
    first = ring.rank * rings.ulysses.size
    rings.ulysses.name_ranks(range(first, first + rings.ulysses.size))
    return rings


Ranks = Ring | Rings
"""The ranks of one call: a ring, or a mesh of two dimensions."""


def ranks_of(group: GroupLike, device: torch.device, ring: Ring | None = None) -> Ranks:
    """Return the ring or rings that calls with this group share; ``ring``: the one that a call names."""
    mesh = resolve_mesh(group)
    return resolve_ring(ring, group, device) if mesh is None else rings_of(mesh, device, ring)


@lru_cache(maxsize=PLANS)
def joined(layout: Layout, ulysses: int) -> Layout:
    """The layout of the ring, whose ranks hold what ``ulysses`` ranks of ``layout`` hold together."""
    return Layout.from_positions(_held(layout, ulysses, place) for place in range(layout.world // ulysses))


@lru_cache(maxsize=PLANS)
def shared(layout: Layout, ulysses: int, place: int) -> Layout:
    """Which of the tokens of one place in the ring, counted from 0, each of its ``ulysses`` ranks holds."""
    held = _held(layout, ulysses, place)
    ranks = range(place * ulysses, (place + 1) * ulysses)
    return Layout.from_positions(torch.searchsorted(held, layout.positions(rank)) for rank in ranks)


def _held(layout: Layout, ulysses: int, place: int) -> Tensor:
    ranks = range(place * ulysses, (place + 1) * ulysses)
    return torch.cat([layout.positions(rank) for rank in ranks]).sort().values
