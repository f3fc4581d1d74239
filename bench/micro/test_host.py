"""What the host computes for a call: schedules, bounds, positions, the look-up of tiles. No device needed."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.bench.micro.fresh import forget
from ringattn.comm.topology.topology import Topology
from ringattn.kernels import Tile, choice, default_config
from ringattn.kernels.config import config_for
from ringattn.kernels.tables import Entry, Gpu, Point, Table, as_json, file_name, triton_version
from ringattn.ring import Layout, Mask, bounds
from ringattn.ring.schedule.plan import plan
from ringattn.ring.schedule.schedule import _schedule, schedule

TOKENS = 1 << 17
ROUNDS = 30
CAUSAL = Mask(causal=True)
CPU = torch.device("cpu")


def scheduled(benchmark: Any, world: int, rank: int, topology: Topology | None = None) -> None:
    """The schedule of a zigzag and a rank's hops, made anew in every round."""

    def fresh() -> tuple[tuple[Layout], dict[str, Any]]:
        forget()
        return (Layout.zigzag(1024 * world, world),), {}

    benchmark.pedantic(
        lambda layout: schedule(layout, CAUSAL, topology=topology).hops(rank), setup=fresh, rounds=ROUNDS
    )
    assert _schedule.cache_info()[:2] == (0, 1), "hits and misses of the last round: it was not made, but found"


@pytest.mark.parametrize("world", [8, 64, 256])
def test_schedule(benchmark: Any, world: int) -> None:
    scheduled(benchmark, world, world // 2)


def test_schedule_of_two_levels(benchmark: Any) -> None:
    scheduled(benchmark, 64, 20, Topology.grid(8, 8))


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_bounds_of_a_hop(benchmark: Any, name: str) -> None:
    layout = getattr(Layout, name)(TOKENS, 8)
    rows, keys = layout.positions(5), layout.positions(2)
    benchmark(bounds, CAUSAL, rows, keys)


def test_positions(benchmark: Any) -> None:
    benchmark(lambda: Layout.zigzag(TOKENS, 8).positions(3))


def test_a_plan_that_is_known(benchmark: Any) -> None:
    """What every call but the first pays."""
    layout = Layout.zigzag(TOKENS, 8)
    plan(layout, CAUSAL, 0, 1, CPU)
    benchmark(plan, layout, CAUSAL, 0, 1, CPU)


def test_built_in_tiles(benchmark: Any) -> None:
    benchmark(config_for, 90, torch.bfloat16, 128)


def test_tiles_of_a_launch(benchmark: Any) -> None:
    """The look-up of a launch without a config, tables included."""
    q = torch.empty(1, 1, 1, 128)
    default_config(q, q)
    benchmark(default_config, q, q)


def test_tile_of_a_tuned_launch(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a table of 144 entries holds it; the first look-up reads the file, and is not counted."""
    gpu = Gpu("NVIDIA H200", 90)
    points = [
        Point(kernel, "bf16", 128, 128, group, "full", 2**power)
        for kernel, group, power in product(("forward", "dq", "dkdv"), (1, 2, 4, 8), range(9, 21))
    ]
    entries = tuple(
        Entry(point, Tile(64, 64, 4, 2), estimated=True, date="2026-01-01T00:00:00+00:00", bound=50.0, bound_by="issue")
        for point in points
    )
    table = Table(gpu.name, gpu.arch, triton_version(), entries)
    (tmp_path / file_name(gpu.name, table.triton)).write_text(json.dumps(as_json(table)))
    monkeypatch.setattr(choice, "gpu_of", lambda device: gpu)
    q, v = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    found = benchmark(default_config, q, v, config_dir=tmp_path, estimated=True)
    assert found.forward == entries[0].tile
