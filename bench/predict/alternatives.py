"""Alternative methods for the same attention: our rings, a baseline ring, all-gather, Ulysses and meshes.

Also questions about a ring: how many tokens reach 90% of ideal, what a slow GPU costs, and a map over tokens and GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...ring.ulysses import can_split_heads
from ..common.flags import human_count, size_text
from ..common.memory_table import ALL_GATHER, BASELINE, FP32, candidate_bytes, mesh_bytes, mesh_name
from .baseline_ring import HOST_ATTENTION, HOST_COLLECTIVE, baseline_passes
from .inputs import PredictionInputs
from .links import ClusterLinks, LinkSpeed
from .predicted_call import FLAT, PredictedCall
from .ring_time import Pass, ideal_seconds, predict_passes
from .speed import Perturbation

MIN_RING_SLOTS = 2  # for a ring of more than two ranks
REORDER_PASSES = 2  # one read and one write of a tensor to bring it into the order that a collective or a kernel takes
ENOUGH_IDEAL = 0.9  # share of ideal
MIN_TOKENS_PER_GPU, MAX_TOKENS_PER_GPU = 256, 1 << 22  # range of tokens per GPU to search
OCTAVE = 8  # lengths per octave: the answer is exact within 9%
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
    links, spans_nodes = inputs.links.spread(inputs.links.count_nics(call.per_node)), 1 < call.nodes < call.world
    for name, needed, passes, note in alternative_options(call, inputs):
        if needed <= capacity:
            # in a flat ring over nodes, each node sends to the next node with one GPU
            spread = tuple(passes(links=links)) if spans_nodes and name in (FLAT, BASELINE) else ()
            results.append(Alternative(name, needed, tuple(passes()), note, spread))
        else:
            note = f"does not fit: needs {human_count(needed, 'B')}, the GPU has {human_count(capacity, 'B')}"
            results.append(Alternative(name, needed, note=note))
    return sorted(results, key=lambda way: (way.seconds, way.memory))


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


# questions about a ring


def tokens_needed(call: PredictedCall, inputs: PredictionInputs) -> int | None:
    """Return the tokens per GPU from which a plain ring reaches 90% of ideal; None if even 4m tokens do not."""
    count = OCTAVE * int(math.log2(MAX_TOKENS_PER_GPU / MIN_TOKENS_PER_GPU))
    lengths = np.array([2.0 * round(MIN_TOKENS_PER_GPU * 2 ** (step / OCTAVE) / 2) for step in range(count + 1)])
    enough = percent_of_ideal(call, inputs, lengths) >= 100 * ENOUGH_IDEAL
    if not enough[-1]:
        return None
    return int(lengths[0] if enough.all() else lengths[int(np.flatnonzero(~enough)[-1]) + 1])


def percent_of_ideal(call: PredictedCall, inputs: PredictionInputs, tokens: Any) -> Any:
    """Return the percent of ideal of a plain ring for each number of tokens per rank in the array ``tokens``."""
    passes = predict_passes(call, inputs.speed, inputs.links, phases=inputs.phases, tokens=tokens)
    ideal = sum(ideal_seconds(call, inputs.speed, phase, tokens) for phase in inputs.phases)
    return 100 * ideal / sum(item.seconds for item in passes)


def straggler_seconds(call: PredictedCall, inputs: PredictionInputs) -> tuple[float, float, float]:
    """Return mean seconds of all passes without slow GPUs; with them and equal shards; and with `Layout.balanced`."""
    slow = inputs.perturbation

    def step(variant: PredictedCall, perturbation: Perturbation) -> float:
        passes = predict_passes(variant, inputs.speed, inputs.links, perturbation, phases=inputs.phases)
        return sum(float(np.mean(each.seconds)) for each in passes)

    speeds = tuple(float(Fraction(1) / Fraction(slow.slow.get(rank, 1.0))) for rank in range(call.world))
    balanced = replace(call, layout="balanced", speeds=speeds)
    return step(call, Perturbation(jitter=slow.jitter)), step(call, slow), step(balanced, slow)


def check_memory(call: PredictedCall, capacity: float, *, backward: bool = True) -> None:
    """Raise ValueError if the call needs more than ``capacity`` bytes per GPU, naming a number of tokens that fits."""
    needed = sum(call.memory(backward=backward).values())
    if needed > capacity:
        raise ValueError(
            f"{call.tokens:,} tokens per GPU need {needed / 1e9:.1f} GB for this attention alone, but the GPU has "
            f"{capacity / 1e9:.3g} GB. At most {int(call.tokens * capacity / needed):,} tokens fit."
        )


def sweep_percents(
    call: PredictedCall,
    inputs: PredictionInputs,
    tokens: Sequence[int],
    gpus: Sequence[int],
    capacity: float = math.inf,
) -> dict[int, dict[int, float | None]]:
    """Return the percent of ideal by number of GPUs and tokens per GPU; None where the call does not fit into memory.

    Raises:
        ValueError: A number of GPUs makes no whole nodes, the call is not plain, or nothing fits into memory.
    """
    for world in gpus:
        if world > call.per_node and world % call.per_node:
            raise ValueError(f"--sweep has {world} GPUs: use a multiple of {call.per_node}, the GPUs per node")
    if not replace(call, tokens=math.gcd(*tokens)).is_plain:
        raise ValueError(
            "--sweep supports full and causal masks, and contiguous, striped or zigzag shards (zigzag: even length): "
            f"got {call.layout}, {min(tokens)} tokens"
        )
    percents: dict[int, dict[int, float | None]] = {}

    def fits(variant: PredictedCall) -> bool:
        return sum(variant.memory(backward=inputs.has_backward).values()) <= capacity

    for world in gpus:
        ring = replace(call, world=world, nodes=max(1, world // call.per_node))
        fitting = [length for length in tokens if fits(replace(ring, tokens=length))]
        percents[world] = dict.fromkeys(tokens)
        if fitting:
            values = percent_of_ideal(ring, inputs, np.array(fitting, float))
            percents[world] |= dict(zip(fitting, map(float, values), strict=True))
    if all(value is None for column in percents.values() for value in column.values()):
        check_memory(replace(call, tokens=min(tokens)), capacity, backward=inputs.has_backward)
    return percents


def draw_map(percents: dict[int, dict[int, float | None]], title: str, target: Path) -> None:
    """Draw ``percents[GPUs][tokens per GPU]`` as a heat map to a PNG or SVG file; None leaves a cell empty."""
    from matplotlib import colormaps  # only needed here
    from matplotlib.figure import Figure

    from ..common.theme import LIGHT, use_theme, write_figure

    tokens = [*next(iter(percents.values()))]
    columns = [[math.nan if value is None else value for value in column.values()] for column in percents.values()]
    grid = [*zip(*columns, strict=True)]

    with use_theme():
        figure = Figure(figsize=(max(6.0, 1.6 + 0.62 * len(percents)), 2.0 + 0.42 * len(tokens)), layout="constrained")
        axes = figure.subplots()
        axes.set_facecolor(LIGHT.track)  # colour of empty cells
        image = axes.pcolormesh(grid, cmap=colormaps["viridis"], vmin=0, vmax=100)
        middles = [[0.5 + place for place in range(count)] for count in (len(percents), len(tokens))]
        axes.set_xticks(middles[0], [size_text(world) for world in percents])
        axes.set_yticks(middles[1], [size_text(length) for length in tokens])
        axes.set_xlabel("GPUs")
        axes.set_ylabel("tokens per GPU")
        axes.set_title(title, fontsize=9, loc="left")
        for row, line in enumerate(grid):
            for column, value in enumerate(line):
                # text on viridis, or a dash on an empty cell
                color = LIGHT.ink if math.isnan(value) else "white" if value <= 60 else "black"
                label = "-" if math.isnan(value) else f"{value:.0f}"
                axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", color=color, fontsize=8)
        if min(len(tokens), len(percents)) > 1:
            axes.contour(*middles, grid, levels=[90], colors="red", linewidths=1.2)
        figure.colorbar(image, label="percent of ideal (one GPU's time / number of GPUs); red: 90%")
        write_figure(figure, target, dpi=150)
