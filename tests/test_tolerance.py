"""The tolerance itself: what it lets pass, and what it must not."""

from __future__ import annotations

import pytest
import torch

from .tolerance import assert_as_exact_as_pytorch

EXACT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def off_by(error: float) -> torch.Tensor:
    return (EXACT + torch.tensor([0.0, 0.0, error])).float()


@pytest.mark.parametrize("error", [0.0, 1e-3, 1.99e-3])
def test_up_to_twice_pytorchs_error_passes(error: float) -> None:
    assert_as_exact_as_pytorch("out", off_by(error), off_by(1e-3), EXACT)


@pytest.mark.parametrize("error", [2.01e-3, 1.0, torch.nan, torch.inf])
def test_more_fails(error: float) -> None:
    with pytest.raises(AssertionError, match="out: error"):
        assert_as_exact_as_pytorch("out", off_by(error), off_by(1e-3), EXACT)


def test_rounding_is_allowed_where_pytorch_is_exact() -> None:
    assert_as_exact_as_pytorch("out", off_by(EPS), EXACT.float(), EXACT)
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", off_by(3 * EPS), EXACT.float(), EXACT)


def test_rounding_is_relative_to_terms_that_cancel() -> None:
    zero = torch.zeros(3)
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("dq", zero + EPS, zero, zero.double())
    assert_as_exact_as_pytorch("dq", zero + EPS, zero, zero.double(), magnitude=1.0)


def test_rounding_is_that_of_our_dtype() -> None:
    assert_as_exact_as_pytorch("out", off_by(2e-3).bfloat16(), EXACT.bfloat16(), EXACT)


def test_nan_in_the_baseline_or_the_reference_fails() -> None:
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", EXACT.float(), off_by(torch.nan), EXACT)
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", off_by(torch.nan), off_by(torch.nan), EXACT + torch.nan)


def test_infinities_are_the_same_or_fail() -> None:
    lse = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert_as_exact_as_pytorch("lse", lse.float(), lse.float(), lse)
    for wrong in (torch.inf, -1e6, torch.nan):
        with pytest.raises(AssertionError, match="infinite"):
            assert_as_exact_as_pytorch("lse", torch.tensor([1.0, wrong]), lse.float(), lse)


def test_other_shapes_fail() -> None:
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", EXACT.float()[:1], EXACT.float(), EXACT)
