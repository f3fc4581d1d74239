"""``ringattn demo``: train a small decoder on one long document, sharded and whole, side by side."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..bench.common.flags import LayoutName, binary, size
from ..bench.common.launching import Member, member, world_of
from ..bench.common.output import check_targets
from ..kernels.strict import regular_file
from .side_by_side import Order, run
from .training import Job

TOPICS = "pydoc_data/topics.py"
DEFAULT_WORLD = 2
DEFAULT = Job()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


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
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a row per step.")] = None,
) -> None:
    """Train a small byte-level decoder on one long document, its sequence sharded over a ring of ranks, then take the
    same steps unsharded with PyTorch's attention, and compare every loss and every gradient.

    A rank is a GPU where this machine has several, a virtual rank where it has one, else a process. The exit code is 1
    where the two disagree.
    """
    seqlen = DEFAULT.seqlen if seqlen is None else seqlen
    check_targets(json, csv)
    job = Job(seqlen, steps, layers, heads, kv_heads, head_dim, layout.value, dtype.value, lr, seed)
    try:
        world = resolve_world(world, member())
        check_job(job)
        order = Order(job, read(text, job.seqlen), TOPICS if text is None else text.name, json, csv)
    except ValueError as error:
        # on every rank: the launcher ends the others when one exits, before rank 0 could have printed
        raise typer.BadParameter(str(error)) from None
    if not run(order, world):
        raise typer.Exit(1)


def resolve_world(world: int | None, place: Member | None) -> int:
    """How many ranks there will be.

    Raises:
        typer.BadParameter: another number than the launcher's.
        ValueError: more than GPUs.
    """
    ranks, gpus = world_of(place, world, DEFAULT_WORLD), torch.cuda.device_count()
    if place is not None:
        _ = place.device
    elif 1 < gpus < ranks:
        raise ValueError(f"--world is {ranks}, this machine has {gpus} GPUs: a rank takes one, so at most {gpus}")
    return ranks


def check_job(job: Job) -> None:
    """Refuse what no decoder can be made of: ValueError."""
    if job.seqlen < 1:
        raise ValueError(f"--seqlen is {job.seqlen}: it must be at least 1")
    if job.heads % job.kv_heads:
        raise ValueError(f"--kv-heads is {job.kv_heads}: --heads, {job.heads}, must be a multiple of it")
    if job.head_dim % 2:
        raise ValueError(f"--head-dim is {job.head_dim}: it must be even, since rotary embedding turns pairs")


def read(text: Path | None, seqlen: int) -> bytes:
    """The first ``seqlen`` bytes of the document and the one after them: each byte's label is the next.

    Raises:
        ValueError: no such file, or too few bytes.
    """
    name = TOPICS if text is None else str(text)
    try:
        content = topics() if text is None else _head(text, seqlen + 1)
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


def _head(path: Path, count: int) -> bytes:
    with regular_file(path) as file:
        return file.read(count)
