"""Two-dimensional groups: which ranks form a ring, which exchange heads for tokens (Ulysses), and their layouts.

Of ``R x U`` ranks, rank ``r * U + u`` holds shard ``r * U + u``, as in a one-dimensional group. The R ranks with equal
u form a ring. After the exchange of heads for tokens, rank r of that ring has the tokens of all U ranks with that r.
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
from .schedule.plan import PLAN_CACHE_SIZE

Mesh = tuple[Group, Group]  # this rank's groups along the ring and along the Ulysses dimension


class Rings(NamedTuple):
    """Rings of this rank in a mesh: the ring that K/V move along, and the ring of the Ulysses dimension."""

    ring: Ring
    ulysses: Ring

    @property
    def rank(self) -> int:
        """Rank in the whole mesh."""
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size

    @contextmanager
    def _call_guard(self, device: torch.device) -> Iterator[None]:
        """Guard one call on both rings. Report an error inside to the ranks of both dimensions."""
        with self.ulysses._call_guard(device), self.ring._call_guard(device):
            yield

    def _agree(
        self,
        fields: Mapping[str, object],
        device: torch.device,
        values: Mapping[str, object] | None = None,
        *,
        always: bool = False,
    ) -> tuple[int, int]:
        """Compare a call with all ranks of the mesh. Return its numbers in the ring and in the Ulysses ring."""
        number = self.ulysses._agree(fields, device, values, always=always)
        try:
            return self.ring._agree(fields, device, values, always=always), number
        except ValueError:  # the refusing ranks have reported to every ring that they are in
            self.ulysses._cancel_agreed(self.ring)
            raise

    def _draw_seed(self, own_seed: int | None = None) -> int:
        """Return the first rank's seed on every rank; ``own_seed`` is a seed that this rank has drawn already."""
        if self.ulysses.rank:
            own_seed = 0  # ignored; virtual ranks share a generator, whose next number belongs to the first rank
        return self.ulysses._draw_seed(self.ring._draw_seed(own_seed))

    def _gather(self, value: object, what: str) -> list[object]:
        """Return the value of each rank of the mesh, in rank order."""
        of_ulysses: list[Any] = self.ulysses._gather(self.ring._gather(value, what), what)
        return [values[ring_rank] for ring_rank in range(self.ring.size) for values in of_ulysses]


def resolve_mesh_rings(mesh: Mesh, device: torch.device, ring: Ring | None = None) -> Rings:
    """Return the rings that calls with this mesh share.

    ``ring`` may be a ring of the first dimension with its own settings. The Ulysses ring takes its transport,
    limits and deadline from it. An error in one ring ends both, and errors name ranks of the mesh.

    Raises:
        ValueError: ``ring`` belongs to another group.
    """
    along_ring, along_ulysses = mesh
    ring = resolve_ring(ring, along_ring if ring is None else None, device)
    if ring.group is not along_ring:
        raise ValueError("ring has a different group from the mesh's first dimension. Pass Ring(mesh['ring']).")
    rings = Rings(ring, ring.partner(along_ulysses))
    ring.name_ranks(range(rings.ulysses.rank, rings.size, rings.ulysses.size))
    first = ring.rank * rings.ulysses.size
    rings.ulysses.name_ranks(range(first, first + rings.ulysses.size))
    return rings


Ranks = Ring | Rings  # the ranks of one call: a ring, or a two-dimensional mesh


def resolve_call_ranks(group: GroupLike, device: torch.device, ring: Ring | None = None) -> Ranks:
    """Return the ring or rings that calls with this group share. ``ring`` is the one that the call passes, if any."""
    mesh = resolve_mesh(group)
    return resolve_ring(ring, group, device) if mesh is None else resolve_mesh_rings(mesh, device, ring)


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def ring_layout(layout: Layout, ulysses: int) -> Layout:
    """Return the layout of the ring: its rank r holds the tokens of ranks ``r * ulysses`` and up of ``layout``."""
    return Layout.from_positions(
        _ring_rank_positions(layout, ulysses, place) for place in range(layout.world // ulysses)
    )


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def ulysses_layout(layout: Layout, ulysses: int, ring_rank: int) -> Layout:
    """Return the layout of one ring rank's tokens, counted from 0, over the ``ulysses`` ranks that hold them."""
    positions = _ring_rank_positions(layout, ulysses, ring_rank)
    ranks = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
    return Layout.from_positions(torch.searchsorted(positions, layout.positions(rank)) for rank in ranks)


def _ring_rank_positions(layout: Layout, ulysses: int, ring_rank: int) -> Tensor:
    """Return the ascending positions of the tokens that the ``ulysses`` ranks of one ring rank hold together."""
    ranks = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
    return torch.cat([layout.positions(rank) for rank in ranks]).sort().values
