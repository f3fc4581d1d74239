"""Emulation of CUDA's fork rule: a process that used CUDA has no GPU in its forks.

In torch 2.13 ``is_available`` initialises the driver, and ``device_count`` does if NVML does not answer. The damage
shows at the fork's first use of CUDA.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

QUESTIONS = (
    "_lazy_init", "current_device", "current_stream", "device_count", "get_device_capability", "get_device_name",
    "get_device_properties", "init", "is_available", "is_bf16_supported", "mem_get_info", "set_device", "synchronize",
)  # fmt: skip
FORK_ERROR = "Cannot re-initialize CUDA in forked subprocess"

first: list[str] = []  # stack of the first CUDA call in this process or its parent; empty before that
_owner = 0  # id of the process that made the first CUDA call


def poison_after_fork(ask: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*arguments: Any, **named: Any) -> Any:
        global _owner
        if _owner and _owner != os.getpid():
            raise RuntimeError(f"{FORK_ERROR}; the parent process first used CUDA here:\n{first[0]}")
        if not _owner:
            _owner = os.getpid()
            first.append("".join(traceback.format_stack()[:-1]))
        return ask(*arguments, **named)

    return asked


def install() -> None:
    for name in QUESTIONS:
        setattr(torch.cuda, name, poison_after_fork(getattr(torch.cuda, name)))
