"""``ringattn tune --ring``: what all ranks of a ring share, found by running whole steps of it on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

from ...bench.common.attention import AttentionConfig
from ...bench.common.launching import Member, member, process_group
from ...bench.common.provenance import command
from ...bench.common.timing import Clock, Ranks
from ...bench.ring.candidates import Candidate, Setting, ours
from ...bench.ring.runs import gathered, judged
from ...comm import Limits, resolve_group
from ...comm.control import Control, control_of
from ...comm.topology import nvml
from ...kernels.lookup import Gpu, gpu_of, triton_version
from ...kernels.tables import file_name
from ...ring import Ring
from .. import Journal, Reading, private_folder, save
from ..rings import (
    CPU,
    DEFAULT,
    Known,
    RingEntry,
    RingPoint,
    RingSetting,
    best_of,
    halved,
    planned_runs,
    settings,
)
from ..search import COOL_DOWN, RETRIES, clocks_of, median, spread
from .compile import digest
from .measure import reading_of
from .run import MOST_COMMAND, driver
from .shown import bars

T = TypeVar("T")

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
    budget: float  # seconds of timed runs
    folder: Path
    threads: int = 1  # per process
    seed: int = 0

    def problem(self, tokens: int) -> AttentionConfig:
        point = self.point
        return AttentionConfig(
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
    kept: int = 0  # runs of an interrupted search
    complete: bool = True  # not ended by its budget


def journal_of(wish: RingWish, gpu: Gpu) -> Journal:
    """Of the runs of every length: what another machine, driver, code or number of threads took is passed over."""
    name = f"rings_{file_name(gpu.name, triton_version()).removesuffix('.json')}.jsonl"
    told = f"{digest('comm', 'ring')} {torch.__version__} {driver()} {wish.threads} {wish.seed}"
    return Journal(private_folder(wish.folder) / name, told)


@dataclass
class Runs:
    """Timed steps of every setting, on all ranks together; rank 0 keeps them."""

    point: RingPoint
    steps: Mapping[RingSetting, Callable[[], object]]
    clock: Callable[[Callable[[], object]], float]
    reader: Callable[[], dict[str, Any]]  # of clocks
    left: Callable[[], float]  # seconds of the budget
    journal: Journal | None = None  # on rank 0
    done: Callable[[], None] = lambda: None
    pause: Callable[[float], None] = time.sleep
    _warm: set[RingSetting] = field(default_factory=set)

    def kept(self) -> Known:
        """What rank 0 has of an interrupted search."""
        found: dict[RingSetting, list[dict[str, Any]]] = {}
        if self.journal is not None:
            told = {one: self.journal.all(self._key(one)) for one in self.steps}
            found = {one: runs for one, runs in told.items() if runs}
        listed = of_rank_0([(asdict(one), runs) for one, runs in found.items()])
        return {RingSetting(**one): [Reading.of(run) for run in runs] for one, runs in listed}

    def __call__(self, one: RingSetting) -> Reading:
        """A run with clocks as high as they get on every rank; after some repeats whatever it is."""
        if one not in self._warm:
            self.steps[one]()  # compiles
            self._warm.add(one)
        reading = self._reading(one)
        for _ in range(RETRIES):
            if not reading.throttled or self.left() <= 0:
                break
            self.pause(COOL_DOWN)
            reading = self._reading(one)
        if self.journal is not None:
            self.journal.put(self._key(one), reading.as_json())
        self.done()
        return reading

    def _reading(self, one: RingSetting) -> Reading:
        mine = reading_of(self.clock(self.steps[one]), self.reader())
        told: list[Any] = ranks().gather(mine.throttled, what="why clocks are low")
        return replace(mine, throttled=tuple(dict.fromkeys(chain(*told))))

    def _key(self, one: RingSetting) -> str:
        return f"{' '.join(map(str, self.point))} | {one}"


def spawned(store: str, wish: RingWish) -> RingReport:
    """The entry of the processes that the command starts itself."""
    place = member()
    assert place is not None
    return search(place, wish, store)


def search(place: Member, wish: RingWish, store: str | None = None) -> RingReport:
    """One rank of the search."""
    torch.set_num_threads(wish.threads)
    device = place.shared_device(wish.device)
    report = RingReport(gpu=gpu_of(device) or CPU)
    with process_group(place, store, device=device), ExitStack() as stack:
        rings, why = opened(wish, stack)
        problem, small = wish.problem(wish.point.length), wish.problem(CHECKED)
        why |= wrong(small, rings, device)
        shards = inputs(problem, device)
        right = {one: ring_candidate(problem, ring, device) for one, ring in rings.items() if one not in why}
        steps = {one: partial(candidate.run, shards) for one, candidate in right.items()}
        # of the runs alone: what is opened and checked first is opened and checked again when the search goes on
        ends = time.monotonic() + wish.budget
        runs = Runs(
            wish.point, steps, Clock(device, Ranks()), nvml.reader(device),
            left=lambda: of_rank_0(ends - time.monotonic()),  # ranks whose clocks differ would part
            journal=journal_of(wish, report.gpu) if place.rank == 0 else None,
        )  # fmt: skip
        taken = timed(runs, report, stack)
        report.rows = [row_of(one, taken.get(one, []), why.get(one)) for one in (*taken, *why)]
        if taken:
            chosen = RingSetting(**of_rank_0(asdict(best_of(taken))))
            report.entry = entry_of(wish.point, resolved(chosen, rings[chosen]), taken[chosen], taken.get(DEFAULT))
            if place.rank == 0:
                report.path = save(wish.folder, report.gpu, rings=[report.entry])
        return report


def timed(runs: Runs, report: RingReport, stack: ExitStack) -> Known:
    """The search itself, with a bar on rank 0."""
    kept = runs.kept()
    report.kept = sum(map(len, kept.values()))
    if runs.journal is not None:
        bar, part = stack.enter_context(bars()), f"measuring {runs.point.length} tokens"
        bar.more(part, planned_runs(runs.steps))
        runs.done = lambda: bar.step(part)
        for _ in range(report.kept):
            bar.step(part)
    taken, report.complete = halved(runs.steps, runs, runs.left, kept)
    return taken


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


def wrong(problem: AttentionConfig, rings: dict[RingSetting, Ring], device: torch.device) -> dict[RingSetting, str]:
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


def ring_candidate(problem: AttentionConfig, ring: Ring, device: torch.device) -> Candidate:
    """``ring_attention`` through one of the rings."""
    return ours(problem.layout, Setting(problem, (problem.layout,), device, lambda: ring))


def inputs(problem: AttentionConfig, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout of this rank, made where they are used."""
    draw = torch.Generator(device).manual_seed(problem.seed + dist.get_rank())
    tokens = problem.held.lengths[dist.get_rank()]
    return tuple(
        torch.randn(
            1, tokens, count, problem.head_dim, generator=draw, device=device, dtype=getattr(torch, problem.dtype)
        )
        for count in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    )


def of_rank_0(value: T) -> T:
    """Rank 0's, on every rank; tuples as lists."""
    told: list[Any] = ranks().gather(None if dist.get_rank() else value, what="what rank 0 says")
    return told[0]  # type: ignore[no-any-return]


def ranks() -> Control:
    """What all ranks tell each other."""
    return control_of(resolve_group()).scope("tune")


def resolved(setting: RingSetting, ring: Ring) -> RingSetting:
    """With the transport that ``auto`` was."""
    return replace(setting, transport=ring.transport) if setting.transport == "auto" else setting


def entry_of(
    point: RingPoint, setting: RingSetting, runs: Sequence[Reading], usual: Sequence[Reading] | None
) -> RingEntry:
    """Medians in seconds."""
    printable = "".join(letter if " " <= letter <= "~" else "?" for letter in command())
    return RingEntry(
        point, setting, datetime.now(UTC).isoformat(timespec="seconds"), median(runs), spread(runs),
        median(usual or runs), {"triton": triton.__version__, "torch": torch.__version__}, driver(),
        clocks_of(runs), printable[:MOST_COMMAND],
    )  # fmt: skip


def row_of(setting: RingSetting, runs: Sequence[Reading], why: str | None) -> dict[str, Any]:
    return {
        **asdict(setting),
        "runs": len(runs),
        "ms": median(runs) * 1e3 if runs else None,
        "±": f"{spread(runs):.1%}" if runs else None,
        "note": why or ("what a ring takes by itself" if setting == DEFAULT else ""),
    }
