"""What a prediction is given: the speed of a device and its links, and what the flags say of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer

from ..common.flags import size
from .call import CPU, Call
from .host import HostSpeed
from .launch import whole
from .links import Links, link_of
from .measured import base_of, kernels_of
from .measured import speed_of as speed_of_rows
from .speed import CONSTANTS_OF, GPUS, Speed

SPEED_TOKENS = 16384  # of the launch whose TFLOP/s are given
TOKENS, WORLD = 8192, 8  # where nothing is said
NVLINK, IB = "nvlink4", "ib400"
MOST_SLOW = 1000  # times as long: slower is broken


@dataclass(frozen=True)
class Given:
    """A device, its links, and where they are from."""

    device: Speed | HostSpeed
    links: Links
    capacity: float
    """Bytes of memory of a rank."""
    told: tuple[str, ...] = ()
    """What was measured, line by line."""
    place: torch.device = CPU
    """Where it was measured, by whoever asked."""

    def checked(self, beside: float | None, capacity: float | None) -> Given:
        """With what flags say in place of what is known.

        Raises:
            ValueError: no part of a speed.
        """
        if beside is not None and not 0 <= beside < 1:
            raise ValueError(f"beside is {beside}: the part of its speed that a kernel loses must be 0 to below 1")
        device = self.device if beside is None else replace(self.device, beside=beside)
        return replace(self, device=device, capacity=self.capacity if capacity is None else capacity)


def speed_of(
    gpu: str | None, forward: float | None, backward: float | None, kernels: Path | None, call: Call
) -> tuple[Speed, tuple[str, ...]]:
    """A GPU's constants, with the TFLOP/s given for causal or full attention of 16k tokens, or with measured rows.

    Raises:
        ValueError: an unknown GPU, a speed that is none, a file that is not of measured kernels, or both; nothing but
            the GPU, and a dtype that its constants are not of.
    """
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: it must be one of {', '.join(GPUS)}; --tflops says how fast it is")
    above_zero("TFLOP/s", tflops=forward, backward_tflops=backward)
    if kernels is not None:
        if forward is not None or backward is not None:
            raise ValueError("kernels and tflops are both given: they say the same, pass one of them")
        found = kernels_of(kernels)
        speed, rows = speed_of_rows(found, call, base_of(found, gpu), str(kernels))
        return speed, (f"{kernels}, {found.gpu}", *map(str, rows))
    base = GPUS[gpu or "h100"]
    if forward is None:
        if backward is not None:
            raise ValueError("backward-tflops is given without tflops: both are of the same kernel")
        if call.dtype not in CONSTANTS_OF:
            raise ValueError(
                f"dtype is {call.dtype}: the constants of a GPU are of {' and '.join(CONSTANTS_OF)}; --tflops or "
                "--kernels say how fast its kernels are, or --calibrate where it is here"
            )
        return base, ()
    area = whole(SPEED_TOKENS, causal=call.mask.causal)
    form = replace(call.form, tokens=SPEED_TOKENS, chunks=1)
    told = None if backward is None else (backward * 1e12, area, form)
    return base.fitted(forward=(forward * 1e12, area, form), backward=told), ()


def links_of(link: str | None, between: str | None) -> Links:
    """What the flags say, or what is usual.

    Raises:
        ValueError: one of them is no link.
    """
    return Links(link_of(NVLINK if link is None else link), link_of(IB if between is None else between, "link-between"))


def above_zero(unit: str, **given: float | None) -> None:
    """Flags that are numbers.

    Raises:
        ValueError: one is not above 0, or not finite.
    """
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name.replace('_', '-')} is {value:g}: it must be above 0 and finite, in {unit}")


def tokens_of(tokens: int | None, seqlen: int | None, world: int) -> int:
    """Tokens per rank, of ``--tokens`` or ``--seqlen``.

    Raises:
        ValueError: both, or a length that the ranks do not divide.
    """
    if tokens is not None and seqlen is not None:
        raise ValueError("tokens and seqlen are both given: per rank and in all; pass one of them")
    if seqlen is None:
        return TOKENS if tokens is None else tokens
    if world < 1 or seqlen % world or not seqlen:
        fits = max(seqlen // max(world, 1), 1) * max(world, 1)
        raise ValueError(f"seqlen is {seqlen:,}: {world:,} ranks have equal shards of it, as of {fits:,}")
    return seqlen // world


def slow_of(texts: Sequence[str]) -> dict[int, float]:
    """``3=1.5``: rank 3 takes 1.5 times as long.

    Raises:
        ValueError: not of this form, a factor below 1 or above ``MOST_SLOW``, or a rank told twice.
    """
    found: dict[int, float] = {}
    for text in texts:
        try:
            rank, factor = (of(part) for of, part in zip((int, float), text.split("="), strict=True))
        except ValueError:
            raise ValueError(f"slow is {text!r}: it must be RANK=FACTOR, as in 3=1.5") from None
        if not 1 <= factor <= MOST_SLOW:
            raise ValueError(f"slow is {text!r}: a factor is how many times as long the rank takes, 1 to {MOST_SLOW:,}")
        if rank in found:
            raise ValueError(f"slow is {text!r}, and rank {rank} is told before: a rank has one factor")
        found[int(rank)] = factor
    return found


def axes_of(text: str) -> dict[str, list[int]]:
    """``tokens=1k..128k,gpus=2..16k``: powers of two from one end to the other.

    Raises:
        ValueError: not both, or not of this form.
    """
    found = {}
    for part in text.split(","):
        name, _, ends = part.partition("=")
        try:
            first, last = (size(end) for end in ends.split(".."))
        except (ValueError, typer.BadParameter):
            raise ValueError(f"sweep is {text!r}: it takes tokens=1k..128k,gpus=2..16k") from None
        found[name] = [first << step for step in range(64) if first << step <= last] if first else []
    if set(found) != {"tokens", "gpus"} or not all(found.values()):
        raise ValueError(f"sweep is {text!r}: it takes tokens=1k..128k,gpus=2..16k")
    return found
