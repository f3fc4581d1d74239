"""Limits on communication: how many blocks and multiprocessors transfers take."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringattn import Ring
from ringattn.comm import Limits
from ringattn.comm.arg_checks import SECONDS
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
        (Limits(), {"NCCL_MIN_P2P_NCHANNELS": "2", "NCCL_CGA_CLUSTER_SIZE": "default"}, 32, 32),
        (Limits(), {"NCCL_CGA_CLUSTER_SIZE": "4"}, 8, 8 + 8 * 3),
        (Limits(cga_cluster_size=2), {"NCCL_CGA_CLUSTER_SIZE": "4"}, 8, 8 + 8 * 1),
        (Limits(), {"NCCL_MAX_CTAS": "0", "NCCL_MIN_CTAS": "many", "NCCL_CGA_CLUSTER_SIZE": "0"}, 8, 8),
    ],
)
def test_blocks_and_multiprocessors_of_transfers(
    limits: Limits, environment: dict[str, str], blocks: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (limits.blocks, limits.multiprocessors) == (blocks, multiprocessors)


def test_limits_end_where_nccl_ends() -> None:
    most = Limits(channels=64, ctas=64, cga_cluster_size=8, bytes_per_second=1)
    assert most == Limits(np.int64(64), np.int32(64), np.float32(1), np.int8(8))  # type: ignore[arg-type]
    assert {type(limit) for limit in vars(most).values()} == {int, float}
    assert Limits(ctas=4, cga_cluster_size=4).blocks == 4
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"channels": 128}, "channels is 128"), ({"ctas": 0}, "ctas is 0"), ({"ctas": 12}, "ctas is 12"),
        ({"bytes_per_second": math.inf}, "bytes_per_second is inf"),
        ({"ctas": 2, "cga_cluster_size": 4}, "cga_cluster_size is 4; it must be at most 2"),
        ({"ctas": 64, "cga_cluster_size": 16}, "cga_cluster_size is 16: it must be a power of two from 1 to 8"),
    ]  # fmt: skip
    for limits, match in wrong:
        with pytest.raises(ValueError, match=match):
            Limits(**limits)
    assert SECONDS.check("deadline", 1e9) == 1e9
    for seconds in (0, 1.1e9):
        with pytest.raises(ValueError, match="deadline is"):
            SECONDS.check("deadline", seconds)


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
