"""Runs a function on every rank: in new processes of this machine, or in those of torchrun, srun or mpirun.

New processes get the environment variables that torchrun sets, and a store on the loopback interface. torch is imported
late, because the flags of the commands do not need it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import typer

from .ranks import LaunchedRank, launched_rank, open_store, rank_environment

T = TypeVar("T")


def run_process_group(world: int, measure: Callable[..., T], *arguments: object, device: str = "cpu") -> T:
    """Call ``measure(place, device, *arguments)`` on every rank of a process group and return its result.

    Under a launcher, every process returns its own result. Otherwise ``world`` new processes are the ranks, and the
    result is rank 0's. If a rank fails, print its error and raise typer.Exit. ``place`` is the rank's `LaunchedRank`,
    and ``device`` its device of the kind ``device`` (cpu or cuda). ``measure`` must be a function at module level.
    """
    if launched_rank() is not None:
        return _in_group(device, measure, arguments)
    try:
        result: T = launch_processes(world, _in_group, device, measure, arguments)
        return result
    except ChildProcessError as error:
        typer.echo(f"a rank failed: {error}", err=True)
        raise typer.Exit(1) from None


def _in_group(kind: str, measure: Callable[..., T], arguments: tuple[object, ...]) -> T:
    from .process_group import process_group

    place = launched_rank()
    assert place is not None
    device = place.shared_device(kind)
    with process_group(place, device):
        return measure(place, device, *arguments)


def launch_processes(world: int, entry: Callable[..., T], *arguments: object) -> T:
    """Call ``entry(*arguments)``, a function at module level, in ``world`` new processes; return rank 0's result.

    If a process raises or dies, the others are killed and ChildProcessError is raised.
    """
    with start_processes(world, entry, *arguments) as (folder, ranks):
        while None in (codes := [process.poll() for process in ranks]) and not any(codes):
            time.sleep(0.02)
        for rank, code in ((rank, code) for rank, code in enumerate(codes) if code):
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            error = folder / f"{rank}.error"
            raise ChildProcessError(f"rank {rank}: {error.read_text() if error.exists() else cause}")
        result: T = pickle.loads((folder / "result").read_bytes())
        return result


@contextmanager
def start_processes(
    world: int, entry: Callable[..., Any], *arguments: object
) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """Start ``world`` processes that call ``entry(*arguments)``; yield their folder and them, then kill them."""
    import torch

    store = open_store()
    shared = {"PYTHONPATH": os.pathsep.join(sys.path), **gpu_sharing_environment(world, torch.cuda.device_count())}
    ranks: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(prefix="ringattn-") as folder:
        Path(folder, "call").write_bytes(pickle.dumps((sys.argv, entry, arguments)))
        command = [sys.executable, "-c", f"from {__name__} import run_rank; run_rank({folder!r}, {os.getpid()})"]
        try:
            for rank in range(world):
                place = LaunchedRank(rank, world, rank, world)
                environment = os.environ | shared | rank_environment(place, store.port)
                # In a new session, Ctrl-C reaches only this process, which then kills the ranks.
                ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
            yield Path(folder), ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def run_rank(folder: str, parent: int) -> None:
    """Run one process of :func:`start_processes`; write rank 0's result, or any rank's traceback, into ``folder``."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    if os.getppid() != parent:
        sys.exit(1)
    try:
        sys.argv, entry, arguments = pickle.loads(Path(folder, "call").read_bytes())
        result = entry(*arguments)
    except Exception:
        with suppress(FileNotFoundError):  # after Ctrl-C the command has deleted the folder, and nobody reads the error
            Path(folder, f"{os.environ['RANK']}.error").write_text(traceback.format_exc())
        sys.exit(1)
    if os.environ["RANK"] == "0":
        Path(folder, "result").write_bytes(pickle.dumps(result))


def gpu_sharing_environment(ranks: int, gpus: int) -> dict[str, str]:
    """Return the variables with which NCCL 2.30 lets ``ranks`` share fewer ``gpus``; empty if each rank has its own."""
    # NCCL's documentation asks for a limit if more than two ranks share a GPU. It overrides Limits.
    bound = {"NCCL_MAX_CTAS": "4"} if ranks > 2 * gpus else {}
    defaults = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **bound} if 0 < gpus < ranks else {}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
