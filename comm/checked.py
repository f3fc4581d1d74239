"""What arguments may be: the kinds that the tables of all doors are made of.

Decided here once: numbers are Python's or numpy's; a bool is no number, and neither is a tensor, whose value may have
to be waited for; NaN is never taken, and every range has an end.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import inf
from numbers import Integral, Number, Real
from reprlib import Repr
from typing import Any, NamedTuple

import torch

from .cuda_threads import indexed

LONGEST_SECONDS = 1e9  # some 30 years, which every clock that waits can count
MOST_RANKS = 1 << 20
MOST_CLUSTER = 8  # thread blocks: NCCL's NCCL_MAX_CGA_CLUSTER_SIZE
MOST_CHANNELS = 64  # NCCL's MAXCHANNELS: never less, and a transfer that took more would leave no room for attention
FIGURES = 1 << 16  # from here on powers of two are written as such

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80


class Kind(NamedTuple):
    """One kind of argument."""

    takes: str
    """In words, after "it must be"."""
    read: Callable[[Any], Any]
    """What is used of a value; raises where it is not of this kind."""

    def of(self, name: str, value: object) -> Any:
        """What is used of an argument: ValueError where it is not of this kind."""
        try:
            return self.read(value)
        except (TypeError, ValueError, OverflowError, RuntimeError, AssertionError):
            instead = "; pass .item() of a tensor" if isinstance(value, torch.Tensor) and value.dim() == 0 else ""
            raise ValueError(f"{name} is {shown(value)}: it must be {self.takes}{instead}") from None


def shown(value: object) -> str:
    """A value in an error, however long it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor, {value.dtype} {list(value.shape)}"
    try:
        if value is None or isinstance(value, Number | str | list | tuple | dict | torch.dtype | torch.device):
            return _REPR.repr(value)
    except ValueError:  # an int of more digits than Python prints
        pass
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def whole(least: int, most: int) -> Kind:
    """Whole numbers of a range."""

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
    """Of a kind what fits."""

    def read(value: Any) -> Any:
        made = kind.read(value)
        if not fits(made):
            raise ValueError
        return made

    return Kind(takes, read)


def number(takes: str, fits: Callable[[float], bool]) -> Kind:
    """Numbers that fit; of NaN no comparison holds."""
    return narrowed(Kind("a number", _number), takes, fits)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def instance(takes: str, *types: type) -> Kind:
    """Objects of some types, as they are."""
    return narrowed(Kind(takes, lambda value: value), takes, lambda value: isinstance(value, types))


def one_of(*words: str) -> Kind:
    """One of a few words."""
    return narrowed(instance("text", str), f"one of {', '.join(words)}", lambda value: value in words)


def optional(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(f"{kind.takes}, or None", lambda value: None if value is None else kind.read(value))


def listed(takes: str) -> Kind:
    """What can be gone through, as a list: also arrays, and tensors on the CPU."""
    return Kind(takes, _list)


def _list(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes)) or (isinstance(value, torch.Tensor) and value.device.type != "cpu"):
        raise TypeError
    made = value.tolist() if hasattr(value, "tolist") else value
    return [*made]


FLAG = instance("True or False", bool)
SECONDS = number("a positive number of seconds, 1e9 at most", lambda value: 0 < value <= LONGEST_SECONDS)


def _nodes(value: Any) -> tuple[tuple[int, ...], ...]:
    made = tuple(tuple(map(RANK.read, _list(node))) for node in _list(value))
    ranks = sorted(chain(*made))
    if not ranks or not all(made) or ranks != [*range(len(ranks))]:
        raise ValueError
    return made


def _device(value: Any) -> torch.device:
    if not isinstance(value, str | torch.device) or torch.device(value).type not in ("cpu", "cuda"):
        raise ValueError
    return indexed(value)


RANK, RANKS = whole(0, MOST_RANKS - 1), whole(1, MOST_RANKS)
NODES = Kind("lists of ranks, one per node: every rank from 0 on exactly once, and no empty node", _nodes)
DEVICE = Kind("cpu or a CUDA device that torch sees", _device)


def _power(most: int) -> Kind:
    return narrowed(whole(1, most), f"a power of two from 1 to {most}", lambda value: value & (value - 1) == 0)


LIMITS = {
    "channels": optional(_power(MOST_CHANNELS)),
    "ctas": optional(_power(MOST_CHANNELS)),
    "cga_cluster_size": optional(_power(MOST_CLUSTER)),
    "bytes_per_second": optional(number("a positive finite number", lambda value: 0 < value < inf)),
}
