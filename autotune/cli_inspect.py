"""``ringattn inspect``: any kernel, compiled for any GPU on any machine: what it takes, what bounds its loop."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench.common.flags import Csv, Json

DEFAULT = [f"90:bf16:128:middle:bounded:mha:{kernel}" for kernel in ("forward", "dq", "dkdv")]
"""What most hops of a ring run on the main GPU."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inspect(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC…",
            help="ARCH:DTYPE:D or ARCH:DTYPE:D/Dv, and words that narrow it, as 90:bf16:192/128:dq:order=longest; "
            f"default: {' '.join(DEFAULT)}",
        ),
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Exit 1 where a variant does not pass.")] = False,
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Compile kernels for any GPU, without one, and say what they take and what bounds their main loop.

    Words: a kernel (forward, dq, dkdv, single_pass, single_pass_deterministic, hopper, hopper_backward, delta, reduce,
    quantize, dequantize), a place in a ring (only, first, middle, last), full or bounded, gqa or mha, features
    (softcap, alibi, dropout, seqused_k, block_sparse), a tile (128x64x8x2: queries, keys, warps, stages), fields of
    KernelConfig (order=longest). What no word says is inspected in every way.

    Bounds are in percent of the tensor cores' peak. The ceiling assumes that everything overlaps; the bound, that a
    block's warps move in step and only another block fills their gaps.
    """
    from ..bench.common.progress import progress
    from ..bench.common.result import finish
    from .compile import select
    from .inspect import inspect_variants, result_of

    try:
        variants = [variant for spec in specs or DEFAULT for variant in select(spec)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with progress() as step:
        rows = inspect_variants(variants, step)
    finish(result_of(rows, gate=gate), json, csv)
