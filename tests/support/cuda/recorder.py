"""A `Device` that also records what each operation reads and writes, and how to repeat it.

It runs on host memory. Streams are only names, and their operations are logged. `operators` records torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from ringattn.kernels.gpu import assumed_gpu

from .device import Device, Op, Stream, Use, replace_streams
from .memory import Memory, Ref, Storage
from .nccl import Fabric, install_nccl
from .one_sided import install_one_sided

GPU = torch.device("cuda:1")  # not the current device of a new thread
HOST = torch.device("cpu")

Give = Callable[[Any], Any]  # function that maps a `Ref` or a `Mail` to memory of one execution


@dataclass(frozen=True)
class Mail:
    """Mailbox for the bytes of one send in a replay: a list that the send fills."""

    send: int


def mail(op: Op, ref: Ref) -> Callable[[Give], None]:
    """Return an action in which a send fills its mailbox, and the receive reads the mailbox."""

    def act(give: Give) -> None:
        if op.kind == "send":
            give(Mail(op.number)).append(give(ref).clone())
        else:
            assert op.source is not None
            give(ref).copy_(give(Mail(op.source.number))[0])

    return act


def poison(ref: Ref) -> Callable[[Give], None]:
    """Return an action that fills memory with a byte pattern that no operation writes."""
    return lambda give: give(ref).fill_(0xFF)  # NaN in every floating type


class Recorder(Device):
    """Device that records reads, writes and repeatable actions of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(self._freed)

    # operations

    def current(self, device: object = GPU) -> Stream:
        return super().current(device)

    def operation(
        self, kind: str, detail: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (),
        action: Callable[..., None] | None = None, arguments: Any = None,
    ) -> None:  # fmt: skip
        """Log an operation of the current stream on tensors; replay repeats `action(arguments)`."""
        op = self.add(kind, self.current(), detail=detail, reads=self.uses(reads), writes=self.uses(writes))
        if action is not None:
            recorded_args = tree_map(self.replay_argument, arguments)
            op.action = lambda give: action(tree_map(give, recorded_args))

    def read_back(self, name: str, tensor: torch.Tensor) -> None:
        """Log that the host reads a tensor and waits for its stream."""
        self.operation("read back", name, reads=[tensor])
        self.add("synchronize", self.current())

    def start_transfer(self, kind: str, stream: Stream, detail: str, ref: Ref) -> Op:
        """Log the start of a transfer into memory; in a replay the bytes are NaN until the transfer is over."""
        group = self.thread.group
        return self.add(kind, stream, detail=detail, group=group, writes=(ref.use,), action=poison(ref))

    def transfer(self, kind: str, pointer: int, count: int, stream: int, **more: Any) -> Op:
        ref, on = self.memory.at(pointer, count), self.streams[stream]
        _, source, destination = more["wire"]
        more |= {"group": self.thread.group, "detail": f"to {destination}" if kind == "send" else f"from {source}"}
        if kind == "send":
            op = self.add(kind, on, reads=(ref.use,), **more)
        else:
            begun = self.start_transfer(kind, on, more["detail"], ref)
            op = self.add(kind, on, writes=(ref.use,), after=(begun,), **more)
        op.action = mail(op, ref)
        return op

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        target, origin = (self.memory.at(address, nbytes) for address in (destination, source))
        on = self.streams[stream]
        self.start_transfer("copy", on, f"of {nbytes} bytes", target)
        op = self.add("copy", on, detail=f"of {nbytes} bytes", reads=(origin.use,), writes=(target.use,))
        op.action = lambda give: give(target).copy_(give(origin))

    def forget(self, tensor: torch.Tensor) -> None:
        storage = self.memory.known(tensor)
        storage.used_by.clear()  # `record_stream` has no effect on memory that is not torch's
        self._freed(storage)

    # memory

    def on_device(self, tensor: torch.Tensor) -> bool:
        storage = self.memory.find(tensor)
        return storage is not None and storage.on_device

    def name(self, tensor: torch.Tensor, name: str) -> None:
        self.memory.known(tensor).name = name

    def allocated(self, tensor: torch.Tensor, on_device: bool) -> None:
        """Log a new allocation, which may reuse memory that its stream has just freed."""
        storage = self.memory.add(tensor, self.current(), on_device)
        if on_device and storage.nbytes:
            self.add("allocate", storage.owner, detail="", writes=(storage.all.use,), action=poison(storage.all))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Stand in for torch.Tensor.record_stream, which delays reuse of freed memory until the stream gets there."""
        self.memory.known(tensor).used_by.append(stream)

    def _freed(self, storage: Storage) -> None:
        if storage.on_device and storage.nbytes and self.recording:
            tails = [next((op for op in reversed(self.log) if op.stream is user), None) for user in storage.used_by]
            after = tuple(op for op in tails if op is not None)
            self.add(
                "free", storage.owner, detail="", writes=(storage.all.use,), action=poison(storage.all), after=after
            )

    def uses(self, tensors: Sequence[torch.Tensor]) -> tuple[Use, ...]:
        return tuple(self.memory.ref(x).use for x in tensors if self.on_device(x))

    def replay_argument(self, value: Any) -> Any:
        """Return an argument for replay: a reference to device memory, or a copy of host memory."""
        if not isinstance(value, torch.Tensor):
            return value
        return self.memory.ref(value) if self.on_device(value) else value.clone()

    # set-up

    def begin(self) -> None:
        """Start the recording: clear the log and save the memory's contents."""
        with self.adding:
            self.recording = False
            self.memory.snapshot()
            self.log.clear()
            self.recording = True

    def end(self) -> None:
        self.recording = False


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Fabric]:
    """Replace the GPU by a recorder, and NCCL by a fabric on the recorder."""
    recorder = Recorder()
    fabric = Fabric(recorder)
    replace_streams(monkeypatch, recorder)
    install_nccl(monkeypatch, fabric)
    install_one_sided(monkeypatch, fabric)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorder.record_stream(tensor, stream))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("ringattn.kernels.gpu._query_gpu", lambda device: assumed_gpu(90, "stand-in"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: recorder.add("synchronize"))
    return recorder, fabric
