"""The ring of one group: its transport and its slots, kept from call to call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..comm import Group, LocalGroup, Slots, Transport, group_rank_size, open_transport, resolve_group
from ..comm.groups import TRANSPORTS
from .plan import Plan
from .schedule import KV_SLOTS, Hop
from .trace import Trace
from .traffic import Call


class Ring:
    """What the ranks of one group share between calls: a transport, three K/V slots and the slots of dK/dV sums.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a :class:`LocalWorld` member; None is
            the default group where ``torch.distributed`` is initialised, else one device alone.
        transport: ``auto``, ``nccl`` (CuPy), ``process_group`` or ``local``.
        direction: 1 sends K/V to the next rank, -1 to the one before.

    The transport opens at the first call, on the device of its tensors; every rank calls together. A context manager;
    :meth:`close` gives back communicators and slots.

    Raises:
        ValueError: an argument that is not one of the above.
    """

    def __init__(self, group: object = None, *, transport: str = "auto", direction: int = 1) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}: it must be one of {', '.join(TRANSPORTS)}")
        if direction not in (1, -1):
            raise ValueError(f"direction is {direction!r}: it must be 1 (to the next rank) or -1 (to the one before)")
        self.group: Group = resolve_group(group)
        self.rank, self.size = group_rank_size(self.group)
        self.direction = direction
        self._wish = transport
        self._transport: Transport | None = None
        self._device: torch.device | None = None
        self._kv: Slots | None = None
        self._sums: Slots | None = None
        self._agreed: set[object] = set()
        self._trace: Trace | None = None
        self._closed = False

    def open(self, device: torch.device) -> Transport:
        """The transport for tensors on ``device``, opened on first use.

        Raises:
            ValueError: the ring is closed, or open on another device.
        """
        if self._closed:
            raise ValueError("ring is closed: make a new one")
        if self._transport is None:
            self._transport = open_transport(self.group, transport=self._wish, device=device)
            self._device = device
        if self._device != device:
            raise ValueError(f"q is on {device}, this ring works on {self._device}: use one Ring per device")
        return self._transport

    @property
    def transport(self) -> str:
        """Name of the transport in use, or the one asked for before the first call."""
        return self._transport.name if self._transport is not None else self._wish

    def call(self, plan: Plan, phase: str, device: torch.device) -> Call:
        """What the loops need for one call."""
        transport = self.open(device)
        self._kv = self._slots(self._kv, KV_SLOTS, device)
        self._sums = self._slots(self._sums, plan.sums_slots, device)

        def span(kind: str, hop: Hop) -> AbstractContextManager[None]:
            return self._trace.span(phase, kind, hop) if self._trace is not None else nullcontext()

        return Call(plan, transport, self._kv, self._sums, span)

    @staticmethod
    def _slots(slots: Slots | None, count: int, device: torch.device) -> Slots:
        if slots is not None and slots.count >= count:
            return slots
        if slots is not None:
            slots.drain()
        return Slots(count, device)

    def agree(self, signature: dict[str, Any], device: torch.device) -> None:
        """Compare what this rank is about to compute with every other rank's, once per signature.

        Raises:
            ValueError: on every rank, naming the first field that differs and who has what.
        """
        if self.size == 1:
            return
        key = tuple(sorted((name, repr(value)) for name, value in signature.items()))
        if key in self._agreed:
            return
        everyone = self.open(device).gather(key)
        for name, theirs in ((name, [dict(one).get(name) for one in everyone]) for name, _ in key):  # type: ignore[call-overload]
            if len(set(theirs)) > 1:
                told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(theirs))
                raise ValueError(f"{name} differs between ranks ({told}): all ranks of a ring must pass the same")
        self._agreed.add(key)

    def check_thread(self) -> None:
        """Refuse a backward from a thread where virtual ranks would wait for each other forever: RuntimeError."""
        if isinstance(self.group, LocalGroup):
            self.group.check_thread()

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record compute and wait per hop of the calls made inside.

        Raises:
            ValueError: no call has been made yet, so that the device is not known.
        """
        if self._device is None:
            raise ValueError("record() needs a ring that has been used once: its device is not known yet")
        self._trace = Trace(self._device)
        try:
            yield self._trace
        finally:
            self._trace = None

    def close(self) -> None:
        """Give back communicators and slots. Idempotent."""
        self._closed = True
        for slots in (self._kv, self._sums):
            if slots is not None:
                slots.drain()
        self._kv = self._sums = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_KEPT: weakref.WeakKeyDictionary[Group, dict[object, object]] = weakref.WeakKeyDictionary()


def ring_of(group: object, device: torch.device) -> Ring:
    """The ring that calls without ``ring=`` share: one per group and device, made on first use."""
    members = resolve_group(group)
    # A ring holds its group: kept by the member of a LocalWorld itself, both go when the world goes
    kept = members.kept if isinstance(members, LocalGroup) else _KEPT.setdefault(members, {})
    if device not in kept:
        kept[device] = Ring(members)
    ring = kept[device]
    assert isinstance(ring, Ring)
    return ring
