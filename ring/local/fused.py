"""The fused Triton kernels as a local kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels import PLAIN, Bounds, KernelConfig, Scores, hopper_backward_launch, hopper_forward_launch, launch_plan
from ...kernels.attention import BackwardLauncher, ForwardLauncher, attention_delta
from ...kernels.checks import MAX_HEAD_DIM
from ...kernels.config import is_single_pass
from ...kernels.launch import Pair, check_cpu
from ...kernels.single_pass import SinglePassLauncher
from .protocol import FEATURES, Supports
from .registry import register_backend


class TritonAttention:
    """Local kernel on :mod:`ringattn.kernels`. CPU tensors need Triton's interpreter."""

    name = "triton"
    supports = Supports(value_dims=range(1, MAX_HEAD_DIM + 1), features=FEATURES)
    delta = staticmethod(attention_delta)

    def forward(
        self, q: torch.Tensor, *, softmax_scale: float, config: KernelConfig | None, start: Pair | None,
        max_logits: bool = False,
    ) -> ForwardLauncher:  # fmt: skip
        return ForwardLauncher(q, softmax_scale, config, start, max_logits)

    def backward(
        self, dout: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None,
        *, softmax_scale: float, config: KernelConfig | None,
    ) -> TritonBackward:  # fmt: skip
        kind = SinglePassBackward if is_single_pass(config) else TritonBackward
        return kind(dout, q, lse, attention_delta(dout, out, dlse), softmax_scale, config)

    def check(
        self, q: torch.Tensor, v: torch.Tensor, *, scores: Scores, block: int | None, config: KernelConfig | None
    ) -> None:
        """Raise if the config does not fit heads, scores or GPU, or if its tiles do not divide the mask's blocks.

        Without this check the first hop or the backward would raise later, while other ranks are sending.
        """
        if q.device.type == "cpu":
            check_cpu((q,))
        launch_plan.check_config(config, q, v)
        if config is not None and config.forward_kernel == "hopper":
            hopper_forward_launch.check_hopper_forward(q, v, scores, config.forward)
        if config is not None and config.backward == "hopper":
            hopper_backward_launch.check_hopper_backward(q, v, scores, config.single_pass)
        launch_plan.check_tiles(config, q, v, block)


class TritonBackward:
    """Backward with two launches per hop, dK/dV and dQ. Both continue fp32 accumulators."""

    def __init__(
        self, dout: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, scale: float,
        config: KernelConfig | None,
    ) -> None:  # fmt: skip
        self._q = q
        self._dq: torch.Tensor | None = None
        self._bound = BackwardLauncher(dout, q, lse, delta, scale, config)
        self._key_gradients: Callable[..., None] = self._bound.dkdv

    def dq(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool
    ) -> None:
        q, accum = self._q, self._dq
        out = q.new_empty(q.shape, dtype=q.dtype if final else torch.float32) if final or accum is None else accum
        self._bound.dq(k, v, bounds=bounds, scores=scores, accum=accum, out=out)
        self._dq = out

    def dkdv(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool,
        accum: Callable[[], tuple[torch.Tensor, ...]] | None, out: tuple[torch.Tensor, ...],
    ) -> None:  # fmt: skip
        incoming = None if accum is None else accum()
        self._key_gradients(k, v, bounds=bounds, scores=scores, accum=incoming, out=out)

    def result(self) -> torch.Tensor:
        assert self._dq is not None
        return self._dq


class SinglePassBackward(TritonBackward):
    """Backward with one launch per hop, which computes dK, dV and dQ when the loop asks for dK/dV.

    The launch of the next chunk hides the transfer of a chunk's dK/dV. With one chunk the transfer is exposed.
    """

    def __init__(
        self, dout: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, scale: float,
        config: KernelConfig | None,
    ) -> None:  # fmt: skip
        assert config is not None
        self._q = q
        self._dq = torch.zeros(q.shape, device=q.device, dtype=torch.float32)
        self._key_gradients = SinglePassLauncher(dout, q, lse, delta, self._dq, scale, config)

    def dq(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool
    ) -> None:
        """Do nothing, because :meth:`dkdv` adds every shard's dQ."""

    def result(self) -> torch.Tensor:
        return super().result().to(self._q.dtype)


register_backend(TritonAttention.name, TritonAttention, default_for="cuda")
