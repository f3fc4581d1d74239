"""glibc's heap: by default it keeps what is freed, and the resident set says what was once used, not what is in use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
MAPPED_BYTES = 64 << 10
KEPT_BYTES = 32 << 20  # the largest block that glibc keeps once it has seen it freed


class _Mallinfo2(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns (mallinfo(3), since 2.33); of it the bytes of all heaps are read."""

    _fields_ = [("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9)]


def trim() -> None:
    """Hand freed memory back to the system: what the heap kept of earlier work would hide what comes after it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        _libc().malloc_trim(0)


def give_back_freed_memory() -> None:
    """Let glibc map every large block by itself, so that what is freed leaves the process at once.

    By default it keeps freed blocks of up to 32 MiB for later. What it had kept before is still given out first.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library: the figures are upper bounds
        _libc().mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


@contextlib.contextmanager
def freed_at_once(device: torch.device) -> Iterator[None]:
    """On the CPU every large block is mapped by itself inside, so that what is resident is what is in use.

    That makes allocations slow: afterwards glibc keeps freed blocks again, as it does in a process that runs on. The
    holes that earlier work left in the heap are taken meanwhile, untouched: a block that is given out from one would
    stay resident when it is freed.
    """
    if device.type != "cpu":
        yield
        return
    trim()
    keep_freed_memory()
    holes = list(_holes())
    give_back_freed_memory()
    try:
        yield
    finally:
        for block in holes:
            _libc().free(block)
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to the largest block that it keeps by itself."""
    with contextlib.suppress(OSError, AttributeError):
        _libc().mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        _libc().mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


def _holes() -> Iterator[int]:
    """Take the free blocks inside the heaps, the largest first, until only one that makes a heap grow would do."""
    with contextlib.suppress(OSError, AttributeError):  # another C library, or a glibc before 2.33
        library, size = _libc(), KEPT_BYTES // 2
        library.mallinfo2.restype = _Mallinfo2
        while size >= MAPPED_BYTES:
            before = library.mallinfo2().arena
            block = library.malloc(size)
            if block and library.mallinfo2().arena == before:
                yield block
            else:
                library.free(block)
                size //= 2


def _libc() -> ctypes.CDLL:
    """With pointers that are wider than ctypes' integers."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    return library
