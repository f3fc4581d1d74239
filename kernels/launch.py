"""From torch tensors to a launch: argument tuples, TMA descriptors, and the lock around an interpreted kernel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from .bounds import Bounds
from .config import LEAST_SIDE, KernelConfig, Tile
from .device.modify import UNMODIFIED, Counter, Modifiers
from .device.parts import dot
from .device.tiles import BlockSparseRanges, Interval, Shape, Strided
from .gpu import gpu_specs
from .scores import PLAIN, Scores
from .target import target

Pair = tuple[torch.Tensor, torch.Tensor]

COPY_ENGINE_ARCH = 90
"""The first compute capability with a copy engine that stores and adds tiles in global memory (TMA)."""

HALF = 0xFFFF
"""The bits of one fp32 number of a ``Counter``."""

ALIGNMENT = 16
"""Bytes of which addresses and strides are multiples (CUDA driver API, cuTensorMapEncodeTiled)."""

TAKES = "dkdv_epilogue='descriptors' takes"
"""Who refuses what no descriptor can be made of."""

# Triton's interpreter patches its language module while a kernel runs, and a first launch compiles: one at a time.
_LOCK = threading.Lock()
_NO_DEVICE = contextlib.nullcontext()


def launch(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Launch ``kernel`` on ``grid`` programs on the current stream of ``device``; an empty grid is no launch.

    Raises:
        NotImplementedError: as :func:`check_cpu`.
        ValueError: what was compiled takes more of the GPU than there is.
    """
    if device.type == "cpu":
        check_cpu(args, kernel)
    if grid == 0:
        return
    if device.type == "meta" and (compiling := target()) is not None:
        compiling.take(kernel, grid, *args, **options)
        return
    with _LOCK, torch.cuda.device(device) if device.type == "cuda" else _NO_DEVICE:
        try:
            kernel[(grid,)](*args, **options)
        except OutOfResources as error:
            options_text = ", ".join(f"{name}={value}" for name, value in options.items())
            raise ValueError(
                f"{kernel.__name__} with {options_text} takes {error.required:,} of {error.name}, this GPU has "
                f"{error.limit:,}: smaller BLOCK_Q or BLOCK_K, or fewer num_stages, take less"
            ) from error


def check_cpu(given: Sequence[Any], kernel: Any = dot) -> None:
    """Refuse CPU tensors without Triton's interpreter, and of dtypes that it does not compute: NotImplementedError."""
    if isinstance(kernel, JITFunction):
        raise NotImplementedError(
            "tensors are on the CPU: Triton kernels run there under Triton's interpreter alone. Set TRITON_INTERPRET=1 "
            "before triton is imported (slow, for tests), or use the aten backend of ring_attention."
        )
    pointers = (getattr(x, "ptr", x) for x in given)
    if isinstance(kernel, type(dot)) and any(getattr(x, "dtype", None) == torch.bfloat16 for x in pointers):
        raise NotImplementedError(
            "tensors are torch.bfloat16 on the CPU: Triton's interpreter multiplies their bits as integers. It takes "
            "float16 and float32; the aten backend of ring_attention computes all three."
        )


def programs(rows: int, block: int, x: torch.Tensor) -> int:
    """One program per tile of rows, batch row and head of ``x [B, S, H, D]``."""
    return -(-rows // block) * x.shape[0] * x.shape[2]


def strided(x: torch.Tensor) -> Strided:
    batch, row, head, _ = x.stride()
    return Strided(x, batch, row, head)


def interval(bounds: Bounds) -> Interval:
    index = bounds.block_sparse
    ranges = None if index is None else BlockSparseRanges(*index.ranges, index.block)
    return Interval(bounds.lo, bounds.hi, bounds.seqused_k, ranges)


@lru_cache(maxsize=64)  # numbers of the host, which every launch asks for
def counter_of(seed: int, first_head: int) -> Counter:
    """Return both numbers in halves of 32 bits; of the head's number only the lowest 32 bits count."""
    words = (*(seed >> shift & HALF for shift in (0, 16, 32, 48)), first_head & HALF, first_head >> 16 & HALF)
    return Counter(*map(float, words))


def modifiers(scores: Scores, *, rows_are_keys: bool = False) -> Modifiers:
    """Of a launch whose rows are queries, or keys."""
    if scores is PLAIN or scores.is_plain:
        return UNMODIFIED
    slopes, drops = scores.alibi_slopes, scores.dropout_p > 0
    rows, columns = scores.q_positions, scores.k_positions
    if rows_are_keys:
        rows, columns = columns, rows
    return Modifiers(
        softcap=scores.softcap or None,
        slopes=slopes,
        slopes_stride=None if slopes is None else slopes.shape[-1] * (slopes.dim() - 1),
        rows=rows if scores.by_position else None,
        columns=columns if scores.by_position else None,
        counter=counter_of(scores.dropout_seed, scores.first_head) if drops else None,
        threshold=scores.threshold if drops else None,
        kept=1 / (1 - scores.dropout_p) if drops else None,
    )


def shape_of(rows: torch.Tensor, columns: torch.Tensor) -> Shape:
    """Of a launch whose programs are tiles of ``rows`` and walk ``columns``, both ``[B, S, heads, D]``."""
    heads = (rows.shape[2], columns.shape[2])
    return Shape(rows.shape[1], columns.shape[1], rows.shape[2], max(heads) // min(heads))


def empty_parts(like: torch.Tensor, splits: int) -> torch.Tensor:
    """Room for ``splits`` fp32 sums per head of ``like [B, S, H, D]``: ``[B, S, H * splits, D]``, rows side by side."""
    batch, length, heads, head_dim = like.shape
    room = torch.empty(batch, heads * splits, length, head_dim, device=like.device, dtype=torch.float32)
    return room.transpose(1, 2)


def head_dims(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    return {"HEAD_DIM": q.shape[3], "HEAD_DIM_V": v.shape[3]}


def options(tile: Tile) -> dict[str, int]:
    return {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def is_described(config: KernelConfig | None) -> bool:
    """Whether the copy engine leaves dK and dV."""
    return config is not None and config.dkdv_epilogue == "descriptors"


def check_described(q: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse a GPU or head dims for which dK and dV have no descriptors.

    Raises:
        ValueError: a compute capability below 9.0, or a head dim that is no power of two or below 16.
    """
    gpu = gpu_specs(q.device)
    if gpu is None or gpu.arch < COPY_ENGINE_ARCH:
        there = "" if gpu is None else f", sm_{gpu.arch}"
        raise ValueError(f"q is on {q.device}{there}: {TAKES} GPUs of compute capability 9.0 or higher")
    for name, head_dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not fills_boxes(head_dim):
            raise ValueError(
                f"{name} has head dim {head_dim}: {TAKES} powers of two of at least {LEAST_SIDE}, 'pointers' any"
            )


def check_describable(takes: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors, by name, of which no descriptor can be made, in the words of who ``takes`` them: ValueError."""
    for name, x in tensors.items():
        if x is not None and not is_aligned(x):
            raise ValueError(
                f"{name} has strides {x.stride()} at {x.data_ptr():#x}: {takes} an address and positive strides that "
                f"are multiples of {ALIGNMENT} bytes, {ALIGNMENT // x.element_size()} elements"
            )


def fills_boxes(head_dim: int) -> bool:
    """Whether a row of ``head_dim`` elements is one of a tile, without padding."""
    return head_dim >= LEAST_SIDE and head_dim & (head_dim - 1) == 0


def is_aligned(x: torch.Tensor) -> bool:
    """Whether the copy engine takes the address and strides of ``x [B, S, H, D]``; of nothing, any."""
    if not x.numel():
        return True
    unit = ALIGNMENT // x.element_size()
    for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True):
        if size > 1 and (stride <= 0 or stride % unit):
            return False
    return x.data_ptr() % ALIGNMENT == 0


def descriptor(x: torch.Tensor, rows: int) -> Any:
    """A TMA descriptor of ``x [B, S, H, D]`` in tiles of ``rows`` rows of one head.

    Past the end the copy engine reads zeros, and leaves what is there where it writes.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), strides_of(x), [1, rows, 1, x.shape[3]])


def strides_of(x: torch.Tensor) -> list[int]:
    """Strides of ``x [B, S, H, D]`` as a descriptor takes them.

    That of a dimension of one element says nothing, and need not be one that the copy engine takes.
    """
    return [*(stride if size > 1 else x.shape[3] for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)), 1]


class Descriptors:
    """Descriptors, made once: of queries, and of the slots that keys and values come in again and again."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int | None], tuple[object, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, rows: int, columns: int | None = None) -> object:
        """As :func:`gluon_descriptor`."""
        key = id(x), rows, columns
        if key not in self._made:
            self._made[key] = gluon_descriptor(x, rows, columns), x  # while it is held nothing else has its id
        return self._made[key][0]


def gluon_descriptor(x: torch.Tensor, rows: int, columns: int | None = None) -> object:
    """For tiles of ``rows`` rows of one head of ``x [B, S, H, D]``, whole or of ``columns`` columns.

    Past the end the copy engine fills with zeros, and leaves what is there where it writes.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    columns = columns or x.shape[3]
    return TensorDescriptor(x, list(x.shape), strides_of(x), [1, rows, 1, columns], _layout(rows, columns, x.dtype))


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    dtypes = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], dtypes[dtype])
