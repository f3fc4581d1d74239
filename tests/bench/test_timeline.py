"""Timelines: the trace that keeps them, and real rings whose ranks' clocks are brought to one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
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
from ringattn.bench.timeline import command as timeline_bench
from ringattn.bench.timeline import runs
from ringattn.bench.timeline.events import LANES, Event, Timeline, alike, as_chrome, from_chrome
from ringattn.bench.timeline.runs import Offset, offset
from ringattn.comm import LocalGroup
from ringattn.comm.control import control_of
from ringattn.ring import Mask

PROBLEM = AttentionConfig(seqlen=128, world=4, heads=2, kv_heads=2, head_dim=16)
CPU = torch.device("cpu")
EVENTS = (
    Event(0, "compute", "forward", 0, 0.0, 1e-3, "own keys"),
    Event(0, "wait", "forward", 1, 1e-3, 2e-3),
    Event(0, "compute", "backward", 1, 2e-3, 4e-3),
    Event(1, "compute", "forward", 0, 0.0, 4e-3),
    Event(1, "send", "forward", 0, 0.0, 3e-3, "K/V of 1", 1 << 20),
    Event(1, "slot 1", "forward", 1, 0.25e-3, 1.5e-3, "K/V of 0"),
)
TWO_RANKS = Timeline("two ranks", "measured", 2, EVENTS, {"provenance": {"command": "ringattn"}, "clock_error": 2e-6})
"""One that computes for 3 ms of 4 and waits for 1, and one that computes for all 4."""

# the trace


def test_a_trace_reads_back_as_it_was() -> None:
    """With a process per rank and a thread per lane, in microseconds."""
    trace = json.loads(json.dumps(as_chrome(TWO_RANKS)))
    found = from_chrome(trace)
    assert replace(found, events=()) == replace(TWO_RANKS, events=()) and found.seconds == pytest.approx(4e-3)
    for one, other in zip(found.events, EVENTS, strict=True):
        assert one.end == pytest.approx(other.end) and replace(one, end=other.end) == other
    named = [one for one in trace["traceEvents"] if one["name"] == "thread_name"]
    assert [one["args"]["name"] for one in named if one["pid"] == 1] == [*LANES, "slot 1"]
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert (spans[-1]["ts"], spans[-1]["dur"]) == (250.0, 1250.0)


def test_what_is_no_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="schema is 'ringattn timeline 9': a timeline says"):
        from_chrome({"otherData": {"schema": "ringattn timeline 9"}, "traceEvents": []})
    with pytest.raises(ValueError, match="source is 'guessed': it must be one of measured, predicted"):
        Timeline("", "guessed", 1, ())
    with pytest.raises(ValueError, match="an event is of rank 2: ranks are 0 to 1"):
        Timeline("", "measured", 2, (Event(2, "compute", "forward", 0, 0, 1),))


def test_rows_of_a_timeline() -> None:
    found = timeline_bench.result_of(TWO_RANKS)
    assert found.rows == [
        {"rank": 0, "compute": pytest.approx(3), "wait": pytest.approx(1), "send": 0, "receive": 0, "computing": 75},
        {"rank": 1, "compute": 4, "wait": 0, "send": 3, "receive": 0, "computing": 100},
    ]
    assert found.notes == ["two ranks", "clocks of the ranks agree to 2.0e-06 s", "ranks compute 87.5% of 4 ms"]
    assert found.provenance == {"command": "ringattn"}


# clocks


def offsets(ahead: tuple[float, ...], machines: tuple[str, ...]) -> list[Offset]:
    """What every rank finds, whose clock is so many seconds ahead and whose machine is of a name."""

    def rank(group: LocalGroup) -> Offset:
        mine = group.rank()
        return offset(control_of(group), now=lambda: time.perf_counter() + ahead[mine], name=lambda: machines[mine])

    with LocalWorld(len(ahead)) as world:
        return world.run(rank)


def test_clock_of_another_machine_is_brought_to_rank_0_within_its_error() -> None:
    found = offsets((0.0, 1000.0, 0.0, -3.5), ("a", "b", "a", "c"))
    assert found[0] == found[2] == Offset(0, 0) and runs.clock_name() == runs.clock_name()
    for told, ahead in ((found[1], 1000.0), (found[3], -3.5)):
        assert 0 < told.error < 0.5
        assert abs(told.seconds + ahead) <= told.error + 1e-6


# recorded


@pytest.mark.parametrize(("layout", "causal"), [("zigzag", True), ("contiguous", False)])
def test_a_prediction_has_the_slots_of_the_ring_that_runs(layout: str, causal: bool) -> None:
    """Of K/V and of sums: the same shards in the same slots at the same hops; and it says that it is of that call."""
    call = Call(32, 4, layout, Mask(causal=causal), heads=2, kv_heads=2, head_dim=16, dtype="float32")
    told = timeline("", predicted(call, H100, Links(PRESETS["nvlink4"], PRESETS["ib400"])), call)
    found = runs.virtual(replace(PROBLEM, layout=layout, causal=causal), CPU, 1)
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


@pytest.mark.usefixtures("alone")
def test_timeline_of_real_processes(tmp_path: Path) -> None:
    trace, picture, target = (tmp_path / name for name in ("trace.json", "timeline.png", "rows.json"))
    shape = ["--world", "2", "--seqlen", "64", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--device", "cpu"]
    files = ["--trace", str(trace), "--out", str(picture), "--json", str(target)]
    ran = CliRunner().invoke(timeline_bench.app, [*shape, *files])
    assert ran.exit_code == 0, ran.output
    found = from_chrome(json.loads(trace.read_text()))
    assert found.world == 2 and {event.lane for event in found.events} >= {*LANES}
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
