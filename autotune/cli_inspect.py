"""``ringattn inspect``: any kernel, compiled for any GPU on any machine: what it takes, what bounds its loop."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import typer

from ..bench.common.flags import Csv, Json, check_mode

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HEARD_BY = {"delta": (), "quantize": (), "dequantize": (), "reduce": ("role", "mask")}
"""Memory-bound kernels, and which of the words for roles, masks and heads they hear."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inspect(
    context: typer.Context,
    spec: Annotated[
        list[str] | None,
        typer.Argument(
            help="All that ARCH:DTYPE:D names, as 90:bf16:192/128:dq:alibi:order=longest; in place of the flags."
        ),
    ] = None,
    kernel: Annotated[
        str,
        typer.Option(
            help="Comma list of forward, dq, dkdv, single_pass, single_pass_deterministic, hopper (forward of sm_90), "
            "hopper_backward (its single pass), delta, reduce (of dK/dV in parts), quantize, dequantize."
        ),
    ] = "forward,dq,dkdv",
    arch: Annotated[
        str, typer.Option(help="Comma list of GPUs: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120.")
    ] = "sm_90",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    head_dim: Annotated[str, typer.Option(metavar="D|D/Dv", help="Of q and k, and of v.")] = "128",
    role: Annotated[
        str, typer.Option(help="Comma list of places in a ring: only, first, middle (carries a state), last.")
    ] = "middle",
    tile: Annotated[
        str | None, typer.Option(metavar="QxKxWARPSxSTAGES", help="Comma list; the default's where left out.")
    ] = None,
    feature: Annotated[str | None, typer.Option(help="Comma list: softcap, alibi, dropout, used, runs.")] = None,
    option: Annotated[
        str | None, typer.Option(metavar="NAME=VALUE,…", help="Fields of KernelConfig: order=longest, pack_gqa=True, …")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="No mask: every query sees every key.")] = False,
    grouped: Annotated[bool, typer.Option("--gqa", help="Several query heads per key head.")] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two specs, or reports by --json, side by side.")
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Exit 1 where a variant does not pass.")] = False,
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Compile kernels for any GPU, without one, and say what they take and what bounds their main loop.

    Bounds are in percent of the tensor cores' peak. The ceiling assumes that everything overlaps; the bound, that a
    block's warps move in step and only another block fills their gaps.
    """
    if diff is not None:
        check_mode(context, "beside --diff, which names all of its variants", ("diff", "gate"))
    elif spec:
        check_mode(context, f"beside {spec[0]!r}, which names all of a variant", ("gate",))
    if diff is not None and spec:
        raise typer.BadParameter(f"{spec[0]!r} has no say beside --diff, which takes two specs itself: leave it out")

    from ..bench.common.result import Result, finish
    from .compile import select
    from .inspect import configs, differences, inspect_variants, read_rows, result_of
    from .tune import progress

    try:
        with progress() as step:
            if diff is not None:
                sides = [
                    read_rows(word) if word.endswith(".json") else inspect_variants(configs(word), step)
                    for word in diff
                ]
                units = dict.fromkeys(("figure", "A", "B", "change", "of A", "of B"), "")
                failed = result_of([row for rows in sides for row in rows], gate=True).failed if gate else []
                found = Result("inspect", units, differences(*sides), failed)
            else:
                specs = spec or specs_of(
                    context, kernel, arch, dtype, head_dim, role, tile, feature, option, full=full, grouped=grouped
                )
                asked = [variant for one in specs for variant in select(one)]
                found = result_of(inspect_variants(asked, step), gate=gate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    finish(found, json, csv)


def specs_of(
    context: typer.Context, kernels: str, archs: str, dtype: str, head_dim: str, roles: str, tiles: str | None,
    features: str | None, options: str | None, *, full: bool, grouped: bool,
) -> list[str]:  # fmt: skip
    """What the flags name, as specs: every combination of the comma lists."""
    found = []
    asked = kernels.split(",")
    if {*asked} <= {*HEARD_BY}:
        heard = {*(word for kernel in asked for word in HEARD_BY[kernel])}
        takes = {"role": "role" in heard, "full": "mask" in heard, "grouped": False}
        refused = {name for name, hears in takes.items() if not hears} | {"tile", "feature", "option"}
        check_mode(context, f"beside --kernel {kernels}", {one.name or "" for one in context.command.params} - refused)
    for arch, kernel, role, tile in product(
        archs.split(","), asked, roles.split(","), tiles.split(",") if tiles else [""]
    ):
        words = {"role": role, "mask": "full" if full else "bounded", "heads": "gqa" if grouped else "mha"}
        heard_words = [word for what, word in words.items() if what in HEARD_BY.get(kernel, words)]
        more = [*(features or "").split(","), *(options or "").split(","), tile]
        parts = [arch, DTYPES.get(dtype, dtype), head_dim, kernel, *heard_words, *filter(None, more)]
        found.append(":".join(parts))
    return [*dict.fromkeys(found)]
