"""cuda.bindings' driver, played on the host by real memory, and streams that run: one thread each.

The transport of the copy engines runs on it as it is, between threads and on CPU tensors. A stream really runs behind
the host and really blocks: a wait for a flag ends when the flag is up and not before. What is current when nobody
chose a stream belongs to the host, as compute on CPU tensors does: waiting on it blocks.

The driver is strict where CUDA is: no current context, an address that was never opened or is closed by the time it is
used, a handle of memory that is gone are errors. What goes into a stream it hands to a `Device`.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import random
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .device import PATIENCE, WORD, Device, Stream, replace_streams

WINDOW = 1 << 30  # allocations begin at multiples of it, unless `Driver.declare` knows better
OPENED, REGISTERED = 1 << 60, 1 << 61  # what a process sees of others' memory, and the device of the host's
STEP = 1 << 36  # between two of them


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_MAP_FAILED = 205


class Flag(IntEnum):
    """What calls are given, of whatever kind."""

    CU_STREAM_WAIT_VALUE_GEQ = CU_STREAM_WRITE_VALUE_DEFAULT = 0
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10
    CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED = 86


class MemHandle:
    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class Driver:
    """`cuda.bindings.driver`, as far as it is called. One process for all ranks; each thread has its contexts."""

    CUresult = Result
    CUpointer_attribute = CUdevice_attribute = Flag
    CUstreamWaitValue_flags = CUstreamWriteValue_flags = CUipcMem_flags = Flag
    CUipcMemHandle = MemHandle
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self, device: Device | None = None) -> None:
        self._device = Device() if device is None else device
        self._device.resolve = self.resolve  # type: ignore[method-assign]
        self.devices = 8
        self.has_ipc = True
        self.shareable = True  # what torch allocates
        self.allocated: dict[int, object] = {}  # by the driver itself
        self.strangers: set[tuple[int, int]] = set()  # (reader, owner) of devices without peer access
        self.fails: set[str] = set()  # calls that CUDA refuses
        self.calls: Counter[str] = Counter()
        self.opens: Counter[tuple[str, int]] = Counter()  # (thread, allocation)
        self.retained: Counter[int] = Counter()
        self.opened: dict[int, int] = {}  # address here -> base there
        self.registered: dict[int, int] = {}  # address for the device -> address for the host
        self._lock = threading.RLock()
        self._declared: dict[int, int] = {}  # base -> nbytes
        self._ids: dict[int, int] = {}  # base -> id
        self._numbers = itertools.count(1)
        self._contexts = threading.local()

    # memory, for tests

    def declare(self, base: int, nbytes: int) -> None:
        """One allocation of its own; again at the same base: the old one was freed, and this is the next."""
        with self._lock:
            self._declared[base] = nbytes
            self._ids[base] = next(self._numbers)

    def free(self, base: int) -> None:
        """The allocation is gone."""
        with self._lock:
            del self._declared[base], self._ids[base]

    def resolve(self, address: int) -> int:
        """The byte of this process behind an address, now; KeyError where it is not, or no longer, mapped."""
        offset = address % STEP
        with self._lock:
            if address >= REGISTERED:
                return self.registered[address - offset] + offset
            if address >= OPENED:
                return self.opened[address - offset] + offset
        return address

    def flag_identity(self, address: int) -> tuple[str, int]:
        """What is equal for two addresses of one word of memory that is mapped twice: (file, offset)."""
        host = self.resolve(address)
        for line in Path("/proc/self/maps").read_text().splitlines():
            places, _, offset, device, inode, *_ = line.split()
            first, last = (int(place, 16) for place in places.split("-"))
            if first <= host < last:
                return f"{device}/{inode}", host - first + int(offset, 16)
        raise KeyError(address)

    # contexts and devices

    def cuInit(self, flags: int) -> tuple[Result]:
        return self._done("cuInit")

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:
        return *self._done("cuDeviceGet"), index

    def cuDeviceGetCount(self) -> tuple[Result, int]:
        return *self._done("cuDeviceGetCount"), self.devices

    def cuDeviceGetAttribute(self, attribute: Flag, device: int) -> tuple[Result, int]:
        return *self._done("cuDeviceGetAttribute"), int(self.has_ipc)

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Result, bytes]:
        return *self._done("cuDeviceGetPCIBusId"), f"0000:{device:02x}:00.0".encode().ljust(length, b"\0")

    def cuDeviceCanAccessPeer(self, device: int, owner: int) -> tuple[Result, int]:
        return *self._done("cuDeviceCanAccessPeer"), int(device != owner and (device, owner) not in self.strangers)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Result, int]:
        self.retained[device] += 1
        return *self._done("cuDevicePrimaryCtxRetain"), device + 1

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Result]:
        self.retained[device] -= 1
        return self._done("cuDevicePrimaryCtxRelease")

    def cuCtxPushCurrent(self, context: int) -> tuple[Result]:
        self._stack().append(context)
        return self._done("cuCtxPushCurrent")

    def cuCtxPopCurrent(self) -> tuple[Result, int]:
        return *self._done("cuCtxPopCurrent"), self._stack().pop()

    # memory

    def cuPointerGetAttribute(self, attribute: Flag, address: int) -> tuple[Result, Any]:
        base = self._base(address)
        if base is None:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        legacy = attribute == Flag.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        shareable = self.shareable or base in self.allocated
        return *self._in_context("cuPointerGetAttribute"), shareable if legacy else self._ids[base]

    def cuMemGetAddressRange(self, address: int) -> tuple[Result, int, int]:
        base = self._base(address)
        assert base is not None
        return *self._in_context("cuMemGetAddressRange"), base, self._declared.get(base, 2 * WINDOW)

    def cuMemAlloc(self, nbytes: int) -> tuple[Result, int]:
        assert nbytes, "CUDA refuses nothing at all"
        block = ctypes.create_string_buffer(nbytes)
        self.allocated[ctypes.addressof(block)] = block
        self.declare(ctypes.addressof(block), nbytes)
        return *self._in_context("cuMemAlloc"), ctypes.addressof(block)

    def cuMemFree(self, address: int) -> tuple[Result]:
        self.free(address)
        del self.allocated[address]
        return self._in_context("cuMemFree")

    def cuIpcGetMemHandle(self, base: int) -> tuple[Result, MemHandle]:
        assert base in self._ids, "a handle stands for a whole allocation"
        handle = MemHandle()
        struct.pack_into("<QQ", handle.data, 0, base, self._ids[base])
        return *self._in_context("cuIpcGetMemHandle"), handle

    def cuIpcOpenMemHandle(self, handle: MemHandle, flags: Flag) -> tuple[Result, int]:
        assert flags == Flag.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        base, number = struct.unpack_from("<QQ", handle.data)
        if self._ids.get(base) != number:
            return Result.CUDA_ERROR_MAP_FAILED, 0
        with self._lock:
            self.opens[threading.current_thread().name, number] += 1
            address = OPENED + STEP * next(self._numbers)
            self.opened[address] = base
        return *self._in_context("cuIpcOpenMemHandle"), address

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Result]:
        del self.opened[address]
        return self._in_context("cuIpcCloseMemHandle")

    def cuMemHostRegister(self, host: int, nbytes: int, flags: int) -> tuple[Result]:
        assert flags == 3, "portable and mapped"
        assert host % 4096 == nbytes % 4096 == 0
        with self._lock:
            self.registered[REGISTERED + STEP * next(self._numbers)] = host
        return self._in_context("cuMemHostRegister")

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> tuple[Result, int]:
        (address,) = (address for address, place in self.registered.items() if place == host)
        return *self._in_context("cuMemHostGetDevicePointer"), address

    def cuMemHostUnregister(self, host: int) -> tuple[Result]:
        with self._lock:
            self.registered = {address: place for address, place in self.registered.items() if place != host}
        return self._in_context("cuMemHostUnregister")

    # what goes into a stream

    def cuMemcpyDtoDAsync(self, destination: int, source: int, nbytes: int, stream: int) -> tuple[Result]:
        self._device.copy(stream, destination, source, nbytes)
        return self._in_context("cuMemcpyDtoDAsync")

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: Flag) -> tuple[Result]:
        assert flags == Flag.CU_STREAM_WRITE_VALUE_DEFAULT and 0 <= value < WORD and address % 4 == 0
        self._device.write(stream, address, value)
        return self._in_context("cuStreamWriteValue32")

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: Flag) -> tuple[Result]:
        assert flags == Flag.CU_STREAM_WAIT_VALUE_GEQ and 0 <= value < WORD and address % 4 == 0
        self._device.wait(stream, address, value)
        return self._in_context("cuStreamWaitValue32")

    def _stack(self) -> list[int]:
        stack: list[int] = vars(self._contexts).setdefault("stack", [])
        return stack

    def _done(self, call: str) -> tuple[Result]:
        with self._lock:
            self.calls[call] += 1
        return (Result.CUDA_ERROR_INVALID_VALUE if call in self.fails else Result.CUDA_SUCCESS,)

    def _in_context(self, call: str) -> tuple[Result]:
        return self._done(call) if self._stack() else (Result.CUDA_ERROR_INVALID_CONTEXT,)

    def _base(self, address: int) -> int | None:
        with self._lock:
            for base, nbytes in self._declared.items():
                if base <= address < base + nbytes:
                    return base
            base = address - address % WINDOW
            if base not in self._ids:
                self._ids[base] = next(self._numbers)
            return base


class Workers(Device):
    """Streams that run: one thread each, behind the host. Ends with `stop`; `errors` is what went wrong in a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []
        self.stopping = threading.Event()
        self.jitter = 0.0  # the longest pause before an operation, in seconds
        self.driver = Driver(self)
        self._running: list[RunningStream] = []

    def stream(self, device: object = None, priority: int = 0) -> Stream:
        self._running.append(RunningStream(self, priority, self.index_of(device)))
        return self._running[-1]

    def default_stream(self, index: int) -> Stream:
        return Stream(self, 0, index)

    def block(self, up: Callable[[], bool]) -> None:
        super().block(lambda: up() or self.stopping.is_set())

    def stop(self) -> None:
        self.stopping.set()
        for stream in self._running:
            stream.jobs.put(None)
        for stream in self._running:
            stream.thread.join(PATIENCE)


class RunningStream(Stream):
    _device: Workers

    def __init__(self, device: Workers, priority: int, index: int) -> None:
        super().__init__(device, priority, index)
        self.jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"stream {self.cuda_stream}", daemon=True)
        self.thread.start()

    def run(self, job: Callable[[], object]) -> None:
        self.jobs.put(job)

    def _run(self) -> None:
        chance = random.Random(self.cuda_stream)
        while (job := self.jobs.get()) is not None:
            try:
                if self._device.jitter:
                    time.sleep(chance.random() * self._device.jitter)
                job()
            except BaseException as error:
                self._device.errors.append(error)


def install_driver(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    """Let `import cuda.bindings.driver` find `driver`; None: find nothing."""
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Streams that run and a driver on them, in the place of torch.cuda's and of cuda.bindings'."""
    workers = Workers()
    replace_streams(monkeypatch, workers)
    install_driver(monkeypatch, workers.driver)
    try:
        yield workers
    finally:
        workers.stop()
    assert not workers.errors
