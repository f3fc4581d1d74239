"""What may be tried at a point: pure, complete, and nothing that arithmetic already rules out."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ringattn.autotune.model import Shape, gpu_of_arch, points_of, shape_of_config
from ringattn.autotune.space import (
    CONFIG_FIELDS,
    DEFAULTS,
    MOST_VALUES,
    SCHEDULE_FIELDS,
    grid,
    nearest,
    schedules,
    space,
    tile_text,
    values_kept,
    why_not,
)
from ringattn.kernels import KernelConfig, Tile
from ringattn.kernels.config import SHARED_LIMIT
from ringattn.kernels.tables import OPTIONS, TUNED, Point, least_shared, options_of

from ..support.tune_cases import POINT

POINTS = [
    Point(kernel, dtype, dims[0], dims[1], 4, mask, 8192)
    for kernel, dtype, dims, mask in product(
        TUNED, ("bf16", "fp32"), ((64, 64), (128, 128), (192, 128), (256, 256)), ("full", "bounded")
    )
]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_combination_is_tried_or_has_a_reason(arch: int) -> None:
    for point in POINTS:
        every, tried = grid(point), space(point, arch)
        assert len({*every}) == len(every)
        assert tried, f"nothing for {point} on sm_{arch}"
        assert [tile for tile in every if why_not(tile, point, arch) is None] == tried
        assert all(least_shared(point, tile) <= SHARED_LIMIT[arch] for tile in tried)


def test_registers_hold_what_is_tried_where_they_hold_it() -> None:
    wide = Tile(128, 128, 4, 2)  # 128 x 128 sums and as many scores, in 4 warps: 256 values per thread
    assert values_kept(wide, POINT) / 128 == 256 > MOST_VALUES
    assert "256 fp32 values per thread" in str(why_not(wide, POINT, 90))
    assert why_not(wide, POINT, 100) is None  # tensor memory holds them


@pytest.mark.parametrize(
    ("tile", "changed", "told"),
    [
        (Tile(128, 128, 8, 4), {}, "takes at least 196608 bytes of shared memory, a block of sm_86 has 101376"),
        (Tile(64, 64, 4, 1), {"length": 32}, "a side is longer than 32 tokens"),
        (Tile(32, 16, 8, 1), {}, "2 scores per thread, fewer than 8"),
    ],
)
def test_reasons(tile: Tile, changed: dict[str, int], told: str) -> None:
    assert why_not(tile, POINT._replace(**changed), 86) == told  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "arch", "stages"),
    [
        ({}, 90, {64: [2, 3, 4], 128: [2, 3]}),  # 232,448 B: 32 KB of queries, and by stage 32 or 64 KB
        ({"head_dim": 256, "head_dim_v": 256}, 90, {64: [2]}),
        ({"mask": "bounded", "dtype": "fp16"}, 90, {64: [2, 3, 4], 128: [2, 3]}),
        ({"dtype": "fp32"}, 90, {}),
        ({"head_dim_v": 64}, 90, {}),
        ({"kernel": "dq"}, 90, {}),
        ({}, 100, {}),
    ],
)
def test_the_hopper_forward_is_tried_where_it_is_written_for(
    changed: dict[str, Any], arch: int, stages: dict[int, list[int]]
) -> None:
    found: dict[int, list[int]] = {}
    for tile in space(POINT._replace(**changed), arch):
        if options_of(tile):
            assert (tile.block_q, tile.num_warps, options_of(tile)) == (128, 8, {"forward_kernel": "hopper"})
            found.setdefault(tile.block_k, []).append(tile.num_stages)
    assert found == stages


def test_what_is_tried_is_what_a_table_takes() -> None:
    for kernel in TUNED:
        config = {**CONFIG_FIELDS[kernel], **SCHEDULE_FIELDS[kernel]}
        assert {*config} == {*OPTIONS[kernel]}, "an option that no table is made with"
        for name, values in config.items():
            assert all(OPTIONS[kernel][name](value) is None for value in values if value is not None)
            assert DEFAULTS[name] in values


@pytest.mark.parametrize(
    ("kernel", "group", "arch", "head_dims", "count"),
    [
        # orders; not, all but a margin, and all multiprocessors; packed or not
        ("forward", 4, 90, (128, 128), 2 * 3 * 2 - 1),
        ("forward", 1, 90, (128, 128), 2 * 3 - 1),
        ("dq", 4, 90, (128, 128), 2 * 3 * 2 - 1),
        ("dkdv", 4, 90, (128, 128), 2 * 3 * 3 * 2 - 1),  # 1, 2 and 4 splits; by pointers or descriptors
        ("dkdv", 3, 90, (128, 64), 2 * 3 * 2 - 1),
        ("dkdv", 3, 80, (128, 64), 2 * 3 - 1),  # no descriptors: on such GPUs, and of such head dims
        ("dkdv", 3, 90, (128, 96), 2 * 3 - 1),
        ("dkdv", 3, 90, (8, 16), 2 * 3 - 1),
        ("single_pass", 4, 90, (128, 128), 0),
    ],
)
def test_schedules_are_tried_with_the_best_tiles(
    kernel: str, group: int, arch: int, head_dims: tuple[int, int], count: int
) -> None:
    """Not with every tile: what they change is not what the loop does."""
    point = POINT._replace(kernel=kernel, group=group, head_dim=head_dims[0], head_dim_v=head_dims[1])
    tiles = space(point, arch)
    assert not any({*options_of(tile)} - {"forward_kernel"} for tile in tiles)
    plain = next(tile for tile in tiles if not options_of(tile))
    others = schedules(plain, point, arch)
    assert len({*others}) == len(others) == count
    for other in others:
        assert other != plain and tile_text(other).startswith(tile_text(plain)) and options_of(other)
        KernelConfig(other, other, other, **options_of(other))  # type: ignore[arg-type]
    assert [schedules(tile, point, arch) for tile in tiles if options_of(tile)] == [[]] * (
        5 if kernel == "forward" else 0
    )


def test_a_short_shard_still_has_tiles() -> None:
    assert space(POINT._replace(length=1, dtype="fp32"), 90)


def test_points() -> None:
    shape = Shape(32, 8, 128, 128)
    causal = points_of(shape, [32768, 8192, 8192], causal=True)
    assert len(causal) == 5 * 2 * 2 == len({*causal})
    assert {point.group for point in causal} == {4}
    assert {point.mask for point in points_of(shape, [1], causal=False)} == {"full"}
    with pytest.raises(ValueError, match=r"seqlen is \[8192, 0\]: it takes"):
        points_of(shape, [8192, 0], causal=True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((6, 4, 64, 64), "heads is 6: it must be a multiple of the 4 heads of keys"),
        ((6, 0, 64, 64), "heads is 6"),
        ((4, 4, 257, 64), "head_dim is 257: it must be 1 to 256"),
        ((4, 4, 64, 0), "value_dim is 0"),
        ((4, 4, 64, 64, "fp8"), "dtype is 'fp8': it must be one of bf16, fp16, fp32"),
    ],
)
def test_no_attention(given: tuple[int, int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Shape(*given)


def test_an_arch_by_name() -> None:
    assert gpu_of_arch("sm_120") == ("sm_120", 120)
    for wrong in ("sm_91", "90", "hopper", ""):
        with pytest.raises(ValueError, match="it must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"):
            gpu_of_arch(wrong)


# models by their config.json

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"}
CONFIGS = [
    (LLAMA, Shape(32, 8, 128, 128)),
    ({**LLAMA, "head_dim": 64, "torch_dtype": "float16"}, Shape(32, 8, 64, 64, "fp16")),
    ({**LLAMA, "num_key_value_heads": None, "head_dim": None}, Shape(32, 32, 128, 128)),
    ({"n_head": 12, "n_embd": 768}, Shape(12, 12, 64, 64)),
    ({"n_head": 71, "hidden_size": 4544, "multi_query": True}, Shape(71, 1, 64, 64)),
    ({"text_config": LLAMA, "vision_config": {"num_attention_heads": 16}}, Shape(32, 8, 128, 128)),
    (
        {
            "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "dtype": "float8_e4m3fn",
        },
        Shape(128, 128, 192, 128),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "shape"), CONFIGS)
def test_a_models_config(data: dict[str, object], shape: Shape, tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(data))
    assert shape_of_config(path) == shape
    assert shape_of_config(path, "fp32").dtype == "fp32"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "it has none of num_attention_heads, n_head, n_heads"),
        ("[]", "it is []: it must be an object"),
        ("{", "Expecting"),
        (json.dumps({**LLAMA, "num_attention_heads": "32"}), "num_attention_heads is '32'"),
        (json.dumps({**LLAMA, "num_key_value_heads": 5}), "heads is 32: it must be a multiple of the 5"),
        (json.dumps({**LLAMA, "head_dim": 512}), "head_dim is 512: it must be 1 to 256"),
        (json.dumps({"num_attention_heads": 8}), "it has none of hidden_size"),
    ],
)
def test_what_is_no_config_is_refused_with_its_path(text: str, told: str, tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as error:
        shape_of_config(path)
    assert str(error.value).startswith(f"{path} does not say an attention: ") and told in str(error.value)


@pytest.mark.parametrize("point", POINTS[::7], ids=str)
def test_the_nearest_are_the_tile_and_its_neighbours(point: Point) -> None:
    """No other tile without options is nearer than those that are taken; the tile itself, where it may be, is first."""
    tiles = space(point, 90)
    middle = next(tile for tile in tiles if (tile.num_warps, tile.num_stages) == (4, 2))
    found = nearest(tiles, middle, 4)
    assert found[0] == middle and len(found) == len({*found}) == 4 and not any(options_of(tile) for tile in found)

    def steps(tile: Tile) -> int:
        sides = [(tile.block_q, middle.block_q), (tile.block_k, middle.block_k), (tile.num_warps, middle.num_warps)]
        halvings = sum(max(one, its).bit_length() - min(one, its).bit_length() for one, its in sides)
        return halvings + abs(tile.num_stages - middle.num_stages)

    left = [tile for tile in tiles if tile not in found and not options_of(tile)]
    assert max(map(steps, found)) <= min(map(steps, left))
    assert nearest(tiles, replace(middle, num_stages=9), 1)[0].num_stages == max(
        tile.num_stages for tile in tiles if (tile.block_q, tile.block_k, tile.num_warps) == astuple(middle)[:3]
    )
