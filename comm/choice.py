"""Which transports all ranks of a process group could open, the best first, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .control import Control
from .limits import Limits
from .transport import TransportError
from .transports.nccl import nccl_missing
from .transports.nccl_library import OVERRIDES, overridden
from .watchdog.preflight import brief

# Backends of torch.distributed that read memory from the host: they cannot take CUDA tensors in stream order.
HOST_BACKENDS = ("gloo", "mpi")
# What "auto" tries, the best first. Copy engines leave the SMs alone but are not known to be faster: until they are
# measured, NCCL goes first.
PREFERENCE = {"cuda": ("nccl", "copy_engine", "process_group"), "cpu": ("process_group",)}
LIMITS_KEPT = {
    ("nccl", "cuda"): tuple(OVERRIDES),
    ("process_group", "cpu"): ("bytes_per_second",),
}


class Wish(NamedTuple):
    """What one rank asks for, and per transport why that rank cannot use it."""

    transport: str
    device: str
    topology: str
    limits: str
    problems: dict[str, str | None]


def wish_of(
    group: dist.ProcessGroup | None, transport: str, device: torch.device, topology: object, limits: Limits
) -> Wish:
    """What this rank brings to the choice; without a group it is alone."""
    problems = {
        "nccl": problem_of("nccl", device, limits),
        "copy_engine": problem_of("copy_engine", device, limits),
        "process_group": problem_of("process_group", device, limits, group),
    }
    return Wish(transport, device.type, brief(topology), repr(limits), problems)


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


def choose(control: Control, wish: Wish, levels: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """What every rank could open, the best first, and what was passed over why; the same on every rank.

    Each choice has one name per level: copy engines do not reach beyond a node.

    Raises:
        ValueError: on every rank: some rank cannot open what was asked for, or there is nothing that all can.
        TransportError: on every rank: they do not ask for the same.
    """
    told: Any = control.merged(tuple(wish), partial(_chosen, levels=levels), what="the choice of a transport")
    kind, found, passed_over = told
    if kind:
        raise {"ValueError": ValueError, "TransportError": TransportError}[kind](found)
    return [tuple(names) for names in found], passed_over


def _chosen(told: list[Any], levels: int) -> tuple[str, object, list[str]]:
    """What ends the choice of all ranks and its words, or "" and what `choose` returns."""
    wishes = [Wish(*one) for one in told]
    for field in ("transport", "device", "topology", "limits"):
        values = [getattr(one, field) for one in wishes]
        if len(set(values)) > 1:
            who = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            return "TransportError", f"the ranks disagree on {field} ({who})", []
    asked, device = wishes[0][:2]
    found, passed_over = [], []
    for name in PREFERENCE[device] if asked == "auto" else [asked]:
        names, problem = _per_level(name, wishes, levels)
        if problem is None:
            found.append(names)
        elif asked != "auto":
            return "ValueError", f'transport is "{name}", and {problem}', []
        else:
            passed_over.append(f"{name}: {problem}")
    if not found:
        return "ValueError", f'transport "auto" finds none that works: {"; ".join(passed_over)}', []
    return "", found, passed_over


def _per_level(name: str, wishes: Sequence[Wish], levels: int) -> tuple[tuple[str, ...], str | None]:
    """The names for all levels, and why some rank cannot have them."""
    problem = _first_problem(name, wishes)
    if problem or levels == 1 or name != "copy_engine":
        return (name,) * levels, problem
    others = {other: _first_problem(other, wishes) for other in ("nccl", "process_group")}
    for other, wrong in others.items():
        if wrong is None:
            return (name, other), None
    told = "; ".join(f"{other}: {wrong}" for other, wrong in others.items())
    return (name, ""), f"there is nothing for the level between the nodes ({told})"


def _first_problem(name: str, wishes: Sequence[Wish]) -> str | None:
    found = ((rank, wish.problems[name]) for rank, wish in enumerate(wishes))
    return next((f"on rank {rank} {problem}" for rank, problem in found if problem), None)


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
