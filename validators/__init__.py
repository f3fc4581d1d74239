"""Argument validators, used by every folder but ``kernels``.

Numbers may be Python's or numpy's. Bools and NaN are rejected, and so are tensors, because reading a tensor may wait
for the GPU. Every range of integers has both limits. The module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Integral, Number, Real
from reprlib import Repr
from typing import Any, NamedTuple

MAX_RANKS = 1 << 20
MIN_POWER_NOTATION = 1 << 16  # messages write powers of two from here on as 2^n

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # no tensors exist before torch is imported
    return torch is not None and isinstance(value, torch.Tensor)


class Validator(NamedTuple):
    """Values that an argument may have, and the function that checks and converts them."""

    expected: str
    """Description of valid values that completes "it must be"."""
    convert: Callable[[Any], Any]
    """Function that converts a valid value to its normal form and raises for any other."""

    def check(self, name: str, value: Any) -> Any:
        """Check the value of the argument ``name`` and return it in normal form.

        Raises:
            ValueError: If the value is invalid.
        """
        try:
            return self.convert(value)
        except (TypeError, ValueError, OverflowError, RuntimeError, AssertionError):
            hint = ". Pass .item() of the tensor." if _is_tensor(value) and value.dim() == 0 else ""
            raise ValueError(f"{name} is {short_repr(value)}: it must be {self.expected}{hint}") from None


def short_repr(value: Any) -> str:
    """Return a value as short text for error messages; a tensor as its dtype and shape."""
    if _is_tensor(value):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    kind = type(value)
    is_torch = kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")
    try:
        if value is None or is_torch or isinstance(value, Number | str | list | tuple | dict):
            return _REPR.repr(value)
    except ValueError:  # Python refuses to print very long ints
        pass
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def integer_between(minimum: int, maximum: int) -> Validator:
    """Return a validator that takes integers from ``minimum`` to ``maximum``, both included."""

    def read(value: Any) -> int:
        is_number = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
        if not is_number or not minimum <= value <= maximum:
            raise ValueError
        return int(value)

    return Validator(f"an integer from {_format_integer(minimum)} to {_format_integer(maximum)}", read)


def _format_integer(number: int) -> str:
    if number < 0:
        text = _format_integer(-number)
        return f"-({text})" if " " in text else f"-{text}"
    for difference, suffix in ((0, ""), (1, " - 1")):
        if (power := number + difference) >= MIN_POWER_NOTATION and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{suffix}"
    return str(number)


def narrow(validator: Validator, expected: str, predicate: Callable[[Any], bool]) -> Validator:
    """Return ``validator`` with one more condition: ``predicate`` must hold for the converted value.

    ``expected`` describes the remaining values in errors.
    """

    def read(value: Any) -> Any:
        result = validator.convert(value)
        if not predicate(result):
            raise ValueError
        return result

    return Validator(expected, read)


def real_number(expected: str, predicate: Callable[[float], bool]) -> Validator:
    """Return a validator that takes real numbers for which ``predicate`` holds, and converts them to floats.

    ``expected`` describes them in errors. Predicates are comparisons, which reject NaN.
    """
    return narrow(Validator("a real number", _convert_number), expected, predicate)


def _convert_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def instance_validator(expected: str, *types: type) -> Validator:
    """Return a validator that takes instances of ``types``, described as ``expected``, without conversion."""
    return narrow(Validator(expected, lambda value: value), expected, lambda value: isinstance(value, types))


def word_choice(*words: str) -> Validator:
    """Return a validator that takes one of ``words``."""
    return narrow(instance_validator("text", str), f"one of {', '.join(words)}", lambda value: value in words)


def optional(validator: Validator) -> Validator:
    """Return a validator that also accepts None."""
    return Validator(
        f"{validator.expected}, or None", lambda value: None if value is None else validator.convert(value)
    )


def list_like(expected: str) -> Validator:
    """Return a validator that takes iterables, arrays and CPU tensors, but no text, and converts them to lists."""

    def read(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes)) or (_is_tensor(value) and value.device.type != "cpu"):
            raise TypeError
        return [*(value.tolist() if hasattr(value, "tolist") else value)]

    return Validator(expected, read)


FLAG = instance_validator("True or False", bool)
RANK, RANKS = integer_between(0, MAX_RANKS - 1), integer_between(1, MAX_RANKS)
