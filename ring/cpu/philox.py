"""Philox4x32-10: random numbers that are a function of a counter and a key, so that no generator has a state.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. In int64 arithmetic, which torch has everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after every round
ROUNDS = 10
WORD = 0xFFFFFFFF

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def first_word(seed: int, counter: Counter) -> Tensor:
    """The first of the four words that ``counter`` becomes under the key ``(low word, high word)`` of ``seed``.

    ``counter`` is four int64 tensors of 32-bit words that broadcast. They are left as narrow as they come for as long
    as the rounds keep them apart, so that a counter of a row, a key and a head costs seven full rounds and not ten.
    """
    key = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS - 1):
        counter = _round(counter, key)
        key = [word + step & WORD for word, step in zip(key, WEYL, strict=True)]
    _, c1, c2, _ = counter
    return _mixed(c2 * MULTIPLIERS[1], c1, key[0])


def _round(counter: Counter, key: list[int]) -> Counter:
    """One round; the second and the fourth word keep their upper half, which the next round's mask takes away."""
    c0, c1, c2, c3 = counter
    products = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    return _mixed(products[1], c1, key[0]), products[1], _mixed(products[0], c3, key[1]), products[0]


def _mixed(product: Tensor, word: Tensor, key: int) -> Tensor:
    """Upper word of a 64-bit product, xor ``word``, xor ``key``; the mask cuts the sign that the shift drags along."""
    return torch.bitwise_xor(product >> 32, word ^ key).bitwise_and_(WORD)
