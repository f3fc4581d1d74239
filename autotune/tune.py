"""One run of ``tune``: compile, write estimates, and where there is a GPU measure and write what was measured."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from ..bench.common.provenance import command, provenance
from ..bench.common.result import Result, Row
from ..comm.topology import nvml
from ..kernels import Tile
from ..kernels.tables import (
    ONE_PASS,
    SINGLE_PASS,
    TUNED,
    TWO_PASSES,
    Entry,
    Gpu,
    Point,
    file_name,
    options_of,
    triton_version,
)
from .candidates import (
    RANKING_ROLE,
    Compiler,
    OutOfBudget,
    Ranked,
    Verdict,
    compile_job,
    digest,
    job_of,
    rank_candidates,
)
from .compile import Variant
from .compile import default_tile as built_in_tile
from .measure import DeviceTrials, checked_sides
from .model import Shape, points_of
from .search import Budget, Measured, Trials, clocks_of, median, median_beside, planned, search, spread
from .space import grid, nearest, point_text, schedules, space, tile_text, why_not
from .store import Journal, known, private_folder, save

CANDIDATES = 20  # of a point that get time on a GPU: the best quarter or so of what compiles
SCHEDULES_OF = 2  # the best of them are also tried in every other tile schedule
MOST_COMMAND = 400  # characters that a table takes

Progress = Callable[[str, int | None], None]
"""Called with a part of a run and how many steps more it has, or None: one of them is done."""


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar per part, on standard error and gone at the end; into a file they would be nothing but empty lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console, tasks, totals = Console(stderr=True), dict[str, Any](), Counter[str]()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def step(part: str, more: int | None) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part)
            if more is None:
                bars.advance(tasks[part])
            else:
                totals[part] += more
                bars.update(tasks[part], total=totals[part])

        yield step


@dataclass(frozen=True)
class TuneConfig:
    """What the command was asked for."""

    shape: Shape
    lengths: tuple[int, ...]
    causal: bool
    gpu: Gpu
    device: torch.device | None  # None: compile only
    folder: Path
    budget: float  # seconds on the GPU; to compile where nothing is measured
    workers: int
    kernels: tuple[str, ...] = TUNED
    schedules_of: int = SCHEDULES_OF
    near: int | None = None
    """So many tiles alone, those nearest to the built-in one; None: the whole space."""

    @property
    def points(self) -> list[Point]:
        """Of all kernels that have a default to be compared with."""
        every = points_of(self.shape, list(self.lengths), causal=self.causal, kernels=self.kernels)
        return [point for point in every if built_in(point, self.gpu.arch) is not None]

    def tiles_of(self, point: Point) -> list[Tile]:
        """What is compiled at a point."""
        every = space(point, self.gpu.arch)
        return every if self.near is None else nearest(every, default_tile(point, self.gpu.arch), self.near)

    def schedules_at(self, point: Point) -> list[str]:
        """In words, every other tile schedule, which depends on the point, but hardly on the tile."""
        tile = next(tile for tile in space(point, self.gpu.arch) if not options_of(tile))
        others = schedules(tile, point, self.gpu.arch) if self.schedules_of else []
        return [tile_text(one).removeprefix(tile_text(tile)).strip() for one in others]


def built_in(point: Point, arch: int) -> Tile | None:
    """The built-in default; None where there is none that fits."""
    return built_in_tile(point.kernel, arch, point.dtype, max(point.head_dim, point.head_dim_v))


def default_tile(point: Point, arch: int) -> Tile:
    """What a launch takes without a table, of a point that has such."""
    tile = built_in(point, arch)
    assert tile is not None, f"{point_text(point)} has no default on sm_{arch}"
    return tile


@dataclass(frozen=True)
class PointResult:
    """What became of one point."""

    point: Point
    default: Tile
    ranked: Ranked = field(default_factory=lambda: Ranked((), {}))
    default_bound: float | None = None
    measured: Measured | None = None
    left: int = 0  # binaries that the budget left to compile

    @property
    def tile(self) -> Tile | None:
        """The answer; None where nothing passes."""
        return self.estimate if self.measured is None else self.measured.tile

    @property
    def estimate(self) -> Tile | None:
        """The best by its bound of those without options: a kernel or a schedule that never ran is no estimate."""
        return next((tile for tile in self.ranked.tiles if not options_of(tile)), None)

    def bound_of(self, tile: Tile) -> float | None:
        """In the unit of the verdicts."""
        verdict = self.ranked.verdicts.get(tile)
        return verdict.bound if verdict is not None else self.default_bound if tile == self.default else None

    def as_row(self) -> dict[str, Any]:
        """By the columns of :data:`UNITS`."""
        row: dict[str, Any] = {
            "kernel": self.point.kernel, "mask": self.point.mask, "tokens": self.point.length,
            "tile": tile_text(self.tile) if self.tile is not None else "none",
            "bound": None if self.tile is None else self.bound_of(self.tile), "default's bound": self.default_bound,
            "default": tile_text(self.default), "tried": len({*self.ranked.dropped, *self.ranked.verdicts}),
            "failed": len(self.ranked.dropped), "left": self.left,
        }  # fmt: skip
        if (found := self.measured) is not None:
            beside, baseline = median_beside(found.best), found.baseline_seconds
            row |= {
                "time": median(found.best) * 1e3, "spread": 100 * spread(found.best), "wrong": len(found.wrong),
                "default's time": None if baseline is None else baseline * 1e3,
                "beside": None if beside is None else beside * 1e3,
            }  # fmt: skip
        return row


UNITS = {
    "kernel": "", "mask": "", "tokens": "", "tile": "", "time": "ms", "default's time": "ms", "bound": "%",
    "default's bound": "%", "spread": "%", "beside": "ms", "default": "", "tried": "", "failed": "", "wrong": "",
    "left": "",
}  # fmt: skip


def journals(config: TuneConfig) -> tuple[Journal, Journal]:
    """Of compiling, which any machine may go on from, and of measuring, which only the same GPU may."""
    version, made = triton_version(), digest()
    names = [
        f"{part}_{file_name(name, version).removesuffix('.json')}.jsonl"
        for part, name in (("compiled", f"sm_{config.gpu.arch}"), ("measured", config.gpu.name))
    ]
    compiled, measured = (private_folder(config.folder) / name for name in names)
    return Journal(compiled, made), Journal(measured, f"{made} {driver()} {config.shape}")


def driver() -> str | None:
    try:
        return nvml.driver_version()
    except nvml.NoNvml:
        return None


def compile_part(
    config: TuneConfig, journal: Journal, step: Progress, *, work: Callable[[Variant], Verdict] = compile_job
) -> list[PointResult]:
    """The candidates of every point, compiled, filtered and ranked; of those to be measured all that a GPU launches.

    Without a GPU as with one: what lies in Triton's cache then, a machine with one need not compile. A point after the
    other, so that a budget leaves whole ones.
    """
    budget = Budget(config.budget if config.device is None else math.inf)
    with Compiler(journal, config.workers, done=partial(step, "compiling"), left=budget.left, work=work) as compiler:
        return [_compiled(config, point, compiler) for point in config.points]


def _compiled(config: TuneConfig, point: Point, compiler: Compiler) -> PointResult:
    arch, heads, default = config.gpu.arch, config.shape.heads, default_tile(point, config.gpu.arch)
    checked = checked_sides(point)
    # what is timed, of the point's length, and the shards that a result is checked by
    launched = ((RANKING_ROLE, None), *((role, checked) for role in ("first", "middle", "last")))
    try:
        ranked = rank_candidates(
            point, arch, compiler, heads=heads, count=CANDIDATES, schedules_of=config.schedules_of,
            tiles=config.tiles_of(point),
        )  # fmt: skip
        own = job_of(point, default, arch, heads)
        verdict = compiler([own])[own]
        jobs = (
            job_of(point, tile, arch, heads, *launch) for tile, launch in product([*ranked.tiles, default], launched)
        )
        compiler(jobs, to_launch=True)
    except OutOfBudget as spent:
        return PointResult(point, default, left=spent.args[0])
    return PointResult(point, default, ranked, verdict.bound)


def measure_part(
    config: TuneConfig,
    found: list[PointResult],
    journal: Journal,
    step: Progress,
    *,
    trials_of: Callable[[Point], Trials] | None = None,
    budget: Budget | None = None,
    pause: Callable[[float], None] | None = None,
) -> list[PointResult]:
    """Search every point on the GPU; each is in the table as soon as it is known."""
    device = config.device or torch.device("cpu")
    make = trials_of or (lambda point: DeviceTrials(point, config.shape, device))
    spent = budget or Budget(config.budget)
    step("measuring", sum(planned(len({*one.ranked.tiles} - {one.default})) for one in found))
    answers = []
    for number, one in enumerate(found):
        best = search(
            one.point, one.default, one.ranked.tiles, make(one.point), journal,
            spent.share(len(found) - number).left, done=partial(step, "measuring", None),
            **({} if pause is None else {"pause": pause}),
        )  # fmt: skip
        answers.append(replace(one, measured=best))
        if best is not None:
            save(config.folder, config.gpu, [measured_entry(one.point, best)])
    if all(one.measured is not None and one.measured.complete for one in answers):
        journal.forget()  # the answers are in the table; asked again, they are measured again
    return answers


def estimated_entry(found: PointResult) -> Entry:
    """What compiling alone tells: never a default."""
    assert found.estimate is not None
    verdict = found.ranked.verdicts[found.estimate]
    return Entry(
        found.point, found.estimate, estimated=True, bound=verdict.bound, bound_by=verdict.bound_by, **_provenance()
    )  # fmt: skip


def measured_entry(point: Point, found: Measured) -> Entry:
    """Medians in seconds."""
    return Entry(
        point, found.tile, estimated=False, seconds=median(found.best), spread=spread(found.best),
        beside=median_beside(found.best), baseline=found.baseline_seconds, clocks=clocks_of(found.best),
        driver=driver(), **_provenance(),
    )  # fmt: skip


def _provenance() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"triton": triton.__version__, "torch": torch.__version__},
        "command": short_command(),
    }


def short_command() -> str:
    """What was typed, as far as a table takes it."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in command())[:MOST_COMMAND]


def tune(config: TuneConfig, step: Progress) -> Result:
    """All of it.

    Raises:
        RefusedTable: the folder has a table of this GPU that cannot be read.
        ValueError: the folder cannot be made.
    """
    known(private_folder(config.folder), config.gpu)  # what could not be added to is refused before minutes of work
    compiled, measured = journals(config)
    found = compile_part(config, compiled, step)
    usable = [one for one in found if one.ranked.tiles]
    # before the GPU's part, which may be interrupted; a measurement is not replaced by an estimate
    guesses = [estimated_entry(one) for one in usable if one.estimate is not None]
    path = save(config.folder, config.gpu, guesses) if usable else None
    if config.device is not None and usable:
        found = measure_part(config, usable, measured, step) + [one for one in found if not one.ranked.tiles]
    return Result(
        "tune",
        UNITS,
        [one.as_row() for one in found],
        [f"{point_text(one.point)}: no candidate passes" for one in found if one.tile is None and not one.left],
        notes_of(found, path),
        provenance(config.device or torch.device("cpu")),
    )


def notes_of(found: Sequence[PointResult], path: Path | None) -> list[str]:
    """What failed most, what is left, where the answers are, and who takes them."""
    reasons = Counter(re.sub(r"^\d+ ", "", reason) for one in found for reason in one.ranked.dropped.values())
    notes = [f"dropped: {count} x {reason}" for reason, count in reasons.most_common(4)]
    units = {verdict.bound_by.partition(",")[0] for one in found for verdict in one.ranked.verdicts.values()}
    notes += [f"bound: {unit}, at most" for unit in sorted(units)]
    notes += backward_notes(found)
    if left := [one.left for one in found if one.left]:
        notes.append(
            f"left by --budget: {len(left)} of {len(found)} kernels, masks and lengths, {sum(left)} binaries or more; "
            "the same command goes on"
        )
    if cut := [one for one in found if one.measured is not None and not one.measured.complete]:
        notes.append(f"{len(cut)} of {len(found)} were cut short by --budget; the same command goes on")
    if path is not None:
        notes.append(f"written: {path}")
    times = [
        (median(one.measured.best) / baseline, one)
        for one in found
        if one.measured is not None and (baseline := one.measured.baseline_seconds) is not None
    ]
    if times:
        least, best = min(times, key=lambda pair: pair[0])
        notes.append(
            f"best: {sum(ratio < 1 for ratio, _ in times)} of {len(found)} are faster than the default, at most "
            f"{point_text(best.point)} by {1 - least:.1%}"
        )
    elif any(one.tile is not None for one in found):
        notes.append("best: by bounds alone; estimates serve who asks: kernels.default_config(q, v, estimated=True)")
    return notes


def candidates(config: TuneConfig) -> Result:
    """A row per candidate, and one per schedule that the best are tried in; nothing is compiled."""
    rows: list[Row] = []
    reasons = Counter[str]()
    tried = others = 0
    for point in config.points:
        tiles, orders = config.tiles_of(point), config.schedules_at(point)
        tried, others = tried + len(tiles), others + len(orders)
        refused = (why_not(tile, point, config.gpu.arch) for tile in grid(point))
        reasons.update(_kind_of(reason) for reason in refused if reason is not None)
        for candidate in [*map(tile_text, tiles), *(f"best {config.schedules_of}: {order}" for order in orders)]:
            rows.append({
                "kernel": point.kernel, "mask": point.mask, "tokens": point.length, "tile": candidate,
                "dtype": point.dtype, "D": point.head_dim, "Dv": point.head_dim_v, "group": point.group,
            })  # fmt: skip
    also = f"; of the best {config.schedules_of} of each also {others} tile schedules" if others else ""
    rest = "; ".join(f"{count} {kind}" for kind, count in reasons.most_common())
    words = f"{tried} candidates for {config.gpu.name}{also}" + (f"; not tried: {rest}" if rest else "")
    return Result("tune", dict.fromkeys(rows[0], ""), rows, notes=[words])


def _kind_of(reason: str) -> str:
    """A reason without its numbers."""
    for word in ("the Hopper forward", "shared memory", "scores per thread", "fp32 values per thread"):
        if word in reason:
            return f"by {word}"
    return "by length"


# one pass or two

PRODUCTS = {"dq": 3, "dkdv": 4, **dict.fromkeys(SINGLE_PASS, 5)}
"""Matrix products per pair of tiles. Five count, by everybody's convention: two passes make two of them twice."""


def counted_bound(bounds: Mapping[str, float]) -> float:
    """Percent of peak in the products that count, of kernels that run one after the other at these bounds."""
    return PRODUCTS[ONE_PASS] / sum(PRODUCTS[kernel] / bound for kernel, bound in bounds.items())


def backward_notes(found: Sequence[PointResult]) -> list[str]:
    """A line per mask and length that has all ways: in ms where all were measured, else by their bounds."""
    by_point = {one.point: one for one in found if one.tile is not None}
    notes = []
    for point in by_point:
        ways = [by_point.get(point._replace(kernel=kernel)) for kernel in PRODUCTS]
        there = {one.point.kernel: one for one in ways if one is not None}
        if point.kernel != ONE_PASS or len(there) < len(ways):
            continue
        times = {kernel: median(one.measured.best) * 1e3 for kernel, one in there.items() if one.measured is not None}
        bounds = {kernel: one.bound_of(one.tile) or 1e-9 for kernel, one in there.items() if one.tile is not None}
        told = []
        for way in (TWO_PASSES, *((kernel,) for kernel in SINGLE_PASS)):
            bound = counted_bound({kernel: bounds[kernel] for kernel in way})
            value = f"{bound:.1f}%" if len(times) < len(ways) else f"{sum(times[kernel] for kernel in way):.4g} ms"
            told.append(f"{' + '.join(way)} {value}")
        unit = " at most, in products that count" if len(times) < len(ways) else ""
        notes.append(f"backward, {point.mask}, {point.length} tokens: {', '.join(told)}{unit}")
    return notes
