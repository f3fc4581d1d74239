"""What a transport is held to: a share of the GPU, or of a link."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .checked import LIMITS

CTAS = 8
"""Thread blocks of a group of transfers through NCCL where nobody says: its own choice may take 32 multiprocessors."""

CGA_CLUSTER_SIZE = 1
"""Of a cluster where nobody says: NCCL's own 4 (on sm_90) start only where 4 multiprocessors of one GPC are free."""

GPCS = 8
"""Of one GPU, at most (H100, B200): groups of multiprocessors, in one of which a whole cluster must lie."""


# These hold for every communicator of the process, and NCCL lets them override what a communicator asks for.
CTA_VARIABLES = ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS")
CLUSTER_VARIABLE = "NCCL_CGA_CLUSTER_SIZE"
NCCL_CTAS = 32
"""The most that NCCL takes where only the fewest are bounded."""


def environment_ctas(environment: Mapping[str, str] = os.environ) -> int | None:
    """The most thread blocks that the environment lets NCCL take; None where it says nothing of them."""
    counts = {name: int(text) for name in CTA_VARIABLES if (text := environment.get(name, "")).isdigit() and int(text)}
    most = [count for name, count in counts.items() if "MAX" in name]
    return min(most, default=NCCL_CTAS) if counts else None


@dataclass(frozen=True)
class Limits:
    """Limits of one transport; None takes its default.

    `channels` (nccl) is how many channels point-to-point transfers use in all, no more and no fewer; `ctas` (nccl) is
    the most thread blocks that one group of transfers may take, each on a whole SM: 8 where neither is given. NCCL
    makes either a power of two, so that nothing else is taken here. `cga_cluster_size` (nccl, from sm_90 on) is how
    many of them start together, in one cluster: 1. Where nothing is given, what the environment says of these
    (`NCCL_MAX_CTAS`, `NCCL_CGA_CLUSTER_SIZE`, …) holds instead. `bytes_per_second` (process_group, on the CPU) makes
    every link at most that fast.

    Raises:
        ValueError: a value that nothing could keep.
    """

    channels: int | None = None
    ctas: int | None = None
    bytes_per_second: float | None = None
    cga_cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name, kind in LIMITS.items():
            object.__setattr__(self, name, kind.of(name, getattr(self, name)))
        if self.channels is not None and self.ctas is not None and self.channels > self.ctas:
            raise ValueError(f"channels is {self.channels} and ctas {self.ctas}: a channel takes a thread block")
        if self.cga_cluster_size is not None and self.cga_cluster_size > self.blocks:
            raise ValueError(f"cga_cluster_size is {self.cga_cluster_size}, of {self.blocks} thread blocks in all")

    @property
    def blocks(self) -> int:
        """The most thread blocks that one group of transfers through NCCL takes."""
        return self.channels or self.ctas or environment_ctas() or CTAS

    @property
    def multiprocessors(self) -> int:
        """How many free multiprocessors are room for them, wherever those lie: of each GPC too few for a cluster may
        be left over."""
        text = os.environ.get(CLUSTER_VARIABLE, "")
        cluster = self.cga_cluster_size or (int(text) if text.isdigit() else 0) or CGA_CLUSTER_SIZE
        return self.blocks + GPCS * (cluster - 1)

    def refused_by(self, transport: str, *keeps: str) -> str | None:
        """Which limit a transport that keeps only `keeps` cannot keep, None where it can keep all that are set."""
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None and name not in keeps:
                return f"limits.{name} is {value}, and {transport} cannot keep that"
        return None


NO_LIMITS = Limits()
