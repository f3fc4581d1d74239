"""How fast a main loop can be at best, in percent of the tensor cores' peak, and what keeps it from more.

An iteration of a block takes at least as long as each unit of the SM is busy with it: clocks of the unit = what the
iteration asks of it / what the unit does per clock. With perfect overlap the longest of these counts: that gives the
``ceiling``, which no kernel passes. But warps that meet at a barrier in every iteration move in step: what they issue
while no product of theirs is in flight (see :func:`sass.flying`) only another block of the same SM can fill with
one. So the bound is

    products / max(longest unit, (max(products, beside them) + exposed) / blocks per SM)

with ``beside`` and ``exposed`` the longest unit of the softmax over the instructions under products, and over the
others. A warp-specialised block counts as many as it has partitions with a loop of their own; what its loading warp
moves takes no time here. Latencies, clocks that drop under load, cache misses and a loop's ends
are left out. The ceiling is arithmetic. That warps move in step is a model, which no measured time has confirmed.

What one SM does per clock and what fits into it is in ``kernels/gpu.py``, with the sources.

Packing two fp32 into 16 bits (``F2FP``) is counted with the bitwise operations: the guide's row is about single
conversions, and does not say which unit packs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.gpu import (
    MULTIPROCESSOR_SPECS,
    REGISTER_UNIT,
    REGISTERS,
    RESERVED_SHARED,
    SCHEDULERS,
    SHARED_BYTES_PER_CLOCK,
    TENSOR_MEMORY_COLUMNS,
)
from .gate import Compiled
from .sass import Loop, Mix, mix_of


def blocks_of(compiled: Compiled) -> int:
    """How many blocks of a compiled kernel an SM holds: 0 where one is too much."""
    spec, warps = MULTIPROCESSOR_SPECS[compiled.arch], -(-compiled.threads // 32)
    if compiled.shared > spec.shared_per_block or compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        return 0
    per_warp = -(-compiled.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    # an SM's registers lie in four parts, one per scheduler, and a warp's in one of them
    warps_held = REGISTERS // SCHEDULERS // max(per_warp, 1) * SCHEDULERS
    shared_by = spec.shared_per_multiprocessor // (compiled.shared + RESERVED_SHARED)
    limits = [spec.blocks, spec.warps // warps, warps_held // warps, shared_by]
    return min([*limits, TENSOR_MEMORY_COLUMNS // compiled.tensor_memory] if compiled.tensor_memory else limits)


# the bound of a loop

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
    clocks: dict[str, float]  # by unit, per iteration of one block
    mix: Mix
    loop: Loop


def clocks(mix: Mix, arch: int) -> dict[str, float]:
    """For how long each unit of an SM is busy with one iteration of one block."""
    spec, lanes = MULTIPROCESSOR_SPECS[arch], mix.warps * LANES
    return {
        TENSOR: mix.products / spec.products,
        "exponentials": mix.special * lanes / spec.special,
        "FMA": lanes * (mix.fma / spec.fma + mix.integer_multiply / spec.integer_multiply),
        "ALU": lanes * (mix.add / spec.add + mix.minmax / spec.minmax + mix.logic / spec.logic),
        "issue": mix.issued * mix.warps / SCHEDULERS,
        SHARED: mix.shared_bytes / SHARED_BYTES_PER_CLOCK + mix.shuffles * lanes / spec.shuffle,
        MEMORY: mix.global_bytes / spec.l2_bytes_per_clock,
    }


def bound_of(loop: Loop, warps: int, arch: int, blocks: int) -> Bound:
    """The bound of a loop of which ``blocks`` blocks run on an SM at a time (one that does not fit counts as one)."""
    mix, exposed = mix_of(loop, warps)
    busy, alone = clocks(mix, arch), clocks(exposed, arch)
    longest = max(busy, key=lambda unit: busy[unit])
    softmax = max(SOFTMAX, key=lambda unit: alone[unit])
    beside = max(busy[unit] - alone[unit] for unit in SOFTMAX)
    run = max(busy[TENSOR], busy[SHARED], beside)
    in_step = (run + alone[softmax]) / max(blocks, 1) if mix.barriers else 0.0
    limiter = longest if busy[longest] >= in_step else f"{softmax} in step"
    return Bound(
        percent=100 * busy[TENSOR] / max(busy[longest], in_step),
        limiter=limiter,
        ceiling=100 * busy[TENSOR] / busy[longest],
        clocks=busy,
        mix=mix,
        loop=loop,
    )


def bounds_of(compiled: Compiled) -> list[Bound]:
    """The bound of each loop that holds matrix instructions, in the order of the listing."""
    # partitions that run a loop each move in step within themselves alone, as blocks do
    warps = (compiled.loop_threads or compiled.threads) // LANES
    blocks = blocks_of(compiled) * compiled.partitions
    return [bound_of(loop, warps, compiled.arch, blocks) for loop in compiled.loops]


def main_bound(compiled: Compiled) -> Bound | None:
    """The bound that counts: of the loop with the fewest instructions per product, which masks nothing."""
    return min(bounds_of(compiled), key=lambda bound: bound.mix.issued / bound.mix.products, default=None)
