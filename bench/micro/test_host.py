"""What the host computes for a call: schedules, bounds, positions, the look-up of tiles. No device needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn.comm.topology import Topology
from ringattn.kernels import default_config
from ringattn.kernels.config import config_for
from ringattn.ring import Layout, Mask, bounds
from ringattn.ring.plan import plan
from ringattn.ring.schedule import schedule

TOKENS = 1 << 17
CAUSAL = Mask(causal=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [8, 64, 256])
def test_schedule(benchmark: Any, world: int) -> None:
    layout = Layout.zigzag(1024 * world, world)
    benchmark(lambda: schedule(layout, CAUSAL).hops(world // 2))


def test_schedule_of_two_levels(benchmark: Any) -> None:
    layout, topology = Layout.zigzag(1024 * 64, 64), Topology.grid(8, 8)
    benchmark(lambda: schedule(layout, CAUSAL, topology=topology).hops(20))


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
