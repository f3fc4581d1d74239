"""A short run of ``ringattn tune`` as a case of the suite: compile, rank, measure; nothing is kept but the numbers."""

from __future__ import annotations

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
from .cases import NotHere, Number


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
    budget: float = 25,
) -> Iterator[Number]:
    """The best tile of each kernel, its time and the default's, in the same interleaved search."""
    if device.type != "cuda":
        raise NotHere("there is no GPU: `ringattn tune --compile-only` ranks candidates without one")
    gpu = gpu_of(device)
    assert gpu is not None
    shape = Shape(heads[0], heads[1], head_dim, head_dim, dtype)
    with TemporaryDirectory(prefix="ringattn-tune-") as folder:
        call = shape, tuple(seqlens), causal, gpu, device, Path(folder), budget, cores()
        # tiles of the kernels that run by default: all the rest takes longer to compile than a suite has
        wish = Wish(*call, kernels=KERNELS, orders_of=0)
        found, _ = tune(wish, Silent())
    for one in found:
        yield from numbers(one)


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
