"""Plots and pictures of a report: what is drawn of which files, by the labels that commands write."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench.common import masks
from ringattn.bench.predict import check
from ringattn.bench.predict.call import NAMED
from ringattn.bench.predict.rows import MASKS, SCHEMA, Row, cases, mask_of
from ringattn.bench.predict.timelines import said
from ringattn.bench.report import calls, charts, views
from ringattn.bench.report.page import html, pictured
from ringattn.bench.report.reading import read
from ringattn.bench.report.rows import world_of_check
from ringattn.bench.suite import worlds
from ringattn.ring import Layout, Mask
from ringattn.ring.schedule.layout import Documents

from ..support import report_cases
from ..support.report_cases import HOSTILE, Outline, everything, write

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_hostile_values_where_numbers_belong_are_left_out_of_plots(tmp_path: Path) -> None:
    links = report_cases.links()
    for row, value in zip(links["links"], (HOSTILE, None, True, 10**299), strict=True):
        row["busbw"] = value
    ring = {**report_cases.ring(), "problem": HOSTILE, "candidates": {"a": 1}}
    told = html(read(write(tmp_path, links=links, ring=ring, memory={**report_cases.memory(), "worlds": [1, {}]})))
    assert "<script>alert" not in told and 'id="plots"' not in told


def test_a_length_of_no_machine(tmp_path: Path) -> None:
    """Its pairs are counted by a formula."""
    data = report_cases.ring()
    data["problem"] = {**data["problem"], "seqlen": 10**15}
    assert "1,000,000,000,000,000" in html(read(write(tmp_path, ring=data)))


def test_plots_say_what_the_files_say(tmp_path: Path) -> None:
    drawn = charts.charts(read(write(tmp_path, **everything())))
    found = {chart.title.partition(" by ")[0]: chart.lines for chart in drawn}
    shares = {chart.title: chart.lines for chart in drawn if chart.title.startswith("Percent of ideal")}
    assert found["Bandwidth"] == {"one way": {2.0**16: 1.0, 2.0**20: 8.0}}  # the slower of both edges
    rates = {1024.0: 90.0, 2048.0: 360.0, 4096.0: 1440.0}
    assert found["TFLOP/s"] == {"ringattn": rates, "flash": rates}
    of = "Percent of ideal by ranks, {}, 64 tokens: {} is 100"
    assert shares == {
        of.format("ring.json", "one process with the threads of all ranks"): {
            "ringattn": {2.0: 75.0}, "usual ring": {2.0: 50.0},
        },
        of.format("whole ring", "one device, divided by their number,"): {
            "ringattn zigzag": {2.0: 75.0}, "Ulysses": {2.0: 100.0},
        },
    }  # fmt: skip
    assert found["Predicted"] == {"causal": {64.0: pytest.approx(10.0), 128.0: pytest.approx(20.0)}}
    peaks = found["Peak memory of a rank"]
    assert peaks == {"forward": {2.0: 2.0, 4.0: 4.0}, "forward and backward": {2.0: 3.0, 4.0: 3.0}}


def test_the_runs_kept_in_the_repository_make_a_page() -> None:
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        found = read(folder)
        assert not found.refused
        assert charts.charts(found)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"world": 4},
        {"world": 4, "seqlen": 64, "layout": HOSTILE, "causal": True},
        {"world": 4, "seqlen": 64, "layout": "shard", "causal": True},
        {"world": 10**9, "seqlen": 10**9, "layout": "zigzag", "causal": True},
        {"world": True, "seqlen": 64, "layout": "zigzag", "causal": True},
        {"world": 4, "seqlen": 2, "layout": "zigzag", "causal": True},
        {"world": 4, "seqlen": 64, "layout": "zigzag", "causal": "yes"},
    ],
)
def test_words_that_say_no_call_have_no_picture(words: dict[str, object]) -> None:
    assert calls.call_of(words) is None


def test_words_that_say_a_call() -> None:
    call = calls.call_of({"world": 4, "tokens": 1 << 20, "layout": "zigzag", "mask": "causal", "nodes": 2})
    assert call is not None
    assert (call.layout.world, call.mask.causal, call.nodes) == (4, True, 2)
    assert call.layout.seqlen <= calls.MOST_TOKENS
    windowed = calls.call_of({"world": 2, "seqlen": 64, "layout": "contiguous", "causal": False, "window": [8, 0]})
    assert windowed is not None and windowed.mask.window == (8, 0)
    assert calls.call_of({**report_cases.CALL, "nodes": 2, "world": 4}) is not None


@pytest.mark.parametrize(("layout", "name"), [(one, name) for name in MASKS for one in NAMED])
def test_every_mask_that_is_predicted_is_drawn_as_it_is(layout: str, name: str) -> None:
    """By labels: the mask is that of the row, or there is no picture of it."""
    call = calls.call_of({"layout": layout, "mask": name, "seqlen": 4096, "world": 4})
    if (layout, name) == ("striped", "blocks"):
        assert call is None
        return
    assert call is not None and call.mask == mask_of(name, 4096) and call.layout == getattr(Layout, layout)(4096, 4)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(causal=True, window=(12, 0)),
        Mask(causal=True, documents=Documents([0, 8, 40, 128])),
        Mask(causal=True, prefix=32),
        Mask(causal=True, used=(0, 128, 40)),
        Mask(window=(8, 8), global_tokens=((0, 4),)),
        Mask(causal=True, window=(8, 8), global_tokens=((0, 4), (60, 61)), used=(100,)),
    ],
)
def test_what_a_prediction_says_of_its_mask_is_drawn(mask: Mask) -> None:
    told = json.loads(json.dumps(said(replace(report_cases.PREDICTED, tokens=64, mask=mask))))
    call = calls.call_of(told)
    assert call is not None and call.mask == mask


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": "window (8, 0)"},
        {"mask": "window", "seqlen": calls.MOST_TOKENS * 2},
        {"window_size": [8]},
        {"window_size": ["a", 0]},
        {"cu_seqlens": [0, 8]},
        {"cu_seqlens": HOSTILE},
        {"prefix_length": "a"},
        {"block_mask": {"block": 64}},
        {"seqused_k": [8, -1]},
        {"seqused_k": [8, False]},
        {"seqused_k": [10**30]},
        {"seqused_k": []},
        {"seqused_k": [8], "mask": "causal"},
        {"global_tokens": [[0, 2]], "mask": "causal"},
        {"seqused_k": 8},
        {"seqused_k": HOSTILE},
        {"seqused_k": [1] * (calls.MOST_PARTS + 1)},
        {"global_tokens": 3},
        {"global_tokens": [3]},
        {"global_tokens": [[]]},
        {"global_tokens": [[4, 2]]},
        {"global_tokens": [[0, 2], [1, 3]]},
        {"global_tokens": [[0, 10**30]]},
        {"global_tokens": [["a", 3]]},
        {"global_tokens": [HOSTILE]},
        {"global_tokens": [[0, 1], [2, 3], [4, 5], [6, 7]], "window_size": [8, 0]},
        {"global_tokens": [[0, 2]], "window_size": [8, 0], "seqused_k": [8] * 20},
        {"mask": {"causal": True}},
    ],
)
def test_a_mask_that_is_not_told_whole_has_no_picture(wrong: dict[str, object]) -> None:
    assert calls.call_of({**report_cases.CALL, **wrong}) is None


def test_rings_of_the_runs_kept_here_have_their_pictures() -> None:
    found = {calls.title(call): names for call, names in pictured(read(RESULTS / "xeon-2-cores_2026-11-21"))}
    assert "whole ring" in found["zigzag, causal, 2 ranks"]
    assert found["contiguous, causal, 2 ranks"] == ("whole ring", "predict-check.json")
    assert found["contiguous, full, 2 ranks"] == ("overlap-world-2.json", "predict-check.json")


def checks(*rows: tuple[str, str, int], **more: object) -> dict[str, object]:
    """What the predictor's check writes, of layouts, masks and lengths."""
    told = [asdict(Row(*row, 2.0, 0.01, 2.1)) for row in rows]
    return {"schema": SCHEMA, "provenance": report_cases.PROVENANCE, **more, "rows": told}


def test_every_layout_and_mask_of_a_check_is_drawn_once(tmp_path: Path) -> None:
    """At the shortest of all lengths in the folder."""
    every = (*cases((8192, 16384), NAMED, MASKS),)
    short = (*cases((4096,), NAMED, MASKS),)
    found = pictured(read(write(tmp_path, a=checks(*every, world=4), b=checks(*short, world=4))))
    assert len(found) == len(short) == 17 <= calls.MOST_PICTURES
    assert {names for _, names in found} == {("b.json",)}
    assert {(call.layout_name, call.mask, call.layout.seqlen, call.layout.world) for call, _ in found} == {
        (layout, mask_of(mask, length), length, 4) for layout, mask, length in short
    }


def test_a_check_that_does_not_say_its_ranks() -> None:
    """Processes are one per core; of anything else nothing is guessed."""
    data = checks(("zigzag", "causal", 64))
    assert world_of_check(data) is None
    assert world_of_check({**data, "link": {}}) == 2  # cores, by its provenance
    assert world_of_check({**data, "link": {}, "world": 8}) == 8
    assert world_of_check({**data, "link": {}, "provenance": "x"}) is None
    kept = pictured(read(RESULTS / "xeon-2-cores_2026-11-21"))
    drawn = {(call.layout_name, masks.title(call.mask)) for call, names in kept if "predict-check.json" in names}
    assert len(drawn) == 17 and len(kept) <= calls.MOST_PICTURES


@pytest.mark.parametrize("wrong", [{"world": "2"}, {"world": None}, {"rows": [{"layout": [], "seqlen": "x"}, 3]}])
def test_a_check_that_says_no_call_has_no_picture(wrong: dict[str, object], tmp_path: Path) -> None:
    assert pictured(read(write(tmp_path, a={**checks(("zigzag", "causal", 64)), **wrong}))) == []


def test_the_check_says_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    sizes = ("--seqlen", "64", "--calibrate", "32", "--repeats", "1", "--layout", "zigzag", "--mask", "causal")
    CliRunner().invoke(check.app, [*sizes, "--local-world", "2", "--device", "cpu", "--json", str(file)])
    assert json.loads(file.read_text())["world"] == 2
    ((call, names),) = pictured(read(tmp_path))
    assert calls.title(call) == "zigzag, causal, 2 ranks" and names == ("check.json",)


def test_a_case_of_a_ring_says_its_layout_and_mask() -> None:
    """By its own labels."""
    cpu = torch.device("cpu")
    number = next(worlds.local_world(cpu, world=2, tokens=32, heads=(1, 1), head_dim=16, dtype="float32", repeats=1))
    call = calls.call_of(number.labels)
    assert call is not None and calls.title(call) == "zigzag, causal, 2 ranks"


def test_one_picture_of_what_looks_alike(tmp_path: Path) -> None:
    page = html(read(write(tmp_path, **everything())))
    outline = Outline(page)
    assert len(outline.tags("img")) == len(outline.tags("source")) == 1
    assert "zigzag, causal, 2 ranks; of whole ring, ring.json, measured.json, predicted.json" in page


def test_a_sweep_of_rings_has_a_picture_of_every_layout(tmp_path: Path) -> None:
    layouts = ("contiguous", "zigzag", "striped")
    found = read(write(tmp_path, ring=report_cases.rings((2, 4), layouts)))
    assert not found.refused
    assert [calls.title(call) for call, _ in pictured(found)] == [
        f"{layout}, causal, {world} ranks" for world in (2, 4) for layout in layouts
    ]
    (chart,) = charts.charts(found)
    assert list(chart.lines) == [*(f"ringattn {layout}" for layout in layouts), "Ulysses"]
    assert chart.lines["ringattn striped"] == {2.0: 75.0, 4.0: 37.5}
    shown, _ = views.tables(found.benches[0])
    by, layout = (shown.columns.index(name) for name in ("by", "layout"))
    rows = {(row[by].text, row[layout].text) for row in shown.rows}
    assert rows == {("one device", ""), ("Ulysses", ""), *((f"ringattn {one}", one) for one in layouts)}


def test_more_pictures_than_are_drawn_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_PICTURES", 1)
    told = html(read(write(tmp_path, ring=report_cases.rings((2,), ("zigzag", "striped")))))
    assert "Not drawn, for there are enough: striped, causal, 2 ranks." in told


def test_no_line_of_a_large_sweep_is_lost(tmp_path: Path) -> None:
    """A GPU's default sweep of links has more lines than one chart can show."""
    rows = [
        {"transport": transport, "channels": channels, "ctas": None, "way": way, "edge": "0->1", "nbytes": size,
         "busbw": 1.0}
        for transport in ("nccl", "copy_engine")
        for channels in (None, 1, 2, 4, 8, 16)
        for way in ("one way", "both ways", "ring")
        for size in (1, 2)
    ]  # fmt: skip
    found = charts.charts(read(write(tmp_path, links={**report_cases.links(), "links": rows})))
    assert [(chart.title, len(chart.lines)) for chart in found] == [
        (f"Bandwidth by size, {transport}: the slowest edge, {part} of 2", 9)
        for transport in ("nccl", "copy_engine")
        for part in (1, 2)
    ]
    assert len(charts.save(read(tmp_path), tmp_path / "plots")) == len(list((tmp_path / "plots").iterdir())) == 4


def test_rings_have_their_rates_by_length() -> None:
    """FLOPs over the time of each rank; of one device and of one process over their own."""
    found = {chart.title: chart for chart in charts.rates(read(RESULTS / "xeon-2-cores_2026-11-22"))}
    chart = found["TFLOP/s of each rank by length, ring.json, 2 ranks"]
    assert len(found) == 2 and {len(points) for points in chart.lines.values()} == {4}
    # as the command printed them: 15.04 GFLOP in 148.7 ms on two ranks, and in 220.7 ms on one device
    assert chart.lines["ringattn zigzag"][2048] == pytest.approx(0.05059, rel=1e-3)
    assert chart.lines["one device"][2048] == pytest.approx(0.06814, rel=1e-3)


def test_one_rank_is_no_ring_to_draw() -> None:
    titles = [calls.title(call) for call, _ in pictured(read(RESULTS / "xeon-2-cores_2026-11-22"))]
    assert titles == [f"{name}, causal, 2 ranks" for name in ("contiguous", "zigzag", "striped")]


def test_percent_of_ideal_keeps_every_length_apart(tmp_path: Path) -> None:
    found = charts.ideal(read(RESULTS / "xeon-2-cores_2026-11-21"))
    lengths = [chart for chart in found if "whole ring" in chart.title]
    assert [chart.title.split(", ")[2] for chart in lengths] == [
        "2k tokens: one device",
        "4k tokens: one device",
    ]
    for chart in found:
        assert not {*chart.lines} & {"one device", "one process, all cores", "SDPA, one process"}
        assert ("ringattn" in chart.lines) == ("threads of all ranks" in chart.title)


def test_what_a_suite_says_of_links_and_memory_is_drawn(tmp_path: Path) -> None:
    of = {"by": "gloo", "way": "ring", "bytes": 64}
    moved = [
        report_cases.number("moved per direction", value, "GB/s", labels={**of, "edge": edge})
        for edge, value in (("0->1", 2.0), ("1->0", 1.0))
    ]
    taken = [
        report_cases.number(
            "peak memory of a rank", 80.0 + world, "MB", labels={"world": world, "tokens per rank": 512}
        )
        for world in (2, 4)
    ]
    case = {"name": "x", "about": "", "arguments": {}, "state": "done", "reason": "", "seconds": 1.0}
    cases = [{**case, "numbers": moved}, {**case, "name": "y", "numbers": taken}]
    found = charts.charts(read(write(tmp_path, results={**report_cases.suite(), "cases": cases})))
    slowest, same = {64.0: 1.0}, {2.0: 82.0, 4.0: 84.0}
    assert [one.lines for one in found] == [
        {"ring, bench suite": slowest},
        {"forward and backward, 512 tokens per rank": same},
    ]
