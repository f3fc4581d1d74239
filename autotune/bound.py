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

Sources of what one SM does per clock and of what fits into it, all by NVIDIA:

- lanes per clock: CUDA C++ best practices guide, "Throughput of native arithmetic instructions" (until 12.9 in the CUDA
  C++ programming guide): results per clock and SM of 32-bit floating-point multiply-add, integer multiply, integer
  add, minimum and maximum, bitwise operations and comparisons, ``exp2`` and its like, and shuffles.
- products per clock of the tensor cores, 16-bit inputs with fp32 sums, dense: white papers of A100 (1,024 fused
  multiply-adds per SM), GA102 and Ada (512), H100 (2,048) and RTX Blackwell (512); for sm_100 the 2.25 PFLOP/s of the
  Blackwell brief over 148 SMs at 1.85 GHz (4,096). GeForce cards of sm_86, 89 and 120 do half of that with fp32 sums.
- shared memory: 32 banks of 4 bytes per clock (programming guide, "shared memory").
- L2: 5,120 bytes per clock for the 108 SMs of A100 (its white paper); not documented for the others, and taken there as
  64 a clock and SM, an assumption on the generous side.
- what fits: programming guide, "compute capabilities"; tuning guides of Ampere, Ada, Hopper and Blackwell, "occupancy".

Packing two fp32 into 16 bits (``F2FP``) is counted with the bitwise operations: the guide's row is about single
conversions, and does not say which unit packs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gate import Compiled
from .sass import Loop, Mix, mix_of

REGISTERS = 65_536
"""Per SM, of 32 bits."""

REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this many."""

RESERVED_SHARED = 1024
"""Bytes of shared memory that the system takes of every block."""

TENSOR_MEMORY = 512
"""Columns of tensor memory of an SM of sm_100."""

SCHEDULERS = 4
"""Of an SM, each of which issues one instruction of one warp per clock."""

SHARED_BYTES = 128
"""Per clock and SM."""


@dataclass(frozen=True)
class Chip:
    """One SM, per clock."""

    products: int  # fused multiply-adds of the tensor cores, 16-bit inputs
    fma: int  # lanes of fp32 add, multiply and multiply-add
    add: int  # lanes of 32-bit integer add
    minmax: int  # lanes of fp32 minimum and maximum
    l2_bytes: float
    warps: int  # at a time
    blocks: int
    shared: int  # bytes of shared memory, of all blocks
    shared_block: int  # and of one
    integer_multiply: int = 64  # lanes, like those below
    logic: int = 64  # bitwise, shift, select, compare
    special: int = 16  # exp2, log2, reciprocal
    shuffle: int = 32


A100_L2, ASSUMED_L2 = 5120 / 108, 64.0

CHIPS = {
    80: Chip(1024, 64, 64, 64, A100_L2, 64, 32, 164 << 10, 163 << 10),
    86: Chip(512, 128, 64, 64, ASSUMED_L2, 48, 16, 100 << 10, 99 << 10),
    89: Chip(512, 128, 64, 64, ASSUMED_L2, 48, 24, 100 << 10, 99 << 10),
    90: Chip(2048, 128, 64, 64, ASSUMED_L2, 64, 32, 228 << 10, 227 << 10),
    100: Chip(4096, 128, 64, 128, ASSUMED_L2, 64, 32, 228 << 10, 227 << 10),
    120: Chip(512, 128, 128, 64, ASSUMED_L2, 48, 24, 100 << 10, 99 << 10),
}
"""By compute capability without the dot."""


def blocks_of(compiled: Compiled) -> int:
    """How many blocks of a compiled kernel an SM holds: 0 where one is too much."""
    chip, warps = CHIPS[compiled.arch], -(-compiled.threads // 32)
    if compiled.shared > chip.shared_block or compiled.tensor_memory > TENSOR_MEMORY:
        return 0
    per_warp = -(-compiled.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    # an SM's registers lie in four parts, one per scheduler, and a warp's in one of them
    warps_held = REGISTERS // SCHEDULERS // max(per_warp, 1) * SCHEDULERS
    shared_by = chip.shared // (compiled.shared + RESERVED_SHARED)
    limits = [chip.blocks, chip.warps // warps, warps_held // warps, shared_by]
    return min([*limits, TENSOR_MEMORY // compiled.tensor_memory] if compiled.tensor_memory else limits)


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
