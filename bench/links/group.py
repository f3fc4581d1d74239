"""All transports of one group of ranks, one after the other: in processes, or between virtual ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...comm import Group, Limits, LocalGroup, LocalWorld, Transport, TransportError, open_transports
from ...comm.control import control_of
from ..common.launching import Member, member, process_group
from .beside import measured_beside
from .runs import REGISTERED, Beside, Row, Wish, measured, ways
from .text import limits_text

SWEPT = ("nccl",)  # transports with channels and CTAs


@dataclass
class Findings:
    """What was measured, and what does not open here and why."""

    rows: list[Row] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)

    def __iadd__(self, other: Findings) -> Findings:
        self.rows += other.rows
        self.beside += other.beside
        self.closed += other.closed
        return self


def spawned(store: str, wish: Wish) -> Findings:
    """The entry of the processes that the command starts itself."""
    place = member()
    assert place is not None
    return between_processes(place, wish, store)


def between_processes(place: Member, wish: Wish, store: str | None = None) -> Findings:
    """One rank of the measurement in processes; every rank has the findings."""
    torch.set_num_threads(1)
    device = place.shared_device(wish.device)
    with process_group(place, store, device=device):
        assert dist.group.WORLD is not None
        return of_group(dist.group.WORLD, wish, device)


def in_process(world: int, wish: Wish) -> Findings:
    """The same between virtual ranks."""
    threads = torch.get_num_threads()
    with LocalWorld(world, device=wish.device) as ranks:

        def run(group: LocalGroup) -> Findings:
            torch.set_num_threads(1)
            return of_group(group, wish, ranks.device)

        try:
            return ranks.run(run)[0]
        finally:
            torch.set_num_threads(threads)


def of_group(group: Group, wish: Wish, device: torch.device) -> Findings:
    """Every transport with every limit, one after the other."""
    found = Findings()
    for name in wish.transports:
        for limits in limits_of(name, wish):
            opened = opening(group, name, device, limits)
            if isinstance(opened, str):
                found.closed.append((name + limits_text(limits.channels, limits.ctas), opened))
                if limits == Limits():
                    break  # nor does it with limits
                continue
            try:
                found += of_transport(opened, wish, device, limits)
            finally:
                opened.close()
    return found


def of_transport(transport: Transport, wish: Wish, device: torch.device, limits: Limits) -> Findings:
    """Rows of one open transport."""
    found = Findings(list(measured(transport, limits, wish, device)))
    if transport.name in SWEPT and limits == Limits():
        try:
            found.rows += measured(transport, limits, wish, device, REGISTERED)
        except TransportError as error:
            found.closed.append((transport.name + REGISTERED, str(error)))
    if wish.beside != "none":
        found.beside = [measured_beside(transport, limits, way, wish, device) for way in ways(transport.size)]
    return found


def limits_of(name: str, wish: Wish) -> Iterator[Limits]:
    """What a transport is held to, one after the other; nothing where it has neither channels nor CTAs."""
    if name not in SWEPT:
        yield Limits()
        return
    for channels, ctas in itertools.product(wish.channels, wish.ctas):
        if channels is None or ctas is None or channels <= ctas:  # a channel takes a CTA
            yield Limits(channels=channels, ctas=ctas)


def opening(group: Group, name: str, device: torch.device, limits: Limits) -> Transport | str:
    """The transport, or why it does not open here: one answer for all ranks."""
    problem, opened = "", None
    try:
        (opened,) = open_transports(group, transport=name, device=device, limits=limits)
    except (ValueError, RuntimeError) as error:  # TransportError is a RuntimeError, and so is NCCL's own
        problem = str(error)
    # virtual ranks fail together: one that raises wakes the others
    problems: list[Any] = [problem] * group.size()
    if not isinstance(group, LocalGroup):
        problems = control_of(group).gather(problem, what=f"whether {name} opens")
    told = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if opened is not None and not told:
        return opened
    if opened is not None:
        opened.close()
    return problem or told[0]
