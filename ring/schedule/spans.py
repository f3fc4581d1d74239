"""Runs of equally spaced positions, and what a list of them must satisfy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from ...comm.checked import listed, shown, whole
from ..checked import MOST_POSITIONS, POSITIONS


class Span(NamedTuple):
    """``length`` tokens at the positions ``start, start + step, start + 2 step, …``."""

    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + (self.length - 1) * self.step + 1 if self.length else self.start


def ascending(rank: int, spans: Iterable[tuple[int, ...]]) -> tuple[Span, ...]:
    """The spans of one rank, checked, without empty ones, joined where one continues the other."""
    made: list[Span] = []
    for number, given in enumerate(listed("a list of spans").of(f"spans_per_rank[{rank}]", spans)):
        name = f"spans_per_rank[{rank}][{number}]"
        span = _span(name, given)
        if not span.length:
            continue
        before = made[-1] if made else Span(0, 0)
        if span.start < before.stop:
            raise ValueError(
                f"{name} starts at {span.start}, the span before it ends at {before.stop - 1}: "
                "the positions of a rank must ascend"
            )
        if made and span.step == before.step and span.start == before.start + before.length * before.step:
            span = Span(before.start, before.length + span.length, before.step)
            made.pop()
        made.append(span)
    return tuple(made)


def _span(name: str, given: tuple[int, ...]) -> Span:
    try:
        span = Span(*map(POSITIONS.read, given))
    except (TypeError, ValueError):
        span = Span(0, 0, 0)
    if span.step < 1 or span.stop > MOST_POSITIONS:
        raise ValueError(
            f"{name} is {shown(given)}: it must be a Span(start, length, step=1) of whole numbers, start and length at "
            "least 0, step at least 1, positions below 2^62"
        )
    return span if span.length > 1 else span._replace(step=1)


class _Run(NamedTuple):
    """The positions ``p`` of one rank with ``p % period == residue`` and ``first <= p // period <= last``."""

    residue: int
    first: int
    last: int
    rank: int


def refuse_overlap(spans_per_rank: Iterable[Iterable[Span]]) -> None:
    """Refuse a position that two spans hold.

    Modulo the least common multiple of all steps every span is a few runs of consecutive numbers, so that this costs
    what the spans cost, not what the positions would.
    """
    spans = [(rank, span) for rank, spans in enumerate(spans_per_rank) for span in spans]
    period = lcm(*(span.step for _, span in spans))
    if period == 1 and _are_disjoint(sorted(span for _, span in spans)):
        return  # documents cut into chunks are many spans: nothing is made for each of them
    runs = sorted(run for rank, span in spans for run in _runs(span, period, rank))
    for before, after in pairwise(runs):
        if before.residue == after.residue and after.first <= before.last:
            ranks = sorted((before.rank, after.rank))
            raise ValueError(
                f"spans_per_rank holds position {after.first * period + after.residue} on rank {ranks[0]} "
                f"and on rank {ranks[1]}: a token lives on one rank"
            )


def _are_disjoint(ascending: list[Span]) -> bool:
    return all(before[0] + before[1] <= after[0] for before, after in pairwise(ascending))


def _runs(span: Span, period: int, rank: int) -> Iterator[_Run]:
    stride = period // span.step
    for offset in range(min(stride, span.length)):
        first, residue = divmod(span.start + offset * span.step, period)
        yield _Run(residue, first, first + (span.length - 1 - offset) // stride, rank)


def at_least(least: int, name: str, value: int) -> int:
    """A number as an integer; ValueError where it is none, or too small."""
    made: int = whole(least, MOST_POSITIONS).of(name, value)
    return made
