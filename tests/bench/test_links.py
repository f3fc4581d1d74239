"""Tests of ``bench links``: edges, byte checks, timing beside compute, flags and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import flags, memory, provenance
from ringattn.bench.common.ranks import LAUNCHERS, LaunchedRank
from ringattn.bench.common.result import Result, Row
from ringattn.bench.links import command as links
from ringattn.bench.links import measure
from ringattn.bench.links.measure import (
    BOTH_WAYS,
    ONE_WAY,
    RING,
    LinksConfig,
    pattern_bytes,
    transfer_patterns,
    transport_rows,
)
from ringattn.bench.links.names import FORWARD, MATMUL
from ringattn.comm import DONE, Fence, Limits, LocalGroup, LocalTransport, LocalWorld, Message
from ringattn.comm.world import single_rank

from ..support.cuda.device import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "edges"), [(1, "0->0"), (2, "0->1 1->0 0<->1 all"), (3, "0->1 1->2 2->0 0<->1 0<->2 1<->2 all")]
)
def test_directions_cover_every_edge(size: int, edges: str) -> None:
    rounds = transfer_patterns(size)
    assert [way.edge for way in rounds] == edges.split()
    ring = [way.pairs[0] for way in rounds if way.name == ONE_WAY]
    assert all(way.pairs == tuple(ring) for way in rounds if way.name == RING)
    assert all(way.pairs[1] == way.pairs[0][::-1] for way in rounds if way.name == BOTH_WAYS)


def test_pattern_of_shifted_swapped_and_old_bytes_differs() -> None:
    right = pattern_bytes(1 << 18, 1, 0, CPU)
    assert right.shape == (1 << 18,) and right.dtype == torch.uint8
    for block in (1, 256, 4096, 65536, 131072):
        assert not right[:-block].equal(right[block:])
    assert not right.equal(pattern_bytes(1 << 18, 2, 0, CPU)) and not right.equal(pattern_bytes(1 << 18, 1, 1, CPU))
    assert pattern_bytes(3, 0, 0, CPU).tolist() == [0, 167, (2 * 167) % 256]


class Spoiling(LocalTransport):
    """Transport that loses the last byte of every message to rank 1."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        before = [int(message.tensor[-1]) for message in receives]
        fence = super().post(sends=sends, receives=receives, after=after)
        fence.wait() if self.rank == 1 else None
        for message, last in zip(receives, before, strict=True):
            if self.rank == 1:
                message.tensor[-1] = last
        return fence


def test_a_lost_byte_is_counted_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LinksConfig(("local",), sizes=(5, 1000), iters=2, warmup=0, checks=3, beside="matmul")
    warmed: list[Any] = []
    monkeypatch.setattr(Spoiling, "warm_up", lambda transport, edges: warmed.append(edges))

    def run(group: LocalGroup) -> list[Row]:
        return transport_rows(Spoiling(group, CPU), Limits(channels=2, ctas=4), config, CPU)

    with LocalWorld(3, device="cpu") as world:
        rows_per_rank = world.run(run)
    assert all(rows == rows_per_rank[0] for rows in rows_per_rank)
    assert warmed == [[(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]] * 3
    columns = [(row["way"], row["edge"], row["size"]) for row in rows_per_rank[0]]
    assert columns == [(way.name, way.edge, nbytes) for way in transfer_patterns(3) for nbytes in config.sizes]
    for row in rows_per_rank[0]:
        assert row["time"] > 0 and set(row) < set(measure.UNITS) and (row["channels"], row["ctas"]) == (2, 4)
        assert ("compute note" in row) == (row["size"] == 1000)  # the largest size also runs beside compute
        assert row["algbw"] == row["busbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
    wrong = {row["edge"]: row["#wrong"] for row in rows_per_rank[0] if row["size"] == 1000}
    assert wrong == {"0->1": 3, "1->2": 0, "2->0": 0, "0<->1": 3, "1<->2": 3, "0<->2": 0, "all": 3}


class Losing(LocalTransport):
    """Transport that delivers nothing."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        return DONE


def test_a_transfer_that_delivers_nothing_has_only_wrong_bytes() -> None:
    ends = measure.RankTransfers(Losing(single_rank(), CPU), transfer_patterns(1)[0], 1000, CPU)
    assert [ends.count_wrong_bytes(turn) for turn in (0, 0, 1)] == [1000] * 3


def test_the_slowest_rank_and_all_wrong_bytes_count() -> None:
    gathered: Any = []
    transport: Any = SimpleNamespace(gather=lambda value: gathered.append(value) or [(0.25, 1), (0.5, 2), (None, 4)])
    calls: list[Any] = []
    ends: Any = SimpleNamespace(
        is_participant=False, count_wrong_bytes=lambda turn: 10 + turn, run=lambda count: calls.append(("run", count)),
        enqueue=lambda count: calls.append(count),
    )  # fmt: skip
    config = LinksConfig((), iters=4, warmup=3, checks=2)
    assert measure._timed(transport, ends, config, CPU) == (0.5, 7) and calls == [("run", 3), 4]
    assert gathered == [None, (None, 10 + 11)]
    assert measure._timed(transport, ends, replace(config, checks=0, warmup=0), CPU) == (0.5, None)
    assert calls[2:] == [("run", 1), 4]


def test_a_transport_that_one_rank_cannot_open_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    opened = SimpleNamespace(close=lambda: closed.append(1))
    monkeypatch.setattr(measure, "open_transports", lambda *_, **named: (opened,))
    problems = ["", "no NIC"]
    monkeypatch.setattr(measure, "open_control", lambda group: SimpleNamespace(gather=lambda own, what: problems))
    group: Any = SimpleNamespace(size=lambda: 2)
    assert measure.open_or_explain(group, "nccl", CPU, Limits()) == "rank 1: no NIC" and closed == [1]
    problems[1] = ""
    found: Any = measure.open_or_explain(group, "nccl", CPU, Limits())
    assert found is opened and closed == [1]


def test_a_transfer_takes_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "transfer_seconds", lambda enqueue, device, timer: 8e-3)
    config = LinksConfig(("local",), sizes=(8,), iters=4, checks=0)
    (row,) = transport_rows(LocalTransport(single_rank(), CPU), Limits(), config, CPU)
    assert row["time"] == pytest.approx(2e3) and row["#wrong"] is None


def test_a_transfer_waits_for_the_fences_given() -> None:
    waits: Any = []
    transport = SimpleNamespace(
        rank=0, mark=lambda: DONE, post=lambda *, sends, receives, after: waits.append(after) or DONE
    )
    ends = measure.RankTransfers(transport, measure.TransferPattern(ONE_WAY, ((0, 1),)), 4, CPU)  # type: ignore[arg-type]
    assert ends.post() is DONE
    ends.enqueue(2)  # behind the current stream's work
    assert waits == [(), [DONE], [DONE]]


def test_events_are_recorded_after_the_busy_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = FakeCuda(monkeypatch)
    measure.transfer_seconds(lambda: on_gpu.calls.append("transfers"), CPU, "events")
    assert on_gpu.calls.index("sleep") < on_gpu.calls.index("transfers")


def test_only_nccl_is_swept() -> None:
    config = LinksConfig((), channels=(None, 4, 8, 16), ctas=(None, 8))
    assert list(measure.transport_limits("nccl", config)) == [
        Limits(), Limits(ctas=8), Limits(channels=4), Limits(channels=4, ctas=8), Limits(channels=8),
        Limits(channels=8, ctas=8), Limits(channels=16),
    ]  # fmt: skip
    for name in ("nccl_one_sided", "process_group", "local"):
        assert list(measure.transport_limits(name, config)) == [Limits()]


@pytest.mark.parametrize("must_open", [False, True])
def test_transport_that_does_not_open_is_named_once(must_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    config = LinksConfig(("nccl", "local"), sizes=(8,), iters=1, channels=(None, 1, 2), must_open=must_open)
    rows = measure.measure_group(single_rank(), config, CPU)
    (why,) = rows.failed if must_open else rows.notes
    assert why.startswith("nccl cannot be opened: ") and "cpu" in why
    assert {row["transport"] for row in rows.rows} == {"local"} and threads == [1]
    rows = measure.measure_group(single_rank(), replace(config, channels=(4, None, 2)), CPU)
    limited, unlimited = rows.failed if must_open else rows.notes  # the transport may open without limits
    assert limited.startswith("nccl, 4 channels cannot be opened: ") and unlimited == why


class Slow:
    """Transport whose posts take time, one after the other, on a simulated clock shared with compute."""

    name, rank, size = "slow", 0, 1

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._ends = 0.0
        self.posted: list[int] = []

    def compute(self) -> None:
        self.now += 0.02 if self._ends <= self.now else 0.03

    def mark(self) -> Fence:
        return DONE

    def gather(self, value: object) -> list[object]:
        return [value, (1.0, 0.5)] if isinstance(value, tuple) else [value]  # slowdowns, here less on another rank

    def post(self, *, sends: Any, receives: object, after: object = ()) -> Fence:
        self.posted.append(sends[0].tensor.nbytes)
        ends = self._ends = max(self._ends, self.now) + self._seconds

        def wait() -> None:
            self.now = max(self.now, ends)

        return SimpleNamespace(wait=wait, done=lambda: self.now >= ends)


def test_compute_runs_as_long_as_the_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Slow(0.1)
    monkeypatch.setattr(measure, "compute_step", lambda kind, device: transport.compute)
    monkeypatch.setattr(time, "perf_counter", lambda: transport.now)
    config = LinksConfig((), sizes=(4, 8), beside="matmul")
    columns = measure.compute_columns(transport, transfer_patterns(1)[0], config, CPU)  # type: ignore[arg-type]
    assert columns["compute alone"] == pytest.approx(20)
    assert columns["compute slowed"] == pytest.approx(1.5) and columns["transfer slowed"] == pytest.approx(1, rel=0.1)
    # One to warm up, four to probe, and twice as many as last for 16 steps of 20 ms.
    assert transport.posted == [8] * (1 + 4 + 2 * 4)


def test_on_a_gpu_steps_count_that_ended_before_the_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    now, on_side = [0.0], [False]
    waits: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = 0.1 if on_side[0] else now[0]  # the transfers end after 0.1 s

        def elapsed_time(self, end: Any) -> float:
            return float(1e3 * (end.at - self.at))

    class Side:
        def __enter__(self) -> None:
            on_side[0] = True

        def __exit__(self, *_: object) -> None:
            on_side[0] = False

    side = SimpleNamespace(wait_event=lambda event: waits.append("begun"), synchronize=lambda: waits.append("side"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Side())
    monkeypatch.setattr(measure, "synchronize_compute", lambda device: waits.append("compute"))
    fence = SimpleNamespace(wait=lambda: waits.append("side fence" if on_side[0] else "fence"))
    ends: Any = SimpleNamespace(post=lambda: fence)

    def step() -> None:
        now[0] += 0.03

    assert measure._on_gpu(ends, 2, step, CPU, 5) == (pytest.approx(0.1), 3, pytest.approx(0.09))
    assert waits == ["compute", "begun", "side fence", "side", "compute", "fence", "fence"]
    assert measure._on_gpu(ends, 1, lambda: now.__setitem__(0, 9.0), CPU, 1)[1:] == (0, 0.0)


@pytest.mark.parametrize(
    ("limits", "sizes"), [((8, 64, 2), (8, 16, 32, 64)), ((8, 63, 4), (8, 32)), ((32 << 20, 32 << 20, 2), (32 << 20,))]
)
def test_sizes_are_those_of_nccl_tests(limits: tuple[int, int, int], sizes: tuple[int, ...]) -> None:
    assert links.message_sizes(*limits) == sizes


def test_memory_of_messages_is_counted() -> None:
    nbytes, transport = 16 << 20, LocalTransport(single_rank(), CPU)
    transport_rows(
        transport, Limits(), LinksConfig(("local",), sizes=(64,), iters=1), CPU
    )  # the first run loads libraries
    config = LinksConfig(("local",), sizes=(nbytes,), iters=1, warmup=0)
    messages = measure.BUFFERS + measure.CHECKS_PER_DEVICE["cpu"]
    with memory.return_freed_memory(CPU):
        peak = memory.PeakMemory(CPU)
        assert len(transport_rows(transport, Limits(), config, CPU)) == 1
        assert 0.9 * messages * nbytes < peak.bytes < 1.1 * messages * nbytes


@pytest.mark.parametrize("launched", [False, True])
def test_virtual_ranks_are_measured_only_without_a_launcher(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"transport": "x", "edge": "all", "#wrong": 0}
    between: list[Any] = []

    def run(world: int, entry: object, config: LinksConfig, *, device: str) -> Result:
        between.append((world, entry, config.transports, device))
        return Result("bench links", measure.UNITS, [row])

    place = LaunchedRank(0, 3, 0, 3) if launched else None
    monkeypatch.setattr(measure, "launched_rank", lambda: place)
    monkeypatch.setattr(measure, "run_process_group", run)
    config = LinksConfig(("process_group", "local"), sizes=(8,), iters=1, warmup=0)
    result = measure.measure_everywhere(3, config)
    assert between == [(3, measure.measure_links, config.transports if launched else ("process_group",), "cpu")]
    assert len(result.rows) == (1 if launched else 1 + len(transfer_patterns(3))) and not result.failed


@pytest.mark.parametrize(("changes", "launched", "host", "gpu"), [
    ({}, False, 3 * (2 + 2), 0), ({"checks": 0}, True, 3 * 2, 0),
    ({"device": "cuda"}, True, 0, 12), ({"device": "cuda"}, False, 0, 3 * 12),  # virtual ranks share one GPU
    ({"device": "cuda", "transports": ("nccl",)}, False, 0, 12),
])  # fmt: skip
def test_messages_of_all_ranks_must_fit(
    changes: dict[str, Any], launched: bool, host: int, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(memory, "usable_gpus", lambda ranks: ranks)
    monkeypatch.setattr(measure, "check_size_fits", lambda *given, **named: asked.append((*given, named)))
    measure.check_message_fits(replace(LinksConfig(("nccl", "local"), sizes=(8, 100)), **changes), 3, launched=launched)
    ((option, size, needed, _, named),) = asked
    assert (option, size, named) == ("-e", 100, {"unit": "bytes", "step": 1 << 20})
    assert needed(10) == (3 * memory.PROCESS_BYTES + 10 * host, 10 * gpu)


@pytest.mark.parametrize(("rows", "message"), [
    ([{"transport": "nccl", "edge": "0->1", "#wrong": 3}, {"transport": "nccl", "edge": "1->0", "#wrong": 0}],
     "nccl, 0->1: 3 bytes arrived wrong"),
    ([{"transport": "local", "edge": "all", "#wrong": 1}], "local, all: 1 bytes arrived wrong"),
    ([], "no transport can be opened"),
])  # fmt: skip
def test_wrong_bytes_and_missing_transports_fail(
    rows: list[Row], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "run_process_group", lambda *args, **more: Result("bench links", measure.UNITS, rows))
    assert measure.measure_everywhere(2, LinksConfig(("process_group",))).failed == [message]


def test_best_is_the_fastest_of_all_edges_between_processes() -> None:
    rows: list[Row] = [
        {"transport": transport, "edge": edge, "size": size, "algbw": rate, "channels": 4, "way": "ring"}
        for transport, edge, size, rate in [
            ("nccl", "all", 1 << 20, 9.0), ("nccl", "all", 1 << 25, 3.0), ("nccl_one_sided", "all", 1 << 25, 2.0),
            ("nccl", "0->1", 1 << 25, 5.0), ("local", "all", 1 << 25, 7.0),
        ]
    ]  # fmt: skip
    assert links.fastest_link_note(Result("", {}, rows)) == [
        "best between processes: nccl, 4 channels, 32m bytes, ring: 3 GB/s"
    ]
    assert links.fastest_link_note(Result("", {}, rows[-1:]))[0].startswith("best within one process: local, ")
    assert links.fastest_link_note(Result("", {})) == []


@pytest.mark.parametrize(
    ("text", "device", "name"),
    [("", "cuda", FORWARD), ("", "cpu", MATMUL), ("forward", "cuda", FORWARD), ("none", "cpu", "none")],
)
def test_compute_beside_a_transfer(text: str, device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.parse_beside(text, device) == name
    monkeypatch.setattr(measure, "attention_forward", lambda *qkv: [(*x.shape, x.dtype) for x in qkv])
    product: Any = measure.compute_step(MATMUL, CPU)()
    assert product.shape == (384, 384) and product.dtype == torch.float32
    assert measure.compute_step(FORWARD, CPU)() == [(1, 2048, 16, 128, torch.bfloat16)] * 3


@pytest.mark.parametrize("transport", ["all", "nccl"])
def test_flags_of_a_gpu_reach_the_measurement(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: Any = []
    results = list[Any]()
    monkeypatch.setattr(flags, "parse_device_kind", lambda text: "cuda")
    monkeypatch.setattr(flags, "check_transport_flag", lambda *_: None)
    monkeypatch.setenv("NCCL_P2P_USE_CUDA_MEMCPY", "1")
    monkeypatch.setattr(links, "finish_command", lambda result, *_: results.append(result))
    monkeypatch.setattr(provenance, "provenance", lambda device: {"gpu": str(device)})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        measure, "check_message_fits", lambda config, ranks, launched: configs.append((ranks, launched))
    )
    monkeypatch.setattr(
        measure,
        "measure_everywhere",
        lambda ranks, config: configs.extend((ranks, config)) or Result("bench links", {}),
    )
    launched = transport == "nccl"  # on two machines
    for name, value in zip(LAUNCHERS[0], "2402", strict=True) if launched else ():
        monkeypatch.setenv(name, value)
    words = f"--transport {transport} --channels 4,auto --ctas 8 -n 7 -w 3 -c 2"
    ran = CliRunner().invoke(cli.app, ["bench", "links", *words.split()])
    assert ran.exit_code == 0, ran.output
    fits, ranks, config = configs
    assert fits == ((2, True) if launched else (4, False)) and ranks == 4
    assert (config.channels, config.ctas, config.must_open) == ((4, None), (8,), transport != "all")
    assert (config.iters, config.warmup, config.checks, config.beside) == (7, 3, 2, FORWARD)
    assert (config.device, config.timer) == ("cuda", "events") and results[0].provenance == {"gpu": "cuda"}
    assert {"timed by events", "NCCL_P2P_USE_CUDA_MEMCPY=1"} <= {*results[0].notes}
