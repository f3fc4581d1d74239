"""One rank of ``bench ring``: every candidate checked against float64, its memory taken, then timed in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Group, Limits
from ...comm.kept import kept_of
from ...reference.masks import Masks
from ...ring import Ring
from ..common.attention import BACKWARD_FLOPS, AttentionConfig, Tensors
from ..common.errors import RESULTS, Inputs, chosen_heads, judge_of
from ..common.flags import binary, human
from ..common.memory import PROCESS_BYTES, Needs, PeakMemory, freed_at_once, gpus_of
from ..common.memory_table import (
    ALL_CORES,
    ALL_GATHER,
    FP32,
    OURS,
    ULYSSES,
    WHOLE,
    candidate_bytes,
    elements,
    inputs,
    judged_bytes,
    ring_slots,
    shard,
)
from ..common.progress import progress
from ..common.ranks import Member, ranks_here
from ..common.result import Result, Row
from ..common.timing import Clock, Ranks, Samples, interleaved
from .candidates import PEERS, Candidate, Setting, candidates, ours

WARM_TOKENS = 64
UNITS = {
    "candidate": "", "world": "", "tokens": "", "time": "ms", "spread": "%", "of ideal": "%", "exposed": "ms",
    "throughput": "tokens/s", "rate of a rank": "TFLOP/s", "sent": "MB", "peak": "MB", "counted peak": "MB",
    "compute": "ms", "error": "", "over tolerance": "",
}  # fmt: skip
"""``bench/README.md`` has the formula of every column."""
ONE_RUN = "exposed and compute: of one more run, empty where either was longer than the time beside it"


@dataclass(frozen=True)
class RingConfig:
    """What to measure; the same on every rank."""

    problems: tuple[AttentionConfig, ...]  # of one world
    layouts: tuple[str, ...]
    repeats: int = 5
    by: tuple[str, ...] = ()
    timer: str = ""  # one of OF_RINGS; empty: the device's own
    bytes_per_second: float | None = None  # of the links of our rings, where they are to be slower than they are


class Checked(NamedTuple):
    """What the first run of a candidate told."""

    shards: Tensors
    peak: int
    errors: Mapping[str, float]  # of each result; on rank 0 alone
    wrong: Sequence[str]  # results that err by more than is allowed


def measure(place: Member, device: torch.device, config: RingConfig) -> Result:
    """One rank of the measurement; rank 0 alone knows of errors."""
    shared = device.type == "cuda" and place.local_world > torch.cuda.device_count()
    result = Result("bench ring", UNITS)
    with freed_at_once(device):
        warm_up(config, device)
    for problem in config.problems:
        with ExitStack() as rings:
            limits = Limits(bytes_per_second=config.bytes_per_second)
            ring = partial(opened, rings, device, problem.transport, limits)
            slowed = config.bytes_per_second is not None
            setting = Setting(problem, config.layouts, device, ring, shared, slowed)
            result.add(measured(setting, config, place.rank))
    if device.type == "cpu" and len(config.problems) > 1:
        result.notes.append("peaks are upper bounds but for the first length: a launcher's ranks measure them all")
    return result


def opened(rings: ExitStack, device: torch.device, transport: str, limits: Limits, group: Group | None) -> Ring:
    """A ring that stays open with the others; with it ends a group that is not the default one."""
    if isinstance(group, dist.ProcessGroup):
        if group is not dist.group.WORLD:
            rings.callback(dist.destroy_process_group, group)
        rings.callback(kept_of(group).pop, device, None)
        if group.size() == 1:  # nothing moves
            transport, limits = "auto", Limits()
    return rings.enter_context(Ring(group, transport=transport, limits=limits))


def warm_up(config: RingConfig, device: torch.device) -> None:
    """Connections, thread pools, modules that load on first use: there once, and in nobody's memory."""
    small = replace(config.problems[0], seqlen=WARM_TOKENS * config.problems[0].world)
    with Ring(transport=small.transport) as ring:
        candidate = ours(config.layouts[0], Setting(small, config.layouts, device, lambda _: ring))
        candidate.run(candidate.shards(small.tensors(), device))


def measured(setting: Setting, config: RingConfig, rank: int) -> Result:
    """All candidates of one problem on this rank."""
    able, absent = candidates(setting, config.by)
    problem, repeats = setting.problem, config.repeats
    with progress(silent=rank != 0) as step:
        part = f"{problem.seqlen:,} tokens"
        step(part, len(able) * (1 + repeats))
        one_done = partial(step, part, None)
        with freed_at_once(setting.device):  # all along: from a heap that once held large blocks new ones are cut
            checks = checked(able, problem, setting.device, rank, one_done)
        steps = {name: partial(candidate.run, checks[name].shards) for name, candidate in able.items()}
        clock = Clock(setting.device, Ranks(), config.timer)
        # the check was the warm-up
        times = interleaved(steps, clock, repeats=repeats, warmup=0, progress=one_done)
    result = Result("bench ring", UNITS)
    ideal = times[WHOLE].median / problem.world if WHOLE in times else None
    for name, candidate in able.items():
        result.rows.append(row_of(problem, candidate, checks[name], times[name], ideal))
        if wrong := checks[name].wrong:
            messages = result.notes if name in PEERS else result.failed
            messages.append(f"{problem.title}: {name}: {', '.join(wrong)} errs by more than rounding explains")
    transports = [candidate.ring.transport for candidate in able.values() if candidate.ring is not None]
    threads = f", {problem.threads} threads each" if problem.device == "cpu" else ""
    over = f" over {transports[0]}" if transports else ""
    if config.bytes_per_second is not None:
        over += f" at {human(config.bytes_per_second, 'B/s')}"
    title = problem.title.replace(problem.layout, "/".join(config.layouts), 1)
    result.notes.append(f"{title}, {problem.device}{over}{threads}, medians of {repeats} interleaved runs")
    if any(candidate.ring or candidate.waits for candidate in able.values()):
        result.notes.append(ONE_RUN)
    result.notes += [f"not there: {name}: {why}" for name, why in absent.items()]
    return result


def checked(
    able: Mapping[str, Candidate],
    problem: AttentionConfig,
    device: torch.device,
    rank: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Checked]:
    """Run each once: its errors against float64, the memory that its first run takes."""
    tensors, checks = problem.tensors(), dict[str, Checked]()
    heads = chosen_heads(problem.batch, problem.heads, problem.kv_heads, problem.seqlen, problem.seqlen)
    judge = None if rank else judge_of(Inputs(*(x.to(device) for x in tensors)), Masks(causal=problem.causal), heads)
    if judge is not None:  # the device is for the candidates
        judge = judge._replace(exact={name: x.cpu() for name, x in judge.exact.items()})
    held: list[tuple[Tensor, Tensors]] = []  # whose tokens somebody has already: kept once
    for name, candidate in able.items():
        memory = PeakMemory(device)
        shards = candidate.shards(tensors, device)
        mine = candidate.run(shards)
        peak = memory.bytes
        results = gathered(candidate, mine, problem, heads)
        del mine
        errors = {} if judge is None else judge.differences(results)
        wrong = [] if judge is None else judge.wrong(errors)
        if candidate.positions is not None:
            tokens = candidate.positions
            shards = next((same for other, same in held if torch.equal(tokens, other)), shards)
            held.append((tokens, shards))
        checks[name] = Checked(shards, peak, errors, wrong)
        progress()
    return checks


def row_of(problem: AttentionConfig, candidate: Candidate, of: Checked, times: Samples, ideal: float | None) -> Row:
    """One candidate's columns; ``ideal`` is the time of one device over the number of ranks.

    Where its time goes is told by another run; what took longer there than all of this says nothing of it.
    """
    seconds, kind = times.median, candidate.kind
    parts = where_time_goes(candidate, of.shards)
    exposed, compute = (None if part is None or part > seconds else part for part in parts)
    ranks = 1 if kind in (WHOLE, ALL_CORES) else problem.world
    return {
        "candidate": candidate.name,
        "world": problem.world,
        "tokens": problem.seqlen,
        "time": seconds * 1e3,
        "spread": 100 * times.spread,
        "of ideal": None if ideal is None else 100 * ideal / seconds,
        "exposed": None if exposed is None else exposed * 1e3,
        "throughput": problem.batch * problem.seqlen / seconds,
        "rate of a rank": problem.flops * (1 + BACKWARD_FLOPS) / seconds / ranks / 1e12,
        "sent": None if candidate.sent is None else candidate.sent / 1e6,
        "peak": Ranks().slowest(of.peak) / 1e6,
        "counted peak": candidate_bytes(kind, problem) / 1e6,
        "compute": None if compute is None else compute * 1e3,
        "error": max(of.errors.values(), default=None),
        "over tolerance": ", ".join(of.wrong),
    }


def gathered(
    candidate: Candidate, mine: Tensors, problem: AttentionConfig, kv_heads: Sequence[int]
) -> dict[str, Tensor]:
    """Some heads of the results of all ranks, in the order of positions, float64, on every rank."""
    group = problem.heads // problem.kv_heads
    heads = [head * group + member for head in kv_heads for member in range(group)]
    chosen = (heads, heads, list(kv_heads), list(kv_heads))
    full = [torch.zeros(problem.batch, problem.seqlen, len(some), problem.head_dim).double() for some in chosen]
    for target, part, some in zip(full, mine, chosen, strict=False):
        target[:, candidate.positions] = part[:, :, some].to("cpu", torch.float64)
    for target in full:
        dist.all_reduce(target)  # every position is one rank's alone, so that the sum is a copy
    return dict(zip(RESULTS, full, strict=True))


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


# what follows from the rows


def crossovers(rows: Sequence[Row]) -> list[str]:
    """Of every world, all-gather and Ulysses: the time over that of the best of our layouts, by length."""
    texts = []
    for world, by in itertools.product(dict.fromkeys(row["world"] for row in rows), (ALL_GATHER, ULYSSES)):
        ratios = []
        for tokens in sorted({row["tokens"] for row in rows}):
            here = [row for row in rows if (row["world"], row["tokens"]) == (world, tokens)]
            others = [row["time"] for row in here if row["candidate"] == by]
            rings = [row["time"] for row in here if row["candidate"].startswith(f"{OURS} ")]
            if others and rings:
                ratios.append(f"{others[0] / min(rings):.2f} at {binary(tokens)}")
        if ratios:
            texts.append(f"time of {by} over the ring's, {world} ranks: {', '.join(ratios)}")
    return texts


def best(rows: Sequence[Row]) -> list[str]:
    """The fastest of all ranks together, at the largest world and length."""
    sharded = [row for row in rows if row["candidate"] not in (WHOLE, ALL_CORES)]
    if not sharded:
        return []
    row = max(sharded, key=lambda row: (row["world"], row["tokens"], -row["time"]))
    ideal = "" if row["of ideal"] is None else f", {row['of ideal']:.1f}% of ideal"
    where = f"{row['world']} ranks, {binary(row['tokens'])} tokens"
    return [f"best: {row['candidate']}, {where}: {row['time']:.4g} ms{ideal}"]


# what it takes of memory


def needs(problem: AttentionConfig, *, layouts: Sequence[str], kinds: Sequence[str]) -> Needs:
    """What all ranks of one machine take: the whole inputs, shards by every order, float64, and the largest peak.

    Beside them the slots of every layout's ring of ours, which stay open while all are timed.
    """
    whole = problem.seqlen * inputs(problem)
    drawn = whole + problem.seqlen * elements(problem)[0] * FP32  # one of them in fp32, before it is rounded
    slots = ring_slots(problem) if OURS in kinds else 0
    kept = (len(layouts) + 2) * shard(problem) * inputs(problem) + len(layouts) * slots
    peaks = {kind: candidate_bytes(kind, problem) - (slots if kind == OURS else 0) for kind in kinds}
    alone, shared = peaks.pop(WHOLE, 0), max((size for kind, size in peaks.items() if kind != ALL_CORES), default=0)
    ranks = ranks_here(problem.world)
    host = ranks * (drawn + PROCESS_BYTES)
    if problem.device == "cpu":
        return Needs(host + ranks * kept + max(ranks * shared, alone + whole, judged_bytes(problem)))
    on_one = -(-ranks // gpus_of(ranks))
    return Needs(host, on_one * (kept + shared) + max(alone + whole, judged_bytes(problem)))
