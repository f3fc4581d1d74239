"""Runs parts of a suite as processes: what fails, hangs or dies costs that part alone, and its share of the time."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path

from ..common.result import Row, read
from .parts import FILE, OUT, PACKAGE, PYTHON, SECONDS, Part

LOGS = "logs"
LEAST_SHARE = 0.5  # of its time: with less left a part is not started
ENOUGH_SHARE = 0.9  # with that a part that overruns has failed
USED_UP = 0.5  # of its time, by a command that is told one: it compiles, starts and writes, too
GRACE_SECONDS = 2.0  # in which what overran says where it was
POLL_SECONDS = 0.05
MARK = "RINGATTN_SUITE_PART"  # in the environment of a part, and of whatever it starts: the folder, and which
DONE, FAILED, NOT_HERE, OUT_OF_TIME = "done", "failed", "not here", "out of time"


def run(parts: Sequence[Part], *, out: Path, device: str, ends: float, width: int) -> Generator[Row, None, None]:
    """Run them in order, those of one ``beside`` side by side; a row for each as it ends, by ``ends`` at the latest.

    Each has its seconds; where there is more time than all that follow need, it has its share of that, too, so that
    what one leaves over goes to those after it.
    """
    end_marked(mark_of(out))  # of a call that was killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    groups = grouped(parts)
    for number, group in enumerate(groups):
        now, needed = time.monotonic(), sum(seconds_of(one, width) for one in groups[number:])
        share = seconds_of(group, width) * max(1.0, (ends - now) / (needed or 1.0))
        yield from together(group, out, device, min(ends, now + share), width)


def grouped(parts: Sequence[Part]) -> list[list[Part]]:
    return [list(group) for _, group in groupby(parts, lambda one: one.beside or one.name)]


def seconds_of(group: Sequence[Part], width: int) -> float:
    """What parts that run side by side take at most, so many at a time."""
    seconds = [one.seconds for one in group if one.missing is None]
    return max(seconds, default=0.0) * math.ceil(len(seconds) / width)


def short_of(parts: Sequence[Part], ends: float) -> float:
    """Seconds that are missing for the shortest of them to start; 0 where one does, or none is to run here."""
    least = min((LEAST_SHARE * one.seconds for one in parts if one.missing is None), default=0.0)
    return max(0.0, least - (ends - time.monotonic())) if least else 0.0


def together(group: Sequence[Part], out: Path, device: str, ends: float, width: int) -> Iterator[Row]:
    with ThreadPoolExecutor(width) as pool:
        futures: list[Future[Row]] = [pool.submit(run_part, part, out, device, ends) for part in group]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:  # where it was interrupted
            for future in futures:
                future.cancel()
            while not all(future.done() for future in futures):
                end_marked(mark_of(out))


def run_part(part: Part, out: Path, device: str, ends: float) -> Row:
    """Run one; how it ended."""
    row = {"part": part.name, "about": part.about, "command": part.command_line, "seconds": 0.0}
    left = ends - time.monotonic()
    if part.missing:
        return {**row, "state": NOT_HERE, "found": part.missing}
    if left < LEAST_SHARE * part.seconds:
        message = f"it takes up to {part.seconds:.0f} s, {max(left, 0):.0f} s were left"
        return {**row, "state": OUT_OF_TIME, "found": message}
    log, mark = out / LOGS / f"{Path(part.file).stem}.txt", f"{mark_of(out)}{os.getpid()}.{part.name}|"
    log.parent.mkdir(parents=True, exist_ok=True)
    (out / part.file).unlink(missing_ok=True)  # an earlier call's
    places = {PYTHON: sys.executable, OUT: str(out.absolute()), FILE: str(out.absolute() / part.file)}
    places[SECONDS] = str(max(1, int(USED_UP * left)))
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [filled(word, places) for word in part.command], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env=environment(device) | {MARK: mark}, start_new_session=True,
        )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(left)
    late = process.poll() is None
    end_marked(mark)
    with contextlib.suppress(subprocess.TimeoutExpired):  # what the driver holds ends when it lets go
        process.wait(GRACE_SECONDS)
    text = log.read_text(errors="replace")
    state, message = overran(part, left, text) if late else ended(process.returncode, text)
    if FILE in part.command:
        state, message = with_result(out / part.file, state, message)
    return {**row, "state": state, "found": message, "seconds": round(time.monotonic() - begun, 1)}


def filled(word: str, places: dict[str, str]) -> str:
    for place, text in places.items():
        word = word.replace(place, text)
    return word


def environment(device: str) -> dict[str, str]:
    """Of every part: ours, Triton's compiler or interpreter, and this very package, wherever it lies."""
    path = [str(PACKAGE.parent)] if PACKAGE.name == "ringattn" else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"TRITON_INTERPRET": "0"}
    return {**os.environ, **variables, **hidden}


def overran(part: Part, had: float, text: str) -> tuple[str, str]:
    """Not its fault where less was left than it takes at most, or where it takes whatever there is."""
    enough = had >= ENOUGH_SHARE * part.seconds and SECONDS not in part.command
    message = f"it had {had:.0f} s, and was ended with all its processes: {last_of(text)}"
    return (FAILED if enough else OUT_OF_TIME), message.rstrip(": ")


def ended(code: int | None, text: str) -> tuple[str, str]:
    """The state, and what was found or why not, by an exit code and a log."""
    last = last_of(text)
    if code == os.EX_UNAVAILABLE:
        return NOT_HERE, last
    if code != 0:
        return FAILED, f"exit code {code}: {last}"
    return DONE, ""


def with_result(path: Path, state: str, message: str) -> tuple[str, str]:
    """The same by the result that a part leaves: what failed in it, or its last note."""
    try:
        result = read(path)
    except ValueError as error:  # a part that is done has left one
        return (FAILED, str(error)) if state == DONE else (state, message)
    if result.failed:
        return FAILED, "; ".join(result.failed)
    return state, message or (result.notes[-1] if result.notes else f"{len(result.rows)} rows")


def last_of(text: str) -> str:
    """The last line of a log."""
    return (text.strip().splitlines() or [""])[-1]


def mark_of(out: Path) -> str:
    """What the marks of all parts of a folder begin with."""
    return f"{out.absolute()}|"


def end_marked(mark: str) -> None:
    """End every process whose mark begins so: asked where it is at first, killed then."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        until = time.monotonic() + GRACE_SECONDS
        while (there := [*marked(mark)]) and time.monotonic() < until:
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
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
