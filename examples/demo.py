"""The command line of ``train.py``; ``ringattn demo`` is the same with ``--compare``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common import flags

if TYPE_CHECKING:
    import torch

    from ..bench.common.memory import Needs
    from ..bench.common.ranks import Member
    from ..bench.common.result import Result

DEFAULT_WORLD = 2
TOKEN_BYTES = 3 * 8  # its place in the text, itself and its label, of int64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
script = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
    batch: int = 1
    data: int = 1  # ranks that take other rows of the batch
    block: int = 1024  # tokens of a feed-forward and of the loss at once; 0: all, and nothing is computed again
    checkpoint: str | None = None
    every: int = 100

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads is {self.kv_heads}: --heads, {self.heads}, must be a multiple of it")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim is {self.head_dim}: it must be even, since rotary embedding turns pairs")
        if self.batch % self.data:
            raise ValueError(f"--data is {self.data}: --batch, {self.batch}, must be a multiple of it")

    @property
    def compared(self) -> list[int]:
        """Steps whose gradients are compared: the first, and the last, where attention has learned to be peaked."""
        return sorted({0, self.steps - 1})


DEFAULT = Job()


@script.command()
@app.command(context_settings={"default_map": {"compare": True}})
def train(
    context: typer.Context,
    world: Annotated[
        int | None, typer.Option(min=1, help=f"Ranks; default: {DEFAULT_WORLD}; the launcher's under torchrun.")
    ] = None,
    data: Annotated[int, typer.Option(min=1, help="Rings, which take other rows of the batch.")] = DEFAULT.data,
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    batch: flags.Batch = DEFAULT.batch,
    seqlen: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help="Bytes of a row; the text is repeated if need be.")
    ] = str(DEFAULT.seqlen),
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    heads: flags.Heads = DEFAULT.heads,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of K and V.")] = DEFAULT.kv_heads,
    head_dim: Annotated[int, typer.Option(min=2, max=256)] = DEFAULT.head_dim,
    layers: Annotated[int, typer.Option(min=1)] = DEFAULT.layers,
    dtype: flags.Dtype = DEFAULT.dtype,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = DEFAULT.lr,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights.")] = DEFAULT.seed,
    block: Annotated[
        int, typer.Option(min=0, help="Tokens of feed-forward and loss at once; 0: all, and nothing is recomputed.")
    ] = DEFAULT.block,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write checkpoints there; go on from the last one in it.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = DEFAULT.every,
    plot: flags.Plot = None,
    compare: Annotated[
        bool, typer.Option(help="Take the same steps unsharded and in float64, and compare losses and gradients.")
    ] = False,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Train a small byte-level decoder on one long text: its sequence sharded over a ring of ranks, its weights over
    all. With --compare the same steps follow unsharded with PyTorch's attention, and every loss and every gradient is
    compared; the exit code is 1 where they disagree.

    A rank is a GPU where this machine has several, a virtual rank where it has one, else a process.
    """
    import torch

    from ..bench.common.memory import refuse_too_large
    from ..bench.common.output import prints
    from ..bench.common.ranks import member, ranks_here
    from ..bench.common.result import finish
    from . import compare as comparison
    from .train import JobError, check_checkpoint, on_all_ranks

    flags.check_needs(context, {"every": "checkpoint"})
    if compare and checkpoint:
        raise typer.BadParameter("--checkpoint is given with --compare, which begins at the first step: leave one out")
    if checkpoint:
        flags.check_folder("--checkpoint", checkpoint)
    try:
        job = Job(
            seqlen=seqlen, batch=batch, steps=steps, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            layout=layout.value, data=data, block=block, dtype=dtype, lr=lr, seed=seed,
            checkpoint=str(checkpoint) if checkpoint else None, every=every,
        )  # fmt: skip
        world = resolve_world(world, data, member())
        if member() is None:  # the ranks of a launcher read it together, so that all of them get the error
            check_checkpoint(job)
    except ValueError as error:
        # on every rank: the launcher ends the others when one exits, before rank 0 could have printed
        raise typer.BadParameter(str(error)) from None
    if compare:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        needed = partial(needs, job, ranks=ranks_here(world), device=device)
        refuse_too_large("--seqlen", seqlen, needed, device, unit="tokens")
        result = comparison.compared(job, text(), world)
    else:
        try:
            result = comparison.report(job, on_all_ranks(job, text(), world))
        except JobError as error:
            raise typer.BadParameter(str(error)) from None
    if result is None:
        return
    if plot and prints():
        draw(result, plot)
    finish(result, json, csv, text=None if compare else result.notes[-1])


def needs(job: Job, tokens: int, *, ranks: int, device: torch.device) -> Needs:
    """Bytes of the whole batch, on the host in float64, and of every rank's process, which reads the whole text."""
    from ..bench.common.memory import PROCESS_BYTES, Needs
    from ..bench.common.memory_table import FP32, FP64, trained_bytes

    tokens *= job.batch
    dims = job.layers, job.heads * job.head_dim, job.kv_heads * job.head_dim
    host = ranks * (PROCESS_BYTES + TOKEN_BYTES * tokens) + trained_bytes(tokens, *dims, FP64)
    return Needs(host, trained_bytes(tokens, *dims, FP32) if device.type == "cuda" else 0)


def resolve_world(world: int | None, data: int, place: Member | None) -> int:
    """How many ranks there will be.

    Raises:
        typer.BadParameter: another number than the launcher's.
        ValueError: more than GPUs, or no whole rings.
    """
    import torch

    ranks, gpus = flags.resolve_world(world, DEFAULT_WORLD), torch.cuda.device_count()
    if ranks % data:
        raise ValueError(f"--data is {data}: the ranks, {ranks}, must be a multiple of it")
    if place is not None:
        _ = place.device
    elif 1 < gpus < ranks:
        raise ValueError(f"--world is {ranks}, this machine has {gpus} GPUs: a rank takes one, so at most {gpus}")
    elif gpus == 1 and data > 1:
        raise ValueError(f"--data is {data}: the virtual ranks of one GPU are one ring; take more GPUs, or --data 1")
    return ranks


def text() -> bytes:
    """The documentation that ships with Python, as ``help("topics")`` shows it: each byte's label is the next."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()).encode()


def draw(result: Result, target: Path) -> None:
    """The loss of every step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result.rows if row["name"] == "loss"]
    figure, axes = pyplot.subplots()
    for name in ("sharded", "whole"):
        if name in rows[0]:
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(target)
    pyplot.close(figure)
