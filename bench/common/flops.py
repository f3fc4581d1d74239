"""How work is counted: visible pairs, not squares."""

from __future__ import annotations

BACKWARD_FLOPS = 2.5  # five products of the forward's two
BY_SQUARE = ", S² / 2"
"""Behind the name of a rate that counts a causal square as FlashAttention's tables do."""


def forward_flops(pairs: int, *, heads: int, head_dim: int, head_dim_v: int | None = None, batch: int = 1) -> int:
    """``2 * pairs * (D + Dv) * H``: two operations per product and sum, of ``q k^T`` and of ``p v``.

    The backward counts ``BACKWARD_FLOPS`` times as much (five products instead of two).
    """
    return 2 * pairs * (head_dim + (head_dim if head_dim_v is None else head_dim_v)) * heads * batch


def pairs_of(seqlen: int, *, causal: bool) -> int:
    """Visible (query, key) pairs of a whole sequence."""
    return seqlen * (seqlen + 1) // 2 if causal else seqlen**2
