"""``ringattn tune --ring``: what all ranks of a ring share, found by running whole steps of it on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..bench.common.attention import AttentionConfig
from ..bench.common.errors import Inputs, Judge, judge_of
from ..bench.common.flags import resolve_threads, resolve_world
from ..bench.common.launching import spawn
from ..bench.common.memory import refuse_ranks
from ..bench.common.memory_table import tuned_bytes
from ..bench.common.output import prints
from ..bench.common.progress import progress
from ..bench.common.provenance import provenance
from ..bench.common.ranks import Member, member
from ..bench.common.result import Result
from ..bench.common.timing import Clock, Ranks
from ..bench.ring.candidates import Candidate, Setting, ours
from ..bench.ring.runs import gathered
from ..comm import resolve_group
from ..comm.control import control_of
from ..comm.topology import nvml
from ..kernels.gpu import gpu_or_interpreter
from ..reference.masks import Masks
from ..ring import Ring
from .rings import DEFAULT, RingEntry, RingPoint, RingSetting, read_rings, save_ring, settings
from .search import Budget, Measured, Reading, clocks_of, planned, samples, search
from .space import SHORT, Shape
from .store import private_folder
from .tune import driver, measurement

CHECKED = 192  # tokens per rank of the check: several tiles, and float64 scores that are quick
LONG = {short: name for name, short in SHORT.items()}
UNITS = {
    "tokens": "", "transport": "", "chunks": "", "channels": "", "time": "ms", "spread": "%", "runs": "", "note": "",
}  # fmt: skip


def problems_of(
    shape: Shape, lengths: Sequence[int], causal: bool, device: str, world: int | None
) -> list[AttentionConfig]:
    """One per number of tokens on a rank.

    Raises:
        typer.BadParameter: not as many ranks as the launcher started.
        ValueError: an attention that a ring here is not tuned for, or one rank alone.
    """
    if shape.value_dim != shape.head_dim:
        raise ValueError(f"--value-dim is {shape.value_dim}: rings are tuned with values of --head-dim")
    place = member()
    if place is not None and place.world < 2:
        raise ValueError("the launcher started 1 rank: a ring to tune takes at least 2")
    ranks = resolve_world(world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    whole = AttentionConfig(
        ranks, ranks, 1, shape.heads, shape.kv_heads, shape.head_dim, LONG[shape.dtype], causal, "zigzag",
        resolve_threads(None, ranks), 0, device,
    )  # fmt: skip
    return [replace(whole, seqlen=tokens * ranks) for tokens in lengths]


def point_of(problem: AttentionConfig) -> RingPoint:
    """What a table has settings for."""
    return RingPoint(
        problem.world, problem.heads, problem.kv_heads, problem.head_dim, SHORT[problem.dtype],
        "bounded" if problem.causal else "full", problem.seqlen // problem.world,
    )  # fmt: skip


def tune_rings(problems: Sequence[AttentionConfig], budget: float, folder: Path) -> Result:
    """A search per length, with even parts of ``budget`` seconds; failed are those where no setting runs.

    Raises:
        RefusedTable: the folder has a file of this GPU's rings that cannot be read.
        ValueError: the folder cannot be made.
        typer.BadParameter: a length that does not fit the free memory, with the one that does.
        typer.Exit: a rank failed.
        KeyboardInterrupt: by the user.
    """
    kind, place = problems[0].device, member()
    device = torch.device(kind, 0) if place is None else place.shared_device(kind)
    if prints():
        read_rings(private_folder(folder), gpu_or_interpreter(device))  # what could not be added to is refused early
    for problem in problems:
        rings = len(settings(point_of(problem), kind))
        refuse_ranks("--seqlen", problem, partial(tuned_bytes, rings=rings), per_rank=True)
    found = Result("tune --ring", UNITS, provenance=provenance(torch.device(kind)))
    for problem in problems:
        found.add(spawn(problem.world, search_ring, problem, budget / len(problems), folder, device=kind))
    return found


# one rank of a search


def search_ring(place: Member, device: torch.device, problem: AttentionConfig, budget: float, folder: Path) -> Result:
    """One rank of the search, which is the same on all; rank 0 writes what it finds."""
    torch.set_num_threads(problem.threads)
    point, gpu = point_of(problem), gpu_or_interpreter(device)
    control = control_of(resolve_group()).scope("tune")
    clock, reader, seconds = Clock(device, Ranks()), nvml.Reader(device), Budget(budget)
    rings: dict[RingSetting, Ring] = {}
    steps: dict[RingSetting, Candidate] = {}

    def left() -> float:
        """By the clock of rank 0."""
        found: Any = control.merged(seconds.left(), lambda values: values[0], what="the seconds left")
        return float(found)

    def run(one: RingSetting) -> Reading:
        mine = Reading.of(clock(partial(steps[one].run, shards)), reader())
        reasons: list[Any] = control.gather(mine.throttled, what="why clocks are low")
        return replace(mine, throttled=tuple(dict.fromkeys(chain(*reasons))))

    with ExitStack() as stack:
        small, shards = replace(problem, seqlen=CHECKED * problem.world), problem.drawn(place.rank, device)
        # twice the error of PyTorch's attention in the same dtype, plus rounding: the rule of the tests
        judge = judge_of(Inputs(*small.tensors()), Masks(causal=small.causal))
        tried = settings(point, problem.device)

        def check(one: RingSetting) -> str | None:
            try:
                rings[one] = stack.enter_context(Ring(**one.arguments))
                if (wrong := error_of(small, rings[one], device, judge)) is not None:
                    return wrong
                steps[one] = candidate_of(problem, rings[one], device)
                steps[one].run(shards)  # compiles
            except (ValueError, RuntimeError, ImportError) as error:  # on every rank alike: what cannot run here
                return f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None

        step = stack.enter_context(progress()) if place.rank == 0 else lambda part, more: None
        part = f"measuring {point.length} tokens"
        step(part, planned(len(tried) - 1))
        found = search(tried, DEFAULT, check, run, left, done=lambda: step(part, None))
        entry = None if found.best is None else entry_of(point, found, rings[found.best].transport)
        path = save_ring(folder, gpu, entry) if entry is not None and place.rank == 0 else None
    return result_of(point, found, entry, path)


def error_of(problem: AttentionConfig, ring: Ring, device: torch.device, judge: Judge) -> str | None:
    """The result that errs by more than is allowed; the same on every rank."""
    candidate = candidate_of(problem, ring, device)
    mine = candidate.run(candidate.shards(problem.tensors(), device))
    errors = judge.differences(gathered(candidate, mine, problem, judge.kv_heads))
    wrong = [f"{name} errs by {errors[name]:.2g}, allowed are {judge.limits[name]:.2g}" for name in judge.wrong(errors)]
    return wrong[0] if wrong else None


def candidate_of(problem: AttentionConfig, ring: Ring, device: torch.device) -> Candidate:
    """``ring_attention`` through one of the rings."""
    return ours(problem.layout, Setting(problem, (problem.layout,), device, lambda _: ring))


def entry_of(point: RingPoint, found: Measured[RingSetting], transport: str) -> RingEntry:
    """Medians in seconds, of the best, with the transport that it was."""
    assert found.best is not None
    runs = samples(found.readings[found.best])
    baseline = samples(found.readings.get(DEFAULT, found.readings[found.best])).median
    about = {**measurement(), "driver": driver(), "clocks": clocks_of(found.readings[found.best])}
    return RingEntry(point, replace(found.best, transport=transport), runs.median, runs.spread, baseline, about)


def result_of(point: RingPoint, found: Measured[RingSetting], entry: RingEntry | None, path: Path | None) -> Result:
    """A row per setting, and the choice in words."""
    result, where = Result("tune --ring", UNITS), f"{point.length} tokens"
    for one, readings in found.readings.items():
        runs, note = samples(readings), "what a ring takes by itself" if one == DEFAULT else ""
        figures = {"time": runs.median * 1e3, "spread": 100 * runs.spread, "runs": len(readings)}
        result.rows.append({"tokens": point.length, **asdict(one), **figures, "note": note})
    result.rows += [{"tokens": point.length, **asdict(one), "runs": 0, "note": why} for one, why in found.wrong.items()]
    if not found.complete:
        result.notes.append(f"{where}: cut short: a longer --budget tells more")
    if entry is not None:
        gain = 1 - entry.seconds / entry.baseline
        against = f"{gain:.1%} less than a ring takes by itself" if gain > 0 else "as a ring does by itself"
        result.notes += [
            f"{where}: written: {path}; autotune.shared_ring_settings looks it up",
            f"{where}: best: {entry.setting}, {entry.seconds * 1e3:.4g} ms ± {entry.spread:.1%} a step, {against}",
        ]
    elif found.complete:
        result.failed.append(f"{where}: no setting runs here: see the notes of the rows")
    return result
