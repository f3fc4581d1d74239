"""Tests of ``bench overlap``: what is timed, the verdicts, and that a ring hides its communication."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ringattn import LocalWorld, Ring, ring_attention
from ringattn.bench import cli
from ringattn.bench.common import progress
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.launching import run_process_group
from ringattn.bench.common.ranks import LaunchedRank
from ringattn.bench.common.result import Result, Row, read_result
from ringattn.bench.common.timing import RankTeam, Samples, StepTimer
from ringattn.bench.overlap import command, measure
from ringattn.bench.overlap.measure import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    PHASES,
    STEP,
    TOGETHER,
    OverlapConfig,
    PhaseTimes,
    RankPasses,
    buffer_verdict,
    sum_phases,
)
from ringattn.comm import DONE, Limits, LocalGroup, LocalTransport, Message
from ringattn.ring.local.rectangles import RectangleBackward, RectangleForward

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
SMALL = AttentionConfig(3 * 24, 3, heads=4, kv_heads=2, head_dim=16, causal=True, layout="zigzag", transport="local")


def times(together: float, communication: float = 8.0) -> PhaseTimes:
    """Return times of a step whose compute alone takes 10 seconds."""
    return PhaseTimes(Samples((10.0,)), Samples((communication,)), Samples((together,)), 4)


def test_rate_of_the_slowed_link(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SimpleNamespace(run=print, nbytes=dict(zip(PHASES, (10, 30), strict=True)))
    team = SimpleNamespace(slowest_seconds=float)
    made: Any = []
    timed: Any = []
    monkeypatch.setattr(measure, "Ring", lambda **named: made.append(named) or nullcontext())
    monkeypatch.setattr(measure, "RankPasses", lambda *_: shard)
    two_seconds = dict.fromkeys(PHASES, Samples((2.0,)))
    monkeypatch.setattr(
        measure, "time_in_turns", lambda steps, clock, **how: timed.append((clock.team, how)) or two_seconds
    )
    monkeypatch.setattr(measure, "RankTeam", lambda: team)
    assert measure.link_speed(OverlapConfig(SMALL, ((2, 1, 4),)), 0.5, CPU) == 40 / (0.5 * 4)
    assert made == [{"transport": "local", "chunks": 4}] and timed == [(team, {"repeats": measure.PROBES})]


@pytest.mark.parametrize(("measured", "columns"), [
    (times(12), {"exposed": 2e3, "overlap": 75, "efficiency": 100 / 1.2, "bound": 13e3, "within bound": True}),
    (times(13.01), {"within bound": False}),
    (times(24, communication=20), {"overlap": 60, "efficiency": 100 / 1.2, "bound": 23.5e3, "within bound": False}),
])  # fmt: skip
def test_overlap_columns_are_computed_from_phase_times(measured: PhaseTimes, columns: dict[str, float]) -> None:
    row = measured.as_columns()
    assert {name: row[name] for name in columns} == pytest.approx(columns)
    assert {"phase", "slots", "prefetch", "chunks", *row} == set(measure.UNITS)


def test_a_step_adds_both_passes_of_each_run() -> None:
    forward = PhaseTimes(Samples((1.0,) * 3), Samples((8.0,) * 3), Samples((1.0, 9.0, 2.0)), 4)
    backward = PhaseTimes(Samples((3.0,) * 3), Samples((7.0,) * 3), Samples((9.0, 2.0, 3.0)), 4)
    assert sum_phases(forward, backward) == (
        Samples((4.0,) * 3), Samples((15.0,) * 3), Samples((10.0, 11.0, 5.0)), 8,
    )  # fmt: skip


def test_verdict_on_the_third_buffer() -> None:
    rows: list[Row] = []
    for slots, seconds in ((2, {1: 10.0, 2: 10.0}), (3, {1: 9.0, 2: 10.5})):
        for chunks, together in seconds.items():
            common = {"phase": STEP, "slots": slots, "chunks": chunks, "spread": float(slots)}
            rows.append({**common, "prefetch": slots - 1, "together": together})
            rows.append({**common, "prefetch": 0, "together": 0.1})  # blocking rings are not compared
    assert buffer_verdict(rows, 2).endswith("third buffer: +10.0% ±3.0% with 1 chunk, -5.0% ±3.0% with 2 chunks")
    assert buffer_verdict(rows, 1).endswith("third buffer: +10.0% with 1 chunk, -5.0% with 2 chunks")
    assert "not measured" in buffer_verdict(rows[:4], 2)


def test_timed_steps_equal_ring_attention_bitwise() -> None:
    revised: dict[int, Any] = {}

    def run(group: LocalGroup) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(group.rank())
        with Ring(group, chunks=4, slots=2) as ring:  # two groups of heads, and two runs of tokens
            shard = RankPasses(SMALL, ring, CPU, revise_plan=lambda own: revised.setdefault(group.rank(), replace(own)))
            assert shard._plan is revised[group.rank()] and shard._plan.slots == 2
            leaves = [x.detach().requires_grad_() for x in (shard.q, shard.k, shard.v)]
            out = ring_attention(*leaves, layout=SMALL.token_layout, ring=ring, causal=True)
            assert isinstance(out, Tensor)
            grads = torch.autograd.grad(out, leaves, shard.dout)
            return [out.detach(), *grads], [shard.out, *shard.run(BACKWARD, TOGETHER)]

    with LocalWorld(3, device="cpu") as world:
        for expected, got in world.run(run):
            assert all(map(torch.equal, expected, got))


def test_compute_alone_posts_nothing_and_communication_alone_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SMALL.world
    moved: dict[int, int] = dict.fromkeys(range(world), 0)
    computed: dict[int, int] = dict.fromkeys(range(world), 0)
    rank_of: dict[int, int] = {}
    post, fold, dkdv = LocalTransport.post, RectangleForward.fold, RectangleBackward.dkdv

    def posting(transport: LocalTransport, **messages: Any) -> Any:
        sizes = [sum(message.tensor.nbytes for message in messages[name]) for name in ("sends", "receives")]
        moved[transport.rank] += max(sizes)
        return post(transport, **messages)

    def computing(backend: Any, *arguments: Any, **named: Any) -> None:
        computed[rank_of[threading.get_ident()]] += 1
        (fold if isinstance(backend, RectangleForward) else dkdv)(backend, *arguments, **named)

    def run(group: LocalGroup) -> dict[tuple[str, str], tuple[int, int]]:
        rank = group.rank()
        rank_of[threading.get_ident()] = rank
        posted = {}
        with Ring(group) as ring:
            shard = RankPasses(SMALL, ring, CPU)
            for phase in PHASES:
                for kind in (TOGETHER, COMPUTE, COMPUTE, COMMUNICATION):
                    before = moved[rank], computed[rank]
                    shard.run(phase, kind)
                    posted[phase, kind] = moved[rank] - before[0], computed[rank] - before[1]
                assert shard.nbytes[phase] == posted[phase, TOGETHER][0] > 0
        return posted

    monkeypatch.setattr(LocalTransport, "post", posting)
    monkeypatch.setattr(RectangleForward, "fold", computing)
    monkeypatch.setattr(RectangleBackward, "dkdv", computing)
    with LocalWorld(world, device="cpu") as ranks:
        for of_rank in ranks.run(run):
            for phase in PHASES:
                nbytes, computes = of_rank[phase, TOGETHER]
                assert computes == world
                assert of_rank[phase, COMPUTE] == (0, computes) and of_rank[phase, COMMUNICATION] == (nbytes, 0)


def test_communication_alone_waits_for_arrivals() -> None:
    # The next pass reuses the slots.
    arrived = Mock(return_value=())
    measure.IdleBackend().dkdv(accum=arrived)
    arrived.assert_called_once_with()


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_shows_progress(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    monkeypatch.setattr(RankTeam, "slowest_seconds", lambda team, seconds: seconds)
    alone = replace(SMALL, seqlen=24, world=1, threads=3)
    config = OverlapConfig(alone, ((2, 1, 1), (3, 2, 1), (3, 0, 2)), repeats=1, link_share=None)
    made: Any = []
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(measure, "Ring", lambda **named: made.append(named) or Ring(**named))
    result = measure.measure_overlap(LaunchedRank(rank, 2, rank, 2), CPU, config)
    assert ("timing: " in capfd.readouterr().err) is (rank == 0)
    names = ("slots", "prefetch", "chunks")
    shared = {"transport": "local", "limits": Limits()}
    assert made == [shared | dict(zip(names, one, strict=True)) for one in config.settings] and threads == [3]
    assert result.notes[-1].endswith("% with 1 chunk") and "±" not in result.notes[-1]  # one run has no spread
    columns = [[row[name] for name in ("phase", *names)] for row in result.rows]
    assert columns == [[phase, *setting] for setting in config.settings for phase in (*PHASES, STEP)]


def test_every_time_is_in_the_row_of_its_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {COMPUTE: 5.0, COMMUNICATION: 3.0, TOGETHER: 7.0}
    timed: list[Any] = []

    def run(given: Any, phase: str, kind: str) -> None:
        timed.append((phase, kind))

    def in_turns(steps: dict[str, Any], clock: StepTimer, *, repeats: int, progress: object) -> dict[str, Samples]:
        samples = dict[str, Any]()
        assert isinstance(clock.team, RankTeam)  # the slowest rank counts
        for name, step in steps.items():
            step()
            phase, kind = timed[-1]
            samples[name] = Samples((seconds[kind] * (1 + (phase == BACKWARD)) + len(samples) / 64,) * repeats)
        return samples

    monkeypatch.setattr(measure, "RankPasses", lambda *_: SimpleNamespace(run=lambda *how: run(None, *how)))
    monkeypatch.setattr(measure, "time_in_turns", in_turns)
    config, steps = OverlapConfig(SMALL, ((2, 1, 1), (3, 2, 1)), repeats=2), list[Any]()
    rings: Any = dict.fromkeys(config.settings)
    rows = measure.overlap_rows(config, rings, CPU, lambda part, more: steps.append((part, more)))
    # Rings with equal chunks share the runs of compute and communication alone.
    assert steps == [("timing", 8 * 3)] and len(timed) == 8
    together = [(row["slots"], row["phase"], row["together"] // 1e3) for row in rows]
    assert together == [(n, p, 7 * f) for n in (2, 3) for p, f in ((FORWARD, 1), (BACKWARD, 2), (STEP, 3))]
    for row, factor in zip(rows, (1, 2, 3) * 2, strict=True):
        assert [row["compute"] // 1e3, row["communication"] // 1e3] == [5 * factor, 3 * factor]
        hops = (2 if row["phase"] == STEP else 1) * SMALL.world
        assert row["bound"] == pytest.approx(1.05 * row["compute"] + row["compute"] / hops)


def test_a_still_transport_counts_the_busier_direction() -> None:
    still = measure.StillTransport(Mock(rank=5))
    small, large = (Message(0, torch.empty(n, dtype=torch.uint8)) for n in (3, 5))
    for sends, receives in (([small], [large]), ([large, small], [large]), ([], [small])):
        assert still.post(sends=sends, receives=receives) is DONE
    assert still.nbytes == 5 + 8 + 3 and still.rank == 5


def test_settings_that_a_ring_refuses_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Result("bench overlap", measure.UNITS, notes=["measured"])
    monkeypatch.setattr(command, "run_process_group", lambda *_, **named: measured)
    words = ["--slots", "1,2", "--prefetch", "0,1", "--chunks", "1", "--json", str(tmp_path / "o.json")]
    ran = CliRunner().invoke(cli.app, ["bench", "overlap", *words])
    assert ran.exit_code == 0, ran.output
    result = read_result(tmp_path / "o.json")
    reason = "skipped: prefetch is 1: with 1 slots it must be between 0 and 0"
    assert result.notes == [reason, "measured"] and result.provenance["versions"]


def measured(config: OverlapConfig, seconds: float) -> list[Any]:
    """Return rows of rings with prefetch 1 and 0.

    Measure again for some seconds, because the machine may be too busy at first.
    """
    ends = time.monotonic() + seconds
    while True:
        result: Result = run_process_group(2, measure.measure_overlap, config)
        print(result.text(300))
        ahead, blocking = (row for row in result.rows if row["phase"] == STEP)
        assert (ahead["prefetch"], blocking["prefetch"]) == (1, 0)
        if (ahead["within bound"] and not blocking["within bound"]) or time.monotonic() > ends:
            return [ahead, blocking]


@pytest.mark.nightly
@pytest.mark.idle
def test_prefetch_hides_communication_that_prefetch_0_exposes() -> None:
    # Communication alone takes 0.8 of compute. With prefetch a step takes at most the larger of both, a chunk and 5%.
    # With four query heads per key head, loopback transfers take less CPU time.
    problem = AttentionConfig(
        2 * 3072, 2, heads=16, kv_heads=4, causal=False, layout="contiguous", transport="process_group"
    )
    config = OverlapConfig(problem, ((2, 1, 2), (2, 0, 2)), repeats=7)
    ahead, blocking = measured(config, 600)
    assert ahead["within bound"], ahead
    assert not blocking["within bound"], blocking


def test_more_overlap_than_there_is_to_hide_is_flagged() -> None:
    row = {"phase": "forward", "slots": 3, "prefetch": 2, "chunks": 1, "overlap": 104.0}
    assert measure.unlikely_notes([row]) == []
    (note,) = measure.unlikely_notes([row, row | {"overlap": 169.0}, row | {"overlap": 120.0}])
    assert "1 chunk (169%) and 1 more" in note and "busy" in note
