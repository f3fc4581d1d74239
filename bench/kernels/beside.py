"""A transfer beside the forward: a copy kernel of few blocks, which stands in for NCCL's.

Its blocks need room on the multiprocessors, which blocks of an attention kernel fill whole, and a block that runs is
never moved: a high-priority stream only decides who starts next where one ends. The copy has as many blocks as
``Limits()`` let NCCL take.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...comm import Limits
from ..common.timing import Stopwatch

LIMITS = Limits()
COPY_BLOCKS = LIMITS.blocks
LEFT = LIMITS.multiprocessors
COPY_WARPS = 16
COPY_BYTES = 1 << 26  # of a copy that a longer one is scaled from
CHUNK = 8192  # elements of 4 bytes that a block has in flight
MOST_BYTES = 8 << 30


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(destination, source, elements, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy 4-byte elements in a few persistent blocks."""
    pid = tl.program_id(0).to(tl.int64)
    for start in range(pid * CHUNK, elements, tl.num_programs(0) * CHUNK):
        offs = start + tl.arange(0, CHUNK)
        inside = offs < elements
        tl.store(destination + offs, tl.load(source + offs, mask=inside), mask=inside)


class Copy:
    """Random data, and where a launch copies it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        elements = nbytes // 4
        self.source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device=device)
        self.destination = torch.zeros_like(self.source)

    def launch(self) -> None:
        """On the current stream."""
        copy_kernel[(COPY_BLOCKS,)](
            self.destination, self.source, self.source.numel(), CHUNK=CHUNK, num_warps=COPY_WARPS
        )

    def beside(self, step: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], None]:
        """The step with this copy on ``stream``, which starts with it, and not under what was enqueued before."""

        def together() -> None:
            begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
            begun.record()
            stream.wait_event(begun)
            with torch.cuda.stream(stream):
                self.launch()
            step()

        return together

    def wrong(self) -> int:
        """Elements that did not arrive."""
        return int((self.destination != self.source).sum())


def bytes_for(device: torch.device, seconds: float, nbytes: int = COPY_BYTES) -> int:
    """How much the copy kernel moves alone in this time: what it does with ``nbytes``, scaled."""
    copy, watch, taken = Copy(device, nbytes), Stopwatch(device), []
    for _ in range(4):  # the first one compiles
        with watch.stretch():
            copy.launch()
        taken.append(watch.take())
    return min(max(int(nbytes * seconds / min(taken)), nbytes), MOST_BYTES) // 4 * 4
