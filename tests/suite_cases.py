"""Cases that behave badly, for the workers of the suite to run in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from ringattn.bench.suite.cases import NotHere, Number


def good(device: torch.device, *, count: int = 2, seconds: float = 0.0) -> Iterator[Number]:
    for number in range(count):
        time.sleep(seconds)
        yield Number("process", os.getpid(), "", {"number": number}, limit=None)


def above_its_limit(device: torch.device) -> Iterator[Number]:
    yield Number("error", 2.0, "", limit=1.0)


def raises(device: torch.device) -> Iterator[Number]:
    yield Number("before", 1.0, "s")
    raise ValueError("it went wrong")


def dies(device: torch.device) -> Iterator[Number]:
    yield Number("before", 1.0, "s")
    time.sleep(0.2)  # let the number leave
    os._exit(9)


def hangs(device: torch.device) -> Iterator[Number]:
    yield Number("before", 1.0, "s")
    time.sleep(600)


def lacks_something(device: torch.device) -> Iterator[Number]:
    raise NotHere("no such library")
    yield Number("never", 1.0, "s")
