"""``ringattn export``: kernels as a C++ framework links them, compiled on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench.common.flags import Json, check_folder, check_needs, dtype_name

if TYPE_CHECKING:
    from .config import ExportConfig
    from .kernels import Exported

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def write(config: ExportConfig, kernels: list[Exported], folder: Path) -> dict[str, Any]:
    """Write cubins, header, launcher, licence and manifest into ``folder``; the manifest."""
    import hashlib

    from ...bench.common.output import write_file, write_json
    from .c import rendered
    from .kernels import manifest

    files = {f"{config.prefix}_{kernel.name}.cubin": kernel.cubin for kernel in kernels}
    files[f"{config.prefix}.h"] = rendered("header.h.j2", config, kernels).encode()
    files[f"{config.prefix}.c"] = rendered("launcher.c.j2", config, kernels).encode()
    files["LICENSE"] = (Path(__file__).parents[2] / "kernels" / "LICENSE").read_bytes()
    for name, content in files.items():
        write_file(folder / name, content)
    made = manifest(config, kernels, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
    write_json(folder / f"{config.prefix}.json", made)
    return made


@app.command()
def main(
    context: typer.Context,
    arch: Annotated[str, typer.Option(metavar="sm_NN", help="The GPU to compile for.")],
    # from 2 on: the stride of heads of one element is 1, which Triton makes a constant
    head_dim: Annotated[int, typer.Option(min=2, max=256, help="Of queries and keys.")] = 128,
    value_dim: Annotated[int | None, typer.Option(min=2, max=256, help="Of values; default: the same.")] = None,
    dtype: Annotated[
        str, typer.Option(parser=dtype_name, metavar="DTYPE", help="Of q, k, v and out: bf16, fp16 or fp32.")
    ] = "bfloat16",
    causal: Annotated[
        bool, typer.Option("--causal", help="With an interval of keys per query: this mask, and every other one.")
    ] = False,
    grouped: Annotated[bool, typer.Option(help="Any number of query heads per key head, or always one.")] = True,
    role: Annotated[
        str, typer.Option(help="What a launch continues and leaves, in a ring: only, first, middle or last.")
    ] = "only",
    forward_kernel: Annotated[str, typer.Option(help="portable or hopper.")] = "portable",
    backward: Annotated[
        str, typer.Option(help="two_pass (dq and dkdv); or at once: single_pass (or it with _deterministic), hopper.")
    ] = "two_pass",
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Tiles of this GPU's tuned table, 'NVIDIA H200'; default: built-in ones."),
    ] = None,
    config_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where `ringattn tune` wrote that table; default: where a launch looks."),
    ] = None,
    out_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path("ringattn-export"),
    json: Json = None,
) -> None:
    """Write cubins, a C header and launcher, and a manifest of attention kernels, forward and backward."""
    check_needs(context, {"config_dir": "gpu"})

    from ...autotune.space import SHORT, gpu_for_arch
    from ...bench.common.output import prints, write_json
    from .config import ExportConfig, chosen_tiles
    from .kernels import export

    kernels = []
    try:
        config = ExportConfig(
            gpu_for_arch(f"sm_{arch.removeprefix('sm_')}").arch, SHORT[dtype], head_dim, value_dim or head_dim, causal,
            grouped, role, forward_kernel, backward, gpu, config_dir,
        )  # fmt: skip
        if prints():
            check_folder("--out-dir", out_dir)
        for name in config.kernels:
            kernels.append(one := export(config, name))
            if prints() and json != "-":
                whence = chosen_tiles(config)[name][1]
                print(f"{name:<9} {len(one.arguments)} arguments, {one.shared} bytes of shared memory; tile: {whence}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not prints():
        return
    made = write(config, kernels, out_dir)
    if json is not None:
        write_json(json, made)
    if json != "-":
        print(
            f"wrote {len(made['sha256']) + 1} files to {out_dir}; the header says how pointers and strides are aligned"
        )
