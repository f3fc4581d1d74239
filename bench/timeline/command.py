"""``ringattn bench timeline``: when each rank computed, sent, received and waited in one forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from ...comm import LocalGroup, LocalWorld
from ...comm.control import control_of
from ...ring import Ring, ring_attention
from ...tools.pictures import picture
from ..common.attention import DTYPES, AttentionConfig
from ..common.files import read_object
from ..common.flags import LayoutName, binary, device_here, device_name, dtype_name, kv_heads_of, size
from ..common.launching import Member, cores, member, process_group, started, world_of
from ..common.memory import Needs, free_here, needs_of_ranks
from ..common.output import check_targets, prints, write_csv, write_json
from ..common.provenance import provenance
from ..ring.candidates import Tensors
from ..ring.memory import of_ours, refusal
from .events import PREDICTED, Timeline, as_chrome, call_of, differences, from_chrome
from .recording import timeline_of
from .spent import as_json, as_rows, shares

DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def spawned(store: str, problem: AttentionConfig, repeats: int) -> Timeline | None:
    """The entry of the processes that the command starts itself: on the CPU."""
    place = member()
    assert place is not None
    return in_a_group(place, problem, repeats, store)


def in_a_group(place: Member, problem: AttentionConfig, repeats: int, store: str | None = None) -> Timeline | None:
    """One rank of a process group."""
    torch.set_num_threads(problem.threads)
    device = place.shared_device(problem.device)
    with process_group(place, store, device=device):
        return recorded(problem, None, device, repeats)


def virtual(problem: AttentionConfig, device: torch.device, repeats: int) -> Timeline | None:
    """Virtual ranks that share one device."""
    with LocalWorld(problem.world, device=device) as world:
        return world.run(lambda group: recorded(problem, group, device, repeats))[0]


def recorded(problem: AttentionConfig, group: LocalGroup | None, device: torch.device, repeats: int) -> Timeline | None:
    """The median of ``repeats`` runs by length, after one that is not recorded; on rank 0."""
    with Ring(group) as ring:
        shards = _shards(problem, ring.rank, device)
        _step(problem, ring, shards)
        about = {"call": asdict(problem), "provenance": provenance(device) if ring.rank == 0 else None}
        runs = [_run(problem, ring, shards, device, about) for _ in range(repeats)]
    found = [run for run in runs if run is not None]
    return sorted(found, key=lambda run: run.seconds)[len(found) // 2] if found else None


def _run(
    problem: AttentionConfig, ring: Ring, shards: Tensors, device: torch.device, about: dict[str, Any]
) -> Timeline | None:
    with ring.record() as trace:
        _together(ring)
        _step(problem, ring, shards)
    return timeline_of(ring, trace, title(problem, device), about)


def _together(ring: Ring) -> None:
    """Let all ranks begin at once, as near as a barrier lets them."""
    if isinstance(ring.group, LocalGroup):
        for _ in range(2):  # who waited long looks seldom: the second time all look at once
            control_of(ring.group).gather(None, what="the ranks to be ready")
    else:
        dist.barrier(ring.group)


def _shards(problem: AttentionConfig, rank: int, device: torch.device) -> Tensors:
    """q, k, v and dout of a rank, drawn by itself."""
    draw = torch.Generator().manual_seed(problem.seed + rank)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.batch, problem.held.lengths[rank], count, problem.head_dim) for count in heads]
    return tuple(torch.randn(shape, generator=draw).to(device, DTYPES[problem.dtype]) for shape in shapes)


def _step(problem: AttentionConfig, ring: Ring, shards: Tensors) -> None:
    """Forward and backward, over when it returns."""
    *inputs, dout = shards
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = ring_attention(*leaves, layout=problem.held, ring=ring, causal=problem.causal)
    assert isinstance(out, torch.Tensor)
    torch.autograd.grad(out, leaves, dout)


def title(problem: AttentionConfig, device: torch.device) -> str:
    """``causal, zigzag, 8k tokens over 4 ranks, H8/8 D64 float32 (CPU)``."""
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    kind = "causal" if problem.causal else "full"
    return (
        f"{kind}, {problem.layout}, {binary(problem.seqlen)} tokens over {problem.world} ranks, "
        f"H{problem.heads}/{problem.kv_heads} D{problem.head_dim} {problem.dtype}, {where}"
    )


def check_room(problem: AttentionConfig, device: torch.device, place: Member | None) -> None:
    """Refuse what does not fit this machine's free memory, with the length that does.

    Raises:
        typer.BadParameter: too many tokens.
    """

    def needed(wanted: AttentionConfig) -> Needs:
        if place is None and device.type == "cuda":
            return Needs(0, problem.world * of_ours(wanted))  # virtual ranks of this process
        return needs_of_ranks(of_ours(wanted), device, problem.world if place is None else place.local_world)

    why = refusal(problem, free_here(device), needed)
    if why is not None:
        raise typer.BadParameter(f"--seqlen: {why}")


def read_timeline(path: Path) -> Timeline:
    """A timeline's file, as an option of a command.

    Raises:
        typer.BadParameter: it cannot be read, or is none.
    """
    try:
        return from_chrome(read_object(path))
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None


def prediction_of(path: Path, call: Mapping[str, Any]) -> Timeline:
    """A predicted timeline's file, which must be of a call.

    Raises:
        typer.BadParameter: it cannot be read, is measured, or of another call.
    """
    found = read_timeline(path)
    if found.source != PREDICTED:
        raise typer.BadParameter(f"--predicted {path} is {found.source}: it takes what `ringattn predict --trace` left")
    theirs = call_of(found)
    if not theirs:
        raise typer.BadParameter(f"--predicted {path} does not say of what call it is: it must be of the one recorded")
    if told := [f"{name} {there} there, {here} here" for name, here, there in differences(call, theirs)]:
        raise typer.BadParameter(f"--predicted {path} is of another call: {'; '.join(told)}")
    return found


@app.command()
def timeline(
    world: Annotated[int | None, typer.Option(min=1, help="Ranks; default: 2; under a launcher, its own.")] = None,
    seqlen: Annotated[Any, typer.Option(parser=size, metavar="SIZE", help="Tokens in all.")] = "8k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    repeats: Annotated[int, typer.Option(min=1, help="Recorded runs; the one of median length is kept.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Per process; default: a share of the cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU where there is one.")] = None,
    trace: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write a trace that Perfetto opens.")] = None,
    out: Annotated[Any, typer.Option(parser=picture, metavar="FILE", help="Draw it: .svg, .png or .pdf.")] = None,
    predicted: Annotated[Path | None, typer.Option(help="A predicted trace of the same call, drawn below.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write what each rank did as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per rank.")] = None,
) -> None:
    """Record one forward and backward of a ring: every rank's compute, waits, transfers and slots on one clock.

    Alone it starts processes of the CPU, or virtual ranks on the GPU where there is one.
    """
    place = member()
    ranks = world_of(place, world, DEFAULT_WORLD)
    problem = _problem(
        place, seqlen, ranks, batch, heads, kv_heads_of(heads, kv_heads), head_dim, dtype, causal, layout
    )
    problem = replace(problem, seed=seed, device=device_name(device or ""), threads=threads or problem.threads)
    if predicted is not None and out is None:
        raise typer.BadParameter("--predicted is given without --out: it is drawn there, below what is recorded")
    below = None if predicted is None else prediction_of(predicted, asdict(problem))
    if trace == json == "-":
        raise typer.BadParameter("--trace and --json are both -: one of them takes a file")
    check_targets(trace, out, json, csv)
    found = measured(place, problem, repeats)
    if found is None or not prints():
        return
    piped = "-" in (trace, json)
    if not piped:
        typer.echo(f"{found.title}\n{shares(found)}\nclocks of the ranks agree to {found.about['clock_error']:.1e} s")
    if trace is not None:
        write_json(trace, as_chrome(found))
    if json is not None:
        write_json(json, as_json(found))
    if csv is not None:
        write_csv(csv, as_rows(found))
    if out is not None:
        from ..report.timelines import save

        save([found] if below is None else [found, below], out)
        typer.echo(f"picture: {out}", err=piped)


def measured(place: Member | None, problem: AttentionConfig, repeats: int) -> Timeline | None:
    """The timeline, on rank 0; with the error of a rank that fails, and exit code 1."""
    if place is not None:
        check_room(problem, place.shared_device(problem.device), place)
        return in_a_group(place, problem, repeats)
    where = device_here(problem.device)
    check_room(problem, where, None)
    if where.type == "cuda":
        return virtual(problem, where, repeats)
    return started(problem.world, spawned, problem, repeats)


def _problem(
    place: Member | None, seqlen: int, world: int, batch: int, heads: int, kv_heads: int, head_dim: int,
    dtype: str, causal: bool, layout: LayoutName,
) -> AttentionConfig:  # fmt: skip
    """What to run; a share of the cores for every rank.

    Raises:
        typer.BadParameter: fewer tokens than ranks.
    """
    if seqlen < world:
        raise typer.BadParameter(f"--seqlen is {seqlen}: {world} ranks need a token each")
    share = max(1, cores() // (place.local_world if place is not None else world))
    return AttentionConfig(seqlen, world, batch, heads, kv_heads, head_dim, dtype, causal, layout.value, share)
