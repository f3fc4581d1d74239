"""Ends of ranks for tests of launchers, in a module that does not import torch, so that processes start fast."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def leave(how: str, folder: str) -> None:
    """Write the process id to the folder, and end rank 1 if ``how`` says so; the others would run for minutes."""
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if how and os.environ["RANK"] == "1":
        while not Path(folder, "0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(7)
    time.sleep(300)
