"""torch.cuda's streams and events and CuPy's NCCL, played on the host: code that uses them runs, and its order is kept.

It refuses what a GPU refuses or punishes: a record without a stream or on another device than the first, a query off
the event's device, and one that breaks a graph that another thread captures.

Every operation lands in one log. `happens_before` asks whether the streams and events alone force one logged operation
to run before another, which is all that a GPU guarantees, however lucky the host's timing was.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from ringattn.comm import Message, Transport, TransportError, cuda_threads
from ringattn.comm.transports import nccl
from ringattn.comm.transports.lanes import StreamLane

from .transport_cases import filled


@dataclass(eq=False)
class Op:
    """One thing that was asked of the device; `tests/support/recorder` adds who asked, and what it reads and writes."""

    kind: str
    stream: Stream | None = None
    event: Event | None = None
    detail: Any = None


GLOBAL, THREAD_LOCAL = 0, 1  # cudaStreamCaptureMode


class Here(threading.local):
    """What CUDA keeps for each thread: the current device, its streams, and how it takes captures of others."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Stream] = {}
        self.capture_mode = GLOBAL


class Device:
    """One stand-in for everything: its log, and the current stream and device of every thread."""

    def __init__(self) -> None:
        self.log: list[Op] = []
        self.pending: set[Event] = set()  # events that the device never reaches
        self.thread = Here()
        self.captures = False  # a thread captures a graph in global mode
        self._numbers = itertools.count(1000)

    def add(self, kind: str, stream: Stream | None = None, event: Event | None = None, detail: Any = None) -> Op:
        op = Op(kind, stream, event, detail)
        self.log.append(op)
        return op

    def check_recorded(self, event: Event) -> None:
        assert event.last is not None, "a wait on an event that was never recorded is no wait"

    def index_of(self, device: object = None) -> int:
        """Of a CUDA device; in the place of any other one there is the current one."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index  # type: ignore[call-overload]
        return self.thread.index if index is None else index

    def stream(self, device: object = None, priority: int = 0) -> Stream:
        return Stream(self, priority, next(self._numbers), self.index_of(device))

    def event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def current(self, device: object = None) -> Stream:
        index, streams = self.index_of(device), self.thread.streams
        if index not in streams:
            streams[index] = self.default_stream(index)
        return streams[index]

    def default_stream(self, index: int) -> Stream:
        return self.stream(index)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        with self.on(stream.index):
            before = self.current(stream.index)
            self.thread.streams[stream.index] = stream
            try:
                yield
            finally:
                self.thread.streams[stream.index] = before

    @contextmanager
    def on(self, device: object) -> Iterator[None]:
        """torch.cuda.device."""
        before = self.thread.index
        self.set_device(device)
        try:
            yield
        finally:
            self.thread.index = before

    def set_device(self, device: object) -> None:
        self.thread.index = self.index_of(device)

    def exchange_capture_mode(self, mode: int) -> int:
        before, self.thread.capture_mode = self.thread.capture_mode, mode
        return before

    def transfer(self, kind: str, wire: tuple[bytes, int, int], pointer: int, count: int, stream: int) -> None:
        """A send or a receive on (communicator, source, destination); for recorders."""

    def happens_before(self, first: Op, second: Op) -> bool:
        """Whether a path of stream order and of waits on recorded events leads from `first` to `second`."""
        index = {id(op): place for place, op in enumerate(self.log)}
        reached = {index[id(first)]}
        events: set[Event] = set()
        for place in range(index[id(first)] + 1, len(self.log)):
            op = self.log[place]
            after_reached = any(self.log[other].stream is op.stream for other in reached) and op.stream is not None
            if after_reached or (op.kind == "wait" and op.event in events):
                reached.add(place)
                if op.kind == "record" and op.event is not None:
                    events.add(op.event)
        return index[id(second)] in reached


class Stream:
    def __init__(self, device: Device, priority: int, number: int, index: int) -> None:
        self._device = device
        self.priority = priority
        self.cuda_stream = number
        self.index = index  # of its device
        self.name = ""

    def wait_event(self, event: Event) -> None:
        self._device.check_recorded(event)
        self._device.add("wait", self, event)

    def wait_stream(self, other: Stream) -> None:
        event = self._device.event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._device.add("synchronize", self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.index: int | None = None  # of the device of its first record, for good
        self.last: Op | None = None  # the newest record: what a wait means, whenever it runs

    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None, "a record without a stream is one on the current device, whosever that is"
        self.index = stream.index if self.index is None else self.index
        if self.index != stream.index:
            raise RuntimeError(f"event device {self.index} does not match recording stream's device {stream.index}")
        self.last = self._device.add("record", stream, self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current()).wait_event(self)

    def query(self) -> bool:
        self.check_place()
        return self not in self._device.pending

    def check_place(self) -> None:
        """Whether this thread may ask for it."""
        here = self._device.thread
        assert self.index is None or here.index == self.index, f"this makes a context on GPU {here.index}"
        if self._device.captures and here.capture_mode == GLOBAL:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        self.check_place()
        self._device.check_recorded(self)
        self._device.add("synchronize event", None, self)


class Fabric:
    """NCCL: what `cupy.cuda.nccl` holds, for any number of ranks that are threads. Bytes really move, at groupEnd."""

    NCCL_UINT8 = 1
    available = True

    def __init__(self, device: Device) -> None:
        self.device = device
        self._wires: dict[tuple[bytes, int, int], queue.Queue[bytes]] = {}
        self.moves = True  # False: nothing moves and nothing blocks, the order is all that is wanted
        self._drawn = itertools.count()
        self.open_group = threading.local()
        self.index: int | None = None  # the GPU on which threads must make, poll and end communicators; None: any
        self.fail_on: str | None = None
        self.refuses: set[int] = set()  # ranks whose memory cannot be registered
        self.async_error = ""
        self.before_end: Callable[[], None] = lambda: None
        self.on_destroy: Callable[[], None] = lambda: None
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.abort_called = threading.Event()

    def wire(self, edge: tuple[bytes, int, int]) -> queue.Queue[bytes]:
        """What was sent over an edge of a communicator and not received yet."""
        return self._wires.setdefault(edge, queue.Queue())  # atomic: both ends may come at once

    def cut(self) -> None:
        """Lose what is under way."""
        self._wires.clear()

    def get_unique_id(self) -> bytes:
        first = next(self._drawn)  # every communicator has its own
        return bytes(range(first, first + 128))

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        self.check_place()
        self.device.add("init", detail=(size, unique_id, rank))
        return Communicator(self, unique_id, rank)

    def groupStart(self) -> None:
        self.device.add("groupStart")
        self.open_group.receives, self.open_group.calls, self.open_group.given_up = [], set(), []

    def groupEnd(self) -> None:
        self.device.add("groupEnd")
        receives, self.open_group.receives = self.open_group.receives, None
        try:
            if not self.open_group.given_up:
                self.before_end()
            for pointer, count, wire in receives if self.moves else ():
                data = self.spoil(self.wire(wire).get(timeout=5))
                assert len(data) == count
                ctypes.memmove(pointer, data, count)
        finally:
            for communicator in self.open_group.calls:
                communicator.calls -= 1
            for communicator in self.open_group.given_up:
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
        self.calls = 0  # threads that are inside of a group with it
        self.freed = False

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._note("send", pointer, count, dtype, peer, stream)
        self._fabric.device.transfer("send", (self._id, self._rank, peer), pointer, count, stream)
        if self._fabric.moves:
            self._fabric.wire((self._id, self._rank, peer)).put(ctypes.string_at(pointer, count))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._note("recv", pointer, count, dtype, peer, stream)
        self._fabric.device.transfer("recv", (self._id, peer, self._rank), pointer, count, stream)
        self._fabric.open_group.receives.append((pointer, count, (self._id, peer, self._rank)))

    def register(self, pointer: int, nbytes: int) -> int:
        if self._rank in self._fabric.refuses:
            raise TransportError("NCCL: no such memory")
        self._fabric.device.add("register", detail=(pointer, nbytes))
        return pointer

    def deregister(self, handle: int) -> None:
        self._fabric.device.add("deregister", detail=handle)

    def check_async_error(self) -> None:
        self._fabric.check_place()
        if self._fabric.async_error:
            raise NcclError(self._fabric.async_error)

    def abort(self) -> None:
        """Raises the flag at once, and frees at the end of the group."""
        self._fabric.check_place()
        self._fabric.device.add("abort")
        self._fabric.abort_called.set()
        if getattr(self._fabric.open_group, "receives", None) is None:
            self.free()
        else:
            self._fabric.open_group.given_up.append(self)

    def free(self) -> None:
        assert not self.calls, "freed under a call"
        self.freed = True
        self._fabric.device.add("free")

    def __del__(self) -> None:  # as CuPy's does
        if not self.freed:
            self._fabric.device.add("destroy")

    def destroy(self) -> None:
        self._fabric.check_place()
        self.freed = True
        self._fabric.device.add("destroy")
        self._fabric.on_destroy()

    def _note(self, kind: str, *arguments: int) -> None:
        self._fabric.device.add(kind, detail=arguments)
        assert self._fabric.open_group.receives is not None, "outside of a group"
        if self.freed:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT")
        if self not in self._fabric.open_group.calls:
            self._fabric.open_group.calls.add(self)
            self.calls += 1
        if self._fabric.fail_on == kind:
            raise NcclError("NCCL_ERROR_INVALID_USAGE")


def install_streams(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Put the stand-in beneath torch.cuda's streams and events; asynchronous copies are logged too."""
    device = Device()
    replace_streams(monkeypatch, device)
    copy = torch.Tensor.copy_

    def logged(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:  # what a transfer stream does; tests fill and compare by blocking ones
            device.add("copy", device.current())
        return copy(destination, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", logged)
    return device


def replace_streams(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Put `device` in the place of torch.cuda's streams and events."""
    monkeypatch.setattr(torch.cuda, "Stream", device.stream)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: device.current(device.index_of(of)))
    monkeypatch.setattr(torch.cuda, "stream", device.using)
    monkeypatch.setattr(torch.cuda, "device", device.on)
    monkeypatch.setattr(torch.cuda, "set_device", device.set_device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda_threads, "exchange_capture_mode", device.exchange_capture_mode)


def install_nccl(monkeypatch: pytest.MonkeyPatch, fabric: object) -> None:
    """Let `import cupy.cuda.nccl` find `fabric`, whose communicators are those of the NCCL library too."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", fabric)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nccl, "ConfiguredCommunicator", lambda *given: fabric.NcclCommunicator(*given[:3]))  # type: ignore[attr-defined]


def check_held(device: Device, transport: Transport, peer: int) -> None:
    """What a post moves is there at each wait of the stream that owns it, and not for longer."""
    sent, received = filled(1, 4, torch.device("cpu")), filled(0, 4, torch.device("cpu"))
    alive = [weakref.ref(sent), weakref.ref(received)]
    fence = transport.post(sends=[Message(peer, sent)], receives=[Message(peer, received)])
    del sent, received
    StreamLane(torch.device("cpu")).follow([fence])  # a third stream: that it waits says nothing of the owner
    owner, held = device.current(), list[list[bool]]()
    wait_event = owner.wait_event

    def noted(event: Event) -> None:
        held.append([one() is not None for one in alive])
        wait_event(event)

    owner.wait_event = noted  # type: ignore[method-assign]
    fence.wait()
    assert held and all(map(all, held))
    gc.collect()
    assert not any(one() is not None for one in alive)
