"""What `group=` and `transport=` take, and that wrong ones are refused with what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn.comm import (
    LocalGroup,
    LocalTransport,
    LocalWorld,
    ProcessGroupTransport,
    TransportError,
    group_rank_size,
    groups,
    open_transport,
    resolve_group,
)

from .stand_in import Fabric, install_nccl, install_streams

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Peers:
    """A process group of `size`, told what `all_gather_object` brings from its other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, size: int = 2) -> None:
        self.backend, self.others = backend, size - 1
        self.change: dict[int, object] = {}  # field of the peers' wish -> its value there
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
        monkeypatch.setattr(groups, "all_gather_object", lambda group, value: self.gather(value))

    def gather(self, value: tuple[object, ...]) -> list[tuple[object, ...]]:
        theirs = tuple(self.change.get(index, mine) for index, mine in enumerate(value))
        return [value] + [theirs] * self.others

    def agree(self, transport: str, device: torch.device) -> str:
        return groups._agree(self, transport, device)  # type: ignore[arg-type]


def test_none_is_one_device_alone() -> None:
    assert group_rank_size(None) == (0, 1)
    assert resolve_group(None) is resolve_group(None)  # a ring kept per group is found again
    transport = open_transport(device="cpu")
    assert isinstance(transport, LocalTransport)
    assert (transport.rank, transport.size) == (0, 1)
    assert transport.gather("x") == ["x"]


def test_none_is_the_default_group_once_there_is_one(gloo: dist.ProcessGroup) -> None:
    assert resolve_group(None) is gloo
    assert resolve_group(gloo) is gloo
    assert group_rank_size() == (0, 1)


def test_a_local_member_is_taken_as_it_is() -> None:
    with LocalWorld(3, device="cpu") as world:
        assert world.run(lambda group: resolve_group(group) is group) == [True] * 3
        assert world.run(group_rank_size) == [(0, 3), (1, 3), (2, 3)]


def test_meshes_of_one_dimension_are_taken(gloo: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ring",))
    assert group_rank_size(mesh) == (0, 1)
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "ring"))
    with pytest.raises(ValueError, match=r"DeviceMesh of 2 dimensions, a ring runs along one: pass mesh\['ring'\]"):
        resolve_group(both)
    assert group_rank_size(both["ring"]) == (0, 1)
    with pytest.raises(ValueError, match="with mesh_dim_names given"):
        resolve_group(init_device_mesh("cpu", (1, 1)))


@pytest.mark.parametrize("group", [3, "ring", [0, 1], LocalWorld])
def test_other_groups_are_refused(group: object) -> None:
    with pytest.raises(ValueError, match=r"it takes a torch\.distributed ProcessGroup, a one-dimensional DeviceMesh"):
        resolve_group(group)


def test_a_group_without_this_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="this rank is not a member"):
        resolve_group(dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("transport", ["auto", "local"])
def test_a_process_group_of_one_needs_no_processes(transport: str, gloo: dist.ProcessGroup) -> None:
    assert open_transport(gloo, transport=transport, device="cpu").name == "local"


def test_an_explicit_process_group_of_one(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed_up: list[object] = []
    monkeypatch.setattr(groups, "check_edges", lambda transport, device: warmed_up.append(transport))
    transport = open_transport(transport="process_group", device="cpu")
    assert isinstance(transport, ProcessGroupTransport)
    assert warmed_up == [transport]
    assert transport.gather(1) == [1]


@pytest.mark.parametrize(
    ("transport", "device", "match"),
    [
        ("ncl", CPU, "transport is 'ncl', it takes one of auto, local, nccl, process_group"),
        ("auto", torch.device("meta"), "device is meta: transports move tensors of cpu or cuda"),
        ("process_group", CPU, "torch.distributed is not initialised"),
        ("nccl", CPU, "it moves CUDA tensors, device is cpu"),
    ],
)
def test_what_one_device_alone_cannot_open(transport: str, device: torch.device, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        open_transport(transport=transport, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_said_before_anything_else() -> None:
    with pytest.raises(ValueError, match="device is cuda, and torch sees no CUDA device here"):
        open_transport(transport="nccl", device="cuda")


@pytest.mark.parametrize("transport", ["nccl", "process_group"])
def test_what_virtual_ranks_cannot_open(transport: str) -> None:
    def fn(group: LocalGroup) -> None:
        with pytest.raises(
            ValueError, match=f"transport is '{transport}', the ranks of a LocalWorld share one process"
        ):
            open_transport(group, transport=transport, device="cpu")

    with LocalWorld(2, device="cpu") as world:
        world.run(fn)


@pytest.mark.parametrize(
    ("transport", "backend", "device", "match"),
    [
        ("process_group", "cpu:gloo,cuda:gloo", CUDA, "on rank 0 the group's backend for CUDA tensors is gloo"),
        ("process_group", "cpu:gloo", CUDA, "backend for CUDA tensors is none"),
        ("process_group", "cuda:nccl", CPU, "the group has no backend for CPU tensors"),
        ("nccl", "cpu:gloo", CPU, "it moves CUDA tensors, device is cpu"),
        ("nccl", "cuda:nccl", CUDA, r'CuPy does not import.*pip install "ringattn\[cupy-cuda'),
        ("auto", "cuda:nccl", CPU, "the group has no backend for CPU tensors"),
        (
            "auto",
            "cpu:gloo,cuda:gloo",
            CUDA,
            r"finds none that works: nccl: on rank 0 CuPy.*; process_group: on rank 0",
        ),
    ],
)
def test_what_processes_cannot_open(
    transport: str, backend: str, device: torch.device, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nccl(monkeypatch, None)
    with pytest.raises(ValueError, match=match):
        Peers(monkeypatch, backend).agree(transport, device)


def test_auto_takes_what_every_rank_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nccl(monkeypatch, Fabric(install_streams(monkeypatch)))
    peers = Peers(monkeypatch, "cpu:gloo,cuda:nccl", size=3)
    assert peers.agree("auto", CUDA) == "nccl"
    assert peers.agree("auto", CPU) == "process_group"
    peers.change = {2: "CuPy does not import"}  # on the others; here it does
    assert peers.agree("auto", CUDA) == "process_group"
    with pytest.raises(ValueError, match='transport is "nccl", and on rank 1 CuPy does not import'):
        peers.agree("nccl", CUDA)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({0: "nccl"}, r"disagree on transport \(rank 0: auto, rank 1: nccl\)"),
        ({1: "cuda"}, r"disagree on device \(rank 0: cpu, rank 1: cuda\)"),
    ],
)
def test_ranks_that_disagree_are_told_who_has_what(
    change: dict[int, object], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Peers(monkeypatch, "cpu:gloo")
    peers.change = change
    with pytest.raises(TransportError, match=match):
        peers.agree("auto", CPU)


def test_local_between_processes_is_refused(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(gloo), "size", lambda group: 2)
    with pytest.raises(ValueError, match='transport is "local", the group has 2 processes'):
        open_transport(gloo, transport="local", device="cpu")
