"""A ring's forward and backward three ways, on one loop: compute alone, communication alone, together.

Compute alone is the same work on the same slots over a transport that moves nothing. Communication alone is the same
transfers with work that computes nothing. So the three differ in nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...comm import DONE, Fence, Message, Transport
from ...kernels import PLAIN, Bounds, Scores
from ...ring import Mask, Ring, loop
from ...ring.backends import backward_backends, forward_backends, joined, resolve_backend
from ...ring.buffers import Call, Tensors, ignore_post
from ...ring.schedule.plan import Plan, plan
from ..common.timing import Stopwatch
from ..ring.candidates import DTYPES, Problem

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
TOGETHER, COMPUTE, COMMUNICATION = "together", "compute", "communication"


class Still:
    """In a transport's place: nothing moves, everything is here already. Counts the bytes that would have moved."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Nothing moves. Counted is the larger direction, which is what takes a link's time."""
        self.nbytes += max(sum(message.tensor.nbytes for message in messages) for messages in (sends, receives))
        return DONE


class Nothing:
    """In the work's place: waits for what arrives, and computes nothing."""

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """The shard has arrived."""

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool) -> None:
        """The shard has arrived."""

    def dkdv(
        self,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        *,
        scores: Scores = PLAIN,
        local: bool,
        accum: Callable[[], Tensors] | None,
        out: Tensors,
    ) -> None:
        """Wait for the sums."""
        if accum is not None:
            accum()


class Stretches(Stopwatch):
    """Stretches of compute, less what is waited for inside them."""

    def without(self, wait: Callable[[], Tensors]) -> Tensors:
        """What ``wait`` returns, its time not counted. On a GPU the host does not wait, and the stream did before."""
        at = time.perf_counter()
        tensors = wait()
        self._host -= 0.0 if self._on_gpu else time.perf_counter() - at
        return tensors


class Clocked:
    """A work whose compute is timed, its waits for the network left out."""

    def __init__(self, work: Any, clock: Stretches, device: torch.device) -> None:
        self._work = work
        self._clock = clock
        self._waits_first = device.type == "cuda"

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        with self._clock.stretch():
            self._work.fold(k, v, bounds, scores=scores, final=final)

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool) -> None:
        with self._clock.stretch():
            self._work.dq(k, v, bounds, scores=scores, local=local, final=final)

    def dkdv(
        self,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        *,
        scores: Scores = PLAIN,
        local: bool,
        accum: Callable[[], Tensors] | None,
        out: Tensors,
    ) -> None:
        wait = accum
        if accum is not None and self._waits_first:  # the kernel's stream waits before its launch, not within it
            arrived = accum()
            wait = lambda: arrived  # noqa: E731
        with self._clock.stretch():
            late = None if wait is None else lambda: self._clock.without(wait)
            self._work.dkdv(k, v, bounds, scores=scores, local=local, accum=late, out=out)


@dataclass
class Shard:
    """One rank's inputs, and what its backward reads: results over all ranks."""

    problem: Problem
    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[3])


def shard_of(problem: Problem, ring: Ring, device: torch.device) -> Shard:
    """Random inputs of this rank."""
    steps = plan(
        problem.held, Mask(causal=problem.causal), ring.rank, ring.direction, device, ring.topology, ring.slots
    )
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    tokens = problem.held.lengths[ring.rank]
    made = [torch.randn(problem.batch, tokens, count, problem.head_dim, device=device) for count in heads]
    return Shard(problem, steps, *(x.to(DTYPES[problem.dtype]) for x in made))


class Step:
    """Forward or backward of one ring, in one of the three ways; called, it runs once.

    ``inside`` are the stretches of compute of each run so far.
    """

    def __init__(self, ring: Ring, shard: Shard, phase: str, kind: str) -> None:
        self.inside: list[Stretches] = []
        self.nbytes = 0  # that a run would have moved, where it moves none
        self._ring, self._shard = ring, shard
        self._phase, self._kind = phase, kind
        self._backend = resolve_backend("auto", shard.q.device)

    def __call__(self) -> Tensors:
        """Out and lse, or dq, dk and dv."""
        q, k = self._shard.q, self._shard.k
        clock = Stretches(q.device)
        self.inside.append(clock)
        with torch.no_grad(), self._ring.call(self._shard.plan, self._phase, q, k) as call:
            stills: list[Still] = []
            if self._kind == COMPUTE:
                stills = [Still(transport) for transport in call.transports]
                call = replace(call, transports=tuple(stills), posted=ignore_post)
            found = self._forward(call, clock) if self._phase == FORWARD else self._backward(call, clock)
            self.nbytes = sum(still.nbytes for still in stills)
        return found

    def _forward(self, call: Call, clock: Stretches) -> Tensors:
        shard = self._shard
        works = forward_backends(self._backend, call.chunks, shard.q, softmax_scale=shard.scale)
        loop.forward(call, self._dressed(works, clock), shard.k, shard.v)
        if self._kind == COMMUNICATION:
            return ()
        outs, lses = zip(*(work.result() for work in works), strict=True)
        return joined(outs, 2), joined(lses, 1)

    def _backward(self, call: Call, clock: Stretches) -> Tensors:
        shard = self._shard
        dkdv = torch.empty_like(shard.k), torch.empty_like(shard.v)
        works: Sequence[Any] = ()
        if self._kind != COMMUNICATION:
            assert shard.out is not None and shard.lse is not None
            given = (shard.dout, shard.q, shard.out, shard.lse)
            works = backward_backends(self._backend, call.chunks, *given, softmax_scale=shard.scale)
        loop.backward(call, self._dressed(works or [None] * len(call.chunks), clock), shard.k, shard.v, dkdv)
        return () if self._kind == COMMUNICATION else (joined([work.result() for work in works], 2), *dkdv)

    def _dressed(self, works: Sequence[Any], clock: Stretches) -> list[Any]:
        if self._kind == COMMUNICATION:
            return [Nothing() for _ in works]
        return [Clocked(work, clock, self._shard.q.device) for work in works]
