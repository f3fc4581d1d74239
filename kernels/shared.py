"""Device tensors that are made once and read on any stream of their device.

Two streams of a device run side by side. A tensor that is filled on one of them and cached needs two things before
another stream may read it: that stream must wait for the fill, and the allocator must know of the reader, or else it
hands the memory on when the cache drops the tensor and the reader is still at work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

Tensors = Iterable[torch.Tensor | None]


class Shared(Generic[T]):
    """A value whose device tensors were made on the stream that is current now, for readers on any stream.

    In a capture of a CUDA graph nothing waits: ``torch.cuda.graph`` synchronizes the device before it captures. The
    owner of the graph must keep the value as long as the graph.

    Args:
        value: what :meth:`read` returns.
        tensors: the device tensors in it, all on one device; None and tensors that are on no GPU are left out.
    """

    __slots__ = ("_made", "_streams", "_tensors", "_value")

    def __init__(self, value: T, tensors: Tensors) -> None:
        self._value = value
        self._tensors = [x for x in tensors if x is not None and x.device.type == "cuda"]
        self._streams: set[int] = set()
        self._made: Any = None
        if self._tensors:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record(stream)
            self._streams.add(stream.cuda_stream)

    def read(self) -> T:
        """Return the value, for work on the current stream of its device."""
        if self._tensors:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            if stream.cuda_stream not in self._streams:
                self._admit(stream)
        return self._value

    def _admit(self, stream: torch.cuda.Stream) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self._made)  # protects the tensors: the stream that made them may still fill them
        for x in self._tensors:
            x.record_stream(stream)  # protects their memory: a cache may drop them before this stream has read them
        self._streams.add(stream.cuda_stream)  # last: another thread on this stream must find the wait enqueued


class SharedCache(Generic[T]):
    """Values with device tensors, each made when it is first asked for and read on any stream."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Shared[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T], tensors: Callable[[T], Tensors]) -> T:
        """Return the value of ``key``, for work on the current stream.

        A value that is made in a capture is not kept: its memory belongs to the graph, which fills it at every replay.
        """
        shared = self._values.get(key)
        if shared is None:
            value = make()
            there = [x for x in tensors(value) if x is not None]
            if any(x.device.type == "cuda" for x in there) and torch.cuda.is_current_stream_capturing():
                return value
            shared = self._values.setdefault(key, Shared(value, there))
        return shared.read()
