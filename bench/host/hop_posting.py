"""Host time to post one hop with its launches, next to the hop's compute time.

One rank of a ring runs with telemetry: every hop sends, receives, waits and launches. On a GPU all its peers are the
rank itself, so only the link is missing. Without a GPU, stubs replace every call that reaches a device. The remaining
time of this package's and Triton's Python is a lower bound.
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
from ...comm.control import open_control
from ...comm.transport import Edge
from ...comm.transports import nccl
from ...comm.transports.nccl import NcclTransport
from ...comm.watchdog import watch
from ...comm.world import DEFAULT_TIMEOUT, Hub, LocalGroup, single_rank
from ...kernels import launch as launching
from ...kernels.device.forward import forward_kernel
from ...kernels.gpu import assumed_gpu
from ...ring import Ring
from ...ring import ring as ring_module
from ...ring.schedule.plan import Plan
from ..common.attention import AttentionConfig
from ..common.result import Row
from ..common.timing import StepTimer, time_in_turns
from ..overlap.measure import PHASES, TOGETHER, RankPasses

HOPS = 8  # also the number of ranks
PEERS = ("kv_from", "kv_to", "dkv_from", "dkv_to")  # fields of a hop
REPEATS = 20
NO_DEVICE = torch.device("cuda", 0)
LIBRARY_FOLDERS = tuple(os.path.dirname(str(file)) + os.sep for file in (torch.__file__, triton.__file__))
"""Folders whose calls do not count as this package's."""


def loop_back(real: Plan) -> Plan:
    """Return the plan with rank 0 as every peer, so that every receive gets what the same rank sends."""
    hops = []
    for hop in real.hops:
        peers: dict[str, Any] = {name: None if getattr(hop, name) is None else 0 for name in PEERS}
        hops.append(replace(hop, **peers))
    dkv_returns = {after: hops[base.index] for after, base in real.dkv_returns.items()}
    runs = tuple(map(loop_back, real.runs))
    return replace(real, hops=tuple(hops), dkv_returns=dkv_returns, edges=(((0, 0),), ()), runs=runs)


def rank_passes(problem: AttentionConfig, ring: Ring, device: torch.device) -> RankPasses:
    """Return rank 0's inputs and a ring's passes over them; on a GPU the rank sends to itself."""
    revise: Any = {"revise_plan": loop_back} if device.type == "cuda" else {}
    return RankPasses(problem, ring, device, backend="triton", **revise)


@contextmanager
def ring_of_one(device: torch.device, chunks: int = 1) -> Iterator[Ring]:
    """Yield rank 0 of a ring of ``HOPS`` ranks; it works alone, and on a GPU sends to itself."""

    def open_to_itself(*given: object, **named: Any) -> Any:
        return open_transports(single_rank(), **named | {"control": open_control(single_rank())})

    with ExitStack() as stack:
        open_transports = vars(ring_module)["open_transports"]
        stack.enter_context(
            stub_device() if device.type == "cpu" else patch.object(ring_module, "open_transports", open_to_itself)
        )
        member = LocalGroup(Hub(HOPS, DEFAULT_TIMEOUT), 0)
        yield stack.enter_context(Ring(member, transport="nccl", chunks=chunks))


def host_rows(shard: RankPasses, clock: StepTimer) -> list[Row]:
    """Return a row per phase with the host's microseconds per hop, and on a GPU the device's."""
    device, rows = clock.device, list[Row]()
    for phase in PHASES:
        step = partial(shard.run, phase, TOGETHER)
        host = posting_seconds(step, device) / HOPS * 1e6
        with skip_launches():
            without = posting_seconds(step, device) / HOPS * 1e6
            calls = count_python_calls(step) / HOPS
        row = {"phase": phase, "host": host, "Triton's part": host - without, "Python calls": calls}
        if device.type == "cuda":
            row["compute"] = time_in_turns({phase: step}, clock, repeats=REPEATS, warmup=3)[phase].median / HOPS * 1e6
        rows.append(row)
    return rows


def posting_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the host's median seconds to post a pass, not waiting for the device; on the CPU, of this thread alone."""
    now = time.perf_counter if device.type == "cuda" else time.thread_time
    samples = []
    for _ in range(REPEATS + 1):
        begun = now()
        step()
        samples.append(now() - begun)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return median(samples[1:])


def count_python_calls(step: Callable[[], object]) -> int:
    """Count calls of Python functions in a pass, without those in torch, in Triton and in this file's stubs.

    ``sys.setprofile`` counts every resumption of a generator.
    """
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        calls += event == "call" and file != __file__ and not file.startswith(LIBRARY_FOLDERS)

    step()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls


class NcclWithoutDevice(NcclTransport):
    """NCCL transport whose calls reach no device, so that a warm-up has no bytes to check."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(rank=0, size=HOPS, device=device, control=open_control(single_rank()))

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """Send nothing."""


def ignore_call(*arguments: object, **named: object) -> None:
    """Do nothing, in place of a call that would reach a device."""


def skip_launches() -> Any:
    """Return a context in which Triton kernels are not run, not even by the interpreter."""
    return patch.object(type(forward_kernel), "run", ignore_call)


@contextmanager
def stub_device() -> Iterator[None]:
    """Replace every call that reaches a device by a stub: streams, events, NCCL, Triton's driver."""
    stream = SimpleNamespace(cuda_stream=0, wait_event=ignore_call, synchronize=ignore_call)
    event = SimpleNamespace(
        record=ignore_call, query=lambda: True, synchronize=ignore_call, elapsed_time=lambda end: 0.0
    )
    calls = ("InitRankConfig", "Abort", "Destroy", "GetAsyncError")
    library = SimpleNamespace(
        **{f"ncclComm{name}": lambda *_: 0 for name in calls}, ncclSend=ignore_call, ncclRecv=ignore_call
    )
    stub = SimpleNamespace(
        available=True, NCCL_UINT8=1, groupStart=ignore_call, groupEnd=ignore_call, get_unique_id=lambda: bytes(128)
    )
    cuda: dict[str, Any] = {
        "Stream": lambda *arguments, **named: stream,
        "Event": lambda *arguments, **named: event,
        "current_stream": lambda *arguments: stream,
        "stream": lambda *arguments: nullcontext(),
        "device": lambda *arguments: nullcontext(),
    }
    kernel = SimpleNamespace(run=ignore_call, function=0, packed_metadata=(), launch_metadata=ignore_call)

    def compile_stub(function: Any, key: object, signature: object, device: int, *_: object) -> SimpleNamespace:
        function.device_caches[device][0][key] = kernel
        return kernel

    open_watch = vars(ring_module)["open_watch"]
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.dict(sys.modules, {"cupy": ModuleType("cupy"), "cupy.cuda": ModuleType("cuda"), "cupy.cuda.nccl": stub}),
        patch.object(torch.Tensor, "contiguous", _contiguous),
        patch.object(torch, "cat", _cat),
        patch.object(nccl, "_library", lambda: library),
        patch.object(ring_module, "open_transports", lambda *arguments, device, **named: (NcclWithoutDevice(device),)),
        # Open the watch as for a GPU, whose spans are events, and without another thread.
        patch.object(ring_module, "open_watch", lambda group, device, **named: open_watch(group, NO_DEVICE, **named)),
        patch.object(watch, "_WATCHDOG", SimpleNamespace(add=ignore_call)),
        patch.object(driver, "_active", StandInDriver(90, device=-1)),
        patch.object(JITFunction, "_do_compile", compile_stub),
        patch.object(launching, "check_cpu", ignore_call),
        patch.object(launching, "gpu_specs", lambda device: assumed_gpu(90)),  # TMA descriptors are made as on a GPU
        nullcontext() if issubclass(type(forward_kernel), JITFunction) else skip_launches(),
    ):
        yield


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` or a new tensor without its data, because on a GPU the host does not wait for a copy."""
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return an empty tensor of the shape that ``torch.cat`` returns."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)
