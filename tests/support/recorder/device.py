"""A GPU that writes down what is asked of it: who asked, on which stream, what it reads and writes, and how to do it.

It runs on memory of the host: streams are names, and what they are given is logged. What torch's operators do comes
from `modes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..stand_in import Device, Event, Stream
from .memory import Memory, Ref, Storage, Use
from .operation import Recorded, mail, poison, site

GPU = torch.device("cuda:1")  # not the one that is current in a new thread
HOST = torch.device("cpu")


class Context(threading.local):
    """What a thread is at."""

    rank = -1
    label = ""
    host: Recorded | None = None
    group: object = None  # stands for the NCCL group that is open
    makes: torch.device | None = None  # where the allocations of the torch call under way are, if it says so


class Recorder(Device):
    """See the module. `log` holds `Recorded` operations, in the order in which the host enqueued them."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(self._freed)
        self.here = Context()
        self.recording = True
        self._adding = threading.RLock()
        self._by_number: dict[int, Stream] = {}

    # what happens

    def add(
        self, kind: str, stream: Stream | None = None, event: Event | None = None, detail: Any = None, **more: Any
    ) -> Recorded:
        """Log one operation."""
        op = Recorded(kind, stream, event, detail, **more)
        if kind in ("wait", "synchronize event") and event is not None:
            op.source = event.last  # type: ignore[assignment]
        if kind in ("synchronize", "wait", "record", "synchronize event") or not op.site:
            op.site = site()
        with self._adding:
            op.number, op.rank, op.thread = len(self.log), self.here.rank, threading.get_ident()
            op.label, op.host = op.label or self.here.label, self.here.host
            if self.recording:
                self.log.append(op)
        if kind.startswith("synchronize"):
            self.here.host = op
        if kind == "groupStart":
            self.here.group = object()
        if kind == "groupEnd":
            self.here.group = None
        return op

    def check_recorded(self, event: Event) -> None:
        """An event that was never recorded is found in the log."""

    def stream(self, device: object = None, priority: int = 0) -> Stream:
        made = super().stream(device, priority)
        self._by_number[made.cuda_stream] = made
        made.name = f"{'transfer' if priority < 0 else 'compute'} stream {made.cuda_stream - 1000}"
        return made

    def current(self, device: object = GPU) -> Stream:
        return super().current(device)

    def numbered(self, number: int) -> Stream:
        """The stream with this handle."""
        return self._by_number[number]

    def transfer(self, kind: str, wire: tuple[object, ...], pointer: int, count: int, stream: int) -> None:
        """A send or a receive of NCCL, on (communicator, source, destination)."""
        ref, group, on = self.memory.at(pointer, count), self.here.group, self.numbered(stream)
        begun: tuple[Recorded, ...] = ()
        if kind == "recv":
            begun = (self.given_up("nccl recv", on, f"from {wire[1]}", ref, group),)
        op = self.add(
            f"nccl {kind}",
            on,
            detail=f"to {wire[2]}" if kind == "send" else f"from {wire[1]}",
            wire=wire,
            group=group,
            reads=(ref.use,) if kind == "send" else (),
            writes=(ref.use,) if kind == "recv" else (),
            after=begun,
        )
        op.action = mail(op, ref)

    def given_up(self, kind: str, stream: Stream, detail: str, ref: Ref, group: object = None) -> Recorded:
        """From here on the bytes are what a transfer makes of them: in replay they are NaN until it is over."""
        return self.add(kind, stream, detail=detail, group=group, writes=(ref.use,), action=poison(ref))

    def operation(
        self,
        kind: str,
        detail: str,
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        action: Callable[..., None] | None = None,
        arguments: Any = None,
        stream: Stream | None = None,
    ) -> Recorded:
        """Log something that the current stream does to tensors; `action(arguments)` does it again, in replay."""
        op = self.add(kind, stream or self.current(), detail=detail, reads=self._uses(reads), writes=self._uses(writes))
        if action is not None:
            held = tree_map(self.held, arguments)
            op.action = lambda give: action(tree_map(give, held))
        return op

    def synchronized(self, stream: Stream | None = None) -> None:
        """The host waits for a stream."""
        self.add("synchronize", stream or self.current())

    # memory

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor says that it is on the GPU."""
        storage = self.memory.find(tensor)
        return storage is not None and storage.on_device

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """What messages call the allocation of a tensor."""
        storage = self.memory.find(tensor)
        assert storage is not None, "made outside of the recording"
        storage.name = name

    def allocated(self, tensor: torch.Tensor, on_device: bool) -> None:
        """A torch operator has made new memory: it may be what the owning stream has just let go of."""
        storage = self.memory.add(tensor, self.current(), on_device)
        if on_device and storage.nbytes:
            self.add("allocate", storage.owner, detail="", writes=(storage.all.use,), action=poison(storage.all))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """torch.Tensor.record_stream: once freed, the memory is not used again before this stream gets there."""
        storage = self.memory.find(tensor)
        assert storage is not None
        storage.used_by.append(stream)

    def _freed(self, storage: Storage) -> None:
        if storage.on_device and storage.nbytes and self.recording:
            tails = [self._tail(stream) for stream in storage.used_by]
            self.add(
                "free", storage.owner, detail="", writes=(storage.all.use,), action=poison(storage.all),
                after=tuple(op for op in tails if op is not None), site="-",
            )  # fmt: skip

    def _tail(self, stream: Stream) -> Recorded | None:
        return next((op for op in reversed(self.log) if op.stream is stream), None)  # type: ignore[return-value]

    def _uses(self, tensors: Sequence[torch.Tensor]) -> tuple[Use, ...]:
        found = []
        for x in tensors:
            storage = self.memory.find(x)
            if storage is not None and storage.on_device:
                found.append(self.memory.ref(x, storage).use)
        return tuple(found)

    def held(self, value: Any) -> Any:
        """What replay needs of an argument: memory of the device as a reference, of the host as it is now."""
        if not isinstance(value, torch.Tensor):
            return value
        storage = self.memory.find(value)
        if storage is not None and storage.on_device:
            return self.memory.ref(value, storage)
        return value.clone()

    # set-up

    def begin(self) -> None:
        """Forget what has happened: what is recorded starts here, after everything else is over."""
        with self._adding:
            self.recording = False
            self.memory.snapshot()
            self.log.clear()
            self.recording = True

    def end(self) -> None:
        """What happens from here on is not recorded."""
        self.recording = False

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """What this thread does inside carries this label."""
        before, self.here.label = self.here.label, label
        try:
            yield
        finally:
            self.here.label = before
