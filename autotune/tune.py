"""One run of ``tune``: compile, write estimates, and where there is a GPU measure and write what was measured."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ..bench.common.progress import Progress
from ..bench.common.provenance import command, provenance
from ..bench.common.result import Result
from ..comm.topology import nvml
from ..kernels import Tile
from ..kernels.gpu import GpuSpec
from ..kernels.tables import TUNED, Entry, Point, options_of
from .candidates import (
    RANKING_ROLE,
    Compiler,
    OutOfBudget,
    Ranked,
    compile_job,
    compile_jobs,
    digest,
    job_of,
    rank_candidates,
)
from .compile import default_tile
from .measure import DeviceTrials, checked_sides
from .pool import Pool
from .search import Budget, Measured, Reading, clocks_of, median_beside, planned, samples, search
from .space import Shape, nearest, point_text, points_of, space, tile_text
from .store import Journal, known, private_folder, save

CANDIDATES = 20  # of a point that get time on a GPU: the best quarter or so of what compiles
SCHEDULES_OF = 2  # the best of them are also tried in every other tile schedule


@dataclass(frozen=True)
class TuneConfig:
    """What the command was asked for."""

    shape: Shape
    lengths: tuple[int, ...]
    causal: bool
    gpu: GpuSpec
    device: torch.device | None  # None: compile only
    folder: Path
    budget: float  # seconds on the GPU; to compile where nothing is measured
    kernels: tuple[str, ...] = TUNED
    tiles: int | None = None
    """So many tiles alone, those nearest to the built-in one; None: the whole space, the best in every schedule."""

    @property
    def points(self) -> list[Point]:
        """Of all kernels that have a default to be compared with."""
        every = points_of(self.shape, self.lengths, causal=self.causal, kernels=self.kernels)
        return [point for point in every if built_in(point, self.gpu.arch) is not None]


def built_in(point: Point, arch: int) -> Tile | None:
    """What a launch takes without a table; None where there is no tile that fits."""
    return default_tile(point.kernel, arch, point.dtype, max(point.head_dim, point.head_dim_v))


@dataclass(frozen=True)
class PointResult:
    """What became of one point."""

    point: Point
    default: Tile
    ranked: Ranked = field(default_factory=Ranked)
    measured: Measured[Tile] | None = None
    left: int = 0  # binaries that the budget left to compile

    @property
    def estimate(self) -> Tile | None:
        """The best by its bound of those without options: a kernel or a schedule that never ran is no estimate."""
        return next((tile for tile in self.ranked.tiles if not options_of(tile)), None)

    @property
    def tile(self) -> Tile | None:
        """The answer; None where nothing passes."""
        return self.measured.best if self.measured is not None and self.measured.best is not None else self.estimate

    @property
    def baseline_seconds(self) -> float | None:
        """Of the built-in default, in the same turns; None where its results are wrong, or it was not timed."""
        runs = None if self.measured is None else self.measured.readings.get(self.default)
        return samples(runs).median if runs else None

    @property
    def best_runs(self) -> Sequence[Reading]:
        """Of the answer, where it was measured."""
        return () if self.measured is None or self.measured.best is None else self.measured.readings[self.measured.best]

    def as_row(self) -> dict[str, Any]:
        """By the columns of :data:`UNITS`."""
        ranked, tile, runs, baseline = self.ranked, self.tile, self.best_runs, self.baseline_seconds
        row: dict[str, Any] = {
            "kernel": self.point.kernel, "mask": self.point.mask, "tokens": self.point.length,
            "tile": "none" if tile is None else tile_text(tile), "default": tile_text(self.default),
            "bound": ranked.results[tile].bound if tile is not None and tile in ranked.results else None,
            "tried": len({*ranked.dropped, *ranked.results}), "failed": len(ranked.dropped), "left": self.left,
            "wrong": 0 if self.measured is None else len(self.measured.wrong),
        }  # fmt: skip
        if runs:
            beside = median_beside(runs)
            row |= {"time": samples(runs).median * 1e3, "spread": 100 * samples(runs).spread}
            row |= {"default's time": baseline and baseline * 1e3, "beside": beside and beside * 1e3}
        return row


UNITS = {
    "kernel": "", "mask": "", "tokens": "", "tile": "", "time": "ms", "default's time": "ms", "bound": "%",
    "spread": "%", "beside": "ms", "default": "", "tried": "", "failed": "", "wrong": "", "left": "",
}  # fmt: skip


def journal_of(config: TuneConfig) -> Journal:
    """Of what was compiled: in Triton's cache, where the binaries lie, so that it is emptied with them."""
    folder = private_folder(Path(triton.knobs.cache.dir).absolute())
    return Journal(folder / f"ringattn_sm_{config.gpu.arch}.jsonl", digest())


def compile_part(config: TuneConfig, journal: Journal, pool: Pool, step: Progress) -> list[PointResult]:
    """The candidates of every point, compiled, filtered and ranked; of those to be measured all that a GPU launches.

    Without a GPU as with one: what lies in Triton's cache then, a machine with one need not compile. A point after the
    other, so that a budget leaves whole ones.
    """
    budget = Budget(config.budget if config.device is None else math.inf)
    compiler = partial(compile_jobs, journal=journal, pool=pool, progress=partial(step, "compiling"), left=budget.left)
    return [_compiled(config, point, compiler) for point in config.points]


def _compiled(config: TuneConfig, point: Point, compiler: Compiler) -> PointResult:
    arch, heads, default = config.gpu.arch, config.shape.heads, built_in(point, config.gpu.arch)
    assert default is not None
    tiles = space(point, arch)
    if config.tiles is not None:
        tiles = nearest(tiles, default, config.tiles)
    # what is timed, of the point's length, and the shards that a result is checked by
    launched = ((RANKING_ROLE, None), *((role, checked_sides(point)) for role in ("first", "middle", "last")))
    try:
        ranked = rank_candidates(
            point, arch, compiler, tiles, heads=heads, count=CANDIDATES,
            schedules_of=SCHEDULES_OF if config.tiles is None else 0,
        )  # fmt: skip
        compiler(job_of(point, tile, arch, heads, *how) for tile, how in product([*ranked.tiles, default], launched))
    except OutOfBudget as spent:
        return PointResult(point, default, left=spent.args[0])
    return PointResult(point, default, ranked)


def measure_part(
    config: TuneConfig,
    found: Sequence[PointResult],
    journal: Journal,
    step: Progress,
    *,
    trials_of: Callable[[Point], Any] | None = None,
    budget: Budget | None = None,
) -> list[PointResult]:
    """Search every point on the GPU; each is in the table as soon as it is known.

    Args:
        trials_of: makes what checks and runs tiles at a point, as :class:`DeviceTrials`.
    """
    device = config.device or torch.device("cpu")
    make = trials_of or (lambda point: DeviceTrials(point, config.shape, device))
    spent = budget or Budget(config.budget)
    step("measuring", sum(planned(len({*one.ranked.tiles} - {one.default})) for one in found))
    answers = []
    for number, one in enumerate(found):
        trials = make(one.point)
        best = search(
            one.ranked.tiles, one.default, partial(check, trials, one.point, config.gpu, journal), trials.run,
            spent.share(len(found) - number).left, done=partial(step, "measuring", None),
        )  # fmt: skip
        answers.append(replace(one, measured=best))
        if best.best is not None:
            save(config.folder, config.gpu, [measured_entry(answers[-1])])
    return answers


class BrokenDevice(NamedTuple):
    """What a tile did to the device."""

    wrong: str


def check(trials: Any, point: Point, gpu: GpuSpec, journal: Journal, tile: Tile) -> str | None:
    """What is wrong with a tile; of one that broke the device, in this run or one before, what the device said."""
    key = f"{gpu.name} {driver()} | {point_text(point)} | {tile_text(tile)}"
    if (broken := journal.get(key, BrokenDevice)) is not None:
        return broken.wrong
    try:
        problem: str | None = trials.wrong(tile)
    except torch.AcceleratorError as error:  # nothing works on this device any more: the next run leaves the tile out
        journal.put(key, BrokenDevice(f"{type(error).__name__}: {error}".splitlines()[0][:300])._asdict())
        raise
    return problem


def estimated_entry(found: PointResult) -> Entry:
    """What compiling alone tells: never a default."""
    assert found.estimate is not None
    result = found.ranked.results[found.estimate]
    return Entry(
        found.point, found.estimate, estimated=True, bound=result.bound, bound_by=result.bound_by, **measurement()
    )  # fmt: skip


def measured_entry(found: PointResult) -> Entry:
    """Medians in seconds."""
    assert found.tile is not None
    runs = found.best_runs
    return Entry(
        found.point, found.tile, estimated=False, seconds=samples(runs).median, spread=samples(runs).spread,
        beside=median_beside(runs), baseline=found.baseline_seconds, clocks=clocks_of(runs), driver=driver(),
        **measurement(),
    )  # fmt: skip


def driver() -> str | None:
    try:
        return nvml.driver_version()
    except nvml.NoNvml:
        return None


def measurement() -> dict[str, Any]:
    """When, with which versions and by which command."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"triton": triton.__version__, "torch": torch.__version__},
        "command": command(),
    }


def tune(config: TuneConfig, workers: int, step: Progress) -> Result:
    """All of it.

    Raises:
        RefusedTable: the folder has a table of this GPU that cannot be read.
        ValueError: the folder cannot be made.
    """
    known(private_folder(config.folder), config.gpu)  # what could not be added to is refused before minutes of work
    journal = journal_of(config)
    with Pool(compile_job, workers) as pool:
        found = compile_part(config, journal, pool, step)
    usable = [one for one in found if one.ranked.tiles]
    # before the GPU's part, which may be interrupted; a measurement is not replaced by an estimate
    guesses = [estimated_entry(one) for one in usable if one.estimate is not None]
    path = save(config.folder, config.gpu, guesses) if usable else None
    if config.device is not None and usable:
        found = measure_part(config, usable, journal, step) + [one for one in found if not one.ranked.tiles]
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
    if left := [one.left for one in found if one.left]:
        notes.append(
            f"left by --budget: {len(left)} of {len(found)} kernels, masks and lengths, {sum(left)} binaries or more; "
            "the same command goes on"
        )
    if cut := [one for one in found if one.measured is not None and not one.measured.complete]:
        notes.append(f"{len(cut)} of {len(found)} were cut short: a longer --budget tells more")
    if path is not None:
        notes.append(f"written: {path}")
    times = {
        one.point: samples(one.best_runs).median / one.baseline_seconds
        for one in found
        if one.best_runs and one.baseline_seconds
    }
    if times:
        best = min(times, key=times.__getitem__)
        notes.append(
            f"best: {sum(ratio < 1 for ratio in times.values())} of {len(found)} are faster than the default, at most "
            f"{point_text(best)} by {1 - times[best]:.1%}"
        )
    elif any(one.tile is not None for one in found):
        notes.append("best: by bounds alone; estimates serve who asks: kernels.default_config(q, v, estimated=True)")
    return notes
