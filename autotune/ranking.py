"""What compiling told of the candidates, and in which order they deserve time on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from ..kernels import Tile
from ..kernels.tables import Point, options_of
from .journal import Journal
from .pool import Failure, run_jobs
from .space import space

RANKING_ROLE = "middle"
OTHER_ROLES = ("only", "first", "last")
"""Where in a ring a launch stands. Most hops are in the middle; a tile is used in all, and has to compile in all."""

ONE, BY_16, ANY = COUNTS = ("1", "16n", "n")
"""What Triton tells its compiler of a number."""

Rank = Callable[[Tile, Point], float]
"""How good a tile is thought to be at a point; larger is better."""


class Job(NamedTuple):
    """One binary: what of a point, a tile and a launch the compiler is told.

    Of numbers it is told whether they are 1 and whether 16 divides them, no more; of lengths the latter is taken for
    granted. ``heads`` are those that programs are cut by: of the keys in dK/dV.
    """

    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    grouped: bool
    full: bool
    heads: str  # one of COUNTS
    group: str
    tile: Tile
    arch: int
    role: str

    @property
    def key(self) -> str:
        """Its name in a journal."""
        flags = f"{'gqa' if self.grouped else 'mha'} {'full' if self.full else 'bounded'} {self.role}"
        flags += f" heads {self.heads} group {self.group}"
        dims = f"D{self.head_dim}/{self.head_dim_v}"
        return f"{self.kernel} sm_{self.arch} {self.dtype} {dims} {flags} {tile_text(self.tile)}"


def tile_text(tile: Tile) -> str:
    """``128x64 8w 2s``, and what else is not the default: ``128x128 8w 2s forward_kernel=hopper``."""
    others = {one.name: getattr(tile, one.name) for one in fields(Tile)[4:] if getattr(tile, one.name) != one.default}
    more = "".join(f" {name}={value}" for name, value in (others | options_of(tile)).items())
    return f"{tile.block_q}x{tile.block_k} {tile.num_warps}w {tile.num_stages}s{more}"


def point_text(point: Point) -> str:
    """``forward bf16 D128/128 group 4 full 8192``."""
    dims = f"D{point.head_dim}/{point.head_dim_v}"
    return f"{point.kernel} {point.dtype} {dims} group {point.group} {point.mask} {point.length}"


def job_of(point: Point, tile: Tile, arch: int, heads: int, role: str = RANKING_ROLE) -> Job:
    """What a launch with so many query heads is compiled for."""
    heads = heads // point.group if point.kernel == "dkdv" else heads
    counts = kind_of_count(heads), kind_of_count(point.group)
    return Job(*point[:4], point.group > 1, point.mask == "full", *counts, tile, arch, role)


def kind_of_count(count: int) -> str:
    """One of :data:`COUNTS`."""
    return ONE if count == 1 else BY_16 if count % 16 == 0 else ANY


@dataclass(frozen=True)
class Verdict:
    """What the compiler made of a job."""

    problems: tuple[str, ...]
    """Why it is not launched: it does not compile or fit, spills, or waits for every wgmma; empty where it may be."""
    bound: float | None = None
    """How fast its loop can be at best, in any unit that compares candidates of one point: larger is better."""
    bound_by: str = ""
    """In which unit that is, and what of the chip sets it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Verdict:
        """Of what :meth:`as_json` gave."""
        return cls(tuple(map(str, told["problems"])), told["bound"], str(told["bound_by"]))


class Judge:
    """Compiles jobs in worker processes and remembers what became of each, across interruptions.

    Args:
        compile_job: called in the workers: pickled, so a function of a module.
        journal: of earlier runs.
        workers: processes at a time.
        told: called with the number of jobs of every batch, and with None for each that is known.
    """

    def __init__(
        self,
        compile_job: Callable[[Job], Verdict],
        journal: Journal,
        *,
        workers: int,
        told: Callable[[int | None], None] = lambda batch: None,
    ) -> None:
        self._compile, self._journal, self._workers, self._told = compile_job, journal, workers, told
        self.compiled = 0
        """Jobs that were not in the journal."""

    def __call__(self, jobs: Iterable[Job]) -> dict[Job, Verdict]:
        """The verdict of every job."""
        asked = list(dict.fromkeys(jobs))
        found = {job: Verdict.of(told) for job in asked if (told := self._journal.last(job.key)) is not None}
        new = [job for job in asked if job not in found]
        self._told(len(new))

        def done(job: Job, result: Verdict | Failure) -> None:
            found[job] = Verdict((result.reason,)) if isinstance(result, Failure) else result
            self._journal.put(job.key, found[job].as_json())
            self.compiled += 1
            self._told(None)

        if new:
            run_jobs(new, self._compile, workers=min(self._workers, len(new)), done=done)
        return {job: found[job] for job in asked}


class Ranked(NamedTuple):
    """The candidates of a point that passed, the most promising first, and what the others failed at."""

    tiles: tuple[Tile, ...]
    dropped: dict[Tile, str]
    bounds: Mapping[Tile, float | None] = {}
    """Of all that passed in the role that candidates are ranked by."""


def rank_candidates(
    points: Sequence[Point], arch: int, judge: Judge, *, heads: int, count: int, rank: Rank | None = None
) -> dict[Point, Ranked]:
    """Compile the whole space of every point and keep the ``count`` best, each of which compiles in every role.

    Args:
        heads: of the queries.
        rank: by default the bound of each candidate's verdict.
    """
    jobs = {point: {tile: job_of(point, tile, arch, heads) for tile in space(point, arch)} for point in points}
    found = judge(job for of_point in jobs.values() for job in of_point.values())
    waiting, dropped, bounds = {}, {}, {}
    for point, of_point in jobs.items():
        verdicts = {tile: found[job] for tile, job in of_point.items()}
        dropped[point] = {tile: verdict.problems[0] for tile, verdict in verdicts.items() if verdict.problems}
        passed = [tile for tile in verdicts if tile not in dropped[point]]
        bounds[point] = {tile: verdicts[tile].bound for tile in passed}
        waiting[point] = in_order(passed, point, rank or _by_bound(verdicts))

    def job(point: Point, tile: Tile, role: str) -> Job:
        return job_of(point, tile, arch, heads, role)

    kept = _clean_in_every_role(waiting, dropped, job, judge, count)
    return {point: Ranked(tuple(kept[point]), dropped[point], bounds[point]) for point in points}


def in_order(tiles: Iterable[Tile], point: Point, rank: Rank) -> list[Tile]:
    """By rank; of equals the deeper pipeline, whose loads have longer, then by what they are called: two runs agree."""
    return sorted(tiles, key=lambda tile: (-rank(tile, point), -tile.num_stages, tile_text(tile)))


def _clean_in_every_role(
    waiting: dict[Point, list[Tile]],
    dropped: dict[Point, dict[Tile, str]],
    job: Callable[[Point, Tile, str], Job],
    judge: Judge,
    count: int,
) -> dict[Point, list[Tile]]:
    """The first ``count`` of each point that pass in all roles; the compiler is asked about no more than it takes."""
    kept: dict[Point, list[Tile]] = {point: [] for point in waiting}
    while batch := [(p, tile) for p, order in waiting.items() for tile in order[: count - len(kept[p])]]:
        found = judge(job(*one, role) for one in batch for role in OTHER_ROLES)
        for point, tile in batch:
            waiting[point].remove(tile)
            failed = [verdict for role in OTHER_ROLES if (verdict := found[job(point, tile, role)]).problems]
            if failed:
                dropped[point][tile] = failed[0].problems[0]
            else:
                kept[point].append(tile)
    return kept


def _by_bound(found: Mapping[Tile, Verdict]) -> Rank:
    def rank(tile: Tile, point: Point) -> float:
        bound = found[tile].bound
        return float("-inf") if bound is None else bound

    return rank
