"""Limits on the share of a GPU or of a link that a transport may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .arg_checks import LIMITS

DEFAULT_CTAS = 8
"""Default number of thread blocks of a group of NCCL transfers; NCCL's own default can occupy 32 multiprocessors."""

DEFAULT_CLUSTER_SIZE = 1
"""Default cluster size. NCCL's own default (4 on sm_90) needs 4 free multiprocessors in one GPC before it starts."""

MAX_GPCS = 8
"""Highest number of GPCs of one GPU (H100, B200). All blocks of a cluster run in the same GPC."""


# These apply to every communicator of the process and override a communicator's own configuration.
CTA_VARIABLES = ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS")
CLUSTER_VARIABLE = "NCCL_CGA_CLUSTER_SIZE"
MAX_NCCL_CTAS = 32
"""Highest number of thread blocks that NCCL uses if only the minimum is set."""


def environment_ctas(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the highest number of thread blocks that the environment allows NCCL, or None without such a variable."""
    counts = {name: int(text) for name in CTA_VARIABLES if (text := environment.get(name, "")).isdigit() and int(text)}
    most = [count for name, count in counts.items() if "MAX" in name]
    return min(most, default=MAX_NCCL_CTAS) if counts else None


@dataclass(frozen=True)
class Limits:
    """Limits of one transport; None uses the default.

    Environment variables such as `NCCL_MAX_CTAS` and `NCCL_CGA_CLUSTER_SIZE` apply where no limit is given. NCCL rounds
    the numbers of channels and thread blocks to powers of two, so only powers of two are accepted.

    Attributes:
        channels: (nccl) exact number of channels for all point-to-point transfers together.
        ctas: (nccl) highest number of thread blocks of one group of transfers; each occupies a whole SM. The default is
            8 if neither `channels` nor `ctas` is given.
        bytes_per_second: (process_group on the CPU) highest speed of every link.
        cga_cluster_size: (nccl, sm_90 and later) number of thread blocks that start together in one cluster. Default:
            1.

    Raises:
        ValueError: a limit is out of range, or more channels or a larger cluster are set than there are thread blocks.
    """

    channels: int | None = None
    ctas: int | None = None
    bytes_per_second: float | None = None
    cga_cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name, kind in LIMITS.items():
            object.__setattr__(self, name, kind.check(name, getattr(self, name)))
        if self.channels is not None and self.ctas is not None and self.channels > self.ctas:
            raise ValueError(
                f"channels is {self.channels}; it must be at most ctas, {self.ctas}, because each channel needs a CTA"
            )
        if self.cga_cluster_size is not None and self.cga_cluster_size > self.blocks:
            raise ValueError(
                f"cga_cluster_size is {self.cga_cluster_size}; it must be at most {self.blocks}, the number of CTAs"
            )

    @property
    def blocks(self) -> int:
        """Highest number of thread blocks that one group of NCCL transfers uses."""
        return self.channels or self.ctas or environment_ctas() or DEFAULT_CTAS

    @property
    def multiprocessors(self) -> int:
        """Number of free multiprocessors with which all thread blocks of a group of transfers can certainly start.

        This is more than `blocks` if blocks start in clusters. Each GPC may have free multiprocessors, but too few for
        one more cluster.
        """
        text = os.environ.get(CLUSTER_VARIABLE, "")
        cluster = self.cga_cluster_size or (int(text) if text.isdigit() else 0) or DEFAULT_CLUSTER_SIZE
        return self.blocks + MAX_GPCS * (cluster - 1)

    def find_unsupported(self, transport: str, *supported: str) -> str | None:
        """Return an error text for the first limit that is set but not named in `supported`, or None."""
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None and name not in supported:
                return f"limits.{name} is {value}, which the transport {transport} does not support"
        return None


NO_LIMITS = Limits()
