"""The ring of one group: its transport and its slots, kept from call to call."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton

from .. import __version__
from ..comm import (
    Group,
    GroupLike,
    Limits,
    LocalGroup,
    Slots,
    Topology,
    Transport,
    TransportError,
    TransportFactory,
    Windows,
    group_rank_size,
    open_transport,
    open_transports,
    resolve_group,
    windows_of,
)
from ..comm.control import Control
from ..comm.cuda_threads import HOST, within
from ..comm.kept import handle_of, kept_of
from ..comm.registry import label
from ..comm.topology.nvml import Reader
from ..comm.topology.topology import discover
from ..comm.watchdog.telemetry import Report
from ..comm.watchdog.watch import ABORT_SECONDS, FailTogether, Watch, open_watch, ring_control
from ..kernels import PLAIN, KernelConfig, Scores
from ..kernels.gpu import gpu_or_interpreter
from ..kinds import shown
from .buffers import Posted, RingCall, chunks_of
from .checked import checked
from .schedule.plan import PLANS, Plan
from .schedule.schedule import KV_SLOTS
from .trace import Trace
from .wire import grad_wire_of, wire_of

logger = logging.getLogger(__name__)

IN_USE = (
    "this ring is in use by a call of another thread: one call at a time, in the same order on every rank; a Ring for "
    "each thread lets them compute side by side"
)
CAPTURED = (
    "the current stream is captured into a CUDA graph, and a ring waits on the host for other ranks: capture what is "
    "before and after the call"
)
VERSIONS = {"ringattn": __version__, "torch": torch.__version__, "triton": triton.__version__}


class Ring:
    """What the ranks of one group share between calls: transports, and the slots of K/V and of dK/dV.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a :class:`LocalWorld` member; None is
            the default group where ``torch.distributed`` is initialised, else one device alone.
        transport: ``auto``, ``nccl`` (CuPy), ``nccl_one_sided`` (copy engines and NICs, no SMs), ``process_group``,
            ``local`` or the name of another registered one; or a factory, see :func:`comm.register_transport`.
        wire_dtype: how K/V travel: None as they are, ``torch.bfloat16``, or ``torch.float8_e4m3fn`` with one scale per
            head and 128 tokens. Encoded once, by their owner; the own shard is computed with as it is.
        grad_wire_dtype: how partial dK/dV travel: None or ``torch.float32`` as they are summed, or ``torch.bfloat16``.
        slots: buffers that K/V rotate through; memory per rank does not depend on the number of ranks. At least 2
            where more than two ranks share a ring.
        prefetch: hops that K/V are posted ahead of the compute, 0 (blocking) to ``slots - 1``, the default.
        chunks: a hop is cut into this many runs of key heads, each sent and computed on its own, so that only one
            run's transfer is exposed at either end. At most the number of key heads.
        direction: 1 sends K/V to the next rank, -1 to the one before.
        topology: the order of the ranks; several nodes of one size make a two-level ring. None: discovered, where the
            group has GPUs, else flat in rank order.
        limits: what a transfer may take of the machine, see :class:`comm.Limits`.
        deadline: seconds that a transfer may take once what it waits for is done, before the ranks give up with an
            error; None: 100 times the median of the last ones, at least 60 s and 4 times the longest, and 600 s for
            the first of a call and for what this ring has never moved before. Given, it bounds every other wait for
            ranks too, connecting, opening and warming up among them, whatever the timeout of the group. In a mesh of
            two dimensions it holds for both. Until this ring is closed it also holds for calls without ``ring=`` of
            the same group, or of a mesh whose first dimension that is, ``shard`` and ``unshard`` among them: the last
            one given does. The same on all ranks, or none.

    The transports open at the first call, on the device of its tensors; every rank makes the same calls in the same
    order, one at a time. A call that another thread makes meanwhile is a RuntimeError, and ends the ring.
    A context manager; :meth:`close` gives back communicators and slots.

    Raises:
        ValueError: an argument that is not one of the above.
    """

    def __init__(
        self,
        group: GroupLike = None,
        *,
        transport: str | TransportFactory = "auto",
        wire_dtype: torch.dtype | str | None = None,
        grad_wire_dtype: torch.dtype | str | None = None,
        slots: int = KV_SLOTS,
        prefetch: int | None = None,
        chunks: int = 1,
        direction: int = 1,
        topology: Topology | None = None,
        limits: Limits | None = None,
        deadline: float | None = None,
    ) -> None:
        transport, slots, prefetch, chunks, direction = checked(
            transport=transport, slots=slots, prefetch=prefetch, chunks=chunks, direction=direction
        )
        topology, limits, deadline = checked(topology=topology, limits=limits, deadline=deadline)
        self.group: Group = resolve_group(group)
        self.rank, self.size = group_rank_size(self.group)
        if topology is not None and topology.world != self.size:
            raise ValueError(f"topology has {topology.world} ranks, the group has {self.size}")
        self.direction = direction
        self.topology = topology
        self._prefetch = prefetch
        self._set_depth(slots)
        self.chunks = chunks
        wire, self._grad_wire = wire_of(wire_dtype, torch.float32), grad_wire_of(grad_wire_dtype)
        # by name, so that ranks that say the same in different ways agree
        self.wire_dtype = None if wire is None else wire.name
        self.grad_wire_dtype = None if self._grad_wire is None else self._grad_wire.name
        self.limits = limits or Limits()
        self.deadline = deadline
        self._names = [*range(self.size)]  # what errors call each rank: in a mesh, its rank there
        self._rings = FailTogether()
        self._partners: dict[Group, Ring] = {}
        self.number = handle_of(self)  # what names this ring in a graph of torch.compile
        self._transport = transport
        self._transports: tuple[Transport, ...] = ()
        self._flat: Transport | None = None
        self._opened: list[Transport] = []  # what the watch aborts; it must not keep the ring alive
        self._watch: Watch | None = None
        self._device: torch.device | None = None
        self._kv: Slots | None = None
        self._dkv: Slots | None = None
        self._warm: list[Plan] = []
        self._exchanged = False
        self._trace: Trace | None = None
        self._control: Control | None = None
        self._values: Control | None = None
        self._process = os.getpid()
        self._broken = ""  # what ended a call: other ranks may never post what this one's transfers wait for
        self._closed = False
        self._busy = threading.Lock()  # held by the call in progress
        self._misused: RuntimeError | None = None
        if deadline is not None and self.size > 1:
            _DEADLINES[self.group] = _Deadline(self.number, deadline)

    @property
    def settings(self) -> dict[str, Any]:
        """What all ranks of a ring must have in common, beside what they compute."""
        return {
            "transport": label(self._transport),
            "limits": self.limits,
            "direction": self.direction,
            "topology": None if self.topology is None else self.topology.nodes,
            "slots": self.slots,
            "prefetch": self.prefetch,
            "chunks": self.chunks,
            "wire_dtype": self.wire_dtype,
            "grad_wire_dtype": self.grad_wire_dtype,
        }

    def _set_depth(self, slots: int) -> None:
        ring = self.topology
        hops = len(ring.nodes[0]) if ring is not None and ring.two_level else self.size
        self.slots, self.prefetch = depth_of(slots, self._prefetch, hops)

    def partner(self, group: Group) -> Ring:
        """Return the ring of the other dimension of a mesh, made on first use.

        It has this ring's deadline and otherwise the defaults. One of the two that fails ends the other. It is closed
        with this ring.
        """
        if group not in self._partners:
            made = _default_ring(group, self.deadline)
            made._rings = self._rings
            self._partners.setdefault(group, made)
        return self._partners[group]

    def name_ranks(self, names: Sequence[int]) -> None:
        """Set what errors call each rank."""
        self._names[:] = names

    def open(self, device: torch.device) -> tuple[Transport, ...]:
        """The transports for tensors on ``device``, one per level of the ring, opened on first use.

        Raises:
            ValueError: the ring is closed, or open on another device.
            TransportError: the ranks could not open them together.
        """
        self._use(device)
        if not self._transports:
            if self.topology is None and device.type == "cuda" and not isinstance(self.group, LocalGroup):
                self.topology = discover(self._shared(), device)
                self._set_depth(self.slots)
            self._transports = open_transports(self.group, transport=self._transport, **self._opening(device))
            self._opened.extend(self._transports)
        return self._transports

    def _opening(self, device: torch.device) -> dict[str, Any]:
        return {"device": device, "topology": self.topology, "limits": self.limits, "control": self._shared()}

    def open_flat(self, device: torch.device) -> Transport:
        """A transport that reaches every rank of the group, opened on first use."""
        transports = self.open(device)
        if len(transports) == 1:
            return transports[0]
        if self._flat is None:
            # What reaches other nodes reaches all ranks.
            transport = self._transport if callable(self._transport) else transports[-1].name
            self._flat = open_transport(self.group, transport=transport, **self._opening(device))
            self._opened.append(self._flat)
        return self._flat

    @property
    def transport(self) -> str:
        """Name of the transport in use, or the argument before the first call."""
        return self._transports[0].name if self._transports else label(self._transport)

    def leaving_room(self, config: KernelConfig | None) -> KernelConfig | None:
        """``config``, whose persistent kernels leave what this ring's transfers take where it says nothing of that."""
        taken: list[Any] = [getattr(transport, "multiprocessors", None) for transport in self._transports]
        if not taken or None in taken or config is None or not config.persistent or config.sm_margin is not None:
            return config
        most = gpu_or_interpreter(self._device or torch.device("cpu")).multiprocessors // 2
        return replace(config, sm_margin=min(sum(taken), most))

    @contextmanager
    def call(
        self, plan: Plan, phase: str, q: torch.Tensor, k: torch.Tensor, scores: Scores = PLAIN
    ) -> Iterator[RingCall]:
        """What the loops need for one call; an error inside reaches the other ranks."""
        with self._watched(phase, q.device) as watch:
            transports = self.open(q.device)
            if not any(plan is known for known in self._warm):
                for transport, edges in zip(transports, plan.edges, strict=False):
                    transport.warm_up(edges)
                self._warm = [*self._warm[1 - PLANS :], plan]
            wire = wire_of(self.wire_dtype, k.dtype)
            windows = windows_of(transports)
            own = wire is not None or windows is not None  # one more slot, which the rank's own K/V leave from
            self._kv = self._slots(self._kv, (plan.kv_slots + own) * self.chunks, q.device, windows)
            self._dkv = self._slots(self._dkv, plan.dkv_slots * self.chunks, q.device, windows)
            call = RingCall(
                plan=plan,
                phase=phase,
                transports=transports,
                kv_slots=self._kv,
                dkv_slots=self._dkv,
                span=watch.span,
                chunks=chunks_of(self.chunks, q.shape[2], k.shape[2]),
                prefetch=self.prefetch,
                wire=wire,
                grad_wire=self._grad_wire,
                posted=watch.posted,
                scores=scores,
            )
            yield call if self._trace is None else self._trace.watching(call)

    @contextmanager
    def _exchange(self, phase: str, device: torch.device) -> Iterator[tuple[Transport, Posted]]:
        """A transport to every rank, and the watch's note of posts there; an error inside reaches the other ranks."""
        transport = self.open_flat(device)
        with self._watched(phase, device) as watch:
            if not self._exchanged:  # every pair connects, also those that are no neighbours on the ring
                transport.warm_up([*permutations(range(self.size), 2)])
                self._exchanged = True
            yield transport, watch.posted

    @contextmanager
    def _watched(self, phase: str, device: torch.device) -> Iterator[Watch]:
        watch = self._use(device)
        watch.begin(phase)
        try:
            yield watch
        except BaseException as error:
            self._broken = repr(error)
            raised = watch.failed(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            watch.end()

    @staticmethod
    def _slots(slots: Slots | None, count: int, device: torch.device, windows: Windows | None) -> Slots:
        if slots is not None and slots.count >= count:
            return slots
        if slots is not None:
            slots.drain()
            slots.release()
        return Slots(count, device, windows)

    @contextmanager
    def _entered(self, device: torch.device) -> Iterator[None]:
        """One call, from its checks to its end; whatever ends it early reaches the other ranks.

        Raises:
            RuntimeError: a call of another thread is in progress. Ranks whose threads race need not agree on which
                call came first, so the ring is lost, as after any other failure. Or a thread whose wait for other
                virtual ranks would never end.
            NotImplementedError: the current stream is captured into a CUDA graph.
        """
        if self.size == 1:
            yield
            return
        self._check_process()
        if isinstance(self.group, LocalGroup):
            self.group.check_thread()
        if not self._busy.acquire(blocking=False):
            self._misused = RuntimeError(IN_USE)
            if self._watch is not None:
                self._watch.failed(self._misused)
            raise self._misused
        try:
            watch = self._use(device) if self._watch is None or self._closed else self._watch
            watch.enter()
            try:
                self._use(device)
                if _is_capturing(device):
                    raise NotImplementedError(CAPTURED)
                yield
                if self._misused is not None:
                    raise self._misused
            except BaseException as error:
                watch.left(error)
                raise
            finally:
                watch.leave()
        finally:
            self._busy.release()

    def _agree(
        self,
        fields: Mapping[str, object],
        device: torch.device,
        values: Mapping[str, object] | None = None,
        *,
        of: int | None = None,
        always: bool = False,
    ) -> int:
        """Compare what this rank is about to do with every other rank's; the number of the call. See `Watch.agree`."""
        common = {"device": device.type, **self.settings, **VERSIONS} if of is None else {}
        return self._use(device).agree({**fields, **common}, values, of=of, always=always)

    def _call_off(self, other: Ring) -> None:
        """Make nothing of the call that was agreed on, where another ring of these ranks refused it and goes on."""
        if self._watch is not None and other._watch is not None and other._watch.stopped() is None:
            self._watch.call_off()

    def _draw_seed(self, drawn: int | None = None) -> int:
        """A seed of 63 bits from rank 0's torch generator, the same on every rank; one round trip through the store.

        ``drawn``: already, by every rank for itself.
        """
        if self.rank:
            drawn = None
        elif drawn is None:
            drawn = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
        seed = self._gather(drawn, "the seed of dropout")[0]
        assert isinstance(seed, int)
        return seed

    def _gather(self, value: object, what: str) -> list[object]:
        """Return the value of each rank, inside a call; ``what`` is what errors call it. One round trip."""
        if self.size == 1:
            return [value]
        watch = self._watch
        assert watch is not None
        if self._values is None:
            self._values = self._shared().fresh_scope("values")
        try:
            return self._values.gather(value, what=what, stop=watch.stopped)
        except TransportError as error:  # a rank whose own value was enough for it may have stopped before
            raise watch.failed(error) from error

    def telemetry(self) -> tuple[Report, ...]:
        """What this rank knows of every rank and how old that is: compute and wait seconds, bytes, last step, clocks.

        Empty before the first call.
        """
        return self._watch.telemetry() if self._watch is not None else ()

    def _use(self, device: torch.device) -> Watch:
        if self._closed:
            raise ValueError("ring is closed: make a new one")
        self._check_process()
        if self._watch is None:
            self._device = device
            self._watch = open_watch(
                self.group,
                device,
                control=self._shared(),
                deadline=self.deadline,
                transports=self._opened.copy,
                rings=self._rings,
                gauges=Reader(device) if device.type == "cuda" else None,
            )
        if self._device != device:
            raise ValueError(f"q is on {device}, this ring works on {self._device}: use one Ring per device")
        return self._watch

    def _shared(self) -> Control:
        """What its ranks exchange on the host; no wait there is longer than the deadline allows."""
        if self._control is None:
            self._control = ring_control(self.group, self.deadline)
            self._control.names = self._names
        return self._control

    def _check_process(self) -> None:
        """Refuse a process that was forked from this ring's: RuntimeError."""
        if self.size > 1 and os.getpid() != self._process:
            raise RuntimeError(
                f"ring belongs to process {self._process}, from which this one was forked: it has none of its threads"
            )

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record compute, waits, transfers and the use of slots of the calls made inside.

        Raises:
            ValueError: no call has been made yet, so that the device is not known.
        """
        if self._device is None:
            raise ValueError("record() needs a ring that has been used once: its device is not known yet")
        self._trace = Trace(self._device)
        try:
            yield self._trace
        finally:
            self._trace = None

    def close(self) -> None:
        """Give back communicators and slots. Idempotent; raises nothing: what cannot be given back is logged."""
        if self._closed or os.getpid() != self._process:  # what a forked process has inherited is its parent's
            return
        self._closed = True
        if self.group in _DEADLINES and _DEADLINES[self.group].ring == self.number:
            del _DEADLINES[self.group]
        steps: list[Callable[[], object]] = []
        if self._broken:
            reason = f"aborted: its ring was left by {self._broken}"
            device = self._device or HOST
            aborts = (partial(one.abort, reason) for one in self._opened)
            steps += [partial(within, ABORT_SECONDS, abort, device, "abort") for abort in aborts]
        # Under the watch, which ends a transfer that never comes.
        steps += [partial(_drain, slots) for slots in (self._kv, self._dkv) if slots is not None]
        held = (*self._partners.values(), self._watch, *reversed(self._opened), self._control)
        steps += [thing.close for thing in held if thing is not None]
        for step in steps:
            try:
                step()
            except Exception as error:
                logger.warning("rank %d: what a ring held is not all given back: %s", self.rank, error)
        self._kv = self._dkv = self._control = self._values = None
        self._opened.clear()
        self._partners.clear()
        self._transports, self._flat = (), None

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self._broken = repr(error)
        self.close()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _drain(slots: Slots) -> None:
    with suppress(TransportError):  # what failed is over, too
        slots.drain()


def depth_of(slots: int, prefetch: int | None, hops: int) -> tuple[int, int]:
    """``slots`` and ``prefetch``, checked against each other; ``hops`` of an outer step."""
    least = 2 if hops > 2 else 1  # a slot that is sent from cannot be received into
    if slots < least:
        raise ValueError(f"slots is {slots}: a ring of {hops} ranks needs at least {least}")
    if prefetch is not None and not 0 <= prefetch < slots:
        raise ValueError(f"prefetch is {prefetch}: with {slots} slots it must be 0 to {slots - 1}")
    return slots, slots - 1 if prefetch is None else prefetch


class _Deadline(NamedTuple):
    """The deadline that a user gave a ring."""

    ring: int  # its number
    seconds: float


_DEADLINES: MutableMapping[Group, _Deadline] = WeakKeyDictionary()
"""By group the last one that was given, until that ring is closed."""


def ring_of(group: GroupLike, device: torch.device) -> Ring:
    """Return the ring that calls without ``ring=`` share: one per group, device and deadline, made on first use."""
    members = resolve_group(group)
    kept, given = kept_of(members), _DEADLINES.get(members)
    key = device if given is None else (device, given.seconds)
    # in one step: two threads must not make two
    ring = kept[key] if key in kept else kept.setdefault(key, _default_ring(members, given and given.seconds))
    assert isinstance(ring, Ring)
    return ring


def _default_ring(group: Group, deadline: float | None) -> Ring:
    ring = Ring(group)
    ring.deadline = deadline  # not as an argument: calls that name no ring must not take it from here
    return ring


def resolve_ring(ring: Ring | None, group: GroupLike, device: torch.device) -> Ring:
    """The ring of a call; ``ring`` and ``group`` name the same thing, so that only one may be given."""
    if ring is None:
        return ring_of(group, device)
    if not isinstance(ring, Ring):
        raise ValueError(f"ring is {shown(ring)}: it must be a Ring")
    if group is not None:
        raise ValueError("ring and group are both given: a Ring has its group, pass one of them")
    return ring


def device_of(*given: object) -> torch.device:
    """Where a call computes; where that is wrong too, somewhere to tell the other ranks from."""
    for x in given:
        if isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda"):
            return x.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
