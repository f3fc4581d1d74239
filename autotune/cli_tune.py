"""Command line of ``ringattn tune``, which finds the fastest tiles for a model's attention on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common.flags import (
    Causal,
    Csv,
    Json,
    check_folder,
    check_mode,
    check_needs,
    dtype_name,
    parse_device_kind,
    sizes,
)

if TYPE_CHECKING:
    import torch

    from ..kernels.gpu import GpuSpec

BUDGET = 300.0
DEFAULT_ARCH = "sm_90"
RING_FLAGS = ("ring", "world", "on")
MODEL_FLAGS = ("heads", "kv_heads", "head_dim", "value_dim", "dtype", "seqlen", "causal", "budget", "save_dir")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tune_command(
    context: typer.Context,
    heads: Annotated[int, typer.Option(min=1, help="Query heads on one GPU.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim of q and k, at most 512.")] = 128,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Head dim of v; default: --head-dim.")] = None,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="bf16, fp16 or fp32.")] = "bfloat16",
    seqlen: Annotated[Any, typer.Option(parser=sizes, metavar="SIZE,…", help="Tokens on one GPU.")] = "8k,32k",
    causal: Causal = True,
    arch: Annotated[
        str | None, typer.Option(metavar="sm_NN", help="Compute capability; default: that of the GPU, or sm_90.")
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="forward, dq, dkdv, single_pass (also with the suffix _deterministic); default: all.",
        ),
    ] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Only compile, even with a GPU.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds to measure, default 300; if nothing is measured, seconds to compile, default: no limit.",
        ),
    ] = None,
    tiles: Annotated[
        int | None,
        typer.Option(min=1, help="Try only this many tiles per two-pass kernel, those nearest to the built-in tile."),
    ] = None,
    ring: Annotated[
        bool, typer.Option("--ring", help="Tune the settings of the ring (transport, chunks, channels) instead.")
    ] = False,
    world: Annotated[
        int | None,
        typer.Option(min=2, help="With --ring: processes; default: the launcher's, else one per GPU, at least 2."),
    ] = None,
    on: Annotated[
        str, typer.Option("--device", help="With --ring: cpu or cuda; default: cuda if there is a GPU.")
    ] = "",
    save_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the tables; default: the user's cache.")
    ] = None,
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Find the fastest tiles for a model's attention: compile all candidates, drop those that spill, measure the best.

    Without a GPU the candidates are compiled and ranked by their throughput bound.
    """
    check_needs(context, {"world": "ring", "on": "ring"})
    if ring:
        check_mode(context, "with --ring", (*MODEL_FLAGS, *RING_FLAGS))

    from ..bench.common.output import is_printing_rank
    from ..bench.common.ranks import cores
    from ..bench.common.result import finish_command
    from ..kernels.tables import KERNELS, TUNED_KERNELS, user_table_folder
    from .tile_space import SHORT_DTYPE_NAMES, ModelShape

    if not ring and not is_printing_rank():
        return  # tuning needs one process, so under a launcher only rank 0 works
    try:
        shape = ModelShape(heads, kv_heads or heads, head_dim, value_dim or head_dim, SHORT_DTYPE_NAMES[dtype])
        folder = save_dir or user_table_folder()
        if folder is None:
            raise ValueError(
                "--save-dir is not given, and this user has no home folder for a cache. Pass --save-dir DIR"
            )
        folder = folder.absolute()
        if is_printing_rank():
            check_folder("--save-dir", folder)
        if ring:
            from .ring_search import ring_problems, tune_rings

            problems = ring_problems(shape, seqlen, causal, parse_device_kind(on), world)
            result = tune_rings(problems, budget or BUDGET, folder)
        else:
            from ..bench.common.progress import progress
            from .tune import TuneConfig, tune

            gpu, device, mode = resolve_target(arch, compile_only)
            names = tuple(kernels.split(",")) if kernels else KERNELS if tiles is not None else TUNED_KERNELS
            for name in names:
                if name not in TUNED_KERNELS:
                    raise ValueError(f"--kernels has {name!r}: each must be one of {', '.join(TUNED_KERNELS)}")
            seconds = budget or (BUDGET if device is not None else float("inf"))
            config = TuneConfig(shape, tuple(seqlen), causal, gpu, device, folder, seconds, names, tiles)
            if "-" not in (json, csv):
                typer.echo(f"{len(config.points)} combinations of kernel, mask and length for {gpu.name}; {mode}")
            with progress() as step:
                result = tune(config, cores(), step)
    except ValueError as error:  # includes RefusedTable
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; finished results are saved", err=True)
        raise typer.Exit(130) from None
    finish_command(result, json, csv)


def resolve_target(arch: str | None, compile_only: bool) -> tuple[GpuSpec, torch.device | None, str]:
    """Return (GPU to tune for, device to measure on, description). The device is None if nothing is measured.

    Raises:
        ValueError: ``arch`` is unknown, or the GPU of this machine is not supported.
    """
    import torch

    from ..kernels.gpu import arch_name, gpu_specs
    from .tile_space import gpu_for_arch

    named = None if arch is None else gpu_for_arch(arch)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    local_gpu = None if device is None else gpu_specs(device)
    estimates = "nothing is measured, so the tables get estimates"
    if local_gpu is None:
        return named or gpu_for_arch(DEFAULT_ARCH), None, f"no GPU on this machine: {estimates}"
    gpu_for_arch(arch_name(local_gpu.arch))  # raises for an unsupported GPU
    if named is not None and named.arch != local_gpu.arch:
        return named, None, f"the GPU of this machine is {local_gpu.name}, {arch_name(local_gpu.arch)}: {estimates}"
    if compile_only:
        return named or local_gpu, None, f"--compile-only: {estimates}"
    return local_gpu, device, "candidates are compiled, then measured"
