"""Train the decoder of ``model.py`` on a long text, with FSDP2 for the weights and rings for the sequence.

    torchrun --nproc-per-node 8 -m ringattn.examples.train --seqlen 256k --steps 1000 --checkpoint runs/a
    python -m ringattn.examples.train --world 4     # four virtual ranks on one device

The ranks form a mesh (data, context). Each context group is a ring that shards the sequences of its batch rows.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ringattn import Layout, LocalWorld, Ring, ring_attention, unshard
from ringattn.comm import LocalGroup

from .checkpoint import find_latest, load_state, read_job, read_metadata, save_state
from .model import Attend, Decoder

ADAM_BETAS = (0.9, 0.95)  # the second moment adapts within about 20 steps
PROGRESS_LINES = 20  # per run
MUTABLE_SETTINGS = {"steps", "data", "block", "checkpoint", "every"}  # settings that a resumed run may change
NO_DIST = "torch.distributed is disabled"  # torch's warning when a rank loads its part of a checkpoint alone
SLOTS = 2  # one K/V slot to compute with and one to receive into; `predict` finds no gain from a third
CHOICES = {"layout": ("contiguous", "zigzag", "striped"), "dtype": ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Job:
    """Settings of a training run; equal on all ranks."""

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
    batch: int = 1
    data: int = 1  # data-parallel size: number of rings with different rows of the batch
    block: int = 1024  # tokens that feed-forward and loss process at a time; 0: all, without recomputation
    checkpoint: str | None = None
    every: int = 100  # steps between checkpoints

    def __post_init__(self) -> None:
        for name in ("seqlen", "steps", "layers", "heads", "kv_heads", "head_dim", "batch", "data", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads is {self.kv_heads}: it must divide --heads, {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim is {self.head_dim}: it must be even for rotary embedding")
        if self.batch % self.data:
            raise ValueError(f"--data is {self.data}: it must divide --batch, {self.batch}")


class JobError(ValueError):
    """Error if the ranks have different jobs, or if a checkpoint cannot be resumed."""


@dataclass
class Run:
    """Loss of every step by number, from 0, and the seconds of each step that this process ran."""

    losses: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


class StepObserver(Protocol):
    """Observer that is called around each training step."""

    def before(self, training: Training, step: int) -> None:
        """Run before a step."""

    def after(self, training: Training, step: int) -> None:
        """Run after a step, before its gradients are cleared."""


@dataclass(frozen=True)
class RankSetup:
    """Share of every batch that one rank computes, and its communication with the other ranks."""

    rank: int
    rows: slice  # rows of the batch
    positions: Tensor  # global positions of this rank's tokens, for every row
    attend: Attend
    gather: Callable[[Tensor], Tensor]  # all-gather from [n] to [ranks, n]
    fully_sharded: bool = False  # FSDP2 shards the weights
    name: str = "sharded"


class Training:
    """Model, optimizer and training loop of one rank."""

    def __init__(self, job: Job, text: bytes, device: torch.device, rank_setup: RankSetup) -> None:
        """Build the model and resume from the last checkpoint; every rank must call it.

        Raises:
            JobError: The ranks differ in job, text or checkpoint, or the checkpoint cannot be resumed. Every rank
                raises.
        """
        self.job, self.device, self.rank_setup, self.run = job, device, rank_setup, Run()
        self._positions = rank_setup.positions.to(device)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for name, value in asdict(job).items():
            self._check_same(f"--{name.replace('_', '-')}", repr(value).encode)
        self._check_same("the text", lambda: text)
        dims = {"heads": job.heads, "kv_heads": job.kv_heads, "head_dim": job.head_dim}
        with torch.device("meta"):  # so that no rank allocates the whole model
            self.model = Decoder(layers=job.layers, **dims, block=job.block or None)
        if rank_setup.fully_sharded:
            for module in (*self.model.layers, self.model):
                fsdp = fully_shard(module)
                # sum the gradients: each rank's loss is already divided by the tokens of all ranks
                fsdp.set_gradient_divide_factor(1.0)
                fsdp.set_force_sum_reduction_for_comms(True)
        self.model.to_empty(device=device).initialize(job.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=job.lr, betas=ADAM_BETAS)
        if job.checkpoint:
            self._resume(Path(job.checkpoint))

    def fit(self, watch: StepObserver | None = None) -> Run:
        """Run the remaining steps, with checkpoints and progress lines."""
        run, job = self.run, self.job
        for step in range(len(run.losses), job.steps):
            if watch:
                watch.before(self, step)
            start = time.perf_counter()
            self.optimizer.zero_grad()
            run.losses[step] = self._sum(self.backward(step))
            self.optimizer.step()
            # reading the loss has synchronised the GPU, so only the optimizer step may still be running
            run.seconds.append(time.perf_counter() - start)
            if watch:
                watch.after(self, step)
            done, last = step + 1, step + 1 == job.steps
            if job.checkpoint and (done % job.every == 0 or last):
                self._save(Path(job.checkpoint) / f"{done:08}")
            if self.rank_setup.rank == 0 and (done % max(1, job.steps // PROGRESS_LINES) == 0 or last):
                loss, speed = run.losses[step], job.batch * job.seqlen / run.seconds[-1]
                line = f"{self.rank_setup.name}, step {done} of {job.steps}: loss {loss:.4f}, {speed:,.0f} tokens/s"
                print(line, file=sys.stderr, flush=True)
        return run

    def backward(self, step: int) -> Tensor:
        """Return this rank's part of the mean loss over the batch, ``[1]``, and set its part of the gradients."""
        job, dtype = self.job, getattr(torch, self.job.dtype)
        tokens, labels = self._batch(step)
        with nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype):
            losses = self.model(tokens, self._positions, self.rank_setup.attend, labels)
        # sum in float64, because a float32 sum over thousands of tokens would round too much to compare runs
        loss: Tensor = losses.sum(dtype=torch.float64) / (job.batch * job.seqlen)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().reshape(1)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and their successors as labels, which are thus shifted before the split.

        Consecutive rows are consecutive pieces of the text, which wraps around at its end.
        """
        rows = torch.arange(self.job.batch)[self.rank_setup.rows] + step * self.job.batch
        index = rows[:, None] * self.job.seqlen + self.rank_setup.positions
        tokens, labels = (self._text[i % len(self._text)].long().to(self.device) for i in (index, index + 1))
        return tokens, labels

    def _sum(self, loss: Tensor) -> float:
        """Return the loss summed over all ranks, and sum the gradients in place unless FSDP does.

        The sum is in rank order and in float64, so that all ranks get bitwise equal results.
        """
        has_fsdp = isinstance(self.model, FSDPModule)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and not has_fsdp]
        flat = torch.cat([loss, *(gradient.reshape(-1).double() for gradient in gradients)])
        total = self.rank_setup.gather(flat).sum(0)
        for gradient, part in zip(gradients, torch.split(total[1:], [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        return total[0].item()

    def _check_same(self, what: str, read: Callable[[], bytes]) -> None:
        """Raise JobError on every rank if ``read`` fails on a rank or returns different bytes on two ranks.

        ``what`` names the compared value in the error.
        """
        error = None
        try:
            digest = hashlib.sha256(read()).digest()
        except ValueError as raised:
            digest, error = bytes(hashlib.sha256().digest_size), raised
        digests = self.rank_setup.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device))
        if error is not None:
            raise JobError(str(error)) from error
        failed = (digests == 0).all(1).nonzero().flatten().tolist()
        if failed:
            raise JobError(f"{what} failed on rank {failed[0]}; see that rank's error")
        if not digests.eq(digests[0]).all():
            raise JobError(f"{what} differs between ranks")

    def _state(self, steps: int) -> dict[str, Any]:
        """Return the state of a checkpoint: model, optimizer and losses."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        losses = torch.tensor([self.run.losses.get(step, 0.0) for step in range(steps)], dtype=torch.float64)
        return {"model": model, "optimizer": optimizer, "losses": losses}

    def _save(self, folder: Path) -> None:
        """Write a checkpoint from which a run resumes bitwise; without FSDP only rank 0 writes."""
        if self.rank_setup.fully_sharded or self.rank_setup.rank == 0:
            state = self._state(len(self.run.losses))
            save_state(folder, state, _fixed_settings(self.job), no_dist=not self.rank_setup.fully_sharded)

    def _resume(self, folder: Path) -> None:
        """Resume from the last checkpoint in ``folder``, on any number of ranks.

        Raises:
            JobError: The ranks see different checkpoints, or the checkpoint is another job's or cannot be read. Every
                rank raises.
        """
        last = find_latest(folder)
        seen = (
            f"--checkpoint {folder}, where rank {self.rank_setup.rank} sees {last.name if last else 'no checkpoint'},"
        )
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


def _read_checked(job: Job, last: Path) -> bytes:
    """Return bytes that identify a checkpoint from which this job may resume.

    Raises:
        ValueError: The checkpoint is another job's, or cannot be read.
    """
    saved, ours = read_job(last), _fixed_settings(job)
    names = [name for name in {**ours, **saved} if saved.get(name) != ours.get(name)]
    if names:
        other = "; ".join(f"{name} {saved.get(name)!r:.60}, here {ours.get(name)!r}" for name in names)
        raise ValueError(f"--checkpoint {last.parent} belongs to another job: {other}. Pass another folder.")
    return repr((last.name, read_metadata(last))).encode()


def _fixed_settings(job: Job) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the checkpoint."""
    return {name: value for name, value in asdict(job).items() if name not in MUTABLE_SETTINGS}


# -- training as processes of a mesh, or as virtual ranks on one device


@contextmanager
def open_ring(ring: Ring, job: Job) -> Iterator[tuple[Layout, Attend]]:
    """Yield the layout of a job over a ring, and an attention function that uses the ring."""
    layout: Layout = getattr(Layout, job.layout)(job.seqlen, ring.size)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, layout=layout, ring=ring, causal=True)

    with ring:
        yield layout, attend


def train_process(job: Job, text: bytes) -> Run:
    """Train as one of torchrun's processes, with its default group."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        return train_on_mesh(job, text, device)
    finally:
        dist.destroy_process_group()


def train_on_mesh(job: Job, text: bytes, device: torch.device, watch: StepObserver | None = None) -> Run:
    """Train as one rank of the default group, with FSDP over all ranks and one ring per row of the mesh.

    Raises:
        JobError: ``job.data`` does not divide the number of ranks, or :class:`Training` raises. Every rank raises.
    """
    world = dist.get_world_size()
    if world % job.data:
        raise JobError(f"--data is {job.data}: it must divide the number of ranks, {world}")
    mesh = init_device_mesh(device.type, (job.data, world // job.data), mesh_dim_names=("data", "context"))
    rows = job.batch // job.data
    first_row = mesh.get_local_rank("data") * rows
    with open_ring(Ring(mesh["context"], slots=SLOTS), job) as (layout, attend):
        positions = layout.positions(mesh.get_local_rank("context"))
        part = RankSetup(
            dist.get_rank(), slice(first_row, first_row + rows), positions, attend, gather, fully_sharded=True
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_DIST)
            training = Training(job, text, device, part)
        return training.fit(watch)


def gather(x: Tensor) -> Tensor:
    """Gather ``[n]`` of all ranks to ``[ranks, n]`` on every rank of the default group."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def train_virtual_ranks(job: Job, text: bytes, world: int, watch: StepObserver | None = None) -> Run:
    """Train on virtual ranks of one device, each with all weights; ``world=1`` is a single process.

    Raises:
        JobError: ``job.data`` is above 1, or :class:`Training` raises.
    """
    if job.data > 1:
        raise JobError(
            f"--data is {job.data}: it must be 1 for virtual ranks, which form one ring. For more rings use torchrun."
        )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def train_rank(group: LocalGroup) -> Run:
        def gather(x: Tensor) -> Tensor:
            return unshard(x[None], layout="contiguous", group=group, grad="slice").view(world, *x.shape)

        with open_ring(Ring(group, slots=SLOTS), job) as (layout, attend):
            part = RankSetup(group.rank(), slice(None), layout.positions(group.rank()), attend, gather)
            return Training(job, text, device, part).fit(watch)

    with LocalWorld(world, device=device) as local, warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_DIST)
        return local.run(train_rank)[0]


# -- the command line


def read_text() -> bytes:
    """Return the documentation that ships with Python (``help("topics")``)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()).encode()


def parse_size(text: str) -> int:
    """Parse ``8192``, ``8k``, ``1m`` or ``2g``, with k, m and g as powers of 1024."""
    match = re.fullmatch(r"(\d{1,18})([kmg]?)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: it must be an integer with an optional k, m or g")
    return int(match[1]) << 10 * " kmg".index(match[2] or " ")


def parse_command_line(arguments: Sequence[str] | None = None) -> tuple[Job, int]:
    """Return the job of a command line, and the number of virtual ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for item in fields(Job):
        kind: Any = {"seqlen": parse_size, "checkpoint": str}.get(item.name, type(item.default))
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=item.default, choices=CHOICES.get(item.name))
    parser.add_argument("--world", type=int, default=2, help="number of virtual ranks without torchrun")
    values = vars(parser.parse_args(arguments))
    world: int = values.pop("world")
    try:
        return Job(**values), world
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    """Train with the settings of the command line, under torchrun or on virtual ranks."""
    job, world = parse_command_line()
    try:
        if dist.is_torchelastic_launched():
            run = train_process(job, read_text())
        else:
            run = train_virtual_ranks(job, read_text(), world)
    except JobError as error:
        raise SystemExit(f"{Path(__file__).name}: {error}") from None
    if int(os.environ.get("RANK", "0")) == 0 and run.seconds:
        median = sorted(run.seconds)[len(run.seconds) // 2]
        print(f"loss {run.losses[job.steps - 1]:.4f}, {job.batch * job.seqlen / median:,.0f} tokens/s")


if __name__ == "__main__":
    main()
