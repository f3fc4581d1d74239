"""``ringattn bench memory`` measures peak memory per rank for growing rings of equal shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import flags
from .common.launching import run_process_group
from .common.ranks import LaunchedRank, launched_rank
from .common.result import Result, Row, finish_command

if TYPE_CHECKING:
    import torch

    from .common.attention import AttentionConfig
    from .common.memory_table import RingForm

WORLDS = (2, 4, 8)
ALLOWED_SPREAD = 0.02  # between worlds, for rounding to pages and for the network library's memory per peer
WARM_TOKENS = 1024
UNITS = {
    "world": "", "peak": "MB", "smallest peak": "MB", "forward peak": "MB", "inputs and results": "MB",
    "peak / first": "",
}  # fmt: skip

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure_memory(
    place: LaunchedRank,
    device: torch.device,
    configs: Sequence[AttentionConfig],
    form: RingForm,
    nodes: int,
    chunks: int,
) -> list[list[dict[str, int]]]:
    """Run the rings of ``configs`` in turn, each over the first ranks of the group.

    Return, for each ring that this rank joins, what :func:`ring_peaks` returned on every rank of the ring.
    """
    import torch.distributed as dist
    from torch import set_num_threads

    from ..comm.control import open_control
    from .common.memory import return_freed_memory

    peaks_by_world: list[list[Any]] = []
    with return_freed_memory(device):
        for config in configs:
            group = dist.new_group(range(config.world))  # a collective of all ranks
            if place.rank < config.world:
                set_num_threads(config.threads)
                # Warm up connections, thread pools and lazy modules, whose memory does not grow with the shards.
                ring_peaks(replace(config, seqlen=WARM_TOKENS * config.world), form, nodes, chunks, group)
                own_peaks = ring_peaks(config, form, nodes, chunks, group)
                peaks_by_world.append(open_control(group).gather(own_peaks, what="the peaks of the ranks"))
            dist.barrier()  # ranks outside the group wait idle
    return peaks_by_world


def ring_peaks(config: AttentionConfig, form: RingForm, nodes: int, chunks: int, group: Any) -> dict[str, int]:
    """Return this rank's bytes in a first call: its peak, the peak of the forward, and ``kept`` inputs and results."""
    import torch

    from ..comm.topology.topology import Topology
    from ..ring import Ring, ring_attention
    from .common.memory import PeakMemory

    peak_memory = PeakMemory(torch.device("cpu"))
    topology = Topology.grid(nodes, config.world // nodes) if nodes > 1 else None
    dtypes: dict[str, Any] = {"wire_dtype": form.wire_dtype, "grad_wire_dtype": form.grad_wire_dtype}
    with Ring(group, topology=topology, slots=form.slots, chunks=chunks, **dtypes) as ring:
        *inputs, dout = config.random_shard(ring.rank, torch.device("cpu"))
        leaves = [x.requires_grad_() for x in inputs]
        out = ring_attention(*leaves, layout=config.token_layout, ring=ring, causal=config.causal)
        assert isinstance(out, torch.Tensor)
        forward = peak_memory.bytes
        grads = torch.autograd.grad(out, leaves, dout)
        kept_bytes = sum(x.nbytes for x in (*leaves, dout, out, *grads))
        return {"forward": forward, "peak": max(forward, peak_memory.bytes), "kept": kept_bytes}


def memory_rows(worlds: Sequence[int], peaks_by_world: Sequence[Sequence[dict[str, int]]]) -> list[Row]:
    """Build a row per number of ranks, with the largest bytes of any rank in MB and the smallest peak."""
    rows: list[Row] = []
    for world, ranks in zip(worlds, peaks_by_world, strict=True):
        maxima = {name: max(rank[name] for rank in ranks) / 1e6 for name in ("peak", "forward", "kept")}
        smallest_peak = min(rank["peak"] for rank in ranks) / 1e6
        rows.append({
            "world": world, "peak": maxima["peak"], "smallest peak": smallest_peak, "forward peak": maxima["forward"],
            "inputs and results": maxima["kept"],
            "peak / first": maxima["peak"] / (rows[0]["peak"] if rows else maxima["peak"]),
        })  # fmt: skip
    return rows


@app.command()
def memory(
    worlds: Annotated[
        Any,
        typer.Option(
            "--world",
            parser=flags.counts,
            metavar="N,…",
            help="Numbers of processes; default: 2,4,8, or 2, 4, … up to a launcher's ranks.",
        ),
    ] = None,
    tokens: flags.TokensPerRank = "8k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 8,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 64,
    dtype: flags.Dtype = "fp32",
    causal: flags.Causal = True,
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a two-level ring; must divide every --world.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Receive buffers for K/V.")] = flags.KV_SLOTS,
    chunks: flags.Chunks = 1,
    wire_dtype: flags.WireDtype = None,
    grad_wire_dtype: flags.GradWireDtype = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Measure peak memory per rank with equal tokens per rank.

    Exit with code 1 if peak memory varies with the number of ranks.
    """
    kv_heads = flags.resolve_kv_heads(heads, kv_heads)
    worlds = resolve_worlds(launched_rank(), worlds)
    for world in worlds:
        if nodes > 1 and (world % nodes or world // nodes < 2):
            raise typer.BadParameter(f"--nodes is {nodes}: it must divide {world} processes into nodes of at least 2")
    from rich.console import Console
    from torch import device

    from .common.attention import AttentionConfig
    from .common.memory import check_ranks_fit
    from .common.memory_table import OURS, RingForm, candidate_bytes
    from .common.provenance import provenance

    form, cpu, largest_world = RingForm(nodes > 1, slots, wire_dtype, grad_wire_dtype), device("cpu"), max(worlds)

    def config(world: int) -> AttentionConfig:
        return AttentionConfig(world * tokens, world, batch, heads, kv_heads, head_dim, dtype, causal, layout.value)

    check_ranks_fit("--tokens", config(largest_world), partial(candidate_bytes, OURS, form=form), per_rank=True)
    with Console(stderr=True).status("measuring"):
        peaks_by_world = run_process_group(
            largest_world, measure_memory, [config(world) for world in worlds], form, nodes, chunks
        )
    if len(peaks_by_world) < len(worlds):
        return  # this launched rank is not in every ring
    rows = memory_rows(worlds, peaks_by_world)
    highest = [row["peak"] for row in rows]
    spread = max(highest) / min(highest) - 1
    wires = [f"{what} as {kind}" for what, kind in (("K/V", wire_dtype), ("dK/dV", grad_wire_dtype)) if kind]
    counts = flags.count_noun(nodes, "node"), flags.count_noun(slots, "slot"), flags.count_noun(chunks, "chunk")
    title = [config(largest_world).title, *counts, *wires]
    failed = [
        f"memory per rank varies by {spread:.1%} with the number of ranks. At most {ALLOWED_SPREAD:.0%} is allowed."
    ]
    summary = f"peak of a rank: {max(highest):.4g} MB; variation with the number of ranks: {spread:+.2%}"
    failed = failed if spread > ALLOWED_SPREAD else []
    finish_command(Result("bench memory", UNITS, rows, failed, [", ".join(title), summary], provenance(cpu)), json, csv)


def resolve_worlds(place: LaunchedRank | None, requested_worlds: list[int] | None) -> list[int]:
    """Return the requested numbers of ranks; the default is 2, 4, 8, and under a launcher 2, 4, … and all its ranks."""
    if place is None:
        return requested_worlds or list(WORLDS)
    if requested_worlds and max(requested_worlds) > place.world:
        raise typer.BadParameter(
            f"--world is {max(requested_worlds)}: it must be at most {place.world}, the launcher's number of ranks"
        )
    return requested_worlds or sorted({*(world for world in WORLDS if world < place.world), place.world})
