"""Every transport on a GPU, and rings over it: ranks that share the GPUs of this machine, be there one or eight.

Ranks run in processes of their own (`gpu_ranks`), each with Triton's compiler, whatever this one is set to. Without a
GPU the harness itself is tried: its processes and rings on the CPU, its cases for copy engines on the stand-in for
CUDA's driver, and the search for a NCCL that lets ranks share a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.bench.common import launching
from ringattn.comm import LocalGroup, LocalWorld, Transport
from ringattn.comm.control import control_of
from ringattn.comm.transports.copy_engine.copy_engine import CopyEngineTransport, copy_engine_missing
from ringattn.comm.transports.nccl import nccl_missing
from ringattn.comm.watchdog.watch import EXIT_CODE

from ..support import gpu_cases, gpu_ranks, nccl_preload
from ..support.cuda.driver import running
from ..support.gpu_cases import ALONE, GPU_CASES, RING_CASES, cases_of
from ..support.transport_cases import CASES

ROOT = Path(__file__).parents[2]
WORLDS = {"local": (1, 2, 3, 4), "nccl": (1, 2, 4), "copy_engine": (2, 3, 4)}
SECONDS = 160.0  # for all cases of one transport and world
GRACE = 2.0  # beyond the deadline, as on the CPU

PLACES = [(transport, world) for transport, worlds in WORLDS.items() for world in worlds]
TRANSFERS = [(*place, name) for place in PLACES for name in cases_of(place[0])]
RINGS = [(*place, name) for place in PLACES for name, case in RING_CASES.items() if case.fits(*place)]


def why_not(transport: str, world: int) -> str | None:
    """Why ranks cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if transport == "copy_engine":
        return copy_engine_missing()
    if transport == "nccl":
        return nccl_missing() or (nccl_preload.cannot_share() if sharing(transport, world) else None)
    return None


def sharing(transport: str, world: int) -> bool:
    """Whether ranks of NCCL have to share a GPU."""
    return transport == "nccl" and world > torch.cuda.device_count()


def environment_of_sharing(world: int) -> dict[str, str]:
    return {nccl_preload.VARIABLE: str(nccl_preload.library()), **launching.sharing(world, torch.cuda.device_count())}


@dataclass
class Ended:
    """What ranks left behind."""

    told: list[dict[str, str]]  # by process
    digests: dict[str, str]
    errors: str
    ends: list[tuple[int, float]]  # exit code and time of each process
    killed: float

    def check(self, name: str) -> None:
        """Fail where a rank failed in a case, or did not get to it."""
        failures = {
            rank: report.get(name, report.get("start", "not run: something ended it before"))
            for rank, report in enumerate(self.told)
        }
        failed = [f"rank {rank}:\n{text}" for rank, text in failures.items() if text]
        assert not failed, "\n".join([*failed, self.errors[-2000:]])


def run_ranks(part: str, transport: str, world: int, folder: Path) -> Ended:
    """Run them to their end, or kill them when their time is over."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **(environment_of_sharing(world) if sharing(transport, world) else {}),
    }
    chain = [
        "tests.support.nccl_preload",
        *([] if torch.cuda.is_available() else ["tests.support.poisoned_fork"]),
        "tests.support.gpu_ranks",
    ]
    command = [sys.executable, "-m", *chain, part, transport, str(world), str(folder)]
    with (folder / "errors").open("w+") as errors:
        ranks = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # told by the cases that did not run
            ranks.wait(SECONDS)
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)  # with what it forked
            ranks.wait()
        errors.seek(0)
        text = errors.read()
    processes = 1 if transport == "local" else world
    return Ended(
        [read(folder / f"rank{rank}.json", {}) for rank in range(processes)],
        read(folder / "digests.json", {}),
        text,
        read(folder / "ends.json", []),
        read(folder / "killed", 0.0),
    )


def read(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise


@cache
def ended(part: str, transport: str, world: int) -> Ended:
    """Run once, looked at by many tests."""
    if (reason := why_not(transport, world)) is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(part, transport, world, Path(folder))


@pytest.mark.parametrize(("transport", "world", "name"), TRANSFERS)
def test_transfers(transport: str, world: int, name: str) -> None:
    ended("transfers", transport, world).check(name)


@pytest.mark.parametrize(("transport", "world", "name"), RINGS)
def test_rings(transport: str, world: int, name: str) -> None:
    ended("rings", transport, world).check(name)


@pytest.mark.parametrize(("transport", "world"), [place for place in PLACES if place[0] != "local"])
def test_rings_have_the_bits_of_virtual_ranks(transport: str, world: int) -> None:
    """A transport moves bytes and nothing else: results do not depend on it."""
    digests, expected = (ended("rings", name, world).digests for name in (transport, "local"))
    assert digests
    assert digests == {name: expected[name] for name in digests}


@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_a_killed_rank_ends_the_others(transport: str) -> None:
    """With an error that says where, and a code by which torchrun restarts: a stream would wait for ever.

    Where the host itself waits for the dead rank, its connection may tell first: that is an error like any other.
    """
    check_kill(ended("kill", transport, 2), {EXIT_CODE, 1})


@pytest.mark.parametrize("name", [name for name in ALONE if name != "hopper"])
def test_by_itself(name: str) -> None:
    """In a process of its own, with Triton's compiler."""
    if (reason := why_not("local", 1)) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.support.gpu_cases", name]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def check_kill(outcome: Ended, codes: set[int]) -> None:
    *others, victim = outcome.ends
    assert victim[0] == -signal.SIGKILL
    for ended, when in others:
        assert ended in codes
        assert when - outcome.killed <= gpu_ranks.DEADLINE + GRACE
    text = outcome.errors + "".join(report.get("ended", "") for report in outcome.told)
    assert re.search(r"rank 0: .*(forward|backward) hop \d+: .*\d+ bytes rank \d -> rank \d", text), text


# the harness itself, without a GPU

on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks take the GPU where there is one")


@on_the_cpu
@pytest.mark.nightly
def test_rings_on_the_cpu_have_the_same_bits(tmp_path: Path) -> None:
    digests = {}
    for transport in ("process_group", "local"):
        (tmp_path / transport).mkdir()
        digests[transport] = run_ranks("rings", transport, 4, tmp_path / transport)
        for name in RING_CASES:
            digests[transport].check(name)
    assert digests["local"].digests == digests["process_group"].digests
    assert {*digests["local"].digests} == {*RING_CASES}
    assert [code for code, _ in digests["process_group"].ends] == [0] * 4


@on_the_cpu
def test_transfers_on_the_cpu(tmp_path: Path) -> None:
    ended = run_ranks("transfers", "process_group", 2, tmp_path)
    for name in CASES:
        ended.check(name)


IMPORTS = """
import importlib
from tests.support import forked, poisoned_fork
poisoned_fork.install()
names = "support.gpu_ranks support.group_cases properties.wait_mutants properties.mutants properties.fuzz_ranks".split()
for name in [*(f"tests.{name}" for name in names), *forked.PRELOADED]:
    importlib.import_module(name)
print(*poisoned_fork.first)
"""


def test_no_gpu_is_asked_for_before_a_fork() -> None:
    """Imports alone do not initialise CUDA, so that later forks can use it."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert not done.stdout.strip(), done.stdout


@on_the_cpu
@pytest.mark.nightly
def test_a_kill_on_the_cpu(tmp_path: Path) -> None:
    check_kill(run_ranks("kill", "process_group", 3, tmp_path), {1})


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", GPU_CASES["copy_engine"])
def test_cases_on_the_stand_in(name: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, over = torch.device("cpu"), threading.Event()
    with running(monkeypatch) as workers, LocalWorld(world, device="cpu", timeout=60) as ranks:

        def hold(transport: Transport, seconds: float) -> None:
            assert isinstance(transport, CopyEngineTransport)
            ends = time.monotonic() + seconds
            number = transport._lane.stream.cuda_stream
            workers.put("hold", number, lambda: workers.block(lambda: over.is_set() or time.monotonic() > ends), None)

        def fn(group: LocalGroup) -> None:
            transport = CopyEngineTransport(
                rank=group.rank(), size=group.size(), device=cpu, control=control_of(group), timeout=60.0
            )
            GPU_CASES["copy_engine"][name](transport, cpu)
            if group.rank() == 0:
                over.set()  # nothing more is held up for long

        monkeypatch.setattr(gpu_cases, "hold", hold)
        monkeypatch.setattr(gpu_cases, "BUSY_SECONDS", 40.0)
        monkeypatch.setattr(gpu_cases, "SEGMENT", 1 << 16)
        monkeypatch.setattr(gpu_cases, "LARGE", 1000)
        ranks.run(fn)


@pytest.mark.parametrize(
    ("ranks", "gpus", "ctas"),
    [(1, 1, None), (2, 0, None), (4, 4, None), (2, 1, ""), (4, 2, ""), (3, 1, "4"), (5, 2, "4")],
)
def test_more_than_two_ranks_of_a_gpu_bound_their_ctas(
    ranks: int, gpus: int, ctas: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)
    bound = {"NCCL_MAX_CTAS": ctas} if ctas else {}
    assert launching.sharing(ranks, gpus) == ({} if ctas is None else {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **bound})
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    assert launching.sharing(ranks, gpus).get("NCCL_MAX_CTAS") == ("2" if ctas else None)
