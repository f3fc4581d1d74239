"""Receive buffers in one byte arena, with the fences that protect each buffer from being overwritten too early."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .transport import Fence, Transport

# Two cache lines of a GPU. Vector loads and TMA descriptors need less.
ALIGNMENT = 256
# Enough for every model that alternates between a few shapes.
MAX_CACHED_FORMS = 64

TensorSpec = tuple[tuple[int, ...], torch.dtype]


def align_up(nbytes: int) -> int:
    """Round a number of bytes up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _spec_nbytes(spec: TensorSpec) -> int:
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


def slot_nbytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes that one slot needs for tensors of these shapes and dtypes, each aligned to `ALIGNMENT`."""
    return sum(align_up(_spec_nbytes(spec)) for spec in specs)


class Windows:
    """Memory that every rank maps, so that transports can write sent data directly into a peer's slot.

    All ranks must allocate and release windows at the same points of their programs.
    """

    def __init__(self, transports: Sequence[Any]) -> None:
        self._transports = transports

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory that is registered with all transports.

        Raises:
            TransportError: on every rank, if any rank cannot allocate the memory.
        """
        first, *others = self._transports
        memory: torch.Tensor = first.zeros(nbytes)
        for transport in others:
            transport.register(memory)
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """Unregister and free memory that nothing uses any more."""
        for transport in reversed(self._transports):
            transport.release(memory)


def slot_windows(transports: Sequence[Transport]) -> Windows | None:
    """Return the windows for slots if every transport can map memory on all ranks, else None."""
    return Windows(transports) if all(hasattr(transport, "zeros") for transport in transports) else None


class Slots:
    """`count` receive buffers of equal size that never shrink and are filled in turn.

    A slot may be overwritten once all its uses are over. `add_use` records a use, and `pop_uses` hands the recorded
    fences to the next writer.
    """

    def __init__(self, count: int, device: torch.device, windows: Windows | None = None) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        self._device = device
        self.windows = windows
        """Allocator of the arena; None uses torch's."""
        self._nbytes = 0
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._fences: list[list[Fence]] = [[] for _ in range(count)]
        self._form_caches: dict[Hashable, dict[Any, Any]] = {}

    @property
    def count(self) -> int:
        return len(self._fences)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def reserve(self, nbytes: int) -> None:
        """Grow every slot to at least `nbytes`. Growing waits for all recorded uses and discards the contents.

        With windows, all ranks must call it at the same point of their programs.
        """
        if nbytes <= self._nbytes:
            return
        self.drain()
        self._nbytes = align_up(nbytes)
        # Free the old arena first, so that the peak is one arena and not two.
        self.release()
        # Fill with zeros, so that reading bytes that never arrived gives the same wrong result on every run.
        if self.windows is not None:  # windows are aligned and equal on all ranks
            self._arena = self.windows.zeros(self.count * self._nbytes)
        else:
            arena = torch.zeros(self.count * self._nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
            self._arena = arena[-arena.data_ptr() % ALIGNMENT :]
        self._synchronize_zeros()

    def release(self) -> None:
        """Free the buffers. The caller must have drained the slots before."""
        self._form_caches.clear()
        if self.windows is not None and self._arena.numel():
            self._synchronize_zeros()  # releasing a window is not ordered with the stream
            self.windows.release(self._arena)
        self._arena = torch.empty(0, dtype=torch.uint8, device=self._device)

    def tensors(self, slot: int, specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        """Return a view of slot `slot` for each (shape, dtype) of `specs`, in this order and aligned to `ALIGNMENT`.

        Raises:
            ValueError: the slot is too small.
            IndexError: there is no such slot.
        """
        needed = slot_nbytes(specs)
        if needed > self._nbytes:
            raise ValueError(f"specs need {needed} bytes, but a slot has {self._nbytes}; call reserve({needed}) first")
        views = []
        if not 0 <= slot < len(self._fences):
            raise self._slot_error(slot)
        offset = slot * self._nbytes
        for spec in specs:
            shape, dtype = spec
            nbytes = _spec_nbytes(spec)
            views.append(self._arena[offset : offset + nbytes].view(dtype).view(shape))
            offset += align_up(nbytes)
        return tuple(views)

    def form_cache(self, form: Hashable) -> dict[Any, Any]:
        """Return a dict for objects that depend on how the slots are divided into tensors, such as views.

        `form` identifies the division. The dict is emptied when the slots grow, or when `MAX_CACHED_FORMS` divisions
        are cached.
        """
        if form not in self._form_caches and len(self._form_caches) == MAX_CACHED_FORMS:
            self._form_caches.clear()
        return self._form_caches.setdefault(form, {})

    def add_use(self, slot: int, fence: Fence) -> None:
        """Record that a kernel or a transfer uses the slot until `fence`."""
        if not 0 <= slot < len(self._fences):
            raise self._slot_error(slot)
        self._fences[slot].append(fence)

    def pop_uses(self, slot: int) -> tuple[Fence, ...]:
        """Return the fences of all recorded uses, which the next writer of the slot waits for, and forget them."""
        if not 0 <= slot < len(self._fences):
            raise self._slot_error(slot)
        fences = tuple(self._fences[slot])
        self._fences[slot] = []
        return fences

    def drain(self) -> None:
        """Make the current stream wait for all recorded uses of all slots, so that the arena can be freed."""
        if self._device.type == "cuda":
            # The arena may have been allocated on another stream, which must not reuse the memory before this stream
            # has passed the waits below.
            self._arena.record_stream(torch.cuda.current_stream(self._device))
        for slot in range(self.count):
            for fence in self.pop_uses(slot):
                fence.wait()

    def _slot_error(self, slot: int) -> IndexError:
        # A negative index would silently select, and overwrite, another slot.
        return IndexError(f"slot is {slot}; it must be between 0 and {self.count - 1}")

    def _synchronize_zeros(self) -> None:
        # The compute stream writes the zeros and transfers run on another stream. Without this wait a transfer could
        # write first, and the zeros would overwrite what arrived.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
