"""Transfers by NCCL's one-sided calls: copy engines inside a node, the NIC between nodes, and no multiprocessor.

A receiver signals that its memory is free; the sender's stream waits for that signal and puts the bytes there with a
signal of their own, for which the receiver's stream waits. No host waits for another. Slots of a ring lie in windows,
memory that NCCL maps on all ranks at once: what is sent between them is put in place. Other tensors go through boxes, a
window of every transport, in pieces, with one copy on either side.

What NCCL's sources say (2.29.7 and 2.30.7: ``src/rma``, ``src/enqueue.cc``, ``src/dev_runtime.cc``), and no GPU has
shown us yet:

- NCCL counts the signals of each peer together (one signal index and one context so far, `rmaTaskAppend`), and a wait
  is for a number of them. If two ranks divide their messages into posts in different ways, free memory would be
  mistaken for bytes that arrived: each kind of signal has a communicator of its own.
- Both ends of a put lie in windows, also the memory that it reads (`rmaTaskAppend`: "srcWinHost is not in a valid
  symmetric window"). Their addresses are multiples of 4096 bytes in one piece of physical memory (`ncclMemAlloc` gives
  such). They are registered by all ranks together, blocking, with equal sizes: each rank places them by its own count
  (`symMemoryObtain`). Where there is no symmetric memory, registering succeeds and returns no window.
- The first one-sided call of a communicator is collective, too (`ncclRmaCeInit` registers the signals): every rank
  signals itself while it opens.
- One group runs its calls one after the other, a wait too, and those of several communicators in turns (`doLaunches`).
  So what is waited for is in a group of its own, ahead of what must come later.
- A put of more than 1 GiB is cut by NCCL, and only its last part signals.
- Aborting a communicator frees no stream that waits for a signal: the wait is the driver's (`cuStreamBatchMemOp`), no
  flag ends it, and `ncclCommAbort` itself waits for that stream (`commDestroySync`). So `abort` gives it a moment and
  returns; the streams are over with the process, which the watchdog ends.
- Counters are the host's in 2.29: a CUDA graph would signal one number again and again. It cannot be captured.
- 2.29 copies the number of a signal from pageable memory (`ncclRmaPutCe`), for which CUDA may hold up the host until
  the stream gets there. That would cost the head start of the host, not the order: 2.30 writes it from the stream.
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

from ..cuda_threads import within
from ..groups import Group
from ..registry import PROCESSES, register_transport
from ..transport import Message, TransportError, as_bytes, self_pairs
from .nccl import ConfiguredCommunicator, NcclTransport, _abort, nccl_missing, overridden

logger = logging.getLogger(__name__)

LEAST_NCCL = 22902
"""The first NCCL with these calls, as `ncclGetVersion` says it."""
LEAST_DRIVER = 12050
"""CUDA driver that `rmaTaskAppend` of NCCL 2.30 asks for."""
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
UINT8 = 1  # ncclUint8
BOX_BYTES = 1 << 20
"""Of a piece that goes through a box; every rank has two boxes for each peer."""
ABORT_SECONDS = 1.0
REFUSED = {
    ("NCCL_WIN_ENABLE", "0"): "switches NCCL's windows off",
    ("NCCL_CUMEM_ENABLE", "0"): "switches off the memory that NCCL's windows are made of",
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"): "lets ranks share a GPU, whose streams wait for signals in the way of others",
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"): "lets a wait for a signal hold up all streams (NVIDIA/nccl#2238)",
}
"""Settings of the environment, and why no ring can use these transfers under them."""


def one_sided_missing(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why NCCL's one-sided calls cannot be used here, None if they can. Touches no GPU."""
    missing = nccl_missing()
    if missing:
        return missing
    version = importlib.import_module("cupy.cuda.nccl").get_version()
    if version < LEAST_NCCL:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"NCCL {text} is loaded, and one-sided calls came with 2.29.2 (torch 2.13 brings 2.29.7)"
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: LEAST_DRIVER)()
    if driver < LEAST_DRIVER:
        return f"the CUDA driver is of {driver // 1000}.{driver // 10 % 100}, and one-sided calls take 12.5"
    wrong = (
        f"{name}={value} in the environment {why}"
        for (name, value), why in REFUSED.items()
        if environment.get(name) == value
    )
    return next((f"{text}: unset it" for text in wrong), None)


class _WaitSignalDesc(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("opCnt", "peer", "sigIdx", "ctx"))


@cache
def _declare(library: ctypes.CDLL) -> None:
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
    """A communicator with the one-sided calls of the NCCL library; peers are its own ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _declare(self._library)

    def allocate(self, nbytes: int) -> int:
        """Call `ncclMemAlloc` on the current device."""
        pointer = ctypes.c_void_p()
        self._check(self._library.ncclMemAlloc(ctypes.byref(pointer), nbytes))
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        """Call `ncclMemFree`."""
        self._check(self._library.ncclMemFree(pointer))

    def register(self, pointer: int, nbytes: int) -> int:
        """Call `ncclCommWindowRegister`, which blocks until every rank has; return the window."""
        window = ctypes.c_void_p()
        self._check(self._library.ncclCommWindowRegister(self._comm, pointer, nbytes, ctypes.byref(window), SYMMETRIC))
        if not window.value:
            raise TransportError(
                "NCCL has no symmetric memory between these GPUs: it takes peer access inside a node, and GPUDirect "
                "RDMA with GIN between nodes (NCCL_DEBUG=INFO says which is missing)"
            )
        return window.value

    def deregister(self, window: int) -> None:
        """Call `ncclCommWindowDeregister`, for this rank alone."""
        self._check(self._library.ncclCommWindowDeregister(self._comm, window))

    def put(self, source: int, nbytes: int, peer: int, window: int, offset: int, stream: int) -> None:
        """Call `ncclPutSignal`."""
        place = (peer, window, offset, 0, 0, 0)
        self._check(self._library.ncclPutSignal(source, nbytes, UINT8, *place, self._comm, stream))

    def signal(self, peer: int, stream: int) -> None:
        """Call `ncclSignal`."""
        self._check(self._library.ncclSignal(peer, 0, 0, 0, self._comm, stream))

    def wait(self, counts: Mapping[int, int], stream: int) -> None:
        """Call `ncclWaitSignal` for so many more signals of each peer."""
        waits = (_WaitSignalDesc * len(counts))(*(_WaitSignalDesc(count, peer) for peer, count in counts.items()))
        self._check(self._library.ncclWaitSignal(len(counts), waits, self._comm, stream))


class _Window(NamedTuple):
    """Registered memory of this rank."""

    pointer: int
    nbytes: int
    handle: int
    owned: bool  # allocated by this transport


class _Communicators:
    """The two communicators of one transport, and the windows of the first."""

    def __init__(self, data: Any, free: Any) -> None:
        self.data = data
        self.free = free  # signals that memory is free
        self.windows: list[_Window] = []

    def check_async_error(self) -> None:
        """Raise what has gone wrong since."""
        self.data.check_async_error()
        self.free.check_async_error()

    def abort(self) -> None:
        """Abort both; memory stays, because peers may still write there."""
        self.data.abort()
        self.free.abort()

    def destroy(self) -> None:
        """Give both back, and everything that is registered."""
        for window in self.windows:
            self.release(window)
        self.data.destroy()
        self.free.destroy()

    def release(self, window: _Window) -> None:
        """Deregister a window, and free its memory."""
        self.data.deregister(window.handle)
        if window.owned:
            self.data.free(window.pointer)


class _Piece(NamedTuple):
    """What one put moves: a message between windows, or as much of another message as a box holds."""

    tensor: torch.Tensor
    window: _Window | None  # None: by box
    offset: int = 0  # in the receiver's window


Pieces = dict[int, list[_Piece]]
"""By peer, a rank of the communicator; a box is used once."""


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at an address of a GPU; they stay the caller's."""
    place = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=device)


class NcclOneSidedTransport(NcclTransport):
    """NCCL's one-sided transfers over some or all ranks of a group; arguments as of its base.

    Raises:
        TransportError: on every rank, naming the window that a rank cannot allocate or register.
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
            self._lane.follow([self.mark()])  # protects the boxes: their zeros
        except BaseException as error:
            self.abort(f"it did not open: {error}")
            raise

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes of zeros that all members map; every rank of the group calls it together.

        Raises:
            TransportError: on every rank, naming the window and the rank that cannot make it; nothing stays open.
        """
        if self._ended:
            raise TransportError(self._ended)
        sizes = self.gather(nbytes)
        if len({*map(str, sizes)}) > 1:
            raise TransportError(f"the ranks disagree on the bytes of a window, which must be equal: {sizes}")
        made: list[int] = []
        try:
            self._together(
                lambda: made.append(self._comm.data.allocate(nbytes)), f"allocate a window of {nbytes} bytes"
            )
            memory = tensor_at(made[0], nbytes, self._device)
            self.register(memory, owned=True)
        except TransportError:
            for pointer in made:
                self._comm.data.free(pointer)
            raise
        return memory.zero_()

    def register(self, memory: torch.Tensor, owned: bool = False) -> None:
        """Make a window of memory, maybe of another transport; every rank of the group calls it together.

        Raises:
            TransportError: on every rank, naming the window and the rank that cannot register it.
        """
        comm, place = self._comm, (memory.data_ptr(), memory.nbytes)
        made: list[int] = []
        try:
            self._together(
                lambda: made.append(comm.data.register(*place)), f"register a window of {memory.nbytes} bytes"
            )
        except TransportError:
            for handle in made:
                comm.data.deregister(handle)
            raise
        comm.windows.append(_Window(*place, made[0], owned))

    def release(self, memory: torch.Tensor) -> None:
        """Give a window back, and its memory if this transport has allocated it.

        No stream may use it any more, on any rank: what peers put there must have been waited for.
        """
        window = None if self._ended else self._window(memory)
        if window is not None:
            self._comm.windows.remove(window)
            self._comm.release(window)

    def _connect(self) -> None:
        """Make the first one-sided call of both communicators, for which NCCL waits for all ranks."""
        stream = self._lane.stream.cuda_stream
        for one in (self._comm.data, self._comm.free):
            one.signal(self._here, stream)
            one.wait({self._here: 1}, stream)

    def _together(self, step: Callable[[], object], what: str) -> None:
        """Take a step that may block until every member takes it; raise on every rank if it failed on any."""
        problems: list[str] = []

        def take() -> None:
            try:
                step()
            except Exception as error:
                problems.append(str(error))

        if not within(self._timeout, take, self._device, "nccl-window"):
            problems.append(f"other ranks did not come in {self._timeout:g} s")
        told = f"rank {self.names[self.rank]} cannot {what}: {problems[0]}" if problems else None
        failed = [str(text) for text in self.gather(told) if text]
        if failed:
            raise TransportError("; ".join(failed))

    def _join(self, limits: Any) -> Any:
        data = super()._join(limits)
        try:
            return _Communicators(data, super()._join(limits))
        except BaseException:
            within(self._timeout, data.abort, self._device, "nccl-abort")
            raise

    def _communicator(self, *arguments: Any) -> Any:
        return OneSidedCommunicator(*arguments)

    def _give_up(self, comm: Any) -> None:
        if not within(ABORT_SECONDS, partial(_abort, self._nccl, comm, self._calling), self._device, "nccl-abort"):
            logger.warning("rank %d: a signal never came: its streams end with the process", self.rank)

    def _enqueue(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        if self._ended:
            raise TransportError(self._ended)
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                "nccl_one_sided cannot be captured into a CUDA graph: its signals are counted on the host"
            )
        try:
            for destination, source in self_pairs(self.rank, sends, receives):
                self._lane.copy(destination, source)
            none: Pieces = {}
            for outgoing, incoming in zip_longest(
                self._rounds(sends, True), self._rounds(receives, False), fillvalue=none
            ):
                self._make_room(outgoing, incoming, stream)
                self._put(outgoing, incoming, stream)
        except BaseException:
            # `close` waits for what was enqueued, whose other half may never come
            self._last = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
            raise

    def _make_room(self, outgoing: Pieces, incoming: Pieces, stream: int) -> None:
        """Signal that what is to arrive has room, and wait until what leaves has room."""
        with self._group() as comm:
            for peer, pieces in incoming.items():
                for _ in pieces:  # behind `after`, and behind the copy out of the box
                    comm.free.signal(peer, stream)
            if outgoing:  # protects the receiver's slot, or its box
                comm.free.wait({peer: len(pieces) for peer, pieces in outgoing.items()}, stream)

    def _put(self, outgoing: Pieces, incoming: Pieces, stream: int) -> None:
        """Put some pieces of each peer, and wait for those that arrive."""
        boxes = len(self._members)  # first those that are sent from
        for peer, piece in _boxed(outgoing):  # behind the last put from there
            self._lane.copy(self._box(peer)[: piece.tensor.nbytes], piece.tensor)
        with self._group() as comm:
            for peer, pieces in outgoing.items():
                for tensor, window, offset in pieces:
                    source, nbytes = tensor.data_ptr(), tensor.nbytes
                    if window is None:
                        source, window = self._box(peer).data_ptr(), comm.windows[0]
                        offset = (boxes + self._here) * BOX_BYTES
                    comm.data.put(source, nbytes, peer, window.handle, offset, stream)
            if incoming:  # protects those that read what arrives
                comm.data.wait({peer: len(pieces) for peer, pieces in incoming.items()}, stream)
        for peer, piece in _boxed(incoming):
            self._lane.copy(piece.tensor, self._box(boxes + peer)[: piece.tensor.nbytes])

    def _rounds(self, messages: Sequence[Message], sent: bool) -> list[Pieces]:
        """Return the pieces of all messages by peer, in their order, cut where a box is used again."""
        rounds: list[Pieces] = []
        latest: dict[int, int] = {}
        for message in messages:
            if message.peer == self.rank:
                continue
            peer = self._members[message.peer]
            for piece in self._pieces(message, sent):
                number = latest.get(peer, 0)
                if number < len(rounds) and any(one.window is None for one in rounds[number].get(peer, ())):
                    number += 1
                latest[peer] = number
                if number == len(rounds):
                    rounds.append({})
                rounds[number].setdefault(peer, []).append(piece)
        return rounds

    def _pieces(self, message: Message, sent: bool) -> Iterator[_Piece]:
        # Both ends know that a slot is in a window, the sender by what it is told of the receiver's.
        target = getattr(message, "into", None) if sent else message.tensor
        window = None if target is None else self._window(target)
        whole = as_bytes(message.tensor)
        if target is not None and window is not None:
            yield _Piece(whole, window, target.data_ptr() - window.pointer)
        else:
            yield from (_Piece(part, None) for part in torch.split(whole, BOX_BYTES))

    def _window(self, tensor: torch.Tensor) -> _Window | None:
        place = tensor.data_ptr()
        return next((one for one in self._comm.windows if one.pointer <= place < one.pointer + one.nbytes), None)

    def _box(self, number: int) -> torch.Tensor:
        """Return the box of what leaves for a member or, after those, of what comes from one."""
        return self._boxes[number * BOX_BYTES : (number + 1) * BOX_BYTES]


def _boxed(pieces: Mapping[int, Sequence[_Piece]]) -> Iterator[tuple[int, _Piece]]:
    return ((peer, piece) for peer, some in pieces.items() for piece in some if piece.window is None)


def _open(
    group: Group, device: torch.device, *, nodes: Sequence[Sequence[int]], **opening: Any
) -> NcclOneSidedTransport:
    # One communicator also through nodes: there are no channels that a NIC could make scarce inside them.
    return NcclOneSidedTransport(rank=group.rank(), size=group.size(), device=device, **opening)


register_transport(
    "nccl_one_sided",
    _open,
    devices=("cuda",),
    ranks=(PROCESSES,),
    preference=-1,
    unavailable=lambda group, device, limits: one_sided_missing() or overridden(limits),
)
