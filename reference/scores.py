"""Softcap and ALiBi of ``scale * q k^T`` before the mask and the softmax, and dropout after them."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from .masks import MaskOptions, mask_predicates
from .philox import counter_words, philox

WORD_COUNT = 1 << 32


class ScoreOptions(TypedDict, total=False):
    """Arguments for score modifiers."""

    softmax_scale: float | None
    """Factor of ``q k^T``. Default: ``1 / sqrt(D)``."""
    softcap: float
    """See :func:`apply_softcap`; 0 for none."""
    alibi_slopes: Tensor | None
    """See :func:`alibi_bias`; ``[H]`` or ``[B, H]``."""
    dropout_p: float
    """See :func:`dropout_factors`; 0 for no dropout."""
    dropout_seed: int | None
    """64-bit key of :func:`.philox.philox`; required with ``dropout_p``."""
    first_head: int
    """Global index of the first head."""


class AttentionOptions(MaskOptions, ScoreOptions, total=False):
    """Arguments for masks and score modifiers."""


def apply_softcap(scores: Tensor, softcap: float) -> Tensor:
    """Return ``cap * tanh(score / cap)``.

    Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, arXiv:2408.00118, section 2.
    """
    return softcap * torch.tanh(scores / softcap)


def alibi_bias(slopes: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Return the ALiBi bias ``-slope * |p_q - p_k|``, float64 ``[1 or B, H, Sq, Sk]``.

    O. Press, N. Smith and M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", 2021, arXiv:2108.12409, section 3. The paper defines it for causal attention.
    """
    distances = (q_positions[:, None] - k_positions[None, :]).abs().to(torch.float64)
    by_row = slopes.to(torch.float64) if slopes.dim() == 2 else slopes.to(torch.float64)[None]
    return -by_row[:, :, None, None] * distances


def apply_score_options(scores: Tensor, q_positions: Tensor, k_positions: Tensor, options: ScoreOptions) -> Tensor:
    """Return ``scores``, ``scale * q k^T`` ``[B, H, Sq, Sk]``, after softcap and ALiBi."""
    softcap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    scores = apply_softcap(scores, softcap) if softcap else scores
    return scores if slopes is None else scores + alibi_bias(slopes, q_positions, k_positions)


def dropout_factors(
    shape: tuple[int, ...], q_positions: Tensor, k_positions: Tensor, options: ScoreOptions
) -> Tensor | None:
    """Return the dropout factors of weights of ``shape`` ``[B, H, Sq, Sk]``, float64; None without dropout.

    A factor is 0 with probability ``dropout_p``, else ``1 / (1 - dropout_p)`` (N. Srivastava et al., "Dropout: A Simple
    Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014). It is 0 if the first word of Philox4x32-10 is
    below ``round(dropout_p * 2^32)``. The key is the seed, and the counter is (query position, key position, head,
    batch row).
    """
    dropout_p, seed = options.get("dropout_p", 0.0), options.get("dropout_seed")
    if not dropout_p:
        return None
    if seed is None:
        raise ValueError(f"dropout_p is {dropout_p} without dropout_seed: pass dropout_seed")
    batch, heads = (torch.arange(count) for count in shape[:2])
    heads = heads + options.get("first_head", 0)
    counter = counter_words(
        q_positions[None, None, :, None],
        k_positions[None, None, None, :],
        heads[None, :, None, None],
        batch[:, None, None, None],
    )
    first_word = philox(counter, (seed % WORD_COUNT, seed // WORD_COUNT))[0]
    threshold = min(round(dropout_p * WORD_COUNT), WORD_COUNT - 1)
    return (first_word >= threshold).to(torch.float64) / (1 - dropout_p)


def uses_positions(options: AttentionOptions) -> bool:
    """Return True if any option of a call depends on positions."""
    slopes = options.get("alibi_slopes")
    return bool(mask_predicates(options)) or slopes is not None or options.get("dropout_p", 0.0) > 0
