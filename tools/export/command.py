"""Command line of ``ringattn export``, which compiles kernels for C and C++ frameworks without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench.common.flags import Json, check_folder, check_needs, dtype_name

if TYPE_CHECKING:
    from .config import ExportConfig
    from .kernels import ExportedKernel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def write_export(config: ExportConfig, kernels: list[ExportedKernel], folder: Path) -> dict[str, Any]:
    """Write cubins, header, launcher, licence and manifest into ``folder``, and return the manifest."""
    import hashlib

    from ...bench.common.output import write_file, write_json
    from .c import render_template
    from .kernels import manifest

    files = {f"{config.prefix}_{kernel.name}.cubin": kernel.cubin for kernel in kernels}
    files[f"{config.prefix}.h"] = render_template("header.h.j2", config, kernels).encode()
    files[f"{config.prefix}.c"] = render_template("launcher.c.j2", config, kernels).encode()
    files["LICENSE"] = (Path(__file__).parents[2] / "kernels" / "LICENSE").read_bytes()
    for name, content in files.items():
        write_file(folder / name, content)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    data = manifest(config, kernels, hashes)
    write_json(folder / f"{config.prefix}.json", data)
    return data


@app.command()
def main(
    context: typer.Context,
    arch: Annotated[str, typer.Option(metavar="sm_NN", help="Compute capability to compile for.")],
    # at least 2, because with head dim 1 a stride is 1, which Triton compiles as a constant
    head_dim: Annotated[int, typer.Option(min=2, max=256, help="Head dim of q and k.")] = 128,
    value_dim: Annotated[int | None, typer.Option(min=2, max=256, help="Head dim of v; default: --head-dim.")] = None,
    dtype: Annotated[
        str, typer.Option(parser=dtype_name, metavar="DTYPE", help="Dtype of q, k, v and out: bf16, fp16 or fp32.")
    ] = "bfloat16",
    causal: Annotated[
        bool,
        typer.Option(
            "--causal", help="Compile kernels that take an interval of keys per query, for causal and other masks."
        ),
    ] = False,
    grouped: Annotated[
        bool, typer.Option(help="Support any number of query heads per key head; --no-grouped: exactly one.")
    ] = True,
    role: Annotated[str, typer.Option(help="Role of the launch in a ring: only, first, middle or last.")] = "only",
    forward_kernel: Annotated[str, typer.Option(help="portable or hopper.")] = "portable",
    backward: Annotated[
        str,
        typer.Option(help="two_pass (kernels dq, dkdv), single_pass (also with the suffix _deterministic) or hopper."),
    ] = "two_pass",
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Use the tiles tuned for this GPU, such as 'NVIDIA H200'; default: built-in tiles."
        ),
    ] = None,
    config_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the table written by `ringattn tune`; default: as for launches."),
    ] = None,
    out_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path("ringattn-export"),
    json: Json = None,
) -> None:
    """Write attention kernels, forward and backward, as cubins with a C header, a C launcher and a manifest."""
    check_needs(context, {"config_dir": "gpu"})

    from ...autotune.tile_space import SHORT_DTYPE_NAMES, gpu_for_arch
    from ...bench.common.output import is_printing_rank, write_json
    from .config import ExportConfig, chosen_tiles
    from .kernels import export

    kernels = []
    try:
        config = ExportConfig(
            gpu_for_arch(f"sm_{arch.removeprefix('sm_')}").arch, SHORT_DTYPE_NAMES[dtype], head_dim,
            value_dim or head_dim, causal, grouped, role, forward_kernel, backward, gpu, config_dir,
        )  # fmt: skip
        if is_printing_rank():
            check_folder("--out-dir", out_dir)
        for name in config.kernels:
            kernels.append(kernel := export(config, name))
            if is_printing_rank() and json != "-":
                origin = chosen_tiles(config)[name][1]
                sizes = f"{len(kernel.arguments)} arguments, {kernel.shared} bytes of shared memory"
                print(f"{name:<9} {sizes}; tile: {origin}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not is_printing_rank():
        return
    data = write_export(config, kernels, out_dir)
    if json is not None:
        write_json(json, data)
    if json != "-":
        print(f"wrote {len(data['sha256']) + 1} files to {out_dir}; the header lists the alignment of all arguments")
