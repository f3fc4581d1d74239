"""Links: bytes per second and latency of a message, inside a node and between nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

GIGA, MICRO = 1e9, 1e-6
MAX_LINK_NUMBER = 1e30  # limit for a measured number
NCCL_SHARE = 220 / 450  # share of NVLink's nominal speed that NCCL's send/recv reach (180 to 260 of 450)
COLLECTIVE_SHARE = 0.78  # the same for collectives; nccl-tests: 230 to 235 of 300, 350 to 360 of 450
LOCAL = "local"  # transport of virtual ranks on one device


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of one direction of a link; both directions carry data at once."""

    rate: float
    """Bytes per second."""
    latency: float
    """Seconds from the moment both ends are ready to the first byte."""
    source: str = "given"
    collective: float | None = None
    """Bytes per second of all-gathers and all-to-alls; None means ``rate``."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or not 0 <= self.latency < math.inf:
            raise ValueError(
                f"a link has a rate of {self.rate} bytes/s and a latency of {self.latency} s ({self.source}). "
                "The rate must be above 0, the latency at least 0, and both finite."
            )

    def seconds(self, nbytes: Any) -> Any:
        """Return the seconds of one message; an array of sizes gives an array."""
        return self.latency + nbytes / self.rate

    @property
    def collective_link(self) -> LinkSpeed:
        """This link with the rate that all-gathers and all-to-alls reach."""
        return replace(self, rate=self.collective or self.rate)


def _nvlink(nominal: float, about: str) -> LinkSpeed:
    share = f"{about}; NCCL's share of it"
    return LinkSpeed(NCCL_SHARE * nominal, 10e-6, share, COLLECTIVE_SHARE * nominal)


PRESETS = {
    "nvlink4": _nvlink(450e9, "450 GB/s nominal"),
    "nvlink4-copy": LinkSpeed(380e9, 10e-6, "450 GB/s nominal; copy engine 380"),
    "nvlink4-h800": _nvlink(200e9, "400 GB/s both ways, 200 nominal per direction"),
    "nvlink5": _nvlink(900e9, "900 GB/s nominal"),
    "nvlink3": _nvlink(300e9, "600 GB/s both ways, 300 nominal per direction"),
    "nvlink3-a800": _nvlink(200e9, "400 GB/s both ways, 200 nominal per direction"),
    "ib400": LinkSpeed(47e9, 20e-6, "400G InfiniBand, 50 GB/s nominal; 46 to 48"),
    "ib200": LinkSpeed(23e9, 20e-6, "200G InfiniBand, 25 GB/s nominal; 22 to 24"),
    "pcie5": LinkSpeed(52e9, 15e-6, "PCIe 5 x16, 64 GB/s nominal; 50 to 55"),
    "pcie4": LinkSpeed(25e9, 15e-6, "PCIe 4 x16, 32 GB/s nominal; 24 to 26"),
}
"""Rates per direction; latencies are guesses of the order of magnitude."""


@dataclass(frozen=True)
class ClusterLinks:
    """Links of a cluster: inside a node, and between nodes."""

    inside: LinkSpeed
    between: LinkSpeed
    """Link over one NIC."""
    nics: float | None = None
    """NICs per node; None means one per GPU."""

    def count_nics(self, gpus: int) -> int:
        """Return the NICs of a node with this many GPUs."""
        return gpus if self.nics is None else int(self.nics)

    def far(self, senders: int) -> LinkSpeed:
        """Return the link between nodes that each of ``senders`` GPUs of a node gets if all send at the same time."""
        share = 1.0 if self.nics is None else min(1.0, self.nics / senders)
        return replace(self.between, rate=share * self.between.rate)

    def spread(self, nics: int) -> ClusterLinks:
        """Return the links for a transport that splits a transfer between nodes over ``nics`` NICs."""
        return replace(self, between=replace(self.between, rate=min(nics * self.between.rate, self.inside.rate)))

    def beside(self, rings: int) -> ClusterLinks:
        """Return the links that each of ``rings`` rings gets if they share the NICs of every node."""
        return self if self.nics is None else replace(self, nics=self.nics / rings)


def parse_link(text: str, flag: str = "link") -> LinkSpeed:
    """Parse a preset's name, GB/s with or without latency (``200,10us``), or a JSON file of ``bench links``.

    ``flag`` is the flag named in the ValueError.
    """
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    if os.path.lexists(text):
        from ..common.result import read_result

        return fit_link(read_result(Path(text)).rows, text)
    rate, comma, latency = text.partition(",")
    try:
        return LinkSpeed(float(rate) * GIGA, float(latency.removesuffix("us")) * MICRO if comma else 0.0)
    except ValueError:
        raise ValueError(
            f"--{flag} is {text!r}: it must be a preset ({', '.join(PRESETS)}), GB/s with an optional latency, such as "
            "200,10us, or a JSON file written by `ringattn bench links`"
        ) from None


def fit_link(rows: Sequence[Mapping[str, Any]], source: str) -> LinkSpeed:
    """Fit rate and latency to the rows of ``bench links``, by least squares of seconds over bytes.

    The slowest edge of the fastest transport counts, without the transport between virtual ranks. Rows with one active
    edge count only if there are none with all edges active. ``source`` describes the link.
    """
    by_way: dict[Any, dict[str, dict[float, float]]] = {"ring": {}, "one way": {}}
    for place, row in enumerate(rows):
        transport = str(row.get("transport"))
        # Names with a comma are variants that no ring uses.
        if transport == LOCAL or "," in transport or row.get("edge") == "0->0" or row.get("channels") is not None:
            continue
        if row.get("way") in by_way:
            where = f"{source}: rows[{place}]"
            nbytes, seconds = positive_number(row, "size", where), MICRO * positive_number(row, "time", where)
            slowest = by_way[row["way"]].setdefault(transport, {})
            slowest[nbytes] = max(seconds, slowest.get(nbytes, 0.0))
    points = by_way["ring"] or by_way["one way"]
    if not points:
        raise ValueError(f"{source} has no transfers between ranks. Run `ringattn bench links --world 2 --json FILE`.")
    return max((_fit(slowest, f"{source}, {name}") for name, slowest in points.items()), key=lambda link: link.rate)


def positive_number(row: Mapping[str, Any], name: str, where: str) -> float:
    """Return ``row[name]``; raise ValueError, which names ``where``, if it is no number above 0 or is too large."""
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 1 / MAX_LINK_NUMBER < value < MAX_LINK_NUMBER:
        return value
    raise ValueError(f"{where}: {name} is {value!r:.80}: it must be a number above 0")


def _fit(slowest: Mapping[float, float], source: str) -> LinkSpeed:
    """Fit rate and latency to seconds by bytes, by relative error; ValueError if more bytes take no longer."""
    sizes, seconds = np.array(list(slowest)), np.array(list(slowest.values()))
    if len(slowest) == 1:
        return LinkSpeed(float(sizes[0] / seconds[0]), 0.0, source)
    # Weights of 1 / seconds let small messages determine the latency and large messages the rate.
    slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if not slope > 0:
        raise ValueError(f"{source}: time does not grow up to {sizes.max():,.0f} bytes, so the rate is unknown")
    return LinkSpeed(float(1 / slope), max(float(latency), 0.0), source)
