"""Facts from /proc about processes and threads: has a process ended, and which socket blocks a thread."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
STATE, START_TIME = 0, 19  # fields of /proc/PID/stat after the name, counted from 0
ENDED_STATES = "ZX"  # zombie (nobody has read its exit code yet) and dead
FIRST_FILE_NUMBER = 3  # after the standard streams


def own_process() -> list[str]:
    """Return [machine and PID namespace, process number, start time], which identifies this process to `has_ended`."""
    return [_machine(), str(os.getpid()), _stat(str(os.getpid()))[START_TIME]]


def has_ended(process: object) -> bool:
    """Return True if the process that `own_process` identified has ended.

    Return False if the process runs, or if it is not visible from this process, as on another machine.
    """
    match process:
        case [str(machine), str(number), str(start)] if machine and machine == _machine():
            stat = _stat(number)
            return stat[STATE] in ENDED_STATES or stat[START_TIME] != start
    return False


def _machine() -> str:
    """Return a text that is equal in all processes that see each other's PIDs, or "" if /proc cannot be read."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip() + os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def _stat(number: str) -> list[str]:
    """Return the fields of /proc/NUMBER/stat after the name, or those of a dead process if the file is missing."""
    try:
        return (PROC / number / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [ENDED_STATES[-1], *[""] * START_TIME]


def shut_socket(thread: threading.Thread) -> bool:
    """Shut down the socket that a thread of this process is blocked on, so that its call returns with an error.

    Does nothing if the thread is not blocked on a socket right now.

    Returns:
        False if /proc does not tell what the thread is blocked on.
    """
    try:
        call = (PROC / f"self/task/{thread.native_id}/syscall").read_text().split()
    except OSError:
        return not thread.is_alive()
    # The line has the system call's number and arguments, or one word if the thread is running. The first argument of
    # recv, read and send is the file descriptor.
    file = int(call[1], 16) if len(call) > 1 else 0
    if FIRST_FILE_NUMBER <= file < 2**31:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=os.dup(file)) as blocking:
            blocking.shutdown(socket.SHUT_RDWR)
    return True
