"""Tile sizes and launch options: what a kernel may be tuned by, and the untuned defaults with their reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_SIDE = 16


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut and launched.

    ``block_q`` and ``block_k`` are rows of queries and keys per tile (powers of two, at least 16), ``num_warps`` and
    ``num_stages`` Triton's options: warps per program and depth of the software pipeline.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if size < LEAST_SIDE or size & (size - 1):
                raise ValueError(f"{name} is {size}: a tile side is a power of two of at least {LEAST_SIDE}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}: it must be 1, 2, 4, 8 or 16")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}: it must be at least 1")


ORDERS = ("heads", "longest")
FORWARD_KERNELS = ("portable", "hopper")
AUTO = "auto"
EPILOGUES = ("pointers", "descriptors")
BACKWARDS = ("two_pass", "single_pass", "single_pass_deterministic", "hopper")
WORDS = {"backward": BACKWARDS, "dkdv_epilogue": EPILOGUES, "forward_kernel": FORWARD_KERNELS, "order": ORDERS}


@dataclass(frozen=True)
class KernelConfig:
    """One :class:`Tile` per kernel, and which kernels; a tile of None is the one that a launch without a config takes.

    The page of this folder says more of each. Whatever was never run on a GPU is nobody's default; what a choice is
    not written for is refused before anything is launched. In a field's words:

    - ``forward_kernel``: "portable", or "hopper": for sm_90, two warpgroups of 64 query rows (``block_q`` 128, 8
      warps), 64 or 128 keys per tile, ``num_stages`` tiles each of K and V. Hops whose bounds have ``seqused_k`` or
      ``block_sparse``, and empty ones, go to the portable kernel with the same tile.
    - ``dkdv_splits``: parts of the query heads of each key head, each a dK/dV program of its own; a second kernel adds
      them up in a fixed order. A divisor of the query heads per key head, or "auto": by programs and multiprocessors
      (``order.splits_for``), 1 where there is no GPU. Takes fp32 memory of as many times dK and dV.
    - ``order`` of the tiles of the forward, dQ and dK/dV: "heads", one head after the other; or "longest", the longest
      tiles first of as many heads as read what fits half of L2. Longest is by position, as a causal mask has it.
    - ``persistent``: programs walk from tile to tile, as many as stay on all multiprocessors but ``sm_margin``, which
      are left to a transfer that runs beside; None leaves ``order.MARGIN`` of them, or half of a GPU that has few.
    - ``pack_gqa``: the rows of a tile of the forward and of dQ are positions times the query heads that share a key
      head, so that K and V are read once for all of them.
    - ``dkdv_epilogue``: "pointers", or "descriptors": the copy engine leaves dK and dV of two passes, and adds them to
      sums that stay where they are, which spares registers. From compute capability 9.0 on, head dims that are powers
      of two of at least 16, addresses and strides of whole 16 bytes.
    - ``backward``: "two_pass", dQ and dK/dV in a kernel each, seven matrix products per pair of tiles; "single_pass",
      all three in one, by five, dQ *added* in fp32 in whatever order programs come; "single_pass_deterministic", in a
      fixed order, at the price of waiting; "hopper", a single pass for sm_90 and head dims 64 and 128. dK and dV have
      the same bits on every run in all of them. ``single_pass`` is the tile of the last three, None their default.
    """

    forward: Tile | None = None
    dq: Tile | None = None
    dkdv: Tile | None = None
    forward_kernel: str = "portable"
    dkdv_splits: int | str = 1
    order: str = "heads"
    persistent: bool = False
    sm_margin: int | None = None
    pack_gqa: bool = False
    dkdv_epilogue: str = "pointers"
    backward: str = "two_pass"
    single_pass: Tile | None = None

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            if (word := getattr(self, name)) not in words:
                raise ValueError(f"{name} is {word!r}: it must be one of {', '.join(words)}")
        for name in ("persistent", "pack_gqa"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if self.single_pass is not None and self.backward == "two_pass":
            raise ValueError(
                f"single_pass is {self.single_pass} with backward='two_pass', which has no use for it: pass "
                "backward='single_pass' or 'single_pass_deterministic', or no tile"
            )
        for name, what, default in (("dkdv_splits", "splits", 1), ("dkdv_epilogue", "is of", "pointers")):
            if getattr(self, name) != default and self.backward != "two_pass":
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with backward={self.backward!r}: it {what} the dK/dV kernel of "
                    f"'two_pass'; pass {default!r}"
                )
        if self.dkdv_splits != AUTO and not is_whole(self.dkdv_splits, 1):
            raise ValueError(
                f"dkdv_splits is {self.dkdv_splits!r}: it must be {AUTO!r} or a divisor of the query heads per key head"
            )
        if self.sm_margin is not None and not (self.persistent and is_whole(self.sm_margin, 0)):
            raise ValueError(
                f"sm_margin is {self.sm_margin!r} and persistent {self.persistent}: it must be None or, of a "
                "persistent kernel, the number of multiprocessors that it leaves free"
            )
        if self.forward_kernel == "hopper" and (self.order, self.persistent, self.pack_gqa) != ("heads", False, False):
            raise ValueError(
                f"order is {self.order!r}, persistent {self.persistent} and pack_gqa {self.pack_gqa}: "
                "forward_kernel='hopper' takes 'heads', False and False, the portable kernel any"
            )


def is_whole(value: object, least: int) -> bool:
    """Whether a value is an int, not a bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_single_pass(config: KernelConfig | None) -> bool:
    """Whether dQ, dK and dV are made by one kernel."""
    return config is not None and config.backward != "two_pass"


# Untuned defaults. Each was the first of its kind that compiles, on Triton 3.6 to 3.9, without local memory traffic
# and without serialised wgmma in the loop that holds the matrix products (16-bit, head dims up to 128; `bench/NOTES.md`
# has the survey), with 128 query rows per K/V tile (128 keys in dK/dV), the arithmetic intensity of Triton's
# fused-attention tutorial. None was timed yet: a tuned table replaces them.
_HOPPER = {  # 227 KB of shared memory; wgmma needs 8 warps to split 128 x 128 accumulators
    64: KernelConfig(Tile(128, 128, 8, 2), Tile(128, 64, 8, 1), Tile(64, 128, 8, 1)),
    128: KernelConfig(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 1)),
    256: KernelConfig(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)),
}
_BLACKWELL = {  # accumulators in tensor memory, softmax in registers: 128 x 128 scores spill there, 64 keys do not
    64: KernelConfig(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 1)),
    128: KernelConfig(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 1)),
    256: KernelConfig(Tile(64, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 4, 1)),
}
_AMPERE = {  # 163 KB; mma.sync keeps operands in registers: smaller tiles, deeper pipelines
    64: KernelConfig(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    128: KernelConfig(Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(16, 128, 8, 2)),
    256: KernelConfig(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)),
}
_SMALL = {  # sm_86, sm_89, sm_120: mma.sync and 99 KB per block
    64: _AMPERE[64],
    128: KernelConfig(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(16, 128, 8, 2)),
    256: KernelConfig(Tile(64, 32, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
_FLOAT32 = {  # tf32x3 holds every operand twice, in 4-byte elements: small tiles on every GPU
    64: KernelConfig(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    128: KernelConfig(Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: KernelConfig(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
INTERPRETER = KernelConfig(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))  # short sequences, many tiles

_BY_ARCH = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL}


def config_for(arch: int, dtype: torch.dtype, head_dim: int) -> KernelConfig:
    """The default for a compute capability (90 is 9.0) and the larger of D and Dv.

    Architectures that are not listed get tiles for 99 KB of shared memory, which fit everywhere.
    """
    table = _FLOAT32 if dtype == torch.float32 else _BY_ARCH.get(arch, _SMALL)
    return table[next(size for size in table if head_dim <= size)]


# Of the single pass, by architecture and the larger head dim. 128 keys, as in dK/dV, where registers hold dK and dV of
# them, and as many queries as leave room for a tile of dQ beside: clean in every role, on Triton 3.7, for both orders
# of adding. Head dims in two parts take more tensor memory than the next power of two. Beyond 128 there is none whose
# loop does not spill.
_SINGLE_PASS: dict[int, dict[int, Tile]] = {
    80: {64: Tile(64, 128, 8, 2), 128: Tile(16, 128, 8, 2)},
    90: {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2)},
    100: {64: Tile(64, 128, 8, 1), 96: Tile(32, 128, 8, 1), 128: Tile(64, 128, 8, 1)},
    103: {64: Tile(64, 128, 8, 1), 96: Tile(32, 128, 8, 1), 128: Tile(64, 128, 8, 1)},
}
MOST_SINGLE_PASS = 128
"""The largest head dim of which the single pass has a default."""

_SINGLE_PASS_SMALL = {64: Tile(32, 128, 8, 2), 128: Tile(16, 64, 4, 2)}
_SINGLE_PASS_FLOAT32 = {64: Tile(32, 32, 4, 1), 128: Tile(16, 16, 4, 1)}


def single_pass_tile(arch: int, dtype: torch.dtype, head_dim: int) -> Tile | None:
    """The default of the single-pass backward for a compute capability and the larger of D and Dv; None: none fits."""
    table = _SINGLE_PASS_FLOAT32 if dtype == torch.float32 else _SINGLE_PASS.get(arch, _SINGLE_PASS_SMALL)
    return next((tile for size, tile in table.items() if head_dim <= size), None)
