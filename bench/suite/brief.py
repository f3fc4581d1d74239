"""What the suite prints last of each case: the numbers that decide it, a line each, and where a way around wins."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from ..kernels import speed
from ..predict import turns
from ..ring.candidates import OURS
from ..shapes import binary
from . import comm_cases, device_cases, ring_cases, tune_cases, worlds
from .cases import Number, Run
from .workers import Outcome

WIDTH = 110  # of a sentence
DECIDING: dict[Run, tuple[str, ...]] = {
    device_cases.launches: ("host time of a launch", "first launch, compilation included"),
    device_cases.ceilings: ("matrix product", "copy, bytes read and written"),
    worlds.local_world: (f"{worlds.FORWARD}{worlds.OVER}", f"{worlds.STEP}{worlds.OVER}"),
    worlds.nccl_to_itself: ("sent to itself",),
    turns.predicted_local_world: ("prediction off",),
    comm_cases.links: ("moved per direction", "compute slowed"),
    comm_cases.overlap: ("exposed communication", "overlap"),
    comm_cases.host_time: ("host time of a hop",),
    tune_cases.tuned: ("default over best tile",),
    ring_cases.whole_ring: ("of ideal",),
    ring_cases.memory: (ring_cases.GROWTH,),
}
"""Names of the numbers that decide a case; of others the first without a limit does."""
UNITS = {"bytes": "bytes", "seqlen": "tokens"}  # of labels that are sizes
SAID_BY = {"layout": "by", "edge": "way"}  # a label that another one says as well
PLAIN = ("by", "layout", "mask", "way", "phase", "kernel")  # labels whose values say what they are


def lines(outcome: Outcome) -> list[str]:
    """A line per deciding number of a case: its value, or the lowest and the highest."""
    free = [number.name for number in outcome.numbers if number.limit is None and number.value is not None]
    found = []
    for name in DECIDING.get(outcome.case.run, free[:1]):
        told = [number for number in outcome.numbers if number.name == name and number.value is not None]
        # where others did the same, ours decides
        mine = [number for number in told if str(number.labels.get("by")).startswith(OURS)] or told
        if mine:
            found.append(line([number for number in mine if number.unit == mine[0].unit]))
    return found


def line(numbers: Sequence[Number]) -> str:
    """``overlap: 18.6 to 91.2 % (prefetch 0; prefetch 2)``: what the two differ in is told; of sizes the largest."""
    sizes = [(name, size) for number in numbers for name, size in _sizes(number)]
    largest = max(sizes, key=lambda told: told[1], default=None)
    told = [number for number in numbers if largest is None or largest in _sizes(number)]
    low, high = (pick(told, key=lambda number: number.value or 0.0) for pick in (min, max))
    name = low.name if largest is None else f"{low.name}, {binary(largest[1])} {UNITS[largest[0]]}"
    if low.value == high.value:
        return f"{name}: {low.value:.3g} {low.unit}"
    differ = [one for one in low.labels if high.labels.get(one) != low.labels[one]]
    differ = [one for one in differ if SAID_BY.get(one) not in differ]
    ends = [", ".join(_label(one, number.labels.get(one)) for one in differ) for number in (low, high)]
    return f"{name}: {low.value:.3g} to {high.value:.3g} {low.unit} ({'; '.join(ends)})"


def _sizes(number: Number) -> list[tuple[str, int]]:
    return [(name, size) for name in UNITS if isinstance(size := number.labels.get(name), int)]


def _label(name: str, value: object) -> str:
    return str(value) if name in PLAIN else f"{name} {value}"


def sentences(outcome: Outcome) -> list[str]:
    """Where all-gather or Ulysses is faster than a ring of a case, and where not."""
    told = dict.fromkeys(number.note for number in outcome.numbers if number.name == ring_cases.AROUND and number.note)
    return [fill(f"{outcome.case.name}: {note}", WIDTH) for note in told]


def longest(outcomes: Sequence[Outcome]) -> list[Number]:
    """The numbers of cases; of those that time kernels at several lengths, of the longest alone."""
    kept: list[Number] = []
    for outcome in outcomes:
        lengths = [size for number in outcome.numbers for name, size in _sizes(number) if name == "seqlen"]
        most = max(lengths, default=None) if outcome.case.run is speed.speed else None
        kept += [number for number in outcome.numbers if most in (None, number.labels.get("seqlen", most))]
    return kept
