"""Validators of arguments: the values that they take, and the texts of their errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.validators import (
    MAX_RANKS,
    RANK,
    RANKS,
    Validator,
    integer_between,
    list_like,
    optional,
    real_number,
    short_repr,
    word_choice,
)

INTEGER, NUMBER = integer_between(-2, 5), real_number("a number above -1", lambda value: value > -1)
LIST, WORD = list_like("a list"), optional(word_choice("left", "right"))
# A tensor on a GPU.
REMOTE: Any = torch.zeros(2).as_subclass(type("Remote", (torch.Tensor,), {"device": torch.device("cuda", 0)}))


@pytest.mark.parametrize(
    ("validator", "values", "expected"),
    [
        (INTEGER, (np.int64(-2), 5), [-2, 5]),
        (RANK, (0, MAX_RANKS - 1), [0, MAX_RANKS - 1]),
        (RANKS, (1, MAX_RANKS), [1, MAX_RANKS]),
        (NUMBER, (np.float32(0.5), 1), [0.5, 1.0]),
        (LIST, (iter((1, 2)), np.array([1, 2]), torch.tensor([1, 2])), [[1, 2]] * 3),
        (WORD, ("left", "right", None), ["left", "right", None]),
    ],
)
def test_valid_values_are_converted(validator: Validator, values: tuple[Any, ...], expected: list[Any]) -> None:
    converted = [validator.check("x", value) for value in values]
    assert (converted, [*map(type, converted)]) == (expected, [*map(type, expected)])


@pytest.mark.parametrize(
    ("validator", "values", "takes"),
    [
        (INTEGER, (True, -3, 6, 1.0, "1", torch.tensor([1])), "an integer from -2 to 5"),
        (INTEGER, (torch.tensor(1),), "an integer from -2 to 5. Pass .item() of the tensor."),
        (RANK, (-1, MAX_RANKS), "an integer from 0 to 2^20 - 1"),
        (RANKS, (0, MAX_RANKS + 1), "an integer from 1 to 2^20"),
        (integer_between(-(2**16) + 1, 2**15), (2**15 + 1,), "an integer from -(2^16 - 1) to 32768"),
        (integer_between(-(2**63), -(2**16) + 2), (0,), "an integer from -2^63 to -65534"),
        (NUMBER, (True, "1", float("nan"), -1, 10**400), "a number above -1"),
        (LIST, ("12", b"12", 3, REMOTE), "a list"),
        (WORD, ("up", 3), "one of left, right, or None"),
    ],
)
def test_errors_say_what_an_argument_takes(validator: Validator, values: tuple[Any, ...], takes: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^x is .*: it must be {re.escape(takes)}$"):
            validator.check("x", value)


def test_values_are_short_in_errors() -> None:
    texts = {
        "torch.float16": torch.float16,
        "device(type='cuda', index=1)": torch.device("cuda", 1),
        "a torch.float32 tensor of shape [2, 1]": torch.zeros(2, 1),
        "an int": 10**5000,  # Python refuses to print it
        f"'{'x' * 37}...{'x' * 38}'": "x" * 200,
        "[1, 1, 1, 1, 1, 1, ...]": [1] * 9,
        "an object": object(),
        "a ringattn.validators.type": type("type", (), {"__module__": "ringattn.validators"})(),
    }
    assert [short_repr(value) for value in texts.values()] == [*texts]
