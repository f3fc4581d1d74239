"""Tests of compile jobs and their worker processes, on stand-ins for processes and for the compiler."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from ringattn.autotune import candidates
from ringattn.autotune import pool as pool_module
from ringattn.autotune.candidates import CompileResult, compile_job, rank_candidates
from ringattn.autotune.pool import JobFailure, Pool
from ringattn.autotune.tile_space import tile_candidates, tile_schedules, tile_text

from ..support.tune_cases import POINT, number_job


class Link:
    """Stand-in for the process of a worker and for the connection to it."""

    exitcode = 7

    def __init__(self, *results: Any, answers: bool = True) -> None:
        self.results, self.answers, self.log = [*results], answers, list[Any]()

    def send(self, job: Any) -> None:
        self.log.append(("send", job))

    def poll(self, seconds: float) -> bool:
        self.log.append(("poll", seconds))
        return self.answers

    def recv(self) -> Any:
        if not self.results:
            raise EOFError
        return self.results.pop(0)

    def kill(self) -> None:
        self.log.append("kill")

    def join(self) -> None:
        self.log.append("join")


@pytest.mark.parametrize(("link", "seconds", "result", "ends"), [
    (Link(5), 99.0, 5, False), (Link(), 99.0, JobFailure("its process died with exit code 7"), True),
    (Link(answers=False), 99.0, JobFailure("it did not end in time and was killed"), True),
    (Link(answers=False), 1.0, None, True),  # the budget ended, so the job has not failed
])  # fmt: skip
def test_a_worker_that_fails_is_replaced(link: Link, seconds: float, result: Any, ends: bool) -> None:
    with Pool(number_job, 1, seconds=20.0) as pool:
        pool._own.worker = (link, link)
        assert pool._result("a", lambda: seconds) == result
        assert link.log[:2] == [("send", "a"), ("poll", min(seconds, 20.0))]
        assert (pool._own.worker is None) is ends and ("kill" in link.log) is (ends and not link.answers)
        for left in (0.0, 99.0):
            assert pool._result("b", partial(float, left)) is None and ("send", "b") not in link.log
            pool._closed = True


def test_a_worker_ignores_the_interrupt_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, link = list[Any](), Link(1, 6)
    monkeypatch.setattr(signal, "signal", lambda *how: handlers.append(how))
    pool_module._serve(link, number_job)  # type: ignore[arg-type]
    assert handlers == [(signal.SIGINT, signal.SIG_IGN)]
    assert link.log == [("send", JobFailure("ValueError: one is")), ("send", 12)]


def test_a_compiled_job_has_the_bound_of_its_main_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = list[str]()
    monkeypatch.setattr(candidates, "compile_variant", lambda job: (job, problems))
    best = SimpleNamespace(percent=61.2345, ceiling=99.0, limiter="issue")
    monkeypatch.setattr(candidates, "main_bound", lambda compiled: best)
    job: Any = "job"
    assert compile_job(job) == CompileResult((), 61.23, "percent of the tensor cores' peak, limited by issue")
    problems += ["it spills", "it waits"]
    assert compile_job(job) == CompileResult(("it spills", "it waits"))


def test_the_digest_covers_kernels_autotune_and_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "ROOT", tmp_path)
    digests = [candidates.compile_digest()]
    for name in ("kernels/a.py", "kernels/device/b.py", "autotune/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for text in ("one", "two"):
            (tmp_path / name).write_text(text)
            digests.append(candidates.compile_digest())
    (tmp_path / "bench.py").write_text("three")
    assert candidates.compile_digest() == digests[-1] and len({*digests}) == 7
    monkeypatch.setattr(triton, "__version__", "0.0")
    assert candidates.compile_digest() not in digests


def test_of_equal_bounds_the_deeper_pipeline_is_better() -> None:
    def compiler(jobs: Any) -> Mapping[Any, CompileResult]:
        return {job: CompileResult((), 5.0) for job in jobs}

    tiles = rank_candidates(POINT, 90, compiler, tile_candidates(POINT, 90)[-24:], heads=32, count=99).tiles
    with_schedules = rank_candidates(
        POINT, 90, compiler, tile_candidates(POINT, 90)[-24:], heads=32, count=3, scheduled_tiles=1
    ).tiles
    assert with_schedules[:3] == tiles[:3] and [*with_schedules[3:]] == sorted(
        tile_schedules(tiles[0], POINT, 90), key=tile_text
    )
    assert [*tiles] == sorted(tiles, key=lambda tile: (-tile.num_stages, tile_text(tile))) and len(tiles) == 24
