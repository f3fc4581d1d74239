"""Which candidates of a point pass the gate, and in which order they deserve time on a GPU."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import triton

from ..kernels import Tile
from ..kernels.tables import Point, options_of
from .bound import main_bound
from .compile import OF_LAUNCHES, Sizes, Variant
from .gate import compile_variant
from .pool import Failure, Pool
from .space import schedules, tile_text
from .store import Journal

ROOT = Path(__file__).resolve().parents[1]
UNIT = "percent of the tensor cores' peak"

RANKING_ROLE = "middle"
OTHER_ROLES = ("only", "first", "last")
"""Where in a ring a launch stands. Most hops are in the middle; a tile is used in all, and has to compile in all."""

Sides = tuple[int, int]
"""Tokens of the side of a launch that is cut into programs, and of the side that they walk."""


def job_of(
    point: Point, tile: Tile, arch: int, heads: int, role: str = RANKING_ROLE, sides: Sides | None = None
) -> Variant:
    """The launch of one sequence with so many query heads; ``sides``: the point's length twice."""
    options = tuple((name, value) for name, value in options_of(tile).items() if name not in OF_LAUNCHES)
    cut, walked = sides or (point.length, point.length)
    queries, keys = (cut, walked) if point.kernel in ("forward", "dq") else (walked, cut)
    sizes = Sizes(1, queries, keys, heads, heads // point.group)
    return Variant(
        point.kernel, arch, point.dtype, point.head_dim, point.head_dim_v, tile, role, point.mask == "full",
        point.group > 1, options=options, sizes=sizes,
    )  # fmt: skip


@dataclass(frozen=True)
class CompileResult:
    """What became of a job."""

    problems: tuple[str, ...]
    """Why it is not launched: it does not compile or fit, spills, or waits for every wgmma; empty where it may be."""
    bound: float | None = None
    """How fast its loop can be at best, in any unit that compares candidates of one point: larger is better."""
    bound_by: str = ""
    """In which unit that is, and what of the chip sets it."""


def compile_job(job: Variant) -> CompileResult:
    """Compile a job and read what came out; runs in a worker process, which Triton's interpreter is off in."""
    compiled, problems = compile_variant(job)
    if problems:
        return CompileResult(tuple(problems))
    best = main_bound(compiled)
    assert best is not None, "the gate asks for a loop with matrix products"
    return CompileResult((), round(best.percent, 2), f"{UNIT}, limited by {best.limiter}")


def digest() -> str:
    """Of all that decides what becomes of a job: kernels, what compiles and reads them, Triton."""
    made = hashlib.sha256(triton.__version__.encode())
    for path in sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "autotune").glob("*.py")]):
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


Compiler = Callable[[Iterable[Variant]], Mapping[Variant, CompileResult]]
"""Says of jobs what becomes of them."""


class OutOfBudget(Exception):
    """The seconds for compiling are spent; the argument: jobs that were asked for and are not compiled."""


def compile_jobs(
    jobs: Iterable[Variant],
    journal: Journal,
    pool: Pool,
    progress: Callable[[int | None], None] = lambda batch: None,
    left: Callable[[], float] = lambda: math.inf,
) -> dict[Variant, CompileResult]:
    """Compile jobs in worker processes; what becomes of every one, which is remembered across interruptions.

    Args:
        journal: of earlier runs.
        pool: whose work is :func:`compile_job`.
        progress: called with the number of new jobs, and with None for each that is compiled.
        left: seconds that may still be spent.

    Raises:
        OutOfBudget: some are not compiled.
    """
    results: dict[str, CompileResult] = {}
    new: dict[str, Variant] = {}
    keys: dict[Variant, str] = {}
    for job in jobs:
        try:
            key = keys[job] = f"{job} | {hashlib.sha256(job.launch.signature.encode()).hexdigest()[:16]}"
        except ValueError as error:  # the entry refuses it
            key = keys[job] = str(job)
            results[key] = CompileResult((str(error),))
        if key in results or key in new:
            continue
        if (known := journal.get(key, CompileResult)) is not None:
            results[key] = known
        else:
            new[key] = job
    progress(len(new))

    def done(job: Variant, result: CompileResult | Failure) -> None:
        key = keys[job]
        results[key] = CompileResult((result.reason,)) if isinstance(result, Failure) else result
        journal.put(key, asdict(results[key]))
        progress(None)

    pool.run([*new.values()], done, left)
    if missing := sum(key not in results for key in new):
        raise OutOfBudget(missing)
    return {job: results[key] for job, key in keys.items()}


@dataclass(frozen=True)
class Ranked:
    """The candidates of a point that passed, the most promising first, and what the others failed at."""

    tiles: tuple[Tile, ...] = ()
    dropped: Mapping[Tile, str] = field(default_factory=dict)
    results: Mapping[Tile, CompileResult] = field(default_factory=dict)
    """Of all that passed in the role that candidates are ranked by."""


def rank_candidates(
    point: Point,
    arch: int,
    compiler: Compiler,
    tiles: Sequence[Tile],
    *,
    heads: int,
    count: int,
    schedules_of: int = 0,
) -> Ranked:
    """Compile candidates of a point and keep the ``count`` best by their bounds that compile in every role.

    Args:
        heads: of the queries.
        schedules_of: so many of the best without options are also kept in every other tile schedule.
    """

    def promise(tile: Tile, result: CompileResult) -> tuple[float, int, str]:
        """By bound; of equals the deeper pipeline, whose loads have longer, then by name: two runs agree."""
        return -(result.bound or 0.0), -tile.num_stages, tile_text(tile)

    def best_of(tried: Sequence[Tile], count: int) -> Ranked:
        jobs = {tile: job_of(point, tile, arch, heads) for tile in tried}
        compiled = compiler(jobs.values())
        results = {tile: compiled[job] for tile, job in jobs.items()}
        dropped = {tile: result.problems[0] for tile, result in results.items() if result.problems}
        passed = {tile: result for tile, result in results.items() if not result.problems}
        kept: list[Tile] = []
        waiting = sorted(passed, key=lambda tile: promise(tile, passed[tile]))
        while batch := waiting[: count - len(kept)]:  # the compiler is asked about no more than it takes
            del waiting[: len(batch)]
            roles = {tile: [job_of(point, tile, arch, heads, role) for role in OTHER_ROLES] for tile in batch}
            compiled = compiler(job for jobs in roles.values() for job in jobs)
            for tile in batch:
                if failed := [compiled[job].problems[0] for job in roles[tile] if compiled[job].problems]:
                    dropped[tile] = failed[0]
                else:
                    kept.append(tile)
        return Ranked(tuple(kept), dropped, passed)

    first = best_of(tiles, count)
    bases = [tile for tile in first.tiles if not options_of(tile)][:schedules_of]
    others = [other for tile in bases for other in schedules(tile, point, arch)]
    more = best_of(others, len(others))
    return Ranked(first.tiles + more.tiles, {**first.dropped, **more.dropped}, {**first.results, **more.results})
