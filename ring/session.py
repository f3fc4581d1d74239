"""The public session of a framework integration: compare calls, gather values, share errors between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from ..comm import GroupLike
from .mesh import Rings, resolve_call_ranks
from .ring import Ring, call_device
from .schedule.layout import Layout, LayoutLike
from .shards import resolve_layout


class Session:
    """The ranks that share a sequence, as a framework integration sees them.

    A session is cheap: it opens nothing, and all sessions of one group share the ring that calls of
    :func:`ringattn.ring_attention` with this ``group`` use. Every rank makes its calls in the same order.

    An integration checks its arguments inside :meth:`call`, so that an error on one rank reaches all of them::

        session = Session(group, device=x.device)
        with session.call():
            if x.dim() != 2:
                raise ValueError(f"x is {list(x.shape)}: it must be [B, S]")
            layout = session.resolve_layout("zigzag", x.shape[1])
            session.agree({"call": "my_framework.split", "layout": layout})
        mine = layout.shard(x, session.rank)

    Args:
        group: as for :func:`ringattn.ring_attention`.
        device: of the tensors; by default the current GPU, or the CPU without one.
        ring: a ring of your own, instead of ``group``.

    Raises:
        ValueError: ``group`` or ``ring`` is of another kind, or both are given.
    """

    def __init__(
        self, group: GroupLike = None, *, device: torch.device | None = None, ring: Ring | None = None
    ) -> None:
        self.device = device if device is not None and device.type in ("cpu", "cuda") else call_device()
        self._ranks = resolve_call_ranks(group, self.device, ring)

    @property
    def ring(self) -> Ring:
        """Ring of this group; with a two-dimensional mesh, the ring along its first dimension."""
        return self._ranks.ring if isinstance(self._ranks, Rings) else self._ranks

    @property
    def rank(self) -> int:
        """Rank in the whole group."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks in the whole group."""
        return self._ranks.size

    def resolve_layout(self, layout: LayoutLike, seqlen: int) -> Layout:
        """Return the layout that a ``layout`` argument describes for ``seqlen`` tokens of all ranks.

        Raises:
            ValueError: no layout for several ranks, an unknown name, or another number of ranks or tokens.
        """
        return resolve_layout(layout, seqlen, self.size)

    def call(self) -> AbstractContextManager[None]:
        """Mark one call: an exception inside is raised here and reported to the other ranks.

        Ranks that are comparing this call raise ValueError; ranks that wait after it raise TransportError.

        Raises:
            RuntimeError: another thread is in a call of this group.
        """
        return self._ranks._call_guard(self.device)

    def agree(
        self, fields: Mapping[str, object], values: Mapping[str, object] | None = None, *, always: bool = False
    ) -> None:
        """Compare what this rank is about to do with the other ranks, inside :meth:`call`.

        Args:
            fields: what must be equal on all ranks, by the name that errors use. Ranks compare a sequence of calls only
                when it changes.
            values: what must also be equal, but usually changes from call to call.
            always: compare even if the sequence of calls is the expected one.

        Raises:
            ValueError: on every rank, if a field or value differs; it names the field and the ranks.
            TransportError: a rank did not make this call before the deadline.
        """
        self._ranks._agree(fields, self.device, values, always=always)

    def gather(self, value: object) -> list[object]:
        """Return the small value that each rank passed, in rank order, inside :meth:`call`; one round trip.

        Args:
            value: anything that JSON can express; tuples arrive as lists. For tensors use :func:`ringattn.unshard`.

        Raises:
            TypeError: JSON cannot express ``value``.
            TransportError: a rank did not make this call before the deadline.
        """
        return self._ranks._gather(value, "the values of a session")
