"""A checked byte pattern over the edges of a transport, before anything that matters travels there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..cuda_threads import on_device
from ..transport import Edge, Message, Transport, TransportError

# of one warm-up, in seconds: connecting an edge takes well under a second inside a node, a few between nodes
DEFAULT_TIMEOUT = 60.0
# One message: more than a protocol header, little enough to cost nothing.
PATTERN_BYTES = 4096
# Coprime to 256, and different for every block of 256: a shifted or repeated block never looks like the right one.
PATTERN_STRIDE = 167
BLOCK_STRIDE = 59


def ring_edges(order: Sequence[int]) -> list[Edge]:
    """Both directions of every edge of the ring through `order`."""
    onward = list(zip(order, [*order[1:], *order[:1]], strict=True))
    return list(dict.fromkeys(onward + [(destination, source) for source, destination in onward]))


class WarmUp:
    """Warms up edges of one transport, each once."""

    def __init__(self, device: torch.device, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._device = device
        self._late = f"its warm-up took more than {timeout:g} s"
        self._timeout = timeout
        self._warm: set[Edge] = set()

    def __call__(self, transport: Transport, edges: Sequence[Edge]) -> None:
        """See `Transport.warm_up`. `transport` is always the same one; not held, so that it ends with its last user."""
        for source, destination in edges:
            if not (0 <= source < transport.size and 0 <= destination < transport.size):
                raise ValueError(
                    f"edges has ({source}, {destination}): the ranks of this group are 0 to {transport.size - 1}"
                )
        fresh = [edge for edge in dict.fromkeys(edges) if edge not in self._warm]
        if not fresh:
            return
        problem = self._exchange(transport, fresh)
        # Also where this rank failed: the others must hear of it instead of waiting.
        problems = [str(found) for found in transport.gather(problem) if found]
        if problems:
            raise TransportError(f"the warm-up of the {transport.name} transport failed: {'; '.join(problems)}")
        self._warm.update(fresh)

    def _exchange(self, transport: Transport, edges: Sequence[Edge]) -> str | None:
        """What went wrong on this rank."""
        try:
            with self._deadline(transport) as late:
                problem = self._exchange_patterns(transport, edges)
        # ValueError: a transport over some of the group's ranks refuses a peer that it cannot reach
        except (TransportError, ValueError) as error:
            return f"rank {transport.rank}: {error}"
        if problem is None and late.is_set():  # on the last bytes
            return f"rank {transport.rank}: {self._late}"
        return problem

    def _exchange_patterns(self, transport: Transport, edges: Sequence[Edge]) -> str | None:
        rank, device = transport.rank, self._device
        sends = [Message(edge[1], _pattern(edge, device)) for edge in edges if edge[0] == rank]
        arriving = [edge for edge in edges if edge[1] == rank]
        receives = [Message(edge[0], torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=device)) for edge in arriving]
        if not sends and not receives:
            return None
        transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
        found = []
        for edge, (peer, arrived) in zip(arriving, receives, strict=True):
            wrong = int((arrived != _pattern(edge, device)).sum())
            if wrong:
                found.append(f"rank {rank} got {wrong} wrong bytes of {PATTERN_BYTES} from rank {peer}")
        return "; ".join(found) or None

    @contextmanager
    def _deadline(self, transport: Transport) -> Iterator[threading.Event]:
        """End the transfers of a warm-up that takes too long; the event says that this happened."""
        late = threading.Event()

        def expire() -> None:
            late.set()
            with on_device(self._device):
                transport.abort(self._late)

        timer = threading.Timer(self._timeout, expire)
        timer.daemon = True
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()


def _pattern(edge: Edge, device: torch.device) -> torch.Tensor:
    """Bytes that tell this edge from any other: every fourth one carries one byte of one of its ranks."""
    source, destination = edge
    digits = torch.tensor([source % 256, source >> 8, destination % 256, destination >> 8], device=device)
    place = torch.arange(PATTERN_BYTES, device=device)
    values = place * PATTERN_STRIDE + (place >> 8) * BLOCK_STRIDE + digits[place % 4]
    return (values % 256).to(torch.uint8)
