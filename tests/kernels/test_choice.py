"""What a launch takes: a config where it fits, else what a tuned table measured and what suits it, else the default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ringattn.bench.kernels.contender import VARIANTS
from ringattn.kernels import (
    FULL,
    Bounds,
    KernelConfig,
    Scores,
    Tile,
    attend,
    attention,
    attention_backward,
    attention_forward,
    choice,
    default_config,
    launch,
    tables,
)
from ringattn.kernels.choice import backward_config, launch_traits, resolve_config, tile_for
from ringattn.kernels.config import config_for, single_pass_tile
from ringattn.kernels.experimental import hopper_launch, single_pass
from ringattn.kernels.order import Chip
from ringattn.kernels.tables import OPTIONS, Point, options_of, with_options
from ringattn.ring.args import check_tiles
from ringattn.ring.schedule.mask import Mask

from ..support.kernel_cases import Inputs, Sizes, check, inputs, ours
from ..support.tile_tables import H200, HOPPER, POINT, TILE, entry, estimate, folders, save

__all__ = ["folders"]

Folders = tuple[Path, Path]
SMALL, LARGE = Tile(16, 16, 4, 1), Tile(256, 256, 8, 8)
OTHER = Tile(128, 32, 8, 3)
SMALL_POINT = Point("forward", "fp32", 16, 16, 4, "full", 64)
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

    for module in (attention, single_pass):
        monkeypatch.setattr(module, "launch", spy)
    return made


def chosen(kernel: str, **options: Any) -> Any:
    return entry(SMALL_POINT._replace(kernel=kernel), with_options(SMALL, options or EVERY[kernel]))


def test_each_kernel_is_launched_as_it_was_measured(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=None)
    grid, forward = seen["forward_kernel"]
    assert (forward.packed, forward.order.count, grid) == (4, 6, 6)
    assert forward.order.l2_group == forward.order.heads == 1  # packed: one head
    grid, dq = seen["dq_kernel"]
    assert (dq.packed, dq.order.l2_group, dq.order.count, grid) == (4, None, None, 6)
    grid, dkdv = seen["dkdv_kernel"]
    assert (dkdv.splits, dkdv.order.l2_group, dkdv.order.count, grid) == (2, 2, None, 4)
    assert "reduce_kernel" in seen


def test_a_configs_fields_rule(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=KernelConfig(SMALL, SMALL, SMALL))
    attention.attention_forward(*inputs(SIZES)[:3], scores=Scores(softcap=20.0))  # with more than bounds none are taken
    assert all(shape.packed is None and shape.order.l2_group is None for _, shape in seen.values())
    assert "reduce_kernel" not in seen


def test_what_does_not_suit_a_call_is_left_out_quietly(
    gpu: Folders, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A margin of all multiprocessors; heads that are not grouped; where the caller asked, it is an error."""
    options: dict[str, Any] = {"order": "longest", "persistent": True, "sm_margin": 500, "pack_gqa": True}
    alone = SMALL_POINT._replace(group=1)
    save(gpu[0], entry(alone, with_options(SMALL, options)))
    x = inputs(Sizes(24, 30, heads=2, kv_heads=2))
    monkeypatch.setattr(choice, "chip_of", lambda device: Chip(132, 50 << 20))
    ours(x)
    _, shape = seen["forward_kernel"]
    assert (shape.packed, shape.order.count, shape.order.l2_group) == (None, None, 2)
    asked = KernelConfig(SMALL, SMALL, SMALL, persistent=True, sm_margin=500)
    with pytest.raises(ValueError, match="sm_margin is 500: this GPU has"):
        attention.attention_forward(*x[:3], config=asked)
    choice._with_options.cache_clear()
    split = with_options(SMALL, {"dkdv_splits": 3})
    made = choice._with_options(split, 4, x.q.device)  # type: ignore[arg-type]
    assert made == KernelConfig(split, split, split)


def test_estimates_have_no_options(gpu: Folders) -> None:
    """A kernel or an order that never ran on a GPU is for who writes a config, whatever a table says."""
    q, _, v, *_ = inputs(SIZES)
    point = SMALL_POINT._replace(kernel="dq")
    save(gpu[0], estimate(SMALL_POINT, with_options(SMALL, EVERY["forward"])), estimate(point, Tile(32, 16, 4, 1)))
    built_in = config_for(90, q.dtype, 16)
    assert default_config(q, v) == built_in
    assert default_config(q, v, estimated=True) == replace(built_in, dq=Tile(32, 16, 4, 1))
    assert tile_for("forward", None, q, v, None) == built_in.forward
    assert choice.resolve_config(None, built_in.forward, q, v) is None


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
        save(gpu[0], *(entry(SMALL_POINT._replace(kernel=name), with_options(SMALL, one)) for name, one in entries))
        tables.forget()
        made = default_config(q, v)
        assert {name: getattr(made, name) for name in agreed} == agreed
        assert made == KernelConfig(made.forward, made.dq, made.dkdv, **agreed)


@pytest.mark.parametrize("options", [{"dkdv_epilogue": "descriptors"}, {"order": "longest", "pack_gqa": True}])
def test_variants_of_the_bench_have_their_own_options_alone(gpu: Folders, options: dict[str, Any]) -> None:
    """Tuned ones would not go with theirs, or change what a row is about."""
    q, _, v, *_ = inputs(SIZES)
    entries = [SMALL_POINT._replace(kernel=name) for name in ("forward", "dq", "dkdv")]
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


# --- one pass or two ----------------------------------------------------------------------------------------------


def backward(one: float | None, fixed: float | None, *, spread: float = 0.0) -> list[Any]:
    """Entries of a backward whose two passes take 2 ms, and whose single ones what is told; None: an estimate."""
    seconds = {"dq": 1e-3, "dkdv": 1e-3, "single_pass": one, "single_pass_deterministic": fixed}
    return [
        estimate(SMALL_POINT._replace(kernel=kernel), Tile(16, 32, 4, 1))
        if told is None
        else entry(SMALL_POINT._replace(kernel=kernel), Tile(16, 32, 4, 1), seconds=told, spread=spread)
        for kernel, told in seconds.items()
    ]


@pytest.mark.parametrize(
    ("one", "fixed", "spread", "single"),
    [
        (None, 1.9e-3, 0.01, True),
        (1e-3, 1.9e-3, 0.1, False),  # no faster than the spread
        (1e-3, None, 0.0, False),  # one that adds in no fixed order is the caller's to choose, however fast
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
    how = launch_traits(FULL, Scores())
    made = backward_config(None, x.q, x.v, **how)
    assert (made is not None and made.backward == "single_pass_deterministic") == single
    two = KernelConfig(SMALL, SMALL, SMALL)
    assert backward_config(two, x.q, x.v, **how) is two
    assert backward_config(None, x.q, x.v, **how | {"plain": False}) is None
    assert backward_config(None, x.q, x.v, **how | {"block": 16}) is None
    assert backward_config(None, x.q, x.v, **how | {"full": False}) is None  # nothing was measured with bounds


def test_who_asks_for_one_pass_has_its_measured_tile(gpu: Folders) -> None:
    x: Inputs = inputs(SIZES)
    measured = [entry(SMALL_POINT._replace(kernel="single_pass"), Tile(16, 64, 4, 1))]
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


# --- tiles of tables and defaults -------------------------------------------------------------------------------------


def on_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """q and v whose device passes for a GPU."""
    monkeypatch.setattr(choice, "gpu_of", lambda device: H200)
    return torch.empty(1, 8, 8, 128, dtype=dtype), torch.empty(1, 8192, 2, 128, dtype=dtype)


PAIR = torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("bounds", "scores", "tile"),
    [
        (Bounds(None, None), Scores(), "full"),
        (Bounds(PAIR, PAIR), Scores(), "bounded"),
        (Bounds(None, None), Scores(softcap=30.0), "default"),
        (Bounds(PAIR, PAIR, seqused_k=torch.ones(1, dtype=torch.int32)), Scores(), "default"),
    ],
)
def test_a_launch_takes_the_tile_of_its_mask(
    bounds: Bounds, scores: Scores, tile: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folders[0], entry(), entry(POINT._replace(mask="bounded"), OTHER))
    q, v = on_gpu(monkeypatch)
    tiles = {"full": TILE, "bounded": OTHER, "default": config_for(90, q.dtype, 128).forward}
    assert len({*tiles.values()}) == 3
    assert tile_for("forward", None, q, v, **launch_traits(bounds, scores)) == tiles[tile]
    small = Tile(16, 16, 4, 1)
    given = KernelConfig(small, small, small)
    assert tile_for("forward", given, q, v, **launch_traits(bounds, scores)) == given.forward


def test_a_tables_forward_kernel_runs_where_it_can(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, so a default of this GPU; what does not suit it takes the portable kernel, and is no error."""
    save(folders[0], entry(tile=HOPPER))
    q, v = on_gpu(monkeypatch)
    k = v.clone()
    plain = Tile(128, 64, 8, 3)
    made = default_config(q, v)
    assert made.forward_kernel == "hopper" and made.forward == HOPPER
    given = KernelConfig(plain, plain, plain)
    assert resolve_config(given, HOPPER, q, k) is given
    ran: list[str] = []
    monkeypatch.setattr(hopper_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention, "launch_hopper", lambda *given: ran.append("hopper"))
    monkeypatch.setattr(attention, "launch", lambda kernel, grid, device, *given, **how: ran.append("portable"))
    odd = torch.empty(1, 8192, 2, 129, dtype=q.dtype)[..., :128]
    for keys, bounds in ((k, FULL), (odd, FULL), (k, Bounds(PAIR, PAIR))):  # nothing was measured with bounds
        attention_forward(q, keys, v, bounds=bounds)
    assert ran == ["hopper", "portable", "portable"]
    with pytest.raises(ValueError, match="k has strides"):
        attention_forward(q, odd, v, config=made)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture
def launched_kernels(monkeypatch: pytest.MonkeyPatch, folders: object) -> list[str]:
    """The CPU passes for an H200 where a tile is chosen; the kernels that were launched."""
    made: list[str] = []
    monkeypatch.setattr(choice, "gpu_of", lambda device: H200)
    for module in (attention, single_pass):
        monkeypatch.setattr(module, "launch", lambda kernel, *given, **how: made.append(kernel.__name__))
    return made


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("forward", KernelConfig(LARGE, SMALL, SMALL)),
        ("dq", KernelConfig(SMALL, LARGE, SMALL)),
        ("dkdv", KernelConfig(SMALL, SMALL, LARGE)),
        ("single_pass", KernelConfig(SMALL, SMALL, SMALL, backward="single_pass", single_pass=LARGE)),
    ],
)
def test_a_tile_that_does_not_fit_is_refused_with_one_that_does(
    field: str, config: KernelConfig, launched_kernels: list[str]
) -> None:
    """By the entry that launches it, a whole backward included, and by a ring before its first hop."""
    x = inputs(Sizes(24, 30, head_dim=64, head_dim_v=64))
    lse = torch.zeros(1, 1, 24)
    entries: dict[str, Callable[[], object]] = {
        "ring": lambda: check_tiles(Mask(), Scores(), "triton", config, x.q, x.v),
        "forward": lambda: attention_forward(x.q, x.k, x.v, config=config),
        "backward": lambda: attention_backward(x.dout, x.q, x.k, x.v, x.dout, lse, config=config),
    }
    fits = r"at least [\d,]+ bytes of shared memory, a block of sm_90 has 232,448; Tile\(.*\) fits"
    for name in ("ring", "forward" if field == "forward" else "backward"):
        with pytest.raises(ValueError, match=rf"config\.{field} is Tile\(block_q=256, .*\): it takes {fits}"):
            entries[name]()
    assert launched_kernels == []


def test_no_tile_of_another_kernel_is_looked_at(launched_kernels: list[str]) -> None:
    x = inputs(Sizes(24, 30, head_dim=64, head_dim_v=64))
    attention_forward(x.q, x.k, x.v, config=KernelConfig(SMALL, LARGE, LARGE))
    assert launched_kernels == ["forward_kernel"]


class Kernel:
    """Takes the place of a compiled kernel: a launch is a call."""

    __name__ = "forward_kernel"

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.run


def test_what_triton_finds_too_large_is_told_with_its_options() -> None:
    """Registers, or what a pipeline takes beyond the least: known once it is compiled."""

    def run(*arguments: object, **options: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    told = "forward_kernel with BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=2 takes 300,000 of shared memory"
    with pytest.raises(ValueError, match=f"{told}, this GPU has 232,448"):
        launch.launch(Kernel(run), 1, torch.device("cpu"), **launch.options(Tile(64, 32, 4, 2)))


def test_a_launch_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, which need not be theirs."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(asked: torch.device) -> Iterator[None]:
        current.append(asked)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    launched: list[torch.device] = []
    launch.launch(Kernel(lambda: launched.append(current[-1])), 1, torch.device("cuda", 1))
    assert launched == [torch.device("cuda", 1)] and len(current) == 1
