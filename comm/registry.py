"""The transports by name: what opens each one, and where it can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from .checked import LIMITS, Kind, shown
from .groups import Group
from .limits import Limits
from .transport import Transport
from .world import LocalGroup

logger = logging.getLogger(__name__)

AUTO = "auto"
PROCESSES, THREADS = "processes", "threads"
"""Kinds of ranks: of a process group, and of a `LocalWorld`."""
ENTRY_POINTS = "ringattn.transports"
"""Group of entry points: modules that call `register_transport`, imported when a transport is first looked up."""

TransportFactory = Callable[..., Transport]
"""Opens one transport: `open(group, device, **opening) -> Transport`. See `register_transport`."""
Unavailable = Callable[[Group, torch.device, Limits], str | None]
"""Return why this rank cannot use a transport for tensors of a device within limits, None if it can. Touches no GPU."""


def _available(group: Group, device: torch.device, limits: Limits) -> str | None:
    return None


@dataclass(frozen=True)
class TransportEntry:
    """One transport of the registry; the fields are the arguments of `register_transport`."""

    name: str
    open: TransportFactory
    devices: tuple[str, ...] = ("cpu", "cuda")
    ranks: tuple[str, ...] = (PROCESSES, THREADS)
    preference: int = 0
    limits: tuple[str, ...] = ()
    across_nodes: bool = True
    unavailable: Unavailable = _available

    def serves(self, group: Group, device: torch.device) -> bool:
        """Return True if ranks and devices of this kind can use the transport; one rank alone is of both kinds."""
        return self._mismatch(group, device) is None

    def problem(self, group: Group, device: torch.device, limits: Limits) -> str | None:
        """Return why this rank cannot use the transport, None if it can; an error of `unavailable` is a reason too."""
        try:
            return (
                self._mismatch(group, device)
                or self.unavailable(group, device, limits)
                or limits.refused_by(self.name, *self.limits)
            )
        except Exception as error:  # the other ranks wait for this rank's answer
            return f"{type(error).__name__}: {error}"

    def _mismatch(self, group: Group, device: torch.device) -> str | None:
        if device.type not in self.devices:
            return f"it moves {' and '.join(self.devices).upper()} tensors, device is {device}"
        kind = THREADS if isinstance(group, LocalGroup) else PROCESSES
        if kind in self.ranks or group.size() == 1:
            return None
        others = " or ".join(f'"{one.name}"' for one in transports() if kind in one.ranks)
        has = (
            "the ranks of a LocalWorld share one process"
            if kind == THREADS
            else f"the group has {group.size()} processes"
        )
        return f"{has}: use {others}"


_REGISTRY: dict[str, TransportEntry] = {}


def register_transport(
    name: str,
    factory: TransportFactory,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    ranks: tuple[str, ...] = (PROCESSES, THREADS),
    preference: int = 0,
    limits: tuple[str, ...] = (),
    across_nodes: bool = True,
    unavailable: Unavailable = _available,
) -> None:
    """Add a transport that `Ring(transport=name)`, `auto` and the commands know from now on; on every rank alike.

    `factory(group, device, **opening)` opens this rank's end of one transport, and every rank calls it together. It
    returns an object that fulfils :class:`Transport`, whose `name` is `name`. Keywords it gets, and may get more of:

    - `control`: a :class:`Control`, through which the ranks can agree while they open;
    - `limits`: the :class:`Limits` to keep;
    - `timeout`: the seconds that a warm-up may take;
    - `members`: the ranks of `group` that this transport must reach, in ring order; every rank must be able to gather;
    - `nodes`: the ranks of each node if the ring passes through several nodes, else `()`.

    A factory that raises on one rank raises a `TransportError` on all ranks, and what the others opened is closed.
    This one counts the bytes that another transport sends::

        class Counting:
            name = "counting"

            def __init__(self, inner):
                self.inner, self.sent_bytes = inner, 0

            def __getattr__(self, attribute):  # rank, size, mark, gather, warm_up and the rest
                return getattr(self.inner, attribute)

            def post(self, *, sends, receives, after=()):
                self.sent_bytes += sum(message.tensor.nbytes for message in sends)
                return self.inner.post(sends=sends, receives=receives, after=after)


        def open_counting(group, device, *, control, limits, **opening):
            inner = "local" if isinstance(group, LocalGroup) else "process_group"
            return Counting(open_transport(group, transport=inner, device=device, control=control, limits=limits))


        register_transport("counting", open_counting)

    :func:`ringattn.comm.testing.check_transport` runs the conformance suite on it.

    Args:
        name: selects the transport; no comma.
        factory: opens the transport.
        devices: device types whose tensors it moves.
        ranks: "processes" of a process group, "threads" of a `LocalWorld`.
        preference: `auto` tries the highest first; 0 comes after every transport of this package.
        limits: fields of :class:`Limits` that it keeps; a ring that sets another one is refused.
        across_nodes: False if it connects ranks of one node only; another transport then connects the nodes.
        unavailable: `unavailable(group, device, limits)` returns why this rank cannot use it, None if it can.

    Raises:
        ValueError: the name is taken, or is no name, or `factory` cannot be called.
    """
    if not isinstance(name, str) or not name or "," in name or name == AUTO:
        raise ValueError(f"name is {shown(name)}: it must be text without a comma, and not {AUTO}")
    if not callable(factory):
        raise ValueError(f"factory is {shown(factory)}: it must be a function open(group, device, **opening)")
    if name in _REGISTRY:
        raise ValueError(f"name is {name!r}: a transport of that name is registered, by {label(_REGISTRY[name].open)}")
    _REGISTRY[name] = TransportEntry(name, factory, devices, ranks, preference, limits, across_nodes, unavailable)


def unregister_transport(name: str) -> None:
    """Remove a transport from the registry; open ones stay open. A `KeyError` if the name is unknown."""
    del _REGISTRY[name]


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # a broken package must not keep rings from opening
            logger.warning("entry point %s = %s does not load: %s", point.name, point.value, error)


def _registered() -> dict[str, TransportEntry]:
    _load_entry_points()
    return _REGISTRY


def transports() -> list[TransportEntry]:
    """Return every registered transport, the most preferred first."""
    return sorted(_registered().values(), key=lambda entry: -entry.preference)


def transport_names() -> list[str]:
    """Return the name of every registered transport, the most preferred first."""
    return [entry.name for entry in transports()]


def find_transport(transport: str | TransportFactory) -> TransportEntry:
    """Return the entry of a name, or one made for a factory, which gets all limits.

    Raises:
        ValueError: an unknown name.
    """
    if callable(transport):
        return TransportEntry(label(transport), transport, limits=(*LIMITS,))
    TRANSPORT.of("transport", transport)
    return _registered()[transport]


def is_within_node(name: str) -> bool:
    """Return True if a registered transport connects ranks of one node only."""
    entry = _registered().get(name)
    return entry is not None and not entry.across_nodes


def label(transport: str | TransportFactory) -> str:
    """Return the text that ranks compare: a name, or where a factory is defined."""
    if isinstance(transport, str):
        return transport
    named: Any = transport if hasattr(transport, "__qualname__") else type(transport)
    return f"{named.__module__}.{named.__qualname__}"


class _TransportKind(Kind):
    """The argument `transport`; its error lists the names that are registered by then."""

    def of(self, name: str, value: object) -> Any:
        if callable(value) or value == AUTO or (isinstance(value, str) and value in _registered()):
            return value
        known = ", ".join([AUTO, *transport_names()])
        raise ValueError(f"{name} is {shown(value)}: it must be one of {known}, or a factory open(group, device)")


TRANSPORT = _TransportKind("a name or a factory", lambda value: value)
