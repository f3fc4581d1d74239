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


class Target(NamedTuple):
    """GPU to compile for, and the callback that gets its launches."""

    gpu: GpuSpec
    take: Callable[..., None]  # called as take(kernel, grid, *args, **options) for every launch


_TARGET: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target | None:
    """Return the target that the meta device stands for in this context, or None."""
    return _TARGET.get()


@contextmanager
def compiling_for(made: Target) -> Iterator[None]:
    """Let the meta device stand for a target in this thread until the context ends."""
    token = _TARGET.set(made)
    try:
        yield
    finally:
        _TARGET.reset(token)
