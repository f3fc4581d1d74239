"""Device memory of one process in the others of its node, by CUDA's IPC handles, and flags that all of them map."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...transport import TransportError

LONGEST_RECORD = 256  # bytes: an offer, or what connects two processes
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
PCI_ID_BYTES = 32  # "0000:00:00.0" and its end, with room to spare

# One flag per cache line of the GPU: writers of two flags never meet in one line.
FLAG_STRIDE = 128
FLAG_BITS = 32

# Smaller allocations of the driver share a block, and a handle stands for all of it.
SHARED_BYTES = 2 << 20


def called(driver: Any, name: str, *arguments: Any, about: str = "") -> Any:
    """What a call of the driver returns beside its status: nothing, one value or a tuple of them.

    Raises:
        TransportError: the call failed; names it, what it was about, and CUDA's name of the error.
    """
    return checked(driver, getattr(driver, name)(*arguments), name + about)


def checked(driver: Any, result: tuple[Any, ...], what: str) -> Any:
    """The same of a call that was made."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"{what} failed: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else tuple(values)


class Context:
    """The context that torch works in on one device; the driver's calls need it to be the thread's current one."""

    def __init__(self, driver: Any, device: torch.device) -> None:
        self.driver = driver
        called(driver, "cuInit", 0)
        self._device = called(driver, "cuDeviceGet", device.index or 0)
        self._context = called(driver, "cuDevicePrimaryCtxRetain", self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it current, also in a thread that has never touched CUDA; the thread's own comes back afterwards."""
        driver = self.driver
        called(driver, "cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            called(driver, "cuCtxPopCurrent")

    def pci_id(self) -> str:
        """The device's PCI address: the same in every process, whatever CUDA_VISIBLE_DEVICES makes of its number."""
        return self._pci_id_of(self._device)

    def problem(self) -> str | None:
        """Why this device cannot share memory with other processes; None where it can."""
        driver = self.driver
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
        able = called(driver, "cuDeviceGetAttribute", attribute, self._device)
        return None if able else "the device has no CUDA IPC"

    def unreadable(self) -> tuple[str, ...]:
        """PCI addresses of visible devices whose memory this one cannot read. One that is not visible is found out
        when its memory is opened."""
        driver = self.driver
        unreadable = []
        for index in range(called(driver, "cuDeviceGetCount")):
            other = called(driver, "cuDeviceGet", index)
            if int(other) == int(self._device):  # its own memory: no peer, and CUDA would say no
                continue
            if not called(driver, "cuDeviceCanAccessPeer", self._device, other):
                unreadable.append(self._pci_id_of(other))
        return tuple(unreadable)

    def release(self) -> None:
        """Let go of it; torch keeps its own hold."""
        called(self.driver, "cuDevicePrimaryCtxRelease", self._device)

    def _pci_id_of(self, device: Any) -> str:
        driver = self.driver
        text = called(driver, "cuDeviceGetPCIBusId", PCI_ID_BYTES, device)
        return bytes(text).split(b"\0")[0].decode()


class Offer(NamedTuple):
    """One message as its sender announces it: which bytes of which allocation."""

    number: int  # of the message, counted for each pair of ranks
    nbytes: int
    offset: int  # into the allocation
    buffer: int  # the allocation's number in the sender's process; never used twice there
    handle: bytes

    def pack(self) -> bytes:
        """As a record."""
        return _OFFER.pack(*self)

    @classmethod
    def unpack(cls, record: bytes) -> Offer | None:
        """From a record; None where it is another kind of record."""
        return cls(*_OFFER.unpack(record)) if len(record) == _OFFER.size else None


_OFFER = struct.Struct(f"<QQQQ{HANDLE_BYTES}s")
RETIRED = struct.Struct("<Q")
"""The record of an allocation that the sender's process has freed: its number."""


@dataclass
class Region:
    """One allocation of this process that other processes may open."""

    buffer: int
    base: int
    handle: bytes
    peers: set[int] = field(default_factory=set)  # to whom bytes of it were offered


class Exports:
    """Allocations of this process, each with its handle, drawn once."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._regions: dict[int, Region] = {}
        self._dead: list[Region] = []

    def locate(self, address: int) -> tuple[Region, int] | None:
        """The allocation that an address lies in, and how many bytes from its start; None where others cannot open it,
        as memory of `expandable_segments` and of cudaMallocAsync."""
        driver = self._driver
        # By number, not by address: the same address may be another allocation after torch.cuda.empty_cache().
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        buffer = int(called(driver, "cuPointerGetAttribute", attribute, address))
        region = self._regions.get(buffer)
        if region is None:
            self._sweep()
            region = self._export(buffer, address)
            if region is None:
                return None
            self._regions[buffer] = region
        return region, address - region.base

    def retired(self) -> list[Region]:
        """Allocations that were offered and have been freed since; told once."""
        dead, self._dead = self._dead, []
        return dead

    def _export(self, buffer: int, address: int) -> Region | None:
        driver = self._driver
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        status, capable = driver.cuPointerGetAttribute(attribute, address)
        if status != driver.CUresult.CUDA_SUCCESS or not capable:
            return None
        # torch cuts tensors out of larger allocations, and a handle stands for a whole one.
        base, _ = called(driver, "cuMemGetAddressRange", address)
        handle = called(driver, "cuIpcGetMemHandle", int(base))
        # Through its address: the bytes have no attribute in cuda-bindings 13.5.
        return Region(buffer, int(base), ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES))

    def _sweep(self) -> None:
        """Forget allocations that are gone, so that peers close them: until then the driver keeps their memory. A new
        allocation is the moment: in the steady state there are none, and nothing is asked."""
        driver = self._driver
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        for region in list(self._regions.values()):
            status, buffer = driver.cuPointerGetAttribute(attribute, region.base)
            if status != driver.CUresult.CUDA_SUCCESS or int(buffer) != region.buffer:
                self._dead.append(self._regions.pop(region.buffer))


class Staging:
    """Memory of the driver's own, which others can open: what leaves from memory that they cannot is copied here."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._blocks: list[tuple[int, int]] = []  # address, bytes; the last one is in use

    def reserve(self, nbytes: int) -> int:
        """Where there is a block of so many bytes. A smaller one stays until `close`: peers may still read it."""
        if not self._blocks or self._blocks[-1][1] < nbytes:
            nbytes = -(-max(nbytes, 2 * sum(size for _, size in self._blocks)) // SHARED_BYTES) * SHARED_BYTES
            address = called(self._driver, "cuMemAlloc", nbytes, about=f" of {nbytes} bytes")
            self._blocks.append((int(address), nbytes))
        return self._blocks[-1][0]

    def close(self) -> None:
        """Free all of it. Idempotent."""
        while self._blocks:
            called(self._driver, "cuMemFree", self._blocks.pop()[0])


class Imports:
    """Allocations of other processes, each opened once."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._opened: dict[tuple[int, int], int] = {}

    def address(self, peer: int, offer: Offer) -> int:
        """Where the bytes of a peer's offer lie in this process."""
        key = (peer, offer.buffer)
        if key not in self._opened:
            self._opened[key] = self._open(peer, offer.handle)
        return self._opened[key] + offer.offset

    def drop(self, peer: int, buffer: int) -> None:
        """Close an allocation that its owner has freed."""
        address = self._opened.pop((peer, buffer), None)
        if address is not None:
            # Every copy out of it is over: its owner waited for them before it was freed.
            called(self._driver, "cuIpcCloseMemHandle", address)

    def close(self) -> None:
        """Close all of them. Idempotent."""
        for peer, buffer in list(self._opened):
            self.drop(peer, buffer)

    def _open(self, peer: int, data: bytes) -> int:
        driver = self._driver
        handle = driver.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), data, HANDLE_BYTES)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS  # the one value there is
        return int(called(driver, "cuIpcOpenMemHandle", handle, flags, about=f" of rank {peer}"))


class Board:
    """`count` 32-bit flags, all of one first value, in memory that the processes of a node share.

    Made by one of them and handed to the others through sockets, without a name: it is gone with the last of them, also
    where they were killed, and no flag of an earlier transport can be mistaken for one of this.
    """

    def __init__(self, fd: int, count: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, self.nbytes_of(count))
        self._words = memoryview(self._map).cast("I")

    @staticmethod
    def nbytes_of(count: int) -> int:
        """Bytes of so many flags, in whole pages."""
        return -(-max(1, count) * FLAG_STRIDE // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def shared(cls, rank: int, sockets: Mapping[int, socket.socket], count: int, first: int) -> Board:
        """The board of all these ranks: the lowest makes it."""
        maker = min([rank, *sockets])
        if rank != maker:
            _, fds, _, _ = socket.recv_fds(sockets[maker], LONGEST_RECORD, 1)
            if not fds:  # the end of the file, or no descriptor is left for it here
                raise TransportError(f"rank {maker} hands out no flags: it gave up, or too many files are open here")
            return cls(fds[0], count)
        fd = os.memfd_create("ringattn-flags")
        os.ftruncate(fd, cls.nbytes_of(count))
        board = cls(fd, count)
        try:
            for index in range(count):
                board.store(index, first)
            for end in sockets.values():
                socket.send_fds(end, [b"board"], [board._fd])
        except BaseException:
            board.close()
            raise
        return board

    @property
    def memory(self) -> mmap.mmap:
        """The mapped bytes."""
        return self._map

    def load(self, index: int) -> int:
        """A flag as it is now."""
        return self._words[index * FLAG_STRIDE // 4]

    def store(self, index: int, value: int) -> None:
        """Set a flag, modulo 2^32, from the host: one word, so the host's memory model does not matter."""
        self._words[index * FLAG_STRIDE // 4] = value % (1 << FLAG_BITS)

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


def flag_of(members: Sequence[int], source: int, destination: int) -> tuple[int, int]:
    """Where the two flags of the messages from `source` to `destination` lie on a board: (ready, taken)."""
    pair = members.index(source) * len(members) + members.index(destination)
    return 2 * pair, 2 * pair + 1


class Flags:
    """A board that the device reads and writes too."""

    def __init__(self, driver: Any, board: Board) -> None:
        self._driver = driver
        self.board = board
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(board.memory))
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        called(driver, "cuMemHostRegister", self._host, len(board.memory), flags)
        self._base = int(called(driver, "cuMemHostGetDevicePointer", self._host, 0))

    def address(self, index: int) -> int:
        """Where the device finds a flag."""
        return self._base + index * FLAG_STRIDE

    def put_up(self, stream: int, index: int, number: int) -> None:
        """Set a flag behind all that is in the stream."""
        driver = self._driver
        # The default has a fence before the write: what the stream did before is visible to whoever sees the flag.
        flags = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        result = driver.cuStreamWriteValue32(stream, self.address(index), number % (1 << FLAG_BITS), flags)
        checked(driver, result, "cuStreamWriteValue32")

    def wait_for(self, stream: int, index: int, number: int) -> None:
        """Let nothing behind this point of the stream begin before a flag is at `number` or past it, cyclically."""
        driver = self._driver
        flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        result = driver.cuStreamWaitValue32(stream, self.address(index), number % (1 << FLAG_BITS), flags)
        checked(driver, result, "cuStreamWaitValue32")

    def close(self) -> None:
        """Take the board from the device, and unmap it."""
        try:
            called(self._driver, "cuMemHostUnregister", self._host)
        finally:
            self.board.close()
