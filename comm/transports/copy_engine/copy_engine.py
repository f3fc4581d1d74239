"""Transfers by the copy engines of one node's GPUs: CUDA IPC and flags in stream order, and no SM taken.

Who copies. The receiver pulls: the sender raises `ready` on its transfer stream, the receiver's transfer stream waits
for it, copies out of the sender's memory and raises `taken`, which the sender's stream waits for. Pushing into the
peer's slot would take as many flags (`free` in place of `taken`), and loses on four counts:

- Nobody ever writes into another's memory. After an abort or a death a late copy reads garbage; a late push would
  scribble over whatever that memory holds by then.
- The receiver says nothing in advance: that its slot is free is in its own `after`, and its address never travels.
- Order rests on less. `cuStreamWriteValue32` puts a fence of the reach of `__threadfence_system()` between what its
  stream did before and the flag, so that who sees the flag sees the bytes; the copy that then fetches them is an
  operation of the receiver's own stream, and so is everything behind it. Bytes pushed into a device that waits for the
  flag behind them are what CU_STREAM_WAIT_VALUE_FLUSH is documented for ("the device is permitted to reorder remote
  writes internally"), and only selected platforms have that.
- Both ways have the same rate over NVLink. (Over PCIe reads may be slower: measure, `ringattn bench links`.)

What the hosts say. Where the bytes are travels as one record through a socket: the handle of the allocation, an offset,
a length and the message's number. So posting waits for the peer's host until it has posted its end too, never for a
device; every rank announces its sends before it asks for its receives, and all ranks post in one global order, hence
no deadlock. The same order keeps streams safe that share a hardware queue, whose waits CUDA then puts in line: every
operation waits for things that were enqueued earlier on all ranks.

Flags. Counters of 32 bits that go up by one for each message of a pair and wrap; the wait is cyclic
(`CU_STREAM_WAIT_VALUE_GEQ`: the difference, as a signed number, is not negative), right as long as fewer than 2^31
messages of a pair are under way. They lie in host memory that every process maps and registers: the host can then
release a stream that waits for a dead peer with a plain store. Writing a flag from another stream may queue behind the
very wait that it is to end. A board is made new for every transport, so flags need no generations.

Memory. Handles stand for whole allocations, are drawn once and opened once by each peer; what torch frees meanwhile
(`empty_cache`) is closed when its owner next shares something new. Until then a peer holds an allocation that is gone
with its owner: CUDA leaves that undefined, and its driver keeps the memory until it is closed. What lies where others
cannot open it (`expandable_segments`, cudaMallocAsync) is copied into memory of the driver's own first, on the transfer
stream: one more copy on the device, and as much memory as a post sends.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from ...control import Control
from ...cuda_threads import start
from ...groups import Group
from ...registry import PROCESSES, register_transport
from ...slots import aligned
from ...transport import (
    WARM_UP_SECONDS,
    Fence,
    Message,
    TransportBase,
    TransportError,
    check_messages,
    self_pairs,
)
from ..lanes import POLL_SECONDS, StreamFence, StreamLane, passed
from .memory import RETIRED, Exports, Imports, Offer, Staging, checked, flag_of
from .sockets import join_node

logger = logging.getLogger(__name__)

FIRST_NUMBER = 0
"""Where the flags of a new transport stand; messages count from the next one."""


def copy_engine_missing() -> str | None:
    """Why copy engines cannot be used here, with what to install; None where they can. Touches no GPU."""
    if not sys.platform.startswith("linux"):
        return f"CUDA IPC handles are for Linux, this is {sys.platform}"
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return f"cuda-bindings does not import ({error}): pip install cuda-bindings"
    return None


class CopyEngineTransport(TransportBase):
    """Copies between the GPUs of one node, or between processes on one GPU.

    `control` covers all `size` ranks of the group, and all of them open together; this transport joins those in
    `members` (None: all), which must run on one node. `timeout`, in seconds, bounds every wait for another process.

    Raises:
        TransportError: on every rank, naming the ranks: cuda-bindings is missing, members on other nodes, devices that
            cannot read each other, or no way to connect.
    """

    name = "copy_engine"

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        control: Control,
        members: Sequence[int] | None = None,
        timeout: float = WARM_UP_SECONDS,
    ) -> None:
        super().__init__(rank, size, device, timeout)
        self.multiprocessors = 0
        self._members = tuple(sorted(range(size) if members is None else members))
        if rank not in self._members:
            raise ValueError(f"members is {self._members}: it takes the rank that opens the transport, {rank}, too")
        self._control, self.names = control, control.names
        self._ending = threading.Lock()
        self._releasing: threading.Thread | None = None
        self._posting = False
        self._last: StreamFence | None = None
        self._sent = dict.fromkeys(self._members, FIRST_NUMBER)  # number of the last message to each peer
        self._awaited: dict[int, int] = {}  # flag -> the number that the stream waits for
        missing = copy_engine_missing()
        joined = join_node(control, rank, self._members, device, missing=missing, first=FIRST_NUMBER, timeout=timeout)
        self._context, self._flags, self._sockets = joined
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._lane = StreamLane(device)
        self._exports = Exports(self._driver)
        self._staging = Staging(self._driver)
        self._imports = Imports(self._driver)

    def mark(self) -> StreamFence:
        """The point that compute has reached on the current stream."""
        return self._lane.mark()

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        """See `Transport.post`. Waits until the peers' hosts have posted what `receives` asks for."""
        self._check_running()
        check_messages(self, self._device, sends, receives)
        self._check_members(sends, receives)
        with self._context.current():
            offers, staged = self._offers(sends)
            with self._failing((*sends, *receives)):
                self._lane.follow(after)  # no copy of a peer reads, and none of ours writes, before this
                for destination, source in self_pairs(self.rank, sends, receives):
                    self._copy(destination.data_ptr(), source.data_ptr(), source.nbytes)
                for tensor, place in staged.items():  # behind the last post, whose peers have taken what was there
                    self._copy(place, tensor.data_ptr(), tensor.nbytes)
                self._announce(offers)
                self._fetch(receives)
                self._await_taken(offers)
                self._last = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
        return self._last

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`. Over all ranks of the group, also those that are no members."""
        self._check_open()
        return self._control.gather(value, what="the gather of a copy_engine transport", timeout=self._timeout)

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Streams go on as if every flag were up, on whatever the memory holds."""
        with self._ending:
            if self._aborted or not self._open:
                return
            self._aborted = reason
            self._sockets.cut(str(self._aborted_error(reason)))
            self._releasing = start(self._release, self._device, "copy-engine-abort")

    def close(self) -> None:
        """Give everything back once this rank's transfers are over, which is when its peers have taken all of them."""
        if not self._open:
            return
        if not self._aborted and not passed(self._last, self._timeout):
            self.abort(f"closed, and its transfers were not over within {self._timeout:g} s")
        over = passed(self._last, self._timeout)
        with self._ending:
            self._open = False
        self._sockets.close()
        if self._releasing is not None:  # it writes the flags that are about to be unmapped
            self._releasing.join()
        if not over:  # what a stream may still touch stays where it is
            logger.warning("rank %d: transfers by copy engine did not end in %g s", self.rank, self._timeout)
            return
        with ExitStack() as last:  # from the last line up, each also where CUDA refuses another
            last.callback(self._context.release)
            last.enter_context(self._context.current())
            last.callback(self._flags.close)
            last.callback(self._imports.close)
            if not self._aborted:  # then streams of peers may still go over it, and the process is to end
                last.callback(self._staging.close)

    def _offers(self, sends: Sequence[Message]) -> tuple[dict[int, list[Offer]], dict[torch.Tensor, int]]:
        """What will be announced to each peer, and where to copy what others cannot open before that."""
        others = [message for message in sends if message.peer != self.rank]
        locations = {tensor: self._exports.locate(tensor.data_ptr()) for _, tensor in others}
        hidden = [tensor for tensor, place in locations.items() if place is None]
        staged: dict[torch.Tensor, int] = {}
        if hidden:
            address = self._staging.reserve(sum(aligned(tensor.nbytes) for tensor in hidden))
            for tensor in hidden:
                staged[tensor], address = address, address + aligned(tensor.nbytes)
                locations[tensor] = self._exports.locate(staged[tensor])
        offers: dict[int, list[Offer]] = {}
        for peer, tensor in others:
            place = locations[tensor]
            assert place is not None, "what the driver allocates has a handle"
            region, offset = place
            number = self._sent[peer] + len(offers.get(peer, ())) + 1
            offers.setdefault(peer, []).append(Offer(number, tensor.nbytes, offset, region.buffer, region.handle))
            region.peers.add(peer)
        return offers, staged

    def _announce(self, offers: dict[int, list[Offer]]) -> None:
        for region in self._exports.retired():
            for peer in region.peers:
                self._sockets.send(peer, RETIRED.pack(region.buffer), self._timeout)
        for peer, announced in offers.items():
            self._sent[peer] = announced[-1].number
            ready, _ = flag_of(self._members, self.rank, peer)
            # Behind `after`: the bytes are final.
            self._flags.put_up(self._lane.stream.cuda_stream, ready, self._sent[peer])
            for offer in announced:
                self._sockets.send(peer, offer.pack(), self._timeout)

    def _fetch(self, receives: Sequence[Message]) -> None:
        incoming: dict[int, list[torch.Tensor]] = {}
        for peer, tensor in receives:
            if peer != self.rank:
                incoming.setdefault(peer, []).append(tensor)
        for peer, tensors in incoming.items():
            ready, taken = flag_of(self._members, peer, self.rank)
            for tensor in tensors:
                offer = self._next_offer(peer, tensor.nbytes)
                source = self._imports.address(peer, offer)
                # The sender's stream has passed its `after`: what lies at `source` is what it sends.
                self._await(ready, offer.number)
                self._copy(tensor.data_ptr(), source, tensor.nbytes)
            # Behind the copies: the sender may write there again.
            self._flags.put_up(self._lane.stream.cuda_stream, taken, offer.number)

    def _await_taken(self, offers: dict[int, list[Offer]]) -> None:
        for peer in offers:
            _, taken = flag_of(self._members, self.rank, peer)
            # The fence of this post covers its sends: their memory is free once the peer has copied the last of them.
            self._await(taken, self._sent[peer])

    def _await(self, flag: int, number: int) -> None:
        self._awaited[flag] = number  # first: from here on `abort` puts it up
        self._flags.wait_for(self._lane.stream.cuda_stream, flag, number)

    def _copy(self, destination: int, source: int, nbytes: int) -> None:
        # Both are addresses of this process: the driver finds the devices from them, and peers' are opened for access.
        result = self._driver.cuMemcpyDtoDAsync(destination, source, nbytes, self._lane.stream.cuda_stream)
        checked(self._driver, result, "cuMemcpyDtoDAsync")

    def _next_offer(self, peer: int, nbytes: int) -> Offer:
        who, whom = self.names[self.rank], self.names[peer]
        what = f"rank {who} waits until rank {whom} posts the {nbytes} bytes that it is to send"
        while True:
            record = self._sockets.receive(peer, what, self._timeout)
            offer = Offer.unpack(record)
            if offer is not None:
                break
            self._imports.drop(peer, *RETIRED.unpack(record))
        if offer.nbytes != nbytes:
            raise TransportError(
                f"rank {who} expects {nbytes} bytes from rank {whom}, which sent {offer.nbytes} (message "
                f"{offer.number} of this pair)"
            )
        return offer

    @contextmanager
    def _failing(self, messages: Sequence[Message]) -> Iterator[None]:
        """End the transport where a post fails half way: its numbers no longer fit those of the peers."""
        self._posting = True
        try:
            yield
        except BaseException as error:
            # Behind what was enqueued, which is over only with this; until then its memory stays.
            self._last = self._lane.point(keep=[message.tensor for message in messages])
            self.abort(f"a post failed: {error}")
            raise
        finally:
            self._posting = False

    def _release(self) -> None:
        """Put every flag that the stream waits for up, until nothing waits.

        Once is not enough: what a peer that lives had already enqueued may write smaller numbers over ours.
        """
        deadline = time.monotonic() + self._timeout
        while self._open and time.monotonic() < deadline:
            for flag, number in list(self._awaited.items()):
                self._flags.board.store(flag, number)
            with suppress(RuntimeError):  # of a device that has failed
                if not self._posting and (self._last is None or self._last.done()):
                    return
            time.sleep(POLL_SECONDS)

    def _check_members(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for kind, messages in (("sends", sends), ("receives", receives)):
            for index, message in enumerate(messages):
                if message.peer not in self._members:
                    raise ValueError(
                        f"{kind}[{index}]: peer is {message.peer}, this transport joins ranks {list(self._members)}"
                    )


def _open(group: Group, device: torch.device, *, nodes: object, limits: object, **opening: Any) -> CopyEngineTransport:
    return CopyEngineTransport(rank=group.rank(), size=group.size(), device=device, **opening)


# Copy engines leave the SMs alone but are not known to be faster: until they are measured, NCCL goes first.
register_transport(
    "copy_engine",
    _open,
    devices=("cuda",),
    ranks=(PROCESSES,),
    preference=20,
    across_nodes=False,
    unavailable=lambda group, device, limits: copy_engine_missing(),
)
