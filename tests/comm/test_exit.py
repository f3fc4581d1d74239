"""Process exit: threads inside torch end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..support import exit_cases
from ..support.nightly import rest_nightly
from ..support.transport_cases import HANGS

ALL = tuple(exit_cases.KINDS)


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", rest_nightly([" ".join(ALL), *ALL], " ".join(ALL)))
def test_threads_inside_torch_end_before_the_interpreter(kinds: str) -> None:
    """Exit without the abort that a thread causes when it returns from C++ into a dying interpreter."""
    command = [sys.executable, "-m", exit_cases.__name__, "3", *kinds.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * HANGS)
    assert ended.returncode == 3, ended.stderr
