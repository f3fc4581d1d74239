"""The same training steps three times: sharded over a ring, whole with PyTorch's attention, and two steps in float64.

The runs after the first start every step from the weights that the first had there: training amplifies rounding, so
that two runs left to themselves part for good, however exact each step is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..bench.common.memory import PeakMemory
from ..comm import GroupLike
from ..ring import Layout, Ring, ring_attention
from ..ring.shards import exchange
from ..ring.trace import Trace
from .model import Attend, Decoder

Tick = Callable[[], object]  # called after each step

EXACT_ROWS = 1024  # queries whose float64 scores a GPU holds at a time
ADAM_BETAS = (0.9, 0.95)  # a second moment that follows within a dozen steps


def no_tick() -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how; the same on every rank."""

    seqlen: int = 8192
    steps: int = 10
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layout: str = "zigzag"
    dtype: str = "float32"
    lr: float = 3e-3
    seed: int = 0

    def model(self) -> Decoder:
        """The decoder as it starts: the same weights wherever it is made."""
        model = Decoder(layers=self.layers, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        model.initialize(self.seed)
        return model

    def held(self, world: int) -> Layout:
        """Who holds which tokens."""
        made: Layout = getattr(Layout, self.layout)(self.seqlen, world)
        return made

    @property
    def compared(self) -> list[int]:
        """Steps whose gradients are compared: the first, and the last, where attention has learned to be peaked."""
        return sorted({0, self.steps - 1})

    @property
    def eps(self) -> float:
        """Relative rounding of the dtype that attention and matrix products run in."""
        return torch.finfo(getattr(torch, self.dtype)).eps


@dataclass(frozen=True)
class Task:
    """A job on a text and a device."""

    job: Job
    document: bytes
    device: torch.device


@dataclass
class Run:
    """What some steps gave; by step, from 0."""

    losses: dict[int, float] = field(default_factory=dict)
    logits: dict[int, float] = field(default_factory=dict)  # the largest in magnitude, of this rank's tokens
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0  # bytes

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the first, which warms up."""
        timed = sorted(self.seconds[1:] or self.seconds)
        return timed[len(timed) // 2]


@dataclass
class RingRun(Run):
    """The same of a ring, with what only a ring has."""

    transport: str = ""
    hops: list[dict[str, Any]] = field(default_factory=list)  # seconds per step, of every rank, hop and phase
    peaks: list[int] = field(default_factory=list)  # of every rank


class Weights:
    """The weights that each step starts from, in files: kept in memory they would count as the run's."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def save(self, step: int, model: Decoder) -> None:
        torch.save(model.state_dict(), self._folder / f"{step}.pt")

    def load(self, step: int, model: Decoder) -> None:
        model.load_state_dict(torch.load(self._folder / f"{step}.pt", weights_only=True))


@dataclass(frozen=True)
class Hooks:
    """Where the runs differ."""

    before: Callable[[int, Decoder], object] = lambda step, model: None  # a step, outside of its time
    record: Callable[[], AbstractContextManager[object]] = nullcontext  # around forward and backward
    reduce: Callable[[Decoder, Tensor], float] = lambda model, loss: loss.item()  # over the ranks; the whole loss
    after: Tick = no_tick  # a step


def train_ring(task: Task, group: GroupLike, weights: Weights | None = None, tick: Tick = no_tick) -> RingRun:
    """Train with the sequence sharded over the ranks of ``group``: every rank calls it.

    Where ``weights`` is given, those that each step starts from are saved in it.
    """
    with Ring(group) as ring:
        transport = ring.open(task.device)[0]
        ring._agree({"job": task.job, "text": hashlib.sha256(task.document).hexdigest()[:12]}, task.device)
        layout = task.job.held(ring.size)
        traces: list[Trace] = []
        hooks = Hooks(
            before=weights.save if weights is not None else Hooks.before,
            record=partial(_record, ring, traces),
            reduce=partial(_sum, ring),
            after=tick,
        )
        run = RingRun(transport=transport.name)
        train(run, task, partial(_ring_attention, layout, ring), layout.positions(ring.rank), hooks)
        everyone: list[Any] = transport.gather((_seconds_per_step(traces[1:] or traces, ring), run.peak))
    run.hops = [hop for hops, _ in everyone for hop in hops]
    run.peaks = [peak for _, peak in everyone]
    return run


def train_whole(task: Task, weights: Weights, tick: Tick = no_tick) -> Run:
    """Take the same steps on the whole sequence in this process, with PyTorch's attention."""
    run = Run()
    hooks = Hooks(before=weights.load, after=tick)
    train(run, task, pytorch_attention, torch.arange(task.job.seqlen), hooks)
    return run


def train_exactly(task: Task, weights: Weights, tick: Tick = no_tick) -> Run:
    """Loss and gradients of the compared steps in float64, on the whole sequence."""
    run = Run()
    model = task.job.model().to(task.device, torch.float64)
    attend = pytorch_attention if task.device.type == "cpu" else blocked_attention
    batch = Batch.of(task, torch.arange(task.job.seqlen))
    for step in task.job.compared:
        weights.load(step, model)
        model.zero_grad()
        loss, run.logits[step] = backward(model, batch, attend, task.job.seqlen)
        run.losses[step] = loss.item()
        run.gradients[step] = copy_gradients(model)
        tick()
    return run


def train(run: Run, task: Task, attend: Attend, positions: Tensor, hooks: Hooks) -> None:
    """Take the steps of a job with Adam on the tokens at ``positions``, and fill ``run``."""
    job, device = task.job, task.device
    model = job.model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.lr, betas=ADAM_BETAS)
    batch = Batch.of(task, positions)
    precision = torch.autocast(device.type, dtype=getattr(torch, job.dtype), enabled=job.dtype != "float32")
    memory = PeakMemory(device)
    for step in range(job.steps):
        hooks.before(step, model)
        begun = time.perf_counter()
        optimizer.zero_grad()
        with hooks.record(), precision:
            loss, run.logits[step] = backward(model, batch, attend, job.seqlen)
        run.losses[step] = hooks.reduce(model, loss)
        optimizer.step()
        run.seconds.append(time.perf_counter() - begun)  # a GPU is idle here but for the update: the loss was read
        if step in job.compared:
            run.gradients[step] = copy_gradients(model)
        hooks.after()
    run.peak = memory.bytes


@dataclass(frozen=True)
class Batch:
    """Bytes, the bytes that follow them, and their global positions."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor

    @classmethod
    def of(cls, task: Task, positions: Tensor) -> Batch:
        text = torch.frombuffer(bytearray(task.document), dtype=torch.uint8).long()
        parts = text[positions][None], text[positions + 1], positions
        return cls(*(part.to(task.device) for part in parts))


def backward(model: Decoder, batch: Batch, attend: Attend, total: int) -> tuple[Tensor, float]:
    """These tokens' part of the mean loss over ``total`` tokens, and their largest logit in magnitude."""
    logits = model(batch.tokens, batch.positions, attend)[0]
    # summed in float64: a sum of thousands of tokens in float32 would round more than what is compared
    loss = F.cross_entropy(logits, batch.labels, reduction="none").sum(dtype=torch.float64) / total
    loss.backward()  # type: ignore[no-untyped-call]
    largest = max(map(abs, torch.aminmax(logits.detach()))).item() if logits.numel() else 0.0
    return loss.detach(), largest


def copy_gradients(model: Decoder) -> dict[str, Tensor]:
    """Every parameter's gradient, on the CPU."""
    return {name: _gradient(parameter).to("cpu", copy=True) for name, parameter in model.named_parameters()}


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient: backward has not run, or the model does not use it")
    return parameter.grad


def _ring_attention(layout: Layout, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = ring_attention(q, k, v, layout=layout, ring=ring, causal=True)
    assert isinstance(out, Tensor)  # it is a pair only where lse was asked for
    return out


def _sum(ring: Ring, model: Decoder, loss: Tensor) -> float:
    """Sum gradients and loss over the ranks, in rank order on every rank, in float64: all ranks get the same bits."""
    gradients = [_gradient(parameter) for parameter in model.parameters()]
    flat = torch.cat([loss.reshape(1), *(gradient.reshape(-1).double() for gradient in gradients)])
    total = torch.stack(exchange(ring, [flat] * ring.size, [flat.shape] * ring.size)).sum(0)
    for gradient, part in zip(gradients, torch.split(total[1:], [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    return total[0].item()


@contextmanager
def _record(ring: Ring, traces: list[Trace]) -> Iterator[None]:
    with ring.record() as trace:
        traces.append(trace)
        yield


def _seconds_per_step(traces: list[Trace], ring: Ring) -> list[dict[str, Any]]:
    """Compute and wait of this rank, per phase and hop: the mean of the steps, summed over the layers."""
    rows: dict[tuple[str, int], dict[str, Any]] = {
        (phase, hop): {"rank": ring.rank, "phase": phase, "hop": hop, "compute": 0.0, "wait": 0.0}
        for phase in ("forward", "backward")
        for hop in range(ring.size)
    }
    for span in (span for trace in traces for span in trace.spans):
        rows[span.phase, span.hop][span.kind] += span.seconds / len(traces)
    return list(rows.values())


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``scaled_dot_product_attention``, causal, of ``[B, S, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by blocks of queries whose scores are forgotten and computed again: a GPU has no fused float64."""
    starts = range(0, q.shape[1], EXACT_ROWS)
    return torch.cat([checkpoint(_block, q, k, v, start, use_reentrant=False) for start in starts], dim=1)


def _block(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    stop = min(start + EXACT_ROWS, q.shape[1])
    rows, columns = torch.arange(start, stop, device=q.device), torch.arange(stop, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q[:, start:stop], k[:, :stop], v[:, :stop]))
    seen = rows[:, None] >= columns
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
