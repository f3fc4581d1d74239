"""Tile tables for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringattn.kernels import Tile, tables
from ringattn.kernels.gpu import GpuSpec, assumed_gpu
from ringattn.kernels.tables import Table, TableEntry, TuningPoint, attach_options, table_file_name, table_to_json

H200 = assumed_gpu(90, "NVIDIA H200")
RTX = assumed_gpu(86, "NVIDIA RTX A6000")
DATE = "2026-11-21T12:00:00+00:00"
POINT = TuningPoint("forward", "bf16", 128, 128, 4, "full", 8192)
TILE = Tile(64, 64, 4, 2)
HOPPER = attach_options(Tile(128, 64, 8, 3), {"forward_kernel": "hopper"})


def entry(point: TuningPoint = POINT, tile: Tile = TILE, **changed: Any) -> TableEntry:
    measured = {"estimated": False, "date": DATE, "seconds": 1e-3, "spread": 0.01, "beside": 1.1e-3, "baseline": 1.2e-3}
    return TableEntry(
        point, tile, **{**measured, "versions": {"triton": "3.7.1"}, "clocks": {"sm_mhz": 1980}, **changed}
    )


def estimate(point: TuningPoint = POINT, tile: Tile = TILE) -> TableEntry:
    return TableEntry(point, tile, estimated=True, date=DATE, bound=3.5, bound_by="instructions")


def save(folder: Path, *entries: TableEntry, gpu: GpuSpec = H200, triton: tuple[int, int] | None = None) -> Path:
    version = triton or tables.triton_version()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / table_file_name(gpu.name, version)
    path.write_text(json.dumps(table_to_json(Table(gpu.name, gpu.arch, version, entries))))
    return path


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the user's and the package's table folders, both temporary, with no folder set by the environment."""
    user, package = tmp_path / "cache" / "ringattn" / "tiles", tmp_path / "package"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tables.CONFIG_DIR, raising=False)
    monkeypatch.setattr(tables, "PACKAGE_TABLE_FOLDERS", (package,))
    tables.clear_table_cache()
    return user, package
