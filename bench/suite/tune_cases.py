"""A short run of ``ringattn tune`` as a case of the suite: a few tiles of each kernel; only the numbers are kept.

The whole space is about 780 binaries of 3 core-seconds: what is tried here are the built-in tile and its neighbours,
kernel after kernel, so that whatever time there is tells something.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ...autotune import Shape, tile_text
from ...autotune.search import median, spread
from ...kernels.lookup import gpu_of
from ...kernels.tables import KERNELS
from ..launching import cores
from ..tune.run import Found, Wish, tune
from .cases import CutShort, NotHere, Number

NEAR = 4
"""Tiles of each kernel and mask, the built-in one among them: as (16 cores) 100 binaries in all, 20 seconds."""
SECONDS = 45.0  # of the case


class Silent:
    """In the place of a progress bar."""

    def more(self, part: str, count: int) -> None:
        """So many steps more."""

    def step(self, part: str) -> None:
        """One is done."""


def tuned(
    device: torch.device,
    *,
    seqlens: Sequence[int],
    head_dim: int = 128,
    heads: Sequence[int] = (16, 16),
    dtype: str = "bf16",
    causal: bool = True,
    budget: float = 18,
    seconds: float = SECONDS,
) -> Iterator[Number]:
    """The best tile of each kernel, its time and the default's, in the same interleaved search.

    Raises:
        CutShort: a kernel would take longer than is left, were it as slow as the slowest before it.
    """
    if device.type != "cuda":
        raise NotHere("there is no GPU: `ringattn tune --compile-only` ranks candidates without one")
    gpu = gpu_of(device)
    assert gpu is not None
    shape = Shape(heads[0], heads[1], head_dim, head_dim, dtype)
    with TemporaryDirectory(prefix="ringattn-tune-") as folder:
        call = shape, tuple(seqlens), causal, gpu, device, Path(folder), budget / len(KERNELS), cores()
        begun, longest = time.monotonic(), 0.0
        for kernel in KERNELS:  # those that run by default
            since = time.monotonic()
            if since + longest > begun + seconds:
                raise CutShort(f"{kernel} was not begun: {since - begun:.0f} of {seconds:.0f} s were over")
            found, _ = tune(Wish(*call, kernels=(kernel,), orders_of=0, near=NEAR), Silent())
            for one in found:
                yield from numbers(one)
            longest = max(longest, time.monotonic() - since)


def numbers(one: Found) -> Iterator[Number]:
    """Of one kernel at one length; what was not measured has its bound alone."""
    labels = {
        "kernel": one.point.kernel, "mask": one.point.mask, "seqlen": one.point.length,
        "tile": "none" if one.tile is None else tile_text(one.tile), "default": tile_text(one.default),
    }  # fmt: skip
    best = one.measured
    if best is None:
        yield Number("best tile time", None, "ms", labels, note="not measured")
        return
    yield Number("best tile time", median(best.alone) * 1e3, "ms", labels, spread=spread(best.alone))
    if best.baseline:
        yield Number("default over best tile", median(best.baseline) / median(best.alone), "times", labels)
