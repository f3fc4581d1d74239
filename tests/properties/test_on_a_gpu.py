"""The suite's cases that need a GPU, on the GPUs of this machine; its transfers also run on a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringattn.bench.suite import device_cases, gpu_cases, part_processes
from ringattn.bench.suite.gpu_cases import TRANSFER_CASES
from ringattn.bench.suite.suite_parts import SuitePart, gpu_parts

from ..support.cuda.device import install_streams
from ..support.cuda.nccl import Fabric, install_nccl
from ..support.cuda.one_sided import install_one_sided, opened
from ..support.transport_cases import on_ranks

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
TIMED = ("ceilings", "targets", "LocalWorld")
WHERE = [part for part in gpu_parts() if device_cases.__name__ in part.command and part.name not in TIMED]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", WHERE, ids=lambda part: part.name)
def test_suite_cases_pass_on_the_gpu(part: SuitePart, tmp_path: Path) -> None:
    """Each case runs in its own process with Triton's compiler."""
    row = part_processes.run_part(part, tmp_path, "cuda", time.monotonic() + SECONDS)
    if row["state"] == part_processes.NOT_HERE:
        pytest.skip(str(row["found"]))
    assert row["state"] == part_processes.DONE, row


IMPORTS = """
import importlib
from tests.support import rank_processes, poisoned_fork
poisoned_fork.install()
names = "support.group_cases properties.wait_mutants properties.mutants properties.fuzz_ranks".split()
for name in [*(f"tests.{name}" for name in names), *rank_processes.PRELOADED]:
    importlib.import_module(name)
print(*poisoned_fork.first)
"""


def test_imports_do_not_initialise_cuda() -> None:
    """A process that initialises CUDA cannot fork."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert not done.stdout.strip(), done.stdout


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("case", TRANSFER_CASES["nccl_one_sided"])
def test_suite_transfers_pass_on_the_stand_in(
    case: Callable[..., None], world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = Fabric(install_streams(monkeypatch))
    install_nccl(monkeypatch, fabric)
    install_one_sided(monkeypatch, fabric)
    monkeypatch.setattr(gpu_cases, "hold_stream", time.sleep)
    monkeypatch.setattr(gpu_cases, "SEGMENT", 1 << 16)
    monkeypatch.setattr(gpu_cases, "LARGE_BYTES", 1000)
    on_ranks(world, lambda group: case(opened(group), torch.device("cpu")))
