"""``ringattn inspect``: any kernel, compiled for any GPU on any machine: what it takes, what bounds its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import triton
import typer
from rich.console import Console
from rich.progress import Progress

from ...bench.common.output import check_targets, prints, write_csv, write_json
from ...bench.common.tables import table
from ...kernels import Tile
from .chips import CHIPS
from .gate import compile_and_ask
from .names import HOPPER, default_tile_of, lacking, options_of_words, select
from .rank import LEAST_CORRELATION, correlations
from .refused import is_report, is_spec, refuse_beside, refuse_unheard
from .report import COMPARED, Row, difference, failed_row, pairs, read_rows, row_of, shown, text
from .variant import ATTENTION, DTYPES, FEATURES, MEMORY_BOUND, ROLES, Variant, launchable

TILE = "QxKxWARPSxSTAGES"
LONG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def one_of(what: str, got: str, known: Sequence[str]) -> str:
    if got not in known:
        raise ValueError(f"{what} is {got!r}: it must be one of {', '.join(known)}")
    return got


def arch_of(word: str) -> int:
    """``sm_90`` or ``90``."""
    return int(one_of("arch", f"sm_{word.removeprefix('sm_')}", [f"sm_{arch}" for arch in CHIPS])[3:])


def head_dims_of(word: str) -> tuple[int, int]:
    """``128`` or ``192/128``: of q and k, and of v."""
    parts = word.split("/")
    if len(parts) > 2 or not all(part.isdecimal() and 1 <= int(part) <= 256 for part in parts):
        raise ValueError(f"head_dim is {word!r}: it must be D or D/Dv, each 1 to 256")
    return int(parts[0]), int(parts[-1])


def tile_of(word: str) -> Tile:
    """``128x64x8x2``: rows of queries and of keys, warps, pipeline stages."""
    parts = word.split("x")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"tile is {word!r}: it must be {TILE}, as 128x64x8x2")
    return Tile(*map(int, parts))


def variants(
    kernels: str, archs: str, dtype: str, head_dim: str, roles: str, tiles: str | None, features: str | None,
    options: str | None, full: bool, grouped: bool,
) -> Iterator[Variant]:  # fmt: skip
    """Every combination of the comma lists; the default tile of each where ``tiles`` is None.

    Raises:
        ValueError: a name that is not known, a tile of no shape, or an option that a kernel does not have.
    """
    short = one_of("dtype", LONG_DTYPES.get(dtype, dtype), list(DTYPES))
    dim, dim_v = head_dims_of(head_dim)
    places = [one_of("role", word, list(ROLES)) for word in roles.split(",")]
    asked = tuple(one_of("feature", word, FEATURES) for word in features.split(",")) if features else ()
    chosen = options_of_words(options.split(",")) if options else ()
    for arch, kernel in product(map(arch_of, archs.split(",")), kernels.split(",")):
        one_of("kernel", kernel, [*ATTENTION, *MEMORY_BOUND, *HOPPER])
        if kernel in MEMORY_BOUND:
            for name, words in (("tile", tiles), ("feature", features), ("option", options)):
                if words:
                    raise ValueError(f"{name} is {words}, and kernel {kernel} takes none: leave out one or the other")
            yield from _memory_bound(kernel, arch, short, dim, dim_v, places, full)
            continue
        direction, hopper = HOPPER.get(kernel, (kernel, ()))
        default = default_tile_of(direction, (*hopper, *chosen), arch, short, max(dim, dim_v))
        if default is None and not tiles:
            raise ValueError(f"kernel {kernel} has no default tile at head dim {head_dim}: pass --tile {TILE}")
        given = map(tile_of, tiles.split(",")) if tiles else [default] if default else []
        for tile, role in product(given, places):
            made = Variant(direction, arch, short, dim, dim_v, tile, role, full, grouped, asked, (*hopper, *chosen))
            if (refusal := lacking(made, made.options)) is not None:
                raise ValueError(refusal)
            yield made


def _memory_bound(
    kernel: str, arch: int, dtype: str, head_dim: int, head_dim_v: int, roles: Sequence[str], full: bool
) -> Iterator[Variant]:
    """Of the sum of dK/dV's parts in these roles; the others have one, and no mask."""
    for variant in launchable(arch, dtype, head_dim, head_dim_v):
        if variant.kernel == kernel and (kernel != "reduce" or (variant.role in roles and variant.full == full)):
            yield variant


def inspect_variant(variant: Variant) -> Row:
    """The row of one variant; where it cannot be compiled or does not fit, its ``problems`` say why and what fits."""
    try:
        row = row_of(variant, *compile_and_ask(variant))
    except Exception as error:  # one that cannot be compiled is a finding, and the others still count
        return failed_row(variant, error)
    if not row["blocks_per_sm"]:
        row["problems"].append(f"does not fit an SM of {row['arch']}{what_fits(variant)}")
    return row


def what_fits(variant: Variant) -> str:
    """The default tile of such a launch, where that is another one and, compiled, does fit."""
    if variant.kernel not in ATTENTION:
        return ""
    widest = max(variant.head_dim, variant.head_dim_v)
    default = default_tile_of(variant.kernel, variant.options, variant.arch, variant.dtype, widest)
    if default in (None, variant.tile):
        return ""
    other = inspect_variant(replace(variant, tile=default))
    return f": {other['tile']} does" if other["blocks_per_sm"] else ""


def inspect_all(asked: Sequence[Variant]) -> list[Row]:
    """Compile one after another, with a bar on a terminal.

    Raises:
        ValueError: under Triton's interpreter there is nothing to compile.
    """
    if not all(isinstance(kernel, triton.runtime.JITFunction) for kernel in ATTENTION.values()):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted and there is nothing to compile; unset it")
    rows = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (prints() and console.is_terminal)) as bar:
        task = bar.add_task("compiling", total=len(asked))
        for variant in asked:
            bar.update(task, description=str(variant))
            rows.append(inspect_variant(variant))
            bar.advance(task)
    return rows


def _rows(word: str, make: Callable[[str], list[Row]]) -> list[Row]:
    """One side of ``--diff``: a report by its file, a config by its spec, or a tile."""
    return read_rows(word) if is_report(word) else inspect_all(configs(word)) if is_spec(word) else make(word)


def named(spec: str) -> list[Variant]:
    """What a spec names: ValueError where that is nothing."""
    found = [*select(spec)]
    if not found:
        raise ValueError(f"spec is {spec!r}: no kernel with such options has a default tile at its head dim")
    return found


def configs(spec: str) -> list[Variant]:
    """Of what a spec names one of each kernel, role, mask and grouping: dK/dV in parts where the spec says so."""
    first: dict[tuple[object, ...], Variant] = {}
    for one in named(spec):
        first.setdefault((one.kernel, one.role, one.full, one.grouped, one.head_dim), one)
    return [*first.values()]


def report(rows: Sequence[Row]) -> str:
    """The table, and below it what is wrong."""
    wrong = [f"{row['variant']}: {'; '.join(row['problems'])}" for row in rows if row["problems"]]
    return "\n".join([table([shown(row) for row in rows]), *wrong])


def differences(before: Sequence[Row], after: Sequence[Row]) -> str:
    """A table per pair."""
    found = []
    for a, b in pairs(before, after):
        title = "\n".join(
            f"{name}: {one['variant']}, Triton {one['triton'] or 'not told'}" for name, one in (("A", a), ("B", b))
        )
        found.append(table(difference(a, b), title=title))
    return "\n\n".join(found)


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
    tile: Annotated[str | None, typer.Option(metavar=TILE, help="Comma list; the default's where left out.")] = None,
    feature: Annotated[str | None, typer.Option(help="Comma list: softcap, alibi, dropout, used, runs.")] = None,
    option: Annotated[
        str | None, typer.Option(metavar="NAME=VALUE,…", help="Fields of KernelConfig: order=longest, pack_gqa=True, …")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="No mask: every query sees every key.")] = False,
    grouped: Annotated[bool, typer.Option("--gqa", help="Several query heads per key head.")] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two tiles, specs or reports by --json, side by side.")
    ] = None,
    correlate: Annotated[
        str | None, typer.Option(metavar="FILE", help="A report whose rows have measured `seconds`: rank correlation.")
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Exit 1 where a variant does not pass.")] = False,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per variant.")] = None,
) -> None:
    """Compile kernels for any GPU, without one, and say what they take and what bounds their main loop.

    Bounds are in percent of the tensor cores' peak. The ceiling assumes that everything overlaps; the bound, that a
    block's warps move in step and only another block fills their gaps.
    """

    def make(tiles: str | None) -> list[Row]:
        if not spec:
            return inspect_all([*variants(kernel, arch, dtype, head_dim, role, tiles, feature, option, full, grouped)])
        return inspect_all([variant for found in [named(name) for name in spec] for variant in found])

    try:
        check_targets(json, csv)
        refuse_beside(context, spec, diff, correlate)
        refuse_unheard(context, kernel)
        if correlate is not None:
            found = correlations(read_rows(correlate), correlate)
            _write(found, table(found), json, csv)
            raise typer.Exit(any(row["correlation"] < LEAST_CORRELATION for row in found))
        if diff is not None:
            before, after = (_rows(word, make) for word in diff)
            _write([*before, *after], differences(before, after), json, csv)
            raise typer.Exit(gate and any(row["problems"] for row in (*before, *after)))
        rows = make(tile)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _write(rows, report(rows), json, csv)
    unfit = not all(row["blocks_per_sm"] for row in rows)
    raise typer.Exit(unfit or (gate and any(row["problems"] for row in rows)))


def _write(rows: Sequence[Row], told: str, json: str | None, csv: Path | None) -> None:
    if not prints():
        return
    if json != "-":
        typer.echo(told)
    if json is not None:
        write_json(json, {"triton": triton.__version__, "rows": list(rows)})
    if csv is not None:
        keys: dict[str, Any] = dict.fromkeys(
            ["variant", "triton", *COMPARED] if rows and "variant" in rows[0] else rows[0]
        )
        write_csv(csv, [{key: text(row[key]) for key in keys} for row in rows])
