"""Tests of memory: measured peaks, the table of counted memory, refusals, and ``bench memory``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench import memory as memory_bench
from ringattn.bench.common import memory as memory_module
from ringattn.bench.common import memory_table, timing
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.flags import PatternFlag
from ringattn.bench.common.memory import (
    MAX_MEMORY_SHARE,
    PROCESS_BYTES,
    MemoryNeeds,
    PeakMemory,
    check_ranks_fit,
    check_size_fits,
    rank_needs,
    return_freed_memory,
)
from ringattn.bench.common.memory_table import ONE_DEVICE, OURS, RingForm
from ringattn.bench.common.ranks import LaunchedRank
from ringattn.bench.common.result import read_result
from ringattn.bench.common.timing import StepTimer
from ringattn.bench.kernels import speed
from ringattn.comm import LocalGroup, LocalWorld, Topology
from ringattn.comm.world import single_rank
from ringattn.ring import Ring, ring_attention

from ..support.rank_processes import group_results

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_peak_memory_includes_freed_memory() -> None:
    first = PeakMemory(CPU)
    torch.ones(50_000_000, dtype=torch.uint8)
    assert 49e6 < first.bytes < 70e6
    assert PeakMemory(CPU).bytes < 20e6


def test_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = []
    numbers = {"memory_allocated": 100, "max_memory_allocated": 350, "mem_get_info": (5, 9)}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, number=number: calls.append(name) or number)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    peak = PeakMemory(GPU)
    assert calls == ["reset", "memory_allocated"] and peak.bytes == 250
    assert memory_module.free_memory(GPU) == 5
    meminfo = StringIO("MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable: 3 kB\n")
    monkeypatch.setattr(memory_module, "open", {"/proc/meminfo": meminfo}.get, raising=False)
    assert memory_module.free_memory(CPU) == 3072


def peak_of_freed_blocks(rank: int) -> int:
    """Return the peak of 64 MiB in small blocks that are freed before one block of 128 MiB is allocated.

    Runs in a fresh process, because blocks of a process that has run other tests come from holes of its heap.
    """
    with return_freed_memory(CPU):
        peak = PeakMemory(CPU)
        small_blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(64)]
        del small_blocks
        torch.ones(128 << 20, dtype=torch.uint8)
        return peak.bytes


def test_the_allocator_setting_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: said.append(option))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with return_freed_memory(CPU):
        assert said == [(memory_module.M_MMAP_THRESHOLD, memory_module.MAPPED_BYTES)]
    before = memory_module.KEPT_BYTES
    assert said[1:] == [(memory_module.M_MMAP_THRESHOLD, before), (memory_module.M_TRIM_THRESHOLD, 2 * before)]


def test_freed_blocks_do_not_count_where_they_are_freed_at_once() -> None:
    (peak,) = group_results(1, peak_of_freed_blocks)
    # Freed blocks that stay resident would give 192 MiB. Library pages first touched after the fork may add 20 MiB.
    assert 127 << 20 < peak < 170 << 20


def test_a_refusal_for_memory_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_memory", lambda device: int(100_000_000 / MAX_MEMORY_SHARE + 10))

    def ask(size: int, needed: Callable[[int], MemoryNeeds] = lambda size: MemoryNeeds(1000 * size)) -> None:
        check_size_fits("--tokens", size, needed, CPU, unit="tokens per rank")

    ask(100_000)
    message = r"^--tokens: 204,800 tokens per rank need 0.2 GB of memory .0.1 GB are free.. 97k fits.$"
    with pytest.raises(typer.BadParameter, match=message):
        ask(200 * 1024)
    ask(97 * 1024)
    with pytest.raises(typer.BadParameter, match="Not even 1k fits"):
        ask(2048, lambda size: MemoryNeeds(PROCESS_BYTES + size))
    with pytest.raises(typer.BadParameter, match=r"0.2 GB of GPU memory .0.1 GB are free.. 1k fits.$"):
        check_size_fits("--tokens", 2048, lambda size: MemoryNeeds(0, 90_000 * size), GPU, unit="tokens")


@pytest.mark.parametrize(("launcher", "per_rank", "message"), [
    ({}, True, "--size: 8,192 tokens on each of 4 ranks need 0.2 GB of memory .0.0 GB are free.. 1k fits"),
    ({}, False, "--size: 32,768 tokens over 4 ranks need 0.2 GB of memory .0.0 GB are free.. 5k fits"),
    ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, True, "need 0.1 GB of memory"),
])  # fmt: skip
def test_ranks_that_do_not_fit_this_machine_are_refused(
    alone: None, launcher: dict[str, str], per_rank: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(memory_module, "PROCESS_BYTES", 0)
    monkeypatch.setattr(memory_module, "free_memory", lambda _: 40 * 10**6)
    with pytest.raises(typer.BadParameter, match=message):
        check_ranks_fit("--size", AttentionConfig(4 * 8192, 4), lambda config: config.seqlen * 1500, per_rank=per_rank)


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("variables", "gpus", "shared"),
    [({}, 1, 4), ({}, 2, 2), ({}, 3, 2), (SRUN, 1, 1), (TORCHRUN, 1, 4), (TORCHRUN, 4, 1)],
)
def test_ranks_that_a_gpu_holds(
    alone: None, variables: dict[str, str], gpus: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # srun may show each rank only its own GPU, and torchrun shows all of them. A rank checks the memory of its own GPU.
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    def free(device: torch.device) -> int:
        devices.append(device)
        return 1 << 40

    monkeypatch.setattr(memory_module, "free_memory", free)
    assert rank_needs(10, GPU, 4) == MemoryNeeds(4 * PROCESS_BYTES, 10 * shared)
    assert rank_needs(10, CPU, 4) == MemoryNeeds(4 * (PROCESS_BYTES + 10))
    check_size_fits("--size", 1, lambda size: MemoryNeeds(size, size), GPU, unit="bytes")
    own = {1: torch.device("cuda", 0), 4: torch.device("cuda", 2)}[gpus] if variables else GPU
    assert {*devices} == {own, CPU}


@pytest.mark.parametrize(("form", "peak"), [
    (RingForm(), 338.1e6),
    (RingForm(two_level=True), 498.6e6),
    (RingForm(wire_dtype="bfloat16", grad_wire_dtype="bfloat16"), 337.0e6),
])  # fmt: skip
def test_memory_counts_two_level_and_wire_dtype_rings(form: RingForm, peak: float) -> None:
    # The peaks come from `bench memory`, without gloo's buffers and rounding to pages.
    counted = memory_table.candidate_bytes(OURS, AttentionConfig(8 * 8192, 8), form)
    assert counted == pytest.approx(peak, rel=memory_bench.ALLOWED_SPREAD)
    assert counted == sum(memory_table.ring_parts(AttentionConfig(8 * 8192, 8), form).values())


def test_a_forward_alone_is_counted_without_gradients() -> None:
    # `bench memory` measured 178 to 187 MB after the forward; it draws dout before.
    config = AttentionConfig(8 * 8192, 8)
    assert memory_table.candidate_bytes(OURS, config, backward=False) == pytest.approx(182e6, rel=0.05)
    assert memory_table.shard_tokens(AttentionConfig(9, 2)) == 5  # of the longest shard
    wired = RingForm(two_level=True, wire_dtype="bfloat16", grad_wire_dtype="bfloat16")
    for form in (RingForm(), wired):
        parts = memory_table.ring_parts(config, form, backward=False)
        assert not [name for name in parts if "dK" in name or "dQ" in name or "gradients" in name]
        assert sum(parts.values()) == memory_table.candidate_bytes(OURS, config, form, backward=False)
    for kind in memory_table.forward_rows(4).keys() | {memory_table.mesh_name(2, 8)}:
        forward, both = (memory_table.candidate_bytes(kind, config, backward=one) for one in (False, True))
        assert 0.3 * both < forward < 0.7 * both
    only_dkv = RingForm(grad_wire_dtype="bfloat16")
    assert memory_table.slot_parts(config, only_dkv, backward=False) == memory_table.slot_parts(config, backward=False)
    # A mesh of rings carries out in fp32 between hops; a single group does not.
    q, tokens, sums = 8 * 64, 8192, list[Any]()
    for degree in (4, 8):
        group = replace(config, world=8 // degree, heads=8 // degree, kv_heads=8 // degree)
        own = memory_table.candidate_bytes(memory_table.ULYSSES, config, backward=False)
        whole = memory_table.mesh_bytes(config, degree, backward=False)
        sums.append(whole - own - memory_table.ring_slots(group, backward=False))
    assert sums == [tokens * q * 4, 0]


def test_a_gpu_adds_dq_of_the_whole_up_in_fp32() -> None:
    config = AttentionConfig(8 * 1024, 8, batch=2, heads=4, head_dim=64)
    cpu, cuda = (memory_table.candidate_bytes(ONE_DEVICE, replace(config, device=name)) for name in ("cpu", "cuda"))
    assert cuda - cpu == 4 * (2 * 8 * 1024 * 4 * 64)
    assert cpu == 8 * 1024 * 2 * (4 * 4 * 64 * (4 + 8) + 4 * 4)  # all tensors of q and k, and lse


def test_memory_of_other_rings() -> None:
    # In 16 bits with few key heads, the baseline's merges take more than its backward.
    few = AttentionConfig(8 * 1024, 8, heads=32, kv_heads=2, dtype="bfloat16")
    forward, both = (memory_table.candidate_bytes(memory_table.BASELINE, few, backward=one) for one in (False, True))
    assert both == forward == 1024 * 64 * (32 * (2 * 2 + 3 * 4) + 2 * 6 * 2)
    gathered = [memory_table.candidate_bytes(memory_table.ALL_GATHER, few, backward=one) for one in (False, True)]
    assert gathered == [
        1024 * 64 * (32 * 2 * 2 + 2 * 2 * 2) + 8192 * 64 * 2 * 3 * 2,  # K/V of all tokens, one of them twice
        1024 * 64 * (32 * (4 * 2 + 4) + 2 * 4 * 2) + 8192 * 64 * 2 * (2 * 2 + 3 * 4),
    ]
    # fp8 K/V have one byte per element, and a scale per token and key head.
    wire = AttentionConfig(8 * 1024, 8, heads=4, kv_heads=2, head_dim=64)
    slots = memory_table.slot_parts(wire, RingForm(wire_dtype="float8_e4m3fn"), backward=False)["K/V slots"]
    assert 4 * 2 * 1024 * 2 * 64 < slots < 1.1 * (4 * 2 * 1024 * 2 * 64)


def test_memory_counts_all_rings_of_overlap_and_tune() -> None:
    # Two processes took 1,183.6 MB in fp32, 775.8 MB in bf16, and 1,309.1 MB more with 12k more tokens.
    slots = [slots for _ in (1, 2) for slots in (1, 2, 3) for ahead in (0, 1) if ahead < slots]
    for dtype, peak in (("float32", 1183.6e6), ("bfloat16", 775.8e6)):
        config = AttentionConfig(2 * 2048, 2, head_dim=128, dtype=dtype)
        assert memory_table.settings_bytes(config, slots) == pytest.approx(peak, rel=0.03)
    short, long = (memory_table.tuned_bytes(AttentionConfig(2 * tokens, 2), 4) for tokens in (4096, 16384))
    assert long - short == pytest.approx(1309.1e6, rel=0.01)


def test_memory_of_judged_kernels_by_hand() -> None:
    config = AttentionConfig(64, batch=2, heads=8, kv_heads=2, head_dim=16, head_dim_v=24, dtype="bfloat16")
    tokens, dims = 2 * 64, 16 + 24
    results = tokens * (8 + 2) * dims  # elements of out, dq, dk and dv, and of their gradients or inputs
    scores = 2 * 8 * 64 * 64  # of one block, because all of them fit
    judged = 8 * results + max(8 * results + 5 * 8 * scores, 2 * 2 * results)
    assert memory_table.judged_bytes(config) == judged
    # Two contenders of ours keep out in two dtypes, lse and two more rows; others keep copies of their inputs.
    out, row, inputs = tokens * 8 * 24, tokens * 8 * 4, 2 * results
    kept = 2 * (out * (2 + 4) + 3 * row) + 3 * (inputs + out * 2 + row)
    running, product = inputs + tokens * 8 * 16 * 4, 3 * 32 * 32 * 4
    assert memory_table.kernels_bytes(config, 64, 2, 3, 32) == inputs + kept + running + judged + product
    on_gpu = replace(config, device="cuda")
    assert memory_table.kernels_bytes(on_gpu, 64, 2, 3, 32) == inputs + kept + running + judged + product + (256 << 20)
    islands = replace(config, block_mask=PatternFlag("longformer", {"window": 8, "global": 4}))
    more = memory_table.kernels_bytes(islands, 64, 2, 0, 32) - memory_table.kernels_bytes(islands, 64, 0, 0, 32)
    assert more == 2 * (out * (2 + 4) + 3 * row) + 2 * tokens * 2 * dims * 4  # dK and dV between the mask's parts
    # Long problems judge the first and the last key head, in blocks. PyTorch then needs a mask of all pairs.
    long = replace(config, seqlen=1 << 13, kv_heads=4, window=(9, 0))
    results, scores = 2 * (1 << 13) * (4 + 2) * dims, max(256 << 20, 2 * 4 * (1 << 13) * 8)
    plain = 2 * 2 * results + (1 << 26) * (2 + 5) + 2 * (1 << 13) * 4 * dims * 2
    assert memory_table.judged_bytes(long) == 8 * results + max(8 * results + 5 * scores, plain)
    padded = replace(long, window=(-1, -1), seqused_k=(9, 99), seqlen=1 << 14)
    results, n = 2 * (1 << 14) * (4 + 2) * dims, 1 << 14
    plain = 2 * 2 * results + 2 * n * n * (2 + 5) + 2 * n * 4 * dims * 2  # a mask for each row of the batch
    assert memory_table.judged_bytes(padded) == 8 * results + plain


LONGFORMER = AttentionConfig(
    2048, heads=2, kv_heads=2, head_dim=32, dtype="bfloat16", layout="contiguous",
    block_mask=PatternFlag("longformer", {"window": 64, "global": 16}),
)  # fmt: skip
"""A mask in parts takes the most memory."""


def peak_of_kernels(rank: int) -> int:
    """Return the peak of two contenders in a fresh process, as :func:`peak_of_freed_blocks` does."""
    timing.MIN_SAMPLES = 1
    by, clock = ("ringattn", "ATen operator"), StepTimer(CPU)
    speed.measure_kernels(replace(LONGFORMER, seqlen=128), clock, seconds=0, prefixes=by)  # the first loads libraries
    with return_freed_memory(CPU):
        peak = PeakMemory(CPU)
        speed.measure_kernels(LONGFORMER, clock, seconds=0, prefixes=by)
        return peak.bytes


@pytest.mark.nightly
def test_kernels_take_no_more_than_counted() -> None:
    (peak,) = group_results(1, peak_of_kernels)
    counted = memory_table.kernels_bytes(LONGFORMER, 2048, 1, 1, speed.PRODUCT_SIDE["cpu"])
    assert 0.5 * counted < peak < counted


@pytest.mark.nightly
def test_memory_of_real_processes(alone: None, tmp_path: Path) -> None:
    command = f"bench memory --world 2 --tokens 1k --heads 4 --json {tmp_path}/m.json"
    result = CliRunner().invoke(cli.app, command.split())
    assert result.exit_code == 0, result.output
    (row,) = read_result(tmp_path / "m.json").rows
    tensor = 1024 * 4 * 64 * 4 / 1e6
    # Four inputs, out and three gradients; three slots of K/V and two of accumulators; the operator's results.
    # The smallest rank counts, because a rank may touch unrelated pages late (6 MB were seen once).
    assert 18 * tensor < row["smallest peak"] < 24 * tensor
    assert row["smallest peak"] <= row["peak"] and row["peak / first"] == 1
    assert row["inputs and results"] == pytest.approx(8 * tensor) and 5 * tensor < row["forward peak"] < row["peak"]


@pytest.mark.nightly
def test_memory_of_two_level_rings_is_constant(alone: None) -> None:
    # Processes with the same work differ by up to 2 MB: 2% of a rank's memory here, 6% with 1k tokens.
    command = "bench memory --nodes 2 --world 4,8 --tokens 4k --heads 4"
    result = CliRunner().invoke(cli.app, command.split())
    assert result.exit_code == 0 and "2 nodes" in result.output, result.output


def test_peaks_of_a_call_with_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AttentionConfig(4 * 16, 4, 2, heads=4, kv_heads=2, head_dim=8, causal=False)
    form, made, attended = RingForm(True, 4, "bfloat16", "bfloat16"), list[Any](), list[Any]()

    def ring(group: LocalGroup, **named: Any) -> Ring:
        made.append(named)
        return Ring(group, **named)

    def attend(*leaves: torch.Tensor, **named: Any) -> Any:
        attended.append(named)
        return ring_attention(*leaves, **named)

    monkeypatch.setattr(memory_module, "PeakMemory", lambda device: SimpleNamespace(bytes=0))
    monkeypatch.setattr("ringattn.ring.Ring", ring)
    monkeypatch.setattr("ringattn.ring.ring_attention", attend)
    with LocalWorld(4) as world:
        peaks = world.run(partial(memory_bench.ring_peaks, config, form, 2, 2))
    elements = 2 * 16 * 8 * 4  # bytes of a head of a shard
    kept = (4 + 2 + 2 + 4) * elements + (4 + 4 + 2 + 2) * elements  # inputs, then results
    assert [peak["kept"] for peak in peaks] == [kept] * 4
    topology = Topology.grid(2, 2)
    options = {"slots": 4, "chunks": 2, "wire_dtype": "bfloat16", "grad_wire_dtype": "bfloat16"}
    assert made == [options | {"topology": topology}] * 4
    assert {named["causal"] for named in attended} == {False}


def peaks_of_growing_rings(rank: int) -> tuple[list[tuple[int, int]], list[list[dict[str, int]]]]:
    """Return tokens and ranks of the rings that this rank joined, and what `measure_memory` returned."""
    joined: list[tuple[int, int]] = []

    def ring_peaks(config: AttentionConfig, form: object, nodes: int, chunks: int, group: Any) -> dict[str, int]:
        joined.append((config.seqlen, dist.get_world_size(group)))
        return {"peak": config.seqlen + dist.get_rank(group)}

    vars(memory_bench)["ring_peaks"] = ring_peaks
    configs = [AttentionConfig(world * 16, world) for world in (1, 2)]
    place = LaunchedRank(rank, 2, rank, 2)
    return joined, memory_bench.measure_memory(place, CPU, configs, RingForm(), 1, 1)


def test_rings_grow_after_a_warm_up() -> None:
    both = [{"peak": 32}, {"peak": 33}]
    assert group_results(2, peaks_of_growing_rings) == [
        ([(1024, 1), (16, 1), (2048, 2), (32, 2)], [[{"peak": 16}], both]), ([(2048, 2), (32, 2)], [both]),
    ]  # fmt: skip


@pytest.mark.parametrize(("peaks", "expected"), [((30, 40), (30, 40)), ((30, 20), (30, 30))])
def test_the_peak_is_at_least_that_of_the_forward(
    peaks: tuple[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(peaks)

    class Peak:
        def __init__(self, device: torch.device) -> None:
            pass

        @property
        def bytes(self) -> int:
            return next(seen)

    monkeypatch.setattr(memory_module, "PeakMemory", Peak)
    config = AttentionConfig(16, 1, heads=1, kv_heads=1, head_dim=8)
    found = memory_bench.ring_peaks(config, RingForm(), 1, 1, single_rank())
    assert (found["forward"], found["peak"]) == expected


@pytest.mark.parametrize(("last", "code"), [(101, 0), (103, 1), (97, 1)])
def test_memory_that_grows_fails(last: int, code: int, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(peak: int, forward: int = 10) -> dict[str, int]:
        return {"forward": forward * 10**6, "peak": peak * 10**6, "kept": 5 * 10**6}

    rows = [[rank(100), rank(99, 20)], [rank(last - 1), rank(last)]]
    monkeypatch.setattr(memory_bench, "run_process_group", lambda *args: rows)
    result = CliRunner().invoke(cli.app, ["bench", "memory", "--world", "2,4", "--tokens", "64"])
    spread = max(last, 100) / min(last, 100) - 1
    assert result.exit_code == code and f"{spread:+.2%}" in result.output, result.output
    assert (f"varies by {spread:.1%}" in result.output) == bool(code)
    monkeypatch.setattr(memory_bench, "run_process_group", lambda *args: rows[:1])  # of a rank outside the larger ring
    outside = CliRunner().invoke(cli.app, ["bench", "memory", "--world", "2,4", "--tokens", "64"])
    assert (outside.exit_code, outside.stdout) == (0, "")
    first, second, third = memory_bench.memory_rows([2, 4, 8], [*rows, rows[1]])
    assert first == {
        "world": 2, "peak": 100, "smallest peak": 99, "forward peak": 20, "inputs and results": 5, "peak / first": 1,
    }  # fmt: skip
    assert second["peak / first"] == third["peak / first"] == last / 100  # relative to the first


def test_worlds_within_a_launcher() -> None:
    assert memory_bench.resolve_worlds(None, None) == [2, 4, 8] and memory_bench.resolve_worlds(None, [3]) == [3]
    place = LaunchedRank(0, 6, 0, 6)
    assert memory_bench.resolve_worlds(place, None) == [2, 4, 6]
    assert memory_bench.resolve_worlds(place, [3, 6]) == [3, 6]
    with pytest.raises(typer.BadParameter, match="--world is 8: it must be at most 6"):
        memory_bench.resolve_worlds(place, [2, 8])
