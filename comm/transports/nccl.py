"""Transfers through NCCL: communicators by CuPy and ctypes, one high-priority stream of our own, one group per post.

A ring through several nodes has two communicators: one for the edges inside this rank's node, one for those that leave
it. NCCL gives all peers of a communicator as many channels as the worst of them can use: one peer over a NIC would
throttle every NVLink edge. And it asks that the operations of several communicators of a GPU run one after the other,
in one order on all ranks (user guide, "Using multiple NCCL communicators concurrently"). So both work on one stream,
and of every post the part inside the node goes first: a transfer waits for none but those before it in that order, at
either end, and the first that is not over can always run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import re
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..control import Control
from ..cuda_threads import on_device, start, within
from ..groups import Group
from ..limits import CGA_CLUSTER_SIZE, CLUSTER_VARIABLE, CTA_VARIABLES, CTAS, NO_LIMITS, Limits, environment_ctas
from ..registry import PROCESSES, register_transport
from ..transport import (
    WARM_UP_SECONDS,
    Edge,
    Fence,
    Message,
    TransportBase,
    TransportError,
    check_messages,
)
from .lanes import StreamFence, StreamLane, passed

logger = logging.getLogger(__name__)


# `ncclConfig_t` of NCCL 2.18: every later library reads it as such and takes its own defaults for newer fields.
CONFIG_VERSION = 21800
CONFIG_MAGIC = 0xCAFEBEEF
UNDEFINED_INT = -(2**31)
UNIQUE_ID_BYTES = 128
LIBRARY = "libnccl.so.2"
# a library of NCCL, not one of its plugins (libnccl-net.so, libnccl-tuner.so …)
LIBRARY_FILE = re.compile(r"libnccl(-[0-9a-f]{8})?\.so[.\d]*")
MAPS = Path("/proc/self/maps")

OVERRIDES = {"channels": CTA_VARIABLES, "ctas": CTA_VARIABLES, "cga_cluster_size": (CLUSTER_VARIABLE,)}
NOT_BLOCKING = "NCCL_COMM_BLOCKING"


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


def cta_bounds(limits: Limits, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The fewest and the most thread blocks of a communicator, -2**31 where that is NCCL's choice.

    NCCL runs one thread block per channel, and takes both bounds for the channels of point-to-point transfers.
    """
    if limits.channels is not None:
        return limits.channels, limits.channels
    if limits.ctas is None and environment_ctas(environment) is not None:
        return UNDEFINED_INT, UNDEFINED_INT  # beside our most, NCCL would cut what the user makes the fewest
    return UNDEFINED_INT, limits.ctas or CTAS


def overridden(limits: Limits, environment: Mapping[str, str] = os.environ) -> str | None:
    """Which environment variable keeps these limits, or any communicator of ours, from being; None where none does."""
    if environment.get(NOT_BLOCKING) == "0":
        return f"{NOT_BLOCKING}=0 in the environment makes NCCL's calls return before they are done: unset it"
    limited = [name for name in OVERRIDES if getattr(limits, name) is not None]
    names = dict.fromkeys(variable for name in limited for variable in OVERRIDES[name])
    variables = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    if not variables:
        return None
    text = ", ".join(variables)
    return f"limits is {limits}, and {text} in the environment overrides it for the whole process: unset it"


def loaded_libraries(maps: str | None = None) -> list[Path]:
    """Every libnccl of a process by its ``/proc/self/maps``, None: of this one; a file that is mapped twice is one.

    More than one is one too many, see `several_loaded`.
    """
    files: dict[tuple[str, str], Path] = {}
    for line in (MAPS.read_text() if maps is None else maps).splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and LIBRARY_FILE.fullmatch(Path(parts[5].removesuffix(" (deleted)")).name):
            files.setdefault((parts[3], parts[4]), Path(parts[5]))  # device and inode: one file has many names
    return [*files.values()]


def several_loaded() -> str | None:
    """Why communicators of this process could not be trusted: torch's NCCL may not be CuPy's; None where it is one."""
    libraries = loaded_libraries()
    if len(libraries) < 2:
        return None
    names = " and ".join(map(str, libraries))
    return f"{len(libraries)} NCCL libraries are loaded, {names}: uninstall or unload all but one"


class ConfiguredCommunicator:
    """What CuPy's `NcclCommunicator` offers and we use, with limits on thread blocks and clusters.

    CuPy (14.2) fills the configuration itself and opens none of these fields, so this calls the very library that it
    uses.

    Raises:
        TransportError: NCCL refuses.
    """

    def __init__(self, size: int, unique_id: Sequence[int], rank: int, limits: Limits) -> None:
        least, most = cta_bounds(limits)
        self._library = _library()
        self._comm = ctypes.c_void_p()
        # CuPy 13 gives signed characters, 14 bytes
        shared = _UniqueId.from_buffer_copy(bytes(character % 256 for character in unique_id))
        config = _Config(
            ctypes.sizeof(_Config),
            CONFIG_MAGIC,
            CONFIG_VERSION,
            blocking=1,  # the calls of a communicator that does not block need polling of their own
            cgaClusterSize=limits.cga_cluster_size or CGA_CLUSTER_SIZE,
            minCTAs=least,
            maxCTAs=most,
            netName=None,
            splitShare=UNDEFINED_INT,
        )
        self._check(
            self._library.ncclCommInitRankConfig(ctypes.byref(self._comm), size, shared, rank, ctypes.byref(config))
        )

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """`ncclSend`."""
        self._check(self._library.ncclSend(pointer, count, dtype, peer, self._comm, stream))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """`ncclRecv`."""
        self._check(self._library.ncclRecv(pointer, count, dtype, peer, self._comm, stream))

    def check_async_error(self) -> None:
        """Raise what has gone wrong since."""
        error = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(error)))
        self._check(error.value)

    def abort(self) -> None:
        """`ncclCommAbort`."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def destroy(self) -> None:
        """`ncclCommDestroy`."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommDestroy(comm)

    def _check(self, status: int) -> None:
        if status:
            raise TransportError(f"NCCL: {self._library.ncclGetErrorString(status).decode()} (status {status})")


@functools.cache
def _library() -> ctypes.CDLL:
    libraries = loaded_libraries()
    if len(libraries) != 1:
        raise TransportError(several_loaded() or f"{LIBRARY} is not loaded in this process")
    # The same file is the same library: nothing is loaded a second time.
    library = ctypes.CDLL(str(libraries[0]))
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    library.ncclCommInitRankConfig.argtypes = (pointer, integer, _UniqueId, integer, pointer)
    for name in ("ncclSend", "ncclRecv"):
        getattr(library, name).argtypes = (pointer, size, integer, integer, pointer, pointer)
    library.ncclCommGetAsyncError.argtypes = (pointer, pointer)
    for name in ("ncclCommAbort", "ncclCommDestroy"):
        getattr(library, name).argtypes = (pointer,)
    library.ncclGetErrorString.argtypes = (integer,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


# A call that sees the flag of an abort returns at once; its connections look for it every half second at most.
CALL_SECONDS = 10.0


def nccl_missing() -> str | None:
    """Why CuPy's NCCL cannot be used here, with what to install; None where it can. Touches no GPU."""
    # torch is loaded by now, so the library that CuPy resolves by name is the one that torch brought.
    extra = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}"
    # CuPy warns of a library that it cannot load and goes on without; where warnings are errors, its import would fail.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            available = importlib.import_module("cupy.cuda.nccl").available
        except ImportError as error:
            return f'CuPy does not import ({error}): pip install "ringattn[{extra}]"'
    reasons = " ".join(" ".join(str(warning.message).split()) for warning in caught)
    if not available:
        return f'this CuPy finds no NCCL library{reasons and f" ({reasons})"}: pip install "ringattn[{extra}]"'
    if reasons:
        logger.warning("CuPy: %s", reasons)
    return several_loaded()


class NcclTransport(TransportBase):
    """An NCCL communicator, grouped by CuPy, over some or all ranks of a group.

    `members` are the group's ranks that the communicator joins, in its order; by default all. `rank`, `size`, the
    peers of messages and what `gather` returns are the group's own. Every rank of the group opens its transports in
    the same order, also where their members differ, as the rings inside the nodes do. `lane` is the stream that
    transfers run on; None makes one.

    Nothing is connected yet: the first transfer to a peer connects to it and blocks the host, `warm_up` does that.
    """

    name = "nccl"

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        control: Control,
        members: Sequence[int] | None = None,
        limits: Limits = NO_LIMITS,
        timeout: float = WARM_UP_SECONDS,
        lane: StreamLane | None = None,
    ) -> None:
        self._members = {peer: place for place, peer in enumerate(range(size) if members is None else members)}
        if rank not in self._members:
            raise ValueError(f"members is {list(self._members)}: rank {rank} is not one of them")
        refused = limits.refused_by("nccl", *OVERRIDES) or overridden(limits)
        if refused:
            raise ValueError(refused)
        missing = nccl_missing()
        if missing:
            raise TransportError(f'transport "nccl": {missing}')
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        super().__init__(rank, size, device, timeout)
        self._control, self.names = control.fresh_scope("nccl"), control.names
        self.multiprocessors = limits.multiprocessors
        self._lane = StreamLane(device) if lane is None else lane
        self._last: StreamFence | None = None
        self._ending = threading.Lock()
        self._ended = ""  # why nothing can be posted any more
        self._calling = threading.Lock()  # held while a call uses the communicator, which is freed by nobody else then
        self._comm: Any = self._join(limits)
        # Nothing else would end one that nobody closed; aborted, for destroying it is collective inside a node.
        self._dropped = weakref.finalize(self, _drop, self._nccl, self._comm, self._calling, device, os.getpid())

    @property
    def lane(self) -> StreamLane:
        """The stream that transfers run on."""
        return self._lane

    def mark(self) -> StreamFence:
        """The point that compute has reached on the current stream."""
        return self._lane.mark()

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        """See `Transport.post`. Enqueues and returns; the host never waits for the device."""
        check_messages(self, self._device, sends, receives)
        for peer, _ in (*sends, *receives):
            if peer not in self._members:
                raise ValueError(f"peer is {peer}, this communicator joins ranks {list(self._members)}")
        self._lane.follow(after)
        try:
            with self._calling:
                self._enqueue(sends, receives, self._lane.stream.cuda_stream)
        except RuntimeError as error:  # NcclError is one
            refused = self._ended or f"rank {self.names[self.rank]}: NCCL refused a group of transfers: {error}"
            raise TransportError(refused) from error
        self._last = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
        return self._last

    def _enqueue(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        with self._group() as comm:
            for peer, tensor in sends:
                comm.send(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, self._members[peer], stream)
            for peer, tensor in receives:
                comm.recv(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, self._members[peer], stream)

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """See `Transport.warm_up`. A transport whose warm-up failed is aborted."""
        try:
            super().warm_up(edges)
        except TransportError:
            self.abort("its warm-up failed")
            raise

    def gather(self, value: object) -> list[object]:
        # A peer may still be in its warm-up, until the deadline of that.
        return self._control.gather(value, what="gather of the nccl transport", timeout=2 * self._timeout)

    def check(self) -> str | None:
        """See `Transport.check`. NCCL notices network errors; a peer of the same node that died is silent."""
        with self._ending:  # or the communicator could be given back meanwhile
            try:
                if not self._ended:
                    self._comm.check_async_error()
            except RuntimeError as error:
                return f"the nccl transport of rank {self.names[self.rank]}: {error}"
        return None

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Peers see their transfers fail or hang."""
        comm = self._end(str(self._aborted_error(reason)))
        if comm is not None:
            self._give_up(comm)

    def close(self) -> None:
        """Give the communicator back once this rank's transfers are over; abort it if they are not, in time."""
        drained = bool(self._ended) or passed(self._last, self._timeout)
        comm = self._end(str(self._closed_error()))
        if comm is None:
            return
        if not (drained and self._calling.acquire(timeout=self._timeout)):
            return self._give_up(comm)
        self._calling.release()  # nobody calls any more: it has ended
        # destroy() flushes what the network still carries, which abort() would cut off under a slower peer. It blocks
        # for as long as a dead peer of this node stays silent, so it is given a thread and a deadline.
        if not within(self._timeout, comm.destroy, self._device, "nccl-destroy"):
            logger.warning("rank %d: NCCL did not let go of its communicator in %g s", self.rank, self._timeout)

    def _join(self, limits: Limits) -> Any:
        """The communicator of the members; blocks until every one of them is here."""
        size, place, shared = len(self._members), self._members[self.rank], self._shared_id()
        joined: list[Any] = []
        given_up = threading.Event()

        def join() -> None:
            try:
                joined.append(self._communicator(size, shared, place, limits))
            except Exception as error:
                joined.append(error)
            if given_up.is_set():
                _abandon(joined)

        # A member that failed leaves the others waiting in NCCL, which nothing ends: so from a thread.
        if not within(self._timeout, join, self._device, "nccl-join"):
            given_up.set()
            start(partial(_abandon, joined), self._device, "nccl-abandon")
            who, members = self.names[self.rank], [self.names[rank] for rank in self._members]
            raise TransportError(f"rank {who}: ranks {members} did not join in {self._timeout:g} s")
        if isinstance(joined[0], Exception):
            who = self.names[self.rank]
            raise TransportError(f"rank {who}: NCCL makes no communicator: {joined[0]}") from joined[0]
        return joined[0]

    def _communicator(self, *arguments: Any) -> Any:
        return ConfiguredCommunicator(*arguments)

    def _shared_id(self) -> Any:
        """What the members of one communicator know each other by, drawn by the first of them."""
        first = next(iter(self._members))
        try:
            drawn = self._nccl.get_unique_id() if self.rank == first else None
            mine: object = None if drawn is None else [isinstance(drawn, bytes), *drawn]  # CuPy 14: bytes, 13: a tuple
        except RuntimeError as error:
            # in its place, so that no rank waits for it
            mine = f"NCCL of rank {self.names[first]} draws no unique id: {error}"
        ids = self._control.fresh_scope("ids")  # not gathered: each communicator has one, and its members need no other
        if self.rank == first:
            ids.publish(str(first), mine)
        ids_drawn: list[Any] = ids.collect({first: str(first)}, what="the unique ids of NCCL", timeout=self._timeout)
        if isinstance(ids_drawn[0], str):
            raise TransportError(ids_drawn[0])
        is_bytes, *numbers = ids_drawn[0]
        return bytes(numbers) if is_bytes else tuple(numbers)

    @contextmanager
    def _group(self) -> Iterator[Any]:
        """The communicator, inside of a group of transfers."""
        with self._ending:
            if self._ended:
                raise TransportError(self._ended)
            comm = self._comm
        self._nccl.groupStart()
        try:
            yield comm
        finally:
            # Left open, the group would swallow every later NCCL call of this thread, torch's own too.
            self._nccl.groupEnd()

    def _give_up(self, comm: Any) -> None:
        # From a thread: it may not come back, where a peer died.
        within(self._timeout, partial(_abort, self._nccl, comm, self._calling), self._device, "nccl-abort")

    def _end(self, why: str) -> Any:
        """The communicator, to whoever ends it first: it must be given back exactly once."""
        with self._ending:
            if self._ended:
                return None
            self._ended = why
            comm, self._comm = self._comm, None
            self._dropped.detach()
            return comm


def _abort(nccl: Any, comm: Any, calling: threading.Lock) -> None:
    """Abort a communicator, and free it only under no call; nothing new calls it, as its transport has ended.

    `ncclCommAbort` raises the flag that ends kernels and calls, then frees what a call still looks at on its way out;
    inside of a group NCCL puts the freeing off to the group's end. So: raise the flag, wait for the call, free.

    No deadlock: the flag waits for nobody, and a first transfer, which connects and blocks, looks for it all the time.
    A call that does not return all the same keeps its communicator, leaked with the open group of this thread.
    """
    nccl.groupStart()
    comm.abort()
    if not calling.acquire(timeout=CALL_SECONDS):
        logger.warning("a call of NCCL did not end in %g s of its abort: its communicator is not freed", CALL_SECONDS)
        return
    calling.release()
    with contextlib.suppress(RuntimeError):  # what is to be said of the end was said
        nccl.groupEnd()


def _drop(nccl: Any, comm: Any, calling: threading.Lock, device: torch.device, process: int) -> None:
    """Abort what nobody closed, without holding up whoever collects it."""
    if os.getpid() != process:  # in a fork it is the parent's
        return
    if threading.main_thread().is_alive():
        start(partial(_abort, nccl, comm, calling), device, "nccl-dropped")
        return
    # From Python 3.12 on no thread starts at exit: end the kernels here, and free nothing, which may block.
    with on_device(device):
        nccl.groupStart()
        comm.abort()


def _abandon(joined: list[Any]) -> None:
    """Give back a communicator whose last member came after all, when nobody waited for it any more."""
    with contextlib.suppress(IndexError):  # not there yet, or the other thread was faster
        late = joined.pop()
        if not isinstance(late, Exception):
            late.abort()


class ByNodeTransport(NcclTransport):
    """One transport over all ranks of ``nodes``, by two communicators; the other arguments are those of its base."""

    def __init__(
        self, *, rank: int, size: int, device: torch.device, nodes: Sequence[Sequence[int]], **more: Any
    ) -> None:
        common = {"rank": rank, "size": size, "device": device, **more}
        self._node = {peer: number for number, node in enumerate(nodes) for peer in node}
        self._inside = NcclTransport(members=nodes[self._node[rank]], **common)
        try:
            super().__init__(members=[*self._node], lane=self._inside.lane, **common)
        except BaseException:
            self._inside.abort("there is none between the nodes")
            raise

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        check_messages(self, self._device, sends, receives)  # before either part is on its way
        near, far = (
            [[message for message in way if self._near(message) is inside] for way in (sends, receives)]
            for inside in (True, False)
        )
        if not any(near):
            return super().post(sends=sends, receives=receives, after=after)
        fence = self._inside.post(sends=near[0], receives=near[1], after=after)
        if not any(far):
            return fence
        last = super().post(sends=far[0], receives=far[1])  # on the same stream: behind `after` too
        last.take_over(fence)
        return last

    def check(self) -> str | None:
        """See `NcclTransport.check`."""
        return self._inside.check() or super().check()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._inside.abort(reason)

    def close(self) -> None:
        super().close()
        self._inside.close()

    def _near(self, message: Message) -> bool:
        return self._node[message.peer] == self._node[self.rank]


def _open(
    group: Group, device: torch.device, *, members: Sequence[int], nodes: Sequence[Sequence[int]], **opening: Any
) -> NcclTransport:
    opening |= {"rank": group.rank(), "size": group.size(), "device": device}
    return ByNodeTransport(nodes=nodes, **opening) if nodes else NcclTransport(members=members, **opening)


register_transport(
    "nccl",
    _open,
    devices=("cuda",),
    ranks=(PROCESSES,),
    preference=30,
    limits=(*OVERRIDES,),
    unavailable=lambda group, device, limits: nccl_missing() or overridden(limits),
)
