"""Who computes a hop: the fused Triton kernels, or PyTorch's own CPU operator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels import (
    Bounds,
    KernelConfig,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
)
from .traffic import Tensors

BACKENDS = ("auto", "triton", "aten")


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that ``name`` means for tensors on ``device``.

    Raises:
        ValueError: no such backend, or not on this device.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}: it must be one of {', '.join(BACKENDS)}")
    if name == "auto":
        return "aten" if device.type == "cpu" else "triton"
    if name == "aten" and device.type != "cpu":
        raise ValueError(f"backend is 'aten', q is on {device}: aten computes on the CPU, use 'triton' or 'auto'")
    return name


class TritonForward:
    """One launch per hop; the state rides in the kernel."""

    def __init__(self, q: torch.Tensor, *, softmax_scale: float, config: KernelConfig | None) -> None:
        self._q = q
        self._scale = softmax_scale
        self._config = config
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None

    def fold(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, final: bool) -> None:
        self._state = attention_forward(
            self._q, k, v, bounds=bounds, softmax_scale=self._scale, state=self._state, final=final, config=self._config
        )

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)``, after the final fold."""
        assert self._state is not None
        return self._state


class TritonBackward:
    """dK/dV and dQ of a hop as two launches; both continue fp32 sums."""

    def __init__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        *,
        softmax_scale: float,
        config: KernelConfig | None,
    ) -> None:
        self._dout, self._q, self._lse = dout, q, lse
        self._scale = softmax_scale
        self._config = config
        self._delta = attention_delta(dout, out, dlse)
        self._dq: torch.Tensor | None = None

    def dq(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, local: bool, final: bool) -> None:
        q, sums = self._q, self._dq
        into = None if final else sums if sums is not None else torch.empty_like(q, dtype=torch.float32)
        self._dq = attention_dq(
            self._dout, q, k, v, self._lse, self._delta,
            bounds=bounds, softmax_scale=self._scale, sums=sums, into=into, config=self._config,
        )  # fmt: skip

    def dkdv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: Bounds,
        *,
        local: bool,
        sums: Callable[[], Tensors] | None,
        into: Tensors,
    ) -> None:
        arrived = None if sums is None else (sums()[0], sums()[1])
        attention_dkdv(
            self._dout, self._q, k, v, self._lse, self._delta,
            bounds=bounds, softmax_scale=self._scale, sums=arrived, into=(into[0], into[1]), config=self._config,
        )  # fmt: skip

    def result(self) -> torch.Tensor:
        """dQ in q's dtype, after the final hop."""
        assert self._dq is not None
        return self._dq
