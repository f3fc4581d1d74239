"""``results.json`` of ``bench suite``: one schema, checked on reading, so that a suite goes on from what it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels.strict import shown
from ..files import read_object
from .cases import Number

SCHEMA = "ringattn bench suite 1"
NAME = "results.json"
STATES = ("done", "failed", "cut short", "not here", "not run")
FINAL = ("done", "not here")  # asked again on the same machine, the answer would be the same

TEXT, COUNT, FLAG = (str,), (int, float), (bool,)
NOTHING = (type(None),)
TOP = {"schema": TEXT, "budget": COUNT, "provenance": (dict,), "cases": (list,)}
CASE = {
    "name": TEXT, "about": TEXT, "arguments": (dict,), "state": TEXT, "reason": TEXT, "seconds": COUNT,
    "numbers": (list,),
}  # fmt: skip
NUMBER = {"name": TEXT, "value": COUNT + NOTHING, "unit": TEXT, "labels": (dict,)}
NUMBER_OPTIONAL = {"limit": COUNT + NOTHING, "spread": COUNT + NOTHING, "note": TEXT, "fails": FLAG}
ABOUT = {
    "command": TEXT,
    "date": TEXT,
    "ringattn": (dict,),
    "versions": (dict,),
    "cpu": (dict,),
    "gpu": (dict, *NOTHING),
    "topology": (dict, *TEXT),
}
SAME = ("ringattn.sources", "versions", "cpu.model", "cpu.cores", "gpu.name", "gpu.driver")
"""What must be equal for two runs to be one: the code, the versions, the machine. Not clocks, loads and dates."""


class RefusedResults(ValueError):
    """A results file that is not one of this version's; the message has its path and the reason."""


def read(path: Path) -> dict[str, Any]:
    """A results file, every field of which has been looked at.

    Raises:
        RefusedResults: it cannot be read, is of another schema, or a field is missing, unknown or of another type.
    """
    try:
        check(data := read_object(path))
    except ValueError as error:
        raise RefusedResults(f"{path}: {error}") from None
    return data


def check(data: Mapping[str, Any]) -> None:
    """Refuse what is not a results file of this schema: ValueError that says where."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {shown(data.get('schema'))}: this version reads {SCHEMA!r}; run the suite again")
    fields("the file", data, TOP, {"seconds": COUNT})
    about = data["provenance"]
    fields("provenance", about, ABOUT, {"seconds": COUNT})
    names = []
    for place, case in enumerate(data["cases"]):
        where = f"cases[{place}]"
        fields(where, case, CASE)
        if case["state"] not in STATES:
            raise ValueError(f"{where}.state is {shown(case['state'])}: it must be one of {', '.join(STATES)}")
        for index, number in enumerate(case["numbers"]):
            fields(f"{where}.numbers[{index}]", number, NUMBER, NUMBER_OPTIONAL)
        names.append(case["name"])
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"there are two cases named {shown(min(twice))}")


def fields(
    where: str, found: Any, needed: Mapping[str, tuple[type, ...]], more: Mapping[str, tuple[type, ...]] | None = None
) -> None:
    """Refuse an object that has not all it needs, or something else, or another type: ValueError."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {_type(found)}: it must be an object")
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}")
    known = {**needed, **(more or {})}
    for name, value in found.items():
        if name not in known:
            raise ValueError(f"{where} has {shown(name)}, which is no field of {SCHEMA!r}")
        # a bool is an int to Python, and no number here
        if not isinstance(value, known[name]) or (isinstance(value, bool) and bool not in known[name]):
            takes = " or ".join(_name(kind) for kind in known[name])
            raise ValueError(f"{where}.{name} is {_type(value)}: it must be {takes}")


def _type(value: object) -> str:
    return _name(type(value))


def _name(kind: type) -> str:
    names = {str: "text", dict: "an object", list: "a list", int: "a number", float: "a number", bool: "true or false"}
    return names.get(kind, "null")


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
