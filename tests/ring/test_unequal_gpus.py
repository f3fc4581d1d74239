"""A ring of unequal GPUs: tiles from each GPU's table, and one setting for both ends of each link."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, reference, ring_attention
from ringattn.autotune import RingEntry, RingPoint, RingSetting, ring_settings, save, save_ring, shared_ring_settings
from ringattn.bench.common import launching
from ringattn.bench.common.process_group import process_group
from ringattn.bench.common.ranks import launched_rank
from ringattn.comm.watchdog.telemetry import RankRow, Report
from ringattn.kernels import Tile, attention, launch, launch_plan
from ringattn.kernels.tables import KERNELS, TuningPoint

from ..support.tile_tables import H200, RTX, entry, folders

__all__ = ["folders"]

GPUS = (H200, RTX, H200)
SEQLEN = 70
TILES = {H200: Tile(32, 16, 4, 1), RTX: Tile(16, 32, 4, 1)}

RING = RingPoint(len(GPUS), 8, 4, 16, "fp32", "bounded", SEQLEN)
CHOSEN = {H200: RingSetting(chunks=2), RTX: RingSetting(chunks=4, channels=2)}


def point(kernel: str, mask: str) -> TuningPoint:
    return TuningPoint(kernel, "fp32", 16, 16, 2, mask, SEQLEN)


def test_each_rank_takes_its_own_tiles(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The result equals that of one device, whatever tiles other ranks use."""
    for gpu, tile in TILES.items():
        save(folders[0], gpu, [entry(point(kernel, mask), tile) for kernel in KERNELS for mask in ("full", "bounded")])
    local, tiles = threading.local(), [set[Tile]() for _ in GPUS]
    monkeypatch.setattr(launch_plan, "gpu_specs", lambda device: getattr(local, "gpu", None))

    def record_tile(tile: Tile) -> dict[str, Any]:
        tiles[local.rank].add(tile)
        return launch.tile_options(tile)

    monkeypatch.setattr(attention, "tile_options", record_tile)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, SEQLEN, heads, 16) for heads in (2, 1, 1, 2))
    layout = Layout.contiguous(SEQLEN, len(GPUS))

    def rank(group: Any) -> list[Tensor]:
        local.rank, local.gpu = group.rank(), GPUS[group.rank()]
        leaves = [layout.shard(x, local.rank).requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, layout=layout, group=group, causal=True, backend="triton")
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(dout, local.rank))]

    with LocalWorld(len(GPUS)) as world:
        parts = world.run(rank)
    for number, gpu in enumerate(GPUS):
        assert tiles[number] == {TILES[gpu]}
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    exact = reference.attention(*whole, causal=True)[0]
    right = [exact.detach(), *torch.autograd.grad(exact, whole, dout.double())]
    for name, expected, *made in zip(("out", "dq", "dk", "dv"), right, *parts, strict=True):
        assert torch.allclose(layout.unshard(made).double(), expected, rtol=1e-4, atol=1e-5), name


def everyone(mine: Any) -> list[Any]:
    values = [None] * len(GPUS)
    dist.all_gather_object(values, mine)
    return values


def settings(folder: str) -> dict[str, list[Any]]:
    """Return what all ranks got when this rank's GPU has another name than its neighbours'."""
    place = launched_rank()
    assert place is not None
    gpu = GPUS[place.rank]
    with process_group(place, torch.device("cpu")):
        shared = everyone(shared_ring_settings(RING, gpu, config_dir=folder))
        own = everyone(ring_settings(RING, gpu, folder))
        two = dist.new_group([1, 2])  # a group without rank 0
        of_two = everyone(shared_ring_settings(RING, gpu, two, folder) if place.rank else None)
        error = ""
        try:
            shared_ring_settings(RING, gpu, config_dir=folder if place.rank else "/nowhere")
        except ValueError as refused:
            error = str(refused)
        return {"own": own, "shared": shared, "of two": of_two, "errors": everyone(error)}


@pytest.mark.nightly
def test_all_ranks_take_rank_0s_ring_settings(tmp_path: Path) -> None:
    """Processes over gloo, with a different setting in each GPU's table; all ranks take rank 0's."""
    for gpu, setting in CHOSEN.items():
        save_ring(tmp_path, gpu, RingEntry(RING, setting, 1e-3, 0.01, 1.2e-3))
    message = "config_dir is '/nowhere': there is no such folder. `ringattn tune --save-dir` creates it."
    assert launching.launch_processes(len(GPUS), settings, str(tmp_path)) == {
        "own": [CHOSEN[gpu] for gpu in GPUS],
        "shared": [CHOSEN[GPUS[0]]] * len(GPUS),
        "of two": [None, CHOSEN[GPUS[1]], CHOSEN[GPUS[1]]],
        "errors": [message] * len(GPUS),
    }


def test_speeds_are_equal_on_all_ranks_and_feed_layouts() -> None:
    """A rank that computes twice as long for the same work has half the speed; telemetry differs between ranks."""

    def on_rank(group: Any) -> list[tuple[float, ...]]:
        with Ring(group) as ring:
            before = ring.speeds()
            x = torch.randn(1, 4, 1, 16)
            ring_attention(x, x, x, layout="contiguous", ring=ring)
            row = RankRow(1, 0.0, "", compute=2.0 if group.rank() == 1 else 1.0)
            others = Report((group.rank() + 1) % 3, 0.0, RankRow(1, 0.0, "", compute=9.0))  # as of now, or older
            ring.telemetry = lambda: (others, Report(group.rank(), 0.0, row))  # type: ignore[method-assign]
            for wrong in ([1, 0, 1], [1, -1, 1], [1, 1], [1, math.inf, 1]):
                with pytest.raises(ValueError, match=f"work is {re.escape(str(wrong))}: it must be 3 finite numbers"):
                    ring.speeds(wrong)
            speeds = [before, *map(ring.speeds, (None, [1, 2, 1], [1000, 1000, 1]))]
            ring.telemetry = lambda: (Report(group.rank(), 0.0, row),) if group.rank() else ()  # type: ignore[method-assign]
            assert ring.speeds() == before, "rank 0 has not computed yet"
            return speeds

    with LocalWorld(3) as world:
        assert world.run(on_rank) == [[(1.0,) * 3, (77 / 64, 38 / 64, 77 / 64), (1.0,) * 3, (2.0, 1.0, 1 / 64)]] * 3
    layout = Layout.packed([0, 30_000, 60_000], 3, speeds=(77 / 64, 38 / 64, 77 / 64))
    assert layout.lengths[1] < min(layout.lengths[0], layout.lengths[2])
