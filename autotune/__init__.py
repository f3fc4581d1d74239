"""Autotuning of tiles and ring settings: candidates, compilation, search on a GPU, and tables.

The search takes compile, check and measure functions as arguments, so most of it runs without a GPU. Submodules are
imported on first use, because the command line imports this package before it needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ring_table import RingEntry, RingPoint, RingSetting, ring_settings, save_ring, shared_ring_settings
    from .store import save

__all__ = ["RingEntry", "RingPoint", "RingSetting", "ring_settings", "save", "save_ring", "shared_ring_settings"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".store" if name == "save" else ".ring_table", __name__), name)
