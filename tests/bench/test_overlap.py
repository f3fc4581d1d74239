"""``bench overlap`` and ``bench host``: what is timed, what follows, and that a ring hides its communication."""

from __future__ import annotations

import csv
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from ringattn import LocalWorld, Ring, ring_attention
from ringattn.bench import cli
from ringattn.bench import host as host_time
from ringattn.bench import memory as memory_bench
from ringattn.bench.common.launching import launch
from ringattn.bench.common.tables import table
from ringattn.bench.common.timing import Clock, Samples
from ringattn.bench.overlap import command as overlap
from ringattn.bench.overlap import runs as overlap_runs
from ringattn.bench.overlap.command import Report, Wish
from ringattn.bench.overlap.rows import Row, step_of, verdict
from ringattn.bench.overlap.runs import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, STEP, TOGETHER, Step, Stretches
from ringattn.bench.ring.candidates import Problem
from ringattn.comm import LocalGroup, LocalTransport, NcclTransport
from ringattn.kernels import FULL
from ringattn.kernels.device.forward import forward_kernel
from ringattn.ring.cpu.aten import AtenBackward, AtenForward

from ..support.fake_cuda import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}


# formulas


def row(seconds: float = 10.0, **changed: Any) -> Row:
    """Together it takes so many seconds, compute alone 10, communication alone 8."""
    told: dict[str, Any] = {"phase": STEP, "slots": 3, "prefetch": 2, "chunks": 1, "pieces": 4}
    times = {"compute": Samples((10.0,)), "communication": Samples((8.0,)), "together": Samples((seconds,))}
    return Row(**{**told, **times, **changed})


def test_what_follows_from_three_times() -> None:
    found = row(12.0)
    assert (found.exposed, found.overlap, found.efficiency) == (2.0, 6 / 8, 10 / 12)
    assert (found.chunk, found.bound) == (2.5, 13.0)
    assert row(18.0).overlap == 0 and row(10.0).overlap == 1 and row(10.0).efficiency == 1
    link_bound = row(22.0, communication=Samples((20.0,)))
    assert (link_bound.exposed, link_bound.overlap, link_bound.bound) == (12.0, 0.8, 23.5)


def test_a_ring_is_within_its_bound_or_says_so() -> None:
    assert row(13.0).within and not row(13.01).within
    assert row(13.0).as_row()[""] == "" and row(13.01).as_row()[""] == "above the bound"


def test_a_step_is_both_passes_run_by_run() -> None:
    forward = row(phase=FORWARD, together=Samples((1.0, 9.0, 2.0)), compute=Samples((1.0, 1.0, 1.0)), contention=1.5)
    backward = row(
        0, phase=BACKWARD, together=Samples((9.0, 2.0, 3.0)), compute=Samples((3.0, 3.0, 3.0)), contention=1.1
    )
    step = step_of(forward, backward)
    assert step.together is not None and step.together.seconds == (10.0, 11.0, 5.0)
    assert (step.phase, step.slots, step.prefetch, step.chunks, step.pieces) == (STEP, 3, 2, 1, 8)
    assert step.contention == pytest.approx(0.25 * 1.5 + 0.75 * 1.1)


def buffers(two: dict[int, float], three: dict[int, float]) -> list[Row]:
    """Steps with two and with three slots, by chunks, that spread by 1%."""
    found = []
    for slots, times in ((2, two), (3, three)):
        for chunks, seconds in times.items():
            spread = Samples((seconds * 0.99, seconds * 0.99, seconds, seconds * 1.01, seconds * 1.01))
            found.append(row(slots=slots, prefetch=slots - 1, chunks=chunks, together=spread))
            found.append(row(0.1, slots=slots, prefetch=0, chunks=chunks))  # blocking: not what is compared
    return found


def test_one_sentence_about_the_third_buffer() -> None:
    assert "pays here: it saves +10.0% of a step with 1 chunk" in verdict(buffers({1: 10.0}, {1: 9.0}), 4)
    assert "does not pay here: it saves +0.5%" in verdict(buffers({1: 10.0}, {1: 9.95}), 4)
    both = verdict(buffers({1: 10.0, 2: 10.0}, {1: 9.0, 2: 10.5}), 4)
    assert "pays here" in both and "does not elsewhere: -5.0% of a step with 2 chunks" in both
    assert "not measured" in verdict(buffers({1: 10.0}, {}), 4)
    assert "cannot pay in a world of 2" in verdict(buffers({1: 10.0}, {1: 1.0}), 2)
    assert "nothing arrives" in verdict([], 1)


# what runs


def small(world: int, **changed: Any) -> Wish:
    problem = Problem(world * 24, world, heads=4, kv_heads=2, head_dim=16, causal=True, layout="zigzag")
    return Wish(problem, **{"slots": (3,), "prefetch": (2,), "repeats": 1, "transport": "local", **changed})


@pytest.mark.parametrize("chunks", [1, 2])
def test_together_is_the_ring(chunks: int) -> None:
    """The steps that are timed compute what ``ring_attention`` computes, to the bit."""
    wish = small(3)

    def run(group: LocalGroup) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(group.rank())
        with Ring(group, chunks=chunks) as ring:
            shard = overlap.prepared(wish, ring, CPU)
            q, k, v = (x.detach().requires_grad_() for x in (shard.q, shard.k, shard.v))
            out = ring_attention(q, k, v, layout=wish.problem.held, ring=ring, causal=True)
            assert isinstance(out, Tensor) and shard.out is not None
            grads = torch.autograd.grad(out, (q, k, v), shard.dout)
            return [out.detach(), *grads], [shard.out, *Step(ring, shard, BACKWARD, TOGETHER)()]

    with LocalWorld(3, device="cpu") as world:
        for expected, got in world.run(run):
            for one, other in zip(expected, got, strict=True):
                assert torch.equal(one, other)


def test_alone_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute alone posts nothing and counts what it would; communication alone posts that and computes nothing."""
    wish, world = small(3), 3
    moved: dict[int, int] = dict.fromkeys(range(world), 0)
    computed: dict[int, int] = dict.fromkeys(range(world), 0)
    rank_of: dict[int, int] = {}
    post, fold, dkdv = LocalTransport.post, AtenForward.fold, AtenBackward.dkdv

    def posting(transport: LocalTransport, **messages: Any) -> Any:
        sizes = [sum(one.tensor.nbytes for one in messages[name]) for name in ("sends", "receives")]
        moved[transport.rank] += max(sizes)
        return post(transport, **messages)

    def computing(work: Any, *arguments: Any, **named: Any) -> None:
        computed[rank_of[threading.get_ident()]] += 1
        (fold if isinstance(work, AtenForward) else dkdv)(work, *arguments, **named)

    def run(group: LocalGroup) -> dict[tuple[str, str], tuple[int, int, int]]:
        rank_of[threading.get_ident()] = group.rank()
        found = {}
        with Ring(group) as ring:
            shard = overlap.prepared(wish, ring, CPU)
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
        overlap_runs.Nothing().dkdv(Tensor(), Tensor(), FULL, local=False, accum=given, out=())
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

    work = overlap_runs.Clocked(Work(), Clock(CPU), torch.device("cuda", 0))

    def arrives() -> Any:
        order.append("wait")
        return "sums"

    work.dkdv(torch.empty(0), torch.empty(0), None, local=False, accum=arrives, out=())  # type: ignore[arg-type]
    assert order == ["wait", "event", "launch on sums"]


# the command


def test_overlap_of_real_processes(tmp_path: Path) -> None:
    target, rows = tmp_path / "o.json", tmp_path / "o.csv"
    flags = [
        "--tokens",
        "64",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "16",
        "--repeats",
        "2",
        "--slots",
        "1,2",
    ]
    files = ["--json", str(target), "--csv", str(rows)]
    result = CliRunner().invoke(cli.app, ["bench", "overlap", *flags, "--prefetch", "0,1", *files])
    assert result.exit_code == 0, result.output
    told = json.loads(target.read_text())
    assert told["transport"] == "process_group" and told["bytes_per_second"] > 0
    settings = [(one["slots"], one["prefetch"], one["chunks"]) for one in told["rows"] if one["phase"] == STEP]
    assert settings == [(s, p, c) for c in (1, 2) for s in (1, 2) for p in (0, 1)]
    for one in told["rows"]:
        if (one["slots"], one["prefetch"]) == (1, 1):
            assert "prefetch is 1" in one["note"] and "together" not in one
        else:
            assert len(one["together"]["samples"]) == 2 and one["bound"] > one["compute"]["median"]
    assert "cannot pay in a world of 2" in result.stdout and "prefetch is 1" in result.stdout
    with rows.open() as file:
        assert [row["phase"] for row in csv.DictReader(file)] == [one["phase"] for one in told["rows"]]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--heads", "4", "--chunks", "1,5"], "at least one of the 4 key heads"),
        (["--chunks", "0"], "at least one"),
        (["--device", "cuda", "--link-share", "0.5"], "sees no CUDA device"),
        (["--dtype", "int8"], "no dtype"),
        (["--tokens", "0"], "'0' is too small: it must be at least 1"),
        (["--slots", "0"], "slots is 0: a ring of 2 ranks needs at least 1"),
        (["--slots", "1,2", "--prefetch", "2,3"], "prefetch is 2: with 1 slots it must be 0 to 0; prefetch is 3"),
        (["--transport", "nccl"], "--transport is nccl, of GPUs, and the device is cpu: take process_group"),
        (["--transport", "local"], "--transport is local, of one process, and 2 are to run"),
        (["--transport", "pigeon"], "it takes auto"),
        (["--timer", "graph"], "timer is 'graph': on cpu it must be one of clock"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(overlap.app, flags, env=WIDE)
    assert result.exit_code == 2 and told in result.output, result.output


def test_only_links_between_cpus_are_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = CliRunner().invoke(overlap.app, ["--link-share", "0.5"], env=WIDE)
    assert result.exit_code == 2 and "the device is cuda" in result.output


# what it must reach


def measured(wish: Wish, seconds: float) -> list[Row]:
    """Rows of rings with prefetch 1 and 0; measured anew, for a while, where the machine may have been too busy."""
    ends = time.monotonic() + seconds
    while True:
        report: Report = launch(2, overlap.spawned, wish)
        print(table([one.as_row() for one in report.rows]))
        ahead, blocking = (one for one in report.rows if one.phase == STEP)
        assert (ahead.prefetch, blocking.prefetch) == (1, 0)
        if (ahead.within and not blocking.within) or time.monotonic() > ends:
            return [ahead, blocking]


def hiding(tokens: int, repeats: int) -> Wish:
    # four query heads to a key head: the fewer bytes, the less of a core the network of the host itself takes
    problem = Problem(2 * tokens, 2, heads=16, kv_heads=4, head_dim=64, causal=False, layout="contiguous")
    return Wish(problem, slots=(2,), prefetch=(1, 0), chunks=(2,), repeats=repeats)


@pytest.mark.nightly
@pytest.mark.idle
@pytest.mark.parametrize(("tokens", "repeats", "seconds"), [(1024, 5, 60), (3072, 7, 600)])
def test_a_ring_hides_what_a_blocking_one_shows(tokens: int, repeats: int, seconds: int) -> None:
    """Communication alone is 0.8 of compute: a step takes the larger, a chunk and 5%; with prefetch 0 it does not."""
    ahead, blocking = measured(hiding(tokens, repeats), seconds)
    assert ahead.within, ahead.as_row()
    assert not blocking.within, blocking.as_row()


# bench host


def test_host_time_is_a_lower_bound_here(tmp_path: Path) -> None:
    target = tmp_path / "h.json"
    before = torch.cuda.Event, torch.cuda.Stream
    flags = ["--tokens", "256", "--heads", "4", "--head-dim", "16", "--chunks", "2", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, ["bench", "host", *flags, "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("a lower bound, not a result") == 2
    told = json.loads(target.read_text())
    assert [one["phase"] for one in told["rows"]] == [FORWARD, BACKWARD] and told["timer"] == "clock"
    assert all(0 < one["host"] < 0.1 and one["compute"] is None for one in told["rows"])
    assert before == (torch.cuda.Event, torch.cuda.Stream)


@pytest.mark.parametrize(("host", "note", "code"), [(99e-6, "", 0), (101e-6, "", 1), (101e-6, host_time.BY_CLOCK, 0)])
def test_the_host_must_be_ahead(host: float, note: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clock its own time is in the compute, and nothing is said."""
    monkeypatch.setattr(host_time, "measured", lambda *given: [host_time.Row(FORWARD, host, 100e-6, note)])
    ran = CliRunner().invoke(cli.app, ["bench", "host", "--tokens", "64", "--device", "cpu"])
    assert ran.exit_code == code and (note or ("host is ahead", "host is behind")[code]) in ran.stdout


def test_every_hop_is_posted_and_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of a ring: a group of transfers per hop and pass, and the launches of its hops; each is watched."""
    posts: list[tuple[int, int]] = []
    launches: list[str] = []
    post = NcclTransport.post

    def posting(transport: NcclTransport, **messages: Any) -> Any:
        posts.append((len(messages["sends"]), len(messages["receives"])))
        return post(transport, **messages)

    monkeypatch.setattr(NcclTransport, "post", posting)

    def run(kernel: Any, *given: object, **named: object) -> None:
        launches.append(kernel.__name__)

    # not monkeypatch: undone after the block, it would put the stand-in of no_device back for good
    with host_time.ring_of_one(CPU) as ring, patch.object(type(forward_kernel), "run", run):
        case = host_time.Case(ring, (1, 32, 2, 16), 2, torch.bfloat16, CPU)
        case.forward()
        assert posts == [(2, 2)] * (host_time.HOPS - 1) and launches == ["forward_kernel"] * host_time.HOPS
        posts.clear()
        launches.clear()
        case.backward()
        assert ring._watch is not None and str(ring._watch._posts.last) == "backward hop 7: sums, chunk 0"
    assert len(posts) == 2 * (host_time.HOPS - 1) and set(posts) == {(2, 2)}
    assert sorted(launches) == ["delta_kernel", *["dkdv_kernel"] * host_time.HOPS, *["dq_kernel"] * host_time.HOPS]


@pytest.mark.parametrize(("phase", "most"), [(FORWARD, 110), (BACKWARD, 260)])
def test_python_calls_of_a_hop(phase: str, most: int) -> None:
    """What ``calls_of`` counts: functions of this package and of the standard library; a count, so that it is exact."""
    with host_time.ring_of_one(CPU) as ring:
        case = host_time.Case(ring, (1, 256, 4, 64), 2, torch.bfloat16, CPU)
        calls = host_time.calls_of(getattr(case, phase)) / host_time.HOPS
    assert calls <= most


@pytest.mark.parametrize("timer", ["events", "graph", "sundial"])
def test_timers_of_a_host_without_a_device(timer: str) -> None:
    ran = CliRunner().invoke(host_time.app, ["--device", "cpu", "--timer", timer], env=WIDE)
    assert ran.exit_code == 2 and f"timer is {timer!r}: on cpu it must be one of clock" in ran.output


@pytest.mark.parametrize("timer", ["", "events", "clock"])
def test_by_clock_nothing_is_said_of_who_is_ahead(timer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time is in the device's then, so that it would never be behind."""
    FakeCuda(monkeypatch)
    clock = Clock(torch.device("cuda"), timer=timer, _flush=torch.ones(4))
    steps: Any = SimpleNamespace(forward=lambda: None, backward=lambda: None)
    found = host_time.rows_of(steps, clock)
    assert [one.phase for one in found] == [FORWARD, BACKWARD] and all(one.compute is not None for one in found)
    assert {one.hidden is None for one in found} == {timer == "clock"}
    assert {one.note for one in found} == {host_time.BY_CLOCK if timer == "clock" else ""}


def test_a_host_that_is_behind_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_time.Row(FORWARD, 1e-5, None).hidden is None
    rows = [host_time.Row(FORWARD, 1e-5, 1e-3), host_time.Row(BACKWARD, 2e-3, 1e-3)]
    assert [one.hidden for one in rows] == [True, False]
    monkeypatch.setattr(host_time, "rows_of", lambda case, clock: rows)
    flags = ["--tokens", "32", "--heads", "2", "--head-dim", "16", "--device", "cpu"]
    result = CliRunner().invoke(host_time.app, flags, env=WIDE)
    assert result.exit_code == 1 and "host is behind" in result.output


# bench memory of other rings


def test_memory_of_rings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(memory_bench.app, ["--nodes", "2", "--world", "4,6,2"], env=WIDE)
    assert result.exit_code == 2 and "2 processes are not 2 nodes of 2 or more each" in result.output
    monkeypatch.setattr(memory_bench, "started", lambda *given: pytest.fail("it started"))
    with pytest.raises(typer.BadParameter):
        memory_bench.memory(worlds=[6], tokens=64, heads=2, nodes=4)


@pytest.mark.nightly
def test_memory_of_two_level_rings_is_constant(tmp_path: Path) -> None:
    target = tmp_path / "m.json"
    flags = ["--nodes", "2", "--world", "4,8", "--tokens", "1k", "--heads", "4", "--json", str(target)]
    result = CliRunner().invoke(cli.app, ["bench", "memory", *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text())["ring"]["nodes"] == 2
