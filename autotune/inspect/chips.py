"""What one SM of each architecture does per clock, and what fits into it: the numbers that a loop's bound is made of.

Sources, all by NVIDIA:

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


def blocks_per_sm(arch: int, registers: int, shared: int, tensor_memory: int, threads: int) -> int:
    """How many blocks an SM holds: 0 where one is too much.

    ``registers`` per thread, ``shared`` in bytes and ``tensor_memory`` in columns per block.
    """
    chip, warps = CHIPS[arch], -(-threads // 32)
    if shared > chip.shared_block or tensor_memory > TENSOR_MEMORY:
        return 0
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    # an SM's registers lie in four parts, one per scheduler, and a warp's in one of them
    warps_held = REGISTERS // SCHEDULERS // max(per_warp, 1) * SCHEDULERS
    limits = [chip.blocks, chip.warps // warps, warps_held // warps, chip.shared // (shared + RESERVED_SHARED)]
    return min([*limits, TENSOR_MEMORY // tensor_memory] if tensor_memory else limits)
