"""This process's rank under torchrun, srun or mpirun, and its share of the machine.

torch is imported late, because the flags need the rank but not torch.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
TORCHRUN = "TORCHELASTIC_RUN_ID"
JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")  # identifies a job of OpenMPI or Slurm
# Rank, world, and rank and ranks on this machine. Slurm's are those of the step, because a batch script that calls this
# without srun also has SLURM_PROCID.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class LaunchedRank:
    """This process among those that a launcher started: its rank in the job and on its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def device(self) -> torch.device:
        """This rank's GPU if the machine has any, else the CPU; ValueError if there are fewer GPUs than ranks."""
        import torch

        gpus = torch.cuda.device_count()
        own = gpus == 1 and TORCHRUN not in os.environ  # srun and mpirun may show each rank only its own GPU
        if 0 < gpus <= self.local_rank and not own:
            raise ValueError(f"rank {self.rank} has no GPU: start at most {gpus} ranks on this machine")
        return self.shared_device("cuda" if gpus else "cpu")

    def shared_device(self, kind: str) -> torch.device:
        """Return this rank's device of that kind; ranks share GPUs if there are fewer GPUs than ranks."""
        import torch

        return torch.device(kind, self.local_rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)


def launched_rank() -> LaunchedRank | None:
    """Return this process's rank from the launcher's variables; None without a launcher or if srun starts only one."""
    for names in LAUNCHERS:
        rank, world, local_rank, local_world = (os.environ.get(name) for name in names)
        if rank is None or world is None:
            continue
        if world == "1" and names[0] != "RANK":
            return None  # `srun ringattn …` with one task equals a call by hand
        here = re.match(r"\d+", local_world or world)  # srun writes 4(x2) for four on each of two machines
        return LaunchedRank(int(rank), int(world), int(local_rank or rank), int(here[0]) if here else 1)
    return None


def open_store() -> TCPStore:
    """Return a store that listens on the loopback interface; TCPStore's own server would listen on every address."""
    from torch._C._distributed_c10d import TCPStore

    server = socket.create_server((LOOPBACK, 0))
    port, listening = server.getsockname()[1], server.detach()
    return TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listening)


def rank_environment(place: LaunchedRank, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank of this machine whose store has a port."""
    ranks = zip(LAUNCHERS[0], (place.rank, place.world, place.local_rank, place.local_world), strict=True)
    variables = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {TORCHRUN: "ringattn"} | {name: str(value) for name, value in (*ranks, *variables.items())}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ranks_here(world: int) -> int:
    """Return how many of ``world`` ranks are on this machine."""
    place = launched_rank()
    return world if place is None else min(world, place.local_world)
