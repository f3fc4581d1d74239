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
from ...comm.group_cache import get_group_cache
from ...ring import Ring
from ..common.attention import BACKWARD_FLOPS, AttentionConfig, Tensors
from ..common.errors import RESULTS, AttentionInputs, build_judge, judged_heads
from ..common.flags import human_count, size_text
from ..common.memory import PROCESS_BYTES, MemoryNeeds, PeakMemory, return_freed_memory, usable_gpus
from ..common.memory_table import (
    ALL_CORES,
    ALL_GATHER,
    FP32,
    ONE_DEVICE,
    OURS,
    ULYSSES,
    candidate_bytes,
    elements_per_token,
    input_bytes,
    judged_bytes,
    ring_slots,
    shard_tokens,
)
from ..common.progress import progress
from ..common.ranks import LaunchedRank, ranks_here
from ..common.result import Result, Row
from ..common.timing import RankTeam, Samples, StepTimer, time_in_turns
from .candidates import PEERS, Candidate, CandidateSetting, make_candidates, our_ring

WARM_TOKENS = 64
UNITS = {
    "candidate": "", "world": "", "tokens": "", "time": "ms", "spread": "%", "of ideal": "%", "exposed": "ms",
    "throughput": "tokens/s", "rate of a rank": "TFLOP/s", "sent": "MB", "peak": "MB", "counted peak": "MB",
    "compute": "ms", "error": "", "over tolerance": "",
}  # fmt: skip
"""Columns and units. ``bench/README.md`` has the formula of every column."""
ONE_RUN_NOTE = "exposed and compute come from one extra run, and are left out if longer than the median time"


@dataclass(frozen=True)
class RingConfig:
    """Configuration of a measurement, equal on every rank."""

    problems: tuple[AttentionConfig, ...]  # all with the same number of ranks
    layouts: tuple[str, ...]
    repeats: int = 5
    prefixes: tuple[str, ...] = ()  # beginnings of candidates' names; empty: all candidates
    timer: str = ""  # one of RING_TIMERS; empty: the device's default
    bytes_per_second: float | None = None  # limit for the links of our rings, if any


class CandidateCheck(NamedTuple):
    """Inputs, peak memory and errors of a candidate's first run on this rank."""

    shards: Tensors
    peak_bytes: int
    errors: Mapping[str, float]  # of each result; only on rank 0
    failing_results: Sequence[str]  # results with errors above the limit


def measure_rings(place: LaunchedRank, device: torch.device, config: RingConfig) -> Result:
    """Measure all problems as one rank of the ring; only rank 0 computes errors."""
    shared = device.type == "cuda" and place.local_world > torch.cuda.device_count()
    result = Result("bench ring", UNITS)
    with return_freed_memory(device):
        warm_up(config, device)
    for problem in config.problems:
        with ExitStack() as rings:
            limits = Limits(bytes_per_second=config.bytes_per_second)
            ring = partial(open_bench_ring, rings, device, problem.transport, limits)
            slowed = config.bytes_per_second is not None
            setting = CandidateSetting(problem, config.layouts, device, ring, shared, slowed)
            result.add(measure_problem(setting, config, place.rank))
    if device.type == "cpu" and len(config.problems) > 1:
        result.notes.append("peaks after the first length are upper bounds, because each process measures all lengths")
    return result


def open_bench_ring(
    rings: ExitStack, device: torch.device, transport: str, limits: Limits, group: Group | None
) -> Ring:
    """Open a ring over a group (None: the default); ``rings`` closes it, and destroys any but the default group."""
    if isinstance(group, dist.ProcessGroup):
        if group is not dist.group.WORLD:
            rings.callback(dist.destroy_process_group, group)
        rings.callback(get_group_cache(group).pop, device, None)
    return rings.enter_context(Ring(group, transport=transport, limits=limits))


def warm_up(config: RingConfig, device: torch.device) -> None:
    """Warm up connections, thread pools and lazy modules, so that no candidate's memory contains them."""
    small = replace(config.problems[0], seqlen=WARM_TOKENS * config.problems[0].world, cu_seqlens=None)
    with Ring(transport=small.transport) as ring:
        candidate = our_ring(config.layouts[0], CandidateSetting(small, config.layouts, device, lambda _: ring))
        candidate.run(candidate.shards(small.tensors(), device))


def measure_problem(setting: CandidateSetting, config: RingConfig, rank: int) -> Result:
    """Check and time all candidates of one problem on this rank."""
    available, absent = make_candidates(setting, config.prefixes)
    problem, repeats = setting.problem, config.repeats
    with progress(silent=rank != 0) as step:
        part = f"{problem.seqlen:,} tokens"
        step(part, len(available) * (1 + repeats))
        advance = partial(step, part, None)
        with return_freed_memory(setting.device):  # for the whole check, because a heap reuses freed blocks
            checks = check_candidates(available, problem, setting.device, rank, advance)
        steps = {name: partial(candidate.run, checks[name].shards) for name, candidate in available.items()}
        clock = StepTimer(setting.device, RankTeam(), config.timer)
        # the check was the warm-up
        times = time_in_turns(steps, clock, repeats=repeats, warmup=0, progress=advance)
    result = Result("bench ring", UNITS)
    ideal = times[ONE_DEVICE].median / problem.world if ONE_DEVICE in times else None
    for name, candidate in available.items():
        result.rows.append(candidate_row(problem, candidate, checks[name], times[name], ideal))
        if failing := checks[name].failing_results:
            messages = result.notes if name in PEERS else result.failed
            messages.append(f"{problem.title}: {name}: error above the limit in {', '.join(failing)}")
    transports = [candidate.ring.transport for candidate in available.values() if candidate.ring is not None]
    threads = f", {problem.threads} threads each" if problem.device == "cpu" else ""
    transport_text = f" over {transports[0]}" if transports else ""
    if config.bytes_per_second is not None:
        transport_text += f" at {human_count(config.bytes_per_second, 'B/s')}"
    title = problem.title.replace(problem.layout, "/".join(config.layouts), 1)
    result.notes.append(f"{title}, {problem.device}{transport_text}{threads}, medians of {repeats} interleaved runs")
    if any(candidate.ring or candidate.wait_timer for candidate in available.values()):
        result.notes.append(ONE_RUN_NOTE)
    result.notes += [f"not available: {name}: {reason}" for name, reason in absent.items()]
    return result


def check_candidates(
    available: Mapping[str, Candidate],
    problem: AttentionConfig,
    device: torch.device,
    rank: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, CandidateCheck]:
    """Run each candidate once on all ranks together; ``progress`` is called after each."""
    tensors, checks = problem.tensors(), dict[str, CandidateCheck]()
    heads = judged_heads(problem.batch, problem.heads, problem.kv_heads, problem.seqlen, problem.seqlen)
    judge = None
    if rank == 0:
        inputs = AttentionInputs(*(x.to(device) for x in tensors))
        judge = build_judge(inputs, problem.reference_masks(device), heads)
        del inputs  # keep the device's memory for the candidates
        judge = judge._replace(exact={name: x.cpu() for name, x in judge.exact.items()})
    cached_shards: list[tuple[Tensor, Tensors]] = []  # candidates with the same tokens share shards
    for name, candidate in available.items():
        memory = PeakMemory(device)
        shards = candidate.shards(tensors, device)
        rank_results = candidate.run(shards)
        peak = memory.bytes
        results = gather_results(candidate, rank_results, problem, heads)
        del rank_results
        errors = {} if judge is None else judge.head_errors(results)
        failing = [] if judge is None else judge.failing_results(errors)
        if candidate.positions is not None:
            tokens = candidate.positions
            shards = next((shared for other, shared in cached_shards if torch.equal(tokens, other)), shards)
            cached_shards.append((tokens, shards))
        checks[name] = CandidateCheck(shards, peak, errors, failing)
        progress()
    return checks


def candidate_row(
    problem: AttentionConfig, candidate: Candidate, check: CandidateCheck, times: Samples, ideal: float | None
) -> Row:
    """Return the candidate's row; all ranks must call, because it runs once more for exposed and compute times.

    ``ideal`` is the time of one device divided by the ranks, if measured. An exposed or compute time above the median
    of the timed runs is left out.
    """
    seconds, kind = times.median, candidate.kind
    parts = split_step_time(candidate, check.shards)
    exposed, compute = (None if part is None or part > seconds else part for part in parts)
    ranks = 1 if kind in (ONE_DEVICE, ALL_CORES) else problem.world
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
        "sent": None if candidate.sent_bytes is None else candidate.sent_bytes / 1e6,
        "peak": RankTeam().slowest_seconds(check.peak_bytes) / 1e6,
        "counted peak": candidate_bytes(kind, problem) / 1e6,
        "compute": None if compute is None else compute * 1e3,
        "error": max(check.errors.values(), default=None),
        "over tolerance": ", ".join(check.failing_results),
    }


def gather_results(
    candidate: Candidate, rank_results: Tensors, problem: AttentionConfig, kv_heads: Sequence[int]
) -> dict[str, Tensor]:
    """Return out, dq, dk and dv of ``kv_heads`` and their query heads on every rank: all positions, in float64."""
    group = problem.heads // problem.kv_heads
    heads = [head * group + member for head in kv_heads for member in range(group)]
    chosen = (heads, heads, list(kv_heads), list(kv_heads))
    full = [torch.zeros(problem.batch, problem.seqlen, len(indices), problem.head_dim).double() for indices in chosen]
    for target, part, indices in zip(full, rank_results, chosen, strict=False):
        target[:, candidate.positions] = part[:, :, indices].to("cpu", torch.float64)
    for target in full:
        dist.all_reduce(target)  # one rank has each position and the others have 0, so the sum is a copy
    return dict(zip(RESULTS, full, strict=True))


def split_step_time(candidate: Candidate, shards: Tensors) -> tuple[float | None, float | None]:
    """Run once more on all ranks; return the seconds of waiting for transfers and of compute.

    Each is the largest over the ranks, or None if it is not known.
    """
    team = RankTeam()
    if candidate.ring is not None:
        team.wait_until_ready()
        with candidate.ring.record() as trace:
            candidate.run(shards)
        return team.slowest_seconds(trace.seconds("wait")), team.slowest_seconds(trace.seconds("compute"))
    if candidate.wait_timer is None:
        return (0.0, None) if candidate.sent_bytes == 0 else (None, None)
    candidate.wait_timer.lap_seconds()
    team.wait_until_ready()
    candidate.run(shards)
    return team.slowest_seconds(candidate.wait_timer.lap_seconds()), None


def crossover_notes(rows: Sequence[Row]) -> list[str]:
    """Return notes with the times of all-gather and Ulysses relative to our fastest layout, by ranks and length."""
    texts = []
    for world, by in itertools.product(dict.fromkeys(row["world"] for row in rows), (ALL_GATHER, ULYSSES)):
        ratios = []
        for tokens in sorted({row["tokens"] for row in rows}):
            same_problem = [row for row in rows if (row["world"], row["tokens"]) == (world, tokens)]
            others = [row["time"] for row in same_problem if row["candidate"] == by]
            rings = [row["time"] for row in same_problem if row["candidate"].startswith(f"{OURS} ")]
            if others and rings:
                ratios.append(f"{others[0] / min(rings):.2f} at {size_text(tokens)}")
        if ratios:
            texts.append(f"time of {by} / time of our ring, {world} ranks: {', '.join(ratios)}")
    return texts


def fastest_ring_note(rows: Sequence[Row]) -> list[str]:
    """Return a note on the fastest sharded candidate at the largest number of ranks and length."""
    sharded = [row for row in rows if row["candidate"] not in (ONE_DEVICE, ALL_CORES)]
    if not sharded:
        return []
    row = max(sharded, key=lambda row: (row["world"], row["tokens"], -row["time"]))
    ideal = "" if row["of ideal"] is None else f", {row['of ideal']:.1f}% of ideal"
    where = f"{row['world']} ranks, {size_text(row['tokens'])} tokens"
    return [f"best: {row['candidate']}, {where}: {row['time']:.4g} ms{ideal}"]


def ring_needs(problem: AttentionConfig, *, layouts: Sequence[str], kinds: Sequence[str]) -> MemoryNeeds:
    """Return the needs of all ranks of this machine for candidates of these layouts and kinds."""
    whole_inputs = problem.seqlen * input_bytes(problem)
    # one tensor at a time is drawn in fp32
    drawn = whole_inputs + problem.seqlen * elements_per_token(problem)[0] * FP32
    slots = ring_slots(problem) if OURS in kinds else 0
    kept_bytes = (len(layouts) + 2) * shard_tokens(problem) * input_bytes(problem) + len(layouts) * slots
    peaks = {kind: candidate_bytes(kind, problem) - (slots if kind == OURS else 0) for kind in kinds}
    alone = peaks.pop(ONE_DEVICE, 0)
    shared = max((size for kind, size in peaks.items() if kind != ALL_CORES), default=0)
    ranks = ranks_here(problem.world)
    host = ranks * (drawn + PROCESS_BYTES)
    if problem.device == "cpu":
        return MemoryNeeds(host + ranks * kept_bytes + max(ranks * shared, alone + whole_inputs, judged_bytes(problem)))
    on_one = -(-ranks // usable_gpus(ranks))
    return MemoryNeeds(host, on_one * (kept_bytes + shared) + max(alone + whole_inputs, judged_bytes(problem)))
