"""torch.cuda's streams, events and graphs on the host: code that uses them runs, and its order is logged.

The stand-in rejects what a GPU rejects or punishes: a wait for an event that was never recorded; a record without a
stream, or on another device than the first; a query from another device; a query while another thread captures a graph.
Every operation is appended to one log. `graph.Graph` derives which operations must run before which others.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ringattn.comm import cuda_threads

PATIENCE = 60.0  # seconds until a wait of the host counts as a deadlock
GLOBAL, THREAD_LOCAL = 0, 1  # cudaStreamCaptureMode
SITED = ("wait", "record", "synchronize", "synchronize event", "write", "await")
OURS = ("ringattn.comm.", "ringattn.ring.", "ringattn.kernels.shared_cache")
DEPTH = 40  # frames searched for callers in our code
MULTIPROCESSORS = 18  # two more than the copy kernel has blocks


class Use(NamedTuple):
    """Bytes of one allocation that an operation accesses."""

    storage: int
    bytes: int  # bit mask, one bit per byte


@dataclass(eq=False)
class Op:
    """One logged operation: its stream, its caller and the memory that it accesses."""

    kind: str
    stream: Stream | None = None
    event: Event | None = None
    detail: Any = None
    number: int = -1
    rank: int = -1
    thread: int = 0
    label: str = ""
    site: str = ""  # our functions on the call stack, innermost first
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    action: Callable[[Callable[[Any], Any]], None] | None = None  # repeats it on the memory that its argument returns
    source: Op | None = None  # of a wait: the record that it waits for
    host: Op | None = None  # the last synchronization of this thread
    group: object = None  # of a send or receive: identity of its NCCL group
    wire: tuple[Any, ...] = ()  # of a send or receive: communicator, source, destination
    flag: tuple[object, int] | None = None  # of a write or wait of a memory word: the word and the value
    after: tuple[Op, ...] = ()

    def __str__(self) -> str:
        stream = "host" if self.stream is None else self.stream.name
        what = f"{self.kind} {self.detail}" if isinstance(self.detail, str) and self.detail else self.kind
        return f"#{self.number} rank {self.rank} {stream}: {what}{f' ({self.label})' if self.label else ''}"


def site() -> str:
    """Return our functions on the call stack, innermost first."""
    names = []
    frame = sys._getframe(2)
    for _ in range(DEPTH):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OURS):
            names.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_qualname}")  # type: ignore[attr-defined]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return " < ".join(names)


class Here(threading.local):
    """Per-thread state: the current CUDA device and streams, the capture mode, and the acting rank."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, Stream] = {}
        self.capture_mode = GLOBAL
        self.rank = -1
        self.label = ""
        self.host: Op | None = None
        self.group: object = None  # identity of the open NCCL group
        self.makes: torch.device | None = None  # device argument of the current torch call, if it has one


class Device:
    """The stand-in: its log, and the current stream and device of every thread."""

    def __init__(self, *, strict: bool = True) -> None:
        self.log: list[Op] = []
        self.strict = strict  # check streams and devices of event records
        self.pending: set[Event] = set()  # events that never complete
        self.thread = Here()
        self.captures = False  # some thread captures a graph in global mode
        self.recording = True
        self.words: dict[object, int] = {}  # memory words that streams write and wait for
        self.blocks = True  # False: a wait for a word does not block the host, whose order streams follow
        self.adding = threading.RLock()
        self.streams: dict[int, Stream] = {}  # by handle
        self._numbers = itertools.count(1000)

    def add(
        self, kind: str, stream: Stream | None = None, event: Event | None = None, detail: Any = None, **more: Any
    ) -> Op:
        op, thread = Op(kind, stream, event, detail, **more), self.thread
        if event is not None and kind != "record":
            op.source = event.last
        if kind in SITED:
            op.site = site()
        with self.adding:
            op.number, op.rank, op.thread, op.host = len(self.log), thread.rank, threading.get_ident(), thread.host
            op.label = op.label or thread.label
            if self.recording:
                self.log.append(op)
        if kind.startswith("synchronize"):
            thread.host = op
        return op

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label all operations of this thread inside the context."""
        before, self.thread.label = self.thread.label, label
        try:
            yield
        finally:
            self.thread.label = before

    # streams, events, devices

    def device_index(self, device: object = None) -> int:
        """Return the index of a CUDA device; for any other device, that of the current one."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index  # type: ignore[call-overload]
        return self.thread.index if index is None else index

    def stream(self, device: object = None, priority: int = 0) -> Stream:
        return Stream(self, priority, self.device_index(device))

    def default_stream(self, index: int) -> Stream:
        return self.stream(index)

    def event(self, enable_timing: bool = False) -> Event:
        return Event(enable_timing, self)

    def current(self, device: object = None) -> Stream:
        index, streams = self.device_index(device), self.thread.streams
        if index not in streams:
            streams[index] = self.default_stream(index)
        return streams[index]

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
        before = self.thread.index
        self.set_device(device)
        try:
            yield
        finally:
            self.thread.index = before

    def set_device(self, device: object) -> None:
        self.thread.index = self.device_index(device)

    def exchange_capture_mode(self, mode: int) -> int:
        before, self.thread.capture_mode = self.thread.capture_mode, mode
        return before

    # operations that libraries enqueue

    def transfer(self, kind: str, pointer: int, count: int, stream: int, **more: Any) -> Op:
        return self.add(kind, self.streams.get(stream), **more)

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Log a copy on a stream that no torch operator makes."""
        self.add("copy", self.streams[stream], detail=(destination, source, nbytes))

    def forget(self, tensor: torch.Tensor) -> None:
        """Log memory that is freed at once, without regard to streams."""
        self.add("free", self.current())

    def write(self, stream: int, word: object, value: int, asked: str = "") -> None:
        """Write a memory word in stream order; ``asked`` is the `site` that requested the write earlier."""
        op = self.add("write", self.streams[stream], detail=str(value), flag=(word, value))
        op.site = asked or op.site
        self.words[word] = value

    def wait(self, stream: int, word: object, value: int, asked: str = "") -> None:
        """Let a stream wait until a memory word is at least ``value``."""
        op = self.add("await", self.streams[stream], detail=str(value), flag=(word, value))
        op.site = asked or op.site
        if self.blocks:
            self.block(lambda: self.words.get(word, 0) >= value)

    def happens_before(self, first: Op, second: Op) -> bool:
        """Return True if streams and events force ``first`` to run before ``second``, whatever the host's timing."""
        from .graph import Graph  # graph imports this module

        return Graph(self.log).happens_before(first, second)

    def block(self, up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not up():
            assert time.monotonic() < deadline, "a stream waits for a value that never arrives"
            time.sleep(1e-4)


class Stream:
    """A stream whose work completes at once."""

    def __init__(self, device: Device, priority: int, index: int) -> None:
        self._device = device
        self.priority = priority
        self.index = index  # index of its device
        self.cuda_stream = next(device._numbers)
        self.name = f"{'transfer' if priority < 0 else 'compute'} stream {self.cuda_stream - 1000}"
        device.streams[self.cuda_stream] = self

    def wait_event(self, event: Event) -> None:
        event.check_recorded()
        self._device.add("wait", self, event)

    def wait_stream(self, other: Stream) -> None:
        event = self._device.event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._device.add("synchronize", self)


class Event:
    """An event that takes its time from the host's clock."""

    def __init__(self, enable_timing: bool = False, device: Device | None = None) -> None:
        self._device = Device(strict=False) if device is None else device
        self.timed = enable_timing
        self.at: float | None = None  # when it was recorded
        self.index: int | None = None  # device of the first record, which never changes
        self.last: Op | None = None  # the newest record, which every later wait refers to

    def record(self, stream: Stream | None = None) -> None:
        if self._device.strict:
            assert stream is not None, "an event recorded without a stream belongs to whatever device is current"
            self.index = stream.index if self.index is None else self.index
            if self.index != stream.index:
                raise RuntimeError(f"event device {self.index} does not match recording stream's device {stream.index}")
        self.at = time.perf_counter()
        self.last = self._device.add("record", stream, self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current()).wait_event(self)

    def query(self) -> bool:
        self.check_place()
        return self not in self._device.pending

    def synchronize(self) -> None:
        self.check_place()
        self.check_recorded()
        self._device.add("synchronize event", None, self)

    def elapsed_time(self, end: Event) -> float:
        assert self.timed and end.timed, "elapsed_time needs two events with enable_timing=True"
        assert self.at is not None and end.at is not None and end.at >= self.at
        return (end.at - self.at) * 1e3

    def check_recorded(self) -> None:
        assert self.at is not None, "the event was never recorded, so a wait for it returns at once"

    def check_place(self) -> None:
        """Raise if this thread may not query or wait for the event."""
        thread = self._device.thread
        assert self.index is None or thread.index == self.index, f"this call makes a context on GPU {thread.index}"
        if self._device.captures and thread.capture_mode == GLOBAL:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def replace_streams(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Replace torch.cuda's streams and events by `device`."""
    monkeypatch.setattr(torch.cuda, "Stream", device.stream)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.using)
    monkeypatch.setattr(torch.cuda, "device", device.on)
    monkeypatch.setattr(torch.cuda, "set_device", device.set_device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_threads, "exchange_capture_mode", device.exchange_capture_mode)


def install_streams(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Install a stand-in for torch.cuda's streams and events that also logs asynchronous copies."""
    device = Device()
    replace_streams(monkeypatch, device)
    copy = torch.Tensor.copy_

    def logged(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:  # only transfer streams do this; tests use blocking copies
            device.add("copy", device.current())
        return copy(destination, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", logged)
    return device


class FakeGraph:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def capture_begin(self, capture_error_mode: str) -> None:
        self._calls.append("capture")

    def capture_end(self) -> None:
        self._calls.append("captured")

    def replay(self) -> None:
        self._calls.append("replay")


class FakeCuda(Device):
    """Stand-in for the parts of torch.cuda that the benches call; `calls` lists what they did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(strict=False)
        self.calls: list[str] = []
        self.captured: object = None  # stream of the last capture
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        places = {
            "Stream": self.stream, "Event": self.event, "stream": self.using, "current_stream": self.current,
            "CUDAGraph": lambda: FakeGraph(self.calls), "graph": self._captured,
            "synchronize": lambda device=None: self.calls.append("synchronize"),
            "_sleep": lambda cycles: self.calls.append("sleep"),
            "get_device_properties": lambda device=None: properties,
        }  # fmt: skip
        for name, place in places.items():
            monkeypatch.setattr(torch.cuda, name, place)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        self.calls.append(f"stream of priority {stream.priority}")
        yield

    @contextmanager
    def _captured(self, graph: object, stream: object = None) -> Iterator[None]:
        self.calls.append("capture")
        self.captured = stream
        yield
