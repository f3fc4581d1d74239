"""``ringattn demo``: train a small decoder on one long document, sharded and whole, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..bench.common.flags import LayoutName, binary, size

if TYPE_CHECKING:
    from ..bench.common.launching import Member
    from ..ring import Layout
    from .training import Runs

TOPICS = "pydoc_data/topics.py"
DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    """Of matrix products and attention."""

    float32 = "float32"
    bfloat16 = "bfloat16"


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
        if self.seqlen < 1:
            raise ValueError(f"--seqlen is {self.seqlen}: it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads is {self.kv_heads}: --heads, {self.heads}, must be a multiple of it")
        if self.head_dim % 2:
            raise ValueError(f"--head-dim is {self.head_dim}: it must be even, since rotary embedding turns pairs")

    def layout_of(self, world: int) -> Layout:
        """Who holds which tokens."""
        from ..ring import Layout

        layout: Layout = getattr(Layout, self.layout)(self.seqlen, world)
        return layout

    @property
    def compared(self) -> list[int]:
        """Steps whose gradients are compared: the first, and the last, where attention has learned to be peaked."""
        return sorted({0, self.steps - 1})


DEFAULT = Job()


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"What to train on, any file; default: the texts of {TOPICS}.")
    ] = None,
    world: Annotated[
        int | None, typer.Option(min=1, help=f"Ranks; default: {DEFAULT_WORLD}; the launcher's under torchrun.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    seqlen: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help=f"Bytes of the text; default: {binary(DEFAULT.seqlen)}."),
    ] = None,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = DEFAULT.heads,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of K and V.")] = DEFAULT.kv_heads,
    head_dim: Annotated[int, typer.Option(min=2, max=256)] = DEFAULT.head_dim,
    layers: Annotated[int, typer.Option(min=1)] = DEFAULT.layers,
    dtype: Annotated[
        Dtype, typer.Option(help="Of matrix products and attention; bfloat16 by autocast.")
    ] = Dtype.float32,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = DEFAULT.lr,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights.")] = DEFAULT.seed,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a row per loss and gradient.")] = None,
) -> None:
    """Train a small byte-level decoder on one long document, its sequence sharded over a ring of ranks, then take the
    same steps unsharded with PyTorch's attention, and compare every loss and every gradient.

    A rank is a GPU where this machine has several, a virtual rank where it has one, else a process. The exit code is 1
    where the two disagree.
    """
    from ..bench.common.launching import member
    from ..bench.common.output import check_targets
    from ..bench.common.result import finish
    from .compare import compared

    check_targets(json, csv)
    try:
        job = Job(
            DEFAULT.seqlen if seqlen is None else seqlen,
            steps, layers, heads, kv_heads, head_dim, layout.value, dtype.value, lr, seed,
        )  # fmt: skip
        world = resolve_world(world, member())
        document = read(text, job.seqlen)
    except ValueError as error:
        # on every rank: the launcher ends the others when one exits, before rank 0 could have printed
        raise typer.BadParameter(str(error)) from None
    runs = run(job, document, world)
    if runs is not None:
        finish(compared(job, TOPICS if text is None else text.name, runs), json, csv)


def run(job: Job, document: bytes, world: int) -> Runs | None:
    """The three runs: of one rank under a launcher, of virtual ranks on a single device, else of new processes.

    Returns:
        None on every rank but the first.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..bench.common.launching import launch, member
    from . import training

    if member() is not None:
        return training.as_rank(None, job, document)
    if world == 1 or torch.cuda.device_count() == 1:
        return training.as_all_ranks(job, document, world)
    typer.echo(f"starting {world} processes …", err=True)
    try:
        return launch(world, training.as_rank, job, document)
    except ChildFailedError as error:
        typer.echo(f"a rank failed: {error}", err=True)
        raise typer.Exit(1) from None


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


def read(text: Path | None, seqlen: int) -> bytes:
    """The first ``seqlen`` bytes of the document and the one after them: each byte's label is the next.

    Raises:
        ValueError: no such file, or too few bytes.
    """
    from ..kernels.strict import regular_file

    name = TOPICS if text is None else str(text)
    try:
        if text is None:
            content = topics()
        else:
            with regular_file(text) as file:
                content = file.read(seqlen + 1)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"cannot read {name}: {error}; --text takes any file") from None
    if len(content) <= seqlen:
        raise ValueError(
            f"{name} has {len(content):,} bytes, --seqlen {seqlen} needs {seqlen + 1:,}, since a byte's label is the "
            f"next: take a longer text, or --seqlen {max(len(content) - 1, 0)}"
        )
    return content[: seqlen + 1]


def topics() -> bytes:
    """The documentation that ships with Python, as ``help("topics")`` shows it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values()).encode()
