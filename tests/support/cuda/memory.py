"""Memory as the recorder sees it: allocations with an identity, and the bytes that a tensor covers."""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from .device import Stream, Use


@dataclass(frozen=True)
class Ref:
    """A tensor without its memory, which replay maps to other memory."""

    storage: int
    dtype: torch.dtype
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def use(self) -> Use:
        return Use(self.storage, footprint(self.dtype.itemsize, self.offset, self.shape, self.strides))


@lru_cache(maxsize=100_000)
def footprint(itemsize: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the bytes that a strided tensor covers, one bit each."""
    covered = ((1 << itemsize) - 1) << (offset * itemsize)
    for count, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if count == 0:
            return 0
        covered_count, step = 1, stride * itemsize
        while covered_count < count:  # double the covered range
            added_count = min(covered_count, count - covered_count)
            covered |= covered << (added_count * step)
            covered_count += added_count
    return covered


@dataclass
class Storage:
    """One allocation."""

    number: int
    address: int
    nbytes: int
    owner: Stream  # the current stream at allocation; memory is reused in its order
    on_device: bool
    name: str = ""
    used_by: list[Stream] = field(default_factory=list)  # streams passed to record_stream
    before: torch.Tensor | None = None  # contents when the recording began

    @property
    def all(self) -> Ref:
        return Ref(self.number, torch.uint8, 0, (self.nbytes,), (1,))


class Memory:
    """All allocations ever made, and the addresses of the live ones."""

    def __init__(self, freed: Callable[[Storage], None]) -> None:
        self.storages: dict[int, Storage] = {}
        self._freed = freed
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._living: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}  # by id of torch's storage
        self._places: dict[int, Storage] = {}  # by address
        self._addresses: list[int] = []

    def find(self, tensor: torch.Tensor) -> Storage | None:
        known = self._living.get(id(tensor.untyped_storage()))
        return None if known is None else known[0]

    def add(self, tensor: torch.Tensor, owner: Stream, on_device: bool) -> Storage:
        """Register a new allocation, and call `freed` when it goes."""
        data = tensor.untyped_storage()
        with self._lock:
            storage = Storage(next(self._numbers), data.data_ptr(), data.nbytes(), owner, on_device)
            self.storages[storage.number] = storage
            self._living[id(data)] = storage, weakref.ref(data)
            if storage.nbytes:
                if storage.address not in self._places:
                    bisect.insort(self._addresses, storage.address)
                self._places[storage.address] = storage
            weakref.finalize(data, self._gone, storage, id(data)).atexit = False
        return storage

    def known(self, tensor: torch.Tensor) -> Storage:
        """Return the allocation of a tensor, which must be known."""
        storage = self.find(tensor)
        assert storage is not None, "the tensor was made outside of the recording"
        return storage

    def ref(self, tensor: torch.Tensor) -> Ref:
        number = self.known(tensor).number
        return Ref(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def at(self, pointer: int, nbytes: int) -> Ref:
        """Return the live allocation of an address range.

        Raises:
            AssertionError: no live allocation holds all these bytes.
        """
        with self._lock:
            place = bisect.bisect_right(self._addresses, pointer) - 1
            storage = self._places[self._addresses[place]] if place >= 0 else None
        assert storage is not None and pointer + nbytes <= storage.address + storage.nbytes, (
            f"{nbytes} bytes at {pointer:#x} are in no live allocation"
        )
        return Ref(storage.number, torch.uint8, pointer - storage.address, (nbytes,), (1,))

    def snapshot(self) -> None:
        """Save the contents of every live device allocation, as the start of a replay."""
        with self._lock:
            for storage, reference in [*self._living.values()]:
                data = reference()
                if data is not None and storage.on_device:
                    storage.before = torch.empty(0, dtype=torch.uint8).set_(data).clone()  # type: ignore[call-overload]

    def _gone(self, storage: Storage, key: int) -> None:
        with self._lock:
            if key in self._living and self._living[key][0] is storage:
                del self._living[key]
            if self._places.get(storage.address) is storage:
                del self._places[storage.address]
                self._addresses.remove(storage.address)
        self._freed(storage)
