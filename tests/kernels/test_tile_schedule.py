"""The tile schedule: its arithmetic against brute force, and kernels with every order of tiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from ringattn.kernels import (
    FULL,
    BlockSparseIndex,
    Bounds,
    KernelConfig,
    Scores,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_forward,
    launch,
    tile_schedule,
)
from ringattn.kernels.config import INTERPRETER_CONFIG
from ringattn.kernels.device import tiles as jit
from ringattn.kernels.device.tiles import HEAD_BY_HEAD_ORDER, LaunchShape, TileOrder
from ringattn.kernels.gpu import INTERPRETER_GPU, assumed_gpu
from ringattn.kernels.tile_schedule import choose_splits, heads_per_l2_group, resolve_sm_margin

from ..support.kernel_cases import DTYPES, Inputs, Sizes, bounds_from, check, inputs, interval, ours, tiles
from . import test_scores as scored

pytestmark = pytest.mark.usefixtures("poison")

Q, K = torch.empty(2, 40, 6, 16), torch.empty(2, 75, 3, 16)  # only their shapes count


@triton.jit  # type: ignore[untyped-decorator]
def mirror(out: Any, shape: Any, BLOCK: tl.constexpr) -> None:
    tile, batch, head = jit.program_placement(shape, BLOCK)
    place = out + 3 * tl.program_id(0)
    tl.store(place, tile)
    tl.store(place + 1, batch)
    tl.store(place + 2, head)


@pytest.mark.parametrize(("batch", "heads", "packed"), [(1, 1, 3), (2, 3, None), (3, 2, 3)])
def test_programs_walk_the_tiles_in_l2_groups(batch: int, heads: int, packed: int | None) -> None:
    """Each tile of each head once: per L2 group first tile 0 of every head, then tile 1; else head by head."""
    for rows, l2_group in product((1, 2, 5), [None, *range(1, batch * heads + 2)]):
        count = -(-rows * (packed or 1) // 2)
        expected = product(range(count), range(batch * heads))
        out = torch.full((count * batch * heads, 3), -1)
        order_of_tiles = HEAD_BY_HEAD_ORDER if l2_group is None else TileOrder(l2_group, batch * heads, None)
        mirror[(len(out),)](out, LaunchShape(rows, 9, heads, 1, order_of_tiles, packed), BLOCK=2)
        in_order = sorted(expected, key=lambda pair: (pair[1] // (l2_group or 1), pair[0], pair[1]))
        assert out.tolist() == [[tile, head // heads, head % heads] for tile, head in in_order]


def test_heads_whose_keys_fit_half_of_l2_form_a_group() -> None:
    for row_bytes, group, heads, by_keys, together in (
        (10, 1, 64, False, 5),
        (10, 4, 64, False, 20),  # heads of a group share their keys
        (10, 4, 6, False, 6),  # all heads
        (51, 4, 64, False, 4),  # at least one key head's group
        (0, 4, 8, False, 8),  # no keys
        (10, 4, 64, True, 1),  # dK/dV share nothing: a program walks all queries of a group
    ):
        assert heads_per_l2_group(heads, group, 10, row_bytes, by_keys, l2_bytes=1000) == together


def test_sm_margin_of_persistent_kernels() -> None:
    assert [resolve_sm_margin(requested, 132) for requested in (None, 0, 131)] == [16, 0, 131]
    assert resolve_sm_margin(None, 20) == 10, "half of a small GPU"
    with pytest.raises(ValueError, match=r"config.sm_margin is 132: this GPU has 132 multiprocessors"):
        resolve_sm_margin(132, 132)


def test_heads_are_packed_only_if_grouped() -> None:
    shape, packing = LaunchShape(40, 75, 6, 1), choose(pack_gqa=True)
    assert tile_schedule.packed_shape(packing, shape) is shape
    assert tile_schedule.packed_shape(packing, shape._replace(group=3)) == LaunchShape(40, 75, 2, 1, packed=3)


def test_dkdv_uses_the_fewest_splits_that_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for programs, group, parts in (
        (64, 16, 2),  # batch 1, 8k, MQA, tiles of 128 keys: 128 programs keep 97% busy, the most of any split
        (64, 3, 3),  # 192 programs are two waves, 73% busy; 64 keep 48%
        (106, 6, 1),  # 80% are busy: splits would cost more, although six would keep 96%
        (105, 8, 1),  # 80% against 97% with eight splits: within 15%
        (70, 8, 8),  # 53%; two splits 53% in two waves, four 71%, eight 85%
        (0, 8, 1),
    ):
        assert choose_splits(programs, group, 132) == parts
    assert choose_splits(16, 5, 20) == 1, "full enough, although five parts would use all multiprocessors"
    monkeypatch.setattr(tile_schedule, "gpu_specs", lambda device: assumed_gpu(90) if device.type == "cuda" else None)
    for requested, heads, device, made in (("auto", 16, "cuda", 2), ("auto", 16, "cpu", 1), (4, 16, "cuda", 4)):
        q, k = (SimpleNamespace(shape=(1, 8192, n, 128), device=torch.device(device)) for n in (heads, 1))
        assert tile_schedule.resolve_splits(choose(dkdv_splits=requested), q, k, 128) == made  # type: ignore[arg-type]


def choose(config: KernelConfig = INTERPRETER_CONFIG, **chosen: Any) -> KernelConfig:
    return replace(config, **chosen)


@pytest.fixture
def small_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink L2 to twice the K/V of two heads of 75 keys (16 by 16, fp32)."""
    monkeypatch.setattr(
        tile_schedule, "gpu_or_interpreter", lambda _: INTERPRETER_GPU._replace(l2_bytes=2 * 2 * 75 * 2 * 16 * 4)
    )


@pytest.mark.usefixtures("small_l2")
def test_grid_and_order_of_each_schedule() -> None:
    shape, tile, count = launch.launch_shape(Q, K), INTERPRETER_CONFIG.forward, 2 * 2 * 6
    assert tile is not None
    packed, keys = tile_schedule.packed_shape(choose(pack_gqa=True), shape), launch.launch_shape(K, Q)
    assert packed == shape._replace(heads=3, group=1, packed=2)
    persistent: dict[str, Any] = {"persistent": True}
    for chosen, requested, warps, programs, dealt in (
        ({}, shape, 4, count, HEAD_BY_HEAD_ORDER),
        ({"order": "longest"}, shape, 4, count, TileOrder(4, 12, None)),  # two key heads, two query heads each
        (persistent, shape, 4, 20, TileOrder(None, None, count)),  # 10 multiprocessors, two programs of 4 warps each
        (persistent, shape, 16, 10, TileOrder(None, None, count)),  # one program of 8 warps or more each
        (persistent, shape, 1, count, TileOrder(None, None, count)),  # at most one program per tile
        (CHOICES["all"], shape, 4, 4, TileOrder(4, 12, count)),
        ({"order": "longest"}, packed, 4, 18, TileOrder(2, 6, None)),  # 80 rows of 3 key heads
        ({"order": "longest"}, keys, 4, 18, TileOrder(1, 6, None)),  # two query heads of 40 rows for each key head
        (CHOICES["all"], keys._replace(rows=0), 4, 0, HEAD_BY_HEAD_ORDER),
    ):
        walked, by_keys = ((K, K), False) if requested.rows == 40 else ((Q, Q), True)
        made = tile_schedule.tile_schedule(
            choose(**chosen), requested, replace(tile, num_warps=warps), walked, rows_are_keys=by_keys
        )
        assert made == (programs, requested._replace(order=dealt)), chosen
    assert tile_schedule.tile_schedule(None, shape, tile, (K, K)) == (count, shape)


CHOICES: dict[str, dict[str, Any]] = {
    "longest": {"order": "longest"},
    "persistent": {"persistent": True, "sm_margin": 18},
    "packed": {"pack_gqa": True},
    "split": {"dkdv_splits": 3},
    "all": {"order": "longest", "persistent": True, "sm_margin": 18, "pack_gqa": True, "dkdv_splits": 3},
}


CASES = [
    *((choice, "causal", DTYPES[0], (20, 35)) for choice in CHOICES),
    ("all", "documents", DTYPES[1], (20, 35)),
    *(("all", "causal", DTYPES[1], lengths) for lengths in ((33, 1), (0, 8), (8, 0))),
]


@pytest.mark.usefixtures("small_l2")
@pytest.mark.parametrize(("choice", "kind", "dtype", "lengths"), CASES)
def test_every_tile_schedule_is_exact(choice: str, kind: str, dtype: torch.dtype, lengths: tuple[int, int]) -> None:
    """Three query heads per key head do not divide a tile; head dims are padded or in two parts."""
    x = inputs(Sizes(*lengths, head_dim=24, head_dim_v=96, heads=3, batch=2), dtype)
    check(x, interval(kind, *lengths), config=choose(tiles(16, 32), **CHOICES[choice]), few_keys=1 in lengths)


@pytest.mark.parametrize(
    ("features", "chosen", "heads"),
    [("used", CHOICES["all"], 3), ("block_sparse", CHOICES["all"], 3), ("alibi and dropout", CHOICES["all"], 3),
     ("used", {"dkdv_splits": 2}, 4)],
)  # fmt: skip
def test_every_tile_schedule_supports_other_features(features: str, chosen: dict[str, Any], heads: int) -> None:
    """Each query head keeps its slope and its dropped weights."""
    x = inputs(Sizes(20, 40, heads=heads, batch=1 + (features == "used")))
    bounds, scores = interval("causal", 20, 40), Scores()
    if features == "used":
        bounds = Bounds(bounds.lo, bounds.hi, torch.tensor([13, 0], dtype=torch.int32))  # inside a tile
    elif features == "block_sparse":
        late = bounds_from(torch.arange(20) - 2, torch.full((20,), 40), 40)  # first tiles masked, later ones unmasked
        bounds = Bounds(late.lo, late.hi, None, BlockSparseIndex(torch.tensor([[1, 1, 0], [0, 1, 1]]).bool(), 16))
    else:
        positions: Any = {"q_positions": torch.arange(20).int(), "k_positions": torch.arange(40).int()}
        scores = Scores(alibi_slopes=torch.rand(heads) / 10, dropout_p=0.3, dropout_seed=5, **positions)
    config = choose(tiles(16, 16 if features == "block_sparse" else 32), **chosen)  # tiles must divide blocks
    scored.compare(scored.ours(x, bounds, scores, config), x, bounds, scores)


@pytest.mark.usefixtures("small_l2")
@pytest.mark.parametrize("choice", ["persistent", "all"])
def test_every_tile_schedule_continues_a_state(choice: str) -> None:
    x, results = inputs(Sizes(20, 20, heads=3)), []
    start = torch.randn_like(x.q), torch.randn_like(x.dlse)
    for config in (tiles(16, 16), choose(tiles(16, 16), **CHOICES[choice])):
        state = start[0].clone(), start[1].clone()
        bounds = interval("first rows blind", 20, 20)
        results.append(attention_forward(x.q, x.k, x.v, bounds=bounds, state=state, config=config))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_packed_heads_of_a_view() -> None:
    """Packed heads use their own stride, here in a view of a wider tensor."""
    x = inputs(Sizes(20, 20, heads=6, kv_heads=2))
    wide = torch.randn(1, 8, 20, 20)
    q = wide[:, 1:7, :, 2:18].transpose(1, 2)
    q.copy_(x.q)
    expected = ours(x, FULL, config=choose(pack_gqa=True))
    made = ours(Inputs(q, *x[1:]), FULL, config=choose(pack_gqa=True))
    assert all(map(torch.equal, made, expected))


@pytest.mark.parametrize("kind", ["causal", "all rows blind"])
def test_split_sums_in_place_and_cast(kind: str) -> None:
    """Splits change only the order of the sum. A tile of 32 keys takes two programs that add its parts."""
    x, bounds = inputs(Sizes(24, 40, heads=4), torch.float16), interval(kind, 24, 40)
    out, lse = attention_forward(*x[:3], bounds=bounds)
    operands = (x.dout, *x[:3], lse, attention_delta(x.dout, out, x.dlse))
    before = torch.randn(x.k.shape), torch.randn(x.v.shape)
    for fresh, tolerance in ((False, 1e-5), (True, 1e-3)):
        results = []
        for parts in (1, 2):
            sums = before[0].clone(), before[1].clone()
            into = (torch.empty_like(x.k), torch.empty_like(x.v)) if fresh else sums
            config = choose(tiles(16, 32), dkdv_splits=parts)
            results.append(attention_dkdv(*operands, bounds=bounds, accum=sums, out=into, config=config))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_splits_that_do_not_divide_are_refused_before_a_write() -> None:
    x = inputs(Sizes(heads=6, kv_heads=2))
    dq, config = torch.zeros_like(x.q), choose(dkdv_splits=2)
    message = "config.dkdv_splits is 2: it must divide 3, "
    with pytest.raises(ValueError, match=message):
        attention_backward(x.dout, x.q, x.k, x.v, x.dout, x.dlse, dq=dq, bounds=FULL, config=config)
    assert not dq.any()
    with pytest.raises(ValueError, match=message):
        attention_forward(x.q, x.k, x.v, config=config)
