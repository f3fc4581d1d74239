"""No kernel reads or writes past what it was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_nothing_past_the_end_is_touched() -> None:
    """In a process of its own, which would end there."""
    command = [sys.executable, "-m", "tests.support.guarded"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, (
        f"exit code {done.returncode} in: {done.stdout.splitlines()[-1:]}\n{done.stderr[-3000:]}"
    )
    assert done.stdout.endswith("inside\n")
