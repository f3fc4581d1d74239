"""``bench ring``: candidates agree, columns are what they say, what does not fit or dies ends with a reason."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.launching import launch, started
from ringattn.bench.common.memory import Needs
from ringattn.bench.common.timing import Samples
from ringattn.bench.ring import candidates, peers
from ringattn.bench.ring import command as ring_bench
from ringattn.bench.ring import memory as ring_memory
from ringattn.bench.ring import rows as ring_rows
from ringattn.bench.ring.candidates import ALL_GATHER, OURS, ULYSSES, USUAL, WHOLE, Candidate, Refused, Setting
from ringattn.bench.ring.runs import Report, Result, Wish, gathered, spawned
from ringattn.comm import LocalGroup, LocalWorld
from ringattn.ring import Ring, ring_attention

from ..support import ring_bench_cases

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}


def result(name: str, seconds: float, **more: Any) -> Result:
    given: dict[str, Any] = {"disagrees": [], "trusted": True, "exposed": 0.01, "sent": 1000, "peak": 10_000_000} | more
    kind = OURS if name.startswith(OURS) else name
    return Result(kind, Samples((seconds,) * 3), dict.fromkeys(("out", "dq", "dk", "dv"), 1e-6), **given)


def report(tokens: int = 1024, world: int = 2, **seconds: float) -> Report:
    names = {
        "whole": WHOLE,
        "ours": f"{OURS} zigzag",
        "striped": f"{OURS} striped",
        "gather": ALL_GATHER,
        "heads": ULYSSES,
    }
    found = {names[name]: result(names[name], value) for name, value in ({"whole": 1.0, "ours": 0.5} | seconds).items()}
    return Report(AttentionConfig(tokens, world), found, {})


# processes


def test_everyone_agrees_in_real_processes(tmp_path: Path) -> None:
    flags = ["--seqlen", "256,512", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--repeats", "1"]
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    by = [
        "--layout",
        "zigzag,striped",
        "--by",
        "ringattn,usual,all-gather,Ulysses,PyTorch",
    ]  # others take long to import
    ran = CliRunner().invoke(cli.app, ["bench", "ring", *flags, *by, *files])
    assert ran.exit_code == 0, ran.output
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["schema"] == ring_bench.SCHEMA and told["provenance"]["versions"] and told["timer"] == "clock"
    assert [one["problem"]["seqlen"] for one in told["measurements"]] == [256, 512]
    for one in told["measurements"]:
        found = {this["name"]: this for this in one["candidates"]}
        ours = [f"{OURS} {layout}" for layout in ("zigzag", "striped")]
        assert {WHOLE, *ours, USUAL, ALL_GATHER, ULYSSES} <= set(found)
        assert not any(this["disagrees"] for this in found.values())
        assert all(found[name]["exposed_seconds"] >= 0 for name in (*ours, USUAL, ALL_GATHER, ULYSSES))
        assert all(found[name]["compute_seconds"] > 0 for name in ours)
        assert "torch" in one["absent"][peers.CONTEXT_PARALLEL]
        shard, kv, queries = one["problem"]["seqlen"] // 2, 2 * 2 * 16 * 4, 4 * 16 * 4
        assert found[ALL_GATHER]["bytes_sent"] == shard * 2 * kv  # K/V there, fp32 sums back
        assert found[ULYSSES]["bytes_sent"] == shard * (4 * queries + 2 * kv) // 2
    assert [one["by"] for one in told["crossovers"]] == [ALL_GATHER, ULYSSES]
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["world"] for row in rows} == {"2"} and {row["tokens"] for row in rows} == {"256", "512"}
    assert "not there: PyTorch context_parallel" in ran.stdout and "2 ranks" in ran.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False])
def test_a_peer_with_another_order_of_heads_is_right(causal: bool) -> None:
    """Its out and dq; its dk and dv are wrong on the CPU with one head of queries to each of K/V, too."""
    problem = AttentionConfig(64, 2, heads=6, kv_heads=2, head_dim=16, causal=causal)
    (found,) = launch(2, spawned, Wish((problem,), ("zigzag",), 1, (peers.LUCIDRAINS,)))
    one = found.found[peers.LUCIDRAINS]
    assert not {"out", "dq"} & set(one.disagrees) and one.errors["dq"] < 1e-3, one.errors


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 4), (4, 1)])
def test_heads_of_who_repeats_all_of_k_and_v(heads: int, kv_heads: int) -> None:
    order = peers.repeated_heads(heads, kv_heads)
    assert order is not None and sorted(order) == list(range(heads))
    assert [head // (heads // kv_heads) for head in order] == [head % kv_heads for head in range(heads)]
    assert peers.repeated_heads(heads, heads) is None


def test_shards_have_the_heads_in_the_candidates_order_and_results_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    problem = AttentionConfig(4, 1, heads=6, kv_heads=2, head_dim=8)
    tensors, positions = problem.tensors(), torch.tensor([2, 0, 3, 1])
    one = Candidate("", positions, lambda q, k, v: q, query_heads=peers.repeated_heads(6, 2))
    q, k, v, dout = one.shards(tensors, CPU)
    assert torch.equal(q, tensors[0][:, positions][:, :, [0, 3, 1, 4, 2, 5]])
    told = gathered(one, (q, dout, k, v), problem, [1])
    wanted = (tensors[0][:, :, 3:], tensors[3][:, :, 3:], tensors[1][:, :, 1:], tensors[2][:, :, 1:])
    assert all(torch.equal(x, y.double()) for x, y in zip(told, wanted, strict=True))


@pytest.mark.nightly
def test_three_ranks_and_a_full_mask() -> None:
    problem = AttentionConfig(3 * 2 * 40, 3, heads=3, kv_heads=3, head_dim=16, causal=False, layout="contiguous")
    (found,) = launch(3, spawned, Wish((problem,), ("contiguous", "striped"), 1))
    wrong = {name: one.disagrees for name, one in found.found.items() if one.trusted and one.disagrees}
    assert wrong == {} and {USUAL, ALL_GATHER, ULYSSES} <= set(found.found)


UNCOUNTED = 0.05  # of 90 to 105 MB: an operator's scratch per thread, gloo's buffers, lse; pieces of half a shard


def spared(kind: str, problem: AttentionConfig) -> int:
    """What a count has for other worlds and dtypes, and two ranks in fp32 do not take."""
    rows, n = ring_memory.rows_of(problem), ring_memory.tokens_per_rank(problem)
    return n * {
        # the second pair of K/V buffers has no third rank's shard to hold; the running dQ is the result
        USUAL: 2 * rows.keys * rows.item + rows.queries * 4,
        # gradients by heads are the fp32 sums themselves, and dout by heads is gone when they travel
        ULYSSES: 2 * rows.queries * rows.item,
    }.get(kind, 0)


@pytest.mark.nightly
def test_memory_is_what_was_counted() -> None:
    """Where tensors are much larger than what a process takes anyway: neither less nor more than the count."""
    problem = AttentionConfig(2 * 4096, 2, heads=8, kv_heads=4, head_dim=64)
    kinds = (OURS, USUAL, ALL_GATHER, ULYSSES)
    (found,) = launch(2, spawned, Wish((problem,), ("zigzag",), 1, kinds))
    assert {one.kind for one in found.found.values()} == {WHOLE, *kinds}
    for name, one in found.found.items():
        counted = ring_memory.peak(one.kind, problem)
        least, most = (1 - UNCOUNTED) * (counted - spared(one.kind, problem)), (1 + UNCOUNTED) * counted
        assert one.peak is not None and least < one.peak < most, (
            f"{name}: {one.peak:,} bytes, {least:,.0f} to {most:,.0f} were to be expected"
        )


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (ring_bench_cases.rank_one_raises, "rank 1 has had enough"),
        pytest.param(ring_bench_cases.rank_one_dies, "exitcode  : 9", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_dies_ends_it(entry: Any, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        started(2, entry, Wish((AttentionConfig(64, 2, heads=2, kv_heads=2, head_dim=16),), ("zigzag",), 1))
    assert ended.value.exit_code == 1
    assert told in capfd.readouterr().err


# columns


def test_columns() -> None:
    found = report(1024, 2, gather=0.25)
    found.found[ALL_GATHER].disagrees.append("dk")
    whole, ours, gather = ring_rows.rows_of(found)
    assert (whole["% of ideal"], ours["% of ideal"], gather["% of ideal"]) == (50, 100, 200)
    assert ours["ms"] == 500 and ours["tokens/s"] == 2048
    assert ours["exposed ms"] == 10 and ours["MB sent"] == 0.001 and ours["peak MB"] == 10
    flops = ring_rows.problem_flops(found.problem)
    assert flops == 3.5 * 4 * 64 * 8 * 1024 * 1025 / 2
    assert ours["TFLOP/s per rank"] == pytest.approx(flops / 0.5 / 2 / 1e12, rel=1e-3)
    assert whole["TFLOP/s per rank"] == pytest.approx(flops / 1.0 / 1e12, rel=1e-3)
    assert gather["agrees"] == "not in dk"


def test_the_crossover_is_between_the_lengths_where_it_changes() -> None:
    reports = [report(1024, gather=0.25), report(4096, gather=1.0, striped=0.4)]
    (one,) = ring_rows.crossovers(reports)
    assert one.ratios == (0.5, 2.5)  # against the best of ours
    assert len(one.crossings) == 1
    # log 0.5 : log 2.5 of the way from 1k to 4k
    assert one.crossings[0] == pytest.approx(1024 * 4 ** (0.6931 / (0.6931 + 0.9163)), rel=1e-3)
    assert "all-gather is faster up to about 1,860 tokens" in str(one)
    assert "the ring is faster at every length measured (1k to 4k)" in str(
        ring_rows.crossovers([report(1024, heads=0.6), report(4096, heads=0.7)])[0]
    )
    (even,) = ring_rows.crossovers([report(1024, gather=0.5)])
    assert "within the spread at 1k" in str(even)
    assert ring_rows.crossovers([report()]) == []


def test_worlds_cross_over_by_themselves() -> None:
    found = ring_rows.crossovers([report(1024, 2, gather=0.4), report(1024, 4, gather=0.6)])
    assert [(one.world, one.ratios) for one in found] == [(2, (0.8,)), (4, (1.2,))]


def test_a_wrong_ring_fails_and_a_wrong_peer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    peer = report()
    peer.found[peers.LUCIDRAINS] = result(
        peers.LUCIDRAINS, 2.0, trusted=False, disagrees=["dk"], exposed=None, sent=None
    )
    peer.absent["yunchang"] = "it needs a GPU"
    ring_bench.finish([peer], "cpu", "clock", None, None)
    told = capsys.readouterr().out
    assert "not in dk" in told and "not there: yunchang: it needs a GPU" in told
    wrong = report()
    wrong.found[f"{OURS} zigzag"].disagrees.append("dq")
    with pytest.raises(typer.Exit):
        ring_bench.finish([wrong], "cpu", "clock", None, None)


# candidates


def setting(problem: AttentionConfig, device: str = "cpu", shared: bool = False) -> Setting:
    def ring() -> Ring:
        raise AssertionError

    return Setting(problem, ("zigzag",), torch.device(device), ring, shared)


@pytest.fixture
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize(
    ("make", "problem", "device", "told"),
    [
        (
            candidates.ulysses,
            AttentionConfig(64, 3, heads=8, kv_heads=8),
            "cpu",
            "heads is 8: 3 ranks need a multiple of 3",
        ),
        (candidates.ulysses, AttentionConfig(64, 4, heads=8, kv_heads=2), "cpu", "kv_heads is 2"),
        (candidates.all_gather, AttentionConfig(65, 2), "cpu", "65 tokens"),
        (candidates.usual, AttentionConfig(66, 2), "cpu", "66 tokens"),
        (candidates.usual, AttentionConfig(64, 2), "cuda", "CPU's operator"),
        (candidates.all_cores, AttentionConfig(64, 2, threads=10**6), "cpu", "no more than"),
        (peers.context_parallel, AttentionConfig(64, 2), "cpu", "needs a GPU"),
        (peers.zhuzilin, AttentionConfig(64, 2), "cpu", "needs a GPU"),
        (peers.zhuzilin, AttentionConfig(64, 2), "cuda", "takes float16 and bfloat16"),
        (peers.zhuzilin, AttentionConfig(64, 2, dtype="bfloat16"), "cuda", "is not installed"),
        (peers.yunchang, AttentionConfig(64, 2, dtype="bfloat16"), "cuda", "is not installed"),
        (peers.context_parallel, AttentionConfig(64, 2, kv_heads=2), "cuda", "as many heads"),
    ],
)
def test_what_is_not_there_says_why(make: Any, problem: AttentionConfig, device: str, told: str) -> None:
    with pytest.raises(Refused, match=told):
        make(setting(problem, device))


@pytest.mark.usefixtures("rank_zero")
def test_collectives_are_refused_where_ranks_share_a_gpu() -> None:
    for make in (candidates.all_gather, candidates.ulysses):
        with pytest.raises(Refused, match="one rank per GPU"):
            make(setting(AttentionConfig(64, 2), "cuda", shared=True))


def test_names_begin_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(setting: Setting) -> Candidate:
        return Candidate("", None, lambda q, k, v: q)

    names = [WHOLE, f"{OURS} zigzag", ALL_GATHER]
    monkeypatch.setattr(candidates, "makers", lambda layouts: dict.fromkeys(names, make))
    assert list(candidates.candidates(setting(AttentionConfig(8, 2)), ("ring",))[0]) == names[:2]
    assert list(candidates.candidates(setting(AttentionConfig(8, 2)))[0]) == names


# memory


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    def needed(problem: AttentionConfig) -> Needs:
        return Needs(problem.seqlen * 1000, problem.seqlen * 10)

    problem = AttentionConfig(100 * 1024, 2)
    assert ring_memory.refusal(problem, Needs(120_000_000, 10**9), needed) is None
    why = ring_memory.refusal(problem, Needs(50_000_000, 10**9), needed)
    assert why is not None and "43k fits" in why and "0.1 GB of memory" in why  # nine tenths of 50 MB
    assert "GPU memory" in str(ring_memory.refusal(problem, Needs(10**12, 100_000), needed))
    assert "not even 1k fits" in str(ring_memory.refusal(problem, Needs(1000), needed))


def test_counted_bytes() -> None:
    """By hand, of B1 H2/1 D4 fp32, 8 tokens over 2 ranks: a query tensor's row is 32 bytes, a key tensor's 16."""
    problem = AttentionConfig(8, 2, heads=2, kv_heads=1, head_dim=4)
    both = 4 * 2 * 2 * (32 + 16)  # of 4 tokens: q, k, v, dout, and as much of results
    assert ring_memory.of_ours(problem) == both + 4 * (3 * 2 * 16 + 2 * 2 * 16 + 32 + 16)
    assert ring_memory.of_all_gather(problem) == both + 4 * 32 + 8 * (2 * 16 + 3 * 16)
    assert ring_memory.of_whole(problem) == 2 * both + 8 * 2 * 4  # lse
    assert ring_memory.of_whole(replace(problem, device="cuda")) == 2 * both + 8 * (2 * 4 + 32)
    grown = replace(problem, seqlen=16, world=4)
    assert ring_memory.of_ours(grown) == ring_memory.of_ours(problem)  # constant in the number of ranks
    assert ring_memory.of_all_gather(grown) > ring_memory.of_all_gather(problem)
    assert ring_memory.peak("somebody else's", problem) == ring_memory.of_usual_ring(problem)


def test_needs_grow_with_ranks_and_length() -> None:
    problem = AttentionConfig(1 << 16, 2)
    few = ring_memory.needs(problem, ["zigzag"], [WHOLE, OURS], 2, 1)
    assert few.gpu == 0 and ring_memory.needs(problem, ["zigzag"], [WHOLE, OURS], 4, 1).host > few.host
    assert (
        ring_memory.needs(replace(problem, seqlen=1 << 17), ["zigzag"], [WHOLE, OURS], 2, 1).host > 1.8 * few.host - 1e9
    )
    on_gpu = ring_memory.needs(replace(problem, device="cuda"), ["zigzag"], [WHOLE, OURS], 2, 1)
    assert on_gpu.gpu > 0 and on_gpu.host < few.host


@pytest.mark.parametrize(("device", "sharing"), [("cpu", 1), ("cuda", 2)])
def test_the_rings_of_all_layouts_keep_their_slots(device: str, sharing: int) -> None:
    """What rings hold between calls, counted on rings that ran; each layout more than the first adds that much."""
    layouts = ["zigzag", "contiguous", "striped"]
    problem = AttentionConfig(2 * 512, 2, heads=4, kv_heads=2, head_dim=16, device=device)

    def held(group: LocalGroup) -> int:
        with ExitStack() as opened:
            rings = [opened.enter_context(Ring(group)) for _ in layouts]
            for ring, layout in zip(rings, layouts, strict=True):
                drawn = [torch.randn(1, 512, heads, 16) for heads in (4, 2, 2)]
                leaves = [x.requires_grad_() for x in drawn]
                out = ring_attention(*leaves, layout=problem.named(layout), ring=ring, causal=True)
                assert isinstance(out, torch.Tensor)
                out.sum().backward()
            kept = [slots for ring in rings for slots in (ring._kv, ring._sums) if slots is not None]
            return sum(slots.count * slots.nbytes for slots in kept)

    with LocalWorld(2) as world:
        (there, _) = world.run(held)
    assert there == 3 * ring_memory.slots_of(problem)

    def needed(names: Sequence[str], *kinds: str) -> int:
        found = ring_memory.needs(problem, names, kinds, 2, sharing)
        return found.gpu if device == "cuda" else found.host

    shards = 2 * 512 * ring_memory.rows_of(problem).inputs  # a copy of them on both ranks
    for kinds in ((OURS,), (OURS, ALL_GATHER)):
        more = needed(layouts, *kinds) - needed(layouts[:1], *kinds)
        assert more == 2 * shards + 2 * 2 * ring_memory.slots_of(problem)
    assert needed(layouts, ALL_GATHER) - needed(layouts[:1], ALL_GATHER) == 2 * shards


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--heads", "4", "--kv-heads", "3"], "multiple"),
        (["--seqlen", "1", "--world", "2"], "a token each"),
        (["--world", "0"], "at least one process"),
        (["--dtype", "int8"], "no dtype"),
        (["--layout", "spiral"], "no layout"),
        (["--by", "magic"], "there are one device"),
        (["--transport", "pigeon"], "it takes auto"),
        (["--transport", "nccl"], "--transport is nccl, of GPUs, and the device is cpu: take process_group"),
        (["--transport", "copy_engine", "--world", "1"], "is copy_engine, of GPUs, and the device is cpu"),
        (["--transport", "local", "--world", "1,2"], "--transport is local, of one process, and 2 are to run"),
        (["--seqlen", "0"], "--seqlen is 0: 2 processes need a token each"),
        (["--timer", "events"], "timer is 'events': on cpu it must be one of clock"),
        (["--seqlen", "1g"], "fits"),
        (["--json", "/no/such/folder/r.json"], "no folder"),
    ],
)
def test_bad_problems_are_refused(flags: list[str], told: str) -> None:
    ran = CliRunner().invoke(ring_bench.app, flags, env=WIDE)
    assert ran.exit_code == 2 and told in ran.output, ran.output
