"""Names that the flags and the rows of ``bench links`` use: transports, and what may run beside a transfer."""

from __future__ import annotations

IN_PROCESS = "local"
FORWARD, MATMUL = "forward", "matmul"  # kernels beside a transfer
SWEPT = ("nccl",)  # transports with channels and CTAs
EVERY = ("nccl", "copy_engine", "process_group", IN_PROCESS)
