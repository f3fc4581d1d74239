"""Values that ``group=`` and ``transport=`` take, and errors that say what would be right."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
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
    group_cache,
    group_rank_size,
    open_transport,
    open_transports,
    register_transport,
    resolve_group,
    unregister_transport,
)
from ringattn.comm.control import Control, open_control
from ringattn.comm.limits import NO_LIMITS
from ringattn.comm.transport import WARM_UP_SECONDS
from ringattn.comm.transports import nccl, process_group, selection
from ringattn.comm.transports.process_group import _Pending
from ringattn.comm.transports.selection import TransportRequest, choose_transports, make_request
from ringattn.comm.watchdog.deadlines import FIRST_DEADLINE_SECONDS
from ringattn.comm.watchdog.watch import ring_control
from ringattn.comm.world import DEFAULT_TIMEOUT, single_rank

from ..support.cuda.device import install_streams
from ..support.cuda.nccl import Fabric, install_nccl
from ..support.transport_cases import HANGS, numbered_control, on_ranks, wait_until

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


class Peers:
    """A process group whose other ranks send this rank's request, except for the fields in ``change``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, size: int = 2) -> None:
        self.names: Sequence[int] = range(size)
        self.others = size - 1
        self.change: dict[str, object] = {}  # fields of the peers' request, or problems by transport name
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)

    def size(self) -> int:
        return 1 + self.others

    def gather_merged(self, value: tuple[object, ...], merge: Callable[[list[Any]], object], *, what: str) -> object:
        request = TransportRequest(*value)  # type: ignore[arg-type]
        fields = {name: there for name, there in self.change.items() if name in TransportRequest._fields}
        problems = {name: self.change.get(name, problem) for name, problem in request.problems.items()}
        theirs = tuple(request._replace(**fields, problems=problems))  # type: ignore[arg-type]
        return merge([value] + [theirs] * self.others)

    def choose(
        self, transport: str, device: torch.device, limits: Limits = NO_LIMITS, levels: int = 1
    ) -> list[tuple[str, ...]]:
        request = make_request(self, transport, device, None, limits, levels)  # type: ignore[arg-type]
        return choose_transports(self, request, levels)[0]  # type: ignore[arg-type]


def test_resolve_group_takes_process_groups_and_1d_meshes(gloo: dist.ProcessGroup) -> None:
    assert resolve_group(None) is resolve_group(gloo) is gloo
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ring",))
    assert group_rank_size(mesh) == (0, 1)
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "ring"))
    with pytest.raises(ValueError, match=r"a 2D DeviceMesh. .*pass mesh\['ring'\]"):
        resolve_group(both)
    with pytest.raises(ValueError, match=r"the dimensions \('data', 'ring'\)"):
        group_rank_size(both)
    assert group_rank_size(both["ring"]) == (0, 1)
    with pytest.raises(ValueError, match=r"the dimensions \('ulysses', 'ring'\)"):
        group_rank_size(init_device_mesh("cpu", (1, 1), mesh_dim_names=("ulysses", "ring")))
    with pytest.raises(ValueError, match=r"a 2D DeviceMesh. .*pass mesh\['tokens'\]"):
        resolve_group(init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tokens")))
    with pytest.raises(ValueError, match="with mesh_dim_names"):
        resolve_group(init_device_mesh("cpu", (1, 1)))
    other: Any = 3
    with pytest.raises(ValueError, match=r"it must be a torch\.distributed ProcessGroup, a one-dimensional DeviceMesh"):
        resolve_group(other)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="group is a process group without this rank"):
        resolve_group(outside)


def test_a_mesh_numbers_its_ranks_row_by_row() -> None:
    closed: list[tuple[int, object]] = []

    def fn(group: LocalGroup) -> None:
        rank, mesh = group.rank(), group.mesh(2, 3)
        assert group.mesh(2, 3) is mesh and group_rank_size(mesh) == (rank, 6)
        assert (mesh.ring._hub.names, mesh.ring.rank()) == ((rank % 3, rank % 3 + 3), rank // 3)
        assert (mesh.ulysses._hub.names, mesh.ulysses.rank()) == (
            tuple(range(rank // 3 * 3, rank // 3 * 3 + 3)),
            rank % 3,
        )
        for part in (mesh.ring, mesh.ulysses):
            part.cache["a ring"] = SimpleNamespace(close=lambda part=part: closed.append((rank, part)))
        mesh.close()
        assert [part for number, part in closed if number == rank] == [mesh.ring, mesh.ulysses]
        assert group.mesh(3, 2).ring.size() == 3
        with pytest.raises(ValueError, match="ring is True"):
            group.mesh(True, 6)
        for ring in (1, 4):
            with pytest.raises(ValueError, match=f"ring is {ring} and ulysses is 2; their product must be 6"):
                group.mesh(ring, 2)

    on_ranks(6, fn)
    (alone,) = on_ranks(1, lambda group: group.mesh(1, 1))
    assert alone.ring._hub is not alone.ulysses._hub  # or an abort of one dimension would end the other


def test_group_none_is_a_single_rank(gloo: dist.ProcessGroup) -> None:
    named = open_transport(gloo, transport="local", device="cpu")
    assert isinstance(named, LocalTransport) and named.reason == "local as requested"
    throttled = open_transport(gloo, device="cpu", limits=Limits(bytes_per_second=1e9))
    assert isinstance(throttled, ProcessGroupTransport)
    throttled.close()
    dist.destroy_process_group()
    assert group_rank_size(None) == (0, 1)
    # A single rank needs no further candidates, some of which import libraries.
    assert [*make_request(single_rank(), "auto", CPU, None, NO_LIMITS, 1).problems] == ["local"]
    assert resolve_group(None) is resolve_group(None)  # so that the ring cached for the group is found again
    transport = open_transport(device="cpu")
    assert isinstance(transport, LocalTransport)
    assert (transport.rank, transport.size) == (0, 1)


def test_process_and_virtual_rank_transports_are_not_interchangeable(
    gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match='the ranks of a LocalWorld share one process: use "local"'):
            open_transport(group, transport="process_group", device="cpu")

    on_ranks(2, fn)
    options: Any = {"device": "cpu", "topology": Topology.grid(2, 2)}  # one transport, whatever the nodes
    assert on_ranks(4, lambda group: open_transport(group, **options).name) == ["local"] * 4
    with pytest.raises(ValueError, match='"local", which cannot be used: the group has 2 processes: use "nccl"'):
        Peers(monkeypatch, "gloo").choose("local", CPU)


@pytest.mark.parametrize(
    ("transport", "device", "match"),
    [
        ("ncl", CPU, "transport is 'ncl': it must be one of auto, local, nccl, process_group, nccl_one_sided"),
        ("auto", torch.device("meta"), "device is device\\(type='meta'\\): it must be cpu or a CUDA device that torch"),
        ("process_group", CPU, "torch.distributed is not initialised"),
        ("nccl", CPU, "it moves CUDA tensors, but device is cpu"),
        ("nccl_one_sided", CPU, r'"nccl_one_sided", .*: it moves CUDA tensors, but device is cpu \(rank 0\)'),
        ("nccl", torch.device("cuda"), "CUDA device"),
        ("nccl", CUDA, "device is cuda:0, but torch sees no CUDA device"),
    ],
)
def test_transports_refused_for_a_single_rank(
    transport: str, device: torch.device, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=match):
        open_transport(transport=transport, device=device)
    with pytest.raises(ValueError, match="topology has 4 ranks; it must have as many as the group, 1"):
        open_transports(device="cpu", topology=Topology.grid(2, 2))


def test_a_warm_up_error_is_raised_although_closing_fails_too() -> None:
    def factory(group: LocalGroup, device: torch.device, **_: object) -> Transport:
        transport = LocalTransport(group, device)
        transport.warm_up = Mock(side_effect=TransportError("an edge is broken"))  # type: ignore[method-assign]
        transport.close = Mock(side_effect=OSError("nothing to close"))  # type: ignore[method-assign]
        return transport

    def fn(group: LocalGroup) -> None:
        with pytest.raises(TransportError, match=r"^an edge is broken$"):  # once, although both ranks report it
            open_transport(group, transport=factory, device="cpu")

    on_ranks(2, fn)
    with pytest.raises(TransportError, match=r"^rank 10: OSError: no room$"):
        open_transport(
            transport=Mock(side_effect=OSError("no room")), device="cpu", control=numbered_control(single_rank())
        )


@pytest.mark.parametrize(
    ("transport", "backend", "device", "match"),
    [
        ("process_group", "cpu:gloo,cuda:gloo", CUDA, r"the group's backend for CUDA tensors is gloo.* \(rank 0\)"),
        ("process_group", "cuda:nccl", CPU, "the group has no backend for CPU tensors"),
        ("nccl", "cuda:nccl", CUDA, r'CuPy could not be imported.*pip install "ringattn\[cupy-cuda12\]'),
        ("process_group", "cpu:gloo,cuda:mpi", CUDA, "the group's backend for CUDA tensors is mpi"),
        ("process_group", "cpu:gloo", CUDA, "the group's backend for CUDA tensors is none"),
        ("auto", "cpu:gloo,cuda:gloo", CUDA, r"nccl: CuPy.* \(rank 0\); process_group: .*; nccl_one_sided: CuPy"),
    ],
)
def test_transports_refused_for_processes(
    transport: str, backend: str, device: torch.device, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nccl(monkeypatch, None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ValueError, match=match):
        Peers(monkeypatch, backend).choose(transport, device)


@pytest.mark.parametrize("field", ["transport", "device", "topology", "limits"])
def test_disagreements_name_the_value_of_every_rank(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(monkeypatch, "cpu:gloo")
    peers.change, peers.names = {field: "another"}, (4, 7)
    with pytest.raises(TransportError, match=rf"{field} differs between ranks \(rank 4: .*, rank 7: another\)"):
        peers.choose("auto", CPU)


def test_each_topology_level_maps_its_own_edges() -> None:
    topology = Topology(((0, 2), (3, 1)))
    inside, between = selection._levels(3, topology)
    assert (inside.members, set(inside.edges)) == ((3, 1), {(0, 2), (2, 0), (3, 1), (1, 3)})
    assert (between.members, set(between.edges)) == ((0, 3), {(0, 3), (3, 0), (2, 1), (1, 2)})
    (flat,) = selection._levels(1, Topology(((2, 0), (1,))))
    assert (flat.members, flat.nodes) == ((2, 0, 1), ((2, 0), (1,)))
    assert set(flat.edges) == {(2, 0), (0, 1), (1, 2), (0, 2), (1, 0), (2, 1)}
    (flat,) = selection._levels(3, topology, flat=True)
    assert (flat.members, flat.nodes) == ((0, 2, 3, 1), topology.nodes)
    for nodes in (((0, 1, 2),), ((0,), (1,))):
        assert selection._levels(0, Topology(nodes))[0].nodes == ()  # all edges are inside nodes, or all between them


def test_the_thread_of_a_transport_holds_no_reference_to_the_group(tmp_path: Path) -> None:
    """Drop the group before exit. In the transport's thread its destructor would abort the process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        transport = ProcessGroupTransport(dist.group.WORLD, CPU)  # type: ignore[arg-type]
        message = Message(0, torch.zeros(3))
        transport.post(sends=[message], receives=[Message(0, torch.ones(3))]).wait()
        stream, group = transport._transfer_thread, weakref.ref(dist.group.WORLD)
        del transport
    finally:
        dist.destroy_process_group()
    assert stream._thread is not None
    wait_until(lambda: gc.collect() >= 0 and group() is None)  # the thread drops its reference after the last transfer
    stream._thread.join(60)
    assert not stream._thread.is_alive(), "the thread must end with its transport"


def test_closing_a_transport_ends_its_thread(gloo: dist.ProcessGroup) -> None:
    transport = ProcessGroupTransport(gloo, CPU)
    transport.post(sends=[Message(0, torch.zeros(3))], receives=[Message(0, torch.ones(3))]).wait()
    thread = transport._transfer_thread._thread
    transport.close()
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_warm_ups_time_out_after_half_the_patience(gloo: dist.ProcessGroup) -> None:
    """Give a warm-up half the patience, because ranks that wait for its outcome have warmed up themselves."""
    timeouts = list[float]()

    def factory(group: dist.ProcessGroup, device: torch.device, *, timeout: float, **_: object) -> Transport:
        timeouts.append(timeout)
        return ProcessGroupTransport(group, device)

    for patience in (4.0, 1e6):
        open_transport(gloo, transport=factory, device=CPU, control=open_control(gloo, patience)).close()
    assert timeouts == [2.0, WARM_UP_SECONDS]
    control = open_control(gloo, 4.0)
    control.names = (7,)
    transport: Any = open_transport(gloo, transport="process_group", device=CPU, control=control)
    assert (transport._timeout, transport.names) == (2.0, (7,))
    transport.close()


@pytest.mark.parametrize(("sent", "received"), [(400, 400), (100, 400), (400, 100)])
def test_a_throttled_link_moves_both_directions_at_once(
    sent: int, received: int, gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = ProcessGroupTransport(gloo, CPU, limits=Limits(bytes_per_second=100.0))
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(transport._transfer_thread.aborted_event, "wait", waits.append)
    over: Any = _Pending(SimpleNamespace(wait=bool), torch.empty(0), "")  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "_start", lambda *_: over)
    transport._transfer([Message(0, torch.empty(sent // 4))], [Message(0, torch.empty(received // 4))], [], [])
    transport.close()
    assert waits == [4.0]


def test_transports_of_one_group_take_successive_tags(gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start again at the first tag after the last one."""
    gather = Mock(side_effect=lambda value, **_: [value, process_group.TAGS - 1])
    monkeypatch.setattr(Control, "gather", gather)
    for tag in (process_group.TAGS - 1, 0):
        transport = ProcessGroupTransport(gloo, CPU, timeout=7.0)
        assert transport._tag == process_group.FIRST_TAG + tag
        transport.gather(0)
        transport.close()
    assert [call.kwargs["timeout"] for call in gather.mock_calls] == [7.0, 14.0] * 2


@pytest.mark.parametrize(("patience", "waits"), [(2.0, 2.0), (1e6, DEFAULT_TIMEOUT), (None, DEFAULT_TIMEOUT)])
def test_virtual_ranks_wait_as_long_as_their_control_but_no_longer_than_their_world(
    patience: float | None, waits: float
) -> None:
    control = open_control(single_rank(), patience)
    control.names = (5,)
    transport = open_transport(device="cpu", control=control)
    assert isinstance(transport, LocalTransport)
    assert (transport._patience, transport._timeout) == (waits, min(waits, WARM_UP_SECONDS))
    assert transport.names == (5,)


def test_the_first_wait_of_a_ring_allows_for_compilation(gloo: dist.ProcessGroup) -> None:
    given: list[tuple[Any, float | None]] = [(gloo, None), (gloo, 4.0), (single_rank(), None), (single_rank(), 4.0)]
    waits = [ring_control(group, deadline).patience for group, deadline in given]
    assert waits == [FIRST_DEADLINE_SECONDS, 4.0, DEFAULT_TIMEOUT, 4.0]
    assert open_control(gloo).patience == DEFAULT_TIMEOUT == 300.0  # in the docstring of `open_control`


def test_the_cache_of_a_destroyed_group_closes_when_another_group_is_used(gloo: dist.ProcessGroup) -> None:
    """Close it in another thread, because closing may wait for transfers that never arrive."""
    destroyed, returned, closed = Mock(spec=dist.ProcessGroup), threading.Event(), threading.Event()
    waits = SimpleNamespace(close=lambda: closed.set() if returned.wait(5.0) else None)
    group_cache._GROUP_CACHES[destroyed] = {group_cache.CONNECTION_KEY: waits}
    group_cache.get_group_cache(gloo)
    returned.set()
    assert closed.wait(HANGS)
    assert destroyed not in group_cache._GROUP_CACHES, "a cache must close only once"


def test_handles_do_not_keep_their_objects() -> None:
    value = threading.Event()
    handle = group_cache.create_handle(value)
    assert group_cache.resolve_handle(handle) is value and group_cache.resolve_handle(0) is None
    del value
    assert group_cache.resolve_handle(handle) is None


def test_a_failed_batch_interrupts_its_other_transfers(
    gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the other transfers, which would write to freed memory."""

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
    def fails(*limits: object) -> str:
        raise OSError("/proc is not mounted")

    monkeypatch.setattr(nccl, "explain_missing_nccl", fails)
    with pytest.raises(ValueError, match=r'transport is "nccl", .*: OSError: /proc is not mounted \(rank 0\)'):
        Peers(monkeypatch, "cuda:nccl").choose("nccl", CUDA)


def test_auto_transfers_through_rccl_on_rocm(able: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls RCCL "nccl", and the process group uses it; transports on CuPy's NCCL say why they do not."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert able.choose("auto", CUDA) == [("process_group",)]
    for name in ("nccl", "nccl_one_sided"):
        with pytest.raises(ValueError, match=f'"{name}", which cannot be used: this PyTorch is for AMD GPUs'):
            able.choose(name, CUDA)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Return two ranks on which every transport works."""
    install_nccl(monkeypatch, Fabric(install_streams(monkeypatch)))
    return Peers(monkeypatch, "cpu:gloo,cuda:nccl")


def test_auto_chooses_a_transport_of_all_ranks(able: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert able.choose("auto", CUDA) == [("nccl",), ("process_group",)]
    assert able.choose("auto", CPU) == [("process_group",)]
    able.change, able.names = {"nccl": "CuPy could not be imported"}, (4, 7)  # on the other rank only
    assert able.choose("auto", CUDA) == [("process_group",)]
    with pytest.raises(ValueError, match=r'transport is "nccl", .*: CuPy could not be imported \(rank 7\)'):
        able.choose("nccl", CUDA)
    assert able.choose("nccl_one_sided", CUDA) == [("nccl_one_sided",)]  # `auto` does not
    request = make_request(able, "auto", CUDA, None, NO_LIMITS, 1)  # type: ignore[arg-type]
    assert request.device == "cuda", "ranks of one host have devices of different numbers"
    able.change = {}
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    assert able.choose("auto", CUDA) == [("process_group",)]
    for name in ("nccl", "nccl_one_sided"):
        with pytest.raises(ValueError, match=f'"{name}", which cannot be used: NCCL_COMM_BLOCKING=0'):
            able.choose(name, CUDA)


def test_a_single_node_transport_gets_another_one_between_nodes(able: Peers) -> None:
    register_transport("of_a_node", LocalTransport, devices=("cuda",), across_nodes=False)
    try:
        assert able.choose("nccl", CUDA, levels=2) == [("nccl", "nccl")]
        assert able.choose("of_a_node", CUDA, levels=2) == [("of_a_node", "nccl")]
        able.change = {"nccl": "CuPy could not be imported"}
        assert able.choose("of_a_node", CUDA, levels=2) == [("of_a_node", "process_group")]
        able.change["process_group"] = "it has gloo alone"
        with pytest.raises(ValueError, match=r"between the nodes \(nccl: CuPy.* \(rank 1\); process_group: .*\(ra"):
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
        with pytest.raises(ValueError, match=rf"limits\.\w+ is [\d.]+, which the transport {name} does not support"):
            able.choose(name, device, limits)
    with pytest.raises(ValueError, match=r"limits\.bytes_per_second is 1.0, which the transport local does not"):
        open_transport(device="cpu", limits=slow)
