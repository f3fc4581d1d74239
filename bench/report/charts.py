"""Charts of a result: a rate or time over a size, with a line for each combination of the other columns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ..common.flags import size_text
from ..common.result import Result, Row
from ..common.theme import LINES, use_theme

SIZES = ("seqlen", "tokens", "tokens per rank", "length", "size", "bytes", "nbytes", "world", "ranks")
"""Columns for the x axis; the first that varies is used."""
QUANTITIES = ("TFLOP/s", "GB/s", "%", "ms", "us", "s", "GB", "MB", "bytes", "times")
"""Units of columns for the y axis; the first available is used."""
WORDS = ("note", "reason", "found", "about", "command", "why", "file")  # columns that do not identify a line
MOST_CHARTS = 12  # per file
MOST_LINES = 12  # per chart; more are indistinguishable
MOST_NAME = 60
LEGEND_COLUMNS = 2  # below the axes, where it hides no point
MAX_DRAWN_NUMBER = 1e150  # largest number: the square of a larger one is infinite
LOG_FROM = 8  # ratio of largest to smallest from which an axis is logarithmic
MOST_TICKS = 9


@dataclass
class Chart:
    """Lines over one axis; every point is a median of rows."""

    title: str
    x: str
    y: str
    lines: dict[str, dict[float, float]] = field(default_factory=dict)


def build_charts(result: Result) -> list[Chart]:
    """Return at most one chart; for a suite case's list of numbers, one for each name and unit that can be drawn."""
    if not {"number", "value", "unit"} <= result.units.keys():
        groups = {(result.case, ""): result.rows}
    else:
        groups = {}
        for row in result.rows:
            groups.setdefault((str(row.get("number")), str(row.get("unit"))), []).append(row)
    results = []
    for (title, unit), rows in groups.items():
        units = result.units
        if unit:
            units = {name: unit for name, unit in units.items() if name not in ("number", "unit", "limit", "spread")}
            units["value"] = unit
        results.append(build_chart(title, rows, units))
    return [chart for chart in results if chart is not None][:MOST_CHARTS]


def build_chart(title: str, rows: Sequence[Row], units: Mapping[str, str]) -> Chart | None:
    """Build the chart of the first of ``QUANTITIES`` over the first varying column of ``SIZES``; None without both."""
    varying = [name for name in units if len({str(row.get(name)) for row in rows}) > 1]
    x = next((name for name in SIZES if name in varying and all(is_drawable(row.get(name)) for row in rows)), None)
    drawn = [name for name in units if name != x and any(is_drawable(row.get(name)) for row in rows)]
    y = next((name for unit in QUANTITIES for name in drawn if units[name] == unit), None)
    if x is None or y is None:
        return None
    # Columns that identify a line: words, or whole numbers without a unit.
    variants = [
        name
        for name in varying
        if name not in (x, y, *WORDS)
        and (name in SIZES or not units[name])
        and all(isinstance(row.get(name), str | int | None) for row in rows)
    ]
    variants = [name for name in variants if not _only_some_have(name, variants, x, rows)]
    points: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        value, size = row.get(y), row.get(x)
        if is_drawable(value) and is_drawable(size):
            labels = [(name, row.get(name)) for name in variants if row.get(name) is not None]
            line = ", ".join(at if isinstance(at, str) else f"{name} {at}" for name, at in labels)[:MOST_NAME] or y
            points.setdefault(line, {}).setdefault(float(size), []).append(float(value))
    lines = {line: {at: statistics.median(ys) for at, ys in values.items()} for line, values in points.items()}
    shown_lines = dict([*lines.items()][:MOST_LINES])
    if not any(len(values) > 1 for values in shown_lines.values()):
        return None
    more = f", first {MOST_LINES} of {len(lines)} lines" if len(lines) > MOST_LINES else ""
    across, up = (f"{name}, {units[name]}" if units[name] not in ("", name) else name for name in (x, y))
    return Chart(f"{title}: {y} by {x}{more}", across, up, shown_lines)


def _only_some_have(name: str, variants: Sequence[str], x: str, rows: Sequence[Row]) -> bool:
    """Return True if some rows lack the column ``name`` and ``variants`` identify every row without it."""
    if all(row.get(name) is not None for row in rows):
        return False
    others = [other for other in (x, *variants) if other != name]
    return len({tuple(str(row.get(other)) for other in others) for row in rows}) == len(rows)


def is_drawable(value: object) -> TypeGuard[float]:
    """Return True for a number that can be drawn: not NaN, not a bool, not too large to square."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_DRAWN_NUMBER


def draw_chart(chart: Chart) -> Any:
    """Draw a chart; return the matplotlib figure, without the title, which the page shows."""
    from matplotlib.figure import Figure

    with use_theme():
        legend_rows = -(-len(chart.lines) // LEGEND_COLUMNS)
        figure = Figure(figsize=(6.4, 3.2 + 0.18 * legend_rows), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(chart.lines.items()):
            colour, dashes = LINES[number % len(LINES)], "-" if number < len(LINES) else "--"
            axes.plot(*zip(*sorted(points.items()), strict=True), dashes, color=colour, marker="o", ms=4.5, label=name)
        axes.set(xlabel=chart.x, ylabel=chart.y)
        _scale(axes, chart)
        axes.grid()
        axes.set_axisbelow(True)
        columns = min(LEGEND_COLUMNS, len(chart.lines))
        figure.legend(fontsize=7.5, loc="outside lower center", ncols=columns, handlelength=3.2)
    return figure


def _scale(axes: Any, chart: Chart) -> None:
    xs = sorted({x for points in chart.lines.values() for x in points})
    ys = [y for points in chart.lines.values() for y in points.values()]
    if xs[0] > 0 and xs[-1] >= LOG_FROM * xs[0]:
        axes.set_xscale("log", base=2)
    ticks = xs[:: -(-len(xs) // MOST_TICKS)]
    axes.set_xticks(ticks, [size_text(int(x)) if x == int(x) else f"{x:.3g}" for x in ticks])
    if min(ys) > 0 and max(ys) >= LOG_FROM**2 * min(ys):
        axes.set_yscale("log")
    elif min(ys) >= 0:
        axes.set_ylim(bottom=0)
    axes.minorticks_off()
