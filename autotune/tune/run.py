"""One run of ``tune``: compile, write estimates, and where there is a GPU measure and write what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from ...bench.common.provenance import command
from ...comm.topology import nvml
from ...kernels import Tile
from ...kernels.tables import TUNED, Entry, Gpu, Point, file_name, options_of, triton_version
from .. import (
    Budget,
    Job,
    Journal,
    Judge,
    Measured,
    Rank,
    Ranked,
    Search,
    Shape,
    Trials,
    Verdict,
    known,
    nearest,
    planned,
    points_of,
    private_folder,
    rank_candidates,
    save,
    space,
    tile_text,
)
from ..inspect.rank import LEAST_CONFIGS
from ..inspect.report import Row, identity
from ..inspect.variant import default_tile as built_in_tile
from ..ranking import RANKING_ROLE, job_of, point_text
from ..search import clocks_of, median, spread
from .compile import compile_job, digest, in_cache, variant_of
from .measure import CHECKED_SIDES, DeviceTrials

# of a point that get time on a GPU: the best quarter or so of what compiles, and what a rank correlation takes
CANDIDATES = LEAST_CONFIGS
ORDERS_OF = 2  # the best of them are also tried in every other order of their launch
LAUNCHES = ((RANKING_ROLE, None), *((role, CHECKED_SIDES) for role in ("first", "middle", "last")))
"""Of a tile on a GPU: what is timed, of the point's length, and the shards that a result is checked by."""
MOST_COMMAND = 400  # characters that a table takes


class Bars(Protocol):
    """What shows progress: a bar for each part."""

    def more(self, part: str, count: int) -> None:
        """So many steps more are to be done."""

    def step(self, part: str) -> None:
        """One is done."""


@dataclass(frozen=True)
class Wish:
    """What the command was asked for."""

    shape: Shape
    lengths: tuple[int, ...]
    causal: bool
    gpu: Gpu
    device: torch.device | None  # None: compile only
    folder: Path
    budget: float  # seconds on the GPU
    workers: int
    kernels: tuple[str, ...] = TUNED
    orders_of: int = ORDERS_OF
    """So many of the best tiles are also tried in every other order of their launch."""
    near: int | None = None
    """So many tiles alone, those nearest to the built-in one; None: the whole space."""

    @property
    def points(self) -> list[Point]:
        """Of all kernels that have a default to be compared with."""
        every = points_of(self.shape, list(self.lengths), causal=self.causal, kernels=self.kernels)
        return [point for point in every if built_in(point, self.gpu.arch) is not None]

    def tiles_of(self, point: Point, arch: int) -> list[Tile]:
        """What is compiled at a point."""
        every = space(point, arch)
        return every if self.near is None else nearest(every, default_tile(point, arch), self.near)


@dataclass(frozen=True)
class Found:
    """What became of one point."""

    point: Point
    candidates: int
    ranked: Ranked
    default: Tile
    default_bound: float | None
    measured: Measured | None = None

    def as_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "kernel": self.point.kernel, "mask": self.point.mask, "tokens": self.point.length,
            "tried": self.candidates, "failed": len(self.ranked.dropped),
            "tile": tile_text(self.tile) if self.tile is not None else "none", "default": tile_text(self.default),
            "bound": None if self.tile is None else self.bound_of(self.tile), "default's": self.default_bound,
        }  # fmt: skip
        if (best := self.measured) is not None:
            row |= {
                "ms": median(best.alone) * 1e3, "±": f"{spread(best.alone):.1%}",
                "beside ms": median(best.beside) * 1e3 if best.beside else None,
                "default's ms": median(best.baseline) * 1e3 if best.baseline else None, "wrong": len(best.wrong),
            }  # fmt: skip
        return row

    @property
    def tile(self) -> Tile | None:
        """The answer; None where nothing passes."""
        if self.measured is not None:
            return self.measured.tile
        return self.estimate

    @property
    def estimate(self) -> Tile | None:
        """The best by its bound of those without options: a kernel or an order that never ran is no estimate."""
        return next((tile for tile in self.ranked.tiles if not options_of(tile)), None)

    def bound_of(self, tile: Tile) -> float | None:
        """In the unit of the verdicts."""
        verdict = self.ranked.verdicts.get(tile)
        return verdict.bound if verdict is not None else self.default_bound if tile == self.default else None


def timed_rows(found: Found, arch: int, heads: int) -> list[Row]:
    """A row per candidate that was timed, with bound and seconds, as ``ringattn inspect --correlate`` takes them."""
    best = found.measured
    return [
        {
            **identity(variant_of(job_of(found.point, tile, arch, heads))),
            "length": found.point.length, "group": found.point.group, "bound": found.bound_of(tile), "seconds": seconds,
            "options": options_of(tile),  # also what no compiler is told of
        }
        for tile, seconds in (best.seconds if best is not None else {}).items()
    ]  # fmt: skip


def built_in(point: Point, arch: int) -> Tile | None:
    """The built-in default; None where there is none that fits."""
    return built_in_tile(point.kernel, arch, point.dtype, max(point.head_dim, point.head_dim_v))


def default_tile(point: Point, arch: int) -> Tile:
    """What a launch takes without a table, of a point that has such."""
    tile = built_in(point, arch)
    assert tile is not None, f"{point_text(point)} has no default on sm_{arch}"
    return tile


def journals(wish: Wish) -> tuple[Journal, Journal]:
    """Of compiling, which any machine may go on from, and of measuring, which only the same GPU may."""
    version, told = triton_version(), digest()
    names = [
        f"{part}_{file_name(name, version).removesuffix('.json')}.jsonl"
        for part, name in (("compiled", f"sm_{wish.gpu.arch}"), ("measured", wish.gpu.name))
    ]
    compiled, measured = (private_folder(wish.folder) / name for name in names)
    return Journal(compiled, told), Journal(measured, f"{told} {driver()} {wish.shape}")


def driver() -> str | None:
    try:
        return nvml.driver_version()
    except nvml.NoNvml:
        return None


def compile_part(
    wish: Wish,
    journal: Journal,
    bars: Bars,
    *,
    compile_with: Callable[[Job], Verdict] = compile_job,
    rank: Rank | None = None,
) -> list[Found]:
    """The candidates of every point, compiled, filtered and ranked; of those to be measured all that a GPU launches.

    Without a GPU as with one: what lies in Triton's cache then, a machine with one need not compile.
    """

    def told(batch: int | None) -> None:
        if batch is None:
            bars.step("compiling")
        else:
            bars.more("compiling", batch)

    judge = Judge(compile_with, journal, workers=wish.workers, told=told, holds=in_cache)
    arch, heads = wish.gpu.arch, wish.shape.heads
    ranked = rank_candidates(
        wish.points, arch, judge, heads=heads, count=CANDIDATES, orders_of=wish.orders_of, rank=rank,
        tiles_of=None if wish.near is None else wish.tiles_of,
    )  # fmt: skip
    defaults = {point: job_of(point, default_tile(point, arch), arch, heads) for point in wish.points}
    verdicts = judge(defaults.values())
    launched = (
        job_of(point, tile, arch, heads, *launch)
        for point, one in ranked.items()
        for tile, launch in product([*one.tiles, defaults[point].tile], LAUNCHES)
    )
    judge(launched, to_launch=True)
    return [
        Found(point, len({*one.dropped, *one.verdicts}), one, defaults[point].tile, verdicts[defaults[point]].bound)
        for point, one in ranked.items()
    ]


def measure_part(
    wish: Wish,
    found: list[Found],
    journal: Journal,
    bars: Bars,
    *,
    trials_of: Callable[[Point], Trials] | None = None,
    budget: Budget | None = None,
) -> list[Found]:
    """Search every point on the GPU; each is in the table as soon as it is known."""
    device = wish.device or torch.device("cpu")
    make = trials_of or (lambda point: DeviceTrials(point, wish.shape, device))
    left = budget or Budget(wish.budget)
    bars.more("measuring", sum(planned(len({*one.ranked.tiles} - {one.default})) for one in found))
    answers = []
    for number, one in enumerate(found):
        search = Search(
            one.point, one.default, make(one.point), journal, left.share(len(found) - number),
            told=lambda: bars.step("measuring"),
        )  # fmt: skip
        best = search.run(one.ranked.tiles)
        answers.append(Found(**{**vars(one), "measured": best}))
        if best is not None:
            save(wish.folder, wish.gpu, [measured_entry(one.point, best)])
    if all(one.measured is not None and one.measured.complete for one in answers):
        journal.forget()  # the answers are in the table; asked again, they are measured again
    return answers


def estimated_entry(found: Found) -> Entry:
    """What compiling alone tells: never a default."""
    assert found.estimate is not None
    verdict = found.ranked.verdicts[found.estimate]
    return Entry(
        found.point, found.estimate, estimated=True, bound=verdict.bound, bound_by=verdict.bound_by, **_provenance()
    )  # fmt: skip


def measured_entry(point: Point, best: Measured) -> Entry:
    """Medians in seconds."""
    return Entry(
        point, best.tile, estimated=False, seconds=median(best.alone), spread=spread(best.alone),
        beside=median(best.beside) if best.beside else None,
        baseline=median(best.baseline) if best.baseline else None,
        clocks=clocks_of(best.alone), driver=driver(), **_provenance(),
    )  # fmt: skip


def _provenance() -> dict[str, Any]:
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    printable = "".join(letter if " " <= letter <= "~" else "?" for letter in command())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "command": printable[:MOST_COMMAND],
    }


def tune(wish: Wish, bars: Bars) -> tuple[list[Found], Path | None]:
    """All of it; the table that was written, None where no candidate of any point passed.

    Raises:
        RefusedTable: the folder has a table of this GPU that cannot be read.
        ValueError: the folder cannot be made.
    """
    known(private_folder(wish.folder), wish.gpu)  # what could not be added to is refused before minutes of work
    compiled, measured = journals(wish)
    found = compile_part(wish, compiled, bars)
    usable = [one for one in found if one.ranked.tiles]
    # before the GPU's part, which may be interrupted; a measurement is not replaced by an estimate
    guesses = [estimated_entry(one) for one in usable if one.estimate is not None]
    path = save(wish.folder, wish.gpu, guesses) if usable else None
    if wish.device is not None and usable:
        answers = measure_part(wish, usable, measured, bars)
        found = answers + [one for one in found if not one.ranked.tiles]
    return found, path
