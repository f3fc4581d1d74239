"""Free memory, peak memory of a piece of code, and the check that a size fits."""

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

from .flags import size_text
from .ranks import TORCHRUN, launched_rank, ranks_here

if TYPE_CHECKING:
    from .attention import AttentionConfig

GB = 1e9
PROCESS_BYTES = 400 << 20  # Python, torch and its libraries
MAX_MEMORY_SHARE = 0.9  # share of the free memory; the rest is for allocations that no estimate contains
SIZE_STEP = 1024  # sizes that fit are reported as multiples of STEP
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MAPPED_BYTES = 64 << 10
KEPT_BYTES = 32 << 20  # largest block size for which glibc raises its mmap threshold


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as file:
        available = next(line for line in file if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024


class PeakMemory:
    """Peak since construction: of memory that PyTorch allocates on a GPU, of resident memory on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
            return
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)
        # 5 resets the high-water mark to the resident memory (proc_pid_clear_refs). If it cannot be reset, an earlier
        # peak of this process counts, and the result is an upper bound.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start = _resident("VmRSS")

    @property
    def bytes(self) -> int:
        """The peak so far, minus the memory at construction."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return max(_resident("VmHWM") - self._start, 0)


def _resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no field {field} on this kernel")
    return int(match[1]) * 1024


@contextlib.contextmanager
def return_freed_memory(device: torch.device) -> Iterator[None]:
    """Make glibc return freed blocks at once inside the block, so that resident memory is memory in use (CPU only).

    At the end glibc keeps freed blocks again, because mapping every block is slow. Run warm-ups inside, because glibc
    does not return the blocks that it kept before.
    """
    with contextlib.suppress(OSError, AttributeError):  # with another C library the numbers are upper bounds
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES if device.type == "cpu" else KEPT_BYTES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
            ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


class MemoryNeeds(NamedTuple):
    """Bytes that a measurement needs: of all processes on the host, and on each GPU."""

    host: int
    gpu: int = 0


def tensor_needs(device: torch.device, nbytes: int) -> MemoryNeeds:
    """Return the needs of tensors of ``nbytes`` on ``device``, in one process."""
    return MemoryNeeds(0, nbytes) if device.type == "cuda" else MemoryNeeds(nbytes)


def rank_needs(bytes_per_rank: int, device: torch.device, ranks_here: int) -> MemoryNeeds:
    """Return the needs of ``ranks_here`` processes on one machine; they share GPUs if there are fewer GPUs."""
    processes = ranks_here * PROCESS_BYTES
    if device.type == "cpu":
        return MemoryNeeds(processes + ranks_here * bytes_per_rank)
    return MemoryNeeds(processes, -(-ranks_here // usable_gpus(ranks_here)) * bytes_per_rank)


def usable_gpus(ranks_here: int) -> int:
    """Return the number of GPUs that the ranks of this machine use; srun may show each rank only its own."""
    gpus = max(1, torch.cuda.device_count())
    hidden = gpus == 1 and launched_rank() is not None and TORCHRUN not in os.environ
    return ranks_here if hidden else gpus


def free_memory_here(device: torch.device) -> MemoryNeeds:
    """Return the free memory of this machine; under a launcher each rank checks its own GPU."""
    place = launched_rank()
    if device.type != "cuda":
        return MemoryNeeds(free_memory(torch.device("cpu")))
    if place is not None:
        device = torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))
    return MemoryNeeds(free_memory(torch.device("cpu")), free_memory(device))


def check_size_fits(
    option: str,
    size: int,
    needed_for: Callable[[int], MemoryNeeds],
    device: torch.device,
    *,
    unit: str,
    step: int = SIZE_STEP,
) -> None:
    """Raise typer.BadParameter if a size needs more than 90% of this machine's free memory, naming a size that fits.

    ``option`` is the flag that sets ``size``, and ``unit`` what it counts, such as ``tokens``. ``needed_for`` returns
    the needs of this machine for a size. The named size is a multiple of ``step``.
    """
    free = free_memory_here(device)

    def excess(count: int) -> list[str]:
        wanted, names = needed_for(count), ("memory", "GPU memory")
        return [
            f"{nbytes / GB:.1f} GB of {name} ({available / GB:.1f} GB are free)"
            for name, nbytes, available in zip(names, wanted, free, strict=True)
            if nbytes > MAX_MEMORY_SHARE * available
        ]

    reasons = excess(size)
    if not reasons:
        return
    steps = range(1, -(-size // step))
    largest = step * bisect_left(steps, True, key=lambda number: bool(excess(number * step)))
    fits = f"{size_text(largest)} fits" if largest else f"Not even {size_text(step)} fits"
    raise typer.BadParameter(f"{option}: {size:,} {unit} need {' and '.join(reasons)}. {fits}.")


def check_ranks_fit(
    option: str,
    config: AttentionConfig,
    needed_for: Callable[[AttentionConfig], int | MemoryNeeds],
    *,
    per_rank: bool = False,
) -> None:
    """Raise typer.BadParameter if an attention over ranks does not fit into this machine's free memory.

    ``option`` is the flag that sets the total tokens, or with ``per_rank`` the tokens of each rank. ``needed_for``
    returns the bytes of one rank's tensors, or the needs of all ranks of this machine.
    """
    device, local_ranks, tokens = torch.device(config.device), ranks_here(config.world), config.world if per_rank else 1

    def needed(size: int) -> MemoryNeeds:
        bytes_taken = needed_for(replace(config, seqlen=size * tokens))
        return bytes_taken if isinstance(bytes_taken, MemoryNeeds) else rank_needs(bytes_taken, device, local_ranks)

    unit = f"tokens {'on each of' if per_rank else 'over'} {config.world} ranks"
    check_size_fits(option, config.seqlen // tokens, needed, device, unit=unit)
