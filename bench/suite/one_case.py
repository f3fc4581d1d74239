"""One case in a process of its own: ``python -m ringattn.bench.suite.one_case NAME cuda|cpu`` prints its numbers."""

from __future__ import annotations

import os
import sys

import torch

from ..common.flags import device_here
from ..common.output import json_text
from .case_lists import cases_of
from .cases import Case, NotHere


def tell(case: Case, device: torch.device) -> int:
    """A line of JSON for each number, as it comes; or why it is not here, and the exit code that says so."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    try:
        for number in case.run(device, **case.arguments):
            sys.stdout.write(json_text(number.as_json(), indent=None))
            sys.stdout.flush()
    except NotHere as missing:
        print(missing)
        return os.EX_UNAVAILABLE
    return os.EX_OK


if __name__ == "__main__":
    here = device_here(sys.argv[2])
    sys.exit(tell({case.name: case for case in cases_of(here.type)}[sys.argv[1]], here))
