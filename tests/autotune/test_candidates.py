"""Tests of compiling candidates: worker processes, the journal of results, and the ranking."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from ringattn.autotune import candidates
from ringattn.autotune.candidates import (
    Compiler,
    CompileResult,
    RankedCandidates,
    compile_job,
    compile_jobs,
    rank_candidates,
    ranking_job,
)
from ringattn.autotune.compile import KernelVariant
from ringattn.autotune.pool import JobFailure, Pool
from ringattn.autotune.store import Journal
from ringattn.autotune.tile_space import tile_candidates, tile_schedules
from ringattn.kernels import Tile
from ringattn.kernels.tables import TuningPoint, attach_options, tuned_options

from ..support.tune_cases import POINT, InlinePool, compile_fine, number_job

HEADS = 32
TILE = Tile(128, 128, 8, 2)


@pytest.mark.nightly
def test_jobs_run_until_the_budget_ends_or_the_user_interrupts() -> None:
    results: dict[int, Any] = {}

    def interrupted(number: int, result: int) -> None:
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Pool(number_job, 2) as pool:
        pool.run(range(5, 14), results.__setitem__)
        assert results == {number: 2 * number for number in range(5, 14)}
        begun = count()
        pool.run(range(14, 99), results.__setitem__, lambda: 60.0 * (next(begun) < 12))
        assert len(results) == 9 + 12
        pool.run([3], results.__setitem__, lambda: 1.0)  # hangs
        assert 3 not in results, "a job ended by the budget has not failed"
        pool.run([5, 6, 7], interrupted)
    assert not multiprocessing.active_children(), "workers survive an interruption"


@pytest.mark.nightly
def test_a_crash_or_hang_fails_only_its_own_job() -> None:
    results: dict[int, Any] = {}
    with Pool(number_job, 2, seconds=20.0) as pool:
        pool.run([0, 1, 2, 3, 4], results.__setitem__)
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert results == {
        0: "off",  # workers compile, so the interpreter is off
        1: JobFailure("ValueError: one is"),
        2: JobFailure("its process died with exit code 7"),
        3: JobFailure("it did not end in time and was killed"),
        4: "off",
    }


@pytest.mark.parametrize("closed", [False, True])
def test_a_worker_that_starts_while_the_pool_closes_is_killed(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, process = Mock(), Mock(), Mock()
    started, environments = list[Any](), list[Any]()

    def create(**arguments: Any) -> Mock:
        started.append(arguments)
        return process

    context = Mock(Pipe=lambda: (ours, theirs), Process=create)
    process.start.side_effect = lambda: environments.append(os.environ.get("TRITON_INTERPRET"))
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context if method == "spawn" else None)
    with Pool(number_job, 1) as pool:
        pool._closed = closed
        assert pool._start() == pool._own.worker == (process, ours)
        assert process.mock_calls == [call.start(), *([call.kill()] if closed else [])]
    assert process.mock_calls[-2:] == [call.kill(), call.join()] and theirs.mock_calls == [call.close()]
    assert [(*made["args"][1:], made["daemon"]) for made in started] == [(number_job, True)]
    assert environments == [None] and os.environ["TRITON_INTERPRET"] == "1"


def compiler_of(pool: InlinePool, path: Path, **how: Any) -> Compiler:
    return partial(compile_jobs, journal=Journal(path, ""), pool=pool, **how)  # type: ignore[arg-type]


def rank(
    work: Callable[[KernelVariant], CompileResult], path: Path, count: int, schedules_of: int = 0
) -> RankedCandidates:
    compiler = compiler_of(InlinePool(work), path)
    return rank_candidates(
        POINT, 90, compiler, tile_candidates(POINT, 90), heads=HEADS, count=count, scheduled_tiles=schedules_of
    )  # fmt: skip


def jobs_of(point: TuningPoint) -> list[KernelVariant]:
    return [ranking_job(point, tile, 90, HEADS) for tile in tile_candidates(point, 90)]


def test_compiled_results_are_reused(tmp_path: Path) -> None:
    jobs, pool = jobs_of(POINT), InlinePool()
    batches: list[int | None] = []
    first = compiler_of(pool, tmp_path / "journal", progress=batches.append)(jobs * 2)
    assert pool.seen == jobs
    assert batches == [len(jobs), *[None] * len(jobs)]
    again = compiler_of(pool, tmp_path / "journal")
    second = again([*jobs, ranking_job(POINT, jobs[0].tile, 80, HEADS)])
    assert len(pool.seen) == len(jobs) + 1
    assert {job: second[job] for job in jobs} == first
    # Lengths and heads share binaries, because Triton only distinguishes multiples of 16.
    again([*jobs_of(POINT._replace(length=32768)), *jobs_of(POINT._replace(group=8))])
    assert len(pool.seen) == len(jobs) + 1
    again(jobs_of(POINT._replace(group=16)))
    assert len(pool.seen) == 2 * len(jobs) + 1


def test_failed_candidates_are_dropped_with_the_reason(tmp_path: Path) -> None:
    def work(job: KernelVariant) -> CompileResult:
        if job.tile.num_stages == 4:
            raise RuntimeError("PassManager::run failed")
        return CompileResult(("serialised wgmma in a loop",)) if job.tile.num_warps == 8 else compile_fine(job)

    tiles, ranked = tile_candidates(POINT, 90), rank(work, tmp_path / "journal", 99)
    assert {*ranked.tiles} == {tile for tile in tiles if tile.num_stages != 4 and tile.num_warps != 8}
    assert {*ranked.dropped} | {*ranked.tiles} == {*tiles}
    for tile, reason in ranked.dropped.items():
        assert reason == ("PassManager::run failed" if tile.num_stages == 4 else "serialised wgmma in a loop")
    # A tile that the kernel's entry refuses is dropped with the entry's message, and no worker runs.
    job, pool = ranking_job(POINT, large := Tile(128, 128, 8, 4), 86, HEADS), InlinePool()
    (refused,) = compiler_of(pool, tmp_path / "other")([job]).values()
    assert not pool.seen and f"config.forward is {large}, which needs at least" in refused.problems[0]


def test_a_tile_compiles_in_every_role_or_is_dropped(tmp_path: Path) -> None:
    order = rank(compile_fine, tmp_path / "a", 999).tiles
    bounds = [compile_fine(ranking_job(POINT, tile, 90, HEADS)).bound or 0 for tile in order]
    assert bounds == sorted(bounds, reverse=True)
    bad = {order[0]: "last", order[2]: "only", order[3]: "first"}

    def work(job: KernelVariant) -> CompileResult:
        return CompileResult((f"spills as {job.role}",)) if bad.get(job.tile) == job.role else compile_fine(job)

    ranked = rank(work, tmp_path / "b", 3)
    assert ranked.tiles == (order[1], order[4], order[5])
    assert ranked.dropped == {tile: f"spills as {role}" for tile, role in bad.items()}


def test_every_schedule_of_the_best_tiles_is_ranked(tmp_path: Path) -> None:
    # The ranking adds every schedule of the best two tiles without options. A schedule must compile in every role; one
    # that fails is dropped alone.

    def work(job: KernelVariant) -> CompileResult:
        options = dict(job.options)
        if options.get("persistent") and job.role == "last":
            return CompileResult(("spills",))
        return CompileResult((), 1e6 * (options.get("forward_kernel") == "hopper") + (compile_fine(job).bound or 0.0))

    first, ranked = (rank(work, tmp_path / "journal", 7, schedules_of) for schedules_of in (0, 2))
    assert [bool(tuned_options(tile)) for tile in first.tiles] == [True] * 5 + [False] * 2
    assert ranked.tiles[:7] == first.tiles
    schedules_of_best = [other for tile in first.tiles[5:] for other in tile_schedules(tile, POINT, 90)]
    compiling = [tile for tile in schedules_of_best if not tuned_options(tile).get("persistent")]
    assert {*ranked.tiles[7:]} == {*compiling} and len(compiling) == 2 * 4 and len(schedules_of_best) == 2 * 12
    assert {*ranked.dropped} == {*first.dropped, *schedules_of_best} - {*compiling}


@pytest.mark.compiles("kernels/attention.py", "autotune/candidates.py", "autotune/gate.py", "autotune/pool.py")
def test_candidates_are_compiled(tmp_path: Path) -> None:
    point = POINT._replace(head_dim=64, head_dim_v=64)
    jobs = {
        "good": ranking_job(point, Tile(64, 64, 4, 2), 90, HEADS),
        "spills": ranking_job(point._replace(kernel="dkdv"), Tile(64, 128, 4, 1), 90, HEADS),
        "hopper": ranking_job(POINT, attach_options(TILE, {"forward_kernel": "hopper"}), 90, HEADS),
    }
    with Pool(compile_job, 2) as pool:
        results = compile_jobs(jobs.values(), Journal(tmp_path / "journal", ""), pool)
    assert results[jobs["good"]].problems == results[jobs["hopper"]].problems == ()
    assert (results[jobs["hopper"]].bound or 0) > (results[jobs["good"]].bound or 0) > 40
    assert results[jobs["good"]].bound_by.startswith(f"{candidates.BOUND_UNIT}, limited by ")
    assert any("local-memory" in problem or "shared" in problem for problem in results[jobs["spills"]].problems)
