"""Ranks of one transport, each on the next GPU of this machine, and on the first again after the last.

`python -m tests.support.gpu_ranks transfers|rings|kill TRANSPORT WORLD FOLDER`. One process per rank, or for `local`
one for all. Where there is no GPU, ranks are on the CPU, which tries this harness itself. Each process leaves a JSON
file in the folder: for each case that it ran the traceback of its failure, or "" where there was none. On another
NCCL than torch's: `python -m tests.support.nccl_preload tests.support.gpu_ranks …`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from ringattn import LocalWorld, Ring, ring_attention
from ringattn.comm import (
    CopyEngineTransport,
    Group,
    LocalGroup,
    LocalTransport,
    NcclTransport,
    ProcessGroupTransport,
    Transport,
)
from ringattn.comm.control import control_of
from ringattn.comm.groups import MESH_DIMS, GroupLike

from .baselines import Results
from .forked import join
from .gpu_cases import RING_CASES, TOKENS, RingCase, cases_of, check_case, drawn, ring_arguments
from .ring_cases import LAYOUTS, rank_part, together
from .transport_cases import CASES, Case, traceback_of

PATIENCE = timedelta(seconds=60)
DEADLINE = 3.0  # seconds, of a ring with a rank that is killed
STEPS_BEFORE_KILL = 3
MOST_STEPS = 10_000

Tell = Callable[[str, str], None]
"""Says of a case how it went: a traceback, or "" where nothing was wrong."""


def telling(file: Path) -> Tell:
    """Writes at once: a later case may end the process."""
    messages: dict[str, str] = {}

    def tell(name: str, text: str) -> None:
        messages[name] = text
        file.write_text(json.dumps(messages))

    return tell


def device_of(rank: int) -> torch.device:
    """A GPU where there is one. Not called before the ranks are forked: CUDA does not survive that."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def transport_of(group: Group, name: str, device: torch.device) -> Transport:
    """A transport that nothing has been sent over yet: not even a warm-up."""
    if isinstance(group, LocalGroup):
        return LocalTransport(group, device)
    if name == "process_group":
        return ProcessGroupTransport(group, device)
    opened = NcclTransport if name == "nccl" else CopyEngineTransport
    return opened(rank=group.rank(), size=group.size(), device=device, control=control_of(group))


def transfers_of(transport: str, device: torch.device) -> dict[str, Case]:
    return cases_of(transport) if device.type == "cuda" else CASES


def transfers(group: Group, transport: str, device: torch.device, tell: Tell) -> None:
    """The conformance suite, up to the first case that fails: the peers are out of step from there on."""
    for name, case in transfers_of(transport, device).items():
        opened = transport_of(group, transport, device)
        error = traceback_of(case, opened, device)
        opened.close()
        tell(name, error)
        if error:
            return


def ring_part(
    case: RingCase, whole: dict[str, Tensor], group: Group, transport: str, device: torch.device
) -> list[Tensor]:
    """One rank's results of a case."""
    rank, world = group.rank(), group.size()
    ring = ring_arguments(case, world) | {"transport": transport}
    layout = LAYOUTS[case.layout](TOKENS, world)
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.call.items()}
    mesh: GroupLike = None
    if case.ulysses > 1:
        sizes = world // case.ulysses, case.ulysses
        if isinstance(group, LocalGroup):
            mesh = group.mesh(*sizes)
            group = mesh.ring
        else:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=MESH_DIMS)  # of its groups alone
            group = mesh.get_group("ring")
    options: dict[str, Any] = {"ring": ring, "calls": 2, "device": device, "causal": case.causal, **call}
    return rank_part(layout, whole, group, rank, mesh=mesh, **options)


def judge(name: str, parts: Sequence[Any], world: int, device: torch.device, folder: Path) -> None:
    """Against the reference; a digest of the bits is left for whoever compares transports."""
    case = RING_CASES[name]
    results: Results = together(LAYOUTS[case.layout](TOKENS, world), parts)
    digest = hashlib.sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in results)).hexdigest()
    known = json.loads((folder / "digests.json").read_text()) if (folder / "digests.json").exists() else {}
    (folder / "digests.json").write_text(json.dumps(known | {name: digest}))
    check_case(case, results, world, "triton" if device.type == "cuda" else "aten")


def rings_of(transport: str, world: int) -> Iterator[tuple[str, RingCase]]:
    yield from ((name, case) for name, case in RING_CASES.items() if case.fits(transport, world))


def rings(group: dist.ProcessGroup, transport: str, device: torch.device, folder: Path, tell: Tell) -> None:
    """Every ring over processes; a wrong result is told, anything else ends it."""
    rank, world = group.rank(), group.size()
    for name, case in rings_of(transport, world):
        everyone: list[Any] = [None] * world
        try:
            dist.all_gather_object(everyone, ring_part(case, drawn(case), group, transport, device))
        except BaseException:
            tell(name, traceback.format_exc())
            return
        tell(name, traceback_of(judge, name, everyone, world, device, folder) if rank == 0 else "")


def killed(rank: int, world: int, transport: str, device: torch.device, folder: Path) -> None:
    """The last rank dies after some steps; the others go on until something ends them."""
    case = RING_CASES["flat"]
    whole, layout = drawn(case), LAYOUTS[case.layout](TOKENS, world)
    q, k, v = (layout.shard(whole[name], rank).detach().to(device).requires_grad_() for name in "qkv")
    ring = Ring(transport=transport, deadline=DEADLINE)
    for step in range(MOST_STEPS):
        out = ring_attention(q, k, v, layout=layout, ring=ring, causal=True)
        torch.autograd.backward(out.sum())  # type: ignore[union-attr]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step == STEPS_BEFORE_KILL and rank == world - 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def process(part: str, transport: str, rank: int, world: int, folder: Path) -> None:
    """One rank of one process."""
    tell, code = telling(folder / f"rank{rank}.json"), 0
    try:
        device = device_of(rank)
        join(rank, world, FileStore(f"{folder}/store", world), PATIENCE)
        group = dist.group.WORLD
        assert group is not None
        if part == "transfers":
            transfers(group, transport, device, tell)
        elif part == "rings":
            rings(group, transport, device, folder, tell)
        else:
            killed(rank, world, transport, device, folder)
    except BaseException:
        code = 1
        tell("start" if part != "kill" else "ended", traceback.format_exc())
    finally:
        os._exit(code)  # at once: the peers of a rank that failed are to notice it


def virtual(part: str, world: int, folder: Path) -> None:
    """All ranks of a `LocalWorld`."""
    torch.set_num_threads(1)
    device, tell = device_of(0), telling(folder / "rank0.json")
    with LocalWorld(world, device=device, timeout=PATIENCE.total_seconds()) as ranks:

        def transfer(case: Case) -> None:
            ranks.run(lambda group: case(transport_of(group, "local", device), device))

        def ring(name: str, case: RingCase) -> None:
            whole = drawn(case)  # here: the ranks are threads, and share one generator
            judge(name, ranks.run(lambda group: ring_part(case, whole, group, "local", device)), world, device, folder)

        for name, ring_case in rings_of("local", world) if part == "rings" else ():
            tell(name, traceback_of(ring, name, ring_case))
        for name, case in transfers_of("local", device).items() if part == "transfers" else ():
            tell(name, traceback_of(transfer, case))


def main(part: str, transport: str, world: int, folder: Path) -> None:
    if transport == "local":
        virtual(part, world, folder)
        return
    # Forked before anything touches CUDA: torch is imported once.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=process, args=(part, transport, rank, world, folder)) for rank in range(world)]
    for running in ranks:
        running.start()
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < world:
        for rank, running in enumerate(ranks):
            if rank not in ended and running.exitcode is not None:
                ended[rank] = (running.exitcode, time.time())
        time.sleep(0.01)
    (folder / "ends.json").write_text(json.dumps([ended[rank] for rank in range(world)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
