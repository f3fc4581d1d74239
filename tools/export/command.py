"""``ringattn export``: kernels as a C++ framework links them, compiled on any machine."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ...autotune.inspect.compiled import SHARED_LIMIT
from ...autotune.models import SHORT
from ...bench.common.flags import dtype_name, size
from ...bench.common.output import check_targets, prints, write_file, write_json
from .kernels import Exported, export
from .manifest import LICENCE, manifest
from .text import header, launcher
from .tiles import Source
from .wish import Wish, chosen_tiles, settled

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Role(StrEnum):
    """Those of ``variant.ROLES``, for typer to list."""

    only = "only"
    first = "first"
    middle = "middle"
    last = "last"


class ForwardKernel(StrEnum):
    """Those of ``KernelConfig.forward_kernel``."""

    portable = "portable"
    hopper = "hopper"


class Backward(StrEnum):
    """Those of ``KernelConfig.backward``."""

    two_pass = "two_pass"
    single_pass = "single_pass"
    single_pass_deterministic = "single_pass_deterministic"
    hopper = "hopper"


def arch_of(text: str) -> int:
    """``sm_90`` as 90; a parser of typer options.

    Raises:
        typer.BadParameter: a GPU that the kernels are not compiled for.
    """
    number = text.strip().lower().removeprefix("sm_")
    if not number.isdigit() or int(number) not in SHARED_LIMIT:
        raise typer.BadParameter(f"{text!r}: it must be one of {', '.join(f'sm_{arch}' for arch in SHARED_LIMIT)}")
    return int(number)


def written(wish: Wish, kernels: list[Exported], folder: Path) -> dict[str, Any]:
    """Write cubins, header, launcher, licence and manifest into ``folder``; the manifest."""
    files = {f"{wish.prefix}_{kernel.name}.cubin": kernel.cubin for kernel in kernels}
    files[f"{wish.prefix}.h"] = header(wish, kernels, LICENCE).encode()
    files[f"{wish.prefix}.c"] = launcher(wish, kernels, LICENCE).encode()
    files["LICENSE"] = (Path(__file__).parents[2] / "kernels" / "LICENSE").read_bytes()
    for name, content in files.items():
        write_file(folder / name, content)
    made = manifest(wish, kernels, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
    write_json(folder / f"{wish.prefix}.json", made)
    return made


@app.command()
def main(
    arch: Annotated[int, typer.Option(parser=arch_of, metavar="ARCH", help="Of the GPU, as sm_90.")],
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Of queries and keys.")] = 128,
    value_dim: Annotated[
        int | None, typer.Option("--value-dim", "--head-dim-v", min=1, max=256, help="Of values; default: the same.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(parser=dtype_name, metavar="DTYPE", help="Of q, k, v and out: bf16, fp16 or fp32.")
    ] = "bfloat16",
    causal: Annotated[
        bool, typer.Option("--causal", help="With an interval of keys per query: this mask, and every other one.")
    ] = False,
    grouped: Annotated[bool, typer.Option(help="Any number of query heads per key head, or always one.")] = True,
    role: Annotated[Role, typer.Option(help="What a launch continues and leaves, in a ring of several.")] = Role.only,
    forward_kernel: Annotated[
        ForwardKernel | None, typer.Option(help="Of KernelConfig; default: the tuned table's, else portable.")
    ] = None,
    backward: Annotated[Backward, typer.Option(help="Of KernelConfig: dq and dkdv, or both at once.")] = (
        Backward.two_pass
    ),
    config_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Tiles of a table that `ringattn tune` wrote there; default: $RINGATTN_CONFIG_DIR."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Tiles of this GPU's table, 'NVIDIA H200'; default: the only one in DIR, else built-in ones.",
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=1, help="Query heads per key head that the tiles were tuned for.")
    ] = None,
    seqlen: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help="Tokens that the tiles were tuned for; default: the most.")
    ] = None,
    estimated: Annotated[bool, typer.Option("--estimated", help="Also tiles that were never timed.")] = False,
    out_dir: Annotated[Path, typer.Option(file_okay=False, help="Folder for the files.")] = Path("ringattn-export"),
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="The manifest as JSON.")] = None,
) -> None:
    """Write cubins, a C header and launcher, and a manifest of attention kernels, forward and backward."""
    check_targets(json_to)
    chosen = forward_kernel and forward_kernel.value
    kernels = []
    try:
        source = Source(gpu, config_dir, group, seqlen, estimated)
        wish = settled(Wish(
            arch, SHORT[dtype], head_dim, value_dim or head_dim, causal, grouped, role.value, source, chosen,
            backward.value,
        ))  # fmt: skip
        for name in wish.kernels:
            kernels.append(export(wish, name))
            if prints() and json_to != "-":
                one = kernels[-1]
                whence = chosen_tiles(wish)[name][1]
                print(f"{name:<9} {len(one.arguments)} arguments, {one.shared} bytes of shared memory; tile: {whence}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not prints():
        return
    made = written(wish, kernels, out_dir)
    if json_to is not None:
        write_json(json_to, made)
    if json_to != "-":
        print(
            f"wrote {len(made['sha256']) + 1} files to {out_dir}; the header says how pointers and strides are aligned"
        )
