"""Runs parts of a suite as processes: what fails, hangs or dies costs that part alone, and its share of the time."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ..common.result import read
from .parts import OUT, PACKAGE, PYTHON, SECONDS, Part

LOGS = "logs"
LEAST_SHARE = 0.5  # of its time: with less left a part is not started
ENOUGH_SHARE = 0.9  # with that a part that overruns has failed
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0  # in which what overran says where it was
USED_UP = 0.5  # of its time, by a command that is told one: it compiles, starts and writes, too
MARK = "RINGATTN_SUITE_PART"  # in the environment of a part, and of whatever it starts: the folder, and which
TESTED = re.compile(r"=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s")  # the last line of pytest
TIME_SLICES = "processes share one GPU: their times are time slices, and no results"


@dataclass
class Outcome:
    """How a part ended."""

    part: Part
    state: str = "not run"  # done, failed, cut short, not here, not run
    reason: str = ""
    seconds: float = 0.0
    found: str = ""  # how many tests passed, or the last note of its result
    failed: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether it has ended, or never runs."""
        return bool(self.seconds or self.reason)

    @property
    def row(self) -> dict[str, object]:
        """Of the result of the suite."""
        sliced = f"; {TIME_SLICES}" if self.part.shares_a_gpu else ""
        return {
            "part": self.part.name,
            "state": self.state,
            "seconds": round(self.seconds, 1),
            "found": self.found,
            "reason": "; ".join(self.failed) or self.reason,
            "about": f"{self.part.about}{sliced}",
            "command": self.part.told,
        }


class Running:
    """A part on its way."""

    def __init__(self, outcome: Outcome, seconds: float, out: Path, device: str) -> None:
        self.outcome, self._seconds, self._out, part = outcome, seconds, out, outcome.part
        self._log = out / LOGS / f"{part.name.replace(' ', '_')}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._mark = f"{mark_of(out)}{os.getpid()}.{part.name}|"
        for name in part.leaves:
            (out / name).unlink(missing_ok=True)  # an earlier call's
        told = str(max(1, int(USED_UP * seconds)))
        command = [
            word.replace(PYTHON, sys.executable).replace(OUT, str(out.absolute())).replace(SECONDS, told)
            for word in part.command
        ]
        self._begun = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=part.within,
                env=environment(device) | {MARK: self._mark}, start_new_session=True,
            )  # fmt: skip

    def over(self) -> bool:
        """Whether it has ended, by itself or because its time was up."""
        running = self._process.poll() is None  # what has ended is not late, however late we look
        late = running and time.monotonic() > self._begun + self._seconds
        if running and not late:
            return False
        self.end()
        outcome, text = self.outcome, self._log.read_text(errors="replace")
        outcome.seconds = time.monotonic() - self._begun
        outcome.state, outcome.reason = self._late(text) if late else ended(self._process.returncode, text)
        tests = TESTED.match(last_of(text))
        outcome.found = tests[1] if tests else ""
        if outcome.part.result is None:
            return True
        try:
            result = read(self._out / outcome.part.result)
        except ValueError as error:  # a part that is done has left one
            if outcome.state == "done":
                outcome.state, outcome.reason = "failed", str(error)
            return True
        outcome.found = result.notes[-1] if result.notes else f"{len(result.rows)} rows"
        outcome.failed = result.failed
        outcome.state = "failed" if result.failed else outcome.state
        return True

    def end(self) -> None:
        """End it and whatever it started: what still runs says where it is, then goes."""
        end_marked(self._mark, self._process.poll)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what the driver holds ends when it lets go
            self._process.wait(GRACE_SECONDS)

    def _late(self, text: str) -> tuple[str, str]:
        """Not its fault where less was left than it takes at most, or where it takes whatever there is."""
        part, had = self.outcome.part, f"it had {self._seconds:.0f} s, and was ended with all its processes"
        enough = self._seconds >= ENOUGH_SHARE * part.seconds and SECONDS not in part.command
        return ("failed" if enough else "cut short"), f"{had}: {last_of(text)}".rstrip(": ")


def environment(device: str) -> dict[str, str]:
    """Of every part: ours, Triton's compiler or interpreter, and this very package, wherever it lies."""
    path = [str(PACKAGE.parent)] if PACKAGE.name == "ringattn" else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    told = {"PYTHONPATH": os.pathsep.join(path), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"TRITON_INTERPRET": "0"}
    return {**os.environ, **told, **hidden}


def mark_of(out: Path) -> str:
    """What the marks of all parts of a folder begin with."""
    return f"{out.absolute()}|"


def end_marked(mark: str, reap: Callable[[], object] = lambda: None) -> None:
    """End every process whose mark begins so: asked where it is at first, killed then."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        until = time.monotonic() + GRACE_SECONDS
        while (there := [*marked(mark)]) and time.monotonic() < until:
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            reap()
            time.sleep(POLL_SECONDS)


def marked(mark: str) -> Iterator[int]:
    """Processes whose mark begins so, also those that have made themselves a session, or lost their parents."""
    begins = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not folder.name.isdigit() or folder.name == str(os.getpid()):
                continue
            if any(word.startswith(begins) for word in (folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)


def ended(code: int, text: str) -> tuple[str, str]:
    """The state and the reason by an exit code and a log."""
    if code == os.EX_UNAVAILABLE:
        return "not here", last_of(text)
    tests = TESTED.match(last_of(text))
    if code == 0 and tests and "skipped" in tests[1] and "passed" not in tests[1]:
        return "not here", next((line for line in text.splitlines() if line.startswith("SKIPPED [")), "")
    return ("done", "") if code == 0 else ("failed", f"exit code {code}: {last_of(text)}")


def last_of(text: str) -> str:
    """The last line of a log."""
    return (text.strip().splitlines() or [""])[-1]


def run(
    parts: Sequence[Part], *, out: Path, device: str, ends: float, width: int, changed: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run them in order, those of one ``beside`` side by side; nothing runs on after ``ends`` (time.monotonic()).

    Each has its seconds; where there is more time than all that follow need, it has its share of that, too, so that
    what one leaves over goes to those after it. ``changed`` is called when a part starts or ends.
    """
    end_marked(mark_of(out))  # of a call that was killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    outcomes = [Outcome(part) for part in parts]
    for _, members in groupby(outcomes, lambda one: one.part.beside or one.part.name):
        group, now = list(members), time.monotonic()
        own = seconds_of([one.part for one in group], width)
        needed = seconds_of(parts[outcomes.index(group[0]) :], width)
        share = own * max(1.0, (ends - now) / (needed or 1.0))
        _together(group, out, device, min(ends, now + share), width, changed)
    return outcomes


def seconds_of(parts: Sequence[Part], width: int) -> float:
    """What parts take at most, those of one ``beside`` side by side, so many at a time."""
    total = 0.0
    for _, group in groupby(parts, lambda one: one.beside or one.name):
        seconds = [one.seconds for one in group if one.missing is None]
        total += max(seconds, default=0.0) * math.ceil(len(seconds) / width)
    return total


def _together(
    group: Sequence[Outcome], out: Path, device: str, ends: float, width: int, changed: Callable[[Outcome], None]
) -> None:
    waiting, running = deque(group), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < width:
                one, left = waiting.popleft(), ends - time.monotonic()
                if one.part.missing:
                    one.state, one.reason = "not here", one.part.missing
                elif left < LEAST_SHARE * one.part.seconds:
                    one.reason = f"it takes up to {one.part.seconds:.0f} s, {max(left, 0):.0f} s were left"
                changed(one)  # before it starts, since a part may read what is known
                if not one.over:
                    running.append(Running(one, left, out, device))
            time.sleep(POLL_SECONDS)
            for each in [each for each in running if each.over()]:
                running.remove(each)
                changed(each.outcome)
    finally:
        for each in running:
            each.end()
