"""Compilation of a point's candidates, and their ranking by throughput bound."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import triton

from ..kernels import Tile
from ..kernels.tables import TuningPoint, tuned_options
from .compile import LAUNCH_OPTIONS, CallSizes, KernelVariant
from .gate import compile_variant
from .loop_bound import main_bound
from .pool import JobFailure, Pool
from .store import Journal
from .tile_space import tile_schedules, tile_text

ROOT = Path(__file__).resolve().parents[1]
BOUND_UNIT = "percent of the tensor cores' peak"

RANKING_ROLE = "middle"
OTHER_ROLES = ("only", "first", "last")
"""Roles of a launch in the ring. Candidates are ranked in the most frequent role, and must compile in all roles."""

Sides = tuple[int, int]
"""Tokens of the side that is split over programs, and of the side that each program loops over."""


def ranking_job(
    point: TuningPoint, tile: Tile, arch: int, heads: int, role: str = RANKING_ROLE, side_lengths: Sides | None = None
) -> KernelVariant:
    """Return the variant that launches ``tile`` at ``point``, on one sequence with ``heads`` query heads.

    ``side_lengths`` defaults to the point's length on both sides.
    """
    options = tuple((name, value) for name, value in tuned_options(tile).items() if name not in LAUNCH_OPTIONS)
    split, looped = side_lengths or (point.length, point.length)
    queries, keys = (split, looped) if point.kernel in ("forward", "dq") else (looped, split)
    sizes = CallSizes(1, queries, keys, heads, heads // point.group)
    return KernelVariant(
        point.kernel, arch, point.dtype, point.head_dim, point.head_dim_v, tile, role, point.mask == "full",
        point.group > 1, options=options, sizes=sizes,
    )  # fmt: skip


@dataclass(frozen=True)
class CompileResult:
    """Result of one compile job."""

    problems: tuple[str, ...]
    """Reasons to drop the candidate, such as spills or serialised wgmma; empty if the candidate passes the gate."""
    bound: float | None = None
    """Throughput bound of the main loop; larger is better. Only bounds of one point are comparable."""
    bound_by: str = ""
    """Unit of ``bound``, and the hardware unit that limits it."""


def compile_job(job: KernelVariant) -> CompileResult:
    """Compile a job and compute its bound; runs in a worker process without Triton's interpreter."""
    compiled, problems = compile_variant(job)
    if problems:
        return CompileResult(tuple(problems))
    best = main_bound(compiled)
    assert best is not None, "the gate requires a loop with matrix products"
    return CompileResult((), round(best.percent, 2), f"{BOUND_UNIT}, limited by {best.limiter}")


def compile_digest() -> str:
    """Return a digest of everything that a compile result depends on: kernels, autotune and Triton's version."""
    sources = hashlib.sha256(triton.__version__.encode())
    for path in sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "autotune").glob("*.py")]):
        sources.update(path.read_bytes())
    return sources.hexdigest()[:16]


Compiler = Callable[[Iterable[KernelVariant]], Mapping[KernelVariant, CompileResult]]
"""Function that compiles jobs and returns the result of each."""


class BudgetSpentError(Exception):
    """Error when the budget ends during compilation; ``args[0]`` is the number of jobs that are left."""


def compile_jobs(
    jobs: Iterable[KernelVariant],
    journal: Journal,
    pool: Pool,
    progress: Callable[[int | None], None] = lambda batch: None,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> dict[KernelVariant, CompileResult]:
    """Compile jobs in worker processes, except those whose results are in the journal.

    Jobs with equal signatures are compiled once, and each new result is appended to the journal at once. ``pool`` runs
    :func:`compile_job`. ``progress`` is called with the number of new jobs, then with None after each of them.

    Raises:
        BudgetSpentError: ``seconds_left`` returned 0 before all jobs were compiled.
    """
    results: dict[str, CompileResult] = {}
    new: dict[str, KernelVariant] = {}
    keys: dict[KernelVariant, str] = {}
    for job in jobs:
        try:
            key = keys[job] = f"{job} | {hashlib.sha256(job.launch.signature.encode()).hexdigest()[:16]}"
        except ValueError as error:  # the host entry rejects the arguments
            key = keys[job] = str(job)
            results[key] = CompileResult((str(error),))
        if key in results or key in new:
            continue
        if (stored := journal.get(key, CompileResult)) is not None:
            results[key] = stored
        else:
            new[key] = job
    progress(len(new))

    def done(job: KernelVariant, result: CompileResult | JobFailure) -> None:
        key = keys[job]
        results[key] = CompileResult((result.reason,)) if isinstance(result, JobFailure) else result
        journal.put(key, asdict(results[key]))
        progress(None)

    pool.run([*new.values()], done, seconds_left)
    if missing := sum(key not in results for key in new):
        raise BudgetSpentError(missing)
    return {job: results[key] for job, key in keys.items()}


@dataclass(frozen=True)
class RankedCandidates:
    """Candidates of a point that passed the gate, best first, and the reasons why others were dropped."""

    tiles: tuple[Tile, ...] = ()
    dropped: Mapping[Tile, str] = field(default_factory=dict)
    results: Mapping[Tile, CompileResult] = field(default_factory=dict)
    """Results of all candidates that passed in the ranking role."""


def rank_candidates(
    point: TuningPoint,
    arch: int,
    compiler: Compiler,
    tiles: Sequence[Tile],
    *,
    heads: int,
    count: int,
    scheduled_tiles: int = 0,
) -> RankedCandidates:
    """Compile candidates of a point, and keep the ``count`` best by bound that compile in every role.

    For the ``scheduled_tiles`` best tiles without options, also keep every other tile schedule. ``compiler`` compiles
    the jobs, with ``heads`` query heads.
    """

    def sort_key(tile: Tile, result: CompileResult) -> tuple[float, int, str]:
        # of equal bounds prefer the deeper pipeline, then the name, so that the order is reproducible
        return -(result.bound or 0.0), -tile.num_stages, tile_text(tile)

    def rank_tiles(candidates: Sequence[Tile], count: int) -> RankedCandidates:
        jobs = {tile: ranking_job(point, tile, arch, heads) for tile in candidates}
        compiled = compiler(jobs.values())
        results = {tile: compiled[job] for tile, job in jobs.items()}
        dropped = {tile: result.problems[0] for tile, result in results.items() if result.problems}
        passed = {tile: result for tile, result in results.items() if not result.problems}
        best: list[Tile] = []
        queue = sorted(passed, key=lambda tile: sort_key(tile, passed[tile]))
        while batch := queue[: count - len(best)]:  # compile other roles only for as many tiles as needed
            del queue[: len(batch)]
            roles = {tile: [ranking_job(point, tile, arch, heads, role) for role in OTHER_ROLES] for tile in batch}
            compiled = compiler(job for jobs in roles.values() for job in jobs)
            for tile in batch:
                if failed := [compiled[job].problems[0] for job in roles[tile] if compiled[job].problems]:
                    dropped[tile] = failed[0]
                else:
                    best.append(tile)
        return RankedCandidates(tuple(best), dropped, passed)

    first = rank_tiles(tiles, count)
    bases = [tile for tile in first.tiles if not tuned_options(tile)][:scheduled_tiles]
    others = [other for tile in bases for other in tile_schedules(tile, point, arch)]
    more = rank_tiles(others, len(others))
    return RankedCandidates(
        first.tiles + more.tiles, {**first.dropped, **more.dropped}, {**first.results, **more.results}
    )
