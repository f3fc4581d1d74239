"""``ringattn demo``: train a small decoder on one long document, sharded and whole, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common import flags

if TYPE_CHECKING:
    import torch

    from ..bench.common.launching import Member
    from ..bench.common.memory import Needs
    from .training import Runs

DEFAULT_WORLD = 2
TEXT_BYTES = 2 + 8  # of one letter: as it is sent and as it is read, and a number of int64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads is {self.kv_heads}: --heads, {self.heads}, must be a multiple of it")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim is {self.head_dim}: it must be even, since rotary embedding turns pairs")

    @property
    def compared(self) -> list[int]:
        """Steps whose gradients are compared: the first, and the last, where attention has learned to be peaked."""
        return sorted({0, self.steps - 1})


DEFAULT = Job()


@app.command()
def demo(
    world: Annotated[
        int | None, typer.Option(min=1, help=f"Ranks; default: {DEFAULT_WORLD}; the launcher's under torchrun.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    seqlen: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help="Bytes of the text, which is repeated if need be.")
    ] = str(DEFAULT.seqlen),
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    heads: flags.Heads = DEFAULT.heads,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of K and V.")] = DEFAULT.kv_heads,
    head_dim: Annotated[int, typer.Option(min=2, max=256)] = DEFAULT.head_dim,
    layers: Annotated[int, typer.Option(min=1)] = DEFAULT.layers,
    dtype: flags.Dtype = DEFAULT.dtype,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = DEFAULT.lr,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights.")] = DEFAULT.seed,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Train a small byte-level decoder on one long document, its sequence sharded over a ring of ranks, then take the
    same steps unsharded with PyTorch's attention, and compare every loss and every gradient.

    A rank is a GPU where this machine has several, a virtual rank where it has one, else a process. The exit code is 1
    where the two disagree.
    """
    import torch
    from rich.console import Console

    from ..bench.common.launching import member, ranks_here
    from ..bench.common.memory import refuse_too_large
    from ..bench.common.output import prints
    from ..bench.common.result import finish
    from .compare import compared

    try:
        job = Job(seqlen, steps, layers, heads, kv_heads, head_dim, layout.value, dtype, lr, seed)
        world = resolve_world(world, member())
    except ValueError as error:
        # on every rank: the launcher ends the others when one exits, before rank 0 could have printed
        raise typer.BadParameter(str(error)) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    needed = partial(needs, job, ranks=ranks_here(world), device=device)
    refuse_too_large("--seqlen", seqlen, needed, device, unit="tokens")
    with Console(stderr=True, quiet=not prints()).status("training: sharded, whole, in float64"):
        runs = run(job, document(seqlen), world)
    if runs is not None:
        finish(compared(job, runs), json, csv)


def needs(job: Job, tokens: int, *, ranks: int, device: torch.device) -> Needs:
    """Bytes of the whole sequence, on the host in float64, and of every rank's process, which reads the whole text."""
    from ..bench.common.memory import PROCESS_BYTES, Needs
    from ..bench.common.memory_table import FP32, FP64, trained_bytes

    dims = job.layers, job.heads * job.head_dim, job.kv_heads * job.head_dim
    host = ranks * (PROCESS_BYTES + TEXT_BYTES * tokens) + trained_bytes(tokens, *dims, FP64)
    return Needs(host, trained_bytes(tokens, *dims, FP32) if device.type == "cuda" else 0)


def run(job: Job, document: bytes, world: int) -> Runs | None:
    """The three runs: of one rank under a launcher, of virtual ranks on a single device, else of new processes.

    Returns:
        None on every rank but the first.
    """
    import torch

    from ..bench.common.launching import member, started
    from . import training

    if member() is not None:
        return training.as_rank(None, job, document)
    if world == 1 or torch.cuda.device_count() == 1:
        return training.as_all_ranks(job, document, world)
    return started(world, training.as_rank, job, document)


def resolve_world(world: int | None, place: Member | None) -> int:
    """How many ranks there will be.

    Raises:
        typer.BadParameter: another number than the launcher's.
        ValueError: more than GPUs.
    """
    import torch

    from ..bench.common.launching import world_of

    ranks, gpus = world_of(place, world, DEFAULT_WORLD), torch.cuda.device_count()
    if place is not None:
        _ = place.device
    elif 1 < gpus < ranks:
        raise ValueError(f"--world is {ranks}, this machine has {gpus} GPUs: a rank takes one, so at most {gpus}")
    return ranks


def document(seqlen: int) -> bytes:
    """The documentation that ships with Python, as ``help("topics")`` shows it: each byte's label is the next."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values()).encode()
    return (text * (seqlen // len(text) + 1))[: seqlen + 1]
