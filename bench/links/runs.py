"""Every edge of the ring over one transport: one way, both ways, all edges at once; time, bandwidth, wrong bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm import Fence, Limits, Message, Transport, TransportError
from ..common.flags import timer_on
from ..common.timing import HOST_AHEAD_CYCLES

PERIOD = 65537  # of the pattern, a prime: no block of any power of two repeats within it
STRIDE = 167
REGISTERED = ", registered"  # behind the transport's name
ONE_WAY, BOTH_WAYS, RING = "one way", "both ways", "ring"

Edge = tuple[int, int]


@dataclass(frozen=True)
class Wish:
    """What the command was asked for; the same on every rank."""

    transports: tuple[str, ...]
    device: str = "cpu"
    sizes: tuple[int, ...] = (32 << 20,)
    step: str = ""  # between them, as nccl-tests prints it
    iters: int = 20
    warmup: int = 5
    checks: int = 1
    timer: str = ""  # one of TIMERS; empty: the device's own
    graphs: int = 0  # replays of a CUDA graph of `iters` transfers; 0: none is captured
    channels: tuple[int | None, ...] = (None,)
    ctas: tuple[int | None, ...] = (None,)
    beside: str = "none"  # what computes beside the transfers


@dataclass(frozen=True)
class Way:
    """Which transfers run at the same time: pairs of (source, destination)."""

    name: str
    pairs: tuple[Edge, ...]

    @property
    def edge(self) -> str:
        """As it is printed: ``0->1``, ``0<->1``, and ``all`` for the ring."""
        if self.name == RING:
            return "all"
        source, destination = self.pairs[0]
        return f"{source}{'<->' if self.name == BOTH_WAYS else '->'}{destination}"


@dataclass(frozen=True)
class Link:
    """What a number is about."""

    transport: str
    channels: int | None  # None: what a ring takes by default
    ctas: int | None
    way: str
    edge: str
    nbytes: int  # of one transfer, per direction


@dataclass(frozen=True)
class Row(Link):
    """Seconds of one transfer at the slowest of the ranks that take part."""

    seconds: float
    ends: dict[int, float]  # seconds of every rank that takes part
    wrong: int | None  # bytes, over all checked transfers and ends; None: not checked

    @property
    def gigabytes_per_second(self) -> float:
        """algbw of nccl-tests, per direction; a send and receive moves nothing twice, so that busbw is the same."""
        return self.nbytes / self.seconds / 1e9

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "algbw": self.gigabytes_per_second, "busbw": self.gigabytes_per_second}


@dataclass(frozen=True)
class Beside(Link):
    """Transfers while the ends compute; slowdowns are those of the end that suffers most."""

    compute: str  # what computes
    alone: float | None = None  # seconds of one step of it
    compute_slowdown: float | None = None
    transfer_slowdown: float | None = None
    note: str = ""


def ways(size: int) -> list[Way]:
    """One way over every edge of the ring, both ways over every pair of neighbours, the whole ring at once."""
    onward = [(rank, (rank + 1) % size) for rank in range(size)]
    if size == 1:
        return [Way(ONE_WAY, (onward[0],))]
    pairs = sorted({tuple(sorted(edge)) for edge in onward})
    both = [Way(BOTH_WAYS, ((low, high), (high, low))) for low, high in pairs]
    return [*(Way(ONE_WAY, (edge,)) for edge in onward), *both, Way(RING, tuple(onward))]


def pattern(nbytes: int, source: int, turn: int, device: torch.device) -> Tensor:
    """Bytes that differ by place, by who sends them and by which check they belong to."""
    base = torch.arange(min(PERIOD, nbytes), device=device) * STRIDE + 5 * source + 11 * turn
    base = (base % 256).to(torch.uint8)
    return base.repeat(-(-nbytes // len(base)))[:nbytes].contiguous()


class Ends:
    """This rank's part of a way: what it sends and receives in every transfer, in buffers that are used again."""

    def __init__(self, transport: Transport, way: Way, nbytes: int, device: torch.device) -> None:
        self._transport = transport
        rank = transport.rank
        self._nbytes, self._device = nbytes, device

        def room(peer: int) -> Message:
            return Message(peer, torch.zeros(nbytes, dtype=torch.uint8, device=device))

        self.sends = [room(destination) for source, destination in way.pairs if source == rank]
        self.receives = [room(source) for source, destination in way.pairs if destination == rank]

    @property
    def takes_part(self) -> bool:
        return bool(self.sends or self.receives)

    def post(self, after: Sequence[Fence] = ()) -> Fence:
        """One transfer. Those of one transport run in order, so that the next may use the same buffers."""
        return self._transport.post(sends=self.sends, receives=self.receives, after=after)

    def wrong(self, turn: int) -> int:
        """One checked transfer into poisoned buffers: how many bytes arrived that are not those sent."""
        if not self.takes_part:
            return 0
        for message in self.sends:
            message.tensor.copy_(pattern(self._nbytes, self._transport.rank, turn, self._device))
        right = [pattern(self._nbytes, message.peer, turn, self._device) for message in self.receives]
        for message, expected in zip(self.receives, right, strict=True):
            torch.bitwise_not(expected, out=message.tensor)  # every byte is wrong until it has arrived
        self.post([self._transport.mark()]).wait()
        arrived = zip(self.receives, right, strict=True)
        return sum(int(torch.count_nonzero(message.tensor != expected)) for message, expected in arrived)

    def enqueue(self, count: int) -> None:
        """So many transfers, one behind the other, between what the current stream did before and does next."""
        if not self.takes_part:
            return
        first = self._transport.mark()  # draws the transport's stream into a capture
        fences = [self.post([first]) for _ in range(count)]
        for fence in fences:
            fence.wait()

    def run(self, count: int) -> None:
        """The same; over when it returns."""
        self.enqueue(count)
        settle(self._device)

    def graph(self, count: int) -> Callable[[], None]:
        """So many transfers captured as a CUDA graph; what enqueues a replay."""
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            self.enqueue(count)
        return captured.replay


def settle(device: torch.device) -> None:
    """Wait until the compute stream is where the host is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def seconds_by_host(enqueue: Callable[[], None], device: torch.device) -> float:
    """From before the host posts the first transfer until the device is done with the last."""
    begun = time.perf_counter()
    enqueue()
    settle(device)
    return time.perf_counter() - begun


def seconds_by_events(enqueue: Callable[[], None], device: torch.device) -> float:
    """On the stream that transfers start from and that waits for the last: busy before, while the host posts them."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begun, ended = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(HOST_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    begun.record()
    enqueue()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def link(transport: Transport, limits: Limits, way: Way, nbytes: int, variant: str = "") -> Link:
    """What is about to be measured."""
    return Link(transport.name + variant, limits.channels, limits.ctas, way.name, way.edge, nbytes)


def measured(
    transport: Transport, limits: Limits, wish: Wish, device: torch.device, variant: str = ""
) -> Iterator[Row]:
    """A row for every way and size; every rank of the transport runs it, and every rank gets the rows.

    Raises:
        TransportError: on every rank, where buffers are to be registered and one of them cannot.
    """
    everything = ways(transport.size)
    transport.warm_up(sorted({pair for way in everything for pair in way.pairs}))
    for way in everything:
        for nbytes in wish.sizes:
            ends = Ends(transport, way, nbytes, device)
            with registered(ends, transport) if variant == REGISTERED else nullcontext():
                seconds, wrong = _one(transport, ends, wish, device)
            about = vars(link(transport, limits, way, nbytes, variant))
            yield Row(**about, seconds=max(seconds.values()), ends=seconds, wrong=wrong)


@contextmanager
def registered(ends: Ends, transport: Any) -> Iterator[None]:
    """The buffers of all ends known to NCCL; none where one rank cannot: a message takes both ends or neither."""
    with ExitStack() as stack:
        problem = ""
        try:
            stack.enter_context(transport.registered([message.tensor for message in (*ends.sends, *ends.receives)]))
        except TransportError as error:
            problem = str(error)
        problems = [str(found) for found in transport.gather(problem) if found]
        if problems:
            raise TransportError(problems[0])
        yield


def _one(transport: Transport, ends: Ends, wish: Wish, device: torch.device) -> tuple[dict[int, float], int | None]:
    wrong = sum(ends.wrong(turn) for turn in range(wish.checks))
    graph = ends.graph(wish.iters) if wish.graphs and ends.takes_part else None

    def timed() -> None:
        for _ in range(max(wish.graphs, 1)):
            ends.enqueue(wish.iters) if graph is None else graph()

    transport.gather(None)
    # after the gather, which ranks leave milliseconds apart: a transfer brings its ends together within its own time
    ends.run(max(wish.warmup, 1))
    if graph is not None:
        graph()
        settle(device)
    by_host = timer_on(device.type, wish.timer) == "clock"
    taken = (seconds_by_host if by_host else seconds_by_events)(timed, device)
    seconds = taken / (wish.iters * max(wish.graphs, 1))
    everyone: list[Any] = transport.gather((seconds if ends.takes_part else None, wrong))
    times = {rank: taken for rank, (taken, _) in enumerate(everyone) if taken is not None}
    return times, sum(count for _, count in everyone) if wish.checks else None
