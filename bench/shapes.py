"""The shape flags that commands share: sizes like ``8k``, and lists of them."""

from __future__ import annotations

import re
from enum import StrEnum

import typer

SUFFIXES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class LayoutName(StrEnum):
    """Layouts that have a name: equal shards."""

    contiguous = "contiguous"
    zigzag = "zigzag"
    striped = "striped"


def size(text: str) -> int:
    """``8192``, ``8k``, ``1m`` or ``2g`` (powers of 1024) as a number; a parser of typer options.

    Raises:
        typer.BadParameter: anything else.
    """
    match = re.fullmatch(r"(\d+)([kmg]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size: it must be a whole number, with k, m or g behind it or not")
    return int(match[1]) * SUFFIXES[match[2]]


def sizes(text: str) -> list[int]:
    """A comma list of sizes, as in ``8k,32k``; a parser of typer options.

    Raises:
        typer.BadParameter: one of them is not a size.
    """
    return [size(part) for part in text.split(",")]


def human(count: float, unit: str = "") -> str:
    """A count in decimal thousands, three digits: ``67.1 MB``, ``1.02 T``; whole numbers below a thousand."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    power = 0
    while count >= 999.5 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 else 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {prefixes[power]}{unit}".rstrip()


def binary(count: int) -> str:
    """A count of tokens the way it is typed: ``8k``, ``1m``, and ``1000`` where no suffix divides it."""
    for suffix, unit in (("m", 1024**2), ("k", 1024)):
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def grouped(heads: int, kv_heads: int | None) -> int:
    """The number of key/value heads that ``--heads`` and ``--kv-heads`` mean: as many as query heads where left out.

    Raises:
        typer.BadParameter: the query heads are not a multiple of them.
    """
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise typer.BadParameter(f"--kv-heads is {kv_heads}: --heads, {heads}, must be a multiple of it")
    return kv_heads
