"""Philox4x32-10 against the known answers of Random123, and against the textbook in whole numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.ring.cpu.blockwise import first_word

WORDS = st.integers(0, 2**32 - 1)


def textbook(seed: int, counter: list[int]) -> int:
    """Salmon et al., SC 2011, section 3.3, with Python's integers."""
    key, word = [seed % 2**32, seed >> 32], 2**32
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b // word ^ counter[1] ^ key[0], b % word, a // word ^ counter[3] ^ key[1], a % word]
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return counter[0]


def ours(seed: int, counter: list[int]) -> int:
    words = [torch.tensor(word) for word in counter]
    return int(first_word(seed, (words[0], words[1], words[2], words[3])))


@pytest.mark.parametrize(
    ("seed", "counter", "word"),
    [
        (0, [0, 0, 0, 0], 0x6627E8D5),
        (2**64 - 1, [2**32 - 1] * 4, 0x408F276D),
        (0x299F31D0A4093822, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0xD16CFE09),
    ],
)
def test_the_known_answers_of_random123(seed: int, counter: list[int], word: int) -> None:
    assert ours(seed, counter) == textbook(seed, counter) == word


@given(seed=st.integers(0, 2**64 - 1), counter=st.lists(WORDS, min_size=4, max_size=4))
def test_any_seed_and_counter(seed: int, counter: list[int]) -> None:
    assert ours(seed, counter) == textbook(seed, counter)


def test_counters_broadcast() -> None:
    rows, keys = torch.tensor([0, 7, 2**31 - 1]), torch.arange(5)
    words = first_word(2**63 + 5, (rows[:, None], keys, torch.tensor(3), torch.tensor(1)))
    assert words.tolist() == [[textbook(2**63 + 5, [row, key, 3, 1]) for key in range(5)] for row in rows.tolist()]
