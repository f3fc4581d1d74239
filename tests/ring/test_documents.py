"""Packed documents: a value, where each begins and ends, and what is refused."""

from __future__ import annotations

import pickle
import re
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.ring.schedule.layout import Documents


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_where_every_position_lies(lengths: list[int]) -> None:
    documents = Documents([*accumulate(lengths, initial=0)])
    whole = documents.seqlen
    assert whole == sum(lengths)
    starts, ends = documents.around(torch.arange(whole + 3))
    assert starts.dtype == ends.dtype == torch.int64
    for position, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        inside = [one for one in pairwise(documents.boundaries) if one[0] <= position < one[1]]
        assert (start, end) == (inside[0] if inside else (whole, whole))


def test_any_whole_numbers_are_the_same_documents() -> None:
    given: list[Any] = [
        [0, 3, 3, 8],
        (0, 3, 3, 8),
        torch.tensor([0, 3, 3, 8]),
        torch.tensor([0, 3, 3, 8], dtype=torch.int32),
        np.array([0, 3, 3, 8]),
    ]
    made = [Documents(one) for one in given]
    assert len(set(made)) == 1
    assert {repr(one) for one in made} == {"Documents([0, 3, 3, 8])"}
    assert Documents([0, 3, 8]) != made[0] != [0, 3, 3, 8]
    made[0].around(torch.arange(3))
    assert pickle.loads(pickle.dumps(made[0])) == made[0]
    assert len(pickle.dumps(made[0])) < 200  # without the caches


def test_many_documents_are_shown_by_a_digest() -> None:
    one, other = Documents(range(100)), Documents([*range(99), 200])
    assert re.fullmatch("<99 documents of 99 tokens, boundaries [0-9a-f]{16}>", repr(one))
    assert repr(one) != repr(other)
    assert repr(Documents(range(16))).startswith("Documents([0, 1,")
    assert repr(Documents(range(17))).startswith("<16 documents")


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([], "cu_seqlens is []: it must have at least one document, [0, length]"),
        ([0], "cu_seqlens is [0]: it must have at least one document, [0, length]"),
        ([1, 4], "cu_seqlens starts at 1: it must start at 0"),
        ([0, 4, 3], "cu_seqlens[2] is 3, the one before is 4: it must not descend"),
        ([0, 4.0], "cu_seqlens is [0, 4.0]: it must be a list of whole numbers, or a CPU tensor"),
        (4, "cu_seqlens is 4: it must be a list of whole numbers, or a CPU tensor"),
        (torch.tensor([0.0, 4.0]), "cu_seqlens is torch.float32 [2]: it must be integers [documents + 1]"),
        (torch.tensor([[0, 4]]), "cu_seqlens is torch.int64 [1, 2]: it must be integers [documents + 1]"),
        (torch.tensor([False, True]), "cu_seqlens is torch.bool [2]: it must be integers [documents + 1]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "cu_seqlens is on meta: it must be a list or a CPU tensor"),
    ],
)
def test_bad_boundaries(cu_seqlens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Documents(cu_seqlens)
