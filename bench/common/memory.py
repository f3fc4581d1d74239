"""Peak memory of a stretch of code above what was in use before it, on the CPU and on a GPU."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from .heap import trim


class PeakMemory:
    """Counts from its making: what PyTorch allocates on a GPU; on the CPU what is resident of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
            return
        trim()
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
