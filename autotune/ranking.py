"""What compiling told of the candidates, and in which order they deserve time on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from ..kernels import Tile
from ..kernels.order import l2_group_of, l2_of, tiles_of
from ..kernels.tables import DTYPES, Point, options_of
from .journal import Journal
from .pool import Failure, run_jobs
from .space import dealt, space

RANKING_ROLE = "middle"
OTHER_ROLES = ("only", "first", "last")
"""Where in a ring a launch stands. Most hops are in the middle; a tile is used in all, and has to compile in all."""

ONE, BY_16, ANY = COUNTS = ("1", "16n", "n")
"""What Triton tells its compiler of a number."""

Sides = tuple[int, int]
"""Tokens of the side of a launch that is cut into programs, and of the side that they walk."""

Rank = Callable[[Tile, Point], float]
"""How good a tile is thought to be at a point; larger is better."""


class Job(NamedTuple):
    """One binary: what of a point, a tile and a launch the compiler is told.

    Of numbers it is told whether they are 1 and whether 16 divides them, no more; of lengths the latter is taken for
    granted. ``heads`` are those that programs are cut by: of the keys in dK/dV, in parts where it is split, and in a
    single pass; and of the keys where query heads are packed. ``order`` is of ``kernels.tiles.Order``; what of it a
    launch does not have says nothing.
    """

    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    grouped: bool
    full: bool
    heads: str  # one of COUNTS
    group: str
    parts: str  # of a group: its packed or split heads
    order: tuple[str, str, str]
    tile: Tile
    arch: int
    role: str

    @property
    def key(self) -> str:
        """Its name in a journal."""
        flags = f"{'gqa' if self.grouped else 'mha'} {'full' if self.full else 'bounded'} {self.role}"
        flags += f" heads {self.heads} group {self.group} parts {self.parts} order {'/'.join(self.order)}"
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


def job_of(
    point: Point, tile: Tile, arch: int, heads: int, role: str = RANKING_ROLE, sides: Sides | None = None
) -> Job:
    """What a launch of one sequence with so many query heads is compiled for; ``sides``: the point's length twice."""
    options, group, parts = options_of(tile), point.group, 1
    if options.get("pack_gqa"):
        heads, group, parts = heads // group, 1, group
    elif point.kernel not in ("forward", "dq"):
        parts = int(options.get("dkdv_splits", 1))
        heads, group = heads // group * parts, group // parts
    counts = kind_of_count(heads), kind_of_count(group), kind_of_count(parts)
    order = order_of(point, tile, arch, (heads, group, parts), sides or (point.length, point.length))
    return Job(*point[:4], point.group > 1, point.mask == "full", *counts, order, tile, arch, role)


def order_of(point: Point, tile: Tile, arch: int, counts: tuple[int, int, int], sides: Sides) -> tuple[str, str, str]:
    """Kinds of an ``Order``'s counts, as ``order.tile_schedule`` has them on a GPU with the L2 of its ``arch``."""
    (heads, group, parts), (rows, walked), options = counts, sides, options_of(tile)
    by_keys = point.kernel not in ("forward", "dq")
    l2_group = total = tiles = 0
    if options.get("order") == "longest":
        row_bytes = (point.head_dim + point.head_dim_v) * DTYPES[point.dtype].itemsize
        l2_group, total = l2_group_of(heads, group, walked, row_bytes, by_keys, l2_of(arch)), heads
    if options.get("persistent"):
        packed, block = (1, tile.block_k) if by_keys else (parts, tile.block_q)
        tiles = tiles_of(rows, packed, block, heads)
    return kind_of_count(l2_group), kind_of_count(total), kind_of_count(tiles)


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
    folder: str = ""
    """Of Triton's cache, where the binary lies; empty where there is none to launch."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Verdict:
        """Of what :meth:`as_json` gave."""
        return cls(tuple(map(str, told["problems"])), told["bound"], str(told["bound_by"]), str(told["folder"]))


class Judge:
    """Compiles jobs in worker processes and remembers what became of each, across interruptions.

    Args:
        compile_job: called in the workers: pickled, so a function of a module.
        journal: of earlier runs.
        workers: processes at a time.
        told: called with the number of jobs of every batch, and with None for each that is known.
        holds: whether what an earlier run compiled is still there: of what is to be launched, which else is compiled
            again; to rank the others, what is known of them is enough.
    """

    def __init__(
        self,
        compile_job: Callable[[Job], Verdict],
        journal: Journal,
        *,
        workers: int,
        told: Callable[[int | None], None] = lambda batch: None,
        holds: Callable[[Verdict], bool] = lambda verdict: True,
    ) -> None:
        self._compile, self._journal, self._workers, self._told = compile_job, journal, workers, told
        self._holds = holds
        self._new: set[Job] = set()
        self.compiled = 0
        """Jobs that were not in the journal, or whose binaries were to be launched and are gone."""

    def __call__(self, jobs: Iterable[Job], *, to_launch: bool = False) -> dict[Job, Verdict]:
        """The verdict of every job, of those ``to_launch`` with the binary that it is about."""
        asked = list(dict.fromkeys(jobs))
        known = {job: Verdict.of(told) for job in asked if (told := self._journal.last(job.key)) is not None}
        older = known.keys() - self._new if to_launch else set()
        found = {job: verdict for job, verdict in known.items() if job not in older or self._holds(verdict)}
        new = [job for job in asked if job not in found]
        self._told(len(new))

        def done(job: Job, result: Verdict | Failure) -> None:
            found[job] = Verdict((result.reason,)) if isinstance(result, Failure) else result
            self._journal.put(job.key, found[job].as_json())
            self._new.add(job)
            self.compiled += 1
            self._told(None)

        if new:
            run_jobs(new, self._compile, workers=min(self._workers, len(new)), done=done)
        return {job: found[job] for job in asked}


class Ranked(NamedTuple):
    """The candidates of a point that passed, the most promising first, and what the others failed at."""

    tiles: tuple[Tile, ...]
    dropped: dict[Tile, str]
    verdicts: Mapping[Tile, Verdict] = {}
    """Of all that passed in the role that candidates are ranked by."""

    def joined(self, other: Ranked) -> Ranked:
        return Ranked(
            self.tiles + other.tiles, {**self.dropped, **other.dropped}, {**self.verdicts, **other.verdicts}
        )  # fmt: skip


def rank_candidates(
    points: Sequence[Point],
    arch: int,
    judge: Judge,
    *,
    heads: int,
    count: int,
    orders_of: int = 0,
    rank: Rank | None = None,
    tiles_of: Callable[[Point, int], Sequence[Tile]] | None = None,
) -> dict[Point, Ranked]:
    """Compile the whole space of every point and keep the ``count`` best, each of which compiles in every role.

    Args:
        heads: of the queries.
        orders_of: so many of the best without options are also kept in every other order of their launch.
        rank: by default the bound of each candidate's verdict.
        tiles_of: what is compiled at a point, in place of the whole space.
    """

    def job(point: Point, tile: Tile, role: str = RANKING_ROLE) -> Job:
        return job_of(point, tile, arch, heads, role)

    def best_of(tried: Mapping[Point, Sequence[Tile]], count: int) -> dict[Point, Ranked]:
        found = judge(job(point, tile) for point, tiles in tried.items() for tile in tiles)
        waiting, dropped, passed = {}, {}, {}
        for point, tiles in tried.items():
            verdicts = {tile: found[job(point, tile)] for tile in tiles}
            dropped[point] = {tile: verdict.problems[0] for tile, verdict in verdicts.items() if verdict.problems}
            passed[point] = {tile: verdict for tile, verdict in verdicts.items() if not verdict.problems}
            waiting[point] = in_order(passed[point], point, rank or _by_bound(verdicts))
        kept = _clean_in_every_role(waiting, dropped, job, judge, count)
        return {point: Ranked(tuple(kept[point]), dropped[point], passed[point]) for point in tried}

    first = best_of({point: (tiles_of or space)(point, arch) for point in points}, count)
    if not orders_of:
        return first
    bases = {point: [tile for tile in one.tiles if not options_of(tile)][:orders_of] for point, one in first.items()}
    others = {point: [other for tile in tiles for other in dealt(tile, point, arch)] for point, tiles in bases.items()}
    more = best_of(others, max(map(len, others.values()), default=0))
    return {point: one.joined(more[point]) for point, one in first.items()}


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
