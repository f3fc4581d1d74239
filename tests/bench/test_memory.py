"""The peak memory of a stretch of code, whatever the process did before it; what does not fit is refused, by size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn.autotune.tune import ring_memory
from ringattn.bench import cli
from ringattn.bench import host as host_time
from ringattn.bench import memory as memory_bench
from ringattn.bench.common import memory as memory_module
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.flags import Pattern
from ringattn.bench.common.memory import (
    PROCESS_BYTES,
    USED,
    Needs,
    PeakMemory,
    freed_at_once,
    needs_of_ranks,
    refuse_too_large,
)
from ringattn.bench.common.timing import Clock
from ringattn.bench.kernels import memory as kernel_memory
from ringattn.bench.kernels import speed
from ringattn.bench.kernels.shape import Shape
from ringattn.bench.links import command as link_bench
from ringattn.bench.links import memory as link_memory
from ringattn.bench.links.runs import Wish, measured
from ringattn.bench.overlap import command as overlap_bench
from ringattn.bench.overlap import memory as overlap_memory
from ringattn.comm import Limits, LocalTransport
from ringattn.comm.transports.local import solo_group

CPU, GPU = torch.device("cpu"), torch.device("cuda")

# blocks that the heap gives out and takes back, each between two small ones that keep it apart from its neighbours
HOLES = """
import ctypes
import torch
from ringattn.bench.common.memory import KEPT_BYTES, M_MMAP_THRESHOLD, freed_at_once
from ringattn.bench.common.memory import PeakMemory

CPU, MIB = torch.device("cpu"), 1 << 20
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
pairs = [(torch.ones(2 * MIB, dtype=torch.uint8), torch.ones(MIB >> 5, dtype=torch.uint8)) for _ in range(32)]
small = [pair[1] for pair in pairs]
del pairs


def peak():
    measured = PeakMemory(CPU)
    many = [torch.ones(MIB, dtype=torch.uint8) for _ in range(24)]
    del many
    torch.ones(32 * MIB, dtype=torch.uint8)
    return measured.bytes / MIB


for _ in range(2):
    with freed_at_once(CPU):
        print(peak())
    print(peak())
"""


def test_peak_memory_counts_what_was_given_back() -> None:
    first = PeakMemory(torch.device("cpu"))
    torch.ones(50_000_000, dtype=torch.uint8)
    assert 49e6 < first.bytes < 70e6
    assert PeakMemory(torch.device("cpu")).bytes < 20e6


def test_what_earlier_work_left_of_the_heap_hides_nothing() -> None:
    """24 MiB in the holes, freed before 32 MiB are asked for: in the holes they would stay, and count as 56."""
    ran = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    inside, outside, again, once_more = map(float, ran.stdout.split())
    assert 31.5 < inside < 33 and 31.5 < again < 33
    assert 55 < outside < 60 and 55 < once_more < 60  # there glibc keeps what is freed, as it did before


# what does not fit


def leave_free(nbytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if so much were free, of the host's memory and of a GPU's."""
    monkeypatch.setattr(memory_module, "free_memory", lambda device: int(nbytes))


def test_what_does_not_fit_is_refused_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(100_000_000 / USED + 10, monkeypatch)

    def ask(size: int, needed: Callable[[int], Needs] = lambda size: Needs(1000 * size)) -> None:
        refuse_too_large("--tokens", size, needed, CPU, unit="tokens per rank")

    ask(100_000)
    told = r"^--tokens: 204,800 tokens per rank take 0.2 GB of memory, 0.1 GB are free: 97k fits$"
    with pytest.raises(typer.BadParameter, match=told):
        ask(200 * 1024)
    ask(97 * 1024)
    with pytest.raises(typer.BadParameter, match="not even 1k fits"):
        ask(2048, lambda size: Needs(PROCESS_BYTES + size))


def test_ranks_that_outnumber_the_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert needs_of_ranks(10, GPU, 5) == Needs(5 * PROCESS_BYTES, 30)
    assert needs_of_ranks(10, CPU, 5) == Needs(5 * (PROCESS_BYTES + 10))


@pytest.mark.parametrize(
    ("variables", "gpus", "shared"),
    [
        ({}, 1, 4),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "2"}, 1, 1),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "x"}, 1, 4),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "x"}, 4, 1),
    ],
)
def test_ranks_that_a_gpu_holds(
    alone: None, variables: dict[str, str], gpus: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun may show each rank its own GPU alone; torchrun shows all; and a rank looks at what is free on its own."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    def free(device: torch.device) -> int:
        asked.append(device)
        return 1 << 40

    monkeypatch.setattr(memory_module, "free_memory", free)
    assert needs_of_ranks(10, GPU, 4).gpu == 10 * shared
    refuse_too_large("--size", 1, lambda size: Needs(size, size), GPU, unit="bytes")
    own = {1: torch.device("cuda", 0), 4: torch.device("cuda", 2)}[gpus] if variables else GPU
    assert asked == [own, CPU]


def test_virtual_ranks_are_counted_where_there_are_some(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(memory_module, "free_memory", lambda device: 100 << 30)
    wish = Wish(("nccl", "local"), "cuda", (2 << 30,))
    link_memory.check_room(wish, 8, launched=True)
    with pytest.raises(typer.BadParameter, match="fits"):
        link_memory.check_room(wish, 8, launched=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("overlap --tokens 1g --device cpu", "--tokens: 1,073,741,824 tokens on each of 2 ranks take"),
        ("links -b 1024g -e 1024g --device cpu", "-e: 1,099,511,627,776 bytes take"),
        ("memory --tokens 1g", "--tokens: 1,073,741,824 tokens on each of 8 ranks take"),
        ("host --tokens 1g --device cpu", "--tokens: 1,073,741,824 tokens per rank take"),
        ("kernels --seqlen 1k,1g", "--seqlen: 1,073,741,824 tokens take"),
    ],
)
def test_benches_refuse_before_they_start(asked: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*given: object, **named: object) -> None:
        raise AssertionError("it started")

    for module in (overlap_bench, link_bench, memory_bench):
        monkeypatch.setattr(module, "started", begun)
    monkeypatch.setattr(link_bench, "in_process", begun)
    monkeypatch.setattr(host_time, "measured", begun)
    monkeypatch.setattr(speed, "measured", begun)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = CliRunner().invoke(cli.app, ["bench", *asked.split()], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert ran.exit_code == 2 and told in ran.output and " fits" in ran.output, ran.output


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("asked", ["memory --tokens 0", "memory --world 2,0", "host --tokens 0"])
def test_nothing_is_not_measured(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*given: object, **named: object) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr(memory_bench, "started", begun)
    monkeypatch.setattr(host_time, "measured", begun)
    ran = CliRunner().invoke(cli.app, ["bench", *asked.split()], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert ran.exit_code == 2 and "'0' is too small: it must be at least 1" in ran.output, ran.output


def test_messages_are_counted_as_they_are_kept() -> None:
    nbytes, transport = 16 << 20, LocalTransport(solo_group(), CPU)
    list(measured(transport, Limits(), Wish(("local",), sizes=(64,), iters=1), CPU))  # loads what loads once
    for checks, messages in ((0, link_memory.BUFFERS), (1, link_memory.BUFFERS + link_memory.CHECKED["cpu"])):
        wish = Wish(("local",), sizes=(nbytes,), iters=1, warmup=0, checks=checks)
        with freed_at_once(CPU):
            peak = PeakMemory(CPU)
            assert len(list(measured(transport, Limits(), wish, CPU))) == 1
            assert 0.9 * messages * nbytes < peak.bytes < 1.1 * messages * nbytes


def test_every_ring_of_an_overlap_is_counted() -> None:
    """What was measured of two processes: 1,183.6 MB in fp32, 775.8 in bf16."""
    settings = [(slots, ahead, chunks) for chunks in (1, 2) for slots in (1, 2, 3) for ahead in (0, 1)]
    for dtype, peak in (("float32", 1183.6e6), ("bfloat16", 775.8e6)):
        problem = AttentionConfig(2 * 2048, 2, heads=8, kv_heads=8, head_dim=128, dtype=dtype)
        assert overlap_memory.of_rank(problem, settings) == pytest.approx(peak, rel=0.03)


def test_every_ring_of_a_search_is_counted() -> None:
    """What was measured of two processes: 1,309.1 MB more with 16k tokens than with 4k, four rings open."""
    short, long = (
        ring_memory.of_rank(AttentionConfig(2 * tokens, 2, heads=8, kv_heads=8), 4) for tokens in (4096, 16384)
    )
    assert long - short == pytest.approx(1309.1e6, rel=0.01)


@pytest.mark.parametrize(
    ("setting", "peak"),
    [
        (memory_bench.Setting(), 338.1e6),
        (memory_bench.Setting(nodes=2), 498.6e6),
        (memory_bench.Setting(wire_dtype="bfloat16", grad_wire_dtype="bfloat16"), 337.0e6),
    ],
)
def test_every_form_of_a_ring_is_counted(setting: memory_bench.Setting, peak: float) -> None:
    """What `bench memory` measured, apart from what gloo holds and what is rounded to pages."""
    counted = memory_bench.of_rank(AttentionConfig(8 * 8192, 8), setting)
    assert counted == pytest.approx(peak, rel=memory_bench.ALLOWED_SPREAD)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2048, 2, 2, 32, window=(64, 0)),
        pytest.param(Shape(2048, 4, 2, 64, dtype="float32"), marks=pytest.mark.nightly),
        pytest.param(Shape(2048, 2, 2, 32, batch=3, seqused_k=(2048, 512, 1024)), marks=pytest.mark.nightly),
        Shape(2048, 2, 2, 32, block_mask=Pattern("longformer", {"window": 64, "global": 16})),
    ],
)
def test_kernels_take_no_more_than_was_counted(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    by = ("ringattn", "ATen operator")
    clock = Clock(CPU)
    list(speed.measured(Shape(64, 2, 2, 16, dtype=shape.dtype), clock, seconds=0, by=by))  # loads what loads once
    with freed_at_once(CPU):
        peak = PeakMemory(CPU)
        list(speed.measured(shape, clock, seconds=0, by=by))
        taken = peak.bytes
    counted = kernel_memory.peak(shape, shape.seqlen, kernel_memory.Field.of(CPU, by))
    assert 0.5 * counted < taken < counted
