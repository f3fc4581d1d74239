"""``results.json`` of ``bench suite``: one schema, checked on reading, so that a suite goes on from what it holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels.strict import checked_as, either, one_of, optional, shown, typed
from ..common.files import read_object
from .cases import Number

SCHEMA = "ringattn bench suite 1"
NAME = "results.json"
STATES = ("done", "failed", "cut short", "not here", "not run")
FINAL = ("done", "not here")  # asked again on the same machine, the answer would be the same

TEXT, COUNT, FLAG = typed("text", str), typed("a number", int, float), typed("true or false", bool)
OBJECT, LIST = typed("an object", dict), typed("a list", list)
TOP = {"schema": TEXT, "budget": COUNT, "provenance": OBJECT, "cases": LIST, "decisions": LIST, "seconds": COUNT}
CASE = {
    "name": TEXT, "about": TEXT, "arguments": OBJECT, "state": one_of(*STATES), "reason": TEXT, "seconds": COUNT,
    "numbers": LIST, "time_slices": FLAG,
}  # fmt: skip
NUMBER = {
    "name": TEXT, "value": optional(COUNT), "unit": TEXT, "labels": OBJECT, "limit": optional(COUNT),
    "spread": optional(COUNT), "note": TEXT, "fails": FLAG,
}  # fmt: skip
ABOUT = {
    "command": TEXT,
    "date": TEXT,
    "ringattn": OBJECT,
    "versions": OBJECT,
    "cpu": OBJECT,
    "gpu": optional(OBJECT),
    "topology": either(OBJECT, TEXT),
    "seconds": COUNT,
}
SAME = ("ringattn.sources", "versions", "cpu.model", "cpu.cores", "gpu.name", "gpu.driver")
"""What must be equal for two runs to be one: the code, the versions, the machine. Not clocks, loads and dates."""


def read(path: Path) -> dict[str, Any]:
    """A results file, every field of which has been looked at.

    Raises:
        ValueError: it cannot be read, is of another schema, or a field is missing, unknown or of another type.
    """
    try:
        check(data := read_object(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return data


def check(data: Mapping[str, Any]) -> None:
    """Refuse what is not a results file of this schema: ValueError that says where."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {shown(data.get('schema'))}: this version reads {SCHEMA!r}; run the suite again")
    checked_as("", data, TOP, {"seconds", "decisions"})
    checked_as("provenance", data["provenance"], ABOUT, {"seconds"})
    for place, case in enumerate(data["cases"]):
        checked_as(where := f"cases[{place}]", case, CASE, {"time_slices"})
        for index, number in enumerate(case["numbers"]):
            checked_as(f"{where}.numbers[{index}]", number, NUMBER, {"limit", "spread", "note", "fails"})
    for place, row in enumerate(data.get("decisions", ())):
        checked_as(f"decisions[{place}]", row, dict.fromkeys(("question", "answer", "why"), TEXT))
    for name, count in Counter(case["name"] for case in data["cases"]).items():
        if count > 1:
            raise ValueError(f"there are {count} cases named {shown(name)}")


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What keeps two provenances from being of one run."""
    told = []
    for path in SAME:
        a, b = _at(mine, path), _at(theirs, path)
        if a != b:
            told.append(f"{path} {_short(b)} there, {_short(a)} here")
    return told


def _at(found: Any, path: str) -> Any:
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    # what JSON makes of it
    return json.loads(json.dumps(found))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def numbers_of(case: Mapping[str, Any]) -> list[Number]:
    """The numbers of a case as they were when they were measured."""
    kept = ("name", "value", "unit", "labels", "limit", "spread", "note")
    return [Number(**{key: one[key] for key in kept if key in one}) for one in case["numbers"]]


def finished(data: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a case that need not run again: it ended by itself, nothing failed, and it is the same case."""
    for case in data["cases"]:
        same = case["arguments"] == json.loads(json.dumps(dict(arguments)))
        if case["name"] == name and same and case["state"] in FINAL:
            return None if any(one.get("fails") for one in case["numbers"]) else dict(case)
    return None


def others(data: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The records of cases that are not among these."""
    return [case for case in data["cases"] if case["name"] not in names]
