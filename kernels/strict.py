"""JSON from anywhere, believed no more than it deserves: read without surprises, every value checked by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

MOST_DEPTH = 8  # the tables' format has 4
MOST_TEXT = 400

Check = Callable[[object], str | None]
"""What a value must be, where it is not that."""


def load_json(text: str) -> Any:
    """JSON without what Python adds to it (NaN, infinities), without a name twice, and not deep.

    Raises:
        ValueError: it is not that.
    """
    depth = 0
    for bracket in re.finditer(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])', text, re.DOTALL):
        depth += (bracket[1] is not None) - (bracket[2] is not None)
        if depth > MOST_DEPTH:
            raise ValueError(f"it nests deeper than {MOST_DEPTH}")
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_name_twice)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name is there twice in one object")
    return made


def checked_as(
    where: str, given: object, wanted: Mapping[str, Check], optional: Set[str] = frozenset()
) -> dict[str, Any]:
    """``given``, once it has the names in ``wanted``, ``optional`` ones or not, no other, and each passes its check."""
    if not isinstance(given, dict):
        raise ValueError(f"{where or 'it'} is {shown(given)}: it must be an object")
    if wrong := sorted(({*given} ^ {*wanted}) - (optional - {*given})):
        state = "is missing" if wrong[0] in wanted else "is not known"
        raise ValueError(f"{where + '.' if where else ''}{shown(wrong[0])[1:-1]} {state}")
    for name, check in ((name, wanted[name]) for name in given):
        if (needs := check(given[name])) is not None:
            raise ValueError(f"{where + '.' if where else ''}{name} is {shown(given[name])}: it must be {needs}")
    return dict(given)


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    if type(value) is int and value.bit_length() > 256:
        return "a huge number"  # Python refuses to print those
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(least: int, most: int) -> Check:
    good = range(least, most + 1)
    return lambda value: None if type(value) is int and value in good else f"a whole number from {least} to {most}"


def power_of_two(least: int, most: int) -> Check:
    def check(value: object) -> str | None:
        right = type(value) is int and least <= value <= most and value & (value - 1) == 0
        return None if right else f"a power of two from {least} to {most}"

    return check


def one_of(*words: object) -> Check:
    return lambda value: (
        None if type(value) in (str, int) and value in words else f"one of {', '.join(map(str, words))}"
    )


def text(pattern: str = r"[ -~]*", what: str = "") -> Check:
    """Printable ASCII: what is printed to a terminal must not be able to steer it."""
    return lambda value: (
        None
        if isinstance(value, str) and len(value) <= MOST_TEXT and re.fullmatch(pattern, value)
        else what or f"text of at most {MOST_TEXT} printable characters"
    )


def number(*, zero: bool = True) -> Check:
    """Finite and not negative."""

    def check(value: object) -> str | None:
        right = type(value) in (int, float) and 0 <= value < 1e300 and math.isfinite(value)  # type: ignore[operator, arg-type]
        return None if right and (zero or value) else f"a {'' if zero else 'positive '}finite number"

    return check


def optional(check: Check) -> Check:
    def checked(value: object) -> str | None:
        return None if value is None or (needs := check(value)) is None else f"{needs}, or null"

    return checked


def either(*checks: Check) -> Check:
    return lambda value: None if any(check(value) is None for check in checks) else str(checks[0](value))


def named(check: Check) -> Check:
    """A small flat object whose values pass ``check``."""

    def checked(value: object) -> str | None:
        if not isinstance(value, dict) or len(value) > 32:
            return "an object of at most 32 values"
        wrong: Iterator[str] = (needs for one in value.values() if (needs := check(one)) is not None)
        return next(wrong, None) if all(text()(name) is None for name in value) else "an object of short names"

    return checked
