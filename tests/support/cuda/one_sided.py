"""NCCL's one-sided calls on the fabric: windows mapped by all ranks, and signals counted per pair of ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ringattn.comm import LocalGroup
from ringattn.comm.transports import nccl_one_sided

from ..transport_cases import numbered_control
from .device import site
from .nccl import Communicator, Fabric, NcclError


class Windows:
    """Allocations and registrations of all ranks."""

    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}  # by address; freed blocks stay, because late calls may use them
        self.freed: set[int] = set()
        self.registered: dict[tuple[bytes, int, int], tuple[int, int]] = {}  # by communicator, rank and handle
        self.gone: set[tuple[bytes, int, int]] = set()
        self.fails: dict[str, int] = {}  # call name to the rank whose call fails
        self.symmetric = True  # False: registration fails

    @property
    def left(self) -> tuple[int, int]:
        """Number of blocks and of windows that were not released."""
        return len(self.blocks.keys() - self.freed), len(self.registered.keys() - self.gone)


class OneSided(Communicator):
    """A communicator with one-sided calls, where every violation of NCCL's rules raises an error."""

    def __init__(self, fabric: Fabric, unique_id: bytes, rank: int) -> None:
        super().__init__(fabric, unique_id, rank)
        self.windows = fabric.__dict__.setdefault("windows", Windows())
        self.sent: dict[int, int] = {}
        self.expected: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        self._refuse("allocate")
        device, block = self._fabric.device, torch.zeros(nbytes, dtype=torch.uint8)
        if hasattr(device, "memory"):
            device.memory.add(block, device.current(), True)
        self.windows.blocks[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, pointer: int | None = None) -> None:
        if pointer is None:  # frees the communicator; NCCL waits for its streams (`commDestroySync`)
            device, words = self._fabric.device, self._fabric.device.words
            until = {self._word(peer, self._rank): count for peer, count in self.expected.items()}
            device.block(lambda: not device.blocks or all(words.get(word, 0) >= count for word, count in until.items()))
            return super().free()
        self.windows.freed.add(pointer)
        self._fabric.device.forget(self.windows.blocks[pointer])

    def register(self, pointer: int, nbytes: int) -> int:
        self._refuse("register")
        if not self.windows.symmetric:
            raise NcclError("no symmetric memory")
        handles = [handle for comm, rank, handle in self.windows.registered if (comm, rank) == (self._id, self._rank)]
        handle = 1 + len(handles)
        self.windows.registered[self._id, self._rank, handle] = pointer, nbytes
        return handle

    def deregister(self, window: int) -> None:
        self.windows.gone.add((self._id, self._rank, window))

    def put(self, source: int, nbytes: int, peer: int, window: int, offset: int, stream: int) -> None:
        target, size = self.windows.registered[self._id, peer, window]
        if size != self.windows.registered[self._id, self._rank, window][1] or not 0 <= offset <= size - nbytes:
            raise NcclError(f"{nbytes} bytes at {offset} of a window of {size}")
        if not any(
            start <= source and source + nbytes <= start + length
            for key, (start, length) in self.windows.registered.items()
            if key[:2] == (self._id, self._rank) and key not in self.windows.gone
        ):
            raise NcclError("srcWinHost is not in a valid symmetric window")

        def job() -> None:
            self._fabric.device.copy(stream, target + offset, source, nbytes)
            if self._fabric.moves:
                data = self._fabric.spoil(ctypes.string_at(source, nbytes))
                ctypes.memmove(target + offset, data, nbytes)
            self._raise_signal(peer, stream, asked)

        asked = site()
        self._call("put", job)

    def signal(self, peer: int, stream: int) -> None:
        asked = site()
        self._call("signal", lambda: self._raise_signal(peer, stream, asked))

    def wait(self, counts: Mapping[int, int], stream: int) -> None:
        assert counts and all(count > 0 for count in counts.values())

        def job() -> None:
            for peer, count in counts.items():
                self.expected[peer] = self.expected.get(peer, 0) + count
                self._fabric.device.wait(stream, self._word(peer, self._rank), self.expected[peer], asked)

        asked = site()
        self._call("wait", job)

    def _raise_signal(self, peer: int, stream: int, asked: str) -> None:
        self.sent[peer] = self.sent.get(peer, 0) + 1
        self._fabric.device.write(stream, self._word(self._rank, peer), self.sent[peer], asked)

    def _word(self, source: int, destination: int) -> object:
        return self._id, source, destination

    def _call(self, kind: str, job: Callable[[], None]) -> None:
        if self._fabric.open_group.receives is None:
            job()
        else:
            self.enter(kind)
            self._fabric.open_group.pending.append((self, kind, job))

    def _refuse(self, call: str) -> None:
        if self.windows.fails.get(call) == self._rank:
            raise NcclError("unhandled cuda error")


def install_one_sided(monkeypatch: pytest.MonkeyPatch, fabric: Fabric) -> Windows:
    """Make the transport use these communicators, windows on the host, and small boxes."""
    windows: Windows = fabric.__dict__.setdefault("windows", Windows())
    monkeypatch.setattr(
        nccl_one_sided, "OneSidedCommunicator", lambda size, unique_id, rank, limits: OneSided(fabric, unique_id, rank)
    )
    monkeypatch.setattr(nccl_one_sided, "tensor_at", lambda pointer, nbytes, device: windows.blocks[pointer])
    monkeypatch.setattr(nccl_one_sided, "BOX_BYTES", 1 << 10)
    return windows


def opened(group: LocalGroup, **more: object) -> nccl_one_sided.NcclOneSidedTransport:
    """Return a transport of CPU tensors over all virtual ranks."""
    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "timeout": 60.0,
        "control": numbered_control(group),
        **more,
    }
    return nccl_one_sided.NcclOneSidedTransport(rank=group.rank(), size=group.size(), **options)
