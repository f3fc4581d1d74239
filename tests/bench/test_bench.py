"""The benches: how they time, count, check and report, and their GPU code on a stand-in for the GPU."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

import ringattn
from ringattn.bench import cli
from ringattn.bench import memory as memory_bench
from ringattn.bench.common import memory as memory_module
from ringattn.bench.common import timing
from ringattn.bench.common.attention import BACKWARD_FLOPS, AttentionConfig, forward_flops, pairs_of
from ringattn.bench.common.flags import OF_RINGS, timer_on
from ringattn.bench.common.memory import USED
from ringattn.bench.common.provenance import command, provenance
from ringattn.bench.common.tables import table
from ringattn.bench.common.timing import Clock, Samples, interleaved, repeats_within
from ringattn.bench.kernels import accuracy, beside
from ringattn.bench.memory import Peaks, Setting
from ringattn.bench.ring import usual_ring
from ringattn.bench.suite import case_lists, device_cases, worlds
from ringattn.bench.suite.cases import Case, NotHere, Number, distance
from ringattn.kernels import KernelConfig, Tile
from ringattn.ring import backends
from ringattn.ring.cpu.aten import AtenForward

from ..support.fake_cuda import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"seqlen": 24, "heads": (2, 1)}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


# timing


def test_candidates_take_turns() -> None:
    order: list[str] = []
    steps = {name: partial(order.append, name) for name in "abc"}
    taken = interleaved(steps, Clock(CPU), repeats=3, warmup=1, limits={"c": 1})
    assert "".join(order) == "abc" + "abc" + "ab" + "ab"
    assert {name: len(samples.seconds) for name, samples in taken.items()} == {"a": 3, "b": 3, "c": 1}


def test_time_is_that_of_the_step() -> None:
    samples = interleaved({"sleep": partial(time.sleep, 0.02)}, Clock(CPU), repeats=3)["sleep"]
    assert 0.02 <= samples.median < 0.2


def test_time_is_that_of_the_slowest_member() -> None:
    class Slow(timing.Team):
        def slowest(self, seconds: float) -> float:
            return seconds + 5

    assert interleaved({"": lambda: None}, Clock(CPU, Slow()), repeats=1)[""].median > 5


def test_no_graph_holds_a_ring() -> None:
    assert [timer_on("cuda", name, OF_RINGS) for name in ("", "clock")] == ["events", "clock"]
    with pytest.raises(ValueError, match="timer is 'graph': on cuda it must be one of events, clock"):
        timer_on("cuda", "graph", OF_RINGS)


def test_samples() -> None:
    samples = Samples((4.0, 1.0, 2.0, 3.0, 5.0))
    assert samples.median == 3.0
    assert samples.spread == pytest.approx(1 / 3)
    assert Samples((1.0,)).spread == 0.0
    assert samples.as_json()["samples"] == [4.0, 1.0, 2.0, 3.0, 5.0]


def test_repeats_follow_the_time_there_is() -> None:
    assert repeats_within(1.0, 0.1) == 10
    assert repeats_within(1.0, 10.0) == timing.LEAST
    assert repeats_within(1.0, 0.0) == timing.MOST


def test_gpu_clock_keeps_the_device_busy_and_flushes(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    clock = Clock(CPU)
    clock._flush = torch.ones(16, dtype=torch.uint8)
    seconds = clock._on_gpu(lambda: cuda.calls.append("step"))
    assert cuda.calls == ["synchronize", "sleep", "step"]
    assert not clock._flush.any() and 0 <= seconds < 1


# counting


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_visible_pairs(causal: bool) -> None:
    seqlen, heads, dim, dim_v = 7, 3, 4, 5
    pairs = sum(1 for q in range(seqlen) for k in range(seqlen) if k <= q or not causal)
    assert pairs_of(seqlen, causal=causal) == pairs
    assert forward_flops(pairs, heads=heads, head_dim=dim, head_dim_v=dim_v, batch=2) == 2 * pairs * (4 + 5) * 3 * 2
    assert forward_flops(pairs, heads=heads, head_dim=dim) == 4 * pairs * dim * heads
    assert BACKWARD_FLOPS == 2.5


def test_distance() -> None:
    a = torch.tensor([3.0, 4.0])
    assert distance([a, a], [a, a * 2]) == pytest.approx(0.5)
    assert math.isnan(distance([a * torch.nan], [a]))


@pytest.mark.parametrize(
    ("value", "limit", "fails"), [(1, 1, False), (2, 1, True), (math.nan, 1, True), (9, None, False)]
)
def test_numbers_fail_above_their_limit(value: float, limit: float | None, fails: bool) -> None:
    assert Number("x", value, "s", limit=limit).fails is fails
    assert Number("x", None, "s", limit=1).fails


# provenance and tables


def test_provenance_names_everything_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/folder/ringattn", "bench", "ring", "--json", "my file"])
    told = provenance(CPU)
    assert told["command"] == "ringattn bench ring --json 'my file'"
    assert told["versions"]["torch"] == torch.__version__
    assert told["cpu"]["cores"] >= 1 and told["gpu"] is None
    assert [*told["topology"]] == ["nics"] and isinstance(told["topology"]["nics"], dict)
    assert len(told["ringattn"]["sources"]) == 12
    assert "/some" not in json.dumps(told)
    monkeypatch.setattr("sys.argv", ["/some/ringattn/__main__.py", "demo"])
    assert command() == "python -m ringattn demo"


def test_the_command_of_a_module_can_be_typed_again(tmp_path: Path) -> None:
    """A module of ours that is no command, as predict.check: not ``check.py``, which nothing finds."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/asks.py").write_text("from ringattn.bench.common.provenance import command\nprint(command())\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(ringattn.__file__).parent.parent)}

    def said(*asked: str) -> str:
        ran = [sys.executable, *asked]
        return subprocess.run(ran, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert said("-m", "inner.asks", "--n", "1 k") == "python -m inner.asks --n '1 k'\n"
    assert said("inner/asks.py", "--n", "2") == "asks.py --n 2\n"


def test_table_aligns() -> None:
    rows: list[dict[str, object]] = [{"name": "a", "value": 1.23456}, {"name": "long", "value": None}]
    assert table(rows, title="t") == "t\nname  value\na     1.235\nlong"
    assert table([]) == ""


# bench ring


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parts_of_the_usual_ring_cover_what_is_visible(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, rows = 3, 4
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    held = AttentionConfig(world * rows, world).held
    for step in range(world):
        mine, theirs = held.positions(rank), held.positions((rank - step) % world)
        seen = theirs[None] <= mine[:, None]
        part = usual_ring.Part(step, rows, causal=True)
        computed = torch.zeros_like(seen)
        block = computed[part.rows, part.keys]
        block[:] = torch.ones(block.shape).tril() if part.causal else 1
        assert computed.equal(seen)


# bench memory


def test_memory_of_real_processes(tmp_path: Path) -> None:
    target = tmp_path / "m.json"
    flags = ["--world", "2", "--tokens", "1k", "--heads", "4", "--head-dim", "64", "--json", str(target)]
    result = CliRunner().invoke(cli.app, ["bench", "memory", *flags])
    assert result.exit_code == 0, result.output
    told = json.loads(target.read_text())
    ranks = told["worlds"][0]["ranks"]
    tensor = 1024 * 4 * 64 * 4
    assert len(ranks) == 2 and told["problem"]["tokens_per_rank"] == 1024
    for rank in ranks:
        # four inputs, out and three gradients; three slots of K/V and two of sums; what the operator returns
        assert 18 * tensor < rank["highest"] < 24 * tensor
        assert sum(rank["named"].values()) == 8 * tensor


def test_memory_that_grows_fails(capsys: pytest.CaptureFixture[str]) -> None:
    results = {2: [Peaks(10, 100), Peaks(10, 99)], 4: [Peaks(10, 101)]}
    memory_bench.finish(AttentionConfig(64, 4), Setting(), results, None, None)
    assert "+1.00%" in capsys.readouterr().out
    results[8] = [Peaks(10, 103)]
    with pytest.raises(typer.Exit) as ended:
        memory_bench.finish(AttentionConfig(64, 8), Setting(), results, None, None)
    assert ended.value.exit_code == 1


def test_memory_is_told_in_megabytes_of_the_worst_rank() -> None:
    results = {2: [Peaks(3_000_000, 8_000_000), Peaks(4_000_000, 7_000_000, {"out": 500_000, "q": 1_000_000})]}
    results[4] = [Peaks(4_000_000, 6_000_000), Peaks(9_000_000, 3_000_000, {"out": 500_000, "q": 1_000_000})]
    first, second = memory_bench.rows_of(results)
    assert (first["peak MB"], first["least rank MB"], first["after forward MB"], first["relative"]) == (8, 7, 4, 1)
    assert (second["peak MB"], second["inputs and results MB"], second["relative"]) == (9, 1.5, 1.125)


# cases


@pytest.mark.parametrize("cases", [case_lists.gpu_cases(), case_lists.cpu_cases()], ids=["gpu", "cpu"])
def test_cases_can_be_called_and_are_named_once(cases: list[Case]) -> None:
    assert len({one.name for one in cases}) == len(cases)
    for one in cases:
        inspect.signature(one.run).bind(CPU, **one.arguments)


@pytest.mark.parametrize(
    ("backend", "dtype", "dims"),
    [("triton", "float32", (16, 24)), ("aten", "bfloat16", (24, 24))],
)
def test_accuracy_holds(backend: str, dtype: str, dims: tuple[int, int]) -> None:
    found = list(accuracy.accuracy(CPU, backend=backend, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], **TINY))
    assert len(found) == 3 * 6
    assert [number for number in found if number.fails] == []


def test_accuracy_of_the_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a portable single pass in their place: carried over hops, and dQ is asked for the same bits of nobody."""
    case = partial(accuracy.accuracy, CPU, backend=accuracy.HOPPER, dtype="float16", head_dim=16, **TINY)
    with pytest.raises(NotHere, match=r"compute capability 9\.0"):
        next(case())
    monkeypatch.setattr(accuracy, "is_hopper", lambda device: True)
    with pytest.raises(ValueError, match="forward_kernel='hopper' takes"):
        next(case())
    tile = Tile(16, 16, 4, 1)
    stand_in = KernelConfig(tile, tile, tile, backward="single_pass")
    monkeypatch.setattr(accuracy, "config_of", lambda backend, q: stand_in)
    found = list(case(causal_worlds=(2,), full_worlds=()))
    assert len(found) == 6 and not any(number.fails for number in found)
    right = backends.SinglePassBackward.result
    monkeypatch.setattr(backends.SinglePassBackward, "result", lambda self: right(self) + torch.rand(()))
    failing = {number.name for number in case(causal_worlds=(1,), full_worlds=()) if number.fails}
    assert failing == {"error of dq"}


def test_accuracy_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AtenForward.result

    def off_by_a_little(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(self)
        return out * (1 + 1e-4), lse

    monkeypatch.setattr(AtenForward, "result", off_by_a_little)
    found = accuracy.accuracy(CPU, backend="aten", dtype="float32", head_dim=16, **TINY)
    assert "error of out" in {number.name for number in found if number.fails}


def test_copy_beside_the_forward(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.Copy, "milliseconds", lambda copy: (0.0, 0.01))  # no stamps without a device's clock
    sizes = beside.Sizes(seconds=1e-4, keys=32, nbytes=1 << 12)
    found = list(beside.beside(CPU, head_dim=16, heads=1, repeats=1, sizes=sizes))
    assert not any(number.fails for number in found)
    assert sum(number.limit == 0 for number in found) == 4
    assert [row["copy beside"] for row in beside.brief(found)] == ["many waves", "one wave", "one wave, 8 left"]
    assert "stream of priority -1" in cuda.calls


@pytest.mark.nightly
def test_copy_kernel_compiles_with_its_clock() -> None:
    """The interpreter has no clock of the device: compiled in a process without it, for one GPU."""
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ringattn.bench.kernels.beside import CHUNK, COPY_WARPS, copy_kernel
types = {"destination": "*i32", "source": "*i32", "elements": "i32", "stamps": "*i64"}
constants = {(4,): CHUNK, (5,): True}
aligned = {(index,): [["tt.divisibility", 16]] for index in range(4)}
source = ASTSource(copy_kernel, {**types, "CHUNK": "constexpr", "STAMP": "constexpr"}, constants, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": COPY_WARPS})
assert compiled.asm["ptx"].count("globaltimer") == 2
assert "ld.global.v4" in compiled.asm["ptx"]
"""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_delays_are_read_from_the_stamps() -> None:
    copy = beside.Copy(CPU, 64)
    copy.stamps.view(-1, 2)[:] = torch.tensor([[5_000_000, 9_000_000]])
    copy.stamps.view(-1, 2)[3] = torch.tensor([7_000_000, 11_000_000])
    assert copy.milliseconds() == (2.0, 6.0)
    alone = beside.Beside(None, first=0.01, last=0.02, copy=4.0)
    together = beside.Beside(12.0, first=1.01, last=3.0, copy=5.0)
    runs: dict[str, list[Any]] = {"alone": [10.0], "copy alone": [alone], "beside": [together]}
    told = {(number.name, number.unit): number.value for number in beside.numbers(runs, 10**12, {})}
    assert told["start delay, first block", "ms"] == pytest.approx(1.0)
    assert told["start delay, last block", "ms"] == pytest.approx(2.99)
    assert told["slowdown of the forward", "times"] == pytest.approx(1.2)
    assert told["forward alone", "TFLOP/s"] == pytest.approx(100)


def test_first_cases_of_a_device() -> None:
    found = list(device_cases.launches(CPU, dtype="float32", seqlen=40, head_dim=16))
    assert [number.name for number in found if number.limit] == ["difference from float64"] * 2
    assert not any(number.fails for number in found)
    assert device_cases.host_microseconds(CPU, lambda: None) < 1000
    rates = list(device_cases.ceilings(CPU, side=64, dtype="float32", nbytes=4096))
    assert [number.unit for number in rates] == ["TFLOP/s", "GB/s"]


def leave_free(nbytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_memory", lambda device: int(nbytes))


def test_ceilings_copy_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers of 16 MiB beside a product that is next to nothing: with room for 25 MiB each is 12."""
    made: list[int] = []
    empty = torch.empty_like

    def counting(x: torch.Tensor) -> torch.Tensor:
        made.append(x.numel())
        return empty(x)

    monkeypatch.setattr(torch, "empty_like", counting)
    ask = partial(device_cases.ceilings, CPU, side=64, dtype="float32", nbytes=1 << 24)
    leave_free((25 << 20) / USED, monkeypatch)
    _, copy = ask()
    assert made == [12 << 20] == [copy.labels["bytes"]]
    leave_free((33 << 20) / USED, monkeypatch)
    _, copy = ask()
    assert copy.labels["bytes"] == 1 << 24
    leave_free((1 << 20) / USED + 10, monkeypatch)
    with pytest.raises(NotHere, match=r"1,048,576 bytes of a copy take 0.0 GB of memory, .*: 480k fits"):
        next(ask())


def test_a_case_that_does_not_fit_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(1 << 30, monkeypatch)
    with pytest.raises(NotHere, match=r"32,768 tokens take [0-9.]+ GB of memory, 1.1 GB are free: [0-9]k fits"):
        next(worlds.local_world(CPU))


@pytest.mark.parametrize(("what", "most"), [("forward", 1.08), ("forward and backward", 1.12)])
def test_virtual_ranks_may_cost_little(what: str, most: float) -> None:
    def fails(times: float, *, limited: bool) -> bool:
        taken = {f"{what}:LocalWorld": Samples((times * 1e-3,)), f"{what}:one piece": Samples((1e-3,))}
        return worlds.over_one_piece(what, taken, {}, limited=limited).fails

    assert fails(most + 1e-3, limited=True)
    assert not fails(most - 1e-3, limited=True) and not fails(9.0, limited=False)


def test_local_world_against_one_piece() -> None:
    run = worlds.local_world(CPU, world=2, tokens=64, heads=(2, 1), head_dim=16, dtype="float32", repeats=2)
    found = list(run)
    assert found[0].name == "difference from one piece" and not found[0].fails
    assert found[-1].unit == "times"
