"""``bench suite``: one file that is checked on reading, and that a later call goes on from."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.kernels import speed, targets
from ringattn.bench.kernels.shape import Shape
from ringattn.bench.provenance import provenance
from ringattn.bench.suite import brief, case_lists, result_file, ring_cases, tune_cases, workers
from ringattn.bench.suite import command as suite
from ringattn.bench.suite.cases import Case, NotHere, Number
from ringattn.bench.suite.workers import Outcome
from ringattn.bench.timeline.events import SOURCES, alike, from_chrome
from ringattn.bench.timing import Samples
from ringattn.bench.tune.run import Wish
from ringattn.kernels import Tile
from ringattn.kernels.tables import KERNELS

from . import suite_cases
from .tile_tables import H200

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
KEPT = Path(__file__).parents[1] / "bench" / "results" / "xeon-2-cores_2026-11-21" / "results.json"


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # put back what the command sets


def results() -> dict[str, Any]:
    number = Number("rate", 5.0, "GB/s", {"by": "x"}, limit=6, spread=0.1, note="a note")
    case = Case("good", "", suite_cases.good, 60, {"count": 1})
    made = suite.as_json(Outcome(case, "done", "", 1.0, [number, Number("gone", None, "s")]))
    whole = {"schema": result_file.SCHEMA, "budget": 480, "provenance": provenance(CPU), "cases": [made]}
    return dict(json.loads(json.dumps(whole)))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results()))
    (case,) = result_file.read(path)["cases"]
    first, second = result_file.numbers_of(case)
    assert first == Number("rate", 5.0, "GB/s", {"by": "x"}, limit=6, spread=0.1, note="a note")
    assert second.value is None


def broken(change: Any) -> dict[str, Any]:
    data = copy.deepcopy(results())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.update(schema="ringattn bench suite 9"), "schema is 'ringattn bench suite 9'"),
        (lambda data: data.pop("schema"), "schema is None"),
        (lambda data: data.pop("provenance"), "provenance is missing"),
        (lambda data: data["provenance"].pop("gpu"), "provenance.gpu is missing"),
        (lambda data: data.update(extra=1), "extra is not known"),
        (lambda data: data.update(budget="long"), "budget is 'long': it must be a number"),
        (lambda data: data.update(budget=True), "budget is True"),
        (lambda data: data["cases"].append(data["cases"][0]), "2 cases named 'good'"),
        (lambda data: data["cases"][0].update(state="fine"), "cases[0].state is 'fine'"),
        (lambda data: data["cases"][0]["numbers"][0].pop("unit"), "cases[0].numbers[0].unit is missing"),
        (lambda data: data["cases"][0]["numbers"][0].update(value="5"), "numbers[0].value is '5'"),
        (lambda data: data["cases"][0]["numbers"].append(3), "numbers[2] is 3: it must be an object"),
    ],
)
def test_what_is_not_a_results_file_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(ValueError) as refused:
        result_file.read(path)
    assert told in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_damage_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json"):
        result_file.read(path)
    with pytest.raises(typer.BadParameter, match="move it away"):
        suite.earlier(tmp_path, {"provenance": provenance(CPU)}, again=False)


def test_only_what_ended_well_is_kept() -> None:
    data = results()
    assert result_file.finished(data, "good", {"count": 1}) is not None
    assert result_file.finished(data, "good", {"count": 2}) is None  # it is another case now
    assert result_file.finished(data, "other", {"count": 1}) is None
    for state in ("failed", "cut short", "not run"):
        data["cases"][0]["state"] = state
        assert result_file.finished(data, "good", {"count": 1}) is None
    data["cases"][0].update(state="done")
    data["cases"][0]["numbers"][0]["fails"] = True
    assert result_file.finished(data, "good", {"count": 1}) is None


def test_other_code_is_put_aside_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, now = tmp_path / "results.json", {"provenance": provenance(CPU)}
    path.write_text(json.dumps(results()))
    assert suite.earlier(tmp_path, now, again=False)["cases"]
    old = results()
    old["provenance"]["ringattn"]["sources"] = "another"
    old["provenance"]["cpu"]["load"] = "9.9"  # which is no reason
    path.write_text(json.dumps(old))
    assert suite.earlier(tmp_path, now, again=False)["cases"] == []
    told = capsys.readouterr().err
    assert "ringattn.sources" in told and "load" not in told
    (aside,) = tmp_path.glob("results_*.json")
    assert json.loads(aside.read_text()) == old and not path.exists()
    path.write_text(json.dumps(results()))
    assert suite.earlier(tmp_path, now, again=True)["cases"] == []


class InProcess:
    """In the place of the pool: no processes, one case after the other."""

    def __init__(self, device: torch.device, ends: float, width: int, changed: Any) -> None:
        self._device, self._changed = device, changed

    def run(self, cases: Iterable[Case]) -> list[Outcome]:
        outcomes = [Outcome(case) for case in cases]
        for one in outcomes:
            self._changed(one)
            connection = SimpleNamespace(send=lambda sent, one=one: one.numbers.append(sent[1]))
            one.state, one.reason = workers.run_case(one.case, self._device, 60, connection)  # type: ignore[arg-type]
            self._changed(one)
        return outcomes


def test_the_suite_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call does some, a second one the others, a third what did not end well."""
    cases = [
        Case("first", "", suite_cases.good, 60, {"count": 1}),
        Case("fails", "", suite_cases.raises, 60),
        Case("last", "", suite_cases.lacks_something, 60),
    ]
    monkeypatch.setattr(suite, "cases_of", lambda place: cases)
    monkeypatch.setattr(suite, "Pool", InProcess)
    pid = iter(range(100, 200))
    monkeypatch.setattr(suite_cases.os, "getpid", lambda: next(pid))  # type: ignore[attr-defined]
    flags = ["bench", "suite", "--device", "cpu", "--out", str(tmp_path)]

    def run(*more: str) -> tuple[int, dict[str, Any], str]:
        ran = CliRunner().invoke(cli.app, [*flags, *more])
        told = result_file.read(tmp_path / "results.json")
        return ran.exit_code, {case["name"]: case for case in told["cases"]}, ran.output

    code, found, _ = run("--only", "first")
    assert code == 0 and list(found) == ["first"] and found["first"]["state"] == "done"
    measured = found["first"]["numbers"][0]["value"]
    code, found, text = run()
    assert code == 1 and list(found) == ["first", "fails", "last"]
    assert found["first"]["numbers"][0]["value"] == measured and "1 of 3 cases were measured before" in text
    assert (found["fails"]["state"], found["last"]["state"]) == ("failed", "not here")
    code, found, text = run("--only", "last")
    assert code == 0 and list(found) == ["first", "fails", "last"] and "1 of 1" in text
    code, found, _ = run("--only", "first", "--again")
    assert list(found) == ["first"] and found["first"]["numbers"][0]["value"] != measured


def test_a_timer_is_an_argument_of_the_cases_that_it_times() -> None:
    """So that what was measured by another one is measured anew; what no graph holds is by events, and stays."""
    graphed, clocked = (
        {case.name: case_lists.timed_by(case, timer).arguments.get("timer") for case in case_lists.gpu_cases()}
        for timer in ("graph", "clock")
    )
    by_graph = {name for name, timer in graphed.items() if timer == "graph"}
    assert {"targets", "ceilings", "fp8", "speed D128 causal", "kernels, every backend"} <= by_graph
    assert set(graphed.values()) == {"graph", None} and set(clocked.values()) == {"clock", None}
    by_clock = {name for name, timer in clocked.items() if timer}
    assert by_clock - by_graph == {
        "LocalWorld", "NCCL to itself", "overlap", "ring", "host time", "copy engine, two processes", "predicted",
    }  # fmt: skip
    others = {case.run.__name__ for case in case_lists.gpu_cases() if case.run not in case_lists.TIMED}
    assert others == {"launches", "accuracy", "beside", "timelines", "tuned"}
    assert clocked["NCCL to itself, replayed"] is None
    data, case = results(), next(case for case in case_lists.gpu_cases() if case.name == "targets")
    data["cases"][0] |= {"name": case.name, "arguments": dict(case.arguments)}
    kept = [
        result_file.finished(data, case.name, case_lists.timed_by(case, timer).arguments) for timer in ("", "graph")
    ]
    assert kept == [data["cases"][0], None]


@pytest.mark.parametrize("run", case_lists.TIMED)
def test_cases_take_their_timer(run: Callable[..., Any]) -> None:
    assert signature(run).parameters["timer"].default == ""


@pytest.mark.parametrize(
    ("kind", "timer", "more"), [("cpu", "clock", ""), ("cuda", "events", ""), ("cuda", "graph", "graph")]
)
def test_a_devices_own_timer_is_no_argument(kind: str, timer: str, more: str) -> None:
    assert suite.checked(timer, torch.device(kind)) == more and suite.checked("", torch.device(kind)) == ""


@pytest.mark.parametrize("timer", ["events", "graph", "sundial"])
def test_timers_of_a_gpu_are_refused_on_the_cpu(timer: str, tmp_path: Path) -> None:
    flags = ["bench", "suite", "--device", "cpu", "--out", str(tmp_path), "--timer", timer]
    ran = CliRunner().invoke(cli.app, flags, env=WIDE)
    assert ran.exit_code == 2 and f"timer is {timer!r}: on cpu it must be one of clock" in ran.output


def test_timelines_are_left_for_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured above predicted, of one call; put aside with results of another machine."""
    (listed,) = (case for case in case_lists.cpu_cases() if case.leaves)
    small = {"world": 2, "seqlen": 512, "heads": 2, "head_dim": 16, "dtype": "float32", "repeats": 1}
    monkeypatch.setattr(suite, "cases_of", lambda place: [replace(listed, arguments=small)])
    monkeypatch.setattr(suite, "Pool", InProcess)

    def run(*more: str) -> None:
        ran = CliRunner().invoke(cli.app, ["bench", "suite", "--device", "cpu", "--out", str(tmp_path), *more])
        assert ran.exit_code == 0, ran.output

    run()
    (case,) = result_file.read(tmp_path / "results.json")["cases"]
    assert case["state"] == "done" and case["arguments"] == small  # wherever the folder is
    lengths = {one["labels"]["by"]: one["value"] for one in case["numbers"] if one["name"] == "forward and backward"}
    traces = {by: tmp_path / f"timeline_{by}.json" for by in SOURCES}
    found = {by: from_chrome(json.loads(path.read_text())) for by, path in traces.items()}
    assert lengths == {by: pytest.approx(1e3 * one.seconds) for by, one in found.items()}
    assert alike(found["measured"], found["predicted"])
    page = (tmp_path / "report.html").read_text()
    assert 'id="timelines"' in page and "above predicted (timeline_predicted.json)" in page
    before = traces["measured"].read_text()
    run("--again")
    (aside,) = tmp_path.glob("results_*_timeline_measured.json")
    assert aside.read_text() == before != traces["measured"].read_text()
    assert (tmp_path / "report.html").read_text().count('class="scroll timeline"') == 1


@pytest.mark.parametrize("budget", ["1", pytest.param("480", marks=pytest.mark.nightly)])
def test_a_real_case_passes_the_schema(budget: str, tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--only", "ceilings", "--budget", budget, "--out", str(tmp_path)]
    ran = CliRunner().invoke(cli.app, ["bench", "suite", *flags])
    assert ran.exit_code == 0, ran.output
    (one,) = result_file.read(tmp_path / "results.json")["cases"]
    assert one["state"] == ("not run" if budget == "1" else "done")


def test_the_gpus_numbers_pass_the_schema() -> None:
    """Those of the table of targets, whose labels are the richest, and of kernels."""
    rates = {"forward:ringattn": 100.0, "forward:flash": 80.0, "forward:cudnn": 120.0}
    judged = [number for target in targets.TARGETS for number in targets.judged(target, rates)]
    shape = Shape(64, causal=False)
    told = list(speed.numbers({"forward:ringattn": Samples((1e-3,)), speed.PRODUCT: Samples((1.0,))}, shape, 1))
    case = Case("targets", "", suite_cases.good, 60)
    data = results()
    data["cases"] = [suite.as_json(Outcome(case, "done", "", 1.0, [*judged, *told]))]
    result_file.check(json.loads(json.dumps(data)))


def test_cases_that_need_another_machine_say_so() -> None:
    with pytest.raises(NotHere, match="no GPU"):
        next(tune_cases.tuned(CPU, seqlens=(8192,)))
    with pytest.raises(NotHere, match="CPU"):
        next(ring_cases.memory(torch.device("cuda"), worlds=(2,), tokens=64))


@pytest.mark.parametrize(
    ("takes", "ran", "state"),
    [
        ((5, 10, 30), ("forward", "dq", "dkdv"), ("done", "")),
        ((15, 20, 30), ("forward", "dq"), ("cut short", "dkdv was not begun: 35 of 45 s were over")),
        ((40, 1, 1), ("forward",), ("cut short", "dq was not begun: 40 of 45 s were over")),
    ],
)
def test_tuning_tells_kernel_after_kernel_what_it_has_time_for(
    takes: tuple[float, ...], ran: tuple[str, ...], state: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stand-in whose kernels take these seconds: numbers of one are there before the next is begun."""
    now, sent = [0.0], list[Any]()
    seconds = dict(zip(KERNELS, takes, strict=True))

    def tune(wish: Wish, bars: object) -> tuple[list[Any], None]:
        (kernel,) = wish.kernels
        assert wish.near == tune_cases.NEAR and wish.budget == pytest.approx(6)
        assert [number.labels["kernel"] for number in sent] == list(KERNELS[: KERNELS.index(kernel)])
        now[0] += seconds[kernel]
        tile = Tile(64, 64, 8, 2)
        point = SimpleNamespace(kernel=kernel, mask="full", length=8192)
        return [SimpleNamespace(point=point, tile=tile, default=tile, measured=None)], None

    monkeypatch.setattr(tune_cases, "tune", tune)
    monkeypatch.setattr(tune_cases, "gpu_of", lambda device: H200)
    monkeypatch.setattr(tune_cases, "time", SimpleNamespace(monotonic=lambda: now[0]))
    case = next(case for case in case_lists.gpu_cases() if case.name == "tune")
    connection: Any = SimpleNamespace(send=lambda message: sent.append(message[1]))
    assert workers.run_case(case, torch.device("cuda"), case.seconds, connection) == state
    assert tuple(number.labels["kernel"] for number in sent) == ran


def test_a_tuned_tile_is_told_beside_the_default() -> None:
    point = SimpleNamespace(kernel="dq", mask="full", length=8192)
    tile = Tile(64, 64, 8, 2)
    measured = SimpleNamespace(alone=[SimpleNamespace(seconds=2e-3)] * 3, baseline=[SimpleNamespace(seconds=3e-3)] * 3)
    found: Any = SimpleNamespace(point=point, tile=tile, default=tile, measured=measured)
    time, ratio = tune_cases.numbers(found)
    assert time.value == pytest.approx(2.0) and ratio.value == pytest.approx(1.5)
    assert time.labels["tile"] == "64x64 8w 2s"
    found.measured = None
    (absent,) = tune_cases.numbers(found)
    assert absent.value is None and absent.note == "not measured"


def test_the_last_table_of_the_kept_results_is_short() -> None:
    """A line or two per case, with the length up to which all-gather or Ulysses wins; what fails is always there."""
    data = result_file.read(KEPT)
    cases = {case.name: case for case in case_lists.cpu_cases()}
    outcomes = [suite.restored(cases[one["name"]], one) for one in data["cases"]]
    told = suite.report(data, outcomes).splitlines()
    assert len(told) <= 3 * len(outcomes) and max(map(len, told)) <= 140
    everything = " ".join(told)
    assert "Ulysses is faster at every length measured (2k to 4k)" in everything
    assert "all-gather and the ring, 2 ranks: the ring is faster" in everything
    (ring,) = (line for line in told if line.startswith("whole ring "))
    assert "14/14" in ring and ring.endswith(
        "of ideal, 4k tokens: 65.3 to 86.2 % (ringattn contiguous; ringattn zigzag)"
    )
    (overlap,) = (line for line in told if line.startswith("overlap "))
    assert overlap.endswith("exposed communication: 40 to 80.3 ms (prefetch 2; prefetch 0)")
    for one in outcomes:
        assert any(line.startswith(f"{one.case.name} ") for line in told)
    outcomes[0].numbers.append(Number("error of dq", None, "absolute", {"D": 64}, limit=1.0))
    assert "launches: error of dq (D 64) is None, at most 1 allowed" in suite.report(data, outcomes)


def test_kernels_are_told_of_their_longest_sequence() -> None:
    shapes = [Shape(length, causal=False) for length in (64, 128)]
    numbers = [one for shape in shapes for one in speed.numbers({"forward:ringattn": Samples((1e-3,))}, shape, 1)]
    case = Case("speed", "", speed.speed, 60)
    kept = brief.longest([Outcome(case, "done", "", 1.0, numbers)])
    assert {number.labels["seqlen"] for number in kept if "seqlen" in number.labels} == {128}
    assert brief.longest([Outcome(replace(case, run=suite_cases.good), "done", "", 1.0, numbers)]) == numbers


def test_numbers_that_decide_a_case_have_the_names_that_it_yields() -> None:
    """Of the kept results; those of a GPU alone are not there."""
    told = {number["name"] for case in result_file.read(KEPT)["cases"] for number in case["numbers"]}
    names = {name for decides in brief.DECIDING.values() for name in decides}
    on_gpus = {"host time of a launch", "sent to itself", "prediction off", "compute slowed", "default over best tile"}
    assert names - told <= on_gpus
