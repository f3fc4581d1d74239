"""CuPy's NCCL between threads of one process; its operations go to the log of a `Device`."""

from __future__ import annotations

import ctypes
import gc
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from ringattn.comm import Message, Transport
from ringattn.comm.transports import nccl
from ringattn.comm.transports.copy_streams import CudaCopyStream

from ..transport_cases import constant_tensor
from .device import PATIENCE, THREAD_LOCAL, Device, Event

Wire = tuple[bytes, int, int]  # communicator, source and destination


class Group(threading.local):
    """Calls of a thread since `groupStart`."""

    def __init__(self) -> None:
        self.receives: list[tuple[int, int, Wire]] | None = None
        self.calls: set[Communicator] = set()
        self.aborted: list[Communicator] = []
        self.pending: list[tuple[Communicator, str, Callable[[], None]]] = []  # pending one-sided calls


class Fabric:
    """Stand-in for `cupy.cuda.nccl`, for any number of ranks in threads; bytes move at `groupEnd`."""

    NCCL_UINT8 = 1
    available = True
    version = 22907

    def __init__(self, device: Device) -> None:
        self.device = device
        self._wires: dict[Wire, queue.Queue[bytes]] = {}
        self.moves = True  # False: no bytes move and no call blocks; only the order is logged
        self._drawn = itertools.count()
        self.open_group = Group()
        self.index: int | None = None  # GPU on which threads must create, poll and destroy communicators; None: any
        self.fail_on: str | None = None
        self.async_error = ""
        self.before_end: Callable[[], None] = lambda: None
        self.on_destroy: Callable[[], None] = lambda: None
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.abort_called = threading.Event()

    def wire(self, edge: Wire) -> queue.Queue[bytes]:
        """Return the queue of bytes sent over an edge and not received yet."""
        return self._wires.setdefault(edge, queue.Queue())  # atomic, because both ends may ask at the same time

    def cut(self) -> None:
        self._wires.clear()

    def get_unique_id(self) -> bytes:
        first = next(self._drawn)  # unique per communicator
        return bytes(range(first, first + 128))

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        self.check_place()
        self.device.add("init", detail=(size, unique_id, rank))
        return Communicator(self, unique_id, rank)

    def get_version(self) -> int:
        return self.version

    def groupStart(self) -> None:
        self.device.add("groupStart")
        self.device.thread.group = object()
        self.open_group.receives, self.open_group.calls, self.open_group.aborted = [], set(), []

    def groupEnd(self) -> None:
        self.device.add("groupEnd")
        self.device.thread.group = None
        receives, self.open_group.receives = self.open_group.receives, None
        try:
            if not self.open_group.aborted:
                self.before_end()
            launch(self.open_group.pending)
            for pointer, count, wire in receives if self.moves and receives is not None else ():
                data = self.spoil(self.wire(wire).get(timeout=PATIENCE))
                assert len(data) == count
                ctypes.memmove(pointer, data, count)
        finally:
            self.open_group.pending.clear()
            for communicator in self.open_group.calls:
                communicator.calls -= 1
            for communicator in self.open_group.aborted:
                communicator.free()

    def check_place(self) -> None:
        here = self.device.thread
        assert self.index is None or (here.index, here.capture_mode) == (self.index, THREAD_LOCAL)


class NcclError(RuntimeError):
    pass


class Communicator:
    def __init__(self, fabric: Fabric, unique_id: bytes, rank: int) -> None:
        self._fabric = fabric
        self._id = unique_id
        self._rank = rank
        self.calls = 0  # threads with a call of this communicator in an open group
        self.freed = False

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        wire = (self._id, self._rank, peer)
        self._enqueue("send", wire, pointer, count, dtype, peer, stream)
        if self._fabric.moves:
            self._fabric.wire(wire).put(ctypes.string_at(pointer, count))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        wire = (self._id, peer, self._rank)
        receives = self._enqueue("recv", wire, pointer, count, dtype, peer, stream)
        receives.append((pointer, count, wire))

    def _enqueue(self, kind: str, wire: Wire, *arguments: int) -> list[tuple[int, int, Wire]]:
        pointer, count, *_, stream = arguments
        self._fabric.device.transfer(kind, pointer, count, stream, detail=arguments, wire=wire)
        return self.enter(kind)

    def enter(self, kind: str) -> list[tuple[int, int, Wire]]:
        """Register a call in the open group and return the group's receives."""
        group = self._fabric.open_group
        assert group.receives is not None, f"{kind} outside of a group"
        if self.freed:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT")
        if self not in group.calls:
            group.calls.add(self)
            self.calls += 1
        if self._fabric.fail_on == kind:
            raise NcclError("NCCL_ERROR_INVALID_USAGE")
        return group.receives

    def check_async_error(self) -> None:
        self._fabric.check_place()
        if self._fabric.async_error:
            raise NcclError(self._fabric.async_error)

    def abort(self) -> None:
        """Signal the abort at once, and free the communicator at the end of the group."""
        self._fabric.check_place()
        self._fabric.device.add("abort")
        self._fabric.abort_called.set()
        if self._fabric.open_group.receives is None:
            self.free()
        else:
            self._fabric.open_group.aborted.append(self)

    def free(self) -> None:
        assert not self.calls, "the communicator was freed during a call"
        self.freed = True
        self._fabric.device.add("free")

    def __del__(self) -> None:  # like CuPy's
        if not self.freed:
            self._fabric.device.add("destroy")

    def destroy(self) -> None:
        self._fabric.check_place()
        self.freed = True
        self._fabric.device.add("destroy")
        self._fabric.on_destroy()


def launch(pending: Sequence[tuple[Communicator, str, Callable[[], None]]]) -> None:
    """Run pending calls like NCCL at the end of a group, where several communicators take turns (`doLaunches`).

    A turn is one wait, or all puts and signals up to the next wait (`scheduleRmaTasksToPlan`).
    """
    turns: dict[Communicator, list[list[Callable[[], None]]]] = {}
    for communicator, calls_in_a_row in itertools.groupby(pending, key=lambda call: call[0]):
        for waits, calls in itertools.groupby(calls_in_a_row, key=lambda call: call[1] == "wait"):
            jobs = [job for _, _, job in calls]
            turns.setdefault(communicator, []).extend([[job] for job in jobs] if waits else [jobs])
    for turn in itertools.zip_longest(*turns.values(), fillvalue=[]):
        for job in itertools.chain.from_iterable(turn):
            job()


def install_nccl(monkeypatch: pytest.MonkeyPatch, fabric: object) -> None:
    """Make `import cupy.cuda.nccl` return `fabric`, whose communicators also replace the NCCL library's."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", fabric)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nccl, "ConfiguredCommunicator", lambda *args: fabric.NcclCommunicator(*args[:3]))  # type: ignore[attr-defined]


def check_held(device: Device, transport: Transport, peer: int) -> None:
    """Check that a posted tensor lives until the owning stream's last wait, and no longer."""
    sent, received = constant_tensor(1, 4, torch.device("cpu")), constant_tensor(0, 4, torch.device("cpu"))
    alive = [weakref.ref(sent), weakref.ref(received)]
    fence = transport.post(sends=[Message(peer, sent)], receives=[Message(peer, received)])
    del sent, received
    CudaCopyStream(torch.device("cpu")).wait_for_fences(
        [fence]
    )  # a wait of a third stream must not release the tensors
    owner, alive_at_wait = device.current(), list[list[bool]]()
    wait_event = owner.wait_event

    def noted(event: Event) -> None:
        alive_at_wait.append([ref() is not None for ref in alive])
        wait_event(event)

    owner.wait_event = noted  # type: ignore[method-assign]
    fence.wait()
    assert alive_at_wait and all(map(all, alive_at_wait))
    gc.collect()
    assert not any(ref() is not None for ref in alive)
