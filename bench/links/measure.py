"""Measures time, bandwidth and wrong bytes of every transport over every edge: one way, both ways, all at once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Fence, Group, Limits, LocalGroup, LocalWorld, Message, Transport, open_transports
from ...comm.control import open_control
from ...kernels import attention_forward
from ..common.flags import resolve_timer
from ..common.launching import run_process_group
from ..common.memory import MemoryNeeds, check_size_fits, rank_needs
from ..common.ranks import LaunchedRank, launched_rank
from ..common.result import Result, Row
from ..common.timing import Step, event_seconds
from .names import FORWARD, IN_PROCESS, swept_transports

PERIOD = 65537  # of the test pattern; a prime, so that no power-of-two block repeats
STRIDE = 167
ONE_WAY, BOTH_WAYS, RING = "one way", "both ways", "ring"
BUFFERS = 2  # a send and a receive buffer
CHECKS_PER_DEVICE = {"cpu": 2, "cuda": 10}
"""Memory of a check, in messages: the expected bytes and their differences, on a GPU also as int64 to count."""
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
"""Units by column: those of nccl-tests, and how much compute and the largest message slow each other."""

RankPair = tuple[int, int]


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
    must_open: bool = False  # a transport that does not open is a failure, because --transport names it


@dataclass(frozen=True)
class TransferPattern:
    """Transfers that run at the same time, as pairs of (source, destination) ranks."""

    name: str
    pairs: tuple[RankPair, ...]

    @property
    def edge(self) -> str:
        """The edge as printed: ``0->1``, ``0<->1``, or ``all`` for the ring."""
        if self.name == RING:
            return "all"
        source, destination = self.pairs[0]
        return f"{source}{'<->' if self.name == BOTH_WAYS else '->'}{destination}"


def transfer_patterns(size: int) -> list[TransferPattern]:
    """Return the patterns for ``size`` ranks: one way over every edge, both ways, and the whole ring at once."""
    onward = [(rank, (rank + 1) % size) for rank in range(size)]
    if size == 1:
        return [TransferPattern(ONE_WAY, (onward[0],))]
    pairs = sorted({tuple(sorted(edge)) for edge in onward})
    both_ways = [TransferPattern(BOTH_WAYS, ((low, high), (high, low))) for low, high in pairs]
    return [*(TransferPattern(ONE_WAY, (edge,)) for edge in onward), *both_ways, TransferPattern(RING, tuple(onward))]


def pattern_bytes(nbytes: int, source: int, turn: int, device: torch.device) -> Tensor:
    """Return ``nbytes`` test bytes that depend on their position, the sending rank and the check's number ``turn``."""
    base = torch.arange(min(PERIOD, nbytes), device=device) * STRIDE + 5 * source + 11 * turn
    base = (base % 256).to(torch.uint8)
    return base.repeat(-(-nbytes // len(base)))[:nbytes].contiguous()


class RankTransfers:
    """This rank's sends and receives of ``nbytes`` each in a pattern, with buffers that all transfers reuse."""

    def __init__(self, transport: Transport, way: TransferPattern, nbytes: int, device: torch.device) -> None:
        self._transport = transport
        rank = transport.rank
        self._nbytes, self._device = nbytes, device

        def buffer(peer: int) -> Message:
            return Message(peer, torch.zeros(nbytes, dtype=torch.uint8, device=device))

        self.sends = [buffer(destination) for source, destination in way.pairs if source == rank]
        self.receives = [buffer(source) for source, destination in way.pairs if destination == rank]

    @property
    def is_participant(self) -> bool:
        return bool(self.sends or self.receives)

    def post(self, after: Sequence[Fence] = ()) -> Fence:
        """Post the sends and receives once. The next post may reuse the buffers, because posts run in order."""
        return self._transport.post(sends=self.sends, receives=self.receives, after=after)

    def count_wrong_bytes(self, turn: int) -> int:
        """Transfer once into poisoned buffers; return the number of received bytes that differ from those sent."""
        if not self.is_participant:
            return 0
        for message in self.sends:
            message.tensor.copy_(pattern_bytes(self._nbytes, self._transport.rank, turn, self._device))
        expected_bytes = [pattern_bytes(self._nbytes, message.peer, turn, self._device) for message in self.receives]
        for message, expected in zip(self.receives, expected_bytes, strict=True):
            torch.bitwise_not(expected, out=message.tensor)  # every byte is wrong until it arrives
        self.post([self._transport.mark()]).wait()
        received = zip(self.receives, expected_bytes, strict=True)
        return sum(int(torch.count_nonzero(message.tensor != expected)) for message, expected in received)

    def enqueue(self, count: int) -> None:
        """Enqueue ``count`` transfers, which run after earlier and before later work of the current stream."""
        if not self.is_participant:
            return
        first = self._transport.mark()
        fences = [self.post([first]) for _ in range(count)]
        for fence in fences:
            fence.wait()

    def run(self, count: int) -> None:
        """Run ``count`` transfers and wait for them."""
        self.enqueue(count)
        synchronize_compute(self._device)


def synchronize_compute(device: torch.device) -> None:
    """Wait until the device has finished the current stream's work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def transfer_seconds(enqueue: Callable[[], None], device: torch.device, timer: str) -> float:
    """Return the seconds of the transfers that ``enqueue`` posts.

    With the timer clock, the host's time starts before the first post and ends when the device has finished. Otherwise
    events on the current stream measure the device's time.
    """
    if timer == "clock":
        begun = time.perf_counter()
        enqueue()
        synchronize_compute(device)
        return time.perf_counter() - begun
    return event_seconds(enqueue)


def transport_rows(transport: Transport, limits: Limits, config: LinksConfig, device: torch.device) -> list[Row]:
    """Return a row per pattern and size, the same on all ranks; the largest size also runs beside compute."""
    rows: list[Row] = []
    patterns = transfer_patterns(transport.size)
    transport.warm_up(sorted({pair for way in patterns for pair in way.pairs}))
    for way in patterns:
        for nbytes in config.sizes:
            seconds, wrong_bytes = _timed(transport, RankTransfers(transport, way, nbytes, device), config, device)
            rate = nbytes / seconds / 1e9  # per direction; every byte is sent once, so busbw is equal
            rows.append({
                "transport": transport.name, "channels": limits.channels, "ctas": limits.ctas,
                "way": way.name, "edge": way.edge, "size": nbytes, "time": seconds * 1e6, "algbw": rate,
                "busbw": rate, "#wrong": wrong_bytes,
            })  # fmt: skip
        if config.beside != "none":
            rows[-1] = {**rows[-1], **compute_columns(transport, way, config, device)}
    return rows


def _timed(
    transport: Transport, ends: RankTransfers, config: LinksConfig, device: torch.device
) -> tuple[float, int | None]:
    """Return the slowest rank's seconds per transfer, and the wrong bytes on all ranks (None without checks)."""
    wrong_bytes = sum(ends.count_wrong_bytes(turn) for turn in range(config.checks))
    transport.gather(None)
    # Warm up after the gather, which ranks leave milliseconds apart. A transfer synchronizes its ends.
    ends.run(max(config.warmup, 1))
    enqueue = partial(ends.enqueue, config.iters)
    per_transfer = transfer_seconds(enqueue, device, resolve_timer(device.type, config.timer)) / config.iters
    rank_results: list[Any] = transport.gather((per_transfer if ends.is_participant else None, wrong_bytes))
    slowest = max(rank_seconds for rank_seconds, _ in rank_results if rank_seconds is not None)
    return slowest, sum(count for _, count in rank_results) if config.checks else None


# Transfers alongside compute.


ConcurrentRun = tuple[float, int, float]
"""Seconds until the last transfer ended, compute steps that ended before it, and the seconds of these steps."""


def compute_step(kind: str, device: torch.device) -> Step:
    """Return a function that runs the kernel ``kind`` once, on the current stream or in the calling thread."""
    if kind == FORWARD:
        q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
        return lambda: attention_forward(q, k, v)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(SIDE[device.type], SIDE[device.type], device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def compute_columns(transport: Transport, way: TransferPattern, config: LinksConfig, device: torch.device) -> Row:
    """Return the columns of the largest size beside compute; slowdowns are the largest of any rank."""
    if transport.name == IN_PROCESS and device.type == "cpu":
        return {"compute": config.beside, "compute note": "nothing overlaps, because this transport copies inside post"}
    ends = RankTransfers(transport, way, config.sizes[-1], device)
    step = compute_step(config.beside, device) if ends.is_participant else None

    def slowest(seconds: float) -> float:
        rank_seconds: list[Any] = transport.gather(seconds)
        return float(max(rank_seconds))

    ends.run(1)
    alone = slowest(0.0 if step is None else _steps_alone(step, device))
    probe = slowest(transfer_seconds(lambda: ends.enqueue(PROBES), device, "clock") / PROBES)
    posts = min(max(math.ceil(STEPS * alone / probe), 1), MOST_POSTS)  # enough transfers to last for STEPS of compute
    transfers = slowest(transfer_seconds(lambda: ends.enqueue(posts), device, "clock"))
    transport.gather(None)  # wait until all ranks are ready
    slowed = None
    if step is not None:
        run = _on_gpu if device.type == "cuda" else _on_host
        seconds, steps, computing = run(ends, posts, step, device, math.ceil(RATIO * transfers / alone))
        slowed = (computing / steps / alone, seconds / transfers) if steps else None
    slowdowns: list[Any] = [ratios for ratios in transport.gather(slowed) if ratios is not None]
    columns = {"compute": config.beside, "compute alone": alone * 1e3}
    if not slowdowns:
        return columns | {"compute note": "not measured, because the transfers ended before one compute step"}
    compute, transfer = (max(ratios) for ratios in zip(*slowdowns, strict=True))
    return columns | {"compute slowed": compute, "transfer slowed": transfer}


def _steps_alone(step: Step, device: torch.device) -> float:
    """Return the seconds of a step without transfers: the mean of ``STEPS``, after as many to warm up."""

    def steps() -> None:
        for _ in range(STEPS):
            step()

    transfer_seconds(steps, device, "clock")
    return transfer_seconds(steps, device, "clock") / STEPS


def _on_host(ends: RankTransfers, posts: int, step: Step, _device: torch.device, _steps: int) -> ConcurrentRun:
    """Post ``posts`` transfers, then compute until the last transfer has ended; the host measures the times."""
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
    return ended - begun, steps, ended - posted


def _on_gpu(ends: RankTransfers, posts: int, step: Step, device: torch.device, steps: int) -> ConcurrentRun:
    """Enqueue ``posts`` transfers and ``steps`` compute steps; events tell which steps ended before the transfers."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begun, transfers_ended = event(enable_timing=True), event(enable_timing=True)
    ended = [event(enable_timing=True) for _ in range(steps)]
    side_stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    synchronize_compute(device)
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
    synchronize_compute(device)
    transfers = float(begun.elapsed_time(transfers_ended))
    times = [float(begun.elapsed_time(done)) for done in ended]
    inside = [milliseconds for milliseconds in times if milliseconds <= transfers]
    for fence in fences:
        fence.wait()
    return transfers / 1e3, len(inside), (inside[-1] if inside else 0.0) / 1e3


def measure_group(group: Group, config: LinksConfig, device: torch.device) -> Result:
    """Measure every transport under every limit; return the same rows on every rank."""
    torch.set_num_threads(1)
    result = Result("bench links", UNITS)
    for name in config.transports:
        for limits in transport_limits(name, config):
            transport = open_or_explain(group, name, device, limits)
            if isinstance(transport, str):
                values = {"channels": limits.channels, "ctas": limits.ctas}
                limit_text = "".join(f", {count} {kind}" for kind, count in values.items() if count is not None)
                reasons = result.failed if config.must_open else result.notes
                reasons.append(f"{name}{limit_text} cannot be opened: {transport}")
                if limits == Limits():
                    break  # it would not open with limits either
                continue
            with closing(transport):
                result.rows += transport_rows(transport, limits, config, device)
    return result


def transport_limits(name: str, config: LinksConfig) -> Iterator[Limits]:
    """Yield the channels and CTAs to measure a transport with; empty limits if the transport has none."""
    if name not in swept_transports():
        yield Limits()
        return
    for channels, ctas in itertools.product(config.channels, config.ctas):
        if channels is None or ctas is None or channels <= ctas:  # a channel takes a CTA
            yield Limits(channels=channels, ctas=ctas)


def open_or_explain(group: Group, name: str, device: torch.device, limits: Limits) -> Transport | str:
    """Return the opened transport, or why it does not open; if one rank fails, all ranks get a reason."""
    problem, opened = "", None
    try:
        (opened,) = open_transports(group, transport=name, device=device, limits=limits)
    except (ValueError, RuntimeError) as error:  # TransportError and NCCL's error are RuntimeErrors
        problem = str(error)
    # Virtual ranks fail together: a rank that raises wakes the others.
    problems: list[Any] = [problem] * group.size()
    if not isinstance(group, LocalGroup):
        problems = open_control(group).gather(problem, what=f"whether {name} opens")
    reasons = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if opened is not None and not reasons:
        return opened
    if opened is not None:
        opened.close()
    return problem or reasons[0]


def measure_everywhere(world: int, config: LinksConfig) -> Result:
    """Measure between ``world`` processes, and ``local`` between virtual ranks; wrong bytes are failures."""
    result = Result("bench links", UNITS)
    between = tuple(name for name in config.transports if name != IN_PROCESS or launched_rank() is not None)
    if between:
        result = run_process_group(world, measure_links, replace(config, transports=between), device=config.device)
    if between != config.transports:
        in_process = replace(config, transports=(IN_PROCESS,))
        with LocalWorld(world, device=config.device) as ranks:
            result.add(ranks.run(partial(measure_group, config=in_process, device=ranks.device))[0])
    for row in result.rows:
        if row["#wrong"]:
            lost = f"{row['#wrong']} bytes arrived wrong"
            result.failed.append(f"{row['transport']}, {row['edge']}: {lost}")
    if not result.rows:
        result.failed.append("no transport can be opened")
    return result


def measure_links(place: LaunchedRank, device: torch.device, config: LinksConfig) -> Result:
    """Run one rank of the measurement between processes."""
    assert dist.group.WORLD is not None
    return measure_group(dist.group.WORLD, config, device)


def check_message_fits(config: LinksConfig, ranks_here: int, *, launched: bool) -> None:
    """Raise typer.BadParameter if the largest message does not fit into this machine's free memory.

    Virtual ranks of ``local`` count as processes on the CPU and share one GPU. A launcher's ranks are processes.
    """
    device = torch.device(config.device)
    messages = BUFFERS + (CHECKS_PER_DEVICE[config.device] if config.checks else 0)
    virtual = IN_PROCESS in config.transports and not launched

    def needed(nbytes: int) -> MemoryNeeds:
        shared = rank_needs(messages * nbytes, device, ranks_here)
        on_one = ranks_here * messages * nbytes if virtual and device.type == "cuda" else 0
        return MemoryNeeds(shared.host, max(shared.gpu, on_one))

    check_size_fits("-e", config.sizes[-1], needed, device, unit="bytes", step=1 << 20)
