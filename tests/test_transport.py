"""One suite for every transport: virtual ranks in threads, real processes over gloo, NCCL where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.comm import LocalGroup, LocalTransport, LocalWorld, Message, NcclTransport, open_transport
from ringattn.comm.control import control_of
from ringattn.comm.local import solo_group
from ringattn.comm.nccl import nccl_missing
from ringattn.comm.transport import TransportError
from ringattn.comm.warm_up import ring_edges

from .group_cases import GROUP_CASES, group_ranks
from .transport_cases import CASES, HOST_CASES, filled

PROCESSES = 4
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_nccl = pytest.mark.skipif(not torch.cuda.is_available() or bool(nccl_missing()), reason="needs CUDA and CuPy")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES | HOST_CASES)
def test_local(name: str, world_size: int) -> None:
    with LocalWorld(world_size, device="cpu", timeout=10) as world:
        world.run(lambda group: (CASES | HOST_CASES)[name](LocalTransport(group, CPU), CPU))


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Per global rank, what became of the cases that its process ran: "" or a traceback."""
    folder = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, "-m", "tests.group_cases", str(PROCESSES), str(folder)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(PROCESSES)]


def assert_passed(gloo: list[dict[str, str]], ranks: list[int], case: str) -> None:
    found = {rank: gloo[rank].get(case, "not run: an earlier case failed here") for rank in ranks}
    failed = [f"global rank {rank}:\n{text}" for rank, text in found.items() if text]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", [*CASES, *HOST_CASES, *GROUP_CASES])
def test_process_group(name: str, world_size: int, gloo: list[dict[str, str]]) -> None:
    assert_passed(gloo, group_ranks(world_size, PROCESSES), f"{name}-{world_size}")


def test_process_group_with_a_dead_peer(gloo: list[dict[str, str]]) -> None:
    assert_passed(gloo, list(range(PROCESSES)), "a_dead_peer")


def test_warm_up_finds_a_wrong_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank talks to the one across: as many bytes, in the right order, from the wrong rank."""
    post = LocalTransport.post

    def misled(transport: LocalTransport, **messages: Any) -> object:
        for kind in ("sends", "receives"):
            messages[kind] = [Message((peer + 2) % 4, tensor) for peer, tensor in messages[kind]]
        return post(transport, **messages)

    monkeypatch.setattr(LocalTransport, "post", misled)

    def fn(group: LocalGroup) -> None:
        with pytest.raises(TransportError, match="rank 3 got 2048 wrong bytes of 4096 from rank 2"):
            LocalTransport(group, CPU).warm_up(ring_edges(range(4)))

    with LocalWorld(4, device="cpu", timeout=10) as world:
        world.run(fn)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_local_on_a_gpu(name: str, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with LocalWorld(world_size, timeout=20) as world:
        world.run(lambda group: CASES[name](open_transport(group, device=device), device))


@needs_nccl
@pytest.mark.parametrize("name", CASES)
def test_nccl_to_itself(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transport = NcclTransport(rank=0, size=1, device=device, control=control_of(solo_group()))
    try:
        CASES[name](transport, device)
    finally:
        transport.close()


@needs_nccl
def test_nccl_waits_for_compute_both_ways() -> None:
    """Values, not only order: slow compute before the send, and compute on what arrived."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport = NcclTransport(rank=0, size=1, device=device, control=control_of(solo_group()))
    source, arrived = filled(0, 1 << 24, device), filled(-1, 1 << 24, device)
    for step in range(1, 20):
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        source.fill_(step)
        fence = transport.post(sends=[Message(0, source)], receives=[Message(0, arrived)], after=[transport.mark()])
        fence.wait()
        assert torch.equal(arrived, source), step
    transport.close()
