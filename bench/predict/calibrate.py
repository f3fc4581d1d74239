"""The speed of this machine and its links, measured here and now: what ``--calibrate`` and the checks predict from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ...comm import resolve_group
from ...comm.control import control_of
from ..common.attention import DTYPES, AttentionConfig
from ..common.launching import cores, member, process_group, started
from ..common.memory import free_memory
from ..common.provenance import cpu, gpu
from ..common.timing import Clock, Samples, Step
from ..kernels import speed as kernel_speed
from ..kernels.contender import OURS
from ..links import group as link_group
from ..links.runs import Wish
from ..suite.cases import Number
from ..suite.device_cases import ceilings
from .call import CPU, Call
from .given import Given
from .host import HostSpeed, mean_of
from .host_pieces import Stage
from .links import BENCH_SCHEMA, LOCAL, Link, Links, measured
from .measured import base_of, of_numbers, speed_of
from .speed import Speed
from .team import HARD, Each, Named, ends_within

HOST_TOKENS = 2048  # of the pieces that a CPU is measured with: half a minute at the width below
HOST_WIDTH = 512  # heads times head dim of these pieces, where there are as many
HOST_REPEATS = 3
MOST_ROUNDS = 4
HOST_SIZES = (1 << 20, 1 << 24)  # of messages between processes of a CPU
GPU_TOKENS = 16 * 1024
GPU_SIZES = (1 << 20, 1 << 24, 1 << 27)
GPU_TRANSPORTS = ("nccl", "copy_engine")
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
SECONDS = 1.5  # of timing our kernels
DEADLINE = 600.0  # seconds that ranks wait for each other


def here(call: Call, device: torch.device, link: Link | None, between: Link | None) -> Given:
    """What the call takes on this machine: one device at one length, and the link of two ranks where none is given.

    Raises:
        ValueError: the machine has one GPU, and no link is given.
    """
    return _of_gpu(call, device, link, between) if device.type == "cuda" else _of_cpu(call, link, between)


def _of_cpu(call: Call, link: Link | None, between: Link | None) -> Given:
    ranks, tokens = min(call.world, cores()), min(HOST_TOKENS, call.tokens)
    group = call.heads // call.kv_heads
    kv_heads = min(call.kv_heads, max(1, HOST_WIDTH // (call.head_dim * group)))
    speed = started(ranks, host_spawned, tokens, kv_heads * group, kv_heads, call.head_dim, call.dtype)
    joined = link or between_processes(max(ranks, 2), "cpu", ("process_group",), HOST_SIZES)
    told = f"{cpu()['model']}: one-thread processes, {ranks} at once, pieces of {tokens:,} tokens"
    return Given(speed, Links(joined, between or joined), free_memory(CPU) / ranks, (told,))


def host_spawned(store: str, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> HostSpeed:
    """One of the processes whose speed is measured; an error is left where their parent reads it."""
    with ends_within(HARD * DEADLINE):
        found = record(_host_speed)(store, tokens, heads, kv_heads, head_dim, dtype)
    assert found is not None
    return found


def _host_speed(store: str, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> HostSpeed:
    place = member()
    assert place is not None
    torch.set_num_threads(1)
    with process_group(place, store, device=CPU):
        rounds = Rounds(tokens, heads, kv_heads, head_dim, dtype, DEADLINE)
        rounds.beside((), HOST_REPEATS)
        return rounds.speed()


class Rounds:
    """The speed of the default group's ranks, measured round by round, so that what it is to tell is timed between.

    In a round every rank does everything once, all at once; then one after the other, alone, what tells what idle
    neighbours are worth. What counts are medians, and the mean of the ranks.
    """

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: str, deadline: float) -> None:
        self._stage = Stage.of(tokens, heads, kv_heads, head_dim, DTYPES[dtype])
        self._steps, self._deadline = self._stage.steps(), deadline
        self._taken: dict[str, list[float]] = {name: [] for name in self._steps}
        self._alone: list[float] = []

    def beside(self, steps: Sequence[Step], repeats: int) -> list[Samples]:
        """Time ``steps`` of all ranks, in turns with rounds; each first time does not count.

        Between two turns of long steps there are up to ``MOST_ROUNDS`` rounds: what is short is measured more often.
        """
        clock, count = Clock(CPU, Named(self._deadline)), 1
        self._round()
        first = [clock(step) for step in steps]
        self._taken, self._alone = {name: [] for name in self._steps}, []
        taken: list[list[float]] = [[] for _ in steps]
        for _ in range(repeats):
            spent = sum(clock(self._round) for _ in range(count))
            for seconds, step in zip(taken, steps, strict=True):
                seconds.append(clock(step))
            count = max(1, min(MOST_ROUNDS, round(count * sum(first) / spent)))  # the same on all ranks
        return [Samples(tuple(seconds)) for seconds in taken]

    def _round(self) -> None:
        together, everybody, alone = Clock(CPU, Each(self._deadline)), Named(self._deadline), Clock(CPU)
        for name, step in self._steps.items():
            self._taken[name].append(together(step))
        for rank in range(dist.get_world_size()):
            everybody.ready()
            if rank == dist.get_rank():
                self._alone.append(sum(alone(self._steps[name]) for name in self._stage.of_operator))
        everybody.ready()

    def speed(self) -> HostSpeed:
        """Of all ranks, the same on each."""
        mine = self._stage.speed({name: statistics.median(seconds) for name, seconds in self._taken.items()})
        pair = statistics.median(self._alone) / self._stage.scores
        shared = mine.forward.by_256 + mine.backward.by_256
        told = asdict(replace(mine, alone=min(1.0, pair / shared)))
        found: list[Any] = control_of(resolve_group()).gather(told, what="the speeds of the ranks")
        return mean_of([HostSpeed.of(one) for one in found])


def _of_gpu(call: Call, device: torch.device, link: Link | None, between: Link | None) -> Given:
    gpus = torch.cuda.device_count()
    if link is None and gpus < 2:
        raise ValueError("calibrate finds one GPU here, which tells no link: pass --link")
    speed, told = gpu_speed(call, device, gpu(device))
    joined = link or between_processes(min(gpus, max(call.world, 2)), "cuda", GPU_TRANSPORTS, GPU_SIZES)
    return Given(speed, Links(joined, between or joined), speed.capacity, told, device)


def gpu_speed(call: Call, device: torch.device, about: Mapping[str, Any]) -> tuple[Speed, tuple[str, ...]]:
    """Our kernels at one length and a large copy, as ``bench kernels`` times them; and what was measured, in words.

    Args:
        call: what is predicted: its heads, dtype and mask, at its length or ``GPU_TOKENS``, what is less.
        device: what is measured.
        about: its name, multiprocessors and memory, as :func:`~ringattn.bench.common.provenance.gpu` tells them.
    """
    config = AttentionConfig(
        min(call.tokens, GPU_TOKENS), heads=call.heads, kv_heads=call.kv_heads, head_dim=call.head_dim,
        dtype=call.dtype, causal=call.mask.causal, layout="contiguous", device=device.type,
    )  # fmt: skip
    kind = device.type
    numbers = [
        Number(row["pass"], row["rate"], "TFLOP/s", {**kernel_speed.labels_of(config), "by": OURS})
        for row in kernel_speed.measure(config, Clock(device), seconds=SECONDS, by=(OURS,)).rows
        if "rate" in row
    ]
    numbers += ceilings(device, side=kernel_speed.PRODUCT_SIDE[kind], dtype=call.dtype, nbytes=COPY_BYTES[kind])
    found = of_numbers([("measured here", one.as_json()) for one in numbers], about, "this GPU")
    speed, rows = speed_of(found, call, base_of(found, None), "this GPU")
    return speed, (f"measured here, {found.gpu}", *map(str, rows))


def between_processes(
    ranks: int, device: str, transports: tuple[str, ...], sizes: tuple[int, ...], deadline: float = DEADLINE
) -> Link:
    """The link of new processes of this machine, as ``ringattn bench links`` measures it."""
    return _fitted(started(ranks, links_spawned, Wish(transports, device, sizes), deadline), local=False)


def between_virtual_ranks(ranks: int, device: torch.device, sizes: tuple[int, ...]) -> Link:
    """The link of a ``LocalWorld``, likewise."""
    return _fitted(link_group.in_process(ranks, Wish((LOCAL,), device.type, sizes)), local=True)


def _fitted(found: link_group.Findings, *, local: bool) -> Link:
    if not found.rows:
        raise ValueError(f"no transport opens here: {'; '.join(f'{name}: {why}' for name, why in found.closed)}")
    return measured({"schema": BENCH_SCHEMA, "links": [asdict(row) for row in found.rows]}, local=local)


def links_spawned(store: str, wish: Wish, deadline: float) -> link_group.Findings:
    """One rank of ``bench links``, which ends by itself where it hangs."""
    with ends_within(HARD * deadline):
        found = record(link_group.spawned)(store, wish)
    assert found is not None
    return found
