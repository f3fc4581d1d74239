"""Compiling candidates: workers that may crash and hang, verdicts that are kept, and the order they give."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringattn.autotune import candidates
from ringattn.autotune.candidates import (
    OTHER_ROLES,
    Compiler,
    OutOfBudget,
    Ranked,
    Verdict,
    compile_job,
    in_cache,
    job_of,
    rank_candidates,
)
from ringattn.autotune.compile import Variant
from ringattn.autotune.pool import Failure, Pool
from ringattn.autotune.space import schedules, space
from ringattn.autotune.store import Journal
from ringattn.kernels import Tile
from ringattn.kernels.tables import Point, options_of, with_options

from ..support.tune_cases import POINT, by_number, twice, without_processes

HEADS = 32
TILE = Tile(128, 128, 8, 2)


# worker processes


def test_every_job_has_its_result_until_the_budget_is_spent_or_the_user_interrupts() -> None:
    found: dict[int, int | Failure] = {}

    def interrupted(number: int, result: int | Failure) -> None:
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Pool(twice, 2) as pool:
        pool.run(range(9), found.__setitem__)
        assert found == {number: 2 * number for number in range(9)}
        pool.run(range(9, 20), found.__setitem__, lambda: 12.0 - len(found))
        assert 12 <= len(found) <= 13
        pool.run([0, 1, 2], interrupted)
    assert not multiprocessing.active_children(), "workers outlive an interruption"


@pytest.mark.nightly
def test_a_crash_and_a_hang_cost_their_jobs_alone() -> None:
    found: dict[int, str | Failure] = {}
    with Pool(by_number, 2, seconds=20.0) as pool:
        pool.run([0, 1, 2, 3, 4], found.__setitem__)
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert found == {
        0: "off",  # a compiler has no interpreter
        1: Failure("ValueError: one is"),
        2: Failure("its process died with exit code 7"),
        3: Failure("it did not end in time, and was ended"),
        4: "off",
    }


# verdicts


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """What was compiled, in this process."""
    without_processes(monkeypatch)
    return []


def compiler_of(seen: list[Variant], path: Path, verdict: Callable[[Variant], Verdict], **how: Any) -> Compiler:
    def compiled(job: Variant) -> Verdict:
        seen.append(job)
        return verdict(job)

    return Compiler(Journal(path, ""), 1, work=compiled, **how)


def fine(job: Variant) -> Verdict:
    """The larger the tile, the better."""
    bound = job.tile.block_q * job.tile.block_k / 128 + job.tile.num_warps + job.tile.num_stages
    return Verdict((), bound, "percent")


def rank(compiler: Compiler, count: int, point: Point = POINT, **how: Any) -> Ranked:
    return rank_candidates(point, 90, compiler, heads=HEADS, count=count, **how)


def test_what_was_compiled_once_is_not_compiled_again(seen: list[Variant], tmp_path: Path) -> None:
    jobs = [job_of(POINT, tile, 90, HEADS) for tile in space(POINT, 90)]
    batches: list[int | None] = []
    first = compiler_of(seen, tmp_path / "journal", fine, done=batches.append)(jobs * 2)
    assert seen == jobs
    assert batches == [len(jobs), *[None] * len(jobs)]
    second = compiler_of(seen, tmp_path / "journal", fine)([*jobs, job_of(POINT, jobs[0].tile, 80, HEADS)])
    assert len(seen) == len(jobs) + 1
    assert {job: second[job] for job in jobs} == first


def test_a_budget_leaves_jobs_for_the_next_run(seen: list[Variant], tmp_path: Path) -> None:
    jobs = [job_of(POINT, tile, 90, HEADS) for tile in space(POINT, 90)]
    compiler = compiler_of(seen, tmp_path / "journal", fine, left=lambda: 3.0 - len(seen))
    with pytest.raises(OutOfBudget) as spent:
        compiler(jobs)
    assert spent.value.args == (len(jobs) - 3,)
    compiler_of(seen, tmp_path / "journal", fine)(jobs)
    assert seen == jobs


def test_what_triton_no_longer_has_is_compiled_again(seen: list[Variant], tmp_path: Path) -> None:
    """Once, whatever the cache does next, and where it is launched; what failed had nothing to keep."""

    def verdict(job: Variant) -> Verdict:
        return Verdict(("spills",)) if job.tile.num_stages == 4 else Verdict((), 1.0, "percent", str(job.tile))

    def compiler(gone: set[str]) -> Compiler:
        return compiler_of(seen, tmp_path / "journal", verdict, holds=lambda verdict: verdict.folder not in gone)

    jobs = [job_of(POINT, tile, 90, HEADS) for tile in space(POINT, 90)]
    compiler(set())(jobs)
    seen.clear()
    emptied = [job for job in jobs if job.tile.num_stages != 4]
    again = compiler({str(job.tile) for job in jobs})
    assert again(jobs) == {job: verdict(job) for job in jobs}
    assert not seen  # a rank takes what the journal knows
    assert again(jobs, to_launch=True) == {job: verdict(job) for job in jobs}
    assert seen == emptied and len(emptied) < len(jobs)
    again(jobs, to_launch=True)
    assert seen == emptied


def test_lengths_and_heads_share_their_binaries(seen: list[Variant], tmp_path: Path) -> None:
    compiler = compiler_of(seen, tmp_path / "journal", fine)
    found = [rank(compiler, 1, point) for point in (POINT, POINT._replace(length=32768), POINT._replace(group=8))]
    assert len({one.tiles for one in found}) == 1
    assert len(seen) == len(space(POINT, 90)) + len(OTHER_ROLES)
    rank(compiler, 1, POINT._replace(group=16))  # which 16 divides
    assert len(seen) == 2 * (len(space(POINT, 90)) + len(OTHER_ROLES))


def test_what_fails_is_dropped_with_its_reason(seen: list[Variant], tmp_path: Path) -> None:
    def verdict(job: Variant) -> Verdict:
        if job.tile.num_stages == 4:
            raise RuntimeError("PassManager::run failed")
        return Verdict(("serialised wgmma in a loop",)) if job.tile.num_warps == 8 else fine(job)

    tiles = space(POINT, 90)
    found = rank(compiler_of(seen, tmp_path / "journal", verdict), 99)
    assert {*found.tiles} == {tile for tile in tiles if tile.num_stages != 4 and tile.num_warps != 8}
    assert {*found.dropped} | {*found.tiles} == {*tiles}
    for tile, reason in found.dropped.items():
        assert reason == ("PassManager::run failed" if tile.num_stages == 4 else "serialised wgmma in a loop")
    nothing = rank(compiler_of(seen, tmp_path / "other", lambda job: Verdict(("spills",))), 4)
    assert nothing.tiles == () and {*nothing.dropped.values()} == {"spills"}


def test_a_tile_the_entry_refuses_is_dropped_by_its_words(seen: list[Variant], tmp_path: Path) -> None:
    job = job_of(POINT, large := Tile(128, 128, 8, 4), 86, HEADS)
    (found,) = compiler_of(seen, tmp_path / "journal", fine)([job]).values()
    assert not seen and f"config.forward is {large}: it takes at least" in found.problems[0]


def test_a_tile_compiles_in_every_role_or_is_dropped(seen: list[Variant], tmp_path: Path) -> None:
    order = rank(compiler_of(seen, tmp_path / "a", fine), 999).tiles
    bounds = [fine(job_of(POINT, tile, 90, HEADS)).bound or math.inf for tile in order]
    assert bounds == sorted(bounds, reverse=True)
    bad = {order[0]: "last", order[2]: "only"}

    def verdict(job: Variant) -> Verdict:
        return Verdict((f"spills as {job.role}",)) if bad.get(job.tile) == job.role else fine(job)

    found = rank(compiler_of(seen, tmp_path / "b", verdict), 3)
    assert found.tiles == (order[1], order[3], order[4])
    assert found.dropped == {order[0]: "spills as last", order[2]: "spills as only"}


def test_the_best_are_kept_in_every_schedule_too(seen: list[Variant], tmp_path: Path) -> None:
    """The best two without options; in all roles, and whatever does not compile is dropped alone."""

    def verdict(job: Variant) -> Verdict:
        options = dict(job.options)
        if options.get("persistent") and job.role == "last":
            return Verdict(("spills",))
        return Verdict((), 1e6 * (options.get("forward_kernel") == "hopper") + (fine(job).bound or 0.0))

    compiler = compiler_of(seen, tmp_path / "journal", verdict)
    first = rank(compiler, 7)
    found = rank(compiler, 7, schedules_of=2)
    assert [bool(options_of(tile)) for tile in first.tiles] == [True] * 5 + [False] * 2
    assert found.tiles[:7] == first.tiles
    every = [other for tile in first.tiles[5:] for other in schedules(tile, POINT, 90)]
    kept = [tile for tile in every if not options_of(tile).get("persistent")]
    assert {*found.tiles[7:]} == {*kept} and len(kept) == 2 * 3 and len(every) == 2 * 11
    assert {*found.dropped} == {*first.dropped, *every} - {*kept}


# the compiler itself, in worker processes


@pytest.mark.compiles("kernels/attention.py", "autotune/candidates.py", "autotune/gate.py", "autotune/pool.py")
def test_candidates_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones: a clean tile has a bound, and one that spills is dropped."""
    point = POINT._replace(head_dim=64, head_dim_v=64)
    jobs = {
        "good": job_of(point, Tile(64, 64, 4, 2), 90, HEADS),
        "spills": job_of(point._replace(kernel="dkdv"), Tile(64, 128, 4, 1), 90, HEADS),
        "hopper": job_of(POINT, with_options(TILE, {"forward_kernel": "hopper"}), 90, HEADS),
    }
    with Compiler(Journal(tmp_path / "journal", ""), 2, work=compile_job) as compiler:
        found = compiler(jobs.values())
    assert found[jobs["good"]].problems == found[jobs["hopper"]].problems == ()
    assert (found[jobs["hopper"]].bound or 0) > (found[jobs["good"]].bound or 0) > 40
    assert found[jobs["good"]].bound_by.startswith(f"{candidates.UNIT}, limited by ")
    assert any("local-memory" in problem or "shared" in problem for problem in found[jobs["spills"]].problems)
    assert all(found[jobs[name]].folder and in_cache(found[jobs[name]]) for name in ("good", "hopper"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "emptied"))
    assert [name for name, job in jobs.items() if in_cache(found[job])] == ["spills"]
