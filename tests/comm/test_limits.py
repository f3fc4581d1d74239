"""Limits on communication: how many blocks and multiprocessors transfers take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringattn import Ring
from ringattn.comm import Limits
from ringattn.comm.world import single_rank
from ringattn.kernels import KernelConfig, Tile
from ringattn.kernels.tile_schedule import DEFAULT_SM_MARGIN


@pytest.mark.parametrize(
    ("limits", "environment", "blocks", "multiprocessors"),
    [
        (Limits(), {}, 8, 8),
        (Limits(channels=4, ctas=16), {}, 4, 4),
        (Limits(channels=4, ctas=4), {}, 4, 4),
        (Limits(ctas=32), {"NCCL_MAX_CTAS": "16"}, 32, 32),  # opening refuses this combination
        (Limits(cga_cluster_size=4), {}, 8, 8 + 8 * 3),  # each of the 8 GPCs may have 3 multiprocessors left over
        (Limits(), {"NCCL_MAX_CTAS": "16", "NCCL_MAX_P2P_NCHANNELS": "4"}, 4, 4),
        (Limits(), {"NCCL_MIN_CTAS": "2"}, 32, 32),
        (Limits(), {"NCCL_CGA_CLUSTER_SIZE": "4"}, 8, 8 + 8 * 3),
        (Limits(), {"NCCL_MAX_CTAS": "0", "NCCL_MIN_CTAS": "many", "NCCL_CGA_CLUSTER_SIZE": "0"}, 8, 8),
    ],
)
def test_blocks_and_multiprocessors_of_transfers(
    limits: Limits, environment: dict[str, str], blocks: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (limits.blocks, limits.multiprocessors) == (blocks, multiprocessors)


def test_the_margin_of_persistent_kernels_is_room_for_two_communicators() -> None:
    assert 2 * Limits().multiprocessors == DEFAULT_SM_MARGIN


@pytest.mark.parametrize(
    ("taken", "options", "margin"),
    [
        ((4,), {"persistent": True}, 4),
        ((0, 4), {"persistent": True}, 4),
        ((4, 4), {"persistent": True}, 8),
        ((64,), {"persistent": True}, 10),  # half of the multiprocessors assumed for the interpreter
        ((8,), {"persistent": True, "sm_margin": 3}, 3),
        ((4, None), {"persistent": True}, None),
    ],
)
def test_a_ring_leaves_room_for_its_own_transfers(
    taken: tuple[int | None, ...], options: dict[str, Any], margin: int | None
) -> None:
    tile = Tile(16, 16, 4, 1)
    with Ring(single_rank()) as ring:
        ring._transports = tuple(SimpleNamespace(multiprocessors=count, close=bool) for count in taken)
        config = ring.with_sm_margin(KernelConfig(tile, tile, tile, **options))
    assert config is not None and config.sm_margin == margin
