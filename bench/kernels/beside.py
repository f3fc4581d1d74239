"""A transfer beside the forward: how long it waits to start, and what either costs the other.

A transfer's kernel (NCCL's, or the copy here that stands in for it) has a few blocks that need room on the
multiprocessors. Blocks of an attention kernel fill a multiprocessor whole, and a block that runs is never moved: a
high-priority stream only decides who starts next where one ends. Three launches of the same forward kernel show what
that means:

- ``many waves``: as in a ring, many more blocks than multiprocessors; one ends every fraction of a millisecond.
- ``one wave``: exactly as many blocks as multiprocessors, each as long as the launch: what a persistent kernel does.
- ``one wave, 8 left``: 8 blocks fewer, so that 8 multiprocessors stay free: what ``sm_margin=8`` would give a
  persistent kernel (``KernelConfig(persistent=True, sm_margin=8)``); leaving blocks out keeps the kernel unchanged.

The copy has as many blocks as ``Limits()`` let NCCL take, and the margin is what they need.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from ...comm import Limits
from ...comm.transports.lanes import HIGH_PRIORITY, new_stream
from ...kernels import attention_forward, default_config
from ..suite.cases import Number

LIMITS = Limits()
COPY_BLOCKS = LIMITS.blocks
LEFT = LIMITS.multiprocessors
COPY_WARPS = 16
CHUNK = 8192  # elements of 4 bytes that a block has in flight
SHARE = 0.25  # of the forward: when the copy is asked for, and how long it takes alone
MOST_BYTES = 8 << 30


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(destination, source, elements, stamps, CHUNK: tl.constexpr, STAMP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy 4-byte elements in a few persistent blocks; with STAMP each notes when it began and ended, in ns."""
    pid = tl.program_id(0).to(tl.int64)
    if STAMP:
        tl.store(stamps + 2 * pid, tl_cuda.globaltimer())
    for start in range(pid * CHUNK, elements, tl.num_programs(0) * CHUNK):
        offs = start + tl.arange(0, CHUNK)
        inside = offs < elements
        tl.store(destination + offs, tl.load(source + offs, mask=inside), mask=inside)
    if STAMP:
        tl.store(stamps + 2 * pid + 1, tl_cuda.globaltimer())


class Sizes(NamedTuple):
    """Where the search for a long enough launch starts, and ends."""

    seconds: float = 12e-3  # of a forward: many times what the host needs to enqueue the copy
    keys: int = 4096
    nbytes: int = 1 << 26  # of a copy


SIZES = Sizes()


class Copy:
    """Random data, and where a launch copies it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        elements = nbytes // 4
        self.source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device=device)
        self.destination = torch.zeros_like(self.source)
        self.stamps = torch.zeros(2 * COPY_BLOCKS, dtype=torch.int64, device=device)
        self._stamp = device.type == "cuda"  # Triton's interpreter has no clock of the device

    def launch(self) -> None:
        """On the current stream."""
        copy_kernel[(COPY_BLOCKS,)](
            self.destination, self.source, self.source.numel(), self.stamps,
            CHUNK=CHUNK, STAMP=self._stamp, num_warps=COPY_WARPS,
        )  # fmt: skip

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

    def milliseconds(self) -> tuple[float, float]:
        """From the first block's start to the last block's start, and to the last block's end."""
        began, ended = self.stamps.view(-1, 2).T.tolist()
        return (max(began) - min(began)) / 1e6, (max(ended) - min(began)) / 1e6


@dataclass(frozen=True)
class Beside:
    """One run of the copy, with or without a forward beside it; milliseconds."""

    forward: float | None  # None: it ran alone
    first: float  # from when the copy could have started to its first block
    last: float  # to its last block
    copy: float  # from its first block's start to its last block's end


Event = Callable[..., torch.cuda.Event]


def one_run(forward: Callable[[], object] | None, copy: Copy, stream: torch.cuda.Stream, asked: float) -> Beside:
    """Enqueue the forward and, ``asked`` seconds into it, the copy on its own stream."""
    event: Event = torch.cuda.Event
    begun, done, ready, copied = (event(enable_timing=True) for _ in range(4))
    torch.cuda.synchronize()
    if forward is not None:
        begun.record()
        forward()
        done.record()
        time.sleep(asked)
    with torch.cuda.stream(stream):
        ready.record()  # the GPU passes this point without needing a multiprocessor: the copy could start now
        copy.launch()
        copied.record()
    torch.cuda.synchronize()
    spread, active = copy.milliseconds()
    first = float(ready.elapsed_time(copied)) - active
    return Beside(begun.elapsed_time(done) if forward is not None else None, first, first + spread, active)


def beside(
    device: torch.device, *, head_dim: int = 128, heads: int = 16, repeats: int = 7, sizes: Sizes = SIZES
) -> Iterator[Number]:
    """Start delay of a copy of few blocks and the slowdown of both, for the three launches above."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    stream = new_stream(device, HIGH_PRIORITY)
    yield from copies_right(device, sizes.nbytes)
    for name, blocks in (
        ("many waves", None),
        ("one wave", multiprocessors),
        (f"one wave, {LEFT} left", multiprocessors - LEFT),
    ):
        forward, seconds, flops = calibrated(device, head_dim, heads, blocks, sizes)
        copy = Copy(device, bytes_for(device, SHARE * seconds, sizes.nbytes))
        runs: dict[str, list[Any]] = {"alone": [], "copy alone": [], "beside": []}
        for _ in range(repeats + 1):
            runs["alone"].append(timed(forward))
            runs["copy alone"].append(one_run(None, copy, stream, 0.0))
            runs["beside"].append(one_run(forward, copy, stream, SHARE * seconds))
        # the first round warms up
        yield from numbers({kind: found[1:] for kind, found in runs.items()}, flops, {"launch": name})
        yield Number("wrong in the copy", copy.wrong(), "elements", {"launch": name}, limit=0)


def copies_right(device: torch.device, nbytes: int) -> Iterator[Number]:
    """The copy kernel by itself: every element arrives, also where the last chunk is not whole."""
    copy = Copy(device, nbytes + 4 * 13)
    copy.launch()
    yield Number("wrong in the copy", copy.wrong(), "elements", limit=0)


def calibrated(
    device: torch.device, head_dim: int, heads: int, blocks: int | None, sizes: Sizes
) -> tuple[Callable[[], object], float, int]:
    """A forward that takes long enough: itself, its seconds, its FLOPs.

    With ``blocks`` it has that many tiles of queries and one head, and as many keys as it takes; else as many tokens.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    probe = torch.empty(1, 1, 1, head_dim, device=device, dtype=dtype)
    rows_per_block = default_config(probe, probe).forward.block_q
    count, keys = heads if blocks is None else 1, sizes.keys
    while True:
        rows = keys if blocks is None else blocks * rows_per_block
        q, k, v = (torch.randn(1, n, count, head_dim, device=device, dtype=dtype) for n in (rows, keys, keys))

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            return attention_forward(q, k, v)

        forward()  # compiles
        seconds = min(timed(forward) for _ in range(3)) / 1e3
        if seconds >= sizes.seconds:
            return forward, seconds, 4 * rows * keys * head_dim * count
        keys *= 2 if seconds > sizes.seconds / 4 else 4


def timed(forward: Callable[[], object]) -> float:
    """Milliseconds of one run on the current stream."""
    event: Event = torch.cuda.Event
    begun, done = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begun.record()
    forward()
    done.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(done))


def bytes_for(device: torch.device, seconds: float, nbytes: int) -> int:
    """How much the copy kernel moves alone in this time: what it does with ``nbytes``, scaled."""
    copy = Copy(device, nbytes)
    copy.launch()
    took = min(timed(copy.launch) for _ in range(3)) / 1e3
    return min(max(int(nbytes * seconds / took), nbytes), MOST_BYTES) // 4 * 4


def numbers(runs: dict[str, list[Any]], flops: int, labels: dict[str, Any]) -> Iterator[Number]:
    """Medians; the start delay beside the forward is told without what a launch takes on an idle device."""

    def median(kind: str, what: str) -> float:
        return float(statistics.median(getattr(run, what) for run in runs[kind]))

    alone, together = statistics.median(runs["alone"]), median("beside", "forward")
    idle = median("copy alone", "first")
    yield Number("forward alone", alone, "ms", labels)
    yield Number("forward alone", flops / alone / 1e9, "TFLOP/s", labels)
    yield Number("forward beside the copy", together, "ms", labels)
    yield Number("slowdown of the forward", together / alone, "times", labels)
    yield Number("copy alone", median("copy alone", "copy"), "ms", labels)
    yield Number("copy beside the forward", median("beside", "copy"), "ms", labels)
    yield Number("slowdown of the copy", median("beside", "copy") / median("copy alone", "copy"), "times", labels)
    yield Number("launch of the copy on an idle device", idle, "ms", labels)
    yield Number("start delay, first block", median("beside", "first") - idle, "ms", labels)
    yield Number("start delay, last block", median("beside", "last") - idle, "ms", labels)
