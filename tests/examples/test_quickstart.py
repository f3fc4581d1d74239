"""The README's example on one device, on virtual ranks and on processes."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ringattn import ring_attention
from ringattn.examples import quickstart

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOLERANCE = 1e-4


@pytest.mark.parametrize("launched", [False, True])
def test_errors_are_printed_on_one_device_virtual_ranks_and_processes(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: Any = []
    answers = {"get_rank": 1, "get_world_size": 2, "init_process_group": None, "destroy_process_group": None}
    for name, answer in (answers | {"is_torchelastic_launched": launched}).items():
        monkeypatch.setattr(dist, name, lambda name=name, answer=answer: calls.append(name) or answer)
    runpy.run_path(str(quickstart.__file__), run_name="__main__")
    out = capsys.readouterr().out
    errors = [float(error) for error in re.findall(r"(?:error|ranks:) (\de[-+]\d\d)", out)]
    assert len(errors) == 2 - launched and 0 < max(errors) < TOLERANCE
    assert ("rank 1 of 2" in out) == launched and ("destroy_process_group" in calls) == launched


def test_an_error_in_any_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*qkv: Tensor, **call: Any) -> Any:
        return ring_attention(*qkv, **call) + 1

    monkeypatch.setattr(quickstart, "ring_attention", shifted)
    assert quickstart.largest_error() > 0.9


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
