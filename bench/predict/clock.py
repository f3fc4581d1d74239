"""Programs on a clock: when each operation begins and ends, on all ranks.

A launch begins when the one before is over, what it waits for is, and the host has come to it; a group of transfers
when the group before on its stream is. A message moves when both ends have begun their groups, and a group is over when
its messages are. Times are numbers, or arrays of one length: as many cases at once.
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
class Track:
    """Seconds at which the operations of one rank's program begin and end."""

    program: Program
    begins: list[Seconds]
    ends: list[Seconds]

    @property
    def seconds(self) -> Seconds:
        return reduce(_later(self.ends), self.ends, 0.0)

    def waits(self, hops: int) -> list[Seconds]:
        """Of each hop how long the compute stream stood still before its launches."""
        seconds: list[Seconds] = [0.0] * hops
        free: Seconds = 0.0
        for op, begin, end in zip(self.program.ops, self.begins, self.ends, strict=True):
            if op.stream == COMPUTE:
                seconds[op.hop] = seconds[op.hop] + (begin - free)
                free = end
        return seconds


def _later(times: Sequence[Seconds]) -> Callable[[Seconds, Seconds], Seconds]:
    """The later of two times; of arrays one by one."""
    return np.maximum if any(isinstance(one, np.ndarray) for one in times) else max


def run(
    programs: Sequence[Program],
    costs: Sequence[Sequence[Seconds]],
    message_seconds: Callable[[int, int, int], Seconds],
    host: Callable[[Op], float] = lambda op: 0.0,
) -> list[Track]:
    """All ranks together.

    Args:
        programs: of the ranks, in rank order.
        costs: seconds of every launch, ``[rank][op]``; of transfers nothing is read.
        message_seconds: of a message, given its source, destination and bytes.
        host: seconds that the host takes to issue an operation; it waits for none.

    Raises:
        ValueError: the programs wait for each other forever, or a message has no other end.
    """
    machine = _Machine(programs, costs, message_seconds, host)
    todo = list(range(len(programs)))
    while todo:
        todo.extend(machine.advance(todo.pop()))
    stuck = [rank for rank, begins in enumerate(machine.begins) if len(begins) < len(programs[rank].ops)]
    if stuck or any(end is None for ends in machine.ends for end in ends):
        raise ValueError(f"ranks {stuck} wait for each other forever: their programs do not fit together")
    return [Track(*one) for one in zip(programs, machine.begins, machine.ends, strict=True)]


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
        self._last: list[dict[int, int]] = [{} for _ in programs]  # by stream the operation before
        self._half: dict[Message, tuple[int, Seconds]] = {}  # which op waits for the other end, since when
        self._open: dict[tuple[int, int], tuple[int, Seconds]] = {}  # messages left of a group, latest end

    def advance(self, rank: int) -> list[int]:
        """As far as what is known allows; the ranks that may go on since."""
        ops, begins, ends, woken = self.programs[rank].ops, self.begins[rank], self.ends[rank], list[int]()
        while len(begins) < len(ops):
            number = len(begins)
            op = ops[number]
            before = self._last[rank].get(op.stream)
            needed = [ends[one] for one in (op.after if before is None else (*op.after, before))]
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
            over = self._later(begin, since) + self.seconds(source, destination, nbytes)
            partner = source if rank == destination else destination
            for member, group in ((rank, number), (partner, other)):
                left, latest = self._open[member, group]
                latest = self._later(latest, over)
                self._open[member, group] = left - 1, latest
                if left == 1:
                    self.ends[member][group] = latest
                    woken.append(member)
        return woken


def slowed(program: Program, costs: Sequence[Seconds], transfers: Sequence[Seconds], beside: float) -> list[Seconds]:
    """Launches take longer while transfers run beside them: those posted so far, for as long as they are not over.

    Args:
        program: of one rank.
        costs: of its launches with nothing beside.
        transfers: seconds of its groups.
        beside: the part of its speed that a launch loses.
    """
    if not beside:
        return list(costs)
    smaller = np.minimum if any(isinstance(one, np.ndarray) for one in (*costs, *transfers)) else min
    longer, moving = list[Seconds](), 0.0
    for op, cost, seconds in zip(program.ops, costs, transfers, strict=True):
        if op.stream != COMPUTE:
            moving = moving + seconds
            longer.append(cost)
            continue
        together = smaller(moving, cost / (1 - beside))
        moving = moving - together
        longer.append(cost + beside * together)
    return longer
