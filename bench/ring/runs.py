"""One rank of ``bench ring``: checks every candidate against float64, measures its memory, then times all in turns."""

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
"""Columns and units. ``bench/README.md`` has the formula of every column."""
ONE_RUN = "exposed and compute come from one extra run; empty if longer than the median time"


@dataclass(frozen=True)
class RingConfig:
    """Configuration of a measurement, equal on every rank."""

    problems: tuple[AttentionConfig, ...]  # all with the same number of ranks
    layouts: tuple[str, ...]
    repeats: int = 5
    by: tuple[str, ...] = ()
    timer: str = ""  # one of OF_RINGS; empty: the device's default
    bytes_per_second: float | None = None  # limit for the links of our rings, if any


class Checked(NamedTuple):
    """Results of the first run of a candidate."""

    shards: Tensors
    peak: int
    errors: Mapping[str, float]  # of each result; only on rank 0
    wrong: Sequence[str]  # results with errors above the limit


def measure(place: Member, device: torch.device, config: RingConfig) -> Result:
    """Measure all problems on one rank; only rank 0 computes errors."""
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
        result.notes.append(
            "peaks after the first length are upper bounds, because the same processes measure every length"
        )
    return result


def opened(rings: ExitStack, device: torch.device, transport: str, limits: Limits, group: Group | None) -> Ring:
    """Open a ring that stays open with the others; destroy its group afterwards unless it is the default group."""
    if isinstance(group, dist.ProcessGroup):
        if group is not dist.group.WORLD:
            rings.callback(dist.destroy_process_group, group)
        rings.callback(kept_of(group).pop, device, None)
        if group.size() == 1:  # nothing is sent
            transport, limits = "auto", Limits()
    return rings.enter_context(Ring(group, transport=transport, limits=limits))


def warm_up(config: RingConfig, device: torch.device) -> None:
    """Warm up connections, thread pools and lazy modules, so that no candidate's memory contains them."""
    small = replace(config.problems[0], seqlen=WARM_TOKENS * config.problems[0].world)
    with Ring(transport=small.transport) as ring:
        candidate = ours(config.layouts[0], Setting(small, config.layouts, device, lambda _: ring))
        candidate.run(candidate.shards(small.tensors(), device))


def measured(setting: Setting, config: RingConfig, rank: int) -> Result:
    """Check and time all candidates of one problem on this rank."""
    available, absent = candidates(setting, config.by)
    problem, repeats = setting.problem, config.repeats
    with progress(silent=rank != 0) as step:
        part = f"{problem.seqlen:,} tokens"
        step(part, len(available) * (1 + repeats))
        advance = partial(step, part, None)
        with freed_at_once(setting.device):  # for the whole check, because a heap reuses freed blocks
            checks = checked(available, problem, setting.device, rank, advance)
        steps = {name: partial(candidate.run, checks[name].shards) for name, candidate in available.items()}
        clock = Clock(setting.device, Ranks(), config.timer)
        # the check was the warm-up
        times = interleaved(steps, clock, repeats=repeats, warmup=0, progress=advance)
    result = Result("bench ring", UNITS)
    ideal = times[WHOLE].median / problem.world if WHOLE in times else None
    for name, candidate in available.items():
        result.rows.append(row_of(problem, candidate, checks[name], times[name], ideal))
        if failing := checks[name].wrong:
            messages = result.notes if name in PEERS else result.failed
            messages.append(f"{problem.title}: {name}: {', '.join(failing)} has an error above its limit")
    transports = [candidate.ring.transport for candidate in available.values() if candidate.ring is not None]
    threads = f", {problem.threads} threads each" if problem.device == "cpu" else ""
    transport_text = f" over {transports[0]}" if transports else ""
    if config.bytes_per_second is not None:
        transport_text += f" at {human(config.bytes_per_second, 'B/s')}"
    title = problem.title.replace(problem.layout, "/".join(config.layouts), 1)
    result.notes.append(f"{title}, {problem.device}{transport_text}{threads}, medians of {repeats} interleaved runs")
    if any(candidate.ring or candidate.waits for candidate in available.values()):
        result.notes.append(ONE_RUN)
    result.notes += [f"not available: {name}: {reason}" for name, reason in absent.items()]
    return result


def checked(
    able: Mapping[str, Candidate],
    problem: AttentionConfig,
    device: torch.device,
    rank: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Checked]:
    """Run each candidate once; return its errors against float64 and its peak memory."""
    tensors, checks = problem.tensors(), dict[str, Checked]()
    heads = chosen_heads(problem.batch, problem.heads, problem.kv_heads, problem.seqlen, problem.seqlen)
    judge = None if rank else judge_of(Inputs(*(x.to(device) for x in tensors)), Masks(causal=problem.causal), heads)
    if judge is not None:  # keep the device's memory for the candidates
        judge = judge._replace(exact={name: x.cpu() for name, x in judge.exact.items()})
    cached_shards: list[tuple[Tensor, Tensors]] = []  # candidates with the same tokens share shards
    for name, candidate in able.items():
        memory = PeakMemory(device)
        shards = candidate.shards(tensors, device)
        rank_results = candidate.run(shards)
        peak = memory.bytes
        results = gathered(candidate, rank_results, problem, heads)
        del rank_results
        errors = {} if judge is None else judge.differences(results)
        failing = [] if judge is None else judge.wrong(errors)
        if candidate.positions is not None:
            tokens = candidate.positions
            shards = next((shared for other, shared in cached_shards if torch.equal(tokens, other)), shards)
            cached_shards.append((tokens, shards))
        checks[name] = Checked(shards, peak, errors, failing)
        progress()
    return checks


def row_of(problem: AttentionConfig, candidate: Candidate, of: Checked, times: Samples, ideal: float | None) -> Row:
    """Build a candidate's row; times of the extra run are left out if they exceed the median."""
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
    """Gather some heads of all ranks' results on every rank, in position order, in float64."""
    group = problem.heads // problem.kv_heads
    heads = [head * group + member for head in kv_heads for member in range(group)]
    chosen = (heads, heads, list(kv_heads), list(kv_heads))
    full = [torch.zeros(problem.batch, problem.seqlen, len(indices), problem.head_dim).double() for indices in chosen]
    for target, part, indices in zip(full, mine, chosen, strict=False):
        target[:, candidate.positions] = part[:, :, indices].to("cpu", torch.float64)
    for target in full:
        dist.all_reduce(target)  # one rank has each position and the others have 0, so the sum is a copy
    return dict(zip(RESULTS, full, strict=True))


def where_time_goes(candidate: Candidate, shards: Tensors) -> tuple[float | None, float | None]:
    """Run once more; return seconds in the network and of compute on the slowest rank, None if not known."""
    team = Ranks()
    if candidate.ring is not None:
        team.ready()
        with candidate.ring.record() as trace:
            candidate.run(shards)
        return team.slowest(trace.seconds("wait")), team.slowest(trace.seconds("compute"))
    if candidate.waits is None:
        return (0.0, None) if candidate.sent == 0 else (None, None)
    candidate.waits.take()
    team.ready()
    candidate.run(shards)
    return team.slowest(candidate.waits.take()), None


def crossovers(rows: Sequence[Row]) -> list[str]:
    """Return notes on all-gather's and Ulysses' time over our best layout's, by length, for every world."""
    texts = []
    for world, by in itertools.product(dict.fromkeys(row["world"] for row in rows), (ALL_GATHER, ULYSSES)):
        ratios = []
        for tokens in sorted({row["tokens"] for row in rows}):
            same_problem = [row for row in rows if (row["world"], row["tokens"]) == (world, tokens)]
            others = [row["time"] for row in same_problem if row["candidate"] == by]
            rings = [row["time"] for row in same_problem if row["candidate"].startswith(f"{OURS} ")]
            if others and rings:
                ratios.append(f"{others[0] / min(rings):.2f} at {binary(tokens)}")
        if ratios:
            texts.append(f"time of {by} / time of our ring, {world} ranks: {', '.join(ratios)}")
    return texts


def best(rows: Sequence[Row]) -> list[str]:
    """Return a note on the fastest ring at the largest world and length."""
    sharded = [row for row in rows if row["candidate"] not in (WHOLE, ALL_CORES)]
    if not sharded:
        return []
    row = max(sharded, key=lambda row: (row["world"], row["tokens"], -row["time"]))
    ideal = "" if row["of ideal"] is None else f", {row['of ideal']:.1f}% of ideal"
    where = f"{row['world']} ranks, {binary(row['tokens'])} tokens"
    return [f"best: {row['candidate']}, {where}: {row['time']:.4g} ms{ideal}"]


def needs(problem: AttentionConfig, *, layouts: Sequence[str], kinds: Sequence[str]) -> Needs:
    """Return the needs of all ranks of a machine: inputs, shards, float64 results, the largest peak and our slots."""
    whole_inputs = problem.seqlen * inputs(problem)
    drawn = whole_inputs + problem.seqlen * elements(problem)[0] * FP32  # one tensor at a time is drawn in fp32
    slots = ring_slots(problem) if OURS in kinds else 0
    kept_bytes = (len(layouts) + 2) * shard(problem) * inputs(problem) + len(layouts) * slots
    peaks = {kind: candidate_bytes(kind, problem) - (slots if kind == OURS else 0) for kind in kinds}
    alone, shared = peaks.pop(WHOLE, 0), max((size for kind, size in peaks.items() if kind != ALL_CORES), default=0)
    ranks = ranks_here(problem.world)
    host = ranks * (drawn + PROCESS_BYTES)
    if problem.device == "cpu":
        return Needs(host + ranks * kept_bytes + max(ranks * shared, alone + whole_inputs, judged_bytes(problem)))
    on_one = -(-ranks // gpus_of(ranks))
    return Needs(host, on_one * (kept_bytes + shared) + max(alone + whole_inputs, judged_bytes(problem)))
