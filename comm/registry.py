"""Registry of transports by name: their factories, and where each of them can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from ..validators import Validator, short_repr
from .arg_checks import LIMITS
from .groups import Group
from .limits import Limits
from .transport import Transport
from .world import LocalGroup

logger = logging.getLogger(__name__)

AUTO = "auto"
PROCESSES, THREADS = "processes", "threads"  # kinds of ranks: those of a process group, and those of a `LocalWorld`
ENTRY_POINTS = "ringattn.transports"
TransportFactory = Callable[..., Transport]
"""Function that opens one transport; see `register_transport`."""
Unavailable = Callable[[Group, torch.device, Limits], str | None]


def _always_available(group: Group, device: torch.device, limits: Limits) -> None:
    return None


@dataclass(frozen=True)
class TransportEntry:
    """A registered transport, with the arguments of `register_transport`."""

    name: str
    open: TransportFactory
    devices: tuple[str, ...] = ("cpu", "cuda")
    ranks: tuple[str, ...] = (PROCESSES, THREADS)
    preference: int = 0
    limits: tuple[str, ...] = ()
    across_nodes: bool = True
    unavailable: Unavailable = _always_available

    def serves(self, group: Group, device: torch.device) -> bool:
        """Return True if the transport supports this device type and this kind of ranks."""
        return self._mismatch(group, device) is None

    def problem(self, group: Group, device: torch.device, limits: Limits) -> str | None:
        """Return why this rank cannot use the transport, or None if it can."""
        try:
            reason = self._mismatch(group, device) or self.unavailable(group, device, limits)
        except Exception as error:  # report any error as the reason, because the other ranks wait for an answer
            reason = f"{type(error).__name__}: {error}"
        return reason or limits.find_unsupported(self.name, *self.limits)

    def _mismatch(self, group: Group, device: torch.device) -> str | None:
        """Return why the transport does not support the device type or the kind of ranks, or None if it does."""
        if device.type not in self.devices:
            return f"it moves {' and '.join(self.devices).upper()} tensors, but device is {device}"
        kind = THREADS if isinstance(group, LocalGroup) else PROCESSES
        if kind in self.ranks or group.size() == 1:  # a single rank can use both kinds
            return None
        ranks = f"the group has {group.size()} processes"
        ranks = "the ranks of a LocalWorld share one process" if kind == THREADS else ranks
        return f"{ranks}: use " + " or ".join(f'"{entry.name}"' for entry in transports() if kind in entry.ranks)


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
    unavailable: Unavailable = _always_available,
) -> None:
    """Register a transport for `Ring(transport=name)`, `auto` and all commands. Every rank must do the same.

    All ranks call `factory(group, device, **opening)` together, and each call returns that rank's :class:`Transport`.
    The factory must accept any keywords in `opening`, because later versions may add some. At present these are:

    - `control`: exchanges small values between the ranks,
    - `limits`: the limits to keep,
    - `timeout`: timeout of the warm-up in seconds,
    - `members`: the ranks to reach, in ring order,
    - `nodes`: the ranks of each node, or ().

    If the factory raises on one rank, all ranks raise a `TransportError` and close what they opened.

    This transport counts the bytes that another transport sends::

        class Counting:
            def __init__(self, inner):
                self.inner, self.sent_bytes = inner, 0

            def __getattr__(self, name):  # rank, size, mark, warm_up, gather and the rest
                return getattr(self.inner, name)

            def post(self, *, sends, receives, after=()):
                self.sent_bytes += sum(message.tensor.nbytes for message in sends)
                return self.inner.post(sends=sends, receives=receives, after=after)


        def open_counting(group, device, *, control, limits, **opening):
            inner = "local" if isinstance(group, LocalGroup) else "process_group"
            return Counting(open_transport(group, transport=inner, device=device, control=control, limits=limits))


        register_transport("counting", open_counting)

    `ringattn.comm.testing.check_transport` runs the conformance suite on a transport. A package can name its module in
    the entry points `ringattn.transports`; the module is then imported when a transport is first looked up.

    Args:
        name: name that selects the transport.
        factory: opens the transport.
        devices: types of the devices whose tensors the transport moves.
        ranks: kinds of ranks: "processes" of a process group, "threads" of a `LocalWorld`.
        preference: `auto` tries the highest first. At 0 the transport comes after the built-in transports that `auto`
            may choose; `auto` never chooses a transport below 0.
        limits: fields of :class:`Limits` that the transport supports. A ring that sets another limit raises.
        across_nodes: False if the transport connects only ranks of one node; another transport then connects the nodes.
        unavailable: called with the group, the device and the limits; returns why this rank cannot use the transport,
            or None.

    Raises:
        ValueError: the name is taken or not valid, or the factory is not callable.
    """
    if not isinstance(name, str) or not name or "," in name or name == AUTO:
        raise ValueError(f"name is {short_repr(name)}; it must be a string without a comma, and not {AUTO!r}")
    if not callable(factory):
        raise ValueError(f"factory is {short_repr(factory)}; it must be a function open(group, device, **opening)")
    if name in _REGISTRY:
        raise ValueError(f"name is {name!r}, which is already registered for {transport_label(_REGISTRY[name].open)}")
    _REGISTRY[name] = TransportEntry(name, factory, devices, ranks, preference, limits, across_nodes, unavailable)


def unregister_transport(name: str) -> None:
    """Remove a transport from the registry. Open transports stay open."""
    del _REGISTRY[name]


@cache
def _load_entry_points() -> None:
    """Import the modules that installed packages name in the entry points `ringattn.transports`."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # a broken package must not prevent rings from opening
            logger.warning("could not load the entry point %s = %s: %s", point.name, point.value, error)


def transports() -> list[TransportEntry]:
    """Return all registered transports, the most preferred first."""
    _load_entry_points()
    return sorted(_REGISTRY.values(), key=lambda entry: -entry.preference)


def transport_names() -> list[str]:
    """Return the names of all registered transports, the most preferred first."""
    return [entry.name for entry in transports()]


def find_transport(transport: str | TransportFactory) -> TransportEntry:
    """Return the entry of a registered name, or an entry for a factory, which supports all limits.

    Raises:
        KeyError: no transport has this name.
    """
    if callable(transport):
        return TransportEntry(transport_label(transport), transport, limits=(*LIMITS,))
    return {entry.name: entry for entry in transports()}[transport]


def transport_label(transport: str | TransportFactory) -> str:
    """Return the text by which ranks compare transports: a name, or the module and name of a factory."""
    if isinstance(transport, str):
        return transport
    named: Any = transport if hasattr(transport, "__qualname__") else type(transport)
    return f"{named.__module__}.{named.__qualname__}"


class _TransportValidator(Validator):
    """Validator of the argument `transport`, whose error lists all registered names."""

    def check(self, name: str, value: object) -> Any:
        known = [AUTO, *transport_names()]
        if callable(value) or (isinstance(value, str) and value in known):
            return value
        raise ValueError(f"{name} is {short_repr(value)}: it must be one of {', '.join(known)}, or a factory")


TRANSPORT = _TransportValidator("a name or a factory", lambda value: value)
