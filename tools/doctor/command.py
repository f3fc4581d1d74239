"""Command line of ``ringattn doctor``, which checks whether a ring works on this machine or in this job."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench.common.flags import Csv, Json, check_mode, count, dtype_name

if TYPE_CHECKING:
    from ...comm import Group
    from ...comm.topology.topology import Topology
    from .findings import Finding

DEFAULT_WORLD = 4  # virtual ranks without a launcher
MOST_TOKENS = 4096  # tokens of the ring that is compared with the reference, at most
UNITS = {"check": "", "status": "", "found": "", "todo": ""}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    context: typer.Context,
    seqlen: Annotated[
        Any, typer.Option(parser=count, metavar="SIZE", help="Total tokens of the test ring, at most 4k.")
    ] = str(MOST_TOKENS),
    dtype: Annotated[
        str | None,
        typer.Option(parser=dtype_name, metavar="DTYPE", help="bf16, fp16 or fp32; default: bf16 on a GPU."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(min=1, help=f"Virtual ranks without a launcher; default: {DEFAULT_WORLD}.")
    ] = None,
    nbytes: Annotated[
        Any, typer.Option("--bytes", parser=count, metavar="SIZE", help="Bytes of one timed transfer.")
    ] = "64m",
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Check faster kernels on this GPU instead, and adopt those that pass.")
    ] = False,
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Check libraries, GPUs, links and settings, all edges with all transports, and a small ring.

    Every transport sends known bytes over every edge and is timed. A small ring is compared with the reference. Run the
    command alone for virtual ranks, or with torchrun, srun or mpirun for real ranks.

    The exit code is 1 if a check fails. The last lines name the first failure and what to do about it.

    With --adopt, rank 0's GPU runs every kernel that fits it beside the portable kernels. Kernels that are right and
    faster are recorded, and backend="auto" uses them. A kernel that fails does not change the exit code.
    """
    import torch
    import torch.distributed as dist
    from rich.console import Console

    from ...bench.common.flags import resolve_world
    from ...bench.common.output import is_printing_rank
    from ...bench.common.process_group import process_group
    from ...bench.common.provenance import provenance
    from ...bench.common.ranks import launched_rank
    from ...bench.common.result import Result, Row, finish_command
    from ...comm import LocalWorld
    from ...comm.control import open_control
    from .adoption import adopt_kernels
    from .findings import COLUMNS, FAIL, DoctorRanks, Finding, closing_lines, error_text
    from .ring import check_job

    place = launched_rank()
    if adopt:
        check_mode(context, "with --adopt", ("adopt",))
        if is_printing_rank():
            finish_command(adopt_kernels(None if place is None else place.device), json, csv)
        return
    size = resolve_world(world, DEFAULT_WORLD)
    if not size <= seqlen <= MOST_TOKENS:
        raise typer.BadParameter(
            f"--seqlen is {seqlen}: it must be between {size}, one token per rank, and {MOST_TOKENS}"
        )
    dtype = dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    device = torch.device("cpu") if place is None else place.device
    findings: list[Finding] = []
    rings: list[Topology | None] = []

    def record(finding: Finding) -> None:
        findings.append(finding)
        if is_printing_rank() and "-" not in (json, csv):
            typer.echo(str(finding))

    def examine_here(group: Group, *, alone: bool) -> None:
        ranks = DoctorRanks(group, open_control(group).scope("doctor"), device, alone)
        for finding in check_job(ranks, seqlen, dtype, nbytes):
            if not alone or ranks.rank == 0:
                record(finding)
                rings[:] = [ranks.ring]

    with Console(stderr=True).status("checking"):
        if place is None:
            with LocalWorld(size) as virtual:
                device = virtual.device
                virtual.run(partial(examine_here, alone=True))
        else:
            try:
                with process_group(place, device):
                    assert dist.group.WORLD is not None
                    examine_here(dist.group.WORLD, alone=False)
            except Exception as error:
                todo = "check MASTER_ADDR and MASTER_PORT, and the firewall"
                record(Finding("rendezvous", FAIL, error_text(error), todo))
    ring = rings[0].to_json() if rings and rings[0] is not None else None
    about = provenance(device) | {"device": str(device), "ring": ring}
    notes = closing_lines(findings)
    failed = [f"{finding.check}: {finding.text}" for finding in findings if finding.status == FAIL]
    rows: list[Row] = [dict(zip(UNITS, finding, strict=True)) for finding in findings]
    lines = [line for note in notes for line in textwrap.wrap(note, COLUMNS)]
    finish_command(Result("doctor", UNITS, rows, failed, notes, about), json, csv, text="\n".join(["", *lines]))
