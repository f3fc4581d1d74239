"""``ringattn bench memory``: peak memory per rank of forward and backward, for growing rings of equal shards."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from ..comm.control import control_of
from ..comm.topology.topology import Topology
from ..ring import Ring, ring_attention
from ..ring.schedule.schedule import KV_SLOTS
from .common.attention import DTYPES, AttentionConfig
from .common.flags import LayoutName, count, counts, dtype_name, kv_heads_of
from .common.launching import Member, member, process_group, started
from .common.memory import Needs, PeakMemory, freed_at_once, needs_of_ranks, refuse_too_large
from .common.output import check_targets, prints, write_csv, write_json
from .common.provenance import provenance
from .common.tables import table
from .ring.memory import RingForm, of_ours

CPU = torch.device("cpu")

WORLDS = (2, 4, 8)
ALLOWED_SPREAD = 0.02  # between worlds: what is rounded to pages and what the network library keeps per peer
WARM_TOKENS = 1024

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Peaks:
    """Bytes of one rank above what it used before its inputs were made."""

    forward: int
    backward: int
    named: dict[str, int] = field(default_factory=dict)  # tensors that must be there: what the peak is made of

    @property
    def highest(self) -> int:
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class Setting:
    """What a ring is built with, apart from its problem."""

    nodes: int = 1
    slots: int = KV_SLOTS
    chunks: int = 1
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None

    def ring(self, world: int, group: dist.ProcessGroup | None = None) -> Ring:
        """A ring of that group; by default of all ranks."""
        return Ring(
            group,
            topology=Topology.grid(self.nodes, world // self.nodes) if self.nodes > 1 else None,
            slots=self.slots,
            chunks=self.chunks,
            wire_dtype=self.wire_dtype,
            grad_wire_dtype=self.grad_wire_dtype,
        )


def spawned(store: str, problem: AttentionConfig, setting: Setting) -> list[Peaks] | None:
    """One rank; rank 0 returns the peaks of all."""
    place = member()
    assert place is not None
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = in_groups(place, [problem], setting, store)
    return found[problem.world] if place.rank == 0 else None


def in_groups(
    place: Member, problems: Sequence[AttentionConfig], setting: Setting, store: str | None = None
) -> dict[int, list[Peaks]]:
    """One rank: world after world, each a ring of the first ranks; on rank 0 the peaks of all."""
    with freed_at_once(CPU), process_group(place, store, device=CPU):
        found = {}
        for problem in problems:
            group = dist.new_group(range(problem.world))  # all ranks help to make it
            if place.rank < problem.world:
                torch.set_num_threads(problem.threads)
                # connections, thread pools, modules that load on first use: there once, however long the shards are
                peaks(replace(problem, seqlen=WARM_TOKENS * problem.world), setting, group)
                mine = asdict(peaks(problem, setting, group))
                everyone: list[Any] = control_of(group).gather(mine, what="the peaks of the ranks")
                found[problem.world] = [Peaks(**one) for one in everyone]
            dist.barrier()  # who has no part in it does not compute beside it
    return found


def peaks(problem: AttentionConfig, setting: Setting, group: dist.ProcessGroup | None) -> Peaks:
    """The peaks of a first call, forward and backward, with everything it allocates: inputs, slots, saved tensors."""
    measured = PeakMemory(CPU)
    with setting.ring(problem.world, group) as ring:
        q, k, v, dout = shards(problem, problem.seqlen // problem.world)
        out = ring_attention(q, k, v, layout=problem.held, ring=ring, causal=problem.causal)
        assert isinstance(out, Tensor)
        forward = measured.bytes
        grads = torch.autograd.grad(out, (q, k, v), dout)
        backward = measured.bytes
        named = {"q, k, v, dout": (q, k, v, dout), "out": (out,), "dq, dk, dv": grads}
        return Peaks(forward, backward, {name: sum(x.nbytes for x in tensors) for name, tensors in named.items()})


def shards(problem: AttentionConfig, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v and dout of one rank."""
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    made = [torch.randn(problem.batch, tokens, count, problem.head_dim) for count in heads]
    return tuple(x.to(DTYPES[problem.dtype]).requires_grad_(index < 3) for index, x in enumerate(made))


def rows_of(results: dict[int, list[Peaks]]) -> list[dict[str, Any]]:
    """A row per world; the rank that needs most speaks for its world."""
    first = max(peak.highest for peak in next(iter(results.values())))
    rows = []
    for world, everyone in results.items():
        worst = max(everyone, key=lambda peak: peak.highest)
        rows.append(
            {
                "world": world,
                "peak MB": round(worst.highest / 1e6, 2),
                "least rank MB": round(min(peak.highest for peak in everyone) / 1e6, 2),
                "after forward MB": round(max(peak.forward for peak in everyone) / 1e6, 2),
                "inputs and results MB": round(sum(worst.named.values()) / 1e6, 2),
                "relative": round(worst.highest / first, 4),
            }
        )
    return rows


@app.command()
def memory(
    worlds: Annotated[
        Any,
        typer.Option(
            "--world",
            parser=counts,
            metavar="N,…",
            help="Processes; default: 2,4,8; of a launcher's, the first 2, 4, ….",
        ),
    ] = None,
    tokens: Annotated[Any, typer.Option(parser=count, metavar="SIZE", help="Tokens per rank.")] = "8k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a two-level ring; every world is a multiple.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Buffers that K/V rotate through.")] = KV_SLOTS,
    chunks: Annotated[int, typer.Option(min=1, help="Runs of heads that a hop is cut into.")] = 1,
    wire_dtype: Annotated[str | None, typer.Option(help="K/V travel as bfloat16 or float8_e4m3fn.")] = None,
    grad_wire_dtype: Annotated[str | None, typer.Option(help="dK/dV travel as float32 or bfloat16.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per world.")] = None,
) -> None:
    """Peak memory per rank for the same tokens per rank: the same for every number of ranks, or exit 1."""
    kv_heads = kv_heads_of(heads, kv_heads)
    place = member()
    worlds = worlds_of(place, worlds)
    for world in worlds:
        if nodes > 1 and (world % nodes or world // nodes < 2):
            raise typer.BadParameter(f"--nodes is {nodes}: {world} processes are not {nodes} nodes of 2 or more each")
    setting = Setting(nodes, slots, chunks, wire_dtype, grad_wire_dtype)
    check_targets(json, csv)
    problems = [
        AttentionConfig(world * tokens, world, batch, heads, kv_heads, head_dim, dtype, causal, layout.value)
        for world in worlds
    ]
    check_room(problems, setting, place)
    results = in_processes(problems, setting) if place is None else in_groups(place, problems, setting)
    if prints():
        finish(problems[-1], setting, results, json, csv)


def worlds_of(place: Member | None, given: list[int] | None) -> list[int]:
    """What ``--world`` says; by default 2, 4 and 8, or as many of a launcher's ranks: 2, 4, … and all of them.

    Raises:
        typer.BadParameter: more than the launcher started.
    """
    if place is None:
        return given or list(WORLDS)
    if given and max(given) > place.world:
        raise typer.BadParameter(f"--world is {max(given)}: the launcher started {place.world} ranks")
    return given or sorted({*(world for world in WORLDS if world < place.world), place.world})


def check_room(problems: Sequence[AttentionConfig], setting: Setting, place: Member | None) -> None:
    """Refuse what does not fit this machine's free memory, with the tokens that do: typer.BadParameter."""
    largest = max(problems, key=lambda problem: problem.world)
    ranks_here = largest.world if place is None else min(largest.world, place.local_world)

    def needed(tokens: int) -> Needs:
        return needs_of_ranks(of_rank(replace(largest, seqlen=tokens * largest.world), setting), CPU, ranks_here)

    unit = f"tokens on each of {largest.world} ranks"
    refuse_too_large("--tokens", largest.seqlen // largest.world, needed, CPU, unit=unit)


def of_rank(problem: AttentionConfig, setting: Setting) -> int:
    """Bytes of one rank: as in ``bench ring``, of a ring with these slots, levels and dtypes."""
    form = RingForm(setting.nodes > 1, setting.slots, setting.wire_dtype, setting.grad_wire_dtype)
    return of_ours(problem, form)


def in_processes(problems: Sequence[AttentionConfig], setting: Setting) -> dict[int, list[Peaks]]:
    """World after world in new processes."""
    results = {}
    with Console(stderr=True).status("measuring") as status:
        for problem in problems:
            status.update(f"world {problem.world}: forward and backward of {problem.seqlen:,} tokens")
            found = started(problem.world, spawned, problem, setting)
            assert found is not None
            results[problem.world] = found
    return results


def finish(
    problem: AttentionConfig, setting: Setting, results: dict[int, list[Peaks]], json: str | None, csv: Path | None
) -> None:
    """Print and write; exit 1 where memory per rank is not the same for all worlds."""
    rows = rows_of(results)
    highest = [max(peak.highest for peak in everyone) for everyone in results.values()]
    spread = max(highest) / min(highest) - 1
    if json != "-":
        kind = "causal" if problem.causal else "full"
        title = (
            f"peak memory per rank, {kind} forward and backward, B{problem.batch} H{problem.heads}/{problem.kv_heads} "
            f"D{problem.head_dim} {problem.dtype}, {problem.seqlen // problem.world:,} tokens per rank, "
            f"{problem.layout}{told_of(setting)}\n"
        )
        typer.echo(table(rows, title=title) + f"\n\nlargest over smallest world: {spread:+.2%}")
    if json is not None:
        write_json(json, as_json(problem, setting, results, spread))
    if csv is not None:
        write_csv(csv, rows)
    if spread > ALLOWED_SPREAD:
        print(f"memory per rank differs by {spread:.1%} between worlds, {ALLOWED_SPREAD:.0%} allowed", file=sys.stderr)
        raise typer.Exit(1)


def told_of(setting: Setting) -> str:
    """What is not as it is by default."""
    usual = asdict(Setting())
    changed = {name: value for name, value in asdict(setting).items() if value != usual[name]}
    return "".join(f", {name} {value}" for name, value in changed.items())


def as_json(
    problem: AttentionConfig, setting: Setting, results: dict[int, list[Peaks]], spread: float
) -> dict[str, Any]:
    case = asdict(problem)
    tokens = problem.seqlen // problem.world
    for name in ("seqlen", "world", "seed"):
        del case[name]
    return {
        "schema": "ringattn bench memory 1",
        "provenance": provenance(CPU),
        "problem": {**case, "tokens_per_rank": tokens},
        "ring": asdict(setting),
        "worlds": [
            {"world": world, "ranks": [{**asdict(peak), "highest": peak.highest, "unit": "B"} for peak in everyone]}
            for world, everyone in results.items()
        ],
        "spread": spread,
    }
