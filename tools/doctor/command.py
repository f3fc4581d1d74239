"""``ringattn doctor``: does this machine, or this job, do what a ring needs; if not, what to do first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.status import Status

from ...bench.common.flags import dtype_name, kv_heads_of, size
from ...bench.common.launching import Member, member, process_group, world_of
from ...bench.common.output import check_targets, prints, write_csv, write_json
from ...bench.common.provenance import provenance
from ...comm import Group, LocalGroup, LocalWorld
from ...comm.control import control_of
from ...comm.topology import nvml
from ...comm.topology.topology import Topology, ring_topology
from .findings import FAIL, Finding, Ranks, closing, first_failure, told
from .links import transports
from .machine import Facts, facts, machine
from .ring import Shape, against_reference, wires

SCHEMA = "ringattn doctor 1"
DEFAULT_WORLD = 4  # virtual ranks, without a launcher
TRY_AGAIN = (
    "a rank stopped answering: look at its own output, above; run again with fewer ranks to find which host it is"
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Report:
    """What has been found so far; rank 0 prints each finding as it comes."""

    def __init__(self, *, prints: bool) -> None:
        self.findings: list[Finding] = []
        self.ring: Topology | None = None
        self.device: torch.device | None = None
        self.prints = prints

    def tell(self, finding: Finding) -> None:
        """One more check is over."""
        self.findings.append(finding)
        if self.prints:
            typer.echo(str(finding))

    def as_json(self) -> dict[str, Any]:
        first = first_failure(self.findings)
        device = self.device or torch.device("cpu")
        return {
            "schema": SCHEMA,
            "provenance": provenance(device),
            "device": str(device),
            "world": None if self.ring is None else self.ring.world,
            "topology": None if self.ring is None else self.ring.to_json(),
            "findings": [finding.as_json() for finding in self.findings],
            "first_failure": None if first is None else first.row(),
        }


def examine(ranks: Ranks, own: Facts, shape: Shape, nbytes: int, report: Report, doing: Callable[[str], None]) -> None:
    """All checks, on every rank together; the report of each rank has the findings of all."""
    report.device = ranks.device
    try:
        everyone = [Facts(**one) for one in ranks.together("versions and settings", lambda: asdict(own))]
        report.ring = ring = ring_topology(nvml.places_of(ranks.control, ranks.device))
        for finding in machine(everyone, ring, ranks.device):
            report.tell(finding)
        doing("sending patterned bytes over every edge")
        transports(ranks, ring, nbytes, report.tell)
        doing("computing a small ring, and the same in float64")
        report.tell(against_reference(ranks, shape))
        doing("trying the wire dtypes")
        for finding in wires(ranks, shape):
            report.tell(finding)
    except Exception as error:  # no answer from a rank: nothing that follows could be agreed on
        report.tell(Finding("all ranks answer", FAIL, told(error), TRY_AGAIN))


def between_processes(place: Member, own: Facts, shape: Shape, nbytes: int, report: Report, doing: Any) -> None:
    """One rank of a launcher's."""
    try:
        with process_group(place):
            group = dist.group.WORLD
            assert group is not None
            ranks = ranks_of(group, place.device, alone=False)
            examine(ranks, own, shape, nbytes, report, doing)
            # the launcher ends the others when one exits: not before rank 0 has come to its end too
            ranks.together("the end of the examination", lambda: None)
    except Exception as error:
        report.tell(Finding("the ranks meet", FAIL, told(error), "check MASTER_ADDR and MASTER_PORT, and the firewall"))


def in_process(world: int, own: Facts, shape: Shape, nbytes: int, report: Report, doing: Any) -> None:
    """Virtual ranks of one device."""
    with LocalWorld(world) as virtual:

        def run(group: LocalGroup) -> None:
            ranks = ranks_of(group, virtual.device, alone=True)
            examine(ranks, own, shape, nbytes, report if group.rank() == 0 else Report(prints=False), doing)

        virtual.run(run)


def ranks_of(group: Group, device: torch.device, *, alone: bool) -> Ranks:
    """The ranks of a group."""
    return Ranks(group, control_of(group).scope("doctor"), device, alone)


@app.command()
def doctor(
    seqlen: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help="Tokens in all, for the wire dtypes.")
    ] = "4k",
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 128,
    dtype: Annotated[
        str | None,
        typer.Option(parser=dtype_name, metavar="DTYPE", help="bf16, fp16 or fp32; default: bf16 on a GPU."),
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help=f"Virtual ranks, alone; default: {DEFAULT_WORLD}.")] = None,
    nbytes: Annotated[Any, typer.Option("--bytes", parser=size, metavar="SIZE", help="Of one timed transfer.")] = "64m",
    ring_seqlen: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help="Tokens of the ring that is held against the reference.")
    ] = "4k",
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per check.")] = None,
) -> None:
    """Look at libraries, GPUs, links and settings, send checked bytes over every edge by every transport, time them,
    and hold a small ring against the reference. Alone, or under torchrun, srun or mpirun for the real ranks.

    The exit code is 1 where a check fails; the last lines name the first that did, and what to do.
    """
    place = member()
    count = world_of(place, world, DEFAULT_WORLD)
    for name, tokens in (("--seqlen", seqlen), ("--ring-seqlen", ring_seqlen)):
        if tokens < count:
            raise typer.BadParameter(f"{name} is {tokens}: {count} ranks need a token each")
    if nbytes < 1:
        raise typer.BadParameter(f"--bytes is {nbytes}: it must be at least 1")
    check_targets(json, csv)
    shape = Shape(seqlen, heads, kv_heads_of(heads, kv_heads), head_dim, dtype or default_dtype(), ring_seqlen)
    report = Report(prints=prints() and json != "-")
    with Status("looking around", console=Console(stderr=True)) as status:
        doing = status.update if prints() else lambda _: None
        own = facts()
        if place is None:
            in_process(count, own, shape, nbytes, report, doing)
        else:
            between_processes(place, own, shape, nbytes, report, doing)
    finish(report, json, csv)


def default_dtype() -> str:
    return "bfloat16" if torch.cuda.is_available() else "float32"


def finish(report: Report, json: str | None, csv: Path | None) -> None:
    """Print the end and write; exit 1 where a check failed."""
    if report.prints:
        typer.echo(closing(report.findings))
    if prints() and json is not None:
        write_json(json, report.as_json())
    if prints() and csv is not None:
        write_csv(csv, [finding.row() for finding in report.findings])
    if first_failure(report.findings) is not None:
        raise typer.Exit(1)
