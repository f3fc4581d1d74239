"""The process group of the ranks that a launcher or :mod:`.launching` started, and the store where they meet."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from .ranks import JOB, LOOPBACK, TORCHRUN, LaunchedRank

TIMEOUT = timedelta(minutes=10)  # for one wait for other ranks: far more than a step of the demo takes
CONSEQUENCE_DELAY = 3.0  # seconds
PORTS = range(10_000, 30_000)  # below the ephemeral ports of outgoing connections

_groups = itertools.count()


@contextmanager
def process_group(place: LaunchedRank, device: torch.device) -> Iterator[None]:
    """Open the default group of torch.distributed over all ranks: gloo, and on GPUs also NCCL."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if place.world == place.local_world and (TORCHRUN in os.environ or _address(place) in (LOOPBACK, "localhost")):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    # Every group gets its own prefix: a rank that opens the next group early would read keys of the last group.
    store = PrefixStore(str(next(_groups)), _store(place))
    with delay_secondary_errors():  # another rank may fail before all have met
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
    try:
        with delay_secondary_errors():  # peers see this rank's error only when the group closes
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def delay_secondary_errors() -> Iterator[None]:
    """Delay an error that another rank's end may have caused, so that the original error is reported first."""
    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError, typer.Exit):
        raise  # a RuntimeError that only this rank can have caused
    except RuntimeError:  # gloo reports a closed connection as a plain RuntimeError
        time.sleep(CONSEQUENCE_DELAY)
        raise


@cache
def _store(place: LaunchedRank) -> Store:
    """Return the store where the ranks meet; it lives as long as this process."""
    address = os.environ.setdefault("MASTER_ADDR", _address(place))
    port = int(os.environ.setdefault("MASTER_PORT", str(_port())))
    if address in (LOOPBACK, "localhost") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # TCPStore's own server would listen on every address of the machine.
        served = socket.create_server((LOOPBACK, port)).detach() if place.rank == 0 else None
        return TCPStore(LOOPBACK, port, place.world, place.rank == 0, TIMEOUT, master_listen_fd=served)
    store: Store = next(rendezvous("env://", place.rank, place.world, timeout=TIMEOUT))[0]
    return store


def _address(place: LaunchedRank) -> str:
    """Return the host of rank 0; raise ValueError if a launcher of several machines does not name it."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if place.world == place.local_world:
        return LOOPBACK
    if first := re.match(r"(?:[^,\[]|\[[^]]*\])+", os.environ.get("SLURM_STEP_NODELIST", "")):
        return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])  # gpu[03-05,9],login becomes gpu03
    raise ValueError(
        f"MASTER_ADDR is not set, and only {place.local_world} of {place.world} ranks are on this machine. "
        "Set it to the host of rank 0 (mpirun -x MASTER_ADDR=host)."
    )


def _port() -> int:
    """Return this job's own port, so that two jobs on one machine do not collide."""
    job = ".".join(os.environ.get(name, "") for name in JOB)
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]
