"""Timelines of real rings: ranks whose clocks differ are brought to one, and the command records processes."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn import LocalWorld
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.memory import PROCESS_BYTES, USED
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.links import PRESETS, Links
from ringattn.bench.predict.ring import predicted
from ringattn.bench.predict.speed import H100
from ringattn.bench.predict.timelines import timeline
from ringattn.bench.report import timelines
from ringattn.bench.ring.memory import of_ours
from ringattn.bench.timeline import command as timeline_bench
from ringattn.bench.timeline import recording as timeline_recording
from ringattn.bench.timeline.events import LANES, Event, Timeline, alike, as_chrome, from_chrome
from ringattn.bench.timeline.recording import Offset, offset
from ringattn.bench.timeline.spent import shares
from ringattn.comm import LocalGroup
from ringattn.comm.control import control_of
from ringattn.ring import Mask

PROBLEM = AttentionConfig(seqlen=128, world=4, heads=2, kv_heads=2, head_dim=16)
CPU = torch.device("cpu")


def offsets(ahead: tuple[float, ...], machines: tuple[str, ...]) -> list[Offset]:
    """What every rank finds, whose clock is so many seconds ahead and whose machine is of a name."""

    def rank(group: LocalGroup) -> Offset:
        mine = group.rank()
        return offset(control_of(group), now=lambda: time.perf_counter() + ahead[mine], name=lambda: machines[mine])

    with LocalWorld(len(ahead)) as world:
        return world.run(rank)


def test_ranks_of_one_machine_share_its_clock() -> None:
    assert offsets((0.0, 0.0), ("a", "a")) == [Offset(0, 0), Offset(0, 0)]
    assert timeline_recording.clock_name() == timeline_recording.clock_name()


def test_the_clock_of_another_machine_is_brought_to_rank_0_s_within_the_error_it_tells() -> None:
    found = offsets((0.0, 1000.0, 0.0, -3.5), ("a", "b", "a", "c"))
    assert found[0] == found[2] == Offset(0, 0)
    for told, ahead in ((found[1], 1000.0), (found[3], -3.5)):
        assert 0 < told.error < 0.5
        assert abs(told.seconds + ahead) <= told.error + 1e-6


def prediction(layout: str, causal: bool) -> Timeline:
    """Of the call of PROBLEM, but for its layout and mask."""
    call = Call(32, 4, layout, Mask(causal=causal), heads=2, kv_heads=2, head_dim=16, dtype="float32")
    return timeline("", predicted(call, H100, Links(PRESETS["nvlink4"], PRESETS["ib400"])), call)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_prediction_has_the_slots_of_the_ring_that_runs(layout: str, causal: bool) -> None:
    """Of K/V and of sums: the same shards in the same slots at the same hops; and it says that it is of that call."""
    problem = replace(PROBLEM, layout=layout, causal=causal)
    told = prediction(layout, causal)
    found = timeline_bench.virtual(problem, CPU, 1)
    assert found is not None and alike(found, told)
    uses = [
        sorted((one.rank, one.lane, one.phase, one.hop, one.name) for one in each.events if one.lane not in LANES)
        for each in (found, told)
    ]
    assert uses[0] == uses[1]
    assert {"sums 0", "sums 1"} <= {lane for _, lane, *_ in uses[1]}


def test_a_timeline_of_virtual_ranks() -> None:
    found = timeline_bench.virtual(PROBLEM, CPU, 2)
    assert found is not None and found.source == "measured" and found.world == 4
    assert {event.rank for event in found.events} == {0, 1, 2, 3}
    lanes = {event.lane for event in found.events}
    assert {*LANES} < lanes and {"slot 0", "slot 1", "slot 2", "sums 0", "sums 1"} <= lanes
    assert min(event.begin for event in found.events) == 0
    assert found.about["call"]["seqlen"] == 128 and found.about["clock_error"] == 0
    per_rank = [sum(one.seconds for one in found.events if (one.rank, one.lane) == (r, "compute")) for r in range(4)]
    assert all(0 < seconds < found.seconds for seconds in per_rank)
    assert "rank 3: compute" in shares(found)


def test_what_one_rank_sends_another_receives() -> None:
    found = timeline_bench.virtual(PROBLEM, CPU, 1)
    assert found is not None
    moved = {
        lane: sorted((one.phase, one.name, one.nbytes) for one in found.events if one.lane == lane)
        for lane in ("send", "receive")
    }
    assert moved["send"] == moved["receive"] and len(moved["send"]) == 4 * (
        3 + 3 + 3
    )  # K/V forward, K/V backward, sums


@pytest.mark.usefixtures("alone")
def test_what_each_rank_did_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a rank that computes for 3 ms of 4 and waits for 1, one that computes for all 4."""
    events = (
        Event(0, "compute", "forward", 0, 0.0, 1e-3),
        Event(0, "wait", "forward", 1, 1e-3, 2e-3),
        Event(0, "compute", "backward", 1, 2e-3, 4e-3),
        Event(1, "compute", "forward", 0, 0.0, 4e-3),
        Event(1, "send", "forward", 0, 0.0, 3e-3),
    )
    about = {"call": asdict(PROBLEM), "provenance": {"command": "ringattn"}, "clock_error": 2e-6}
    monkeypatch.setattr(timeline_bench, "started", lambda *_: Timeline("two ranks", "measured", 2, events, about))
    rows, asked = tmp_path / "rows.csv", ["--device", "cpu", "--seqlen", "64"]
    ran = CliRunner().invoke(timeline_bench.app, [*asked, "--json", "-", "--csv", str(rows)])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["schema"] == "ringattn bench timeline 1" and told["problem"] == json.loads(json.dumps(asdict(PROBLEM)))
    assert (told["title"], told["world"], told["seconds"], told["clock_error"]) == ("two ranks", 2, 4e-3, 2e-6)
    assert told["provenance"] == {"command": "ringattn"}
    assert [(one["rank"], one["compute_seconds"], one["wait_seconds"]) for one in told["ranks"]] == [
        (0, pytest.approx(3e-3), pytest.approx(1e-3)), (1, 4e-3, 0)
    ]  # fmt: skip
    with rows.open() as file:
        found = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert found == [
        {"rank": 0, "compute ms": pytest.approx(3), "wait ms": pytest.approx(1), "of ms": 4},
        {"rank": 1, "compute ms": 4, "wait ms": 0, "of ms": 4},
    ]
    ran = CliRunner().invoke(timeline_bench.app, [*asked, "--json", str(tmp_path / "told.json")])
    assert json.loads((tmp_path / "told.json").read_text()) == told
    assert "rank 0: compute 3.0 ms, wait 1.0 ms of 4.0 ms\nrank 1: compute 4.0 ms, wait 0.0 ms" in ran.stdout


@pytest.mark.nightly
def test_the_command_records_processes(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    asked = ["--world", "2", "--seqlen", "64", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--device", "cpu"]
    ran = CliRunner().invoke(timeline_bench.app, [*asked, "--trace", str(trace), "--out", str(picture)])
    assert ran.exit_code == 0, ran.output
    found = from_chrome(json.loads(trace.read_text()))
    assert isinstance(found, Timeline) and found.world == 2
    assert {event.lane for event in found.events} >= {*LANES}
    assert found.about["provenance"]["command"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "clocks of the ranks agree" in ran.output


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--seqlen", "1"], "--seqlen is 1: 2 ranks need a token each"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--trace", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--csv", "/nowhere/at/all.csv"], "there is no folder /nowhere/at"),
        (["--trace", "-", "--json", "-"], "--trace and --json are both -: one of them takes a file"),
        (["--out", "a.gif"], "a.gif is no picture"),
        (["--predicted", "/nowhere.json"], "--predicted is given without --out: it is drawn there"),
        (["--kv-heads", "3"], "--kv-heads is 3"),
        (["--predicted", "/nowhere.json", "--out", "a.svg"], "/nowhere.json"),
        (["--device", "cpu", "--seqlen", "16g"], "--seqlen: 17,179,869,184 tokens over 2 ranks take"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_it_starts(
    asked: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr(timeline_bench, "started", started)
    ran = CliRunner().invoke(timeline_bench.app, asked, env={"COLUMNS": "300"})
    assert ran.exit_code == 2 and told in ran.output


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_length_that_is_told_to_fit_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks here: on the CPU each is a process besides; the room is what `bench ring` counts for our ring."""
    where, ranks = torch.device(device), 4
    problem = AttentionConfig(1 << 20, ranks, heads=8, kv_heads=2, head_dim=64)
    room = ranks * of_ours(replace(problem, seqlen=100 * 1024)) + (ranks * PROCESS_BYTES if device == "cpu" else 0)
    monkeypatch.setattr(timeline_bench, "free_memory", lambda _: int(room / USED) + 100)
    with pytest.raises(typer.BadParameter, match=r"--seqlen: 1,048,576 tokens over 4 ranks take .*: 100k fits"):
        timeline_bench.check_room(problem, where, None)
    timeline_bench.check_room(replace(problem, seqlen=100 * 1024), where, None)
    with pytest.raises(typer.BadParameter):
        timeline_bench.check_room(replace(problem, seqlen=101 * 1024), where, None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("asked", "kind"), [(["--device", "cpu"], "cpu"), ([], "cuda")])
def test_the_device_that_is_asked_for_is_recorded_under_a_launcher(
    asked: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of two GPUs, which is not here: nothing runs."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(timeline_bench, "free_memory", lambda _: 1 << 40)
    ran: list[tuple[str, torch.device | None, torch.device]] = []

    @contextmanager
    def process_group(*_: object, device: torch.device | None = None) -> Iterator[None]:
        opened.append(device)
        yield

    def recorded(problem: AttentionConfig, group: None, device: torch.device, repeats: int) -> None:
        ran.append((problem.device, opened[-1], device))

    opened: list[torch.device | None] = []
    monkeypatch.setattr(timeline_bench, "process_group", process_group)
    monkeypatch.setattr(timeline_bench, "recorded", recorded)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    result = CliRunner().invoke(timeline_bench.app, asked)
    where = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 1)
    assert result.exit_code == 0 and ran == [(kind, where, where)], result.output


@pytest.mark.usefixtures("alone")
def test_a_prediction_must_be_of_the_call_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "predicted.json"
    drawn: list[tuple[str, ...]] = []
    found = timeline_bench.virtual(replace(PROBLEM, layout="zigzag"), CPU, 1)
    assert found is not None
    monkeypatch.setattr(timeline_bench, "started", lambda *_: found)
    monkeypatch.setattr(timelines, "save", lambda shown, out: drawn.append(tuple(one.source for one in shown)))
    asked = ["--world", "4", "--seqlen", "128", "--heads", "2", "--head-dim", "16", "--device", "cpu"]
    flags = [*asked, "--predicted", str(file), "--out", str(tmp_path / "a.svg")]

    def told(one: Timeline) -> str:
        file.write_text(json.dumps(as_chrome(one)))
        ran = CliRunner().invoke(timeline_bench.app, flags, env={"COLUMNS": "400"})
        assert ran.exit_code == (0 if drawn else 2), ran.output
        return ran.output

    assert "is of another call: causal False there, True here; layout striped there, zigzag here" in told(
        prediction("striped", False)
    )
    assert "is measured: it takes what `ringattn predict --trace` left" in told(found)
    assert "does not say of what call it is" in told(replace(prediction("zigzag", True), about={}))
    drawn.append(())
    told(prediction("zigzag", True))
    assert drawn == [(), ("measured", "predicted")]
