"""Tests of ``bench suite``: parts run as processes within a budget, and a later call continues."""

from __future__ import annotations

import inspect
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.memory_table import ALL_CORES, BASELINE, ONE_DEVICE
from ringattn.bench.common.provenance import provenance
from ringattn.bench.common.ranks import LAUNCHERS, TORCHRUN
from ringattn.bench.common.result import Result, Row, read_result
from ringattn.bench.links.command import message_sizes
from ringattn.bench.ring.candidates import select_makers
from ringattn.bench.suite import command as suite
from ringattn.bench.suite import device_cases, part_processes, suite_parts
from ringattn.bench.suite.suite_parts import FILE, OUT, PYTHON, SECONDS, SuitePart

from ..support import suite_stand_in
from ..support.watch_cases import ManualClock

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")


def part(name: str, *words: str, code: str = "", seconds: float = 5.0, **more: Any) -> SuitePart:
    """Return a part that imports neither torch nor this package."""
    return SuitePart(name, "", (PYTHON, "-S", "-c", code, *words), seconds, **more)


GOOD = part("good")
HERE = provenance(CPU)
ROW = {"part": "good", "state": "done", "seconds": 1.0, "found": "", "about": "", "command": GOOD.command_line}


def results(**changes: Any) -> dict[str, Any]:
    """Return a result file of the suite as JSON."""
    result = Result("bench suite", suite.UNITS, [ROW], provenance=HERE).as_json()
    return dict(json.loads(json.dumps(result | changes)))


@pytest.mark.parametrize(("text", "message"), [
    ("[1]", "it must be a JSON object"),
    (json.dumps({"schema": "ringattn bench suite 1"}), "its schema is not 'ringattn result'"),
    (json.dumps(results(case="bench links")), "holds results of bench links"),
    (json.dumps(results(units={"part": ""}, rows=[{"part": "x"}])), "holds results of bench suite"),
    (json.dumps(results(provenance={**HERE, "ringattn": {"sources": "other"}})), "ringattn.sources other, not"),
])  # fmt: skip
def test_a_folder_with_other_results_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results(provenance={**HERE, "date": "another"})))
    assert suite.read_earlier_rows(tmp_path, HERE) == [ROW]
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(typer.BadParameter, match="Move the file") as refused:
        suite.read_earlier_rows(tmp_path, HERE)
    assert message in str(refused.value) and "results.json" in str(refused.value)


@pytest.mark.parametrize("change", [
    {"ringattn": {"sources": "other"}}, {"versions": {"torch": "1"}}, {"cpu": {"model": "a CPU", "cores": 9}},
    {"cpu": {"model": "another", "cores": 2}}, {"gpu": {"name": "A", "driver": "2"}},
    {"gpu": {"name": "B", "driver": "1"}}, {"gpu": None},
])  # fmt: skip
def test_a_run_continues_only_on_the_same_code_and_machine(change: dict[str, Any]) -> None:
    here = HERE | {"gpu": {"name": "A", "driver": "1"}, "cpu": {"model": "a CPU", "cores": 2}}
    same = here | {"date": "later", "gpu": {"name": "A", "driver": "1", "clocks": {}}}
    assert suite.run_identity(here) == suite.run_identity(same) != suite.run_identity(here | change)


@pytest.mark.parametrize(("flags", "message"), [
    (["--device", "cuda"], "torch finds no CUDA device"),
    (["--only", "nothing"], "--only is 'nothing': no part's name contains it"),
    (["--out", __file__], "cannot write to this folder"),
    (["--out", "/proc/no/suite"], "--out is /proc/no/suite: cannot write to this folder"),
    (["--budget", "0"], "--budget"),
])  # fmt: skip
def test_refusals(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = CliRunner().invoke(suite.app, ["--device", "cpu", *flags], env={"COLUMNS": "300"})
    assert ran.exit_code == 2 and message in ran.output, ran.output


def run(parts: list[SuitePart], out: Path, budget: float = 60.0) -> dict[object, Row]:
    ends = time.monotonic() + budget
    return {row["part"]: row for row in part_processes.run_parts(parts, out=out, device="cpu", end_time=ends, width=2)}


CHILD = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', {}], start_new_session=True); "
HANGS = "import time; time.sleep(60)"


def leaves(failed: list[str] | None = None, notes: list[str] | None = None) -> str:
    """Return code that writes a result to the file in its first argument."""
    result = Result("x", {"a": ""}, [{"a": 1}], failed or [], notes or []).as_json()
    return f"import sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps(result))}); "


def test_failing_parts_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The part that hangs has a child in another session, which must end, too.
    monkeypatch.setattr(part_processes, "GRACE_SECONDS", 60.0)
    (tmp_path / "silent.json").write_text(json.dumps(results()))  # of an earlier run
    child = CHILD.format(repr(HANGS)) + f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); "
    result = run(
        [
            part("good", FILE, code=leaves(notes=["first", "best: 3"])),
            part("plain", FILE, code=leaves()),
            part("raises", code="raise ValueError('it went wrong')"),
            part("crashes", code="import os; os.abort()"),
            part("lacks", FILE, code="print('no such library'); raise SystemExit(69)"),
            part("hangs", FILE, code=leaves() + child + HANGS, seconds=0.1),
            part("absent", missing_reason="no GPU"),
            part("wrong", FILE, code=leaves(["a is 2"])),
            part("silent", FILE),
            part("last", code="import os, sys; print('here', os.getsid(0) == os.getpid(), sys.stdin.read() == '')"),
        ],
        tmp_path, budget=500.0,  # the part gets 3 seconds of it
    )  # fmt: skip
    assert {name: row["state"] for name, row in result.items()} == {
        "good": "done", "plain": "done", "raises": "failed", "crashes": "failed", "lacks": "not here",
        "hangs": "failed", "absent": "not here", "wrong": "failed", "silent": "failed", "last": "done",
    }  # fmt: skip
    for name, words in {
        "good": "best: 3", "plain": "1 rows", "raises": "exit code 1: ValueError: it went wrong",
        "crashes": "exit code -6", "lacks": "no such library",
        "hangs": "it was killed after", "absent": "no GPU", "wrong": "a is 2",
        "silent": "silent.json cannot be read", "last": "",
    }.items():  # fmt: skip
        assert words in str(result[name]["found"]), name
    assert "Fatal Python error: Aborted" in (tmp_path / "logs" / "hangs.txt").read_text()  # with the stack of the hang
    assert not Path("/proc", (tmp_path / "child").read_text(), "exe").exists()
    assert (tmp_path / "logs" / "last.txt").read_text() == "here True True\n"  # Ctrl-C does not reach its session


@pytest.mark.parametrize(("given", "words", "text", "outcome"), [
    (9.0, (), "one\nlast line\n", ("failed", "it was killed after 9 s: last line")),
    (8.9, (), "", ("out of time", "it was killed after 9 s")),
    (99.0, (SECONDS,), "", ("out of time", "it was killed after 99 s")),  # its command chose how long it ran
])  # fmt: skip
def test_a_part_that_overran_its_time_has_failed(
    given: float, words: tuple[str, ...], text: str, outcome: tuple[str, str]
) -> None:
    assert part_processes.timeout_outcome(part("x", *words, seconds=10.0), given, text) == outcome


@pytest.mark.parametrize(("path", "expected"), [("", ["{parent}"]), ("/more", ["{parent}", "/more"])])
def test_environment_of_a_part(path: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(part_processes, "PACKAGE", tmp_path / "ringattn")
    cpu, cuda = (part_processes.part_environment(device) for device in ("cpu", "cuda"))
    assert cpu["PYTHONPATH"].split(os.pathsep) == [place.format(parent=tmp_path) for place in expected]
    assert (cpu["TRITON_INTERPRET"], cuda["TRITON_INTERPRET"], cpu["CUDA_VISIBLE_DEVICES"]) == ("1", "0", "")
    assert cuda.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert cpu["PYTHONFAULTHANDLER"] == cpu["PYTHONUNBUFFERED"] == "1" and cpu["HOME"] == os.environ["HOME"]
    monkeypatch.setattr(part_processes, "PACKAGE", tmp_path / "clone")
    assert part_processes.part_environment("cpu")["PYTHONPATH"] == path


def test_the_next_call_ends_orphaned_parts(tmp_path: Path) -> None:
    orphan, other = (
        subprocess.Popen(
            [sys.executable, "-S", "-c", HANGS],
            env=os.environ | {part_processes.MARK: f"{part_processes.folder_mark(out)}1.1|"},
        )
        for out in (tmp_path, tmp_path / "x")
    )
    try:
        run([GOOD], tmp_path)
        assert orphan.wait(60) != 0 and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_signal_ends_parts_and_keeps_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); "
    listed = [part("first"), part("hangs", code=signals + HANGS, parallel_group="x"), part("waits", parallel_group="x")]
    monkeypatch.setattr(suite_parts, "list_parts", lambda kind: listed)
    monkeypatch.setattr(suite, "MOST_SIDE_BY_SIDE", 1)
    ran = CliRunner().invoke(suite.app, ["--device", "cpu", "--out", str(tmp_path)])
    assert ran.exit_code == 130 and "interrupted. Finished parts are kept" in ran.output and not ran.stdout
    assert {*map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP))} == {signal.default_int_handler}
    assert [row["part"] for row in read_result(tmp_path / "results.json").rows] == ["first"]
    assert not [*part_processes.marked_processes(part_processes.folder_mark(tmp_path))]


def test_unused_time_goes_to_later_parts(tmp_path: Path) -> None:
    # A part gets a share of the time left, at least its own seconds. Its command gets half of the share.
    three = [part(name, SECONDS, code="import sys; print(sys.argv[1])", seconds=10.0) for name in "abc"]
    run(three, tmp_path, budget=90.0)
    budgets = [int((tmp_path / "logs" / f"{name}.txt").read_text()) for name in "abc"]
    assert 14 <= budgets[0] <= 15 and 21 <= budgets[1] <= 22 and 40 <= budgets[2] <= 45
    late = run([part("cut", code=HANGS, seconds=0.9), part("late", seconds=50.0)], tmp_path, budget=0.6)
    assert [row["state"] for row in late.values()] == ["out of time", "out of time"]
    assert str(late["cut"]["found"]).startswith("it was killed after")
    assert late["late"]["found"] == "it takes up to 50 s, but only 0 s were left"


def test_parts_that_are_not_timed_run_side_by_side(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
def there():
    return [name for name in os.listdir() if len(name) == 1]
os.chdir({str(tmp_path)!r})
open(sys.argv[1], "w").close()
while len(there()) < 2 and not os.path.exists("together"):  # wait until two parts run
    time.sleep(0.01)
open("together", "w").close()
time.sleep(0.3)  # a third part would start meanwhile
print(len(there()))
os.remove(sys.argv[1])
"""
    listed = [part(name, name, code=code, parallel_group="x" if name < "d" else "") for name in "abcd"]
    run(listed, tmp_path)
    counts = [int((tmp_path / "logs" / f"{name}.txt").read_text()) for name in "abcd"]
    assert max(counts) == 2 and counts[3] == 1
    missing = [part(name, missing_reason="no GPU", parallel_group="y") for name in ("absent", "lacking")]
    groups = part_processes.group_parts([*listed, *missing, part("here", parallel_group="y")])
    assert [part_processes.group_seconds(group, 2) for group in groups] == [10.0, 5.0, 5.0]
    assert part_processes.group_seconds(missing, 2) == 0


def test_missing_seconds_of_the_shortest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # The shortest part needs at least half of its time. A missing part needs none.
    listed = [
        part("long", seconds=60.0),
        part("short", seconds=10.0),
        part("absent", seconds=1.0, missing_reason="no GPU"),
    ]
    now = ManualClock(monkeypatch).now
    assert part_processes.missing_seconds(listed, now + 6) == part_processes.missing_seconds(listed[2:], now) == 0
    assert part_processes.missing_seconds(listed, now + 2) == 3


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 2), ("cuda", 4), ("cpu", 0)])
def test_parts_are_commands_that_leave_a_result(
    device: str, gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    listed = suite_parts.list_parts(device)
    assert len({candidate.file for candidate in listed}) == len(listed)
    assert ("nccl-4" in {candidate.name for candidate in listed}) == (gpus >= 4)
    places = {FILE: str(tmp_path / "a.json"), OUT: str(tmp_path), SECONDS: "10"}
    for candidate in listed:
        assert FILE in candidate.command and "tests" not in candidate.command_line
        assert f"{OUT}/{candidate.file}" not in candidate.command  # another file must not be overwritten by the result
        assert shlex.split(candidate.command_line) == [word.replace(PYTHON, "python") for word in candidate.command]
        command = candidate.command[candidate.command.index(PYTHON) :]
        _, _, module, *words = (part_processes.fill_placeholders(word, places) for word in command)
        if module == "ringattn":
            name = " ".join(words[: 1 + (words[0] == "bench")])
            app = import_module(f"ringattn.{cli.COMMANDS[name][0]}").app
            # raises on unknown flags
            context = typer.main.get_command(app).make_context(name, words[len(name.split()) :])
            if name == "bench links":
                assert message_sizes(*(context.params[flag] for flag in ("minbytes", "maxbytes", "stepfactor")))
        else:
            inspect.signature(device_cases.CASES[device][words[0]]).bind(CPU)


def test_nccl_library_is_preloaded_if_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(suite_parts.NCCL_LIBRARY, "/opt/libnccl.so.2")
    for name in ("explain_missing_nccl", "one_sided_missing"):
        monkeypatch.setattr(suite_parts, name, lambda: None)
    for gpus, before in ((1, ("env", "LD_PRELOAD=/opt/libnccl.so.2")), (2, ())):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for found in suite_parts.gpu_parts():
            needed = before if found.name in ("nccl-2", "killed nccl") else ()
            assert found.command[: len(needed)] == needed and ("env" in found.command) == bool(needed)
            assert found.name != "nccl-2" or found.missing_reason is None
    reasons = []
    for gpus in (2, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.delenv(suite_parts.NCCL_LIBRARY, raising=False)
        reasons.append({found.name: found.missing_reason for found in suite_parts.gpu_parts() if "2" in found.name})
    assert {*reasons[0].values()} == {None} and "its own GPU" in str(reasons[1]["nccl_one_sided-2"])
    assert "need NCCL 2.30" in str(reasons[1]["nccl-2"])


def test_parts_of_a_gpu_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = suite_parts.gpu_parts()
    total = sum(part_processes.group_seconds(group, len(listed)) for group in part_processes.group_parts(listed))
    assert total <= 480 - suite.WRITING_SECONDS
    names = [part.name for part in listed]
    assert names[0] == "launches" and names[-1] == "tune"
    assert names.index("ceilings") < names.index("local-4") < names.index("killed nccl_one_sided")
    for gpus, between in ((3, ["ring"]), (8, ["nccl-4", "ring", "Ulysses x ring"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [part.name for part in suite_parts.gpu_parts()] == [*names[:-1], "links", "overlap", *between, "tune"]


def test_every_candidate_of_four_gpus_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    prefixes = [
        part.command[part.command.index("--by") + 1].split(",")
        for part in suite_parts.gpu_parts()
        if "ring" in part.command and "--by" in part.command
    ]
    names = [{*select_makers(["zigzag"], by, [8])} for by in prefixes]
    assert len(names) == 2 and names[0] & names[1] == {ONE_DEVICE}
    assert names[0] | names[1] == {*select_makers(["zigzag"], (), [8])} - {ALL_CORES, BASELINE}  # these run on the CPU


def test_a_later_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, count = tmp_path / "out", tmp_path / "count"
    shown = f"print(open({str(out / 'results.json')!r}).read())"
    listed = [
        part("first", FILE, code=f"{leaves()}open({str(count)!r}, 'a').write('x')"),
        part("fails", code=f"{shown}; raise ValueError('no')"),
        part("last", missing_reason="no GPU"),
    ]
    monkeypatch.setattr(suite_parts, "list_parts", lambda kind: listed)
    flags = ["bench", "suite", "--device", "cpu", "--out", str(out)]

    def call(*more: str) -> tuple[int, dict[str, str], str]:
        ran = CliRunner().invoke(cli.app, [*flags, *more])
        rows = read_result(out / "results.json").rows
        return ran.exit_code, {row["part"]: row["state"] for row in rows}, ran.output

    for name, value in (*zip(LAUNCHERS[0], "0101", strict=True), ("MASTER_ADDR", "here"), (TORCHRUN, "x")):
        monkeypatch.setenv(name, value)  # parts start ranks of their own
    code, states, text = call("--only", "first")
    assert not {*LAUNCHERS[0], "MASTER_ADDR", TORCHRUN} & {*os.environ}
    assert code == 0 and states == {"first": "done"} and (out / "report.html").exists()
    assert "1 parts take at most 25 s" in text and "--budget 480 is enough" in text
    (out / "report.html").unlink()
    (out / "report.html").mkdir()
    code, states, text = call("--only", "last", "--budget", "1")
    assert code == 0 and "may not be enough for all" in text and "no report.html: BadParameter: cannot write" in text
    code, states, text = call("--only", "fails", "--budget", "21")  # writing the page takes the rest
    assert code == 2 and "fails" not in states and "--budget is 21, too short for even one part" in text
    code, states, text = call()
    assert code == 1 and states == {"first": "done", "fails": "failed", "last": "not here"}
    assert "2 parts with results" in text and "FAILED: fails: exit code 1: ValueError: no" in text
    during = json.loads((out / "logs" / "fails.txt").read_text().rpartition("Traceback")[0])
    assert [row["state"] for row in during["rows"]] == ["done", "not here"]
    assert read_result(out / "results.json").failed == ["fails: exit code 1: ValueError: no"]
    assert 0 < read_result(out / "results.json").provenance["seconds"] < 400
    code, states, text = call("--only", "last")
    assert code == 0 and len(states) == 3 and "1 parts with results" in text and "first" not in text
    assert count.read_text() == "x"
    assert "1 parts take at most" in call("--only", "fails")[2]  # a failed part runs again
    listed[0] = replace(listed[0], command=(*listed[0].command, "another"))
    assert "1 parts take at most 25 s" in call("--only", "first")[2] and count.read_text() == "xx"


@pytest.mark.nightly
def test_rehearsal_of_a_gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = suite_stand_in.rehearsed_parts()
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(suite_parts, "list_parts", lambda kind: listed)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["bench", "suite", "--device", "cpu", "--budget", "1200", "--out", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = CliRunner().invoke(cli.app, flags)
    assert ran.exit_code == 0, ran.output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # half of the suite's budget of 8 minutes; CPU time, because other processes may be running
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 240
    rows = read_result(tmp_path / "results.json").rows
    assert [row["part"] for row in rows] == [part.name for part in suite_parts.gpu_parts()]
    assert {row["state"] for row in rows} == {"done"}
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("host.json", "beside_NCCL.json", "tune.json"))
    assert f"{len(listed)} parts with results" in CliRunner().invoke(cli.app, flags).output
