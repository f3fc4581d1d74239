"""Folders of results for the tests of the report: a whole one, and one whose every string is hostile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.timing import Samples
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.timelines import said
from ringattn.bench.ring.candidates import OURS, WHOLE
from ringattn.bench.ring.rows import as_json
from ringattn.bench.ring.runs import Report, Result
from ringattn.bench.timeline.events import Event, Timeline, as_chrome

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> javascript:alert(3) $\\frac{ {{ 7*7 }} --> ]]> & é"

PROBLEM = AttentionConfig(64, 2, heads=2, kv_heads=2, head_dim=16)
CALL = asdict(PROBLEM)
"""What a measured timeline and `bench ring` say of their call."""
PREDICTED = Call(32, 2, heads=2, kv_heads=2, head_dim=16, dtype="float32")
"""The same call, as the predictor has it."""
PROVENANCE = {
    "command": "ringattn bench suite", "date": "2026-01-02", "cpu": {"model": "a CPU", "cores": 2}, "gpu": None,
    "ringattn": {}, "versions": {"torch": "2"}, "topology": {},
}  # fmt: skip


def number(name: str, value: float | None, unit: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "labels": {}, **more}


def ring_report(problem: AttentionConfig = PROBLEM, layouts: Sequence[str] = ("zigzag",)) -> Report:
    """What `bench ring` knows of a problem: one device in 6 s, every layout in 4, Ulysses in 3."""

    def result(kind: str, seconds: float) -> Result:
        return Result(kind, Samples((seconds,)), {"out": 1e-6}, [], True, None, None, 1 << 20)

    ours = {f"{OURS} {layout}": result(OURS, 4.0) for layout in layouts}
    return Report(problem, {WHOLE: result(WHOLE, 6.0), **ours, "Ulysses": result("Ulysses", 3.0)}, {})


def rings(worlds: Sequence[int], layouts: Sequence[str]) -> dict[str, Any]:
    """What `bench ring --json` writes."""
    made = [ring_report(replace(PROBLEM, world=world), layouts) for world in worlds]
    return {"schema": "ringattn bench ring 2", "provenance": PROVENANCE, "timer": "", **as_json(made)}


def suite() -> dict[str, Any]:
    """A case that is right, one that fails by a number, one that raised, one that was not run, and a whole ring."""
    speeds = [
        number("forward", 90.0 * k * k, "TFLOP/s", labels={"seqlen": 1024 * k, "by": by, "dtype": "bfloat16"})
        for k in (1, 2, 4)
        for by in ("ringattn", "flash")
    ]
    wrong = number("error of dq", 2.0, "absolute", labels={"dtype": "float16"}, limit=1.0, fails=True, note="too much")
    of = {"world": 2, "seqlen": 64, "mask": "causal"}
    ring = [
        number("of ideal", share, "%", labels={"by": by, **of, **layout})
        for by, share, layout in (
            (WHOLE, 50.0, {}),
            (f"{OURS} zigzag", 75.0, {"layout": "zigzag"}),
            ("Ulysses", 100.0, {}),
        )
    ]
    cases: list[dict[str, Any]] = [
        {
            "name": "speed",
            "about": "kernels",
            "arguments": {"head_dim": 128, "causal": True},
            "state": "done",
            "reason": "",
            "numbers": speeds,
        },
        {"name": "right", "about": "errors", "arguments": {}, "state": "done", "reason": "", "numbers": [wrong]},
        {"name": "raised", "about": "", "arguments": {}, "state": "failed", "reason": "Traceback\nKeyError: 'x'"},
        {"name": "late", "about": "", "arguments": {}, "state": "not run", "reason": "3 s were left", "numbers": []},
        {
            "name": "whole ring",
            "about": "",
            "arguments": {"seqlens": [64]},
            "state": "done",
            "reason": "",
            "numbers": ring,
        },
    ]
    whole = [{"seconds": 1.5, "numbers": [], **case} for case in cases]
    told = {"schema": "ringattn bench suite 1", "budget": 60.0, "provenance": PROVENANCE, "cases": whole}
    return {**told, "decisions": [{"question": "nccl passes", "answer": "open", "why": "nccl-2 not run"}]}


def links() -> dict[str, Any]:
    rows = [
        {"transport": "nccl", "way": "one way", "edge": edge, "nbytes": 1 << power, "busbw": busbw}
        for power, speeds in ((16, (1.0, 2.0)), (20, (9.0, 8.0)))
        for edge, busbw in zip(("0->1", "1->0"), speeds, strict=True)
    ]
    return {"schema": "ringattn bench links 1", "provenance": PROVENANCE, "links": rows}


def ring() -> dict[str, Any]:
    times = {"SDPA, one process": 3.0, "ringattn": 4.0, "usual ring": 6.0}
    candidates = [
        {
            "name": name,
            "seconds": {"median": time, "unit": "s", "samples": [time]},
            "errors": {"out": 1e-6},
            "disagrees": [],
        }
        for name, time in times.items()
    ]
    return {"schema": "ringattn bench ring 1", "provenance": PROVENANCE, "problem": CALL, "candidates": candidates}


def memory() -> dict[str, Any]:
    worlds = [
        {"world": world, "ranks": [{"forward": 10**6 * rank, "backward": 3 * 10**6} for rank in range(1, world + 1)]}
        for world in (2, 4)
    ]
    told = {"schema": "ringattn bench memory 1", "provenance": PROVENANCE, "ring": {"nodes": 1}}
    return {**told, "worlds": worlds, "spread": 1 / 3}


def predicted() -> dict[str, Any]:
    """Two layouts at each of two lengths: 10% too low, 5% too high; 20% too low, right."""
    rows = [
        {"layout": layout, "mask": "causal", "seqlen": seqlen, "measured": 2.0, "spread": 0.01, "predicted": told}
        for layout, seqlen, told in (
            ("zigzag", 64, 1.8),
            ("striped", 64, 2.1),
            ("zigzag", 128, 1.6),
            ("striped", 128, 2),
        )
    ]
    return {"schema": "ringattn predict check 1", "provenance": PROVENANCE, "rows": rows}


def timeline(source: str, *, slower: float = 1.0, name: str = "K/V of 1") -> Timeline:
    """Two ranks, a hop each way, with a wait and a slot."""
    told = []
    for rank in (0, 1):
        for phase, start in (("forward", 0.0), ("backward", 1.0)):
            bars = [
                ("compute", 0, 0.0, 0.4, ""),
                ("send", 0, 0.0, 0.3, f"K/V of {rank}"),
                ("receive", 0, 0.0, 0.3, name),
                ("slot 1", 1, 0.0, 0.9, name),
                ("wait", 1, 0.4, 0.5, ""),
                ("compute", 1, 0.5, 0.9, ""),
            ]
            told += [
                Event(rank, lane, phase, hop, (start + begin) * slower, (start + end) * slower, what, 1 << 20)
                for lane, hop, begin, end, what in bars
            ]
    call = CALL if source == "measured" else said(PREDICTED)
    return Timeline("causal, zigzag, 64 tokens", source, 2, tuple(told), {"call": call, "provenance": PROVENANCE})


def write(folder: Path, **files: object) -> Path:
    """A folder of JSON files, by their stems."""
    folder.mkdir(exist_ok=True)
    for stem, data in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(data))
    return folder


def everything() -> dict[str, Any]:
    return {
        "results": suite(),
        "links": links(),
        "ring": ring(),
        "memory": memory(),
        "check": predicted(),
        "measured": as_chrome(timeline("measured")),
        "predicted": as_chrome(timeline("predicted", slower=0.9)),
    }


# what readers take from files as it is; every other string may be anything
KEPT_KEYS = ("schema", "ph", "state", "source", "layout")
KEPT_VALUES = (
    "process_name",
    "thread_name",
    "TFLOP/s",
    "compute",
    "wait",
    "send",
    "receive",
    "slot 1",
    "SDPA, one process",
    "one device",
    "of ideal",
    "ringattn",
)


def tainted(data: Any, key: str = "") -> Any:
    """The same with a hostile end on every string, and keys of labels that are hostile too."""
    if isinstance(data, dict):
        rename = key in ("labels", "versions", "cpu", "errors")
        keep = ("seqlen", "by", "world")  # by which a plot knows its points
        return {name + HOSTILE * (rename and name not in keep): tainted(value, name) for name, value in data.items()}
    if isinstance(data, list):
        return [tainted(value, key) for value in data]
    if isinstance(data, str) and key not in KEPT_KEYS and data not in KEPT_VALUES:
        return data + HOSTILE
    return data


class Outline(HTMLParser):
    """Every element with its attributes, and the text of each kind of element."""

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
