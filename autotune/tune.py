"""Steps of ``tune``: compile candidates, write estimates, then measure on the GPU and write the measurements."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from ..bench.common.progress import Progress
from ..bench.common.provenance import provenance, typed_command
from ..bench.common.result import Result
from ..comm.topology import nvml
from ..kernels import Tile
from ..kernels.gpu import GpuSpec
from ..kernels.tables import TUNED_KERNELS, TableEntry, TuningPoint, tuned_options
from .candidates import (
    RANKING_ROLE,
    BudgetSpentError,
    Compiler,
    RankedCandidates,
    compile_digest,
    compile_job,
    compile_jobs,
    rank_candidates,
    ranking_job,
)
from .compile import builtin_tile
from .device_trials import DeviceTrials, check_lengths
from .pool import Pool
from .search import Budget, SearchResult, TimedRun, median_clocks, median_with_transfer, planned_runs, samples, search
from .store import Journal, private_folder, read_tuned_table, save
from .tile_space import ModelShape, model_points, nearest_tiles, point_text, tile_candidates, tile_text

CANDIDATES = 20  # candidates per point to measure: about the best quarter of those that compile
SCHEDULED_TILES = 2  # number of best candidates that are also tried with every other tile schedule


@dataclass(frozen=True)
class TuneConfig:
    """Arguments of ``ringattn tune``."""

    shape: ModelShape
    lengths: tuple[int, ...]
    causal: bool
    gpu: GpuSpec
    device: torch.device | None  # None: compile only
    folder: Path
    budget: float  # seconds on the GPU, or to compile if nothing is measured
    kernels: tuple[str, ...] = TUNED_KERNELS
    tiles: int | None = None
    """Number of tiles to try, those nearest to the built-in tile; None: the whole space and all schedules."""

    @property
    def points(self) -> list[TuningPoint]:
        """Points of all kernels that have a built-in tile to compare with."""
        points = model_points(self.shape, self.lengths, causal=self.causal, kernels=self.kernels)
        return [point for point in points if tile_without_table(point, self.gpu.arch) is not None]


def tile_without_table(point: TuningPoint, arch: int) -> Tile | None:
    """Return the tile that a launch uses without a table, or None if no tile fits."""
    return builtin_tile(point.kernel, arch, point.dtype, max(point.head_dim, point.head_dim_v))


@dataclass(frozen=True)
class PointResult:
    """Result of one point."""

    point: TuningPoint
    default: Tile
    ranked: RankedCandidates = field(default_factory=RankedCandidates)
    search_result: SearchResult[Tile] = field(default_factory=SearchResult)
    uncompiled_jobs: int = 0  # binaries that are not compiled, because the budget ended

    @property
    def estimate(self) -> Tile | None:
        """Best tile by throughput bound, or None; without tiles with tuned options, which bounds ignore."""
        return next((tile for tile in self.ranked.tiles if not tuned_options(tile)), None)

    @property
    def tile(self) -> Tile | None:
        """Fastest tile, or the estimate if none was measured; None if no candidate passes."""
        return self.search_result.best or self.estimate

    @property
    def baseline_seconds(self) -> float | None:
        """Median of the built-in tile in the same search; None if its results are wrong or it was not timed."""
        runs = self.search_result.readings.get(self.default)
        return samples(runs).median if runs else None

    @property
    def best_runs(self) -> Sequence[TimedRun]:
        """Timed runs of the fastest tile; empty if nothing was measured."""
        best = self.search_result.best
        return () if best is None else self.search_result.readings[best]

    def as_row(self) -> dict[str, Any]:
        """Return the table row of this point, with the columns of :data:`UNITS`."""
        ranked, tile, runs, baseline = self.ranked, self.tile, self.best_runs, self.baseline_seconds
        row: dict[str, Any] = {
            "kernel": self.point.kernel, "mask": self.point.mask, "tokens": self.point.length,
            "tile": "none" if tile is None else tile_text(tile), "default": tile_text(self.default),
            "bound": ranked.results[tile].bound if tile is not None and tile in ranked.results else None,
            "tried": len({*ranked.dropped, *ranked.results}), "failed": len(ranked.dropped),
            "left": self.uncompiled_jobs, "wrong": len(self.search_result.errors),
        }  # fmt: skip
        if runs:
            with_transfer = median_with_transfer(runs)
            row |= {"time": samples(runs).median * 1e3, "spread": 100 * samples(runs).spread}
            row |= {"default's time": baseline and baseline * 1e3, "beside": with_transfer and with_transfer * 1e3}
        return row


UNITS = {
    "kernel": "", "mask": "", "tokens": "", "tile": "", "time": "ms", "default's time": "ms", "bound": "%",
    "spread": "%", "beside": "ms", "default": "", "tried": "", "failed": "", "wrong": "", "left": "",
}  # fmt: skip


def open_journal(config: TuneConfig) -> Journal:
    """Open the compile journal in Triton's cache folder, so that it is deleted together with the binaries."""
    folder = private_folder(Path(triton.knobs.cache.dir).absolute())
    return Journal(folder / f"ringattn_sm_{config.gpu.arch}.jsonl", compile_digest())


def compile_points(config: TuneConfig, journal: Journal, pool: Pool, step: Progress) -> list[PointResult]:
    """Compile, filter and rank the candidates of every point, and compile all launches that measuring needs.

    The same binaries are compiled without a GPU, so that a machine with a GPU finds them in Triton's cache. Points are
    compiled one after another, so that the budget completes as many points as possible.
    """
    budget = Budget(config.budget if config.device is None else math.inf)
    compiler = partial(
        compile_jobs, journal=journal, pool=pool, progress=partial(step, "compiling"), seconds_left=budget.left
    )
    return [_compiled(config, point, compiler) for point in config.points]


def _compiled(config: TuneConfig, point: TuningPoint, compiler: Compiler) -> PointResult:
    """Compile and rank the candidates of one point, and compile the launches that measuring it needs."""
    arch, heads, default = config.gpu.arch, config.shape.heads, tile_without_table(point, config.gpu.arch)
    assert default is not None
    tiles = tile_candidates(point, arch)
    if config.tiles is not None:
        tiles = nearest_tiles(tiles, default, config.tiles)
    # the timed launch has the point's length, and the check launches one hop per shard
    launches = ((RANKING_ROLE, None), *((role, check_lengths(point)) for role in ("first", "middle", "last")))
    try:
        ranked = rank_candidates(
            point, arch, compiler, tiles, heads=heads, count=CANDIDATES,
            scheduled_tiles=SCHEDULED_TILES if config.tiles is None else 0,
        )  # fmt: skip
        compiler(
            ranking_job(point, tile, arch, heads, *how) for tile, how in product([*ranked.tiles, default], launches)
        )
    except BudgetSpentError as error:
        return PointResult(point, default, uncompiled_jobs=error.args[0])
    return PointResult(point, default, ranked)


def measure_points(
    config: TuneConfig, compiled_points: Sequence[PointResult], journal: Journal, step: Progress
) -> list[PointResult]:
    """Search every point on the GPU, and save the result of each point at once.

    The journal records tiles that break the device.
    """
    assert config.device is not None
    remaining = Budget(config.budget)
    step("measuring", sum(planned_runs(len({*result.ranked.tiles} - {result.default})) for result in compiled_points))
    results = []
    for number, result in enumerate(compiled_points):
        trials = DeviceTrials(result.point, config.shape, config.device)
        searched = search(
            result.ranked.tiles, result.default, partial(check_on_device, trials, result.point, config.gpu, journal),
            trials.run,
            remaining.share(len(compiled_points) - number).left, on_run=partial(step, "measuring", None),
        )  # fmt: skip
        results.append(replace(result, search_result=searched))
        if searched.best is not None:
            save(config.folder, config.gpu, [table_entry(results[-1])])
    return results


def check_on_device(trials: Any, point: TuningPoint, gpu: GpuSpec, journal: Journal, tile: Tile) -> str | None:
    """Return the problem of a tile or None. A tile that broke the device in an earlier run does not run again."""
    key = f"{gpu.name} {installed_driver()} | {point_text(point)} | {tile_text(tile)}"
    if (broken := journal.get(key, dict)) is not None:
        return str(broken["wrong"])
    try:
        problem: str | None = trials.find_error(tile)
    except torch.AcceleratorError as error:  # the device is unusable now; the next run skips the tile
        journal.put(key, {"wrong": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        raise
    return problem


def table_entry(point_result: PointResult) -> TableEntry:
    """Return a table entry with the measurements of the fastest tile.

    Without measurements the entry has the estimate and its bound; default configs ignore such entries.
    """
    point, tile, runs = point_result.point, point_result.tile, point_result.best_runs
    assert tile is not None
    if not runs:
        result = point_result.ranked.results[tile]
        return TableEntry(
            point, tile, estimated=True, bound=result.bound, bound_by=result.bound_by, **measurement_details()
        )
    return TableEntry(
        point, tile, estimated=False, seconds=samples(runs).median, spread=samples(runs).spread,
        beside=median_with_transfer(runs), baseline=point_result.baseline_seconds, clocks=median_clocks(runs),
        driver=installed_driver(),
        **measurement_details(),
    )  # fmt: skip


def installed_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if NVML cannot tell it."""
    try:
        return nvml.driver_version()
    except nvml.NvmlUnavailableError:
        return None


def measurement_details() -> dict[str, Any]:
    """Return the date, the versions and the command line of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"triton": triton.__version__, "torch": torch.__version__},
        "command": typed_command(),
    }


def tune(config: TuneConfig, workers: int, step: Progress) -> Result:
    """Run ``ringattn tune`` with ``workers`` compiler processes.

    Raises:
        RefusedTable: The folder has a table of this GPU that cannot be read.
        ValueError: The folder cannot be created.
    """
    read_tuned_table(private_folder(config.folder), config.gpu)  # raise for an unreadable table before minutes of work
    journal = open_journal(config)
    with Pool(compile_job, workers) as pool:
        results = compile_points(config, journal, pool, step)
    usable = [result for result in results if result.ranked.tiles]
    # save estimates before measuring, which may be interrupted; they never replace measurements
    estimates = [table_entry(result) for result in usable if result.estimate is not None]
    path = save(config.folder, config.gpu, estimates) if usable else None
    if config.device is not None and usable:
        unusable = [result for result in results if not result.ranked.tiles]
        results = measure_points(config, usable, journal, step) + unusable
    return Result(
        "tune",
        UNITS,
        [result.as_row() for result in results],
        [
            f"{point_text(it.point)}: no candidate passes"
            for it in results
            if it.tile is None and not it.uncompiled_jobs
        ],
        tuning_notes(results, path),
        provenance(config.device or torch.device("cpu")),
    )


def tuning_notes(point_results: Sequence[PointResult], path: Path | None) -> list[str]:
    """Return notes on dropped candidates, the budget, the written table and the speedup."""
    reasons = Counter(
        re.sub(r"^\d+ ", "", reason) for result in point_results for reason in result.ranked.dropped.values()
    )
    notes = [f"dropped: {count} x {reason}" for reason, count in reasons.most_common(4)]
    if left := [result.uncompiled_jobs for result in point_results if result.uncompiled_jobs]:
        notes.append(
            f"--budget ran out: {len(left)} of {len(point_results)} points still have at least {sum(left)} binaries to "
            "compile; run the same command again to continue"
        )
    if incomplete := sum(not result.search_result.is_complete for result in point_results):
        notes.append(
            f"--budget ran out: {incomplete} of {len(point_results)} searches are incomplete; increase --budget"
        )
    if path is not None:
        notes.append(f"written: {path}")
    ratios = {
        result.point: samples(result.best_runs).median / result.baseline_seconds
        for result in point_results
        if result.best_runs and result.baseline_seconds
    }
    if ratios:
        best = min(ratios, key=ratios.__getitem__)
        notes.append(
            f"best: {sum(ratio < 1 for ratio in ratios.values())} of {len(point_results)} points are faster than the "
            f"default; largest gain {1 - ratios[best]:.1%} for {point_text(best)}"
        )
    elif any(result.tile is not None for result in point_results):
        notes.append("best: estimates only; kernels.default_config(q, v, estimated=True) uses them")
    return notes
