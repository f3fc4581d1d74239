"""Every transport over every edge of the ring: one way, both ways, all edges at once; time, bandwidth, wrong bytes."""

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

PERIOD = 65537  # of the pattern, a prime: no block of any power of two repeats within it
STRIDE = 167
ONE_WAY, BOTH_WAYS, RING = "one way", "both ways", "ring"
BUFFERS = 2  # what leaves and what arrives
CHECKED = {"cpu": 2, "cuda": 10}
"""Messages beside them: what is expected, which bytes differ from it, and on a GPU those as int64, to be counted."""
STEPS = 16  # of compute, at least, while the transfers last: what a step more or less would change is then small
MOST_POSTS = 4096
PROBES = 4  # transfers that their number is chosen by
RATIO = 1.5  # more steps are enqueued on a GPU than fit beside the transfers alone, for these take longer beside them
SIDE = {"cpu": 384, "cuda": 2048}  # of the matrices: a step of about 2 ms of one core, 50 us of a GPU
TOKENS, HEADS, HEAD_DIM = 2048, 16, 128  # of the forward: more blocks than a GPU has multiprocessors

UNITS = {
    "transport": "", "channels": "", "edge": "", "size": "B", "time": "us", "algbw": "GB/s", "#wrong": "",
    "way": "", "ctas": "", "busbw": "GB/s", "compute slowed": "x", "transfer slowed": "x", "compute": "",
    "compute alone": "ms", "compute note": "",
}  # fmt: skip
"""The columns: those of nccl-tests by its names, and what compute beside the largest transfer costs and is cost."""

Edge = tuple[int, int]


@dataclass(frozen=True)
class LinksConfig:
    """What to measure; the same on every rank."""

    transports: tuple[str, ...]
    device: str = "cpu"
    sizes: tuple[int, ...] = (32 << 20,)
    iters: int = 20
    warmup: int = 5
    checks: int = 1
    timer: str = ""  # one of TIMERS; empty: the device's own
    channels: tuple[int | None, ...] = (None,)  # None: what a ring takes by default
    ctas: tuple[int | None, ...] = (None,)
    beside: str = "none"  # what computes beside the transfers
    must_open: bool = False  # the transports were named: one that does not open is a failure


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

        def buffer(peer: int) -> Message:
            return Message(peer, torch.zeros(nbytes, dtype=torch.uint8, device=device))

        self.sends = [buffer(destination) for source, destination in way.pairs if source == rank]
        self.receives = [buffer(source) for source, destination in way.pairs if destination == rank]

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
        first = self._transport.mark()
        fences = [self.post([first]) for _ in range(count)]
        for fence in fences:
            fence.wait()

    def run(self, count: int) -> None:
        """The same; over when it returns."""
        self.enqueue(count)
        settle(self._device)


def settle(device: torch.device) -> None:
    """Wait until the compute stream is where the host is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def seconds_of(enqueue: Callable[[], None], device: torch.device, timer: str) -> float:
    """By clock from before the host posts the first transfer until the device is done with the last.

    By events on the stream that transfers start from and that waits for the last: it is busy while the host posts them.
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
    """A row for every way and size, of the largest beside compute, too; every rank of the transport gets the rows."""
    rows: list[Row] = []
    every_way = ways(transport.size)
    transport.warm_up(sorted({pair for way in every_way for pair in way.pairs}))
    for way in every_way:
        for nbytes in config.sizes:
            seconds, wrong = _timed(transport, Ends(transport, way, nbytes, device), config, device)
            rate = nbytes / seconds / 1e9  # per direction; nothing moves twice, so that busbw is the same
            rows.append({
                "transport": transport.name, "channels": limits.channels, "ctas": limits.ctas,
                "way": way.name, "edge": way.edge, "size": nbytes, "time": seconds * 1e6, "algbw": rate,
                "busbw": rate, "#wrong": wrong,
            })  # fmt: skip
        if config.beside != "none":
            rows[-1] = {**rows[-1], **beside(transport, way, config, device)}
    return rows


def _timed(transport: Transport, ends: Ends, config: LinksConfig, device: torch.device) -> tuple[float, int | None]:
    """Seconds of one transfer at the slowest end, and how many bytes were wrong over all checks and ends."""
    wrong = sum(ends.wrong(turn) for turn in range(config.checks))
    transport.gather(None)
    # after the gather, which ranks leave milliseconds apart: a transfer brings its ends together within its own time
    ends.run(max(config.warmup, 1))
    enqueue = partial(ends.enqueue, config.iters)
    each = seconds_of(enqueue, device, timer_on(device.type, config.timer)) / config.iters
    everyone: list[Any] = transport.gather((each if ends.takes_part else None, wrong))
    slowest = max(taken for taken, _ in everyone if taken is not None)
    return slowest, sum(count for _, count in everyone) if config.checks else None


# a transfer while its ends compute: what either costs the other


class Together(NamedTuple):
    """Seconds until the last transfer was over, and how many steps of compute had ended by then, in what time."""

    transfers: float
    steps: int
    compute: float


def step_of(kind: str, device: torch.device) -> Step:
    """One step of compute on the current stream, or in the calling thread."""
    if kind == FORWARD:
        q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
        return lambda: attention_forward(q, k, v)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(SIDE[device.type], SIDE[device.type], device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def beside(transport: Transport, way: Way, config: LinksConfig, device: torch.device) -> Row:
    """Columns of the row of the largest size over one way: of the end that suffers most, the same on every rank."""
    if transport.name == IN_PROCESS and device.type == "cpu":
        return {"compute": config.beside, "compute note": "copies inside the post: nothing runs beside it"}
    ends = Ends(transport, way, config.sizes[-1], device)
    step = step_of(config.beside, device) if ends.takes_part else None

    def slowest(seconds: float) -> float:
        everyone: list[Any] = transport.gather(seconds)
        return float(max(everyone))

    ends.run(1)
    alone = slowest(0.0 if step is None else _steps_alone(step, device))
    probe = slowest(seconds_of(lambda: ends.enqueue(PROBES), device, "clock") / PROBES)
    posts = min(max(math.ceil(STEPS * alone / probe), 1), MOST_POSTS)  # so many that STEPS of compute fit beside them
    transfers = slowest(seconds_of(lambda: ends.enqueue(posts), device, "clock"))
    transport.gather(None)  # all are ready
    slowed = None
    if step is not None:
        run = _on_gpu if device.type == "cuda" else _on_host
        both = run(ends, posts, step, device, math.ceil(RATIO * transfers / alone))
        slowed = (both.compute / both.steps / alone, both.transfers / transfers) if both.steps else None
    every_end: list[Any] = [ratios for ratios in transport.gather(slowed) if ratios is not None]
    columns = {"compute": config.beside, "compute alone": alone * 1e3}
    if not every_end:
        return {**columns, "compute note": "over before a step of compute was"}
    compute, transfer = (max(ratios) for ratios in zip(*every_end, strict=True))
    return {**columns, "compute slowed": compute, "transfer slowed": transfer}


def _steps_alone(step: Step, device: torch.device) -> float:
    """Seconds of one step, of ``STEPS`` in a row after as many to warm up."""

    def steps() -> None:
        for _ in range(STEPS):
            step()

    seconds_of(steps, device, "clock")
    return seconds_of(steps, device, "clock") / STEPS


def _on_host(ends: Ends, posts: int, step: Step, _device: torch.device, _steps: int) -> Together:
    """Steps until the last transfer is over, as the host sees it."""
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
    """Everything is enqueued at once; which steps ended before the transfers is read from events afterwards."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begun, over = event(enable_timing=True), event(enable_timing=True)
    ended = [event(enable_timing=True) for _ in range(steps)]
    watching = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    settle(device)
    begun.record()
    fences = [ends.post() for _ in range(posts)]
    with torch.cuda.stream(watching):
        watching.wait_event(begun)
        fences[-1].wait()
        over.record()
    for done in ended:
        step()
        done.record()
    watching.synchronize()
    settle(device)
    transfers = float(begun.elapsed_time(over))
    times = [float(begun.elapsed_time(done)) for done in ended]
    inside = [taken for taken in times if taken <= transfers]
    for fence in fences:
        fence.wait()
    return Together(transfers / 1e3, len(inside), (inside[-1] if inside else 0.0) / 1e3)


# every transport


def of_group(group: Group, config: LinksConfig, device: torch.device) -> Result:
    """Every transport with every limit, one after the other; every rank has the rows."""
    found = Result("bench links", UNITS)
    for name in config.transports:
        for limits in limits_of(name, config):
            transport = opening(group, name, device, limits)
            if isinstance(transport, str):
                given = {"channels": limits.channels, "ctas": limits.ctas}
                held = "".join(f", {count} {what}" for what, count in given.items() if count is not None)
                reasons = found.failed if config.must_open else found.notes
                reasons.append(f"{name}{held} does not open here: {transport}")
                if limits == Limits():
                    break  # nor does it with limits
                continue
            with closing(transport):
                found.rows += measured(transport, limits, config, device)
    return found


def limits_of(name: str, config: LinksConfig) -> Iterator[Limits]:
    """What a transport is held to, one after the other; nothing where it has neither channels nor CTAs."""
    if name not in swept():
        yield Limits()
        return
    for channels, ctas in itertools.product(config.channels, config.ctas):
        if channels is None or ctas is None or channels <= ctas:  # a channel takes a CTA
            yield Limits(channels=channels, ctas=ctas)


def opening(group: Group, name: str, device: torch.device, limits: Limits) -> Transport | str:
    """The transport, or why it does not open here: the same for all ranks."""
    problem, opened = "", None
    try:
        (opened,) = open_transports(group, transport=name, device=device, limits=limits)
    except (ValueError, RuntimeError) as error:  # TransportError is a RuntimeError, and so is NCCL's own
        problem = str(error)
    # virtual ranks fail together: one that raises wakes the others
    problems: list[Any] = [problem] * group.size()
    if not isinstance(group, LocalGroup):
        problems = control_of(group).gather(problem, what=f"whether {name} opens")
    reasons = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if opened is not None and not reasons:
        return opened
    if opened is not None:
        opened.close()
    return problem or reasons[0]


# where ranks are


def everywhere(world: int, config: LinksConfig) -> Result:
    """In processes and, where no launcher started them, for ``local`` between virtual ranks; with what failed."""
    found = Result("bench links", UNITS)
    between = tuple(name for name in config.transports if name != IN_PROCESS or member() is not None)
    if between:
        found = spawn(world, measure, replace(config, transports=between), device=config.device)
    if between != config.transports:
        torch.set_num_threads(1)
        with LocalWorld(world, device=config.device) as ranks:
            here = replace(config, transports=(IN_PROCESS,))
            found.add(ranks.run(partial(_of_virtual_rank, here, ranks.device))[0])
    for row in found.rows:
        if row["#wrong"]:
            lost = f"{row['#wrong']} bytes did not arrive as they left"
            found.failed.append(f"{row['transport']}, {row['edge']}: {lost}")
    if not found.rows:
        found.failed.append("no transport opens here")
    return found


def measure(place: Member, device: torch.device, config: LinksConfig) -> Result:
    """One rank of the measurement in processes."""
    torch.set_num_threads(1)
    assert dist.group.WORLD is not None
    return of_group(dist.group.WORLD, config, device)


def _of_virtual_rank(config: LinksConfig, device: torch.device, group: LocalGroup) -> Result:
    torch.set_num_threads(1)
    return of_group(group, config, device)


def check_room(config: LinksConfig, ranks_here: int, *, launched: bool) -> None:
    """Refuse a largest message that does not fit this machine's free memory: typer.BadParameter.

    Virtual ranks, which ``local`` is measured between, are counted as processes on the CPU, and lie on one GPU; under
    a launcher there are none.
    """
    device = torch.device(config.device)
    messages = BUFFERS + (CHECKED[config.device] if config.checks else 0)
    virtual = IN_PROCESS in config.transports and not launched

    def needed(nbytes: int) -> Needs:
        shared = needs_of_ranks(messages * nbytes, device, ranks_here)
        on_one = ranks_here * messages * nbytes if virtual and device.type == "cuda" else 0
        return Needs(shared.host, max(shared.gpu, on_one))

    refuse_too_large("-e", config.sizes[-1], needed, device, unit="bytes", step=1 << 20)
