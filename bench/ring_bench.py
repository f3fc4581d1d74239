"""``ringattn bench ring``: a whole ring in real processes beside one process, a usual ring, and a ring from PyPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..ring import Ring
from .candidates import DTYPES, PEER, Candidate, Problem, Tensors, candidates, whole
from .flops import BACKWARD_FLOPS, forward_flops, pairs_of
from .launching import Member, cores, launch, member, process_group
from .output import check_target, prints, write_csv, write_json
from .provenance import provenance
from .shapes import LayoutName, grouped, size
from .tables import table
from .timing import Clock, Samples, Team, interleaved

T = TypeVar("T")

RESULTS = ("out", "dq", "dk", "dv")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CPU = torch.device("cpu")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Ranks(Team):
    """All ranks of the default group; waiting blocks and does not spin."""

    def ready(self) -> None:
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        longest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()


@dataclass
class Report:
    """What rank 0 knows after a measurement."""

    times: dict[str, Samples]
    errors: dict[str, dict[str, float]]  # largest error against float64, of each result
    disagreements: dict[str, list[str]] = field(default_factory=dict)
    hops: dict[str, float] = field(default_factory=dict)  # seconds of our compute and our waits, slowest rank


def dtype_name(text: str) -> str:
    """A dtype by its long or its short name; a parser of typer options.

    Raises:
        typer.BadParameter: anything else.
    """
    name = SHORT.get(text, text)
    if name not in DTYPES:
        raise typer.BadParameter(f"{text!r} is no dtype: it takes {', '.join([*SHORT, *DTYPES])}")
    return name


def spawned(store: str, problem: Problem, repeats: int) -> Report | None:
    """The entry of the processes that the command starts itself."""
    place = member()
    assert place is not None
    return measure(place, problem, repeats, store)


def measure(place: Member, problem: Problem, repeats: int, store: str | None = None) -> Report | None:
    """One rank of the measurement: the results first, then the time."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this version measures processes of the CPU, also where there is a GPU
    with process_group(place, store), Ring() as ring:
        everyone = candidates(problem, ring)
        tensors = problem.tensors()
        shards = {name: one.shards(tensors) for name, one in everyone.items()}
        total = len(everyone) + sum(min(one.runs or repeats, repeats) for one in everyone.values())
        with Progress(console=Console(stderr=True), disable=place.rank != 0, transient=True) as bar:
            task = bar.add_task("checking", total=total)
            errors, disagreements = check(problem, everyone, tensors, shards, lambda: bar.advance(task))
            bar.update(task, description="timing")
            times = interleaved(
                {name: lambda one=one, name=name: one.run(shards[name]) for name, one in everyone.items()},  # type: ignore[misc]
                Clock(CPU, Ranks()),
                repeats=repeats,
                warmup=0,  # the check was one
                limits={name: one.runs for name, one in everyone.items() if one.runs is not None},
                progress=lambda: bar.advance(task),
            )
        hops = where_time_goes(everyone["ringattn"], shards["ringattn"], ring)
        return Report(times, errors, disagreements, hops) if place.rank == 0 else None


def check(
    problem: Problem, everyone: Mapping[str, Candidate], tensors: Tensors, shards: Mapping[str, Tensors], progress: Any
) -> tuple[dict[str, dict[str, float]], dict[str, list[str]]]:
    """Every candidate's largest errors against float64; which of them exceed what rounding explains.

    Allowed is twice the error of PyTorch's attention in the same dtype plus the rounding of that dtype, the rule of
    the tests.
    """
    judge = whole(problem, torch.float64)
    exact = gathered(judge, judge.run(judge.shards(tensors)), tensors, torch.float64)
    sizes = {name: float(x.abs().max()) for name, x in zip(RESULTS, exact, strict=True)}
    errors: dict[str, dict[str, float]] = {}
    disagreements: dict[str, list[str]] = {}
    eps = torch.finfo(DTYPES[problem.dtype]).eps
    for name, one in everyone.items():
        told = gathered(one, one.run(shards[name]), tensors, torch.float64)
        errors[name] = {what: float((x - y).abs().max()) for what, x, y in zip(RESULTS, told, exact, strict=True)}
        allowed = {what: 2 * next(iter(errors.values()))[what] + eps * sizes[what] for what in RESULTS}
        # a NaN fails too
        disagreements[name] = [what for what in RESULTS if not errors[name][what] <= allowed[what]]
        progress()
    return errors, disagreements


def gathered(one: Candidate, mine: Tensors, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The results of all ranks as whole tensors in the order of positions, on every rank."""
    q, k, v, dout = tensors
    full = tuple(torch.zeros(x.shape, dtype=dtype) for x in (dout, q, k, v))
    for target, part in zip(full, mine, strict=False):
        target[:, one.positions] = part.to(dtype)
    for target in full:
        dist.all_reduce(target)  # every position is one rank's alone, so that the sum is a copy
    return full


def where_time_goes(one: Candidate, shards: Tensors, ring: Ring) -> dict[str, float]:
    """Seconds of one more run: computing, and waiting for the network, each on its slowest rank."""
    dist.barrier()
    with ring.record() as trace:
        one.run(shards)
    return {kind: Ranks().slowest(trace.seconds(kind)) for kind in ("compute", "wait")}


def rows_of(problem: Problem, report: Report) -> list[dict[str, Any]]:
    """A row per candidate; ``times SDPA`` is the ratio of the medians of the same interleaved run."""
    flops = problem_flops(problem)
    baseline = next(iter(report.times.values())).median
    rows = []
    for name, samples in report.times.items():
        wrong = report.disagreements[name]
        rows.append(
            {
                "": name,
                "seconds": samples.median,
                "spread": f"±{samples.spread:.1%}",
                "times SDPA": round(samples.median / baseline, 3),
                "GFLOP/s": round(flops / samples.median / 1e9, 1),
                "tokens/s": round(problem.batch * problem.seqlen / samples.median),
                "runs": len(samples.seconds),
                **{f"error {what}": float(f"{error:.2g}") for what, error in report.errors[name].items()},
                "agrees": "yes" if not wrong else "not in " + ", ".join(wrong),
            }
        )
    return rows


def problem_flops(problem: Problem) -> float:
    """Forward and backward of the whole sequence."""
    pairs = pairs_of(problem.seqlen, causal=problem.causal)
    once = forward_flops(pairs, heads=problem.heads, head_dim=problem.head_dim, batch=problem.batch)
    return once * (1 + BACKWARD_FLOPS)


def as_json(problem: Problem, report: Report) -> dict[str, Any]:
    return {
        "schema": "ringattn bench ring 1",
        "provenance": provenance(CPU),
        "problem": asdict(problem),
        "flops": problem_flops(problem),
        "candidates": [
            {
                "name": name,
                "seconds": samples.as_json(),
                "errors": report.errors[name],
                "disagrees": report.disagreements[name],
            }
            for name, samples in report.times.items()
        ],
        "ringattn_seconds": report.hops,
    }


@app.command()
def ring(
    world: Annotated[int, typer.Option(min=1, help="Processes; under a launcher, its ranks.")] = 2,
    seqlen: Annotated[Any, typer.Option(parser=size, metavar="SIZE", help="Tokens in all.")] = "16k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V [default: --heads].")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Per process [default: a share of the cores].")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per candidate.")] = None,
) -> None:
    """Forward and backward of one attention, sharded over processes, beside the same attention whole."""
    place = member()
    world = place.world if place is not None else world
    kv_heads = grouped(heads, kv_heads)
    if seqlen < world:
        raise typer.BadParameter(f"--seqlen is {seqlen}: {world} processes need a token each")
    check_targets(json, csv)
    share = threads or max(1, cores() // (place.local_world if place is not None else world))
    problem = Problem(seqlen, world, batch, heads, kv_heads, head_dim, dtype, causal, layout.value, share, seed)
    report = started(world, spawned, problem, repeats) if place is None else measure(place, problem, repeats)
    if report is not None and prints():
        finish(problem, report, json, csv)


def check_targets(*targets: str | Path | None) -> None:
    """Refuse a file that could not be written, before minutes of work."""
    try:
        for target in targets:
            check_target(target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def started(world: int, entry: Callable[..., T], *arguments: object) -> T:
    """What rank 0 of new processes returns; where one of them fails, its error and exit code 1."""
    try:
        return launch(world, entry, *arguments)
    except ChildFailedError as error:
        typer.echo(f"a rank failed: {error}", err=True)
        raise typer.Exit(1) from None


def finish(problem: Problem, report: Report, json: str | None, csv: Path | None) -> None:
    """Print and write; exit 1 where a result that must agree does not."""
    rows = rows_of(problem, report)
    if json != "-":
        typer.echo(text(problem, report, rows))
    if json is not None:
        write_json(json, as_json(problem, report))
    if csv is not None:
        write_csv(csv, [{"candidate" if key == "" else key: value for key, value in row.items()} for row in rows])
    if any(wrong for name, wrong in report.disagreements.items() if name != PEER):
        print("a result differs from PyTorch's by more than rounding: see `agrees`", file=sys.stderr)
        raise typer.Exit(1)


def text(problem: Problem, report: Report, rows: list[dict[str, Any]]) -> str:
    kind = "causal" if problem.causal else "full"
    title = (
        f"{kind} forward and backward, B{problem.batch} H{problem.heads}/{problem.kv_heads} D{problem.head_dim} "
        f"{problem.dtype}, {problem.seqlen:,} tokens, {problem.layout}; {problem.world} processes, threads of each: "
        f"{problem.threads}; time on the slowest rank, medians of interleaved runs\n"
    )
    hops = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in report.hops.items())
    return table(rows, title=title) + f"\n\nringattn on its slowest rank, one run: {hops}"
