"""``ringattn doctor``: does this machine, or this job, do what a ring needs; if not, what to do first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench.common.flags import Csv, HeadDim, Heads, Json, KvHeads, count, dtype_name, kv_heads_of

if TYPE_CHECKING:
    from ...comm import Group, LocalGroup
    from ...comm.topology.topology import Topology
    from .findings import Finding
    from .machine import Facts
    from .ring import Shape

DEFAULT_WORLD = 4  # virtual ranks, without a launcher
UNITS = {"check": "", "status": "", "found": "", "todo": ""}
TRY_AGAIN = (
    "a rank stopped answering: look at its own output, above; run again with fewer ranks to find which host it is"
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    seqlen: Annotated[
        Any, typer.Option(parser=count, metavar="SIZE", help="Tokens in all, for the wire dtypes.")
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
    ring_seqlen: Annotated[
        Any, typer.Option(parser=count, metavar="SIZE", help="Tokens of the ring that is held against the reference.")
    ] = "4k",
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Look at libraries, GPUs, links and settings, send checked bytes over every edge by every transport, time them,
    and hold a small ring against the reference. Alone, or under torchrun, srun or mpirun for the real ranks.

    The exit code is 1 where a check fails; the last lines name the first that did, and what to do.
    """
    import torch
    from rich.console import Console

    from ...bench.common.launching import member, world_of
    from ...bench.common.output import prints
    from ...bench.common.provenance import provenance
    from ...bench.common.result import Result, finish
    from ...comm import LocalWorld
    from .findings import FAIL, closing
    from .machine import facts
    from .ring import Shape

    place = member()
    size = world_of(place, world, DEFAULT_WORLD)
    for name, tokens in (("--seqlen", seqlen), ("--ring-seqlen", ring_seqlen)):
        if tokens < size:
            raise typer.BadParameter(f"{name} is {tokens}: {size} ranks need a token each")
    usual = "bfloat16" if torch.cuda.is_available() else "float32"
    shape = Shape(seqlen, heads, kv_heads_of(heads, kv_heads), head_dim, dtype or usual, ring_seqlen)
    exam = Examination(shape, nbytes, facts(), prints=prints() and json != "-")
    with Console(stderr=True).status("looking around") as status:
        exam.doing = status.update if prints() else exam.doing
        if place is not None:
            exam.between_processes(place)
        else:
            with LocalWorld(size) as virtual:
                virtual.run(partial(exam.of_virtual_rank, device=virtual.device))
    about = provenance(exam.device or torch.device("cpu"))
    about |= {"device": str(exam.device), "ring": None if exam.ring is None else exam.ring.to_json()}
    notes = closing(exam.findings)
    failed = [f"{one.check}: {one.text}" for one in exam.findings if one.status == FAIL]
    result = Result("doctor", UNITS, [one.row for one in exam.findings], failed, notes, about)
    finish(result, json, csv, text="\n".join(["", *notes]))


@dataclass
class Examination:
    """All checks, on every rank together; rank 0 prints each finding as it comes."""

    shape: Shape
    nbytes: int
    own: Facts
    prints: bool
    doing: Callable[[str], None] = lambda _: None
    findings: list[Finding] = field(default_factory=list)
    ring: Topology | None = None
    device: Any = None

    def tell(self, finding: Finding) -> None:
        """One more check is over."""
        self.findings.append(finding)
        if self.prints:
            typer.echo(str(finding))

    def between_processes(self, place: Any) -> None:
        """One rank of a launcher's."""
        import torch.distributed as dist

        from ...bench.common.launching import process_group
        from .findings import FAIL, Finding, told

        try:
            with process_group(place):
                group = dist.group.WORLD
                assert group is not None
                self.examine(group, place.device, alone=False)
        except Exception as error:
            todo = "check MASTER_ADDR and MASTER_PORT, and the firewall"
            self.tell(Finding("the ranks meet", FAIL, told(error), todo))

    def of_virtual_rank(self, group: LocalGroup, device: Any) -> None:
        """One of several on one device; the findings are those of rank 0."""
        mine = self if group.rank() == 0 else Examination(self.shape, self.nbytes, self.own, prints=False)
        mine.examine(group, device, alone=True)

    def examine(self, group: Group, device: Any, *, alone: bool) -> None:
        """Every check; each rank has the findings of all."""
        from ...comm.control import control_of
        from ...comm.topology.topology import device_infos, ring_topology
        from .findings import FAIL, Finding, Ranks, told
        from .links import transports
        from .machine import Facts, machine
        from .ring import against_reference, wires

        ranks = Ranks(group, control_of(group).scope("doctor"), device, alone)
        self.device = device
        try:
            everyone = [Facts(**one) for one in ranks.together("versions and settings", lambda: asdict(self.own))]
            self.ring = ring_topology(device_infos(ranks.control, device))
            for finding in machine(everyone, self.ring, device):
                self.tell(finding)
            self.doing("sending patterned bytes over every edge")
            transports(ranks, self.ring, self.nbytes, self.tell)
            self.doing("computing a small ring, and the same in float64")
            self.tell(against_reference(ranks, self.shape))
            self.doing("trying the wire dtypes")
            for finding in wires(ranks, self.shape):
                self.tell(finding)
        except Exception as error:  # no answer from a rank: nothing that follows could be agreed on
            self.tell(Finding("all ranks answer", FAIL, told(error), TRY_AGAIN))
        if not alone:
            # the launcher ends the others when one exits: not before rank 0 has come to its end too
            ranks.together("the end of the examination", lambda: None)
