"""Questions about a ring: how many tokens reach 90% of ideal, what a slow GPU costs, and a map over tokens and GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ..common.flags import size_text
from .inputs import PredictionInputs
from .predicted_call import PredictedCall
from .ring_time import ideal_seconds, predict_passes
from .speed import Perturbation

ENOUGH_IDEAL = 0.9  # share of ideal
MIN_TOKENS_PER_GPU, MAX_TOKENS_PER_GPU = 256, 1 << 22  # range of tokens per GPU to search
OCTAVE = 8  # lengths per octave: the answer is exact within 9%


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
