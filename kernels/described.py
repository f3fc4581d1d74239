"""TMA descriptors of what kernels leave in global memory: what the copy engine takes, and dK and dV through them."""

from __future__ import annotations

from typing import Any

import torch

from .config import LEAST_SIDE, KernelConfig
from .lookup import gpu_of

COPY_ENGINE_ARCH = 90
"""The first compute capability with a copy engine that stores and adds tiles in global memory (TMA)."""

ALIGNMENT = 16
"""Bytes of which addresses and strides are multiples (CUDA driver API, cuTensorMapEncodeTiled)."""

TAKES = "dkdv_epilogue='descriptors' takes"


def is_described(config: KernelConfig | None) -> bool:
    """Whether the copy engine leaves dK and dV."""
    return config is not None and config.dkdv_epilogue == "descriptors"


def check_described(q: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse a GPU or head dims for which dK and dV have no descriptors.

    Raises:
        ValueError: a compute capability below 9.0, or a head dim that is no power of two or below 16.
    """
    gpu = gpu_of(q.device)
    if gpu is None or gpu.arch < COPY_ENGINE_ARCH:
        there = "" if gpu is None else f", sm_{gpu.arch}"
        raise ValueError(f"q is on {q.device}{there}: {TAKES} GPUs of compute capability 9.0 or higher")
    for name, head_dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not fills_boxes(head_dim):
            raise ValueError(
                f"{name} has head dim {head_dim}: {TAKES} powers of two of at least {LEAST_SIDE}, 'pointers' any"
            )


def check_results(**results: torch.Tensor | None) -> None:
    """Refuse sums or results, by name, of which no descriptor can be made: ValueError."""
    for name, x in results.items():
        if x is not None:
            check_describable(name, x, TAKES)


def check_describable(name: str, x: torch.Tensor, takes: str) -> None:
    """Refuse a tensor of which no descriptor can be made, in the words of who ``takes`` it: ValueError."""
    if not is_aligned(x):
        raise ValueError(
            f"{name} has strides {x.stride()} at {x.data_ptr():#x}: {takes} an address and positive strides that "
            f"are multiples of {ALIGNMENT} bytes, {ALIGNMENT // x.element_size()} elements"
        )


def describes(
    config: KernelConfig | None, q: torch.Tensor, v: torch.Tensor, *, asked: bool, **results: torch.Tensor | None
) -> bool:
    """Whether the copy engine leaves the results of one launch: its sums and what it writes, by name.

    Where a tuned table chose so and not the caller, what does not suit it goes by pointers.

    Raises:
        ValueError: what :func:`check_described` and :func:`check_results` refuse, where the caller ``asked``.
    """
    if not is_described(config):
        return False
    try:
        check_described(q, v)
        check_results(**results)
    except ValueError:
        if asked:
            raise
        return False
    return v.numel() > 0


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
