"""What a message costs: bytes per second and a latency, inside a node and between nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.files import load, objects, positive, whole_number

GIGA = 1e9
NCCL_SHARE = 220 / 450  # of NVLink's nominal speed what NCCL's send and receive reach, the middle of 180 to 260 of 450
BENCH_SCHEMA = "ringattn bench links 1"
WRITER = "`ringattn bench links --json FILE`"
LOCAL = "local"  # the transport of virtual ranks that share a device


@dataclass(frozen=True)
class Link:
    """One direction of a link, both of which carry at once."""

    rate: float
    """Bytes per second."""
    latency: float
    """Seconds from the moment when both ends are there to the first byte."""
    source: str = "given"

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or not 0 <= self.latency < math.inf:
            raise ValueError(
                f"a link of {self.rate} bytes/s and {self.latency} s ({self.source}): "
                "it takes more than 0, and at least 0, both finite"
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


def link_of(text: str, flag: str = "link") -> Link:
    """``nvlink4``, the name of a preset; ``200`` or ``200,10us``, GB/s and latency; or a file of ``bench links``.

    ``flag`` is what it is called in errors.

    Raises:
        ValueError: none of these.
    """
    if text in PRESETS:
        return PRESETS[text]
    if os.path.lexists(text):
        return measured(load(Path(text), (BENCH_SCHEMA,), WRITER), source=text)
    rate, comma, latency = text.partition(",")
    try:
        return Link(float(rate) * GIGA, float(latency.removesuffix("us")) * 1e-6 if comma else 0.0)
    except ValueError:
        known = ", ".join(PRESETS)
        raise ValueError(
            f"{flag} is {text!r}: it takes one of {known}, GB/s and microseconds as in 200,10us, or a JSON file of "
            "`ringattn bench links`"
        ) from None


def measured(
    results: Mapping[str, Any], *, source: str = "bench links", way: str = "ring", local: bool = False
) -> Link:
    """Rate and latency of the slowest edge, by least squares of seconds over bytes, of what ``bench links`` wrote.

    Of several transports the fastest counts; with ``local`` the one between virtual ranks of one device, else all but
    that. ``way`` is how the ring uses its links: ``ring``, every edge at once; where no such rows are there, one way
    alone.

    Raises:
        ValueError: no transfers between two ranks, or a damaged row.
    """
    everything = objects(results, "links", source)
    rows = [(f"{source}: links[{place}]", row) for place, row in enumerate(everything)]
    rows = [(where, row) for where, row in rows if (row.get("transport") == LOCAL) == local]
    rows = [(where, row) for where, row in rows if "," not in str(row.get("transport"))]  # as no ring moves it
    rows = [(where, row) for where, row in rows if row.get("edge") != "0->0" and row.get("channels") is None]
    rows = [one for one in rows if one[1].get("way") == way] or [one for one in rows if one[1].get("way") == "one way"]
    by_transport: dict[str, dict[int, float]] = {}
    for where, row in rows:
        name, nbytes = str(row.get("transport")), whole_number(row, "nbytes", where)
        slowest, seconds = by_transport.setdefault(name, {}), positive(row, "seconds", where)
        slowest[nbytes] = max(seconds, slowest.get(nbytes, 0.0))
    if not by_transport:
        raise ValueError(
            f"{source} has no transfers between two ranks: run `ringattn bench links --world 2 --json FILE`"
        )
    fits = [_fit(slowest, f"{source}, {name}") for name, slowest in sorted(by_transport.items())]
    return max(fits, key=lambda link: link.rate)


def _fit(slowest: Mapping[int, float], source: str) -> Link:
    """The line through the slowest edge's points, relative errors counted.

    Raises:
        ValueError: larger messages do not take longer.
    """
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
    if not slope > 0:
        raise ValueError(f"{source}: {max(slowest):,} bytes take no longer than {min(slowest):,}: that tells no rate")
    return Link(1 / slope, max(mean_seconds - slope * mean_bytes, 0.0), source)
