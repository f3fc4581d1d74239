"""What the host needs to post one hop, launches included, beside what the hop computes.

One rank of a ring, telemetry on: every hop sends and receives, waits and launches. On a GPU all its peers are the rank
itself, and only the link is missing. Without a GPU every call that reaches a device is replaced by nothing: what is
left is this package's own Python and Triton's, up to its driver, a lower bound.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...autotune.compile import StandInDriver
from ...comm.control import control_of
from ...comm.transport import Edge, Transport
from ...comm.transports import nccl
from ...comm.transports.nccl import NcclTransport
from ...comm.watchdog import watch
from ...comm.world import DEFAULT_TIMEOUT, Hub, LocalGroup, single_rank
from ...kernels import launch as launching
from ...kernels.device.forward import forward_kernel
from ...ring import Ring
from ...ring import ring as ring_module
from ...ring.schedule.plan import Plan
from ..common.attention import AttentionConfig
from ..common.result import Row
from ..common.timing import Clock, interleaved
from ..overlap.runs import PHASES, TOGETHER, Shard

HOPS = 8  # and ranks
PEERS = ("kv_from", "kv_to", "dkv_from", "dkv_to")  # of a hop
REPEATS = 20
NO_DEVICE = torch.device("cuda", 0)
OTHERS = tuple(os.path.dirname(str(one)) + os.sep for one in (torch.__file__, triton.__file__))
"""Whose calls are not this package's."""


def to_itself(real: Plan) -> Plan:
    """The same, with every peer this very rank: each group has a send and its receive."""
    hops = []
    for hop in real.hops:
        peers: dict[str, Any] = {name: None if getattr(hop, name) is None else 0 for name in PEERS}
        hops.append(replace(hop, **peers))
    comings = {after: hops[base.index] for after, base in real.dkv_returns.items()}
    return replace(real, hops=tuple(hops), dkv_returns=comings, edges=(((0, 0),), ()))


def shard_of(problem: AttentionConfig, ring: Ring, device: torch.device) -> Shard:
    """What rank 0 computes with; on a GPU it sends to itself."""
    return Shard(problem, ring, device, backend="triton", revised=to_itself if device.type == "cuda" else None)


@contextmanager
def ring_of_one(device: torch.device, chunks: int = 1) -> Iterator[Ring]:
    """The ring of rank 0, the only one here: with all that a ring of several ranks does, and a way to itself."""

    def to_itself(*given: object, **named: Any) -> tuple[Transport, ...]:
        made: tuple[Transport, ...] = opened(single_rank(), **named | {"control": control_of(single_rank())})
        return made

    with ExitStack() as stack:
        opened = vars(ring_module)["open_transports"]
        stack.enter_context(
            no_device() if device.type == "cpu" else patch.object(ring_module, "open_transports", to_itself)
        )
        member = LocalGroup(Hub(HOPS, DEFAULT_TIMEOUT), 0)
        yield stack.enter_context(Ring(member, transport="nccl", chunks=chunks))


def rows_of(shard: Shard, clock: Clock) -> list[Row]:
    """Microseconds of the host per hop, and on a GPU what the device takes for it."""
    device, rows = clock.device, list[Row]()
    for phase in PHASES:
        step = partial(shard.run, phase, TOGETHER)
        host = posting(step, device) / HOPS * 1e6
        with no_launches():
            without = posting(step, device) / HOPS * 1e6
            calls = calls_of(step) / HOPS
        row = {"phase": phase, "host": host, "of it Triton": host - without, "Python calls": calls}
        if device.type == "cuda":
            row["compute"] = interleaved({phase: step}, clock, repeats=REPEATS, warmup=3)[phase].median / HOPS * 1e6
        rows.append(row)
    return rows


def posting(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of the host for one pass, while the device is free to be behind; without one, of this thread alone."""
    now = time.perf_counter if device.type == "cuda" else time.thread_time
    taken = []
    for _ in range(REPEATS + 1):
        begun = now()
        step()
        taken.append(now() - begun)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return median(taken[1:])


def calls_of(step: Callable[[], object]) -> int:
    """Calls of Python functions in a pass, those of the standard library (``contextlib``, named tuples) among them.

    By ``sys.setprofile``, which counts every resumption of a generator. Not those of torch, of Triton and of this file,
    which has the stand-ins.
    """
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        calls += event == "call" and file != __file__ and not file.startswith(OTHERS)

    step()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls


class Unwarmed(NcclTransport):
    """NCCL without a device: there are no bytes to check, and nobody to tell anything."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(rank=0, size=HOPS, device=device, control=control_of(single_rank()))

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """Nothing moves."""


def nothing(*arguments: object, **named: object) -> None:
    """In the place of whatever reaches a device."""


def no_launches() -> Any:
    """Nothing of Triton's runs, under its interpreter neither."""
    return patch.object(type(forward_kernel), "run", nothing)


@contextmanager
def no_device() -> Iterator[None]:
    """Replace every call that reaches a device by nothing: streams, events, NCCL through CuPy, Triton's driver."""
    stream = SimpleNamespace(cuda_stream=0, wait_event=nothing, synchronize=nothing)
    event = SimpleNamespace(record=nothing, query=lambda: True, synchronize=nothing, elapsed_time=lambda end: 0.0)
    calls = ("InitRankConfig", "Abort", "Destroy", "GetAsyncError")
    library = SimpleNamespace(**{f"ncclComm{name}": lambda *_: 0 for name in calls}, ncclSend=nothing, ncclRecv=nothing)
    stub = SimpleNamespace(
        available=True, NCCL_UINT8=1, groupStart=nothing, groupEnd=nothing, get_unique_id=lambda: bytes(128)
    )
    cuda: dict[str, Any] = {
        "Stream": lambda *arguments, **named: stream,
        "Event": lambda *arguments, **named: event,
        "current_stream": lambda *arguments: stream,
        "stream": lambda *arguments: nullcontext(),
        "device": lambda *arguments: nullcontext(),
    }
    kernel = SimpleNamespace(run=nothing, function=0, packed_metadata=(), launch_metadata=nothing)

    def compiled(function: Any, key: object, signature: object, device: int, *_: object) -> SimpleNamespace:
        function.device_caches[device][0][key] = kernel
        return kernel

    opened = vars(ring_module)["open_watch"]
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.dict(sys.modules, {"cupy": ModuleType("cupy"), "cupy.cuda": ModuleType("cuda"), "cupy.cuda.nccl": stub}),
        patch.object(torch.Tensor, "contiguous", _contiguous),
        patch.object(torch, "cat", _cat),
        patch.object(nccl, "_library", lambda: library),
        patch.object(ring_module, "open_transports", lambda *arguments, device, **named: (Unwarmed(device),)),
        # as if of a GPU: its spans are events; and no thread beside this one
        patch.object(ring_module, "open_watch", lambda group, device, **named: opened(group, NO_DEVICE, **named)),
        patch.object(watch, "_WATCHDOG", SimpleNamespace(add=nothing)),
        patch.object(driver, "_active", StandInDriver(90, device=-1)),
        patch.object(JITFunction, "_do_compile", compiled),
        patch.object(launching, "check_cpu", nothing),
        nullcontext() if issubclass(type(forward_kernel), JITFunction) else no_launches(),
    ):
        yield


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Room for a copy: on a GPU the host does not wait for the bytes."""
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The same of what joins them."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)
