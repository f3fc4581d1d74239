"""Selection of the transports that every rank of a group can open, and their opening."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from ...validators import short_repr
from ..arg_checks import DEVICE
from ..control import CheckSchedule, Control, open_control
from ..groups import Group, GroupLike, resolve_group
from ..limits import NO_LIMITS, Limits
from ..registry import AUTO, TRANSPORT, TransportEntry, TransportFactory, find_transport, transport_label, transports
from ..topology.topology import Topology
from ..transport import TRANSPORT_ATTRIBUTES, WARM_UP_SECONDS, Edge, Transport, TransportError, ring_edges
from ..watchdog.preflight import shorten_repr
from ..world import LocalGroup
from .local import LocalTransport

logger = logging.getLogger(__name__)

UNKNOWN_TRANSPORT = "no transport with that name is registered"
BY_NAME = "it is only used when requested by name; `ringattn tune --ring` measures whether it is faster here"


class TransportRequest(NamedTuple):
    """A rank's request, and why this rank cannot use each candidate transport."""

    transport: str
    device: str
    topology: str
    limits: str
    problems: dict[str, str | None]  # by name, the most preferred first


def make_request(
    group: Group, transport: str | TransportFactory, device: torch.device, topology: object, limits: Limits, levels: int
) -> TransportRequest:
    """Return this rank's request for `choose_transports`, with this rank's problem of each candidate.

    `levels` is the number of levels of the ring: 1, or 2 for a two-level ring.
    """
    served = [entry for entry in transports() if entry.serves(group, device)]
    entries = served
    if transport != AUTO:
        entries = [find_transport(transport)]
        if levels > 1 and not entries[0].across_nodes:
            entries += [entry for entry in served if entry.across_nodes and entry.preference >= 0]
    problems: dict[str, str | None] = {}
    for entry in entries:
        problems[entry.name] = entry.problem(group, device, limits)
        if transport == AUTO and entry.preference < 0:
            problems[entry.name] = problems[entry.name] or BY_NAME
        if group.size() == 1 and entry.name == LocalTransport.name and problems[entry.name] is None:
            break  # a single rank needs no further candidate, and checking one may import a library
    return TransportRequest(transport_label(transport), device.type, shorten_repr(topology), repr(limits), problems)


def choose_transports(
    control: Control, request: TransportRequest, levels: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Compare the requests of all ranks, and return (choices, reasons), which are equal on all ranks.

    A choice has one transport name per level. `choices` has every choice that all ranks can open, the best first.
    `reasons` has a text for each candidate that some rank cannot open.

    Raises:
        ValueError: on every rank, if some rank cannot open the requested transport, or no transport works on all ranks.
        TransportError: on every rank, if the requests differ.
    """
    merge = partial(_merge_requests, levels=levels, names=control.names)
    choice: Any = control.gather_merged(tuple(request), merge, what="the choice of a transport")
    kind, choices, passed_over = choice
    if kind:
        raise {"ValueError": ValueError, "TransportError": TransportError}[kind](choices)
    return [tuple(names) for names in choices], passed_over


def _merge_requests(values_of_ranks: list[Any], levels: int, names: Sequence[int]) -> tuple[str, object, list[str]]:
    """Merge the requests of all ranks; `names` has the rank numbers for errors.

    Returns:
        ("", choices, reasons) as in `choose_transports`, or (name of an exception, its text, []).
    """
    requests = [TransportRequest(*values) for values in values_of_ranks]
    for field in ("transport", "device", "topology", "limits"):
        values = [getattr(request, field) for request in requests]
        if len(set(values)) > 1:
            who = ", ".join(f"rank {rank}: {value}" for rank, value in zip(names, values, strict=True))
            return "TransportError", f"{field} differs between ranks ({who}). All ranks must pass the same value", []
    requested, candidates = requests[0].transport, [*requests[0].problems]
    choices, passed_over = [], []
    for name in candidates if requested == AUTO else [requested]:
        choice, problem = _names_per_level(name, requests, levels, names)
        if problem is None:
            choices.append(choice)
        elif requested != AUTO:
            return "ValueError", f'transport is "{name}", which cannot be used: {problem}', []
        else:
            passed_over.append(f"{name}: {problem}")
    if not choices:
        return "ValueError", f'transport "auto" found no transport that works: {"; ".join(passed_over)}', []
    return "", choices, passed_over


def _names_per_level(
    name: str, requests: Sequence[TransportRequest], levels: int, names: Sequence[int]
) -> tuple[tuple[str, ...], str | None]:
    """Return the transport name of each level if `name` is chosen, and the problem of the first rank with one, or None.

    If `name` does not work across nodes, the most preferred transport that does connects the nodes.
    """
    problem = _first_problem(name, requests, names)
    within_nodes = [entry.name for entry in transports() if not entry.across_nodes]
    if problem or levels == 1 or name not in within_nodes:
        return (name,) * levels, problem
    wider = [other for other in requests[0].problems if other not in within_nodes]
    others = {other: _first_problem(other, requests, names) for other in wider}
    for other, problem in others.items():
        if problem is None:
            return (name, other), None
    problems = "; ".join(f"{other}: {problem}" for other, problem in others.items())
    return (name, ""), f"no transport works between the nodes ({problems})"


def _first_problem(name: str, requests: Sequence[TransportRequest], names: Sequence[int]) -> str | None:
    """Return the problem of the first rank that cannot use a transport, with the rank, or None."""
    problems = (
        (rank, request.problems.get(name, UNKNOWN_TRANSPORT)) for rank, request in zip(names, requests, strict=True)
    )
    return next((f"{problem} (rank {rank})" for rank, problem in problems if problem), None)


def open_transport(group: GroupLike = None, **opening: Any) -> Transport:
    """Open the transport of a flat ring. See `open_transports`; `topology` only sets the order here."""
    (opened,) = open_transports(group, **opening, flat=True)
    return opened


def open_transports(
    group: GroupLike = None,
    *,
    transport: str | TransportFactory = AUTO,
    device: torch.device | str,
    topology: Topology | None = None,
    limits: Limits = NO_LIMITS,
    control: Control | None = None,
    flat: bool = False,
) -> tuple[Transport, ...]:
    """Open the transports between the ranks of a group, for tensors on one device. All ranks call it together.

    A flat ring has one transport. If `topology` has two levels and `flat` is False, one transport serves the rings
    inside the nodes and another serves the rings between them. If the selected transport only works inside a node, the
    most preferred transport that reaches further connects the nodes. Without a topology the ring follows the rank
    order.

    "auto" selects the most preferred registered transport that all ranks can use and whose warm-up succeeds. This is
    `local` for a `LocalWorld` member or a single device, `nccl` or `process_group` for CUDA tensors, and
    `process_group` for CPU tensors. The selection and its reason are logged and stored in `reason` of the transport.
    Both directions of every ring edge are verified with known bytes.

    The ranks agree through `control`; None uses the group's own. No wait lasts longer than its patience.

    Raises:
        ValueError: the name is unknown, the transport cannot be used with this group or device, or it does not support
            the limits. Nothing was sent.
        TransportError: the ranks' requests differ, a rank could not open the transport, or no warm-up succeeded.
    """
    TRANSPORT.check("transport", transport)
    device = torch.device(DEVICE.check("device", device))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, but torch sees no CUDA device")
    members = resolve_group(group)
    if isinstance(members, LocalGroup):
        members.check_thread()
    if topology is not None and topology.world != members.size():
        raise ValueError(f"topology has {topology.world} ranks; it must have as many as the group, {members.size()}")
    levels = _levels(members.rank(), topology or Topology.flat(members.size()), flat=flat)
    control = (control or open_control(members)).new_scope("open")
    request = make_request(members, transport, device, topology, limits, len(levels))
    choices, passed_over = choose_transports(control, request, len(levels))
    for names in choices:
        joined_names = " and ".join(dict.fromkeys(names))
        reason = f"auto selected {joined_names}" if transport == AUTO else f"{joined_names} as requested"
        entries = [find_transport(transport if callable(transport) else name) for name in names]
        try:
            opened = _open(entries, levels, members, device, limits, control)
        except TransportError as error:
            if transport != AUTO:
                raise
            logger.info('rank %d: transport "auto" skips %s: %s', members.rank(), joined_names, error)
            passed_over.append(f"{joined_names}: {error}")
            continue
        for opened_transport in opened:
            opened_transport.reason = "; not ".join([reason, *passed_over])
        logger.info("rank %d of %d, tensors on %s: %s", members.rank(), members.size(), device, opened[0].reason)
        return opened
    raise TransportError(f'transport "auto" found no transport that works: {"; ".join(passed_over)}')


class _Level(NamedTuple):
    """One level of a ring, as seen by one rank."""

    members: tuple[int, ...]  # ranks of this rank's communicator
    edges: list[Edge]  # edges of all ranks
    nodes: tuple[tuple[int, ...], ...] = ()  # set if some edges of the ring leave a node and some do not


def _levels(rank: int, topology: Topology, *, flat: bool = False) -> list[_Level]:
    """Return the levels of a ring: one for a flat ring, else the rings inside the nodes and the rings between them."""
    if flat or not topology.two_level:
        several = 1 < len(topology.nodes) < topology.world
        return [_Level(topology.order, ring_edges(topology.order), topology.nodes if several else ())]
    return [
        _Level(next(ring for ring in rings if rank in ring), [edge for ring in rings for edge in ring_edges(ring)])
        for rings in (topology.nodes, tuple(zip(*topology.nodes, strict=True)))
    ]


def _open(
    entries: Sequence[TransportEntry],
    levels: Sequence[_Level],
    group: Group,
    device: torch.device,
    limits: Limits,
    control: Control,
) -> tuple[Transport, ...]:
    """Open and warm up all levels. Raise a `TransportError` on every rank if any rank failed."""
    # Use separate keys, so that ranks that gave up early do not disturb an exchange of the other ranks.
    inner = control.new_scope(entries[0].name)
    # Use half of the patience, because a rank waits for the result of the others' warm-up after its own.
    timeout = min(WARM_UP_SECONDS, control.patience / 2)
    # A factory may be waiting for a rank whose factory has raised; this check ends that wait.
    inner.stop = partial(_published_failure, inner, CheckSchedule())
    opened: list[Transport] = []

    def open_all() -> None:
        for entry, (members, _, nodes) in zip(entries, levels, strict=True):
            opened.append(
                entry.open(group, device, control=inner, limits=limits, timeout=timeout, members=members, nodes=nodes)
            )
            missing = [attribute for attribute in TRANSPORT_ATTRIBUTES if not hasattr(opened[-1], attribute)]
            if missing:
                name = transport_label(entry.open)
                raise TypeError(
                    f"{name} returned {short_repr(opened[-1])}, which lacks the attributes {', '.join(missing)}"
                )
            if entry in transports():
                opened[-1].name = entry.name

    def warm_up() -> None:
        for transport, level in zip(opened, levels, strict=True):
            transport.warm_up(level.edges)

    try:
        _on_every_rank(open_all, control, inner, f"opening the transport {entries[0].name}")
        _on_every_rank(warm_up, control, inner, f"warming up the transport {entries[0].name}")
    except BaseException:
        for transport in opened:
            with suppress(Exception):
                transport.close()
        raise
    return tuple(opened)


def _published_failure(control: Control, schedule: CheckSchedule) -> str | None:
    """Return the error that a rank has published while opening, or None.

    `schedule` limits how often the store is read.
    """
    text = control.read_key("failure") if schedule.is_due(time.monotonic()) else None
    return None if text is None else str(text)


def _on_every_rank(step: Callable[[], None], control: Control, inner: Control, what: str) -> None:
    """Run one step of opening. Raise a `TransportError` on every rank if the step failed on any rank.

    `inner` publishes a failure at once for ranks that are still in the step. `what` names the step in errors.
    """
    problem = None
    try:
        step()
    except TransportError as error:
        problem = str(error)
    except Exception as error:  # any error must reach the other ranks
        problem = f"rank {control.names[control.rank]}: {type(error).__name__}: {error}"
    if problem:
        inner.publish("failure", problem)
    problems = [str(text) for text in control.gather(problem, what=what) if text]
    if problems:
        raise TransportError("; ".join(dict.fromkeys(problems)))
