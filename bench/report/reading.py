"""What a folder of results holds: a suite's results.json, timelines, and what single benches wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..doctor.command import SCHEMA as DOCTOR
from ..predict.rows import SCHEMA as PREDICTED
from ..predict.text import SCHEMA as PREDICTION
from ..predict.text import SWEEP_SCHEMA as MAP
from ..suite.result_file import NAME as RESULTS
from ..suite.result_file import SCHEMA as SUITE
from ..timeline.events import SCHEMA as TIMELINE
from ..timeline.events import Timeline, from_chrome
from ..tune.shown import SCHEMA as TUNE

PUT_ASIDE = "results_"  # of earlier code or of another machine: the suite puts them aside under such a name
BENCHES = {
    f"ringattn bench {kind} 1": kind for kind in ("links", "overlap", "ring", "memory", "kernels", "host", "timeline")
}
BENCHES |= {"ringattn bench ring 2": "ring", PREDICTED: "predicted"}
"""What single benches write, by schema."""
OTHERS = (PREDICTION, MAP, TUNE, DOCTOR)
"""What our other commands write: nothing is wrong with such a file, and there is no view for it."""
MOST_BYTES = 64 * 2**20  # of one file: more was not written by a bench


class Refused(ValueError):
    """A file that is not what it has to be; the message names it and says what it takes."""


@dataclass(frozen=True)
class Bench:
    """What one bench wrote."""

    file: str
    kind: str
    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What wrote it: its schema without the version."""
        return f"{self.file}: {self.data['schema'].rpartition(' ')[0]}"


@dataclass
class Folder:
    """Everything in a folder that the page is made of."""

    name: str
    suite: Mapping[str, Any] | None = None
    benches: list[Bench] = field(default_factory=list)
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # file and why
    unshown: list[tuple[str, str]] = field(default_factory=list)  # file and schema

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Of the suite, else of the first bench or timeline."""
        found = [self.suite] if self.suite is not None else [one.data for one in self.benches]
        found += [timeline.about for _, timeline in self.timelines]
        told = [one["provenance"] for one in found if one is not None and isinstance(one.get("provenance"), dict)]
        return told[0] if told else {}


def read(folder: Path) -> Folder:
    """Everything of a folder.

    Raises:
        Refused: there is no folder, or nothing in it, or its results.json is of another schema.
    """
    if not folder.is_dir():
        raise Refused(f"{folder} is no folder: it takes what `ringattn bench suite --out DIR` writes to")
    found = Folder(folder.absolute().name)
    for path in sorted(folder.glob("*.json")):
        if path.name == RESULTS:
            found.suite = _suite(_load(path))
            continue
        if path.name.startswith(PUT_ASIDE):
            continue
        try:
            _take(found, path.name, _load(path))
        except Refused as error:
            found.refused.append((path.name, str(error)))
    if found.suite is None and not found.benches and not found.timelines:
        told = "; ".join([*(why for _, why in found.refused), *(f"{name} is of {of}" for name, of in found.unshown)])
        raise Refused(
            f"{folder} holds no results: neither {RESULTS} nor what a bench wrote with --json. {told}".strip()
        )
    return found


def _load(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise Refused(f"{path.name} has {path.stat().st_size:,} bytes: at most {MOST_BYTES:,} are read")
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path.name} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refused(f"{path.name} is a JSON {type(data).__name__}: a result is an object with a schema")
    return data


def _take(found: Folder, name: str, data: Mapping[str, Any]) -> None:
    about = data.get("otherData")
    schema = about.get("schema") if isinstance(about, dict) else data.get("schema")
    if schema == TIMELINE:
        try:
            found.timelines.append((name, from_chrome(data)))
        except ValueError as error:
            raise Refused(f"{name}: {error}") from None
    elif isinstance(schema, str) and schema in BENCHES:
        found.benches.append(Bench(name, BENCHES[schema], data))
    elif schema in OTHERS:
        found.unshown.append((name, schema))
    else:
        taken = ", ".join(repr(one) for one in (*BENCHES, TIMELINE))
        raise Refused(f"{name}: schema is {schema!r}: this version reads {taken}")


def _suite(data: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = data.get("schema")
    if schema != SUITE:
        raise Refused(f"{RESULTS}: schema is {schema!r}: this version reads {SUITE!r}; run the suite again")
    _demand(data, RESULTS, {"provenance": dict, "cases": list})
    for number, case in enumerate(data["cases"]):
        where = f"{RESULTS}: cases[{number}]"
        _demand(case, where, {"name": str, "state": str, "reason": str, "numbers": list})
        for index, one in enumerate(case["numbers"]):
            _demand(one, f"{where}.numbers[{index}]", {"name": str, "unit": str})
    return data


def _demand(data: object, where: str, fields: Mapping[str, type]) -> None:
    if not isinstance(data, dict):
        raise Refused(f"{where} is {_kind(data)}: it must be an object")
    for name, kind in fields.items():
        if not isinstance(data.get(name), kind):
            raise Refused(f"{where}.{name} is {_kind(data.get(name))}: it must be {_kind(kind())}")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "missing", bool: "a truth value"}
    return names.get(type(value), "a number")
