"""From what users call a group to its transports: which ranks, which bytes' carrier, and why that one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .choice import choose, problem_of, wish_of
from .control import Control, control_of
from .kept import check_process
from .limits import NO_LIMITS, Limits
from .topology.topology import Topology
from .transport import Edge, Transport, TransportError
from .transports.by_node import ByNodeTransport
from .transports.lanes import indexed
from .transports.local import LocalGroup, LocalTransport, solo_group
from .transports.nccl import NcclTransport
from .transports.process_group import ProcessGroupTransport
from .transports.warm_up import DEFAULT_TIMEOUT, ring_edges

logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "local", "nccl", "copy_engine", "process_group")

Group = LocalGroup | dist.ProcessGroup
GroupLike = Group | DeviceMesh | None
"""What `group=` takes."""


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
        members = _default_process_group() or solo_group()
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
        f"group is a {type(group).__name__}: it takes a torch.distributed ProcessGroup, a one-dimensional DeviceMesh, "
        "a LocalWorld member or None"
    )


def group_rank_size(group: GroupLike = None) -> tuple[int, int]:
    """(rank inside the group, number of ranks)."""
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
    (opened,) = _opened(group, transport, device, topology, limits, control, flat=True)
    return opened


def open_transports(
    group: GroupLike = None,
    *,
    transport: str = "auto",
    device: torch.device | str,
    topology: Topology | None = None,
    limits: Limits = NO_LIMITS,
    control: Control | None = None,
) -> tuple[Transport, ...]:
    """Open the transports between the ranks of a group for tensors of one device; every rank calls it together.

    One for a flat ring, with NCCL of two communicators where it passes through nodes (`by_node`). Where `topology`
    makes two levels, one for the rings inside the nodes and one for the rings between them: with NCCL a communicator
    and a stream for each. `copy_engine` works inside a node; the level between the nodes is then NCCL's, where CuPy
    has it, else the process group's. Without a topology the ring goes by rank.

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
    return _opened(group, transport, device, topology, limits, control, flat=False)


def _opened(
    group: GroupLike,
    transport: str,
    device: torch.device | str,
    topology: Topology | None,
    limits: Limits,
    control: Control | None,
    *,
    flat: bool,
) -> tuple[Transport, ...]:
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, it takes one of {', '.join(TRANSPORTS)}")
    device = _usable(torch.device(device))
    members = resolve_group(group)
    if topology is not None and topology.world != members.size():
        raise ValueError(f"topology has {topology.world} ranks, the group has {members.size()}")
    levels = _levels(members.rank(), topology or Topology.flat(members.size()), flat=flat)
    if isinstance(members, LocalGroup):
        opened = _open_in_process(members, transport, device, levels, limits, control)
    elif members.size() == 1 and transport in ("auto", "local"):
        opened = _open_in_process(solo_group(), "local", device, levels, limits, control)
    elif transport == "local":
        raise ValueError(
            f'transport is "local", the group has {members.size()} processes: use "process_group" or "nccl"'
        )
    else:
        opened = _open_between_processes(members, transport, device, topology, levels, limits, control)
    logger.info("rank %d of %d, tensors on %s: %s", opened[0].rank, opened[0].size, device, opened[0].reason)
    return opened


class _Level(NamedTuple):
    """One level of a ring, as one rank sees it."""

    members: tuple[int, ...]  # of the communicator that this rank is in
    edges: list[Edge]  # of all ranks
    nodes: tuple[tuple[int, ...], ...] = ()  # of a ring some of whose edges leave a node, and some do not


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


def _default_process_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f"mesh[{names[-1]!r}]" if names else 'mesh["ring"], with mesh_dim_names given'
        raise ValueError(f"group is a DeviceMesh of {mesh.ndim} dimensions, a ring runs along one: pass {example}")
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _open_in_process(
    group: LocalGroup,
    transport: str,
    device: torch.device,
    levels: Sequence[_Level],
    limits: Limits,
    control: Control | None,
) -> tuple[Transport, ...]:
    if transport in ("auto", "local"):
        problem = limits.refused_by("local")
        if problem:
            raise ValueError(problem)
        opened: list[Transport] = []
        for level in levels:
            opened.append(LocalTransport(group, device))
            opened[-1].warm_up(level.edges)
            opened[-1].reason = f"{transport} takes local: {'one device alone' if group.size() == 1 else group}"
        return tuple(opened)
    if group.size() > 1:
        raise ValueError(f'transport is {transport!r}, the ranks of a LocalWorld share one process: use "local"')
    problem = problem_of(transport, device, limits)
    if problem:
        raise ValueError(f'transport is "{transport}", and {problem}')
    names, control = [transport] * len(levels), control or control_of(group)
    return _open(group, names, device, levels, limits, control, f"{transport} as asked for")


def _open_between_processes(
    group: dist.ProcessGroup,
    transport: str,
    device: torch.device,
    topology: Topology | None,
    levels: Sequence[_Level],
    limits: Limits,
    control: Control | None,
) -> tuple[Transport, ...]:
    control = (control or control_of(group)).fresh_scope("open")
    choices, passed_over = choose(control, wish_of(group, transport, device, topology, limits), len(levels))
    for names in choices:
        called = " and ".join(dict.fromkeys(names))
        chosen = f"auto takes {called}" if transport == "auto" else f"{called} as asked for"
        try:
            return _open(group, names, device, levels, limits, control, "; not ".join([chosen, *passed_over]))
        except TransportError as error:
            if transport != "auto":
                raise
            logger.info('rank %d: transport "auto" passes over %s: %s', group.rank(), called, error)
            passed_over.append(f"{called}: {error}")
    raise TransportError(f'transport "auto" finds none that works: {"; ".join(passed_over)}')


def _open(
    group: Group,
    names: Sequence[str],
    device: torch.device,
    levels: Sequence[_Level],
    limits: Limits,
    control: Control,
    reason: str,
) -> tuple[Transport, ...]:
    """All levels, warmed up; TransportError on every rank where that failed on any."""
    # Keys of its own: what ranks that gave up early say must not be heard where the others still are.
    inner, problem = control.fresh_scope(names[0]), None
    opened: list[Transport] = []
    try:
        for name, level in zip(names, levels, strict=True):
            opened.append(_make(group, name, device, level, limits, inner))
            opened[-1].reason = reason
            opened[-1].warm_up(level.edges)
    except TransportError as error:
        problem = str(error)
    except Exception as error:  # the others must hear of it all the same
        problem = f"rank {group.rank()}: {type(error).__name__}: {error}"
    problems = [str(found) for found in control.gather(problem, what=f"whether {names[0]} works") if found]
    if problems:
        for transport in opened:
            transport.close()
        raise TransportError("; ".join(dict.fromkeys(problems)))
    return tuple(opened)


def _make(group: Group, name: str, device: torch.device, level: _Level, limits: Limits, control: Control) -> Transport:
    # Half: who waits for what the others say of a warm-up has had one of its own.
    timeout = min(DEFAULT_TIMEOUT, control.patience / 2)
    if name == "process_group":
        assert isinstance(group, dist.ProcessGroup)
        return ProcessGroupTransport(group, device, control=control, limits=limits, timeout=timeout)
    common: dict[str, Any] = {"rank": group.rank(), "size": group.size(), "device": device, "members": level.members}
    if name == "nccl" and level.nodes:
        del common["members"]
        return ByNodeTransport(**common, nodes=level.nodes, control=control, limits=limits, timeout=timeout)
    if name == "nccl":
        return NcclTransport(**common, control=control, limits=limits, timeout=timeout)
    from .transports.copy_engine.copy_engine import CopyEngineTransport  # on demand: most processes never use it

    return CopyEngineTransport(**common, control=control, timeout=timeout)
