"""``ringattn bench host``: what the host needs to post one hop, launches included, beside what the hop computes.

One rank of a ring, telemetry on: every hop sends and receives, waits and launches. On a GPU all its peers are the rank
itself, and only the link is missing. Without a GPU every call that reaches a device is replaced by nothing: what is
left is this package's own Python and Triton's, up to its driver, a lower bound.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType, ModuleType, SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..comm.control import control_of
from ..comm.transport import Edge, Transport
from ..comm.transports import nccl_library
from ..comm.transports.lanes import indexed
from ..comm.transports.local import LocalGroup, solo_group
from ..comm.transports.mailboxes import DEFAULT_TIMEOUT, Hub
from ..comm.transports.nccl import NcclTransport
from ..comm.watchdog import watchdog
from ..kernels import launch as launching
from ..kernels.checks import MAX_HEAD_DIM
from ..kernels.device.forward import forward_kernel
from ..ring import Layout, Mask, Ring, loop
from ..ring import ring as ring_module
from ..ring.backends import backward_backends, forward_backends
from ..ring.schedule.plan import Plan, plan
from .common.memory_room import Needs, of_ranks, refuse_too_large
from .common.output import check_targets, prints, write_csv, write_json
from .common.provenance import provenance
from .common.shapes import TimerOfRings, binary, check_chunks, count, device_name, dtype_name, grouped, timer_of_rings
from .common.tables import table
from .common.timing import Clock, interleaved
from .overlap.runs import BACKWARD, FORWARD
from .ring.candidates import DTYPES, Problem
from .ring.memory import of_ours

HOPS = 8  # and ranks
REPEATS = 20
LOWER_BOUND = "device calls stubbed: a lower bound, not a result"
BY_CLOCK = "by clock: the host's time is in the compute"
NO_DEVICE = torch.device("cuda", 0)
OTHERS = tuple(os.path.dirname(str(one)) + os.sep for one in (torch.__file__, triton.__file__))
"""Whose calls are not this package's."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """Seconds per hop."""

    phase: str
    host: float
    compute: float | None  # of the device; None where there is none
    note: str = ""  # why nothing is said of who is ahead
    launches: float | None = None  # of the host's, Triton's share
    calls: float | None = None  # of Python functions, see `calls_of`

    @property
    def hidden(self) -> bool | None:
        """The host is ahead of the device."""
        return None if self.compute is None or self.note else self.host < self.compute

    def as_row(self) -> dict[str, object]:
        return {
            "phase": self.phase,
            "host us per hop": round(self.host * 1e6, 1),
            "of it Triton us": None if self.launches is None else round(self.launches * 1e6, 1),
            "calls per hop": None if self.calls is None else round(self.calls, 1),
            "compute us per hop": None if self.compute is None else round(self.compute * 1e6, 1),
            "": self.note or ("host is ahead" if self.hidden else "host is behind"),
        }


def to_itself(real: Plan) -> Plan:
    """The same, with every peer this very rank: each group has a send and its receive."""

    def self_only(peer: int | None) -> int | None:
        return None if peer is None else 0

    hops = tuple(
        replace(
            hop,
            kv_from=self_only(hop.kv_from),
            kv_to=self_only(hop.kv_to),
            dkv_from=self_only(hop.dkv_from),
            dkv_to=self_only(hop.dkv_to),
        )
        for hop in real.hops
    )
    comings = {after: hops[base.index] for after, base in real.dkv_returns.items()}
    return replace(real, hops=hops, dkv_returns=comings, edges=(((0, 0),), ()))


class Case:
    """Forward and backward of rank 0 of a full ring, of ``[batch, tokens, heads, head dim]`` per hop."""

    def __init__(
        self, ring: Ring, shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        batch, tokens, heads, dim = shape
        draw = torch.empty if device.type == "cpu" else torch.randn  # without a device nothing reads them
        self.q, self.k, self.v, self.dout, self.out = (
            draw(batch, tokens, count, dim, device=device, dtype=dtype)
            for count in (heads, kv_heads, kv_heads, heads, heads)
        )
        self.lse = draw(batch, heads, tokens, device=device, dtype=torch.float32)
        self.ring, self.scale = ring, 1 / math.sqrt(dim)
        layout = Layout.contiguous(HOPS * tokens, HOPS)
        real = plan(layout, Mask(causal=False), 0, 1, device, None, ring.slots)
        self.plan = real if device.type == "cpu" else to_itself(real)

    def forward(self) -> None:
        with self.ring.call(self.plan, FORWARD, self.q, self.k) as call:
            works = forward_backends("triton", call.chunks, self.q, softmax_scale=self.scale)
            loop.forward(call, works, self.k, self.v)

    def backward(self) -> None:
        dkdv = torch.empty_like(self.k), torch.empty_like(self.v)
        with self.ring.call(self.plan, BACKWARD, self.q, self.k) as call:
            given = (self.dout, self.q, self.out, self.lse)
            works = backward_backends("triton", call.chunks, *given, softmax_scale=self.scale)
            loop.backward(call, works, self.k, self.v, dkdv)


def measured(
    device: torch.device,
    shape: tuple[int, int, int, int],
    kv_heads: int,
    dtype: torch.dtype,
    chunks: int,
    timer: str = "",
) -> list[Row]:
    """Forward and backward on a GPU, or on the CPU with every call to a device stubbed."""
    with ring_of_one(device, chunks) as ring:
        return rows_of(Case(ring, shape, kv_heads, dtype, device), Clock(device, timer=timer))


@contextmanager
def ring_of_one(device: torch.device, chunks: int = 1) -> Iterator[Ring]:
    """The ring of rank 0, the only one here: with all that a ring of several ranks does, and a way to itself."""

    def to_itself(*given: object, **named: Any) -> tuple[Transport, ...]:
        made: tuple[Transport, ...] = opened(solo_group(), **named | {"control": control_of(solo_group())})
        return made

    with ExitStack() as stack:
        opened = vars(ring_module)["open_transports"]
        stack.enter_context(
            no_device() if device.type == "cpu" else patch.object(ring_module, "open_transports", to_itself)
        )
        member = LocalGroup(Hub(HOPS, DEFAULT_TIMEOUT), 0)
        yield stack.enter_context(Ring(member, transport="nccl", chunks=chunks))


def rows_of(case: Case, clock: Clock) -> list[Row]:
    """Host time per hop, and on a GPU what the device takes for it."""
    device, rows = clock.device, []
    for phase, step in ((FORWARD, case.forward), (BACKWARD, case.backward)):
        host = posting(step, device) / HOPS
        with no_launches():
            launches, calls = host - posting(step, device) / HOPS, calls_of(step) / HOPS
        if device.type == "cuda":
            taken = interleaved({phase: step}, clock, repeats=REPEATS, warmup=3)[phase].median
            note = BY_CLOCK if clock.timer == "clock" else ""
            rows.append(Row(phase, host, taken / HOPS, note, launches, calls))
        else:
            rows.append(Row(phase, host, None, LOWER_BOUND, launches, calls))
    return rows


def posting(step: Callable[[], None], device: torch.device) -> float:
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


def calls_of(step: Callable[[], None]) -> int:
    """Calls of Python functions in a pass, those of the standard library (``contextlib``, named tuples) among them.

    By ``sys.setprofile``, which counts every resumption of a generator. Not those of torch, of Triton and of this file,
    which has the stand-ins.
    """
    found = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        file = frame.f_code.co_filename
        found += event == "call" and file != __file__ and not file.startswith(OTHERS)

    step()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


def check_room(shape: tuple[int, int, int, int], kv_heads: int, dtype: str, device: torch.device) -> None:
    """Refuse what does not fit the free memory, with the tokens that do: typer.BadParameter."""
    batch, tokens, heads, head_dim = shape

    def needed(some: int) -> Needs:
        return of_ranks(of_ours(Problem(HOPS * some, HOPS, batch, heads, kv_heads, head_dim, dtype)), device, 1)

    refuse_too_large("--tokens", tokens, needed, device, unit="tokens per rank")


class Unwarmed(NcclTransport):
    """NCCL without a device: there are no bytes to check."""

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """Nothing moves."""


def nothing(*arguments: object, **named: object) -> None:
    """In the place of whatever reaches a device."""


class NoDriver:
    """What Triton asks a driver on its way to a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # what is "compiled" for it is nobody else's

    def get_current_stream(self, device: int) -> int:
        return 0


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
    nccl = SimpleNamespace(
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
    opened = vars(ring_module)["open_watch"]
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.dict(sys.modules, {"cupy": ModuleType("cupy"), "cupy.cuda": ModuleType("cuda"), "cupy.cuda.nccl": nccl}),
        patch.object(torch.Tensor, "contiguous", _contiguous),
        patch.object(nccl_library, "_library", lambda: library),
        patch.object(ring_module, "open_transports", lambda *arguments, device, **named: (_unwarmed(device),)),
        # as if of a GPU: its spans are events; and no thread beside this one
        patch.object(ring_module, "open_watch", lambda group, device, **named: opened(group, NO_DEVICE, **named)),
        patch.object(watchdog, "_WATCHDOG", SimpleNamespace(add=nothing)),
        patch.object(driver, "_active", NoDriver()),
        patch.object(triton.compiler, "compile", lambda *arguments, **named: kernel),
        patch.object(launching, "check_cpu", nothing),
        nullcontext() if issubclass(type(forward_kernel), JITFunction) else no_launches(),
    ):
        yield


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Room for a copy: on a GPU the host does not wait for the bytes."""
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _unwarmed(device: torch.device) -> NcclTransport:
    control = control_of(solo_group())  # nobody else is there to tell anything
    return Unwarmed(rank=0, size=HOPS, device=device, control=control)


@app.command()
def host(
    tokens: Annotated[Any, typer.Option(parser=count, metavar="SIZE", help="Tokens per rank.")] = "4k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=MAX_HEAD_DIM)] = 128,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")] = "bf16",
    chunks: Annotated[int, typer.Option(min=1, help="Runs of heads that a hop is cut into.")] = 1,
    device: Annotated[str, typer.Option(help="cpu (stubbed) or cuda; default: cuda where there is one.")] = "",
    timer: TimerOfRings = "",
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per phase.")] = None,
) -> None:
    """The host's time to post one hop, launches included; on a GPU less than the hop computes, or exit 1."""
    where = torch.device(device_name(device))
    timer = timer_of_rings(where.type, timer)
    kv_heads = grouped(heads, kv_heads)
    check_targets(json, csv)
    if not prints():
        return  # one rank tells what there is to tell
    check_chunks([chunks], kv_heads)
    shape = (batch, tokens, heads, head_dim)
    check_room(shape, kv_heads, dtype, where)
    rows = measured(indexed(where), shape, kv_heads, DTYPES[dtype], chunks, timer)
    title = (
        f"full, B{batch} H{heads}/{kv_heads} D{head_dim} {dtype}, {binary(tokens)} tokens per rank, {chunks} chunks; "
        f"one rank of {HOPS}, median of {REPEATS} passes by {timer}\n"
    )
    if json != "-":
        typer.echo(table([row.as_row() for row in rows], title=title))
    if json is not None:
        told = {"shape": shape, "kv_heads": kv_heads, "dtype": dtype, "chunks": chunks, "hops": HOPS}
        found = [{**asdict(row), "hidden": row.hidden, "unit": "s"} for row in rows]
        about = {"schema": "ringattn bench host 1", "provenance": provenance(where), "timer": timer}
        write_json(json, {**about, "asked": told, "rows": found})
    if csv is not None:
        write_csv(csv, [row.as_row() for row in rows])
    if any(row.hidden is False for row in rows):
        print("the host needs longer to post a hop than the device to compute it", file=sys.stderr)
        raise typer.Exit(1)
