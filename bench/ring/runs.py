"""One rank of ``bench ring``: every candidate checked against float64, its memory taken, then timed in turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from ...reference.masks import Masks
from ...ring import Ring
from ..common.exact import RESULTS, Judge, allowed, chosen_heads, judge, plainly
from ..common.flops import BACKWARD_FLOPS, forward_flops, pairs_of
from ..common.heap import freed_at_once
from ..common.launching import Member, member, process_group
from ..common.memory import PeakMemory
from ..common.result import Result
from ..common.shapes import binary
from ..common.timing import Clock, Samples, Team, interleaved
from ..links.runs import device_of
from .candidates import (
    ALL_CORES,
    ALL_GATHER,
    OURS,
    ULYSSES,
    WHOLE,
    Candidate,
    Problem,
    Setting,
    Tensors,
    candidates,
    ours,
)
from .memory import peak

WARM_TOKENS = 64
UNITS = {
    "candidate": "", "world": "", "tokens": "", "time": "ms", "spread": "%", "of ideal": "%", "exposed": "ms",
    "throughput": "tokens/s", "rate of a rank": "TFLOP/s", "sent": "MB", "peak": "MB", "counted peak": "MB",
    "compute": "ms", "error": "", "disagrees": "",
}  # fmt: skip
"""``bench/README.md`` has the formula of every column."""

Row = dict[str, Any]


class Ranks(Team):
    """All ranks of the default group; waiting blocks and does not spin, and is over the host's network."""

    def ready(self) -> None:
        self.slowest(0.0)

    def slowest(self, seconds: float) -> float:
        longest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()


@dataclass(frozen=True)
class RingConfig:
    """What to measure; the same on every rank."""

    problems: tuple[Problem, ...]  # of one world
    layouts: tuple[str, ...]
    repeats: int = 5
    by: tuple[str, ...] = ()
    timer: str = ""  # one of OF_RINGS; empty: the device's own


def spawned(store: str, config: RingConfig) -> Result:
    """The entry of the processes that the command starts itself; an error is left where their parent reads it."""
    place = member()
    assert place is not None
    result = record(measure)(place, config, store)
    assert result is not None
    return result


def measure(place: Member, config: RingConfig, store: str | None = None) -> Result:
    """One rank of the measurement; rank 0 alone knows of errors."""
    kind = config.problems[0].device
    device = device_of(place, kind)
    shared = kind == "cuda" and place.local_world > torch.cuda.device_count()
    result = Result("bench ring", UNITS)
    with process_group(place, store, device=device):
        warm_up(config, device)
        for problem in config.problems:
            with ExitStack() as rings:

                def ring(rings: ExitStack = rings, transport: str = problem.transport) -> Ring:
                    return rings.enter_context(Ring(transport=transport))

                setting = Setting(problem, config.layouts, device, ring, shared)
                more = Measurement(setting, config, place)()
            result.rows += more.rows
            result.notes += [note for note in more.notes if note not in result.notes]
            result.failed += more.failed
    return result


def warm_up(config: RingConfig, device: torch.device) -> None:
    """Connections, thread pools, modules that load on first use: there once, and in nobody's memory."""
    small = replace(config.problems[0], seqlen=WARM_TOKENS * config.problems[0].world)
    with Ring(transport=small.transport) as ring:
        candidate = ours(config.layouts[0], Setting(small, config.layouts, device, lambda: ring))
        candidate.run(candidate.shards(small.tensors(), device))


@dataclass
class Measurement:
    """All candidates of one problem on this rank."""

    setting: Setting
    config: RingConfig
    place: Member
    shards: dict[str, Tensors] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    disagrees: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self) -> Result:
        able, absent = candidates(self.setting, self.config.by)
        repeats, problem = self.config.repeats, self.setting.problem
        total = len(able) + sum(min(candidate.runs or repeats, repeats) for candidate in able.values())
        with Progress(console=Console(stderr=True), disable=self.place.rank != 0, transient=True) as bar:
            task = bar.add_task(f"{problem.seqlen:,} tokens: checking", total=total)
            for _ in self._checked(able):
                bar.advance(task)
            bar.update(task, description=f"{problem.seqlen:,} tokens: timing")
            times = interleaved(
                {name: partial(candidate.run, self.shards[name]) for name, candidate in able.items()},
                Clock(self.setting.device, Ranks(), self.config.timer),
                repeats=repeats,
                warmup=0,  # the check was one
                limits={name: candidate.runs for name, candidate in able.items() if candidate.runs is not None},
                progress=lambda: bar.advance(task),
            )
        result = Result("bench ring", UNITS)
        ideal = times[WHOLE].median / problem.world if WHOLE in times else None
        for name, candidate in able.items():
            result.rows.append(self._row(candidate, times[name], ideal))
            if wrong := self.disagrees.get(name):
                told = result.failed if candidate.trusted else result.notes
                told.append(f"{problem.title}: {name}: {', '.join(wrong)} errs by more than rounding explains")
        transports = [candidate.ring.transport for candidate in able.values() if candidate.ring is not None]
        threads = f", {problem.threads} threads each" if problem.device == "cpu" else ""
        over = f" over {transports[0]}" if transports else ""
        title = replace(problem, layout="/".join(self.config.layouts)).title
        result.notes.append(f"{title}, {problem.device}{over}{threads}, medians of {repeats} interleaved runs")
        result.notes += [f"not there: {name}: {why}" for name, why in absent.items()]
        return result

    def _checked(self, able: Mapping[str, Candidate]) -> Iterator[None]:
        """Run each once: its errors against float64, the memory that its first run takes. A line of work each."""
        problem, device = self.setting.problem, self.setting.device
        tensors = problem.tensors()
        heads = chosen_heads(problem.batch, problem.heads, problem.kv_heads, problem.seqlen, problem.seqlen)
        exact, tolerance = (None, {}) if self.place.rank else judged(problem, tensors, heads, device)
        for name, candidate in able.items():
            with freed_at_once(device):
                measured = PeakMemory(device)
                self.shards[name] = candidate.shards(tensors, device)
                mine = candidate.run(self.shards[name])
                self.peaks[name] = measured.bytes
            self.shards[name] = self._shared(name, able)
            whole = gathered(candidate, mine, problem, heads)
            del mine
            if exact is not None:
                self.errors[name] = exact.differences(whole)
                # a NaN fails too
                wrong = [what for what in RESULTS if not self.errors[name][what] <= tolerance[what]]
                self.disagrees[name] = wrong
            yield

    def _shared(self, name: str, able: Mapping[str, Candidate]) -> Tensors:
        """The shards of an earlier candidate that holds the same tokens and heads, in place of a copy of them."""
        mine = able[name]
        for other, shards in self.shards.items():
            theirs = able[other]
            if mine.positions is None or theirs.positions is None or mine.query_heads != theirs.query_heads:
                continue
            if torch.equal(mine.positions, theirs.positions):
                return shards
        return self.shards[name]

    def _row(self, candidate: Candidate, times: Samples, ideal: float | None) -> Row:
        problem, seconds = self.setting.problem, times.median
        name, kind = candidate.name, candidate.kind or candidate.name
        exposed, compute = where_time_goes(candidate, self.shards[name])
        ranks = 1 if kind in (WHOLE, ALL_CORES) else problem.world
        return {
            "candidate": name,
            "world": problem.world,
            "tokens": problem.seqlen,
            "time": seconds * 1e3,
            "spread": 100 * times.spread,
            "of ideal": None if ideal is None else 100 * ideal / seconds,
            "exposed": None if exposed is None else exposed * 1e3,
            "throughput": problem.batch * problem.seqlen / seconds,
            "rate of a rank": problem_flops(problem) / seconds / ranks / 1e12,
            "sent": None if candidate.sent is None else candidate.sent / 1e6,
            "peak": Ranks().slowest(self.peaks[name]) / 1e6,
            "counted peak": peak(kind, problem) / 1e6,
            "compute": None if compute is None else compute * 1e3,
            "error": max(self.errors.get(name, {}).values(), default=None),
            "disagrees": ", ".join(self.disagrees.get(name, ())),
        }


def problem_flops(problem: Problem) -> float:
    """Forward and backward of the whole sequence."""
    pairs = pairs_of(problem.seqlen, causal=problem.causal)
    once = forward_flops(pairs, heads=problem.heads, head_dim=problem.head_dim, batch=problem.batch)
    return once * (1 + BACKWARD_FLOPS)


def judged(
    problem: Problem, tensors: Tensors, heads: Sequence[int], device: torch.device
) -> tuple[Judge, dict[str, float]]:
    """float64 of some heads on rank 0, and what each result may err by."""
    q, k, v, dout = (x.to(device) for x in tensors)
    options = Masks(causal=problem.causal)
    exact = judge(q, k, v, dout, heads, options)
    tolerance = allowed(exact, plainly(q, k, v, dout, exact, options))
    return exact._replace(exact=tuple(x.cpu() for x in exact.exact)), tolerance


def gathered(candidate: Candidate, mine: Tensors, problem: Problem, kv_heads: Sequence[int]) -> list[Tensor]:
    """Some heads of the results of all ranks, in the order of positions and of our heads, float64, on every rank."""
    group = problem.heads // problem.kv_heads
    heads = [head * group + member for head in kv_heads for member in range(group)]
    order = candidate.query_heads
    theirs = heads if order is None else [order.index(head) for head in heads]
    chosen = (theirs, theirs, list(kv_heads), list(kv_heads))
    shapes = [(problem.batch, problem.seqlen, len(some), problem.head_dim) for some in chosen]
    full = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for target, part, some in zip(full, mine, chosen, strict=False):
        target[:, candidate.positions] = part[:, :, some].to("cpu", torch.float64)
    for target in full:
        dist.all_reduce(target)  # every position is one rank's alone, so that the sum is a copy
    return full


def where_time_goes(candidate: Candidate, shards: Tensors) -> tuple[float | None, float | None]:
    """Seconds of one more run in the network, and of compute, each on its slowest rank; None: not known."""
    everyone = Ranks()
    if candidate.ring is not None:
        everyone.ready()
        with candidate.ring.record() as trace:
            candidate.run(shards)
        return everyone.slowest(trace.seconds("wait")), everyone.slowest(trace.seconds("compute"))
    if candidate.waits is None:
        return (0.0, None) if candidate.sent == 0 else (None, None)
    candidate.waits.take()
    everyone.ready()
    candidate.run(shards)
    return everyone.slowest(candidate.waits.take()), None


# where a way around the ring stops winning


def crossovers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of every world and every way around that was measured there: beside the best of our layouts, by length."""
    texts = []
    for world in dict.fromkeys(row["world"] for row in rows):
        for by in (ALL_GATHER, ULYSSES):
            points = []
            for tokens in sorted({row["tokens"] for row in rows}):
                here = [row for row in rows if (row["world"], row["tokens"]) == (world, tokens)]
                other = next((row for row in here if row["candidate"] == by), None)
                rings = [row for row in here if row["candidate"].startswith(f"{OURS} ")]
                if other is not None and rings:
                    ring = min(rings, key=lambda row: float(row["time"]))
                    points.append((tokens, other["time"] / ring["time"], max(other["spread"], ring["spread"]) / 100))
            if points:
                texts.append(f"{by} and the ring, {world} ranks: {_crossover(by, points)}")
    return texts


def _crossover(by: str, points: Sequence[tuple[int, float, float]]) -> str:
    """Who is faster up to where, by (tokens, the other's time over ours, spread of the two)."""
    first, last = points[0], points[-1]
    crossings = []
    for (x, a, _), (y, b, _) in pairwise(points):
        a, b = math.log(a), math.log(b)
        if (a < 0) != (b < 0):  # straight between them, in logarithms of both
            crossings.append(f"{math.exp(math.log(x) + (math.log(y) - math.log(x)) * a / (a - b)):,.0f} tokens")
    span = " to ".join(dict.fromkeys((binary(first[0]), binary(last[0]))))
    where = f"up to about {', then at '.join(crossings)}, measured {span}" if crossings else f"at every length ({span})"
    ratios = dict.fromkeys(
        f"{ratio:.2f} times the ring's time at {binary(tokens)}" for tokens, ratio, _ in (first, last)
    )
    even = [binary(tokens) for tokens, ratio, noise in points if abs(math.log(ratio)) <= noise]
    within = f"; within the spread at {', '.join(even)}" if even else ""
    return f"{by if first[1] < 1 else 'the ring'} is faster {where}: {', '.join(ratios)}{within}"


def best(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest of all ranks together, at the largest world and length."""
    largest = max((row["world"], row["tokens"]) for row in rows)
    here = [row for row in rows if (row["world"], row["tokens"]) == largest]
    row = min((row for row in here if row["candidate"] not in (WHOLE, ALL_CORES)), key=lambda row: float(row["time"]))
    ideal = "" if row["of ideal"] is None else f", {row['of ideal']:.1f}% of ideal"
    return f"best: {row['candidate']}, {largest[0]} ranks, {binary(largest[1])} tokens: {row['time']:.4g} ms{ideal}"
