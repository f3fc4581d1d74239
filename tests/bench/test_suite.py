"""``bench suite``: command lines run as processes within a budget, and one file that a later call goes on from."""

from __future__ import annotations

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
from ringattn.bench.common.result import Result, read
from ringattn.bench.suite import command as suite
from ringattn.bench.suite import decisions as deciding
from ringattn.bench.suite import device_cases, parts, processes
from ringattn.bench.suite.parts import OUT, PYTHON, SECONDS, Part
from ringattn.bench.suite.processes import Outcome

from ..support import suite_stand_in

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
ORDER = [
    "launches", "right bfloat16 D128", "right hopper bfloat16 D128", "right single_pass bfloat16 D128", "ceilings",
    "targets", "beside NCCL", "local", "nccl-1", "copy_engine-2", "compiled", "killed", "captured", "nccl-2",
    "host", "racecheck", "memcheck", "fp8", "LocalWorld", "tune",
]  # fmt: skip


def part(name: str, *words: str, code: str = "", seconds: float = 5.0, **more: Any) -> Part:
    """A part that needs neither torch nor this package."""
    return Part(name, "", (PYTHON, "-S", "-c", code, *words), seconds, **more)


GOOD = part("good")


def results(**changes: Any) -> dict[str, Any]:
    """A file of the suite, read as JSON."""
    made = Result("bench suite", suite.UNITS, [Outcome(GOOD, "done").row], provenance=provenance(CPU)).as_json()
    return dict(json.loads(json.dumps(made | changes)))


# going on from a folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[1]", "it must be an object"),
        (json.dumps({"schema": "ringattn bench suite 1"}), "its schema is not 'ringattn result'"),
        (json.dumps(results(case="bench links")), "is of bench links"),
        (json.dumps(results(units={"part": ""}, rows=[{"part": "x"}])), "is of bench suite"),
    ],
)
def test_a_folder_of_something_else_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(typer.BadParameter, match="move it away") as refused:
        suite.earlier(tmp_path, provenance(CPU), again=False)
    assert message in str(refused.value) and "results.json" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--device", "tpu"], "tpu"),
        (["--only", "nothing"], "no part has that in its name"),
        (["--out", __file__], "that is no folder"),
        (["--budget", "0"], "--budget"),
    ],
)
def test_refusals(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = CliRunner().invoke(suite.app, ["--device", "cpu", *flags], env={"COLUMNS": "300"})
    assert ran.exit_code == 2 and message in ran.output, ran.output


def test_only_what_ended_well_is_kept() -> None:
    row = Outcome(GOOD, "done").row
    assert suite.ended_well(row, GOOD) and suite.ended_well({**row, "state": "not here"}, GOOD)
    assert not suite.ended_well(None, GOOD) and not suite.ended_well(row, part("good", "another command"))
    assert not any(suite.ended_well({**row, "state": state}, GOOD) for state in ("failed", "cut short", "not run"))


def test_a_folder_of_other_code_is_put_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def earlier(data: dict[str, Any], *, again: bool = False) -> list[Any]:
        out.mkdir(exist_ok=True)
        (out / "results.json").write_text(json.dumps(data))
        return list(suite.earlier(out, provenance(CPU), again=again))

    old = results()
    old["provenance"]["cpu"]["load"] = "9.9"  # which is no reason
    old["provenance"]["date"] = "2026-01-02"
    assert earlier(old)
    old["provenance"]["ringattn"]["sources"] = "another"
    assert earlier(old) == []
    told = capsys.readouterr().err
    assert "ringattn.sources" in told and "load" not in told
    assert json.loads((tmp_path / "out_2026-01-02" / "results.json").read_text()) == old and not out.exists()
    with pytest.raises(typer.BadParameter, match="cannot put"):
        earlier(old)
    assert earlier(results(), again=True) == []


# the processes


def run(parts: list[Part], out: Path, budget: float = 60.0, width: int = 2) -> list[Outcome]:
    ends = time.monotonic() + budget
    return processes.run(parts, out=out, device="cpu", ends=ends, width=width, changed=lambda one: None)


CHILD = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', {}], start_new_session=True); "
HANGS = "import time; time.sleep(60)"


def leaves(failed: list[str] | None = None, notes: list[str] | None = None) -> str:
    """Code that writes a result to the file that is its argument."""
    made = Result("x", {"a": ""}, [{"a": 1}], failed or [], notes or []).as_json()
    return f"import sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps(made))}); "


def test_bad_parts_cost_themselves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth hangs, and so does what it started in a session of its own: none of it runs on."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    child = CHILD.format(repr(HANGS)) + f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); "
    found = run(
        [
            part("good", f"{OUT}/good.json", code=leaves(notes=["first", "best: 3"])),
            part("raises", code="raise ValueError('it went wrong')"),
            part("lacks", code="print('no such library'); raise SystemExit(69)"),
            part("hangs", f"{OUT}/hangs.json", code=leaves() + child + HANGS, seconds=1.0),
            part("absent", missing="no GPU"),
            part("wrong", f"{OUT}/wrong.json", code=leaves(["a is 2"])),
            part("silent", f"{OUT}/silent.json"),
            part("last", code="print('here')"),
        ],
        tmp_path, budget=9.0,
    )  # fmt: skip
    states = ["done", "failed", "not here", "failed", "not here", "failed", "failed", "done"]
    assert [one.state for one in found] == states
    assert [one.found for one in found] == ["best: 3", "", "", "1 rows", "", "1 rows", "", ""]
    assert found[1].reason == "exit code 1: ValueError: it went wrong" and found[2].reason == "no such library"
    assert "ended with all its processes" in found[3].reason and found[4].reason == "no GPU"
    assert found[5].row["reason"] == "a is 2" and "silent.json cannot be read" in found[6].reason
    assert "Fatal Python error: Aborted" in (tmp_path / "logs" / "hangs.txt").read_text()  # and where it was
    assert not Path("/proc", (tmp_path / "child").read_text(), "exe").exists()
    assert (tmp_path / "logs" / "last.txt").read_text() == "here\n"


def test_parts_of_a_call_that_was_killed_are_ended_by_the_next(tmp_path: Path) -> None:
    orphan, other = (
        subprocess.Popen(
            [sys.executable, "-S", "-c", HANGS], env=os.environ | {processes.MARK: f"{processes.mark_of(out)}1.1|"}
        )
        for out in (tmp_path, tmp_path / "x")
    )
    try:
        run([GOOD], tmp_path)
        assert orphan.wait(10) != 0 and other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_ends_parts_and_keeps_what_is_known(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "parts_of", lambda kind: [part("first"), part("hangs", code=HANGS)])
    before = signal.getsignal(number)
    threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
    ran = CliRunner().invoke(suite.app, ["--device", "cpu", "--out", str(tmp_path)])
    assert ran.exit_code == 130 and "interrupted: what is known is kept" in ran.output and not ran.stdout
    assert [row["state"] for row in read(tmp_path / "results.json").rows] == ["done", "not run"]
    assert not [*processes.marked(processes.mark_of(tmp_path))] and signal.getsignal(number) == before


def test_time_that_is_left_over_goes_to_those_that_follow(tmp_path: Path) -> None:
    """A share is of what is left, and never less than its own seconds while they last; the command is told half."""
    three = [part(name, SECONDS, code="import sys; print(sys.argv[1])", seconds=10.0) for name in "abc"]
    run(three, tmp_path, budget=90.0)
    told = [int((tmp_path / "logs" / f"{name}.txt").read_text()) for name in "abc"]
    assert 14 <= told[0] <= 15 and 21 <= told[1] <= 22 and 40 <= told[2] <= 45
    late = run([part("cut", code=HANGS, seconds=0.9), part("late", seconds=50.0)], tmp_path, budget=0.6)
    assert [one.state for one in late] == ["cut short", "not run"]
    assert late[1].reason == "it takes up to 50 s, 0 s were left"


def test_parts_that_are_not_timed_run_side_by_side(tmp_path: Path) -> None:
    """Two at a time, though there are three; and alone what stands alone."""
    code = f"import os, sys, time; p = {str(tmp_path)!r} + '/' + sys.argv[1]; open(p, 'w').close(); time.sleep(0.3); "
    code += f"print(len([x for x in os.listdir({str(tmp_path)!r}) if len(x) == 1])); os.remove(p)"
    listed = [part(name, name, code=code, beside="x" if name < "d" else "") for name in "abcd"]
    run(listed, tmp_path)
    seen = [int((tmp_path / "logs" / f"{name}.txt").read_text()) for name in "abcd"]
    assert max(seen) == 2 and seen[3] == 1
    assert processes.seconds_of([*listed, part("absent", missing="no GPU")], 2) == 15.0


def test_tests_are_counted() -> None:
    log = "tests/test_a.py::test_x[1] PASSED [ 10%]\n===== 1 failed, 2 skipped in 0.12s =====\n"
    assert processes.TESTED.match(processes.last_of(log))[1] == "1 failed, 2 skipped"  # type: ignore[index]
    skipped = "SKIPPED [1] tests/test_a.py:3: needs a CUDA device\n== 1 skipped, 96 deselected in 2.80s =="
    assert processes.ended(0, skipped) == ("not here", "SKIPPED [1] tests/test_a.py:3: needs a CUDA device")
    assert processes.ended(0, skipped.replace("96 deselected", "1 passed"))[0] == "done"
    assert processes.ended(5, "")[0] == "failed"  # no test has such a name


# the lists


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_parts_are_named_once_and_leave_a_result(device: str) -> None:
    found = parts.parts_of(device)
    assert len({one.name for one in found}) == len({(*one.leaves, one.name) for one in found}) == len(found)
    for one in found:
        if "pytest" not in one.command and "compute-sanitizer" not in one.command:
            assert one.command[0] == PYTHON and one.command[2] in ("ringattn", device_cases.__name__) and one.result


def test_a_gpu_is_asked_in_this_order_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each takes all of its time, those of correctness side by side."""
    found = parts.gpu_parts()
    names = [one.name for one in found]
    assert [name for name in names if name in ORDER] == ORDER and names[-1] == "tune"
    assert all(name.startswith("right") for name in names if name not in ORDER)
    assert processes.seconds_of(found, len(found)) <= 480 - suite.WRITING_SECONDS
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    several = [one.name for one in parts.gpu_parts()]
    assert several[-4:] == ["links", "overlap", "ring", "tune"] and several[:-4] == names[:-1]


def test_times_of_processes_on_one_gpu_are_time_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def sliced(gpus: int) -> set[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return {one.name for one in parts.gpu_parts() if "time slices" in str(Outcome(one).row["about"])}

    assert sliced(1) == {"copy_engine-2", "killed", "nccl-2"} and sliced(2) == set()


@pytest.mark.nightly
def test_every_part_of_tests_has_some() -> None:
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
        {"number": name, "unit": "TFLOP/s", "value": value, "by": by, "mask": mask, "head_dim": dim}
        for name in ("forward", "backward") for by, value in rates.items() for mask, dim in shapes
    ]  # fmt: skip
    numbers.append({"number": "matrix product", "unit": "TFLOP/s", "value": 700.0})  # of no kernel and no mask
    states = {one.name: "done" for one in parts.gpu_parts()} | changes
    rows = [{"part": name, "state": state} for name, state in states.items()]
    return {row["question"]: row["answer"] for row in deciding.decisions(rows, numbers)}


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
    """A first call does some, a second one the others, a third what did not end well; the file is there meanwhile."""
    out, count = tmp_path / "out", tmp_path / "count"
    told = f"print(open({str(out / 'results.json')!r}).read())"
    listed = [
        part("first", f"{OUT}/first.json", code=f"{leaves()}open({str(count)!r}, 'a').write('x')"),
        part("fails", code=f"{told}; raise ValueError('no')"),
        part("last", missing="no GPU"),
    ]
    monkeypatch.setattr(parts, "parts_of", lambda kind: listed)
    flags = ["bench", "suite", "--device", "cpu", "--out", str(out)]

    def call(*more: str) -> tuple[int, dict[str, str], str]:
        ran = CliRunner().invoke(cli.app, [*flags, *more])
        rows = read(out / "results.json").rows
        return ran.exit_code, {row["part"]: row["state"] for row in rows}, ran.output

    code, states, text = call("--only", "first")
    assert code == 0 and states == {"first": "done"} and (out / "report.html").exists()
    assert "1 parts take up to 25 s" in text and "--budget 480 is enough" in text
    assert "does not let all of them run" in call("--only", "last", "--budget", "1")[2]
    code, states, text = call()
    assert code == 1 and states == {"first": "done", "fails": "failed", "last": "not here"}
    assert "2 parts were run before" in text and "FAILED: fails: exit code 1: ValueError: no" in text
    during = json.loads((out / "logs" / "fails.txt").read_text().rpartition("Traceback")[0])
    assert [(row["part"], row["state"]) for row in during["rows"]] == [
        ("first", "done"), ("fails", "not run"), ("last", "not here"),
    ]  # fmt: skip
    assert read(out / "results.json").failed == ["fails: exit code 1: ValueError: no"]
    code, states, text = call("--only", "last")
    assert code == 0 and len(states) == 3 and "1 parts were run before" in text and "first" not in text
    assert count.read_text() == "x"
    assert list(call("--only", "first", "--again")[1]) == ["first"]
    assert count.read_text() == "xx"


@pytest.mark.nightly
def test_one_visit_to_a_gpu_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts in their order on stand-ins, in under three minutes; a second call has nothing left to do."""
    listed = suite_stand_in.rehearsed()
    monkeypatch.setattr(parts, "parts_of", lambda kind: listed)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["bench", "suite", "--device", "cpu", "--budget", "1200", "--out", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = CliRunner().invoke(cli.app, flags)
    assert ran.exit_code == 0, ran.output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 180  # whatever else runs here
    result = read(tmp_path / "results.json")
    assert [row["part"] for row in result.rows] == [one.name for one in parts.gpu_parts()]
    assert {row["state"] for row in result.rows} == {"done"}
    suite.decide(tmp_path, result, result.rows)
    answers = {row["question"]: row["answer"] for row in read(tmp_path / "decisions.json").rows}
    assert {answers[question] for question in deciding.QUESTIONS} == {"yes"}
    assert f"{next(iter(deciding.QUESTIONS))}: yes" in result.notes
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("host.json", "beside_NCCL.json", "tune.json"))
    assert f"{len(listed)} parts were run before" in CliRunner().invoke(cli.app, flags).output
