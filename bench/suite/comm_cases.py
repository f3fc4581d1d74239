"""What moves between processes, and what the host needs for it, as cases of the suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...comm.copy_engine import copy_engine_missing
from ...comm.nccl import nccl_missing
from .. import host_time as host
from ..launching import cores, launch
from ..links import group as link_group
from ..links import runs as link_runs
from ..overlap import command as overlapping
from ..overlap import runs as overlap_runs
from ..ring.candidates import DTYPES, Problem
from .cases import NotHere, Number

LAYOUT, MASK = "zigzag", "causal"  # of the ring whose overlap is measured
MISSING = {"nccl": nccl_missing, "copy_engine": copy_engine_missing}


def links(
    device: torch.device,
    *,
    transport: str,
    world: int,
    nbytes: tuple[int, ...],
    iters: int = 20,
    graphs: int = 0,
    beside: str = "none",
    timer: str = "",
) -> Iterator[Number]:
    """``bench links`` with one transport between processes of this machine, which share its GPU where it has one."""
    refuse_missing(transport)
    wish = link_runs.Wish(
        (transport,), device.type, nbytes, iters=iters, timer=timer, graphs=graphs, checks=1, warmup=3, beside=beside
    )
    found = launch(world, link_group.spawned, wish)
    if not found.rows:
        raise RuntimeError(f"{transport} does not open: {'; '.join(why for _, why in found.closed)}")
    for row in found.rows:
        labels = {"by": row.transport, "way": row.way, "edge": row.edge, "bytes": row.nbytes}
        yield Number("wrong bytes", row.wrong, "bytes", labels, limit=0)
        yield Number("moved per direction", row.gigabytes_per_second, "GB/s", labels)
    for slowed in found.beside:
        labels = {"by": transport, "way": slowed.way, "edge": slowed.edge, "beside": slowed.compute}
        yield Number("compute slowed", slowed.compute_slowdown, "times", labels, note=slowed.note or None)
        yield Number("transfer slowed", slowed.transfer_slowdown, "times", labels, note=slowed.note or None)


def overlap(
    device: torch.device,
    *,
    transport: str,
    world: int,
    tokens: int,
    heads: int,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    repeats: int = 5,
    link_share: float | None = None,
    timer: str = "",
) -> Iterator[Number]:
    """``bench overlap``: a ring that prefetches and one that blocks. Ranks that share a GPU take turns on it."""
    refuse_missing(transport)
    threads = max(1, cores() // world)
    wish = overlapping.Wish(
        Problem(world * tokens, world, 1, heads, heads, head_dim, dtype, MASK == "causal", LAYOUT, threads, 0),
        slots=(3,), prefetch=(0, 2), repeats=repeats, link_share=link_share, transport=transport, device=device.type,
        timer=timer,
    )  # fmt: skip
    for row in launch(world, overlapping.spawned, wish).rows:
        if row.phase != overlap_runs.STEP or row.together is None:
            continue
        labels = {
            "by": transport, "world": world, "tokens per rank": tokens, "prefetch": row.prefetch,
            "layout": LAYOUT, "mask": MASK,
        }  # fmt: skip
        yield Number("step", row.together.median * 1e3, "ms", labels, spread=row.together.spread)
        yield Number("exposed communication", row.exposed * 1e3, "ms", labels)
        yield Number("overlap", row.overlap * 100, "%", labels)
        yield Number("contention", row.contention, "times", labels)


def host_time(
    device: torch.device,
    *,
    tokens: int = 4096,
    heads: int = 32,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    chunks: int = 1,
    timer: str = "",
) -> Iterator[Number]:
    """``bench host``: the host must be ahead of the device. On the CPU this package's own Python alone, not limited."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        refuse_missing("nccl")
    for row in host.measured(device, (1, tokens, heads, head_dim), heads, DTYPES[dtype], chunks, timer):
        labels = {"phase": row.phase, "tokens per rank": tokens, "heads": heads, "chunks": chunks}
        yield Number("host time of a hop", row.host * 1e6, "us", labels, note=row.note or None)
        if row.compute is not None:
            yield Number("compute of a hop", row.compute * 1e6, "us", labels)
            limit = None if row.hidden is None else 1.0
            yield Number("host over compute", row.host / row.compute, "times", labels, limit)


def refuse_missing(transport: str) -> None:
    """Stop where this machine lacks what a transport needs: NotHere."""
    missing = MISSING[transport]() if transport in MISSING else None
    if missing:
        raise NotHere(missing)
