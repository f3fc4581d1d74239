"""The GPU of tensors on the meta device: the one that launches are compiled for, which need not be here.

``kernels.attention_forward`` and its like then check, choose and hand over a launch as they do on that GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .gpu import GpuSpec


class Target(NamedTuple):
    """The GPU that launches are compiled for, and who gets them instead of a device."""

    gpu: GpuSpec
    take: Callable[..., None]  # is handed (kernel, grid, *arguments, **options) of every launch


_TARGET: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target | None:
    """What tensors on the meta device stand for now; None: they are only that."""
    return _TARGET.get()


@contextmanager
def compiling_for(made: Target) -> Iterator[None]:
    """Until it ends, in this thread."""
    token = _TARGET.set(made)
    try:
        yield
    finally:
        _TARGET.reset(token)
