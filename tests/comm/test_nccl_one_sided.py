"""The one-sided NCCL transport on a fake of NCCL's calls and rules, and the calls that reach libnccl."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import LocalGroup, Message, NcclTransport, Placed, Slots, TransportError, slot_windows
from ringattn.comm.limits import NO_LIMITS
from ringattn.comm.transports import nccl_one_sided
from ringattn.comm.transports.nccl_one_sided import OneSidedCommunicator, one_sided_missing

from ..support.cuda.device import Device
from ..support.cuda.nccl import Fabric
from ..support.cuda.one_sided import OneSided, Windows, install_one_sided, opened
from ..support.transport_cases import CASES, constant_tensor, on_ranks, ring_neighbours
from .test_nccl import Library, through

CPU = torch.device("cpu")


@pytest.fixture
def device(fabric: Fabric) -> Device:
    return fabric.device


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, fabric: Fabric) -> Windows:
    windows = install_one_sided(monkeypatch, fabric)
    monkeypatch.setattr(nccl_one_sided, "BOX_BYTES", 1 << 18)  # so that a LARGE message takes several boxes
    return windows


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_conformance(name: str, world_size: int, windows: Windows) -> None:
    def fn(group: LocalGroup) -> bool:
        transport = opened(group)
        CASES[name](transport, CPU)
        transport.close()
        return "aborted" in transport._end_reason  # after an abort peers may still write to the windows

    assert any(on_ranks(world_size, fn)) or windows.left == (0, 0)


def test_slots_in_windows_are_written_in_place(windows: Windows, device: Device) -> None:
    spec = [((50,), torch.float32)]

    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        data: Any = transport._comm.data  # new memory has old contents
        data.allocate = lambda n, ask=data.allocate: (place := ask(n), windows.blocks[place].fill_(7))[0]
        onward, back = ring_neighbours(transport)
        slots = Slots(2, CPU, slot_windows([transport]))
        for nbytes in (200, 5000):
            slots.reserve(nbytes)
            here, there = (slots.tensors(slot, spec)[0] for slot in (0, 1))
            assert not here.any() and not there.any()
            here.fill_(transport.rank)
            sends, receives = [Placed(onward, here, there)], [Message(back, there)]
            transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
            assert there.tolist() == [back] * 50
            transport.gather(None)
        assert len(transport._comm.windows) == 2, "one window for the boxes and one for the newest slots"
        transport.close()

    on_ranks(3, fn)
    assert windows.left == (0, 0)
    copies = [op.detail for op in device.log if op.kind == "copy"]
    assert len(copies) == 6 and {nbytes for _, _, nbytes in copies} == {200}


@pytest.mark.parametrize("mistaken", [False, True])
def test_free_signals_and_data_signals_are_counted_apart(
    mistaken: bool, windows: Windows, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Post send and receive together on one rank only. With one counter for both signals, the data is wrong."""
    put = OneSided.put

    def late(self: OneSided, *arguments: int) -> None:
        time.sleep(0.3)
        put(self, *arguments)

    def fn(group: LocalGroup) -> int:
        transport = opened(group)
        transport.gather(None)
        monkeypatch.setattr(OneSided, "put", late)
        if mistaken:
            transport._comm.free = transport._comm.data
        sends, receives = ([Message(1 - group.rank(), constant_tensor(value, 4, CPU))] for value in (7, 0))
        for parts in [(sends, receives)] if group.rank() else [([], receives), (sends, [])]:
            transport.post(sends=parts[0], receives=parts[1], after=[transport.mark()]).wait()
        transport.gather(None)
        return int(receives[0].tensor[0])

    assert on_ranks(2, fn) == [0 if mistaken else 7, 7]
    device.blocks = False  # release the remaining waits


@pytest.mark.parametrize("call", ["allocate", "register", "no symmetric memory"])
def test_a_window_that_cannot_be_created_is_an_error_on_every_rank(call: str, windows: Windows) -> None:
    def refused(group: LocalGroup, make: Callable[[LocalGroup], object]) -> None:
        who = "rank 10" if call.startswith("no") else "rank 11"
        with pytest.raises(TransportError, match=rf"{who} cannot \w+ a window of \d+ bytes: (unhandled|no symmetric)"):
            make(group)

    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        transport.gather(None)
        windows.fails, windows.symmetric = {call: 1}, not call.startswith("no")
        slots = Slots(1, CPU, slot_windows([transport]))
        refused(group, lambda _: slots.reserve(1000))
        transport.gather(None)
        refused(group, opened)
        transport.gather(None)
        windows.fails, windows.symmetric = {}, True
        slots.reserve(1001)
        transport.close()

    on_ranks(2, fn)
    assert windows.left == (0, 0)


def test_memory_of_another_owner_is_deregistered_but_not_freed(windows: Windows) -> None:
    def fn(group: LocalGroup) -> None:
        transport, arena = opened(group), torch.zeros(512, dtype=torch.uint8)
        assert transport.multiprocessors == 0
        before = windows.left
        transport.register(arena[:256])
        assert transport._window(arena[255:]) is not None and transport._window(arena[256:]) is None
        transport.release(arena[:256])
        assert windows.left == before and not windows.freed
        transport.close()
        transport.release(arena)  # the end of the transport has released everything
        with pytest.raises(TransportError, match="is closed"):
            transport.zeros(256)

    on_ranks(1, fn)


@pytest.mark.parametrize("method", ["abort", "destroy", "check_async_error"])
def test_both_communicators_end_and_are_checked(method: str) -> None:
    both = Mock(), Mock()
    getattr(nccl_one_sided._Communicators(*both), method)()
    assert [getattr(comm, method).call_count for comm in both] == [1, 1]


def test_each_communicator_makes_its_first_call_when_it_opens(
    windows: Windows, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, signal = cast("Any", []), OneSided.signal
    monkeypatch.setattr(OneSided, "signal", lambda self, *given: signals.append(self) or signal(self, *given))

    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        assert signals == [transport._comm.data, transport._comm.free]
        stream: Any = transport.copy_stream.stream  # waits for the zeros of the boxes
        assert [op.stream for op in device.log if op.kind == "wait"] == [stream]

    on_ranks(1, fn)


@pytest.mark.parametrize("make", [opened, partial(through, ((0,),))])
def test_the_first_communicator_is_aborted_when_the_second_fails(
    make: Callable[[LocalGroup], object], windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, failed = Mock(), TransportError("rank 0: ranks [0] did not join")
    monkeypatch.setattr(NcclTransport, "_join", Mock(side_effect=[first, failed]))

    with pytest.raises(TransportError, match="did not join"):
        on_ranks(1, make)
    first.abort.assert_called_once()


def test_a_step_that_other_ranks_do_not_take_is_named(windows: Windows) -> None:
    def fn(group: LocalGroup) -> None:
        transport, over = opened(group), threading.Event()
        transport._timeout = 0.05
        with pytest.raises(
            TransportError, match=r"rank 10 cannot wait: other ranks did not do the same within 0\.05 s"
        ):
            transport._together(over.wait, "wait")
        over.set()

    on_ranks(1, fn)


def test_memory_of_nccl_is_wrapped_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = Mock()
    monkeypatch.setattr(torch, "as_tensor", wrap)
    nccl_one_sided.tensor_at(4096, 24, torch.device("cuda", 1))
    (memory,), options = wrap.call_args
    assert memory.__cuda_array_interface__["data"] == (4096, False) and options == {"device": torch.device("cuda", 1)}
    assert (memory.__cuda_array_interface__["shape"], memory.__cuda_array_interface__["typestr"]) == ((24,), "|u1")


def test_windows_of_different_sizes_are_refused(windows: Windows) -> None:
    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        with pytest.raises(TransportError, match=r"nbytes differs between ranks \(\[256, 512\]\)"):
            transport.zeros(256 * (1 + group.rank()))
        transport.close()

    on_ranks(2, fn)


def test_an_abort_returns_although_a_signal_never_arrives(
    windows: Windows, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Return from ``abort`` and ``close`` although NCCL's own abort blocks on a stream that waits for a signal."""
    monkeypatch.setattr(nccl_one_sided, "ABORT_SECONDS", 0.2)
    caplog.set_level(logging.WARNING)

    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        transport.gather(None)
        if group.rank() == 0:
            device.blocks = False  # the stream waits while the host continues
            fence: Any = transport.post(sends=[], receives=[Message(1, constant_tensor(0, 4, CPU))])
            device.pending.add(fence._event)
            device.blocks = True
            begun = time.monotonic()
            transport.abort("hop 3 is 20 s late")
            transport.close()
            assert time.monotonic() - begun < 10 and not fence.done()
            assert "rank 10: a signal never arrived" in caplog.text
            assert not transport._finalizer.alive, "abort and close must end the communicator once"
            with pytest.raises(TransportError, match="of rank 10 was aborted: hop 3 is 20 s late"):
                transport.post(sends=[], receives=[])
        transport.gather(None)
        device.blocks = False  # the process ends
        transport.close()

    on_ranks(2, fn)


def test_a_post_that_fails_half_way_is_waited_for(windows: Windows, fabric: Fabric) -> None:
    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        transport.gather(None)
        fabric.fail_on = "put"
        tensor = constant_tensor(0, 4, CPU)
        with pytest.raises(TransportError, match="NCCL refused a group of transfers: NCCL_ERROR_INVALID_USAGE"):
            transport.post(sends=[Message(1 - group.rank(), tensor)], receives=[Message(1 - group.rank(), tensor)])
        last: Any = transport._last
        assert last._keep == (tensor, tensor)
        transport.gather(None)
        transport.abort("the test is over")

    on_ranks(2, fn)


def test_capture_into_a_cuda_graph_is_refused(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(TransportError, match="cannot be captured into a CUDA graph"):
            transport.post(sends=[], receives=[])

    on_ranks(1, fn)


@pytest.mark.parametrize(
    ("version", "driver", "environment", "match"),
    [
        (22902, 12050, {}, None),
        (22901, 12050, {}, "NCCL 2.29.1 is loaded; one-sided calls need 2.29.2"),
        (22907, 12040, {}, "the driver supports CUDA 12.4; one-sided calls need 12.5"),
        (22907, 13000, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment lets a"),
        (22907, 13000, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, None),
        (22907, 13000, {"NCCL_WIN_ENABLE": "0"}, "NCCL_WIN_ENABLE=0 in the environment disables"),
        (22907, 13000, {"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE=0 in the environment disables"),
        (22907, 13000, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "lets ranks share a GPU"),
    ],
)
def test_reasons_why_one_sided_calls_are_unavailable(
    version: int, driver: int, environment: Any, match: str | None, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.version = version
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    missing = one_sided_missing(environment)
    assert missing is None if match is None else match in str(missing)


def test_calls_into_libnccl(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = Library()
    monkeypatch.setattr("ringattn.comm.transports.nccl._library", lambda: library)
    monkeypatch.setattr(nccl_one_sided, "_declare", lambda library: None)
    communicator = OneSidedCommunicator(3, bytes(128), 2, NO_LIMITS)
    communicator.put(1000, 24, 1, 55, 512, 9)
    communicator.signal(1, 9)
    communicator.wait({0: 2, 1: 1}, 9)
    communicator.deregister(55)
    communicator.free(1000)
    put, signal, wait, *rest = library.calls[1:]
    assert put == ("ncclPutSignal", (1000, 24, 1, 1, 55, 512, 0, 0, 0, 77, 9))
    assert signal == ("ncclSignal", (1, 0, 0, 0, 77, 9))
    assert (wait[0], wait[1][0], wait[1][2:]) == ("ncclWaitSignal", 2, (77, 9))
    assert [(desc.opCnt, desc.peer, desc.sigIdx, desc.ctx) for desc in wait[1][1]] == [(2, 0, 0, 0), (1, 1, 0, 0)]
    assert rest == [("ncclCommWindowDeregister", (77, 55)), ("ncclMemFree", (1000,))]
    with pytest.raises(TransportError, match="NCCL has no symmetric memory between these GPUs"):
        communicator.register(1000, 4096)
    name, (comm, *memory, _, flags) = library.calls[-1]
    assert (name, comm, memory, flags) == ("ncclCommWindowRegister", 77, [1000, 4096], 1)
    assert communicator.allocate(4096) == 0
    library.status = 5
    for refused in (
        partial(communicator.put, 1000, 24, 1, 55, 512, 9), partial(communicator.signal, 1, 9),
        partial(communicator.wait, {0: 2}, 9), partial(communicator.allocate, 4096), partial(communicator.free, 1000),
        partial(communicator.register, 1000, 4096), partial(communicator.deregister, 55),
    ):  # fmt: skip
        with pytest.raises(TransportError, match="error 5"):
            refused()
    assert ctypes.sizeof(nccl_one_sided._WaitSignalDesc) == 16
