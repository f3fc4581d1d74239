"""What a message costs: bytes per second and a latency, inside a node and between nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIGA = 1e9
NCCL_SHARE = 220 / 450  # of NVLink's nominal speed what NCCL's send and receive reach, the middle of 180 to 260 of 450
BENCH_SCHEMA = "ringattn bench links 1"


@dataclass(frozen=True)
class Link:
    """One direction of a link, both of which carry at once."""

    rate: float
    """Bytes per second."""
    latency: float
    """Seconds from the moment when both ends are there to the first byte."""
    source: str = "given"

    def __post_init__(self) -> None:
        if not self.rate > 0 or self.latency < 0:
            raise ValueError(
                f"a link of {self.rate} bytes/s and {self.latency} s: it takes more than 0, and at least 0"
            )

    def seconds(self, nbytes: float) -> float:
        """Of one message."""
        return self.latency + nbytes / self.rate


PRESETS = {
    "nvlink4": Link(NCCL_SHARE * 450e9, 10e-6, "450 GB/s nominal; NCCL send/recv 180 to 260 by channel count"),
    "nvlink4-copy": Link(380e9, 10e-6, "450 GB/s nominal; copy engine 380"),
    "nvlink4-h800": Link(NCCL_SHARE * 200e9, 10e-6, "400 GB/s in all, 200 nominal per direction; NCCL's share of it"),
    "nvlink3": Link(NCCL_SHARE * 300e9, 10e-6, "600 GB/s in all, 300 nominal per direction; NCCL's share of it"),
    "ib400": Link(47e9, 20e-6, "400G InfiniBand, 50 GB/s nominal; 46 to 48"),
    "pcie5": Link(52e9, 15e-6, "PCIe 5 x16, 64 GB/s nominal; 50 to 55"),
}
"""Per direction; latencies are guesses of their order."""


@dataclass(frozen=True)
class Links:
    """What ranks of one node are joined by, and ranks of two."""

    inside: Link
    between: Link

    def of(self, same_node: bool) -> Link:
        """The link of two ranks."""
        return self.inside if same_node else self.between


def link_of(text: str) -> Link:
    """``nvlink4``, the name of a preset; ``200`` or ``200,10us``, GB/s and latency; or a file of ``bench links``.

    Raises:
        ValueError: none of these.
    """
    if text in PRESETS:
        return PRESETS[text]
    if Path(text).is_file():
        return measured(json.loads(Path(text).read_text()), source=text)
    rate, _, latency = text.partition(",")
    try:
        return Link(float(rate) * GIGA, float(latency.removesuffix("us") or 0) * 1e-6)
    except ValueError:
        known = ", ".join(PRESETS)
        raise ValueError(
            f"link is {text!r}: it takes one of {known}, GB/s and microseconds as in 200,10us, or a JSON file of "
            "`ringattn bench links`"
        ) from None


def measured(results: Mapping[str, Any], *, source: str = "bench links", way: str = "ring") -> Link:
    """Rate and latency of the slowest edge, by least squares of seconds over bytes, of what ``bench links`` wrote.

    Of several transports the fastest counts. ``way`` is how the ring uses its links: ``ring``, every edge at once;
    where no such rows are there, one way alone.

    Raises:
        ValueError: another schema, or no transfers between two ranks.
    """
    if results.get("schema") != BENCH_SCHEMA:
        raise ValueError(f"{source} has schema {results.get('schema')!r}: it takes a JSON file of {BENCH_SCHEMA!r}")
    rows = [row for row in results["links"] if row["edge"] != "0->0" and row.get("channels") is None]
    rows = [row for row in rows if row["way"] == way] or [row for row in rows if row["way"] == "one way"]
    transports = sorted({row["transport"] for row in rows if row["transport"] != "local"})
    fits = [_fit([row for row in rows if row["transport"] == name], f"{source}, {name}") for name in transports]
    if not fits:
        raise ValueError(
            f"{source} has no transfers between two ranks: run `ringattn bench links --world 2 --json FILE`"
        )
    return max(fits, key=lambda link: link.rate)


def _fit(rows: list[Mapping[str, Any]], source: str) -> Link:
    """The line through the slowest edge's points, relative errors counted."""
    slowest: dict[int, float] = {}
    for row in rows:
        slowest[row["nbytes"]] = max(row["seconds"], slowest.get(row["nbytes"], 0.0))
    if len(slowest) == 1:
        ((nbytes, seconds),) = slowest.items()
        return Link(nbytes / seconds, 0.0, source)
    # weights 1 / seconds^2, so that small messages tell the latency and large ones the rate
    weights = {nbytes: seconds**-2 for nbytes, seconds in slowest.items()}
    total = sum(weights.values())
    mean_bytes = sum(weights[n] * n for n in slowest) / total
    mean_seconds = sum(weights[n] * slowest[n] for n in slowest) / total
    slope = sum(weights[n] * (n - mean_bytes) * (slowest[n] - mean_seconds) for n in slowest)
    slope /= sum(weights[n] * (n - mean_bytes) ** 2 for n in slowest)
    return Link(1 / slope, max(mean_seconds - slope * mean_bytes, 0.0), source)
