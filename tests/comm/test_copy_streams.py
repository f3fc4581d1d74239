"""CUDA paths of ``local`` and ``process_group`` on fake streams and events: which work must precede which."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ringattn.comm import Limits, LocalGroup, LocalTransport, LocalWorld, Message, ProcessGroupTransport
from ringattn.comm.control import open_control
from ringattn.comm.transport import DONE, TransportError
from ringattn.comm.transports.copy_streams import CudaCopyStream, wait_until_passed
from ringattn.comm.world import single_rank

from ..support.cuda.device import Device, Event, Stream
from ..support.cuda.nccl import check_held
from ..support.transport_cases import CASES, constant_tensor, on_ranks

CPU = torch.device("cpu")


def streamed(group: LocalGroup) -> LocalTransport:
    return LocalTransport(group, CPU, copy_stream=CudaCopyStream(CPU))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_local_conformance(name: str, world_size: int, device: Device) -> None:
    on_ranks(world_size, lambda group: CASES[name](streamed(group), CPU))


def test_local_holds_tensors_until_compute_waits(device: Device) -> None:
    on_ranks(2, lambda group: check_held(device, streamed(group), 1 - group.rank()))


def test_copy_streams_have_high_priority(device: Device) -> None:
    stream: Any = CudaCopyStream(torch.device("cuda", 0)).stream
    assert stream.priority < 0


@pytest.mark.parametrize("fails", [False, True])
def test_virtual_ranks_compute_between_the_caller_s_work_and_its_return(
    fails: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run each rank on its own stream after the caller's work, and synchronize before ``run`` returns or raises."""

    def fn(group: LocalGroup) -> None:
        device.add("compute", device.current())
        assert device.thread.index == 1
        if fails:
            raise ValueError(f"rank {group.rank()}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with LocalWorld(3) as world:
        assert world.device == torch.device("cuda", 1)
        earlier = device.add("compute", device.current(1))
        with pytest.raises(ValueError, match="rank") if fails else nullcontext():
            world.run(fn)
    computed = [op for op in device.log if op.kind == "compute" and op is not earlier]
    assert len({op.stream for op in (earlier, *computed)}) == 4
    for op in computed:
        assert device.happens_before(earlier, op)
        assert any(device.happens_before(op, end) for end in device.log if end.kind == "synchronize")


def on_streams(device: Device, **more: Any) -> ProcessGroupTransport:
    group = Mock(rank=lambda: 0, size=lambda: 2, abort=lambda: device.add("abort"))
    group._get_backend.return_value = group
    control, stream = open_control(single_rank()), CudaCopyStream(CPU)
    return ProcessGroupTransport(group, CPU, control=control, copy_stream=stream, **more)


def test_process_group_refuses_a_speed_limit_on_streams(device: Device) -> None:
    with pytest.raises(ValueError, match=r"limits.bytes_per_second is 9.0, which the transport process_group does not"):
        on_streams(device, limits=Limits(bytes_per_second=9))


def test_process_group_aborts_its_backend_once(device: Device) -> None:
    transport = on_streams(device)
    transport.abort("hop 3 is 20 s late")
    transport.abort("for the second time")
    transport.close()
    assert [op.kind for op in device.log] == ["abort"]
    with pytest.raises(TransportError, match="the process_group transport of rank 0 was aborted: hop 3 is 20 s late"):
        transport.post(sends=[], receives=[])


def test_posted_tensors_are_held_until_their_fence_is_waited_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hold the tensors, because the allocator would reuse their memory while the stream still uses it."""
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
    monkeypatch.setattr(ProcessGroupTransport, "_operation", lambda *_: None)
    transport, held = on_streams(device), [torch.zeros(2) for _ in range(4)]
    sends, receives = [Message(1, held[0]), Message(0, held[1])], [Message(1, held[2]), Message(0, held[3])]
    fence = transport.post(sends=sends, receives=receives)
    gone = [weakref.ref(x) for x in held]
    del sends, receives, held
    device.log.clear()  # the log holds references to the copied tensors
    assert all(x() is not None for x in gone)
    fence.wait()
    assert all(x() is None for x in gone)


def test_the_fence_of_a_failed_device_raises(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = CudaCopyStream(CPU).mark()
    assert fence.done()
    device.pending.add(fence._event)  # type: ignore[arg-type]
    assert not fence.done()

    def fail(event: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(type(fence._event), "query", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fence.done()
    assert not wait_until_passed(fence, 5.0), "a failed device never passes its fence"


def test_fence_numbers_follow_the_order_of_event_records(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number fences in the order of their records, because a larger number means a later point of the stream."""
    lane, record, pause = CudaCopyStream(CPU), Event.record, random.Random(0)

    def slow(event: Event, stream: Stream) -> None:
        record(event, stream)
        time.sleep(pause.random() * 1e-3)

    monkeypatch.setattr(Event, "record", slow)
    with ThreadPoolExecutor(4) as pool:
        fences = [
            fence
            for points in pool.map(lambda _: [lane.record_point() for _ in range(10)], range(4))
            for fence in points
        ]
    numbers = {fence._event: fence._number for fence in fences}
    recorded = [numbers[op.event] for op in device.log if op.kind == "record"]  # type: ignore[index]
    assert recorded == sorted(recorded)


def test_process_group_runs_beside_compute(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the copy stream current both when the backend starts and when it is waited for."""

    class Work:
        def wait(self) -> None:
            device.add("work.wait", device.current())

    def batch(operations: Sequence[Any]) -> list[Work]:
        device.add("batch", device.current(), detail=operations)
        return [Work()]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, group, group_peer: (kind, tensor.numel(), group_peer))
    transport = on_streams(device)
    compute = device.current()

    written = device.add("compute", compute)
    mark = transport.mark()
    fence = transport.post(
        sends=[Message(1, constant_tensor(1, 3, CPU)), Message(0, constant_tensor(1, 5, CPU))],
        receives=[Message(0, constant_tensor(0, 5, CPU)), Message(1, constant_tensor(0, 4, CPU))],
        after=[DONE, mark],
    )
    between = device.add("compute", compute)
    fence.wait()
    read = device.add("compute", compute)

    ops = {op.kind: op for op in device.log}
    assert ops["batch"].detail == [(dist.isend, 12, 1), (dist.irecv, 16, 1)]
    for kind in ("copy", "batch", "work.wait"):
        assert ops[kind].stream is not compute
        assert device.happens_before(written, ops[kind])
        assert device.happens_before(ops[kind], read)
        assert not device.happens_before(ops[kind], between)

    device.log.clear()
    transport.post(sends=[], receives=[], after=[])  # torch refuses an empty batch
    assert [op.kind for op in device.log] == ["record"]
