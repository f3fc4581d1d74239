"""``ringattn tune``: the fastest tiles for a model's attention on a GPU; without one, by compiling alone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...bench.common.flags import Causal, device_name, dtype_name, sizes
from ...bench.common.launching import cores
from ...bench.common.output import check_targets, prints
from ...kernels.lookup import Gpu, gpu_of, user_folder
from ...kernels.tables import KERNELS, Point, options_of
from .. import Shape, dealt, gpu_of_arch, grid, shape_of_config, space, tile_text, why_not
from ..models import DEFAULT_DTYPE, SHORT
from .backward import backward_lines
from .ring_command import list_rings, ring_wishes, tune_rings
from .run import ORDERS_OF, Found, Wish, timed_rows, tune
from .shown import bars, finish

BUDGET = 300.0
DEFAULT_ARCH = "sm_90"
HEADS, HEAD_DIM = 32, 128

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads on one GPU; default: 32.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Of q and k, at most 256; default: 128.")] = None,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Head dim of v; default: --head-dim.")] = None,
    from_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Heads, head dims and dtype of a Hugging Face config.json.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(parser=dtype_name, metavar="DTYPE", help="bf16, fp16 or fp32; default: the config's, or bf16."),
    ] = None,
    seqlen: Annotated[Any, typer.Option(parser=sizes, metavar="SIZE,…", help="Tokens on one GPU.")] = "8k,32k",
    causal: Causal = True,
    arch: Annotated[
        str | None, typer.Option(metavar="sm_NN", help="Compile for this one; default: the GPU's, or sm_90.")
    ] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Measure nothing, GPU or not.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print what would be tried, and do nothing.")] = False,
    budget: Annotated[float | None, typer.Option(min=1, help="Seconds on the GPU; default: 300.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Compiling processes; default: the cores.")] = None,
    near: Annotated[
        int | None, typer.Option(min=1, help="So many tiles next to the default's alone, of two passes.")
    ] = None,
    ring: Annotated[
        bool, typer.Option("--ring", help="Tune what all ranks share (transport, chunks, channels) by whole steps.")
    ] = False,
    world: Annotated[
        int | None, typer.Option(min=2, help="With --ring: processes; default: the GPUs, or 2; or the launcher's.")
    ] = None,
    on: Annotated[
        str, typer.Option("--device", help="With --ring: cpu or cuda; default: cuda where there is one.")
    ] = "",
    wire: Annotated[
        str, typer.Option(metavar="bf16,fp8", help="With --ring: also K/V in these, which changes results.")
    ] = "",
    save_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where tables go; default: the user's cache.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per kernel, mask and length.")] = None,
) -> None:
    """Find the tiles of a model's attention: compile every candidate, drop what is not clean, measure the best."""
    if (list_ or not ring) and not prints():
        return  # one GPU, or none: under a launcher rank 0 does it, and the others have nothing to do
    check_targets(json, csv)
    try:
        of_rings = {"--world": world, "--device": on, "--wire": wire}
        of_tiles = {"--arch": arch, "--compile-only": compile_only, "--workers": workers, "--near": near}
        check_mode(ring, of_rings, of_tiles)
        of_runs = {"--compile-only": compile_only, "--budget": budget, "--workers": workers, "--save-dir": save_dir}
        check_say("--list, which does nothing", {**of_runs, "--near": near} if list_ else {})
        check_say("--compile-only, which measures nothing", {"--budget": budget} if compile_only else {})
        seconds = budget or BUDGET
        shape = shape_of(heads, kv_heads, head_dim, value_dim, from_config, SHORT[dtype] if dtype else None)
        folder = save_dir or user_folder()
        if folder is None:
            raise ValueError("--save-dir is not given, and this user has no home to keep a cache in")
        if ring:
            wishes = ring_wishes(shape, seqlen, causal, device_name(on), world, wire, seconds, folder.absolute())
            (list_rings if list_ else tune_rings)(wishes, json, csv)
            return
        gpu, device, why = target(arch, compile_only)
        call = shape, tuple(seqlen), causal, gpu, device, folder.absolute(), seconds, workers or cores()
        wish = Wish(*call) if near is None else Wish(*call, KERNELS, orders_of=0, near=near)
        points = wish.points
        if list_:
            rows = listed(wish)
            finish(f"{counted(wish)}", rows, {"points": [point._asdict() for point in points]}, json, csv)
            return
        if json != "-":
            typer.echo(f"{len(points)} kernels, masks and lengths for {gpu.name}; {why}")
        with bars() as shown:
            found, path = tune(wish, shown)
    except ValueError as error:  # also a table that is refused
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: what is known is kept, and the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    rows = in_one_shape([one.as_row() for one in found])
    timed = [row for one in found for row in timed_rows(one, gpu.arch, shape.heads)]
    report = {"table": path and str(path), "measured": device is not None, "timed": timed}
    finish(summary(found, path), rows, report, json, csv, device)
    if any(one.tile is None for one in found):
        raise typer.Exit(1)


def check_mode(ring: bool, of_rings: dict[str, Any], of_tiles: dict[str, Any]) -> None:
    """Refuse flags of the search that is not asked for.

    Raises:
        ValueError: one of them is given.
    """
    for name, value in (of_tiles if ring else of_rings).items():
        if value and ring:
            raise ValueError(f"{name} is {value}: it is for tiles, which --ring does not search; leave out one of them")
        if value:
            raise ValueError(f"{name} is {value}: it is for rings; add --ring, or leave it out")


def check_say(beside: str, flags: dict[str, Any]) -> None:
    """Refuse what has no say beside another flag.

    Raises:
        ValueError: one of them is given.
    """
    for name, value in flags.items():
        if value:
            raise ValueError(f"{name} is {value}: it has no say beside {beside}; leave out one of them")


def shape_of(
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    config: Path | None,
    dtype: str | None,
) -> Shape:
    """By a config or by flags.

    Raises:
        ValueError: both say it, or what they say is no attention.
    """
    flags = {"--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--value-dim": value_dim}
    if config is not None:
        if given := [name for name, value in flags.items() if value is not None]:
            raise ValueError(f"--from-config says the shape, and so does {', '.join(given)}: leave one of them out")
        return shape_of_config(config, dtype)
    heads, head_dim = heads or HEADS, head_dim or HEAD_DIM
    return Shape(heads, kv_heads or heads, head_dim, value_dim or head_dim, dtype or DEFAULT_DTYPE)


def target(arch: str | None, compile_only: bool) -> tuple[Gpu, torch.device | None, str]:
    """What to tune for, the device to measure on or None, and in words what is done.

    Raises:
        ValueError: ``arch`` is unknown.
    """
    asked = None if arch is None else gpu_of_arch(arch)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    here = None if device is None else gpu_of(device)
    if here is None:
        gpu = asked or gpu_of_arch(DEFAULT_ARCH)
        return gpu, None, "no GPU here: compiled and ranked, nothing is measured, entries are estimates"
    gpu_of_arch(f"sm_{here.arch}")  # a GPU that no tile is known to fit is refused
    if asked is not None and asked.arch != here.arch:
        return asked, None, f"the GPU here is {here.name}, sm_{here.arch}: nothing is measured, entries are estimates"
    if compile_only:
        return asked or here, None, "compiled and ranked, nothing is measured, entries are estimates"
    return here, device, "compiled, then measured"


def listed(wish: Wish) -> list[dict[str, Any]]:
    """A row per candidate, and one per order of the launch that the best are tried in."""
    return [
        {
            "kernel": point.kernel, "dtype": point.dtype, "D": point.head_dim, "Dv": point.head_dim_v,
            "group": point.group, "mask": point.mask, "tokens": point.length, "tile": candidate,
        }
        for point in wish.points
        for candidate in [
            *map(tile_text, space(point, wish.gpu.arch)),
            *(f"best {ORDERS_OF}: {order}" for order in orders_of(point, wish.gpu.arch)),
        ]
    ]  # fmt: skip


def orders_of(point: Point, arch: int) -> list[str]:
    """In words, every other order of a launch: which depends on the point, but hardly on the tile."""
    tile = next(tile for tile in space(point, arch) if not options_of(tile))
    return [tile_text(one).removeprefix(tile_text(tile)).strip() for one in dealt(tile, point, arch)]


def counted(wish: Wish) -> str:
    """How many are tried, and why the others are not."""
    tried, reasons = 0, Counter[str]()
    for point in wish.points:
        for tile in grid(point):
            if (reason := why_not(tile, point, wish.gpu.arch)) is None:
                tried += 1
            else:
                reasons[kind_of(reason)] += 1
    others = "; ".join(f"{count} {kind}" for kind, count in reasons.most_common())
    orders = sum(len(orders_of(point, wish.gpu.arch)) for point in wish.points)
    also = f"; of the best {ORDERS_OF} of each also {orders} orders of a launch" if orders else ""
    return f"{tried} candidates for {wish.gpu.name}{also}" + (f"; not tried: {others}" if others else "")


def kind_of(reason: str) -> str:
    """A reason without its numbers."""
    for word in ("the Hopper forward", "shared memory", "scores per thread", "fp32 values per thread"):
        if word in reason:
            return f"by {word}"
    return "by length"


def without_number(reason: str) -> str:
    """``12 local-memory instructions in a loop`` as the kind of thing that it is."""
    return re.sub(r"^\d+ ", "", reason)


def in_one_shape(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every key: what was not measured has nothing there."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def summary(found: list[Found], path: Path | None) -> str:
    """What failed most, where the answers are, and who takes them."""
    reasons = Counter(without_number(reason) for one in found for reason in one.ranked.dropped.values())
    lines = [f"dropped: {count} x {reason}" for reason, count in reasons.most_common(4)]
    units = {verdict.bound_by.partition(",")[0] for one in found for verdict in one.ranked.verdicts.values()}
    lines += [f"bound: {unit}, at most" for unit in sorted(units)]
    lines += backward_lines(found)
    cut = [one for one in found if one.measured is not None and not one.measured.complete]
    if cut:
        lines.append(f"{len(cut)} of {len(found)} were cut short by --budget; the same command goes on")
    if path is not None:
        lines.append(f"written: {path}")
    if any(one.measured is None for one in found):
        lines.append("estimates serve who asks for them: kernels.default_config(q, v, estimated=True)")
    return "\n".join(lines)
