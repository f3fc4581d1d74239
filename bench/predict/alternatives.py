"""Alternative methods for the same attention: our rings, a baseline ring, all-gather, Ulysses and meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...ring.ulysses import can_split_heads
from ..common.flags import human_count
from ..common.memory_table import ALL_GATHER, BASELINE, FP32, candidate_bytes, mesh_bytes, mesh_name
from .baseline_ring import HOST_ATTENTION, HOST_COLLECTIVE, baseline_passes
from .inputs import PredictionInputs
from .links import ClusterLinks, LinkSpeed
from .predicted_call import FLAT, PredictedCall
from .ring_time import Pass, ideal_seconds, predict_passes

MIN_RING_SLOTS = 2  # for a ring of more than two ranks
REORDER_PASSES = 2  # one read and one write of a tensor to bring it into the order that a collective or a kernel takes
AlternativeOption = tuple[str, int, Callable[..., Sequence[Pass]], str]
"""A method before its prediction: name, bytes per rank, function that predicts the passes, and note.

A ring's function accepts other ``links``.
"""


@dataclass(frozen=True)
class Alternative:
    """One method for the same attention; it has no passes if it does not fit into memory."""

    name: str
    memory: int
    """Bytes per rank."""
    passes: tuple[Pass, ...] = ()
    note: str = ""
    multi_nic_passes: tuple[Pass, ...] = ()
    """For a ring with one transfer between nodes: the passes if this transfer uses all NICs of a node."""

    @property
    def seconds(self) -> float:
        """Mean time of all passes; infinite if the method does not fit."""
        return sum(float(np.mean(item.seconds)) for item in self.passes) if self.passes else math.inf


def predict_alternatives(
    call: PredictedCall, inputs: PredictionInputs, *, capacity: float = math.inf
) -> list[Alternative]:
    """Return all methods, fastest first; methods that need more than ``capacity`` bytes come last, without passes."""
    results = []
    links = inputs.links.spread(nics_per_node(call, inputs))
    for name, needed, passes, note in alternative_options(call, inputs):
        if needed <= capacity:
            spread = tuple(passes(links=links)) if is_flat_across_nodes(call, name) else ()
            results.append(Alternative(name, needed, tuple(passes()), note, spread))
        else:
            note = f"does not fit: needs {human_count(needed, 'B')}, the GPU has {human_count(capacity, 'B')}"
            results.append(Alternative(name, needed, note=note))
    return sorted(results, key=lambda way: (way.seconds, way.memory))


def nics_per_node(call: PredictedCall, inputs: PredictionInputs) -> int:
    """Return the NICs of a node; the default is one per GPU."""
    return call.per_node if inputs.links.nics is None else int(inputs.links.nics)


def is_flat_across_nodes(call: PredictedCall, name: str) -> bool:
    """Return True if the method is a ring in which each node sends to the next node with one GPU."""
    return call.nodes > 1 and call.per_node > 1 and name in (FLAT, BASELINE)


def alternative_options(call: PredictedCall, inputs: PredictionInputs) -> Iterator[AlternativeOption]:
    """Yield our rings, and the other methods if the call is plain."""
    names = ("speed", "links", "perturbation", "phases")
    arguments: dict[str, Any] = {name: getattr(inputs, name) for name in names}
    rings = [call]
    if call.is_two_level:
        rings.append(replace(call, two_level=False, slots=max(call.slots, MIN_RING_SLOTS)))
    for ring in rings:
        needed = sum(ring.memory(backward=inputs.has_backward).values())
        yield ring.name, needed, partial(predict_passes, ring, **arguments), ""
    if not call.is_plain or call.world == 1:
        return
    config = call.config
    yield (
        BASELINE,
        candidate_bytes(BASELINE, config, backward=inputs.has_backward),
        partial(baseline_passes, call, **arguments),
        "two buffers, merged by torch",
    )
    note = f"every rank holds K and V of all {call.seqlen:,} tokens"
    yield (
        "all-gather of K/V",
        candidate_bytes(ALL_GATHER, config, backward=inputs.has_backward),
        partial(all_gather_passes, call, inputs),
        note,
    )
    # Ulysses over every degree that `ring_attention` takes, and a ring over the groups
    for degree in range(2, call.heads + 1):
        if call.world % degree == 0 and can_split_heads(call.heads, call.kv_heads, degree):
            name, group = mesh_name(degree, call.world), group_call(call, degree)
            needed = mesh_bytes(config, degree, group.ring_form, backward=inputs.has_backward)
            where = "" if call.per_node % degree == 0 else ", over nodes"
            repeated = f", with {degree // call.kv_heads} copies of each key head" if degree > call.kv_heads else ""
            note = f"{degree} ranks exchange heads{repeated}{where}"
            yield name, needed, partial(ulysses_passes, call, degree, inputs), note


def all_gather_passes(call: PredictedCall, inputs: PredictionInputs) -> list[Pass]:
    """Predict a method that gathers K and V on every rank and computes in one launch per pass.

    The backward gathers again, and reduce-scatters fp32 dK and dV. The all-gather is a ring of P ranks that moves P - 1
    shards past every rank, at the speed of its slowest edge. All ranks wait for the rank whose launch takes longest.
    """
    kv = 2 * call.batch * call.tokens * call.kv_heads * call.head_dim
    link = _gather_link(call, inputs.links) if call.nodes > 1 else inputs.links.inside.collective_link

    def collective_seconds(width: int) -> float:
        nbytes = kv * width
        # One collective for K and one for V. Each has a latency per rank that it passes.
        along = (call.world - 1) * (2 * link.latency + nbytes / link.rate)
        arranged = inputs.speed.memory_seconds(REORDER_PASSES * nbytes * call.world)
        return max(HOST_COLLECTIVE + along + float(arranged), 2 * HOST_COLLECTIVE + HOST_ATTENTION)

    gather, scatter = collective_seconds(call.itemsize), collective_seconds(FP32)
    exposed = {"forward": gather, "backward": gather + scatter}
    passes = []
    for phase in inputs.phases:
        # Every rank computes an equal share of the plane in one launch.
        computed = float(ideal_seconds(call, inputs.speed, phase)) * inputs.perturbation.slowest_factor(call.world)
        passes.append(Pass(phase, computed + exposed[phase], exposed[phase], exposed[phase]))
    return passes


def _gather_link(call: PredictedCall, links: ClusterLinks) -> LinkSpeed:
    """Return the effective link of a rank in an all-gather over nodes, in which all NICs of a node receive."""
    inside, between = links.inside.collective_link, links.far(call.per_node).collective_link
    far_share = (call.world - call.per_node) / call.per_node / max(call.world - 1, 1)
    inside_share = 1.0 if call.per_node > 1 else 0.0
    seconds = max(far_share / between.rate, inside_share / inside.rate)
    return LinkSpeed(1 / seconds, (inside if inside_share else between).latency)


def group_call(call: PredictedCall, degree: int) -> PredictedCall:
    """Return the call of one ring over groups of ``degree`` ranks: all tokens of a group, 1 / degree of the heads."""
    ranks, inside = call.world // degree, call.per_node % degree == 0
    return replace(
        call, tokens=call.tokens * degree, world=ranks, nodes=call.nodes if inside else ranks,
        heads=call.heads // degree, kv_heads=max(1, call.kv_heads // degree), chunks=1,
        slots=max(call.slots, MIN_RING_SLOTS),
    )  # fmt: skip


def ulysses_passes(
    call: PredictedCall, degree: int, inputs: PredictionInputs, ring: Callable[..., tuple[Pass, ...]] = predict_passes
) -> list[Pass]:
    """Predict Ulysses over groups of ``degree`` ranks and rings between the groups; the all-to-alls are exposed.

    ``ring`` predicts the passes of one ring. A group's ranks are in ``degree`` rings, which run at the same time. One
    of them is simulated, with the slowest GPU of each group. With a single group, the ring is one launch.
    """
    group, exchange = group_call(call, degree), exchange_seconds(call, degree, inputs)
    if group.world == 1:
        slowest = inputs.perturbation.slowest_factor(call.world)
        passes = [Pass(phase, slowest * float(ideal_seconds(group, inputs.speed, phase))) for phase in inputs.phases]
    else:
        slow, links = inputs.perturbation.group_ranks(degree), inputs.links.beside(degree)
        passes = [*ring(group, inputs.speed, links, slow, phases=inputs.phases)]
    for number, predicted_pass in enumerate(passes):
        worst = np.maximum(predicted_pass.worst, exchange)[()]
        seconds, exposed = predicted_pass.seconds + exchange, predicted_pass.exposed + exchange
        passes[number] = Pass(predicted_pass.phase, seconds, exposed, worst)
    return passes


def exchange_seconds(call: PredictedCall, degree: int, inputs: PredictionInputs) -> float:
    """Return the seconds of the two all-to-alls of a pass.

    The first moves q, k and v (in the backward dout), the second out (in the backward dq, dk and dv). Each tensor is
    rearranged before and after. If there are fewer key/value heads than ranks, each head is sent to several ranks.
    """
    inside = call.per_node % degree == 0
    link = (inputs.links.inside if inside else inputs.links.far(call.per_node)).collective_link
    total = 0.0
    for heads in (call.heads + 2 * max(call.kv_heads, degree), call.heads):
        nbytes = call.batch * call.tokens * call.head_dim * call.itemsize * heads
        transfer = link.latency + nbytes * (degree - 1) / degree / link.rate
        total += max(HOST_COLLECTIVE, transfer + float(inputs.speed.memory_seconds(2 * REORDER_PASSES * nbytes)))
    return total
