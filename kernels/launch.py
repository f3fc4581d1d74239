"""Kernel launches: argument tuples from torch tensors, TMA descriptors, and the launch itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .bounds import Bounds
from .compile_target import compile_target
from .config import MIN_TILE_SIDE, KernelConfig, Tile
from .device.score_modifiers import NO_MODIFIERS, DropoutCounter, ScoreModArgs
from .device.tile_ops import MAX_PART_WIDTH, dot, first_part_width, second_part_width
from .device.tiles import BlockSparseRanges, LaunchShape, MaskInterval, StridedTensor
from .gpu import arch_name, gpu_specs, is_amd
from .scores import PLAIN, Scores

Pair = tuple[Tensor, Tensor]

TMA_ARCH = 90
"""First compute capability whose TMA unit stores tiles to global memory and adds to it."""

_ANY_HEAD_DIM = range(1, MAX_PART_WIDTH + 1)
TMA_LOAD_HEAD_DIMS = {"forward": dict.fromkeys((90, 100, 103), _ANY_HEAD_DIM), "dq": {90: range(65, 193)}}
"""Larger head dims of D and Dv whose 16-bit tiles TMA loads, by kernel and compute capability.

Elsewhere pointers have as good a bound, or descriptors spill or serialise wgmma (``bench/results/LOG.md``).
"""

LOW_16_BITS = 0xFFFF
"""Mask of the 16 bits that one fp32 number of a ``DropoutCounter`` holds."""

ALIGNMENT = 16
"""Alignment of TMA addresses and strides in bytes (CUDA driver API, cuTensorMapEncodeTiled)."""

DESCRIPTOR_ERROR_PREFIX = "dkdv_epilogue='descriptors' supports"

# One launch at a time: a first launch compiles, and Triton's interpreter patches its language module while a kernel
# runs.
_LOCK = threading.Lock()
_NO_DEVICE = contextlib.nullcontext()


def launch(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Launch ``grid`` programs of ``kernel`` on the current stream of ``device``; do nothing for an empty grid.

    Raises:
        NotImplementedError: If the tensors are on the CPU and Triton's interpreter cannot run the kernel.
        ValueError: If the compiled kernel needs more registers or shared memory than the GPU has.
    """
    if device.type == "cpu":
        check_cpu(args, kernel)
    if grid == 0:
        return
    if device.type == "meta" and (compiling := compile_target()) is not None:
        compiling.on_launch(kernel, grid, *args, **options)
        return
    with _LOCK, torch.cuda.device(device) if device.type == "cuda" else _NO_DEVICE:
        try:
            kernel[(grid,)](*args, **options)
        except OutOfResources as error:
            options_text = ", ".join(f"{name}={value}" for name, value in options.items())
            raise ValueError(
                f"{kernel.__name__} with {options_text} exceeds this GPU's {error.name}: it needs "
                f"{error.required:,}, and the limit is {error.limit:,}. Use a smaller BLOCK_Q, BLOCK_K or num_stages."
            ) from error


def check_cpu(args: Sequence[Any], kernel: Any = dot) -> None:
    """Raise NotImplementedError if Triton's interpreter cannot run ``kernel``. Call it only for tensors on the CPU.

    Without the interpreter every kernel raises. With it, bfloat16 tensors among ``args`` raise.
    """
    if isinstance(kernel, JITFunction):
        raise NotImplementedError(
            "tensors are on the CPU, where Triton kernels need Triton's interpreter. Set TRITON_INTERPRET=1 before "
            "triton is imported (slow, for tests), or use the aten backend of ring_attention."
        )
    pointers = (getattr(x, "ptr", x) for x in args)
    if isinstance(kernel, type(dot)) and any(getattr(x, "dtype", None) == torch.bfloat16 for x in pointers):
        raise NotImplementedError(
            "tensors are torch.bfloat16 on the CPU, which Triton's interpreter cannot multiply. Use float16, float32 "
            "or the aten backend of ring_attention."
        )


def grid_size(rows: int, block: int, x: Tensor) -> int:
    """Return the grid with one program per tile of ``block`` rows, batch row and head of ``x [B, S, H, D]``."""
    return -(-rows // block) * x.shape[0] * x.shape[2]


def strided_tensor(x: Tensor) -> StridedTensor:
    """Return the kernel argument for ``x [B, S, H, D]``."""
    batch, row, head, _ = x.stride()
    return StridedTensor(x, batch, row, head)


def mask_interval(bounds: Bounds) -> MaskInterval:
    """Return the kernel argument for ``bounds``."""
    index = bounds.block_sparse
    ranges = None if index is None else BlockSparseRanges(*index.ranges, index.block)
    return MaskInterval(bounds.lo, bounds.hi, bounds.seqused_k, ranges)


@lru_cache(maxsize=64)
def dropout_counter(seed: int, first_head: int) -> DropoutCounter:
    """Return the seed and the lowest 32 bits of the first head's index, in pieces of 16 bits."""
    words = (
        *(seed >> shift & LOW_16_BITS for shift in (0, 16, 32, 48)),
        first_head & LOW_16_BITS,
        first_head >> 16 & LOW_16_BITS,
    )
    return DropoutCounter(*map(float, words))


def score_modifiers(scores: Scores, *, rows_are_keys: bool = False) -> ScoreModArgs:
    """Return the kernel argument for ``scores``; the rows of the launch are queries, or keys with ``rows_are_keys``."""
    if scores is PLAIN or scores.is_plain:
        return NO_MODIFIERS
    slopes, drops = scores.alibi_slopes, scores.dropout_p > 0
    rows, columns = scores.q_positions, scores.k_positions
    if rows_are_keys:
        rows, columns = columns, rows
    return ScoreModArgs(
        softcap=scores.softcap or None,
        slopes=slopes,
        slopes_stride=None if slopes is None else slopes.shape[-1] * (slopes.dim() - 1),
        rows=rows if scores.needs_positions else None,
        columns=columns if scores.needs_positions else None,
        counter=dropout_counter(scores.dropout_seed, scores.first_head) if drops else None,
        threshold=scores.threshold if drops else None,
        kept=1 / (1 - scores.dropout_p) if drops else None,
    )


def launch_shape(rows: Tensor, columns: Tensor) -> LaunchShape:
    """Return the shape of a launch whose programs are tiles of ``rows`` and loop over ``columns``."""
    heads = (rows.shape[2], columns.shape[2])
    return LaunchShape(rows.shape[1], columns.shape[1], rows.shape[2], max(heads) // min(heads))


def empty_split_sums(like: Tensor, splits: int) -> Tensor:
    """Return an empty fp32 ``[B, S, H * splits, D]`` for ``like [B, S, H, D]``; the rows of a head are contiguous."""
    batch, length, heads, head_dim = like.shape
    sums = torch.empty(batch, heads * splits, length, head_dim, device=like.device, dtype=torch.float32)
    return sums.transpose(1, 2)


def head_dims(q: Tensor, v: Tensor) -> dict[str, int]:
    """Return the head dims of q and v as options of a kernel."""
    return {"HEAD_DIM": q.shape[3], "HEAD_DIM_V": v.shape[3]}


def tile_options(tile: Tile) -> dict[str, int]:
    """Return a tile as options of a kernel."""
    return {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def has_descriptor_epilogue(config: KernelConfig | None) -> bool:
    """Return True if TMA stores dK and dV."""
    return config is not None and config.dkdv_epilogue == "descriptors"


def loads_by_tma(kernel: str, config: KernelConfig | None, q: Tensor, v: Tensor) -> bool:
    """Return True if TMA loads a kernel's tiles where strides allow: on this GPU, in this dtype, with this config."""
    gpu = gpu_specs(q.device)
    if gpu is None or q.dtype == torch.float32 or (config is not None and config.loads == "pointers"):
        return False
    return max(q.shape[3], v.shape[3]) in TMA_LOAD_HEAD_DIMS.get(kernel, {}).get(gpu.arch, ())


def check_descriptor_support(q: Tensor, v: Tensor) -> None:
    """Raise ValueError if the GPU or a head dim does not allow TMA descriptors of dK and dV."""
    gpu = gpu_specs(q.device)
    if gpu is None or not has_tma(gpu.arch):
        raise ValueError(
            f"q is on {device_text(q.device)}: {DESCRIPTOR_ERROR_PREFIX} only GPUs of compute capability 9.0 or higher"
        )
    for name, head_dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not is_tma_head_dim(head_dim):
            raise ValueError(
                f"{name} has head dim {head_dim}: {DESCRIPTOR_ERROR_PREFIX} only powers of two from "
                f"{MIN_TILE_SIDE} to {MAX_PART_WIDTH}. Use dkdv_epilogue='pointers'."
            )


def device_text(device: torch.device) -> str:
    """Return a device and its architecture for error messages, such as ``cuda:0, sm_80``."""
    gpu = gpu_specs(device)
    return str(device) if gpu is None else f"{device}, {arch_name(gpu.arch)}"


def check_tma_alignment(error_prefix: str, **tensors: Tensor | None) -> None:
    """Raise ValueError if the address or a stride of a named tensor is not aligned for TMA.

    ``error_prefix`` names the option that needs TMA, for the message.
    """
    for name, x in tensors.items():
        if x is not None and not is_tma_aligned(x):
            raise ValueError(
                f"{name} has strides {x.stride()} and address {x.data_ptr():#x}: {error_prefix} only addresses and "
                f"positive strides that are multiples of {ALIGNMENT} bytes, or {ALIGNMENT // x.element_size()} elements"
            )


def has_tma(arch: int) -> bool:
    """Return True if TMA of a GPU of this architecture stores tiles to global memory and adds to it."""
    return arch >= TMA_ARCH and not is_amd(arch)


def is_tma_head_dim(head_dim: int) -> bool:
    """Return True if ``head_dim`` is a power of two from 16 to 256, so that TMA moves whole rows of a tile."""
    return MIN_TILE_SIDE <= head_dim <= MAX_PART_WIDTH and head_dim & (head_dim - 1) == 0


def is_tma_aligned(x: Tensor) -> bool:
    """Return True if address and strides of ``x [B, S, H, D]`` are aligned for TMA, or ``x`` is empty."""
    return not x.numel() or (x.data_ptr() % ALIGNMENT == 0 and tma_strides(x) is not None)


def tma_descriptor(x: Tensor, rows: int) -> Any:
    """Return a TMA descriptor of ``x [B, S, H, D]`` in tiles of ``rows`` rows of one head.

    Past the end, TMA reads zeros and writes nothing.
    """
    return TensorDescriptor(x, x.shape, tma_strides(x), [1, rows, 1, x.shape[3]])


def load_arguments(x: Tensor, rows: int | None) -> tuple[Any, Any] | None:
    """Return two kernel arguments for ``x [B, S, H, D]``, which a kernel loads in tiles of ``rows`` rows of one head.

    These are the TMA descriptors of both parts of the head dim, or None if TMA cannot load ``x``. Without ``rows``
    they are a strided tensor and None, for loads by pointers.
    """
    if rows is None:
        return strided_tensor(x), None
    strides = tma_strides(x) if x.numel() and x.data_ptr() % ALIGNMENT == 0 else None
    if strides is None:
        return None
    first, second = _part_boxes(rows, x.shape[3])
    return TensorDescriptor(x, x.shape, strides, first), second and TensorDescriptor(x, x.shape, strides, second)


@cache
def _part_boxes(rows: int, head_dim: int) -> tuple[list[int], list[int] | None]:
    """Return the boxes of both parts of the head dim, or None if there is no second part."""
    second = second_part_width(head_dim)
    return [1, rows, 1, first_part_width(head_dim)], [1, rows, 1, second] if second else None


def tma_strides(x: Tensor) -> tuple[int, ...] | None:
    """Return the strides of ``x [B, S, H, D]`` for a descriptor, or None if they are not aligned for TMA."""
    return _tma_strides(x.shape, x.stride(), ALIGNMENT // x.element_size())


@lru_cache(maxsize=256)
def _tma_strides(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> tuple[int, ...] | None:
    # The stride of a dimension of size 1 is replaced, because it is arbitrary and may not be aligned.
    row = -(-shape[3] // unit) * unit
    used = [stride if size > 1 else row for stride, size in zip(strides[:3], shape[:3], strict=True)]
    return (*used, 1) if all(stride > 0 and stride % unit == 0 for stride in used) else None


class TensorCache:
    """Results of ``make(x, *key)`` by tensor; many launches use the same queries and the same slots of K and V."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._made = make, dict[tuple[int | None, ...], tuple[Any, Tensor]]()

    def __call__(self, x: Tensor, *key: int | None) -> Any:
        """Return ``make(x, *key)``, cached."""
        full_key = id(x), *key
        if full_key not in self._made:
            self._made[full_key] = self._make(x, *key), x  # keep x alive, so that no other tensor gets its id
        return self._made[full_key][0]


def gluon_descriptor(x: Tensor, rows: int, columns: int | None = None) -> object:
    """Return a Gluon TMA descriptor of ``x [B, S, H, D]`` in tiles of ``rows`` rows of one head.

    A tile has ``columns`` columns, or all of them if None. Past the end, TMA reads zeros and writes nothing.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    columns = columns or x.shape[3]
    return TensorDescriptor(x, x.shape, tma_strides(x), [1, rows, 1, columns], _shared_layout(rows, columns, x.dtype))


@cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Return the layout in shared memory of a tile of ``rows`` rows and ``columns`` columns."""
    from triton.experimental.gluon import language as gl

    dtypes = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], dtypes[dtype])
