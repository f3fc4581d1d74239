"""Timelines as pictures: per rank what it computed or waited for, what it sent and received, and its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..timeline.events import LANES, Event, Timeline, lane_order
from . import theme as themes
from .theme import LIGHT, Theme, themed

ROWS = {"compute": 1.0, "send": 0.42, "receive": 0.42}
"""Rows of a rank and their heights; waits share the row of compute, for a rank does one or the other."""
SLOT_ROW = 0.5
GAP = 0.5  # between ranks
INCH_PER_UNIT = 0.18
LABEL_SHARE = 0.022  # of the width: a narrower bar has no text
MOST_SLOT_RANKS = 4  # with more ranks slots would be too thin to read
WIDTH = 10.0
MILLI = 1e3


@dataclass(frozen=True)
class Row:
    """Where a lane is drawn."""

    top: float
    height: float


def rows_of(timelines: Sequence[Timeline], *, slots: bool) -> tuple[dict[tuple[int, str], Row], float]:
    """The row of every (rank, lane), the same for all timelines, and the height of all together."""
    world = max(one.world for one in timelines)
    found = {event.lane for one in timelines for event in one.events} - set(LANES)
    lanes = sorted(found, key=lane_order) if slots else []
    rows: dict[tuple[int, str], Row] = {}
    top = 0.0
    for rank in range(world):
        for lane, height in [*ROWS.items(), *((lane, SLOT_ROW) for lane in lanes)]:
            rows[rank, lane] = Row(top, height)
            top += height
        rows[rank, "wait"] = rows[rank, "compute"]
        top += GAP
    return rows, top - GAP


def draw(timelines: Sequence[Timeline], theme: Theme = LIGHT, *, slots: bool | None = None) -> Any:
    """A figure of timelines above each other on one time axis, the first at the top; measured before predicted.

    ``slots``: with the slots of every rank; None: where there are at most four ranks.
    """
    if not timelines:
        raise ValueError("timelines is empty: there is nothing to draw")
    from matplotlib.figure import Figure

    slots = max(one.world for one in timelines) <= MOST_SLOT_RANKS if slots is None else slots
    rows, units = rows_of(timelines, slots=slots)
    end = max(one.seconds for one in timelines) * MILLI or 1.0
    with themed(theme):
        height = len(timelines) * (units * INCH_PER_UNIT + 0.45) + 0.75
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for one, place in zip(timelines, axes, strict=True):
            _draw_one(place, one, rows, units, end, theme)
        axes[-1].set_xlabel("milliseconds since the call began")
        _legend(figure, theme, slots=slots)
    return figure


def save(timelines: Sequence[Timeline], out: Path) -> None:
    """Draw into a file; an SVG is light or dark as the page around it is."""
    themes.save(lambda theme: draw(timelines, theme), out, dpi=140)


def computing(timeline: Timeline) -> float:
    """Share of all ranks' time that is compute."""
    total = timeline.seconds * timeline.world
    return sum(event.seconds for event in timeline.events if event.lane == "compute") / total if total else 0.0


def heading(timeline: Timeline) -> str:
    """``measured: causal, zigzag, …; 812 ms, ranks compute 96% of it``."""
    spent = f"{timeline.seconds * MILLI:,.3g} ms" if timeline.seconds < 0.1 else f"{timeline.seconds * MILLI:,.0f} ms"
    return f"{timeline.source}: {timeline.title}; {spent}, ranks compute {computing(timeline):.0%} of it"


def _draw_one(
    axes: Any, timeline: Timeline, rows: dict[tuple[int, str], Row], units: float, end: float, theme: Theme
) -> None:
    axes.set_title(heading(timeline), loc="left", fontsize=9.5)
    for (rank, lane), row in rows.items():
        if lane != "wait" and rank < timeline.world:
            axes.broken_barh([(0, end)], (row.top, row.height * 0.9), facecolors=theme.track)
    for rank in range(timeline.world):
        for lane in sorted({lane for at, lane in rows if at == rank}, key=lane_order):
            events = [one for one in timeline.events if (one.rank, one.lane) == (rank, lane)]
            _draw_lane(axes, events, rows[rank, lane], end, theme)
        _name_rows(axes, rank, rows)
    _mark_backward(axes, timeline, units, theme)
    axes.set(xlim=(0, end * 1.002), ylim=(units, -0.15), yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _draw_lane(axes: Any, events: Sequence[Event], row: Row, end: float, theme: Theme) -> None:
    if not events:
        return
    bars = [(one.begin * MILLI, one.seconds * MILLI) for one in events]
    colours = [_colour(one, theme) for one in events]
    axes.broken_barh(
        bars, (row.top, row.height * 0.9), facecolors=colours, edgecolors=theme.paper, linewidth=0.4, zorder=2
    )
    for one, (begin, width) in zip(events, bars, strict=True):
        label = _label(one)
        if label and width > LABEL_SHARE * end * max(1.0, len(label) / 2.5):
            middle = (begin + width / 2, row.top + row.height * 0.45)
            size = 7.5 if one.lane == "compute" else 6
            ink = theme.on_slot if one.lane not in LANES else theme.paper
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=size, color=ink, zorder=3)


def _colour(event: Event, theme: Theme) -> str:
    if event.lane == "compute":
        return theme.compute if event.phase == "forward" else theme.backward
    if event.lane in LANES:
        colour: str = getattr(theme, event.lane)
        return colour
    return theme.sums if event.lane.startswith("dK/dV") else theme.slot


def _label(event: Event) -> str:
    if event.lane == "compute":
        return f"hop {event.hop}"
    return "" if event.lane == "wait" else event.name


def _name_rows(axes: Any, rank: int, rows: dict[tuple[int, str], Row]) -> None:
    """Names at the left: the rank at its compute, small ones at the other lanes."""
    across = axes.get_yaxis_transform()
    for (at, lane), row in rows.items():
        if at != rank or lane == "wait":
            continue
        middle = row.top + row.height * 0.45
        text, size = (f"rank {rank}", 9) if lane == "compute" else (lane, 6.5)
        axes.text(-0.006, middle, text, transform=across, ha="right", va="center_baseline", fontsize=size)


def _mark_backward(axes: Any, timeline: Timeline, units: float, theme: Theme) -> None:
    """A line where the first rank begins its backward."""
    begins = [one.begin for one in timeline.events if one.phase == "backward"]
    if begins:
        axes.vlines(min(begins) * MILLI, -0.15, units, color=theme.faint, lw=0.9, ls=(0, (3, 2)), zorder=4)


def _legend(figure: Any, theme: Theme, *, slots: bool) -> None:
    from matplotlib.patches import Patch

    names = {
        "compute, forward": theme.compute,
        "compute, backward": theme.backward,
        "waits": theme.wait,
        "sends": theme.send,
        "receives": theme.receive,
        **({"slot in use, K/V": theme.slot, "slot in use, dK/dV": theme.sums} if slots else {}),
    }
    handles = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7.5, handlelength=1.1)
