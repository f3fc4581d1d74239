"""What people do instead of a ring: gather all keys and values, or exchange heads for tokens; and mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ..common.shapes import human
from ..ring.memory import of_all_gather, of_ulysses, slots_of
from .call import DTYPES, Call
from .launch import Device, Launch, whole
from .links import Link, Links
from .memory import form_of, memory, problem_of
from .program import DKDV, DQ, FOLD, PASSES
from .ring import Pass, ideal_seconds, predicted
from .trouble import Trouble

FP32 = 4
LEAST_SLOTS = 2  # of a ring of more than two ranks
MIXTURE = " x "  # in the names of Ulysses beside a ring


@dataclass(frozen=True)
class Way:
    """One way to compute the same attention; without times where it does not fit."""

    name: str
    memory: int
    """Bytes of a rank."""
    ideal: float
    forward: float | None = None
    backward: float | None = None
    exposed: float | None = None
    """Of both, seconds in which nothing is computed."""
    note: str = ""

    @property
    def seconds(self) -> float:
        """Of both passes; endless where it does not fit."""
        return math.inf if self.forward is None or self.backward is None else self.forward + self.backward

    @property
    def percent(self) -> float | None:
        """Of one device divided by the ranks."""
        return None if self.forward is None else 100 * self.ideal / self.seconds


class Times(NamedTuple):
    """Seconds of both passes, and those in which nothing is computed."""

    forward: float
    backward: float
    exposed: float


class Option(NamedTuple):
    """A way before it is looked at, which takes time only where it fits."""

    name: str
    memory: int
    times: Callable[[], Times]
    note: str = ""


def ways(
    call: Call,
    device: Device,
    links: Links,
    trouble: Trouble | None = None,
    *,
    capacity: float = math.inf,
    passes: Sequence[Pass] = (),
) -> list[Way]:
    """All that there are, with the same slow ranks and varying launches, the fastest first.

    What needs more than ``capacity``, the bytes of a GPU, comes last, with a note in place of times. ``passes`` are
    those of the call's own ring, where they are known.
    """
    trouble = trouble or Trouble()
    trouble.check(call.world)
    rings = [flat(call, device, links, trouble)]
    if call.nodes > 1 and call.per_node > 1:
        rings.append(two_level(call, device, links, trouble))
    if passes and call.slots >= LEAST_SLOTS:
        own = len(rings) - 1 if call.is_two_level else 0
        rings[own] = rings[own]._replace(times=partial(_of_passes, passes))
    options = [*rings, gathered(call, device, links, trouble), *exchanged(call, device, links, trouble)]
    ideal, found = sum(ideal_seconds(call, device, phase) for phase in PASSES), []
    for name, needed, times, note in options:
        if needed <= capacity:
            found.append(Way(name, needed, ideal, *times(), note))
        else:
            short = f"does not fit: needs {human(needed, 'B')} of {human(capacity, 'B')}"
            found.append(Way(name, needed, ideal, note=short))
    return sorted(found, key=lambda way: (way.seconds, way.memory))


def flat(call: Call, device: Device, links: Links, trouble: Trouble) -> Option:
    """One ring through all ranks."""
    slots = _slots(call, call.world)
    made = replace(call, two_level=False, slots=slots)
    note = "" if slots == call.slots else f"{slots} slots, which it needs"
    return Option("flat ring", sum(memory(made).values()), partial(_of_ring, made, device, links, trouble), note)


def _slots(call: Call, ranks: int) -> int:
    """The call's, or what another ring of so many ranks needs."""
    return max(call.slots, LEAST_SLOTS) if ranks > LEAST_SLOTS else call.slots


def two_level(call: Call, device: Device, links: Links, trouble: Trouble) -> Option:
    """A ring of rings."""
    made = replace(call, two_level=True)
    return Option("two-level ring", sum(memory(made).values()), partial(_of_ring, made, device, links, trouble))


def _of_ring(call: Call, device: Device, links: Links, trouble: Trouble) -> Times:
    return _of_passes(predicted(call, device, links, trouble))


def _of_passes(passes: Sequence[Pass]) -> Times:
    forward, backward = passes
    return Times(forward.seconds, backward.seconds, forward.waited + backward.waited)


def gathered(call: Call, device: Device, links: Links, trouble: Trouble) -> Option:
    """All-gather of K and V, then one launch; backward again, then a reduce-scatter of dK and dV in fp32."""
    note = f"every rank holds K and V of all {call.seqlen:,} tokens"
    times = partial(_of_gather, call, device, links, trouble)
    return Option("all-gather of K/V", of_all_gather(problem_of(call)), times, note)


def _of_gather(call: Call, device: Device, links: Links, trouble: Trouble) -> Times:
    """A ring of P ranks moves P - 1 shards past every rank; over several nodes the slowest edge of that ring counts.

    All wait for the rank whose launch takes longest.
    """
    kv, size = 2 * call.batch * call.tokens * call.kv_heads * call.head_dim, DTYPES[call.dtype].itemsize
    link = links.inside if call.nodes == 1 else _rail(call, links)
    there, back = ((call.world - 1) * link.seconds(kv * width) for width in (size, FP32))
    # equal shares of the whole plane, in one launch
    forward, backward = (ideal_seconds(call, device, phase) * trouble.last(call.world) for phase in PASSES)
    return Times(forward + there, backward + there + back, 2 * there + back)


def _rail(call: Call, links: Links) -> Link:
    """Per rank of a gather over nodes: every rank's NIC brings its part of the other nodes' shards, NVLink the rest."""
    far = (call.world - call.per_node) / call.per_node / max(call.world - 1, 1)
    near = 1.0 if call.per_node > 1 else 0.0
    seconds = max(far / links.between.rate, near / links.inside.rate)
    return Link(1 / seconds, (links.inside if near else links.between).latency)


def exchanged(call: Call, device: Device, links: Links, trouble: Trouble) -> list[Option]:
    """Ulysses over every number of ranks that divides the key heads, and a ring of such groups for the rest."""
    degrees = [d for d in range(2, call.kv_heads + 1) if call.kv_heads % d == 0 and call.world % d == 0]
    return [_ulysses(call, degree, device, links, trouble) for degree in degrees]


def _ulysses(call: Call, degree: int, device: Device, links: Links, trouble: Trouble) -> Option:
    """Neighbours exchange heads; over nodes where a group is more than a part of one."""
    ranks, inside = call.world // degree, call.per_node % degree == 0
    group = replace(
        call, tokens=call.tokens * degree, world=ranks, nodes=call.nodes if inside else ranks,
        heads=call.heads // degree, kv_heads=call.kv_heads // degree, chunks=1, slots=_slots(call, ranks),
    )  # fmt: skip
    link = links.inside if inside else links.between
    exchange = _exchange(call, degree, link)
    if ranks == 1:
        name, times = "Ulysses", partial(_of_whole, group, exchange, device, trouble.last(call.world))
    else:
        slow: dict[int, float] = {}
        for rank, factor in trouble.slow.items():
            slow[rank // degree] = max(factor, slow.get(rank // degree, 1.0))
        name = f"Ulysses {degree}{MIXTURE}ring {ranks}"
        times = partial(_of_groups, group, exchange, device, links, replace(trouble, slow=slow))
    needed = of_ulysses(problem_of(call)) + slots_of(problem_of(group), form_of(group))
    where = "" if inside else ", over nodes"
    return Option(name, needed, times, f"{degree} ranks exchange heads{where}")


def _exchange(call: Call, degree: int, link: Link) -> float:
    """Seconds of the four all-to-alls of a forward (q, k, v, out); a backward has twice as many."""
    row = call.batch * call.tokens * call.head_dim * DTYPES[call.dtype].itemsize
    tensors = 2 * call.heads + 2 * call.kv_heads
    return (degree - 1) * link.latency + row * tensors * (degree - 1) / degree / link.rate


def _of_whole(group: Call, exchange: float, device: Device, slowest: float) -> Times:
    """Every rank has all tokens of its heads."""
    area = whole(group.seqlen, causal=group.mask.causal)
    forward, backward = (
        slowest * sum(device.launch_seconds(Launch(one, 0, area), group.form) for one in what)
        for what in ((FOLD,), (DQ, DKDV))
    )
    return Times(forward + exchange, backward + 2 * exchange, 3 * exchange)


def _of_groups(group: Call, exchange: float, device: Device, links: Links, trouble: Trouble) -> Times:
    """As many rings run side by side as a group has ranks.

    One stands for all: at each of its places the slowest of the neighbours there.
    """
    ring = _of_ring(group, device, links, trouble)
    return Times(ring.forward + exchange, ring.backward + 2 * exchange, ring.exposed + 3 * exchange)
