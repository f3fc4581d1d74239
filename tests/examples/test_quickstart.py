"""The README's example on one device, on virtual ranks and on processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringattn import LocalWorld
from ringattn.examples.quickstart import largest_error

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOLERANCE = 1e-4


def test_one_device_and_virtual_ranks() -> None:
    assert largest_error() < TOLERANCE
    with LocalWorld(4) as world:
        assert max(world.run(largest_error)) < TOLERANCE


def test_readme_shows_the_example() -> None:
    shown = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert shown == (ROOT / "examples" / "quickstart.py").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("launcher", "runs"), [("python", 2), ("torchrun --nproc-per-node 4", 4)])
def test_readme_commands(launcher: str, runs: int, tmp_path: Path) -> None:
    arguments = ["-m", "ringattn.examples.quickstart"]
    assert f"`{launcher} {' '.join(arguments)}`" in README
    _, *options = launcher.split(" ")
    command = [sys.executable, *(["-m", "torch.distributed.run", *options] if options else []), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # torchrun's ranks write unbuffered, so their lines may be interleaved
    errors = [float(error) for error in re.findall(r"(?:error|ranks:) (\de[-+]\d\d)", done.stdout)]
    assert len(errors) == runs and max(errors) < TOLERANCE
