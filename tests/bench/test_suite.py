"""``bench suite``: command lines run as processes within a budget, and one file that a later call goes on from."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from _pytest.mark.expression import Expression
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.provenance import provenance
from ringattn.bench.kernels import speed
from ringattn.bench.suite import command as suite
from ringattn.bench.suite import decisions as deciding
from ringattn.bench.suite import one_case, parts, processes, result_file
from ringattn.bench.suite.cases import Case, NotHere, Number
from ringattn.bench.suite.parts import OUT, PYTHON, SECONDS, Part
from ringattn.bench.suite.processes import Outcome

from ..support import suite_stand_in

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
ORDER = [
    "launches", "right bfloat16 D128", "right hopper bfloat16 D128", "right single_pass bfloat16 D128", "ceilings",
    "targets", "beside", "beside NCCL", "local", "nccl-1", "copy_engine-2", "compiled", "killed", "captured", "nccl-2",
    "host", "racecheck", "memcheck", "fp8", "LocalWorld", "tune",
]  # fmt: skip


def results() -> dict[str, Any]:
    number = Number("rate", 5.0, "GB/s", {"by": "x"}, limit=6, spread=0.1, note="a note")
    made = suite.as_json(Outcome(GOOD, "done", "", 1.0, [number, Number("gone", None, "s")]))
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
        (lambda data: data.update(decisions=[{"question": "?"}]), "decisions[0].answer is missing"),
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
        suite.earlier(tmp_path, {"provenance": provenance(CPU)}, [], again=False)


def test_only_what_ended_well_is_kept() -> None:
    data = results()
    assert result_file.finished(data, "good", suite.asked(GOOD)) is not None
    assert result_file.finished(data, "good", {"count": 2}) is None  # it is another case now
    assert result_file.finished(data, "other", suite.asked(GOOD)) is None
    for state in ("failed", "cut short", "not run"):
        data["cases"][0]["state"] = state
        assert result_file.finished(data, "good", suite.asked(GOOD)) is None
    data["cases"][0].update(state="done")
    data["cases"][0]["numbers"][0]["fails"] = True
    assert result_file.finished(data, "good", suite.asked(GOOD)) is None


def test_other_code_is_put_aside_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the files and logs of its parts."""
    path, now, files = tmp_path / "results.json", {"provenance": provenance(CPU)}, [part("x", f"{OUT}/x.json")]

    def earlier(data: dict[str, Any], *, again: bool = False) -> list[Any]:
        path.write_text(json.dumps(data))
        (tmp_path / "x.json").write_text("{}")
        return list(suite.earlier(tmp_path, now, files, again=again)["cases"])

    assert earlier(results()) and (tmp_path / "x.json").exists()
    old = results()
    old["provenance"]["ringattn"]["sources"] = "another"
    old["provenance"]["cpu"]["load"] = "9.9"  # which is no reason
    old["provenance"]["date"] = "2026-01-02"
    assert earlier(old) == []
    told = capsys.readouterr().err
    assert "ringattn.sources" in told and "load" not in told
    aside = tmp_path / "results_2026-01-02"
    assert {one.name for one in aside.iterdir()} == {"results.json", "x.json"} and not path.exists()
    assert json.loads((aside / "results.json").read_text()) == old
    assert earlier(results(), again=True) == []


# the processes


def part(name: str, *words: str, code: str = "", seconds: float = 5.0, **more: Any) -> Part:
    """A part that needs neither torch nor this package."""
    return Part(name, "", (PYTHON, "-S", "-c", code, *words), seconds, **more)


GOOD = part("good")


def run(parts: list[Part], out: Path, budget: float = 60.0, width: int = 2) -> list[Outcome]:
    ends = time.monotonic() + budget
    return processes.run(parts, out=out, device="cpu", ends=ends, width=width, changed=lambda one: None)


CHILD = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', {}], start_new_session=True); "
HANGS = "import time; time.sleep(60)"
TELLS = "import json, os; d = {'name': 'process', 'value': os.getpid(), 'unit': '', 'labels': {}}; "
TELLS += "print(json.dumps(d), flush=True); "


def test_bad_parts_cost_themselves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth hangs, and so does what it started in a session of its own: none of it runs on."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    child = CHILD.format(repr(HANGS)) + f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); "
    found = run(
        [
            part("good", code=TELLS),
            part("raises", code=TELLS + "raise ValueError('it went wrong')"),
            part("lacks", code="print('no such library'); raise SystemExit(69)"),
            part("hangs", code=TELLS + child + HANGS, seconds=1.0),
            part("absent", missing="no GPU"),
            part("last", code="print('here')"),
        ],
        tmp_path, budget=9.0,
    )  # fmt: skip
    assert [one.state for one in found] == ["done", "failed", "not here", "failed", "not here", "done"]
    assert "it went wrong" in found[1].reason and found[2].reason == "no such library"
    assert "ended with all its processes" in found[3].reason and found[4].reason == "no GPU"
    assert "Fatal Python error: Aborted" in (tmp_path / "logs" / "hangs.txt").read_text()  # and where it was
    assert [len(one.numbers) for one in found] == [1, 1, 0, 1, 0, 0]
    assert [one.good for one in found] == [True, False, True, False, True, True]
    assert not Path("/proc", (tmp_path / "child").read_text(), "exe").exists()
    assert (tmp_path / "logs" / "last.txt").read_text() == "here\n"


def test_parts_of_a_call_that_was_killed_are_ended_by_the_next(tmp_path: Path) -> None:
    orphan = subprocess.Popen(
        [sys.executable, "-c", HANGS], env=os.environ | {processes.MARK: f"{processes.mark_of(tmp_path)}1.1|"}
    )
    other = subprocess.Popen(
        [sys.executable, "-c", HANGS], env=os.environ | {processes.MARK: f"{processes.mark_of(tmp_path / 'x')}1.1|"}
    )
    try:
        run([part("good")], tmp_path)
        assert orphan.wait(10) != 0 and other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_ends_parts_as_ctrl_c_does(number: signal.Signals, tmp_path: Path) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
    with pytest.raises(KeyboardInterrupt), suite.ending_as_interrupted():
        run([part("hangs", code=HANGS)], tmp_path)
    assert not [*processes.marked(processes.mark_of(tmp_path))]


def test_time_that_is_left_over_goes_to_those_that_follow(tmp_path: Path) -> None:
    """A share is of what is left, and never less than its own seconds while they last; the command is told half."""
    monkey = [part(name, SECONDS, code="import sys; print(sys.argv[1])", seconds=10.0) for name in "abc"]
    run(monkey, tmp_path, budget=90.0)
    told = [int((tmp_path / "logs" / f"{name}.txt").read_text()) for name in "abc"]
    assert 14 <= told[0] <= 15 and 21 <= told[1] <= 22 and 40 <= told[2] <= 45
    late = run([part("cut", code=HANGS, seconds=0.9), part("late", seconds=50.0)], tmp_path, budget=0.6)
    assert [one.state for one in late] == ["cut short", "not run"] and all(one.good for one in late)
    assert late[1].reason == "it takes up to 50 s, 0 s were left"


def test_parts_that_are_not_timed_run_side_by_side(tmp_path: Path) -> None:
    """Two at a time, though there are three; and alone what stands alone."""
    code = f"import os, sys, time; p = {str(tmp_path)!r} + '/' + sys.argv[1]; open(p, 'w').close(); time.sleep(0.3); "
    code += f"print(len([x for x in os.listdir({str(tmp_path)!r}) if len(x) == 1])); os.remove(p)"
    run([part(name, name, code=code, beside="x" if name < "d" else "") for name in "abcd"], tmp_path)
    seen = [int((tmp_path / "logs" / f"{name}.txt").read_text()) for name in "abcd"]
    assert max(seen) == 2 and seen[3] == 1


def test_tests_are_counted() -> None:
    """Also of a log that was cut off."""
    log = "tests/test_a.py::test_x[1] PASSED [ 10%]\ntests/test_a.py::test_y FAILED [ 20%]\ntests/test_a.py::test_z"
    assert {one.name: (one.value, one.fails) for one in processes.tests_in(log)} == {
        "passed": (1, False), "failed": (1, True),
    }  # fmt: skip
    skipped = "tests/test_a.py::test_x SKIPPED (n...) [100%]\nSKIPPED [1] tests/test_a.py:3: needs a CUDA device\n"
    assert processes.ended(0, skipped) == ("not here", "SKIPPED [1] tests/test_a.py:3: needs a CUDA device")
    assert processes.ended(0, log.replace("FAILED", "PASSED") + skipped)[0] == "done"
    assert processes.ended(5, "")[0] == "failed"  # no test has such a name


def test_a_case_tells_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    told = [Number("rate", 5.0, "GB/s", {"by": "x"}, limit=6.0), Number("gone", float("nan"), "s", limit=1.0)]
    assert one_case.tell(Case("good", "", lambda device: iter(told)), CPU) == 0
    first, second = processes.numbers_in("a warning\n" + capsys.readouterr().out + '{"name": "cut')
    assert first == told[0] and second.fails

    def lacks(device: torch.device) -> Any:
        raise NotHere("no such library")
        yield

    assert one_case.tell(Case("lacks", "", lacks), CPU) == 69 and capsys.readouterr().out == "no such library\n"


# the lists


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_parts_are_named_once_and_can_be_called(device: str) -> None:
    found = parts.parts_of(device)
    assert len({one.name for one in found}) == len({(*one.leaves, one.name) for one in found}) == len(found)
    for one in found:
        if "pytest" not in one.command and "compute-sanitizer" not in one.command:
            assert one.command[0] == PYTHON and one.command[2] in ("ringattn", one_case.__name__)


def test_a_gpu_is_asked_in_this_order_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each takes all of its time, those of correctness side by side."""
    names = [one.name for one in parts.gpu_parts()]
    assert [name for name in names if name in ORDER] == ORDER and names[-1] == "tune"
    assert all(name.startswith("right") for name in names if name not in ORDER)
    alone = sum(one.seconds for one in parts.gpu_parts() if not one.beside)
    beside = {one.beside: one.seconds for one in parts.gpu_parts() if one.beside}
    assert alone + sum(beside.values()) <= 480 - suite.WRITING_SECONDS
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    several = [one.name for one in parts.gpu_parts()]
    assert several[-4:] == ["links", "overlap", "ring", "tune"] and several[:-4] == names[:-1]


def test_times_of_processes_on_one_gpu_are_time_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def sliced(gpus: int) -> set[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        made = {one.name: suite.as_json(Outcome(one, "done")) for one in parts.gpu_parts()}
        assert all("time slices" in told["about"] for told in made.values() if told.get("time_slices"))
        return {name for name, told in made.items() if told.get("time_slices")}

    assert sliced(1) == {"copy_engine-2", "killed", "nccl-2"} and sliced(2) == set()


@pytest.mark.nightly
def test_every_part_of_tests_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that pytest collects."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
         "tests/properties/test_on_a_gpu.py"],
        cwd=parts.CLONE, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    chosen = {one.name: one.command[-1] for one in parts.gpu_parts() if "-k" in one.command}
    for name, words in chosen.items():
        wanted = Expression.compile(words)

        def within(word: str, /, *, line: str, **_: object) -> bool:
            return word in line

        count = sum(wanted.evaluate(partial(within, line=line)) for line in found)
        assert count == 1 if name in ("killed", "captured", "compiled") else count > 10, name


# what is decided


def decided(**changes: Any) -> dict[str, str]:
    rates = {"ringattn": 500.0, "ringattn hopper": 600.0, "ringattn single pass": 400.0} | changes.pop("rates", {})
    shapes = [("full", 128), ("causal", 128), ("full", 64)]
    numbers = [
        {"name": name, "unit": "TFLOP/s", "value": value, "labels": {"by": by, "mask": mask, "head_dim": dim}}
        for name in ("forward", "backward") for by, value in rates.items() for mask, dim in shapes
    ]  # fmt: skip
    states = {one.name: "done" for one in parts.gpu_parts()} | changes
    cases = [{"name": name, "state": state, "numbers": []} for name, state in states.items()]
    next(case for case in cases if case["name"] == "targets")["numbers"] = numbers
    return {row["question"]: row["answer"] for row in deciding.decisions(cases)}


def test_what_is_right_and_faster_becomes_the_default() -> None:
    forward, backward, single = (f"{what} is to be the default of sm_90" for what in deciding.FASTER)
    answers = decided()
    assert {name: answer for name, answer in answers.items() if answer != "yes"} == {single: "no", backward: "open"}
    assert answers[forward] == "yes"
    assert decided(racecheck="failed")[forward] == "no" and decided(racecheck="not run")[forward] == "open"
    assert decided(rates={"ringattn hopper": 499.0})[forward] == "no"
    assert decided(rates={"ringattn hopper": None})[forward] == "open"
    assert decided(**{"nccl-2": "not here"})["nccl passes, two ranks"] == "open"


# the command


def test_the_suite_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call does some, a second one the others, a third what did not end well."""
    listed = [part("first", code=TELLS), part("fails", code="raise ValueError"), part("last", missing="no GPU")]
    monkeypatch.setattr(suite, "parts_of", lambda kind: listed)
    flags = ["bench", "suite", "--device", "cpu", "--out", str(tmp_path)]

    def call(*more: str) -> tuple[int, dict[str, Any], str]:
        ran = CliRunner().invoke(cli.app, [*flags, *more])
        told = result_file.read(tmp_path / "results.json")
        return ran.exit_code, {case["name"]: case for case in told["cases"]}, ran.output

    code, found, _ = call("--only", "first")
    assert code == 0 and list(found) == ["first"] and found["first"]["state"] == "done"
    measured = found["first"]["numbers"][0]["value"]
    code, found, text = call()
    assert code == 1 and list(found) == ["first", "fails", "last"]
    assert found["first"]["numbers"][0]["value"] == measured and "1 of 3 parts were run before" in text
    assert (found["fails"]["state"], found["last"]["state"]) == ("failed", "not here")
    code, found, text = call("--only", "last")
    assert code == 0 and list(found) == ["first", "fails", "last"] and "1 of 1" in text
    code, found, _ = call("--only", "first", "--again")
    assert list(found) == ["first"] and found["first"]["numbers"][0]["value"] != measured


def test_results_are_kept_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what has ended, however the call ends."""
    listed = [part("first"), part("second", code=f"print(open({str(tmp_path / 'results.json')!r}).read())")]
    monkeypatch.setattr(suite, "parts_of", lambda kind: listed)
    CliRunner().invoke(cli.app, ["bench", "suite", "--device", "cpu", "--out", str(tmp_path)])
    during = json.loads((tmp_path / "logs" / "second.txt").read_text())
    assert [(case["name"], case["state"]) for case in during["cases"]] == [("first", "done"), ("second", "not run")]


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags in (["--device", "cuda"], ["--only", "nothing"], ["--device", "tpu"]):
        assert CliRunner().invoke(suite.app, flags).exit_code == 2


def test_failures_are_told_last() -> None:
    outcomes = [
        Outcome(part("raises"), "failed", "exit code 1\nValueError: it went wrong\n", 2.0),
        Outcome(
            part("above"), "done", "", 3.0,
            [Number("error of dq", 2.0, "absolute", {"D": 64}, limit=1.0), Number("rate", 5.0, "GB/s")],
        ),
    ]  # fmt: skip
    told = suite.report({"provenance": provenance(CPU)}, outcomes, [{"question": "?", "answer": "yes", "why": ""}])
    assert "raises: ValueError: it went wrong" in told and "yes" in told
    assert "error of dq (D 64) is 2.0, at most 1 allowed" in told
    assert "0/1" in told and "200%" in told and "rate: 5 GB/s" in told


@pytest.mark.nightly
def test_a_real_case_passes_the_schema(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--only", "ceilings", "--out", str(tmp_path)]
    ran = CliRunner().invoke(cli.app, ["bench", "suite", *flags])
    assert ran.exit_code == 0, ran.output
    (one,) = result_file.read(tmp_path / "results.json")["cases"]
    assert one["state"] == "done"


def test_the_gpus_numbers_pass_the_schema() -> None:
    """Those of the table of targets, whose labels are the richest, and of kernels."""
    rates = {"forward:ringattn": 100.0, "forward:flash": 80.0, "forward:cudnn": 120.0}
    judged = [number for target in speed.TARGETS for number in speed.judged(target, rates)]
    data = results()
    data["cases"] = [suite.as_json(Outcome(part("targets"), "done", "", 1.0, judged))]
    result_file.check(json.loads(json.dumps(data)))


@pytest.mark.nightly
def test_one_visit_to_a_gpu_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts in their order on stand-ins, in under three minutes; a second call has nothing left to do."""
    listed = suite_stand_in.rehearsed()
    monkeypatch.setattr(suite, "parts_of", lambda kind: listed)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["bench", "suite", "--device", "cpu", "--budget", "1200", "--out", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = CliRunner().invoke(cli.app, flags)
    assert ran.exit_code == 0, ran.output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 180  # whatever else runs here
    data = result_file.read(tmp_path / "results.json")
    assert [case["name"] for case in data["cases"]] == [one.name for one in parts.gpu_parts()]
    assert {case["state"] for case in data["cases"]} == {"done"}
    answers = {row["question"]: row["answer"] for row in deciding.decisions(data["cases"])}
    assert {answers[question] for question in deciding.QUESTIONS} == {"yes"}
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("host.json", "beside_NCCL.json", "tune.json"))
    assert f"{len(listed)} of {len(listed)} parts were run before" in CliRunner().invoke(cli.app, flags).output
