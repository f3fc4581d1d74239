"""Argument checks that the host makes before a launch."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compile_target import compile_target

if TYPE_CHECKING:
    from .bounds import Bounds
    from .scores import Scores

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 512
MAX_SCALE = 1e30
"""Largest softmax scale and softcap. Above it, score / cap leaves the range of fp32."""
MIN_SCALE = 1e-30
"""Smallest softmax scale. Below it, scores and gradients leave the range of fp32."""
MIN_SOFTCAP = 1e-8
"""Smallest softcap. Below it, scale / cap leaves the range of fp32, and all weights would be equal anyway."""
TRANSPOSE_HINT = ". If your tensors are [B, H, S, D], pass q.transpose(1, 2), and the same for k and v."


def check_inputs(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores, scale: float | None) -> float:
    """Raise ValueError if the arguments of a forward do not fit each other; return the softmax scale."""
    check_qkv(q, k, v)
    bounds.check(q.shape[0], q.shape[1], k.shape[1], q.device)
    scores.check(q.shape[0], q.shape[2], q.device)
    scores.check_positions(q.shape[1], k.shape[1], q.device)
    return check_scale(scale, q.shape[3])


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if q, k and v are not dense tensors that fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, may_be_meta=x is not q)  # check_shapes compares the devices of k and v with q's
    check_shapes(q, k, v)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if dtypes, devices, strides or sizes of q, k and v do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_qkv_tensor(name, x)
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must have the same dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q is on {q.device}: they must be on the same device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {x.shape[0]} and q has {q.shape[0]}: they must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head dim {k.shape[3]} and q has {q.shape[3]}: they must be equal")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {list(v.shape)} and k has {list(k.shape)}: all but the head dim must be equal")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        swapped = k.shape[1] and q.shape[1] % k.shape[1] == 0
        raise ValueError(
            f"k has {kv_heads} heads and q has {heads}: the heads of q must be a multiple of the heads of k"
            f"{TRANSPOSE_HINT if swapped else ''}"
        )


def is_real(value: object, kind: type = Real) -> bool:
    """Return True for a number of Python or numpy that is not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_tensor(name: str, x: object, *, may_be_meta: bool = False) -> None:
    """Raise ValueError if an argument is not a dense tensor, or has no values (meta or fake).

    ``may_be_meta`` accepts tensors without values.
    """
    if not isinstance(x, Tensor):
        hint = f". Pass torch.from_numpy({name})." if type(x).__module__ == "numpy" else ""
        raise ValueError(f"{name} is {x if x is None else type(x).__name__}: it must be a torch.Tensor{hint}")
    check_not_dtensor(name, x)
    if not may_be_meta and ((x.is_meta and compile_target() is None) or hasattr(x, "fake_mode")):
        raise ValueError(f"{name} is a {type(x).__name__} on {x.device} without data: it must be a tensor with data")
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"{name} is a {'nested' if x.is_nested else x.layout} tensor: it must be a dense tensor")


def check_not_dtensor(name: str, x: object) -> None:
    """Raise ValueError if an argument is a DTensor."""
    kind = type(x)  # torch.compile can trace type(x)
    if kind is not Tensor and hasattr(kind, "to_local"):
        raise ValueError(f"{name} is a {kind.__name__}: it must be this rank's local tensor. Pass {name}.to_local().")


def check_qkv_tensor(name: str, x: Tensor) -> None:
    """Raise ValueError if a tensor cannot be q, k or v: shape, dtype, head dim or last stride."""
    check_four_dims(name, x)
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} is {x.dtype}: it must be float16, bfloat16 or float32")
    if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} has head dim {x.shape[3]}: it must be between 1 and {MAX_HEAD_DIM}")
    check_unit_stride(name, x)


def check_four_dims(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be [B, S, H, D]")


def check_unit_stride(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.numel() and x.stride(-1) != 1:  # the strides of an empty tensor do not matter
        raise ValueError(f"{name} has strides {x.stride()}: the last stride must be 1")


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the softmax scale, ``1 / sqrt(head_dim)`` for None, or raise ValueError if it is out of range."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not is_real(scale) or not MIN_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"softmax_scale is {scale!r}: it must be a number from 1e-30 to 1e30, or None for 1/sqrt(D)")
    return float(scale)


def check_like(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device,
    needs_contiguous: bool = False, is_output: bool = False,
) -> None:  # fmt: skip
    """Raise ValueError if a tensor has another shape, dtype (None: one of ``DTYPES``), device or last stride.

    ``is_output`` also requires that no two elements share memory, because a kernel writes the tensor.
    """
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be {list(shape)}")
    if x.dtype not in ((dtype,) if dtype else DTYPES):
        raise ValueError(f"{name} is {x.dtype}: it must be {dtype or 'float16, bfloat16 or float32'}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}: it must be on {device}")
    if needs_contiguous and not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}: it must be contiguous")
    if is_output and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name} has strides {x.stride()}: the kernel writes it, so no two elements may share memory")
    check_unit_stride(name, x)


def resolve_grad_output(
    out_name: str, out: Tensor | None, accum_name: str, accum: Tensor | None, like: Tensor
) -> Tensor:
    """Return the tensor to write the gradient of ``like`` to: ``out`` or a new one.

    Raises:
        ValueError: If ``out``, or the fp32 accumulator ``accum``, does not fit ``like``.
    """
    if accum is not None:
        check_like(accum_name, accum, tuple(like.shape), torch.float32, like.device)
    if out is None:
        return torch.empty(like.shape, device=like.device, dtype=like.dtype)
    check_like(out_name, out, tuple(like.shape), None, like.device, is_output=True)
    return out


def resolve_dkdv_output(
    out: tuple[Tensor, Tensor] | None, accum: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tensors to write dK and dV to: ``out`` or new ones; see :func:`resolve_grad_output`."""
    (dk, dv), (dk_accum, dv_accum) = out or (None, None), accum or (None, None)
    return resolve_grad_output("out[0]", dk, "accum[0]", dk_accum, k), resolve_grad_output(
        "out[1]", dv, "accum[1]", dv_accum, v
    )


def check_backward_inputs(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, bounds: Bounds, scores: Scores,
    scale: float | None,
) -> float:  # fmt: skip
    """Raise ValueError if the arguments of a backward do not fit each other; return the softmax scale."""
    scale = check_inputs(q, k, v, bounds, scores, scale)
    rows = (q.shape[0], q.shape[2], q.shape[1])
    check_like("dout", dout, (*q.shape[:3], v.shape[3]), q.dtype, q.device)
    check_like("lse", lse, rows, torch.float32, q.device, needs_contiguous=True)
    check_like("delta", delta, rows, torch.float32, q.device, needs_contiguous=True)
    return scale
