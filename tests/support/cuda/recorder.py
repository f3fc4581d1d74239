"""A `Device` that also knows memory: what each operation reads and writes, and how to do it again.

It runs on memory of the host: streams are names, and what they are given is logged. What torch's operators do comes
from `operators`.
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

GPU = torch.device("cuda:1")  # not the one that is current in a new thread
HOST = torch.device("cpu")

Give = Callable[[Any], Any]
"""What turns a `Ref` or a `Mail` into the memory of one execution."""


@dataclass(frozen=True)
class Mail:
    """Where the bytes of one send lie in a replay: a list that is empty until they have been read."""

    send: int


def mail(op: Op, ref: Ref) -> Callable[[Give], None]:
    """A send puts its bytes into the mail, its receive takes them out."""

    def act(give: Give) -> None:
        if op.kind == "send":
            give(Mail(op.number)).append(give(ref).clone())
        else:
            assert op.source is not None
            give(ref).copy_(give(Mail(op.source.number))[0])

    return act


def poison(ref: Ref) -> Callable[[Give], None]:
    """Make bytes unlike anything that was written there."""
    return lambda give: give(ref).fill_(0xFF)  # NaN in every floating type


class Recorder(Device):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(self._freed)

    # what happens

    def current(self, device: object = GPU) -> Stream:
        return super().current(device)

    def operation(
        self,
        kind: str,
        detail: str,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        action: Callable[..., None] | None = None,
        arguments: Any = None,
    ) -> None:
        """Log something that the current stream does to tensors; `action(arguments)` does it again, in replay."""
        op = self.add(kind, self.current(), detail=detail, reads=self.uses(reads), writes=self.uses(writes))
        if action is not None:
            held = tree_map(self.held, arguments)
            op.action = lambda give: action(tree_map(give, held))

    def read_back(self, name: str, tensor: torch.Tensor) -> None:
        """The host reads a tensor, and waits for its stream."""
        self.operation("read back", name, reads=[tensor])
        self.add("synchronize", self.current())

    def given_up(self, kind: str, stream: Stream, detail: str, ref: Ref) -> Op:
        """From here on the bytes are what a transfer makes of them: in replay they are NaN until it is over."""
        group = self.thread.group
        return self.add(kind, stream, detail=detail, group=group, writes=(ref.use,), action=poison(ref))

    def transfer(self, kind: str, pointer: int, count: int, stream: int, **more: Any) -> Op:
        """A send or a receive of NCCL."""
        ref, on = self.memory.at(pointer, count), self.streams[stream]
        _, source, destination = more["wire"]
        more |= {"group": self.thread.group, "detail": f"to {destination}" if kind == "send" else f"from {source}"}
        if kind == "send":
            op = self.add(kind, on, reads=(ref.use,), **more)
        else:
            begun = self.given_up(kind, on, more["detail"], ref)
            op = self.add(kind, on, writes=(ref.use,), after=(begun,), **more)
        op.action = mail(op, ref)
        return op

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        target, origin = (self.memory.at(address, nbytes) for address in (destination, source))
        on = self.streams[stream]
        self.given_up("copy", on, f"of {nbytes} bytes", target)
        op = self.add("copy", on, detail=f"of {nbytes} bytes", reads=(origin.use,), writes=(target.use,))
        op.action = lambda give: give(target).copy_(give(origin))

    def forget(self, tensor: torch.Tensor) -> None:
        storage = self.memory.known(tensor)
        storage.used_by.clear()  # `record_stream` is nothing to memory that is not torch's
        self._freed(storage)

    # memory

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor says that it is on the GPU."""
        storage = self.memory.find(tensor)
        return storage is not None and storage.on_device

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """What messages call the allocation of a tensor."""
        self.memory.known(tensor).name = name

    def allocated(self, tensor: torch.Tensor, on_device: bool) -> None:
        """A torch operator has made new memory: it may be what the owning stream has just let go of."""
        storage = self.memory.add(tensor, self.current(), on_device)
        if on_device and storage.nbytes:
            self.add("allocate", storage.owner, detail="", writes=(storage.all.use,), action=poison(storage.all))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """torch.Tensor.record_stream: once freed, the memory is not used again before this stream gets there."""
        self.memory.known(tensor).used_by.append(stream)

    def _freed(self, storage: Storage) -> None:
        if storage.on_device and storage.nbytes and self.recording:
            tails = [next((op for op in reversed(self.log) if op.stream is user), None) for user in storage.used_by]
            after = tuple(op for op in tails if op is not None)
            self.add(
                "free", storage.owner, detail="", writes=(storage.all.use,), action=poison(storage.all), after=after
            )

    def uses(self, tensors: Sequence[torch.Tensor]) -> tuple[Use, ...]:
        """The bytes of those that are on the device."""
        return tuple(self.memory.ref(x).use for x in tensors if self.on_device(x))

    def held(self, value: Any) -> Any:
        """What replay needs of an argument: memory of the device as a reference, of the host as it is now."""
        if not isinstance(value, torch.Tensor):
            return value
        return self.memory.ref(value) if self.on_device(value) else value.clone()

    # set-up

    def begin(self) -> None:
        """Forget what has happened: what is recorded starts here, after everything else is over."""
        with self.adding:
            self.recording = False
            self.memory.snapshot()
            self.log.clear()
            self.recording = True

    def end(self) -> None:
        """What happens from here on is not recorded."""
        self.recording = False


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Fabric]:
    """Put a recorder in the place of the GPU, and a fabric on it in the place of NCCL."""
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
