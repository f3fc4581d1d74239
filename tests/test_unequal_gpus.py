"""A ring of unequal GPUs: each rank's tiles by its own GPU's table, and what both ends of a link share one for all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, reference, ring_attention
from ringattn.autotune import save
from ringattn.kernels import Tile, attention, choice, launch
from ringattn.kernels.tables import KERNELS, Point

from .tile_tables import H200, RTX, entry, folders

__all__ = ["folders"]

GPUS = (H200, RTX, H200)
SEQLEN = 70
TILES = {H200: Tile(32, 16, 4, 1), RTX: Tile(16, 32, 4, 1)}


def point(kernel: str, mask: str) -> Point:
    return Point(kernel, "fp32", 16, 16, 2, mask, SEQLEN)


def test_each_rank_takes_its_own_tiles(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the result is that of one device, forward and backward, whatever the others' tiles are."""
    for gpu, tile in TILES.items():
        save(folders[0], gpu, [entry(point(kernel, mask), tile) for kernel in KERNELS for mask in ("full", "bounded")])
    here, seen = threading.local(), [set[Tile]() for _ in GPUS]
    monkeypatch.setattr(choice, "gpu_of", lambda device: getattr(here, "gpu", None))

    def noted(tile: Tile) -> dict[str, Any]:
        seen[here.rank].add(tile)
        return launch.options(tile)

    monkeypatch.setattr(attention, "options", noted)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, SEQLEN, heads, 16) for heads in (2, 1, 1, 2))
    layout = Layout.contiguous(SEQLEN, len(GPUS))

    def rank(group: Any) -> list[Tensor]:
        here.rank, here.gpu = group.rank(), GPUS[group.rank()]
        leaves = [layout.shard(x, here.rank).requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, layout=layout, group=group, causal=True, backend="triton")
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(dout, here.rank))]

    with LocalWorld(len(GPUS)) as world:
        parts = world.run(rank)
    for number, gpu in enumerate(GPUS):
        assert seen[number] == {TILES[gpu]}
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    exact = reference.attention(*whole, causal=True)[0]
    right = [exact.detach(), *torch.autograd.grad(exact, whole, dout.double())]
    for name, expected, *made in zip(("out", "dq", "dk", "dv"), right, *parts, strict=True):
        assert torch.allclose(layout.unshard(made).double(), expected, rtol=1e-4, atol=1e-5), name
