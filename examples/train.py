"""Train the decoder of ``model.py`` on a long text: weights sharded by FSDP2, the sequence over rings of ranks.

    torchrun --nproc-per-node 8 -m ringattn.examples.train --seqlen 256k --steps 1000 --data 2 --checkpoint runs/a
    ringattn demo                             # the same, small, compared with one process: compare.py

Ranks are a mesh (data, context): each row of ``context`` is a ring over which a row's documents are sharded.
"""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..bench.common.launching import spawn
from ..bench.common.memory import PeakMemory
from ..bench.common.ranks import Member, cores, member
from ..comm import LocalGroup, LocalWorld
from ..ring import Layout, Ring, ring_attention
from ..ring.shards import exchange
from .checkpoint import find_latest, load_state, read_job, read_metadata, save_state
from .demo import Job
from .model import Attend, Decoder

if TYPE_CHECKING:
    from .compare import Kept

ADAM_BETAS = (0.9, 0.95)  # a second moment that follows within a dozen steps
LINES = 20  # of progress, whatever the steps
MAY_CHANGE = {"steps", "data", "block", "checkpoint", "every"}  # in a run that continues: its ranks, end and files
NO_DIST = "torch.distributed is disabled"  # torch's warning; a rank loads its part of a checkpoint without the others
SLOTS = 2  # of the ring, one for K/V that are computed with, one for those that arrive; `predict` has 3 no faster


class JobError(ValueError):
    """The ranks have different jobs, or the job's checkpoint cannot be continued."""


@dataclass
class Run:
    """What some steps gave; by step, from 0."""

    losses: dict[int, float] = field(default_factory=dict)
    logits: dict[int, float] = field(default_factory=dict)  # the largest in magnitude, where compared
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # where compared
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes of every rank, weights included
    where: str = ""  # what ran it

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the first, which warms up."""
        timed = sorted(self.seconds[1:] or self.seconds)
        return timed[len(timed) // 2] if timed else 0.0


@dataclass(frozen=True)
class Part:
    """What one rank takes of every batch, and how it reaches the others."""

    rank: int
    rows: slice  # of the batch
    positions: Tensor  # of every row's tokens
    attend: Attend
    gather: Callable[[Tensor], Tensor]  # [n] of this rank -> [ranks, n], on every rank
    fully_sharded: bool = False  # weights lie in parts on all ranks
    name: str = "sharded"


class Training:
    """A job on one rank's part of it."""

    def __init__(self, job: Job, text: bytes, device: torch.device, part: Part) -> None:
        """Every rank makes one.

        Raises:
            JobError: on every rank: not all ranks have the same job, text and checkpoint, or it cannot be continued.
        """
        self._memory = PeakMemory(device)
        self.job, self.device, self.part, self.run = job, device, part, Run()
        self._positions = part.positions.to(device)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for name, value in asdict(job).items():
            self._check_same(f"--{name.replace('_', '-')}", repr(value).encode)
        self._check_same("the text", lambda: text)
        dims = {"heads": job.heads, "kv_heads": job.kv_heads, "head_dim": job.head_dim}
        with torch.device("meta"):  # nobody holds the whole model
            self.model = Decoder(layers=job.layers, **dims, block=job.block or None)
        if part.fully_sharded:
            for module in (*self.model.layers, self.model):
                fsdp = fully_shard(module)
                # parts of one mean are summed, not averaged: the loss is divided by the tokens of all
                fsdp.set_gradient_divide_factor(1.0)
                fsdp.set_force_sum_reduction_for_comms(True)
        self.model.to_empty(device=device).initialize(job.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=job.lr, betas=ADAM_BETAS)
        if job.checkpoint:
            self._resume(Path(job.checkpoint))

    def fit(self, kept: Kept | None = None) -> Run:
        """Take the steps that are left; ``kept`` keeps or loads what a comparison needs around each."""
        run, job = self.run, self.job
        for step in range(len(run.losses), job.steps):
            if kept:
                kept.before(self, step)
            begun = time.perf_counter()
            self.optimizer.zero_grad()
            run.losses[step] = self._sum(self.backward(step))
            self.optimizer.step()
            run.seconds.append(time.perf_counter() - begun)  # a GPU is idle but for the update: the loss was read
            if kept:
                kept.after(self, step)
            done, last = step + 1, step + 1 == job.steps
            if job.checkpoint and (done % job.every == 0 or last):
                self._save(Path(job.checkpoint) / f"{done:08}")
            if self.part.rank == 0 and (done % max(1, job.steps // LINES) == 0 or last):
                loss, speed = run.losses[step], job.batch * job.seqlen / run.seconds[-1]
                line = f"{self.part.name}, step {done} of {job.steps}: loss {loss:.4f}, {speed:,.0f} tokens/s"
                print(line, file=sys.stderr, flush=True)
        run.peaks = self.part.gather(torch.tensor([self._memory.bytes], device=self.device)).flatten().tolist()
        return run

    def backward(self, step: int) -> Tensor:
        """This rank's part of the mean loss over the batch, ``[1]``; its part of the gradients is left in the model."""
        job, dtype = self.job, getattr(torch, self.job.dtype)
        tokens, labels = self._batch(step)
        with nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype):
            losses = self.model(tokens, self._positions, self.part.attend, labels)
        # in float64: a sum of thousands of tokens in float32 would round more than what is compared
        loss: Tensor = losses.sum(dtype=torch.float64) / (job.batch * job.seqlen)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().reshape(1)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's tokens, and those that follow them: labels are shifted before the split.

        Rows are one piece of the text after the other; from its end it goes on at its start.
        """
        rows = torch.arange(self.job.batch)[self.part.rows] + step * self.job.batch
        where = rows[:, None] * self.job.seqlen + self.part.positions
        tokens, labels = (self._text[at % len(self._text)].long().to(self.device) for at in (where, where + 1))
        return tokens, labels

    def _sum(self, loss: Tensor) -> float:
        """The loss of all ranks; with it the gradients, unless FSDP has summed them.

        In rank order, in float64: all ranks get the same bits.
        """
        summed = isinstance(self.model, FSDPModule)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and not summed]
        flat = torch.cat([loss, *(gradient.reshape(-1).double() for gradient in gradients)])
        total = self.part.gather(flat).sum(0)
        for gradient, part in zip(gradients, torch.split(total[1:], [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        return total[0].item()

    def _check_same(self, what: str, read: Callable[[], bytes]) -> None:
        """Raise on all ranks if ``read`` raises ``ValueError`` on one or does not return the same bytes on all.

        Raises:
            JobError: on every rank.
        """
        error = None
        try:
            digest = hashlib.sha256(read()).digest()
        except ValueError as raised:
            digest, error = bytes(hashlib.sha256().digest_size), raised
        digests = self.part.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device))
        if error is not None:
            raise JobError(str(error)) from error
        failed = (digests == 0).all(1).nonzero().flatten().tolist()
        if failed:
            raise JobError(f"{what} is refused by rank {failed[0]}, whose error says why")
        if not digests.eq(digests[0]).all():
            raise JobError(f"{what} differs between ranks")

    def _state(self, steps: int) -> dict[str, Any]:
        """Return what a checkpoint holds besides the job."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        losses = torch.tensor([self.run.losses.get(step, 0.0) for step in range(steps)], dtype=torch.float64)
        return {"model": model, "optimizer": optimizer, "losses": losses}

    def _save(self, folder: Path) -> None:
        """Write what continues from here bit for bit; ranks that have all of it write it once."""
        if self.part.fully_sharded or self.part.rank == 0:
            state = self._state(len(self.run.losses))
            save_state(folder, state, _what_stays(self.job), no_dist=not self.part.fully_sharded)

    def _resume(self, folder: Path) -> None:
        """Go on from the last checkpoint in ``folder``, on any number of ranks.

        Raises:
            JobError: on every rank: not all see the same checkpoint, it is another job's, or it cannot be read.
        """
        last = find_latest(folder)
        seen = f"--checkpoint {folder}, where rank {self.part.rank} sees {last.name if last else 'no checkpoint'},"
        self._check_same(seen, lambda: b"" if last is None else _read_checked(self.job, last))
        if last is None:
            return
        state = self._state(int(last.name))

        def read() -> bytes:
            load_state(last, state)
            return b"loaded"

        self._check_same(f"--checkpoint {folder}", read)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.run.losses = dict(enumerate(state["losses"].tolist()))


# -- who trains: processes of a mesh, or virtual ranks on one device


def check_checkpoint(job: Job) -> None:
    """Raise if the last checkpoint in the job's folder cannot be continued; called before any rank starts.

    Raises:
        ValueError: the checkpoint is another job's, or cannot be read; the message says where.
    """
    if job.checkpoint and (last := find_latest(Path(job.checkpoint))):
        _read_checked(job, last)


def _read_checked(job: Job, last: Path) -> bytes:
    """Return what identifies a checkpoint that this job may continue from.

    Raises:
        ValueError: the checkpoint is another job's, or cannot be read.
    """
    theirs, ours = read_job(last), _what_stays(job)
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if names:
        other = "; ".join(f"{name} {theirs.get(name)!r:.60}, here {ours.get(name)!r}" for name in names)
        raise ValueError(f"--checkpoint {last.parent} is of another job: {other}: name another folder")
    return repr((last.name, read_metadata(last))).encode()


def _what_stays(job: Job) -> dict[str, Any]:
    """Return what a run that continues has in common with the one before: all but its ranks, its end and its files."""
    return {name: value for name, value in asdict(job).items() if name not in MAY_CHANGE}


@contextmanager
def ring_of(ring: Ring, job: Job) -> Iterator[tuple[Layout, Attend]]:
    """The layout of a job over a ring, and attention by it."""
    layout: Layout = getattr(Layout, job.layout)(job.seqlen, ring.size)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, layout=layout, ring=ring, causal=True)

    with ring:
        yield layout, attend


def on_all_ranks(job: Job, text: bytes, world: int, kept: Kept | None = None) -> Run:
    """Train on so many ranks: this one's part under a launcher, virtual ones on a single device, else new processes."""
    if member() is None and (world == 1 or torch.cuda.device_count() == 1):
        return as_virtual_ranks(job, text, world, kept)
    return spawn(world, as_process, job, text, kept, device="cuda" if torch.cuda.is_available() else "cpu")


def as_process(place: Member, device: torch.device, job: Job, text: bytes, kept: Kept | None) -> Run:
    """Train one rank of several processes."""
    count = max(1, cores() // place.local_world)
    with threads(count):
        run = on_mesh(job, text, device, kept)
    run.where = f"{place.world} ranks, {device_name(device, count)} each"
    return run


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch use ``count`` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_mesh(job: Job, text: bytes, device: torch.device, kept: Kept | None = None) -> Run:
    """One rank of the default group: weights lie in parts on all, rows on the rings, tokens on the ranks of each."""
    shape = job.data, dist.get_world_size() // job.data
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
    each = job.batch // job.data
    first = mesh.get_local_rank("data") * each
    with ring_of(Ring(mesh["context"], slots=SLOTS), job) as (layout, attend):
        positions = layout.positions(mesh.get_local_rank("context"))
        part = Part(dist.get_rank(), slice(first, first + each), positions, attend, gather, fully_sharded=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_DIST)
            training = Training(job, text, device, part)
        return training.fit(kept)


def gather(x: Tensor) -> Tensor:
    """``[n]`` of every process."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def as_virtual_ranks(job: Job, text: bytes, world: int, kept: Kept | None = None) -> Run:
    """All ranks on one device, each with all weights; one is a single process."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def as_virtual_rank(group: LocalGroup) -> Run:
        ring = Ring(group, slots=SLOTS)

        def gather(x: Tensor) -> Tensor:
            return torch.stack(exchange(ring, [x] * ring.size, [x.shape] * ring.size))

        with ring_of(ring, job) as (layout, attend):
            part = Part(ring.rank, slice(None), layout.positions(ring.rank), attend, gather)
            return Training(job, text, device, part).fit(kept)

    with threads(cores()), LocalWorld(world, device=device) as local, warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_DIST)
        run = local.run(as_virtual_rank)[0]
    run.where = f"{world} virtual ranks on {device_name(device, cores())}, memory of all together"
    return run


def device_name(device: torch.device, count: int) -> str:
    """A GPU's, or how many threads there are."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"1 process of {count} thread{'s' * (count > 1)}"


if __name__ == "__main__":
    from ringattn.examples.demo import script

    script()
