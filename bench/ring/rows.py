"""What ``bench ring`` tells: a row per candidate, and the length at which a way around the ring stops winning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from ..common.attention import BACKWARD_FLOPS, AttentionConfig, forward_flops, pairs_of
from ..common.flags import binary
from ..common.tables import table
from ..common.timing import Samples
from .candidates import ALL_CORES, ALL_GATHER, OURS, ULYSSES, WHOLE
from .memory import peak
from .peers import PEERS
from .runs import Report, Result

AROUND = (ALL_GATHER, ULYSSES)  # whose crossover with the ring is told
ALL_CORES_ONCE = "SDPA, one process"
"""What schema 1 called one process with the threads of all ranks; it had no one device."""


def problem_flops(problem: AttentionConfig) -> float:
    """Forward and backward of the whole sequence."""
    pairs = pairs_of(problem.seqlen, causal=problem.causal)
    once = forward_flops(pairs, heads=problem.heads, head_dim=problem.head_dim, batch=problem.batch)
    return once * (1 + BACKWARD_FLOPS)


def rows_of(report: Report) -> list[dict[str, Any]]:
    """A row per candidate; ``bench/README.md`` has the formula of every column."""
    problem, flops = report.problem, problem_flops(report.problem)
    ideal = report.found[WHOLE].times.median / problem.world if WHOLE in report.found else None
    rows = []
    for name, one in report.found.items():
        seconds, ranks = one.times.median, 1 if one.kind in (WHOLE, ALL_CORES) else problem.world
        rows.append(
            {
                "world": problem.world,
                "tokens": problem.seqlen,
                "": name,
                "ms": _digits(seconds * 1e3),
                "±": f"{one.times.spread:.1%}",
                "tokens/s": round(problem.batch * problem.seqlen / seconds),
                "TFLOP/s per rank": _digits(flops / seconds / ranks / 1e12),
                "% of ideal": None if ideal is None else _digits(100 * ideal / seconds),
                "exposed ms": None if one.exposed is None else _digits(one.exposed * 1e3),
                "MB sent": None if one.sent is None else _digits(one.sent / 1e6),
                "peak MB": None if one.peak is None else _digits(one.peak / 1e6),
                "error": _digits(max(one.errors.values(), default=math.nan), 2),
                "agrees": "yes" if not one.disagrees else "not in " + ", ".join(one.disagrees),
            }
        )
    return rows


def _digits(value: float, count: int = 4) -> float:
    return float(f"{value:.{count}g}")


@dataclass(frozen=True)
class Crossover:
    """How one way around compares with the best of our layouts as the sequence grows, at one world."""

    world: int
    by: str
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]  # its time over ours
    crossings: tuple[float, ...]  # lengths where the ratio passes 1, between two measured ones
    noise: tuple[float, ...]  # spreads of the two: a ratio nearer to 1 says nothing

    def __str__(self) -> str:
        span = " to ".join(dict.fromkeys((binary(self.lengths[0]), binary(self.lengths[-1]))))
        wins = [ratio < 1 for ratio in self.ratios]
        who = self.by if wins[0] else "the ring"
        if not self.crossings:
            told = f"{who} is faster at every length measured ({span}): " + self._told(0, len(wins) - 1)
        else:
            points = ", then at ".join(f"{point:,.0f} tokens" for point in self.crossings)
            told = f"{who} is faster up to about {points}, measured {span}: " + self._told(0, len(wins) - 1)
        even = [binary(n) for n, ratio, noise in self._points() if abs(math.log(ratio)) <= noise]
        return f"{self.by} and the ring, {self.world} ranks: {told}" + (
            f"; within the spread at {', '.join(even)}" if even else ""
        )

    def _told(self, *indices: int) -> str:
        return ", ".join(
            f"{self.ratios[i]:.2f} times the ring's time at {binary(self.lengths[i])}" for i in dict.fromkeys(indices)
        )

    def _points(self) -> zip[tuple[int, float, float]]:
        return zip(self.lengths, self.ratios, self.noise, strict=True)


def crossovers(reports: Sequence[Report]) -> list[Crossover]:
    """Of every world and every way around that was measured there."""
    found = []
    for world in dict.fromkeys(report.problem.world for report in reports):
        here = sorted((one for one in reports if one.problem.world == world), key=lambda one: one.problem.seqlen)
        for by in AROUND:
            both = [(one.problem.seqlen, one.found[by], best_ring(one)) for one in here if by in one.found]
            both = [(tokens, other, ring) for tokens, other, ring in both if ring is not None]
            if both:
                found.append(_crossover(world, by, both))
    return found


def best_ring(report: Report) -> Result | None:
    """Our fastest layout."""
    ours = [one for one in report.found.values() if one.kind == OURS]
    return min(ours, key=lambda one: one.times.median, default=None)


def _crossover(world: int, by: str, both: Sequence[tuple[int, Result, Result | None]]) -> Crossover:
    lengths = tuple(tokens for tokens, _, _ in both)
    ratios = tuple(other.times.median / ring.times.median for _, other, ring in both if ring is not None)
    noise = tuple(max(other.times.spread, ring.times.spread) for _, other, ring in both if ring is not None)
    crossings = []
    for (x, a), (y, b) in pairwise(zip(lengths, map(math.log, ratios), strict=True)):
        if (a < 0) != (b < 0):  # straight between them, in logarithms of both
            crossings.append(math.exp(math.log(x) + (math.log(y) - math.log(x)) * a / (a - b)))
    return Crossover(world, by, lengths, ratios, tuple(crossings), noise)


def text(reports: Sequence[Report]) -> str:
    """The table, what is not there and why, and the crossovers."""
    first = reports[0].problem
    kind = "causal" if first.causal else "full"
    threads = f", threads of each: {first.threads}" if first.device == "cpu" else ""
    transports = "/".join(dict.fromkeys(one.transport for one in reports if one.transport))
    title = (
        f"{kind} forward and backward, B{first.batch} H{first.heads}/{first.kv_heads} D{first.head_dim} {first.dtype}, "
        f"on {first.device}{threads}, transport {transports}; time on the slowest rank, medians of interleaved runs\n"
    )
    parts = [table([row for report in reports for row in rows_of(report)], title=title)]
    for lines in (absences(reports), [str(one) for one in crossovers(reports)]):
        parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def absences(reports: Sequence[Report]) -> list[str]:
    """Who is not there and why; where, if not everywhere."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for name, why in report.absent.items():
            reasons.setdefault((name, why), []).append(f"{report.problem.world} x {binary(report.problem.seqlen)}")
    return [
        f"not there: {name}: {why}" + ("" if len(where) == len(reports) else f" ({', '.join(where)})")
        for (name, why), where in reasons.items()
    ]


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Everything but the provenance."""
    return {
        "measurements": [_measurement(report) for report in reports],
        "crossovers": [asdict(one) | {"told": str(one)} for one in crossovers(reports)],
    }


def _measurement(report: Report) -> dict[str, Any]:
    return {
        "problem": asdict(report.problem),
        "flops": problem_flops(report.problem),
        "transport": report.transport,
        "candidates": [
            {
                "name": name,
                "kind": one.kind,
                "layout": name.removeprefix(f"{OURS} ") if one.kind == OURS else None,
                "seconds": one.times.as_json(),
                "errors": one.errors,
                "disagrees": one.disagrees,
                "trusted": one.trusted,
                "exposed_seconds": one.exposed,
                "compute_seconds": one.compute,
                "bytes_sent": one.sent,
                "peak_bytes": one.peak,
                "counted_bytes": peak(one.kind, report.problem),
            }
            for name, one in report.found.items()
        ],
        "absent": report.absent,
    }


def from_json(data: Mapping[str, Any]) -> list[Report]:
    """What :func:`as_json` wrote, of schema 1 too, which had one problem, no memory and no bytes.

    Raises:
        Exception: of any kind, where something is missing or is not what is written there.
    """
    return [_report(run) for run in data.get("measurements", [data])]


def _report(run: Mapping[str, Any]) -> Report:
    problem = AttentionConfig(
        **{one.name: run["problem"][one.name] for one in fields(AttentionConfig) if one.name in run["problem"]}
    )
    ours = run.get("ringattn_seconds", {})  # of schema 1: apart from the candidates
    found = {str(one["name"]): _result(one, ours if one["name"] == OURS else {}) for one in run["candidates"]}
    return Report(problem, found, dict(run.get("absent", {})), run.get("transport", ""))


def _errors(told: Mapping[str, float | None]) -> dict[str, float]:
    """Null is what was not finite."""
    return {name: math.nan if error is None else error for name, error in told.items()}


def _result(told: Mapping[str, Any], apart: Mapping[str, Any]) -> Result:
    name = told["name"]
    kind = told.get("kind", ALL_CORES if name == ALL_CORES_ONCE else name)
    # other people's rings were the ones that were not trusted when files did not say it
    trusted = told.get("trusted", name not in PEERS)
    return Result(
        kind, Samples(tuple(told["seconds"]["samples"])), _errors(told["errors"]), list(told["disagrees"]), trusted,
        told.get("exposed_seconds", apart.get("wait")), told.get("bytes_sent"), told.get("peak_bytes"),
        told.get("compute_seconds", apart.get("compute")),
    )  # fmt: skip
