"""Result files and timelines as the commands write them, hostile variants, and a parser for report pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

from ringattn.bench.common.result import Result, Row
from ringattn.bench.timeline.events import Event, Timeline, as_chrome

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> javascript:alert(3) $\\frac{ {{ 7*7 }} --> ]]> & é"

CALL = {"seqlen": 64, "world": 2, "heads": 2, "kv_heads": 2, "head_dim": 16, "layout": "zigzag", "causal": True}
"""Description of the call in a timeline."""
PROVENANCE = {
    "command": "ringattn bench suite", "date": "2026-01-02", "cpu": {"model": "a CPU", "cores": 2}, "gpu": None,
    "ringattn": {}, "versions": {"torch": "2"}, "topology": {},
}  # fmt: skip


def result(case: str, units: dict[str, str], rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """Return the JSON of a command's result file."""
    return Result(case, units, [*rows], provenance={**PROVENANCE, "command": f"ringattn {case}"}, **more).as_json()


def suite() -> dict[str, Any]:
    """Return a suite result with one passing part, and one that fails by a number."""
    wrong = "error of dq (dtype float16) is 2.0, at most 1 allowed"
    rows = [
        {"part": part, "state": state, "seconds": 9.5, "found": outcome, "command": "python"}
        for part, state, outcome in (("speed", "done", "3 rows"), ("right", "failed", wrong))
    ]
    units = {"part": "", "state": "", "seconds": "s", "found": "", "command": ""}
    return result("bench suite", units, rows, failed=[f"right: {wrong}"])


def kernels() -> dict[str, Any]:
    """Return a kernel benchmark: rates of two contenders at three lengths, and an error with its limit."""
    units = dict.fromkeys(("number", "value", "unit", "seqlen", "by", "limit", "note"), "")
    rows: list[dict[str, Any]] = [
        {"number": "forward", "value": 90.0 * k * k, "unit": "TFLOP/s", "seqlen": 1024 * k, "by": by}
        for k in (1, 2, 4)
        for by in ("ringattn", "flash")
    ]
    rows.append({"number": "error of dq", "value": 0.5, "unit": "absolute", "by": "ringattn", "limit": 1.0})
    return result("bench kernels", units, rows)


def links() -> dict[str, Any]:
    """Return bandwidths of two edges at two sizes."""
    units = {"transport": "", "way": "", "edge": "", "size": "bytes", "busbw": "GB/s"}
    values = (("0->1", 1 << 16, 1.0), ("1->0", 1 << 16, 2.0), ("0->1", 1 << 20, 9.0), ("1->0", 1 << 20, 8.0))
    rows = [dict(zip(units, ("nccl", "one way", *value_row), strict=True)) for value_row in values]
    return result("bench links", units, rows, notes=["nccl_one_sided does not open here: device is cpu"])


def memory() -> dict[str, Any]:
    rows = [{"world": world, "peak": 3.0 * world} for world in (2, 4)]
    failed = ["memory per rank differs by 33.3% between worlds, 2% allowed"]
    return result("bench memory", {"world": "", "peak": "MB"}, rows, failed=failed)


def timeline(source: str, *, slower: float = 1.0, name: str = "K/V of 1") -> Timeline:
    """Return a timeline of two ranks with one hop each way, a wait and a slot."""
    bars = [
        ("compute", 0, 0.0, 0.4, ""),
        ("send", 0, 0.0, 0.3, "K/V of 0"),
        ("receive", 0, 0.0, 0.3, name),
        ("slot 1", 1, 0.0, 0.9, name),
        ("wait", 1, 0.4, 0.5, ""),
        ("compute", 1, 0.5, 0.9, ""),
    ]
    events = tuple(
        Event(rank, lane, phase, hop, (start + begin) * slower, (start + end) * slower, what, 1 << 20)
        for rank, (phase, start) in product((0, 1), (("forward", 0.0), ("backward", 1.0)))
        for lane, hop, begin, end, what in bars
    )
    return Timeline("causal, zigzag, 64 tokens", source, 2, events, {"call": CALL, "provenance": PROVENANCE})


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    for stem, data in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(data))
    return folder


def all_result_files() -> dict[str, Any]:
    """Return one result file of every kind."""
    return {
        "results": suite(),
        "kernels": kernels(),
        "links": links(),
        "memory": memory(),
        "measured": as_chrome(timeline("measured")),
        "predicted": as_chrome(timeline("predicted", slower=0.9)),
    }


# Keys and values that readers interpret; every other string may be anything.
KEPT_KEYS = ("schema", "ph", "state", "source", "layout", "units", "unit")
KEPT_VALUES = ("process_name", "thread_name", "compute", "wait", "send", "receive", "slot 1")


def taint_strings(data: Any, key: str = "") -> Any:
    """Append a hostile suffix to every string, and to the keys of the provenance."""
    if isinstance(data, dict):
        if key in KEPT_KEYS:
            return data
        return {
            name + HOSTILE * (key in ("versions", "cpu")): taint_strings(value, name) for name, value in data.items()
        }
    if isinstance(data, list):
        return [taint_strings(value, key) for value in data]
    if isinstance(data, str) and key not in KEPT_KEYS and data not in KEPT_VALUES:
        return data + HOSTILE
    return data


class Outline(HTMLParser):
    """Parser that lists every element with its attributes, and the text by tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self._open[-1] if self._open else "", []).append(data)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]
