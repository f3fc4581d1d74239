"""Files and JSON from anywhere, believed no more than they deserve: read without surprises, values checked by name."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

MOST_DEPTH = 8  # the tables' format has 4
MOST_DIGITS = 300  # a whole number of more is no float
MOST_TEXT = 400
NO_FILE = "it is no regular file"

Check = Callable[[object], str | None]
"""What a value must be, where it is not that."""


def regular_file(path: Path, mode: str = "rb", flags: int = os.O_RDONLY, permissions: int = 0o666) -> BinaryIO:
    """``open`` for what a user names, with flags of ``os.open``; what it opens to write is no link to another file.

    Raises:
        ValueError: it is no regular file: a FIFO waits for its other end, a device may never end.
        OSError: it cannot be opened.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:  # not blocking: opening a FIFO would wait for its other end
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, permissions)
    except OSError as error:
        if flags & os.O_NOFOLLOW and os.path.islink(path):
            raise ValueError("it is a symbolic link, and what it points to is not written") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a FIFO that nobody reads, a folder
            raise ValueError(NO_FILE) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(NO_FILE)
    return open(descriptor, mode)  # type: ignore[return-value]


def read_text(path: Path, most_bytes: int, errors: str = "strict") -> str:
    """The text of a regular file of at most ``most_bytes``.

    Raises:
        ValueError: it is something else, larger, or not in UTF-8.
        OSError: it cannot be read.
    """
    with regular_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise ValueError(f"it has {size:,} bytes: at most {most_bytes:,} are read")
        data = file.read(most_bytes + 1)  # it may have grown, and some of the system's own say no size
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return data.decode(errors=errors)


def load_json(text: str, most_depth: int = MOST_DEPTH) -> Any:
    """JSON without what Python adds to it (NaN, infinities, lone surrogates), without a name twice, and not deep.

    Raises:
        ValueError: it is not that, or has a number that no float is near to.
    """
    try:
        made = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_no_name_twice
        )
    except RecursionError:
        raise ValueError(f"it nests deeper than {most_depth}") from None
    level = [made]
    for _ in range(most_depth):
        level = [one for held in level for one in _inside(held)]
    if any(isinstance(one, dict | list) for one in level):
        raise ValueError(f"it nests deeper than {most_depth}")
    if "\\u" in text:
        json.dumps(made, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    return made


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits[:20]} is not a finite number")
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits: at most {MOST_DIGITS} are read")
    return int(digits)


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
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def typed(what: str, *kinds: type) -> Check:
    """Of one of these types, and of no other that inherits from it."""
    return lambda value: None if type(value) in kinds else what


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
