"""Is the prediction right? ``python -m ringattn.bench.predict.check``: measured beside predicted, on this CPU.

It needs a machine on which nothing else runs. One-thread processes, one per core, first measure their own speed at one
length, each by itself and all at once, then the link between them as ``ringattn bench links`` does; from that alone
every row is predicted. Then each row is run. A row is right within 10% plus the measured spread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from ...ring import Mask, Ring, ring_attention
from ...ring.documents import Documents
from ..launching import Member, cores, launch, member, process_group
from ..links.group import between_processes
from ..links.runs import Wish
from ..output import write_json
from ..ring.candidates import DTYPES
from ..ring.runs import Ranks
from ..shapes import binary, sizes
from ..tables import table
from ..timing import Clock, Step, interleaved
from .call import NAMED, Call
from .host import HostSpeed, calibrated, mean_of, operator_seconds
from .links import Link, Links, measured
from .ring import predicted

CPU = torch.device("cpu")

ALLOWED = 0.10
LINK_SIZES = (1 << 20, 1 << 24)
MASKS = ("full", "causal", "window", "documents")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """One attention, measured and predicted."""

    layout: str
    mask: str
    seqlen: int
    measured: float
    spread: float
    predicted: float

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_right(self) -> bool:
        return abs(self.off) <= ALLOWED + self.spread


@dataclass(frozen=True)
class Shape:
    """What all rows have in common."""

    world: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"

    def call(self, layout: str, mask: str, seqlen: int) -> Call:
        return Call(
            seqlen // self.world, self.world, layout, mask_of(mask, seqlen), self.heads, self.kv_heads, self.head_dim,
            dtype=self.dtype,
        )  # fmt: skip


def mask_of(name: str, seqlen: int) -> Mask:
    """A mask of each kind that the CPU computes in its own way."""
    if name == "window":
        return Mask(causal=True, window=(1023, 0))
    if name == "documents":
        return Mask(causal=True, documents=Documents([0, seqlen // 8, seqlen // 2, seqlen]))
    return Mask(causal=name == "causal")


def cases(lengths: list[int], layouts: list[str], masks: list[str]) -> Iterator[tuple[str, str, int]]:
    return ((layout, mask, length) for length in lengths for mask in masks for layout in layouts)


def spawned(
    store: str, shape: Shape, wanted: list[tuple[str, str, int]], link: Link, length: int, repeats: int
) -> tuple[HostSpeed, list[Row]]:
    """One rank: its speed, and its part of every row; rank 0 prints each as it is done."""
    place = member()
    assert place is not None
    torch.set_num_threads(1)
    with process_group(place, store), Ring() as ring:
        clock = Clock(CPU, Ranks())
        speed = speed_here(shape, length, repeats)
        rows = []
        for case in wanted:
            call = shape.call(*case)
            step = _step(place, call, ring)
            samples = interleaved({"": step}, clock, repeats=repeats)[""]
            passes = predicted(call, speed, Links(link, link))
            rows.append(Row(*case, samples.median, samples.spread, sum(one.seconds for one in passes)))
            if place.rank == 0:
                print(
                    rows[-1], "" if rows[-1].is_right else "WRONG", f"{rows[-1].off:+.1%}", file=sys.stderr, flush=True
                )
        return speed, rows


class Each(Ranks):
    """All ranks begin together, and each keeps its own time."""

    def ready(self) -> None:
        super().slowest(0.0)

    def slowest(self, seconds: float) -> float:
        return seconds


def speed_here(shape: Shape, length: int, repeats: int) -> HostSpeed:
    """Measured by all ranks at once, and then by one after the other, which tells what idle neighbours are worth."""
    how: dict[str, Any] = {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": DTYPES[shape.dtype],
    }
    mine = calibrated(length, **how, clock=Clock(CPU, Each()), repeats=repeats)
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            pair = operator_seconds(length, **how, repeats=repeats) / (shape.heads * length**2)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, replace(mine, alone=min(1.0, pair / (mine.forward.pair + mine.backward.pair))))
    return mean_of(everyone)


def _step(place: Member, call: Call, ring: Ring) -> Step:
    """Forward and backward of this rank's part."""
    held, mask = call.held(), call.mask
    boundaries = None if mask.documents is None else list(mask.documents.boundaries)
    shape, draw = (1, held.lengths[place.rank]), torch.Generator().manual_seed(place.rank)
    heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
    *inputs, dout = (
        torch.randn(*shape, count, call.head_dim, generator=draw).to(DTYPES[call.dtype]) for count in heads
    )

    def run() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ring_attention(
            *leaves, layout=held, ring=ring, causal=mask.causal, window_size=mask.window, cu_seqlens=boundaries
        )
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, leaves, dout)

    return run


def link_between(world: int) -> Link:
    """As ``ringattn bench links`` measures it."""
    wish = Wish(("process_group",), "cpu", LINK_SIZES)
    found = launch(world, _links, wish)
    rows = [asdict(row) for row in found.rows]
    return measured({"schema": "ringattn bench links 1", "links": rows})


def _links(store: str, wish: Wish) -> Any:
    place = member()
    assert place is not None
    return between_processes(place, wish, store)


@app.command()
def check(
    seqlen: Annotated[Any, typer.Option(parser=sizes, metavar="SIZE,…")] = "4k,8k,16k,32k",
    layout: Annotated[str, typer.Option(help=f"Some of {','.join(NAMED)}.")] = ",".join(NAMED),
    mask: Annotated[str, typer.Option(help=f"Some of {','.join(MASKS)}.")] = ",".join(MASKS),
    calibrate: Annotated[int, typer.Option(help="Rows and keys of the pieces that speeds are measured with.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    json: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measure rings of one-thread processes, predict them, compare."""
    shape = Shape(cores())
    wanted = list(cases(seqlen, layout.split(","), mask.split(",")))
    link = link_between(shape.world)
    speed, rows = launch(shape.world, spawned, shape, wanted, link, calibrate, repeats)
    shown = [
        asdict(row) | {"seqlen": binary(row.seqlen), "off": f"{row.off:+.1%}", "": "" if row.is_right else "WRONG"}
        for row in rows
    ]
    print(table(shown, title=f"{link}\n{speed}\n"))
    wrong = sum(not row.is_right for row in rows)
    print(f"{len(rows) - wrong} of {len(rows)} within {ALLOWED:.0%} plus the spread")
    if json is not None:
        write_json(str(json), {"link": asdict(link), "speed": asdict(speed), "rows": [asdict(row) for row in rows]})
    sys.exit(wrong > 0)


if __name__ == "__main__":
    app()
