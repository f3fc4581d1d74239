"""One operation of the log, and what replay does for those that torch has no operator for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..stand_in import Op
from .memory import Ref, Use

OURS = ("ringattn.comm.", "ringattn.ring.")
DEPTH = 40  # frames that are looked at for the place in our code that asked

Give = Callable[[Any], Any]
"""What turns a `Ref` or a `Mail` into the memory of one execution."""


@dataclass(eq=False)
class Recorded(Op):
    """An operation, with who asked for it and what it touches."""

    number: int = -1
    rank: int = -1
    thread: int = 0
    label: str = ""
    site: str = ""  # functions of ours that asked for it, innermost first
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    action: Callable[[Give], None] | None = None  # does it on the memory that its argument gives
    source: Recorded | None = None  # of a wait: the record that it means
    host: Recorded | None = None  # the newest thing that this thread's host had waited for
    group: object = None  # of a send or receive: what stands for the group that it runs in
    wire: tuple[object, ...] = ()  # of a send or receive: communicator, source, destination
    flag: tuple[object, int] | None = None  # of a write or a wait in memory: which word, and the value
    after: tuple[Recorded, ...] = ()

    @property
    def stream_name(self) -> str:
        return "host" if self.stream is None else self.stream.name

    def __str__(self) -> str:
        what = f"{self.kind} {self.detail}" if isinstance(self.detail, str) and self.detail else self.kind
        return f"#{self.number} rank {self.rank} {self.stream_name}: {what}{f' ({self.label})' if self.label else ''}"


def site() -> str:
    """The functions of ours that are under way, innermost first."""
    names = []
    frame = sys._getframe(2)
    for _ in range(DEPTH):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OURS):
            names.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_qualname}")  # type: ignore[attr-defined]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return " < ".join(names)


@dataclass(frozen=True)
class Mail:
    """Where the bytes of one send lie in a replay: a list that is empty until they have been read."""

    send: int


def mail(op: Recorded, ref: Ref) -> Callable[[Give], None]:
    """A send puts its bytes into the mail, its receive takes them out."""

    def act(give: Give) -> None:
        if op.kind == "nccl send":
            give(Mail(op.number)).append(give(ref).clone())
        else:
            assert op.source is not None
            give(ref).copy_(give(Mail(op.source.number))[0])

    return act


def poison(ref: Ref) -> Callable[[Give], None]:
    """Make bytes unlike anything that was written there."""
    return lambda give: give(ref).fill_(0xFF)  # NaN in every floating type
