"""One rank of ``bench ring``: every candidate checked against float64, its memory taken, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from ...reference.masks import Masks
from ...ring import Ring
from ..common.attention import AttentionConfig
from ..common.errors import RESULTS, Exact, chosen_heads, exact_results, pytorch_results, tolerances
from ..common.launching import Member, member, process_group
from ..common.memory import PeakMemory, freed_at_once
from ..common.timing import Clock, Ranks, Samples, interleaved
from .candidates import Candidate, Setting, Tensors, candidates, ours

WARM_TOKENS = 64


@dataclass(frozen=True)
class Wish:
    """What the command was asked for; the same on every rank."""

    problems: tuple[AttentionConfig, ...]  # of one world
    layouts: tuple[str, ...]
    repeats: int = 5
    by: tuple[str, ...] = ()
    timer: str = ""  # one of OF_RINGS; empty: the device's own


@dataclass
class Result:
    """What is known of one candidate, over all ranks."""

    kind: str
    times: Samples
    errors: dict[str, float]  # largest error against float64, of each result
    disagrees: list[str]  # results that err by more than rounding explains
    trusted: bool
    exposed: float | None  # seconds in the network on the slowest rank
    sent: int | None  # bytes of the rank that sends most
    peak: int | None  # bytes of the rank that takes most; None: a file of schema 1, which does not say it
    compute: float | None = None  # seconds of compute on the slowest rank


@dataclass
class Report:
    """What rank 0 knows after the measurement of one problem."""

    problem: AttentionConfig
    found: dict[str, Result]
    absent: dict[str, str]
    transport: str = ""


def spawned(store: str, wish: Wish) -> list[Report]:
    """The entry of the processes that the command starts itself; an error is left where their parent reads it."""
    place = member()
    assert place is not None
    return record(measure)(place, wish, store) or []


def measure(place: Member, wish: Wish, store: str | None = None) -> list[Report]:
    """One rank of the measurement; reports on rank 0, nothing on the others."""
    kind = wish.problems[0].device
    device = place.shared_device(kind)
    shared = kind == "cuda" and place.local_world > torch.cuda.device_count()
    with process_group(place, store, device=device):
        reports = []
        warm_up(wish, device)
        for problem in wish.problems:
            with ExitStack() as rings:

                def ring(rings: ExitStack = rings, transport: str = problem.transport) -> Ring:
                    return rings.enter_context(Ring(transport=transport))

                reports.append(Measurement(Setting(problem, wish.layouts, device, ring, shared), wish, place)())
        return reports if place.rank == 0 else []


def warm_up(wish: Wish, device: torch.device) -> None:
    """Connections, thread pools, modules that load on first use: there once, and in nobody's memory."""
    small = replace(wish.problems[0], seqlen=WARM_TOKENS * wish.problems[0].world)
    with Ring(transport=small.transport) as ring:
        one = ours(wish.layouts[0], Setting(small, wish.layouts, device, lambda: ring))
        one.run(one.shards(small.tensors(), device))


@dataclass
class Measurement:
    """All candidates of one problem on this rank."""

    setting: Setting
    wish: Wish
    place: Member
    shards: dict[str, Tensors] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    disagrees: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self) -> Report:
        everyone, absent = candidates(self.setting, self.wish.by)
        repeats, problem = self.wish.repeats, self.setting.problem
        total = len(everyone) + sum(min(one.runs or repeats, repeats) for one in everyone.values())
        with Progress(console=Console(stderr=True), disable=self.place.rank != 0, transient=True) as bar:
            task = bar.add_task(f"{problem.seqlen:,} tokens: checking", total=total)
            for _ in self._checked(everyone):
                bar.advance(task)
            bar.update(task, description=f"{problem.seqlen:,} tokens: timing")
            times = interleaved(
                {name: lambda one=one, name=name: one.run(self.shards[name]) for name, one in everyone.items()},  # type: ignore[misc]
                Clock(self.setting.device, Ranks(), self.wish.timer),
                repeats=repeats,
                warmup=0,  # the check was one
                limits={name: one.runs for name, one in everyone.items() if one.runs is not None},
                progress=lambda: bar.advance(task),
            )
        found = {name: self._result(name, one, times[name]) for name, one in everyone.items()}
        rings = [one.ring for one in everyone.values() if one.ring is not None]
        return Report(problem, found, absent, rings[0].transport if rings else "")

    def _checked(self, everyone: Mapping[str, Candidate]) -> Iterator[None]:
        """Run each once: its errors against float64, the memory that its first run takes. A line of work each."""
        problem, device = self.setting.problem, self.setting.device
        tensors = problem.tensors()
        heads = chosen_heads(problem.batch, problem.heads, problem.kv_heads, problem.seqlen, problem.seqlen)
        judge, limits = (None, {}) if self.place.rank else judged(problem, tensors, heads, device)
        for name, one in everyone.items():
            with freed_at_once(device):
                measured = PeakMemory(device)
                self.shards[name] = one.shards(tensors, device)
                mine = one.run(self.shards[name])
                self.peaks[name] = measured.bytes
            self.shards[name] = self._shared(name, everyone)
            told = gathered(one, mine, problem, heads)
            del mine
            if judge is not None:
                self.errors[name] = judge.differences(told)
                # a NaN fails too
                wrong = [what for what in RESULTS if not self.errors[name][what] <= limits[what]]
                self.disagrees[name] = wrong
            yield

    def _shared(self, name: str, everyone: Mapping[str, Candidate]) -> Tensors:
        """The shards of an earlier candidate that holds the same tokens and heads, in place of a copy of them."""
        mine = everyone[name]
        for other, shards in self.shards.items():
            theirs = everyone[other]
            if mine.positions is None or theirs.positions is None or mine.query_heads != theirs.query_heads:
                continue
            if torch.equal(mine.positions, theirs.positions):
                return shards
        return self.shards[name]

    def _result(self, name: str, one: Candidate, times: Samples) -> Result:
        exposed, compute = where_time_goes(one, self.shards[name])
        peak = int(Ranks().slowest(self.peaks[name]))
        return Result(
            one.kind or one.name, times, self.errors.get(name, {}), self.disagrees.get(name, []), one.trusted,
            exposed, one.sent, peak, compute,
        )  # fmt: skip


def judged(
    problem: AttentionConfig, tensors: Tensors, heads: Sequence[int], device: torch.device
) -> tuple[Exact, dict[str, float]]:
    """float64 of some heads on rank 0, and what each result may err by."""
    q, k, v, dout = (x.to(device) for x in tensors)
    options = Masks(causal=problem.causal)
    found = exact_results(q, k, v, dout, heads, options)
    limits = tolerances(found, pytorch_results(q, k, v, dout, found, options))
    return found._replace(exact=tuple(x.cpu() for x in found.exact)), limits


def gathered(one: Candidate, mine: Tensors, problem: AttentionConfig, kv_heads: Sequence[int]) -> list[Tensor]:
    """Some heads of the results of all ranks, in the order of positions and of our heads, float64, on every rank."""
    group = problem.heads // problem.kv_heads
    heads = [head * group + member for head in kv_heads for member in range(group)]
    theirs = heads if one.query_heads is None else [one.query_heads.index(head) for head in heads]
    chosen = (theirs, theirs, list(kv_heads), list(kv_heads))
    shapes = [(problem.batch, problem.seqlen, len(some), problem.head_dim) for some in chosen]
    full = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for target, part, some in zip(full, mine, chosen, strict=False):
        target[:, one.positions] = part[:, :, some].to("cpu", torch.float64)
    for target in full:
        dist.all_reduce(target)  # every position is one rank's alone, so that the sum is a copy
    return full


def where_time_goes(one: Candidate, shards: Tensors) -> tuple[float | None, float | None]:
    """Seconds of one more run in the network, and of compute, each on its slowest rank; None: not known."""
    everyone = Ranks()
    if one.ring is not None:
        everyone.ready()
        with one.ring.record() as trace:
            one.run(shards)
        return everyone.slowest(trace.seconds("wait")), everyone.slowest(trace.seconds("compute"))
    if one.waits is None:
        return (0.0, None) if one.sent == 0 else (None, None)
    one.waits.take()
    everyone.ready()
    one.run(shards)
    return everyone.slowest(one.waits.take()), None
