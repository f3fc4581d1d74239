"""``ringattn tune --ring``: what all ranks of a ring share, found by running whole steps of it on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import typer

from ...autotune.rings import CPU, DEFAULT, RingEntry, RingPoint, RingSetting, best_of, halved, settings
from ...autotune.store import save
from ...comm import Limits
from ...kernels.lookup import Gpu, gpu_of
from ...ring import Ring
from ..launching import Member, cores, member, process_group, started
from ..links.group import device_of
from ..output import prints
from ..overlap.command import Members
from ..provenance import command
from ..ring.candidates import Candidate, Problem, Setting, ours
from ..ring.runs import gathered, judged
from ..timing import Clock, Samples
from .run import driver

CHECKED = 192  # tokens per rank of the check: several tiles, and float64 scores that are quick
WIRE_ERRORS = {None: 0.0, "bf16": 2**-7, "fp8": 2**-3}
"""What a wire may add, over the largest magnitude: a rounding of K/V by that dtype's spacing."""

LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class RingWish:
    """What the command was asked for; the same on every rank."""

    point: RingPoint
    device: str  # cpu or cuda
    wires: tuple[str, ...]
    budget: float  # seconds
    folder: Path
    threads: int = 1  # per process
    seed: int = 0

    def problem(self, tokens: int) -> Problem:
        point = self.point
        return Problem(
            tokens * point.world, point.world, 1, point.heads, point.kv_heads, point.head_dim, LONG[point.dtype],
            point.mask == "bounded", "zigzag", self.threads, self.seed,
        )  # fmt: skip


@dataclass
class RingReport:
    """What every rank knows after a search."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    entry: RingEntry | None = None
    gpu: Gpu = CPU
    path: Path | None = None


def spawned(store: str, wish: RingWish) -> RingReport:
    """The entry of the processes that the command starts itself."""
    place = member()
    assert place is not None
    return search(place, wish, store)


def search(place: Member, wish: RingWish, store: str | None = None) -> RingReport:
    """One rank of the search."""
    torch.set_num_threads(wish.threads)
    device = device_of(place, wish.device)
    with process_group(place, store, device=device), ExitStack() as stack:
        ends = time.monotonic() + wish.budget
        rings, why = opened(wish, stack)
        problem, small = wish.problem(wish.point.length), wish.problem(CHECKED)
        why |= wrong(small, rings, device)
        players = {one: runner(problem, ring, device) for one, ring in rings.items() if one not in why}
        clock = Clock(device, Members())
        for run in players.values():
            run()  # opens transports and compiles
        taken = halved(players, lambda one: clock(players[one]), lambda: agreed(ends - time.monotonic()))
        report = RingReport(gpu=gpu_of(device) or CPU)
        report.rows = [row_of(one, taken.get(one, []), why.get(one)) for one in (*taken, *why)]
        if taken:
            chosen = decided(best_of(taken))
            report.entry = entry_of(wish.point, resolved(chosen, rings[chosen]), taken[chosen], taken.get(DEFAULT))
            if place.rank == 0:
                report.path = save(wish.folder, report.gpu, rings=[report.entry])
        return report


def opened(wish: RingWish, stack: ExitStack) -> tuple[dict[RingSetting, Ring], dict[RingSetting, str]]:
    """A ring for every setting, and why the others cannot be."""
    rings: dict[RingSetting, Ring] = {}
    why: dict[RingSetting, str] = {}
    for one in settings(wish.point, wish.device, wish.wires):
        try:
            rings[one] = stack.enter_context(Ring(**one.arguments, limits=Limits(**one.limits)))
        except ValueError as error:
            why[one] = str(error)
    return rings, why


def wrong(problem: Problem, rings: dict[RingSetting, Ring], device: torch.device) -> dict[RingSetting, str]:
    """What cannot run here, or whose results err by more than rounding explains; the same on every rank.

    Allowed is twice the error of PyTorch's attention in the same dtype plus rounding, the rule of the tests; with
    narrower K/V on the wire also what their rounding explains.
    """
    tensors, heads = problem.tensors(), range(problem.kv_heads)
    judge, limits = judged(problem, tensors, heads, torch.device("cpu"))
    sizes = judge.sizes()
    found: dict[RingSetting, str] = {}
    for one, ring in rings.items():
        try:
            candidate = ring_candidate(problem, ring, device)
            told = gathered(candidate, candidate.run(candidate.shards(tensors, device)), problem, heads)
        except (ValueError, RuntimeError, ImportError) as error:  # on every rank alike: what a transport cannot do here
            found[one] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        for name, error_ in judge.differences(told).items():
            allowed = limits[name] + WIRE_ERRORS[one.wire_dtype] * sizes[name]
            if not error_ <= allowed:  # also NaN
                found.setdefault(one, f"{name} errs by {error_:.2g}, allowed are {allowed:.2g}")
    return found


def ring_candidate(problem: Problem, ring: Ring, device: torch.device) -> Candidate:
    """``ring_attention`` through one of the rings."""
    return ours(problem.layout, Setting(problem, (problem.layout,), device, lambda: ring))


def runner(problem: Problem, ring: Ring, device: torch.device) -> Callable[[], object]:
    """One step of this rank, forward and backward, on inputs of its own."""
    draw = torch.Generator().manual_seed(problem.seed + dist.get_rank())
    one = ring_candidate(problem, ring, device)
    assert one.positions is not None
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    made = (torch.randn(1, len(one.positions), count, problem.head_dim, generator=draw) for count in heads)
    shards = tuple(x.to(device, getattr(torch, problem.dtype)) for x in made)
    return lambda: one.run(shards)


def agreed(seconds: float) -> float:
    """What rank 0 says: ranks whose clocks differ would part."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.item()


def decided(setting: RingSetting) -> RingSetting:
    """Rank 0's choice, on every rank."""
    told = [setting]
    dist.broadcast_object_list(told, 0)
    return told[0]


def resolved(setting: RingSetting, ring: Ring) -> RingSetting:
    """With the transport that ``auto`` was."""
    return replace(setting, transport=ring.transport) if setting.transport == "auto" else setting


def entry_of(point: RingPoint, setting: RingSetting, seconds: list[float], usual: list[float] | None) -> RingEntry:
    """Medians in seconds."""
    samples = Samples(tuple(seconds))
    printable = "".join(letter if " " <= letter <= "~" else "?" for letter in command())
    return RingEntry(
        point, setting, datetime.now(UTC).isoformat(timespec="seconds"), samples.median, samples.spread,
        Samples(tuple(usual)).median if usual else samples.median,
        {"triton": triton.__version__, "torch": torch.__version__}, driver(), printable[:400],
    )  # fmt: skip


def row_of(setting: RingSetting, seconds: list[float], why: str | None) -> dict[str, Any]:
    samples = Samples(tuple(seconds)) if seconds else None
    return {
        **asdict(setting),
        "runs": len(seconds),
        "ms": samples and samples.median * 1e3,
        "±": samples and f"{samples.spread:.1%}",
        "note": why or ("what a ring takes by itself" if setting == DEFAULT else ""),
    }


def told(report: RingReport) -> str:
    """The choice in words."""
    if report.entry is None:
        return "no setting runs here: see the notes"
    one = report.entry
    gain = 1 - one.seconds / one.baseline
    against = f"{gain:.1%} less than a ring takes by itself" if gain > 0 else "as a ring does by itself"
    return (
        f"best: {one.setting}, {one.seconds * 1e3:.4g} ms ± {one.spread:.1%} a step, {against}\n"
        f"written: {report.path}; autotune.ring_settings looks it up"
    )


def tune_ring(wish: RingWish) -> RingReport | None:
    """Here or in new processes; None on ranks that print nothing.

    Raises:
        typer.Exit: a rank failed.
    """
    place = member()
    report = started(wish.point.world, spawned, wish) if place is None else search(place, wish)
    return report if prints() else None


def ring_wish(
    shape: tuple[int, int, int, str], tokens: int, causal: bool, device: str, world: int | None, wires: tuple[str, ...],
    budget: float, folder: Path,
) -> RingWish:  # fmt: skip
    """The wish of the command's flags.

    Raises:
        typer.BadParameter: one rank alone, or a wire that is none.
    """
    place = member()
    here = max(2, torch.cuda.device_count() if device == "cuda" else 0)
    ranks = place.world if place is not None else world or here
    if ranks < 2:
        raise typer.BadParameter(f"--world is {ranks}: a ring to tune takes at least 2 ranks")
    heads, kv_heads, head_dim, dtype = shape
    point = RingPoint(ranks, heads, kv_heads, head_dim, dtype, "bounded" if causal else "full", tokens)
    share = max(1, cores() // (place.local_world if place is not None else ranks))
    return RingWish(point, device, wires, budget, folder, share)
