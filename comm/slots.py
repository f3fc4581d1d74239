"""Receive buffers cut from one byte arena, and what must be over before each may be overwritten."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .transport import Fence, Transport

# Two cache lines of the GPU, and what its widest vector loads and TMA descriptors ask for with room to spare.
ALIGNMENT = 256
# A model alternates between a few shapes.
FORMS = 64

TensorSpec = tuple[tuple[int, ...], torch.dtype]


def aligned(nbytes: int) -> int:
    """As many bytes, up to the next boundary."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _spec_nbytes(spec: TensorSpec) -> int:
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


def slot_nbytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes that one slot needs for tensors of these shapes and dtypes, each on its own alignment."""
    return sum(aligned(_spec_nbytes(spec)) for spec in specs)


class Windows:
    """Memory that every rank maps, so that transports put what is sent between slots in place.

    All ranks ask for windows, and give them back, at the same points of their programs.
    """

    def __init__(self, transports: Sequence[Any]) -> None:
        self._transports = transports

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeros that all of these transports know; `TransportError` on every rank if any rank has none."""
        first, *others = self._transports
        memory: torch.Tensor = first.zeros(nbytes)
        for transport in others:
            transport.register(memory)
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """Give back what nothing uses any more."""
        for transport in reversed(self._transports):
            transport.release(memory)


def windows_of(transports: Sequence[Transport]) -> Windows | None:
    """Return where slots of these transports should lie; None if any memory of the device will do."""
    return Windows(transports) if all(hasattr(one, "zeros") for one in transports) else None


class Slots:
    """`count` equal buffers, kept at their high-water mark, that are filled and read in turn.

    A slot may be written again once everything that used it is over: `busy` notes a use, `free` hands the notes to
    whoever writes next.
    """

    def __init__(self, count: int, device: torch.device, windows: Windows | None = None) -> None:
        if count < 1:
            raise ValueError(f"count is {count}: a ring needs at least one slot")
        self._device = device
        self.windows = windows
        """Where the buffers lie; None: in memory of torch."""
        self._nbytes = 0
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._fences: list[list[Fence]] = [[] for _ in range(count)]
        self._kept: dict[Hashable, dict[Any, Any]] = {}

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self._fences)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return self._nbytes

    def reserve(self, nbytes: int) -> None:
        """Make every slot at least `nbytes` long. Growing waits for every noted use and drops what the slots held."""
        if nbytes <= self._nbytes:
            return
        self.drain()
        self._nbytes = aligned(nbytes)
        # The old arena goes back before the new one is made: the peak is one arena, not two.
        self.release()
        # Zeros, not whatever lay there: a stray read of bytes that never arrived is then a wrong number on every run.
        if self.windows is not None:  # aligned, and alike on all ranks
            self._arena = self.windows.zeros(self.count * self._nbytes)
        else:
            arena = torch.zeros(self.count * self._nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
            self._arena = arena[-arena.data_ptr() % ALIGNMENT :]
        self._settle()

    def release(self) -> None:
        """Let go of the buffers, which were drained."""
        self._kept.clear()
        if self.windows is not None and self._arena.numel():
            self._settle()  # a window is gone at once, not in the order of a stream
            self.windows.release(self._arena)
        self._arena = torch.empty(0, dtype=torch.uint8, device=self._device)

    def tensors(self, slot: int, specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        """Views of a slot, one per (shape, dtype), each `ALIGNMENT`-byte aligned, one after the other."""
        needed = slot_nbytes(specs)
        if needed > self._nbytes:
            raise ValueError(f"these tensors take {needed} bytes, a slot holds {self._nbytes}: reserve({needed}) first")
        views = []
        if not 0 <= slot < len(self._fences):
            raise self._no_such(slot)
        offset = slot * self._nbytes
        for spec in specs:
            shape, dtype = spec
            nbytes = _spec_nbytes(spec)
            views.append(self._arena[offset : offset + nbytes].view(dtype).view(shape))
            offset += aligned(nbytes)
        return tuple(views)

    def kept(self, form: Hashable) -> dict[Any, Any]:
        """Room for what is made of the slots, cut in one way: until they grow, or too many ways were asked for."""
        if form not in self._kept and len(self._kept) == FORMS:
            self._kept.clear()
        return self._kept.setdefault(form, {})

    def busy(self, slot: int, fence: Fence) -> None:
        """Note that a compute or a transfer uses the slot until `fence`."""
        if not 0 <= slot < len(self._fences):
            raise self._no_such(slot)
        self._fences[slot].append(fence)

    def free(self, slot: int) -> tuple[Fence, ...]:
        """What must be over before the slot may be overwritten; a new generation begins, so they are forgotten here."""
        if not 0 <= slot < len(self._fences):
            raise self._no_such(slot)
        fences = tuple(self._fences[slot])
        self._fences[slot] = []
        return fences

    def drain(self) -> None:
        """Wait, on the current stream, for every noted use of every slot; what lets go of the arena next may do so."""
        if self._device.type == "cuda":
            # It may belong to another stream, which has not waited: its memory is used again once this one gets here.
            self._arena.record_stream(torch.cuda.current_stream(self._device))
        for slot in range(self.count):
            for fence in self.free(slot):
                fence.wait()

    def _no_such(self, slot: int) -> IndexError:
        # A negative index would silently be another slot, and overwrite what that one still needs.
        return IndexError(f"slot is {slot}, the slots are 0 to {self.count - 1}")

    def _settle(self) -> None:
        # The zeros are written by the compute stream, and transfers run on another one: no transfer may overtake them.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
