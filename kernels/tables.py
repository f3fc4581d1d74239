"""Tuned tiles: what one is chosen for, how it was found, and the table of all of a GPU; ``table_files`` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from .config import SHARED_LIMIT, Tile

NO_GPU = 0
"""The arch of the table of a machine without a GPU."""

KERNELS = ("forward", "dq", "dkdv")
SINGLE_PASS = ("single_pass", "single_pass_deterministic")
"""In place of the last two: `KernelConfig.backward`."""

TUNED = KERNELS + SINGLE_PASS
DTYPES = ("bf16", "fp16", "fp32")
MASKS = ("full", "bounded")
"""What a kernel knows of a mask: none, or an interval of keys per row (causal, window, documents, prefix)."""

ARCH = re.compile(r"sm_(\d{2,3})")
"""The name of a table that was made without a GPU: of a compute capability, not of a product."""

Option = str | int  # bool too
Options = tuple[tuple[str, Option], ...]


@dataclass(frozen=True)
class Chosen(Tile):
    """A tile together with fields of ``KernelConfig`` that go with it: sorted pairs of ``table_files.OPTIONS``."""

    options: Options = ()


def options_of(tile: Tile) -> dict[str, Option]:
    """The fields of ``KernelConfig`` that go with a tile; none where all have their defaults."""
    return dict(tile.options) if isinstance(tile, Chosen) else {}


def with_options(tile: Tile, options: Mapping[str, Option]) -> Tile:
    """``tile`` with fields of ``KernelConfig``; itself without any."""
    return Chosen(**fields_of(tile), options=tuple(sorted(options.items()))) if options else tile


def fields_of(tile: Tile) -> dict[str, Any]:
    """Those of ``Tile``, without options."""
    return {one.name: getattr(tile, one.name) for one in fields(Tile)}


class RefusedTable(ValueError):
    """A table that is not used; the message has its path and the reason."""


class Point(NamedTuple):
    """What a tile is chosen for."""

    kernel: str  # one of TUNED
    dtype: str  # one of DTYPES
    head_dim: int
    head_dim_v: int
    group: int  # query heads per key head
    mask: str  # one of MASKS
    length: int  # tokens on one GPU, of queries and of keys


@dataclass(frozen=True)
class Entry:
    """One tile, and how it was found; ``seconds``, ``spread``, ``beside`` and ``baseline`` are None where estimated."""

    point: Point
    tile: Tile
    estimated: bool  # never measured: compiled, and ranked by `bound`
    date: str  # ISO 8601
    seconds: float | None = None  # median of one launch
    spread: float | None = None  # half the interquartile range over the median
    beside: float | None = None  # median with a communication kernel beside it
    baseline: float | None = None  # median of the built-in default in the same run
    bound: float | None = None  # what an estimate was ranked by; larger is better
    bound_by: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    clocks: Mapping[str, float | str | None] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True)
class Table:
    """All entries of one file."""

    gpu: str  # as the driver names it; sm_90 for a table made without a GPU
    arch: int  # compute capability without the dot
    triton: tuple[int, int]
    entries: tuple[Entry, ...]
    rings: tuple[Mapping[str, Any], ...] = ()
    """Settings of whole rings, as they stand in the file: no kernel reads them, `autotune/rings.py` checks them."""
    path: Path | None = field(default=None, compare=False)  # the file it was read from


def file_name(gpu: str, triton: tuple[int, int]) -> str:
    """``nvidia-h200_triton-3.7.json``: letters, digits and dashes of the GPU's name, so that no name leaves a folder.

    Raises:
        ValueError: a name without a letter or digit.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")[:80]
    if not slug:
        raise ValueError(f"gpu is {gpu!r}: a name of a table takes at least one letter or digit")
    return f"{slug}_triton-{triton[0]}.{triton[1]}.json"


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that one block may take."""
    return SHARED_LIMIT.get(arch, max(SHARED_LIMIT.values()))


def least_shared(point: Point, tile: Tile) -> int:
    """Bytes of shared memory that a tile takes in any case: what its pipeline has in flight of the streamed pair.

    Forward and dQ stream K and V, dK/dV and a single pass Q and dO; one of ``num_stages`` may be in registers. What a
    compiled kernel takes is this or more.
    """
    rows = tile.block_k if point.kernel in ("forward", "dq") else tile.block_q
    size = 4 if point.dtype == "fp32" else 2
    both = rows * (point.head_dim + point.head_dim_v) * size
    return both * (tile.num_stages - 1) if tile.num_stages > 1 else 0
