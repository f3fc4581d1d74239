"""The stand-ins of the recorder for NCCL and for the CUDA driver, and the place that each of them takes."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from ..stand_in import Fabric, install_nccl, replace_streams
from ..stand_in_cuda import Driver, install_driver
from .device import Recorder

PATIENCE = 5.0  # seconds of the host in which a value must be written


class CopyEngine:
    """What `cuda.bindings.driver` puts into streams.

    Bytes move at once, for whoever asks has heard that they are there; and a wait blocks the host, as it would block
    the stream: behind it, memory that a peer still reads may be freed.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._words: dict[int, object] = {}  # by address, as one rank has mapped it
        self.driver = Driver(self)

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        """An asynchronous copy."""
        into, out_of = (self.driver.resolve(address, nbytes) for address in (destination, source))
        target, origin = self._recorder.memory.at(into, nbytes), self._recorder.memory.at(out_of, nbytes)
        on = self._recorder.numbered(stream)
        self._recorder.given_up("engine copy", on, f"of {nbytes} bytes", target)
        self._recorder.add(
            "engine copy",
            on,
            detail=f"of {nbytes} bytes",
            reads=(origin.use,),
            writes=(target.use,),
            action=lambda give: give(target).copy_(give(origin)),
        )
        ctypes.memmove(into, out_of, nbytes)

    def write(self, stream: int, address: int, value: int) -> None:
        """A value for a word, in the order of a stream."""
        self._note("write value", stream, address, value)
        ctypes.c_uint32.from_address(self.driver.resolve(address, 4)).value = value

    def wait(self, stream: int, address: int, value: int) -> None:
        """A stream waits until a word has at least this value."""
        self._note("wait value", stream, address, value)
        word, deadline = ctypes.c_uint32.from_address(self.driver.resolve(address, 4)), time.monotonic() + PATIENCE
        while word.value < value:
            assert time.monotonic() < deadline, f"nobody writes the {value} that {self._recorder.here.label} waits for"
            time.sleep(1e-4)

    def _note(self, kind: str, stream: int, address: int, value: int) -> None:
        if address not in self._words:
            self._words[address] = self.driver.flag_identity(address)
        self._recorder.add(kind, self._recorder.numbered(stream), detail=str(value), flag=(self._words[address], value))


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Fabric]:
    """Put a recorder in the place of the GPU and its driver, and a fabric on it in the place of NCCL."""
    recorder = Recorder()
    fabric = Fabric(recorder)
    replace_streams(monkeypatch, recorder)
    install_nccl(monkeypatch, fabric)
    install_driver(monkeypatch, CopyEngine(recorder).driver)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorder.record_stream(tensor, stream))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "stand-in")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: recorder.add("synchronize"))
    return recorder, fabric
