"""Sizes as they are typed and as they are printed."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from ringattn.bench.common.flags import binary, human, size, sizes


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("17", 17), ("8k", 8192), ("1m", 2**20), ("2g", 2**31), (" 2K ", 2048)]
)
def test_size(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5k", "8t", "8 k", "8k,"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size: it must be a whole number, with k, m or g behind it"):
        size(text)


def test_sizes() -> None:
    assert sizes("8k,32k, 5") == [8192, 32768, 5]
    assert sizes("1m") == [2**20]
    with pytest.raises(typer.BadParameter, match="'' is not a size"):
        sizes("8k,,32k")


@given(st.integers(0, 2**40))
def test_binary_is_what_size_reads(count: int) -> None:
    assert size(binary(count)) == count


@pytest.mark.parametrize(
    ("count", "unit", "expected"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (1000, "B", "1.00 kB"),
        (67_108_864, "B", "67.1 MB"),
        (999_499, "", "999 k"),
        (999_500, "", "1.00 M"),
        (9_996, "", "10.0 k"),
        (99_960, "", "100 k"),
        (1.5e12, "FLOP", "1.50 TFLOP"),
        (5e21, "", "5000 E"),
        (12, "", "12"),
    ],
)
def test_human(count: float, unit: str, expected: str) -> None:
    assert human(count, unit) == expected
