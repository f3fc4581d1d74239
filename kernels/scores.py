"""Changes to ``scale * q k^T``: softcap and ALiBi before the softmax, dropout after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from .checks import MAX_SCALE, MIN_SOFTCAP, check_tensor, is_real

WORD_RANGE = 1 << 32  # number of 32-bit words
SEED_RANGE = 1 << 64


@dataclass(frozen=True, eq=False)
class Scores:
    """Score modifiers, applied in this order to ``s = scale * q k^T`` of the positions ``p_q`` and ``p_k``.

    1. Softcap: ``s = cap * tanh(s / cap)`` (Gemma 2, arXiv:2408.00118, section 2).
    2. ALiBi: ``s -= slope * |p_q - p_k|`` (Press et al., arXiv:2108.12409, made symmetric).
    3. The mask and the softmax. ``lse`` covers all weights, also dropped ones.
    4. Dropout: a weight is kept if the first word of philox4x32-10 (Salmon et al., SC11), unsigned, is at least
       :attr:`threshold`. The key is the seed, and the counter is (p_q, p_k, head, batch row). Kept weights are divided
       by ``1 - dropout_p``.
    """

    softcap: float = 0.0
    """Cap of the scores, from 1e-8 to 1e30; 0 for none."""
    alibi_slopes: Tensor | None = None
    """ALiBi slopes, fp32 ``[H]`` or ``[B, H]``."""
    dropout_p: float = 0.0
    """Probability to drop a weight, at least 0 and below 1."""
    dropout_seed: int = 0
    """Seed of dropout, 64 bits."""
    first_head: int = 0
    """Global index of the first head; dropout counts the heads of all ranks."""
    q_positions: Tensor | None = None
    """Global positions of the queries, int32 ``[Sq]``; required by ALiBi and dropout."""
    k_positions: Tensor | None = None
    """Global positions of the keys, int32 ``[Sk]``; required by ALiBi and dropout."""

    @property
    def needs_positions(self) -> bool:
        """True if ALiBi or dropout is on; they depend on positions."""
        return self.alibi_slopes is not None or self.dropout_p > 0

    @property
    def is_plain(self) -> bool:
        """True if every modifier is off."""
        return not (self.softcap or self.needs_positions)

    @property
    def threshold(self) -> int:
        """Smallest philox word that keeps its weight, ``round(dropout_p * 2^32)``."""
        return min(round(self.dropout_p * WORD_RANGE), WORD_RANGE - 1)

    def slice_heads(self, heads: slice) -> Scores:
        """Return the modifiers for a slice of the heads."""
        if not self.needs_positions:
            return self
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[..., heads].contiguous()
        return replace(self, alibi_slopes=slopes, first_head=self.first_head + heads.start)

    def check(self, batch: int, heads: int, device: torch.device) -> None:
        """Raise ValueError if a modifier is out of range, or if the slopes do not fit ``batch`` and ``heads``."""
        if not is_real(self.softcap) or not (self.softcap == 0 or MIN_SOFTCAP <= self.softcap <= MAX_SCALE):
            raise ValueError(f"softcap is {self.softcap!r}: it must be a number from 1e-8 to 1e30, or 0 for no cap")
        if not is_real(self.dropout_p) or not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p is {self.dropout_p!r}: it must be a number in [0, 1)")
        if not is_real(self.dropout_seed, Integral) or not 0 <= self.dropout_seed < SEED_RANGE:
            raise ValueError(f"dropout_seed is {self.dropout_seed!r}: it must be an integer from 0 to 2^64 - 1")
        self.check_slopes(batch, heads, device)

    def check_slopes(self, batch: int, heads: int, device: torch.device) -> None:
        """Raise ValueError if the ALiBi slopes have another shape, dtype, device or stride."""
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
                f"alibi_slopes is {slopes.dtype} of shape {list(slopes.shape)} on {slopes.device}: it must be float32 "
                f"of shape [{heads}] or [{batch}, {heads}] on {device}"
            )
        if not slopes.is_contiguous():
            raise ValueError(f"alibi_slopes has strides {slopes.stride()}: it must be contiguous")

    def check_positions(self, rows: int, columns: int, device: torch.device) -> None:
        """Raise ValueError if positions are missing, strided, or do not fit ``rows`` queries and ``columns`` keys."""
        if not self.needs_positions:
            return
        for name, length in (("q_positions", rows), ("k_positions", columns)):
            positions = getattr(self, name)
            if positions is None:
                raise ValueError(f"scores.{name} is None: ALiBi and dropout need an int32 tensor of shape [{length}]")
            check_tensor(f"scores.{name}", positions, may_be_meta=True)
            if positions.dtype != torch.int32 or positions.shape != (length,) or positions.device != device:
                got = f"{positions.dtype} of shape {list(positions.shape)} on {positions.device}"
                raise ValueError(f"scores.{name} is {got}: it must be int32 of shape [{length}] on {device}")
            if not positions.is_contiguous():
                raise ValueError(f"scores.{name} has strides {positions.stride()}: it must be contiguous")


PLAIN = Scores()
"""Scores without modifiers."""
