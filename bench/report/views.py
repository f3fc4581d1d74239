"""What single benches wrote, a view per kind: their rows, what they say in words, and what of them failed.

What fails here is what ends the command itself with exit code 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from ..common.flags import human
from ..links.command import EVERY
from ..links.runs import REGISTERED
from ..memory import ALLOWED_SPREAD
from ..predict.rows import ALLOWED, Row
from ..ring.candidates import OURS
from ..ring.rows import absences, crossovers, from_json, rows_of
from .reading import Bench
from .rows import (
    Table,
    cell,
    finite,
    labels_of,
    layout_of,
    mapping_of,
    mappings_of,
    median,
    number_failures,
    number_table,
    percent,
    percent_off,
    ring_runs,
    table,
)

Data = Mapping[str, Any]
Rows = list[dict[str, object]]


class View(NamedTuple):
    """What of one kind is shown."""

    holds: str  # what its numbers are listed under
    tables: Callable[[str, Data], list[Table | None]]
    failures: Callable[[Data], Iterable[str]] = lambda data: ()
    words: Callable[[Data], Iterable[str]] = lambda data: ()


def tables(bench: Bench) -> list[Table]:
    """Every row that a bench wrote, with its words above the first table; none where it is not as benches write."""
    view = VIEWS[bench.kind]
    try:
        words = tuple(view.words(bench.data))
        shown = [one for one in view.tables(bench.title, bench.data) if one is not None]
    except Exception:  # which is a failure, and told as one
        return []
    return [shown[0]._replace(above=words), *shown[1:]] if shown else []


def failures(bench: Bench) -> list[str]:
    """What of a bench failed, in a line each; also that it holds nothing, or not what such a bench writes."""
    view = VIEWS[bench.kind]
    listed = ring_runs(bench.data) if bench.kind == "ring" else mappings_of(bench.data.get(view.holds))
    if not listed:
        return [f"it holds no {view.holds}"]
    try:
        view.tables(bench.title, bench.data)
        return list(view.failures(bench.data))
    except Exception as error:  # text where a number belongs, no time at all, and whatever else a file may say
        return [f"it is not as {bench.data['schema']} is written: {type(error).__name__}: {error}"[:300]]


def _one(rows: Callable[[Data], Rows]) -> Callable[[str, Data], list[Table | None]]:
    return lambda caption, data: [table(caption, rows(data))]


def _ring_tables(caption: str, data: Data) -> list[Table | None]:
    """The columns of the bench itself; what every result errs by, in a table of its own, for paper is not wider."""
    times: Rows = []
    results: Rows = []
    for report, run in zip(from_json(data), ring_runs(data), strict=True):
        told = {str(one.get("name")): one for one in mappings_of(run.get("candidates"))}
        for row, (name, one) in zip(rows_of(report), report.found.items(), strict=True):
            who = {"layout": layout_of(run, told[name]), "by": row.pop("")}
            who = {"world": row.pop("world"), "tokens": row.pop("tokens"), **who}
            agrees = cell(row.pop("agrees"), wrong=bool(one.disagrees))
            del row["error"]  # the largest of the results'
            counted = told[name].get("counted_bytes")
            more = {
                "compute ms": None if one.compute is None else one.compute * 1e3,
                "counted MB": counted / 1e6 if finite(counted) else None,
            }
            times.append({**who, **row, **more})
            errors = {f"error of {result}": error for result, error in one.errors.items()}
            results.append({**who, **errors, "agrees": agrees})
    return [table(caption, times), table(f"{caption}, errors against float64", results)]


def _ring_words(data: Data) -> Iterator[str]:
    reports = from_json(data)
    yield from map(str, crossovers(reports))
    yield from absences(reports)


def _ring_failures(data: Data) -> Iterator[str]:
    for report in from_json(data):
        for name, one in report.found.items():
            if one.disagrees and one.trusted:
                results = ", ".join(one.disagrees)
                where = f"{report.problem.world} ranks, {report.problem.seqlen} tokens"
                yield f"{name}, {where}: {results} differ from PyTorch's by more than rounding"


def _links_tables(caption: str, data: Data) -> list[Table | None]:
    beside = table(f"{caption}, transfers beside compute", mappings_of(data.get("beside")))
    return [table(caption, _links_rows(data)), beside]


def _links_rows(data: Data) -> Rows:
    told = ({name: value for name, value in one.items() if name != "ends"} for one in mappings_of(data.get("links")))
    return [{**one, "wrong": cell(one.get("wrong"), wrong=one.get("wrong") not in (0, None))} for one in told]


def _links_words(data: Data) -> Iterator[str]:
    for one in mappings_of(data.get("closed")):
        yield f"{one.get('transport')} does not open here: {one.get('reason')}"


def _links_failures(data: Data) -> Iterator[str]:
    wrong: Counter[str] = Counter()
    for row in mappings_of(data.get("links")):
        if finite(row.get("wrong")):
            wrong[str(row.get("transport"))] += row["wrong"]
    yield from (f"{name}: {count:,} bytes did not arrive as they left" for name, count in wrong.items() if count)
    asked = mapping_of(data.get("asked"))
    named = asked.get("transports")
    # all of them, or all that a CUDA graph can hold: not asked for by name
    if isinstance(named, list) and named != list(EVERY) and not asked.get("graphs"):
        closed = [one for one in mappings_of(data.get("closed")) if str(one.get("transport")).split(",")[0] in named]
        closed = [one for one in closed if not str(one.get("transport")).endswith(REGISTERED)]  # nobody asked for it
        yield from (f"{one.get('transport')} was asked for and does not open: {one.get('reason')}" for one in closed)


def _overlap_rows(data: Data) -> Rows:
    """Medians; a ring that takes longer than its bound is marked."""
    rows = mappings_of(data.get("rows"))
    # what cannot be has a note in the place of all others
    names = [name for name in dict.fromkeys(name for one in rows for name in one) if name not in ("within", "note")]
    return [
        {
            **{name: median(one.get(name)) for name in names},
            "spread": percent(mapping_of(one.get("together")).get("spread")),
            "within": cell(one.get("within"), wrong=one.get("within") is False),
            "note": one.get("note"),
        }
        for one in rows
    ]


def _overlap_words(data: Data) -> Iterator[str]:
    if data.get("verdict"):
        yield str(data["verdict"])
    speed = data.get("bytes_per_second")
    throttled = f", throttled to {human(speed, 'B/s')}" if finite(speed) else ""
    yield f"Over {data.get('transport')}{throttled}. Times are in seconds; marked is what takes longer than its bound."


def _memory_rows(data: Data) -> Rows:
    return [
        {
            "world": one.get("world"),
            "rank": rank,
            "forward bytes": told.get("forward"),
            "bytes": told.get("backward"),
            **{f"of that {name}": count for name, count in mapping_of(told.get("named")).items()},
        }
        for one in mappings_of(data.get("worlds"))
        for rank, told in enumerate(mappings_of(one.get("ranks")))
    ]


def _memory_words(data: Data) -> Iterator[str]:
    if finite(data.get("spread")):
        yield f"largest over smallest world: {data['spread']:+.2%}, {ALLOWED_SPREAD:.0%} allowed"


def _memory_failures(data: Data) -> Iterator[str]:
    spread = data.get("spread")
    if not finite(spread):
        raise ValueError(f"spread is {spread!r}: it must be a number")
    if spread > ALLOWED_SPREAD:
        yield f"memory per rank differs by {spread:.1%} between worlds, {ALLOWED_SPREAD:.0%} allowed"


def _kernels_tables(caption: str, data: Data) -> list[Table | None]:
    return [number_table(caption, mappings_of(data.get("numbers")))]


def _kernels_failures(data: Data) -> Iterator[str]:
    numbers = mappings_of(data.get("numbers"))
    yield from number_failures(numbers)
    for one in numbers:
        if one.get("name") == "not there" and labels_of(one).get("by") == OURS:
            of = ", ".join(f"{name} {value}" for name, value in labels_of(one).items())
            yield f"not there ({of}): {one.get('note')}"


def _host_rows(data: Data) -> Rows:
    told = mappings_of(data.get("rows"))
    return [{**one, "hidden": cell(one.get("hidden"), wrong=one.get("hidden") is False)} for one in told]


def _host_failures(data: Data) -> Iterator[str]:
    for one in mappings_of(data.get("rows")):
        if one.get("hidden") is False:
            yield f"{one.get('phase')}: the host needs longer to post a hop than the device to compute it"


def _timeline_rows(data: Data) -> Rows:
    return [dict(one) for one in mappings_of(data.get("ranks"))]


def _timeline_words(data: Data) -> Iterator[str]:
    if finite(data.get("seconds")):
        yield f"{data.get('title')}: {data['seconds'] * 1e3:,.4g} ms"
    if finite(data.get("clock_error")):
        yield f"clocks of the ranks agree to {data['clock_error']:.1e} s"


def _predicted_rows(data: Data) -> Rows:
    return [
        {**row, "off, %": cell(percent_off(row), wrong=not checked.is_right)}
        for row, checked in zip(mappings_of(data.get("rows")), _checked(data), strict=True)
    ]


def _predicted_words(data: Data) -> Iterator[str]:
    rows = _checked(data)
    yield f"{sum(row.is_right for row in rows)} of {len(rows)} within {ALLOWED:.0%} plus the spread"


def _predicted_failures(data: Data) -> Iterator[str]:
    for row in _checked(data):
        if not row.is_right:
            off = f"off by {row.off:+.1%}, at most {ALLOWED + row.spread:.1%} allowed"
            yield f"{row.layout}, {row.mask}, {row.shown()['seqlen']} tokens: {off}"


def _checked(data: Data) -> list[Row]:
    """The rows of a check, which know themselves whether they are right."""
    return [Row(**{one.name: row[one.name] for one in fields(Row)}) for row in mappings_of(data.get("rows"))]


VIEWS = {
    "links": View("links", _links_tables, _links_failures, _links_words),
    "overlap": View("rows", _one(_overlap_rows), words=_overlap_words),
    "ring": View("measurements", _ring_tables, _ring_failures, _ring_words),
    "memory": View("worlds", _one(_memory_rows), _memory_failures, _memory_words),
    "kernels": View("numbers", _kernels_tables, _kernels_failures),
    "host": View("rows", _one(_host_rows), _host_failures),
    "timeline": View("ranks", _one(_timeline_rows), words=_timeline_words),
    "predicted": View("rows", _one(_predicted_rows), _predicted_failures, _predicted_words),
}
"""By the kind of :data:`.reading.BENCHES`."""
