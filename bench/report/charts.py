"""Plots of what benches measured: bandwidth by size, TFLOP/s by length, percent of ideal and memory by ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.attention import BY_SQUARE
from ..common.flags import binary
from ..ring.candidates import ALL_CORES, WHOLE
from .reading import Folder
from .rows import finite, labels_of, mapping_of, mappings_of, median, percent_off, ring_runs
from .theme import LIGHT, LINES, Theme, themed, write_figure

MARKERS = "osD^vP"
MOST_LINES = 12  # of a chart: more could not be told apart
MOST_NAME = 60
MOST_TITLE = 160
MOST_FILE = 120  # letters of a file's name
DPI = 150
ONE_DEVICE, ALL_THREADS = WHOLE, "SDPA, one process"  # candidates of `bench ring`, schemas 2 and 1
WHOLES = (ONE_DEVICE, ALL_THREADS, ALL_CORES)  # that are no contenders
SHARE = "one device, divided by their number,"
# names in the suite's cases
MOVED, IDEAL, PEAK, SAME = "moved per direction", "of ideal", "peak memory of a rank", "tokens per rank"
COURSE = ("seqlen", "tokens", "length", "by", "layout")  # labels of lines and points; the others are a chart's own
MEGA, TERA = 1e6, 1e12
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

    @property
    def parts(self) -> list[Chart]:
        """Itself; cut into several of about as many lines, and numbered, where it has too many."""
        count = -(-len(self.lines) // MOST_LINES)
        if count <= 1:
            return [self]
        each, lines = -(-len(self.lines) // count), [*self.lines.items()]
        return [
            replace(self, title=f"{self.title}, {n + 1} of {count}", lines=dict(lines[n * each : (n + 1) * each]))
            for n in range(count)
        ]

    def add_one_of(self, pick: Callable[[float, float], float], name: str, x: object, y: object) -> None:
        """A point of all that are told for the same x: the lowest, or the highest."""
        if finite(x) and finite(y):
            self.add(name, x, pick(y, self.lines.get(name[:MOST_NAME], {}).get(float(x), y)))


def charts(folder: Folder) -> list[Chart]:
    """Every chart that the results have points for, none of more lines than can be told apart."""
    found = [*bandwidth(folder), *rates(folder), *ideal(folder), memory(folder), predictions(folder)]
    return [part for one in found if one.lines for part in one.parts]


def bandwidth(folder: Folder) -> list[Chart]:
    """A chart per transport: the slowest edge at each size."""
    found: dict[str, Chart] = {}

    def add(transport: object, line: str, x: object, y: object) -> None:
        title = f"Bandwidth by size, {transport}: the slowest edge"
        chart = found.setdefault(title, Chart(title, "bytes of a message", "GB/s", log_y=True))
        chart.add_one_of(min, line, x, y)

    for row in (row for one in folder.benches if one.kind == "links" for row in mappings_of(one.data.get("links"))):
        knobs = [f"{row[name]} {name}" for name in ("channels", "ctas") if row.get(name) is not None]
        add(row.get("transport"), ", ".join([str(row.get("way")), *knobs]), row.get("nbytes"), row.get("busbw"))
    for number in (one for one in _numbers(folder) if one.get("name") == MOVED):
        of = labels_of(number)
        add(of.get("by"), f"{of.get('way')}, bench suite", of.get("bytes"), number.get("value"))
    return list(found.values())


def rates(folder: Folder) -> list[Chart]:
    """TFLOP/s by length, a chart per direction, dtype, head dim and mask; of rings per file and number of ranks."""
    found: dict[str, Chart] = {}

    def add(title: str, name: str, length: object, rate: object) -> None:
        chart = found.setdefault(title, Chart(title, "tokens", "TFLOP/s on what the mask lets through"))
        chart.add(name, length, rate)

    for number in _numbers(folder):
        labels = labels_of(number)
        length = labels.get("seqlen", labels.get("tokens", labels.get("length")))
        if number.get("unit") != "TFLOP/s" or not finite(length) or str(number.get("name")).endswith(BY_SQUARE):
            continue  # the same course counted otherwise is a column of the table, not another plot
        of = {name: value for name, value in labels.items() if name not in COURSE}
        title = [f"TFLOP/s by length: {number.get('name')}", *(f"{name} {value}" for name, value in of.items())]
        add(", ".join(title), str(labels.get("by", "ringattn")), length, number.get("value"))
    for one in (one for one in folder.benches if one.kind == "ring"):
        for run in ring_runs(one.data):
            problem, flops = mapping_of(run.get("problem")), run.get("flops")
            world = problem.get("world")
            where = f"TFLOP/s of each rank by length, {one.file}, {world} rank{'' if world == 1 else 's'}"
            for each in mappings_of(run.get("candidates")):
                name, seconds = str(each.get("name")), median(each.get("seconds"))
                ranks = 1 if name in WHOLES else world
                if finite(flops) and finite(ranks) and finite(seconds) and ranks and seconds:
                    add(where, name, problem.get("seqlen"), flops / ranks / seconds / TERA)
    # a single length is a bar, not a course
    return [chart for chart in found.values() if any(len(points) > 1 for points in chart.lines.values())]


def ideal(folder: Folder) -> list[Chart]:
    """A chart per file or case, length and meaning of ideal: it over the time of each contender."""
    found: dict[str, Chart] = {}

    def add(where: str, what: str, length: object, name: str, world: object, value: object) -> None:
        tokens = f"{short(length)} tokens" if finite(length) else "tokens not told"
        title = f"Percent of ideal by ranks, {where}, {tokens}: {what} is 100"
        if name not in WHOLES:
            found.setdefault(title, Chart(title, "ranks", "%", log_x=False)).add(name, world, value)

    for one in (one for one in folder.benches if one.kind == "ring"):
        for run in ring_runs(one.data):
            problem = mapping_of(run.get("problem"))
            world = problem.get("world")
            times = {str(each.get("name")): median(each.get("seconds")) for each in mappings_of(run.get("candidates"))}
            what, best = ideal_seconds(times, world)
            for name, seconds in times.items():
                if best is not None and finite(seconds) and seconds:
                    add(one.file, what, problem.get("seqlen"), name, world, 100 * best / seconds)
    for case in folder.suite["cases"] if folder.suite is not None else ():
        for number in (one for one in case["numbers"] if one["name"] == IDEAL):
            of = labels_of(number)
            add(case["name"], SHARE, of.get("seqlen"), str(of.get("by")), of.get("world"), number.get("value"))
    return list(found.values())


def ideal_seconds(times: Mapping[str, object], world: object) -> tuple[str, float | None]:
    """What is ideal and its seconds: one device's over the ranks, else one process with the threads of all ranks."""
    alone, together = times.get(ONE_DEVICE), times.get(ALL_THREADS)
    if finite(alone) and finite(world) and world:
        return SHARE, alone / world
    return "one process with the threads of all ranks", together if finite(together) else None


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
    files: list[Path] = []
    for chart in charts(folder):
        name = re.sub("[^a-z0-9]+", "-", chart.title.lower())[:MOST_FILE].strip("-")
        file = to / f"{name}.png"
        file = file if file not in files else to / f"{name}-{len(files)}.png"
        write_figure(draw(chart), file, DPI)
        files.append(file)
    return files


def draw(chart: Chart, theme: Theme = LIGHT, *, titled: bool = True) -> Any:
    """A figure of a chart; a page that says the title beside it draws none."""
    from matplotlib.figure import Figure

    with themed(theme):
        figure = Figure(figsize=(6.4, 3.5), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(chart.lines.items()):
            xs = sorted(points)
            colour = getattr(theme, LINES[number % len(LINES)])
            style = {"color": colour, "marker": MARKERS[number % len(MARKERS)], "ms": 4.5, "lw": 1.6}
            axes.plot(xs, [points[x] for x in xs], label=name, ls="-" if number < len(LINES) else "--", **style)
        _scale(axes, chart)
        axes.set(xlabel=chart.x, ylabel=chart.y)
        if titled:
            axes.set_title(chart.title[:MOST_TITLE], loc="left", fontsize=9.5)
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
