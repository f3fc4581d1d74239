"""Who computes a hop: the fused Triton kernels, or PyTorch's own CPU operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..kernels import PLAIN, Bounds, KernelConfig, Scores
from ..kernels.attention import Backward, Forward, attention_delta
from ..kernels.config import is_single_pass
from ..kernels.single_pass import Gradients
from .buffers import Heads, Pair, Tensors
from .checked import checked
from .cpu.aten import AtenBackward, AtenForward, row_dot


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that ``name`` means for tensors on ``device``.

    Raises:
        ValueError: no such backend, or not on this device.
    """
    (name,) = checked(backend=name)
    if name == "auto":
        return "aten" if device.type == "cpu" else "triton"
    if name == "aten" and device.type != "cpu":
        raise ValueError(f"backend is 'aten', q is on {device}: aten computes on the CPU, use 'triton' or 'auto'")
    return name


def forward_backends(
    backend: str,
    chunks: Sequence[Heads],
    q: torch.Tensor,
    *,
    softmax_scale: float,
    config: KernelConfig | None = None,
    start: Pair | None = None,
) -> list[AtenForward] | list[Forward]:
    """What computes the forward of each chunk of heads; ``start`` is the ``(out, lse)`` before any key, fp32."""
    parts: list[tuple[torch.Tensor, Pair | None]] = [(q[:, :, heads.q], None) for heads in chunks]
    if start is not None:
        out, lse = start
        parts = [(q[:, :, heads.q], (out[:, :, heads.q], lse[:, heads.q].contiguous())) for heads in chunks]
    if backend == "aten":
        return [AtenForward(part, softmax_scale=softmax_scale, start=state) for part, state in parts]
    return [Forward(part, softmax_scale, config, state) for part, state in parts]


def backward_backends(
    backend: str,
    chunks: Sequence[Heads],
    dout: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    config: KernelConfig | None = None,
) -> list[AtenBackward] | list[TritonBackward]:
    """What computes the backward of each chunk of heads."""
    parts = [
        (
            dout[:, :, heads.q],
            q[:, :, heads.q],
            out[:, :, heads.q],
            lse[:, heads.q].contiguous(),  # as the kernels take it
            None if dlse is None else dlse[:, heads.q].contiguous(),
        )
        for heads in chunks
    ]
    if backend == "aten":
        return [AtenBackward(*part, softmax_scale=softmax_scale) for part in parts]
    kind = SinglePassBackward if is_single_pass(config) else TritonBackward
    return [kind(*part, softmax_scale=softmax_scale, config=config) for part in parts]


def row_delta(backend: str, dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """``rowsum(dout * out) - dlse``, fp32 ``[B, H, S]``."""
    if backend == "triton":
        return attention_delta(dout, out, dlse)
    delta = row_dot(dout, out).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The chunks of heads of a result as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class TritonBackward:
    """dK/dV and dQ of a hop as two launches; both continue fp32 accumulators."""

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
        self._q = q
        self._dq: torch.Tensor | None = None
        self._bind(dout, lse, attention_delta(dout, out, dlse), softmax_scale, config)

    def _bind(
        self, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, scale: float, config: KernelConfig | None
    ) -> None:
        self._bound = Backward(dout, self._q, lse, delta, scale, config)
        self._key_gradients: Callable[..., None] = self._bound.dkdv

    def dq(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool
    ) -> None:
        q, accum = self._q, self._dq
        out = q.new_empty(q.shape, dtype=q.dtype if final else torch.float32) if final or accum is None else accum
        self._bound.dq(k, v, bounds=bounds, scores=scores, accum=accum, out=out)
        self._dq = out

    def dkdv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: Bounds,
        *,
        scores: Scores = PLAIN,
        local: bool,
        accum: Callable[[], Tensors] | None,
        out: Tensors,
    ) -> None:
        arrived = None
        if accum is not None:
            dk, dv = accum()
            arrived = (dk, dv)
        self._key_gradients(k, v, bounds=bounds, scores=scores, accum=arrived, out=(out[0], out[1]))

    def result(self) -> torch.Tensor:
        """dQ in q's dtype, after the final hop."""
        assert self._dq is not None
        return self._dq


class SinglePassBackward(TritonBackward):
    """dK, dV and dQ of a hop as one launch, in the place of dK/dV: what the loop asks for dQ is there already.

    So a chunk's dK/dV travel under the next chunk's launch, and with one chunk under none.
    """

    def _bind(
        self, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, scale: float, config: KernelConfig | None
    ) -> None:
        assert config is not None
        self._dq = torch.zeros(self._q.shape, device=self._q.device, dtype=torch.float32)
        self._key_gradients = Gradients(dout, self._q, lse, delta, self._dq, scale, config)

    def dq(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool
    ) -> None:
        """Nothing: every shard's part is added with its dK/dV, that of the own shard at the very end."""

    def result(self) -> torch.Tensor:
        """dQ in q's dtype, after the last shard."""
        return super().result().to(self._q.dtype)
