"""What becomes of ``scale * q k^T`` on its way to weights: softcap, ALiBi, mask and softmax, then dropout."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from .masks import Masks, predicates
from .philox import philox, words

WORD_COUNT = 1 << 32


class Scores(TypedDict, total=False):
    """The arguments about scores of every function here."""

    softmax_scale: float | None
    """Factor of ``q k^T``; default ``1 / sqrt(D)``."""
    softcap: float
    """See :func:`capped`; 0: none."""
    alibi_slopes: Tensor | None
    """See :func:`alibi`; ``[H]`` or ``[B, H]``."""
    dropout_p: float
    """See :func:`kept`; 0: nothing is dropped."""
    dropout_seed: int | None
    """64 bits, the key of :func:`.philox.philox`; required with ``dropout_p``."""
    first_head: int
    """Number of the first head, where these are some heads of many."""


class Options(Masks, Scores, total=False):
    """All of them, with those about masks."""


def capped(scores: Tensor, softcap: float) -> Tensor:
    """``cap * tanh(score / cap)``: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024,
    arXiv:2408.00118, section 2."""
    return softcap * torch.tanh(scores / softcap)


def alibi(slopes: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """``-slope * |p_q - p_k|``, float64 ``[1 or B, H, Sq, Sk]``.

    O. Press, N. Smith and M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", 2021, arXiv:2108.12409, section 3, there for causal attention alone.
    """
    distances = (q_positions[:, None] - k_positions[None, :]).abs().to(torch.float64)
    by_row = slopes.to(torch.float64) if slopes.dim() == 2 else slopes.to(torch.float64)[None]
    return -by_row[:, :, None, None] * distances


def modified(scores: Tensor, q_positions: Tensor, k_positions: Tensor, options: Scores) -> Tensor:
    """``scale * q k^T`` ``[B, H, Sq, Sk]`` after softcap and ALiBi, before the mask."""
    softcap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    scores = capped(scores, softcap) if softcap else scores
    return scores if slopes is None else scores + alibi(slopes, q_positions, k_positions)


def kept(shape: tuple[int, ...], q_positions: Tensor, k_positions: Tensor, options: Scores) -> Tensor | None:
    """What the weights of ``shape`` ``[B, H, Sq, Sk]`` are multiplied with after the softmax, float64; None: with 1.

    Dropout (N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014;
    scaled in training): 0 with probability ``dropout_p``, else ``1 / (1 - dropout_p)``. 0 where the first word of
    Philox4x32-10, its key the seed, its counter (query position, key position, head, batch row), is below
    ``dropout_p * 2^32``, rounded.
    """
    share, seed = options.get("dropout_p", 0.0), options.get("dropout_seed")
    if not share:
        return None
    if seed is None:
        raise ValueError(f"dropout_p is {share} without dropout_seed: the reference draws none")
    batch, heads = (torch.arange(count) for count in shape[:2])
    heads = heads + options.get("first_head", 0)
    counter = words(
        q_positions[None, None, :, None],
        k_positions[None, None, None, :],
        heads[None, :, None, None],
        batch[:, None, None, None],
    )
    first = philox(counter, (seed % WORD_COUNT, seed // WORD_COUNT))[0]
    threshold = min(round(share * WORD_COUNT), WORD_COUNT - 1)
    return (first >= threshold).to(torch.float64) / (1 - share)


def by_position(options: Options) -> bool:
    """Whether anything in a call depends on positions."""
    slopes = options.get("alibi_slopes")
    return bool(predicates(options)) or slopes is not None or options.get("dropout_p", 0.0) > 0
