"""Tests of timelines: the trace file, and the alignment of ranks' clocks."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn import LocalWorld
from ringattn.bench.common import launching, memory
from ringattn.bench.common.attention import AttentionConfig, forward_backward
from ringattn.bench.common.memory_table import OURS, candidate_bytes
from ringattn.bench.common.ranks import LAUNCHERS, LaunchedRank, launched_rank
from ringattn.bench.common.result import read_result
from ringattn.bench.predict.links import PRESETS, ClusterLinks
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.ring_time import predict_passes, predicted_timeline
from ringattn.bench.predict.speed import gpu_speed
from ringattn.bench.timeline import command as timeline_bench
from ringattn.bench.timeline import record
from ringattn.bench.timeline.events import LANES, Event, Timeline, as_chrome, from_chrome, is_same_call, lane_order
from ringattn.bench.timeline.record import ClockOffset, measure_clock_offset
from ringattn.comm import LocalGroup, TransportError
from ringattn.comm.control import open_control
from ringattn.ring import Mask
from ringattn.ring.trace import TraceSpan

from ..support.rank_processes import group_results

PROBLEM = AttentionConfig(seqlen=128, world=4, heads=2, kv_heads=2, head_dim=16)
CPU = torch.device("cpu")
EVENTS = (
    Event(0, "compute", "forward", 0, 0.0, 1e-3, "own keys"),
    Event(0, "wait", "forward", 1, 1e-3, 1.5e-3),
    Event(0, "compute", "backward", 1, 2e-3, 4e-3),
    Event(1, "compute", "forward", 0, 0.0, 4e-3),
    Event(1, "send", "forward", 0, 0.0, 3e-3, "K/V of 1", 1 << 20),
    Event(1, "slot 0", "forward", 1, 0.25e-3, 1e-3, "K/V of 0"),
    Event(1, "slot 1", "forward", 2, 0.25e-3, 1.5e-3, "K/V of 0"),
)
TWO_RANKS = Timeline("two ranks", "measured", 2, EVENTS, {"provenance": {"command": "ringattn"}, "clock_error": 2e-6})
"""Rank 0 computes for 3 of 4 ms and waits for 0.5 ms; rank 1 computes for all 4 ms."""


def test_a_written_trace_reads_back_unchanged() -> None:
    # A trace has a process per rank and a thread per lane, in microseconds.
    trace = json.loads(json.dumps(as_chrome(TWO_RANKS)))
    nameless: list[dict[str, Any]] = [{}, {"call": {}}, {"call": None}]  # they do not say which call it is of
    for about in nameless:
        assert not is_same_call(replace(TWO_RANKS, about=about), replace(TWO_RANKS, about=about))
    full, window = (replace(TWO_RANKS, about={"call": {"seqlen": 8} | more}) for more in ({}, {"window_size": (3, 0)}))
    assert is_same_call(window, window) and not is_same_call(full, window) and not is_same_call(window, full)
    assert from_chrome(trace) == TWO_RANKS and TWO_RANKS.seconds == pytest.approx(4e-3)
    named = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert [event["args"]["name"] for event in named if event["pid"] == 1] == [*LANES, "slot 0", "slot 1"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    where = {"ph": "X", "pid": 1, "tid": 5, "cat": "forward", "name": "K/V of 0", "ts": 250.0, "dur": 1250.0}
    assert spans[-1].items() >= where.items() and spans[1]["name"] == "forward hop 1"
    ranks = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert ranks == ["rank 0", "rank 1"]
    assert sorted(["dK/dV slot 0", "slot 1", *LANES[::-1]], key=lane_order) == [*LANES, "slot 1", "dK/dV slot 0"]


@pytest.mark.parametrize(("change", "message"), [
    ({"schema": "ringattn timeline 9"}, "otherData.schema is 'ringattn timeline 9': it must be 'ringattn timeline 2'"),
    ({"source": "guessed"}, "source is 'guessed': it must be one of measured, predicted"),
    ({"world": 1}, "an event has rank 1: it must be between 0 and 0"),
    ({"world": "2"}, "world is '2'"),
    ({"world": 1025}, "timeline.world is 1025: it must be at most 1024"),
])  # fmt: skip
def test_files_without_a_timeline_are_refused(change: dict[str, Any], message: str) -> None:
    trace = as_chrome(TWO_RANKS)
    damaged = trace | {"traceEvents": [{}]}
    with pytest.raises(ValueError, match="this timeline is damaged: KeyError: 'ph'"):
        from_chrome(damaged)
    with pytest.raises(ValueError, match="this timeline is damaged: TypeError"):
        from_chrome(trace | {"traceEvents": None})
    trace["otherData"] |= change
    with pytest.raises(ValueError, match=message):
        from_chrome(trace)


def test_rows_of_a_timeline() -> None:
    result = timeline_bench.timeline_result(TWO_RANKS)
    assert result.rows == [
        {"rank": 0, "compute": pytest.approx(3), "wait": pytest.approx(0.5), "send": 0, "receive": 0, "computing": 75},
        {"rank": 1, "compute": 4, "wait": 0, "send": 3, "receive": 0, "computing": 100},
    ]
    assert result.notes == ["two ranks", "clocks of the ranks agree within 2.0e-06 s", "ranks compute 87.5% of 4 ms"]
    assert result.provenance == {"command": "ringattn"}


@pytest.mark.usefixtures("alone")
def test_the_command_writes_trace_picture_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: Any = []
    monkeypatch.setattr(record, "run_timeline", lambda *given: recorded.append(given) or TWO_RANKS)
    trace, picture, target = (tmp_path / name for name in ("trace.json", "timeline.PNG", "rows.json"))
    words = ["--repeats", "3", "--device", "cpu", "--trace", str(trace), "--out", str(picture), "--json", str(target)]
    ran = CliRunner().invoke(timeline_bench.app, words)
    assert ran.exit_code == 0 and "ranks compute 87.5%" in ran.output, ran.output
    assert from_chrome(json.loads(trace.read_text())) == TWO_RANKS
    png = picture.read_bytes()
    assert png[:4] == b"\x89PNG" and int.from_bytes(png[16:20]) == 1400  # pixels, at 140 per inch
    assert read_result(target).notes[0] == "two ranks"
    ((place, problem, repeats),) = recorded
    assert (place, problem.world, problem.seqlen, repeats) == (None, 2, 8192, 3)


def test_clocks_of_other_machines_are_aligned_with_rank_0() -> None:
    ahead, machines = (0.0, 1000.0, 0.0, -3.5), "abac"

    def of_a_rank(group: LocalGroup) -> ClockOffset:
        mine = group.rank()
        return measure_clock_offset(
            open_control(group), now=lambda: time.perf_counter() + ahead[mine], name=lambda: machines[mine]
        )

    with LocalWorld(4) as world:
        offsets = world.run(of_a_rank)
    assert offsets[0] == offsets[2] == ClockOffset(0, 0)
    for rank in (1, 3):
        assert 0 < offsets[rank].error < 30
        assert abs(offsets[rank].seconds + ahead[rank]) <= offsets[rank].error + 1e-6


def test_the_fastest_answer_gives_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    # This clock is 100 s behind. A question takes 2 s to arrive and its answer 4 s, then 1 s and 2 s.
    monkeypatch.setattr(record, "ROUNDS", 2)
    answers = {"answer3/0": (102.0, 103.0), "answer3/1": (121.0, 121.5)}
    published: list[Any] = []
    control: Any = SimpleNamespace(rank=3, publish=lambda *given: published.append(given), read_key=answers.get)
    times = iter([0.0, 7.0, 20.0, 23.5])
    assert record._ask(control, lambda: next(times)) == ClockOffset((101.0 + 98.0) / 2, (3.5 - 0.5) / 2)
    assert published == [("question3/0", True), ("question3/1", True)]
    monkeypatch.setattr(record, "PATIENCE", 0.0)
    with pytest.raises(TransportError, match="no rank published answer3/9"):
        record._wait_for_key(control, "answer3/9")


def clock_of(rank: int) -> str:
    return record.clock_name()


def test_processes_of_one_machine_share_a_clock() -> None:
    # The clock is shared only within a boot and a time namespace.
    names = group_results(2, clock_of)
    assert {*names} == {record.clock_name()}
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/time")]
    assert all(part in names[0] for part in parts)


def test_processes_with_unknown_clocks_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "Path", lambda path: Path("/nowhere"))
    mine = record.clock_name()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert mine != record.clock_name()


@pytest.mark.parametrize(("layout", "causal"), [("zigzag", True), ("contiguous", False)])
def test_a_prediction_has_the_transfers_and_slots_of_the_real_ring(layout: str, causal: bool) -> None:
    call = PredictedCall(32, 4, layout, Mask(causal=causal), heads=2, kv_heads=2, head_dim=16, dtype="float32")
    prediction = predicted_timeline(
        "", predict_passes(call, gpu_speed("h100"), ClusterLinks(PRESETS["nvlink4"], PRESETS["ib400"])), call
    )
    measured = record.virtual_timeline(replace(PROBLEM, layout=layout, causal=causal), CPU, 1)
    assert measured is not None and is_same_call(measured, prediction)
    uses = [
        sorted((e.rank, e.lane, e.phase, e.hop, e.name) for e in each.events if e.lane not in ("compute", "wait"))
        for each in (measured, prediction)
    ]
    assert uses[0] == uses[1]
    assert {"dK/dV slot 0", "dK/dV slot 1"} <= {lane for _, lane, *_ in uses[1]}


def test_a_timeline_of_virtual_ranks() -> None:
    measured = record.virtual_timeline(PROBLEM, CPU, 2)
    assert measured is not None and measured.source == "measured" and measured.world == 4
    assert {event.rank for event in measured.events} == {0, 1, 2, 3}
    lanes = {event.lane for event in measured.events}
    assert {*LANES} < lanes and {"slot 0", "slot 1", "slot 2", "dK/dV slot 0", "dK/dV slot 1"} <= lanes
    assert min(event.begin for event in measured.events) == 0
    assert measured.about["call"]["seqlen"] == 128 and measured.about["clock_error"] == 0
    assert all(0 < row["compute"] < measured.seconds * 1e3 for row in timeline_bench.timeline_result(measured).rows)
    sent, received = (
        sorted((event.phase, event.name, event.nbytes) for event in measured.events if event.lane == lane)
        for lane in ("send", "receive")
    )
    assert sent == received and len(sent) == 4 * (3 + 3 + 3)  # K/V of the forward, K/V of the backward, partial dK/dV


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("device", "launched"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_virtual_ranks_share_the_memory_of_one_gpu(
    device: str, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    place = LaunchedRank(1, 4, 1, 4) if launched else None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(record, "resolve_device", lambda name: torch.device(name))
    monkeypatch.setattr(record, "check_ranks_fit", lambda option, config, needed: calls.append(needed(config)))
    monkeypatch.setattr(record, "virtual_timeline", lambda *given: calls.append(given))
    monkeypatch.setattr(record, "run_process_group", lambda *given, device: calls.append((*given, device)))
    problem = replace(PROBLEM, device=device)
    record.run_timeline(place, problem, 3)
    one = candidate_bytes(OURS, problem)
    if device == "cuda" and not launched:
        assert calls == [(0, 4 * one), (problem, torch.device("cuda"), 3)]
    else:
        assert calls == [one, (4, record.record_timeline, problem, 3, device)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("flags", "where"), [(["--device", "cpu"], "cpu"), ([], "cuda:1")])
def test_device_under_a_launcher(flags: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The two GPUs are simulated; nothing runs.
    for name, value in zip(LAUNCHERS[0], ("1", "2", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(memory, "free_memory", lambda _: 1 << 40)
    ran: list[str] = []

    def in_group(kind: str, *_: object) -> None:
        place = launched_rank()
        assert place is not None
        ran.append(str(place.shared_device(kind)))

    monkeypatch.setattr(launching, "_in_group", in_group)
    result = CliRunner().invoke(timeline_bench.app, [*flags, "--seqlen", "2"])  # a token per rank is enough
    assert result.exit_code == 0 and ran == [where], result.output


def test_every_event_is_on_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, errors = [ClockOffset(0.0, 0.0), ClockOffset(-100.0, 0.25)], (0.125, 0.5)
    monkeypatch.setattr(record, "measure_clock_offset", lambda control: offsets[control.rank])

    def of_a_rank(group: LocalGroup) -> Timeline | None:
        at = 5.0 + 104.0 * group.rank()
        spans = [
            TraceSpan("forward", "compute", 1, at, at + 2, "a name"),
            TraceSpan("backward", "send", 2, at + 1, at + 3, "", 7),
        ]
        slots = [TraceSpan("forward", "slot 0", 0, at + 4, at + 8)]
        trace: Any = SimpleNamespace(
            clock_error=errors[group.rank()], spans=spans[:1], transfers=spans[1:], slots=slots
        )
        ring: Any = SimpleNamespace(group=group, rank=group.rank(), size=2)
        return record.gather_timeline(ring, trace, "a title", {"call": 3})

    with LocalWorld(2) as world:
        timeline, nothing = world.run(of_a_rank)
    events = [
        Event(rank, *given)  # rank 1 begins 4 s after rank 0
        for rank, at in ((0, 0.0), (1, 4.0))
        for given in (
            ("compute", "forward", 1, at, at + 2, "a name", 0), ("send", "backward", 2, at + 1, at + 3, "", 7),
            ("slot 0", "forward", 0, at + 4, at + 8, "", 0),
        )
    ]  # fmt: skip
    assert nothing is None
    assert timeline == Timeline("a title", "measured", 2, tuple(events), {"call": 3, "clock_error": 0.75})


def test_the_run_of_median_length_is_kept_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter([3.0, 1.0, 2.0])
    steps: Any = []
    monkeypatch.setattr(record, "forward_backward", lambda *given: steps.append(given) or forward_backward(*given))
    gathered: list[Any] = []

    def gather(ring: Any, trace: Any, title: str, about: Any) -> Any:
        gathered.append((title, about["call"]["seqlen"], about["provenance"] is not None))
        return SimpleNamespace(seconds=next(lengths))

    monkeypatch.setattr(record, "gather_timeline", gather)
    monkeypatch.setattr(record, "_align_start", lambda ring: steps.append("together"))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    alone, place = replace(PROBLEM, world=1, threads=3), LaunchedRank(0, 1, 0, 1)
    with LocalWorld(1) as world:
        (kept,) = world.run(partial(record.record_timeline, place, CPU, alone, 3))
    assert kept is not None and kept.seconds == 2.0 and threads == [3]
    assert [step == "together" for step in steps] == [False, *[True, False] * 3]
    assert gathered == [(f"{alone.title}, CPU", alone.seqlen, True)] * 3
