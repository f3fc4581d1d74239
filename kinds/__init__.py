"""Argument validators, used by every folder but ``kernels``.

Numbers may be of Python or numpy. Bools are rejected, and so are tensors, because reading one may wait for the GPU. NaN
is rejected, and every range has an end. The module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Integral, Number, Real
from reprlib import Repr
from typing import Any, NamedTuple

MOST_RANKS = 1 << 20
FIGURES = 1 << 16  # messages write powers of two from here on as 2^n

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # no tensors exist before torch is imported
    return torch is not None and isinstance(value, torch.Tensor)


class Kind(NamedTuple):
    """Validator of one kind of argument."""

    takes: str
    """Description of valid values that completes "it must be"."""
    read: Callable[[Any], Any]
    """Function that converts a valid value to its normal form and raises for any other."""

    def of(self, name: str, value: Any) -> Any:
        """Return the converted value of the argument ``name``.

        Raises:
            ValueError: If the value is invalid.
        """
        try:
            return self.read(value)
        except (TypeError, ValueError, OverflowError, RuntimeError, AssertionError):
            hint = "; pass .item() of a tensor" if _is_tensor(value) and value.dim() == 0 else ""
            raise ValueError(f"{name} is {shown(value)}: it must be {self.takes}{hint}") from None


def shown(value: Any) -> str:
    """Return a short text of a value for error messages."""
    if _is_tensor(value):
        return f"a tensor, {value.dtype} {list(value.shape)}"
    kind = type(value)
    is_torch = kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")
    try:
        if value is None or is_torch or isinstance(value, Number | str | list | tuple | dict):
            return _REPR.repr(value)
    except ValueError:  # Python refuses to print very long ints
        pass
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def whole(least: int, most: int) -> Kind:
    """Return the validator of integers from ``least`` to ``most``, both included."""

    def read(value: Any) -> int:
        is_number = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
        if not is_number or not least <= value <= most:
            raise ValueError
        return int(value)

    return Kind(f"a whole number from {_figure(least)} to {_figure(most)}", read)


def _figure(number: int) -> str:
    for difference, suffix in ((0, ""), (1, " - 1")):
        if (power := number + difference) >= FIGURES and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{suffix}"
    return str(number)


def narrowed(kind: Kind, takes: str, fits: Callable[[Any], bool]) -> Kind:
    """Return a validator that also requires ``fits`` of the converted value."""

    def read(value: Any) -> Any:
        result = kind.read(value)
        if not fits(result):
            raise ValueError
        return result

    return Kind(takes, read)


def number(takes: str, fits: Callable[[float], bool]) -> Kind:
    """Return the validator of real numbers that satisfy ``fits``; comparisons with NaN are False."""
    return narrowed(Kind("a number", _number), takes, fits)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def instance(takes: str, *types: type) -> Kind:
    """Return the validator of instances of ``types``, without conversion."""
    return narrowed(Kind(takes, lambda value: value), takes, lambda value: isinstance(value, types))


def one_of(*words: str) -> Kind:
    """Return the validator of a fixed set of words."""
    return narrowed(instance("text", str), f"one of {', '.join(words)}", lambda value: value in words)


def optional(kind: Kind) -> Kind:
    """Return a validator that also accepts None."""
    return Kind(f"{kind.takes}, or None", lambda value: None if value is None else kind.read(value))


def listed(takes: str) -> Kind:
    """Return the validator of iterables, arrays and CPU tensors, which are converted to lists."""

    def read(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes)) or (_is_tensor(value) and value.device.type != "cpu"):
            raise TypeError
        return [*(value.tolist() if hasattr(value, "tolist") else value)]

    return Kind(takes, read)


FLAG = instance("True or False", bool)
RANK, RANKS = whole(0, MOST_RANKS - 1), whole(1, MOST_RANKS)
