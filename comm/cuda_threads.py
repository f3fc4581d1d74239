"""CUDA calls from our own threads: on the ring's device, and without breaking another thread's graph capture."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# cudaStreamCaptureModeThreadLocal: calls of this thread do not affect captures of other threads.
CAPTURE_THREAD_LOCAL = 1

CPU_DEVICE = torch.device("cpu")


# Higher than the compute stream's 0, so that the scheduler places the few blocks of a transfer first.
HIGH_PRIORITY = -1


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Create a CUDA stream; a lower number is a higher priority."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device=device, priority=priority)  # type: ignore[no-untyped-call]
    return stream


def with_device_index(device: torch.device | str) -> torch.device:
    """Return the device with an index, because a tensor's device never equals "cuda" without one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` current, and let this thread query CUDA events while another thread captures a graph.

    A new thread starts on GPU 0, where its first CUDA call would create a context of about 500 MiB. `torch.cuda.graph`
    captures in global mode, in which a query by any other thread breaks the capture. The block therefore runs in
    thread-local mode, as PyTorch's watchdog does. Does nothing on the CPU or if the process has not used CUDA.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with ExitStack() as stack:
        with suppress(RuntimeError):  # the device has failed; the caller's own CUDA call will report that
            stack.enter_context(torch.cuda.device(device))
        before = exchange_capture_mode(CAPTURE_THREAD_LOCAL)
        try:
            yield
        finally:
            exchange_capture_mode(before)


# A call of the GPU driver may never return, so the exit of the process waits no longer than this for each thread.
DRIVER_SECONDS = 60.0
_THREADS_TO_JOIN: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join_at_exit(thread: threading.Thread) -> None:
    """Wait for a thread that was asked to end. If the process uses CUDA, wait at most DRIVER_SECONDS.

    A thread that returns from C++ into an interpreter that is shutting down would abort the process.
    """
    thread.join(DRIVER_SECONDS if torch.cuda.is_initialized() else None)  # type: ignore[no-untyped-call]


def wait_at_exit_for(thread: threading.Thread) -> None:
    """Make the exit of the process wait for a thread that ends by itself."""
    _THREADS_TO_JOIN.add(thread)


@atexit.register
def _join_all() -> None:
    """Wait for the threads of `wait_at_exit_for`, and for those that they start meanwhile."""
    while alive := [thread for thread in list(_THREADS_TO_JOIN) if thread.is_alive()]:  # a thread may start another
        for thread in alive:
            join_at_exit(thread)
            _THREADS_TO_JOIN.discard(thread)


def start_thread(function: Callable[[], object], device: torch.device, name: str) -> threading.Thread:
    """Run `function`, which ends by itself, in a new thread on `device`. The exit of the process waits for it."""

    def run() -> None:
        with on_device(device):
            function()

    thread = threading.Thread(target=run, name=f"ringattn-{name}", daemon=True)
    wait_at_exit_for(thread)
    thread.start()
    return thread


def run_with_timeout(seconds: float, function: Callable[[], object], device: torch.device, name: str) -> bool:
    """Run `function`, which may block forever, in a new thread, and return True if it ends within `seconds`.

    After the timeout, the thread goes on running. `device` is the thread's current device.
    """
    thread = start_thread(function, device, name)
    thread.join(seconds)
    return not thread.is_alive()


def exchange_capture_mode(mode: int) -> int:
    """Set this thread's `cudaStreamCaptureMode` and return the previous mode. Does nothing if the device has failed."""
    exchange, value = _load_exchange_mode(), ctypes.c_int(mode)
    if exchange is not None:
        exchange(ctypes.byref(value))
    return value.value


@functools.cache
def _load_exchange_mode() -> Any:
    """Return `cudaThreadExchangeStreamCaptureMode` of torch's CUDA or HIP runtime, or None with a warning."""
    # The function must come from the CUDA runtime that torch uses, so it is looked up through torch's library. Torch
    # and CuPy do not expose it in Python, and cuda.bindings has a separate runtime.
    runtime = "hip" if torch.version.hip else "cuda"
    library = Path(torch.__file__).parent / "lib" / f"libc10_{runtime}.so"
    try:
        return getattr(ctypes.CDLL(str(library)), f"{runtime}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError) as error:
        logger.warning("CUDA graph capture in another thread may fail while a ring is open: %s", error)
        return None
