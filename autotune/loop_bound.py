"""Throughput bound of a kernel's main loop, in percent of tensor-core peak, and the unit that limits it.

Each unit of an SM is busy with one iteration of a block for

    clocks = work of the iteration / work of the unit per clock

With perfect overlap the busiest unit determines the time. The result is the ``ceiling``, which no kernel exceeds.

The bound is stricter. Warps that meet at a barrier in every iteration run in step, so instructions that they issue
while no matrix product is in flight (see :func:`sass.overlaps_product`) are exposed. Only another block on the SM can
fill that gap with its products:

    bound = products / max(busiest unit, (max(products, hidden) + exposed) / blocks per SM)

The bound is 0 if wgmma is serialised, because the model has no figure for the latency of each wait.

``hidden`` and ``exposed`` are the clocks of the busiest softmax unit for the instructions under products, and for all
others. Each partition of a warp-specialised block with its own main loop counts as a block. The loading warp is free.

The model ignores latencies, clocks that drop under load, cache misses, and the prologue and epilogue. The ceiling is
plain arithmetic. The assumption that warps run in step has not been confirmed by measurements.

``kernels/gpu.py`` lists throughput and capacity of an SM with sources. ``F2FP``, which packs two fp32 values into 16
bits, counts as a bitwise operation, because NVIDIA's guide lists single conversions only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.gpu import (
    MULTIPROCESSOR_SPECS,
    SCHEDULERS,
    SHARED_BYTES_PER_CLOCK,
    TENSOR_MEMORY_COLUMNS,
)
from .gate import CompiledKernel
from .sass import InstructionMix, Loop, instruction_mix


def blocks_per_sm(compiled: CompiledKernel) -> int:
    """Return the number of blocks of a compiled kernel that fit on an SM (occupancy), 0 if none fits."""
    spec = MULTIPROCESSOR_SPECS[compiled.arch]
    warps = -(-compiled.threads // spec.warp_size)
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        return 0
    per_warp = -(-compiled.registers * spec.warp_size // spec.register_unit) * spec.register_unit
    # each scheduler has a quarter of the registers, and a warp's registers all lie in one quarter
    warps_by_registers = spec.registers // SCHEDULERS // max(per_warp, 1) * SCHEDULERS
    blocks_by_shared = spec.shared_per_multiprocessor // max(compiled.shared + spec.reserved_shared, 1)
    limits = [spec.blocks, spec.warps // warps, warps_by_registers // warps, blocks_by_shared]
    return min([*limits, TENSOR_MEMORY_COLUMNS // compiled.tensor_memory] if compiled.tensor_memory else limits)


# the bound of a loop

TENSOR, SHARED, MEMORY = "tensor cores", "shared memory", "memory"
SOFTMAX = ("exponentials", "FMA", "ALU", "issue")
"""Units that execute the softmax."""

LANES = 32


@dataclass(frozen=True)
class LoopBound:
    """Throughput bound of one loop."""

    percent: float  # of tensor-core peak
    limiter: str
    ceiling: float  # percent, with perfect overlap
    clocks: dict[str, float]  # of each unit, for one iteration of one block
    mix: InstructionMix
    loop: Loop


def busy_clocks(mix: InstructionMix, arch: int) -> dict[str, float]:
    """Return the clocks for which each unit of an SM is busy with one iteration of one block."""
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


def loop_bound(loop: Loop, warps: int, arch: int, blocks: int) -> LoopBound:
    """Compute the bound of a loop of blocks with ``warps`` warps, ``blocks`` of which are resident per SM.

    0 blocks, which means that none fits, count as 1.
    """
    mix, exposed_mix = instruction_mix(loop, warps)
    busy, exposed = busy_clocks(mix, arch), busy_clocks(exposed_mix, arch)
    busiest = max(busy, key=lambda unit: busy[unit])
    softmax = max(SOFTMAX, key=lambda unit: exposed[unit])
    hidden = max(busy[unit] - exposed[unit] for unit in SOFTMAX)
    overlapped = max(busy[TENSOR], busy[SHARED], hidden)
    in_step = (overlapped + exposed[softmax]) / max(blocks, 1) if mix.barriers else 0.0
    limiter = busiest if busy[busiest] >= in_step else f"{softmax} in step"
    return LoopBound(
        percent=0.0 if loop.is_serialised else 100 * busy[TENSOR] / max(busy[busiest], in_step),
        limiter="serialised wgmma" if loop.is_serialised else limiter,
        ceiling=100 * busy[TENSOR] / busy[busiest],
        clocks=busy,
        mix=mix,
        loop=loop,
    )


def loop_bounds(compiled: CompiledKernel) -> list[LoopBound]:
    """Compute the bound of each loop with matrix instructions, in the order of the listing."""
    # partitions with their own loops run independently of each other, as blocks do
    warps = (compiled.loop_threads or compiled.threads) // LANES
    blocks = blocks_per_sm(compiled) * compiled.partitions
    return [loop_bound(loop, warps, compiled.arch, blocks) for loop in compiled.loops]


def main_bound(compiled: CompiledKernel) -> LoopBound | None:
    """Return the bound of the unmasked loop, which has the fewest instructions per product, or None."""
    return min(loop_bounds(compiled), key=lambda bound: bound.mix.issued / bound.mix.products, default=None)
