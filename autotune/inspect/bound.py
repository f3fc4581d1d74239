"""How fast a main loop can be at best, in percent of the tensor cores' peak, and what keeps it from more.

An iteration of a block takes at least as long as each unit of the SM is busy with it: clocks of the unit = what the
iteration asks of it / what the unit does per clock. With perfect overlap the longest of these counts: that gives the
``ceiling``, which no kernel passes. But warps that meet at a barrier in every iteration move in step: what they issue
while no product of theirs is in flight (see :func:`inspect_mix.flying`) only another block of the same SM can fill with
one. So the bound is

    products / max(longest unit, (max(products, beside them) + exposed) / blocks per SM)

with ``beside`` and ``exposed`` the longest unit of the softmax over the instructions under products, and over the
others. A warp-specialised block counts as many as it has partitions with a loop of their own; what its loading warp
moves is told (``tma``), but takes no time here. Latencies, clocks that drop under load, cache misses and a loop's ends
are left out. The ceiling is arithmetic. That warps move in step is a model: what it is worth is its rank correlation
with measured time (:mod:`.rank`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .chips import CHIPS, SCHEDULERS, SHARED_BYTES, blocks_per_sm
from .compiled import Compiled
from .mix import Mix, mix_of
from .sass import Loop

TENSOR, SHARED, MEMORY = "tensor cores", "shared memory", "memory"
SOFTMAX = ("exponentials", "FMA", "ALU", "issue")
"""Units that an exponential, and all that comes with it, runs on."""

LANES = 32


@dataclass(frozen=True)
class Bound:
    """Of one loop."""

    percent: float  # of the tensor cores' peak
    limiter: str
    ceiling: float  # percent, if everything overlapped
    ceiling_limiter: str
    clocks: dict[str, float]  # by unit, per iteration of one block
    mix: Mix
    loop: Loop


def clocks(mix: Mix, arch: int) -> dict[str, float]:
    """For how long each unit of an SM is busy with one iteration of one block."""
    chip, lanes = CHIPS[arch], mix.warps * LANES
    return {
        TENSOR: mix.products / chip.products,
        "exponentials": mix.special * lanes / chip.special,
        "FMA": lanes * (mix.fma / chip.fma + mix.integer_multiply / chip.integer_multiply),
        "ALU": lanes * (mix.add / chip.add + mix.minmax / chip.minmax + mix.logic / chip.logic),
        "issue": mix.issued * mix.warps / SCHEDULERS,
        SHARED: mix.shared_bytes / SHARED_BYTES + mix.shuffles * lanes / chip.shuffle,
        MEMORY: mix.global_bytes / chip.l2_bytes,
    }


def bound_of(mix: Mix, arch: int, blocks: int, loop: Loop | None = None) -> Bound:
    """The bound of a loop of which ``blocks`` blocks run on an SM at a time (one that does not fit counts as one)."""
    busy = clocks(mix, arch)
    longest = max(busy, key=lambda unit: busy[unit])
    alone = clocks(mix.exposed, arch) if mix.exposed else busy
    softmax = max(SOFTMAX, key=lambda unit: alone[unit])
    beside = max(busy[unit] - alone[unit] for unit in SOFTMAX)
    run = max(busy[TENSOR], busy[SHARED], beside)
    in_step = (run + alone[softmax]) / max(blocks, 1) if mix.barriers else 0.0
    limiter = longest if busy[longest] >= in_step else f"{softmax} in step"
    return Bound(
        percent=100 * busy[TENSOR] / max(busy[longest], in_step),
        limiter=limiter,
        ceiling=100 * busy[TENSOR] / busy[longest],
        ceiling_limiter=longest,
        clocks=busy,
        mix=mix,
        loop=loop or Loop(mix.matrix, 0, mix.waits, False),
    )


def blocks_of(compiled: Compiled) -> int:
    """Blocks of a compiled kernel that an SM holds; 0 where one is too much for it."""
    return blocks_per_sm(compiled.arch, compiled.registers, compiled.shared, compiled.tensor_memory, compiled.threads)


def bounds_of(compiled: Compiled) -> list[Bound]:
    """The bound of each loop that holds matrix instructions, in the order of the listing.

    Raises:
        ValueError: what was compiled does not say for which GPU or how many threads.
    """
    if compiled.arch not in CHIPS or not compiled.threads:
        raise ValueError(
            f"compiled for arch {compiled.arch} and {compiled.threads} threads: arch must be one of "
            f"{', '.join(map(str, CHIPS))}, threads at least 1"
        )
    # partitions that run a loop each move in step within themselves alone, as blocks do
    warps = (compiled.loop_threads or compiled.threads) // LANES
    blocks = blocks_of(compiled) * compiled.partitions
    return [bound_of(mix_of(loop, warps), compiled.arch, blocks, loop) for loop in compiled.loops]


def main_bound(bounds: Iterable[Bound]) -> Bound | None:
    """The bound that counts: of the loop with the fewest instructions per product, which masks nothing."""
    return min(bounds, key=lambda bound: bound.mix.issued / bound.mix.products, default=None)


def loop_bound(compiled: Compiled) -> float:
    """What an autotuner ranks by: percent of the tensor cores' peak; 0 if it has no products or does not fit.

    Raises:
        ValueError: see :func:`bounds_of`.
    """
    main = main_bound(bounds_of(compiled))
    return main.percent if main is not None and blocks_of(compiled) else 0.0
