"""``bench ring``: candidates agree, columns are what they say, what does not fit or dies ends with a reason."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch import Tensor
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.launching import Member, launch, started
from ringattn.bench.common.memory_room import Needs
from ringattn.bench.common.result import Result, read
from ringattn.bench.ring import candidates, runs
from ringattn.bench.ring import command as ring_bench
from ringattn.bench.ring import memory as ring_memory
from ringattn.bench.ring.candidates import (
    ALL_GATHER,
    BASELINE,
    CONTEXT_PARALLEL,
    LUCIDRAINS,
    OURS,
    ULYSSES,
    WHOLE,
    Candidate,
    Problem,
    Refused,
    Setting,
    sdpa,
)
from ringattn.bench.ring.runs import RingConfig, Row, best, crossovers, gathered, spawned
from ringattn.comm import LocalGroup, LocalWorld
from ringattn.ring import Ring, ring_attention

from ..support import ring_bench_cases

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}


def row(candidate: str, seconds: float, tokens: int = 1024, world: int = 2) -> Row:
    """Of a candidate that takes so long, with a spread of 0."""
    return {"candidate": candidate, "world": world, "tokens": tokens, "time": seconds * 1e3, "spread": 0.0}


def by_name(found: Result) -> dict[str, Any]:
    """Rows of one problem."""
    return {row["candidate"]: row for row in found.rows}


# processes


def test_everyone_agrees_in_real_processes(tmp_path: Path) -> None:
    flags = "--seqlen 256,512 --heads 4 --kv-heads 2 --head-dim 16 --repeats 1 --layout zigzag,striped"
    by = "ringattn,baseline,all-gather,Ulysses,PyTorch"  # others take long to import
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    ran = CliRunner().invoke(cli.app, ["bench", "ring", *flags.split(), "--by", by, *files])
    assert ran.exit_code == 0, ran.output
    found = read(tmp_path / "r.json")
    assert not found.failed and found.provenance["versions"]
    for tokens in (256, 512):
        rows = by_name(Result("", {}, [row for row in found.rows if row["tokens"] == tokens]))
        ours = [f"{OURS} {layout}" for layout in ("zigzag", "striped")]
        assert {WHOLE, *ours, BASELINE, ALL_GATHER, ULYSSES} <= set(rows)
        assert not any(row["disagrees"] for row in rows.values()) and all(row["error"] < 1e-4 for row in rows.values())
        assert all(rows[name]["exposed"] >= 0 for name in (*ours, BASELINE, ALL_GATHER, ULYSSES))
        assert all(rows[name]["compute"] > 0 for name in ours)
        kv, queries = 2 * 2 * 16 * 4, 4 * 16 * 4
        assert rows[ALL_GATHER]["sent"] * 1e6 == tokens // 2 * 2 * kv  # K/V there, fp32 sums back
        assert rows[ULYSSES]["sent"] * 1e6 == tokens // 2 * (4 * queries + 2 * kv) // 2
        flops = 3.5 * 4 * 16 * 4 * tokens * (tokens + 1) / 2
        for name, ranks in ((WHOLE, 1), (ours[0], 2)):
            of = rows[name]
            assert of["rate of a rank"] == pytest.approx(flops / (of["time"] / 1e3) / ranks / 1e12)
            assert of["of ideal"] == pytest.approx(100 * rows[WHOLE]["time"] / 2 / of["time"])
            assert of["throughput"] == pytest.approx(tokens / (of["time"] / 1e3))
    assert f"not there: {CONTEXT_PARALLEL}: it has no sharding strategy" in ran.stdout
    assert [note.partition(" and")[0] for note in found.notes[-3:-1]] == [ALL_GATHER, ULYSSES]
    assert found.notes[-1].startswith("best: ")
    with (tmp_path / "r.csv").open() as file:
        assert {row["tokens"] for row in csv.DictReader(file)} == {"256", "512"}


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False])
def test_a_peer_with_another_order_of_heads_is_right(causal: bool) -> None:
    """Its out and dq; its dk and dv are wrong on the CPU with one head of queries to each of K/V, too."""
    problem = Problem(64, 2, heads=6, kv_heads=2, head_dim=16, causal=causal)
    found = launch(2, spawned, RingConfig((problem,), ("zigzag",), 1, (LUCIDRAINS,)))
    assert not {"out", "dq"} & {*by_name(found)[LUCIDRAINS]["disagrees"].split(", ")} and not found.failed


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 4), (4, 1)])
def test_heads_of_who_repeats_all_of_k_and_v(heads: int, kv_heads: int) -> None:
    order = candidates.repeated_heads(heads, kv_heads)
    assert order is not None and sorted(order) == list(range(heads))
    assert [head // (heads // kv_heads) for head in order] == [head % kv_heads for head in range(heads)]
    assert candidates.repeated_heads(heads, heads) is None


def test_shards_have_the_heads_in_the_candidates_order_and_results_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    problem = Problem(4, 1, heads=6, kv_heads=2, head_dim=8)
    tensors, positions = problem.tensors(), torch.tensor([2, 0, 3, 1])
    one = Candidate("", positions, lambda q, k, v: q, query_heads=candidates.repeated_heads(6, 2))
    q, k, v, dout = one.shards(tensors, CPU)
    assert torch.equal(q, tensors[0][:, positions][:, :, [0, 3, 1, 4, 2, 5]])
    told = gathered(one, (q, dout, k, v), problem, [1])
    wanted = (tensors[0][:, :, 3:], tensors[3][:, :, 3:], tensors[1][:, :, 1:], tensors[2][:, :, 1:])
    assert all(torch.equal(x, y.double()) for x, y in zip(told, wanted, strict=True))


@pytest.mark.nightly
def test_three_ranks_and_a_full_mask() -> None:
    problem = Problem(3 * 2 * 40, 3, heads=3, kv_heads=3, head_dim=16, causal=False, layout="contiguous")
    found = launch(3, spawned, RingConfig((problem,), ("contiguous", "striped"), 1))
    assert not found.failed and {BASELINE, ALL_GATHER, ULYSSES} <= set(by_name(found))


UNCOUNTED = 0.05  # of 90 to 105 MB: an operator's scratch per thread, gloo's buffers, lse; pieces of half a shard


def spared(kind: str, problem: Problem) -> int:
    """What a count has for other worlds and dtypes, and two ranks in fp32 do not take."""
    rows, n = ring_memory.rows_of(problem), ring_memory.tokens_per_rank(problem)
    return n * {
        # the second pair of K/V buffers has no third rank's shard to hold; the running dQ is the result
        BASELINE: 2 * rows.keys * rows.item + rows.queries * 4,
        # gradients by heads are the fp32 sums themselves, and dout by heads is gone when they travel
        ULYSSES: 2 * rows.queries * rows.item,
    }.get(kind, 0)


@pytest.mark.nightly
def test_memory_is_what_was_counted() -> None:
    """Where tensors are much larger than what a process takes anyway: neither less nor more than the count."""
    problem = Problem(2 * 4096, 2, heads=8, kv_heads=4, head_dim=64)
    kinds = (OURS, BASELINE, ALL_GATHER, ULYSSES)
    rows = by_name(launch(2, spawned, RingConfig((problem,), ("zigzag",), 1, kinds)))
    assert len(rows) == 1 + len(kinds)
    for name, row in rows.items():
        counted = row["counted peak"] * 1e6
        least, most = (1 - UNCOUNTED) * (counted - spared(name, problem)), (1 + UNCOUNTED) * counted
        assert least < row["peak"] * 1e6 < most, (
            f"{name}: {row['peak']:,} MB, {least:,.0f} to {most:,.0f} bytes were to be expected"
        )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ring_bench_cases.rank_one_raises, "rank 1 has had enough"),
        pytest.param(ring_bench_cases.rank_one_dies, "exitcode  : 9", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_dies_ends_it(entry: Any, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        started(2, entry, RingConfig((Problem(64, 2, heads=2, kv_heads=2, head_dim=16),), ("zigzag",), 1))
    assert ended.value.exit_code == 1
    assert message in capfd.readouterr().err


# what follows from rows


def rows(tokens: int = 1024, world: int = 2, **seconds: float) -> list[Row]:
    names = {"gather": ALL_GATHER, "heads": ULYSSES, "striped": f"{OURS} striped"}
    others = [row(names[name], value, tokens, world) for name, value in seconds.items()]
    return [row(WHOLE, 1.0, tokens, world), row(f"{OURS} zigzag", 0.5, tokens, world), *others]


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        # log 0.5 : log 2.5 of the way from 1k to 4k, against the best of ours
        (
            [*rows(1024, gather=0.25), *rows(4096, gather=1.0, striped=0.4)],
            [
                "all-gather is faster up to about 1,860 tokens, measured 1k to 4k: 0.50 times the ring's time at 1k, 2.50 "
            ],
        ),
        (
            [*rows(1024, heads=0.6), *rows(4096, heads=0.7)],
            ["the ring is faster at every length (1k to 4k): 1.20 times the ring's time at 1k, 1.40 times"],
        ),
        (rows(1024, gather=0.5), ["; within the spread at 1k"]),
        ([*rows(1024, 2, gather=0.4), *rows(1024, 4, gather=0.6)], ["2 ranks: all-gather is", "4 ranks: the ring is"]),
        (rows(), []),
    ],
)
def test_crossovers(found: list[Row], texts: list[str]) -> None:
    told = crossovers(found)
    assert len(told) == len(texts) and all(text in line for text, line in zip(texts, told, strict=True)), told


def test_best_of_the_largest_problem() -> None:
    found = [{**row, "of ideal": 80.0} for row in [*rows(1024, heads=0.1), *rows(4096, heads=0.6, striped=0.45)]]
    assert best(found) == "best: ringattn striped, 2 ranks, 4k tokens: 450 ms, 80.0% of ideal"


@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize("trusted", [True, False])
def test_a_wrong_ring_fails_and_a_wrong_peer_is_noted(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that returns a wrong dk, on rank 0 of one rank."""
    problem = Problem(16, 1, heads=2, kv_heads=2, head_dim=8)

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k + k.detach(), v, causal=True)

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, causal=True)

    able = {
        WHOLE: Candidate(WHOLE, torch.arange(16), right),
        "wrong": Candidate("wrong", torch.arange(16), wrong, trusted=trusted),
    }
    monkeypatch.setattr(runs, "candidates", lambda *_: (able, {"yunchang": "it needs a GPU"}))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    found = runs.Measurement(setting(problem), RingConfig((problem,), ("zigzag",), 1), Member(0, 1, 0, 1))()
    assert [row["disagrees"] for row in found.rows] == ["", "out, dq, dk, dv"]
    (line,) = found.failed if trusted else [note for note in found.notes if "errs" in note]
    assert "wrong: out, dq, dk, dv errs by more than rounding explains" in line and bool(found.failed) == trusted
    assert "not there: yunchang: it needs a GPU" in found.notes


# candidates


def setting(problem: Problem, device: str = "cpu", shared: bool = False) -> Setting:
    def ring() -> Ring:
        raise AssertionError

    return Setting(problem, ("zigzag",), torch.device(device), ring, shared)


@pytest.fixture
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize(
    ("make", "problem", "device", "message"),
    [
        (candidates.ulysses, Problem(64, 3, heads=8, kv_heads=8), "cpu", "heads is 8: 3 ranks need a multiple of 3"),
        (candidates.ulysses, Problem(64, 4, heads=8, kv_heads=2), "cpu", "kv_heads is 2"),
        (candidates.all_gather, Problem(65, 2), "cpu", "65 tokens"),
        (candidates.baseline_ring, Problem(66, 2), "cpu", "66 tokens"),
        (candidates.baseline_ring, Problem(64, 2), "cuda", "CPU's operator"),
        (candidates.all_cores, Problem(64, 2, threads=10**6), "cpu", "no more than"),
        (candidates.context_parallel, Problem(64, 2), "cpu", "needs a GPU"),
        (candidates.zhuzilin, Problem(64, 2), "cpu", "needs a GPU"),
        (candidates.zhuzilin, Problem(64, 2), "cuda", "takes float16 and bfloat16"),
        (candidates.zhuzilin, Problem(64, 2, dtype="bfloat16"), "cuda", "is not installed"),
        (candidates.yunchang, Problem(64, 2, dtype="bfloat16"), "cuda", "is not installed"),
        (candidates.context_parallel, Problem(64, 2, kv_heads=2), "cuda", "as many heads"),
    ],
)
def test_refused_candidates(make: Any, problem: Problem, device: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        make(setting(problem, device))


@pytest.mark.usefixtures("rank_zero")
def test_collectives_are_refused_where_ranks_share_a_gpu() -> None:
    for make in (candidates.all_gather, candidates.ulysses):
        with pytest.raises(Refused, match="one rank per GPU"):
            make(setting(Problem(64, 2), "cuda", shared=True))


def test_names_begin_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(setting: Setting) -> Candidate:
        return Candidate("", None, lambda q, k, v: q)

    names = [WHOLE, f"{OURS} zigzag", ALL_GATHER]
    monkeypatch.setattr(candidates, "makers", lambda layouts: dict.fromkeys(names, make))
    assert list(candidates.candidates(setting(Problem(8, 2)), ("ring",))[0]) == names[:2]
    assert list(candidates.candidates(setting(Problem(8, 2)))[0]) == names


# memory


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    def needed(problem: Problem) -> Needs:
        return Needs(problem.seqlen * 1000, problem.seqlen * 10)

    problem = Problem(100 * 1024, 2)
    assert ring_memory.refusal(problem, Needs(120_000_000, 10**9), needed) is None
    why = ring_memory.refusal(problem, Needs(50_000_000, 10**9), needed)
    assert why is not None and "43k fits" in why and "0.1 GB of memory" in why  # nine tenths of 50 MB
    assert "GPU memory" in str(ring_memory.refusal(problem, Needs(10**12, 100_000), needed))
    assert "not even 1k fits" in str(ring_memory.refusal(problem, Needs(1000), needed))


def test_counted_bytes() -> None:
    """By hand, of B1 H2/1 D4 fp32, 8 tokens over 2 ranks: a query tensor's row is 32 bytes, a key tensor's 16."""
    problem = Problem(8, 2, heads=2, kv_heads=1, head_dim=4)
    both = 4 * 2 * 2 * (32 + 16)  # of 4 tokens: q, k, v, dout, and as much of results
    assert ring_memory.of_ours(problem) == both + 4 * (3 * 2 * 16 + 2 * 2 * 16 + 32 + 16)
    assert ring_memory.of_all_gather(problem) == both + 4 * 32 + 8 * (2 * 16 + 3 * 16)
    assert ring_memory.of_whole(problem) == 2 * both + 8 * 2 * 4  # lse
    assert ring_memory.of_whole(replace(problem, device="cuda")) == 2 * both + 8 * (2 * 4 + 32)
    grown = replace(problem, seqlen=16, world=4)
    assert ring_memory.of_ours(grown) == ring_memory.of_ours(problem)  # constant in the number of ranks
    assert ring_memory.of_all_gather(grown) > ring_memory.of_all_gather(problem)
    assert ring_memory.peak("somebody else's", problem) == ring_memory.of_baseline_ring(problem)


def test_needs_grow_with_ranks_and_length() -> None:
    problem = Problem(1 << 16, 2)
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
    problem = Problem(2 * 512, 2, heads=4, kv_heads=2, head_dim=16, device=device)

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
    ("flags", "message"),
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
def test_refused_flags(flags: list[str], message: str) -> None:
    ran = CliRunner().invoke(ring_bench.app, flags, env=WIDE)
    assert ran.exit_code == 2 and message in ran.output, ran.output
