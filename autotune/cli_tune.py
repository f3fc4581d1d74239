"""``ringattn tune``: the fastest tiles for a model's attention on a GPU; without one, by compiling alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common.flags import Causal, Csv, Json, check_mode, check_needs, device_name, dtype_name, sizes

if TYPE_CHECKING:
    import torch

    from ..kernels.tables import Gpu
    from .model import Shape

BUDGET = 300.0
DEFAULT_ARCH = "sm_90"
HEADS, HEAD_DIM = 32, 128

SHAPE = ("heads", "kv_heads", "head_dim", "value_dim")
MODEL = (*SHAPE, "from_config", "dtype", "seqlen", "causal")
RINGS = ("ring", "world", "on", "wire")
TILES = (*MODEL, "arch", "kernels", "budget", "workers", "near", "save_dir", "compile_only")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    context: typer.Context,
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
    kernels: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Of forward, dq, dkdv, single_pass, single_pass_deterministic; all."),
    ] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Measure nothing, GPU or not.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print what would be tried, and do nothing.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds on the GPU, default 300; where nothing is measured, to compile, all."),
    ] = None,
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
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Find the tiles of a model's attention: compile every candidate, drop what is not clean, measure the best."""
    check_needs(context, {"world": "ring", "on": "ring", "wire": "ring"})
    if list_:
        check_mode(context, "beside --list", (*MODEL, "arch", "kernels", "near", *RINGS), ("list_",))
    if ring:
        check_mode(context, "with --ring", (*MODEL, *RINGS, "budget", "save_dir"), ("list_",))
    if from_config is not None:
        check_mode(context, "beside --from-config", (*{*TILES, *RINGS} - {*SHAPE}, "list_"))

    from ..bench.common.launching import cores
    from ..bench.common.output import prints
    from ..bench.common.result import finish
    from ..kernels.strict import one_of
    from ..kernels.tables import KERNELS, TUNED, user_folder

    if (list_ or not ring) and not prints():
        return  # one GPU, or none: under a launcher rank 0 does it, and the others have nothing to do
    try:
        shape = shape_of(heads, kv_heads, head_dim, value_dim, from_config, dtype)
        folder = save_dir or user_folder()
        if folder is None:
            raise ValueError("--save-dir is not given, and this user has no home to keep a cache in")
        folder = folder.absolute()
        if ring:
            from .ring_search import candidates as ring_candidates
            from .ring_search import configs_of, tune_rings

            rings = configs_of(shape, seqlen, causal, device_name(on), world, wire, budget or BUDGET, folder)
            found = ring_candidates(rings) if list_ else tune_rings(rings)
        else:
            from .tune import SCHEDULES_OF, TuneConfig, candidates, progress, tune

            gpu, device, why = target(arch, compile_only)
            names = tuple(kernels.split(",")) if kernels else KERNELS if near is not None else TUNED
            for name in names:
                if (needs := one_of(*TUNED)(name)) is not None:
                    raise ValueError(f"--kernels has {name!r}: it must be {needs}")
            seconds = budget or (BUDGET if device is not None else float("inf"))
            config = TuneConfig(
                shape, tuple(seqlen), causal, gpu, device, folder, seconds, workers or cores(), names,
                SCHEDULES_OF if near is None else 0, near,
            )  # fmt: skip
            if list_:
                found = candidates(config)
            else:
                if json != "-":
                    typer.echo(f"{len(config.points)} kernels, masks and lengths for {gpu.name}; {why}")
                with progress() as step:
                    found = tune(config, step)
    except ValueError as error:  # also a table that is refused
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: what is known is kept, and the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    finish(found, json, csv)


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
        ValueError: what they say is no attention.
    """
    from .model import DEFAULT_DTYPE, SHORT, Shape, shape_of_config

    short = SHORT[dtype] if dtype else None
    if config is not None:
        return shape_of_config(config, short)
    heads, head_dim = heads or HEADS, head_dim or HEAD_DIM
    return Shape(heads, kv_heads or heads, head_dim, value_dim or head_dim, short or DEFAULT_DTYPE)


def target(arch: str | None, compile_only: bool) -> tuple[Gpu, torch.device | None, str]:
    """What to tune for, the device to measure on or None, and in words what is done.

    Raises:
        ValueError: ``arch`` is unknown.
    """
    import torch

    from ..kernels.tables import gpu_of
    from .model import gpu_of_arch

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
