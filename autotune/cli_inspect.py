"""Command line of ``ringattn inspect``, which compiles kernels for any GPU without having one."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench.common.flags import Csv, Json

DEFAULT = [f"90:bf16:128:middle:bounded:mha:{kernel}" for kernel in ("forward", "dq", "dkdv")]
"""Variants of most hops of a ring, on an H100."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inspect(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC…",
            help="ARCH:DTYPE:D or ARCH:DTYPE:D/Dv, then words that select variants, for example "
            f"90:bf16:192/128:dq:order=longest; default: {' '.join(DEFAULT)}",
        ),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option("--gate", help="Exit with 1 if a variant spills, may compute wrong values or has other problems."),
    ] = False,
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Compile kernels for any GPU, without having one, and print their resources and their throughput bound.

    Words: a kernel (forward, dq, dkdv, single_pass, single_pass_deterministic, hopper, hopper_backward, delta, reduce,
    quantize, dequantize), a role in the ring (only, first, middle, last), full or bounded, gqa or mha, features
    (softcap, alibi, dropout, seqused_k, block_sparse, max_logits), a tile (128x64x8x2: queries, keys, warps, stages),
    fields of KernelConfig (order=longest). All combinations that match the words are compiled.

    Bounds are in percent of tensor-core peak. The ceiling assumes perfect overlap. The bound assumes that the warps of
    a block run in step, so that only another block can fill their gaps. GPUs of AMD, such as gfx942, get no bound.
    """
    from ..bench.common.progress import progress
    from ..bench.common.result import finish_command
    from ..kernels.gpu import is_amd
    from .assemblers import newest_assembler
    from .compile import parse_variants
    from .inspect import inspect_variants

    try:
        variants = [variant for spec in specs or DEFAULT for variant in parse_variants(spec)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    needs_assembler = gate and not all(is_amd(variant.arch) for variant in variants)  # Triton for AMD may lack ptxas
    with progress() as step:
        result = inspect_variants(variants, step, newest_assembler() if needs_assembler else None, gate=gate)
    finish_command(result, json, csv)
