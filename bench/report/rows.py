"""Tables of a page: what a results file says, as cells of text with what they sort by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from ..common.memory_table import OURS
from ..suite.result_file import NAME as RESULTS

LONGEST = 400  # characters of a cell: what a file says may be anything
MOST = 1e150
WRONG = "wrong"


@dataclass(frozen=True)
class Cell:
    """What a table shows, and what it sorts by."""

    text: str
    key: str  # a number as Python writes it, or text
    flag: str = ""  # WRONG: it is marked


class Table(NamedTuple):
    """A caption, the names of columns, and cells; ``numeric`` columns stand to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    above: Sequence[str] = ()  # sentences

    @property
    def numeric(self) -> list[bool]:
        """Of each column whether every cell that says something is a number."""
        return [all(is_number(row[i].key) for row in self.rows if row[i].text) for i in range(len(self.columns))]


def finite(value: object) -> TypeGuard[float]:
    """A number that can be drawn: no NaN, no truth value, none so large that its square is infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def is_number(key: str) -> bool:
    try:
        return math.isfinite(float(key))
    except ValueError:
        return False


def cell(value: object, *, wrong: bool = False) -> Cell:
    """Four digits of a number; words as they are, cut where they are very long; nothing for None."""
    flag = WRONG if wrong else ""
    if value is None:
        return Cell("", "", flag)
    if isinstance(value, bool):
        return Cell("yes" if value else "no", str(int(value)), flag)
    if isinstance(value, int):
        return Cell(f"{value:,}", str(value), flag)
    if isinstance(value, float):
        return Cell(f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}", repr(value), flag)
    text = value if isinstance(value, str) else plain(value)
    text = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    return Cell(text, text, flag)


def plain(value: object) -> str:
    """Anything that JSON holds, in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(one)}" for key, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(one) for one in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def table(caption: str, rows: Iterable[Mapping[str, object]]) -> Table | None:
    """A table of rows whose keys may differ, of values or cells; None where there are no rows."""
    rows = list(rows)
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    if not columns:
        return None
    return Table(caption, columns, [[_celled(row.get(name)) for name in columns] for row in rows])


def _celled(value: object) -> Cell:
    return value if isinstance(value, Cell) else cell(value)


def number_table(caption: str, numbers: Sequence[Mapping[str, Any]]) -> Table | None:
    """The numbers of a case or of `bench kernels`; what exceeds its limit is marked."""
    labels = list(dict.fromkeys(key for one in numbers for key in labels_of(one)))
    limited = [name for name in ("limit", "spread", "note") if any(one.get(name) is not None for one in numbers)]
    rows = []
    for one in numbers:
        wrong = bool(one.get("fails"))
        spread = one.get("spread")
        told = {"limit": one.get("limit"), "spread": percent(spread), "note": one.get("note")}
        shown = [one.get("name"), *(labels_of(one).get(name) for name in labels)]
        rows.append(
            [
                *(cell(value) for value in shown),
                cell(one.get("value"), wrong=wrong),
                cell(one.get("unit")),
                *(cell(told[name]) for name in limited),
            ]
        )
    columns = ["number", *labels, "value", "unit", *limited]
    return Table(caption, columns, rows) if rows else None


def percent(share: object) -> str | None:
    """``±1.2%``; None where it is no number."""
    return f"±{share:.1%}" if isinstance(share, int | float) and not isinstance(share, bool) else None


def labels_of(number: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a number says that it is of."""
    labels = number.get("labels")
    return labels if isinstance(labels, dict) else {}


def failing(case: Mapping[str, Any]) -> list[str]:
    """What is wrong with a case, in a line each; nothing where all is well."""
    told = []
    if case["state"] == "failed":
        last = case["reason"].strip().splitlines()
        told.append(last[-1] if last else "it failed and did not say why")
    return told + number_failures(case["numbers"])


def number_failures(numbers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The numbers that exceed their limit, or are missing where they were demanded."""
    told = []
    for one in numbers:
        if one.get("fails"):
            of = ", ".join(f"{name} {value}" for name, value in labels_of(one).items())
            told.append(f"{one.get('name')} ({of}) is {one.get('value')}, at most {one.get('limit')} allowed")
    return told


def case_rows(cases: Sequence[Mapping[str, Any]]) -> Table | None:
    """How every case ended: of the numbers with a limit, how many hold."""
    rows = []
    for case in cases:
        limited = [one for one in case["numbers"] if one.get("limit") is not None]
        wrong = bool(failing(case))
        held = f"{sum(not one.get('fails') for one in limited)}/{len(limited)}" if limited else ""
        state = "failed" if wrong else case["state"]
        shown = [cell(case["name"]), cell(state, wrong=wrong), cell(case.get("seconds")), cell(held)]
        rows.append([*shown, cell(case.get("about"))])
    columns = ["case", "state", "seconds", "checks", "about"]
    return Table(f"Every case of {RESULTS}, in the order in which they ran", columns, rows) if rows else None


def percent_off(row: Mapping[str, Any]) -> float | None:
    """How far a prediction lies above what was measured; None where either is no number that says so."""
    told, seconds = row.get("predicted"), row.get("measured")
    return 100 * (told / seconds - 1) if finite(told) and finite(seconds) and seconds > 0 else None


def ring_runs(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The measurements of `bench ring`, each a problem and who did it: one in schema 1, several in schema 2."""
    return mappings_of(data["measurements"]) if "measurements" in data else [data]


def world_of_check(data: Mapping[str, Any]) -> object:
    """The ranks that a check of the predictor was of; None where the file does not say it.

    Files of before they said it: where a link was measured, the ranks were processes, one per core.
    """
    of_processes = mapping_of(mapping_of(data.get("provenance")).get("cpu")).get("cores") if "link" in data else None
    return data.get("world", of_processes)


def ours(name: object) -> str | None:
    """The layout of a candidate of ours, by its name: "striped" of "ringattn striped"."""
    first, _, layout = str(name).partition(" ")
    return layout or None if first == OURS else None


def layout_of(run: Mapping[str, Any], candidate: Mapping[str, Any]) -> str | None:
    """The layout of a candidate of `bench ring`; None of those that are no ring of ours."""
    name = candidate.get("name")
    told = candidate.get("layout", mapping_of(run.get("problem")).get("layout") if name == OURS else ours(name))
    return told if isinstance(told, str) else None


def median(value: object) -> object:
    """The median of samples, where it is that."""
    return value.get("median") if isinstance(value, dict) and "median" in value else value


def mapping_of(value: object) -> Mapping[str, Any]:
    """An object of JSON; an empty one in the place of anything else."""
    return value if isinstance(value, dict) else {}


def mappings_of(value: object) -> list[Mapping[str, Any]]:
    """The objects of a list of JSON; none in the place of anything else."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
