"""``bench overlap``: what is timed, what follows, and that a ring hides its communication."""

from __future__ import annotations

import csv
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ringattn import LocalWorld, Ring, ring_attention
from ringattn.bench import cli
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.launching import spawn
from ringattn.bench.common.result import Result, read
from ringattn.bench.common.timing import Samples
from ringattn.bench.overlap import runs
from ringattn.bench.overlap.runs import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    STEP,
    TOGETHER,
    OverlapConfig,
    Row,
    Step,
    Stretches,
    Times,
    shard_of,
    step_of,
    verdict,
)
from ringattn.comm import LocalGroup, LocalTransport
from ringattn.kernels import FULL
from ringattn.ring.cpu.aten import AtenBackward, AtenForward

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}


# formulas


def times(together: float = 10.0, communication: float = 8.0) -> Times:
    """Compute alone takes 10 seconds."""
    return Times(Samples((10.0,)), Samples((communication,)), Samples((together,)), 4, None)


@pytest.mark.parametrize(
    ("found", "columns"),
    [
        (
            times(12.0),
            {"exposed": 2e3, "overlap": 75, "efficiency": 100 * 10 / 12, "bound": 13e3, "within bound": True},
        ),
        (times(13.01), {"within bound": False}),
        (times(18.0), {"overlap": 0}),
        (times(10.0), {"overlap": 100, "efficiency": 100}),
        (times(22.0, 20.0), {"exposed": 12e3, "overlap": 80, "bound": 23.5e3}),
    ],
)
def test_columns(found: Times, columns: dict[str, float]) -> None:
    row = found.row(STEP)
    assert {name: row[name] for name in columns} == pytest.approx(columns)
    assert {"slots", "prefetch", "chunks", *row} == set(runs.UNITS)


def test_a_step_is_both_passes_run_by_run() -> None:
    forward = Times(Samples((1.0,) * 3), Samples((8.0,) * 3), Samples((1.0, 9.0, 2.0)), 4, 1.5)
    backward = Times(Samples((3.0,) * 3), Samples((8.0,) * 3), Samples((9.0, 2.0, 3.0)), 4, 1.1)
    step = step_of(forward, backward)
    assert step.together.seconds == (10.0, 11.0, 5.0) and step.pieces == 8
    assert step.contention == pytest.approx(0.25 * 1.5 + 0.75 * 1.1)


def test_verdict_on_the_third_buffer() -> None:
    rows: list[Row] = []
    for slots, seconds in ((2, {1: 10.0, 2: 10.0}), (3, {1: 9.0, 2: 10.5})):
        for chunks, together in seconds.items():
            common = {"phase": STEP, "slots": slots, "chunks": chunks, "spread": float(slots)}
            rows.append({**common, "prefetch": slots - 1, "together": together})
            rows.append({**common, "prefetch": 0, "together": 0.1})  # blocking: not what is compared
    assert verdict(rows).endswith(" saves of a step: +10.0% ±3.0% with 1 chunks, -5.0% ±3.0% with 2 chunks")
    assert "not measured" in verdict(rows[:4])


# what runs


SMALL = AttentionConfig(3 * 24, 3, heads=4, kv_heads=2, head_dim=16, causal=True, layout="zigzag", transport="local")


def test_together_is_the_ring() -> None:
    """The steps that are timed compute what ``ring_attention`` computes, to the bit."""

    def run(group: LocalGroup) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(group.rank())
        with Ring(group, chunks=2) as ring:
            shard = shard_of(SMALL, ring, CPU)
            q, k, v = (x.detach().requires_grad_() for x in (shard.q, shard.k, shard.v))
            out = ring_attention(q, k, v, layout=SMALL.held, ring=ring, causal=True)
            assert isinstance(out, Tensor) and shard.out is not None
            grads = torch.autograd.grad(out, (q, k, v), shard.dout)
            return [out.detach(), *grads], [shard.out, *Step(ring, shard, BACKWARD, TOGETHER)()]

    with LocalWorld(3, device="cpu") as world:
        for expected, got in world.run(run):
            for one, other in zip(expected, got, strict=True):
                assert torch.equal(one, other)


def test_alone_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute alone posts nothing and counts what it would; communication alone posts that and computes nothing."""
    world = SMALL.world
    moved: dict[int, int] = dict.fromkeys(range(world), 0)
    computed: dict[int, int] = dict.fromkeys(range(world), 0)
    rank_of: dict[int, int] = {}
    post, fold, dkdv = LocalTransport.post, AtenForward.fold, AtenBackward.dkdv

    def posting(transport: LocalTransport, **messages: Any) -> Any:
        sizes = [sum(one.tensor.nbytes for one in messages[name]) for name in ("sends", "receives")]
        moved[transport.rank] += max(sizes)
        return post(transport, **messages)

    def computing(backend: Any, *arguments: Any, **named: Any) -> None:
        computed[rank_of[threading.get_ident()]] += 1
        (fold if isinstance(backend, AtenForward) else dkdv)(backend, *arguments, **named)

    def run(group: LocalGroup) -> dict[tuple[str, str], tuple[int, int, int]]:
        rank_of[threading.get_ident()] = group.rank()
        found = {}
        with Ring(group) as ring:
            shard = shard_of(SMALL, ring, CPU)
            for phase in (FORWARD, BACKWARD):
                for kind in (TOGETHER, COMPUTE, COMMUNICATION):
                    before = moved[group.rank()], computed[group.rank()]
                    step = Step(ring, shard, phase, kind)
                    step()
                    now = moved[group.rank()], computed[group.rank()]
                    found[phase, kind] = now[0] - before[0], now[1] - before[1], step.nbytes
        return found

    monkeypatch.setattr(LocalTransport, "post", posting)
    monkeypatch.setattr(AtenForward, "fold", computing)
    monkeypatch.setattr(AtenBackward, "dkdv", computing)
    with LocalWorld(world, device="cpu") as ranks:
        for found in ranks.run(run):
            for phase in (FORWARD, BACKWARD):
                nbytes, computes, _ = found[phase, TOGETHER]
                assert nbytes > 0 and computes == world
                assert found[phase, COMPUTE] == (0, computes, nbytes)
                assert found[phase, COMMUNICATION] == (nbytes, 0, 0)


def test_what_computes_nothing_still_waits() -> None:
    waited: list[str] = []

    def sums() -> tuple[Tensor, ...]:
        waited.append("sums")
        return ()

    for given in (None, sums):
        runs.Nothing().dkdv(Tensor(), Tensor(), FULL, local=False, accum=given, out=())
    assert waited == ["sums"]


def test_waits_are_not_compute() -> None:
    clock = Stretches(CPU)
    with clock.stretch():
        time.sleep(0.01)
        clock.without(lambda: (time.sleep(0.05),))  # type: ignore[arg-type, func-returns-value, return-value]
    assert 0.01 <= clock.seconds < 0.05


def test_kernels_wait_before_they_are_timed() -> None:
    """On a GPU the stream waits for the sums outside of the events around the kernel."""
    order: list[str] = []

    class Work:
        def dkdv(self, *given: Any, accum: Any, **named: Any) -> None:
            order.append(f"launch on {accum()}")

    class Clock(Stretches):
        def stretch(self) -> Any:
            order.append("event")
            return super().stretch()

    work = runs.Clocked(Work(), Clock(CPU), torch.device("cuda", 0))

    def arrives() -> Any:
        order.append("wait")
        return "sums"

    work.dkdv(torch.empty(0), torch.empty(0), None, local=False, accum=arrives, out=())  # type: ignore[arg-type]
    assert order == ["wait", "event", "launch on sums"]


# the command


def test_overlap_of_real_processes(tmp_path: Path) -> None:
    target, rows = tmp_path / "o.json", tmp_path / "o.csv"
    flags = "--tokens 64 --heads 4 --kv-heads 2 --head-dim 16 --repeats 2 --slots 1,2 --prefetch 0,1"
    files = ["--json", str(target), "--csv", str(rows)]
    ran = CliRunner().invoke(cli.app, ["bench", "overlap", *flags.split(), *files])
    assert ran.exit_code == 0, ran.output
    found = read(target)
    settings = [(row["slots"], row["prefetch"], row["chunks"]) for row in found.rows if row["phase"] == STEP]
    assert settings == [(s, p, c) for c in (1, 2) for s, p in ((1, 0), (2, 0), (2, 1))]
    assert all(row["bound"] > row["compute"] > 0 and row["communication"] > 0 for row in found.rows)
    assert "no ring: prefetch is 1: with 1 slots it must be 0 to 0" in ran.stdout
    assert "over process_group, link throttled to" in ran.stdout
    assert "not measured" in found.notes[-1] and found.provenance["versions"]
    with rows.open() as file:
        assert [row["phase"] for row in csv.DictReader(file)] == [row["phase"] for row in found.rows]


# what it must reach


def measured(config: OverlapConfig, seconds: float) -> list[Any]:
    """Rows of rings with prefetch 1 and 0; measured anew, for a while, where the machine may have been too busy."""
    ends = time.monotonic() + seconds
    while True:
        result: Result = spawn(2, runs.measure, config)
        print(result.text(300))
        ahead, blocking = (row for row in result.rows if row["phase"] == STEP)
        assert (ahead["prefetch"], blocking["prefetch"]) == (1, 0)
        if (ahead["within bound"] and not blocking["within bound"]) or time.monotonic() > ends:
            return [ahead, blocking]


@pytest.mark.nightly
@pytest.mark.idle
@pytest.mark.parametrize(("tokens", "repeats", "seconds"), [(1024, 5, 60), (3072, 7, 600)])
def test_a_ring_hides_what_a_blocking_one_shows(tokens: int, repeats: int, seconds: int) -> None:
    """Communication alone is 0.8 of compute: a step takes the larger, a chunk and 5%; with prefetch 0 it does not."""
    # four query heads to a key head: the fewer bytes, the less of a core the network of the host itself takes
    problem = AttentionConfig(
        2 * tokens, 2, heads=16, kv_heads=4, causal=False, layout="contiguous", transport="process_group"
    )
    config = OverlapConfig(problem, slots=(2,), prefetch=(1, 0), chunks=(2,), repeats=repeats)
    ahead, blocking = measured(config, seconds)
    assert ahead["within bound"], ahead
    assert not blocking["within bound"], blocking
