"""The NCCL transport on a fake of CuPy's NCCL and torch's streams, and the calls that reach libnccl."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import (
    DONE,
    Limits,
    LocalGroup,
    Message,
    NcclTransport,
    Topology,
    TransportError,
    open_transport,
    open_transports,
)
from ringattn.comm.control import open_control
from ringattn.comm.limits import NO_LIMITS
from ringattn.comm.registry import find_transport
from ringattn.comm.transports import nccl, nccl_one_sided
from ringattn.comm.transports.nccl import (
    ByNodeTransport,
    ConfiguredCommunicator,
    cta_bounds,
    find_duplicate_nccl,
    find_override,
    loaded_libraries,
)
from ringattn.comm.transports.selection import _levels
from ringattn.comm.watchdog.watch import Watch, _tick
from ringattn.comm.world import single_rank

from ..support.cuda.device import Device, Op
from ..support.cuda.nccl import Fabric, check_held
from ..support.transport_cases import CASES, constant_tensor, numbered_control, on_ranks, wait_until
from ..support.watch_cases import memory_controls

UNDEFINED = -(2**31)
UNIQUE_ID = bytes(range(128, 256))


class Library:
    """A libnccl that records its calls and returns ``status``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status = 0
        self.asynchronous = 0
        self.config: dict[str, Any] = {}
        self.unique_id = b""

    def ncclCommInitRankConfig(self, comm: Any, size: int, unique_id: Any, rank: int, config: Any) -> int:
        comm._obj.value = 77
        self.unique_id = bytes(unique_id)
        self.config = {name: getattr(config._obj, name) for name, _ in config._obj._fields_}
        self.calls.append(("init", (size, rank)))
        return self.status

    def ncclCommGetAsyncError(self, comm: Any, error: Any) -> int:
        error._obj.value = self.asynchronous
        return self.status

    def ncclGetErrorString(self, status: int) -> bytes:
        return f"error {status}".encode()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            plain = tuple(value.value if isinstance(value, ctypes.c_void_p) else value for value in arguments)
            self.calls.append((name, plain))
            return self.status

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(nccl, "_library", lambda: library)
    return library


@pytest.mark.parametrize(
    ("limits", "environment", "bounds", "refused"),
    [
        (Limits(), {"NCCL_MAX_CTAS": "", "NCCL_COMM_BLOCKING": "1"}, (UNDEFINED, 8), None),
        (Limits(cga_cluster_size=4), {"NCCL_DEBUG": "INFO"}, (UNDEFINED, 8), None),
        (Limits(ctas=16), {"NCCL_CGA_CLUSTER_SIZE": "4", "NCCL_MAX_CTAS": ""}, (UNDEFINED, 16), None),
        (Limits(channels=4, ctas=8), {}, (4, 4), None),  # exactly four channels, and at most eight CTAs
        # Opening refuses these beside an explicit limit only. The default limit must not cut the user's minimum.
        (Limits(), {"NCCL_MIN_CTAS": "16"}, (UNDEFINED, UNDEFINED), None),
        (Limits(cga_cluster_size=1), {"NCCL_MAX_P2P_NCHANNELS": "16"}, (UNDEFINED, UNDEFINED), None),
        (Limits(), {"NCCL_COMM_BLOCKING": "0"}, (UNDEFINED, 8), "NCCL_COMM_BLOCKING=0 in the environment"),
        (Limits(cga_cluster_size=2), {"NCCL_CGA_CLUSTER_SIZE": "4"}, (UNDEFINED, 8), "NCCL_CGA_CLUSTER_SIZE=4 in the"),
        (Limits(channels=2), {"NCCL_MIN_P2P_NCHANNELS": "4"}, (2, 2), "limits.channels is 2, but NCCL_MIN_P2P_NCHANNE"),
        (
            Limits(ctas=4),
            {"NCCL_MAX_P2P_NCHANNELS": "8", "NCCL_MIN_CTAS": "2"},
            (UNDEFINED, 4),
            "NCCL_MIN_CTAS=2, NCCL_MAX_P2P_NCHANNELS=8 in the environment overrides it",
        ),
    ],
)
def test_cta_bounds_with_limits_and_environment_variables(
    limits: Limits, environment: dict[str, str], bounds: tuple[int, int], refused: str | None
) -> None:
    assert cta_bounds(limits, environment) == bounds
    overrides = find_override(limits, environment)
    assert overrides is None if refused is None else refused in str(overrides)


def test_a_configured_communicator_calls_libnccl(library: Library) -> None:
    communicator = ConfiguredCommunicator(3, [byte - 256 for byte in UNIQUE_ID], 2, Limits(ctas=4, cga_cluster_size=2))
    assert library.unique_id == UNIQUE_ID  # CuPy 13 returns signed characters
    assert library.config == {
        "size": 48,
        "magic": 0xCAFEBEEF,
        "version": 21800,
        "blocking": 1,
        "cgaClusterSize": 2,
        "minCTAs": UNDEFINED,
        "maxCTAs": 4,
        "netName": None,
        "splitShare": UNDEFINED,
    }
    communicator.send(1000, 5, 1, 3, 9)
    communicator.recv(2000, 6, 1, 4, 9)
    communicator.check_async_error()
    library.asynchronous = 6
    with pytest.raises(TransportError, match=r"NCCL: error 6 \(status 6\)"):
        communicator.check_async_error()
    library.status, library.asynchronous, calls = 5, 0, [*library.calls]
    for refused in (
        partial(communicator.send, 0, 0, 1, 0, 0), partial(communicator.recv, 0, 0, 1, 0, 0),
        communicator.check_async_error, partial(ConfiguredCommunicator, 1, UNIQUE_ID, 0, Limits()),
    ):  # fmt: skip
        with pytest.raises(TransportError, match=r"NCCL: error 5 \(status 5\)"):
            refused()
    library.status, library.calls = 0, calls
    for end in (communicator.abort, communicator.abort, communicator.destroy):
        end()
    other = ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits())
    assert (library.config["cgaClusterSize"], library.config["maxCTAs"]) == (1, 8)
    for end in (other.destroy, other.destroy):
        end()
    assert library.calls == [
        ("init", (3, 2)),
        ("ncclSend", (1000, 5, 1, 3, 77, 9)),
        ("ncclRecv", (2000, 6, 1, 4, 77, 9)),
        ("ncclCommAbort", (77,)),
        ("init", (1, 0)),
        ("ncclCommDestroy", (77,)),
    ]


def test_the_loaded_library_is_found_and_two_are_refused(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    none = "7f0 r-xp 0 08:01 7 /usr/lib/libm.so.6\n7f3 rw-p 0 00:00 0\n7f5 r-xp 0 08:01 6 /usr/lib/libnccl-net.so\n"
    single = none + "".join(f"7f{at} r-xp 0 08:01 8             /opt/a b/nccl/lib/libnccl.so.2\n" for at in (1, 2))
    linked = f"{single}7f3 r-xp 0 08:01 8 /usr/lib/libnccl.so.2\n"  # same inode, another path
    assert loaded_libraries(linked) == [Path("/opt/a b/nccl/lib/libnccl.so.2")]
    two = f"{single}7f4 r-xp 0 08:01 9 /usr/lib/libnccl.so.2.30.7\n"
    assert loaded_libraries("7f4 r-xp 0 08:01 9 /opt/libnccl-0a1b2c3d.so.2") == [Path("/opt/libnccl-0a1b2c3d.so.2")]
    same_number = f"{single}7f4 r-xp 0 08:02 8 /usr/lib/libnccl.so.2.30.7 (deleted)\n"  # on another device
    monkeypatch.setattr(Path, "read_text", lambda path: single)
    assert loaded_libraries() == [Path("/opt/a b/nccl/lib/libnccl.so.2")]
    assert find_duplicate_nccl() is None
    both = r"2 NCCL libraries are loaded: /opt/a b/nccl/lib/libnccl\.so\.2 and /usr/lib/libnccl\.so\.2\.30\.7"
    for maps, match in ((two, both), (same_number, both), (none, r"libnccl\.so\.2 is not loaded")):
        monkeypatch.setattr(Path, "read_text", lambda path, maps=maps: maps)
        nccl._library.cache_clear()
        with pytest.raises(TransportError, match=match):
            nccl._library()
        if maps is two:
            with pytest.raises(TransportError, match=both):
                open_alone()


def test_argument_types_of_libnccl_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare every argument, because ctypes would cut a pointer to 32 bits."""
    library: Any = Mock()
    monkeypatch.setattr(nccl, "loaded_libraries", lambda: [Path("/opt/libnccl.so.2")])
    monkeypatch.setattr(ctypes, "CDLL", {"/opt/libnccl.so.2": library}.__getitem__)
    nccl._library.cache_clear()
    nccl_one_sided._declare(nccl._library())
    nccl._library.cache_clear()
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "u": ctypes.c_uint, "s": ctypes.c_size_t, "U": nccl._UniqueId}
    functions = {
        "ncclCommInitRankConfig": "piUip", "ncclSend": "psiipp", "ncclRecv": "psiipp", "ncclCommGetAsyncError": "pp",
        "ncclCommAbort": "p", "ncclCommDestroy": "p", "ncclGetErrorString": "i", "ncclMemAlloc": "ps",
        "ncclMemFree": "p", "ncclCommWindowRegister": "ppspi", "ncclCommWindowDeregister": "pp",
        "ncclPutSignal": "psiipsiiupp", "ncclSignal": "iiiupp", "ncclWaitSignal": "ippp",
    }  # fmt: skip
    for name, letters in functions.items():
        assert getattr(library, name).argtypes == tuple(kinds[letter] for letter in letters), name
    assert library.ncclGetErrorString.restype is ctypes.c_char_p


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def device(fabric: Fabric) -> Device:
    return fabric.device


def open_alone(timeout: float = 60.0, limits: Limits = NO_LIMITS, device: torch.device = CPU) -> NcclTransport:
    control = numbered_control(single_rank())
    return NcclTransport(rank=0, size=1, device=device, control=control, timeout=timeout, limits=limits)


def opened(group: LocalGroup) -> NcclTransport:
    return NcclTransport(rank=group.rank(), size=group.size(), device=CPU, control=numbered_control(group), timeout=60)


def kinds(ops: list[Op]) -> list[str]:
    return [op.kind for op in ops]


def ends(device: Device) -> list[str]:
    """Return how communicators ended, in order."""
    return [kind for kind in kinds(device.log) if kind in ("abort", "left", "free", "destroy")]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_conformance(name: str, world_size: int, fabric: Fabric) -> None:
    on_ranks(world_size, lambda group: CASES[name](opened(group), CPU))


def through(nodes: tuple[tuple[int, ...], ...], group: LocalGroup) -> ByNodeTransport:
    more: Any = {"device": CPU, "control": numbered_control(group), "timeout": 60}
    return ByNodeTransport(rank=group.rank(), size=group.size(), nodes=nodes, **more)


@pytest.mark.parametrize("nodes", [((0, 1), (2,)), ((2,), (1, 0)), ((0, 1, 2),)])
@pytest.mark.parametrize("name", CASES)
def test_conformance_through_nodes(name: str, nodes: tuple[tuple[int, ...], ...], fabric: Fabric) -> None:
    on_ranks(3, lambda group: CASES[name](through(nodes, group), CPU))


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_group_end_is_called_when_an_operation_raises(kind: str, fabric: Fabric, device: Device) -> None:
    transport = open_alone()
    device.log.clear()
    fabric.fail_on = kind
    tensor = constant_tensor(1, 4, CPU)
    fabric.cut()
    with pytest.raises(TransportError, match="rank 10: NCCL refused a group of transfers: NCCL_ERROR_INVALID_USAGE"):
        transport.post(sends=[Message(0, tensor)], receives=[Message(0, constant_tensor(0, 4, CPU))])
    assert kinds(device.log)[-1] == "groupEnd"
    assert kinds(device.log).count("groupStart") == 1


@pytest.mark.parametrize("drawn", [UNIQUE_ID, tuple(range(-64, 64))])  # of CuPy 14 and 13
def test_the_unique_id_keeps_its_type(drawn: Any, fabric: Fabric, device: Device) -> None:
    fabric.get_unique_id = lambda: drawn  # type: ignore[method-assign]
    open_alone()
    assert [op.detail for op in device.log if op.kind == "init"] == [(1, drawn, 0)]


def test_tensors_are_held_until_compute_has_waited(device: Device) -> None:
    check_held(device, open_alone(), 0)


@pytest.mark.parametrize("returns", [True, False])
def test_an_abort_unblocks_a_call_and_frees_the_communicator_after_it(
    returns: bool, fabric: Fabric, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abort a first transfer that blocks while it connects, and free the communicator after the call has left it."""
    monkeypatch.setattr(nccl, "CALL_SECONDS", 60.0 if returns else 0.05)
    transport, messages = open_alone(), [Message(0, constant_tensor(1, 4, CPU))]
    aborting = threading.Thread(target=transport.abort, args=["hop 3 is 20 s late"])

    def blocked() -> None:
        aborting.start()
        assert fabric.abort_called.wait(60)
        if returns:
            time.sleep(0.02)
        else:
            aborting.join(60)  # abort has given up while the call still blocks
        device.add("left")
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE")

    fabric.before_end = blocked
    with pytest.raises(TransportError, match="the nccl transport of rank 10 was aborted: hop 3 is 20 s late"):
        transport.post(sends=messages, receives=messages)
    aborting.join(60)
    assert ends(device) == ["abort", "left", *(["free"] if returns else [])]


def test_close_waits_for_a_running_call(fabric: Fabric, device: Device) -> None:
    transport, messages = open_alone(), [Message(0, constant_tensor(1, 4, CPU))]
    closing = threading.Thread(target=transport.close)

    def slow() -> None:
        closing.start()
        time.sleep(0.05)
        device.add("left")

    fabric.before_end = slow
    transport.post(sends=messages, receives=messages)
    closing.join(60)
    assert ends(device) == ["left", "destroy"]


def test_an_unclosed_transport_is_aborted(device: Device) -> None:
    """Abort instead of destroy, which would wait for the other ranks of the node."""
    transport = open_alone()
    del transport
    gc.collect()
    wait_until(lambda: "free" in kinds(device.log))
    assert ends(device) == ["abort", "free"]


@pytest.mark.parametrize("forked", [False, True])
def test_an_unclosed_transport_at_exit_is_aborted_by_its_own_process(
    forked: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abort without a thread, which Python 3.12 refuses at exit, and never the transport of a forked child's parent."""

    def refuse(*args: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    transport = open_alone(device=CUDA)
    monkeypatch.setattr(nccl, "start_thread", refuse)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    assert transport._finalizer.atexit
    if forked:
        monkeypatch.setattr(os, "getpid", lambda: 0)
    transport._finalizer()
    assert ends(device) == ([] if forked else ["abort"])


@pytest.mark.parametrize("end", [NcclTransport.close, lambda transport: transport.abort("hop 3 is late")])
def test_threads_of_a_transport_use_its_device(end: Callable[[NcclTransport], None], fabric: Fabric) -> None:
    fabric.index = CUDA.index
    transport = open_alone(device=CUDA)
    transport.post(sends=[], receives=[])
    end(transport)
    transport = open_alone(device=CUDA)
    del transport
    gc.collect()
    wait_until(lambda: "free" in kinds(fabric.device.log))


def test_nccl_async_errors_abort_the_ring(fabric: Fabric, device: Device) -> None:
    fabric.index = CUDA.index
    transport = open_alone(device=CUDA)
    fence = transport.post(sends=[], receives=[])
    device.pending.add(fence._event)  # type: ignore[arg-type]
    watch = Watch(memory_controls(2)[0], deadline=None, device=CUDA, transports=lambda: [transport])
    watch.begin_loop("forward")
    watch.add_post("forward hop 1: K/V", fence, [DONE], [(1, 64)], [(1, 32)])
    _tick([watch])
    assert watch.failure_reason() is None
    fabric.async_error = "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
    _tick([watch])
    where = "rank 0: forward hop 1: K/V (32 bytes rank 1 -> rank 0, 64 bytes rank 0 -> rank 1)"
    assert str(watch.failure_reason()).startswith(
        f"{where} failed: the nccl transport of rank 10: {fabric.async_error}."
    )
    assert "abort" in kinds(device.log)
    assert transport.check() is None, "an aborted transport reports no further problem"


def test_missing_peers_time_out(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    make, given_up = fabric.NcclCommunicator, threading.Event()

    def late(*arguments: Any) -> Any:
        assert given_up.wait(60)
        return make(*arguments)

    monkeypatch.setattr(fabric, "NcclCommunicator", late)
    with pytest.raises(TransportError, match=r"rank 10: ranks \[10\] did not all join within 0\.05 s"):
        open_alone(timeout=0.05)
    given_up.set()
    assert fabric.abort_called.wait(60), "a communicator that is created too late must be aborted"
    fabric.abort_called.clear()
    # The communicator comes between the timeout and its notice.
    monkeypatch.setattr(nccl, "run_with_timeout", lambda seconds, join, device, name: bool(join()))
    with pytest.raises(TransportError, match="did not all join"):
        open_alone()
    assert fabric.abort_called.wait(60)


@pytest.mark.parametrize(
    ("available", "message"), [(False, r"no NCCL library \(nccl .* Reason: ImportError\)"), (True, "None")]
)
def test_cupy_import_warnings_are_the_reason(
    available: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Import CuPy with its warnings recorded, because with warnings as errors the import would stop half way."""
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    told_by_cupy = "nccl library could not be loaded.\n\nReason: ImportError"
    code = f"import warnings\nwarnings.warn({told_by_cupy!r})\navailable = {available}"
    (tmp_path / "cupy" / "cuda" / "nccl.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    missing = nccl.explain_missing_nccl()
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        del sys.modules[name]
    assert re.search(message, str(missing))
    assert ("Reason: ImportError" in caplog.text) is available


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"members": [1, 2]}, r"members is \[1, 2\]; it must contain this rank, 0"),
        ({"limits": Limits(bytes_per_second=1e9)}, r"limits\.bytes_per_second is 1000000000.0, which the transport"),
        ({"limits": Limits(ctas=4)}, "limits.ctas is 4, but NCCL_MAX_CTAS=8 in the environment overrides it for the"),
    ],
)
def test_refused_arguments(arguments: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    with pytest.raises(ValueError, match=match):
        NcclTransport(**{"rank": 0, "size": 3, "device": CPU, "control": open_control(single_rank()), **arguments})


def test_one_hop_may_use_two_communicators(device: Device) -> None:
    def fn(group: LocalGroup) -> None:
        transport, rank = through(((0, 1), (2,)), group), group.rank()
        sent, arrived = torch.full((5,), rank), torch.zeros(5, dtype=torch.int64)
        following, previous = (rank + 1) % 3, (rank - 1) % 3
        fence = transport.post(sends=[Message(following, sent)], receives=[Message(previous, arrived)])
        alive = weakref.ref(sent)
        del sent
        gc.collect()
        assert alive() is not None  # the fence of both parts holds the tensors of both
        fence.wait()
        assert alive() is None
        assert transport.copy_stream.stream is transport._inside.copy_stream.stream
        with pytest.raises(ValueError, match=r"receives\[0\]: peer is 3; it must be between 0 and 2"):
            transport.post(sends=[Message(following, arrived)], receives=[Message(3, arrived)])
        assert transport.check() is None
        transport._inside.check = lambda: "a network error"  # type: ignore[method-assign]
        assert transport.check() == "a network error"
        transport.close()
        with pytest.raises(TransportError, match="is closed"):
            transport.post(sends=[], receives=[])

    on_ranks(3, fn)
    assert kinds(device.log).count("destroy") == 6
    assert kinds(device.log).count("groupStart") == 2 + 2 + 1  # ranks without messages at a level start no group


def test_both_communicators_are_aborted_when_one_edge_fails(fabric: Fabric, device: Device) -> None:
    def fn(group: LocalGroup) -> None:
        transport = through(((0, 1), (2,)), group)
        fabric.spoil = lambda data: data[::-1]
        with pytest.raises(TransportError, match="the warm-up of the nccl transport failed"):
            transport.warm_up([(0, 1), (1, 2), (2, 0)])
        for edge in (transport, transport._inside):
            with pytest.raises(TransportError, match="was aborted: its warm-up failed"):
                edge.post(sends=[], receives=[])

    on_ranks(3, fn)


def test_one_communicator_per_ring_inside_and_between_nodes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open two nodes of three. Peers stay ranks of the group, but NCCL gets ranks of the communicator."""
    limits, make = list[Limits](), nccl.ConfiguredCommunicator

    def noted(*args: Any) -> Any:
        limits.append(args[3])
        return make(*args)

    monkeypatch.setattr(nccl, "ConfiguredCommunicator", noted)

    def fn(group: LocalGroup) -> None:
        open_nccl, topology = find_transport("nccl").open, Topology(((0, 2, 1), (3, 4, 5)))
        inside, between = open_transports(
            group, transport=open_nccl, device=CPU, topology=topology, limits=Limits(ctas=4)
        )
        assert isinstance(inside, NcclTransport) and isinstance(between, NcclTransport)
        assert inside._copy_stream.stream is not between._copy_stream.stream
        assert inside.reason == between.reason != ""
        assert (inside._warm, between._warm) == tuple({*edges} for _, edges, _ in _levels(group.rank(), topology))
        with pytest.raises(TransportError, match=r"rank 0: peer is 5; this communicator connects only ranks \[0, 3\]"):
            between.warm_up([(0, 5)])

    on_ranks(6, fn)
    joined = [op.detail for op in device.log if op.kind == "init"]
    assert sorted((size, place) for size, _, place in joined) == [(2, 0)] * 3 + [(2, 1)] * 3 + sorted(
        (3, place) for place in [0, 1, 2] * 2
    )
    assert len({unique_id for _, unique_id, _ in joined}) == 5 and limits == [Limits(ctas=4)] * 12
    assert {op.detail[3] for op in device.log if op.kind in ("send", "recv")} == {0, 1, 2}

    def flat(group: LocalGroup) -> object:
        uneven = Topology(((0, 1), (2,)))
        return type(open_transport(group, transport=find_transport("nccl").open, device=CPU, topology=uneven))

    assert on_ranks(3, flat) == [ByNodeTransport] * 3


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("get_unique_id", "^NCCL of rank 10 could not create a unique id: NCCL_ERROR_SYSTEM_ERROR$"),
        ("NcclCommunicator", r"rank 1[0-2]: NCCL could not create a communicator: NCCL_ERROR_SYSTEM_ERROR"),
    ],
)
def test_nccl_init_errors_are_raised_on_all_ranks(
    name: str, match: str, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> object:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    def fn(group: LocalGroup) -> None:
        with pytest.raises(TransportError, match=match):
            opened(group)

    monkeypatch.setattr(fabric, name, refuse)
    on_ranks(3, fn)


def test_a_communicator_is_destroyed_or_aborted_once(
    fabric: Fabric, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    transport = open_alone(limits=Limits(ctas=4, cga_cluster_size=2))
    assert transport.multiprocessors == 4 + 8  # as `Limits.multiprocessors`
    device.log.clear()
    transport.close()
    transport.close()
    transport.abort("too late")
    assert kinds(device.log) == ["destroy"] and not transport._finalizer.alive
    with pytest.raises(TransportError, match="the nccl transport of rank 10 is closed"):
        transport.post(sends=[], receives=[])

    transport = open_alone()  # pending transfers lead to an abort
    transport._timeout = 0.05
    device.pending.add(transport.post(sends=[], receives=[])._event)  # type: ignore[arg-type]
    device.log.clear()
    transport.close()
    transport.close()
    assert ends(device) == ["abort", "free"]

    transport = open_alone()
    transport._timeout = 0.05
    device.log.clear()
    with transport._call_lock:  # a call that does not return
        transport.close()
        wait_until(lambda: ends(device) == ["abort"])
    wait_until(lambda: ends(device) == ["abort", "free"])

    # ncclCommDestroy blocks while a dead peer is silent.
    transport, peer, over = open_alone(), threading.Event(), list[bool]()
    transport._timeout = 0.05
    fabric.on_destroy = lambda: over.append(peer.wait(60))
    transport.close()
    assert not over and "rank 10: NCCL did not destroy its communicator within 0.05 s" in caplog.messages
    peer.set()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_warm_up_has_a_deadline(hangs: bool, fabric: Fabric, device: Device) -> None:
    def blocked() -> None:
        assert fabric.abort_called.wait(60)
        if hangs:
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    fabric.before_end = blocked
    transport = open_alone()
    transport._timeout = 0.05  # applies to the warm-up only
    transport._control.gather = Mock(wraps=transport._control.gather)  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=r"its warm-up took more than 0\.05 s"):
        transport.warm_up([(0, 0)])
    assert transport._control.gather.call_args.kwargs["timeout"] == 0.1  # a peer may have begun later
    wait_until(lambda: kinds(device.log).count("abort") == 1)
