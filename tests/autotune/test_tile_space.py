"""Tests of the candidate tiles and schedules at a point."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from ringattn.autotune.compile import DEFAULTS
from ringattn.autotune.tile_space import (
    CONFIG_FIELDS,
    MAX_THREAD_VALUES,
    SCHEDULE_FIELDS,
    ModelShape,
    gpu_for_arch,
    is_worth_compiling,
    model_points,
    nearest_tiles,
    register_values,
    tile_candidates,
    tile_schedules,
    tile_text,
)
from ringattn.kernels import KernelConfig, Tile
from ringattn.kernels.gpu import ARCHS, shared_limit
from ringattn.kernels.tables import TUNABLE_OPTIONS, TUNED_KERNELS, TuningPoint, min_shared_bytes, tuned_options

from ..support.tune_cases import POINT

POINTS = [
    TuningPoint(kernel, dtype, dims[0], dims[1], 4, mask, 8192)
    for kernel, dtype, dims, mask in product(
        TUNED_KERNELS, ("bf16", "fp32"), ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)), ("full", "bounded")
    )
]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_point_has_candidates_that_fit(arch: int) -> None:
    for point in POINTS:
        tried = tile_candidates(point, arch)
        assert tried and len({*tried}) == len(tried), f"for {point} on sm_{arch}"
        assert all(min_shared_bytes(point, tile) <= shared_limit(arch) for tile in tried)
    assert tile_candidates(POINT._replace(length=1, dtype="fp32"), arch), "a short shard still has tiles"


@pytest.mark.parametrize(("tile", "changed", "arch", "worth"), [
    (Tile(128, 128, 8, 4), {}, 86, False),  # needs 196,608 bytes of shared memory, has 101,376
    (Tile(128, 128, 8, 2), {}, 90, True),
    (Tile(64, 64, 4, 1), {"length": 32}, 90, False),  # a block is longer than the shard
    (Tile(32, 16, 4, 1), {}, 90, False),  # too few scores per thread: 4
    (Tile(32, 32, 4, 1), {}, 90, True),  # 8 scores per thread
    (Tile(128, 128, 4, 2), {}, 90, False),  # accumulators and scores of 128 x 128: 256 values per thread
    (Tile(128, 128, 4, 2), {}, 100, True),  # tensor memory holds the accumulators
    (Tile(64, 128, 4, 2), {"length": 64}, 90, False),  # a block is longer than the shard
    (Tile(32, 32, 8, 1), {"length": 32}, 90, True),  # 4 scores per thread, but there are no more
    (Tile(16, 16, 4, 1), {"head_dim_v": 512}, 90, True),  # 2 scores per thread are enough for wide heads
])  # fmt: skip
def test_tiles_that_cannot_work_are_no_candidates(tile: Tile, changed: dict[str, Any], arch: int, worth: bool) -> None:
    assert is_worth_compiling(tile, POINT._replace(**changed), arch) is worth
    assert register_values(Tile(128, 128, 4, 2), POINT) / 128 == 256 > MAX_THREAD_VALUES
    assert any(tile.block_q == 16 for tile in tile_candidates(POINT._replace(head_dim_v=512), 90))


@pytest.mark.parametrize(
    ("kernel", "values"),
    [("forward", 64 * 48 + 64 * 32), ("dq", 64 * 96 + 2 * 64 * 32), ("dkdv", 32 * 144 + 2 * 64 * 32)],
)
def test_a_program_keeps_its_accumulators_and_scores(kernel: str, values: int) -> None:
    point = POINT._replace(kernel=kernel, head_dim=96, head_dim_v=48)
    assert register_values(Tile(64, 32, 4, 2), point) == values


@pytest.mark.parametrize(("changed", "arch", "stages"), [
    ({}, 90, {64: [2, 3, 4], 128: [2, 3]}),  # 232,448 bytes hold 32 KB of queries and 32 or 64 KB per stage
    ({"head_dim": 256, "head_dim_v": 256}, 90, {64: [2]}),
    ({"dtype": "fp32"}, 90, {}),
    ({"head_dim_v": 64}, 90, {}),
    ({"head_dim": 96, "head_dim_v": 96}, 90, {}),
    ({}, 100, {}),
])  # fmt: skip
def test_hopper_forward_candidates(changed: dict[str, Any], arch: int, stages: dict[int, list[int]]) -> None:
    by_head_dim: dict[int, list[int]] = {}
    for tile in tile_candidates(POINT._replace(**changed), arch):
        if tuned_options(tile):
            assert (tile.block_q, tile.num_warps, tuned_options(tile)) == (128, 8, {"forward_kernel": "hopper"})
            by_head_dim.setdefault(tile.block_k, []).append(tile.num_stages)
    assert by_head_dim == stages


def test_candidate_options_are_valid_in_tables() -> None:
    for kernel in TUNED_KERNELS:
        config = {**CONFIG_FIELDS[kernel], **SCHEDULE_FIELDS[kernel]}
        assert {*config} == {*TUNABLE_OPTIONS[kernel]}, "an option that no table is made with"
        for name, values in config.items():
            assert {*values} - {None} <= {*TUNABLE_OPTIONS[kernel][name]}
            assert DEFAULTS[name] in values


@pytest.mark.parametrize(("kernel", "group", "arch", "head_dims", "count"), [
    # two orders; not persistent, persistent with and without a margin; packed or not; loads by pointers
    ("forward", 4, 90, (128, 128), 2 * 3 * 2 - 1 + 1),
    ("forward", 1, 120, (128, 128), 2 * 3 - 1),
    ("dq", 1, 90, (128, 128), 2 * 3 - 1 + 1),
    ("dkdv", 4, 90, (128, 128), 2 * 3 * 3 * 2 - 1),  # 1, 2 and 4 splits; pointers or descriptors
    ("dkdv", 3, 90, (128, 64), 2 * 3 * 2 - 1),
    ("dkdv", 3, 80, (128, 64), 2 * 3 - 1),  # no descriptors on this GPU or with this head dim
    ("dkdv", 3, 90, (128, 96), 2 * 3 - 1),
    ("single_pass", 4, 90, (128, 128), 0),
])  # fmt: skip
def test_number_of_schedules_of_a_tile(
    kernel: str, group: int, arch: int, head_dims: tuple[int, int], count: int
) -> None:
    point = POINT._replace(kernel=kernel, group=group, head_dim=head_dims[0], head_dim_v=head_dims[1])
    tiles = tile_candidates(point, arch)
    assert not any({*tuned_options(tile)} - {"forward_kernel"} for tile in tiles)
    plain = next(tile for tile in tiles if not tuned_options(tile))
    others = tile_schedules(plain, point, arch)
    assert len({*others}) == len(others) == count
    for other in others:
        assert other != plain and tile_text(other).startswith(tile_text(plain)) and tuned_options(other)
        KernelConfig(other, other, other, **tuned_options(other))  # type: ignore[arg-type]
    assert not any(tile_schedules(tile, point, arch) for tile in tiles if tuned_options(tile))


def test_nearest_returns_the_tile_and_its_neighbours() -> None:
    tiles, middle = tile_candidates(POINT, 90), Tile(64, 64, 4, 2)
    chosen = nearest_tiles(tiles, middle, 6)
    assert chosen[0] == middle and not any(tuned_options(tile) for tile in chosen)
    assert {*chosen[1:]} == {  # one number halved or doubled, or one stage more or less
        Tile(32, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 3)
    }  # fmt: skip


def test_points_of_a_model() -> None:
    shape = ModelShape(32, 8, 128, 128)
    causal = model_points(shape, [32768, 8192, 8192], causal=True)
    assert len(causal) == 5 * 2 * 2 == len({*causal})
    assert {point.group for point in causal} == {4}
    assert {point.mask for point in model_points(shape, [1], causal=False)} == {"full"}
    assert gpu_for_arch("sm_120")[:2] == ("sm_120", 120)


@pytest.mark.parametrize(("made", "message"), [
    (lambda: ModelShape(6, 4, 64, 64), "heads is 6: it must be a multiple of kv_heads, 4"),
    (lambda: ModelShape(6, 0, 64, 64), "heads is 6"),
    (lambda: ModelShape(0, 4, 64, 64), "heads is 0"),
    (lambda: ModelShape(4, 4, 64, 513), "value_dim is 513: it must be between 1 and 512"),
    (lambda: ModelShape(4, 4, 64, 64, "fp8"), "dtype is 'fp8': it must be one of bf16, fp16, fp32"),
    (lambda: model_points(ModelShape(1, 1, 64, 64), [8192, 0], causal=True), "seqlen is [8192, 0]: it must have"),
    (lambda: gpu_for_arch("sm_91"), "arch is 'sm_91': it must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
])  # fmt: skip
def test_invalid_points_and_gpus_are_refused(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made()
