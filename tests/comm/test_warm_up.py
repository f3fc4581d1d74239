"""Which edges a ring has, and a pattern that no other edge could have sent. The rest is in `transport_cases`."""

from __future__ import annotations

import itertools

import pytest
import torch

from ringattn.comm.transport import PATTERN_BYTES, _pattern, ring_edges


@pytest.mark.parametrize(
    ("order", "edges"),
    [
        ([0], {(0, 0)}),
        ([1, 0], {(0, 1), (1, 0)}),
        ([0, 2, 1], {(0, 2), (2, 1), (1, 0), (2, 0), (1, 2), (0, 1)}),
    ],
)
def test_both_directions_of_a_ring(order: list[int], edges: set[tuple[int, int]]) -> None:
    found = ring_edges(order)
    assert set(found) == edges
    assert len(found) == len(edges)


def test_patterns_of_two_edges_differ() -> None:
    ranks = [0, 1, 2, 255, 256, 257, 1023]
    patterns = [_pattern((source, destination), torch.device("cpu")) for source in ranks for destination in ranks]
    for first, second in itertools.combinations(patterns, 2):
        assert int((first != second).sum()) >= PATTERN_BYTES // 4


@pytest.mark.parametrize("shift", [1, 4, 128, 256, 512, 1024, 2048])
def test_a_shifted_pattern_is_wrong(shift: int) -> None:
    pattern = _pattern((3, 5), torch.device("cpu"))
    assert int((pattern[shift:] != pattern[:-shift]).sum()) > (PATTERN_BYTES - shift) // 2
