"""Programs on a clock: when each operation begins and ends, on all ranks.

A launch begins when the one before is over and what it waits for; a group of transfers when the group before on its
stream is. A message moves when both ends have begun their groups, and a group is over when its messages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from .program import COMPUTE, Op, Program

Lanes = npt.NDArray[np.float64]
Message = tuple[int, int, object]  # source, destination, key


@dataclass(frozen=True)
class Track:
    """Seconds at which the operations of one rank's program begin and end."""

    program: Program
    begins: list[float]
    ends: list[float]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self) -> list[tuple[float, float]]:
        """When it computes: from begin to end of every launch, in order, where it takes time."""
        every = zip(self.program.ops, self.begins, self.ends, strict=True)
        return [(begin, end) for op, begin, end in every if op.stream == COMPUTE and end > begin]

    def waits(self) -> list[float]:
        """Of each operation how long its stream stood still before it; of launches alone."""
        found, free = [], 0.0
        for op, begin, end in zip(self.program.ops, self.begins, self.ends, strict=True):
            found.append(begin - free if op.stream == COMPUTE else 0.0)
            free = end if op.stream == COMPUTE else free
        return found


def run(
    programs: Sequence[Program],
    costs: Sequence[Sequence[float]],
    message_seconds: Callable[[int, int, int], float],
) -> list[Track]:
    """All ranks together.

    Args:
        programs: of the ranks, in rank order.
        costs: seconds of every launch, ``[rank][op]``; of transfers nothing is read.
        message_seconds: of a message, given its source, destination and bytes.

    Raises:
        ValueError: the programs wait for each other forever, or a message has no other end.
    """
    machine = _Machine(programs, costs, message_seconds)
    todo = list(range(len(programs)))
    while todo:
        todo.extend(machine.advance(todo.pop()))
    stuck = [rank for rank, at in enumerate(machine.at) if at < len(programs[rank].ops)]
    if stuck or any(None in ends for ends in machine.ends):
        raise ValueError(f"ranks {stuck} wait for each other forever: their programs do not fit together")
    return [
        Track(program, begins, [end for end in ends if end is not None])
        for program, begins, ends in zip(programs, machine.begins, machine.ends, strict=True)
    ]


class _Machine:
    def __init__(self, programs: Sequence[Program], costs: Sequence[Sequence[float]], seconds: Any) -> None:
        self.programs, self.costs, self.seconds = programs, costs, seconds
        self.at = [0] * len(programs)
        self.begins: list[list[float]] = [[] for _ in programs]
        self.ends: list[list[float | None]] = [[None] * len(program.ops) for program in programs]
        self._last: list[dict[int, int]] = [{} for _ in programs]  # by stream the operation before
        self._half: dict[Message, tuple[int, float]] = {}  # which op waits for the other end, since when
        self._open: dict[tuple[int, int], tuple[int, float]] = {}  # messages left of a group, latest end

    def advance(self, rank: int) -> list[int]:
        """As far as what is known allows; the ranks that may go on since."""
        ops, ends, woken = self.programs[rank].ops, self.ends[rank], []
        while self.at[rank] < len(ops):
            number = self.at[rank]
            op = ops[number]
            before = self._last[rank].get(op.stream)
            needed = [ends[one] for one in (op.after if before is None else (*op.after, before))]
            known = [end for end in needed if end is not None]
            if len(known) < len(needed):
                break
            begin = max(known, default=0.0)
            self.begins[rank].append(begin)
            self._last[rank][op.stream] = number
            self.at[rank] += 1
            if op.stream == COMPUTE:
                ends[number] = begin + self.costs[rank][number]
            else:
                woken += self._begin_group(rank, number, op, begin)
        return woken

    def _begin_group(self, rank: int, number: int, op: Op, begin: float) -> list[int]:
        messages = [(rank, peer, nbytes) for peer, nbytes in op.sends]
        messages += [(peer, rank, nbytes) for peer, nbytes in op.receives]
        self._open[rank, number] = len(messages), begin
        woken = []
        for source, destination, nbytes in messages:
            name = source, destination, op.key
            if source == destination and name not in self._half:
                self._half[name] = number, begin
                continue
            if name not in self._half:
                self._half[name] = number, begin
                continue
            other, since = self._half.pop(name)
            over = max(begin, since) + self.seconds(source, destination, nbytes)
            partner = source if rank == destination else destination
            for member, group in {(rank, number), (partner, other)}:
                count = 2 if source == destination else 1
                left, latest = self._open[member, group]
                self._open[member, group] = left - count, max(latest, over)
                if left == count:
                    self.ends[member][group] = max(latest, over)
                    woken.append(member)
        return woken


def run_alike(
    program: Program,
    costs: Iterable[Lanes | float],
    groups: Iterable[Lanes | float],
    meet: Callable[[Op, Lanes], Lanes] | None = None,
) -> Alike:
    """One program on many lanes at once: ranks that do the same, or one rank in many cases.

    Args:
        program: of rank 0; every other rank does the same with peers as far away.
        costs: seconds of each launch, per lane; asked for one after the other, and not kept.
        groups: seconds of each group once both its ends have begun, per lane.
        meet: for a group, and when each lane has begun it, when all that it meets have too; None: every lane is a ring
            of its own, all of whose ranks are alike.
    """
    ends: list[Lanes | None] = []
    last_use = _last_uses(program)
    zero = np.zeros(1)
    free: dict[int, Lanes] = {COMPUTE: zero}
    waited: Lanes = zero
    by_hop: dict[int, float] = {}
    for number, (op, cost, group) in enumerate(zip(program.ops, costs, groups, strict=True)):
        before = free.get(op.stream, zero)
        begin = before
        for one in op.after:
            end = ends[one]
            assert end is not None
            begin = np.maximum(begin, end)
        if op.stream == COMPUTE:
            by_hop.setdefault(op.hop, 0.0)
            if begin is not before:
                stood = begin - before
                waited = waited + stood
                by_hop[op.hop] += float(stood.mean())
            end = begin + cost
        else:
            end = (begin if meet is None or begin.size == 1 else meet(op, begin)) + group
        free[op.stream] = end
        ends.append(end)
        for one in last_use.get(number, ()):
            ends[one] = None  # of thousands of ranks and hops not all can be kept
    return Alike(reduce(np.maximum, free.values()), waited, by_hop)


@dataclass(frozen=True)
class Alike:
    """What :func:`run_alike` found."""

    seconds: Lanes
    """Per lane until all is over."""
    waited: Lanes
    """Per lane how long launches stood still."""
    by_hop: dict[int, float]
    """The same per hop, the mean of all lanes."""


def needed(program: Program) -> Program:
    """The same on the clock, with no operation after what another that it comes after, or its stream, waits for."""
    known: list[dict[int, int]] = []  # of each operation the last one of every stream that is over by its end
    last: dict[int, dict[int, int]] = {}
    ops = []
    for number, op in enumerate(program.ops):
        over, after = dict(last.get(op.stream, {})), []
        for one in sorted(op.after, reverse=True):
            if one > over.get(program.ops[one].stream, -1):
                after.append(one)
                over |= {stream: max(end, over.get(stream, -1)) for stream, end in known[one].items()}
        over[op.stream] = number
        known.append(over)
        last[op.stream] = over
        ops.append(op if len(after) == len(op.after) else replace(op, after=tuple(after)))
    return replace(program, ops=tuple(ops))


def _last_uses(program: Program) -> dict[int, list[int]]:
    last: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        last[number] = number
        last.update((one, number) for one in op.after)
    found: dict[int, list[int]] = {}
    for one, number in last.items():
        found.setdefault(number, []).append(one)
    return found
