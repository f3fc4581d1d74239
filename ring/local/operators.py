"""Attention of other projects as local kernels: one class, with their calls and limits as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import KernelConfig, Scores
from ...kernels.gpu import arch_name, gpu_or_interpreter
from ...kernels.launch import Pair
from .protocol import Supports
from .rectangles import RectangleAttention, Tensors

NO_DROPOUT = 0.0


def is_deterministic() -> bool:
    """Return True if PyTorch must use deterministic kernels, and not only warn."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _accepts_all(arch: int, dim: int, value_dim: int, deterministic: bool) -> bool:
    return True


@dataclass(frozen=True)
class Operator:
    """Fused attention of another project, for full rectangles and causal squares.

    A causal square is the same with masks that count from the top left and from the bottom right.
    """

    forward_call: Callable[..., Pair]
    """``(q, k, v, causal, scale)`` returns out and ``lse``, ``[B, H, S]``, fp32, natural log."""
    backward_call: Callable[..., Tensors]
    """``(dout, q, k, v, out, lse, causal, scale)`` returns dq, dk and dv. ``lse`` is contiguous."""
    is_heads_first: bool = False
    """True: tensors are ``[B, H, S, D]``; False: ``[B, S, H, D]``."""
    multiple: int = 8
    """Head dims are padded to a multiple of it. Strides and offsets of the tensors are multiples too."""
    has_one_dim: bool = False
    """True: v is padded to the head dim of q and k, or the reverse."""
    for_one_token: Operator | None = None
    """Operator for one row or one key, if this one does not support them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Pair:
        """Return ``out [B, Sq, H, Dv]`` and ``lse [B, H, Sq]``."""
        if self.for_one_token is not None and 1 in (q.shape[1], k.shape[1]):
            return self.for_one_token.forward(q, k, v, causal=causal, scale=scale)
        dim, value_dim = self.padded_dims(q.shape[3], v.shape[3])
        inputs = (self._pass(x, width) for x, width in ((q, dim), (k, dim), (v, value_dim)))
        with torch.no_grad():  # other projects' entries record a graph otherwise
            out, lse = self.forward_call(*inputs, causal, scale)
        return self._order(out)[..., : v.shape[3]], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> Tensors:
        """Return dq, dk and dv for ``out`` and ``lse`` over all keys that the rows see."""
        if self.for_one_token is not None and 1 in (q.shape[1], k.shape[1]):
            return self.for_one_token.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
        dim, value_dim = self.padded_dims(q.shape[3], v.shape[3])
        widths = (dout, value_dim), (q, dim), (k, dim), (v, value_dim), (out, value_dim)
        inputs = (self._pass(x, width) for x, width in widths)
        grads = self.backward_call(*inputs, lse.contiguous(), causal, scale)
        return tuple(self._order(x)[..., : like.shape[3]] for x, like in zip(grads, (q, k, v), strict=True))

    def padded_dims(self, dim: int, value_dim: int) -> tuple[int, int]:
        """Return the head dims of q and k, and of v, as the operator gets them."""
        dim, value_dim = (-(-x // self.multiple) * self.multiple for x in (dim, value_dim))
        return (max(dim, value_dim),) * 2 if self.has_one_dim else (dim, value_dim)

    def _pass(self, x: Tensor, width: int) -> Tensor:
        """Return ``x`` as the operator takes it. Zeros in padded columns change neither scores nor gradients."""
        if x.shape[-1] < width:
            x = F.pad(x, (0, width - x.shape[-1]))
        elif any(size % self.multiple for size in (x.storage_offset(), *x.stride()[:-1])):
            x = x.clone(memory_format=torch.contiguous_format)  # kernels load 16 bytes at once
        return self._order(x)

    def _order(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.is_heads_first else x


class OperatorAttention(RectangleAttention):
    """A :class:`RectangleAttention` on an :class:`Operator`, which also checks what this GPU supports.

    Args:
        name: name of the kernel.
        operator: calls of the operator.
        supports: devices, dtypes and head dims.
        accepts: ``accepts(arch, dim, value_dim, deterministic)`` returns whether a GPU, 90 for compute capability 9.0,
            supports these head dims (after padding), forward and backward.
        limits: what ``accepts`` accepts, for error messages.
        load: imports the package. It raises ImportError if the package is missing.
    """

    def __init__(
        self, name: str, operator: Operator, *, supports: Supports,
        accepts: Callable[[int, int, int, bool], bool] = _accepts_all, limits: str = "",
        load: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, operator.forward, operator.backward, supports=supports)
        self.operator, self._accepts, self._limits, self._load = operator, accepts, limits, load

    def check(self, q: Tensor, v: Tensor, *, scores: Scores, block: int | None, config: KernelConfig | None) -> None:
        """Raise if the package is missing, or if this GPU does not support the head dims."""
        if self._load is not None:
            self._load()
        self._check_dims(q, v, "")

    def check_dlse(self, q: Tensor, v: Tensor) -> None:
        """Raise if the head dims leave no room for the columns of a gradient through lse."""
        self._check_dims(
            q, v, f" with {self.dlse_columns} more columns for the gradient through lse", self.dlse_columns
        )

    def _check_dims(self, q: Tensor, v: Tensor, why: str, extra: int = 0) -> None:
        if q.device.type != "cuda":
            return
        gpu = gpu_or_interpreter(q.device)
        dims, deterministic = (q.shape[3], v.shape[3]), is_deterministic()
        padded = self.operator.padded_dims(*(dim + extra for dim in dims))
        if not self._accepts(gpu.arch, *padded, deterministic):
            mode = " in deterministic mode" if deterministic else ""
            raise ValueError(
                f"backend {self.name!r} does not support head dim {dims[0]} for q and k and {dims[1]} for v{why} on "
                f"{arch_name(gpu.arch)}{mode}: it supports {self._limits}"
            )
