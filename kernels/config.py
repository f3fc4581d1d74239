"""Tiles and launch options of the kernels, and the built-in defaults with their reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .device.tile_ops import MAX_PART_WIDTH
from .gpu import AMD_ARCHS, is_amd

MIN_TILE_SIDE = 16
MAX_WIDE_ROWS = 32
"""Most query rows of a forward program whose accumulators have more than ``MAX_PART_WIDTH`` columns."""


@dataclass(frozen=True)
class Tile:
    """Tile of one kernel.

    Attributes:
        block_q: Queries per tile, a power of two of at least 16.
        block_k: Keys per tile, a power of two of at least 16.
        num_warps: Warps per program (Triton).
        num_stages: Depth of the software pipeline (Triton).
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if not is_int_at_least(size, MIN_TILE_SIDE) or size & (size - 1):
                raise ValueError(f"{name} is {size!r}: it must be a power of two of at least {MIN_TILE_SIDE}")
        if not is_int_at_least(self.num_warps, 1) or self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps!r}: it must be 1, 2, 4, 8 or 16")
        if not is_int_at_least(self.num_stages, 1):
            raise ValueError(f"num_stages is {self.num_stages!r}: it must be at least 1")


ORDERS = ("heads", "longest")
FORWARD_KERNELS = ("portable", "hopper")
AUTO = "auto"
LOADS = ("descriptors", "pointers")
EPILOGUES = ("pointers", "descriptors")
BACKWARD_MODES = ("two_pass", "single_pass", "single_pass_deterministic", "hopper")
FIELD_CHOICES = {
    "backward": BACKWARD_MODES,
    "dkdv_epilogue": EPILOGUES,
    "forward_kernel": FORWARD_KERNELS,
    "loads": LOADS,
    "order": ORDERS,
}


@dataclass(frozen=True)
class KernelConfig:
    """Tiles and options of the kernels; a tile of None is chosen as in a launch without a config.

    ``kernels/README.md`` lists the requirements of each option. Options that have not run on a GPU are not defaults. An
    option that does not suit a call raises ValueError before any launch.

    Attributes:
        forward, dq, dkdv: Tiles of the forward, dQ and dK/dV kernels.
        forward_kernel: "portable" or "hopper" (sm_90 only).
        loads: "descriptors" or "pointers". With descriptors, TMA loads 16-bit tiles where that is better
            (``launch.TMA_LOAD_HEAD_DIMS``), if addresses and strides are multiples of 16 bytes.
        dkdv_splits: Number of dK/dV programs per key head; each takes a part of its query heads. A divisor of the query
            heads per key head, or "auto".
        order: Order of tiles. "heads" takes one head after another. "longest" takes the longest tiles of a causal mask
            first, of as many heads as fit into half of L2.
        persistent: Launch only as many programs as fit on the GPU at once; each takes tile after tile.
        sm_margin: Multiprocessors that a persistent kernel leaves to a concurrent transfer. None:
            ``tile_schedule.DEFAULT_SM_MARGIN``, but at most half of the GPU.
        pack_gqa: In the forward and dQ, the rows of a tile are positions times the query heads of one key head, so that
            K and V are read once for all of these heads.
        dkdv_epilogue: "pointers" or "descriptors". With descriptors, TMA stores dK and dV of the two-pass backward.
        backward: "two_pass" has one kernel for dQ and one for dK/dV. "single_pass" is one kernel that adds to dQ in no
            fixed order, "single_pass_deterministic" adds in a fixed order, and "hopper" is a single pass for sm_90.
        single_pass: Tile of the single-pass modes, or None for the default.
    """

    forward: Tile | None = None
    dq: Tile | None = None
    dkdv: Tile | None = None
    forward_kernel: str = "portable"
    loads: str = "descriptors"
    dkdv_splits: int | str = 1
    order: str = "heads"
    persistent: bool = False
    sm_margin: int | None = None
    pack_gqa: bool = False
    dkdv_epilogue: str = "pointers"
    backward: str = "two_pass"
    single_pass: Tile | None = None

    def __post_init__(self) -> None:
        for name, words in FIELD_CHOICES.items():
            if (word := getattr(self, name)) not in words:
                raise ValueError(f"{name} is {word!r}: it must be one of {', '.join(words)}")
        for name in ("forward", "dq", "dkdv", "single_pass"):
            if not isinstance(tile := getattr(self, name), Tile | None):
                raise ValueError(f"{name} is {tile!r:.60}: it must be a Tile or None")
        for name in ("persistent", "pack_gqa"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if self.single_pass is not None and self.backward == "two_pass":
            raise ValueError(
                f"single_pass is {self.single_pass}, but backward is 'two_pass'. Pass backward='single_pass' or "
                "'single_pass_deterministic', or omit single_pass."
            )
        for name, default in (("dkdv_splits", 1), ("dkdv_epilogue", "pointers")):
            if getattr(self, name) != default and self.backward != "two_pass":
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with backward={self.backward!r}: it needs backward='two_pass'. "
                    f"Pass {name}={default!r}."
                )
        if self.dkdv_splits != AUTO and not is_int_at_least(self.dkdv_splits, 1):
            raise ValueError(
                f"dkdv_splits is {self.dkdv_splits!r}: it must be {AUTO!r} or a divisor of the number of query heads "
                "per key head"
            )
        if self.sm_margin is not None and not (self.persistent and is_int_at_least(self.sm_margin, 0)):
            raise ValueError(
                f"sm_margin is {self.sm_margin!r} and persistent is {self.persistent}: sm_margin must be None or, with "
                "persistent=True, the number of multiprocessors to leave free"
            )
        if self.forward_kernel == "hopper" and (self.order, self.persistent, self.pack_gqa) != ("heads", False, False):
            raise ValueError(
                f"order is {self.order!r}, persistent is {self.persistent} and pack_gqa is {self.pack_gqa}: "
                "forward_kernel='hopper' needs order='heads', persistent=False and pack_gqa=False"
            )


def is_int_at_least(value: object, minimum: int) -> bool:
    """Return True for an int of at least ``minimum`` that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_single_pass(config: KernelConfig | None) -> bool:
    """Return True if one kernel computes dQ, dK and dV."""
    return config is not None and config.backward != "two_pass"


def value_columns(tile: Tile, head_dim_v: int) -> int:
    """Return how many columns of v a forward program takes; further columns take launches that repeat the scores.

    The accumulators of more rows than ``MAX_WIDE_ROWS`` fit in registers only up to ``MAX_PART_WIDTH`` columns.
    """
    return head_dim_v if tile.block_q <= MAX_WIDE_ROWS else min(head_dim_v, MAX_PART_WIDTH)


# Untuned defaults. For 16-bit inputs and head dims up to 128, each compiles on Triton 3.6 to 3.9 without spills and
# without serialised wgmma in the loop over tiles (`bench/NOTES.md` has the survey). The search began at 128 query rows
# per K/V tile (128 keys in dK/dV), as in Triton's fused-attention tutorial. Those of dQ and dK/dV on sm_90 and those
# for 512 are the best of about ten tiles by the bound of `ringattn inspect`, and no role of 512 spills in its loop on
# Triton 3.7. None was timed on a GPU yet; a tuned table replaces them.
_HOPPER = {  # 227 KB of shared memory; two programs of 4 warps share a multiprocessor and take turns
    64: KernelConfig(Tile(64, 128, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
    96: KernelConfig(Tile(64, 128, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
    128: KernelConfig(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 1)),
    192: KernelConfig(Tile(64, 64, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 3)),
    256: KernelConfig(Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 3)),
    512: KernelConfig(Tile(128, 32, 8, 2), Tile(32, 64, 8, 1), Tile(64, 16, 8, 1)),
}
_BLACKWELL = {  # accumulators in tensor memory, softmax in registers
    64: KernelConfig(Tile(128, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 1)),
    96: KernelConfig(Tile(128, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 1)),
    128: KernelConfig(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 1)),
    192: KernelConfig(Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 4, 1)),
    256: KernelConfig(Tile(64, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 4, 1)),
    512: KernelConfig(Tile(64, 32, 8, 2), Tile(32, 64, 8, 1), Tile(64, 16, 8, 1)),
}
_AMPERE = {  # 163 KB; mma.sync keeps operands in registers: smaller tiles, deeper pipelines
    64: KernelConfig(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    128: KernelConfig(Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(16, 128, 8, 2)),
    256: KernelConfig(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)),
    512: KernelConfig(Tile(32, 64, 8, 1), Tile(32, 64, 8, 1), Tile(32, 16, 4, 1)),
}
_SMALL = {  # sm_86, sm_89, sm_120: mma.sync and 99 KB per block
    64: _AMPERE[64],
    128: KernelConfig(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(16, 128, 8, 2)),
    256: KernelConfig(Tile(64, 32, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    512: KernelConfig(Tile(32, 32, 8, 2), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
}
_AMD = {  # 64 KB; warps of 64 threads; the most products per clock of the issue slots (`bench/results/LOG.md`)
    64: KernelConfig(Tile(128, 64, 4, 2), Tile(128, 32, 4, 2), Tile(16, 128, 4, 2)),
    128: KernelConfig(Tile(128, 64, 4, 1), Tile(128, 16, 8, 2), Tile(16, 64, 4, 2)),
    256: KernelConfig(Tile(64, 32, 4, 1), Tile(64, 16, 4, 1), Tile(16, 64, 4, 1)),
    512: KernelConfig(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
_FLOAT32 = {  # tf32x3 holds every operand twice, in 4-byte elements: small tiles on every GPU
    64: KernelConfig(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    128: KernelConfig(Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: KernelConfig(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    512: KernelConfig(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
INTERPRETER_CONFIG = KernelConfig(
    Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)
)  # short sequences, many tiles

_BY_ARCH = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL}


def built_in_config(arch: int, dtype: torch.dtype, head_dim: int) -> KernelConfig:
    """Return the default config for an architecture and the larger of D and Dv.

    GPUs of NVIDIA without an entry get tiles for 99 KB of shared memory, which fit all of them.
    """
    table = _FLOAT32 if dtype == torch.float32 else _BY_ARCH.get(arch, _AMD if is_amd(arch) else _SMALL)
    return table[next(size for size in table if head_dim <= size)]


# Tiles of the single pass by architecture and the larger head dim. A tile has 128 keys as in dK/dV if registers hold
# their dK and dV, and as many queries as leave room for a tile of dQ. On Triton 3.7 no tile spills in any role, for
# both orders of adding. A head dim that is split in two parts takes more tensor memory than the next power of two.
# Beyond 128 every tile spills.
_SINGLE_PASS: dict[int, dict[int, Tile]] = {
    80: {64: Tile(64, 128, 8, 2), 128: Tile(16, 128, 8, 2)},
    90: {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2)},
    100: {64: Tile(64, 128, 8, 1), 96: Tile(32, 128, 8, 1), 128: Tile(64, 128, 8, 1)},
    103: {64: Tile(64, 128, 8, 1), 96: Tile(32, 128, 8, 1), 128: Tile(64, 128, 8, 1)},
    **{arch: {64: Tile(16, 128, 4, 2), 128: Tile(16, 64, 4, 2)} for arch in AMD_ARCHS},
}
MAX_SINGLE_PASS_HEAD_DIM = 128
"""Largest head dim for which the single pass has a default tile."""

_SINGLE_PASS_SMALL = {64: Tile(32, 128, 8, 2), 128: Tile(16, 64, 4, 2)}
_SINGLE_PASS_FLOAT32 = {64: Tile(32, 32, 4, 1), 128: Tile(16, 16, 4, 1)}


def single_pass_tile(arch: int, dtype: torch.dtype, head_dim: int) -> Tile | None:
    """Return the default tile of the single-pass backward for a compute capability, or None if no tile fits.

    ``head_dim`` is the larger of D and Dv.
    """
    table = _SINGLE_PASS_FLOAT32 if dtype == torch.float32 else _SINGLE_PASS.get(arch, _SINGLE_PASS_SMALL)
    return next((tile for size, tile in table.items() if head_dim <= size), None)
