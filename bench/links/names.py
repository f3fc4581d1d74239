"""Names that the flags and the rows of ``bench links`` use: transports, and what may run beside a transfer."""

from __future__ import annotations

IN_PROCESS = "local"
FORWARD, MATMUL = "forward", "matmul"  # kernels beside a transfer


def swept() -> list[str]:
    """Return the transports that have channels and CTAs to sweep."""
    from ...comm.registry import transports  # with torch, which flags must not import

    return [entry.name for entry in transports() if {"channels", "ctas"} <= {*entry.limits}]
