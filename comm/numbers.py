"""Numbers that stand for objects where numbers may pass and objects may not: the arguments of a torch.library op."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

_NEXT = count(1)  # 0 stands for nothing
_ALIVE: WeakValueDictionary[int, object] = WeakValueDictionary()


def numbered(thing: object) -> int:
    """A number for ``thing`` in this process, which does not keep it alive."""
    number = next(_NEXT)
    _ALIVE[number] = thing
    return number


def of_number(number: int) -> object | None:
    """What ``number`` was given to; None for 0, and once it is gone."""
    return _ALIVE.get(number)
