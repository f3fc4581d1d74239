"""Ways to compute the same attention: our rings, a baseline ring, gathered K/V, exchanged heads, and mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...ring.ulysses import heads_fit
from ..common.flags import human
from ..common.memory_table import ALL_GATHER, BASELINE, FP32, candidate_bytes, exchanged_name, mesh_bytes
from .baseline import HOST_ATTENTION, HOST_COLLECTIVE, baseline
from .call import FLAT, Call
from .inputs import Inputs
from .links import Link, Links
from .ring import Pass, ideal_seconds, predicted

LEAST_SLOTS = 2  # of a ring of more than two ranks
ARRANGE = 2  # a tensor's bytes are read and written once to bring it into the order that a collective or a kernel takes
Option = tuple[str, int, Callable[..., Sequence[Pass]], str]
"""A way before it is looked at, which takes time only where it fits: name, bytes of a rank, passes, note.

The passes of a ring take other ``links``.
"""


@dataclass(frozen=True)
class Way:
    """One way to compute the same attention; without passes where it does not fit."""

    name: str
    memory: int
    """Bytes of a rank."""
    passes: tuple[Pass, ...] = ()
    note: str = ""
    spread: tuple[Pass, ...] = ()
    """Of a ring that crosses nodes by one transfer: the passes where that goes over all NICs of a node."""

    @property
    def seconds(self) -> float:
        """Of all passes, the mean of all draws; endless where it does not fit."""
        return sum(float(np.mean(one.seconds)) for one in self.passes) if self.passes else math.inf


def ways(call: Call, inputs: Inputs, *, capacity: float = math.inf) -> list[Way]:
    """All that there are, with the same slow ranks and varying launches, the fastest first.

    What needs more than ``capacity``, the bytes of a GPU, comes last, with a note in place of times.
    """
    results = []
    links = inputs.links.spread(nics_of(call, inputs))
    for name, needed, passes, note in options(call, inputs):
        if needed <= capacity:
            spread = tuple(passes(links=links)) if crosses_flat(call, name) else ()
            results.append(Way(name, needed, tuple(passes()), note, spread))
        else:
            results.append(
                Way(name, needed, note=f"does not fit: needs {human(needed, 'B')} of {human(capacity, 'B')}")
            )
    return sorted(results, key=lambda way: (way.seconds, way.memory))


def nics_of(call: Call, inputs: Inputs) -> int:
    """Return the NICs of a node: one per GPU where nothing is said."""
    return call.per_node if inputs.links.nics is None else int(inputs.links.nics)


def crosses_flat(call: Call, name: str) -> bool:
    """Return True if a way is one ring through several nodes, of which one transfer at a time crosses."""
    return call.nodes > 1 and call.per_node > 1 and name in (FLAT, BASELINE)


def options(call: Call, inputs: Inputs) -> Iterator[Option]:
    """Our rings; of plain calls the others too."""
    given: dict[str, Any] = {
        "speed": inputs.speed,
        "links": inputs.links,
        "perturbation": inputs.perturbation,
        "phases": inputs.phases,
    }
    rings = [call]
    if call.is_two_level:
        rings.append(replace(call, two_level=False, slots=max(call.slots, LEAST_SLOTS)))
    for one in rings:
        yield one.name, sum(one.memory(backward=inputs.backward).values()), partial(predicted, one, **given), ""
    if not call.is_plain or call.world == 1:
        return
    config = call.config
    yield (
        BASELINE,
        candidate_bytes(BASELINE, config, backward=inputs.backward),
        partial(baseline, call, **given),
        "two buffers, merged by torch",
    )
    note = f"every rank holds K and V of all {call.seqlen:,} tokens"
    yield (
        "all-gather of K/V",
        candidate_bytes(ALL_GATHER, config, backward=inputs.backward),
        partial(gathered, call, inputs),
        note,
    )
    # Ulysses over every number of ranks that `ring_attention` takes, and a ring of such groups for the rest
    for degree in range(2, call.heads + 1):
        if call.world % degree == 0 and heads_fit(call.heads, call.kv_heads, degree):
            name, group = exchanged_name(degree, call.world), grouped(call, degree)
            needed = mesh_bytes(config, degree, group.ring_form, backward=inputs.backward)
            where = "" if call.per_node % degree == 0 else ", over nodes"
            repeated = f", key heads {degree // call.kv_heads} times" if degree > call.kv_heads else ""
            note = f"{degree} ranks exchange heads{repeated}{where}"
            yield name, needed, partial(exchanged, call, degree, inputs), note


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

    there, back = moved(call.itemsize), moved(FP32)
    exposed = {"forward": there, "backward": there + back}
    passes = []
    for phase in inputs.phases:
        # equal shares of the whole plane, in one launch
        computed = float(ideal_seconds(call, inputs.speed, phase)) * inputs.perturbation.slowest(call.world)
        passes.append(Pass(phase, computed + exposed[phase], exposed[phase], exposed[phase]))
    return passes


def _rail(call: Call, links: Links) -> Link:
    """Per rank of a gather over nodes: every rank's NIC brings its part of the other nodes' shards, NVLink the rest."""
    inside, between = links.inside.of_collectives, links.far(call.per_node).of_collectives
    far = (call.world - call.per_node) / call.per_node / max(call.world - 1, 1)
    near = 1.0 if call.per_node > 1 else 0.0
    seconds = max(far / between.rate, near / inside.rate)
    return Link(1 / seconds, (inside if near else between).latency)


def grouped(call: Call, degree: int) -> Call:
    """The ring of groups of neighbours, each a part of the heads of all tokens of its group."""
    ranks, inside = call.world // degree, call.per_node % degree == 0
    return replace(
        call, tokens=call.tokens * degree, world=ranks, nodes=call.nodes if inside else ranks,
        heads=call.heads // degree, kv_heads=max(1, call.kv_heads // degree), chunks=1,
        slots=max(call.slots, LEAST_SLOTS),
    )  # fmt: skip


def exchanged(call: Call, degree: int, inputs: Inputs, ring: Callable[..., tuple[Pass, ...]] = predicted) -> list[Pass]:
    """All-to-alls that are exposed around a ring of groups; as many rings run side by side as a group has ranks.

    One stands for all: at each of its places the slowest of the neighbours there. A ring of one group is one launch.
    """
    group, exchange = grouped(call, degree), exchange_seconds(call, degree, inputs)
    if group.world == 1:
        slowest = inputs.perturbation.slowest(call.world)
        passes = [Pass(phase, slowest * float(ideal_seconds(group, inputs.speed, phase))) for phase in inputs.phases]
    else:
        slow, links = inputs.perturbation.grouped(degree), inputs.links.beside(degree)
        passes = [*ring(group, inputs.speed, links, slow, phases=inputs.phases)]
    for number, one in enumerate(passes):
        worst = np.maximum(one.worst, exchange)[()]
        passes[number] = Pass(one.phase, one.seconds + exchange, one.exposed + exchange, worst)
    return passes


def exchange_seconds(call: Call, degree: int, inputs: Inputs) -> float:
    """Of the two all-to-alls of a pass, each in one group of transfers: q, k and v, then out; dout, then dq, dk and dv.

    Each tensor is arranged before and after. Fewer key heads than ranks are sent to several of them.
    """
    inside = call.per_node % degree == 0
    link = (inputs.links.inside if inside else inputs.links.far(call.per_node)).of_collectives
    total = 0.0
    for heads in (call.heads + 2 * max(call.kv_heads, degree), call.heads):
        nbytes = call.batch * call.tokens * call.head_dim * call.itemsize * heads
        moved = link.latency + nbytes * (degree - 1) / degree / link.rate
        total += max(HOST_COLLECTIVE, moved + float(inputs.speed.moved(2 * ARRANGE * nbytes)))
    return total
