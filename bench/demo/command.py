"""Command line of ``ringattn demo``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ...examples.train import Job
    from ..common.memory import MemoryNeeds
    from ..common.ranks import LaunchedRank
    from ..common.result import Result

DEFAULT_WORLD = 2
TOKEN_BYTES = 3 * 8  # int64 position in the text, input and label

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    world: Annotated[
        int | None, typer.Option(min=1, help=f"Ranks; default: the launcher's, or {DEFAULT_WORLD}.")
    ] = None,
    data: Annotated[int, typer.Option(min=1, help="Number of rings. Each gets its own rows of the batch.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 10,
    batch: flags.Batch = 1,
    seqlen: Annotated[
        Any,
        typer.Option(parser=flags.count, metavar="SIZE", help="Bytes per row; the text is repeated if it is shorter."),
    ] = "8k",
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    heads: flags.Heads = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=2, max=flags.MAX_HEAD_DIM)] = 32,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the decoder.")] = 2,
    dtype: flags.Dtype = "float32",
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights.")] = 0,
    block: Annotated[
        int, typer.Option(min=0, help="Tokens per chunk of feed-forward and loss; 0: one chunk, without recomputation.")
    ] = 1024,
    plot: flags.Plot = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Train a small byte-level decoder with and without sharding, and compare every loss and gradient.

    The sequence of one long text is sharded over a ring, and the weights over all ranks. The same steps run unsharded
    with PyTorch's attention, and in float64. The exit code is 1 if results disagree.

    Ranks are GPUs if this machine has several, virtual ranks if it has one, else processes. `python -m
    ringattn.examples.train` runs the same job, but only trains and writes checkpoints.
    """
    import torch

    from ...examples.train import Job, read_text
    from ..common.memory import check_size_fits
    from ..common.ranks import launched_rank, ranks_here
    from ..common.result import finish_command
    from .compare import compare_training

    try:
        job = Job(
            seqlen=seqlen, batch=batch, steps=steps, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            layout=layout.value, data=data, block=block, dtype=dtype, lr=lr, seed=seed,
        )  # fmt: skip
        world = resolve_ranks(world, data, launched_rank())
    except ValueError as error:
        # Raise on every rank, because a launcher kills the others when one exits, before rank 0 has printed.
        raise typer.BadParameter(str(error)) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    needed = partial(demo_needs, job, ranks=ranks_here(world), device=device)
    check_size_fits("--seqlen", seqlen, needed, device, unit="tokens")
    result = compare_training(job, read_text(), world)
    if result is None:
        return
    if plot:
        draw_losses(result, plot)
    finish_command(result, json, csv)


def demo_needs(job: Job, tokens: int, *, ranks: int, device: torch.device) -> MemoryNeeds:
    """Return the bytes to train on ``tokens`` per row: float64 on the host, fp32 on a GPU, ``ranks`` processes."""
    from ..common.memory import PROCESS_BYTES, MemoryNeeds
    from ..common.memory_table import FP32, FP64, trained_bytes

    tokens *= job.batch
    dims = job.layers, job.heads * job.head_dim, job.kv_heads * job.head_dim
    host = ranks * (PROCESS_BYTES + TOKEN_BYTES * tokens) + trained_bytes(tokens, *dims, FP64)
    return MemoryNeeds(host, trained_bytes(tokens, *dims, FP32) if device.type == "cuda" else 0)


def resolve_ranks(world: int | None, data: int, place: LaunchedRank | None) -> int:
    """Return the number of ranks; raise ValueError if ``data`` rings do not divide them, or there are too few GPUs."""
    import torch

    ranks, gpus = flags.resolve_world(world, DEFAULT_WORLD), torch.cuda.device_count()
    if ranks % data:
        raise ValueError(f"--world is {ranks}: it must be a multiple of --data, {data}")
    if place is not None:
        _ = place.device
    elif 1 < gpus < ranks:
        raise ValueError(f"--world is {ranks}: it must be at most {gpus}, the number of GPUs of this machine")
    elif gpus == 1 and data > 1:
        raise ValueError(f"--data is {data}: it must be 1, because virtual ranks on one GPU form one ring")
    return ranks


def draw_losses(result: Result, target: Path) -> None:
    """Plot the losses of both runs by step into a file."""
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row["name"] == "loss"]
    figure = Figure()
    axes = figure.subplots()
    for name in ("sharded", "unsharded"):
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(target)
