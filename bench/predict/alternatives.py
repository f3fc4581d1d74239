"""Ways to compute the same attention: our rings, a baseline ring, gathered K/V, exchanged heads, and mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..common.flags import human
from ..common.memory_table import ALL_GATHER, ULYSSES, candidate_bytes, ring_parts, ring_slots
from .baseline import HOST_ATTENTION, HOST_COLLECTIVE, baseline
from .call import Call
from .inputs import Inputs
from .links import Link, Links
from .ring import Pass, ideal_seconds, predicted
from .speed import DKDV, DQ, FOLD, whole

FP32 = 4
LEAST_SLOTS = 2  # of a ring of more than two ranks
ARRANGE = 2  # a tensor's bytes are read and written once to bring it into the order that a collective or a kernel takes


@dataclass(frozen=True)
class Way:
    """One way to compute the same attention; without passes where it does not fit."""

    name: str
    memory: int
    """Bytes of a rank."""
    passes: tuple[Pass, ...] = ()
    note: str = ""

    @property
    def seconds(self) -> float:
        """Of all passes, the mean of all draws; endless where it does not fit."""
        return sum(float(np.mean(one.seconds)) for one in self.passes) if self.passes else math.inf


class Option(NamedTuple):
    """A way before it is looked at, which takes time only where it fits."""

    name: str
    memory: int
    passes: Callable[[], Sequence[Pass]]
    note: str = ""


def ways(call: Call, inputs: Inputs, *, capacity: float = math.inf) -> list[Way]:
    """All that there are, with the same slow ranks and varying launches, the fastest first.

    What needs more than ``capacity``, the bytes of a GPU, comes last, with a note in place of times.
    """
    found = []
    for name, needed, passes, note in options(call, inputs):
        if needed <= capacity:
            found.append(Way(name, needed, tuple(passes()), note))
        else:
            found.append(Way(name, needed, note=f"does not fit: needs {human(needed, 'B')} of {human(capacity, 'B')}"))
    return sorted(found, key=lambda way: (way.seconds, way.memory))


def options(call: Call, inputs: Inputs) -> list[Option]:
    """Our rings; of plain calls the others too."""
    flat = replace(call, two_level=False, slots=_slots(call, call.world))
    two_level = replace(call, two_level=True)
    rings = [flat, two_level] if two_level.is_two_level else [flat]
    found = [_ring(one, inputs, _note(one, call)) for one in rings]
    if not call.is_plain or call.world == 1:
        return found
    return [*found, _baseline(call, inputs), _gathered(call, inputs), *_exchanged(call, inputs)]


def _slots(call: Call, ranks: int) -> int:
    """The call's, or what another ring of so many ranks needs."""
    return max(call.slots, LEAST_SLOTS) if ranks > LEAST_SLOTS else call.slots


def _note(made: Call, call: Call) -> str:
    return "" if made.slots == call.slots else f"{made.slots} slots, which it needs"


def _ring(call: Call, inputs: Inputs, note: str) -> Option:
    name = "two-level ring" if call.is_two_level else "flat ring"
    return Option(name, sum(ring_parts(call.config, call.ring_form).values()), partial(_of_ring, call, inputs), note)


def _of_ring(call: Call, inputs: Inputs) -> tuple[Pass, ...]:
    return predicted(call, inputs.speed, inputs.links, inputs.perturbation, phases=inputs.phases)


def _baseline(call: Call, inputs: Inputs) -> Option:
    passes = partial(baseline, call, inputs.speed, inputs.links, inputs.perturbation, phases=inputs.phases)
    return Option(
        "baseline ring", candidate_bytes("baseline ring", call.config), passes, "two buffers, merged by torch"
    )


def _gathered(call: Call, inputs: Inputs) -> Option:
    note = f"every rank holds K and V of all {call.seqlen:,} tokens"
    return Option("all-gather of K/V", candidate_bytes(ALL_GATHER, call.config), partial(gathered, call, inputs), note)


def gathered(call: Call, inputs: Inputs) -> list[Pass]:
    """All-gather of K and V, then one launch; backward again, then a reduce-scatter of dK and dV in fp32.

    A ring of P ranks moves P - 1 shards past every rank; over several nodes the slowest edge of that ring counts. All
    wait for the rank whose launch takes longest.
    """
    kv = 2 * call.batch * call.tokens * call.kv_heads * call.head_dim
    link = _rail(call, inputs.links) if call.nodes > 1 else inputs.links.inside.of_collectives

    def moved(width: int) -> float:
        nbytes = kv * width
        # one collective for K, one for V; each has a latency for every rank that it goes past
        along = (call.world - 1) * (2 * link.latency + nbytes / link.rate)
        arranged = inputs.speed.moved(ARRANGE * nbytes * call.world)
        return max(HOST_COLLECTIVE + along + float(arranged), 2 * HOST_COLLECTIVE + HOST_ATTENTION)

    there, back = moved(call.form.dtype.itemsize), moved(FP32)
    exposed = {"forward": there, "backward": there + back}
    found = []
    for phase in inputs.phases:
        # equal shares of the whole plane, in one launch
        computed = float(ideal_seconds(call, inputs.speed, phase)) * inputs.perturbation.slowest(call.world)
        found.append(Pass(phase, computed + exposed[phase], exposed[phase], exposed[phase]))
    return found


def _rail(call: Call, links: Links) -> Link:
    """Per rank of a gather over nodes: every rank's NIC brings its part of the other nodes' shards, NVLink the rest."""
    inside, between = links.inside.of_collectives, links.far(call.per_node).of_collectives
    far = (call.world - call.per_node) / call.per_node / max(call.world - 1, 1)
    near = 1.0 if call.per_node > 1 else 0.0
    seconds = max(far / between.rate, near / inside.rate)
    return Link(1 / seconds, (inside if near else between).latency)


def _exchanged(call: Call, inputs: Inputs) -> list[Option]:
    """Ulysses over every number of ranks that divides the key heads, and a ring of such groups for the rest."""
    degrees = [d for d in range(2, call.kv_heads + 1) if call.kv_heads % d == 0 and call.world % d == 0]
    return [_ulysses(call, degree, inputs) for degree in degrees]


def _ulysses(call: Call, degree: int, inputs: Inputs) -> Option:
    group = grouped(call, degree)
    name = "Ulysses" if group.world == 1 else f"Ulysses {degree} x ring {group.world}"
    needed = candidate_bytes(ULYSSES, call.config) + ring_slots(group.config, group.ring_form)
    where = "" if call.per_node % degree == 0 else ", over nodes"
    return Option(name, needed, partial(exchanged, call, degree, inputs), f"{degree} ranks exchange heads{where}")


def grouped(call: Call, degree: int) -> Call:
    """The ring of groups of neighbours, each a part of the heads of all tokens of its group."""
    ranks, inside = call.world // degree, call.per_node % degree == 0
    return replace(
        call, tokens=call.tokens * degree, world=ranks, nodes=call.nodes if inside else ranks,
        heads=call.heads // degree, kv_heads=call.kv_heads // degree, chunks=1, slots=_slots(call, ranks),
    )  # fmt: skip


def exchanged(call: Call, degree: int, inputs: Inputs, ring: Callable[..., tuple[Pass, ...]] = predicted) -> list[Pass]:
    """All-to-alls that are exposed around a ring of groups; as many rings run side by side as a group has ranks.

    One stands for all: at each of its places the slowest of the neighbours there.
    """
    group, exchange = grouped(call, degree), exchange_seconds(call, degree, inputs)
    if group.world == 1:
        passes = _alone(group, inputs, inputs.perturbation.slowest(call.world))
    else:
        slow, links = inputs.perturbation.grouped(degree), inputs.links.beside(degree)
        passes = ring(group, inputs.speed, links, slow, phases=inputs.phases)
    found = []
    for one in passes:
        spent = exchange if one.phase == "forward" else 2 * exchange
        worst = np.maximum(one.worst, spent)[()]
        found.append(Pass(one.phase, one.seconds + spent, one.exposed + spent, worst))
    return found


def exchange_seconds(call: Call, degree: int, inputs: Inputs) -> float:
    """Of the four all-to-alls of a forward (q, k, v, out), each arranged before and after; a backward has twice."""
    inside = call.per_node % degree == 0
    link = (inputs.links.inside if inside else inputs.links.far(call.per_node)).of_collectives
    total = 0.0
    for heads in (call.heads, call.kv_heads, call.kv_heads, call.heads):
        nbytes = call.batch * call.tokens * call.head_dim * call.form.dtype.itemsize * heads
        moved = (degree - 1) * link.latency + nbytes * (degree - 1) / degree / link.rate
        total += max(HOST_COLLECTIVE, moved + float(inputs.speed.moved(2 * ARRANGE * nbytes)))
    return total


def _alone(group: Call, inputs: Inputs, slowest: float) -> tuple[Pass, ...]:
    """Every rank has all tokens of its heads."""
    area = whole(group.seqlen, causal=group.mask.causal)
    kernels = {"forward": (FOLD,), "backward": (DQ, DKDV)}
    return tuple(
        Pass(phase, slowest * float(sum(inputs.speed.seconds(one, area, group.form, hop=0) for one in kernels[phase])),
             0.0, 0.0)
        for phase in inputs.phases
    )  # fmt: skip
