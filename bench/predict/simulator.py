"""Simulates programs: when each operation of every rank begins and ends.

A launch begins after the previous launch, after its dependencies, and after the host issued it. A group of transfers
begins after the previous group on its stream. A message moves once both ends have begun their groups. A group ends with
its last message. Times are numbers, or arrays with one element per case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .program import COMPUTE, Op, Program
from .speed import POINT, Seconds

Message = tuple[int, int, object]  # source, destination, key


@dataclass(frozen=True)
class RankTimes:
    """Begin and end of each operation of one rank's program, in seconds."""

    program: Program
    begins: list[Seconds]
    ends: list[Seconds]

    @property
    def seconds(self) -> Seconds:
        return reduce(_later(self.ends), self.ends, 0.0)

    def hop_waits(self, hops: int) -> list[Seconds]:
        """Return, for each hop, how long the compute stream was idle before the hop's launches."""
        seconds: list[Seconds] = [0.0] * hops
        free: Seconds = 0.0
        for op, begin, end in zip(self.program.ops, self.begins, self.ends, strict=True):
            if op.stream == COMPUTE:
                seconds[op.hop] = seconds[op.hop] + (begin - free)
                free = end
        return seconds


def _later(times: Sequence[Seconds]) -> Callable[[Seconds, Seconds], Seconds]:
    """Return a function for the later of two times, elementwise for arrays."""
    return np.maximum if any(isinstance(time, np.ndarray) for time in times) else max


def run_programs(
    programs: Sequence[Program],
    costs: Sequence[Sequence[Seconds]],
    message_seconds: Callable[[int, int, int], Seconds],
    host: Callable[[Op], float] = lambda op: 0.0,
) -> list[RankTimes]:
    """Simulate all ranks together; raise ValueError if their programs wait for each other forever.

    ``costs`` are the seconds of every launch, ``[rank][op]``. ``message_seconds`` takes source, destination and bytes.
    ``host`` returns the seconds that the host takes to issue an operation; it issues all of them without waiting.
    """
    machine = _Machine(programs, costs, message_seconds, host)
    ready = list(range(len(programs)))
    while ready:
        ready.extend(machine.advance(ready.pop()))
    stuck = [rank for rank, begins in enumerate(machine.begins) if len(begins) < len(programs[rank].ops)]
    if stuck or any(end is None for ends in machine.ends for end in ends):
        raise ValueError(f"ranks {stuck} wait for each other forever, because their programs do not match")
    return [RankTimes(*one) for one in zip(programs, machine.begins, machine.ends, strict=True)]


class _Machine:
    def __init__(
        self, programs: Sequence[Program], costs: Sequence[Sequence[Seconds]], seconds: Any, host: Callable[[Op], float]
    ) -> None:
        self.programs, self.costs, self.seconds, self.host = programs, costs, seconds, host
        self.begins: list[list[Seconds]] = [[] for _ in programs]
        self.ends: list[list[Seconds | None]] = [[None] * len(program.ops) for program in programs]
        messages = [seconds(0, 0, 0)] if programs else []
        self._later = _later([*messages, *(cost for one in costs[:1] for cost in one)])
        self._issued = [0.0] * len(programs)
        self._last: list[dict[int, int]] = [{} for _ in programs]  # previous operation by stream
        self._half: dict[Message, tuple[int, Seconds]] = {}  # operation that waits for the other end, and its begin
        self._open: dict[tuple[int, int], tuple[int, Seconds]] = {}  # by group: messages left, latest end so far

    def advance(self, rank: int) -> list[int]:
        """Begin a rank's operations until one must wait; return the ranks whose transfers ended thereby."""
        ops, begins, ends, woken = self.programs[rank].ops, self.begins[rank], self.ends[rank], list[int]()
        while len(begins) < len(ops):
            number = len(begins)
            op = ops[number]
            before = self._last[rank].get(op.stream)
            needed = [ends[index] for index in (op.after if before is None else (*op.after, before))]
            if any(end is None for end in needed):
                break
            if op.what != POINT:
                self._issued[rank] += self.host(op)
            begin = reduce(self._later, needed, self._issued[rank])
            begins.append(begin)
            self._last[rank][op.stream] = number
            if op.stream == COMPUTE:
                ends[number] = begin + self.costs[rank][number]
            else:
                woken += self._begin_group(rank, number, op, begin)
        return woken

    def _begin_group(self, rank: int, number: int, op: Op, begin: Seconds) -> list[int]:
        messages = [(rank, peer, nbytes) for peer, nbytes in op.sends]
        messages += [(peer, rank, nbytes) for peer, nbytes in op.receives]
        self._open[rank, number] = len(messages), begin
        woken = []
        for source, destination, nbytes in messages:
            name = source, destination, op.key
            if name not in self._half:
                self._half[name] = number, begin
                continue
            other, since = self._half.pop(name)
            end = self._later(begin, since) + self.seconds(source, destination, nbytes)
            partner = source if rank == destination else destination
            for member, group in ((rank, number), (partner, other)):
                messages_left, latest = self._open[member, group]
                latest = self._later(latest, end)
                self._open[member, group] = messages_left - 1, latest
                if messages_left == 1:
                    self.ends[member][group] = latest
                    woken.append(member)
        return woken


def slow_launches(
    program: Program, costs: Sequence[Seconds], transfers: Sequence[Seconds], transfer_slowdown: float
) -> list[Seconds]:
    """Return the seconds of a program's launches, longer than ``costs`` where transfers run at the same time.

    ``transfers`` are the seconds of each group of transfers. During a transfer a launch loses the share
    ``transfer_slowdown`` of its speed.
    """
    if not transfer_slowdown:
        return list(costs)
    smaller = np.minimum if any(isinstance(value, np.ndarray) for value in (*costs, *transfers)) else min
    stretched, remaining = list[Seconds](), 0.0
    for op, cost, seconds in zip(program.ops, costs, transfers, strict=True):
        if op.stream != COMPUTE:
            remaining = remaining + seconds
            stretched.append(cost)
            continue
        overlap = smaller(remaining, cost / (1 - transfer_slowdown))
        remaining = remaining - overlap
        stretched.append(cost + transfer_slowdown * overlap)
    return stretched
