"""What the baseline ring of ``bench ring`` computes of each block."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.ring import usual_ring


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parts_of_the_usual_ring_cover_what_is_visible(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, rows = 3, 4
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    held = AttentionConfig(world * rows, world).held
    for step in range(world):
        mine, theirs = held.positions(rank), held.positions((rank - step) % world)
        seen = theirs[None] <= mine[:, None]
        part = usual_ring.Part(step, rows, causal=True)
        computed = torch.zeros_like(seen)
        block = computed[part.rows, part.keys]
        block[:] = torch.ones(block.shape).tril() if part.causal else 1
        assert computed.equal(seen)
