"""What follows from compute alone, communication alone and together; formulas in ``bench/README.md``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.timing import Samples
from .runs import STEP

ALLOWANCE = 0.05  # of the larger one: what a step may take above it and one chunk


@dataclass(frozen=True)
class Row:
    """One phase of one ring; ``together`` is None where there is no such ring, and ``note`` says why."""

    phase: str
    slots: int
    prefetch: int
    chunks: int
    pieces: int = 1  # chunks of all hops of the phase that compute something
    compute: Samples | None = None
    communication: Samples | None = None
    together: Samples | None = None
    contention: float | None = None  # compute while communicating over compute alone
    note: str = ""

    @property
    def exposed(self) -> float:
        """Seconds of communication that compute does not hide."""
        return _median(self.together) - _median(self.compute)

    @property
    def overlap(self) -> float:
        """The part of what could be hidden that is: 1 where the shorter of the two costs nothing."""
        compute, communication = _median(self.compute), _median(self.communication)
        return (compute + communication - _median(self.together)) / min(compute, communication)

    @property
    def efficiency(self) -> float:
        """Of a ring that hides all it can: its time over this one's."""
        return max(_median(self.compute), _median(self.communication)) / _median(self.together)

    @property
    def chunk(self) -> float:
        """Seconds of compute with one chunk of one hop, on average."""
        return _median(self.compute) / self.pieces

    @property
    def bound(self) -> float:
        """The larger of the two, one chunk, and 5%: what a ring that overlaps takes at most."""
        return max(_median(self.compute), _median(self.communication)) * (1 + ALLOWANCE) + self.chunk

    @property
    def within(self) -> bool:
        return _median(self.together) <= self.bound

    def as_json(self) -> dict[str, Any]:
        told = {"phase": self.phase, "slots": self.slots, "prefetch": self.prefetch, "chunks": self.chunks}
        if self.together is None or self.compute is None or self.communication is None:
            return {**told, "note": self.note}
        return {
            **told,
            "compute": self.compute.as_json(),
            "communication": self.communication.as_json(),
            "together": self.together.as_json(),
            **{name: getattr(self, name) for name in ("exposed", "overlap", "contention", "efficiency")},
            **{name: getattr(self, name) for name in ("chunk", "bound", "within")},
        }

    def as_row(self) -> dict[str, object]:
        """For the terminal and for CSV."""
        told: dict[str, object] = {
            "phase": self.phase,
            "slots": self.slots,
            "prefetch": self.prefetch,
            "chunks": self.chunks,
        }
        names = ("compute ms", "communication ms", "together ms", "spread", "exposed ms", "overlap", "contention")
        if self.together is None:
            return {**told, **dict.fromkeys((*names, "efficiency", "bound ms"), None), "": self.note}
        values = (
            *(round(_median(each) * 1e3, 2) for each in (self.compute, self.communication, self.together)),
            f"±{self.together.spread:.1%}",
            round(self.exposed * 1e3, 2),
            f"{self.overlap:.0%}",
            None if self.contention is None else f"{self.contention:.2f}x",
        )
        rest = {"efficiency": f"{self.efficiency:.0%}", "bound ms": round(self.bound * 1e3, 2)}
        return {**told, **dict(zip(names, values, strict=True)), **rest, "": "" if self.within else "above the bound"}


def _median(samples: Samples | None) -> float:
    assert samples is not None
    return samples.median


def step_of(forward: Row, backward: Row) -> Row:
    """Forward and backward of one ring as one step: the sums of their times, run by run."""
    parts = ((forward.compute, backward.compute), (forward.communication, backward.communication))
    compute, communication = (_sum(*pair) for pair in parts)
    contention = None
    if forward.contention is not None and backward.contention is not None:
        share = _median(forward.compute) / compute.median
        contention = share * forward.contention + (1 - share) * backward.contention
    return Row(
        STEP,
        forward.slots,
        forward.prefetch,
        forward.chunks,
        pieces=forward.pieces + backward.pieces,
        compute=compute,
        communication=communication,
        together=_sum(forward.together, backward.together),
        contention=contention,
    )


def _sum(a: Samples | None, b: Samples | None) -> Samples:
    assert a is not None and b is not None
    return Samples(tuple(x + y for x, y in zip(a.seconds, b.seconds, strict=True)))


def verdict(rows: Sequence[Row], world: int) -> str:
    """Whether the third buffer pays, when and how much, in one sentence."""
    if world <= 2:
        return (
            f"The third buffer cannot pay in a world of {world}: one shard arrives, and one buffer holds it."
            if world == 2
            else "The third buffer cannot pay in a world of 1: nothing arrives."
        )
    pays: list[str] = []
    not_pays: list[str] = []
    for chunks in sorted({row.chunks for row in rows}):
        two, three = (_best(rows, slots, chunks) for slots in (2, 3))
        if two is None or three is None:
            continue
        saved, spread = 1 - three.median / two.median, max(two.spread, three.spread)
        told = f"{saved:+.1%} of a step with {chunks} chunk{'s' if chunks > 1 else ''} (runs spread ±{spread:.1%})"
        (pays if saved > spread else not_pays).append(told)
    if not pays and not not_pays:
        return "Whether the third buffer pays was not measured: it takes --slots 2,3 with --prefetch 1,2."
    if not pays:
        return f"The third buffer does not pay here: it saves {' and '.join(not_pays)}."
    rest = f", and does not elsewhere: {' and '.join(not_pays)}" if not_pays else ""
    return f"The third buffer pays here: it saves {' and '.join(pays)}{rest}."


def _best(rows: Sequence[Row], slots: int, chunks: int) -> Samples | None:
    """The step of a ring with so many buffers that prefetches as far as they allow."""
    found = [
        row.together
        for row in rows
        if (row.phase, row.slots, row.chunks, row.prefetch) == (STEP, slots, chunks, slots - 1) and row.together
    ]
    return min(found, key=lambda samples: samples.median) if found else None


def contention(together: Sequence[float], alone: Sequence[float]) -> float | None:
    """How many times longer the same compute takes while something moves; None where there is none to compare."""
    if not together or not alone or not statistics.median(alone) > 0:
        return None
    return statistics.median(together) / statistics.median(alone)
