"""Timelines of real rings: ranks whose clocks differ are brought to one, and the command records processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn import LocalWorld
from ringattn.bench.common import memory
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.launching import Member
from ringattn.bench.common.memory import PROCESS_BYTES, USED
from ringattn.bench.common.memory_table import OURS, candidate_bytes
from ringattn.bench.common.result import read
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.links import PRESETS, Links
from ringattn.bench.predict.ring import predicted
from ringattn.bench.predict.speed import H100
from ringattn.bench.predict.timelines import timeline
from ringattn.bench.report import timelines
from ringattn.bench.timeline import command as timeline_bench
from ringattn.bench.timeline import runs
from ringattn.bench.timeline.events import LANES, Event, Timeline, alike, as_chrome, from_chrome
from ringattn.bench.timeline.runs import Offset, offset
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
    assert runs.clock_name() == runs.clock_name()


def test_clock_of_another_machine_is_brought_to_rank_0_within_its_error() -> None:
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
    """Of K/V and of dK/dV: the same shards in the same slots at the same hops; and it says that it is of that call."""
    problem = replace(PROBLEM, layout=layout, causal=causal)
    told = prediction(layout, causal)
    found = runs.virtual(problem, CPU, 1)
    assert found is not None and alike(found, told)
    uses = [
        sorted((one.rank, one.lane, one.phase, one.hop, one.name) for one in each.events if one.lane not in LANES)
        for each in (found, told)
    ]
    assert uses[0] == uses[1]
    assert {"dK/dV slot 0", "dK/dV slot 1"} <= {lane for _, lane, *_ in uses[1]}


def test_a_timeline_of_virtual_ranks() -> None:
    found = runs.virtual(PROBLEM, CPU, 2)
    assert found is not None and found.source == "measured" and found.world == 4
    assert {event.rank for event in found.events} == {0, 1, 2, 3}
    lanes = {event.lane for event in found.events}
    assert {*LANES} < lanes and {"slot 0", "slot 1", "slot 2", "dK/dV slot 0", "dK/dV slot 1"} <= lanes
    assert min(event.begin for event in found.events) == 0
    assert found.about["call"]["seqlen"] == 128 and found.about["clock_error"] == 0
    assert all(0 < row["compute"] < found.seconds * 1e3 for row in timeline_bench.result_of(found).rows)
    sent, received = (
        sorted((event.phase, event.name, event.nbytes) for event in found.events if event.lane == lane)
        for lane in ("send", "receive")
    )
    assert sent == received and len(sent) == 4 * (3 + 3 + 3)  # K/V forward, K/V backward, sums


def two_ranks() -> Timeline:
    """By hand: a rank that computes for 3 ms of 4 and waits for 1, one that computes for all 4."""
    events = (
        Event(0, "compute", "forward", 0, 0.0, 1e-3),
        Event(0, "wait", "forward", 1, 1e-3, 2e-3),
        Event(0, "compute", "backward", 1, 2e-3, 4e-3),
        Event(1, "compute", "forward", 0, 0.0, 4e-3),
        Event(1, "send", "forward", 0, 0.0, 3e-3),
    )
    about = {"call": asdict(PROBLEM), "provenance": {"command": "ringattn"}, "clock_error": 2e-6}
    return Timeline("two ranks", "measured", 2, events, about)


def test_rows_of_a_timeline() -> None:
    found = timeline_bench.result_of(two_ranks())
    assert found.rows == [
        {"rank": 0, "compute": pytest.approx(3), "wait": pytest.approx(1), "send": 0, "receive": 0, "computing": 75},
        {"rank": 1, "compute": 4, "wait": 0, "send": 3, "receive": 0, "computing": 100},
    ]
    assert found.notes == ["two ranks", "clocks of the ranks agree to 2.0e-06 s", "ranks compute 87.5% of 4 ms"]
    assert found.provenance == {"command": "ringattn"}


@pytest.mark.usefixtures("alone")
def test_timeline_of_real_processes(tmp_path: Path) -> None:
    trace, picture, target = (tmp_path / name for name in ("trace.json", "timeline.png", "rows.json"))
    shape = ["--world", "2", "--seqlen", "64", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--device", "cpu"]
    files = ["--trace", str(trace), "--out", str(picture), "--json", str(target)]
    ran = CliRunner().invoke(timeline_bench.app, [*shape, *files])
    assert ran.exit_code == 0, ran.output
    found = from_chrome(json.loads(trace.read_text()))
    assert isinstance(found, Timeline) and found.world == 2
    assert {event.lane for event in found.events} >= {*LANES}
    assert found.about["provenance"]["command"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "clocks of the ranks agree" in ran.output
    assert [row["rank"] for row in read(target).rows] == [0, 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_length_that_is_told_to_fit_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks here: on the CPU each is a process besides; the room is what `bench ring` counts for our ring."""
    where, ranks = torch.device(device), 4
    problem = AttentionConfig(1 << 20, ranks, heads=8, kv_heads=2, head_dim=64)
    fits = replace(problem, seqlen=100 * 1024)
    nbytes = ranks * candidate_bytes(OURS, fits) + (ranks * PROCESS_BYTES if device == "cpu" else 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: int(nbytes / USED) + 100)
    with pytest.raises(typer.BadParameter, match=r"--seqlen: 1,048,576 tokens over 4 ranks take .*: 100k fits"):
        runs.check_room(problem, where, None)
    runs.check_room(fits, where, None)
    with pytest.raises(typer.BadParameter):
        runs.check_room(replace(problem, seqlen=101 * 1024), where, None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("flags", "kind"), [(["--device", "cpu"], "cpu"), ([], "cuda")])
def test_device_under_a_launcher(flags: list[str], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of two GPUs, which is not here: nothing runs."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(memory, "free_memory", lambda _: 1 << 40)
    ran: list[tuple[str, torch.device]] = []

    def spawn(world: int, measure: Callable[..., Any], problem: AttentionConfig, repeats: int, *, device: str) -> None:
        ran.append((device, Member(1, 2, 1, 2).shared_device(problem.device)))

    monkeypatch.setattr(runs, "spawn", spawn)
    result = CliRunner().invoke(timeline_bench.app, flags)
    where = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 1)
    assert result.exit_code == 0 and ran == [(kind, where)], result.output


@pytest.mark.usefixtures("alone")
def test_a_prediction_must_be_of_the_call_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "predicted.json"
    drawn: list[tuple[str, ...]] = []
    found = runs.virtual(replace(PROBLEM, layout="zigzag"), CPU, 1)
    assert found is not None
    monkeypatch.setattr(runs, "measured", lambda *_: found)
    monkeypatch.setattr(timelines, "save", lambda shown, out: drawn.append(tuple(one.source for one in shown)))
    shape = ["--world", "4", "--seqlen", "128", "--heads", "2", "--head-dim", "16", "--device", "cpu"]
    flags = [*shape, "--predicted", str(file), "--out", str(tmp_path / "a.svg")]
    for drawn_below, message in (
        (prediction("striped", False), "is of another call: causal False there, True here; layout striped there, zig"),
        (found, "is measured: it takes what `ringattn predict --trace` left"),
        (replace(prediction("zigzag", True), about={}), "does not say of what call it is"),
        (prediction("zigzag", True), None),
    ):
        file.write_text(json.dumps(as_chrome(drawn_below)))
        ran = CliRunner().invoke(timeline_bench.app, flags, env={"COLUMNS": "400"})
        assert ran.exit_code == (0 if message is None else 2) and (message or "") in ran.output, ran.output
    assert drawn == [("measured", "predicted")]
