"""Tests of ``bench ring``: candidates agree, columns are right, and unusable candidates state a reason."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import memory_table
from ringattn.bench.common.attention import AttentionConfig, sdpa_attention
from ringattn.bench.common.cases import UnavailableError
from ringattn.bench.common.launching import run_process_group
from ringattn.bench.common.memory import PROCESS_BYTES, PeakMemory
from ringattn.bench.common.memory_table import ALL_CORES, ALL_GATHER, BASELINE, LUCIDRAINS, ONE_DEVICE, OURS, ULYSSES
from ringattn.bench.common.ranks import LaunchedRank
from ringattn.bench.common.result import Result, Row
from ringattn.bench.common.timing import RankTeam, Samples
from ringattn.bench.ring import baselines, candidates, command, measure
from ringattn.bench.ring.candidates import Candidate, CandidateSetting
from ringattn.bench.ring.measure import RingConfig, crossover_notes, fastest_ring_note, measure_rings
from ringattn.comm import LocalGroup, LocalWorld
from ringattn.comm.group_cache import get_group_cache
from ringattn.kernels import FULL
from ringattn.ring import Layout, Ring, ring_attention

from ..support.rank_processes import group_results

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WAYS = (OURS, BASELINE, ALL_GATHER, ULYSSES)


def by_name(result: Result) -> dict[str, Any]:
    """Return the rows of one problem by candidate."""
    return {row["candidate"]: row for row in result.rows}


P, HEADS, KV_HEADS, DIM, BATCH = 4, 8, 4, 16, 2
DOCUMENTS = (0, 20, 20, 45, 64)
PROBLEM = AttentionConfig(64, P, BATCH, HEADS, KV_HEADS, DIM)
CONFIGS = (
    RingConfig((PROBLEM, replace(PROBLEM, seqlen=128, causal=False)), ("zigzag",), 1, WAYS),
    RingConfig((replace(PROBLEM, cu_seqlens=DOCUMENTS),), ("packed", "per-document"), 1, (*WAYS[:3], LUCIDRAINS)),
    RingConfig((replace(PROBLEM, kv_heads=1),), ("zigzag",), 1, ("Ulysses 4", BASELINE, LUCIDRAINS), "", 1e6),
)


def measure_and_count_open_rings(rank: int) -> list[tuple[Result, int, int]]:
    """Measure every configuration, and count the groups and rings that are still open after each."""
    assert RankTeam().slowest_seconds(float(rank)) == P - 1
    results = []
    for config in CONFIGS:
        result = measure_rings(LaunchedRank(rank, P, rank, P), CPU, config)
        groups = dist.distributed_c10d._world.pg_map
        rings = [value for group in groups for value in get_group_cache(group).values() if isinstance(value, Ring)]
        results.append((result, len(groups), len(rings)))
    return results


def test_all_candidates_agree_and_count_what_they_send() -> None:
    ranks = group_results(P, measure_and_count_open_rings)
    only_rank_0 = dict.fromkeys(("error", "over tolerance"))
    for number, (result, groups, rings) in enumerate(ranks[0]):
        assert not result.failed and (groups, rings) == (1, 0)
        assert all(row["over tolerance"] == "" and 0 < row["error"] < 1e-5 for row in result.rows)
        for other, _, _ in (rank[number] for rank in ranks):  # times and peaks are those of the slowest rank
            assert [row | only_rank_0 for row in other.rows] == [row | only_rank_0 for row in result.rows]
    plain, packed, mesh = (result for result, _, _ in ranks[0])
    assert measure.ONE_RUN_NOTE in plain.notes and "over process_group, 1 threads each, medians of 1" in plain.notes[0]
    kv, queries = 2 * BATCH * KV_HEADS * DIM * 4, BATCH * HEADS * DIM * 4  # bytes per token
    for tokens in (64, 128):
        rows, shard = by_name(Result("", {}, [row for row in plain.rows if row["tokens"] == tokens])), tokens // P
        exchanged = 2 * queries + kv  # times the share that leaves the rank
        assert {name: row["sent"] * 1e6 / shard for name, row in rows.items()} == pytest.approx({
            ONE_DEVICE: 0,
            f"{OURS} zigzag": 3 * (P - 1) * kv,  # the local dK/dV never leave
            BASELINE: (2 * (P - 1) + P) * kv,
            ALL_GATHER: 2 * (P - 1) * kv,  # K/V sent, fp32 dK/dV returned
            ULYSSES: 2 * exchanged * (P - 1) / P,
            "Ulysses 2 x ring 2": 2 * exchanged / 2 + 3 * kv,  # half of the heads of two shards
            "Ulysses 4 x ring 1": 2 * exchanged * (P - 1) / P,
        })  # fmt: skip
        assert not [name for name, row in rows.items() if (row["exposed"] == 0) != (name == ONE_DEVICE)]
        pairs = tokens * (tokens + 1) / 2 if tokens == 64 else tokens**2
        for name, row in rows.items():
            seconds, count = row["time"] / 1e3, 1 if name == ONE_DEVICE else P
            assert row["rate of a rank"] == pytest.approx(
                3.5 * 4 * DIM * HEADS * BATCH * pairs / seconds / count / 1e12
            )
            assert row["of ideal"] == pytest.approx(100 * rows[ONE_DEVICE]["time"] / P / row["time"])
            assert row["throughput"] == pytest.approx(BATCH * tokens / seconds) and row["peak"] >= 0
            for part in ("exposed", "compute"):  # the part is missing if the machine was busy
                assert row[part] is None or 0 <= row[part] <= row["time"], (name, part)
                assert row[part] is None or name != ONE_DEVICE or part == "exposed"
    rows = by_name(packed)
    assert {*rows} == {ONE_DEVICE, f"{OURS} packed", f"{OURS} per-document", ALL_GATHER}
    for name in (BASELINE, LUCIDRAINS):
        assert f"not available: {name}: it is not set up for packed documents here" in packed.notes
        assert f"not available: {name}: --bytes-per-second slows down only our rings" in mesh.notes
    assert "causal, 4 documents, packed/per-document, 64 tokens" in packed.notes[0]
    assert 0 < rows[f"{OURS} packed"]["sent"] < rows[f"{OURS} per-document"]["sent"]
    pairs = sum(n * (n + 1) // 2 for n in (20, 25, 19))
    row = rows[f"{OURS} packed"]
    assert row["rate of a rank"] * row["time"] == pytest.approx(3.5 * 4 * DIM * HEADS * BATCH * pairs / P / 1e9)
    row = by_name(mesh)["Ulysses 4 x ring 1"]
    # Three quarters of q, out, dout and dq; k and v for each other rank; dk and dv of each other rank's queries.
    assert row["sent"] * 1e6 == 16 * 3 * (4 * queries // 4 + 4 * BATCH * DIM * 4)
    assert "at 1.00 MB/s" in mesh.notes[0] and row["time"] > row["sent"] * 1e3


@pytest.mark.parametrize("launched", [False, True])
def test_every_length_runs_in_its_own_processes(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A peak counts what an earlier length left on the heap. Ranks of a launcher measure all lengths, which a note says.
    lengths: list[list[int]] = []
    warmed: list[int] = []

    def measured(setting: CandidateSetting, *_: object) -> Result:
        return Result("bench ring", measure.UNITS)

    def spawned(world: int, measure: Any, config: RingConfig, **_: object) -> Result:
        lengths.append([problem.seqlen for problem in config.problems])
        part: Result = measure(LaunchedRank(0, 1, 0, 1), CPU, config)
        return part

    monkeypatch.setattr(measure, "warm_up", lambda config, device: warmed.append(len(config.problems)))
    monkeypatch.setattr(measure, "measure_problem", measured)
    monkeypatch.setattr(command, "run_process_group", spawned)
    monkeypatch.setattr(command, "launched_rank", lambda: LaunchedRank(0, 1, 0, 1) if launched else None)
    ran = CliRunner().invoke(cli.app, ["bench", "ring", "--world", "1,1", "--seqlen", "512,256", "--device", "cpu"])
    assert ran.exit_code == 0, ran.output
    assert lengths == ([[256, 512]] if launched else [[256], [512]]) and warmed == ([2] if launched else [1, 1])
    assert ("peaks after the first length are upper bounds" in ran.output) == launched


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False])
def test_a_library_with_another_head_order_is_right(causal: bool) -> None:
    # On the CPU this library's dk and dv are wrong even with one query head per key head.
    problem = AttentionConfig(64, 2, heads=6, kv_heads=2, head_dim=16, causal=causal)
    result = run_process_group(2, measure_rings, RingConfig((problem,), ("zigzag",), 1, (LUCIDRAINS,)))
    assert not {"out", "dq"} & {*by_name(result)[LUCIDRAINS]["over tolerance"].split(", ")} and not result.failed


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 4), (4, 4)])
def test_repeated_heads_keep_their_key_head(heads: int, kv_heads: int) -> None:
    order = candidates.repeated_head_order(heads, kv_heads).tolist()
    assert sorted(order) == list(range(heads))
    assert [head // (heads // kv_heads) for head in order] == [index % kv_heads for index in range(heads)]


UNCOUNTED = 0.05  # of 90 to 105 MB: operators' scratch, gloo's buffers, lse, pieces of half a shard


@pytest.mark.nightly
def test_counted_memory_matches_the_measured_peaks() -> None:
    # Tensors are much larger than a process's other memory, so the count must match in both directions.
    problem = AttentionConfig(2 * 4096, 2, heads=8, kv_heads=4, head_dim=64)
    (q, k), tokens = memory_table.elements_per_token(problem), memory_table.shard_tokens(problem)
    unused = {  # counted for other worlds and dtypes, but not taken by two ranks in fp32
        # Without a third rank the second pair of K/V buffers is unused. The running dQ is the result.
        BASELINE: tokens * (2 * k * 4 + q * 4),
        # Gradients by heads are the fp32 accumulators. dout by heads is freed before they are sent.
        ULYSSES: tokens * 2 * q * 4,
        # In addition, the rank's own part of an exchange is not copied.
        "Ulysses 2 x ring 1": tokens * (2 * q + q // 2) * 4,
    }
    rows = by_name(run_process_group(2, measure_rings, RingConfig((problem,), ("zigzag",), 1, WAYS)))
    assert len(rows) == 2 + len(WAYS)
    for name, row in rows.items():
        counted = row["counted peak"] * 1e6
        least, most = (1 - UNCOUNTED) * (counted - unused.get(name, 0)), (1 + UNCOUNTED) * counted
        assert least < row["peak"] * 1e6 < most, f"{name}: {row['peak']:,} MB, {least:,.0f} to {most:,.0f} bytes"


def rows(tokens: int = 1024, world: int = 2, **seconds: float) -> list[Row]:
    names = {"whole": ONE_DEVICE, "zigzag": f"{OURS} zigzag", "gather": ALL_GATHER, "heads": ULYSSES,
             "striped": f"{OURS} striped"}  # fmt: skip
    return [
        {"candidate": names[name], "world": world, "tokens": tokens, "time": value * 1e3, "of ideal": 80.0}
        for name, value in {"whole": 1.0, "zigzag": 0.5, **seconds}.items()
    ]


def test_time_of_waiting_and_computing_by_kind_of_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_: calls.append("meet"))
    trace = SimpleNamespace(seconds={"wait": 0.1, "compute": 0.2}.__getitem__)
    ring = SimpleNamespace(record=lambda: nullcontext(trace))
    laps = iter([9.0, 0.5])
    timer = SimpleNamespace(lap_seconds=lambda: calls.append("lap") or next(laps))

    def split(**made: Any) -> tuple[float | None, float | None]:
        calls.clear()
        candidate: Any = SimpleNamespace(
            run=calls.append, **{"ring": None, "wait_timer": None, "sent_bytes": None} | made
        )
        return measure.split_step_time(candidate, "shards")  # type: ignore[arg-type]

    assert split(ring=ring) == (0.1, 0.2) and calls == ["meet", "shards", "meet", "meet"]
    assert split(wait_timer=timer) == (0.5, None) and calls == ["lap", "meet", "shards", "lap", "meet"]
    assert split(sent_bytes=0) == (0.0, None) and split() == split(sent_bytes=1) == (None, None) and calls == []


def test_parts_longer_than_the_median_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # They come from an extra run, which may be slower.
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    check = measure.CandidateCheck((), 3_000_000, {"out": 0.5, "dq": 0.25}, ["out", "dq"])
    problem = AttentionConfig(64, 2, 3, heads=4, kv_heads=2, head_dim=16)
    for parts, columns in (((0.5, 0.25), (500, 250)), ((0.75, 0.0), (None, 0)), ((None, 0.75), (None, None))):
        monkeypatch.setattr(measure, "split_step_time", lambda *_, parts=parts: parts)
        made = Candidate(f"{OURS} zigzag", None, lambda *_: _[0], sent_bytes=2_000_000)
        row = measure.candidate_row(problem, made, check, Samples((0.5,) * 3), 0.2)
        assert (row["exposed"], row["compute"]) == columns
    counted = memory_table.candidate_bytes(OURS, problem) / 1e6
    assert row == {
        "candidate": f"{OURS} zigzag", "world": 2, "tokens": 64, "time": 500, "spread": 0, "of ideal": 40,
        "exposed": None, "throughput": 3 * 64 / 0.5, "rate of a rank": 3.5 * problem.flops / 0.5 / 2 / 1e12,
        "sent": 2, "peak": 3, "counted peak": counted, "compute": None, "error": 0.5, "over tolerance": "out, dq",
    }  # fmt: skip
    for kind in (ONE_DEVICE, ALL_CORES):
        alone = measure.candidate_row(problem, replace(made, name=kind), check, Samples((0.5,)), None)
        assert alone["rate of a rank"] == 3.5 * problem.flops / 0.5 / 1e12 and alone["of ideal"] is None


def test_crossover_and_fastest_ring_notes() -> None:
    all_rows = [*rows(1024, gather=0.25), *rows(4096, gather=1.0, striped=0.4), *rows(1024, 4, heads=0.6)]
    assert crossover_notes(all_rows) == [
        "time of all-gather / time of our ring, 2 ranks: 0.50 at 1k, 2.50 at 4k",
        "time of Ulysses / time of our ring, 4 ranks: 1.20 at 1k",
    ]
    assert fastest_ring_note(all_rows[:-3]) == ["best: ringattn striped, 2 ranks, 4k tokens: 400 ms, 80.0% of ideal"]
    assert fastest_ring_note(all_rows) == ["best: ringattn zigzag, 4 ranks, 1k tokens: 500 ms, 80.0% of ideal"]
    assert crossover_notes(rows()) == [] and fastest_ring_note(rows()[:1]) == []


@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize("name", [BASELINE, LUCIDRAINS])
def test_a_wrong_ring_fails_and_a_wrong_peer_is_noted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The candidate returns a wrong dk. Candidates with the same positions share their shards.
    problem, positions = AttentionConfig(16, 1, heads=2, kv_heads=2, head_dim=8), torch.randperm(16).sort().values

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_attention(q, k + k.detach(), v, causal=True)

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_attention(q, k, v, causal=True)

    available = {ONE_DEVICE: Candidate(ONE_DEVICE, positions, right), name: Candidate(name, positions.clone(), wrong)}
    monkeypatch.setattr(measure, "make_candidates", lambda *_: (available, {"another": "it needs a GPU"}))
    monkeypatch.setattr(measure, "PeakMemory", lambda device: SimpleNamespace(bytes=0))
    monkeypatch.setattr(measure, "return_freed_memory", nullcontext)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    result = measure.measure_problem(setting(problem), RingConfig((problem,), ("zigzag",), 1), 0)
    assert [row["over tolerance"] for row in result.rows] == ["", "out, dq, dk, dv"]
    (line,) = (
        [note for note in result.notes if "error above the limit" in note] if name == LUCIDRAINS else result.failed
    )
    assert f"{name}: error above the limit in out, dq, dk, dv" in line
    assert bool(result.failed) == (name == BASELINE)
    assert "not available: another: it needs a GPU" in result.notes
    assert measure.ONE_RUN_NOTE not in result.notes  # no candidate has such columns
    available["flipped"] = Candidate("flipped", positions.flip(0), right)
    done: Any = []
    gather, run = measure.gather_results, Candidate.run
    monkeypatch.setattr(measure, "gather_results", lambda *given: done.append("gather") or gather(*given))
    monkeypatch.setattr(Candidate, "run", lambda *given: done.append("run") or run(*given))
    monkeypatch.setattr(PeakMemory, "bytes", property(lambda peak: len(done)))
    monkeypatch.setattr(measure, "PeakMemory", PeakMemory)
    first, second, third = measure.check_candidates(available, problem, CPU, 0).values()
    assert [check.peak_bytes for check in (first, second, third)] == [1, 3, 5]  # between run and gather
    assert first.shards is second.shards and len(second.shards) == 4
    assert torch.equal(third.shards[0], first.shards[0].flip(1))


def setting(problem: AttentionConfig, device: str = "cpu", shared: bool = False) -> CandidateSetting:
    def ring(group: object) -> Ring:
        raise AssertionError

    return CandidateSetting(problem, ("zigzag",), torch.device(device), ring, shared)


@pytest.fixture
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def test_a_candidate_sets_its_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    tensors = tuple(torch.randn(1, 4, 1, 8) for _ in range(4))
    Candidate("x", torch.arange(4), partial(sdpa_attention, causal=True), threads=3).run(tensors)
    assert threads == [3]


def test_the_baseline_ring_merges_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[Any] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(baselines, "RingTransfer", lambda current, waits: SimpleNamespace(wait=lambda: current))
    monkeypatch.setattr(baselines, "_merge", lambda *parts: merged.append([x.dtype for x in parts]))
    q, k, v = torch.randn(3, 1, 8, 2, 16, dtype=torch.bfloat16)
    out = baselines.baseline_ring_attention(q, k, v, causal=False)
    assert merged == [[torch.float32, torch.float32, torch.bfloat16, torch.float32]] and out.dtype == torch.bfloat16


def test_gradients_of_other_ranks_are_added_in_fp32() -> None:
    added: Any = []
    net: Any = SimpleNamespace(
        bounds=FULL, queries=lambda x: x, keys=lambda x: x, results=lambda x: x,
        gradients=lambda x, dtype: added.append((x.dtype, dtype)) or x.to(dtype),
    )  # fmt: skip
    leaves = [torch.randn(1, 16, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    torch.autograd.grad(baselines._CollectiveFunction.apply(*leaves, net).sum(), leaves)  # type: ignore[no-untyped-call]
    assert added == [(torch.float32, torch.bfloat16)] * 2


@pytest.mark.usefixtures("rank_zero")
def test_one_process_uses_the_threads_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionConfig(64, 4, threads=2, causal=False)
    for cores, threads in ((16, 8), (5, 5)):
        monkeypatch.setattr(candidates, "cores", lambda cores=cores: cores)
        whole = candidates.sdpa_all_cores(setting(problem))
        assert (whole.name, whole.threads, whole.sent_bytes) == (ALL_CORES, threads, 0)
    one = candidates.sdpa_one_device(setting(problem))
    assert (one.name, one.threads) == (ONE_DEVICE, 2) and one.positions is not None and len(one.positions) == 64
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    idle = candidates.sdpa_one_device(setting(problem))
    assert idle.positions is None and idle.run(idle.shards(problem.tensors(), CPU)) == ()


@pytest.mark.parametrize("causal", [True, False])
def test_other_packages_get_their_layout_and_their_order_of_heads(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    calls: list[Any] = []

    def their_attention(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        calls.append((q, named))
        return q

    modules: dict[str, Any] = {
        "ring_flash_attn": {
            "zigzag_ring_flash_attn_func": lambda *_, **named: ("zigzag", named),
            "ring_flash_attn_func": lambda *_, **named: ("plain", named),
        },
        "ring_attention_pytorch.ring_flash_attention": {"ring_flash_attn": their_attention},
    }  # fmt: skip
    for name, fields in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**fields))
    problem = AttentionConfig(2048 * 4, 2, heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", causal=causal)
    theirs: Any = candidates.zhuzilin(setting(problem, "cuda"))
    assert theirs.attend(*[CPU] * 3) == ("zigzag" if causal else "plain", {"causal": causal})
    layout = problem.layout_by_name("zigzag" if causal else "contiguous")
    assert torch.equal(theirs.positions, layout.positions(1))
    theirs = candidates.lucidrains(setting(problem))
    q = torch.arange(4.0).view(1, 1, 4, 1)
    assert torch.equal(theirs.attend(q, q, q), q)
    ((given, named),) = calls
    # Head i reads key head i % 2 there, and i // 2 here.
    assert given.flatten().tolist() == [0, 2, 1, 3]
    assert named == {
        "causal": causal, "bucket_size": 1024, "ring_reduce_col": True, "striped_ring_attn": causal, "ring_size": 2,
    }  # fmt: skip
    assert torch.equal(theirs.positions[:1024], torch.arange(4, 8192, 8))  # of eight buckets
    for refused in (replace(problem, seqlen=2 * 1536), replace(problem, seqlen=1024, world=1)):
        with pytest.raises(UnavailableError, match="at least two ranks, and shards with a multiple of 1024 tokens"):
            candidates.lucidrains(setting(refused))


def test_candidates_are_chosen_by_name() -> None:
    names = [*candidates.select_makers(["zigzag"], (), [2, 4])]
    assert "Ulysses 2 x ring 2" in names
    assert all(command.parse_candidate_prefixes(["zigzag"], name, [2, 4]) == (name,) for name in names)
    assert command.parse_layouts("all") == ["contiguous", "zigzag", "striped"]
    assert command.parse_layouts("zigzag, striped") == ["zigzag", "striped"]
    balanced = [candidates.balanced_layout(replace(PROBLEM, cu_seqlens=ends)) for ends in (None, DOCUMENTS)]
    assert balanced == ["zigzag", "per-document"]
    ends = (0, 50, 53, 64)
    packed, layout_by_name = (
        Layout.packed(ends, P, heads_per_kv_head=2),
        replace(PROBLEM, cu_seqlens=ends).layout_by_name,
    )
    assert layout_by_name("per-document") == Layout.zigzag(64, P, ends) and layout_by_name("packed") == packed


def test_one_device_computes_documents_one_by_one() -> None:
    q, k, v = (torch.randn(1, 8, heads, 4) for heads in (4, 2, 2))
    parts = [sdpa_attention(*(x[:, rows] for x in (q, k, v)), causal=False) for rows in (slice(0, 3), slice(3, 8))]
    assert torch.equal(sdpa_attention(q, k, v, causal=False, cu_seqlens=(0, 3, 3, 8)), torch.cat(parts, 1))


@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize(("make", "ring_setting", "message"), [
    (candidates.ulysses, setting(AttentionConfig(64, 3, heads=8, kv_heads=8)), "heads is 8: .* ranks, 3"),
    (candidates.ulysses, setting(AttentionConfig(64, 4, heads=8, kv_heads=2)), "kv_heads is 2: .* ranks, 4"),
    (candidates.ulysses, setting(AttentionConfig(64, 2), "cuda", shared=True), "Ulysses needs one GPU per rank"),
    (partial(candidates.ulysses_mesh, 2), setting(AttentionConfig(64, 4, heads=3, kv_heads=3)), "can have 1, 3"),
    (candidates.all_gather, setting(AttentionConfig(65, 2)), "multiple of 2 tokens, not 65"),
    (candidates.baseline_ring, setting(AttentionConfig(66, 2)), "multiple of 4 tokens, not 66"),
    (candidates.baseline_ring, setting(AttentionConfig(64, 2), "cuda"), "uses a CPU operator"),
    (candidates.sdpa_all_cores, setting(AttentionConfig(64, 2, threads=10**6)), "threads than one rank, 1000000"),
    (candidates.sdpa_all_cores, setting(AttentionConfig(64, 1, threads=1)), "threads than one rank, 1"),
    (candidates.sdpa_all_cores, setting(AttentionConfig(64, 2), "cuda"), "runs only on the CPU"),
    (candidates.context_parallel, setting(AttentionConfig(64, 2)), "needs a GPU"),
    (candidates.context_parallel, setting(AttentionConfig(64, 2, kv_heads=2), "cuda"), "as many key/value heads"),
    (candidates.zhuzilin, setting(AttentionConfig(64, 2, dtype="bfloat16")), "kernels need a GPU"),
    (partial(candidates.our_ring, "zigzag", backend="flash"), setting(AttentionConfig(64, 2)), "'flash' .* q on cpu"),
    (candidates.zhuzilin, setting(AttentionConfig(64, 2, dtype="bfloat16"), "cuda"), "is not installed"),
])  # fmt: skip
def test_refused_candidates(make: Any, ring_setting: CandidateSetting, message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        make(ring_setting)


@pytest.mark.usefixtures("rank_zero")
def test_a_shared_key_head_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("init_device_mesh", "resolve_mesh"):
        monkeypatch.setattr(candidates, name, lambda *_, **named: None)
    by_ring = []
    for kv_heads in (1, 2):
        problem = AttentionConfig(64, 4, heads=4, kv_heads=kv_heads)
        sent = candidates.ulysses_mesh(2, setting(problem)).sent_bytes
        by_ring.append((sent or 0) - candidates.exchanged_bytes(problem, 2))
    assert by_ring[0] == by_ring[1] > 0
    # q, out, dout and dq of eight heads, k, v, dk and dv of two, in fp32; half of each goes to the other rank
    assert candidates.exchanged_bytes(replace(problem, heads=8), 2) == 16 * problem.head_dim * 4 * (4 * 8 + 4 * 2) // 2


def test_the_rings_of_all_layouts_keep_their_slots() -> None:
    # Slots that a ring keeps between calls; every further layout adds as many.
    problem = AttentionConfig(2 * 512, 2, heads=4, kv_heads=2, head_dim=16)

    def held(group: LocalGroup) -> int:
        with Ring(group) as ring:
            leaves = [torch.randn(1, 512, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
            out = ring_attention(*leaves, layout=problem.token_layout, ring=ring, causal=True)
            assert isinstance(out, Tensor)
            torch.autograd.grad(out.sum(), leaves)
            return sum(slots.count * slots.nbytes for slots in (ring._kv, ring._dkv) if slots is not None)

    with LocalWorld(2) as world:
        slots = world.run(held)[0]
    assert slots == memory_table.ring_slots(problem)
    shards = 2 * 512 * memory_table.input_bytes(problem)  # a copy on both ranks
    for device in ("cpu", "cuda"):
        for kinds, more in (([OURS], 4 * slots), ([OURS, ALL_GATHER], 4 * slots), ([ALL_GATHER], 0)):
            single, three = (
                measure.ring_needs(
                    replace(problem, device=device), layouts=layouts, kinds=kinds
                )  # two ranks on one GPU
                for layouts in (["zigzag"], ["zigzag", "contiguous", "striped"])
            )
            if kinds == [OURS]:
                q, k = 1024 * 4 * 16 * 4, 1024 * 2 * 16 * 4  # bytes of the whole q and k
                whole, running = 2 * (q + k), memory_table.candidate_bytes(OURS, problem) - slots
                ranks = 2 * (whole + q + PROCESS_BYTES + 3 * whole // 2 + slots)  # all inputs, three shards
                judged, kept = memory_table.judged_bytes(problem), 2 * (3 * whole // 2 + slots)
                on_cpu = ranks + max(2 * running, whole, judged), 0
                on_gpu = ranks - kept, kept + 2 * running + max(whole, judged)  # both ranks share it
                assert single == (on_cpu if device == "cpu" else on_gpu)
            assert three.host + three.gpu - single.host - single.gpu == 2 * shards + more
    # One process holds all inputs and its own tensors while the other ranks wait.
    long, every = AttentionConfig(2 << 20, 2, heads=32, kv_heads=32, head_dim=16), [OURS, ONE_DEVICE, ALL_CORES]
    ours, all_kinds = (measure.ring_needs(long, layouts=["zigzag"], kinds=kinds).host for kinds in ([OURS], every))
    running = memory_table.candidate_bytes(OURS, long) - memory_table.ring_slots(long)
    alone = memory_table.candidate_bytes(ONE_DEVICE, long) + long.seqlen * memory_table.input_bytes(long)
    assert all_kinds - ours == alone - 2 * running > 0
