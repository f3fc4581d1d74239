"""Whether the process of another rank is gone, as far as one process of a machine can tell of another."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
STATE, START = 0, 19  # fields of /proc/PID/stat behind the name, counted from 0
ENDED = "ZX"  # states of a process that runs no more, though nobody has asked for its exit code yet


def own_process() -> list[str]:
    """This process by what no other has: machine and process namespace, number and start time."""
    return [_machine(), str(os.getpid()), _stat(str(os.getpid()))[START]]


def has_ended(process: object) -> bool:
    """Whether the process that told this has ended; False where it runs, or cannot be seen from here."""
    match process:
        case [str(machine), str(number), str(start)] if machine and machine == _machine() and number.isdigit():
            stat = _stat(number)
            return stat[STATE] in ENDED or stat[START] != start
    return False


def _machine() -> str:
    """The same in all processes that see each other's numbers; "" where the system does not tell."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip() + os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def _stat(number: str) -> list[str]:
    try:
        return (PROC / number / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [ENDED[-1], *[""] * START]
