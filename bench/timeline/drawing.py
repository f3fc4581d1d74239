"""Draws timelines: compute, waits, sends, receives and slots of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common.theme import LIGHT, use_theme
from .events import LANES, Event, Timeline, lane_order

ROWS = {"compute": 1.0, "send": 0.42, "receive": 0.42}
"""Heights of a rank's rows. Waits are in the row of compute, because a rank either computes or waits."""
SLOT_ROW = 0.5
GAP = 0.5  # between ranks
INCH_PER_UNIT = 0.18
LABEL_SHARE = 0.022  # of the width; narrower bars have no text
MOST_SLOT_RANKS = 4  # with more ranks slots would be too thin to read
WIDTH = 10.0
MILLI = 1e3


LaneBox = tuple[float, float]
"""Vertical position of a rank's lane in a figure, from the top, and its height."""


def lane_boxes(timelines: Sequence[Timeline]) -> tuple[dict[tuple[int, str], LaneBox], float]:
    """Return the box of every (rank, lane), and the total height; slots have boxes only if there are few ranks."""
    world = max(timeline.world for timeline in timelines)
    lanes = {event.lane for timeline in timelines for event in timeline.events} - set(LANES)
    heights = ROWS | {lane: SLOT_ROW for lane in sorted(lanes, key=lane_order) if world <= MOST_SLOT_RANKS}
    rows: dict[tuple[int, str], LaneBox] = {}
    top = 0.0
    for rank in range(world):
        for lane, height in heights.items():
            rows[rank, lane] = top, height
            top += height
        rows[rank, "wait"] = rows[rank, "compute"]
        top += GAP
    return rows, top - GAP


def draw_timeline_figure(timelines: Sequence[Timeline]) -> Any:
    """Draw timelines below each other on one time axis; return the matplotlib figure."""
    from matplotlib.figure import Figure

    rows, units = lane_boxes(timelines)
    end = max(timeline.seconds for timeline in timelines) * MILLI or 1.0
    with use_theme():
        height = len(timelines) * (units * INCH_PER_UNIT + 0.45) + 0.75
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for timeline, place in zip(timelines, axes, strict=True):
            _draw_one(place, timeline, rows, units, end)
        axes[-1].set_xlabel("milliseconds since the call began")
        _legend(figure)
    return figure


def timeline_heading(timeline: Timeline) -> str:
    """Return a heading such as ``measured: causal, zigzag, …; 812 ms, ranks compute 96% of it``."""
    total = timeline.seconds * timeline.world
    computing = sum(event.seconds for event in timeline.events if event.lane == "compute") / total if total else 0.0
    spent = f"{timeline.seconds * MILLI:,.3g} ms" if timeline.seconds < 0.1 else f"{timeline.seconds * MILLI:,.0f} ms"
    return f"{timeline.source}: {timeline.title}; {spent}, ranks compute {computing:.0%} of it"


def _draw_one(axes: Any, timeline: Timeline, rows: dict[tuple[int, str], LaneBox], units: float, end: float) -> None:
    axes.set_title(timeline_heading(timeline), loc="left", fontsize=9.5)
    across = axes.get_yaxis_transform()
    for (rank, lane), (top, height) in rows.items():
        if lane != "wait":
            middle = top + height * 0.45
            text, size = (f"rank {rank}", 9) if lane == "compute" else (lane, 6.5)
            axes.text(-0.006, middle, text, transform=across, ha="right", va="center_baseline", fontsize=size)
            axes.broken_barh([(0, end)], (top, height * 0.9), facecolors=LIGHT.track)
        _draw_lane(
            axes, [event for event in timeline.events if (event.rank, event.lane) == (rank, lane)], (top, height), end
        )
    begins = [event.begin for event in timeline.events if event.phase == "backward"]
    if begins:
        axes.vlines(min(begins) * MILLI, -0.15, units, color=LIGHT.faint, lw=0.9, ls=(0, (3, 2)), zorder=4)
    axes.set(xlim=(0, end * 1.002), ylim=(units, -0.15), yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _draw_lane(axes: Any, events: Sequence[Event], row: LaneBox, end: float) -> None:
    if not events:
        return
    top, height = row
    bars = [(event.begin * MILLI, event.seconds * MILLI) for event in events]
    style = {"edgecolors": LIGHT.paper, "linewidth": 0.4, "zorder": 2}
    axes.broken_barh(bars, (top, height * 0.9), facecolors=[_colour(event) for event in events], **style)
    for event, (begin, width) in zip(events, bars, strict=True):
        label = {"compute": f"hop {event.hop}", "wait": ""}.get(event.lane, event.name)
        if label and width > LABEL_SHARE * end * max(1.0, len(label) / 2.5):
            middle = (begin + width / 2, top + height * 0.45)
            size, ink = 7.5 if event.lane == "compute" else 6, LIGHT.on_bar if event.lane in LANES else LIGHT.on_slot
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=size, color=ink, zorder=3)


def _colour(event: Event) -> str:
    if event.lane == "compute":
        return LIGHT.compute if event.phase == "forward" else LIGHT.backward
    if event.lane in LANES:
        colour: str = getattr(LIGHT, event.lane)
        return colour
    return LIGHT.sums if event.lane.startswith("dK/dV") else LIGHT.slot


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    names = {
        "compute, forward": LIGHT.compute,
        "compute, backward": LIGHT.backward,
        "waits": LIGHT.wait,
        "sends": LIGHT.send,
        "receives": LIGHT.receive,
        "slot in use, K/V": LIGHT.slot,
        "slot in use, dK/dV": LIGHT.sums,
    }
    handles = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7.5, handlelength=1.1)
