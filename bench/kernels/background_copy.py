"""A copy kernel with few blocks that runs alongside the forward, in place of NCCL.

Its blocks need free multiprocessors, but blocks of an attention kernel fill them. A running block is never preempted: a
high-priority stream only decides which block starts next. The copy has as many blocks as ``Limits()`` allows NCCL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...comm import Limits
from ..common.timing import DeviceStopwatch

LIMITS = Limits()
COPY_BLOCKS = LIMITS.blocks
FREE_MULTIPROCESSORS = LIMITS.multiprocessors
COPY_WARPS = 16
COPY_BYTES = 1 << 26  # of the first copy, from which a longer one is scaled
CHUNK = 8192  # 4-byte elements that a block copies at a time
MOST_BYTES = 8 << 30


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(destination, source, elements, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy 4-byte elements in a few persistent blocks."""
    pid = tl.program_id(0).to(tl.int64)
    for start in range(pid * CHUNK, elements, tl.num_programs(0) * CHUNK):
        offs = start + tl.arange(0, CHUNK)
        inside = offs < elements
        tl.store(destination + offs, tl.load(source + offs, mask=inside), mask=inside)


class BackgroundCopy:
    """A copy of ``nbytes`` of random data from ``source`` to ``destination`` on a GPU."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        elements = nbytes // 4
        self.source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device=device)
        self.destination = torch.zeros_like(self.source)

    def launch(self) -> None:
        """Launch the copy on the current stream."""
        elements = self.source.numel()
        copy_kernel[(COPY_BLOCKS,)](self.destination, self.source, elements, CHUNK=CHUNK, num_warps=COPY_WARPS)

    def run_alongside(self, step: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], None]:
        """Return a function that starts this copy on ``stream`` and ``step`` together, after earlier work."""

        def run_together() -> None:
            begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
            begun.record()
            stream.wait_event(begun)
            with torch.cuda.stream(stream):
                self.launch()
            step()

        return run_together

    def count_wrong(self) -> int:
        """Return the number of elements in which destination and source differ."""
        return int((self.destination != self.source).sum())


def copy_bytes_for(device: torch.device, seconds: float, nbytes: int = COPY_BYTES) -> int:
    """Return the bytes that the copy kernel alone moves in ``seconds``, estimated from timed copies of ``nbytes``."""
    copy, watch, seconds_per_copy = BackgroundCopy(device, nbytes), DeviceStopwatch(device), []
    for _ in range(4):  # the first run compiles
        with watch.count_block():
            copy.launch()
        seconds_per_copy.append(watch.lap_seconds())
    return min(max(int(nbytes * seconds / min(seconds_per_copy)), nbytes), MOST_BYTES) // 4 * 4
