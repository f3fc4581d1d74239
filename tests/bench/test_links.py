"""``bench links``: which bytes move when, how they are checked and told, and what is refused."""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import flags
from ringattn.bench.links import beside as link_beside
from ringattn.bench.links import command as links
from ringattn.bench.links import group as link_group
from ringattn.bench.links import runs as link_runs
from ringattn.bench.links import text as link_text
from ringattn.bench.links.group import Findings
from ringattn.bench.links.runs import BOTH_WAYS, ONE_WAY, RING, Beside, Ends, Row, Way, Wish, measured, pattern, ways
from ringattn.comm import DONE, Fence, Limits, LocalGroup, LocalTransport, LocalWorld, Message, NcclTransport
from ringattn.comm.control import control_of
from ringattn.comm.transports.local import solo_group

from ..support.fake_cuda import FakeCuda, FakeEvent
from ..support.stand_in import Fabric, install_nccl, install_streams

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}


def row(**changed: Any) -> Row:
    told: dict[str, Any] = {
        "transport": "nccl", "channels": 4, "ctas": None, "way": ONE_WAY, "edge": "0->1", "nbytes": 2**25,
        "seconds": 1e-4, "ends": {0: 1e-4, 1: 9e-5}, "wrong": 0,
    }  # fmt: skip
    return Row(**{**told, **changed})


# which bytes move


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ways_cover_every_edge(size: int) -> None:
    by_name: dict[str, list[Way]] = {}
    for way in ways(size):
        by_name.setdefault(way.name, []).append(way)
    edges = sorted((rank, (rank + 1) % size) for rank in range(size))
    assert sorted(way.pairs[0] for way in by_name[ONE_WAY]) == edges
    assert all(len(way.pairs) == 1 for way in by_name[ONE_WAY])
    if size == 1:
        assert list(by_name) == [ONE_WAY]
        return
    both = [frozenset(way.pairs) for way in by_name[BOTH_WAYS]]
    assert len(set(both)) == len(both) == (1 if size == 2 else size)
    assert all({(b, a) for a, b in pairs} == pairs for pairs in both)
    (ring,) = by_name[RING]
    assert sorted(ring.pairs) == edges and ring.edge == "all"
    assert {way.edge for way in by_name[BOTH_WAYS]} >= {"0<->1"}


def test_pattern_shows_what_is_shifted_swapped_or_old() -> None:
    right = pattern(1 << 18, 1, 0, CPU)
    assert right.shape == (1 << 18,) and right.dtype == torch.uint8
    for block in (1, 256, 4096, 65536, 131072):
        assert not right[:-block].equal(right[block:])
    assert not right.equal(pattern(1 << 18, 2, 0, CPU)) and not right.equal(pattern(1 << 18, 1, 1, CPU))
    assert pattern(3, 0, 0, CPU).tolist() == [0, 167, (2 * 167) % 256]


class Spoiling(LocalTransport):
    """Loses the last byte of every message that rank 1 receives."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        before = [int(message.tensor[-1]) for message in receives]
        fence = super().post(sends=sends, receives=receives, after=after)
        fence.wait() if self.rank == 1 else None
        for message, last in zip(receives, before, strict=True):
            if self.rank == 1:
                message.tensor[-1] = last
        return fence


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_a_world(size: int) -> None:
    wish = Wish(("local",), sizes=(5, 1000), iters=3, warmup=1, checks=2)

    def run(group: LocalGroup) -> list[Row]:
        return list(measured(LocalTransport(group, CPU), Limits(), wish, CPU))

    with LocalWorld(size, device="cpu") as world:
        everyone = world.run(run)
    assert all(rows == everyone[0] for rows in everyone)
    told = [(one.way, one.edge, one.nbytes) for one in everyone[0]]
    assert told == [(way.name, way.edge, nbytes) for way in ways(size) for nbytes in wish.sizes]
    for one, way in zip(everyone[0][::2], ways(size), strict=True):
        assert set(one.ends) == {rank for pair in way.pairs for rank in pair}
        assert one.seconds == max(one.ends.values()) > 0 and one.wrong == 0


def test_a_lost_byte_is_counted() -> None:
    wish = Wish(("local",), sizes=(64,), iters=1, warmup=0, checks=3)

    def run(group: LocalGroup) -> list[Row]:
        return list(measured(Spoiling(group, CPU), Limits(), wish, CPU))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spoiling, "warm_up", lambda transport, edges: None)
        with LocalWorld(3, device="cpu") as world:
            rows = world.run(run)[0]
    wrong = {one.edge: one.wrong for one in rows}
    assert wrong == {"0->1": 3, "1->2": 0, "2->0": 0, "0<->1": 3, "1<->2": 3, "0<->2": 0, "all": 3}


@pytest.mark.parametrize("refuses", [set(), {1}])
def test_buffers_of_both_ends_are_registered_or_none(refuses: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(install_streams(monkeypatch))
    install_nccl(monkeypatch, fabric)
    fabric.refuses = refuses
    wish = Wish(("nccl",), sizes=(8, 64), iters=2, timer="clock")

    def run(group: LocalGroup) -> Findings:
        more: dict[str, Any] = {"device": CPU, "control": control_of(group), "timeout": 5}
        with closing(NcclTransport(rank=group.rank(), size=group.size(), **more)) as transport:
            return link_group.of_transport(transport, wish, CPU, Limits())

    with LocalWorld(2, device="cpu", timeout=10) as world:
        found = world.run(run)[0]
    plain, more = ([one for one in found.rows if one.transport == name] for name in ("nccl", "nccl, registered"))
    assert [(one.way, one.edge, one.nbytes) for one in more] == (
        [] if refuses else [(one.way, one.edge, one.nbytes) for one in plain]
    )
    assert all(one.wrong == 0 for one in found.rows)
    assert found.closed == ([("nccl, registered", "NCCL: no such memory")] if refuses else [])
    log = [op for op in fabric.device.log if op.kind in ("register", "deregister")]
    assert sum(op.kind == "register" for op in log) == len(log) / 2 > 0
    assert {op.detail[0] for op in log if op.kind == "register"} == {op.detail for op in log if op.kind == "deregister"}
    assert links.text(wish, found).count("# nccl, registered") == (1 if refuses else 3)


def test_settings_of_nccl_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_USE_CUDA_MEMCPY", "1")
    assert "# NCCL_P2P_USE_CUDA_MEMCPY=1" in links.text(Wish(("local",)), Findings())
    assert links.as_json(Wish(("local",)), Findings())["settings"]["NCCL_P2P_USE_CUDA_MEMCPY"] == "1"


def test_unchecked_is_not_called_right() -> None:
    wish = Wish(("local",), sizes=(8,), iters=1, checks=0)
    (one,) = measured(LocalTransport(solo_group(), CPU), Limits(), wish, CPU)
    assert one.wrong is None and " N/A" in link_text.line(one)


def test_graphs_replay_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA graphs, which records nothing: how much is captured, and how often it is replayed."""
    log: list[str] = []

    @contextmanager
    def graph(captured: object) -> Iterator[None]:
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: log.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    post = Ends.post

    def posting(ends: Ends, after: Sequence[Fence] = ()) -> Fence:
        log.append("post")
        return post(ends, after)

    monkeypatch.setattr(Ends, "post", posting)
    wish = Wish(("local",), sizes=(8,), iters=3, warmup=0, checks=0, graphs=5)
    (one,) = measured(LocalTransport(solo_group(), CPU), Limits(), wish, CPU)
    assert log == ["capture", *["post"] * 3, "captured", "post", *["replay"] * 6]  # one replay warms up
    assert one.seconds < 0.01


@pytest.mark.parametrize(("timer", "graphs"), [("events", 0), ("graph", 2), ("clock", 0)])
def test_a_gpus_transfers_are_timed_by_what_was_asked_for(
    timer: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in whose device is 8 ms between two events: the device is busy first, the host waits at the end."""
    log: list[str] = []

    class Event(FakeEvent):
        def record(self, stream: object = None) -> None:
            log.append("event")
            self.at = 8e-3 * log.count("event")

    cuda = FakeCuda(monkeypatch)
    cuda.calls = log
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(link_runs, "timer_on", lambda kind, asked: flags.timer_on("cuda", asked))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: log.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", lambda captured: nullcontext())
    post = Ends.post

    def posting(ends: Ends, after: Sequence[Fence] = ()) -> Fence:
        log.append("post")
        return post(ends, after)

    monkeypatch.setattr(Ends, "post", posting)
    wish = Wish(("local",), sizes=(8,), iters=4, warmup=1, checks=0, timer=timer, graphs=graphs)
    (one,) = measured(LocalTransport(solo_group(), CPU), Limits(), wish, CPU)
    if timer == "clock":
        assert log == ["post"] * 5 and one.seconds < 8e-3
        return
    assert one.seconds == pytest.approx(8e-3 / (4 * (graphs or 1)))
    last = ["replay"] * 2 if graphs else ["post"] * 4
    assert log[-len(last) - 3 :] == ["sleep", "event", *last, "event"]


# limits, and what does not open


def test_only_nccl_is_swept() -> None:
    wish = Wish((), channels=(None, 4, 16), ctas=(None, 8))
    assert list(link_group.limits_of("nccl", wish)) == [
        Limits(), Limits(ctas=8), Limits(channels=4), Limits(channels=4, ctas=8), Limits(channels=16),
    ]  # fmt: skip
    for name in ("copy_engine", "process_group", "local"):
        assert list(link_group.limits_of(name, wish)) == [Limits()]


def test_what_does_not_open_is_told_once() -> None:
    wish = Wish(("nccl", "local"), sizes=(8,), iters=1, channels=(None, 1, 2))
    found = link_group.of_group(solo_group(), wish, CPU)
    assert [(name, "cpu" in why) for name, why in found.closed] == [("nccl", True)]
    assert {one.transport for one in found.rows} == {"local"}


# beside compute


class Slow:
    """A transport whose posts take a while, one after the other, in a thread."""

    name, rank, size = "slow", 0, 1

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = 0.0

    def mark(self) -> Fence:
        return DONE

    def gather(self, value: object) -> list[object]:
        return [value]

    def post(self, *, sends: object, receives: object, after: object = ()) -> Fence:
        self._ends = max(self._ends, time.perf_counter()) + self._seconds
        over = threading.Event()
        threading.Timer(self._ends - time.perf_counter(), over.set).start()
        return SimpleNamespace(wait=over.wait, done=over.is_set)  # type: ignore[return-value]


def test_compute_runs_as_long_as_the_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_beside, "step_of", lambda kind, device: lambda: time.sleep(0.02))
    wish = Wish((), sizes=(8,), beside="matmul")
    found = link_beside.measured_beside(Slow(0.1), Limits(), ways(1)[0], wish, CPU)  # type: ignore[arg-type]
    assert found.alone == pytest.approx(0.02, rel=0.8)
    assert found.compute_slowdown is not None and 0.3 < found.compute_slowdown < 3
    assert found.transfer_slowdown is not None and 0.5 < found.transfer_slowdown < 3


def test_nothing_runs_beside_copies_of_the_host() -> None:
    wish = Wish((), sizes=(8,), beside="matmul")
    transport = LocalTransport(solo_group(), CPU)
    found = link_beside.measured_beside(transport, Limits(), ways(1)[0], wish, CPU)
    assert found.compute_slowdown is None and "inside the post" in found.note


def test_steps_on_a_gpu_count_if_they_end_before_the_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in whose events tell the time of our choice: transfers end after 25 ms, steps every 10 ms."""
    times = iter([0.0, 25.0, 10.0, 20.0, 30.0])

    class Event(FakeEvent):
        def record(self, stream: object = None) -> None:
            self.at = next(times) / 1e3

    @contextmanager
    def using(stream: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    nothing = SimpleNamespace(wait_event=lambda event: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: nothing)
    monkeypatch.setattr(torch.cuda, "stream", using)
    ends = Ends(LocalTransport(solo_group(), CPU), ways(1)[0], 8, CPU)
    found = link_beside._on_gpu(ends, 2, lambda: None, CPU, 3)
    assert (found.transfers, found.steps, found.compute) == pytest.approx((0.025, 2, 0.020))


# what is printed


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (476.281, 7, "476.28"),
        (8776.81, 7, "8776.81"),
        (27211.04, 7, "27211.0"),
        (141223.0, 7, "141223"),
        (1234567.0, 7, "1234567"),
        (12345678.0, 7, "1.2e+07"),
        (0.0, 6, "0.00"),
        (0.26, 6, "0.26"),
        (222.88, 6, "222.88"),
        (12345.0, 6, "12345"),
        (1.5e7, 6, "2e+07"),
    ],
)
def test_numbers_are_those_of_nccl_tests(value: float, width: int, text: str) -> None:
    assert link_text.fitted(value, width) == text


def test_a_block_reads_like_nccl_tests() -> None:
    rows = [row(), row(edge="1->0", seconds=2e-4, wrong=2)]
    title, empty, header, names, units, *found = link_text.block(rows).splitlines()
    assert title == "# nccl, one way, channels 4" and empty == "#"
    assert header.split() == ["#", "out-of-place", "in-place"]
    assert names.split()[1:6] == ["size", "count", "type", "redop", "root"] and names.count("#wrong") == 2
    assert names.startswith("#       size         count      type   redop    root     time   algbw   busbw")
    assert units.split()[1:] == ["(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)", "(us)", "(GB/s)", "(GB/s)"]
    cells = [one.split() for one in found[:2]]
    assert cells[0] == ["33554432", "33554432", "uint8", "none", "-1", "100.00", "335.54", "335.54", "0"] + [
        "N/A"
    ] * 4 + ["0->1"]
    assert [one[7:9] for one in cells] == [["335.54", "0"], ["167.77", "2"]]
    # a column of numbers ends where its name ends
    assert found[0].index("100.00") + len("100.00") == names.index("time") + len("time")
    assert found[2:] == ["# Out of bounds values : 2 FAILED", "# Avg bus bandwidth    : 251.658 ", "#"]
    assert "# Out of bounds values : 0 OK" in link_text.block(rows[:1])


def test_wrong_bytes_and_closed_transports_fail(capsys: pytest.CaptureFixture[str]) -> None:
    wish = Wish(("nccl",))
    links.finish(wish, Findings([row()], closed=[("local", "not between processes")]), [], None, None)
    told = capsys.readouterr().out
    assert "# local does not open here: not between processes" in told
    for found, demanded in (
        (Findings([row(wrong=1)]), []),
        (Findings([row()], closed=[("nccl, channels 4", "no GPU")]), ["nccl"]),
        (Findings(), []),
    ):
        with pytest.raises(typer.Exit):
            links.finish(wish, found, demanded, None, None)


def test_beside_is_a_table() -> None:
    about = {name: getattr(row(), name) for name in ("transport", "channels", "ctas", "way", "edge", "nbytes")}
    rows = [Beside(**about, compute="matmul", alone=1e-3, compute_slowdown=1.25, transfer_slowdown=2.0)]
    rows.append(Beside(**about, compute="matmul", note="nothing"))
    told = link_text.beside_table(rows)
    assert "1.25x" in told and "2.00x" in told and "n/a" in told and "nccl, channels 4" in told


# flags


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((8, 64, 2, None), (8, 16, 32, 64)),
        ((8, 63, 2, None), (8, 16, 32)),
        ((8, 30, None, 10), (8, 18, 28)),
        ((1 << 20, 3 << 20, None, None), (1 << 20, 2 << 20, 3 << 20)),
        ((32 << 20, 32 << 20, None, None), (32 << 20,)),
    ],
)
def test_sizes_are_those_of_nccl_tests(given: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
    assert links.steps(*given) == sizes


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-G", "1"], "the device is cpu"),
        (["--timer", "graph"], "--timer: timer is 'graph': on cpu it must be one of clock"),
        (["--timer", "events"], "on cpu it must be one of clock"),
        (["--timer", "sundial"], "on cpu it must be one of clock"),
        (["-f", "2", "-i", "8"], "not by both"),
        (["-f", "1"], "a factor of at least 2"),
        (["-b", "2k", "-e", "1k"], "sizes run from -b"),
        (["-i", "0"], "at least 1 byte"),
        (["--transport", "tcp"], "comma list of nccl, copy_engine, process_group, local"),
        (["--channels", "4,x"], "or auto"),
        (["--channels", "3"], "power of two"),
        (["--channels", "4"], "--channels is of nccl on a GPU, and the device is cpu: leave it out"),
        (["--ctas", "auto", "--transport", "nccl"], "--ctas is of nccl on a GPU, and the device is cpu"),
        (["--transport", "local,nccl"], "--transport is nccl, of GPUs, and the device is cpu: take process_group"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--device", "cuda"], "sees no CUDA device"),
        (["--beside", "forward"], "kernel of a GPU"),
        (["--beside", "sleep"], "forward, matmul or none"),
        (["-n", "0"], "--iters"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(links.app, flags, env=WIDE)
    assert result.exit_code == 2 and told in result.output, result.output


def test_limits_are_of_transports_that_take_some() -> None:
    """On a GPU, of which there is none here."""
    with pytest.raises(typer.BadParameter, match="--ctas is of nccl on a GPU, and --transport is process_group,local:"):
        links.check_limits(["process_group", "local"], "cuda", channels=None, ctas=(4,))
    links.check_limits(["process_group", "nccl"], "cuda", channels=(4,), ctas=(None,))
    links.check_limits(["process_group"], "cpu", channels=None, ctas=None)


def test_limits_that_are_not_given_are_swept_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wish] = []

    def everywhere(place: None, ranks: int, wish: Wish) -> Findings:
        asked.append(wish)
        return Findings()

    monkeypatch.setattr(links, "everywhere", everywhere)
    CliRunner().invoke(links.app, ["--transport", "local", "--device", "cpu"], env=WIDE)
    assert (asked[0].channels, asked[0].ctas) == ((None, 1, 2, 4, 8, 16, 32), (None,))


def test_graphs_are_refused_where_they_cannot_be() -> None:
    names, refused = links.transports_of("all", 3)
    assert names == ["nccl", "process_group"]
    assert {name for name, _ in refused} == {"copy_engine", "local"} and all(
        "no CUDA graph" in why for _, why in refused
    )
    with pytest.raises(
        typer.BadParameter, match=r"graph \(-G\) cannot be with --transport copy_engine: its ready flags"
    ):
        links.transports_of("copy_engine", 1)
    assert links.transports_of("copy_engine", 0) == (["copy_engine"], [])


@pytest.mark.parametrize(
    ("timer", "graphs", "taken"),
    [
        ("", 0, ("events", 0)),
        ("clock", 0, ("clock", 0)),
        ("graph", 0, ("graph", 1)),
        ("", 3, ("graph", 3)),
        ("graph", 3, ("graph", 3)),
    ],
)
def test_timers_of_a_gpu(timer: str, graphs: int, taken: tuple[str, int]) -> None:
    assert links.timer_of("cuda", timer, graphs) == taken


def test_a_graph_is_timed_as_a_graph() -> None:
    with pytest.raises(typer.BadParameter, match="--timer is 'clock', and -G is 3, which is --timer graph: leave one"):
        links.timer_of("cuda", "clock", 3)
    with pytest.raises(typer.BadParameter, match="on cuda it must be one of events, graph, clock"):
        links.timer_of("cuda", "sundial", 0)
    assert links.timer_of("cpu", "", 0) == ("clock", 0)


# the command


def test_links_of_real_processes(tmp_path: Path) -> None:
    target, rows = tmp_path / "l.json", tmp_path / "l.csv"
    flags = ["-b", "1k", "-e", "4k", "-f", "4", "-n", "2", "-w", "1", "--transport", "process_group,local"]
    result = CliRunner().invoke(cli.app, ["bench", "links", *flags, "--json", str(target), "--csv", str(rows)])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("# Out of bounds values : 0 OK") == 6
    assert "step: 4(factor) warmup iters: 1 iters: 2" in result.stdout
    told = json.loads(target.read_text())
    assert {one["transport"] for one in told["links"]} == {"process_group", "local"}
    assert len(told["links"]) == 2 * 4 * 2 and all(one["algbw"] == one["busbw"] > 0 for one in told["links"])
    assert told["asked"]["timer"] == "clock" and "; by clock; time of the slowest rank" in result.stdout
    assert told["closed"] == [] and len(told["beside"]) == 2 * 4
    beside = [one for one in told["beside"] if one["transport"] == "process_group"]
    assert all(one["compute"] == "matmul" and one["alone"] > 0 for one in beside)
    with rows.open() as file:
        assert len(list(csv.DictReader(file))) == len(told["links"])


def test_a_transport_asked_for_by_name_must_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a process group there is no such transport: the command says why, and fails."""

    def nowhere(world: int, entry: object, wish: Wish) -> Findings:
        return link_group.of_group(solo_group(), wish, CPU)

    monkeypatch.setattr(links, "started", nowhere)
    result = CliRunner().invoke(cli.app, ["bench", "links", "--transport", "process_group", "--device", "cpu"])
    assert result.exit_code == 1 and "process_group does not open here" in result.output
