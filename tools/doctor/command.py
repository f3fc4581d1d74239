"""``ringattn doctor``: does this machine, or this job, do what a ring needs; if not, what to do first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench.common.flags import Csv, HeadDim, Heads, Json, KvHeads, count, dtype_name, kv_heads_of

if TYPE_CHECKING:
    from ...comm import LocalGroup
    from .findings import Finding

DEFAULT_WORLD = 4  # virtual ranks, without a launcher
UNITS = {"check": "", "status": "", "found": "", "todo": ""}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    seqlen: Annotated[
        Any, typer.Option(parser=count, metavar="SIZE", help="Tokens in all, of the rings that are computed.")
    ] = "4k",
    heads: Heads = 32,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 128,
    dtype: Annotated[
        str | None,
        typer.Option(parser=dtype_name, metavar="DTYPE", help="bf16, fp16 or fp32; default: bf16 on a GPU."),
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help=f"Virtual ranks, alone; default: {DEFAULT_WORLD}.")] = None,
    nbytes: Annotated[
        Any, typer.Option("--bytes", parser=count, metavar="SIZE", help="Of one timed transfer.")
    ] = "64m",
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Look at libraries, GPUs, links and settings, send checked bytes over every edge by every transport, time them,
    and hold a small ring against the reference. Alone, or under torchrun, srun or mpirun for the real ranks.

    The exit code is 1 where a check fails; the last lines name the first that did, and what to do.
    """
    import torch
    import torch.distributed as dist
    from rich.console import Console

    from ...bench.common.launching import member, process_group, world_of
    from ...bench.common.output import prints
    from ...bench.common.provenance import provenance
    from ...bench.common.result import Result, Row, finish
    from ...comm import LocalWorld
    from .findings import FAIL, Finding, Ranks, closing, error_text
    from .ring import Shape, examine

    place = member()
    size = world_of(place, world, DEFAULT_WORLD)
    if seqlen < size:
        raise typer.BadParameter(f"--seqlen is {seqlen}: {size} ranks need a token each")
    default = "bfloat16" if torch.cuda.is_available() else "float32"
    shape = Shape(seqlen, heads // kv_heads_of(heads, kv_heads), head_dim, dtype or default)
    device = torch.device("cpu") if place is None else place.device
    findings: list[Finding] = []
    ring: dict[str, Any] | None = None

    def record(finding: Finding) -> None:
        findings.append(finding)
        if prints() and json != "-":
            typer.echo(str(finding))

    def examine_here(ranks: Ranks) -> None:
        nonlocal ring
        for finding in examine(ranks, shape, nbytes):
            if not ranks.alone or ranks.rank == 0:
                record(finding)
                ring = None if ranks.ring is None else ranks.ring.to_json()

    with Console(stderr=True).status("examining"):
        if place is None:
            with LocalWorld(size) as virtual:
                device = virtual.device

                def of_virtual_rank(group: LocalGroup) -> None:
                    examine_here(Ranks.of(group, device, alone=True))

                virtual.run(of_virtual_rank)
        else:
            try:
                with process_group(place):
                    assert dist.group.WORLD is not None
                    examine_here(Ranks.of(dist.group.WORLD, device, alone=False))
            except Exception as error:
                todo = "check MASTER_ADDR and MASTER_PORT, and the firewall"
                record(Finding("the ranks meet", FAIL, error_text(error), todo))
    about = provenance(device) | {"device": str(device), "ring": ring}
    notes = closing(findings)
    failed = [f"{one.check}: {one.text}" for one in findings if one.status == FAIL]
    rows: list[Row] = [dict(zip(UNITS, one[: len(UNITS)], strict=True)) for one in findings]
    finish(Result("doctor", UNITS, rows, failed, notes, about), json, csv, text="\n".join(["", *notes]))
