"""What a launch without a config takes of a tuned table beside tiles: only what was measured, and what suits it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.bench.kernels.contender import VARIANTS
from ringattn.kernels import FULL, KernelConfig, Scores, Tile, attend, attention, choice, default_config, launch, lookup
from ringattn.kernels.choice import backward_config, situation, tile_for
from ringattn.kernels.config import config_for, single_pass_tile
from ringattn.kernels.experimental import gradients
from ringattn.kernels.order import Chip
from ringattn.kernels.table_files import OPTIONS, as_json, parse
from ringattn.kernels.tables import Point, Table, options_of, with_options

from ..support.kernel_cases import Inputs, Sizes, check, inputs, ours
from ..support.tile_tables import H200, TILE, entry, estimate, folders, save

__all__ = ["folders"]

Folders = tuple[Path, Path]
SMALL = Tile(16, 16, 4, 1)
POINT = Point("forward", "fp32", 16, 16, 4, "full", 64)
EVERY: dict[str, dict[str, Any]] = {
    "forward": {"order": "longest", "persistent": True, "sm_margin": 3, "pack_gqa": True},
    "dq": {"pack_gqa": True},
    "dkdv": {"dkdv_splits": 2, "order": "longest"},
}
SIZES = Sizes(24, 30, heads=4, kv_heads=1)
DEFAULTS = {one.name: one.default for one in fields(KernelConfig) if one.name not in ("forward", "dq", "dkdv")}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> Folders:
    """The CPU passes for an H200 where a tile is chosen, and for itself where kernels are launched."""
    monkeypatch.setattr(choice, "gpu_of", lambda device: H200)
    return folders


class Seen(dict[str, tuple[int, Any]]):
    """By kernel: the grid and the shape that it was launched with."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made, run = Seen(), launch.launch

    def spy(kernel: Any, grid: int, device: torch.device, *given: Any, **how: Any) -> None:
        made[kernel.__name__] = grid, next(one for one in given if type(one).__name__ == "Shape")
        run(kernel, grid, device, *given, **how)

    for module in (attention, gradients):
        monkeypatch.setattr(module, "launch", spy)
    return made


def chosen(kernel: str, **options: Any) -> Any:
    return entry(POINT._replace(kernel=kernel), with_options(SMALL, options or EVERY[kernel]))


def test_each_kernel_is_launched_as_it_was_measured(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=None)
    grid, forward = seen["forward_kernel"]
    assert (forward.packed, forward.order.count, grid) == (4, 6, 6)
    assert forward.order.swath == forward.order.heads == 1  # packed: one head
    grid, dq = seen["dq_kernel"]
    assert (dq.packed, dq.order.swath, dq.order.count, grid) == (4, None, None, 6)
    grid, dkdv = seen["dkdv_kernel"]
    assert (dkdv.splits, dkdv.order.swath, dkdv.order.count, grid) == (2, 2, None, 4)
    assert "reduce_kernel" in seen


def test_a_configs_fields_rule(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=KernelConfig(SMALL, SMALL, SMALL))
    assert all(shape.packed is None and shape.order.swath is None for _, shape in seen.values())
    assert "reduce_kernel" not in seen


def test_what_does_not_suit_a_call_is_left_out_quietly(
    gpu: Folders, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A margin of all multiprocessors; heads that are not grouped; where the caller asked, it is an error."""
    options: dict[str, Any] = {"order": "longest", "persistent": True, "sm_margin": 500, "pack_gqa": True}
    alone = POINT._replace(group=1)
    save(gpu[0], entry(alone, with_options(SMALL, options)))
    x = inputs(Sizes(24, 30, heads=2, kv_heads=2))
    monkeypatch.setattr(choice, "chip_of", lambda device: Chip(132, 50 << 20))
    ours(x)
    _, shape = seen["forward_kernel"]
    assert (shape.packed, shape.order.count, shape.order.swath) == (None, None, 2)
    asked = KernelConfig(SMALL, SMALL, SMALL, persistent=True, sm_margin=500)
    with pytest.raises(ValueError, match="sm_margin is 500: this GPU has"):
        attention.attention_forward(*x[:3], config=asked)
    choice._with_options.cache_clear()
    split = with_options(SMALL, {"dkdv_splits": 3})
    made = choice._with_options(split, 4, x.q.device)  # type: ignore[arg-type]
    assert made == KernelConfig(split, split, split)


def test_launches_with_more_than_bounds_have_no_options(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    attention.attention_forward(*inputs(SIZES)[:3], scores=Scores(softcap=20.0))
    assert all(shape.packed is None and shape.order.swath is None for _, shape in seen.values())


def test_estimates_have_no_options(gpu: Folders) -> None:
    """A kernel or an order that never ran on a GPU is for who writes a config, whatever a table says."""
    q, _, v, *_ = inputs(SIZES)
    point = POINT._replace(kernel="dq")
    save(gpu[0], estimate(POINT, with_options(SMALL, EVERY["forward"])), estimate(point, Tile(32, 16, 4, 1)))
    built_in = config_for(90, q.dtype, 16)
    assert default_config(q, v) == built_in
    assert default_config(q, v, estimated=True) == replace(built_in, dq=Tile(32, 16, 4, 1))
    assert tile_for("forward", None, q, v, None) == built_in.forward
    assert choice.launched(None, built_in.forward, q, v) is None


def test_a_default_config_has_what_its_kernels_agree_on(gpu: Folders) -> None:
    q, _, v, *_ = inputs(SIZES)
    longest = {"order": "longest"}
    cases: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
        ({"pack_gqa": True}, {"pack_gqa": True, **longest}, {"pack_gqa": True, "dkdv_splits": 2}),
        (longest, longest, {"order": "longest", "dkdv_splits": 2}),
        (longest, {"pack_gqa": True}, {"dkdv_splits": 2}),
        ({"forward_kernel": "portable"}, {}, {"dkdv_splits": 2}),
    )
    for forward, dq, agreed in cases:
        entries = [("forward", forward), ("dq", dq), ("dkdv", {"dkdv_splits": 2, **longest})]
        save(gpu[0], *(entry(POINT._replace(kernel=name), with_options(SMALL, one)) for name, one in entries))
        lookup.forget()
        made = default_config(q, v)
        assert {name: getattr(made, name) for name in agreed} == agreed
        assert made == KernelConfig(made.forward, made.dq, made.dkdv, **agreed)


@pytest.mark.parametrize(
    "options",
    [{"dkdv_epilogue": "descriptors"}, {"order": "longest", "persistent": True}, {"pack_gqa": True}],
)
def test_variants_of_the_bench_have_their_own_options_alone(gpu: Folders, options: dict[str, Any]) -> None:
    """Tuned ones would not go with theirs, or change what a row is about."""
    q, _, v, *_ = inputs(SIZES)
    entries = [POINT._replace(kernel=name) for name in ("forward", "dq", "dkdv")]
    known = {
        point: {name: value for name, value in options.items() if name in OPTIONS[point.kernel]} for point in entries
    }
    save(gpu[0], *(entry(point, with_options(SMALL, known[point])) for point in entries))
    assert VARIANTS[0].config(q, v, full=True) is None
    assert default_config(q, v) != KernelConfig(SMALL, SMALL, SMALL)
    for variant in VARIANTS[1:]:
        assert variant.options is not None
        forward = config_for(90, q.dtype, 16).forward if "forward_kernel" in variant.options else SMALL
        made, bounded = variant.config(q, v, full=True), variant.config(q, v, full=False)
        assert made is not None and bounded is not None and bounded.dq != made.dq
        assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS | variant.options
        assert asdict(made.forward).items() >= asdict(forward).items()


@pytest.mark.parametrize(
    ("kernel", "options", "told"),
    [
        ("dq", {"persistent": True, "sm_margin": 0}, "options.sm_margin is 0: it must be a whole number from 1"),
        ("forward", {"forward_kernel": "hopper", "persistent": True}, "options do not go together: order is 'heads'"),
        ("dq", {"sm_margin": 4}, "options do not go together: sm_margin is 4 and persistent False"),
        ("dq", {"persistent": 1}, "options.persistent is 1: it must be true or false"),
        ("dq", {"order": "best"}, "options.order is 'best': it must be one of heads, longest"),
        ("dq", {"dkdv_splits": 2}, "options.dkdv_splits is not known"),
        ("dkdv", {"dkdv_splits": 0}, "options.dkdv_splits is 0: it must be a whole number from 1"),
        ("dkdv", {"dkdv_splits": "auto"}, "options.dkdv_splits is 'auto'"),
        ("dkdv", {"dkdv_epilogue": "tma"}, "options.dkdv_epilogue is 'tma': it must be one of pointers, descriptors"),
        ("dkdv", {"pack_gqa": True}, "options.pack_gqa is not known"),
        ("single_pass", {"order": "longest"}, "options.order is not known"),
    ],
)
def test_a_table_with_other_options_is_refused(kernel: str, options: dict[str, Any], told: str) -> None:
    made = as_json(Table("NVIDIA H200", 90, (3, 7), (entry(POINT._replace(kernel=kernel), SMALL),)))
    made["entries"][0]["options"] = options
    with pytest.raises(ValueError, match="entries") as error:
        parse(json.dumps(made))
    assert told in str(error.value)


# --- one pass or two ----------------------------------------------------------------------------------------------


def backward(one: float | None, fixed: float | None, *, spread: float = 0.0) -> list[Any]:
    """Entries of a backward whose two passes take 2 ms, and whose single ones what is told; None: an estimate."""
    seconds = {"dq": 1e-3, "dkdv": 1e-3, "single_pass": one, "single_pass_deterministic": fixed}
    return [
        estimate(POINT._replace(kernel=kernel), Tile(16, 32, 4, 1))
        if told is None
        else entry(POINT._replace(kernel=kernel), Tile(16, 32, 4, 1), seconds=told, spread=spread)
        for kernel, told in seconds.items()
    ]


@pytest.mark.parametrize(
    ("one", "fixed", "spread", "single"),
    [
        (1e-3, 1.9e-3, 0.01, True),
        (1e-3, 1.9e-3, 0.1, False),  # no faster than the spread
        (1e-3, 2.1e-3, 0.0, False),  # one that adds in no fixed order is the caller's to choose, however fast
        (1e-3, None, 0.0, False),
        (None, 1e-3, 0.0, True),
    ],
)
def test_one_pass_where_it_was_measured_as_faster(
    one: float | None, fixed: float | None, spread: float, single: bool, gpu: Folders, seen: Seen
) -> None:
    save(gpu[0], *backward(one, fixed, spread=spread))
    x = inputs(SIZES)
    check(x, FULL, config=None)
    assert ("single_pass_kernel" in seen, "dq_kernel" in seen) == (single, not single)
    seen.clear()
    q, k, v = (tensor.requires_grad_() for tensor in x[:3])
    attend(q, k, v)[0].sum().backward()
    assert ("single_pass_kernel" in seen, "dq_kernel" in seen) == (single, not single)
    how = situation(FULL, Scores())
    made = backward_config(None, x.q, x.v, **how)
    assert (made is not None and made.backward == "single_pass_deterministic") == single
    two = KernelConfig(SMALL, SMALL, SMALL)
    assert backward_config(two, x.q, x.v, **how) is two
    assert backward_config(None, x.q, x.v, **how | {"plain": False}) is None
    assert backward_config(None, x.q, x.v, **how | {"block": 16}) is None
    assert backward_config(None, x.q, x.v, **how | {"full": False}) is None  # nothing was measured with bounds


def test_who_asks_for_one_pass_has_its_measured_tile(gpu: Folders) -> None:
    x: Inputs = inputs(SIZES)
    measured = [entry(POINT._replace(kernel="single_pass"), Tile(16, 64, 4, 1))]
    save(gpu[0], *measured, *(one for one in backward(1.0, 1.0) if one.point.kernel == "single_pass_deterministic"))
    built_in = single_pass_tile(90, x.q.dtype, 16)
    for mode, plain, tile in (
        ("single_pass", True, Tile(16, 64, 4, 1)),
        ("single_pass_deterministic", True, Tile(16, 32, 4, 1)),
        ("single_pass", False, built_in),
    ):
        asked = KernelConfig(SMALL, SMALL, SMALL, backward=mode)
        assert tile_for("single_pass", asked, x.q, x.v, None, plain=plain) == tile
    own = KernelConfig(SMALL, SMALL, SMALL, backward="single_pass", single_pass=TILE)
    assert tile_for("single_pass", own, x.q, x.v, None) == TILE
    assert options_of(TILE) == {}
