"""The first example: one body alone, on virtual ranks and on processes; what the README shows is that file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringattn import LocalWorld
from ringattn.examples.quickstart import error

from ..support.forked import results

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MOST = 1e-4


def in_a_process(rank: int) -> float:
    return error()


def test_alone_and_on_virtual_ranks() -> None:
    assert error() < MOST
    with LocalWorld(4) as world:
        assert max(world.run(error)) < MOST


def test_processes() -> None:
    assert max(results(2, in_a_process)) < MOST


def test_the_readme_shows_it() -> None:
    shown = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert shown == (ROOT / "examples" / "quickstart.py").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("launcher", "runs"), [("python", 2), ("torchrun --nproc-per-node 4", 4)])
def test_the_readmes_commands(launcher: str, runs: int, tmp_path: Path) -> None:
    """Its error is told for every rank, or alone and for the virtual ones."""
    arguments = ["-m", "ringattn.examples.quickstart"]
    assert f"`{launcher} {' '.join(arguments)}`" in README
    _, *options = launcher.split(" ")
    command = [sys.executable, *(["-m", "torch.distributed.run", *options] if options else []), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # ranks of torchrun do not buffer: the end of one's line may come after the next one's text
    errors = [float(error) for error in re.findall(r"(?:error|ranks:) (\de[-+]\d\d)", done.stdout)]
    assert len(errors) == runs and max(errors) < MOST
