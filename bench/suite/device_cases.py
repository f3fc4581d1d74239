"""What comes first on a device: does a launch work at all, what does it cost, and how fast can this device be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch

from ... import reference
from ...kernels import FULL, attention_forward
from ..common.attention import DTYPES
from ..common.memory import Needs, largest
from ..common.timing import Clock, Step, interleaved
from ..kernels.accuracy import draw
from ..kernels.speed import AGREE, causal_bounds
from ..ring.memory import FP32
from .cases import Number, demand_room, distance, free_on, taken_on

ENQUEUED = 200  # launches in one timed stretch of the host


def launches(
    device: torch.device, *, dtype: str = "bfloat16", seqlen: int = 512, head_dim: int = 64
) -> Iterator[Number]:
    """The forward with NamedTuple arguments, with bounds and without: first launch, result, the host's time."""
    for causal in (False, True):
        q, k, v, _, _ = draw(device, DTYPES[dtype], (seqlen, 4, 2, head_dim, head_dim))
        step = partial(attention_forward, q, k, v, bounds=causal_bounds(q, k) if causal else FULL)
        labels = {"mask": "causal" if causal else "full", "dtype": dtype, "head_dim": head_dim}
        begun = time.perf_counter()
        out, _ = step()
        synchronize(device)
        yield Number("first launch, compilation included", time.perf_counter() - begun, "s", labels)
        exact, _ = reference.attention(q, k, v, causal=causal)
        yield Number("difference from float64", distance([out], [exact]), "relative", labels, AGREE[dtype])
        if device.type == "cuda":
            yield Number("host time of a launch", host_microseconds(device, step), "us", labels)


def host_microseconds(device: torch.device, step: Step) -> float:
    """What the host needs to enqueue one step, while the device is behind."""
    taken = []
    for _ in range(3):
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(ENQUEUED):
            step()
        taken.append((time.perf_counter() - begun) / ENQUEUED * 1e6)
    synchronize(device)
    return statistics.median(taken)


def ceilings(
    device: torch.device, *, side: int = 8192, dtype: str = "bfloat16", nbytes: int = 4 << 30
) -> Iterator[Number]:
    """A large matrix product and a large copy through PyTorch, on random data: what percentages refer to.

    Of the copy as much as fits the free memory, in sixteenths.
    """

    def needed(copied: int) -> Needs:
        return taken_on(device, side**2 * (FP32 + 3 * DTYPES[dtype].itemsize) + 2 * copied)

    step = max(1, nbytes // 16)
    demand_room(device, step, needed, "bytes of a copy")
    nbytes = largest(nbytes, needed, free_on(device), step=step)
    clock = Clock(device)
    with clock.stage():
        a, b = (torch.randn(side, side, device=device).to(DTYPES[dtype]) for _ in range(2))
        source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        steps: dict[str, Step] = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
        prepared = {name: clock.prepared(step) for name, step in steps.items()}
        taken = interleaved(prepared, clock, repeats=10, warmup=3)
    product, copy = taken["product"], taken["copy"]
    yield Number(
        "matrix product",
        2 * side**3 / product.median / 1e12,
        "TFLOP/s",
        {"side": side, "dtype": dtype},
        spread=product.spread,
    )
    yield Number(
        "copy, bytes read and written", 2 * nbytes / copy.median / 1e9, "GB/s", {"bytes": nbytes}, spread=copy.spread
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
