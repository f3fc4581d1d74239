"""Runs the suite's parts as processes, so that a part that fails, hangs or dies does not stop the others."""

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

from ..common.result import Row, read_result
from .suite_parts import FILE, OUT, PACKAGE, PYTHON, SECONDS, SuitePart

LOGS = "logs"
LEAST_SHARE = 0.5  # share of a part's time; with less left it is not started
ENOUGH_SHARE = 0.9  # a part that overruns after this share has failed
USED_UP = 0.5  # share of its time that a command with a time limit gets; start-up and writing need the rest
GRACE_SECONDS = 2.0  # for a part that overran to dump its stack
POLL_SECONDS = 0.05
MARK = "RINGATTN_SUITE_PART"  # environment variable of a part and its children: the folder and the part
DONE, FAILED, NOT_HERE, OUT_OF_TIME = "done", "failed", "not here", "out of time"


def run_parts(
    parts: Sequence[SuitePart], *, out: Path, device: str, end_time: float, width: int
) -> Generator[Row, None, None]:
    """Run parts in order, some in parallel, and yield a row as each ends.

    Every group of parallel parts gets a share of the time until ``end_time`` (of ``time.monotonic``). ``device`` is cpu
    or cuda, and ``width`` the number of parts that may run at the same time.
    """
    end_marked_processes(folder_mark(out))  # left by a suite that was killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    groups = group_parts(parts)
    for number, group in enumerate(groups):
        now, needed = time.monotonic(), sum(group_seconds(rest, width) for rest in groups[number:])
        share = group_seconds(group, width) * max(1.0, (end_time - now) / (needed or 1.0))
        yield from run_side_by_side(group, out, device, min(end_time, now + share), width)


def group_parts(parts: Sequence[SuitePart]) -> list[list[SuitePart]]:
    return [list(group) for _, group in groupby(parts, lambda part: part.parallel_group or part.name)]


def group_seconds(group: Sequence[SuitePart], width: int) -> float:
    """Return the longest time that a group of parallel parts takes, ``width`` at a time."""
    seconds = [part.seconds for part in group if part.missing_reason is None]
    return max(seconds, default=0.0) * math.ceil(len(seconds) / width)


def missing_seconds(parts: Sequence[SuitePart], end_time: float) -> float:
    """Return by how many seconds the time left is too short to start any part; 0 if a part can start."""
    shortest = min((LEAST_SHARE * part.seconds for part in parts if part.missing_reason is None), default=0.0)
    return max(0.0, shortest - (end_time - time.monotonic())) if shortest else 0.0


def run_side_by_side(group: Sequence[SuitePart], out: Path, device: str, end_time: float, width: int) -> Iterator[Row]:
    with ThreadPoolExecutor(width) as pool:
        futures: list[Future[Row]] = [pool.submit(run_part, part, out, device, end_time) for part in group]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:  # if interrupted
            for future in futures:
                future.cancel()
            while not all(future.done() for future in futures):
                end_marked_processes(folder_mark(out))


def run_part(part: SuitePart, out: Path, device: str, end_time: float) -> Row:
    """Run one part until it ends or ``end_time``; return its row."""
    row = {"part": part.name, "about": part.about, "command": part.command_line, "seconds": 0.0}
    seconds_left = end_time - time.monotonic()
    if part.missing_reason:
        return {**row, "state": NOT_HERE, "found": part.missing_reason}
    if seconds_left < LEAST_SHARE * part.seconds:
        message = f"it takes up to {part.seconds:.0f} s, but only {max(seconds_left, 0):.0f} s were left"
        return {**row, "state": OUT_OF_TIME, "found": message}
    log, mark = out / LOGS / f"{Path(part.file).stem}.txt", f"{folder_mark(out)}{os.getpid()}.{part.name}|"
    log.parent.mkdir(parents=True, exist_ok=True)
    (out / part.file).unlink(missing_ok=True)  # of an earlier run
    places = {PYTHON: sys.executable, OUT: str(out.absolute()), FILE: str(out.absolute() / part.file)}
    places[SECONDS] = str(max(1, int(USED_UP * seconds_left)))
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [fill_placeholders(word, places) for word in part.command], stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, env=part_environment(device) | {MARK: mark}, start_new_session=True,
        )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds_left)
    late = process.poll() is None
    end_marked_processes(mark)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in the driver ends only when the driver returns
        process.wait(GRACE_SECONDS)
    text = log.read_text(errors="replace")
    state, message = timeout_outcome(part, seconds_left, text) if late else exit_outcome(process.returncode, text)
    if FILE in part.command:
        state, message = result_outcome(out / part.file, state, message)
    return {**row, "state": state, "found": message, "seconds": round(time.monotonic() - start, 1)}


def fill_placeholders(word: str, places: dict[str, str]) -> str:
    for place, text in places.items():
        word = word.replace(place, text)
    return word


def part_environment(device: str) -> dict[str, str]:
    """Return the environment of a part: this package's path, and Triton's compiler or interpreter."""
    path = [str(PACKAGE.parent)] if PACKAGE.name == "ringattn" else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"TRITON_INTERPRET": "0"}
    return {**os.environ, **variables, **hidden}


def timeout_outcome(part: SuitePart, given_seconds: float, text: str) -> tuple[str, str]:
    """Return state and message of a part that overran: failed, or out of time if it had less than its time."""
    enough = given_seconds >= ENOUGH_SHARE * part.seconds and SECONDS not in part.command
    message = f"it was killed after {given_seconds:.0f} s: {last_line(text)}"
    return (FAILED if enough else OUT_OF_TIME), message.rstrip(": ")


def exit_outcome(code: int | None, text: str) -> tuple[str, str]:
    """Return state and message of a part by its exit code and log."""
    last = last_line(text)
    if code == os.EX_UNAVAILABLE:
        return NOT_HERE, last
    if code != 0:
        return FAILED, f"exit code {code}: {last}"
    return DONE, ""


def result_outcome(path: Path, state: str, message: str) -> tuple[str, str]:
    """Return state and message of a part that wrote ``path``: the failures in it, or its last note."""
    try:
        result = read_result(path)
    except ValueError as error:  # a finished part has written one
        return (FAILED, str(error)) if state == DONE else (state, message)
    if result.failed:
        return FAILED, "; ".join(result.failed)
    return state, message or (result.notes[-1] if result.notes else f"{len(result.rows)} rows")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def folder_mark(out: Path) -> str:
    """Return the text with which ``MARK`` starts in all processes of a folder's parts."""
    return f"{out.absolute()}|"


def end_marked_processes(mark: str) -> None:
    """End every process whose ``MARK`` starts with ``mark``: by SIGABRT, which dumps stacks, then SIGKILL."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        until = time.monotonic() + GRACE_SECONDS
        while (pids := [*marked_processes(mark)]) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(POLL_SECONDS)


def marked_processes(mark: str) -> Iterator[int]:
    """Yield the ids of processes whose ``MARK`` starts with ``mark``, even if their parents have ended."""
    begins = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not folder.name.isdigit() or folder.name == str(os.getpid()):
                continue
            if any(word.startswith(begins) for word in (folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)
