"""Which candidates of a point pass the gate, and in which order they deserve time on a GPU."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton

from ..kernels import Tile
from ..kernels.tables import Point, options_of
from .bound import bounds_of, loop_bound, main_bound
from .compile import OF_LAUNCHES, Sizes, Variant
from .gate import compile_variant
from .pool import Failure, Pool
from .space import schedules, space, tile_text
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
class Verdict:
    """What became of a job."""

    problems: tuple[str, ...]
    """Why it is not launched: it does not compile or fit, spills, or waits for every wgmma; empty where it may be."""
    bound: float | None = None
    """How fast its loop can be at best, in any unit that compares candidates of one point: larger is better."""
    bound_by: str = ""
    """In which unit that is, and what of the chip sets it."""
    folder: str = ""
    """Of Triton's cache, where the binary lies; empty where there is none to launch."""

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Verdict:
        """Of what a journal has."""
        return cls(tuple(map(str, kept["problems"])), kept["bound"], str(kept["bound_by"]), str(kept["folder"]))


def compile_job(job: Variant) -> Verdict:
    """Compile a job and read what came out; runs in a worker process, which Triton's interpreter is off in."""
    compiled, found = compile_variant(job)
    if found:
        return Verdict(tuple(found))
    best = main_bound(bounds_of(compiled))
    assert best is not None, "the gate asks for a loop with matrix products"
    return Verdict((), round(loop_bound(compiled), 2), f"{UNIT}, limited by {best.limiter}", compiled.folder)


def in_cache(verdict: Verdict) -> bool:
    """Whether Triton's cache still has the binary: a launch would compile it again, while the GPU waits."""
    return not verdict.folder or any((Path(triton.knobs.cache.dir) / verdict.folder).glob("*.cubin"))


def digest() -> str:
    """Of all that decides a verdict: kernels, what compiles and reads them, Triton."""
    made = hashlib.sha256(triton.__version__.encode())
    for path in sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "autotune").glob("*.py")]):
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


class OutOfBudget(Exception):
    """The seconds for compiling are spent; the argument: jobs that were asked for and are not compiled."""


class Compiler:
    """Compiles jobs in worker processes and remembers what became of each, across interruptions.

    Args:
        journal: of earlier runs.
        workers: processes at a time.
        done: called with the number of new jobs of every batch, and with None for each that is compiled.
        left: seconds that may still be spent.
        work: called in the workers: pickled, so a function of a module.
        holds: whether what an earlier run compiled is still there: of what is to be launched, which else is compiled
            again; to rank the others, what is known of them is enough.
    """

    def __init__(
        self,
        journal: Journal,
        workers: int,
        *,
        done: Callable[[int | None], None] = lambda batch: None,
        left: Callable[[], float] = lambda: math.inf,
        work: Callable[[Variant], Verdict] = compile_job,
        holds: Callable[[Verdict], bool] = in_cache,
    ) -> None:
        self._journal, self._done, self._left, self._holds = journal, done, left, holds
        self._pool: Pool[Variant, Verdict] = Pool(work, workers)
        self._new: set[str] = set()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__()

    def __call__(self, jobs: Iterable[Variant], *, to_launch: bool = False) -> dict[Variant, Verdict]:
        """The verdict of every job, of those ``to_launch`` with the binary that it is about.

        Raises:
            OutOfBudget: some are not compiled.
        """
        found: dict[str, Verdict] = {}
        new: dict[str, Variant] = {}
        keys: dict[Variant, str] = {}
        for job in jobs:
            try:
                key = keys[job] = _key(job)
            except ValueError as error:  # the entry refuses it
                key = keys[job] = str(job)
                found[key] = Verdict((str(error),))
            if key in found or key in new:
                continue
            kept = self._journal.last(key)
            known = None if kept is None else Verdict.of(kept)
            if known is None or (to_launch and key not in self._new and not self._holds(known)):
                new[key] = job
            else:
                found[key] = known
        self._done(len(new))
        names = {id(job): key for key, job in new.items()}

        def done(job: Variant, result: Verdict | Failure) -> None:
            key = names[id(job)]
            found[key] = Verdict((result.reason,)) if isinstance(result, Failure) else result
            self._journal.put(key, asdict(found[key]))
            self._new.add(key)
            self._done(None)

        self._pool.run([*new.values()], done, self._left)
        if missing := sum(key not in found for key in new):
            raise OutOfBudget(missing)
        return {job: found[key] for job, key in keys.items()}


def _key(job: Variant) -> str:
    """The name of a job in a journal; jobs of one binary share it."""
    return f"{job} | {hashlib.sha256(job.launch.signature.encode()).hexdigest()[:16]}"


class Ranked(NamedTuple):
    """The candidates of a point that passed, the most promising first, and what the others failed at."""

    tiles: tuple[Tile, ...]
    dropped: dict[Tile, str]
    verdicts: Mapping[Tile, Verdict] = {}
    """Of all that passed in the role that candidates are ranked by."""


def rank_candidates(
    point: Point,
    arch: int,
    compiler: Callable[[Iterable[Variant]], Mapping[Variant, Verdict]],
    *,
    heads: int,
    count: int,
    schedules_of: int = 0,
    tiles: Sequence[Tile] | None = None,
) -> Ranked:
    """Compile the whole space of a point and keep the ``count`` best by their bounds that compile in every role.

    Args:
        heads: of the queries.
        schedules_of: so many of the best without options are also kept in every other tile schedule.
        tiles: what is compiled, in place of the whole space.
    """

    def best_of(tried: Sequence[Tile], count: int) -> Ranked:
        jobs = {tile: job_of(point, tile, arch, heads) for tile in tried}
        found = compiler(jobs.values())
        verdicts = {tile: found[job] for tile, job in jobs.items()}
        dropped = {tile: verdict.problems[0] for tile, verdict in verdicts.items() if verdict.problems}
        passed = {tile: verdict for tile, verdict in verdicts.items() if not verdict.problems}
        kept: list[Tile] = []
        waiting = in_order(passed)
        while batch := waiting[: count - len(kept)]:  # the compiler is asked about no more than it takes
            del waiting[: len(batch)]
            roles = {tile: [job_of(point, tile, arch, heads, role) for role in OTHER_ROLES] for tile in batch}
            found = compiler(job for jobs in roles.values() for job in jobs)
            for tile in batch:
                if failed := [found[job].problems[0] for job in roles[tile] if found[job].problems]:
                    dropped[tile] = failed[0]
                else:
                    kept.append(tile)
        return Ranked(tuple(kept), dropped, passed)

    first = best_of(space(point, arch) if tiles is None else tiles, count)
    bases = [tile for tile in first.tiles if not options_of(tile)][:schedules_of]
    others = [other for tile in bases for other in schedules(tile, point, arch)]
    more = best_of(others, len(others))
    return Ranked(
        first.tiles + more.tiles, {**first.dropped, **more.dropped}, {**first.verdicts, **more.verdicts}
    )  # fmt: skip


def in_order(verdicts: Mapping[Tile, Verdict]) -> list[Tile]:
    """By bound; of equals the deeper pipeline, whose loads have longer, then by name: two runs agree."""

    def rank(tile: Tile) -> tuple[float, int, str]:
        bound = verdicts[tile].bound
        return -(-math.inf if bound is None else bound), -tile.num_stages, tile_text(tile)

    return sorted(verdicts, key=rank)
