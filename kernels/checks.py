"""What the host refuses before anything is launched."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch

from .target import target

if TYPE_CHECKING:
    from .bounds import Bounds
    from .scores import Scores

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
LARGEST = 1e30
"""Of scales and caps: beyond it a score over its cap leaves the range of fp32."""
LEAST_SCALE = 1e-30
"""Below it scores and gradients leave the range of fp32."""
LEAST_CAP = 1e-8
"""Below it the largest scale over a cap leaves the range of fp32, in which the weights of such scores are all alike."""
TRANSPOSED = "; in [B, H, S, D] they would fit: pass .transpose(1, 2) of q, k and v"


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores, scale: float | None
) -> float:
    """Refuse q, k, v that do not fit each other; returns the softmax scale."""
    check_qkv(q, k, v)
    bounds.check(q.shape[0], q.shape[1], k.shape[1], q.device)
    scores.check(q.shape[0], q.shape[2], q.device)
    scores.check_positions(q.shape[1], k.shape[1], q.device)
    return check_scale(scale, q.shape[3])


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Ranks, dtypes, devices, strides, batches, heads and head dims of q, k and v: ValueError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, may_be_meta=x is not q)  # of k and v below: they must be where q is
    check_shapes(q, k, v)


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors whose dtypes, devices, strides or sizes do not fit each other: ValueError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_values(name, x)
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, q is {q.dtype}: they must have one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: they must be on one device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {x.shape[0]}, q has {q.shape[0]}: they must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head dim {k.shape[3]}, q has {q.shape[3]}: they must be equal")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v is {list(v.shape)}, k is {list(k.shape)}: batch, length and heads must be equal")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        swapped = k.shape[1] and q.shape[1] % k.shape[1] == 0
        raise ValueError(
            f"k has {kv_heads} heads, q has {heads}: the heads of q must be a multiple of the heads of k, "
            f"of which head h of q reads head h // (H // Hkv){TRANSPOSED if swapped else ''}"
        )


def is_real(value: object, kind: type = Real) -> bool:
    """Whether a value is a number, of Python's or numpy's, and no bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_tensor(name: str, x: object, *, may_be_meta: bool = False) -> None:
    """Refuse what is no plain tensor with values of its own: ValueError, which says what to pass."""
    if not isinstance(x, torch.Tensor):
        instead = f"; pass torch.from_numpy({name})" if type(x).__module__ == "numpy" else ""
        raise ValueError(f"{name} is {x if x is None else type(x)}: it must be a torch.Tensor{instead}")
    check_local(name, x)
    if not may_be_meta and ((x.is_meta and target() is None) or hasattr(x, "fake_mode")):
        raise ValueError(f"{name} is a {type(x).__name__} on {x.device} without values: it must be one with values")
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"{name} is a {'nested' if x.is_nested else x.layout} tensor: it must be a dense one")


def check_local(name: str, x: object) -> None:
    """Refuse a DTensor, whatever else is given: ValueError."""
    kind = type(x)  # which a graph of torch.compile knows
    if kind is not torch.Tensor and hasattr(kind, "to_local"):
        raise ValueError(f"{name} is a {kind.__name__}: it must be this rank's own tensor; pass {name}.to_local()")


def check_values(name: str, x: torch.Tensor) -> None:
    """Refuse what is not shaped as queries, keys or values, or of another dtype: ValueError."""
    check_rank(name, x)
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} is {x.dtype}: it must be float16, bfloat16 or float32")
    if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} has head dim {x.shape[3]}: it must be 1 to {MAX_HEAD_DIM}")
    check_unit_stride(name, x)


def check_rank(name: str, x: torch.Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be [B, S, H, D]")


def check_unit_stride(name: str, x: torch.Tensor) -> None:
    if x.shape[-1] > 1 and x.numel() and x.stride(-1) != 1:  # torch calls a tensor without elements contiguous
        raise ValueError(f"{name} has strides {x.stride()}: the last stride must be 1")


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not is_real(scale) or not LEAST_SCALE <= scale <= LARGEST:
        raise ValueError(f"softmax_scale is {scale!r}: it must be a number from 1e-30 to 1e30, or None: 1/sqrt(D)")
    return float(scale)


def check_like(
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device,
    contiguous: bool = False,
    written: bool = False,
) -> None:
    """Refuse a tensor of another shape, dtype (None: any of the supported), device or stride.

    ``written``: also one that is expanded, whose elements share memory.
    """
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be {list(shape)}")
    if x.dtype not in ((dtype,) if dtype else DTYPES):
        raise ValueError(f"{name} is {x.dtype}: it must be {dtype or 'float16, bfloat16 or float32'}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}: it must be on {device}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}: it must be contiguous")
    if written and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name} has strides {x.stride()}: it is written to, each element must have its own memory")
    check_unit_stride(name, x)


def result_like(
    out_name: str, out: torch.Tensor | None, accum_name: str, accum: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """The tensor that a gradient is written to, checked together with the sums that are added to it."""
    if accum is not None:
        check_like(accum_name, accum, tuple(like.shape), torch.float32, like.device)
    if out is None:
        return torch.empty(like.shape, device=like.device, dtype=like.dtype)
    check_like(out_name, out, tuple(like.shape), None, like.device, written=True)
    return out


def check_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    bounds: Bounds,
    scores: Scores,
    scale: float | None,
) -> float:
    """As :func:`check_inputs`, with what only the backward takes."""
    scale = check_inputs(q, k, v, bounds, scores, scale)
    rows = (q.shape[0], q.shape[2], q.shape[1])
    check_like("dout", dout, (*q.shape[:3], v.shape[3]), q.dtype, q.device)
    check_like("lse", lse, rows, torch.float32, q.device, contiguous=True)
    check_like("delta", delta, rows, torch.float32, q.device, contiguous=True)
    return scale
