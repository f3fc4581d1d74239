"""Single benches on the page: what of them failed is told as failed, and what they wrote is there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringattn.bench.common.result import Result, finish
from ringattn.bench.common.timing import Samples
from ringattn.bench.links.command import EVERY
from ringattn.bench.links.runs import Beside
from ringattn.bench.links.runs import Row as Link
from ringattn.bench.overlap.rows import Row as Ring
from ringattn.bench.overlap.rows import verdict
from ringattn.bench.predict.rows import Row
from ringattn.bench.report import command, views
from ringattn.bench.report.page import failures, html, pictured
from ringattn.bench.report.reading import OTHERS, Bench, Refused, read
from ringattn.bench.ring.candidates import ULYSSES, WHOLE
from ringattn.bench.ring.peers import ZHUZILIN
from ringattn.bench.ring.rows import as_json, from_json, rows_of
from ringattn.bench.ring.runs import Report
from ringattn.bench.suite.cases import Number
from ringattn.bench.timeline.spent import as_json as as_json_of_timeline

from ..support import report_cases
from ..support.report_cases import PROVENANCE, write

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def written(data: object) -> dict[str, Any]:
    """As it comes back from a file."""
    made: dict[str, Any] = json.loads(json.dumps(data))
    return made


def ring(report: Report | None = None) -> dict[str, Any]:
    made = as_json([report or report_cases.ring_report()])
    return written({"schema": "ringattn bench ring 2", "provenance": PROVENANCE, **made})


def wrong_ring(name: str, *, trusted: bool) -> dict[str, Any]:
    """Of two candidates, one errs in dk and dv."""
    report = report_cases.ring_report()
    one = replace(report.found["Ulysses"], disagrees=["dk", "dv"], trusted=trusted)
    return ring(replace(report, found={**report.found, name: one}))


def links(*, wrong: int | None = 0, asked: tuple[str, ...] = EVERY, graphs: int = 0) -> dict[str, Any]:
    about: dict[str, Any] = {"transport": "nccl", "channels": None, "ctas": None, "way": "one way", "nbytes": 1 << 20}
    rows = [Link(**about, edge=edge, seconds=1e-3, ends={0: 1e-3}, wrong=wrong) for edge in ("0->1", "1->0")]
    beside = Beside(**about, edge="0->1", compute="matmul", compute_slowdown=1.75, transfer_slowdown=2.0)
    return written({
        "schema": "ringattn bench links 1", "asked": {"transports": asked, "graphs": graphs},
        "links": [row.as_json() for row in rows], "beside": [asdict(beside)],
        "closed": [{"transport": "copy_engine", "reason": "device is cpu"}],
    })  # fmt: skip


def overlap() -> dict[str, Any]:
    times: dict[str, Any] = {"compute": Samples((10.0,)), "communication": Samples((8.0,)), "contention": 1.25}
    two, three = (
        Ring("step", slots, slots - 1, 1, 4, **times, together=Samples((taken,)))
        for slots, taken in ((2, 14.0), (3, 12.0))
    )
    rows = [Ring("step", 1, 0, 1, note="a ring of 4 ranks needs at least 2"), two, three]
    told = {"schema": "ringattn bench overlap 1", "transport": "process_group", "bytes_per_second": 2e9}
    return written({**told, "rows": [row.as_json() for row in rows], "verdict": verdict(rows, 4)})


def memory(spread: object) -> dict[str, Any]:
    return {**report_cases.memory(), "spread": spread}


def kernels(*more: Number) -> dict[str, Any]:
    right = Number("error of dq", 0.5, "absolute", {"by": "ringattn", "head_dim": 64}, limit=1.0)
    absent = Number("not there", None, "", {"by": "cudnn", "head_dim": 64}, note="a GPU is needed")
    numbers = [one.as_json() for one in (right, absent, *more)]
    return written({"schema": "ringattn bench kernels 1", "numbers": numbers})


def host(hidden: bool | None) -> dict[str, Any]:
    row = {"phase": "forward", "host": 2.0, "compute": 1.0, "note": "", "hidden": hidden, "unit": "s"}
    return {"schema": "ringattn bench host 1", "rows": [row]}


def recorded() -> dict[str, Any]:
    about = {"call": report_cases.CALL, "provenance": PROVENANCE, "clock_error": 2e-6}
    return written(as_json_of_timeline(replace(report_cases.timeline("measured"), about=about)))


def checked(predicted: float, spread: float = 0.02) -> dict[str, Any]:
    row = Row("zigzag", "blocks", 32768, 10.0, spread, predicted)
    return written({"schema": "ringattn predict check 1", "rows": [asdict(row)]})


def told(data: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What the page says failed."""
    return failures(read(write(folder, file=data)))


DIFFERS = "differ from PyTorch's by more than rounding"
WRONG = [
    (wrong_ring("Ulysses", trusted=True), f"Ulysses, 2 ranks, 64 tokens: dk, dv {DIFFERS}"),
    (links(wrong=3), "nccl: 6 bytes did not arrive as they left"),
    (links(asked=("copy_engine",)), "copy_engine was asked for and does not open: device is cpu"),
    ({**links(), "links": []}, "it holds no links"),
    ({**recorded(), "ranks": []}, "it holds no ranks"),
    (memory(0.031), "memory per rank differs by 3.1% between worlds, 2% allowed"),
    (
        kernels(Number("error of dk", 2.0, "absolute", {"by": "ringattn"}, limit=1.0)),
        "error of dk (by ringattn) is 2.0, at most 1.0 allowed",
    ),
    (kernels(Number("not there", None, "", {"by": "ringattn"}, note="why")), "not there (by ringattn): why"),
    (host(False), "forward: the host needs longer to post a hop than the device to compute it"),
    (checked(8.7), "zigzag, blocks, 32k tokens: off by -13.0%, at most 12.0% allowed"),
    (checked(11.3), "zigzag, blocks, 32k tokens: off by +13.0%, at most 12.0% allowed"),
]


@pytest.mark.parametrize(("data", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_failed_in_a_single_bench_is_told_with_its_file(data: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert told(data, tmp_path) == [("file.json", why)]


SOUND = [
    ring(), wrong_ring(ZHUZILIN, trusted=False), links(), links(wrong=None), links(asked=("local",)),
    links(asked=("nccl", "copy_engine"), graphs=1), overlap(), memory(0.02), kernels(), host(True), host(None),
    checked(8.9), checked(11.9, 0.1), recorded(),
]  # fmt: skip


@pytest.mark.parametrize("data", SOUND, ids=[one["schema"] for one in SOUND])
def test_nothing_failed_where_nothing_did(data: dict[str, Any], tmp_path: Path) -> None:
    assert told(data, tmp_path) == []


def test_files_of_before_they_said_whom_they_trust() -> None:
    data = wrong_ring(ZHUZILIN, trusted=True)
    for one in data["measurements"][0]["candidates"]:
        del one["trusted"]
    assert views.failures(Bench("a", "ring", data)) == []
    data = wrong_ring("Ulysses", trusted=True)
    for one in data["measurements"][0]["candidates"]:
        del one["trusted"]
    assert len(views.failures(Bench("a", "ring", data))) == 1


def broken(data: dict[str, Any], *place: Any, value: object) -> dict[str, Any]:
    """The same with another value at one place."""
    made = written(data)
    *path, last = place
    at: Any = made
    for name in path:
        at = at[name]
    at[last] = value
    return made


@pytest.mark.parametrize(
    "data",
    [
        broken(ring(), "measurements", 0, "problem", value="x"),
        broken(ring(), "measurements", 0, "problem", "seqlen", value="x"),
        broken(ring(), "measurements", 0, "candidates", 0, "seconds", value=None),
        broken(ring(), "measurements", 0, "candidates", 0, "seconds", "samples", value=[]),
        broken(ring(), "measurements", 0, "candidates", 0, "seconds", "samples", value=[0.0]),
        broken(ring(), "measurements", 0, "candidates", 0, "errors", value={"out": "x"}),
        broken(checked(9.0), "rows", 0, "measured", value=0),
        broken(checked(9.0), "rows", 0, "predicted", value="x"),
        broken(checked(9.0), "rows", 0, value={}),
        memory(None),
    ],
)
def test_a_file_with_something_else_in_the_place_of_numbers_failed(data: dict[str, Any], tmp_path: Path) -> None:
    ((name, why),) = told(data, tmp_path)
    assert name == "file.json" and why.startswith(f"it is not as {data['schema']} is written: ")


def test_the_kept_results_name_the_prediction_that_was_off() -> None:
    failed = failures(read(RESULTS / "xeon-2-cores_2026-11-21"))
    (why,) = [why for name, why in failed if name == "predict-check-32k.json"]
    assert why == "zigzag, blocks, 32k tokens: off by -13.1%, at most 11.9% allowed"
    assert len(failed) == 1


@pytest.mark.parametrize("schema", OTHERS)
def test_files_of_other_commands_are_listed_and_have_not_failed(schema: str, tmp_path: Path) -> None:
    write(tmp_path, links=links(), another={"schema": schema})
    ran = CliRunner().invoke(command.app, [str(tmp_path)])
    assert ran.exit_code == 0
    assert f"not shown: another.json: there is no view for {schema}" in ran.stderr
    page = (tmp_path / "report.html").read_text()
    assert "Nothing failed." in page and f"<li><strong>another.json</strong>: {schema}</li>" in page
    (tmp_path / "links.json").unlink()
    with pytest.raises(Refused, match=f"holds no results.*another.json is of {schema}"):
        read(tmp_path)


def test_the_schemas_are_those_that_commands_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert OTHERS == ("ringattn predict 1", "ringattn predict sweep 1", "ringattn result", "ringattn doctor 1")
    finish(Result("tune", {"a": ""}, [{"a": 1}]), str(tmp_path / "tune.json"))
    assert json.loads((tmp_path / "tune.json").read_text())["schema"] in OTHERS


def cells(data: dict[str, Any], kind: str, number: int = 0) -> tuple[list[dict[str, Any]], str]:
    """The rows of a table by their columns, and the words above it."""
    made = views.tables(Bench("a.json", kind, data))[number]
    rows = [dict(zip(made.columns, row, strict=True)) for row in made.rows]
    return rows, "\n".join(made.above)


def test_every_column_of_bench_ring_is_there() -> None:
    report = report_cases.ring_report()
    report.found["Ulysses"] = replace(report.found["Ulysses"], exposed=0.25, sent=3_000_000, compute=2.5)
    found = replace(report, absent={"yunchang": "it needs a GPU"})
    rows, words = cells(ring(found), "ring")
    assert "Ulysses and the ring, 2 ranks: Ulysses is faster at every length measured (64)" in words
    assert "not there: yunchang: it needs a GPU" in words
    assert from_json(ring(found)) == [found]
    (expected,) = [row for row in rows_of(found) if row[""] == ULYSSES]
    (shown,) = [row for row in rows if row["by"].text == ULYSSES]
    columns = ("tokens/s", "TFLOP/s per rank", "% of ideal", "exposed ms", "MB sent", "peak MB")
    assert [float(shown[name].key) for name in columns] == [expected[name] for name in columns]
    errors, _ = cells(ring(found), "ring", 1)
    assert [(row["error of out"].text, row["agrees"].text) for row in errors] == [("1e-06", "yes")] * 3
    assert shown["compute ms"].text == "2,500"
    assert [row["% of ideal"].text for row in rows if row["by"].text == WHOLE] == ["50"]


def test_what_each_rank_of_a_timeline_did_is_there(tmp_path: Path) -> None:
    rows, words = cells(recorded(), "timeline")
    assert [row["rank"].text for row in rows] == ["0", "1"]
    assert [(row["compute_seconds"].text, row["wait_seconds"].text) for row in rows] == [("1.6", "0.2")] * 2
    assert words == "causal, zigzag, 64 tokens: 1,900 ms\nclocks of the ranks agree to 2.0e-06 s"
    ((call, names),) = pictured(read(write(tmp_path, rank_times=recorded())))
    assert call.layout_name == "zigzag" and call.layout.world == 2 and list(names) == ["rank_times.json"]


def test_a_wrong_result_is_marked_whoever_made_it() -> None:
    rows, _ = cells(wrong_ring(ZHUZILIN, trusted=False), "ring", 1)
    assert {row["by"].text: row["agrees"].flag for row in rows if row["agrees"].flag} == {ZHUZILIN: "wrong"}


def test_a_ring_of_the_first_schema_has_what_it_said() -> None:
    rows, _ = cells({**report_cases.ring(), "ringattn_seconds": {"wait": 0.5, "compute": 3.0}}, "ring")
    shown = {row["by"].text: (row["ms"].text, row["exposed ms"].text, row["compute ms"].text) for row in rows}
    assert shown["ringattn"] == ("4,000", "500", "3,000") and shown["usual ring"] == ("6,000", "", "")
    # one process with the threads of all ranks: its rate is not divided by them
    whole, ours = (float(rows[number]["TFLOP/s per rank"].key) for number in (0, 1))
    assert whole == pytest.approx(ours * 2 * 4 / 3, rel=1e-3)


def test_links_beside_compute_and_what_does_not_open_are_there() -> None:
    rows, words = cells(links(wrong=3), "links")
    assert words == "copy_engine does not open here: device is cpu"
    assert [row["wrong"].flag for row in rows] == ["wrong"] * 2 and "ends" not in rows[0]
    (beside,), _ = cells(links(), "links", 1)
    assert (beside["compute_slowdown"].text, beside["transfer_slowdown"].text) == ("1.75", "2")


def test_overlap_ends_with_its_verdict() -> None:
    rows, words = cells(overlap(), "overlap")
    assert "The third buffer pays here: it saves +14.3% of a step with 1 chunk" in words
    assert "Over process_group, throttled to 2.00 GB/s." in words
    assert [(row["within"].text, row["within"].flag) for row in rows] == [("", ""), ("no", "wrong"), ("yes", "")]
    assert rows[0]["note"].text == "a ring of 4 ranks needs at least 2" and rows[2]["together"].text == "12"


def test_kernels_have_limits_and_reasons() -> None:
    rows, _ = cells(kernels(Number("error of dk", 2.0, "absolute", {"by": "ringattn"}, limit=1.0)), "kernels")
    assert [(row["limit"].text, row["value"].flag, row["note"].text) for row in rows] == [
        ("1", "", ""), ("", "", "a GPU is needed"), ("1", "wrong", ""),
    ]  # fmt: skip


def test_words_stand_above_their_table(tmp_path: Path) -> None:
    page = html(read(write(tmp_path, memory=memory(0.0125), check=checked(8.0))))
    assert 'class="verdict bad"' in page and "<strong>check.json</strong>: zigzag, blocks, 32k tokens" in page
    for sentence in ("largest over smallest world: +1.25%, 2% allowed", "0 of 1 within 10% plus the spread"):
        assert f"<p>{sentence}</p>\n\n<div" in page
