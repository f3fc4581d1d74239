"""``ringattn bench kernels`` compares our kernels with PyTorch's backends on one device, for any dtype and mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags
from ..common.output import is_printing_rank
from ..common.ranks import launched_rank
from ..common.result import Result, finish_command

if TYPE_CHECKING:
    import torch

DEFAULTS = {"cuda": ("8k,16k", "bf16", 16), "cpu": ("1k,2k", "fp32", 4)}
"""Default lengths, dtype and number of heads, by kind of device."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def kernels(
    seqlen: Annotated[
        Any, typer.Option(parser=flags.counts, metavar="SIZE,…", help="Tokens; default: 8k,16k; on the CPU, 1k,2k.")
    ] = None,
    batch: flags.Batch = 1,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; default: 16, on the CPU 4.")] = None,
    kv_heads: flags.KvHeads = None,
    head_dim: Annotated[
        Any, typer.Option(parser=flags.head_dims, metavar="N,…", help="Head dim of q and k.")
    ] = "64,128",
    value_dim: Annotated[
        int | None, typer.Option(min=1, max=flags.MAX_HEAD_DIM, help="Head dim of v; default: --head-dim.")
    ] = None,
    dtype: Annotated[
        Any,
        typer.Option(
            parser=flags.dtype_names, metavar="NAME,…", help="fp32, bf16 or fp16; default: bf16, on the CPU fp32."
        ),
    ] = None,
    causal: flags.Causal = True,
    window: flags.Window = None,
    cu_seqlens: flags.CuSeqlens = None,
    documents: flags.MeanDocumentLength = None,
    documents_seed: flags.DocumentsSeed = None,
    seqused_k: flags.SeqUsedK = None,
    prefix_length: flags.PrefixLength = None,
    block_mask: flags.BlockMaskPattern = None,
    by: Annotated[str | None, typer.Option(metavar="NAME,…", help="Measure only these contenders.")] = None,
    timer: flags.Timer = "",
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of timing per shape.")] = 3.0,
    seed: flags.Seed = 0,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Time forward, forward with a carried state, and backward; report errors and percent of a matrix product."""
    if not is_printing_rank():
        return  # under a launcher only rank 0 measures
    from itertools import product

    import torch

    from ..common.attention import AttentionConfig, document_boundaries
    from ..common.progress import progress
    from ..common.provenance import provenance
    from ..common.timing import StepTimer
    from .contenders import OURS, list_contenders
    from .speed import UNITS, comparison_line, measure_kernels

    place = launched_rank()
    device = flags.resolve_device() if place is None else place.device
    lengths, dtypes, usual_heads = DEFAULTS[device.type]
    heads = heads or usual_heads
    clock = StepTimer(device, timer=timer)
    configs = [
        AttentionConfig(
            tokens, batch=batch, heads=heads, kv_heads=flags.resolve_kv_heads(heads, kv_heads), head_dim=dim,
            head_dim_v=value_dim or dim, dtype=kind, causal=causal, layout="contiguous", seed=seed, device=device.type,
            window=window or (-1, -1),
            cu_seqlens=_tuple(document_boundaries(tokens, cu_seqlens, documents, documents_seed)),
            seqused_k=_tuple(seqused_k), prefix_length=prefix_length, block_mask=block_mask,
        )
        for kind, dim, tokens in product(dtype or flags.dtype_names(dtypes), head_dim, seqlen or flags.counts(lengths))
    ]  # fmt: skip
    known = [contender.name for contender in list_contenders(device)]
    names = [part.strip() for part in by.split(",")] if by else known
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"--by has {unknown[0]!r}: on {device.type} each name must be one of {', '.join(known)}"
        )
    ours = sum(name.startswith(OURS) for name in names)
    _check_room(configs, ours, len(names) - ours, device)
    torch.manual_seed(seed)
    result = Result("bench kernels", UNITS, notes=[f"medians of interleaved runs, timed by {clock.timer}"])
    with progress() as step:
        step("measuring", len(configs))
        for config in configs:
            result.add(measure_kernels(config, clock, seconds=seconds, prefixes=names))
            step("measuring", None)
    result.notes.append(comparison_line(result.rows))
    result.provenance = provenance(device)
    finish_command(result, json, csv)


def _tuple(given: Any) -> tuple[int, ...] | None:
    return None if given is None else tuple(given)


def _check_room(configs: list[Any], ours: int, theirs: int, device: torch.device) -> None:
    """Raise if a mask does not fit its shape (ValueError), or if a shape needs too much memory (typer.BadParameter)."""
    from ..common.memory import MemoryNeeds, check_size_fits, tensor_needs
    from ..common.memory_table import kernels_bytes
    from .speed import PRODUCT_SIDE

    for config in configs:
        _ = config.mask  # raise for the requested length, not for a shorter one

        def needed(seqlen: int, config: Any = config) -> MemoryNeeds:
            return tensor_needs(device, kernels_bytes(config, seqlen, ours, theirs, PRODUCT_SIDE[device.type]))

        check_size_fits("--seqlen", config.seqlen, needed, device, unit="tokens")
