"""What `group=` and `transport=` take, and that wrong ones are refused with what would be right."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn.comm import (
    Limits,
    LocalGroup,
    LocalTransport,
    Message,
    ProcessGroupTransport,
    Topology,
    Transport,
    TransportError,
    group_rank_size,
    kept,
    open_transport,
    open_transports,
    register_transport,
    resolve_group,
    unregister_transport,
)
from ringattn.comm.control import Control, control_of
from ringattn.comm.limits import NO_LIMITS
from ringattn.comm.transport import WARM_UP_SECONDS
from ringattn.comm.transports import choice, nccl, process_group
from ringattn.comm.transports.choice import Request, choose, request_of
from ringattn.comm.transports.lanes import HostLane
from ringattn.comm.transports.process_group import _Pending
from ringattn.comm.watchdog.deadlines import FIRST_SECONDS
from ringattn.comm.watchdog.watch import ring_control
from ringattn.comm.world import DEFAULT_TIMEOUT, single_rank

from ..support.cuda.device import install_streams
from ..support.cuda.nccl import Fabric, install_nccl
from ..support.transport_cases import HANGS, on_ranks, until

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Peers:
    """A process group and its control, told what its other ranks bring."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, size: int = 2) -> None:
        self.names, self.others = range(size), size - 1
        self.change: dict[str, object] = {}  # field of the peers' request, or name of a transport -> its value there
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)

    def size(self) -> int:
        return 1 + self.others

    def merged(self, value: tuple[object, ...], merge: Callable[[list[Any]], object], *, what: str) -> object:
        request = Request(*value)  # type: ignore[arg-type]
        fields = {name: there for name, there in self.change.items() if name in Request._fields and name != "problems"}
        problems = {name: self.change.get(name, problem) for name, problem in request.problems.items()}
        theirs = tuple(request._replace(**fields, problems=problems))  # type: ignore[arg-type]
        return merge([value] + [theirs] * self.others)

    def choose(
        self, transport: str, device: torch.device, limits: Limits = NO_LIMITS, levels: int = 1
    ) -> list[tuple[str, ...]]:
        request = request_of(self, transport, device, None, limits, levels)  # type: ignore[arg-type]
        return choose(self, request, levels)[0]  # type: ignore[arg-type]


def test_what_a_group_may_be(gloo: dist.ProcessGroup) -> None:
    assert resolve_group(None) is resolve_group(gloo) is gloo
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ring",))
    assert group_rank_size(mesh) == (0, 1)
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "ring"))
    with pytest.raises(ValueError, match=r"DeviceMesh of 2 dimensions, a ring runs along one: pass mesh\['ring'\]"):
        resolve_group(both)
    assert group_rank_size(both["ring"]) == (0, 1)
    with pytest.raises(ValueError, match="with mesh_dim_names given"):
        resolve_group(init_device_mesh("cpu", (1, 1)))
    other: Any = 3
    with pytest.raises(ValueError, match=r"it takes a torch\.distributed ProcessGroup, a one-dimensional DeviceMesh"):
        resolve_group(other)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="this rank is not a member"):
        resolve_group(outside)


def test_none_is_one_device_alone() -> None:
    assert group_rank_size(None) == (0, 1)
    assert resolve_group(None) is resolve_group(None)  # a ring kept per group is found again
    transport = open_transport(device="cpu")
    assert isinstance(transport, LocalTransport)
    assert (transport.rank, transport.size) == (0, 1)


def test_transports_of_processes_and_of_virtual_ranks(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match='the ranks of a LocalWorld share one process: use "local"'):
            open_transport(group, transport="process_group", device="cpu")

    on_ranks(2, fn)
    with pytest.raises(
        ValueError, match='"local", and on rank 0 the group has 2 processes: use "nccl" or "process_group'
    ):
        Peers(monkeypatch, "gloo").choose("local", CPU)


@pytest.mark.parametrize(
    ("transport", "device", "match"),
    [
        ("ncl", CPU, "transport is 'ncl': it must be one of auto, local, nccl, process_group, nccl_one_sided"),
        (
            "auto",
            torch.device("meta"),
            "device is device\\(type='meta'\\): it must be cpu or a CUDA device that torch sees",
        ),
        ("process_group", CPU, "torch.distributed is not initialised"),
        ("nccl", CPU, "it moves CUDA tensors, device is cpu"),
        ("nccl_one_sided", CPU, '"nccl_one_sided", and on rank 0 it moves CUDA tensors, device is cpu'),
        (
            "nccl",
            torch.device("cuda"),
            "CUDA device",
        ),
    ],
)
def test_what_one_device_alone_cannot_open(
    transport: str, device: torch.device, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=match):
        open_transport(transport=transport, device=device)
    with pytest.raises(ValueError, match="topology has 4 ranks, the group has 1"):
        open_transports(device="cpu", topology=Topology.grid(2, 2))


@pytest.mark.parametrize(
    ("transport", "backend", "device", "match"),
    [
        ("process_group", "cpu:gloo,cuda:gloo", CUDA, "on rank 0 the group's backend for CUDA tensors is gloo"),
        ("process_group", "cuda:nccl", CPU, "the group has no backend for CPU tensors"),
        ("nccl", "cuda:nccl", CUDA, r'CuPy does not import.*pip install "ringattn\[cupy-cuda'),
        (
            "auto",
            "cpu:gloo,cuda:gloo",
            CUDA,
            r"none that works: nccl: on rank 0 CuPy.*; process_group: on rank 0 .*; nccl_one_sided: on rank 0 CuPy",
        ),
    ],
)
def test_what_processes_cannot_open(
    transport: str, backend: str, device: torch.device, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nccl(monkeypatch, None)
    with pytest.raises(ValueError, match=match):
        Peers(monkeypatch, backend).choose(transport, device)


@pytest.mark.parametrize("field", ["transport", "device", "topology", "limits"])
def test_disagreements_name_the_value_of_every_rank(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(monkeypatch, "cpu:gloo")
    peers.change = {field: "another"}
    with pytest.raises(TransportError, match=rf"disagree on {field} \(rank 0: .*, rank 1: another\)"):
        peers.choose("auto", CPU)


def test_levels_of_a_topology() -> None:
    topology = Topology(((0, 2), (3, 1)))
    inside, between = choice._levels(3, topology)
    assert (inside.members, set(inside.edges)) == ((3, 1), {(0, 2), (2, 0), (3, 1), (1, 3)})
    assert (between.members, set(between.edges)) == ((0, 3), {(0, 3), (3, 0), (2, 1), (1, 2)})
    (flat,) = choice._levels(1, Topology(((2, 0), (1,))))
    assert (flat.members, flat.nodes) == ((2, 0, 1), ((2, 0), (1,)))
    assert set(flat.edges) == {(2, 0), (0, 1), (1, 2), (0, 2), (1, 0), (2, 1)}
    (flat,) = choice._levels(3, topology, flat=True)
    assert (flat.members, flat.nodes) == ((0, 2, 3, 1), topology.nodes)
    for nodes in (((0, 1, 2),), ((0,), (1,))):
        assert choice._levels(0, Topology(nodes))[0].nodes == ()  # every edge is of one kind


def test_the_thread_of_a_transport_does_not_keep_the_process_group(tmp_path: Path) -> None:
    """Its destructor would run in that thread, perhaps while the interpreter is taken down: the process then aborts."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        transport = ProcessGroupTransport(dist.group.WORLD, CPU)  # type: ignore[arg-type]
        message = Message(0, torch.zeros(3))
        transport.post(sends=[message], receives=[Message(0, torch.ones(3))]).wait()
        held, group = transport._host, weakref.ref(dist.group.WORLD)
        del transport
    finally:
        dist.destroy_process_group()
    assert held._thread is not None
    until(lambda: gc.collect() >= 0 and group() is None)  # its thread lets go once it has ended the last transfer
    held._thread.join(60)
    assert not held._thread.is_alive(), "the thread of a transport that nobody holds"


def test_warm_ups_end_while_others_still_wait_for_them(gloo: dist.ProcessGroup) -> None:
    """Half of the patience: who waits for what the others say of a warm-up has had one of its own."""
    timeouts = list[float]()

    def factory(group: dist.ProcessGroup, device: torch.device, *, timeout: float, **_: object) -> Transport:
        timeouts.append(timeout)
        return ProcessGroupTransport(group, device)

    for patience in (4.0, 1e6):
        open_transport(gloo, transport=factory, device=CPU, control=control_of(gloo, patience)).close()
    assert timeouts == [2.0, WARM_UP_SECONDS]


@pytest.mark.parametrize(("sent", "received"), [(400, 400), (100, 400), (400, 100)])
def test_a_throttled_link_moves_both_directions_at_once(
    sent: int, received: int, gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the time of the busier one, not of both after each other."""
    transport = ProcessGroupTransport(gloo, CPU, limits=Limits(bytes_per_second=100.0))
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(transport._host.stopped, "wait", waits.append)
    over: Any = _Pending(SimpleNamespace(wait=bool), torch.empty(0), "")  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "_start", lambda *_: over)
    transport._transfer([Message(0, torch.empty(sent // 4))], [Message(0, torch.empty(received // 4))], [], [])
    transport.close()
    assert waits == [4.0]


def test_transports_of_one_group_take_tags_in_turn(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has counted three more: here they could not be opened."""
    monkeypatch.setattr(Control, "gather", lambda control, value, **_: [value, 3])
    for tag in (3, 4):
        transport = ProcessGroupTransport(gloo, CPU)
        assert transport._tag == process_group.FIRST_TAG + tag
        transport.close()


@pytest.mark.parametrize(("patience", "waits"), [(2.0, 2.0), (1e6, DEFAULT_TIMEOUT), (None, DEFAULT_TIMEOUT)])
def test_virtual_ranks_wait_as_long_as_their_control_does(patience: float | None, waits: float) -> None:
    """And no longer than their world."""
    transport = open_transport(device="cpu", control=control_of(single_rank(), patience))
    assert isinstance(transport, LocalTransport) and transport._patience == waits


def test_the_first_wait_of_a_ring_is_for_ranks_that_compile(gloo: dist.ProcessGroup) -> None:
    given: list[tuple[Any, float | None]] = [(gloo, None), (gloo, 4.0), (single_rank(), None), (single_rank(), 4.0)]
    waits = [ring_control(group, deadline).patience for group, deadline in given]
    assert waits == [FIRST_SECONDS, 4.0, DEFAULT_TIMEOUT, 4.0]


def test_an_abort_ends_the_transfers_of_a_stream(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, ended, lane = ProcessGroupTransport(gloo, CPU), list[torch.device](), HostLane()
    backend = SimpleNamespace(abort=lambda: ended.append(CPU))
    monkeypatch.setattr(transport, "_lane", lane)
    monkeypatch.setattr(transport, "_group", SimpleNamespace(_get_backend=lambda device: backend))
    for _ in range(2):
        transport.abort("enough")
    assert ended == [CPU]


def test_what_is_kept_ends_on_its_device_and_the_connection_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are kept by device, and by device and deadline."""
    entered, cuda = list[torch.device](), torch.device("cuda", 1)

    def on_device(device: torch.device) -> Any:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(kept, "on_device", on_device)
    kept.end({key: SimpleNamespace(close=str) for key in (cuda, (cuda, 4.0), kept.CONNECTION)})
    assert entered == [CPU, cuda, cuda]


def test_what_is_kept_for_a_destroyed_group_ends_when_another_one_is_used(gloo: dist.ProcessGroup) -> None:
    destroyed, closed = Mock(spec=dist.ProcessGroup), threading.Event()
    kept._KEPT[destroyed] = {kept.CONNECTION: SimpleNamespace(close=closed.set)}
    kept.kept_of(gloo)
    assert closed.wait(HANGS)


def test_what_is_left_of_a_failed_group_of_transfers_is_ended(
    gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write to memory that is free by then."""

    def fail() -> None:
        raise RuntimeError("closed by peer")

    transport, ended, message = ProcessGroupTransport(gloo, CPU), list[Any](), Message(0, torch.empty(1))
    broken: Any = _Pending(SimpleNamespace(wait=fail), torch.empty(0), "")  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "_start", lambda *_: broken)
    monkeypatch.setattr(process_group, "_interrupt", ended.append)
    for receives in ([message], [message, message]):
        with pytest.raises(TransportError, match="closed by peer"):
            transport._transfer([], receives, [], [])
    assert ended == [gloo]
    transport.close()


def test_a_failure_before_the_choice_is_propagated_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is part of what the rank contributes to the choice, for which the others wait."""

    def fails(*limits: object) -> str:
        raise OSError("/proc is not mounted")

    monkeypatch.setattr(nccl, "nccl_missing", fails)
    with pytest.raises(ValueError, match='transport is "nccl", and on rank 0 OSError: /proc is not mounted'):
        Peers(monkeypatch, "cuda:nccl").choose("nccl", CUDA)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Two ranks that have everything."""
    install_nccl(monkeypatch, Fabric(install_streams(monkeypatch)))
    return Peers(monkeypatch, "cpu:gloo,cuda:nccl")


def test_auto_chooses_a_transport_of_all_ranks(able: Peers) -> None:
    assert able.choose("auto", CUDA) == [("nccl",), ("process_group",)]
    assert able.choose("auto", CPU) == [("process_group",)]
    able.change = {"nccl": "CuPy does not import"}  # on the other rank; here it does
    assert able.choose("auto", CUDA) == [("process_group",)]
    with pytest.raises(ValueError, match='transport is "nccl", and on rank 1 CuPy does not import'):
        able.choose("nccl", CUDA)


def test_a_transport_of_one_node_leaves_the_level_between_nodes_to_another(able: Peers) -> None:
    register_transport("of_a_node", LocalTransport, devices=("cuda",), across_nodes=False)
    try:
        assert able.choose("nccl", CUDA, levels=2) == [("nccl", "nccl")]
        assert able.choose("of_a_node", CUDA, levels=2) == [("of_a_node", "nccl")]
        able.change = {"nccl": "CuPy does not import"}
        assert able.choose("of_a_node", CUDA, levels=2) == [("of_a_node", "process_group")]
        able.change["process_group"] = "it has gloo alone"
        with pytest.raises(ValueError, match=r"between the nodes \(nccl: on rank 1 CuPy.*; process_group: on ra"):
            able.choose("of_a_node", CUDA, levels=2)
    finally:
        unregister_transport("of_a_node")


def test_auto_chooses_a_transport_within_the_limits(able: Peers) -> None:
    slow = Limits(bytes_per_second=1.0)
    assert able.choose("auto", CUDA, Limits(channels=2)) == [("nccl",)]
    assert able.choose("auto", CPU, slow) == [("process_group",)]
    for name, device, limits in (
        ("process_group", CPU, Limits(ctas=4)),
        ("nccl_one_sided", CUDA, Limits(channels=1)),
        ("process_group", CUDA, slow),
        ("nccl", CUDA, slow),
    ):
        with pytest.raises(ValueError, match=rf"limits\.\w+ is [\d.]+, and {name} cannot keep that"):
            able.choose(name, device, limits)
    with pytest.raises(ValueError, match=r"limits\.bytes_per_second is 1.0, and local cannot keep that"):
        open_transport(device="cpu", limits=slow)
