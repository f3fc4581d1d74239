"""Compilation of several kernels side by side, before the first of them is launched.

Launches compile one after the other, because a launch waits for its kernel. Here the launches are first recorded on the
meta device and then compiled in threads. Processes that share a Triton cache, such as the ranks of a node, compile
every kernel only once: a lock file per kernel in the cache's folder tells the others to wait for the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from .compile_target import CompileTarget, compiling_for
from .gpu import GpuSpec

logger = logging.getLogger(__name__)

MAX_WORKERS = 16
LOCK_SECONDS = 120.0
"""Time to wait for another process that compiles the same kernel; a backward kernel takes 3 to 10 seconds."""

LOCK_POLL_SECONDS = 0.02


class Launch(NamedTuple):
    """Launch that was recorded on the meta device."""

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def meta_like(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the shape, strides and dtype of ``x``."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def collect_launches(gpu: GpuSpec, run: Callable[[], object]) -> list[Launch]:
    """Return the launches that ``run()`` requests on ``gpu``. Its tensors are on the meta device, and nothing runs."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: int, *arguments: Any, **options: Any) -> None:
        launches.append(Launch(kernel, grid, arguments, options))

    with compiling_for(CompileTarget(gpu, record)):
        run()
    return launches


def compile_launches(launches: list[Launch], *, share: float = 0.0) -> int:
    """Compile the kernels of recorded launches for the current GPU, and return how many were not loaded yet.

    A kernel that does not compile is skipped; its launch then raises the compiler's error.

    Args:
        launches: Result of :func:`collect_launches`.
        share: Position in the list to begin at, from 0 to 1, so that processes with a common cache begin with
            different kernels.
    """
    begin = int(share * len(launches))
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, "ringattn-compile") as executor, _SharedCompileMode(executor) as mode:
        for launch in launches[begin:] + launches[:begin]:
            if isinstance(launch.kernel, JITFunction):  # not in Triton's interpreter
                with suppress(Exception):
                    launch.kernel.warmup(*launch.arguments, grid=(launch.grid,), **launch.options)
    return len(mode.future_kernels)


class _SharedCompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode that compiles in threads, with a lock per kernel between the processes that share the cache."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor, ignore_errors=True)

    def submit(self, key: str, compile_fn: Callable[[], Any], *rest: Any) -> Any:
        if not self.future_kernels:
            logger.info("compiling the kernels for a new kind of call")
        return super().submit(key, partial(_compile_locked, key, compile_fn), *rest)


def _compile_locked(key: str, compile_fn: Callable[[], Any]) -> Any:
    """Compile a kernel, or load it from the cache if another process compiles it at the same time."""
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.ringattn.lock"
    try:
        folder = Path(triton.knobs.cache.dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / name).open("w")
    except OSError:  # a cache that cannot be written to is not shared either
        return compile_fn()
    with file:
        _wait_for_lock(file.fileno())
        return compile_fn()


def _wait_for_lock(descriptor: int) -> None:
    """Take a file lock; give up after LOCK_SECONDS, or where the file system has no locks."""
    end = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_POLL_SECONDS)
        except OSError:
            return
        else:
            return
