"""Compilation without a GPU: inside :func:`compiling_for`, tensors on the meta device stand for a given GPU.

The host entries then check arguments and choose tiles as on that GPU, and pass the launch to a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .gpu import GpuSpec


class CompileTarget(NamedTuple):
    """GPU to compile for, and the callback that gets its launches."""

    gpu: GpuSpec
    on_launch: Callable[..., None]  # called as take(kernel, grid, *args, **options) for every launch


_COMPILE_TARGET: ContextVar[CompileTarget | None] = ContextVar("target", default=None)


def compile_target() -> CompileTarget | None:
    """Return the target that the meta device stands for in this context, or None."""
    return _COMPILE_TARGET.get()


@contextmanager
def compiling_for(target: CompileTarget) -> Iterator[None]:
    """Let the meta device stand for a target in this thread until the context ends."""
    token = _COMPILE_TARGET.set(target)
    try:
        yield
    finally:
        _COMPILE_TARGET.reset(token)
