"""What a launch takes: a config where it fits, else what a tuned table measured and what suits it, else the default."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from ringattn.kernels import (
    FULL,
    PLAIN,
    BlockSparseIndex,
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
    hopper_launch,
    launch,
    single_pass,
    tables,
)
from ringattn.kernels.choice import backward_config, launch_traits, tile_for
from ringattn.kernels.config import config_for, single_pass_tile
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.tables import Point, with_options
from ringattn.ring.local import fused

from ..support.kernel_cases import Sizes, check, inputs, ours
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> Folders:
    """The CPU passes for an H200 where a tile is chosen, and for itself where kernels are launched."""
    monkeypatch.setattr(choice, "gpu_specs", lambda device: H200)
    return folders


Seen = dict[str, tuple[int, Any]]
"""By kernel: the grid and the shape that it was launched with."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made, run = dict[str, tuple[int, Any]](), launch.launch

    def spy(kernel: Any, grid: int, device: torch.device, *args: Any, **how: Any) -> None:
        made[kernel.__name__] = grid, next(arg for arg in args if type(arg).__name__ == "Shape")
        run(kernel, grid, device, *args, **how)

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


def test_config_fields_override_tables(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=KernelConfig(SMALL, SMALL, SMALL))
    attention.attention_forward(*inputs(SIZES)[:3], scores=Scores(softcap=20.0))  # with more than bounds none are taken
    assert all(shape.packed is None and shape.order.l2_group is None for _, shape in seen.values())
    assert "reduce_kernel" not in seen


def test_unsuitable_table_options_are_ignored(gpu: Folders, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin of all multiprocessors; heads that are not grouped. Requested by the caller, each is an error."""
    options: dict[str, Any] = {"order": "longest", "persistent": True, "sm_margin": 132, "pack_gqa": True}
    alone = SMALL_POINT._replace(group=1)
    split = entry(alone._replace(kernel="dkdv"), with_options(SMALL, {"dkdv_splits": 3}))
    save(gpu[0], entry(alone, with_options(SMALL, options)), split)
    x = inputs(Sizes(24, 30, heads=2, kv_heads=2))
    monkeypatch.setattr(choice, "gpu_or_interpreter", lambda device: assumed_gpu(90))
    ours(x)
    _, shape = seen["forward_kernel"]
    assert (shape.packed, shape.order.count, shape.order.l2_group) == (None, None, 2)
    assert "reduce_kernel" not in seen
    requested = KernelConfig(SMALL, SMALL, SMALL, persistent=True, sm_margin=132)
    with pytest.raises(ValueError, match="sm_margin is 132: this GPU has"):
        attention_forward(*x[:3], config=requested)
    grouped = entry(SMALL_POINT._replace(kernel="dkdv"), with_options(SMALL, {"dkdv_splits": 3}))
    save(gpu[0], grouped)  # of four query heads per key head
    tables.forget()
    ours(inputs(SIZES))
    assert "reduce_kernel" not in seen


def test_a_tables_forward_kernel_runs_where_it_can(gpu: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, so a default of this GPU; what does not suit it takes the portable kernel, and is no error."""
    save(gpu[0], entry(tile=HOPPER))
    q, k = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    made = default_config(q, k)
    assert made.forward_kernel == "hopper" and made.forward == HOPPER
    ran: list[str] = []
    monkeypatch.setattr(hopper_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention, "launch_hopper", lambda *args: ran.append("hopper"))
    monkeypatch.setattr(attention, "launch", lambda kernel, grid, device, *rest, **how: ran.append("portable"))
    odd = torch.empty(1, 8192, 2, 129, dtype=q.dtype)[..., :128]
    for keys, bounds in ((k, FULL), (odd, FULL), (k, Bounds(PAIR, PAIR))):  # nothing was measured with bounds
        attention_forward(q, keys, k, bounds=bounds)
    assert ran == ["hopper", "portable", "portable"]
    with pytest.raises(ValueError, match="k has strides"):
        attention_forward(q, odd, k, config=made)


def test_estimates_have_no_options(gpu: Folders) -> None:
    """Kernels and orders that never ran on a GPU are used only where a config requests them."""
    q, _, v, *_ = inputs(SIZES)
    point = SMALL_POINT._replace(kernel="dq")
    save(gpu[0], estimate(SMALL_POINT, with_options(SMALL, EVERY["forward"])), estimate(point, Tile(32, 16, 4, 1)))
    built_in = config_for(90, q.dtype, 16)
    assert default_config(q, v) == built_in
    assert default_config(q, v, estimated=True) == replace(built_in, dq=Tile(32, 16, 4, 1))


PAIR = torch.zeros(8, dtype=torch.int32)


def test_a_launch_takes_the_tile_of_its_mask(gpu: Folders) -> None:
    save(gpu[0], entry(), entry(POINT._replace(mask="bounded"), OTHER))
    q, v = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    default, fixed = config_for(90, q.dtype, 128).forward, KernelConfig(SMALL, SMALL, SMALL)
    used = torch.ones(1, dtype=torch.int32)
    for bounds, scores, tile in (
        (FULL, Scores(), TILE),
        (Bounds(PAIR, PAIR), Scores(), OTHER),
        (FULL, Scores(softcap=30.0), default),
        (Bounds(PAIR, PAIR, used), Scores(), default),
    ):
        how = launch_traits(bounds, scores)
        assert tile_for("forward", None, q, v, **how) == tile
        assert tile_for("forward", fixed, q, v, **how) == SMALL


def test_launches_of_other_kinds_are_planned_anew(gpu: Folders) -> None:
    """What one tensor of queries is bound for serves shards of other lengths, masks and scores, in any order."""
    save(gpu[0], entry(SMALL_POINT, SMALL), entry(SMALL_POINT._replace(mask="bounded"), Tile(32, 16, 4, 1)))
    x = inputs(SIZES)
    few, rows = (x.k[:, :7], x.v[:, :7]), torch.zeros(SIZES.queries, dtype=torch.int32)
    used = torch.ones(SIZES.batch, dtype=torch.int32)
    blocks = [BlockSparseIndex(torch.ones(-(-24 // side), -(-30 // side), dtype=torch.bool), side) for side in (16, 48)]
    launches: list[tuple[Any, ...]] = [
        ((x.k, x.v), FULL, PLAIN),
        (few, FULL, PLAIN),
        ((x.k, x.v), Bounds(rows, rows), PLAIN),
        ((x.k, x.v), Bounds(rows, rows, used), PLAIN),
        ((x.k, x.v), FULL, Scores(softcap=2.0)),
        *(((x.k, x.v), Bounds(None, None, None, index), PLAIN) for index in blocks),
    ]

    def planned(made: attention.Forward, launch: tuple[Any, ...]) -> Any:
        (k, v), bounds, scores = launch
        return made._plan("forward", k, v, bounds, scores)

    fresh = [planned(attention.Forward(x.q, 0.25, None), launch) for launch in launches]
    assert len({(plan.tile, plan.shape.columns) for plan in fresh}) == 5  # the full, few, bounded, default and 16
    for order in (1, -1):
        made = attention.Forward(x.q, 0.25, None)
        assert [planned(made, launch) for launch in launches[::order]] == fresh[::order]


def test_a_backward_asks_nothing_of_the_tile_of_the_forward() -> None:
    x, config = inputs(SIZES), KernelConfig(forward=Tile(32, 32, 4, 1), dq=SMALL, dkdv=SMALL)
    bounds = Bounds(None, None, None, BlockSparseIndex(torch.ones(1, 1, dtype=torch.bool), 48))
    zero = torch.zeros_like(x.dout), x.q, x.k, x.v, x.dout, torch.zeros(SIZES.batch, 4, 24)
    assert not attention_backward(*zero, bounds=bounds, config=config)[0].any()


def test_a_pair_of_slots_is_asked_for_once() -> None:
    """By keys and by values: one of them may be aligned and the other not."""
    x, asked = inputs(SIZES), list[int]()
    made = attention.Forward(x.q, 0.25, None)
    pairs = [(x.k, x.v), (x.k, x.v.clone()), (x.k.clone(), x.v), (x.k, x.v)]

    def takes(number: int) -> bool:
        asked.append(number)
        return number == 0

    answers = [made._takes(0, *pair, partial(takes, number)) for number, pair in enumerate(pairs)]
    assert (asked, answers) == ([0, 1, 2], [True, False, False, True])


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_a_config_with_one_tile_leaves_the_others_at_their_defaults(kernel: str, gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *(entry(SMALL_POINT._replace(kernel=one), SMALL) for one in EVERY))
    x, own = inputs(SIZES), Tile(32, 16, 4, 1)
    config = KernelConfig(**{kernel: own})  # type: ignore[arg-type]
    for one in EVERY:
        assert tile_for(one, config, x.q, x.v, None) == (own if one == kernel else SMALL)
    check(x, FULL, config=config)
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel"} <= {*seen}


def test_the_hopper_kernels_have_tiles_of_their_own(gpu: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned tile of the portable forward may be one that they do not take."""
    save(gpu[0], entry(POINT, Tile(64, 32, 4, 3)))
    monkeypatch.setattr(hopper_launch, "is_hopper", lambda device: True)
    q, v = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    config = KernelConfig(forward_kernel="hopper", backward="hopper")
    assert tile_for("forward", config, q, v, None) == config_for(90, q.dtype, 128).forward
    monkeypatch.setattr(fused, "check_cpu", lambda tensors: None)  # bfloat16
    fused.Triton().check(q, v, scores=Scores(), block=None, config=config)


# --- one pass or two ----------------------------------------------------------------------------------------------


def backward(single_pass: float | None, fixed: float | None, spread: float = 0.0) -> list[Any]:
    """Entries of a backward whose two passes take 2 ms, and whose single ones what is told; None: an estimate."""
    seconds = {"dq": 1e-3, "dkdv": 1e-3, "single_pass": single_pass, "single_pass_deterministic": fixed}
    tile, points = Tile(16, 32, 4, 1), {kernel: SMALL_POINT._replace(kernel=kernel) for kernel in seconds}
    return [
        estimate(points[kernel], tile) if time is None else entry(points[kernel], tile, seconds=time, spread=spread)
        for kernel, time in seconds.items()
    ]


@pytest.mark.parametrize(
    ("single_pass", "fixed", "spread", "single"),
    [
        (None, 1.9e-3, 0.01, True),
        (1e-3, 1.9e-3, 0.1, False),  # no faster than the spread
        (1e-3, None, 0.0, False),  # one that adds in no fixed order is the caller's to choose, however fast
    ],
)
def test_one_pass_where_it_was_measured_as_faster(
    single_pass: float | None, fixed: float | None, spread: float, single: bool, gpu: Folders, seen: Seen
) -> None:
    save(gpu[0], *backward(single_pass, fixed, spread))
    x = inputs(SIZES)
    check(x, FULL, config=None)
    assert ("single_pass_kernel" in seen, "dq_kernel" in seen) == (single, not single)
    seen.clear()
    q, k, v = (tensor.requires_grad_() for tensor in x[:3])
    attend(q, k, v)[0].sum().backward()
    assert ("single_pass_kernel" in seen, "dq_kernel" in seen) == (single, not single)
    how = launch_traits(FULL, Scores())
    two = KernelConfig(SMALL, SMALL, SMALL)
    assert backward_config(two, x.q, x.v, **how) is two
    for other in ({"plain": False}, {"block": 16}, {"full": False}):  # nothing was measured with these
        assert backward_config(None, x.q, x.v, **how | other) is None


def test_requested_single_pass_uses_its_measured_tile(gpu: Folders) -> None:
    x = inputs(SIZES)
    save(gpu[0], *backward(1.0, 1.0))
    built_in = single_pass_tile(90, x.q.dtype, 16)
    for plain, tile, own in ((True, Tile(16, 32, 4, 1), None), (False, built_in, None), (True, TILE, TILE)):
        requested = KernelConfig(SMALL, SMALL, SMALL, backward="single_pass_deterministic", single_pass=own)
        assert tile_for("single_pass", requested, x.q, x.v, None, plain=plain) == tile


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_margin_of_the_whole_gpu_is_refused_before_the_first_hop() -> None:
    x, config = inputs(SIZES), KernelConfig(SMALL, SMALL, SMALL, persistent=True, sm_margin=10_000)
    with pytest.raises(ValueError, match=r"config\.sm_margin is 10000: this GPU has"):
        fused.Triton().check(x.q, x.v, scores=Scores(), block=None, config=config)


@pytest.mark.parametrize("field", ["forward", "dq", "dkdv", "single_pass"])
def test_a_tile_that_does_not_fit_is_refused_with_one_that_does(field: str, gpu: Folders, seen: Seen) -> None:
    """By the entry that launches it, a whole backward included, and by a ring before its first hop."""
    x = inputs(Sizes(24, 30, head_dim=64, head_dim_v=64))
    config = KernelConfig(SMALL, SMALL, SMALL, backward="single_pass" if field == "single_pass" else "two_pass")
    config = replace(config, **{field: LARGE})  # type: ignore[arg-type]
    calls: list[Callable[[], object]] = [
        lambda: fused.Triton().check(x.q, x.v, scores=Scores(), block=None, config=config),
        lambda: (
            attention_forward(x.q, x.k, x.v, config=config)
            if field == "forward"
            else attention_backward(x.dout, x.q, x.k, x.v, x.dout, x.dlse, config=config)
        ),
    ]
    fits = r"at least [\d,]+ bytes of shared memory, a block of sm_90 has 232,448; Tile\(.*\) fits"
    for call in calls:
        with pytest.raises(ValueError, match=rf"config\.{field} is Tile\(block_q=256, .*\): it needs {fits}"):
            call()
    assert not seen
    if field != "forward":
        attention_forward(x.q, x.k, x.v, config=config)
        assert [*seen] == ["forward_kernel"], "no tile of another kernel is looked at"


def test_what_is_known_of_slots_is_kept_with_them() -> None:
    """Else another tensor could have their ids, and another alignment."""
    slot = torch.zeros(1, 8, 1, 64)
    bound, alive = choice.Bound(torch.zeros(1, 8, 1, 64), 1.0, None), weakref.ref(slot)
    assert bound._takes("forward", slot, slot, lambda: True)
    del slot
    assert alive() is not None


@pytest.mark.parametrize(("dtype", "fits"), [(torch.float32, False), (torch.float16, True)])
def test_the_room_of_a_tile_is_that_of_its_dtype(dtype: torch.dtype, fits: bool, gpu: Folders) -> None:
    x = torch.zeros(1, 8, 1, 64, dtype=dtype)
    with nullcontext() if fits else pytest.raises(ValueError, match=r"config\.forward is .* at least 262,144 bytes"):
        choice.check_tiles(KernelConfig(Tile(64, 256, 8, 3), SMALL, SMALL), x, x, None)


def kernel(run: Callable[..., None]) -> Any:
    """Takes the place of a compiled kernel: a launch is a call."""
    return type("forward_kernel", (), {"__name__": "forward_kernel", "__getitem__": lambda self, grid: run})()


def test_out_of_resources_is_reported_with_the_options() -> None:
    """Registers, or what a pipeline takes beyond the least: known once it is compiled."""

    def run(*arguments: object, **options: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    message = "forward_kernel with BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=2 needs 300,000 of shared memory"
    with pytest.raises(ValueError, match=f"{message}, this GPU has 232,448"):
        launch.launch(kernel(run), 1, torch.device("cpu"), **launch.options(Tile(64, 32, 4, 2)))


def test_a_launch_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, which need not be theirs."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(device_of_launch: torch.device) -> Iterator[None]:
        current.append(device_of_launch)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    launched: list[torch.device] = []
    launch.launch(kernel(lambda: launched.append(current[-1])), 1, torch.device("cuda", 1))
    assert launched == [torch.device("cuda", 1)] and len(current) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_built_in_tiles_serve_head_dims_up_to_their_own(dtype: torch.dtype) -> None:
    """Of the larger of two head dims; and no architecture is without."""
    for arch in (80, 86, 89, 90, 100, 103, 120):
        at = {dim: config_for(arch, dtype, dim) for dim in (1, 64, 65, 128, 129, 256)}
        assert at[1] == at[64] and at[65] == at[128] and at[129] == at[256]
        assert at[128] != at[256]
    assert config_for(103, dtype, 128) == config_for(100, dtype, 128)


def test_float32_has_tiles_of_its_own() -> None:
    """Each operand takes twice the room, in elements twice as large."""
    for dtype, tile in ((torch.float32, Tile(64, 32, 8, 1)), (torch.float16, Tile(128, 128, 8, 2))):
        assert config_for(90, dtype, 128).forward == tile
    assert config_for(90, torch.float16, 128) == config_for(90, torch.bfloat16, 128)


@pytest.mark.parametrize("dropout_p", [1.0, -0.1, True])
def test_dropout_leaves_something(dropout_p: float) -> None:
    with pytest.raises(ValueError, match="dropout_p"):
        Scores(dropout_p=dropout_p).check(1, 2, torch.device("cpu"))
