"""A transfer while its ends compute: what either costs the other.

Transfers are posted back to back, and steps of compute run until the last of them is over. Compute is slowed by the
time of those steps over the same number alone, the transfer by its time over the same transfers alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...comm import Fence, Limits, Transport
from ...kernels import attention_forward
from .runs import Beside, Ends, Way, Wish, link, settle

FORWARD, MATMUL = "forward", "matmul"
STEPS = 16  # of compute, at least, while the transfers last: what a step more or less would change is then small
MOST_POSTS = 4096
PROBES = 4  # transfers that their number is chosen by
RATIO = 1.5  # more steps are enqueued on a GPU than fit beside the transfers alone, for these take longer beside them
SIDE = {"cpu": 384, "cuda": 2048}  # of the matrices: a step of about 2 ms of one core, 50 us of a GPU
TOKENS, HEADS, HEAD_DIM = 2048, 16, 128  # of the forward: more blocks than a GPU has multiprocessors

Step = Callable[[], object]


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


def measured_beside(transport: Transport, limits: Limits, way: Way, wish: Wish, device: torch.device) -> Beside:
    """The largest size over one way, beside the compute that was asked for; the same on every rank."""
    about = vars(link(transport, limits, way, wish.sizes[-1]))
    if transport.name == "local" and device.type == "cpu":
        return Beside(**about, compute=wish.beside, note="copies inside the post: nothing runs beside it")
    ends = Ends(transport, way, wish.sizes[-1], device)
    step = step_of(wish.beside, device) if ends.takes_part else None
    ends.run(1)
    alone = max(_shared(transport, 0.0 if step is None else seconds_of(step, STEPS, device)))
    posts = _posts(transport, ends, alone)
    transfers = max(_shared(transport, _timed(lambda: ends.run(posts))))
    transport.gather(None)  # all are ready
    slowed = None
    if step is not None:
        found = together(ends, posts, step, device, RATIO * transfers / alone)
        slowed = (found.compute / found.steps / alone, found.transfers / transfers) if found.steps else None
    everyone: list[Any] = [one for one in transport.gather(slowed) if one is not None]
    if not everyone:
        return Beside(**about, compute=wish.beside, alone=alone, note="over before a step of compute was")
    compute, transfer = (max(told) for told in zip(*everyone, strict=True))
    return Beside(**about, compute=wish.beside, alone=alone, compute_slowdown=compute, transfer_slowdown=transfer)


def seconds_of(step: Step, count: int, device: torch.device) -> float:
    """Seconds of one step, of ``count`` in a row after as many to warm up."""

    def steps() -> None:
        for _ in range(count):
            step()
        settle(device)

    steps()
    return _timed(steps) / count


def together(ends: Ends, posts: int, step: Step, device: torch.device, steps: float) -> Together:
    """The transfers, and steps of compute for as long as they last."""
    return (
        _on_gpu(ends, posts, step, device, math.ceil(steps)) if device.type == "cuda" else _on_host(ends, posts, step)
    )


def _on_host(ends: Ends, posts: int, step: Step) -> Together:
    begun = time.perf_counter()
    fences = [ends.post() for _ in range(posts)]
    posted = time.perf_counter()
    steps = 0
    while not all(fence.done() for fence in fences[-1:]):
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
    fences: list[Fence] = [ends.post() for _ in range(posts)]
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


def _posts(transport: Transport, ends: Ends, alone: float) -> int:
    """So many transfers that STEPS of compute fit beside them; the same number on every rank."""
    one = max(_shared(transport, _timed(lambda: ends.run(PROBES)) / PROBES))
    return min(max(math.ceil(STEPS * alone / one), 1), MOST_POSTS)


def _shared(transport: Transport, seconds: float) -> list[float]:
    return [float(told) for told in transport.gather(seconds)]  # type: ignore[arg-type]


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
