"""Sizes that do not fit the free memory are refused before anything starts, with the size that fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import typer

from . import free_memory
from .launching import member
from .shapes import binary

GB = 1e9
PROCESS_BYTES = 400 << 20  # Python, torch and its libraries
USED = 0.9  # of what is free: the rest is for what nobody counts
STEP = 1024  # sizes that fit are told in multiples of it


@dataclass(frozen=True)
class Needs:
    """Bytes that a measurement takes in all, on the host and on each GPU."""

    host: int
    gpu: int = 0


def refuse_too_large(
    option: str, size: int, needed: Callable[[int], Needs], device: torch.device, *, unit: str, step: int = STEP
) -> None:
    """Refuse what takes more than nine tenths of this machine's free memory.

    Args:
        option: the one that says the size.
        size: as it was asked for.
        needed: bytes in all on this machine, by size.
        device: what is measured.
        unit: of the size, as in ``tokens``.
        step: the size that fits is told in multiples of it.

    Raises:
        typer.BadParameter: too large, with the size that fits.
    """
    free = free_here(own_device(device), free_memory.free_memory)
    if refusal := too_large(size, needed, free, unit=unit, step=step):
        raise typer.BadParameter(f"{option}: {refusal}")


def too_large(size: int, needed: Callable[[int], Needs], free: Needs, *, unit: str, step: int = STEP) -> str | None:
    """Why a size does not fit, with the largest that does; None where it fits."""
    most = largest(size, needed, free, step=step)
    if most == size:
        return None
    wanted = needed(size)
    told = [
        f"{nbytes / GB:.1f} GB of {where}, {there / GB:.1f} GB are free"
        for where, nbytes, there in (("memory", wanted.host, free.host), ("GPU memory", wanted.gpu, free.gpu))
        if nbytes > USED * there
    ]
    fits = f"{binary(most)} fits" if most else f"not even {binary(step)} fits"
    return f"{size:,} {unit} take {' and '.join(told)}: {fits}"


def largest(size: int, needed: Callable[[int], Needs], free: Needs, *, step: int) -> int:
    """A size where it fits, else the largest multiple of the step below it that does; 0: none."""

    def fits(some: int) -> bool:
        wanted = needed(some)
        return wanted.host <= USED * free.host and wanted.gpu <= USED * free.gpu

    if fits(size):
        return size
    low, high = 0, (size - 1) // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step


def free_here(device: torch.device, free_memory: Callable[[torch.device], int]) -> Needs:
    """What is free on this machine now."""
    on_gpu = free_memory(device) if device.type == "cuda" else 0
    return Needs(free_memory(torch.device("cpu")), on_gpu)


def own_device(device: torch.device) -> torch.device:
    """Under a launcher each rank looks at its own GPU."""
    place = member()
    if place is None or device.type != "cuda":
        return device
    return torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))


def of_ranks(each: int, device: torch.device, ranks_here: int) -> Needs:
    """What the ranks of one machine take, each so many bytes of tensors; ranks that outnumber the GPUs share them."""
    processes = ranks_here * PROCESS_BYTES
    if device.type == "cpu":
        return Needs(processes + ranks_here * each)
    return Needs(processes, -(-ranks_here // gpus_of(ranks_here)) * each)


def gpus_of(ranks_here: int) -> int:
    """Of the ranks on this machine; srun and mpirun may show each its own GPU alone, torchrun shows all of them."""
    gpus = max(1, torch.cuda.device_count())
    hidden = gpus == 1 and member() is not None and "TORCHELASTIC_RUN_ID" not in os.environ
    return ranks_here if hidden else gpus
