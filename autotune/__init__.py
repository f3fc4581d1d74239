"""Finds tiles per GPU and keeps them: what may be tried, which of it compiles, which is fastest, where answers live.

The search is handed the functions that compile, check and measure: nothing here needs a GPU.
"""

from .cards import Shape, gpu_of_arch, points_of
from .journal import Journal
from .models import shape_of_config
from .pool import Failure, run_jobs
from .ranking import Job, Judge, Rank, Ranked, Verdict, rank_candidates, tile_text
from .rings import RingEntry, RingPoint, RingSetting, ring_settings, shared_ring_settings
from .search import Budget, Measured, Reading, Search, Trials, planned
from .space import dealt, grid, nearest, space, why_not
from .store import known, merged, private_folder, save

__all__ = [
    "Budget",
    "Failure",
    "Job",
    "Journal",
    "Judge",
    "Measured",
    "Rank",
    "Ranked",
    "Reading",
    "RingEntry",
    "RingPoint",
    "RingSetting",
    "Search",
    "Shape",
    "Trials",
    "Verdict",
    "dealt",
    "gpu_of_arch",
    "grid",
    "known",
    "merged",
    "nearest",
    "planned",
    "points_of",
    "private_folder",
    "rank_candidates",
    "ring_settings",
    "run_jobs",
    "save",
    "shape_of_config",
    "shared_ring_settings",
    "space",
    "tile_text",
    "why_not",
]
