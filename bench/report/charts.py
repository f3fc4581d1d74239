"""Plots of what benches measured: bandwidth by size, TFLOP/s by length, percent of ideal and memory by ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..flops import BY_SQUARE
from ..shapes import binary
from .reading import Folder
from .rows import finite, labels_of, mapping_of, mappings_of, median, percent_off, ring_runs
from .theme import LIGHT, LINES, Theme, themed

MARKERS = "osD^vP"
MOST_LINES = 12  # of a chart: more could not be told apart
MOST_NAME = 60
MOST_FILE = 120  # letters of a file's name
DPI = 150
ONE_DEVICE, ALL_THREADS = "one device", "SDPA, one process"  # candidates of `bench ring`, schemas 2 and 1
WHOLES = (ONE_DEVICE, ALL_THREADS, "one process, all cores")
MOVED, PEAK, SAME = "moved per direction", "peak memory of a rank", "tokens per rank"  # names in the suite's cases
MEGA = 1e6
Points = dict[float, float]


@dataclass
class Chart:
    """Lines over one axis; every point is a measurement."""

    title: str
    x: str
    y: str
    log_x: bool = True
    log_y: bool = False
    lines: dict[str, Points] = field(default_factory=dict)

    def add(self, name: str, x: object, y: object) -> None:
        """A point; what is no finite number is left out."""
        if finite(x) and finite(y):
            self.lines.setdefault(name[:MOST_NAME], {})[float(x)] = float(y)

    def add_one_of(self, pick: Callable[[float, float], float], name: str, x: object, y: object) -> None:
        """A point of all that are told for the same x: the lowest, or the highest."""
        if finite(x) and finite(y):
            self.add(name, x, pick(y, self.lines.get(name[:MOST_NAME], {}).get(float(x), y)))


def charts(folder: Folder) -> list[Chart]:
    """Every chart that the results have points for."""
    found = [bandwidth(folder), *rates(folder), ideal(folder), memory(folder), predictions(folder)]
    return [one for one in found if one.lines]


def bandwidth(folder: Folder) -> Chart:
    """Of every transport, the slowest edge at each size."""
    chart = Chart("Bandwidth by size: the slowest edge of each transport", "bytes of a message", "GB/s", log_y=True)
    for row in (row for one in folder.benches if one.kind == "links" for row in mappings_of(one.data.get("links"))):
        knobs = [f"{row[name]} {name}" for name in ("channels", "ctas") if row.get(name) is not None]
        chart.add_one_of(
            min,
            ", ".join([str(row.get("transport")), str(row.get("way")), *knobs]),
            row.get("nbytes"),
            row.get("busbw"),
        )
    for number in (one for one in _numbers(folder) if one.get("name") == MOVED):
        of = labels_of(number)
        chart.add_one_of(min, f"{of.get('by')}, {of.get('way')}", of.get("bytes"), number.get("value"))
    return chart


def rates(folder: Folder) -> list[Chart]:
    """TFLOP/s by length, a chart per direction, dtype, head dim and mask."""
    found: dict[str, Chart] = {}
    for number in _numbers(folder):
        labels = labels_of(number)
        length = labels.get("seqlen", labels.get("tokens", labels.get("length")))
        if number.get("unit") != "TFLOP/s" or not finite(length) or str(number.get("name")).endswith(BY_SQUARE):
            continue  # the same course counted otherwise is a column of the table, not another plot
        of = {name: value for name, value in labels.items() if name not in ("seqlen", "tokens", "length", "by")}
        title = ", ".join(
            [f"TFLOP/s by length: {number.get('name')}", *(f"{name} {value}" for name, value in of.items())]
        )
        chart = found.setdefault(title, Chart(title, "tokens", "TFLOP/s on what the mask lets through"))
        chart.add(str(labels.get("by", "ringattn")), length, number.get("value"))
    # a single length is a bar, not a course
    return [chart for chart in found.values() if any(len(points) > 1 for points in chart.lines.values())]


def ideal(folder: Folder) -> Chart:
    """One device divided by the ranks, over the time of each contender."""
    chart = Chart("Percent of ideal by ranks: one device, divided by their number, is 100", "ranks", "%", log_x=False)
    runs = [run for one in folder.benches if one.kind == "ring" for run in ring_runs(one.data)]
    cuts = {run_cut(run) for run in runs}
    for run in runs:
        world = mapping_of(run.get("problem")).get("world")
        times = {str(each.get("name")): median(each.get("seconds")) for each in mappings_of(run.get("candidates"))}
        best = ideal_seconds(times, world)
        for name, seconds in times.items():
            if best is not None and finite(seconds) and seconds and name not in WHOLES:
                chart.add(name + (f", {run_cut(run)}" if len(cuts) > 1 else ""), world, 100 * best / seconds)
    for number in _numbers(folder):
        if number.get("unit") == "%" and "ideal" in str(number.get("name")):
            chart.add(str(labels_of(number).get("by", "ringattn")), labels_of(number).get("world"), number.get("value"))
    return chart


def ideal_seconds(times: Mapping[str, object], world: object) -> float | None:
    """One device's time over the ranks; of runs that have none, that of one process with the threads of all ranks."""
    alone, together = times.get(ONE_DEVICE), times.get(ALL_THREADS)
    if finite(alone) and finite(world) and world:
        return alone / world
    return together if finite(together) else None


def run_cut(run: Mapping[str, Any]) -> str:
    """``zigzag, 16k``: what a ring's runs of one line have in common."""
    problem = mapping_of(run.get("problem"))
    length = problem.get("seqlen")
    return f"{problem.get('layout')}, {short(length) if finite(length) else length}"


def memory(folder: Folder) -> Chart:
    """The rank that takes most, above what it had before the call."""
    chart = Chart("Peak memory of a rank by ranks, of the same tokens per rank", "ranks", "MB", log_x=False)
    for one in (one for one in folder.benches if one.kind == "memory"):
        nodes = mapping_of(one.data.get("ring")).get("nodes", 1)
        where = "" if nodes == 1 else f", {nodes} nodes"
        for world in mappings_of(one.data.get("worlds")):
            for name, key in (("forward", "forward"), ("forward and backward", "backward")):
                taken = [told.get(key) for told in mappings_of(world.get("ranks"))]
                counts = [each for each in taken if finite(each)]
                chart.add(name + where, world.get("world"), max(counts) / MEGA if counts else None)
    for number in (one for one in _numbers(folder) if one.get("name") == PEAK):
        of = labels_of(number)
        if SAME in of:
            chart.add(f"forward and backward, {of[SAME]} {SAME}", of.get("world"), number.get("value"))
    return chart


def predictions(folder: Folder) -> Chart:
    """Of every mask, the layout whose prediction is furthest off."""
    chart = Chart("Predicted by length: the furthest off of a mask's layouts", "tokens", "% of the measured time")
    for row in (row for one in folder.benches if one.kind == "predicted" for row in mappings_of(one.data.get("rows"))):
        off = percent_off(row)
        chart.add_one_of(max, str(row.get("mask")), row.get("seqlen"), None if off is None else abs(off))
    return chart


def _numbers(folder: Folder) -> Iterable[Mapping[str, Any]]:
    """Of the suite's cases and of `bench kernels`."""
    for case in folder.suite["cases"] if folder.suite is not None else ():
        yield from case["numbers"]
    for one in folder.benches:
        if one.kind == "kernels":
            yield from mappings_of(one.data.get("numbers"))


def save(folder: Folder, to: Path) -> list[Path]:
    """Every chart as a PNG in the folder ``to``, which is made: the files, named after what they show."""
    drawn = [
        (chart, to / f"{re.sub('[^a-z0-9]+', '-', chart.title.lower())[:MOST_FILE].strip('-')}.png")
        for chart in charts(folder)
    ]
    for chart, file in drawn:
        to.mkdir(exist_ok=True)
        draw(chart).savefig(file, dpi=DPI)
    return [file for _, file in drawn]


def draw(chart: Chart, theme: Theme = LIGHT, *, titled: bool = True) -> Any:
    """A figure of a chart; a page that says the title beside it draws none."""
    from matplotlib.figure import Figure

    with themed(theme):
        figure = Figure(figsize=(6.4, 3.5), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(list(chart.lines.items())[:MOST_LINES]):
            xs = sorted(points)
            colour = getattr(theme, LINES[number % len(LINES)])
            style = {"color": colour, "marker": MARKERS[number % len(MARKERS)], "ms": 4.5, "lw": 1.6}
            axes.plot(xs, [points[x] for x in xs], label=name, ls="-" if number < len(LINES) else "--", **style)
        _scale(axes, chart)
        axes.set(xlabel=chart.x, ylabel=chart.y)
        if titled:
            axes.set_title(chart.title, loc="left", fontsize=9.5)
        axes.grid()
        axes.set_axisbelow(True)
        axes.legend(fontsize=7.5, loc="best")
    return figure


def _scale(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    xs = sorted({x for points in chart.lines.values() for x in points})
    ys = [y for points in chart.lines.values() for y in points.values()]
    if chart.log_x and xs[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs if len(xs) <= 9 else xs[:: -(-len(xs) // 8)])
    axes.set_xticklabels([short(x) for x in axes.get_xticks()])
    if chart.log_y and min(ys) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(0, max(ys) * 1.1 or 1)
    axes.minorticks_off()


def short(count: float) -> str:
    """``8k``, ``64m``: powers of 1024 where they divide, as sizes are typed; else plain digits."""
    whole = int(count)
    if whole != count:
        return f"{count:.3g}"
    return f"{whole // 2**30}g" if whole and whole % 2**30 == 0 else binary(whole)
