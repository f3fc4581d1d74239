"""Memory: what is free, what a stretch of code takes at its peak, and the refusal of what would not fit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import typer

from .flags import binary
from .ranks import TORCHRUN, member, ranks_here

if TYPE_CHECKING:
    from .attention import AttentionConfig

GB = 1e9
PROCESS_BYTES = 400 << 20  # Python, torch and its libraries
USED = 0.9  # of what is free: the rest is for what nobody counts
STEP = 1024  # sizes that fit are told in multiples of it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
MAPPED_BYTES = 64 << 10
KEPT_BYTES = 32 << 20  # the largest block that glibc keeps once it has seen it freed


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as file:
        available = next(line for line in file if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024


class PeakMemory:
    """Counts from its making: what PyTorch allocates on a GPU; on the CPU what is resident of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
            return
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)
        # 5: the high-water mark falls to what is resident now (proc_pid_clear_refs); without it, an earlier peak
        # of this process counts, and the result is an upper bound
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start = _resident("VmRSS")

    @property
    def bytes(self) -> int:
        """The peak so far, above the start."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return max(_resident("VmHWM") - self._start, 0)


def _resident(field: str) -> int:
    """Bytes of a field of /proc/self/status, which are in kB."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}: this kernel does not keep it")
    return int(match[1]) * 1024


@contextlib.contextmanager
def freed_at_once(device: torch.device) -> Iterator[None]:
    """On the CPU glibc maps every large block by itself inside, so that what is resident is what is in use.

    By default it keeps freed blocks for later, and does so again afterwards: mapping makes allocations slow. What it
    has kept by then is cut up for later blocks all the same, and stays: a warm-up belongs inside.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: the figures are upper bounds
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES if device.type == "cpu" else KEPT_BYTES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
            ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


class Needs(NamedTuple):
    """Bytes that a measurement takes in all, on the host and on each GPU."""

    host: int
    gpu: int = 0


def needs_on(device: torch.device, nbytes: int) -> Needs:
    """So many bytes of tensors of this process."""
    return Needs(0, nbytes) if device.type == "cuda" else Needs(nbytes)


def needs_of_ranks(each: int, device: torch.device, ranks_here: int) -> Needs:
    """What the ranks of one machine take, each so many bytes of tensors; ranks that outnumber the GPUs share them."""
    processes = ranks_here * PROCESS_BYTES
    if device.type == "cpu":
        return Needs(processes + ranks_here * each)
    return Needs(processes, -(-ranks_here // gpus_of(ranks_here)) * each)


def gpus_of(ranks_here: int) -> int:
    """Of the ranks on this machine; srun and mpirun may show each its own GPU alone, torchrun shows all of them."""
    gpus = max(1, torch.cuda.device_count())
    hidden = gpus == 1 and member() is not None and TORCHRUN not in os.environ
    return ranks_here if hidden else gpus


def free_here(device: torch.device) -> Needs:
    """What is free on this machine now; under a launcher each rank looks at its own GPU."""
    place = member()
    if device.type != "cuda":
        return Needs(free_memory(torch.device("cpu")))
    if place is not None:
        device = torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))
    return Needs(free_memory(torch.device("cpu")), free_memory(device))


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
    if refusal := too_large(size, needed, free_here(device), unit=unit, step=step):
        raise typer.BadParameter(f"{option}: {refusal}")


def refuse_ranks(
    option: str, config: AttentionConfig, taken: Callable[[AttentionConfig], int | Needs], *, per_rank: bool = False
) -> None:
    """The same of an attention over ranks.

    Args:
        option: the one that says how many tokens there are in all, or with ``per_rank`` on each rank.
        config: as it was asked for.
        taken: bytes of tensors of each rank, or what all of this machine take, by the attention.
        per_rank: which of the two ``option`` says.
    """
    device, here, tokens = torch.device(config.device), ranks_here(config.world), config.world if per_rank else 1

    def needed(size: int) -> Needs:
        bytes_taken = taken(replace(config, seqlen=size * tokens))
        return bytes_taken if isinstance(bytes_taken, Needs) else needs_of_ranks(bytes_taken, device, here)

    unit = f"tokens {'on each of' if per_rank else 'over'} {config.world} ranks"
    refuse_too_large(option, config.seqlen // tokens, needed, device, unit=unit)


def too_large(size: int, needed: Callable[[int], Needs], free: Needs, *, unit: str, step: int = STEP) -> str | None:
    """Why a size does not fit, with the largest multiple of the step that does; None where it fits."""

    def excess(some: int) -> list[str]:
        wanted, names = needed(some), ("memory", "GPU memory")
        return [
            f"{nbytes / GB:.1f} GB of {name}, {there / GB:.1f} GB are free"
            for name, nbytes, there in zip(names, wanted, free, strict=True)
            if nbytes > USED * there
        ]

    reasons = excess(size)
    if not reasons:
        return None
    steps = range(1, -(-size // step))
    most = step * bisect_left(steps, True, key=lambda count: bool(excess(count * step)))
    fits = f"{binary(most)} fits" if most else f"not even {binary(step)} fits"
    return f"{size:,} {unit} take {' and '.join(reasons)}: {fits}"
