"""Pictures of timelines: a row for every lane, one time axis, files that are light or dark as their page is."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringattn.bench.report.theme import DARK, LIGHT, VARIABLES, css, inline
from ringattn.bench.report.timelines import MOST_SLOT_RANKS, computing, draw, heading, rows_of, save
from ringattn.bench.timeline.events import Event, Timeline

from ..support.report_cases import HOSTILE, timeline


def test_rows_are_apart_and_waits_share_that_of_compute() -> None:
    rows, height = rows_of([timeline("measured")], slots=True)
    assert rows[0, "wait"] == rows[0, "compute"]
    apart = sorted((row.top, row.top + row.height) for (_, lane), row in rows.items() if lane != "wait")
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(apart))
    assert height == pytest.approx(apart[-1][1])
    assert (0, "slot 1") in rows and (0, "slot 1") not in rows_of([timeline("measured")], slots=False)[0]


def test_measured_and_predicted_share_one_time_axis() -> None:
    upper, lower = draw([timeline("measured"), timeline("predicted", slower=0.5)]).axes
    assert upper.get_xlim() == lower.get_xlim() and upper.get_xlim()[1] > 1900
    assert upper.get_title(loc="left").startswith("measured: causal, zigzag, 64 tokens; 1,900 ms, ranks compute 84%")
    assert lower.get_title(loc="left").startswith("predicted: ")


def test_what_is_empty() -> None:
    with pytest.raises(ValueError, match="timelines is empty"):
        draw([])
    nothing = Timeline("nothing, and no mathematics: $\\frac{$", "measured", 1, ())
    assert computing(nothing) == 0 and "0 ms" in heading(nothing)
    inline(draw([nothing]), "a")


@pytest.mark.parametrize("world", [2, 8])
def test_more_ranks_have_no_slots(world: int) -> None:
    events = tuple(Event(rank, "slot 0", "forward", 0, 0, 1, "K/V of 0") for rank in range(world))
    found = draw([Timeline("", "measured", world, events)])
    named = {text.get_text() for text in found.axes[0].texts}
    assert ("slot 0" in named) == (world <= MOST_SLOT_RANKS)
    assert f"rank {world - 1}" in named


def test_an_svg_is_light_or_dark_as_its_page(tmp_path: Path) -> None:
    out = tmp_path / "timeline.svg"
    save([timeline("measured", name=HOSTILE)], out)
    text = out.read_text()
    ElementTree.fromstring(text)
    assert css(LIGHT) in text and css(DARK) in text and "prefers-color-scheme: dark" in text
    # every colour is a variable that says what to take without it, and stands before it for who knows no variables
    plain = re.sub(r"([a-z-]+): (#[0-9a-f]{6}); \1: var\(--[a-z-]+, \2\)", "", text)
    used = {*re.findall(r"#[0-9a-fA-F]{6}\b|var\(", re.sub("<style>.*?</style>", "", plain, flags=re.DOTALL))}
    assert used == set() != plain != text, used
    assert len(text) < 60_000
    save([timeline("measured", name=HOSTILE)], out)
    assert out.read_text() == text


def test_pictures_of_one_page_share_no_ids() -> None:
    first, second = (inline(draw([timeline("measured")], VARIABLES), name) for name in ("a", "b"))
    of = [{*re.findall(r'\bid="([^"]+)"', text)} for text in (first, second)]
    assert of[0] and of[0].isdisjoint(of[1])
    assert {*re.findall(r'(?:url\(|href=")#([^")]+)', first)} <= of[0]
    assert first.startswith("<svg") and "<metadata" not in first and "matplotlib.org" not in first
