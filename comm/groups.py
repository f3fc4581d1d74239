"""From what users call a group to its transports: which ranks, which transport all of them can open, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..kinds import shown
from .control import Control, control_of
from .kept import check_process
from .limits import NO_LIMITS, Limits
from .topology.topology import Topology
from .transport import WARM_UP_SECONDS, Edge, Transport, TransportError, ring_edges
from .transports.lanes import indexed
from .transports.local import LocalGroup, LocalMesh, LocalTransport, single_rank
from .transports.nccl import OVERRIDES, ByNodeTransport, NcclTransport, nccl_missing, overridden
from .transports.process_group import ProcessGroupTransport
from .watchdog.preflight import brief

logger = logging.getLogger(__name__)


# Backends of torch.distributed that read memory from the host: they cannot take CUDA tensors in stream order.
HOST_BACKENDS = ("gloo", "mpi")
# What "auto" tries, the best first. Copy engines leave the SMs alone but are not known to be faster: until they are
# measured, NCCL goes first.
PREFERENCE = {"cuda": ("nccl", "copy_engine", "process_group"), "cpu": ("process_group",)}
LIMITS_KEPT = {
    ("nccl", "cuda"): tuple(OVERRIDES),
    ("process_group", "cpu"): ("bytes_per_second",),
}


class Request(NamedTuple):
    """What one rank asks for, and per transport why that rank cannot use it."""

    transport: str
    device: str
    topology: str
    limits: str
    problems: dict[str, str | None]


def request_of(
    group: dist.ProcessGroup | None, transport: str, device: torch.device, topology: object, limits: Limits
) -> Request:
    """What this rank brings to the choice; without a group it is alone."""
    problems: dict[str, str | None] = {}
    for name in ("nccl", "copy_engine", "process_group"):
        try:
            problems[name] = problem_of(name, device, limits, group)
        except Exception as error:  # the others wait for what this rank brings
            problems[name] = f"{type(error).__name__}: {error}"
    return Request(transport, device.type, brief(topology), repr(limits), problems)


def problem_of(name: str, device: torch.device, limits: Limits, group: dist.ProcessGroup | None = None) -> str | None:
    """Why this rank cannot use a transport for tensors of a device, None where it can."""
    refused = limits.refused_by(name, *LIMITS_KEPT.get((name, device.type), ()))
    if name == "process_group":
        return (_backend_problem(group, device) if group else "torch.distributed is not initialised") or refused
    if device.type != "cuda":
        return f"it moves CUDA tensors, device is {device}"
    if name == "nccl":
        return nccl_missing() or refused or overridden(limits)
    from .transports.copy_engine.copy_engine import copy_engine_missing  # on demand: most processes never use it

    return copy_engine_missing() or refused


def choose(control: Control, request: Request, levels: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """What every rank could open, the best first, and what was passed over why; the same on every rank.

    Each choice has one name per level: copy engines do not reach beyond a node.

    Raises:
        ValueError: on every rank: some rank cannot open what was asked for, or there is nothing that all can.
        TransportError: on every rank: they do not ask for the same.
    """
    choice: Any = control.merged(
        tuple(request), partial(_chosen, levels=levels, names=control.names), what="the choice of a transport"
    )
    kind, choices, passed_over = choice
    if kind:
        raise {"ValueError": ValueError, "TransportError": TransportError}[kind](choices)
    return [tuple(names) for names in choices], passed_over


def _chosen(values_of_ranks: list[Any], levels: int, names: Sequence[int]) -> tuple[str, object, list[str]]:
    """What ends the choice of all ranks and its words, or "" and what `choose` returns."""
    requests = [Request(*values) for values in values_of_ranks]
    for field in ("transport", "device", "topology", "limits"):
        values = [getattr(request, field) for request in requests]
        if len(set(values)) > 1:
            who = ", ".join(f"rank {rank}: {value}" for rank, value in zip(names, values, strict=True))
            return "TransportError", f"the ranks disagree on {field} ({who})", []
    requested, device = requests[0][:2]
    choices, passed_over = [], []
    for name in PREFERENCE[device] if requested == "auto" else [requested]:
        choice, problem = _per_level(name, requests, levels, names)
        if problem is None:
            choices.append(choice)
        elif requested != "auto":
            return "ValueError", f'transport is "{name}", and {problem}', []
        else:
            passed_over.append(f"{name}: {problem}")
    if not choices:
        return "ValueError", f'transport "auto" finds none that works: {"; ".join(passed_over)}', []
    return "", choices, passed_over


def _per_level(
    name: str, requests: Sequence[Request], levels: int, names: Sequence[int]
) -> tuple[tuple[str, ...], str | None]:
    """The names for all levels, and why some rank cannot have them."""
    problem = _first_problem(name, requests, names)
    if problem or levels == 1 or name != "copy_engine":
        return (name,) * levels, problem
    others = {other: _first_problem(other, requests, names) for other in ("nccl", "process_group")}
    for other, problem in others.items():
        if problem is None:
            return (name, other), None
    problems = "; ".join(f"{other}: {problem}" for other, problem in others.items())
    return (name, ""), f"there is nothing for the level between the nodes ({problems})"


def _first_problem(name: str, requests: Sequence[Request], names: Sequence[int]) -> str | None:
    problems = ((rank, request.problems[name]) for rank, request in zip(names, requests, strict=True))
    return next((f"on rank {rank} {problem}" for rank, problem in problems if problem), None)


def _backend_problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backend = {device_type: backend for device_type, _, backend in pairs}.get(device.type, "")
    if device.type == "cpu" and not backend:
        return 'the group has no backend for CPU tensors: init_process_group("cpu:gloo,cuda:nccl") makes one with both'
    if device.type == "cuda" and (not backend or backend in HOST_BACKENDS):
        return (
            f"the group's backend for CUDA tensors is {backend or 'none'}: it takes one that works in stream order, as "
            'init_process_group("cpu:gloo,cuda:nccl") makes, or transport="nccl" beside any group'
        )
    return None


TRANSPORTS = ("auto", "local", "nccl", "copy_engine", "process_group")

Group = LocalGroup | dist.ProcessGroup
GroupLike = Group | DeviceMesh | LocalMesh | None
"""What `group=` takes."""
MESH_DIMS = ("ring", "ulysses")
"""Names of the dimensions of a two-dimensional mesh, where it has names."""


def resolve_group(group: GroupLike = None) -> Group:
    """The ranks that `group` names.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a `LocalWorld` member; None is the
            default group where torch.distributed is initialised, else one device alone.

    Raises:
        ValueError: anything else, a mesh of more dimensions, or a process group that this rank is not in.
        RuntimeError: this process was forked from the one that is in the process group.
    """
    members: object = group
    if group is None:
        members = dist.group.WORLD if dist.is_initialized() else single_rank()
    elif isinstance(group, DeviceMesh):
        members = _mesh_group(group)
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if members is outside:
        raise ValueError("group: this rank is not a member of that process group")
    if isinstance(members, LocalGroup):
        return members
    if isinstance(members, dist.ProcessGroup):
        check_process(members)
        return members
    raise ValueError(
        f"group is {shown(group)}: it takes a torch.distributed ProcessGroup, a one-dimensional DeviceMesh, "
        "a LocalWorld member or None"
    )


def resolve_mesh(group: GroupLike) -> tuple[Group, Group] | None:
    """This rank's two groups in a two-dimensional mesh: along the ring, and along Ulysses; None for any other group.

    Raises:
        ValueError: the dimensions have other names, so that neither is known to be a ring.
    """
    dims = dims_of(group)
    return None if dims is None else (resolve_group(dims[0]), resolve_group(dims[1]))


def dims_of(group: GroupLike) -> tuple[Group, Group] | None:
    """Both dimensions as the mesh has them, which torch.compile can trace; raises the same."""
    if isinstance(group, LocalMesh):
        return group.ring, group.ulysses
    if not isinstance(group, DeviceMesh) or group.ndim != len(MESH_DIMS):
        return None
    if group.mesh_dim_names not in (None, MESH_DIMS):
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}: two are taken where they are "
            f"{MESH_DIMS} or have no names; of a mesh that has more, pass those of the sequence, as {_example(group)}"
        )
    return group.get_group(0), group.get_group(1)


def group_rank_size(group: GroupLike = None) -> tuple[int, int]:
    """(rank inside the group, number of ranks); of a two-dimensional mesh over all of it."""
    mesh = resolve_mesh(group)
    if mesh is not None:
        ring, ulysses = mesh
        return ring.rank() * ulysses.size() + ulysses.rank(), ring.size() * ulysses.size()
    members = resolve_group(group)
    return members.rank(), members.size()


def open_transport(
    group: GroupLike = None,
    *,
    transport: str = "auto",
    device: torch.device | str,
    topology: Topology | None = None,
    limits: Limits = NO_LIMITS,
    control: Control | None = None,
) -> Transport:
    """The one transport of a flat ring; see `open_transports`, whose `topology` gives the order here."""
    (opened,) = open_transports(
        group, transport=transport, device=device, topology=topology, limits=limits, control=control, flat=True
    )
    return opened


def open_transports(
    group: GroupLike = None,
    *,
    transport: str = "auto",
    device: torch.device | str,
    topology: Topology | None = None,
    limits: Limits = NO_LIMITS,
    control: Control | None = None,
    flat: bool = False,
) -> tuple[Transport, ...]:
    """Open the transports between the ranks of a group for tensors of one device; every rank calls it together.

    One for a flat ring, with NCCL of two communicators where it passes through nodes. Where `topology` makes two
    levels, and the ring is not to be `flat`, one for the rings inside the nodes and one for the rings between them:
    with NCCL a communicator and a stream for each. `copy_engine` works inside a node; the level between the nodes is
    then NCCL's, where CuPy has it, else the process group's. Without a topology the ring goes by rank.

    "auto" takes `local` for a `LocalWorld` member or one device alone; for CUDA tensors `nccl`, `copy_engine`,
    `process_group`, whichever comes first that all ranks have and whose warm-up passed; for CPU tensors
    `process_group`. It logs what it took and why; `reason` of a transport says the same. Both directions of every ring
    edge are checked with patterned bytes before it returns.

    Through `control` the ranks agree, and no wait of opening is longer than its patience; None: the group's own.

    Raises:
        ValueError: an unknown name, or one that this group or device cannot use, or limits that the transport cannot
            keep; nothing has been sent.
        TransportError: the ranks disagree on what to open, or no warm-up passed.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, it takes one of {', '.join(TRANSPORTS)}")
    device = _usable(torch.device(device))
    members = resolve_group(group)
    if topology is not None and topology.world != members.size():
        raise ValueError(f"topology has {topology.world} ranks, the group has {members.size()}")
    levels = _levels(members.rank(), topology or Topology.flat(members.size()), flat=flat)
    wanted = _Wanted(members, device, levels, limits)
    if isinstance(members, LocalGroup):
        opened = _open_in_process(wanted, transport, control)
    elif members.size() == 1 and transport in ("auto", "local"):
        opened = _open_in_process(wanted._replace(group=single_rank()), "local", control)
    elif transport == "local":
        raise ValueError(
            f'transport is "local", the group has {members.size()} processes: use "process_group" or "nccl"'
        )
    else:
        opened = _open_between_processes(wanted, transport, topology, control)
    logger.info("rank %d of %d, tensors on %s: %s", opened[0].rank, opened[0].size, device, opened[0].reason)
    return opened


class _Level(NamedTuple):
    """One level of a ring, as one rank sees it."""

    members: tuple[int, ...]  # of the communicator that this rank is in
    edges: list[Edge]  # of all ranks
    nodes: tuple[tuple[int, ...], ...] = ()  # of a ring some of whose edges leave a node, and some do not


class _Wanted(NamedTuple):
    """What transports are opened for."""

    group: Group
    device: torch.device
    levels: list[_Level]
    limits: Limits


def _levels(rank: int, topology: Topology, *, flat: bool = False) -> list[_Level]:
    if flat or not topology.two_level:
        several = 1 < len(topology.nodes) < topology.world
        return [_Level(topology.order, ring_edges(topology.order), topology.nodes if several else ())]
    return [
        _Level(next(ring for ring in rings if rank in ring), [edge for ring in rings for edge in ring_edges(ring)])
        for rings in (topology.nodes, tuple(zip(*topology.nodes, strict=True)))
    ]


def _usable(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}: transports move tensors of cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, and torch sees no CUDA device here")
    return indexed(device)


def _mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ValueError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions, a ring runs along one: pass {_example(mesh)}"
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _example(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    if not names:
        return 'mesh["ring"], with mesh_dim_names given'
    return f"mesh[{(MESH_DIMS[0] if MESH_DIMS[0] in names else names[-1])!r}]"


def _open_in_process(wanted: _Wanted, transport: str, control: Control | None) -> tuple[Transport, ...]:
    group, device, levels, limits = wanted
    assert isinstance(group, LocalGroup)
    if transport in ("auto", "local"):
        problem = limits.refused_by("local")
        if problem:
            raise ValueError(problem)
        opened: list[Transport] = []
        for level in levels:
            made = LocalTransport(group, device, patience=None if control is None else control.patience)
            opened.append(made)
            made.names = made.names if control is None else control.names
            made.warm_up(level.edges)
            made.reason = f"{transport} takes local: {'one device alone' if group.size() == 1 else group}"
        return tuple(opened)
    if group.size() > 1:
        raise ValueError(f'transport is {transport!r}, the ranks of a LocalWorld share one process: use "local"')
    problem = problem_of(transport, device, limits)
    if problem:
        raise ValueError(f'transport is "{transport}", and {problem}')
    return _open(wanted, [transport] * len(levels), control or control_of(group), f"{transport} as asked for")


def _open_between_processes(
    wanted: _Wanted, transport: str, topology: Topology | None, control: Control | None
) -> tuple[Transport, ...]:
    group = wanted.group
    assert isinstance(group, dist.ProcessGroup)
    control = (control or control_of(group)).fresh_scope("open")
    request = request_of(group, transport, wanted.device, topology, wanted.limits)
    choices, passed_over = choose(control, request, len(wanted.levels))
    for names in choices:
        called = " and ".join(dict.fromkeys(names))
        chosen = f"auto takes {called}" if transport == "auto" else f"{called} as asked for"
        try:
            return _open(wanted, names, control, "; not ".join([chosen, *passed_over]))
        except TransportError as error:
            if transport != "auto":
                raise
            logger.info('rank %d: transport "auto" passes over %s: %s', group.rank(), called, error)
            passed_over.append(f"{called}: {error}")
    raise TransportError(f'transport "auto" finds none that works: {"; ".join(passed_over)}')


def _open(wanted: _Wanted, names: Sequence[str], control: Control, reason: str) -> tuple[Transport, ...]:
    """All levels, warmed up; TransportError on every rank where that failed on any."""
    # Keys of its own: what ranks that gave up early say must not be heard where the others still are.
    inner, problem = control.fresh_scope(names[0]), None
    opened: list[Transport] = []
    try:
        for name, level in zip(names, wanted.levels, strict=True):
            opened.append(_make(wanted, name, level, inner))
            opened[-1].reason = reason
            opened[-1].warm_up(level.edges)
    except TransportError as error:
        problem = str(error)
    except Exception as error:  # the others must hear of it all the same
        problem = f"rank {control.names[wanted.group.rank()]}: {type(error).__name__}: {error}"
    problems = [str(text) for text in control.gather(problem, what=f"whether {names[0]} works") if text]
    if problems:
        for transport in opened:
            transport.close()
        raise TransportError("; ".join(dict.fromkeys(problems)))
    return tuple(opened)


def _make(wanted: _Wanted, name: str, level: _Level, control: Control) -> Transport:
    group, device, _, limits = wanted
    # Half: who waits for what the others say of a warm-up has had one of its own.
    timeout = min(WARM_UP_SECONDS, control.patience / 2)
    if name == "process_group":
        assert isinstance(group, dist.ProcessGroup)
        return ProcessGroupTransport(group, device, control=control, limits=limits, timeout=timeout)
    common: dict[str, Any] = {
        "rank": group.rank(), "size": group.size(), "device": device, "control": control, "timeout": timeout
    }  # fmt: skip
    if name == "nccl" and level.nodes:
        return ByNodeTransport(**common, nodes=level.nodes, limits=limits)
    if name == "nccl":
        return NcclTransport(**common, members=level.members, limits=limits)
    from .transports.copy_engine.copy_engine import CopyEngineTransport  # on demand: most processes never use it

    return CopyEngineTransport(**common, members=level.members)
