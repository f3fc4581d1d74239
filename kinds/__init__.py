"""Kinds of arguments: the one vocabulary of which every folder but ``kernels`` builds its checks.

Numbers are Python's or numpy's. A bool is no number, and neither is a tensor, whose value may have to be waited for.
NaN is never taken, and every range has an end. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Integral, Number, Real
from reprlib import Repr
from typing import Any, NamedTuple

MOST_RANKS = 1 << 20
FIGURES = 1 << 16  # from here on powers of two are written as such

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # without it there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


class Kind(NamedTuple):
    """One kind of argument."""

    takes: str
    """Its values in words, after "it must be"."""
    read: Callable[[Any], Any]
    """Convert a value to the form that is used; raise if it is not of this kind."""

    def of(self, name: str, value: Any) -> Any:
        """Return an argument in the form that is used: ValueError if it is not of this kind."""
        try:
            return self.read(value)
        except (TypeError, ValueError, OverflowError, RuntimeError, AssertionError):
            instead = "; pass .item() of a tensor" if _is_tensor(value) and value.dim() == 0 else ""
            raise ValueError(f"{name} is {shown(value)}: it must be {self.takes}{instead}") from None


def shown(value: Any) -> str:
    """Return a value as errors show it, however long it is."""
    if _is_tensor(value):
        return f"a tensor, {value.dtype} {list(value.shape)}"
    kind = type(value)
    is_torch = kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")
    try:
        if value is None or is_torch or isinstance(value, Number | str | list | tuple | dict):
            return _REPR.repr(value)
    except ValueError:  # an int of more digits than Python prints
        pass
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def whole(least: int, most: int) -> Kind:
    """Return the kind of whole numbers of a range, whose ends it includes."""

    def read(value: Any) -> int:
        is_number = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
        if not is_number or not least <= value <= most:
            raise ValueError
        return int(value)

    return Kind(f"a whole number from {_figure(least)} to {_figure(most)}", read)


def _figure(number: int) -> str:
    for less, text in ((0, ""), (1, " - 1")):
        if (power := number + less) >= FIGURES and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{text}"
    return str(number)


def narrowed(kind: Kind, takes: str, fits: Callable[[Any], bool]) -> Kind:
    """Return the kind of those values of another one that fit."""

    def read(value: Any) -> Any:
        made = kind.read(value)
        if not fits(made):
            raise ValueError
        return made

    return Kind(takes, read)


def number(takes: str, fits: Callable[[float], bool]) -> Kind:
    """Return the kind of numbers that fit; of NaN no comparison holds."""
    return narrowed(Kind("a number", _number), takes, fits)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def instance(takes: str, *types: type) -> Kind:
    """Return the kind of objects of some types, as they are."""
    return narrowed(Kind(takes, lambda value: value), takes, lambda value: isinstance(value, types))


def one_of(*words: str) -> Kind:
    """Return the kind of a few words."""
    return narrowed(instance("text", str), f"one of {', '.join(words)}", lambda value: value in words)


def optional(kind: Kind) -> Kind:
    """Return a kind that also takes None."""
    return Kind(f"{kind.takes}, or None", lambda value: None if value is None else kind.read(value))


def listed(takes: str) -> Kind:
    """Return the kind of iterables, as lists: also arrays, and tensors on the CPU."""

    def read(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes)) or (_is_tensor(value) and value.device.type != "cpu"):
            raise TypeError
        return [*(value.tolist() if hasattr(value, "tolist") else value)]

    return Kind(takes, read)


FLAG = instance("True or False", bool)
RANK, RANKS = whole(0, MOST_RANKS - 1), whole(1, MOST_RANKS)
