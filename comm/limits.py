"""What a transport is held to: a share of the GPU, or of a link."""

from __future__ import annotations

from dataclasses import dataclass

from .checked import LIMITS


@dataclass(frozen=True)
class Limits:
    """Limits of one transport; None leaves the choice to it.

    `channels` (nccl) is how many channels point-to-point transfers use in all, no more and no fewer; `ctas` (nccl) is
    the most thread blocks that one group of transfers may take, each on a whole SM. NCCL makes either a power of two,
    so that nothing else is taken here. `bytes_per_second` (process_group, on the CPU) makes every link at most that
    fast.

    Raises:
        ValueError: a value that nothing could keep.
    """

    channels: int | None = None
    ctas: int | None = None
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, kind in LIMITS.items():
            object.__setattr__(self, name, kind.of(name, getattr(self, name)))
        if self.channels is not None and self.ctas is not None and self.channels > self.ctas:
            raise ValueError(f"channels is {self.channels} and ctas {self.ctas}: a channel takes a thread block")

    def refused_by(self, transport: str, *keeps: str) -> str | None:
        """Which limit a transport that keeps only `keeps` cannot keep, None where it can keep all that are set."""
        for name in ("channels", "ctas", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and name not in keeps:
                return f"limits.{name} is {value}, and {transport} cannot keep that"
        return None


NO_LIMITS = Limits()
