"""Rows of a result, as a table on the terminal and as columns of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, object]


def table(rows: Sequence[Row], *, title: str = "") -> str:
    """Rows of the same keys as aligned text: numbers to the right, words to the left, the keys on top."""
    if not rows:
        return title
    keys = list(rows[0])
    cells = [[_cell(row[key]) for key in keys] for row in rows]
    right = [all(isinstance(row[key], int | float | None) for row in rows) for key in keys]
    widths = [max(map(len, column)) for column in zip(keys, *cells, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if push else text.ljust(width)
            for text, width, push in zip(line, widths, right, strict=True)
        )
        for line in (keys, *cells)
    ]
    return "\n".join(filter(None, [title, *(line.rstrip() for line in lines)]))


def _cell(value: object) -> str:
    """Four digits of a number; nothing for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
