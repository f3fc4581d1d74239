"""`Ring`: the transports and receive slots of one group, shared by all calls of that group."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
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
    slot_windows,
)
from ..comm.control import Control
from ..comm.cuda_threads import CPU_DEVICE, run_with_timeout
from ..comm.group_cache import create_handle, get_group_cache
from ..comm.registry import transport_label
from ..comm.topology.nvml import GpuReader
from ..comm.topology.topology import discover_topology
from ..comm.watchdog.telemetry import Report
from ..comm.watchdog.watch import ABORT_SECONDS, FailureGroup, Watch, open_watch, ring_control
from ..kernels import PLAIN, KernelConfig, Scores
from ..kernels.gpu import gpu_or_interpreter
from ..validators import short_repr
from .arg_checks import check_ring_args
from .buffers import PostHook, RingCall, split_heads
from .schedule.plan import PLAN_CACHE_SIZE, Plan
from .schedule.schedule import KV_SLOTS
from .trace import Trace
from .wire import resolve_grad_wire, resolve_wire

logger = logging.getLogger(__name__)

RING_IN_USE = (
    "this ring is in use by a call in another thread. Make one call at a time, in the same order on every rank, or use "
    "one Ring per thread."
)
GRAPH_CAPTURE = (
    "the current stream is being captured into a CUDA graph, but a ring waits on the host for other ranks. Capture the "
    "code before and after the call instead."
)
VERSIONS = {"ringattn": __version__, "torch": torch.__version__, "triton": triton.__version__}


class Ring:
    """Transports and receive slots that the ranks of one group share between calls.

    The transports open at the first call, on the device of its tensors. Every rank makes the same calls in the same
    order, one at a time. A call from a second thread during a call raises RuntimeError and ends the ring.

    A Ring is a context manager; :meth:`close` releases communicators and slots.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a :class:`LocalWorld` member. None
            means the default group if ``torch.distributed`` is initialised, and otherwise this device alone.
        transport: ``auto``, ``nccl`` (CuPy), ``nccl_one_sided`` (copy engines and NICs, no SMs), ``process_group``,
            ``local``, the name of another registered transport, or a factory (see :func:`comm.register_transport`).
        wire_dtype: dtype in which K/V are sent. None sends them unchanged. ``torch.bfloat16`` rounds.
            ``torch.float8_e4m3fn`` uses one scale per head and 128 tokens. The owner encodes K/V once; its own compute
            uses the unrounded tensors.
        grad_wire_dtype: dtype in which partial dK/dV are sent. None or ``torch.float32`` sends the fp32 sums,
            ``torch.bfloat16`` rounds them at every hop.
        slots: number of K/V receive slots, at least 2 if more than two ranks share a ring. Memory per rank does not
            depend on the number of ranks.
        prefetch: number of hops that K/V are posted ahead of the compute, 0 (blocking) to ``slots - 1``, the default.
        chunks: number of chunks that a hop is cut into, at most 1024. Each is sent and computed separately, so that
            only one chunk's transfer is exposed at either end. Chunks are groups of key heads. If there are fewer key
            heads than chunks, the tokens of the shard are cut as well. None: 2 if the first call with gradients, for
            each dtype and head dim, has a single-pass backward on any rank, and otherwise 1.
        direction: 1 sends K/V to the next rank, -1 to the previous rank.
        topology: order of the ranks. Several nodes of equal size make a two-level ring. None discovers the topology if
            the group has GPUs, and otherwise uses a flat ring in rank order.
        limits: machine resources that a transfer may use, see :class:`comm.Limits`.
        deadline: seconds that a transfer may take after everything it waits for is done. When they have passed, all
            ranks fail with an error. Pass the same value on all ranks, or none. See below.

    With ``deadline=None`` the limit is 100 times the median of recent transfers, at least 60 s and at least 4 times the
    longest. The first transfer of a call, and transfers that this ring has never made before, have 600 s.

    A given ``deadline`` also bounds every other wait for ranks, such as connecting, opening and warming up, whatever
    the timeout of the group. In a two-dimensional mesh it holds for both dimensions. Until this ring is closed, the
    deadline also holds for calls without ``ring=`` on the same group, including ``shard`` and ``unshard``. It
    also holds on meshes whose first dimension is this group. If several rings set a deadline, the last one counts.

    Raises:
        ValueError: an argument is not one of the values above.
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
        chunks: int | None = None,
        direction: int = 1,
        topology: Topology | None = None,
        limits: Limits | None = None,
        deadline: float | None = None,
    ) -> None:
        transport, slots, prefetch, chunks, direction = check_ring_args(
            transport=transport, slots=slots, prefetch=prefetch, chunks=chunks, direction=direction
        )
        topology, limits, deadline = check_ring_args(topology=topology, limits=limits, deadline=deadline)
        self.group: Group = resolve_group(group)
        self.rank, self.size = group_rank_size(self.group)
        if topology is not None and topology.world != self.size:
            raise ValueError(f"topology has {topology.world} ranks, but the group has {self.size}")
        self.direction = direction
        self.topology = topology
        self._prefetch = prefetch
        self._set_slots(slots)
        self.chunks = chunks
        self._default_chunks: dict[Hashable, int] = {}
        wire, self._grad_wire = resolve_wire(wire_dtype, torch.float32), resolve_grad_wire(grad_wire_dtype)
        # Compared between ranks by name, because a dtype can be passed as a torch dtype or as text.
        self.wire_dtype = None if wire is None else wire.name
        self.grad_wire_dtype = None if self._grad_wire is None else self._grad_wire.name
        self.limits = limits or Limits()
        self.deadline = deadline
        self._names = [*range(self.size)]  # rank numbers for error messages; in a mesh, ranks of the whole mesh
        self._rings = FailureGroup()
        self._partners: dict[Group, Ring] = {}
        self.number = create_handle(self)  # identifies this ring in a torch.compile graph
        self._transport = transport
        self._transports: tuple[Transport, ...] = ()
        self._flat: Transport | None = None
        self._opened: list[Transport] = []  # the watchdog aborts these; it must not keep the ring alive
        self._watch: Watch | None = None
        self._device: torch.device | None = None
        self._kv: Slots | None = None
        self._dkv: Slots | None = None
        self._warm: list[Plan] = []
        self._is_fully_connected = False
        self._trace: Trace | None = None
        self._control: Control | None = None
        self._values: Control | None = None
        self._process = os.getpid()
        self._broken = ""  # the error that ended a call; other ranks may never post what our transfers wait for
        self._closed = False
        self._busy = threading.Lock()  # held by the call in progress
        self._misused: RuntimeError | None = None
        if deadline is not None and self.size > 1:
            _DEADLINES[self.group] = _Deadline(self.number, deadline)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks of the ring."""
        return {
            "transport": transport_label(self._transport),
            "limits": self.limits,
            "direction": self.direction,
            "topology": None if self.topology is None else self.topology.nodes,
            "slots": self.slots,
            "prefetch": self.prefetch,
            "chunks": self.chunks,
            "wire_dtype": self.wire_dtype,
            "grad_wire_dtype": self.grad_wire_dtype,
        }

    def _set_slots(self, slots: int) -> None:
        ring = self.topology
        hops = len(ring.nodes[0]) if ring is not None and ring.two_level else self.size
        self.slots, self.prefetch = check_slots(slots, self._prefetch, hops)

    def partner(self, group: Group) -> Ring:
        """Return the partner: the ring of ``group``, the other mesh dimension. Created on first use.

        The partner has this ring's transport, limits and deadline. If one of the two fails, both end. Closing this
        ring closes the partner.
        """
        if group not in self._partners:
            ring = _new_ring(group, self.deadline, transport=self._transport, limits=self.limits)
            ring._rings = self._rings
            self._partners.setdefault(group, ring)
        return self._partners[group]

    def name_ranks(self, names: Sequence[int]) -> None:
        """Set the rank number that error messages use for each rank of this ring."""
        self._names[:] = names

    def open(self, device: torch.device) -> tuple[Transport, ...]:
        """Return the transports for tensors on ``device``, one per level of the ring. Open them on first use.

        Raises:
            ValueError: the ring is closed, or open on another device.
            TransportError: the ranks could not open the transports together.
        """
        self._get_watch(device)
        if not self._transports:
            if self.topology is None and device.type == "cuda" and not isinstance(self.group, LocalGroup):
                self.topology = discover_topology(self._get_control(), device)
                self._set_slots(self.slots)
            self._transports = open_transports(self.group, transport=self._transport, **self._open_options(device))
            self._opened.extend(self._transports)
        return self._transports

    def _open_options(self, device: torch.device) -> dict[str, Any]:
        return {"device": device, "topology": self.topology, "limits": self.limits, "control": self._get_control()}

    def open_flat(self, device: torch.device) -> Transport:
        """Return a transport that reaches every rank of the group, opened on first use."""
        transports = self.open(device)
        if len(transports) == 1:
            return transports[0]
        if self._flat is None:
            # The transport between nodes reaches all ranks.
            transport = self._transport if callable(self._transport) else transports[-1].name
            self._flat = open_transport(self.group, transport=transport, **self._open_options(device))
            self._opened.append(self._flat)
        return self._flat

    @property
    def transport(self) -> str:
        """Name of the transport in use, or the argument before the first call."""
        return self._transports[0].name if self._transports else transport_label(self._transport)

    def with_sm_margin(self, config: KernelConfig | None) -> KernelConfig | None:
        """Return ``config`` with ``sm_margin`` set, so that persistent kernels leave multiprocessors for transfers.

        A config that sets ``sm_margin`` itself, or has no persistent kernels, is returned unchanged.
        """
        used: list[Any] = [getattr(transport, "multiprocessors", None) for transport in self._transports]
        if not used or None in used or config is None or not config.persistent or config.sm_margin is not None:
            return config
        half_of_gpu = gpu_or_interpreter(self._device or torch.device("cpu")).multiprocessors // 2
        return replace(config, sm_margin=min(sum(used), half_of_gpu))

    @contextmanager
    def call(
        self, plan: Plan, phase: str, q: torch.Tensor, k: torch.Tensor, scores: Scores = PLAIN, chunks: int = 1
    ) -> Iterator[RingCall]:
        """Yield the state for one forward or backward of :mod:`.loop`. Report an error inside to the other ranks."""
        with self._watched_call(phase, q.device) as watch:
            transports = self.open(q.device)
            if not any(plan is known for known in self._warm):
                for transport, edges in zip(transports, plan.edges, strict=False):
                    transport.warm_up(edges)
                self._warm = [*self._warm[1 - PLAN_CACHE_SIZE :], plan]
            wire = resolve_wire(self.wire_dtype, k.dtype)
            windows = slot_windows(transports)
            own = wire is not None or windows is not None  # one more slot, which the rank's own K/V leave from
            self._kv = self._slots(self._kv, (plan.kv_slots + own) * chunks, q.device, windows)
            self._dkv = self._slots(self._dkv, plan.dkv_slots * chunks, q.device, windows)
            call = RingCall(
                plan=plan,
                phase=phase,
                transports=transports,
                kv_slots=self._kv,
                dkv_slots=self._dkv,
                record_span=watch.span,
                heads=split_heads(chunks // max(len(plan.runs), 1), q.shape[2], k.shape[2]),
                prefetch=self.prefetch,
                wire=wire,
                grad_wire=self._grad_wire,
                on_post=watch.add_post,
                scores=scores,
            )
            yield call if self._trace is None else self._trace.wrap_call(call)

    @contextmanager
    def _exchange(self, phase: str, device: torch.device) -> Iterator[tuple[Transport, PostHook]]:
        """Yield a transport between all pairs of ranks, to move data outside a pass, and the callback for its posts.

        An error inside the block is reported to the other ranks. ``phase`` names the exchange in errors.
        """
        transport = self.open_flat(device)
        with self._watched_call(phase, device) as watch:
            if not self._is_fully_connected:  # connect every pair of ranks, not only neighbours on the ring
                transport.warm_up([*permutations(range(self.size), 2)])
                self._is_fully_connected = True
            yield transport, watch.add_post

    @contextmanager
    def _watched_call(self, phase: str, device: torch.device) -> Iterator[Watch]:
        """Yield the watch for one forward, backward or exchange, and report an error inside to the other ranks."""
        watch = self._get_watch(device)
        watch.begin_loop(phase)
        try:
            yield watch
        except BaseException as error:
            self._broken = repr(error)
            raised = watch.report_failure(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            watch.end_loop()

    @staticmethod
    def _slots(slots: Slots | None, count: int, device: torch.device, windows: Windows | None) -> Slots:
        """Return ``slots`` if there are at least ``count``, else replace them."""
        if slots is not None and slots.count >= count:
            return slots
        if slots is not None:
            slots.drain()
            slots.release()
        return Slots(count, device, windows)

    @contextmanager
    def _call_guard(self, device: torch.device) -> Iterator[None]:
        """Guard one call from its checks to its end. Report any error inside to the other ranks.

        Raises:
            RuntimeError: a call of another thread is in progress. The ring is then lost, because ranks whose threads
                race need not agree on the order of calls. Also raised in a thread that must not wait for other virtual
                ranks.
            NotImplementedError: the current stream is captured into a CUDA graph.
        """
        if self.size == 1:
            yield
            return
        self._check_process()
        if isinstance(self.group, LocalGroup):
            self.group.check_thread()
        if not self._busy.acquire(blocking=False):
            self._misused = RuntimeError(RING_IN_USE)
            if self._watch is not None:
                self._watch.report_failure(self._misused)
            raise self._misused
        try:
            watch = self._get_watch(device) if self._watch is None or self._closed else self._watch
            watch.begin_call()
            try:
                self._get_watch(device)
                if _is_capturing(device):
                    raise NotImplementedError(GRAPH_CAPTURE)
                yield
                if self._misused is not None:
                    raise self._misused
            except BaseException as error:
                watch.report_call_error(error)
                raise
            finally:
                watch.end_call()
        finally:
            self._busy.release()

    def _agree(
        self,
        fields: Mapping[str, object],
        device: torch.device,
        values: Mapping[str, object] | None = None,
        *,
        forward_number: int | None = None,
        always: bool = False,
    ) -> int:
        """Compare a call with all other ranks and return its number; a forward also compares settings and versions.

        ``forward_number`` is given for a backward. ``always`` waits for the other ranks even if the call was expected.
        """
        common = {"device": device.type, **self.settings, **VERSIONS} if forward_number is None else {}
        return self._get_watch(device).agree_on_call(
            {**fields, **common}, values, forward_number=forward_number, is_forced=always
        )

    def _cancel_agreed(self, other: Ring) -> None:
        """Cancel the agreed call because another ring of these ranks refused it."""
        if self._watch is not None and other._watch is not None and other._watch.failure_reason() is None:
            self._watch.cancel_call()

    def _draw_seed(self, own_seed: int | None = None) -> int:
        """Return a seed that is equal on every rank, by default 63 bits from rank 0's generator. One round trip.

        Args:
            own_seed: the seed that this rank has drawn already, if every rank has drawn one. Rank 0's seed is returned.
        """
        if self.rank:
            own_seed = None
        elif own_seed is None:
            own_seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
        seed = self._gather(own_seed, "the seed of dropout")[0]
        assert isinstance(seed, int)
        return seed

    def _gather(self, value: object, what: str) -> list[object]:
        """Return the value of each rank, inside a call. One round trip; ``what`` names the value in errors."""
        if self.size == 1:
            return [value]
        watch = self._watch
        assert watch is not None
        if self._values is None:
            self._values = self._get_control().new_scope("values")
        try:
            return self._values.gather(value, what=what, stop=watch.failure_reason)
        except TransportError as error:  # another rank may have failed before it sent its value
            raise watch.report_failure(error) from error

    def _choose_chunks(self, kind: Hashable, is_single_pass: bool) -> int:
        """Return the number of chunks of a call with gradients. One round trip for the first call of a ``kind``."""
        if self.chunks is None and kind not in self._default_chunks:
            self._default_chunks[kind] = 1 + (
                self.size > 1 and any(self._gather(is_single_pass, "the kind of the backward"))
            )
        return self.chunks or self._default_chunks[kind]

    def telemetry(self) -> tuple[Report, ...]:
        """Return the newest report of every rank that has arrived here, with its age. Empty before the first call.

        A report has compute and wait seconds, bytes, the last step and clock rates.
        """
        return self._watch.telemetry() if self._watch is not None else ()

    def speeds(self, work: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return the relative speed of every rank, for ``Layout.packed`` and ``Layout.balanced``. Mean about 1.

        Every rank calls this method, between two calls of the ring, and gets the same speeds: the work of a rank
        divided by its compute seconds of the last 10 s, rounded to 1/64. Before all ranks have computed, all are 1.

        Args:
            work: relative work of every rank in the layout of these calls, such as its speed when the layout was made.
                None: equal.

        Raises:
            ValueError: ``work`` does not have one number above 0 per rank.
        """
        amounts = [1.0] * self.size if work is None else [float(amount) for amount in work]
        if len(amounts) != self.size or not all(0 < amount < math.inf for amount in amounts):
            raise ValueError(f"work is {short_repr(work)}: it must be {self.size} finite numbers above 0, one per rank")
        if self._watch is None:
            return (1.0,) * self.size
        own = next((report.row.compute for report in self.telemetry() if report.rank == self.rank), 0.0)
        seconds = [float(str(each)) for each in self._gather(own, "compute seconds")]
        if not all(seconds):
            return (1.0,) * self.size
        rates = [amount / each for amount, each in zip(amounts, seconds, strict=True)]
        mean = math.fsum(rates) / self.size
        return tuple(max(round(64 * rate / mean), 1) / 64 for rate in rates)

    def _get_watch(self, device: torch.device) -> Watch:
        if self._closed:
            raise ValueError("ring is closed. Create a new Ring.")
        self._check_process()
        if self._watch is None:
            self._device = device
            self._watch = open_watch(
                self.group,
                device,
                control=self._get_control(),
                deadline=self.deadline,
                transports=self._opened.copy,
                failure_group=self._rings,
                gauges=GpuReader(device) if device.type == "cuda" else None,
            )
        if self._device != device:
            raise ValueError(f"q is on {device}, but this ring works on {self._device}. Use one Ring per device.")
        return self._watch

    def _get_control(self) -> Control:
        """Return the host-side control channel of the ranks. Its waits never exceed the deadline."""
        if self._control is None:
            self._control = ring_control(self.group, self.deadline)
            self._control.names = self._names
        return self._control

    def _check_process(self) -> None:
        """Raise RuntimeError if this process was forked from the ring's process."""
        if self.size > 1 and os.getpid() != self._process:
            raise RuntimeError(
                f"ring belongs to process {self._process}, but this process was forked from it and has none of its "
                "threads. Create a new Ring."
            )

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record compute, waits, transfers and slot use of the calls made inside.

        Raises:
            ValueError: the ring has not been used yet, so its device is unknown.
        """
        if self._device is None:
            raise ValueError("record() needs a ring whose device is known. Make one call with this ring first.")
        self._trace = Trace(self._device)
        try:
            yield self._trace
        finally:
            self._trace = None

    def close(self) -> None:
        """Release communicators and slots. Idempotent; failures are logged, never raised."""
        if self._closed or os.getpid() != self._process:  # the resources of a forked process belong to its parent
            return
        self._closed = True
        if self.group in _DEADLINES and _DEADLINES[self.group].ring == self.number:
            del _DEADLINES[self.group]
        steps: list[Callable[[], object]] = []
        if self._broken:
            reason = f"aborted because a call on its ring failed: {self._broken}"
            device = self._device or CPU_DEVICE
            aborts = (partial(transport.abort, reason) for transport in self._opened)
            steps += [partial(run_with_timeout, ABORT_SECONDS, abort, device, "abort") for abort in aborts]
        # Drain while the watchdog still runs: it ends a transfer that never completes.
        steps += [partial(_drain, slots) for slots in (self._kv, self._dkv) if slots is not None]
        resources = (*self._partners.values(), self._watch, *reversed(self._opened), self._control)
        steps += [resource.close for resource in resources if resource is not None]
        for step in steps:
            try:
                step()
            except Exception as error:
                logger.warning(
                    "rank %d: closing a ring partly failed, so some resources may leak: %s", self.rank, error
                )
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
    with suppress(TransportError):  # a failed transfer does not use its slot any more
        slots.drain()


def check_slots(slots: int, prefetch: int | None, hops: int) -> tuple[int, int]:
    """Check ``slots`` and ``prefetch`` for outer steps of ``hops`` hops; return both, without None."""
    least = 2 if hops > 2 else 1  # a slot cannot receive while it is being sent
    if slots < least:
        raise ValueError(f"slots is {slots}: a ring of {hops} ranks needs at least {least}")
    if prefetch is not None and not 0 <= prefetch < slots:
        raise ValueError(f"prefetch is {prefetch}: with {slots} slots it must be between 0 and {slots - 1}")
    return slots, slots - 1 if prefetch is None else prefetch


class _Deadline(NamedTuple):
    """Deadline that a user gave to a ring."""

    ring: int  # number of the ring
    seconds: float


_DEADLINES: MutableMapping[Group, _Deadline] = WeakKeyDictionary()
"""Last deadline given per group, until that ring is closed."""


def default_ring(group: GroupLike, device: torch.device) -> Ring:
    """Return the ring for calls without ``ring=``: one per group, device and deadline, created on first use."""
    members = resolve_group(group)
    cache, deadline = get_group_cache(members), _DEADLINES.get(members)
    key = device if deadline is None else (device, deadline.seconds)
    # setdefault is atomic, so that two threads get the same ring
    ring = cache[key] if key in cache else cache.setdefault(key, _new_ring(members, deadline and deadline.seconds))
    assert isinstance(ring, Ring)
    return ring


def _new_ring(group: Group, deadline: float | None, **settings: Any) -> Ring:
    ring = Ring(group, **settings)
    ring.deadline = deadline  # not as an argument, which would enter it in _DEADLINES
    return ring


def resolve_ring(ring: Ring | None, group: GroupLike, device: torch.device) -> Ring:
    """Return the ring of a call. Raise ValueError if ``ring`` and ``group`` are both given."""
    if ring is None:
        return default_ring(group, device)
    if not isinstance(ring, Ring):
        raise ValueError(f"ring is {short_repr(ring)}: it must be a Ring")
    if group is not None:
        raise ValueError("ring and group are both given. Pass only one of them, because a Ring has its own group.")
    return ring


def call_device(*tensors: object) -> torch.device:
    """Return the device of the first CPU or GPU tensor among the arguments.

    Without such a tensor, return the current GPU or the CPU, so that the other ranks can be told about the error.
    """
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda"):
            return x.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
