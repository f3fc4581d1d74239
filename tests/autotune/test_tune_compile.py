"""Compiling candidates: workers that may crash and hang, verdicts that are kept, and the order they give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ringattn.autotune import Failure, Job, Journal, Judge, Verdict, dealt, rank_candidates, ranking, run_jobs, space
from ringattn.autotune.inspect.chips import CHIPS
from ringattn.autotune.ranking import OTHER_ROLES, job_of
from ringattn.autotune.tune.compile import compile_job, in_cache
from ringattn.kernels import Tile
from ringattn.kernels.tables import Point, options_of, with_options

from ..support.tune_cases import POINT, at_once, by_number, process_then_sleep, twice

HEADS = 32

# worker processes


def test_every_job_has_its_result() -> None:
    found: dict[int, int | Failure] = {}
    run_jobs(range(9), twice, workers=2, done=found.__setitem__)
    assert found == {number: 2 * number for number in range(9)}


@pytest.mark.nightly
def test_a_crash_and_a_hang_cost_their_jobs_alone() -> None:
    found: dict[int, str | Failure] = {}
    run_jobs([0, 1, 2, 3, 4], by_number, workers=2, done=found.__setitem__, seconds=20.0)
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert found == {
        0: "off",  # a compiler has no interpreter
        1: Failure("ValueError: one is"),
        2: Failure("its process died with exit code 7"),
        3: Failure("it did not end in time, and was ended"),
        4: "off",
    }


def test_an_interruption_ends_the_workers() -> None:
    started: list[int] = []

    def done(number: int, result: int | Failure) -> None:
        assert isinstance(result, int)
        started.append(result)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([0, 1, 2], process_then_sleep, workers=1, done=done)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


# verdicts


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What was compiled, in this process."""
    monkeypatch.setattr(ranking, "run_jobs", at_once)
    return []


def judge_of(
    seen: list[Job], path: Path, verdict: Callable[[Job], Verdict], told: Callable[[int | None], None] = lambda n: None
) -> Judge:
    def compiled(job: Job) -> Verdict:
        seen.append(job)
        return verdict(job)

    return Judge(compiled, Journal(path, ""), workers=1, told=told)


def fine(job: Job) -> Verdict:
    """The larger the tile, the better."""
    bound = job.tile.block_q * job.tile.block_k / 128 + job.tile.num_warps + job.tile.num_stages
    return Verdict((), bound, "percent")


def test_what_was_compiled_once_is_not_compiled_again(compiler: list[Job], tmp_path: Path) -> None:
    jobs = [job_of(POINT, tile, 90, HEADS) for tile in space(POINT, 90)]
    told: list[int | None] = []
    first = judge_of(compiler, tmp_path / "journal", fine, told.append)(jobs * 2)
    assert compiler == jobs
    assert told == [len(jobs), *[None] * len(jobs)]
    second = judge_of(compiler, tmp_path / "journal", fine)([*jobs, job_of(POINT, jobs[0].tile, 80, HEADS)])
    assert len(compiler) == len(jobs) + 1
    assert {job: second[job] for job in jobs} == first


def test_what_triton_no_longer_has_is_compiled_again(compiler: list[Job], tmp_path: Path) -> None:
    """Once, whatever the cache does next; what failed had nothing to keep."""

    def verdict(job: Job) -> Verdict:
        return Verdict(("spills",)) if job.tile.num_stages == 4 else Verdict((), 1.0, "percent", job.key)

    def judge(gone: set[str]) -> Judge:
        def compiled(job: Job) -> Verdict:
            compiler.append(job)
            return verdict(job)

        def holds(verdict: Verdict) -> bool:
            return verdict.folder not in gone

        return Judge(compiled, Journal(tmp_path / "journal", ""), workers=1, holds=holds)

    jobs = [job_of(POINT, tile, 90, HEADS) for tile in space(POINT, 90)]
    judge(set())(jobs)
    compiler.clear()
    emptied = [job for job in jobs if job.tile.num_stages != 4]
    again = judge({job.key for job in jobs})
    assert again(jobs) == {job: verdict(job) for job in jobs}
    assert not compiler  # a rank takes what the journal knows
    assert again(jobs, to_launch=True) == {job: verdict(job) for job in jobs}
    assert compiler == emptied and len(emptied) < len(jobs)
    again(jobs, to_launch=True)
    assert compiler == emptied
    judge({jobs[0].key})(jobs, to_launch=True)
    assert compiler == [*emptied, jobs[0]]


def test_lengths_and_heads_share_their_binaries(compiler: list[Job], tmp_path: Path) -> None:
    points = [POINT, POINT._replace(length=32768), POINT._replace(group=8)]
    assert job_of(POINT, TILE, 90, 8) != JOB != job_of(POINT._replace(group=16), TILE, 90, 16)
    found = rank_candidates(points, 90, judge_of(compiler, tmp_path / "journal", fine), heads=HEADS, count=1)
    assert len({found[point].tiles for point in points}) == 1
    assert len(compiler) == len({*compiler}) == len(space(POINT, 90)) + len(OTHER_ROLES)


def test_what_fails_is_dropped_with_its_reason(compiler: list[Job], tmp_path: Path) -> None:
    def verdict(job: Job) -> Verdict:
        if job.tile.num_stages == 4:
            raise RuntimeError("PassManager::run failed")
        return Verdict(("serialised wgmma in a loop",)) if job.tile.num_warps == 8 else fine(job)

    tiles = space(POINT, 90)
    found = rank_candidates([POINT], 90, judge_of(compiler, tmp_path / "journal", verdict), heads=HEADS, count=99)[
        POINT
    ]
    assert {*found.tiles} == {tile for tile in tiles if tile.num_stages != 4 and tile.num_warps != 8}
    assert {*found.dropped} | {*found.tiles} == {*tiles}
    for tile, reason in found.dropped.items():
        assert reason == ("PassManager::run failed" if tile.num_stages == 4 else "serialised wgmma in a loop")


def test_a_tile_compiles_in_every_role_or_is_dropped(compiler: list[Job], tmp_path: Path) -> None:
    order = [tile for tile in rank_all(compiler, tmp_path) if tile]
    bad = {order[0]: "last", order[2]: "only"}

    def verdict(job: Job) -> Verdict:
        return Verdict((f"spills as {job.role}",)) if bad.get(job.tile) == job.role else fine(job)

    found = rank_candidates([POINT], 90, judge_of(compiler, tmp_path / "b", verdict), heads=HEADS, count=3)[POINT]
    assert found.tiles == (order[1], order[3], order[4])
    assert found.dropped == {order[0]: "spills as last", order[2]: "spills as only"}


def rank_all(compiler: list[Job], path: Path) -> tuple[Tile, ...]:
    return rank_candidates([POINT], 90, judge_of(compiler, path / "a", fine), heads=HEADS, count=999)[POINT].tiles


def test_the_rank_is_the_bound_or_any_function(compiler: list[Job], tmp_path: Path) -> None:
    tiles = rank_all(compiler, tmp_path)
    bounds = [fine(job_of(POINT, tile, 90, HEADS)).bound for tile in tiles]
    assert bounds == sorted(bounds, reverse=True)  # type: ignore[type-var]

    def small_first(tile: Tile, point: Point) -> float:
        assert point == POINT
        return -tile.block_q * tile.block_k

    judge = judge_of(compiler, tmp_path / "a", fine)
    found = rank_candidates([POINT], 90, judge, heads=HEADS, count=2, rank=small_first)[POINT]
    least = min(tile.block_q * tile.block_k for tile in tiles)
    assert len(found.tiles) == 2 and all(tile.block_q * tile.block_k == least for tile in found.tiles)


def test_the_best_are_kept_in_every_order_too(compiler: list[Job], tmp_path: Path) -> None:
    """The best two without options; in all roles, and whatever does not compile is dropped alone."""

    def verdict(job: Job) -> Verdict:
        options = options_of(job.tile)
        if options.get("persistent") and job.role == "last":
            return Verdict(("spills",))
        return Verdict((), 1e6 * (options.get("forward_kernel") == "hopper") + (fine(job).bound or 0.0))

    judge = judge_of(compiler, tmp_path / "journal", verdict)
    first = rank_candidates([POINT], 90, judge, heads=HEADS, count=7)[POINT]
    found = rank_candidates([POINT], 90, judge, heads=HEADS, count=7, orders_of=2)[POINT]
    assert [bool(options_of(tile)) for tile in first.tiles] == [True] * 5 + [False] * 2
    assert found.tiles[:7] == first.tiles
    every = [other for tile in first.tiles[5:] for other in dealt(tile, POINT, 90)]
    kept = [tile for tile in every if not options_of(tile).get("persistent")]
    assert {*found.tiles[7:]} == {*kept} and len(kept) == 2 * 3 and len(every) == 2 * 11
    assert {*found.dropped} == {*first.dropped, *every} - {*kept}
    assert all(found.verdicts[tile].bound == fine(job_of(POINT, tile, 90, HEADS)).bound for tile in kept)


@pytest.mark.parametrize(
    ("kernel", "group", "options", "counts"),
    [
        ("forward", 4, {}, ("16n", "n", "1")),
        ("forward", 4, {"pack_gqa": True}, ("n", "1", "n")),
        ("dq", 16, {"pack_gqa": True}, ("n", "1", "16n")),
        ("dkdv", 4, {}, ("n", "n", "1")),
        ("dkdv", 4, {"dkdv_splits": 2}, ("16n", "n", "n")),
        ("dkdv", 4, {"dkdv_splits": 4}, ("16n", "1", "n")),
        ("single_pass", 32, {}, ("1", "16n", "1")),
    ],
)
def test_a_job_has_the_heads_of_its_launch(
    kernel: str, group: int, options: dict[str, Any], counts: tuple[str, ...]
) -> None:
    point = POINT._replace(kernel=kernel, group=group)
    job = job_of(point, with_options(TILE, options), 90, HEADS)
    assert (job.heads, job.group, job.parts) == counts


@pytest.mark.parametrize(
    ("kernel", "options", "sides", "order"),
    [
        ("forward", {}, None, ("16n", "16n", "16n")),  # which says nothing
        ("forward", {"order": "longest"}, None, ("n", "16n", "16n")),  # K and V of 6 of 8 groups fit half of L2
        ("forward", {"order": "longest"}, (1008, 336), ("16n", "16n", "16n")),  # and of all of them
        ("forward", {"order": "longest", "pack_gqa": True}, None, ("n", "n", "16n")),  # 6 of 8 heads
        ("dkdv", {"order": "longest"}, (1008, 10**6), ("1", "n", "16n")),
        ("dq", {"persistent": True}, None, ("16n", "16n", "16n")),
        ("dkdv", {"persistent": True}, (1000, 500), ("16n", "16n", "16n")),  # 8 tiles of 8 heads
        ("dkdv", {"persistent": True}, (300, 500), ("16n", "16n", "n")),  # 3
    ],
)
def test_a_job_has_the_order_of_its_launch(
    kernel: str, options: dict[str, Any], sides: tuple[int, int] | None, order: tuple[str, ...]
) -> None:
    point = POINT._replace(kernel=kernel)
    assert job_of(point, with_options(TILE, options), 90, HEADS, "middle", sides).order == order


def test_nothing_that_passes_is_an_empty_answer(compiler: list[Job], tmp_path: Path) -> None:
    judge = judge_of(compiler, tmp_path / "journal", lambda job: Verdict(("spills",)))
    found = rank_candidates([POINT], 90, judge, heads=HEADS, count=4)[POINT]
    assert found.tiles == () and {*found.dropped.values()} == {"spills"}


# the compiler itself, in worker processes

TILE = Tile(128, 128, 8, 2)
JOB = job_of(POINT, TILE, 90, HEADS)


INSPECT = """
import json, sys
from ringattn.autotune.inspect.command import inspect_variant, tile_of
from ringattn.autotune.inspect.names import select
from dataclasses import replace
(variant,) = (one for one in select(sys.argv[1]) if one.grouped and one.full)
row = inspect_variant(replace(variant, tile=tile_of(sys.argv[2])))
print(json.dumps(row))
"""


def inspected(job: Job) -> dict[str, Any]:
    """What ``ringattn inspect --json`` tells."""
    tile = "x".join(map(str, vars(job.tile).values()))
    name = f"{job.arch}:{job.dtype}:{job.head_dim}:{job.role}:{job.kernel}"
    told = subprocess.run(
        [sys.executable, "-c", INSPECT, name, tile], capture_output=True, text=True, check=True, env=compiling()
    )
    row: dict[str, Any] = json.loads(told.stdout)
    return row


def compiling() -> dict[str, str]:
    """The environment of a process in which kernels are compiled, not interpreted."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


COMPILED = pytest.mark.compiles(
    "kernels/attention.py", "autotune/inspect", "autotune/tune", "autotune", "tests/support/launch_keys.py"
)


@COMPILED
def test_candidates_are_compiled_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones: a clean tile has a bound; one that spills is dropped, and one that does not fit."""
    good, spills, large = Tile(64, 64, 4, 2), Tile(64, 128, 4, 1), Tile(128, 128, 8, 4)
    point = POINT._replace(head_dim=64, head_dim_v=64)
    jobs = {
        "good": job_of(point, good, 90, HEADS),
        "spills": job_of(point._replace(kernel="dkdv"), spills, 90, HEADS),
        "large": job_of(POINT, large, 86, HEADS),
        "hopper": job_of(POINT, with_options(TILE, {"forward_kernel": "hopper"}), 90, HEADS),
    }
    journal = Journal(tmp_path / "journal", "")
    found = Judge(compile_job, journal, workers=2)(jobs.values())
    assert found[jobs["good"]].problems == found[jobs["hopper"]].problems == ()
    assert (found[jobs["hopper"]].bound or 0) > (found[jobs["good"]].bound or 0)
    row = inspected(jobs["good"])
    limited = f"percent of the tensor cores' peak, limited by {row['limiter']}"
    assert (round(row["bound"], 2), limited) == (found[jobs["good"]].bound, found[jobs["good"]].bound_by)
    assert any("local-memory" in problem or "shared" in problem for problem in found[jobs["spills"]].problems)
    assert "bytes of shared memory, the chip has 101376" in found[jobs["large"]].problems[0]
    assert all(found[jobs[name]].folder and in_cache(found[jobs[name]]) for name in ("good", "hopper"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "emptied"))
    assert [name for name, job in jobs.items() if in_cache(found[job])] == ["spills", "large"]


@pytest.mark.compiles("90:fp32:64:middle:forward")
def test_products_of_fp32_are_three_of_half_the_rate() -> None:
    """`tf32x3`: what the bound of an fp32 kernel counts as time of the tensor cores."""
    tile = Tile(64, 32, 4, 2)
    row = inspected(job_of(POINT._replace(dtype="fp32", head_dim=64, head_dim_v=64), tile, 90, HEADS))
    assert row["clocks"]["tensor cores"] * CHIPS[90].products == 3 * 2 * tile.block_q * tile.block_k * (64 + 64)


def test_the_users_interruption_keeps_what_was_compiled(tmp_path: Path) -> None:
    """Ctrl-C at the command, as a terminal sends it: to the whole process group."""
    code = f"""
    from ringattn.bench.cli import app
    app(["tune", "--seqlen", "64", "--heads", "1", "--head-dim", "16", "--full", "--compile-only", "--workers", "1",
         "--save-dir", {str(tmp_path)!r}])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stderr=subprocess.PIPE, text=True, env=compiling(), start_new_session=True,
    )  # fmt: skip
    ends = time.monotonic() + 120
    journal: list[Path] = []
    while not journal and time.monotonic() < ends and process.poll() is None:
        journal = [path for path in tmp_path.glob("compiled_*.jsonl") if path.stat().st_size]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "what is known is kept" in told
    assert len(journal[0].read_text().splitlines()) >= 1
    assert [*tmp_path.glob("*.json")] == []


@COMPILED
def test_a_launch_finds_in_tritons_cache_what_was_compiled_before() -> None:
    """By the key: all that is timed and all that is checked, of every kernel in every order."""
    command = [sys.executable, "-m", "tests.support.launch_keys"]
    done = subprocess.run(command, env=compiling(), capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("found: ")] == []
    for kernel, feature in product(("forward", "dq", "dkdv"), ("softcap", "alibi", "dropout")):
        assert f"found: {kernel} with {feature}" in lines, "what `inspect` compiles of modified scores"
    for part, launches in (("timed", 1), ("checked", 3)):  # a first, a middle and a last hop
        names = [name for line in lines if (name := line.removeprefix(f"found: {part} {launches}, ")) != line]
        for kernel, options in (
            ("forward", "forward_kernel=hopper"), ("forward", "order=longest"), ("forward", "pack_gqa=True"),
            ("dq", "order=longest persistent=True sm_margin=8"), ("dkdv", "dkdv_epilogue=descriptors"),
            ("dkdv", "dkdv_splits=2"), ("single_pass", ""), ("single_pass_deterministic", ""),
        ):  # fmt: skip
            for mask in ("full", "bounded"):
                assert any(name.startswith(kernel) and mask in name and options in name for name in names)
