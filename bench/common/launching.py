"""One process per rank: started here by torch's elastic launcher, or found under torchrun, srun or mpirun.

torch is imported where it is used: the flags need to know who prints, and nothing of torch.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

LOOPBACK, INTERFACE = "127.0.0.1", "lo"
LOCAL = (LOOPBACK, "localhost")
TORCHRUN = "TORCHELASTIC_RUN_ID"
TIMEOUT = timedelta(minutes=10)  # of one wait for the other ranks: far more than a step of a demo takes
LATER = 3.0  # seconds; times of errors are compared in whole ones
# what launchers set: rank, ranks, rank and ranks on this machine. srun's are those of the step: a batch script that
# calls us without srun has SLURM_PROCID too, and is no rank of anything
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
# what tells one job's ranks from another's: OpenMPI's (and Slurm's PMIx's) name of it, or Slurm's two numbers
JOBS = (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"))
SHARED_CTAS = "4"  # of a rank, where more than two share a GPU: NCCL's documentation asks for a bound there
STARTING = "start_processes"  # of torch.multiprocessing
USUAL_PORT = 29500  # torchrun's: where a launcher does not name the job
PORTS = range(10_000, 30_000)  # below those that the system gives to outgoing connections

_groups = itertools.count()


@dataclass(frozen=True)
class Member:
    """This process among those that a launcher started."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def threads(self) -> int:
        """This rank's share of the cores."""
        return max(1, cores() // self.local_world)

    @property
    def device(self) -> torch.device:
        """This rank's GPU where the machine has some, else the CPU.

        Raises:
            ValueError: more ranks than GPUs on this machine.
        """
        import torch

        gpus = torch.cuda.device_count()
        own = gpus == 1 and TORCHRUN not in os.environ  # srun and mpirun may show each rank its own GPU alone
        if 0 < gpus <= self.local_rank and not own:
            raise ValueError(f"rank {self.rank} finds no GPU: {self.local_world} ranks here, {gpus} GPUs; start fewer")
        return self.shared_device("cuda" if gpus else "cpu")

    def shared_device(self, kind: str) -> torch.device:
        """This rank's device of that kind; where there are fewer GPUs than ranks on this machine, they share them."""
        import torch

        if kind == "cpu":
            return torch.device("cpu")
        gpus = torch.cuda.device_count()
        return torch.device("cuda", 0 if gpus == 1 else self.local_rank % gpus)


def member() -> Member | None:
    """This process's place under a launcher; None where there is none, or only this one process."""
    for names in LAUNCHERS:
        rank, world, local_rank, local_world = (os.environ.get(name) for name in names)
        if rank is None or world is None:
            continue
        if world == "1" and names[0] != "RANK":
            return None  # `srun ringattn …` with one task: as if it had been called by hand
        here = re.match(r"\d+", local_world or world)  # srun writes 4(x2): four on each of two machines
        return Member(int(rank), int(world), int(local_rank or rank), int(here[0]) if here else 1)
    return None


def world_of(place: Member | None, given: int | None, usual: int) -> int:
    """How many ranks: the launcher's, or what ``--world`` says, or as many as usual.

    Raises:
        typer.BadParameter: another number than the launcher started.
    """
    if place is None:
        return usual if given is None else given
    if given not in (None, place.world):
        raise typer.BadParameter(f"--world is {given}: the launcher started {place.world} ranks; leave it out")
    return place.world


def forget_launcher() -> None:
    """Let this process, and those that it starts, be as if it had been called by hand."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        del os.environ[name]
    for name in (name for names in LAUNCHERS for name in names):
        os.environ.pop(name, None)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ranks_here(world: int) -> int:
    """How many of so many ranks are on this machine: all, or as many as the launcher started here."""
    place = member()
    return world if place is None else min(world, place.local_world)


def threads_of(given: int | None, world: int) -> int:
    """Of each of so many ranks: what ``--threads`` says, or its share of the cores."""
    return given or max(1, cores() // ranks_here(world))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads of PyTorch's for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def process_group(place: Member, store: str | None = None, *, device: torch.device | None = None) -> Iterator[None]:
    """The default group of torch.distributed over all ranks: gloo and, on GPUs, NCCL.

    ``store`` is a file where the ranks meet; without it they meet where the launcher says. ``device`` is this rank's,
    where it is not the one that its place gives it. Where a rank fails, it is its error that ends them all, and not
    another's, whose connection to it closed: see :func:`consequences_later`.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    backend, device = "gloo", device or place.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    # names of its own for each group: a rank that opens the next one early would read what the last one left
    fresh = PrefixStore(str(next(_groups)), _store(place, store))
    with _environment(**_interfaces(place)):
        with consequences_later():  # another rank may fail before all have met
            dist.init_process_group(backend, store=fresh, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
        try:
            with consequences_later():  # until the group closes, nobody else has an error of this one's making
                yield
        finally:
            dist.destroy_process_group()


def _interfaces(place: Member) -> dict[str, str]:
    """What gloo and NCCL listen on where all ranks are on this machine, unless somebody has said it."""
    if place.world > place.local_world or not (TORCHRUN in os.environ or _address(place) in LOCAL):
        return {}
    return {name: os.environ.get(name, INTERFACE) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


@contextmanager
def consequences_later() -> Iterator[None]:
    """Raise a little later what another rank's end may be the cause of: the first error of all is the one told.

    That is a RuntimeError, as gloo's of a closed connection is, which has no class of its own.
    """
    import torch

    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError, typer.Exit):  # RuntimeErrors too, and a rank's own
        raise
    except RuntimeError:
        time.sleep(LATER)
        raise


@cache
def _store(place: Member, file: str | None) -> Store:
    """Where the ranks meet for as long as this process lives: in a file, or where the launcher says.

    One for each group would let a rank that is early for the next group meet in the store of the last one; and the last
    rank to close a file removes it, under whoever has opened it anew.
    """
    from torch._C._distributed_c10d import FileStore, TCPStore
    from torch.distributed.rendezvous import rendezvous

    if file is not None:
        return FileStore(file, place.world)
    address = os.environ.setdefault("MASTER_ADDR", _address(place))
    port = int(os.environ.setdefault("MASTER_PORT", str(_port())))
    if address in LOCAL and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # by itself the server would listen on every address of the machine
        served = socket.create_server((LOOPBACK, port)).detach() if place.rank == 0 else None
        return TCPStore(LOOPBACK, port, place.world, place.rank == 0, TIMEOUT, master_listen_fd=served)
    store: Store = next(rendezvous("env://", place.rank, place.world, timeout=TIMEOUT))[0]
    store.set_timeout(TIMEOUT)
    return store


def _address(place: Member) -> str:
    """Where rank 0 is, as far as the launcher tells: torchrun does in MASTER_ADDR, Slurm by its list of nodes.

    Raises:
        ValueError: several machines, and nothing says which is rank 0's.
    """
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if place.world == place.local_world:
        return LOOPBACK
    if "SLURM_STEP_NODELIST" in os.environ:
        return first_host(os.environ["SLURM_STEP_NODELIST"])
    raise ValueError(
        f"MASTER_ADDR is not set, and {place.world} ranks, {place.local_world} of them here, are on several machines: "
        "set it to the host of rank 0 (mpirun -x MASTER_ADDR=host)"
    )


def first_host(nodes: str) -> str:
    """The first name of a list as Slurm writes it: ``gpu[03-05,9],login`` begins with ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0]) if first else nodes


def _port() -> int:
    """One for each job: at one port for all, the ranks of two jobs of a machine would meet each other."""
    for names in JOBS:
        if all(name in os.environ for name in names):
            job = ".".join(os.environ[name] for name in names)
            return PORTS[zlib.crc32(job.encode()) % len(PORTS)]
    return USUAL_PORT


def sharing(ranks: int, gpus: int) -> dict[str, str]:
    """The environment in which so many ranks share so many GPUs by NCCL, from 2.30 on; empty where each has its own.

    NCCL_MAX_CTAS holds for the whole process: with more than two ranks on a GPU, no ``Limits`` of their own are kept.
    """
    if not 0 < gpus < ranks:
        return {}
    bound = {"NCCL_MAX_CTAS": SHARED_CTAS} if ranks > 2 * gpus else {}
    return {name: os.environ.get(name, value) for name, value in {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **bound}.items()}


def launch(world: int, entry: Callable[..., T], *arguments: object) -> T:
    """Call ``entry(store, *arguments)`` in ``world`` new processes of this machine; what it returns on rank 0.

    ``entry`` is a module's function. The ranks meet in files and talk over the loopback interface: nothing listens for
    the world outside.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process raised, or died.
        KeyboardInterrupt: the user ended it, and with it the processes.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the agent would open a TCP server on every interface for the ranks to meet at
    inside = _environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **sharing(world, torch.cuda.device_count()))
    with TemporaryDirectory(prefix="ringattn-") as folder, inside:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id="ringattn",
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder, "rendezvous")),
            rdzv_configs={"store_type": "file"},
            local_addr=LOOPBACK,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # of SIGINT see below
        )
        with _interrupted_alone():
            results: dict[int, T] = elastic_launch(config, entry)(str(Path(folder, "store")), *arguments)
    return results[0]


@contextmanager
def _interrupted_alone() -> Iterator[None]:
    """Ctrl-C is of this process, not of those that it starts: it ends them, without a word of torch's agent or theirs.

    They inherit that the signal is blocked, also while they import; a thread that blocks nothing receives it here.

    Raises:
        KeyboardInterrupt: it came, and they are gone.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def end(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == STARTING:  # nobody would end the processes that are there already: soon
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                return
            frame = frame.f_back
        raise SignalException("interrupted", signal.SIGTERM)  # what the agent sends them

    quiet, over = logging.root.manager.disable, threading.Event()
    logging.disable(logging.ERROR)  # what torch's agent tells of a rank that failed is in the error as well
    threading.Thread(target=over.wait, daemon=True).start()
    resource_tracker.ensure_running()  # multiprocessing's, which unblocks the signal when it starts
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGALRM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        over.set()
        logging.disable(quiet)


def started(world: int, entry: Callable[..., T], *arguments: object) -> T:
    """What rank 0 of new processes returns; where one of them fails, its error and exit code 1."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        return launch(world, entry, *arguments)
    except ChildFailedError as error:
        typer.echo(f"a rank failed: {error}", err=True)
        raise typer.Exit(1) from None


def spawn(world: int, measure: Callable[..., T], *arguments: object, device: str = "cpu") -> T:
    """Call ``measure(place, device, *arguments)`` on every rank of a process group.

    The ranks are those of the launcher, each of which gets what it returns; without one, ``world`` new processes of
    this machine, of which rank 0's result is returned. ``measure`` is a module's function, ``device`` cpu or cuda.

    Raises:
        typer.Exit: one of the new processes failed; its error is told.
    """
    place = member()
    if place is not None:
        return _in_group(place, None, device, measure, arguments)
    result: T = started(world, _as_rank, device, measure, arguments)
    return result


def _as_rank(store: str, kind: str, measure: Callable[..., T], arguments: tuple[object, ...]) -> T:
    """One new process; its error is left where the one that started it reads it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    place = member()
    assert place is not None
    in_group: Callable[..., Any] = record(_in_group)
    result: T = in_group(place, store, kind, measure, arguments)
    return result


def _in_group(
    place: Member, store: str | None, kind: str, measure: Callable[..., T], arguments: tuple[object, ...]
) -> T:
    device = place.shared_device(kind)
    with process_group(place, store, device=device):
        return measure(place, device, *arguments)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for a while, for the processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
