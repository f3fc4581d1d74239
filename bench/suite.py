"""``ringattn bench suite``: everything this machine can measure, most important first, within a time budget."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from . import accuracy, beside, device_cases, ring_cases, speed, worlds
from .cases import Case, Number
from .launching import cores, member
from .provenance import provenance
from .tables import table
from .workers import Outcome, Pool

WRITING_SECONDS = 3.0  # of the budget, kept for the end
MOST_WORKERS = 13  # as many as there are cases of correctness
WORKER_GIB = 2  # of host memory: CUDA's libraries and a compiler
FEW_WORKERS = 4  # whatever the memory: some machines show little of theirs until it is used

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def gpu_cases() -> list[Case]:
    """First what no CPU can tell, then whether the kernels are right, then how fast they are."""
    kib = 1024
    lengths = (16 * kib, 8 * kib, 32 * kib, 4 * kib)
    shapes = [(128, True), (128, False), (64, True), (64, False)]
    return [
        Case("launches", "NamedTuple arguments at launch; what a launch costs the host", device_cases.launches, 30),
        Case("beside", "a 16-block copy on a high-priority stream beside the forward", beside.beside, 40),
        *(
            Case(
                f"right {dtype} D{dim}", "every kernel against float64", accuracy.accuracy, 90,
                {"backend": "triton", "dtype": dtype, "head_dim": dim, "full_worlds": (1, 3) if dim == 128 else (1,)},
                alone=False,
            )
            for dtype in ("bfloat16", "float16", "float32")
            for dim in (128, 64, 256, 40)
        ),
        Case(
            "right, ragged", "odd lengths, no groups, Dv other than D", accuracy.accuracy, 90,
            {
                "backend": "triton", "dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128, "seqlen": 997,
                "heads": (3, 3),
            }, alone=False,
        ),
        Case("ceilings", "a large matrix product and a large copy", device_cases.ceilings, 15),
        *(
            Case(
                f"speed D{dim} {'causal' if causal else 'full'}", "kernels beside SDPA's flash and cuDNN", speed.speed,
                40, {"head_dim": dim, "causal": causal, "seqlens": lengths},
            )
            for dim, causal in shapes
        ),
        Case("LocalWorld", "four virtual ranks against one launch", worlds.local_world, 30),
        Case("NCCL to itself", "CuPy's communicator with one rank", worlds.nccl_to_itself, 20),
        Case(
            "speed D128 causal, grouped", "32 query heads, 8 of K/V", speed.speed, 25,
            {"head_dim": 128, "causal": True, "seqlens": (8 * kib, 16 * kib), "heads": (32, 8)},
        ),
        Case(
            "speed D256 causal", "the widest head", speed.speed, 25,
            {"head_dim": 256, "causal": True, "seqlens": (8 * kib, 16 * kib)},
        ),
        Case(
            "speed D64 causal, float32", "tf32x3", speed.speed, 25,
            {"head_dim": 64, "causal": True, "seqlens": (8 * kib,), "dtype": "float32"},
        ),
    ]  # fmt: skip


def cpu_cases() -> list[Case]:
    """The same list where it makes sense; kernels run under Triton's interpreter, and are not timed."""
    small = {"seqlen": 80, "heads": (2, 1)}
    return [
        Case(
            "launches", "NamedTuple arguments at launch, under the interpreter", device_cases.launches, 60,
            {"dtype": "float32", "seqlen": 80},
        ),
        Case("whole ring", "two processes over gloo against one process", ring_cases.whole_ring, 90, {"seqlen": 4096}),
        *(
            Case(
                f"right aten {dtype}", "PyTorch's operator in a ring against float64", accuracy.accuracy, 60,
                {"backend": "aten", "dtype": dtype, "head_dim": 64, "seqlen": 512}, alone=False,
            )
            for dtype in ("float32", "bfloat16", "float16")
        ),
        *(
            Case(
                f"right triton {dtype} D{dim}", "kernels under the interpreter against float64", accuracy.accuracy,
                120, {"backend": "triton", "dtype": dtype, "head_dim": dim, **small}, alone=False,
            )
            for dtype, dim in (("float32", 64), ("float16", 40))
        ),
        Case(
            "LocalWorld", "four virtual ranks against PyTorch's attention in one piece", worlds.local_world, 60,
            {"tokens": 512, "heads": (8, 8), "head_dim": 64, "dtype": "float32", "repeats": 5},
        ),
        Case(
            "ceilings", "a large matrix product and a large copy", device_cases.ceilings, 30,
            {"side": 2048, "dtype": "float32", "nbytes": 1 << 28},
        ),
    ]  # fmt: skip


BRIEF: dict[Callable[..., Any], Callable[[list[Number]], list[dict[str, Any]]]] = {
    speed.speed: speed.brief,
    beside.beside: beside.brief,
}
"""Cases whose numbers make a table of their own; of the others every number without a limit is told."""


@app.command()
def suite(
    budget: Annotated[float, typer.Option(min=1, help="Seconds in all.")] = 480,
    out: Annotated[Path, typer.Option(help="Folder of results.json.")] = Path("build/bench"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu [default: the GPU where there is one].")] = None,
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this.")] = None,
) -> None:
    """Measure what this machine can, most important first; a failure is recorded, and the rest goes on."""
    begun = time.monotonic()
    if member() is not None:
        raise typer.BadParameter("it uses one device, and starts its own processes: call it without a launcher")
    place = device_of(device)
    cases = [case for case in (gpu_cases() if place.type == "cuda" else cpu_cases()) if (only or "") in case.name]
    if not cases:
        raise typer.BadParameter(f"--only is {only!r}: no case has that in its name")
    os.environ["TRITON_INTERPRET"] = "1" if place.type == "cpu" else "0"  # read when a worker imports triton
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"schema": "ringattn bench suite 1", "budget": budget, "provenance": provenance(place)}
    running: dict[str, Outcome] = {}
    with Console(stderr=True).status("starting") as status:

        def changed(outcome: Outcome) -> None:
            running[outcome.case.name] = outcome
            status.update(", ".join(name for name, one in running.items() if not one.seconds and not one.reason))
            write(out, record, list(running.values()))

        pool = Pool(place, begun + budget - WRITING_SECONDS, width(), changed)
        outcomes = pool.run(cases)
    record["provenance"]["seconds"] = time.monotonic() - begun
    write(out, record, outcomes)
    typer.echo(report(record, outcomes))
    typer.echo(f"\n{out / 'results.json'}")
    if not all(outcome.good for outcome in outcomes):
        print("something failed: see above, and `reason` in results.json", file=sys.stderr)
        raise typer.Exit(1)


def width() -> int:
    """Processes that may run side by side where nothing is timed: each compiles, which keeps a core busy."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return min(cores(), MOST_WORKERS, max(FEW_WORKERS, int(gib / WORKER_GIB)))


def device_of(name: str | None) -> torch.device:
    """The device to measure.

    Raises:
        typer.BadParameter: there is none of that name.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu") or (name == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device is {name!r}: it takes cuda, where there is a GPU, or cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def write(out: Path, record: Mapping[str, Any], outcomes: list[Outcome]) -> None:
    """Replace results.json: whoever reads it, or ends us, finds a whole one."""
    data = {**record, "cases": [as_json(outcome) for outcome in outcomes]}
    draft = out / "results.json.part"
    draft.write_text(json.dumps(data, indent=1) + "\n")
    draft.replace(out / "results.json")


def as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.case.name,
        "about": outcome.case.about,
        "arguments": dict(outcome.case.arguments),
        "state": outcome.state,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 1),
        "numbers": [number.as_json() for number in outcome.numbers],
    }


def report(record: Mapping[str, Any], outcomes: list[Outcome]) -> str:
    """The short table: what was found, then how each case ended."""
    about = record["provenance"]
    device = about["gpu"]["name"] if about["gpu"] else f"{about['cpu']['model']}, {about['cpu']['cores']} cores"
    parts = [f"{device}, torch {torch.__version__}, {about['date']}"]
    for run, brief in BRIEF.items():
        rows = brief([number for outcome in outcomes if outcome.case.run is run for number in outcome.numbers])
        parts += [table(rows)] if rows else []
    told = [
        {
            "case": outcome.case.name,
            "number": number.name,
            "of": labels(number),
            "value": number.value,
            "unit": number.unit,
        }
        for outcome in outcomes
        if outcome.case.run not in BRIEF
        for number in outcome.numbers
        if number.limit is None and number.value is not None
    ]
    parts += [table(told)] if told else []
    parts.append(table([ended(outcome) for outcome in outcomes]))
    parts += [
        f"{outcome.case.name}: {outcome.reason.strip().splitlines()[-1]}" for outcome in outcomes if outcome.reason
    ]
    parts += [
        f"{outcome.case.name}: {number.name} ({labels(number)}) is {number.value}, at most {number.limit:.3g} allowed"
        for outcome in outcomes
        for number in outcome.numbers
        if number.fails and number.limit is not None
    ]
    return "\n\n".join(parts)


def ended(outcome: Outcome) -> dict[str, object]:
    """A line: of the numbers with a limit, how many hold and how near the nearest came."""
    demanded = [number for number in outcome.numbers if number.limit is not None]
    nearest = max((number.value / number.limit for number in demanded if number.limit and number.value), default=None)
    return {
        "case": outcome.case.name,
        "state": outcome.state if outcome.good or outcome.state == "failed" else "failed",
        "seconds": round(outcome.seconds, 1),
        "checks": f"{sum(not number.fails for number in demanded)}/{len(demanded)}",
        "nearest to its limit": None if nearest is None else f"{nearest:.0%}",
        "about": outcome.case.about,
    }


def labels(number: Number) -> str:
    """``head_dim 64, mask causal``."""
    return ", ".join(f"{name} {value}" for name, value in number.labels.items())
