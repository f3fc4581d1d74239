"""Measures time, bandwidth and wrong bytes of every transport over every edge: one way, both ways, all at once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Fence, Group, Limits, LocalGroup, LocalWorld, Message, Transport, open_transports
from ...comm.control import control_of
from ...kernels import attention_forward
from ..common.flags import timer_on
from ..common.launching import spawn
from ..common.memory import Needs, needs_of_ranks, refuse_too_large
from ..common.ranks import Member, member
from ..common.result import Result, Row
from ..common.timing import HOST_AHEAD_CYCLES, Step
from .names import FORWARD, IN_PROCESS, swept

PERIOD = 65537  # of the test pattern; a prime, so that no power-of-two block repeats
STRIDE = 167
ONE_WAY, BOTH_WAYS, RING = "one way", "both ways", "ring"
BUFFERS = 2  # a send and a receive buffer
CHECKED = {"cpu": 2, "cuda": 10}
"""Extra buffers of a check, in messages: expected bytes, differences, and on a GPU differences as int64 to count."""
STEPS = 16  # least compute steps during the transfers, so that one step more or less matters little
MOST_POSTS = 4096
PROBES = 4  # transfers that determine the number of posts
RATIO = 1.5  # extra steps to enqueue on a GPU, because transfers take longer alongside compute
SIDE = {"cpu": 384, "cuda": 2048}  # of the matrices: a step of about 2 ms on one core, 50 us on a GPU
TOKENS, HEADS, HEAD_DIM = 2048, 16, 128  # of the forward, which has more blocks than a GPU has multiprocessors

UNITS = {
    "transport": "", "channels": "", "edge": "", "size": "B", "time": "us", "algbw": "GB/s", "#wrong": "",
    "way": "", "ctas": "", "busbw": "GB/s", "compute slowed": "x", "transfer slowed": "x", "compute": "",
    "compute alone": "ms", "compute note": "",
}  # fmt: skip
"""Columns of nccl-tests, and the slowdown of compute and transfer when the largest message overlaps compute."""

Edge = tuple[int, int]


@dataclass(frozen=True)
class LinksConfig:
    """Configuration of a measurement, equal on every rank."""

    transports: tuple[str, ...]
    device: str = "cpu"
    sizes: tuple[int, ...] = (32 << 20,)
    iters: int = 20
    warmup: int = 5
    checks: int = 1
    timer: str = ""  # one of TIMERS; empty: the device's default
    channels: tuple[int | None, ...] = (None,)  # None: a ring's default
    ctas: tuple[int | None, ...] = (None,)
    beside: str = "none"  # kernel alongside the transfers
    must_open: bool = False  # True if transports were named, so that one that does not open is a failure


@dataclass(frozen=True)
class Way:
    """A pattern of concurrent transfers, as pairs of (source, destination)."""

    name: str
    pairs: tuple[Edge, ...]

    @property
    def edge(self) -> str:
        """The edge as printed: ``0->1``, ``0<->1``, or ``all`` for the ring."""
        if self.name == RING:
            return "all"
        source, destination = self.pairs[0]
        return f"{source}{'<->' if self.name == BOTH_WAYS else '->'}{destination}"


def ways(size: int) -> list[Way]:
    """Return the patterns: one way over every edge, both ways over every pair, and the whole ring at once."""
    onward = [(rank, (rank + 1) % size) for rank in range(size)]
    if size == 1:
        return [Way(ONE_WAY, (onward[0],))]
    pairs = sorted({tuple(sorted(edge)) for edge in onward})
    both_ways = [Way(BOTH_WAYS, ((low, high), (high, low))) for low, high in pairs]
    return [*(Way(ONE_WAY, (edge,)) for edge in onward), *both_ways, Way(RING, tuple(onward))]


def pattern(nbytes: int, source: int, turn: int, device: torch.device) -> Tensor:
    """Return bytes that depend on position, sender and number of the check."""
    base = torch.arange(min(PERIOD, nbytes), device=device) * STRIDE + 5 * source + 11 * turn
    base = (base % 256).to(torch.uint8)
    return base.repeat(-(-nbytes // len(base)))[:nbytes].contiguous()


class Ends:
    """This rank's sends and receives in a pattern, with reused buffers."""

    def __init__(self, transport: Transport, way: Way, nbytes: int, device: torch.device) -> None:
        self._transport = transport
        rank = transport.rank
        self._nbytes, self._device = nbytes, device

        def buffer(peer: int) -> Message:
            return Message(peer, torch.zeros(nbytes, dtype=torch.uint8, device=device))

        self.sends = [buffer(destination) for source, destination in way.pairs if source == rank]
        self.receives = [buffer(source) for source, destination in way.pairs if destination == rank]

    @property
    def takes_part(self) -> bool:
        return bool(self.sends or self.receives)

    def post(self, after: Sequence[Fence] = ()) -> Fence:
        """Post one transfer. A transport's transfers run in order, so the next may use the same buffers."""
        return self._transport.post(sends=self.sends, receives=self.receives, after=after)

    def wrong(self, turn: int) -> int:
        """Transfer once into poisoned buffers; return the number of received bytes that differ from those sent."""
        if not self.takes_part:
            return 0
        for message in self.sends:
            message.tensor.copy_(pattern(self._nbytes, self._transport.rank, turn, self._device))
        expected_bytes = [pattern(self._nbytes, message.peer, turn, self._device) for message in self.receives]
        for message, expected in zip(self.receives, expected_bytes, strict=True):
            torch.bitwise_not(expected, out=message.tensor)  # every byte is wrong until it arrives
        self.post([self._transport.mark()]).wait()
        received = zip(self.receives, expected_bytes, strict=True)
        return sum(int(torch.count_nonzero(message.tensor != expected)) for message, expected in received)

    def enqueue(self, count: int) -> None:
        """Enqueue ``count`` transfers in order, after earlier and before later work of the current stream."""
        if not self.takes_part:
            return
        first = self._transport.mark()
        fences = [self.post([first]) for _ in range(count)]
        for fence in fences:
            fence.wait()

    def run(self, count: int) -> None:
        """Run ``count`` transfers to their end."""
        self.enqueue(count)
        settle(self._device)


def settle(device: torch.device) -> None:
    """Wait until the device has finished the current stream's work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def seconds_of(enqueue: Callable[[], None], device: torch.device, timer: str) -> float:
    """Return the seconds of ``enqueue``.

    The clock runs from before the host posts the first transfer until the device has finished the last. Events are
    recorded on the stream that transfers start from and that waits for the last. This stream is busy while the host
    posts.
    """
    if timer == "clock":
        begun = time.perf_counter()
        enqueue()
        settle(device)
        return time.perf_counter() - begun
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(HOST_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    enqueue()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measured(transport: Transport, limits: Limits, config: LinksConfig, device: torch.device) -> list[Row]:
    """Measure every pattern and size, the largest also alongside compute; every rank gets all rows."""
    rows: list[Row] = []
    patterns = ways(transport.size)
    transport.warm_up(sorted({pair for way in patterns for pair in way.pairs}))
    for way in patterns:
        for nbytes in config.sizes:
            seconds, wrong_bytes = _timed(transport, Ends(transport, way, nbytes, device), config, device)
            rate = nbytes / seconds / 1e9  # per direction; every byte is sent once, so busbw is equal
            rows.append({
                "transport": transport.name, "channels": limits.channels, "ctas": limits.ctas,
                "way": way.name, "edge": way.edge, "size": nbytes, "time": seconds * 1e6, "algbw": rate,
                "busbw": rate, "#wrong": wrong_bytes,
            })  # fmt: skip
        if config.beside != "none":
            rows[-1] = {**rows[-1], **beside(transport, way, config, device)}
    return rows


def _timed(transport: Transport, ends: Ends, config: LinksConfig, device: torch.device) -> tuple[float, int | None]:
    """Return seconds per transfer of the slowest rank, and the number of wrong bytes of all checks and ranks."""
    wrong_bytes = sum(ends.wrong(turn) for turn in range(config.checks))
    transport.gather(None)
    # Warm up after the gather, which ranks leave milliseconds apart. A transfer synchronizes its ends.
    ends.run(max(config.warmup, 1))
    enqueue = partial(ends.enqueue, config.iters)
    per_transfer = seconds_of(enqueue, device, timer_on(device.type, config.timer)) / config.iters
    rank_results: list[Any] = transport.gather((per_transfer if ends.takes_part else None, wrong_bytes))
    slowest = max(rank_seconds for rank_seconds, _ in rank_results if rank_seconds is not None)
    return slowest, sum(count for _, count in rank_results) if config.checks else None


# Transfers alongside compute.


class Together(NamedTuple):
    """Seconds until the last transfer ended, compute steps that ended before it, and the seconds of these steps."""

    transfers: float
    steps: int
    compute: float


def step_of(kind: str, device: torch.device) -> Step:
    """Return one step of compute, on the current stream or in the calling thread."""
    if kind == FORWARD:
        q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
        return lambda: attention_forward(q, k, v)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(SIDE[device.type], SIDE[device.type], device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def beside(transport: Transport, way: Way, config: LinksConfig, device: torch.device) -> Row:
    """Return compute columns for the largest size over one pattern: the largest slowdown of any rank."""
    if transport.name == IN_PROCESS and device.type == "cpu":
        return {"compute": config.beside, "compute note": "this transport copies inside post, so nothing overlaps"}
    ends = Ends(transport, way, config.sizes[-1], device)
    step = step_of(config.beside, device) if ends.takes_part else None

    def slowest(seconds: float) -> float:
        rank_seconds: list[Any] = transport.gather(seconds)
        return float(max(rank_seconds))

    ends.run(1)
    alone = slowest(0.0 if step is None else _steps_alone(step, device))
    probe = slowest(seconds_of(lambda: ends.enqueue(PROBES), device, "clock") / PROBES)
    posts = min(max(math.ceil(STEPS * alone / probe), 1), MOST_POSTS)  # enough transfers to last for STEPS of compute
    transfers = slowest(seconds_of(lambda: ends.enqueue(posts), device, "clock"))
    transport.gather(None)  # wait until all ranks are ready
    slowed = None
    if step is not None:
        run = _on_gpu if device.type == "cuda" else _on_host
        run_together = run(ends, posts, step, device, math.ceil(RATIO * transfers / alone))
        slowed = (
            (run_together.compute / run_together.steps / alone, run_together.transfers / transfers)
            if run_together.steps
            else None
        )
    slowdowns: list[Any] = [ratios for ratios in transport.gather(slowed) if ratios is not None]
    columns = {"compute": config.beside, "compute alone": alone * 1e3}
    if not slowdowns:
        return {**columns, "compute note": "transfers ended before one compute step"}
    compute, transfer = (max(ratios) for ratios in zip(*slowdowns, strict=True))
    return {**columns, "compute slowed": compute, "transfer slowed": transfer}


def _steps_alone(step: Step, device: torch.device) -> float:
    """Return the seconds of one compute step, from ``STEPS`` in a row after as many to warm up."""

    def steps() -> None:
        for _ in range(STEPS):
            step()

    seconds_of(steps, device, "clock")
    return seconds_of(steps, device, "clock") / STEPS


def _on_host(ends: Ends, posts: int, step: Step, _device: torch.device, _steps: int) -> Together:
    """Compute until the host sees that the last transfer has ended."""
    begun = time.perf_counter()
    fences = [ends.post() for _ in range(posts)]
    posted = time.perf_counter()
    steps = 0
    while not fences[-1].done():
        step()
        steps += 1
    ended = time.perf_counter()
    for fence in fences:
        fence.wait()
    return Together(ended - begun, steps, ended - posted)


def _on_gpu(ends: Ends, posts: int, step: Step, device: torch.device, steps: int) -> Together:
    """Enqueue transfers and steps at once; events tell which steps ended before the transfers."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begun, transfers_ended = event(enable_timing=True), event(enable_timing=True)
    ended = [event(enable_timing=True) for _ in range(steps)]
    side_stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    settle(device)
    begun.record()
    fences = [ends.post() for _ in range(posts)]
    with torch.cuda.stream(side_stream):
        side_stream.wait_event(begun)
        fences[-1].wait()
        transfers_ended.record()
    for done in ended:
        step()
        done.record()
    side_stream.synchronize()
    settle(device)
    transfers = float(begun.elapsed_time(transfers_ended))
    times = [float(begun.elapsed_time(done)) for done in ended]
    inside = [milliseconds for milliseconds in times if milliseconds <= transfers]
    for fence in fences:
        fence.wait()
    return Together(transfers / 1e3, len(inside), (inside[-1] if inside else 0.0) / 1e3)


def of_group(group: Group, config: LinksConfig, device: torch.device) -> Result:
    """Measure every transport with every limit in turn; every rank gets the rows."""
    result = Result("bench links", UNITS)
    for name in config.transports:
        for limits in limits_of(name, config):
            transport = opening(group, name, device, limits)
            if isinstance(transport, str):
                values = {"channels": limits.channels, "ctas": limits.ctas}
                limit_text = "".join(f", {count} {kind}" for kind, count in values.items() if count is not None)
                reasons = result.failed if config.must_open else result.notes
                reasons.append(f"{name}{limit_text} cannot be opened: {transport}")
                if limits == Limits():
                    break  # it would not open with limits either
                continue
            with closing(transport):
                result.rows += measured(transport, limits, config, device)
    return result


def limits_of(name: str, config: LinksConfig) -> Iterator[Limits]:
    """Yield the limits to measure a transport with; no limits if it has neither channels nor CTAs."""
    if name not in swept():
        yield Limits()
        return
    for channels, ctas in itertools.product(config.channels, config.ctas):
        if channels is None or ctas is None or channels <= ctas:  # a channel takes a CTA
            yield Limits(channels=channels, ctas=ctas)


def opening(group: Group, name: str, device: torch.device, limits: Limits) -> Transport | str:
    """Return the transport, or the reason why it does not open; the same on all ranks."""
    problem, opened = "", None
    try:
        (opened,) = open_transports(group, transport=name, device=device, limits=limits)
    except (ValueError, RuntimeError) as error:  # TransportError and NCCL's error are RuntimeErrors
        problem = str(error)
    # Virtual ranks fail together: a rank that raises wakes the others.
    problems: list[Any] = [problem] * group.size()
    if not isinstance(group, LocalGroup):
        problems = control_of(group).gather(problem, what=f"whether {name} opens")
    reasons = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if opened is not None and not reasons:
        return opened
    if opened is not None:
        opened.close()
    return problem or reasons[0]


def everywhere(world: int, config: LinksConfig) -> Result:
    """Measure between processes, and without a launcher also ``local`` between virtual ranks; collect failures."""
    result = Result("bench links", UNITS)
    between = tuple(name for name in config.transports if name != IN_PROCESS or member() is not None)
    if between:
        result = spawn(world, measure, replace(config, transports=between), device=config.device)
    if between != config.transports:
        torch.set_num_threads(1)
        with LocalWorld(world, device=config.device) as ranks:
            in_process = replace(config, transports=(IN_PROCESS,))
            result.add(ranks.run(partial(_of_virtual_rank, in_process, ranks.device))[0])
    for row in result.rows:
        if row["#wrong"]:
            lost = f"{row['#wrong']} bytes arrived wrong"
            result.failed.append(f"{row['transport']}, {row['edge']}: {lost}")
    if not result.rows:
        result.failed.append("no transport can be opened")
    return result


def measure(place: Member, device: torch.device, config: LinksConfig) -> Result:
    """Run one rank of the measurement between processes."""
    torch.set_num_threads(1)
    assert dist.group.WORLD is not None
    return of_group(dist.group.WORLD, config, device)


def _of_virtual_rank(config: LinksConfig, device: torch.device, group: LocalGroup) -> Result:
    torch.set_num_threads(1)
    return of_group(group, config, device)


def check_room(config: LinksConfig, ranks_here: int, *, launched: bool) -> None:
    """Raise typer.BadParameter if the largest message does not fit into this machine's free memory.

    Virtual ranks count as processes on the CPU and share one GPU. Under a launcher there are none.
    """
    device = torch.device(config.device)
    messages = BUFFERS + (CHECKED[config.device] if config.checks else 0)
    virtual = IN_PROCESS in config.transports and not launched

    def needed(nbytes: int) -> Needs:
        shared = needs_of_ranks(messages * nbytes, device, ranks_here)
        on_one = ranks_here * messages * nbytes if virtual and device.type == "cuda" else 0
        return Needs(shared.host, max(shared.gpu, on_one))

    refuse_too_large("-e", config.sizes[-1], needed, device, unit="bytes", step=1 << 20)
