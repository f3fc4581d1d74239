"""Names in flags and rows of ``bench links``: transports, and kernels that run alongside transfers."""

from __future__ import annotations

IN_PROCESS = "local"
FORWARD, MATMUL = "forward", "matmul"  # kernels alongside a transfer


def swept_transports() -> list[str]:
    """Return the transports that have channels and CTAs to sweep."""
    from ...comm.registry import transports  # imports torch, which flags must not

    return [entry.name for entry in transports() if {"channels", "ctas"} <= {*entry.limits}]
