"""Cached device tensors that any stream of their device may read.

A cached tensor is filled on one stream and may be read on another. The reading stream must wait for the fill. The
caching allocator must also know the reading stream; otherwise it reuses the memory when the cache drops the tensor,
while the reader is still running.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Tensors = Iterable[Tensor | None]


class SharedValue(Generic[T]):
    """Value whose device tensors are filled on the current stream and may be read on any stream.

    During the capture of a CUDA graph no stream waits, because ``torch.cuda.graph`` synchronizes the device before the
    capture. The owner of the graph must keep the value as long as the graph.

    Args:
        value: Object that :meth:`read` returns.
        tensors: Device tensors inside the value, all on the same device. None and CPU tensors are skipped.
    """

    __slots__ = ("_ready_event", "_streams", "_tensors", "_value")

    def __init__(self, value: T, tensors: Tensors) -> None:
        self._value = value
        self._tensors = [x for x in tensors if x is not None and x.device.type == "cuda"]
        self._streams: set[int] = set()
        self._ready_event: Any = None
        if self._tensors:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            self._ready_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready_event.record(stream)
            self._streams.add(stream.cuda_stream)

    def read(self) -> T:
        """Return the value, for work on the current stream of its device."""
        if self._tensors:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            if stream.cuda_stream not in self._streams:
                self._add_reader(stream)
        return self._value

    def _add_reader(self, stream: torch.cuda.Stream) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self._ready_event)  # protects the content: the first stream may still fill the tensors
        for x in self._tensors:
            x.record_stream(stream)  # protects the memory: the cache may drop the tensors before this stream reads them
        self._streams.add(stream.cuda_stream)  # last, so that another thread on this stream finds the wait enqueued


class SharedCache(Generic[T]):
    """Cache of values with device tensors that any stream may read; a value is built at its first use."""

    def __init__(self) -> None:
        self._values: dict[Hashable, SharedValue[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T], tensors: Callable[[T], Tensors]) -> T:
        """Return the value of ``key``, built by ``make()`` at its first use, for work on the current stream.

        A value that is built during a graph capture is not cached, because the graph owns its memory and refills it at
        every replay. ``tensors`` returns the device tensors of a value.
        """
        shared = self._values.get(key)
        if shared is None:
            value = make()
            device_tensors = [x for x in tensors(value) if x is not None]
            if any(x.device.type == "cuda" for x in device_tensors) and torch.cuda.is_current_stream_capturing():
                return value
            shared = self._values.setdefault(key, SharedValue(value, device_tensors))
        return shared.read()
