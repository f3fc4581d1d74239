"""What people ask of a prediction: how many tokens are enough, what a slow GPU costs, and the map of both axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ..common.flags import binary
from .call import Call
from .inputs import Inputs
from .ring import ideal_seconds, predicted
from .speed import Perturbation

ENOUGH = 0.9  # of ideal
LEAST, MOST = 256, 1 << 22  # tokens per GPU between which the answer is looked for
OCTAVE = 8  # lengths that are predicted: the answer is found within 9%


def tokens_needed(call: Call, inputs: Inputs) -> int | None:
    """Tokens per GPU from which on a plain ring's passes reach 90% of ideal; None: more than ``MOST``."""
    count = OCTAVE * int(math.log2(MOST / LEAST))
    lengths = np.array([2.0 * round(LEAST * 2 ** (step / OCTAVE) / 2) for step in range(count + 1)])
    enough = percent_of_ideal(call, inputs, lengths) >= 100 * ENOUGH
    if not enough[-1]:
        return None
    return int(lengths[0] if enough.all() else lengths[int(np.flatnonzero(~enough)[-1]) + 1])


def percent_of_ideal(call: Call, inputs: Inputs, tokens: Any) -> Any:
    """Of a plain ring with each of many lengths."""
    passes = predicted(call, inputs.speed, inputs.links, phases=inputs.phases, tokens=tokens)
    ideal = sum(ideal_seconds(call, inputs.speed, phase, tokens) for phase in inputs.phases)
    return 100 * ideal / sum(one.seconds for one in passes)


def straggling(call: Call, inputs: Inputs) -> tuple[float, float, float]:
    """Seconds of all passes, the mean of all draws: no GPU slow, equal shards, and ``Layout.balanced``."""
    slow = inputs.perturbation

    def step(one: Call, perturbation: Perturbation) -> float:
        passes = predicted(one, inputs.speed, inputs.links, perturbation, phases=inputs.phases)
        return sum(float(np.mean(each.seconds)) for each in passes)

    speeds = tuple(float(Fraction(1) / Fraction(slow.slow.get(rank, 1.0))) for rank in range(call.world))
    balanced = replace(call, layout="balanced", speeds=speeds)
    return step(call, Perturbation(jitter=slow.jitter)), step(call, slow), step(balanced, slow)


def check_memory(call: Call, capacity: float, *, backward: bool = True) -> None:
    """Refuse what does not fit: ValueError with the tokens that do."""
    needed = sum(call.memory(backward=backward).values())
    if needed > capacity:
        raise ValueError(
            f"{call.tokens:,} tokens per GPU need {needed / 1e9:.1f} GB for this attention alone, the GPU has "
            f"{capacity / 1e9:.3g}: at most {int(call.tokens * capacity / needed):,} fit"
        )


def sweep(
    call: Call, inputs: Inputs, tokens: Sequence[int], gpus: Sequence[int], capacity: float = math.inf
) -> dict[int, dict[int, float | None]]:
    """Percent of ideal, ``[gpus][tokens]``; as many per node as the call has. None where a point fits no GPU.

    Raises:
        ValueError: GPUs that make no whole nodes, zigzags that are not even, or nothing that fits.
    """
    for world in gpus:
        if world > call.per_node and world % call.per_node:
            raise ValueError(f"sweep has rings of {world} GPUs: they must make whole nodes, of {call.per_node}")
    if not replace(call, tokens=math.gcd(*tokens)).is_plain:
        raise ValueError(
            f"sweep takes contiguous, zigzag (of even shards) and striped, full or causal: got {min(tokens)} tokens"
        )
    percents: dict[int, dict[int, float | None]] = {}

    def fits(one: Call) -> bool:
        return sum(one.memory(backward=inputs.backward).values()) <= capacity

    for world in gpus:
        one = replace(call, world=world, nodes=max(1, world // call.per_node))
        fitting = [each for each in tokens if fits(replace(one, tokens=each))]
        percents[world] = dict.fromkeys(tokens)
        if fitting:
            values = percent_of_ideal(one, inputs, np.array(fitting, float))
            percents[world] |= dict(zip(fitting, map(float, values), strict=True))
    if all(value is None for column in percents.values() for value in column.values()):
        check_memory(replace(call, tokens=min(tokens)), capacity, backward=inputs.backward)
    return percents


def draw(percents: dict[int, dict[int, float | None]], title: str, target: Path) -> None:
    """Write the map as a PNG or an SVG, by the file's ending."""
    from matplotlib import colormaps  # no picture, no need for it
    from matplotlib.figure import Figure

    from ..common.theme import LIGHT, themed, write_figure

    tokens = [*next(iter(percents.values()))]
    columns = [[math.nan if value is None else value for value in column.values()] for column in percents.values()]
    grid = [*zip(*columns, strict=True)]

    with themed():
        made = Figure(figsize=(max(6.0, 1.6 + 0.62 * len(percents)), 2.0 + 0.42 * len(tokens)), layout="constrained")
        axes = made.subplots()
        axes.set_facecolor(LIGHT.track)  # shows where there is no number
        image = axes.pcolormesh(grid, cmap=colormaps["viridis"], vmin=0, vmax=100)
        middles = [[0.5 + place for place in range(count)] for count in (len(percents), len(tokens))]
        axes.set_xticks(middles[0], [binary(world) for world in percents])
        axes.set_yticks(middles[1], [binary(one) for one in tokens])
        axes.set_xlabel("GPUs")
        axes.set_ylabel("tokens per GPU")
        axes.set_title(title, fontsize=9, loc="left")
        for row, line in enumerate(grid):
            for column, value in enumerate(line):
                # on viridis; a dash is on the track
                color = LIGHT.ink if math.isnan(value) else "white" if value <= 60 else "black"
                label = "-" if math.isnan(value) else f"{value:.0f}"
                axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", color=color, fontsize=8)
        if min(len(tokens), len(percents)) > 1:
            axes.contour(*middles, grid, levels=[90], colors="red", linewidths=1.2)
        made.colorbar(image, label="percent of ideal: one GPU divided by the GPUs; red: 90")
        write_figure(made, target, dpi=150)
