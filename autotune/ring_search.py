"""``ringattn tune --ring``: what all ranks of a ring share, found by running whole steps of it on all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import triton
from torch.distributed.elastic.multiprocessing.api import SignalException

from ..bench.common.attention import AttentionConfig
from ..bench.common.launching import Member, cores, member, spawn, world_of
from ..bench.common.memory import Needs, needs_of_ranks, refuse_too_large
from ..bench.common.memory_table import tuned_bytes
from ..bench.common.output import prints
from ..bench.common.provenance import provenance
from ..bench.common.result import Result, Row
from ..bench.common.timing import Clock, Ranks
from ..bench.ring.candidates import Candidate, Setting, ours
from ..bench.ring.runs import gathered, judged
from ..comm import resolve_group
from ..comm.control import Control, control_of
from ..comm.topology import nvml
from ..kernels.tables import Gpu, gpu_of
from ..ring import Ring
from .measure import reading_of
from .model import SHORT, Shape
from .rings import CPU, DEFAULT, WIRES, RingEntry, RingPoint, RingSetting, settings
from .search import LEAST_TURNS, Reading, clocks_of, halving, median, planned, spread, unthrottled
from .store import known, private_folder, save
from .tune import driver, progress, short_command

T = TypeVar("T")

CHECKED = 192  # tokens per rank of the check: several tiles, and float64 scores that are quick
WIRE_ERRORS = {None: 0.0, "bf16": 2**-7, "fp8": 2**-3}
"""What a wire may add, over the largest magnitude: a rounding of K/V by that dtype's spacing."""

LONG = {short: name for name, short in SHORT.items()}


@dataclass(frozen=True)
class RingConfig:
    """What the command was asked for; the same on every rank."""

    point: RingPoint
    device: str  # cpu or cuda
    wires: tuple[str, ...]
    budget: float  # seconds of timed runs
    folder: Path
    threads: int = 1  # per process
    seed: int = 0

    def attention(self, tokens: int) -> AttentionConfig:
        point = self.point
        return AttentionConfig(
            tokens * point.world, point.world, 1, point.heads, point.kv_heads, point.head_dim, LONG[point.dtype],
            point.mask == "bounded", "zigzag", self.threads, self.seed, self.device,
        )  # fmt: skip

    @property
    def settings(self) -> list[RingSetting]:
        """All that are tried, the default first."""
        return settings(self.point, self.device, self.wires)


@dataclass
class RingReport:
    """What every rank knows after a search."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    entry: RingEntry | None = None
    gpu: Gpu = CPU
    path: Path | None = None
    complete: bool = True  # not ended by its budget


# the command


def configs_of(
    shape: Shape, lengths: Sequence[int], causal: bool, device: str, world: int | None, wire: str, budget: float,
    folder: Path,
) -> list[RingConfig]:  # fmt: skip
    """One per length.

    Raises:
        typer.BadParameter: not as many ranks as the launcher started.
        ValueError: an attention or a wire that a ring here is not tuned for, or one rank alone.
    """
    wires = tuple(wire.split(",")) if wire else ()
    if unknown := {*wires} - {*WIRES}:
        raise ValueError(f"--wire is {', '.join(sorted(unknown))}: it takes some of {', '.join(WIRES)}")
    if shape.value_dim != shape.head_dim:
        raise ValueError(f"--value-dim is {shape.value_dim}: rings are tuned with values of --head-dim")
    place = member()
    if place is not None and place.world < 2:
        raise ValueError("the launcher started 1 rank: a ring to tune takes at least 2")
    ranks = world_of(place, world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    share = max(1, cores() // (place.local_world if place is not None else ranks))
    mask = "bounded" if causal else "full"
    points = [
        RingPoint(ranks, shape.heads, shape.kv_heads, shape.head_dim, shape.dtype, mask, tokens) for tokens in lengths
    ]
    return [RingConfig(point, device, wires, budget / len(points), folder, share) for point in points]


def candidates(configs: Sequence[RingConfig]) -> Result:
    """``--list``: a row per length and setting."""
    rows: list[Row] = [{"tokens": config.point.length, **asdict(one)} for config in configs for one in config.settings]
    first = configs[0]
    words = f"{len(rows)} candidates for rings of {first.point.world} ranks on {first.device}"
    return Result("tune --ring", dict.fromkeys(rows[0], ""), rows, notes=[words])


UNITS = {
    "tokens": "", "transport": "", "chunks": "", "channels": "", "wire_dtype": "", "time": "ms", "spread": "%",
    "runs": "", "note": "",
}  # fmt: skip


def tune_rings(configs: Sequence[RingConfig]) -> Result:
    """A search per length; failed are those where no setting runs.

    Raises:
        RefusedTable: the folder has a table of this GPU that cannot be read.
        ValueError: the folder cannot be made.
        typer.BadParameter: a length that does not fit the free memory, with the one that does.
        typer.Exit: a rank failed.
        KeyboardInterrupt: by the user, or who else ends processes.
    """
    first, place = configs[0], member()
    device = torch.device(first.device, 0) if place is None else place.shared_device(first.device)
    if prints():
        known(private_folder(first.folder), gpu_of(device) or CPU)  # what could not be added to is refused early
    for config in configs:
        check_room(config)
    try:
        reports = [spawn(config.point.world, search_ring, config, device=config.device) for config in configs]
    except SignalException:  # what torch's launcher makes of Ctrl-C
        raise KeyboardInterrupt from None
    pairs = [*zip(configs, reports, strict=True)]
    return Result(
        "tune --ring",
        UNITS,
        [{"tokens": config.point.length, **row} for config, one in pairs for row in one.rows],
        [f"{config.point.length} tokens: no setting runs here: see the notes of the rows" for config, one in pairs
         if one.entry is None],
        [f"{config.point.length} tokens: {line}" for config, one in pairs for line in notes_of(one)],
        provenance(torch.device(first.device)),
    )  # fmt: skip


def check_room(config: RingConfig) -> None:
    """Refuse what does not fit this machine's free memory, with the tokens that do: typer.BadParameter."""
    place, device = member(), torch.device(config.device)
    ranks_here = config.point.world if place is None else place.local_world

    def needed(tokens: int) -> Needs:
        return needs_of_ranks(tuned_bytes(config.attention(tokens), len(config.settings)), device, ranks_here)

    unit = f"tokens on each of {config.point.world} ranks"
    refuse_too_large("--seqlen", config.point.length, needed, device, unit=unit)


def notes_of(report: RingReport) -> list[str]:
    """The choice in words."""
    if report.entry is None:
        return []
    one = report.entry
    gain = 1 - one.seconds / one.baseline
    against = f"{gain:.1%} less than a ring takes by itself" if gain > 0 else "as a ring does by itself"
    cut = [] if report.complete else ["cut short by --budget"]
    written = f"written: {report.path}; autotune.shared_ring_settings looks it up"
    return [*cut, written, f"best: {one.setting}, {one.seconds * 1e3:.4g} ms ± {one.spread:.1%} a step, {against}"]


# one rank of a search


def search_ring(place: Member, device: torch.device, config: RingConfig) -> RingReport:
    """One rank of the search."""
    torch.set_num_threads(config.threads)
    report = RingReport(gpu=gpu_of(device) or CPU)
    with ExitStack() as stack:
        rings, why = opened(config, stack)
        problem, small = config.attention(config.point.length), config.attention(CHECKED)
        why |= wrong(small, rings, device)
        shards = inputs(problem, device)
        right = {one: ring_candidate(problem, ring, device) for one, ring in rings.items() if one not in why}
        taken, report.complete = timed(config, right, shards, device, stack)
        report.rows = [row_of(one, taken.get(one, []), why.get(one)) for one in (*taken, *why)]
        if any(taken.values()):
            chosen = RingSetting(**of_rank_0(asdict(best_of(taken))))
            report.entry = entry_of(config.point, resolved(chosen, rings[chosen]), taken[chosen], taken.get(DEFAULT))
            if place.rank == 0:
                report.path = save(config.folder, report.gpu, rings=[report.entry])
        return report


def timed(
    config: RingConfig,
    candidates: Mapping[RingSetting, Candidate],
    shards: tuple[torch.Tensor, ...],
    device: torch.device,
    stack: ExitStack,
) -> tuple[dict[RingSetting, list[Reading]], bool]:
    """The search itself, with a bar on rank 0: the same on all ranks, whose clocks differ."""
    clock, reader = Clock(device, Ranks()), nvml.Reader(device)
    step = stack.enter_context(progress()) if dist.get_rank() == 0 else lambda part, more: None
    part = f"measuring {config.point.length} tokens"
    step(part, planned(len({*candidates} - {DEFAULT})))
    for candidate in candidates.values():
        candidate.run(shards)  # compiles
    # of the timed runs alone; at least one of each
    ends, runs = time.monotonic() + config.budget, 0

    def left() -> float:
        return 1.0 if runs < len(candidates) else of_rank_0(ends - time.monotonic())

    def run(one: RingSetting) -> Reading:
        nonlocal runs
        runs += 1
        found = unthrottled(partial(reading, one), left)
        step(part, None)
        return found

    def reading(one: RingSetting) -> Reading:
        mine = reading_of(clock(partial(candidates[one].run, shards)), reader())
        reasons: list[Any] = ranks().gather(mine.throttled, what="why clocks are low")
        return replace(mine, throttled=tuple(dict.fromkeys(chain(*reasons))))

    return halving(candidates, DEFAULT, run, left)


def opened(config: RingConfig, stack: ExitStack) -> tuple[dict[RingSetting, Ring], dict[RingSetting, str]]:
    """A ring for every setting, and why the others cannot be."""
    rings: dict[RingSetting, Ring] = {}
    why: dict[RingSetting, str] = {}
    for one in config.settings:
        try:
            rings[one] = stack.enter_context(Ring(**one.arguments))
        except ValueError as error:
            why[one] = str(error)
    return rings, why


def wrong(problem: AttentionConfig, rings: dict[RingSetting, Ring], device: torch.device) -> dict[RingSetting, str]:
    """What cannot run here, or whose results err by more than rounding explains; the same on every rank.

    Allowed is twice the error of PyTorch's attention in the same dtype plus rounding, the rule of the tests; with
    narrower K/V on the wire also what their rounding explains.
    """
    tensors, heads = problem.tensors(), range(problem.kv_heads)
    reference, limits = judged(problem, tensors, heads, torch.device("cpu"))
    sizes = reference.sizes()
    found: dict[RingSetting, str] = {}
    for one, ring in rings.items():
        try:
            candidate = ring_candidate(problem, ring, device)
            results = gathered(candidate, candidate.run(candidate.shards(tensors, device)), problem, heads)
        except (ValueError, RuntimeError, ImportError) as error:  # on every rank alike: what a transport cannot do here
            found[one] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        for name, error_ in reference.differences(results).items():
            tolerance = limits[name] + WIRE_ERRORS[one.wire_dtype] * sizes[name]
            if not error_ <= tolerance:  # also NaN
                found.setdefault(one, f"{name} errs by {error_:.2g}, allowed are {tolerance:.2g}")
    return found


def ring_candidate(problem: AttentionConfig, ring: Ring, device: torch.device) -> Candidate:
    """``ring_attention`` through one of the rings."""
    return ours(problem.layout, Setting(problem, (problem.layout,), device, lambda: ring))


def inputs(problem: AttentionConfig, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout of this rank, made where they are used."""
    draw = torch.Generator(device).manual_seed(problem.seed + dist.get_rank())
    tokens, dtype = problem.held.lengths[dist.get_rank()], getattr(torch, problem.dtype)
    return tuple(
        torch.randn(1, tokens, count, problem.head_dim, generator=draw, device=device, dtype=dtype)
        for count in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    )


def of_rank_0(value: T) -> T:
    """Rank 0's, on every rank; tuples as lists."""
    return ranks().merged(value, lambda values: values[0], what="what rank 0 says")  # type: ignore[return-value]


def ranks() -> Control:
    """What all ranks tell each other."""
    return control_of(resolve_group()).scope("tune")


def best_of(known: Mapping[RingSetting, Sequence[Reading]]) -> RingSetting:
    """The least median among those that ran to the end; the default, where none is faster by more than the spread."""
    most = max(map(len, known.values()))
    final = {one: median(runs) for one, runs in known.items() if len(runs) == most}
    best = min(final, key=final.__getitem__)
    if DEFAULT not in final:
        return best
    noise = max(spread(known[one]) for one in (best, DEFAULT))
    return best if most >= LEAST_TURNS and final[best] < (1 - noise) * final[DEFAULT] else DEFAULT


def resolved(setting: RingSetting, ring: Ring) -> RingSetting:
    """With the transport that ``auto`` was."""
    return replace(setting, transport=ring.transport) if setting.transport == "auto" else setting


def entry_of(
    point: RingPoint, setting: RingSetting, runs: Sequence[Reading], baseline: Sequence[Reading] | None
) -> RingEntry:
    """Medians in seconds."""
    return RingEntry(
        point, setting, datetime.now(UTC).isoformat(timespec="seconds"), median(runs), spread(runs),
        median(baseline or runs), {"triton": triton.__version__, "torch": torch.__version__}, driver(),
        clocks_of(runs), short_command(),
    )  # fmt: skip


def row_of(setting: RingSetting, runs: Sequence[Reading], why: str | None) -> dict[str, Any]:
    return {
        **asdict(setting),
        "time": median(runs) * 1e3 if runs else None,
        "spread": 100 * spread(runs) if runs else None,
        "runs": len(runs),
        "note": why or ("what a ring takes by itself" if setting == DEFAULT else ""),
    }
