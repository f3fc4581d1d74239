"""What a call's transfers carried, and from when to when each slot was in use: read off the schedule and the times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..traffic import Key, Kind
from .plan import Plan
from .schedule import Hop

Stretch = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class Span:
    """``kind`` from ``begin`` to ``end``, in seconds on the rank's host clock, at a hop of the forward or the backward.

    ``kind`` is "compute" or "wait"; "send" or "receive"; "slot N" (K/V) or "sums N" (dK/dV) while a slot is in use.
    """

    phase: str
    kind: str
    hop: int
    begin: float
    end: float
    name: str = ""  # what moves, or what a slot holds: "K/V of 3"
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Moved(NamedTuple):
    """A group of transfers that is over: when, and how many bytes it sent and received."""

    key: Key
    begin: float
    end: float
    sent: int
    received: int


def uses(phase: str, plan: Plan, posts: Sequence[Moved], computed: Mapping[int, Sequence[Stretch]]) -> Iterator[Span]:
    """Every use of a slot by one call: from when something may be written there until its last reader is over.

    ``computed``: per hop, when it computed. The two slots of a two-level ring through which nodes' sums go home are not
    told.
    """
    for hop in plan.hops:
        reads = computed.get(hop.index, ())
        if hop.kv_slot is not None:
            span = _use(plan, posts, reads, hop, _brings_kv, _leaves_kv)
            if span is not None:
                yield Span(phase, f"slot {hop.kv_slot}", hop.index, *span, f"K/V of {hop.shard}")
        if hop.sums_slot is not None and phase == "backward":
            # where more is to come, what came home is added to a total as soon as it is there
            plain = not plan.two_level and plan.leaving is None
            span = _use(plan, posts, reads if hop.index or plain else (), hop, _brings_sums, _leaves_sums)
            if span is not None:
                yield Span(phase, f"sums {hop.sums_slot}", hop.index, *span, f"dK/dV of {hop.shard}")


Asks = Callable[[Plan, Key, Hop], bool]


def _use(
    plan: Plan, posts: Sequence[Moved], reads: Sequence[Stretch], hop: Hop, brings: Asks, leaves: Asks
) -> Stretch | None:
    """From the first write into a hop's slot to its last reader; None where nothing comes or goes through it."""
    into = [(post.begin, post.end) for post in posts if post.received and brings(plan, post.key, hop)]
    out = [(post.begin, post.end) for post in posts if post.sent and leaves(plan, post.key, hop)]
    if not into and not out:
        return None
    used = [*into, *out, *reads]
    return min(begin for begin, _ in into or used), max(end for _, end in used)


def names(plan: Plan, key: Key) -> tuple[str, str]:
    """What a group of transfers sends, and what it receives."""
    if key.kind in (Kind.KV, Kind.RAIL):
        return f"K/V of {_leaving(plan, key).shard}", f"K/V of {plan.hops[key.brings].shard}"
    if key.kind is Kind.SUMS:
        coming = " and ".join(str(one.shard) for one in _coming_sums(plan, key))
        return f"dK/dV of {plan.hops[key.hop].shard}", f"dK/dV of {coming}"
    base = plan.hops[key.hop // plan.inner * plan.inner]
    return f"dK/dV of {base.shard}", f"dK/dV of {plan.rank}"


def _coming_sums(plan: Plan, key: Key) -> list[Hop]:
    """The hops whose sums arrive with a group of sums."""
    following = plan.hops[key.hop + 1 : key.hop + 2]
    home = plan.homecomings.get(key.hop)
    return [one for one in following if not plan.is_base(one) and one.sums_from is not None] + ([home] if home else [])


def _leaving(plan: Plan, key: Key) -> Hop:
    """Whose K/V leave with a group that brings those of another hop."""
    return plan.hops[key.brings - (plan.inner if key.kind is Kind.RAIL else 1)]


def _brings_kv(plan: Plan, key: Key, hop: Hop) -> bool:
    return key.kind in (Kind.KV, Kind.RAIL) and key.brings == hop.index


def _leaves_kv(plan: Plan, key: Key, hop: Hop) -> bool:
    return key.kind in (Kind.KV, Kind.RAIL) and _leaving(plan, key) is hop


def _brings_sums(plan: Plan, key: Key, hop: Hop) -> bool:
    return key.kind is Kind.SUMS and hop in _coming_sums(plan, key)


def _leaves_sums(plan: Plan, key: Key, hop: Hop) -> bool:
    return key.kind is Kind.SUMS and key.hop == hop.index
