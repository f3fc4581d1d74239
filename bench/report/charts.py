"""The chart of a result: a rate or a time over a size, a line for each value of the other columns."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ..common.flags import binary
from ..common.result import Result, Row
from .theme import LIGHT, LINES, Theme, themed, write_figure

SIZES = ("seqlen", "tokens", "tokens per rank", "length", "size", "bytes", "nbytes", "world", "ranks")
"""Columns that a chart may be drawn over, the first that varies."""
QUANTITIES = ("TFLOP/s", "GB/s", "%", "ms", "us", "s", "GB", "MB", "bytes", "times")
"""Units of columns that are drawn, the first that there is."""
WORDS = ("note", "reason", "found", "about", "command", "why", "file")  # columns that say no variant
MOST_CHARTS = 12  # of a file
MOST_LINES = 12  # of a chart: more could not be told apart
MOST_NAME = 60
MOST_TITLE = 160
MOST = 1e150  # of a number: the square of a larger one is infinite
LOG_FROM = 8  # times the smallest: a linear axis would squeeze the others together
MARKERS = "osD^vP"
DPI = 150


@dataclass
class Chart:
    """Lines over one axis; every point is the median of the rows that it is of."""

    title: str
    x: str
    y: str
    lines: dict[str, dict[float, float]] = field(default_factory=dict)


def charts(result: Result) -> list[Chart]:
    """What of a result makes a course: one chart; of a list of numbers, one for each number by its name and unit."""
    if {"number", "value", "unit"} <= result.units.keys():
        kinds = dict.fromkeys((str(row.get("number")), str(row.get("unit"))) for row in result.rows)
        groups: Iterable[tuple[str, str, Sequence[Row]]] = (
            (name, unit, [row for row in result.rows if (str(row.get("number")), str(row.get("unit"))) == (name, unit)])
            for name, unit in kinds
        )
        units = {name: unit for name, unit in result.units.items() if name not in ("number", "unit", "limit", "spread")}
        found = (chart_of(name, rows, {**units, "value": unit}) for name, unit, rows in groups if unit in QUANTITIES)
    else:
        found = (one for one in [chart_of(result.case, result.rows, result.units)])
    return [one for one in found if one is not None][:MOST_CHARTS]


def chart_of(title: str, rows: Sequence[Row], units: Mapping[str, str]) -> Chart | None:
    """The first quantity over the first size that varies; None where there is no such course."""
    sizes = (name for name in SIZES if name in units and _varies(rows, name))
    x = next((name for name in sizes if all(finite(row.get(name)) for row in rows)), None)
    drawn = [(QUANTITIES.index(unit), name) for name, unit in units.items() if unit in QUANTITIES and name != x]
    y = next((name for _, name in sorted(drawn, key=lambda one: one[0]) if _some(rows, name)), None)
    if x is None or y is None:
        return None
    variants = [name for name in units if name not in (x, y) and _is_variant(rows, name, units[name])]
    points: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        value, size = row.get(y), row.get(x)
        if finite(value) and finite(size):
            line = ", ".join(_said(name, row.get(name)) for name in variants)[:MOST_NAME] or y
            points.setdefault(line, {}).setdefault(float(size), []).append(float(value))
    medians = {line: {at: statistics.median(of) for at, of in told.items()} for line, told in points.items()}
    kept = dict([*medians.items()][:MOST_LINES])
    more = f", the first {MOST_LINES} of {len(points)} lines" if len(points) > MOST_LINES else ""
    if not any(len(told) > 1 for told in kept.values()):
        return None
    return Chart(f"{title}: {y} by {x}{more}", _axis(x, units[x]), _axis(y, units[y]), kept)


def finite(value: object) -> TypeGuard[float]:
    """A number that can be drawn: no NaN, no truth value, none so large that its square is infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({str(row.get(name)) for row in rows}) > 1


def _some(rows: Sequence[Row], name: str) -> bool:
    return any(finite(row.get(name)) for row in rows)


def _is_variant(rows: Sequence[Row], name: str, unit: str) -> bool:
    """Whether a column says which of several things a row is of: a word, or a whole number without a unit."""
    words = all(isinstance(row.get(name), str | int | None) for row in rows)
    return words and _varies(rows, name) and name not in WORDS and (name in SIZES or not unit)


def _said(name: str, value: object) -> str:
    return value if isinstance(value, str) else f"{name} {value}"


def _axis(name: str, unit: str) -> str:
    return f"{name}, {unit}" if unit and unit != name else name


def save(results: Iterable[tuple[str, Result]], to: Path) -> list[Path]:
    """Every chart as a PNG in the folder ``to``, which is made: the files, named after what they show."""
    written = list[Path]()
    for file, result in results:
        for chart in charts(result):
            name = re.sub("[^a-z0-9]+", "-", f"{Path(file).stem} {chart.title}".lower())[:MOST_TITLE].strip("-")
            target = to / f"{name}.png"
            write_figure(draw(chart), target if target not in written else to / f"{name}-{len(written)}.png", DPI)
            written.append(target)
    return written


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
    if xs[0] > 0 and xs[-1] >= LOG_FROM * xs[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs if len(xs) <= 9 else xs[:: -(-len(xs) // 8)])
    axes.set_xticklabels([short(x) for x in axes.get_xticks()])
    if min(ys) > 0 and max(ys) >= LOG_FROM**2 * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(min(0.0, min(ys)) * 1.1, max(0.0, max(ys)) * 1.1 or 1)
    axes.minorticks_off()


def short(count: float) -> str:
    """``8k``, ``64m``: powers of 1024 where they divide, as sizes are typed; else plain digits."""
    whole = int(count)
    if whole != count:
        return f"{count:.3g}"
    return f"{whole // 2**30}g" if whole and whole % 2**30 == 0 else binary(whole)
