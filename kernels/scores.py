"""What becomes of ``scale * q k^T`` on its way to weights: softcap and ALiBi before the softmax, dropout behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

import torch

from .checks import LARGEST, LEAST_CAP, check_tensor, is_real

WORDS = 1 << 32  # of 32 bits
SEEDS = 1 << 64


@dataclass(frozen=True, eq=False)
class Scores:
    """Softcap, then ALiBi, then the mask, then the softmax, then dropout; see :data:`PLAIN`.

    With ``s = scale * q k^T`` of the query at position p_q and the key at p_k: ``s = cap * tanh(s / cap)`` (Gemma 2,
    arXiv:2408.00118, section 2), ``s -= slope * |p_q - p_k|`` (ALiBi, Press et al., arXiv:2108.12409, made symmetric).
    A weight is kept where the first word of philox4x32-10 (Salmon et al., SC11; key: the seed, counter: p_q, p_k, head,
    batch row), unsigned, is at least :attr:`threshold`; kept weights are divided by ``1 - dropout_p``. ``lse`` is that
    of the weights before dropout.
    """

    softcap: float = 0.0
    """``cap``, from 1e-8 to 1e30; 0: none."""
    alibi_slopes: torch.Tensor | None = None
    """fp32 ``[H]`` or ``[B, H]``."""
    dropout_p: float = 0.0
    """Share of the weights that are dropped, 0 to below 1."""
    dropout_seed: int = 0
    """64 bits."""
    first_head: int = 0
    """Number of the first head, where these are some heads of many: dropout counts all."""
    q_positions: torch.Tensor | None = None
    """int32 ``[Sq]``, global; ALiBi and dropout need both."""
    k_positions: torch.Tensor | None = None
    """int32 ``[Sk]``."""

    @property
    def by_position(self) -> bool:
        """Whether the scores depend on positions."""
        return self.alibi_slopes is not None or self.dropout_p > 0

    @property
    def is_plain(self) -> bool:
        """Whether nothing becomes of them."""
        return not (self.softcap or self.by_position)

    @property
    def threshold(self) -> int:
        """Words below it drop their weight; ``round(p * 2^32)``."""
        return min(round(self.dropout_p * WORDS), WORDS - 1)

    def of_heads(self, heads: slice) -> Scores:
        """The same for some of the heads."""
        if not self.by_position:
            return self
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[..., heads].contiguous()
        return replace(self, alibi_slopes=slopes, first_head=self.first_head + heads.start)

    def check(self, batch: int, heads: int, device: torch.device) -> None:
        """Refuse what does not fit: ValueError."""
        if not is_real(self.softcap) or not (self.softcap == 0 or LEAST_CAP <= self.softcap <= LARGEST):
            raise ValueError(f"softcap is {self.softcap!r}: it must be a number from 1e-8 to 1e30, or 0 for none")
        if not is_real(self.dropout_p) or not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p is {self.dropout_p!r}: it must be a number of at least 0 and below 1")
        if not is_real(self.dropout_seed, Integral) or not 0 <= self.dropout_seed < SEEDS:
            raise ValueError(f"dropout_seed is {self.dropout_seed!r}: it must be a whole number from 0 to 2^64 - 1")
        self.check_slopes(batch, heads, device)

    def check_slopes(self, batch: int, heads: int, device: torch.device) -> None:
        """Refuse ALiBi slopes of another shape, dtype, device or stride: ValueError."""
        slopes = self.alibi_slopes
        if slopes is None:
            return
        check_tensor("alibi_slopes", slopes)
        if (
            slopes.dtype != torch.float32
            or tuple(slopes.shape) not in ((heads,), (batch, heads))
            or slopes.device != device
        ):
            raise ValueError(
                f"alibi_slopes is {slopes.dtype} {list(slopes.shape)} on {slopes.device}: it must be float32 [{heads}] "
                f"or [{batch}, {heads}] on {device}"
            )
        if not slopes.is_contiguous():
            raise ValueError(f"alibi_slopes has strides {slopes.stride()}: it must be contiguous")

    def check_positions(self, rows: int, columns: int, device: torch.device) -> None:
        """Refuse positions that are missing or do not fit ``rows`` queries and ``columns`` keys: ValueError."""
        if not self.by_position:
            return
        for name, given, length in (
            ("q_positions", self.q_positions, rows),
            ("k_positions", self.k_positions, columns),
        ):
            if given is None:
                raise ValueError(f"{name} of the scores is None: ALiBi and dropout need int32 [{length}] on {device}")
            check_tensor(f"{name} of the scores", given, may_be_meta=True)
            if given.dtype != torch.int32 or given.shape != (length,) or given.device != device:
                got = f"{given.dtype} {list(given.shape)} on {given.device}"
                raise ValueError(f"{name} of the scores is {got}: it must be int32 [{length}] on {device}")


PLAIN = Scores()
"""Scores as they are."""
