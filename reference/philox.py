"""Philox4x32-10: four random words that are a function of a counter and a key.

J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; the
order of the words is that of their library Random123, whose known answers the tests hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four words of 32 bits, each an int64 tensor of one shape."""

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
"""The golden ratio and the square root of 3 less 1: what a round adds to the two words of the key."""
ROUNDS = 10
MASK = 0xFFFFFFFF


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """The block that ``counter`` is encrypted to under the two words of ``key``."""
    for number in range(ROUNDS):
        counter = _round(counter, tuple((word + number * step) & MASK for word, step in zip(key, WEYL, strict=True)))
    return counter


def _round(counter: Words, key: tuple[int, ...]) -> Words:
    """Two multiplications, and the words change places."""
    high0, low0 = _product(counter[0], MULTIPLIERS[0])
    high1, low1 = _product(counter[2], MULTIPLIERS[1])
    return high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product, from the products of the word's halves: those fit in int64."""
    upper, lower = (word >> 16) * factor, (word & 0xFFFF) * factor
    carried = upper + (lower >> 16)  # of the product, all but its last 16 bits
    return carried >> 16, ((carried & 0xFFFF) << 16) | (lower & 0xFFFF)


def words(*numbers: int | Tensor) -> Words:
    """Four numbers below 2^32, or int64 tensors of them that broadcast, as one counter."""
    one, two, three, four = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        *(torch.as_tensor(x, dtype=torch.int64) for x in numbers)
    )
    return one, two, three, four
