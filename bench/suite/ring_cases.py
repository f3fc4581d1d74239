"""Whole rings of real processes as cases of the suite: time beside other ways, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import typer

from .. import memory_bench
from ..launching import cores, launch
from ..ring.candidates import ALL_CORES, OURS, WHOLE, Problem
from ..ring.command import refuse_too_large
from ..ring.rows import crossovers, problem_flops
from ..ring.runs import Report, Wish, spawned
from .cases import NotHere, Number

AROUND, GROWTH = "time over the ring's", "largest over smallest world"


def whole_ring(
    device: torch.device,
    *,
    seqlens: Sequence[int],
    world: int = 2,
    layouts: Sequence[str] = ("zigzag",),
    heads: Sequence[int] = (8, 8),
    head_dim: int = 64,
    dtype: str = "float32",
    repeats: int = 3,
    by: Sequence[str] = (),
    transport: str = "auto",
    timer: str = "",
) -> Iterator[Number]:
    """``bench ring``, short: errors and times of all candidates, and where a way around the ring wins."""
    threads = max(1, cores() // world)
    problems = tuple(
        Problem(
            seqlen, world, 1, heads[0], heads[1], head_dim, dtype, True, layouts[0], threads, 0, device.type, transport
        )
        for seqlen in seqlens
    )
    try:
        for problem in problems:
            refuse_too_large(problem, layouts, by, world)
    except typer.BadParameter as refused:
        raise NotHere(str(refused)) from None
    reports = launch(world, spawned, Wish(problems, tuple(layouts), repeats, tuple(by), timer))
    for report in reports:
        yield from numbers(report)
    for one in crossovers(reports):
        for seqlen, ratio in zip(one.lengths, one.ratios, strict=True):
            labels = {"by": one.by, "world": world, "seqlen": seqlen}
            yield Number(AROUND, ratio, "times", labels, note=str(one))


def numbers(report: Report) -> Iterator[Number]:
    """What is wrong, then the columns of ``bench ring``, number by number."""
    problem, flops = report.problem, problem_flops(report.problem)
    baseline = report.found[WHOLE].times.median
    for name, reason in report.absent.items():
        labels = of(problem, name)
        yield Number("not there", None, "", labels, note=reason)
    for name, one in report.found.items():
        labels = of(problem, name, one.kind)
        limit = 0 if one.trusted else None
        wrong = ", ".join(one.disagrees) or None
        yield Number("results that disagree", len(one.disagrees), "tensors", labels, limit, note=wrong)
        seconds, spread = one.times.median, one.times.spread
        ranks = 1 if one.kind in (WHOLE, ALL_CORES) else problem.world
        yield Number("forward and backward", seconds * 1e3, "ms", labels, spread=spread)
        yield Number("forward and backward", flops / seconds / ranks / 1e12, "TFLOP/s", labels, spread=spread)
        yield Number("of ideal", 100 * baseline / problem.world / seconds, "%", labels, spread=spread)
        if one.peak is not None:
            yield Number("peak memory of a rank", one.peak / 1e6, "MB", labels)
        if one.exposed is not None:
            yield Number("exposed", one.exposed * 1e3, "ms", labels)
        if one.sent is not None:
            yield Number("sent by a rank", one.sent / 1e6, "MB", labels)


def of(problem: Problem, by: str, kind: str = "") -> dict[str, object]:
    """Labels of what a candidate did; its layout, where it is a ring of ours."""
    labels = {
        "by": by,
        "world": problem.world,
        "seqlen": problem.seqlen,
        "mask": "causal" if problem.causal else "full",
    }
    return labels | ({"layout": by.removeprefix(f"{OURS} ")} if kind == OURS else {})


def memory(
    device: torch.device, *, worlds: Sequence[int], tokens: int, heads: int = 8, head_dim: int = 64
) -> Iterator[Number]:
    """``bench memory``, short: the peak of a rank does not grow with the number of ranks."""
    if device.type != "cpu":
        raise NotHere("it measures processes of the CPU; a GPU's peak memory is a column of `ringattn bench ring`")
    peaks = {}
    for world in worlds:
        problem = Problem(world * tokens, world, heads=heads, kv_heads=heads, head_dim=head_dim)
        everyone = launch(world, memory_bench.spawned, problem, memory_bench.Setting())
        assert everyone is not None
        peaks[world] = max(peak.highest for peak in everyone)
        mask = "causal" if problem.causal else "full"
        labels = {"world": world, "tokens per rank": tokens, "layout": problem.layout, "mask": mask}
        yield Number("peak memory of a rank", peaks[world] / 1e6, "MB", labels)
    spread = max(peaks.values()) / min(peaks.values()) - 1
    yield Number(GROWTH, spread, "times less 1", {"tokens per rank": tokens})
