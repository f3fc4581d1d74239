"""What ``bench links`` prints: the columns and closing lines of nccl-tests, so that what reads those reads these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..common.tables import table
from .runs import Beside, Row

TYPE, NO_REDUCTION, NO_ROOT = "uint8", "none", "-1"
NOT_IN_PLACE = ("N/A", "N/A", "N/A", "N/A")  # a send and a receive need two buffers
WIDTHS = (12, 12, 8, 6, 6, 7, 6, 6, 6, 7, 6, 6, 6)  # of nccl-tests
NAMES = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
UNITS = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
HEADER = (*("",) * 5, "out-of-place", *("",) * 3, "in-place", *("",) * 3)


def block(rows: Sequence[Row]) -> str:
    """The rows of one transport, its limits and one way: title, header, a row per size and edge, closing lines."""
    first = rows[0]
    title = f"# {first.transport}, {first.way}{limits_text(first.channels, first.ctas)}"
    lines = [title, "#", *map(_commented, (HEADER, NAMES, UNITS)), *map(line, rows), *closing(rows), "#"]
    return "\n".join(lines)


def limits_text(channels: int | None, ctas: int | None) -> str:
    """What the transport was held to; nothing where it chose by itself."""
    told = [f"{name} {count}" for name, count in (("channels", channels), ("ctas", ctas)) if count is not None]
    return "".join(f", {text}" for text in told)


def line(row: Row) -> str:
    """One row; the edge comes after the columns of nccl-tests."""
    rate = fitted(row.gigabytes_per_second, 6)
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    told = (fitted(row.seconds * 1e6, 7), rate, rate, wrong)
    cells = (str(row.nbytes), str(row.nbytes), TYPE, NO_REDUCTION, NO_ROOT, *told, *NOT_IN_PLACE)
    return f"{_aligned(cells)}  {row.edge}"


def closing(rows: Iterable[Row]) -> list[str]:
    """How many bytes were wrong, and the mean of all bandwidths."""
    rows = list(rows)
    wrong = sum(row.wrong or 0 for row in rows)
    mean = sum(row.gigabytes_per_second for row in rows) / len(rows)
    return [
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {mean:g} ",
    ]


def fitted(value: float, width: int) -> str:
    """A number with as many decimals as nccl-tests leaves it in so many characters."""
    digits = len(str(int(value))) if value >= 1 else 0
    for decimals, room in ((2, width - 2), (1, width - 1), (0, width + 1)):
        if digits < room:
            return f"{value:.{decimals}f}"
    return f"{value:.{1 if width >= 7 else 0}e}"


def beside_table(rows: Sequence[Beside]) -> str:
    """A row per transport, limits, way and edge: what the transfer and the compute beside it cost each other."""
    told = [
        {
            "transport": f"{row.transport}{limits_text(row.channels, row.ctas)}",
            "way": row.way,
            "edge": row.edge,
            "size": row.nbytes,
            "compute": row.compute,
            "compute ms": None if row.alone is None else row.alone * 1e3,
            "compute slowed": "n/a" if row.compute_slowdown is None else f"{row.compute_slowdown:.2f}x",
            "transfer slowed": "n/a" if row.transfer_slowdown is None else f"{row.transfer_slowdown:.2f}x",
            "": row.note,
        }
        for row in rows
    ]
    return table(told, title="transfers beside compute: time together over time alone, slowest end")


def _commented(cells: Sequence[str]) -> str:
    # the mark takes the place of the first column's two leading blanks
    return "# " + _aligned(cells)[2:].rstrip()


def _aligned(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
