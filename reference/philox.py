"""Philox4x32-10, a counter-based random number generator that maps a counter and a key to four random words.

J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The order of words is
that of their library Random123, and the tests contain its known answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four 32-bit words, each an int64 tensor; all have the same shape."""

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
"""Increments of the two key words per round: the golden ratio, and the square root of 3 minus 1."""
ROUNDS = 10
MASK = 0xFFFFFFFF


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four random words for ``counter`` and the two words of ``key``."""
    for number in range(ROUNDS):
        counter = _round(counter, tuple((word + number * step) & MASK for word, step in zip(key, WEYL, strict=True)))
    return counter


def _round(counter: Words, key: tuple[int, ...]) -> Words:
    high0, low0 = _product(counter[0], MULTIPLIERS[0])
    high1, low1 = _product(counter[2], MULTIPLIERS[1])
    return high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of a product; products of 16-bit halves fit in int64."""
    upper, lower = (word >> 16) * factor, (word & 0xFFFF) * factor
    high_48 = upper + (lower >> 16)  # the product without its lowest 16 bits
    return high_48 >> 16, ((high_48 & 0xFFFF) << 16) | (lower & 0xFFFF)


def counter_words(*numbers: int | Tensor) -> Words:
    """Return a counter of four numbers below 2^32, or of int64 tensors that broadcast."""
    first, second, third, fourth = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        *(torch.as_tensor(x, dtype=torch.int64) for x in numbers)
    )
    return first, second, third, fourth
