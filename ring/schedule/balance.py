"""How tokens are cut so that ranks have equal work: rank by rank, runs from both ends of every document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor, inf
from numbers import Rational

from ...comm.checked import number
from ..checked import checked
from .spans import Span

_SPEED = number("a finite number of at least 0", lambda speed: 0 <= speed < inf)


def zigzag(boundaries: Sequence[int], world: int) -> list[list[Span]]:
    """For every rank its runs of every document, one from each end; see :meth:`Layout.zigzag` for the rule."""
    spans: list[list[Span]] = [[] for _ in range(world)]
    held, turn = [0] * world, 0
    for start, end in pairwise(boundaries):
        each, extra = divmod(end - start, world)
        lengths = [each + ((rank - turn) % world < extra) for rank in range(world)]
        heads = [-(-(had + new) // 2) - -(-had // 2) for had, new in zip(held, lengths, strict=True)]
        for rank, runs in enumerate(_from_both_ends(start, end, heads, lengths)):
            spans[rank] += runs
        held = [had + new for had, new in zip(held, lengths, strict=True)]
        turn = (turn + extra) % world
    return spans


def by_tokens(seqlen: int, speeds: Sequence[Fraction]) -> list[int]:
    """``seqlen`` cut by ``speeds``: the first r ranks hold ``round(seqlen * speed of them / speed of all)`` tokens."""
    return _differences(_nearest(seqlen * share) for share in _shares(speeds))


def by_causal_pairs(seqlen: int, speeds: Sequence[Fraction]) -> list[list[Span]]:
    """For every rank one run from each end of the sequence; see :meth:`Layout.balanced` for the rule."""
    # the token in the middle of an odd length is its own mirror image, half a pair: the innermost run at the head
    heads = [_nearest(Fraction(seqlen, 2) * share) for share in _shares(speeds)]
    tails = [min(head, seqlen // 2) for head in heads]
    head_runs, tail_runs = _differences(heads), _differences(tails)
    lengths = [head + tail for head, tail in zip(head_runs, tail_runs, strict=True)]
    return [[*runs] for runs in _from_both_ends(0, seqlen, head_runs, lengths)]


def speeds_of(given: Iterable[float]) -> list[Fraction]:
    """Relative speeds as exact numbers, so that every machine cuts alike.

    Raises:
        ValueError: none, one that is not a finite number of at least 0, or none above 0.
    """
    (speeds,) = checked(speeds=given)
    made = [_speed(rank, speed) for rank, speed in enumerate(speeds)]
    if not made:
        raise ValueError("speeds is empty: it must have the relative speed of every rank")
    if not any(made):
        raise ValueError(f"speeds is {[*map(float, made)]}: at least one rank must be faster than 0")
    return made


def _speed(rank: int, speed: float) -> Fraction:
    as_float: float = _SPEED.of(f"speeds[{rank}]", speed)
    return Fraction(speed if isinstance(speed, Rational) else as_float)


def _from_both_ends(start: int, end: int, heads: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Span, Span]]:
    """Rank by rank the next run of ``heads[rank]`` tokens at the start, and one at the end with what is left."""
    for head, length in zip(heads, lengths, strict=True):
        tail = length - head
        yield Span(start, head), Span(end - tail, tail)
        start, end = start + head, end - tail


def _shares(speeds: Sequence[Fraction]) -> list[Fraction]:
    """Of all speed what the first 1, 2, ... ranks have."""
    return [part / sum(speeds) for part in accumulate(speeds)]


def _nearest(x: Fraction) -> int:
    return floor(x + Fraction(1, 2))


def _differences(ends: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *ends])]
