"""The same training steps three times: sharded over a ring, whole with PyTorch's attention, and two steps in float64.

The runs after the first start every step from the weights that the first had there: training amplifies rounding, so
that two runs left to themselves part for good, however exact each step is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench.common.launching import cores, member, process_group, threads
from ..bench.common.memory import PeakMemory
from ..comm import GroupLike, LocalGroup, LocalWorld
from ..ring import Layout, Ring, ring_attention
from ..ring.shards import exchange
from .demo import Job
from .model import Attend, Decoder

ADAM_BETAS = (0.9, 0.95)  # a second moment that follows within a dozen steps
CPU = torch.device("cpu")


@dataclass
class Run:
    """What some steps gave; by step, from 0."""

    losses: dict[int, float] = field(default_factory=dict)
    logits: dict[int, float] = field(default_factory=dict)  # the largest in magnitude, of this rank's tokens
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes of every rank
    where: str = ""  # what ran it

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the first, which warms up."""
        timed = sorted(self.seconds[1:] or self.seconds)
        return timed[len(timed) // 2]


@dataclass(frozen=True)
class Runs:
    """Three runs of one job."""

    ring: Run
    whole: Run
    exact: Run


@dataclass(frozen=True)
class Task:
    """A job on a text and a device; the weights that each step starts from are in files of ``folder``.

    Kept in memory they would count as the run's.
    """

    job: Job
    document: bytes
    device: torch.device
    folder: Path | None = None  # None on ranks that only take part

    def model(self) -> Decoder:
        """The decoder as it starts: the same weights wherever it is made."""
        job = self.job
        model = Decoder(layers=job.layers, heads=job.heads, kv_heads=job.kv_heads, head_dim=job.head_dim)
        model.initialize(job.seed)
        return model.to(self.device)

    def save(self, step: int, model: Decoder) -> None:
        """The weights before a step."""
        if self.folder is not None:
            torch.save(model.state_dict(), self.folder / f"{step}.pt")

    def load(self, step: int, model: Decoder) -> None:
        """The weights that :meth:`save` kept."""
        assert self.folder is not None
        model.load_state_dict(torch.load(self.folder / f"{step}.pt", weights_only=True, map_location="cpu"))

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The bytes of the document at ``positions``, the bytes that follow them, and these positions.

        Labels are shifted before the split.
        """
        text = torch.frombuffer(bytearray(self.document), dtype=torch.uint8).long()
        parts = text[positions][None], text[positions + 1], positions
        return parts[0].to(self.device), parts[1].to(self.device), parts[2].to(self.device)


def as_rank(store: str | None, job: Job, document: bytes) -> Runs | None:
    """One rank of several processes, which meet in the file ``store``; rank 0 alone takes the steps on the whole.

    Returns:
        On rank 0 the three runs, None on every other.
    """
    place = member()
    assert place is not None
    with TemporaryDirectory() as folder:
        task = Task(job, document, place.device, Path(folder) if place.rank == 0 else None)
        with threads(place.threads), process_group(place, store):
            ring = train_ring(task, None)
        ring.where = f"{place.world} ranks, {_device_name(task.device, place.threads)} each"
        return whole_runs(task, ring) if place.rank == 0 else None


def as_all_ranks(job: Job, document: bytes, world: int) -> Runs:
    """All ranks, as virtual ones on one device."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    with TemporaryDirectory() as folder, threads(cores()):
        task = Task(job, document, device, Path(folder))

        def rank(group: LocalGroup) -> Run:
            return train_ring(task if group.rank() == 0 else Task(job, document, device), group)

        with LocalWorld(world, device=device) as local:
            ring = local.run(rank)[0]
        ring.where = f"{world} virtual ranks on {_device_name(device, cores())}, memory of all together"
        return whole_runs(task, ring)


def whole_runs(task: Task, ring: Run) -> Runs:
    """The steps of a ring again on the whole sequence, in this process with all its threads.

    Raises:
        RuntimeError: the whole sequence does not fit the GPU.
    """
    try:
        with threads(cores()):
            return Runs(ring, train_whole(task), train_exactly(task))
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"--seqlen {task.job.seqlen}: the whole sequence does not fit one GPU, and nothing is left to compare "
            "with; take a shorter one"
        ) from error


def train_ring(task: Task, group: GroupLike) -> Run:
    """Train with the sequence sharded over the ranks of ``group``: every rank calls it."""
    with Ring(group) as ring:
        transport = ring.open(task.device)[0]
        ring._agree({"job": task.job, "text": hashlib.sha256(task.document).hexdigest()[:12]}, task.device)
        layout: Layout = getattr(Layout, task.job.layout)(task.job.seqlen, ring.size)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = ring_attention(q, k, v, layout=layout, ring=ring, causal=True)
            assert isinstance(out, Tensor)  # it is a pair only where lse was asked for
            return out

        run = train(task, attend, layout.positions(ring.rank), task.save, partial(reduce, ring))
        run.peaks = [peak for peak in transport.gather(run.peaks[0]) if isinstance(peak, int)]
    return run


def train_whole(task: Task) -> Run:
    """Take the same steps on the whole sequence in this process, with PyTorch's attention."""
    positions = torch.arange(task.job.seqlen)
    run = train(task, pytorch_attention, positions, task.load, lambda model, loss: loss.item())
    run.where = _device_name(task.device, cores())
    return run


def train_exactly(task: Task) -> Run:
    """Loss and gradients of the compared steps in float64, of the whole sequence, on the CPU, which has a kernel."""
    run, task = Run(), Task(task.job, task.document, CPU, task.folder)
    model, batch = task.model().double(), task.batch(torch.arange(task.job.seqlen))
    for step in task.job.compared:
        task.load(step, model)
        model.zero_grad()
        loss, run.logits[step] = backward(model, batch, pytorch_attention)
        run.losses[step] = loss.item()
        run.gradients[step] = copy_gradients(model)
    return run


def train(
    task: Task,
    attend: Attend,
    positions: Tensor,
    before: Callable[[int, Decoder], object],
    reduce: Callable[[Decoder, Tensor], float],
) -> Run:
    """Take the steps of a job with Adam on the tokens at ``positions``.

    ``before`` a step its weights are saved or loaded; ``reduce`` sums gradients and loss over the ranks.
    """
    run, job, device = Run(), task.job, task.device
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=job.lr, betas=ADAM_BETAS)
    batch = task.batch(positions)
    dtype = getattr(torch, job.dtype)
    precision = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
    memory = PeakMemory(device)
    for step in range(job.steps):
        before(step, model)
        begun = time.perf_counter()
        optimizer.zero_grad()
        with precision:
            loss, run.logits[step] = backward(model, batch, attend, job.seqlen)
        run.losses[step] = reduce(model, loss)
        optimizer.step()
        run.seconds.append(time.perf_counter() - begun)  # a GPU is idle here but for the update: the loss was read
        if step in job.compared:
            run.gradients[step] = copy_gradients(model)
    run.peaks = [memory.bytes]
    return run


def backward(
    model: Decoder, batch: tuple[Tensor, Tensor, Tensor], attend: Attend, total: int | None = None
) -> tuple[Tensor, float]:
    """These tokens' part of the mean loss over ``total`` tokens (or all), and their largest logit in magnitude."""
    tokens, labels, positions = batch
    logits = model(tokens, positions, attend)[0]
    # summed in float64: a sum of thousands of tokens in float32 would round more than what is compared
    loss = F.cross_entropy(logits, labels, reduction="none").sum(dtype=torch.float64) / (total or len(labels))
    loss.backward()  # type: ignore[no-untyped-call]
    largest = max(map(abs, torch.aminmax(logits.detach()))).item() if logits.numel() else 0.0
    return loss.detach(), largest


def reduce(ring: Ring, model: Decoder, loss: Tensor) -> float:
    """Sum gradients and loss over the ranks, in rank order on every rank, in float64: all ranks get the same bits."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([loss.reshape(1), *(gradient.reshape(-1).double() for gradient in gradients)])
    total = torch.stack(exchange(ring, [flat] * ring.size, [flat.shape] * ring.size)).sum(0)
    for gradient, part in zip(gradients, torch.split(total[1:], [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    return total[0].item()


def copy_gradients(model: Decoder) -> dict[str, Tensor]:
    """Every parameter's gradient, on the CPU."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.to("cpu", copy=True) for name, gradient in gradients.items() if gradient is not None}


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``scaled_dot_product_attention``, causal, of ``[B, S, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _device_name(device: torch.device, count: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"1 process of {count} thread{'s' * (count > 1)}"
