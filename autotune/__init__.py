"""Finds tiles per GPU and keeps them: what may be tried, which of it compiles, which is fastest, where answers live.

The search is handed the functions that compile, check and measure: nothing here needs a GPU. Imported when a name is
asked for, as the command line comes by here before it needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import Shape, gpu_of_arch, points_of, shape_of_config
    from .rings import RingEntry, RingPoint, RingSetting, ring_settings, shared_ring_settings
    from .space import space, why_not
    from .store import save

_MODULES = {
    **dict.fromkeys(("Shape", "gpu_of_arch", "points_of", "shape_of_config"), "model"),
    **dict.fromkeys(("RingEntry", "RingPoint", "RingSetting", "ring_settings", "shared_ring_settings"), "rings"),
    **dict.fromkeys(("space", "why_not"), "space"),
    "save": "store",
}

__all__ = [
    "RingEntry",
    "RingPoint",
    "RingSetting",
    "Shape",
    "gpu_of_arch",
    "points_of",
    "ring_settings",
    "save",
    "shape_of_config",
    "shared_ring_settings",
    "space",
    "why_not",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
