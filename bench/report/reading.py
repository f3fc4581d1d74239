"""What a folder of results holds: a suite's results.json, timelines, and what single benches wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels.strict import shown
from ...tools.doctor.command import SCHEMA as DOCTOR
from ..common.files import read_object
from ..common.result import SCHEMA as TUNE
from ..predict.rows import SCHEMA as PREDICTED
from ..predict.text import SCHEMA as PREDICTION
from ..predict.text import SWEEP_SCHEMA as MAP
from ..suite.result_file import NAME as RESULTS
from ..suite.result_file import check
from ..timeline.events import SCHEMA as TIMELINE
from ..timeline.events import Timeline, from_chrome

PUT_ASIDE = "results_"  # of earlier code or of another machine: the suite puts them aside under such a name
BENCHES = {
    f"ringattn bench {kind} 1": kind for kind in ("links", "overlap", "ring", "memory", "kernels", "host", "timeline")
}
BENCHES |= {"ringattn bench ring 2": "ring", PREDICTED: "predicted"}
"""What single benches write, by schema."""
OTHERS = (PREDICTION, MAP, TUNE, DOCTOR)
"""What our other commands write: nothing is wrong with such a file, and there is no view for it."""


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

    def parts(self) -> Iterator[tuple[str, Folder]]:
        """Every file that is drawn, and a folder of it alone."""
        if self.suite is not None:
            yield RESULTS, Folder(self.name, self.suite)
        yield from ((one.file, Folder(self.name, benches=[one])) for one in self.benches)
        yield from ((name, Folder(self.name, timelines=[(name, one)])) for name, one in self.timelines)

    def joined(self, other: Folder) -> Folder:
        """What is drawn of both."""
        suite = self.suite if other.suite is None else other.suite
        return Folder(self.name, suite, self.benches + other.benches, self.timelines + other.timelines)

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
        Refused: there is no folder, or nothing in it.
    """
    if not folder.is_dir():
        raise Refused(f"{folder} is no folder: it takes what `ringattn bench suite --out DIR` writes to")
    found = Folder(printable(folder.absolute().name))
    for path in sorted(folder.glob("*.json")):
        name = printable(path.name)
        if name.startswith(PUT_ASIDE):
            continue
        try:
            _take(found, name, read_object(path))
        except ValueError as error:
            found.refused.append((name, printable(str(error))))
    if found.suite is None and not found.benches and not found.timelines:
        told = [f"{name}: {why}" for name, why in found.refused] + [f"{name} is of {of}" for name, of in found.unshown]
        why = f"{folder} holds no results: neither {RESULTS} nor what a bench wrote with --json"
        raise Refused("; ".join([why, *told]))
    return found


def printable(text: str) -> str:
    """What a page and a terminal may show: names of files are any bytes."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _take(found: Folder, name: str, data: Mapping[str, Any]) -> None:
    about = data.get("otherData")
    schema = about.get("schema") if isinstance(about, dict) else data.get("schema")
    if name == RESULTS:
        check(data)
        found.suite = data
    elif schema == TIMELINE:
        found.timelines.append((name, from_chrome(data)))
    elif isinstance(schema, str) and schema in BENCHES:
        found.benches.append(Bench(name, BENCHES[schema], data))
    elif schema in OTHERS:
        found.unshown.append((name, schema))
    else:
        taken = ", ".join(repr(one) for one in (*BENCHES, TIMELINE))
        raise ValueError(f"schema is {shown(schema)}: this version reads {taken}")
