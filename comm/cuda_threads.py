"""CUDA from threads of ours: on the ring's device, and never in the way of a graph that another thread captures."""

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

# cudaStreamCaptureModeThreadLocal: captures of other threads are none of this one's business.
THREAD_LOCAL = 1

HOST = torch.device("cpu")


# Any priority above the compute stream's 0 lets the scheduler place a transfer's few blocks first.
HIGH_PRIORITY = -1


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A CUDA stream; the lower the number, the higher the priority."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device=device, priority=priority)  # type: ignore[no-untyped-call]
    return stream


def indexed(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" alone means the current one, and never equals any tensor's device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` the current one, and let this thread ask for events while another captures a graph.

    A new thread is on GPU 0, where its first call makes a context of some 500 MiB. And `torch.cuda.graph` captures in
    global mode: a query by any thread that has not exchanged its own mode fails the capture. PyTorch's watchdog
    exchanges it in the same way. Does nothing on the CPU and in a process that has not used CUDA.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with ExitStack() as placed:
        with suppress(RuntimeError):  # a device that has failed: what is asked of it says so in its own words
            placed.enter_context(torch.cuda.device(device))
        before = exchange_capture_mode(THREAD_LOCAL)
        try:
            yield
        finally:
            exchange_capture_mode(before)


# A call of a GPU's driver may never return: what the end of a process that uses one grants each thread.
DRIVER_SECONDS = 60.0
_ENDING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join_at_exit(thread: threading.Thread) -> None:
    """Wait for a thread that was told to end, without a limit if the process does not use CUDA.

    A thread that returns from C++ into an interpreter that is being taken down aborts the process.
    """
    thread.join(DRIVER_SECONDS if torch.cuda.is_initialized() else None)  # type: ignore[no-untyped-call]


def wait_at_exit_for(thread: threading.Thread) -> None:
    """Let the end of the process wait for a thread that ends by itself."""
    _ENDING.add(thread)


@atexit.register
def _join_all() -> None:
    while alive := [thread for thread in list(_ENDING) if thread.is_alive()]:  # one may start another
        for thread in alive:
            join_at_exit(thread)
            _ENDING.discard(thread)


def start(do: Callable[[], object], device: torch.device, name: str) -> threading.Thread:
    """Do something that ends by itself in a thread of its own, on a device; the end of the process waits for it."""

    def run() -> None:
        with on_device(device):
            do()

    thread = threading.Thread(target=run, name=f"ringattn-{name}", daemon=True)
    wait_at_exit_for(thread)
    thread.start()
    return thread


def within(seconds: float, do: Callable[[], object], device: torch.device, name: str) -> bool:
    """Do what may never return, in a thread of its own; whether it has returned in time."""
    thread = start(do, device, name)
    thread.join(seconds)
    return not thread.is_alive()


def exchange_capture_mode(mode: int) -> int:
    """Set this thread's `cudaStreamCaptureMode`; the one before. A device that has failed refuses, and keeps it."""
    exchange, value = _exchange(), ctypes.c_int(mode)
    if exchange is not None:
        exchange(ctypes.byref(value))
    return value.value


@functools.cache
def _exchange() -> Any:
    # In the runtime that torch itself calls, found through the library of torch's that links it: neither torch nor
    # CuPy has it in Python, and cuda.bindings brings a runtime of its own.
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        return ctypes.CDLL(str(library)).cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        logger.warning("graphs that other threads capture may fail beside a ring: %s", error)
        return None
