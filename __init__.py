"""Exact attention over a sequence that is split across GPUs.

Names are imported on first use, so ``import ringattn`` does not import torch, triton, cupy, typer or matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import autotune, bench, comm, conformance, examples, integrations, kernels, reference, ring, tools
    from .comm import LocalWorld, single_rank
    from .ring import (
        Documents,
        Layout,
        LayoutLike,
        LocalAttention,
        PrefixTree,
        RectangleAttention,
        Ring,
        Session,
        Supports,
        checkpoint_policy,
        halo,
        merge,
        positions,
        register_backend,
        relayout,
        ring_attention,
        roll,
        shard,
        unshard,
    )

__version__ = "0.1.0"
__all__ = [
    "Documents",
    "Layout",
    "LayoutLike",
    "LocalAttention",
    "LocalWorld",
    "PrefixTree",
    "RectangleAttention",
    "Ring",
    "Session",
    "Supports",
    "__version__",
    "autotune",
    "bench",
    "checkpoint_policy",
    "comm",
    "conformance",
    "examples",
    "halo",
    "integrations",
    "kernels",
    "merge",
    "positions",
    "reference",
    "register_backend",
    "relayout",
    "ring",
    "ring_attention",
    "roll",
    "shard",
    "single_rank",
    "tools",
    "unshard",
]

_FOLDERS = (
    "autotune",
    "bench",
    "comm",
    "conformance",
    "examples",
    "integrations",
    "kernels",
    "validators",
    "reference",
    "ring",
    "tools",
)
_RING = (
    "Documents Layout LayoutLike LocalAttention PrefixTree RectangleAttention Ring Session Supports "
    "checkpoint_policy halo merge positions register_backend relayout ring_attention roll shard unshard"
)
_HOME = dict.fromkeys(_RING.split(), "ring")
_HOME |= dict.fromkeys(("LocalWorld", "single_rank"), "comm")

if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports misspelt names

    def __getattr__(name: str) -> object:
        if name in _FOLDERS:
            return import_module(f".{name}", __name__)
        if name in _HOME:
            value = getattr(import_module(f".{_HOME[name]}", __name__), name)
            globals()[name] = value  # the next lookup does not call __getattr__
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
