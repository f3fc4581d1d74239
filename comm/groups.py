"""From what users call a group to a transport: which ranks, which bytes' carrier, and why that one."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .lanes import indexed
from .local import LocalGroup, LocalTransport, solo_group
from .nccl import NcclTransport, nccl_missing
from .process_group import ProcessGroupTransport, all_gather_object
from .transport import Transport, TransportError, check_edges

logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "local", "nccl", "process_group")
# Backends of torch.distributed that read memory from the host: they cannot take CUDA tensors in stream order.
HOST_BACKENDS = ("gloo", "mpi")

Group = LocalGroup | dist.ProcessGroup


def resolve_group(group: object = None) -> Group:
    """The ranks that `group` names.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a `LocalWorld` member; None is the
            default group where torch.distributed is initialised, else one device alone.

    Raises:
        ValueError: anything else, a mesh of more dimensions, or a process group that this rank is not in.
    """
    if isinstance(group, LocalGroup):
        return group
    if group is None:
        return _default_process_group() or solo_group()
    if isinstance(group, DeviceMesh):
        return _mesh_group(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not a member of that process group")
    if isinstance(group, dist.ProcessGroup):
        return group
    raise ValueError(
        f"group is a {type(group).__name__}: it takes a torch.distributed ProcessGroup, a one-dimensional DeviceMesh, "
        "a LocalWorld member or None"
    )


def group_rank_size(group: object = None) -> tuple[int, int]:
    """(rank inside the group, number of ranks)."""
    members = resolve_group(group)
    return members.rank(), members.size()


def open_transport(group: object = None, *, transport: str = "auto", device: torch.device | str) -> Transport:
    """Open a transport between the ranks of a group for tensors of one device; every rank calls it together.

    "auto" takes `local` for a `LocalWorld` member or one device alone; for CUDA tensors `nccl` where CuPy imports on
    every rank, else `process_group`; for CPU tensors `process_group`. Both ring edges of every rank are checked with
    patterned bytes before it returns.

    Raises:
        ValueError: an unknown name, or one that this group or device cannot use; nothing has been sent.
        TransportError: the ranks disagree on what to open, or the check failed.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, it takes one of {', '.join(TRANSPORTS)}")
    device = _usable(torch.device(device))
    members = resolve_group(group)
    if isinstance(members, dist.ProcessGroup):
        opened = _open_between_processes(members, transport, device)
    else:
        opened = _open_in_process(members, transport, device)
    logger.info("rank %d of %d moves %s tensors by transport %s", opened.rank, opened.size, device, opened.name)
    return opened


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


def _open_in_process(group: LocalGroup, transport: str, device: torch.device) -> Transport:
    if transport in ("auto", "local"):
        opened = LocalTransport(group, device)
        check_edges(opened, device)
        return opened
    if group.size() > 1:
        raise ValueError(f'transport is {transport!r}, the ranks of a LocalWorld share one process: use "local"')
    if transport == "process_group":
        raise ValueError('transport is "process_group", and torch.distributed is not initialised')
    problem = _nccl_problem(device)
    if problem:
        raise ValueError(f'transport is "nccl", and {problem}')
    return NcclTransport(rank=0, size=1, device=device, gather=lambda value: [value])


def _open_between_processes(group: dist.ProcessGroup, transport: str, device: torch.device) -> Transport:
    if transport == "local" and group.size() > 1:
        raise ValueError(f'transport is "local", the group has {group.size()} processes: use "process_group" or "nccl"')
    if transport == "local" or (transport == "auto" and group.size() == 1):
        return _open_in_process(solo_group(), "local", device)
    name = _agree(group, transport, device)
    if name == "nccl":
        return NcclTransport(
            rank=group.rank(),
            size=group.size(),
            device=device,
            gather=lambda value: all_gather_object(group, value),
        )
    opened = ProcessGroupTransport(group, device)
    check_edges(opened, device)
    return opened


def _nccl_problem(device: torch.device) -> str | None:
    return nccl_missing() if device.type == "cuda" else f"it moves CUDA tensors, device is {device}"


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The group's backend for tensors of this device, "" where it has none."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device_type: backend for device_type, _, backend in pairs}.get(device.type, "")


def _backend_problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    backend = _backend(group, device)
    if device.type == "cpu" and not backend:
        return 'the group has no backend for CPU tensors: init_process_group("cpu:gloo,cuda:nccl") makes one with both'
    if device.type == "cuda" and (not backend or backend in HOST_BACKENDS):
        return (
            f"the group's backend for CUDA tensors is {backend or 'none'}: it takes one that works in stream order, as "
            'init_process_group("cpu:gloo,cuda:nccl") makes, or transport="nccl" beside any group'
        )
    return None


class _Wish(NamedTuple):
    """What one rank brings to the choice of a transport; a problem is why the transport cannot work there."""

    transport: str
    device: str
    nccl: str | None
    process_group: str | None


def _agree(group: dist.ProcessGroup, transport: str, device: torch.device) -> str:
    """One choice for all ranks, out of what every one of them can do; one error for all where there is none."""
    mine = _Wish(transport, device.type, _nccl_problem(device), _backend_problem(group, device))
    wishes = [_Wish(*wish) for wish in all_gather_object(group, tuple(mine))]  # type: ignore[misc]
    for field in ("transport", "device"):
        values = [getattr(wish, field) for wish in wishes]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise TransportError(f"the ranks disagree on {field} ({told})")
    if transport == "auto":
        return _best(wishes)
    problem = _problem_of(transport, wishes)
    if problem:
        raise ValueError(f'transport is "{transport}", and {problem}')
    return transport


def _best(wishes: list[_Wish]) -> str:
    passed_over: list[str] = []
    for name in ("nccl", "process_group"):
        problem = _problem_of(name, wishes)
        if problem is None:
            logger.info('transport "auto" takes %s%s', name, "".join(f"; not {reason}" for reason in passed_over))
            return name
        passed_over.append(f"{name}: {problem}")
    raise ValueError(f'transport "auto" finds none that works: {"; ".join(passed_over)}')


def _problem_of(name: str, wishes: list[_Wish]) -> str | None:
    for rank, wish in enumerate(wishes):
        problem: str | None = getattr(wish, name)
        if problem:
            return f"on rank {rank} {problem}"
    return None
