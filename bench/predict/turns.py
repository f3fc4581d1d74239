"""Virtual ranks that take turns on one device: how long a ``LocalWorld`` takes, predicted and measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from ...comm import LocalWorld
from ...ring import Ring
from ..common.provenance import gpu
from ..common.timing import Clock, Samples, interleaved
from .calibrate import HOST_SIZES, between_virtual_ranks, gpu_speed
from .call import DTYPES, Call
from .host_pieces import calibrated
from .launch import Device
from .links import Link
from .program import PASSES
from .ring import launches
from .rows import Row, Shape, step_of

PATIENCE = 300.0  # seconds of one wait of a virtual rank for another


def predicted_turns(call: Call, device: Device, copies: Link) -> float:
    """Seconds of a forward and a backward whose ranks share one device: the sum of their launches.

    What arrives is copied on the same device: by as much as launches are slower beside a transfer, a copy takes their
    time.
    """
    total, plans = 0.0, call.plans()
    for phase in PASSES:
        for plan in plans:
            program, spent = launches(call, plan, device, phase)
            received = (nbytes for op in program.ops for _, nbytes in op.receives)
            total += sum(spent) + device.beside * sum(copies.seconds(nbytes) for nbytes in received)
    return total


def calibrated_here(shape: Shape, device: torch.device, tokens: int, repeats: int) -> tuple[Device, Link]:
    """The device at one length, and what a copy between its virtual ranks takes."""
    if device.type == "cuda":
        call = shape.call("contiguous", "causal", tokens * shape.world)
        speed, _ = gpu_speed(call, device, gpu(device))
        return speed, Link(speed.memory * speed.passes / 2, 0.0, "a copy reads and writes")
    host = calibrated(
        tokens, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=DTYPES[shape.dtype],
        clock=Clock(device), repeats=repeats,
    )  # fmt: skip
    return host, between_virtual_ranks(shape.world, device, HOST_SIZES)


def rows_of(
    shape: Shape,
    wanted: Sequence[tuple[str, str, int]],
    device: torch.device,
    calibrate: int,
    repeats: int,
    timer: str = "",
) -> Iterator[Row]:
    """Every row measured with virtual ranks of one device, beside what is predicted for it.

    On the CPU one core computes for all of them, as one GPU does. ``timer`` is of what is measured: predictions
    are made of a GPU's kernels by events, as everywhere.
    """
    clock, threads = Clock(device, timer=timer), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_core() if device.type == "cpu" else nullcontext():
            speed, copies = calibrated_here(shape, device, calibrate, repeats)
            with LocalWorld(shape.world, device=device, timeout=PATIENCE) as world:
                for case in wanted:
                    call = shape.call(*case)
                    taken = _taken(world, call, clock, repeats)
                    yield Row(*case, taken.median, taken.spread, predicted_turns(call, speed, copies))
    finally:
        torch.set_num_threads(threads)


def _taken(world: LocalWorld, call: Call, clock: Clock, repeats: int) -> Samples:
    """Of a forward and a backward of all ranks."""
    rings = world.run(Ring)
    steps = [step_of(rank, call, ring, world.device) for rank, ring in enumerate(rings)]
    taken = interleaved({"": lambda: world.run(lambda group: steps[group.rank()]())}, clock, repeats=repeats)[""]
    world.run(lambda group: rings[group.rank()].close())
    return taken


@contextmanager
def one_core() -> Iterator[None]:
    """This thread, and those it starts inside, on one core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
