"""comm/transports/nccl.py as it is, on a stand-in for CuPy's NCCL and for torch's streams and events."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.comm import DONE, Limits, LocalGroup, LocalWorld, Message, NcclTransport, Topology, TransportError, groups
from ringattn.comm.control import control_of
from ringattn.comm.limits import NO_LIMITS
from ringattn.comm.transports import nccl
from ringattn.comm.transports.lanes import StreamFence, StreamLane
from ringattn.comm.transports.local import solo_group
from ringattn.comm.transports.nccl import ByNodeTransport
from ringattn.comm.watchdog.watch import Watch, _tick

from ..support.stand_in import Device, Fabric, Op, install_nccl, install_streams
from ..support.transport_cases import CASES, filled
from ..support.watch_cases import controls

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    fabric = Fabric(install_streams(monkeypatch))
    install_nccl(monkeypatch, fabric)
    return fabric


@pytest.fixture
def device(fabric: Fabric) -> Device:
    return fabric.device


def open_alone(timeout: float = 5.0, limits: Limits = NO_LIMITS, device: torch.device = CPU) -> NcclTransport:
    control = control_of(solo_group())
    return NcclTransport(rank=0, size=1, device=device, control=control, timeout=timeout, limits=limits)


def opened(group: LocalGroup) -> NcclTransport:
    return NcclTransport(rank=group.rank(), size=group.size(), device=CPU, control=control_of(group), timeout=5)


def event_of(fence: StreamFence) -> Any:
    return fence._event


def kinds(ops: list[Op]) -> list[str]:
    return [op.kind for op in ops]


def ends(device: Device) -> list[str]:
    """What became of communicators, in order."""
    return [kind for kind in kinds(device.log) if kind in ("abort", "left", "free", "destroy")]


def until(device: Device, kind: str) -> None:
    """A thread of the transport's has done this."""
    deadline = time.monotonic() + 5
    while kind not in kinds(device.log):
        assert time.monotonic() < deadline, kind
        time.sleep(0.001)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_conformance(name: str, world_size: int, fabric: Fabric) -> None:
    with LocalWorld(world_size, device="cpu", timeout=10) as world:
        world.run(lambda group: CASES[name](opened(group), CPU))


def through(nodes: tuple[tuple[int, ...], ...], group: LocalGroup) -> ByNodeTransport:
    more: Any = {"device": CPU, "control": control_of(group), "timeout": 5}
    return ByNodeTransport(rank=group.rank(), size=group.size(), nodes=nodes, **more)


@pytest.mark.parametrize("nodes", [((0, 1), (2,)), ((2,), (1, 0)), ((0, 1, 2),)])
@pytest.mark.parametrize("name", CASES)
def test_conformance_through_nodes(name: str, nodes: tuple[tuple[int, ...], ...], fabric: Fabric) -> None:
    with LocalWorld(3, device="cpu", timeout=10) as world:
        world.run(lambda group: CASES[name](through(nodes, group), CPU))


def test_a_hop_between_two_communicators(device: Device) -> None:
    """Rank 0 receives from another node and sends inside its own: one stream, the node's part first."""

    def fn(group: LocalGroup) -> None:
        transport, rank = through(((0, 1), (2,)), group), group.rank()
        sent, came = torch.full((5,), rank), torch.zeros(5, dtype=torch.int64)
        following, previous = (rank + 1) % 3, (rank - 1) % 3
        fence = transport.post(sends=[Message(following, sent)], receives=[Message(previous, came)])
        assert came.eq(previous).all()
        alive = weakref.ref(sent)
        del sent
        gc.collect()
        assert alive() is not None  # the fence of both parts holds the tensors of both
        fence.wait()
        assert alive() is None
        sent = came
        if rank < 2:
            transport.post(sends=[Message(1 - rank, sent)], receives=[Message(1 - rank, came.clone())]).wait()
        stream = transport._inside.lane.stream
        assert transport._between.lane.stream is stream
        parts = [op.kind for op in device.log if op.kind in ("send", "recv") and op.detail[4] == stream.cuda_stream]
        assert parts[:2] == [["send", "recv"], ["recv", "send"], ["send", "recv"]][rank]
        with pytest.raises(ValueError, match=r"receives\[0\]: peer is 3, the ranks of this group are 0 to 2"):
            transport.post(sends=[Message(following, sent)], receives=[Message(3, came)])
        transport.close()
        with pytest.raises(TransportError, match="is closed"):
            transport.post(sends=[], receives=[])

    with LocalWorld(3, device="cpu", timeout=10) as world:
        world.run(fn)
    joined = [op.detail for op in device.log if op.kind == "init"]
    assert sorted((size, place) for size, _, place in joined) == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    assert kinds(device.log).count("destroy") == 6
    assert kinds(device.log).count("groupStart") == 2 + 2 + 1 + 2  # none of nothing


def test_both_communicators_end_where_one_edge_fails(fabric: Fabric, device: Device) -> None:
    def fn(group: LocalGroup) -> None:
        transport = through(((0, 1), (2,)), group)
        fabric.spoil = lambda data: data[::-1]
        with pytest.raises(TransportError, match="the warm-up of the nccl transport failed"):
            transport.warm_up([(0, 1), (1, 2), (2, 0)])
        with pytest.raises(TransportError, match="was aborted: its warm-up failed"):
            transport.post(sends=[], receives=[])

    with LocalWorld(3, device="cpu", timeout=10) as world:
        world.run(fn)
    assert kinds(device.log).count("abort") == 6


def test_every_rank_joins_by_the_id_of_rank_0(device: Device) -> None:
    with LocalWorld(3, device="cpu", timeout=10) as world:
        world.run(opened)
    joined = [op.detail for op in device.log if op.kind == "init"]
    assert sorted(joined, key=lambda detail: detail[2]) == [(3, joined[0][1], rank) for rank in range(3)]
    assert len(joined[0][1]) == 128


def test_a_communicator_for_each_ring_inside_and_between_the_nodes(device: Device) -> None:
    """Two nodes of three: peers stay ranks of the group, NCCL hears of places in the communicator."""
    nodes = (0, 2, 1), (3, 4, 5)

    def fn(group: LocalGroup) -> None:
        rank = group.rank()
        levels = groups._levels(rank, Topology(nodes))
        inside, between = groups._open(group, ["nccl"] * 2, CPU, levels, NO_LIMITS, control_of(group), "as asked for")
        assert isinstance(inside, NcclTransport) and isinstance(between, NcclTransport)
        assert inside._lane.stream is not between._lane.stream
        assert between.gather(rank) == list(range(6))
        with pytest.raises(ValueError, match=r"peer is \d, this communicator joins ranks \[\d, \d\]"):
            between.post(sends=[Message((rank + 1) % 3 + 3 * (rank // 3), torch.zeros(1))], receives=[])
        with pytest.raises(TransportError, match=r"rank 0: peer is 5, this communicator joins ranks \[0, 3\]"):
            between.warm_up([(0, 5)])

    with LocalWorld(6, device="cpu", timeout=10) as world:
        world.run(fn)
    joined = [op.detail for op in device.log if op.kind == "init"]
    assert sorted((size, place) for size, _, place in joined) == [(2, 0)] * 3 + [(2, 1)] * 3 + sorted(
        (3, place) for place in [0, 1, 2] * 2
    )
    assert len({unique_id for _, unique_id, _ in joined}) == 5
    assert {op.detail[3] for op in device.log if op.kind in ("send", "recv")} == {0, 1, 2}


def test_members_hold_this_rank(device: Device) -> None:
    with pytest.raises(ValueError, match=r"members is \[1, 2\]: rank 0 is not one of them"):
        NcclTransport(rank=0, size=3, device=CPU, control=control_of(solo_group()), members=[1, 2])


def test_a_rank_0_without_an_id_is_an_error_everywhere(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bytes:
        raise RuntimeError("no interface")

    monkeypatch.setattr(fabric, "get_unique_id", refuse)

    def fn(group: LocalGroup) -> None:
        with pytest.raises(TransportError, match=r"^NCCL of rank 0 draws no unique id: no interface$"):
            opened(group)

    with LocalWorld(3, device="cpu", timeout=10) as world:
        world.run(fn)


def test_a_post_is_one_group_between_its_waits_and_its_record(device: Device) -> None:
    transport = open_alone()
    compute = device.current()
    transfer: Any = transport._lane.stream
    assert transfer is not compute
    assert transfer.priority < compute.priority  # the lower number goes first

    first, second = torch.zeros(3, 5, dtype=torch.bfloat16), filled(1, 7, CPU)
    into_first, into_second = torch.zeros_like(first), torch.zeros_like(second)
    earlier = transport.post(sends=[Message(0, first)], receives=[Message(0, into_first)])
    mark = transport.mark()
    assert device.log[-1].stream is compute
    device.log.clear()
    fence = transport.post(
        sends=[Message(0, first), Message(0, second)],
        receives=[Message(0, into_first), Message(0, into_second)],
        after=[mark, earlier],
    )

    ops = device.log
    # one wait: the earlier post ran on this stream
    assert kinds(ops) == ["wait", "groupStart", "send", "send", "recv", "recv", "groupEnd", "record"]
    assert (ops[0].stream, ops[0].event) == (transfer, event_of(mark))
    number = transfer.cuda_stream
    assert [op.detail for op in ops[2:6]] == [
        (first.data_ptr(), 30, Fabric.NCCL_UINT8, 0, number),
        (second.data_ptr(), 28, Fabric.NCCL_UINT8, 0, number),
        (into_first.data_ptr(), 30, Fabric.NCCL_UINT8, 0, number),
        (into_second.data_ptr(), 28, Fabric.NCCL_UINT8, 0, number),
    ]
    assert (ops[-1].stream, ops[-1].event) == (transfer, event_of(fence))

    device.log.clear()
    fence.wait()
    assert [(op.kind, op.stream, op.event) for op in device.log] == [("wait", compute, event_of(fence))]


def test_after_holds_back_the_transfer_stream_and_not_compute(device: Device) -> None:
    transport = open_alone()
    tensor, copy = filled(1, 4, CPU), filled(0, 4, CPU)
    mark = transport.mark()
    device.log.clear()
    transport.post(sends=[Message(0, tensor)], receives=[Message(0, copy)], after=[mark])
    assert all(op.stream is not device.current() for op in device.log)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_the_group_is_closed_when_an_operation_raises(kind: str, fabric: Fabric, device: Device) -> None:
    transport = open_alone()
    device.log.clear()
    fabric.fail_on = kind
    tensor = filled(1, 4, CPU)
    fabric.cut()
    with pytest.raises(TransportError, match="rank 0: NCCL refused a group of transfers: NCCL_ERROR_INVALID_USAGE"):
        transport.post(sends=[Message(0, tensor)], receives=[Message(0, filled(0, 4, CPU))])
    assert kinds(device.log)[-1] == "groupEnd"
    assert kinds(device.log).count("groupStart") == 1


def test_tensors_are_held_until_compute_has_waited(device: Device) -> None:
    transport = open_alone()
    tensor, copy = filled(1, 4, CPU), filled(0, 4, CPU)
    alive = [weakref.ref(tensor), weakref.ref(copy)]
    fence = transport.post(sends=[Message(0, tensor)], receives=[Message(0, copy)])
    del tensor, copy
    StreamLane(CPU).follow([fence])  # a third stream: that it waits says nothing of the owner
    gc.collect()
    assert all(reference() is not None for reference in alive)
    fence.wait()
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_close_gives_the_communicator_back_once(device: Device) -> None:
    transport = open_alone()
    device.log.clear()
    transport.close()
    transport.close()
    transport.abort("too late")
    assert kinds(device.log) == ["destroy"]
    assert not transport._dropped.alive
    with pytest.raises(TransportError, match="is closed"):
        transport.post(sends=[], receives=[])


def test_close_aborts_transfers_that_do_not_end(device: Device) -> None:
    transport = open_alone(timeout=0.05)
    fence = transport.post(sends=[], receives=[])
    device.pending.add(event_of(fence))
    device.log.clear()
    transport.close()
    transport.close()
    assert ends(device) == ["abort", "free"]


def test_close_does_not_wait_for_ever(fabric: Fabric, device: Device) -> None:
    """NCCL's destroy blocks while a dead peer is silent."""
    transport = open_alone(timeout=0.05)
    fabric.on_destroy = lambda: time.sleep(1.0)
    started = time.monotonic()
    transport.close()
    assert time.monotonic() - started < 0.9


def test_close_does_not_wait_for_an_abort_for_ever(
    fabric: Fabric, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = open_alone(timeout=0.05)
    monkeypatch.setattr(nccl, "passed", lambda fence, seconds: False)
    monkeypatch.setattr(transport._comm, "abort", lambda: time.sleep(1.0))
    started = time.monotonic()
    transport.close()
    assert time.monotonic() - started < 0.9


def test_abort_names_its_reason_to_whoever_posts(device: Device) -> None:
    transport = open_alone()
    device.log.clear()
    transport.abort("hop 3 is 20 s late")
    transport.abort("for the second time")
    transport.close()
    assert ends(device) == ["abort", "free"]
    with pytest.raises(TransportError, match="the nccl transport of rank 0 was aborted: hop 3 is 20 s late"):
        transport.post(sends=[], receives=[])


@pytest.mark.parametrize("returns", [True, False])
def test_an_abort_ends_a_call_that_blocks_and_frees_behind_it(
    returns: bool, fabric: Fabric, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first transfer blocks while it connects: a flag ends it, and on its way out it uses the communicator."""
    monkeypatch.setattr(nccl, "CALL_SECONDS", 5.0 if returns else 0.05)
    transport, messages = open_alone(), [Message(0, filled(1, 4, CPU))]
    aborting = threading.Thread(target=transport.abort, args=["hop 3 is 20 s late"])

    def blocked() -> None:
        aborting.start()
        assert fabric.abort_called.wait(5)
        if returns:
            time.sleep(0.02)
        else:
            aborting.join(5)  # it has given up, and the call is still there
        device.add("left")
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE")

    fabric.before_end = blocked
    with pytest.raises(TransportError, match="the nccl transport of rank 0 was aborted: hop 3 is 20 s late"):
        transport.post(sends=messages, receives=messages)
    aborting.join(5)
    assert ends(device) == ["abort", "left", *(["free"] if returns else [])]


def test_a_communicator_is_not_given_back_under_a_call(fabric: Fabric, device: Device) -> None:
    """Another thread closes, as the end of a process group does."""
    transport, messages = open_alone(), [Message(0, filled(1, 4, CPU))]
    closing = threading.Thread(target=transport.close)

    def slow() -> None:
        closing.start()
        time.sleep(0.05)
        device.add("left")

    fabric.before_end = slow
    transport.post(sends=messages, receives=messages)
    closing.join(5)
    assert ends(device) == ["left", "destroy"]


def test_a_transport_that_nobody_closed_is_aborted(device: Device) -> None:
    """Destroying it would wait for the other ranks of the node to collect theirs."""
    transport = open_alone()
    del transport
    gc.collect()
    until(device, "free")
    assert ends(device) == ["abort", "free"]


def test_a_transport_that_nobody_closed_at_exit(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started, as from Python 3.12 on, and nothing may block."""

    def refuse(*given: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    transport = open_alone(device=CUDA)
    monkeypatch.setattr(nccl, "start", refuse)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    assert transport._dropped.atexit
    transport._dropped()
    assert ends(device) == ["abort"]


@pytest.mark.parametrize("end", [NcclTransport.close, lambda transport: transport.abort("enough")])
def test_threads_are_on_the_transport_s_device(end: Callable[[NcclTransport], None], fabric: Fabric) -> None:
    fabric.index = CUDA.index
    transport = open_alone(device=CUDA)
    transport.post(sends=[], receives=[])
    end(transport)
    transport = open_alone(device=CUDA)
    del transport
    gc.collect()
    until(fabric.device, "free")


def test_what_nccl_notices_ends_the_ring(fabric: Fabric, device: Device) -> None:
    """At the next tick, on the ring's device."""
    fabric.index = CUDA.index
    transport = open_alone(device=CUDA)
    fence = transport.post(sends=[], receives=[])
    device.pending.add(event_of(fence))
    watch = Watch(controls(2)[0], deadline=None, device=CUDA, transports=lambda: [transport])
    watch.begin("forward")
    watch.posted("forward hop 1: K/V", fence, [DONE], [(1, 64)], [(1, 32)])
    _tick([watch])
    assert watch.stopped() is None
    fabric.async_error = "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
    _tick([watch])
    where = "rank 0: forward hop 1: K/V (32 bytes rank 1 -> rank 0, 64 bytes rank 0 -> rank 1)"
    assert str(watch.stopped()).startswith(f"{where} failed: the nccl transport of rank 0: {fabric.async_error}.")
    assert "abort" in kinds(device.log)
    assert transport.check() is None, "what has ended has nothing more to tell"


def test_warm_up_finds_wrong_bytes(fabric: Fabric, device: Device) -> None:
    fabric.spoil = lambda data: data[::-1]
    transport = open_alone()
    with pytest.raises(TransportError, match=r"rank 0 got \d+ wrong bytes of 4096 from rank 0"):
        transport.warm_up([(0, 0)])
    assert kinds(device.log).count("abort") == 1
    with pytest.raises(TransportError, match="was aborted: its warm-up failed"):
        transport.post(sends=[], receives=[])


def test_warm_up_that_hangs_is_aborted(fabric: Fabric, device: Device) -> None:
    """A first transfer that cannot connect blocks the host; abort from another thread lets it go with an error."""

    def blocked() -> None:
        assert fabric.abort_called.wait(5)
        raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    fabric.before_end = blocked
    transport = open_alone(timeout=0.05)
    with pytest.raises(TransportError, match=r"was aborted: its warm-up took more than 0\.05 s"):
        transport.warm_up([(0, 0)])
    assert kinds(device.log).count("abort") == 1


def test_warm_up_deadline_on_the_last_bytes(fabric: Fabric, device: Device) -> None:
    fabric.before_end = lambda: time.sleep(0.3)
    transport = open_alone(timeout=0.05)
    with pytest.raises(TransportError, match=r"its warm-up took more than 0\.05 s"):
        transport.warm_up([(0, 0)])


def test_peers_that_do_not_join_are_not_waited_for(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    make = fabric.NcclCommunicator

    def late(*arguments: Any) -> Any:
        time.sleep(0.3)
        return make(*arguments)

    monkeypatch.setattr(fabric, "NcclCommunicator", late)
    with pytest.raises(TransportError, match=r"rank 0: ranks \[0\] did not join in 0\.05 s"):
        open_alone(timeout=0.05)
    assert fabric.abort_called.wait(5), "a communicator that comes too late is given back"


def test_a_communicator_that_nccl_refuses(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> object:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    monkeypatch.setattr(fabric, "NcclCommunicator", refuse)
    with pytest.raises(TransportError, match="rank 0: NCCL makes no communicator: NCCL_ERROR_SYSTEM_ERROR"):
        open_alone()


@pytest.mark.parametrize("limits", [NO_LIMITS, Limits(channels=2, ctas=4, cga_cluster_size=2)])
def test_every_communicator_is_a_configured_one(
    limits: Limits, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []

    def make(*arguments: object) -> Any:
        made.append(arguments)
        return fabric.NcclCommunicator(1, b"", 0)

    monkeypatch.setattr(nccl, "ConfiguredCommunicator", make)
    transport = open_alone(limits=limits)
    ((size, unique_id, place, given),) = made
    assert (size, len(unique_id), place, given) == (1, 128, 0, limits)  # type: ignore[arg-type]
    assert kinds(fabric.device.log).count("init") == 1
    transport.close()


def test_limits_that_nccl_cannot_keep(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"limits\.bytes_per_second is 1000000000.0, and nccl cannot keep that"):
        open_alone(limits=Limits(bytes_per_second=1e9))
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    with pytest.raises(ValueError, match="NCCL_MAX_CTAS=8 in the environment overrides it for the whole process"):
        open_alone(limits=Limits(ctas=4))
    open_alone().close()


@pytest.mark.parametrize(
    ("module", "match"),
    [(None, "CuPy does not import"), (type("Missing", (), {"available": False}), "this CuPy finds no NCCL library")],
)
def test_a_missing_library_says_what_to_install(
    module: Callable[[], object] | None, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nccl(monkeypatch, module)
    with pytest.raises(TransportError, match=rf'{match}.*pip install "ringattn\[cupy-cuda1\d\]"'):
        open_alone()


@pytest.mark.parametrize(
    ("available", "told"), [(False, r"no NCCL library \(nccl .* Reason: ImportError\)"), (True, "None")]
)
def test_what_cupy_warns_of_is_the_reason(
    available: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where warnings are errors, as here: CuPy's import would end in the middle."""
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    told_by_cupy = "nccl library could not be loaded.\n\nReason: ImportError"
    code = f"import warnings\nwarnings.warn({told_by_cupy!r})\navailable = {available}"
    (tmp_path / "cupy" / "cuda" / "nccl.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    missing = nccl.nccl_missing()
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        del sys.modules[name]
    assert re.search(told, str(missing))
    assert ("Reason: ImportError" in caplog.text) is available


def test_two_libraries_are_refused(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Path("/a/libnccl.so.2"), Path("/b/libnccl.so.2")]
    monkeypatch.setattr(nccl, "loaded_libraries", lambda: found)
    with pytest.raises(TransportError, match=r"2 NCCL libraries are loaded, /a/libnccl\.so\.2 and /b/libnccl\.so\.2"):
        open_alone()


def test_importing_it_loads_no_cupy() -> None:
    check = "import sys, ringattn.comm.transports.nccl; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
