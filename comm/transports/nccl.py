"""NCCL transport: communicators through CuPy and ctypes, one high-priority stream, and one NCCL group per post.

A ring through several nodes uses two communicators: one for the edges inside this rank's node, and one for the edges
that leave it. With a single communicator, NCCL would give all peers as few channels as the slowest needs, so one peer
behind a NIC would throttle every NVLink edge.

Operations of several communicators on one GPU must run one after the other, in the same order on all ranks (NCCL user
guide, "Using multiple NCCL communicators concurrently"). So both communicators use one stream, and the
transfers inside the node go first in every post. Each transfer waits only for earlier ones in that order, at both ends.
Hence the first unfinished transfer can always run, and no deadlock occurs.
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
from ..cuda_threads import on_device, run_with_timeout, start_thread
from ..groups import Group
from ..limits import (
    CLUSTER_VARIABLE,
    CTA_VARIABLES,
    DEFAULT_CLUSTER_SIZE,
    DEFAULT_CTAS,
    NO_LIMITS,
    Limits,
    environment_ctas,
)
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
from .copy_streams import CudaCopyStream, StreamFence, wait_until_passed

logger = logging.getLogger(__name__)


# `ncclConfig_t` of NCCL 2.18. Later libraries accept it and use their defaults for newer fields.
CONFIG_VERSION = 21800
CONFIG_MAGIC = 0xCAFEBEEF
UNDEFINED_INT = -(2**31)
UNIQUE_ID_BYTES = 128
LIBRARY = "libnccl.so.2"
# Matches the NCCL library, but not its plugins (libnccl-net.so, libnccl-tuner.so …).
LIBRARY_FILE = re.compile(r"libnccl(-[0-9a-f]{8})?\.so[.\d]*")
MAPS_FILE = Path("/proc/self/maps")

LIMIT_VARIABLES = {"channels": CTA_VARIABLES, "ctas": CTA_VARIABLES, "cga_cluster_size": (CLUSTER_VARIABLE,)}
BLOCKING_VARIABLE = "NCCL_COMM_BLOCKING"


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
    """Return the minimum and maximum number of thread blocks of a communicator; -2**31 leaves a bound to NCCL.

    NCCL runs one thread block per channel and applies both bounds to the channels of point-to-point transfers.
    """
    if limits.channels is not None:
        return limits.channels, limits.channels
    if limits.ctas is None and environment_ctas(environment) is not None:
        return UNDEFINED_INT, UNDEFINED_INT  # with our maximum, NCCL would clip the user's minimum
    return UNDEFINED_INT, limits.ctas or DEFAULT_CTAS


def find_override(limits: Limits, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why an environment variable overrides these limits or breaks our communicators, or None if none does."""
    if environment.get(BLOCKING_VARIABLE) == "0":
        return f"{BLOCKING_VARIABLE}=0 in the environment makes NCCL's calls return before they are done; unset it"
    limited = [name for name in LIMIT_VARIABLES if getattr(limits, name) is not None]
    names = dict.fromkeys(variable for name in limited for variable in LIMIT_VARIABLES[name])
    variables = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    if not variables:
        return None
    text = ", ".join(variables)
    values = ", ".join(f"limits.{name} is {getattr(limits, name)}" for name in limited)
    return f"{values}, but {text} in the environment overrides it for the whole process; unset it"


def loaded_libraries(maps: str | None = None) -> list[Path]:
    """Return the paths of all NCCL libraries that a process has loaded, without duplicates.

    `maps` is the content of the process's /proc/PID/maps; the default is this process. More than one library is an
    error; see `find_duplicate_nccl`.
    """
    files: dict[tuple[str, str], Path] = {}
    for line in (MAPS_FILE.read_text() if maps is None else maps).splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and LIBRARY_FILE.fullmatch(Path(parts[5].removesuffix(" (deleted)")).name):
            # Use device and inode as key, because a file can have several names.
            files.setdefault((parts[3], parts[4]), Path(parts[5]))
    return [*files.values()]


def find_duplicate_nccl() -> str | None:
    """Return an error text if several NCCL libraries are loaded, because torch and CuPy may then use different ones."""
    libraries = loaded_libraries()
    if len(libraries) < 2:
        return None
    names = " and ".join(map(str, libraries))
    return f"{len(libraries)} NCCL libraries are loaded: {names}; uninstall or unload all but one"


class ConfiguredCommunicator:
    """A replacement for CuPy's `NcclCommunicator` that supports limits on thread blocks and clusters.

    CuPy (14.2) gives no access to these configuration fields, so this class calls the NCCL library that CuPy uses.

    Raises:
        TransportError: NCCL returned an error.
    """

    def __init__(self, size: int, unique_id: Sequence[int], rank: int, limits: Limits) -> None:
        least, most = cta_bounds(limits)
        self._library = _library()
        self._comm = ctypes.c_void_p()
        # CuPy 13 returns signed characters and CuPy 14 returns bytes.
        shared = _UniqueId.from_buffer_copy(bytes(character % 256 for character in unique_id))
        config = _Config(
            ctypes.sizeof(_Config),
            CONFIG_MAGIC,
            CONFIG_VERSION,
            blocking=1,  # calls of a non-blocking communicator would need polling
            cgaClusterSize=limits.cga_cluster_size or DEFAULT_CLUSTER_SIZE,
            minCTAs=least,
            maxCTAs=most,
            netName=None,
            splitShare=UNDEFINED_INT,
        )
        self._check(
            self._library.ncclCommInitRankConfig(ctypes.byref(self._comm), size, shared, rank, ctypes.byref(config))
        )

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._check(self._library.ncclSend(pointer, count, dtype, peer, self._comm, stream))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._check(self._library.ncclRecv(pointer, count, dtype, peer, self._comm, stream))

    def check_async_error(self) -> None:
        """Raise if NCCL has reported an asynchronous error."""
        error = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(error)))
        self._check(error.value)

    def abort(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def destroy(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommDestroy(comm)

    def _check(self, status: int) -> None:
        if status:
            raise TransportError(f"NCCL: {self._library.ncclGetErrorString(status).decode()} (status {status})")


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the NCCL library that this process has loaded, with the argument types of its functions.

    Raises:
        TransportError: no NCCL library is loaded, or several are.
    """
    libraries = loaded_libraries()
    if len(libraries) != 1:
        raise TransportError(find_duplicate_nccl() or f"{LIBRARY} is not loaded in this process")
    # Loading the same file again returns the library that is loaded already.
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


# NCCL's calls return soon after an abort: connecting code checks the abort flag at least every half second.
CALL_SECONDS = 10.0


def explain_missing_nccl() -> str | None:
    """Return why CuPy's NCCL cannot be used and what to install, or None if it can. Does not touch a GPU."""
    if torch.version.hip:
        return "this PyTorch is for AMD GPUs; process_group transfers through RCCL, the nccl backend of torch"
    # torch is loaded already, so CuPy finds torch's NCCL library by name.
    extra = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}"
    # CuPy only warns if it cannot load a library. If the user turns warnings into errors, its import would fail.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            available = importlib.import_module("cupy.cuda.nccl").available
        except ImportError as error:
            return f'CuPy could not be imported ({error}); run pip install "ringattn[{extra}]"'
    reasons = " ".join(" ".join(str(warning.message).split()) for warning in caught)
    if not available:
        return f'CuPy found no NCCL library{reasons and f" ({reasons})"}; run pip install "ringattn[{extra}]"'
    if reasons:
        logger.warning("CuPy: %s", reasons)
    return find_duplicate_nccl()


class NcclTransport(TransportBase):
    """Transport through an NCCL communicator over some or all ranks of a group.

    `rank`, `size`, the peers of messages and the result of `gather` refer to the whole group. All ranks of the group
    open their transports in the same order, even if the members differ, as for the rings inside the nodes.

    Opening connects nothing. The first transfer to a peer connects to it and blocks the host, which `warm_up` takes
    care of.

    Args:
        rank: this rank in the group.
        size: number of ranks in the group.
        device: CUDA device of all tensors.
        control: exchanges small values between the ranks.
        members: ranks of the group that the communicator joins, in its order; None is all.
        limits: limits on channels, thread blocks and clusters.
        timeout: timeout of opening and of the warm-up, in seconds.
        copy_stream: stream that transfers run on; None creates one.
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
        copy_stream: CudaCopyStream | None = None,
    ) -> None:
        self._members = {peer: place for place, peer in enumerate(range(size) if members is None else members)}
        if rank not in self._members:
            raise ValueError(f"members is {list(self._members)}; it must contain this rank, {rank}")
        refused = limits.find_unsupported("nccl", *LIMIT_VARIABLES) or find_override(limits)
        if refused:
            raise ValueError(refused)
        missing = explain_missing_nccl()
        if missing:
            raise TransportError(f'transport "nccl": {missing}')
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        super().__init__(rank, size, device, timeout)
        self._control, self.names = control.new_scope("nccl"), control.names
        self.multiprocessors = limits.multiprocessors
        self._copy_stream = CudaCopyStream(device) if copy_stream is None else copy_stream
        self._last: StreamFence | None = None
        self._end_lock = threading.Lock()
        self._end_reason = ""  # reason why nothing can be posted any more
        self._call_lock = threading.Lock()  # held while a call uses the communicator, which must not be freed then
        self._comm: Any = self._join(limits)
        # Without a finalizer, a communicator that nobody closes would never end. It is aborted and not destroyed,
        # because destroying is collective inside a node.
        self._finalizer = weakref.finalize(self, _drop, self._nccl, self._comm, self._call_lock, device, os.getpid())

    @property
    def copy_stream(self) -> CudaCopyStream:
        return self._copy_stream

    def mark(self) -> StreamFence:
        return self._copy_stream.mark()

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        """Enqueue transfers and return; the host never waits for the device. See `Transport.post`."""
        check_messages(self, self._device, sends, receives)
        for peer, _ in (*sends, *receives):
            if peer not in self._members:
                raise ValueError(f"peer is {peer}; this communicator connects only ranks {list(self._members)}")
        self._copy_stream.wait_for_fences(after)
        try:
            with self._call_lock:
                self._enqueue(sends, receives, self._copy_stream.stream.cuda_stream)
        except RuntimeError as error:  # NcclError is one
            refused = self._end_reason or f"rank {self.names[self.rank]}: NCCL refused a group of transfers: {error}"
            raise TransportError(refused) from error
        self._last = self._copy_stream.record_point(keep=[message.tensor for message in (*sends, *receives)])
        return self._last

    def _enqueue(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Enqueue the sends and receives of a post on `stream`, as one NCCL group."""
        with self._group() as comm:
            for peer, tensor in sends:
                comm.send(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, self._members[peer], stream)
            for peer, tensor in receives:
                comm.recv(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, self._members[peer], stream)

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """Warm up the edges, and abort the transport if that fails. See `Transport.warm_up`."""
        try:
            super().warm_up(edges)
        except TransportError:
            self.abort("its warm-up failed")
            raise

    def gather(self, value: object) -> list[object]:
        # A peer may still be in its warm-up, which has the same timeout.
        return self._control.gather(value, what="gather of the nccl transport", timeout=2 * self._timeout)

    def check(self) -> str | None:
        """Return NCCL's asynchronous error, if any. NCCL reports network errors, but no dead peer of the same node."""
        with self._end_lock:  # otherwise another thread could free the communicator
            try:
                if not self._end_reason:
                    self._comm.check_async_error()
            except RuntimeError as error:
                return f"the nccl transport of rank {self.names[self.rank]}: {error}"
        return None

    def abort(self, reason: str) -> None:
        """Abort the communicator; transfers of the peers fail or hang. See `Transport.abort`."""
        comm = self._end(str(self._aborted_error(reason)))
        if comm is not None:
            self._give_up(comm)

    def close(self) -> None:
        """Destroy the communicator after this rank's transfers, or abort it if they are not over in time."""
        drained = bool(self._end_reason) or wait_until_passed(self._last, self._timeout)
        comm = self._end(str(self._closed_error()))
        if comm is None:
            return
        if not (drained and self._call_lock.acquire(timeout=self._timeout)):
            return self._give_up(comm)
        self._call_lock.release()  # no new call starts, because the transport has ended
        # destroy() flushes data in the network, which abort() would lose for a slower peer. It may block if a peer of
        # this node died, so it runs in a thread with a timeout.
        if not run_with_timeout(self._timeout, comm.destroy, self._device, "nccl-destroy"):
            name = self.names[self.rank]
            logger.warning("rank %d: NCCL did not destroy its communicator within %g s", name, self._timeout)

    def _join(self, limits: Limits) -> Any:
        """Create the communicator of the members. Blocks until every member takes part."""
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

        # If a member fails, the others wait in NCCL for ever. So join in a thread.
        if not run_with_timeout(self._timeout, join, self._device, "nccl-join"):
            given_up.set()
            start_thread(partial(_abandon, joined), self._device, "nccl-abandon")
            who, members = self.names[self.rank], [self.names[rank] for rank in self._members]
            raise TransportError(f"rank {who}: ranks {members} did not all join within {self._timeout:g} s")
        if isinstance(joined[0], Exception):
            who = self.names[self.rank]
            raise TransportError(f"rank {who}: NCCL could not create a communicator: {joined[0]}") from joined[0]
        return joined[0]

    def _communicator(self, *arguments: Any) -> Any:
        return ConfiguredCommunicator(*arguments)

    def _shared_id(self) -> Any:
        """Return the NCCL unique id of the communicator, which its first member creates."""
        first = next(iter(self._members))
        try:
            drawn = self._nccl.get_unique_id() if self.rank == first else None
            mine: object = None if drawn is None else [isinstance(drawn, bytes), *drawn]  # CuPy 14: bytes, 13: a tuple
        except RuntimeError as error:
            # Publish the error in place of the id, so that no rank waits for it.
            mine = f"NCCL of rank {self.names[first]} could not create a unique id: {error}"
        ids = self._control.new_scope("ids")  # published and not gathered, because only the members need the id
        if self.rank == first:
            ids.publish(str(first), mine)
        ids_drawn: list[Any] = ids.collect({first: str(first)}, what="the unique ids of NCCL", timeout=self._timeout)
        if isinstance(ids_drawn[0], str):
            raise TransportError(ids_drawn[0])
        is_bytes, *numbers = ids_drawn[0]
        return bytes(numbers) if is_bytes else tuple(numbers)

    @contextmanager
    def _group(self) -> Iterator[Any]:
        """Run the block inside an NCCL group and yield the communicator."""
        with self._end_lock:
            if self._end_reason:
                raise TransportError(self._end_reason)
            comm = self._comm
        self._nccl.groupStart()
        try:
            yield comm
        finally:
            # An open group would delay every later NCCL call of this thread, including torch's.
            self._nccl.groupEnd()

    def _give_up(self, comm: Any) -> None:
        """Abort a communicator, and wait for that at most for the timeout."""
        # Use a thread, because the call may never return if a peer died.
        run_with_timeout(self._timeout, partial(_abort, self._nccl, comm, self._call_lock), self._device, "nccl-abort")

    def _end(self, why: str) -> Any:
        """End the transport with the reason `why`, and return its communicator.

        Only the first caller gets the communicator, so that it is released exactly once. Later callers get None.
        """
        with self._end_lock:
            if self._end_reason:
                return None
            self._end_reason = why
            comm, self._comm = self._comm, None
            self._finalizer.detach()
            return comm


def _abort(nccl: Any, comm: Any, calling: threading.Lock) -> None:
    """Abort a communicator and free it only when no call uses it. No new call starts, because its transport has ended.

    `calling` is held while a call uses the communicator. `ncclCommAbort` sets the flag that ends kernels and calls,
    then frees memory that a running call still reads. Inside a group, NCCL delays the freeing to the end of the group.
    So this function sets the flag, waits for the call, and frees.

    Setting the flag blocks on nothing, and a first transfer, which connects and blocks, polls the flag. So there is no
    deadlock. If a call does not return, its communicator leaks together with the open group of this thread.
    """
    nccl.groupStart()
    comm.abort()
    if not calling.acquire(timeout=CALL_SECONDS):
        logger.warning(
            "an NCCL call did not end within %g s of its abort, so its communicator is not freed", CALL_SECONDS
        )
        return
    calling.release()
    with contextlib.suppress(RuntimeError):  # the reason for the end has been reported already
        nccl.groupEnd()


def _drop(nccl: Any, comm: Any, calling: threading.Lock, device: torch.device, process: int) -> None:
    """Abort a communicator that nobody closed, without blocking the garbage collector.

    `calling` is held while a call uses the communicator, and `process` is the number of the process that created it.
    """
    if os.getpid() != process:  # in a forked process the communicator is the parent's
        return
    if threading.main_thread().is_alive():
        start_thread(partial(_abort, nccl, comm, calling), device, "nccl-dropped")
        return
    # From Python 3.12 on, no thread starts at exit. End the kernels here, but free nothing, because that may block.
    with on_device(device):
        nccl.groupStart()
        comm.abort()


def _abandon(joined: list[Any]) -> None:
    """Abort the communicator in `joined`, which another thread may have created after the timeout."""
    with contextlib.suppress(IndexError):  # the communicator is not there yet, or the other thread took it
        late = joined.pop()
        if not isinstance(late, Exception):
            late.abort()


class ByNodeTransport(NcclTransport):
    """Transport over all ranks of ``nodes`` with two communicators. The other arguments are those of the base class.

    rank 0 ── inside ── rank 1 │ rank 2 ── inside ── rank 3
      └────────────── between (all ranks) ─────────────┘
    """

    def __init__(
        self, *, rank: int, size: int, device: torch.device, nodes: Sequence[Sequence[int]], **more: Any
    ) -> None:
        common = {"rank": rank, "size": size, "device": device, **more}
        self._node = {peer: number for number, node in enumerate(nodes) for peer in node}
        self._inside = NcclTransport(members=nodes[self._node[rank]], **common)
        try:
            super().__init__(members=[*self._node], copy_stream=self._inside.copy_stream, **common)
        except BaseException:
            self._inside.abort("the communicator between the nodes could not be opened")
            raise

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        check_messages(self, self._device, sends, receives)  # before either part is sent
        inside, between = (
            [
                [message for message in messages if self._is_in_node(message) is is_inside]
                for messages in (sends, receives)
            ]
            for is_inside in (True, False)
        )
        if not any(inside):
            return super().post(sends=sends, receives=receives, after=after)
        fence = self._inside.post(sends=inside[0], receives=inside[1], after=after)
        if not any(between):
            return fence
        last = super().post(sends=between[0], receives=between[1])  # the same stream, so it runs after `after`, too
        last.adopt_tensors(fence)
        return last

    def check(self) -> str | None:
        """Return an asynchronous error of either communicator; see `NcclTransport.check`."""
        return self._inside.check() or super().check()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._inside.abort(reason)

    def close(self) -> None:
        super().close()
        self._inside.close()

    def _is_in_node(self, message: Message) -> bool:
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
    limits=(*LIMIT_VARIABLES,),
    unavailable=lambda group, device, limits: explain_missing_nccl() or find_override(limits),
)
