"""Transport through NCCL's one-sided calls: copy engines inside a node, the NIC between nodes, no multiprocessors.

    receiver's stream                     sender's stream
    signal "memory is free"  ──────────►  wait for the signal
    wait for "data arrived"  ◄──────────  put the bytes, with a signal

No host waits for another. Slots of a ring lie in windows, which is memory that NCCL maps on all ranks. Data sent
between slots is written in place. Other tensors go through boxes, in pieces, with one copy at either end. Boxes are a
window of the transport.

The design rests on NCCL's sources (2.29.7 and 2.30.7: ``src/rma``, ``src/enqueue.cc``, ``src/dev_runtime.cc``). No GPU
has confirmed the following facts yet:

- NCCL counts all signals of one peer together (one signal index and one context so far, `rmaTaskAppend`). A wait is for
  a number of signals. If two ranks split their messages into posts differently, "memory is free" could be taken for
  "data arrived". So each kind of signal has its own communicator.
- Both ends of a put lie in windows, including the memory that it reads (`rmaTaskAppend`: "srcWinHost is not in a valid
  symmetric window"). Window addresses are multiples of 4096 bytes in one physical allocation, as `ncclMemAlloc` gives.
- All ranks register a window together, with equal sizes, and block meanwhile (`symMemoryObtain`). Without symmetric
  memory, registering succeeds but returns no window.
- The first one-sided call of a communicator is collective, too (`ncclRmaCeInit` registers the signals). So every rank
  signals itself when it opens.
- The calls of one group run one after the other, including waits, and those of several communicators take turns
  (`doLaunches`). So waits have their own group, ahead of the calls that must come later.
- NCCL splits a put of more than 1 GiB, and only the last part signals.
- Aborting a communicator does not free a stream that waits for a signal. The driver waits (`cuStreamBatchMemOp`), no
  flag ends that, and `ncclCommAbort` itself waits for the stream (`commDestroySync`). So `abort` waits briefly and
  returns; the streams end with the process, which the watchdog ends.
- In 2.29 the host keeps the counters, so a CUDA graph would repeat the same number. Posts cannot be captured.
- 2.29 copies the number of a signal from pageable memory (`ncclRmaPutCe`). CUDA may block the host until the stream
  gets there. That costs the host's head start but keeps the order. 2.30 writes the number from the stream.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..cuda_threads import run_with_timeout
from ..groups import Group
from ..registry import PROCESSES, register_transport
from ..transport import Message, TransportError, as_bytes, pair_self_messages
from .nccl import ConfiguredCommunicator, NcclTransport, _abort, explain_missing_nccl, find_override

logger = logging.getLogger(__name__)

LEAST_NCCL = 22902
"""First NCCL version with one-sided calls, in the format of `ncclGetVersion`."""
LEAST_DRIVER = 12050
"""Lowest CUDA driver version that `rmaTaskAppend` of NCCL 2.30 accepts."""
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
UINT8 = 1  # ncclUint8
BOX_BYTES = 1 << 20
"""Size of a box; every rank has two boxes for each peer."""
ABORT_SECONDS = 1.0
REFUSED = {
    ("NCCL_WIN_ENABLE", "0"): "disables NCCL's windows",
    ("NCCL_CUMEM_ENABLE", "0"): "disables the memory that NCCL's windows need",
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"): "lets ranks share a GPU, where waiting streams block other streams",
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"): "lets a wait for a signal block all streams (NVIDIA/nccl#2238)",
}
"""Environment settings under which one-sided calls cannot be used, with the reason."""


def one_sided_missing(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why NCCL's one-sided calls cannot be used, or None if they can. Does not touch a GPU."""
    missing = explain_missing_nccl()
    if missing:
        return missing
    version = importlib.import_module("cupy.cuda.nccl").get_version()
    if version < LEAST_NCCL:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"NCCL {text} is loaded; one-sided calls need 2.29.2 or later (torch 2.13 has 2.29.7)"
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: LEAST_DRIVER)()
    if driver < LEAST_DRIVER:
        return f"the driver supports CUDA {driver // 1000}.{driver // 10 % 100}; one-sided calls need 12.5 or later"
    wrong = (
        f"{name}={value} in the environment {why}"
        for (name, value), why in REFUSED.items()
        if environment.get(name) == value
    )
    return next((f"{text}; unset it" for text in wrong), None)


class _WaitSignalDesc(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("opCnt", "peer", "sigIdx", "ctx"))


@cache
def _declare(library: ctypes.CDLL) -> None:
    """Declare the argument types of NCCL's one-sided functions."""
    pointer, integer, size, flags = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint
    library.ncclMemAlloc.argtypes = (pointer, size)
    library.ncclMemFree.argtypes = (pointer,)
    library.ncclCommWindowRegister.argtypes = (pointer, pointer, size, pointer, integer)
    library.ncclCommWindowDeregister.argtypes = (pointer, pointer)
    library.ncclPutSignal.argtypes = (
        *(pointer, size, integer, integer, pointer, size),
        *(integer, integer, flags, pointer, pointer),
    )
    library.ncclSignal.argtypes = (integer, integer, integer, flags, pointer, pointer)
    library.ncclWaitSignal.argtypes = (integer, pointer, pointer, pointer)


class OneSidedCommunicator(ConfiguredCommunicator):
    """A communicator with NCCL's one-sided calls; peers are ranks of the communicator."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _declare(self._library)

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._check(self._library.ncclMemAlloc(ctypes.byref(pointer), nbytes))
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        self._check(self._library.ncclMemFree(pointer))

    def register(self, pointer: int, nbytes: int) -> int:
        """Call `ncclCommWindowRegister` and return the window. Blocks until every rank has called it."""
        window = ctypes.c_void_p()
        self._check(self._library.ncclCommWindowRegister(self._comm, pointer, nbytes, ctypes.byref(window), SYMMETRIC))
        if not window.value:
            raise TransportError(
                "NCCL has no symmetric memory between these GPUs. It needs peer access inside a node, and GPUDirect "
                "RDMA with GIN between nodes. NCCL_DEBUG=INFO shows which is missing"
            )
        return window.value

    def deregister(self, window: int) -> None:
        self._check(self._library.ncclCommWindowDeregister(self._comm, window))

    def put(self, source: int, nbytes: int, peer: int, window: int, offset: int, stream: int) -> None:
        """Enqueue a copy of `nbytes` from address `source` to `offset` in the peer's window, and signal the peer."""
        place = (peer, window, offset, 0, 0, 0)
        self._check(self._library.ncclPutSignal(source, nbytes, UINT8, *place, self._comm, stream))

    def signal(self, peer: int, stream: int) -> None:
        """Enqueue a signal to a peer that carries no data."""
        self._check(self._library.ncclSignal(peer, 0, 0, 0, self._comm, stream))

    def wait(self, counts: Mapping[int, int], stream: int) -> None:
        """Make `stream` wait for further signals; `counts` has their number by peer."""
        waits = (_WaitSignalDesc * len(counts))(*(_WaitSignalDesc(count, peer) for peer, count in counts.items()))
        self._check(self._library.ncclWaitSignal(len(counts), waits, self._comm, stream))


class _Window(NamedTuple):
    """Registered memory of this rank."""

    pointer: int
    nbytes: int
    handle: int
    owned: bool  # allocated by this transport


class _Communicators:
    """Two communicators of one transport: one moves data between registered windows, one signals free memory."""

    def __init__(self, data: Any, free: Any) -> None:
        self.data = data
        self.free = free  # for the signals "memory is free"
        self.windows: list[_Window] = []

    def check_async_error(self) -> None:
        """Raise if either communicator has an asynchronous error."""
        self.data.check_async_error()
        self.free.check_async_error()

    def abort(self) -> None:
        """Abort both communicators. The memory stays allocated, because peers may still write there."""
        self.data.abort()
        self.free.abort()

    def destroy(self) -> None:
        """Release all windows and destroy both communicators."""
        for window in self.windows:
            self.release(window)
        self.data.destroy()
        self.free.destroy()

    def release(self, window: _Window) -> None:
        """Deregister a window and free its memory."""
        self.data.deregister(window.handle)
        if window.owned:
            self.data.free(window.pointer)


class _Piece(NamedTuple):
    """Data of one put: a message between windows, or the part of another message that fits a box."""

    tensor: torch.Tensor
    window: _Window | None  # None: goes through a box
    offset: int = 0  # in the receiver's window


Pieces = dict[int, list[_Piece]]
"""Pieces per peer, a rank of the communicator. Each box is used at most once."""


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at a GPU address as a tensor that does not own them."""
    place = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=device)


class NcclOneSidedTransport(NcclTransport):
    """Transport through NCCL's one-sided calls over some or all ranks of a group.

    The arguments are those of the base class.

    Raises:
        TransportError: on every rank, with the window that a rank cannot allocate or register.
    """

    name = "nccl_one_sided"

    def __init__(self, **opening: Any) -> None:
        missing = one_sided_missing()
        if missing:
            raise TransportError(f'transport "nccl_one_sided": {missing}')
        super().__init__(**opening)
        self.multiprocessors = 0
        self._here = self._members[self.rank]
        try:
            self._together(self._connect, "make its first one-sided calls")
            self._boxes = self.zeros(2 * len(self._members) * BOX_BYTES)
            self._copy_stream.wait_for_fences([self.mark()])  # no transfer may write a box before its zeros are written
        except BaseException as error:
            self.abort(f"opening failed: {error}")
            raise

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` zero bytes that all members map. Every rank of the group calls it together.

        Raises:
            TransportError: on every rank, with the window and the rank that cannot allocate it. Nothing stays
                allocated.
        """
        if self._end_reason:
            raise TransportError(self._end_reason)
        sizes = self.gather(nbytes)
        if len({*map(str, sizes)}) > 1:
            raise TransportError(f"nbytes differs between ranks ({sizes}). All ranks must pass the same value")
        pointers: list[int] = []
        try:
            self._together(
                lambda: pointers.append(self._comm.data.allocate(nbytes)), f"allocate a window of {nbytes} bytes"
            )
            memory = tensor_at(pointers[0], nbytes, self._device)
            self.register(memory, owned=True)
        except TransportError:
            for pointer in pointers:
                self._comm.data.free(pointer)
            raise
        return memory.zero_()

    def register(self, memory: torch.Tensor, owned: bool = False) -> None:
        """Register memory as a window, possibly of another transport. Every rank of the group calls it together.

        Raises:
            TransportError: on every rank, with the window and the rank that cannot register it.
        """
        comm, place = self._comm, (memory.data_ptr(), memory.nbytes)
        handles: list[int] = []
        try:
            self._together(
                lambda: handles.append(comm.data.register(*place)), f"register a window of {memory.nbytes} bytes"
            )
        except TransportError:
            for handle in handles:
                comm.data.deregister(handle)
            raise
        comm.windows.append(_Window(*place, handles[0], owned))

    def release(self, memory: torch.Tensor) -> None:
        """Deregister a window, and free its memory if this transport allocated it.

        No stream of any rank may use the window any more, and all puts into it must have been waited for.
        """
        window = None if self._end_reason else self._window(memory)
        if window is not None:
            self._comm.windows.remove(window)
            self._comm.release(window)

    def _connect(self) -> None:
        """Make the first one-sided call of both communicators, in which NCCL waits for all ranks."""
        stream = self._copy_stream.stream.cuda_stream
        for comm in (self._comm.data, self._comm.free):
            comm.signal(self._here, stream)
            comm.wait({self._here: 1}, stream)

    def _together(self, step: Callable[[], object], what: str) -> None:
        """Run a collective step with a timeout. Raise on every rank if the step failed on any rank.

        `what` completes "rank N cannot" in errors.
        """
        problems: list[str] = []

        def take() -> None:
            try:
                step()
            except Exception as error:
                problems.append(str(error))

        if not run_with_timeout(self._timeout, take, self._device, "nccl-window"):
            problems.append(f"other ranks did not do the same within {self._timeout:g} s")
        problem = f"rank {self.names[self.rank]} cannot {what}: {problems[0]}" if problems else None
        failed = [str(text) for text in self.gather(problem) if text]
        if failed:
            raise TransportError("; ".join(failed))

    def _join(self, limits: Any) -> Any:
        """Create both communicators of the members. Blocks until every member takes part."""
        data = super()._join(limits)
        try:
            return _Communicators(data, super()._join(limits))
        except BaseException:
            run_with_timeout(self._timeout, data.abort, self._device, "nccl-abort")
            raise

    def _communicator(self, *arguments: Any) -> Any:
        return OneSidedCommunicator(*arguments)

    def _give_up(self, comm: Any) -> None:
        if not run_with_timeout(
            ABORT_SECONDS, partial(_abort, self._nccl, comm, self._call_lock), self._device, "nccl-abort"
        ):
            name = self.names[self.rank]
            logger.warning("rank %d: a signal never arrived, so the streams end only with the process", name)

    def _enqueue(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Enqueue the transfers of a post on `stream`, in rounds that use each box once."""
        if self._end_reason:
            raise TransportError(self._end_reason)
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                "nccl_one_sided cannot be captured into a CUDA graph, because the host counts its signals"
            )
        try:
            for destination, source in pair_self_messages(self.rank, sends, receives):
                self._copy_stream.copy(destination, source)
            no_pieces: Pieces = {}
            for outgoing, incoming in zip_longest(
                self._rounds(sends, True), self._rounds(receives, False), fillvalue=no_pieces
            ):
                self._make_room(outgoing, incoming, stream)
                self._put(outgoing, incoming, stream)
        except BaseException:
            # `close` waits for the transfers enqueued so far; their counterparts may never come.
            self._last = self._copy_stream.record_point(keep=[message.tensor for message in (*sends, *receives)])
            raise

    def _make_room(self, outgoing: Pieces, incoming: Pieces, stream: int) -> None:
        """Signal that the memory for incoming pieces is free, and wait until the memory for outgoing pieces is free."""
        with self._group() as comm:
            for peer, pieces in incoming.items():
                for _ in pieces:  # the stream is past `after`, and past the copy out of the box
                    comm.free.signal(peer, stream)
            if outgoing:  # protects the receiver's slot or box from being overwritten
                comm.free.wait({peer: len(pieces) for peer, pieces in outgoing.items()}, stream)

    def _put(self, outgoing: Pieces, incoming: Pieces, stream: int) -> None:
        """Enqueue on ``stream`` the puts of the outgoing pieces and a wait for the incoming pieces."""
        boxes = len(self._members)  # number of the first box for incoming data
        for peer, piece in _boxed(outgoing):  # the stream is past the last put from this box
            self._copy_stream.copy(self._box(peer)[: piece.tensor.nbytes], piece.tensor)
        with self._group() as comm:
            for peer, pieces in outgoing.items():
                for tensor, window, offset in pieces:
                    source, nbytes = tensor.data_ptr(), tensor.nbytes
                    if window is None:
                        source, window = self._box(peer).data_ptr(), comm.windows[0]
                        offset = (boxes + self._here) * BOX_BYTES
                    comm.data.put(source, nbytes, peer, window.handle, offset, stream)
            if incoming:  # protects readers from data that has not arrived yet
                comm.data.wait({peer: len(pieces) for peer, pieces in incoming.items()}, stream)
        for peer, piece in _boxed(incoming):
            self._copy_stream.copy(piece.tensor, self._box(boxes + peer)[: piece.tensor.nbytes])

    def _rounds(self, messages: Sequence[Message], sent: bool) -> list[Pieces]:
        """Return the pieces of all messages by peer, in order, in rounds that use each box once.

        `sent` is True for sends and False for receives.
        """
        rounds: list[Pieces] = []
        latest: dict[int, int] = {}
        for message in messages:
            if message.peer == self.rank:
                continue
            peer = self._members[message.peer]
            for piece in self._pieces(message, sent):
                number = latest.get(peer, 0)
                if number < len(rounds) and any(other.window is None for other in rounds[number].get(peer, ())):
                    number += 1
                latest[peer] = number
                if number == len(rounds):
                    rounds.append({})
                rounds[number].setdefault(peer, []).append(piece)
        return rounds

    def _pieces(self, message: Message, sent: bool) -> Iterator[_Piece]:
        """Yield the pieces of a message: one if the receiver's memory is in a window, else pieces that fit a box."""
        # Both ends must agree whether a slot is in a window. The sender knows from the message's `into`.
        target = getattr(message, "into", None) if sent else message.tensor
        window = None if target is None else self._window(target)
        data = as_bytes(message.tensor)
        if target is not None and window is not None:
            yield _Piece(data, window, target.data_ptr() - window.pointer)
        else:
            yield from (_Piece(part, None) for part in torch.split(data, BOX_BYTES))

    def _window(self, tensor: torch.Tensor) -> _Window | None:
        """Return the window that contains a tensor, or None."""
        pointer, windows = tensor.data_ptr(), self._comm.windows
        return next((w for w in windows if w.pointer <= pointer < w.pointer + w.nbytes), None)

    def _box(self, number: int) -> torch.Tensor:
        """Return a box: the first half of the boxes is for outgoing data per member, the second for incoming data."""
        return self._boxes[number * BOX_BYTES : (number + 1) * BOX_BYTES]


def _boxed(pieces: Mapping[int, Sequence[_Piece]]) -> Iterator[tuple[int, _Piece]]:
    """Yield (peer, piece) for each piece that goes through a box."""
    return ((peer, piece) for peer, of_peer in pieces.items() for piece in of_peer if piece.window is None)


def _open(
    group: Group, device: torch.device, *, nodes: Sequence[Sequence[int]], **opening: Any
) -> NcclOneSidedTransport:
    # One communicator is enough for several nodes, because one-sided calls have no channels to share.
    return NcclOneSidedTransport(rank=group.rank(), size=group.size(), device=device, **opening)


register_transport(
    "nccl_one_sided",
    _open,
    devices=("cuda",),
    ranks=(PROCESSES,),
    preference=-1,
    unavailable=lambda group, device, limits: one_sided_missing() or find_override(limits),
)
