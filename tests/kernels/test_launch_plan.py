"""Settings of a launch: from the config if given, else from a matching tuned table, else the default."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
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
    default_config,
    hopper_backward_launch,
    hopper_forward_launch,
    launch,
    launch_plan,
    single_pass,
    tables,
)
from ringattn.kernels.config import built_in_config, single_pass_tile, value_columns
from ringattn.kernels.gpu import MULTIPROCESSOR_SPECS, assumed_gpu
from ringattn.kernels.launch_plan import backward_config, resolve_tile, tile_criteria
from ringattn.kernels.tables import TuningPoint, attach_options
from ringattn.ring.local import fused

from ..support.kernel_cases import Sizes, check, inputs, interval, ours
from ..support.tile_tables import H200, HOPPER, POINT, TILE, entry, estimate, folders, save

__all__ = ["folders"]

Folders = tuple[Path, Path]
SMALL, LARGE = Tile(16, 16, 4, 1), Tile(256, 256, 8, 8)
OTHER = Tile(128, 32, 8, 3)
SMALL_POINT = TuningPoint("forward", "fp32", 16, 16, 4, "full", 64)
EVERY: dict[str, dict[str, Any]] = {
    "forward": {"order": "longest", "persistent": True, "sm_margin": 3, "pack_gqa": True},
    "dq": {"pack_gqa": True, "loads": "pointers"},
    "dkdv": {"dkdv_splits": 2, "order": "longest"},
}
SIZES = Sizes(24, 30, heads=4, kv_heads=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> Folders:
    """Treat the CPU as an H200 when a tile is chosen, and as the interpreter when a kernel is launched."""
    monkeypatch.setattr(launch_plan, "gpu_specs", lambda device: H200)
    return folders


Seen = dict[str, tuple[int, Any]]
"""By kernel name: the grid and the shape of its launch."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made, run = dict[str, tuple[int, Any]](), launch.launch

    def spy(kernel: Any, grid: int, device: torch.device, *args: Any, **how: Any) -> None:
        made[kernel.__name__] = grid, next(arg for arg in args if type(arg).__name__ == "LaunchShape")
        run(kernel, grid, device, *args, **how)

    for module in (attention, single_pass):
        monkeypatch.setattr(module, "launch", spy)
    return made


def chosen(kernel: str, **options: Any) -> Any:
    return entry(SMALL_POINT._replace(kernel=kernel), attach_options(SMALL, options or EVERY[kernel]))


def test_launches_use_the_tuned_options(gpu: Folders, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: dict[str, str] = {}
    monkeypatch.setattr(launch_plan, "loads_by_tma", lambda name, config, *_: loads.update({name: config.loads}))
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=None)
    assert loads == {"forward": "descriptors", "dq": "pointers"}
    grid, forward = seen["forward_kernel"]
    assert (forward.packed, forward.order.count, grid) == (4, 6, 6)
    assert forward.order.l2_group == forward.order.heads == 1  # packed into one head
    grid, dq = seen["dq_kernel"]
    assert (dq.packed, dq.order.l2_group, dq.order.count, grid) == (4, None, None, 6)
    grid, dkdv = seen["dkdv_kernel"]
    assert (dkdv.splits, dkdv.order.l2_group, dkdv.order.count, grid) == (2, 2, None, 4)
    assert "reduce_kernel" in seen


def test_config_fields_override_tables(gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *map(chosen, EVERY))
    check(inputs(SIZES), FULL, config=KernelConfig(SMALL, SMALL, SMALL))
    attention.attention_forward(*inputs(SIZES)[:3], scores=Scores(softcap=20.0))  # tables have no options for scores
    assert all(shape.packed is None and shape.order.l2_group is None for _, shape in seen.values())
    assert "reduce_kernel" not in seen


def test_unsuitable_table_options_are_ignored(gpu: Folders, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same options are errors if a caller passes them."""
    options: dict[str, Any] = {"order": "longest", "persistent": True, "sm_margin": 132, "pack_gqa": True}
    alone = SMALL_POINT._replace(group=1)
    split = entry(alone._replace(kernel="dkdv"), attach_options(SMALL, {"dkdv_splits": 3}))
    save(gpu[0], entry(alone, attach_options(SMALL, options)), split)
    x = inputs(Sizes(24, 30, heads=2, kv_heads=2))
    monkeypatch.setattr(launch_plan, "gpu_or_interpreter", lambda device: assumed_gpu(90))
    ours(x)
    _, shape = seen["forward_kernel"]
    assert (shape.packed, shape.order.count, shape.order.l2_group) == (None, None, 2)
    assert "reduce_kernel" not in seen
    requested = KernelConfig(SMALL, SMALL, SMALL, persistent=True, sm_margin=132)
    with pytest.raises(ValueError, match="sm_margin is 132: this GPU has"):
        attention_forward(*x[:3], config=requested)
    grouped = entry(SMALL_POINT._replace(kernel="dkdv"), attach_options(SMALL, {"dkdv_splits": 3}))
    save(gpu[0], grouped)  # four query heads per key head
    tables.clear_table_cache()
    ours(inputs(SIZES))
    assert "reduce_kernel" not in seen


def test_a_tuned_hopper_kernel_runs_if_the_inputs_fit(gpu: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned Hopper kernel falls back to the portable kernel for unsuitable inputs."""
    save(gpu[0], entry(tile=HOPPER))
    q, k = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    made = default_config(q, k)
    assert made.forward_kernel == "hopper" and made.forward == HOPPER
    ran: list[str] = []
    monkeypatch.setattr(hopper_forward_launch, "is_hopper_device", lambda device: True)
    monkeypatch.setattr(attention, "launch_hopper_forward", lambda *args: ran.append("hopper"))
    monkeypatch.setattr(attention, "launch", lambda kernel, grid, device, *rest, **how: ran.append("portable"))
    odd = torch.empty(1, 8192, 2, 129, dtype=q.dtype)[..., :128]
    for keys, bounds in ((k, FULL), (odd, FULL), (k, Bounds(PAIR, PAIR))):  # the table has no entry with bounds
        attention_forward(q, keys, k, bounds=bounds)
    assert ran == ["hopper", "portable", "portable"]
    launcher, used = attention.ForwardLauncher(q, 1.0, made), torch.ones(1, dtype=torch.int32)
    for bounds in (FULL, Bounds(None, None, used), FULL):  # the same slots in hops of another kind
        launcher.fold(k, k, bounds, final=False)
    assert ran[3:] == ["hopper", "portable", "hopper"]
    with pytest.raises(ValueError, match="k has strides"):
        attention_forward(q, odd, k, config=made)


def test_options_of_estimates_are_ignored(gpu: Folders) -> None:
    """Kernels and orders that were never measured run only if a config requests them."""
    q, _, v, *_ = inputs(SIZES)
    point = SMALL_POINT._replace(kernel="dq")
    save(gpu[0], estimate(SMALL_POINT, attach_options(SMALL, EVERY["forward"])), estimate(point, Tile(32, 16, 4, 1)))
    built_in = built_in_config(90, q.dtype, 16)
    assert default_config(q, v) == built_in
    assert default_config(q, v, estimated=True) == replace(built_in, dq=Tile(32, 16, 4, 1))


PAIR = torch.zeros(8, dtype=torch.int32)


def test_a_launch_uses_the_tile_tuned_for_its_mask_and_keys(gpu: Folders) -> None:
    save(gpu[0], entry(), entry(POINT._replace(mask="bounded"), OTHER), entry(POINT._replace(length=8), SMALL))
    q, v = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    default, fixed = built_in_config(90, q.dtype, 128).forward, KernelConfig(SMALL, SMALL, SMALL)
    used = torch.ones(1, dtype=torch.int32)
    for bounds, scores, tile in (
        (FULL, Scores(), TILE),
        (Bounds(PAIR, PAIR), Scores(), OTHER),
        (FULL, Scores(softcap=30.0), default),
        (Bounds(PAIR, PAIR, used), Scores(), default),
    ):
        how = tile_criteria(bounds, scores)
        assert resolve_tile("forward", None, q, v, **how) == tile
        assert resolve_tile("forward", fixed, q, v, **how) == SMALL
    assert resolve_tile("forward", None, q, v, block=1024) == default
    oblong = built_in_config(90, q.dtype, 128).dkdv
    assert resolve_tile("dkdv", None, q, v, block=1024) == oblong == Tile(32, 64, 4, 1)
    assert [default_config(q, v, full=full).forward for full in (True, False)] == [TILE, OTHER]
    save(own := gpu[0] / "own", entry(tile=OTHER))
    assert default_config(q, v, config_dir=own).forward == OTHER


def test_plans_do_not_depend_on_earlier_launches(gpu: Folders) -> None:
    """A launcher serves shards of other lengths, masks and scores, in any order."""
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

    def planned(made: attention.ForwardLauncher, launch: tuple[Any, ...]) -> Any:
        (k, v), bounds, scores = launch
        return made._get_plan("forward", k, v, bounds, scores)

    fresh = [planned(attention.ForwardLauncher(x.q, 0.25, None), launch) for launch in launches]
    # full, few keys, bounded, default, blocks of 16
    assert len({(plan.tile, plan.shape.columns) for plan in fresh}) == 5
    for order in (1, -1):
        made = attention.ForwardLauncher(x.q, 0.25, None)
        assert [planned(made, launch) for launch in launches[::order]] == fresh[::order]


def test_a_backward_ignores_the_tile_of_the_forward(seen: Seen) -> None:
    x, config = inputs(SIZES), KernelConfig(forward=Tile(32, 32, 4, 1), dq=SMALL, dkdv=SMALL)
    bounds = Bounds(None, None, None, BlockSparseIndex(torch.ones(1, 1, dtype=torch.bool), 48))
    zero = torch.zeros_like(x.dout), x.q, x.k, x.v, x.dout, torch.zeros(SIZES.batch, 4, 24)
    assert not attention_backward(*zero, bounds=bounds, config=config)[0].any()
    seen.clear()
    with pytest.raises(ValueError, match=r"config\.dkdv has block_q=32 and block_k=32: .* block size, 48"):
        attention_backward(*zero, bounds=bounds, config=replace(config, dkdv=Tile(32, 32, 4, 1)))
    assert not seen, "all tiles are checked before the first launch"


def test_alignment_is_checked_once_per_pair_of_slots() -> None:
    """The cache key has both keys and values, because their alignment may differ."""
    x, asked = inputs(SIZES), list[int]()
    made = attention.ForwardLauncher(x.q, 0.25, None)
    pairs = [(x.k, x.v), (x.k, x.v.clone()), (x.k.clone(), x.v), (x.k, x.v)]

    def takes(number: int) -> bool:
        asked.append(number)
        return number == 0

    answers = [made._runs_hopper(0, *pair, partial(takes, number)) for number, pair in enumerate(pairs)]
    assert (asked, answers) == ([0, 1, 2], [True, False, False, True])


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_a_config_may_set_a_single_tile(kernel: str, gpu: Folders, seen: Seen) -> None:
    save(gpu[0], *(entry(SMALL_POINT._replace(kernel=name), SMALL) for name in EVERY))
    x, own = inputs(SIZES), Tile(32, 16, 4, 1)
    config = KernelConfig(**{kernel: own})  # type: ignore[arg-type]
    for name in EVERY:
        assert resolve_tile(name, config, x.q, x.v, None) == (own if name == kernel else SMALL)
    check(x, FULL, config=config)
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel"} <= {*seen}


def test_hopper_kernels_do_not_take_tuned_portable_tiles(gpu: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper kernels may not accept a tuned tile of the portable forward."""
    save(gpu[0], entry(POINT, Tile(64, 32, 4, 3)))
    monkeypatch.setattr(hopper_forward_launch, "is_hopper_device", lambda device: True)
    q, v = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    config = KernelConfig(forward_kernel="hopper", backward="hopper")
    assert resolve_tile("forward", config, q, v, None) == hopper_forward_launch.default_forward_tile(128)
    monkeypatch.setattr(fused, "check_cpu", lambda tensors: None)  # bfloat16
    fused.TritonAttention().check(q, v, scores=Scores(), block=None, config=config)


def backward(single_pass: float | None, fixed: float | None, spread: float = 0.0) -> list[Any]:
    """Return entries: two passes that take 2 ms together, and single passes of the given seconds or an estimate."""
    seconds = {"dq": 1e-3, "dkdv": 1e-3, "single_pass": single_pass, "single_pass_deterministic": fixed}
    tiles = {**dict.fromkeys(seconds, Tile(16, 32, 4, 1)), "single_pass": SMALL}
    points = {kernel: SMALL_POINT._replace(kernel=kernel) for kernel in seconds}
    return [
        estimate(points[name], tiles[name])
        if time is None
        else entry(points[name], tiles[name], seconds=time, spread=spread)
        for name, time in seconds.items()
    ]


@pytest.mark.parametrize(
    ("single_pass", "fixed", "spread", "single"),
    [
        (None, 1.9e-3, 0.01, True),
        (1e-3, 1.9e-3, 0.1, False),  # no faster than the spread
        (1e-3, None, 0.0, False),  # a nondeterministic kernel is never the default
    ],
)
def test_a_single_pass_is_used_if_measured_as_faster(
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
    how = tile_criteria(FULL, Scores())
    two = KernelConfig(SMALL, SMALL, SMALL)
    assert backward_config(two, x.q, x.v, **how) is two
    config = backward_config(None, x.q, x.v, **how)
    assert (config is not None and config.backward == "single_pass_deterministic") == single
    for other in ({"plain": False}, {"block": 16}, {"full": False}):  # not measured, so not used
        assert backward_config(None, x.q, x.v, **how | other) is None
    calls: list[dict[str, Any]] = [{"bounds": interval("causal", 24, 30)}, {"scores": Scores(softcap=2.0)}]
    for call in calls:
        seen.clear()
        attention_backward(x.dout, q.detach(), k.detach(), v.detach(), x.dout, x.dlse, **call)
        assert "dq_kernel" in seen


def test_requested_single_pass_uses_its_measured_tile(gpu: Folders) -> None:
    x = inputs(SIZES)
    save(gpu[0], *backward(1.0, 1.0))
    built_in = single_pass_tile(90, x.q.dtype, 16)
    for mode, plain, tile, own in (
        ("single_pass_deterministic", True, Tile(16, 32, 4, 1), None),
        ("single_pass", True, SMALL, None),
        ("single_pass", False, built_in, None),
        ("single_pass_deterministic", True, TILE, TILE),
    ):
        requested = KernelConfig(OTHER, OTHER, OTHER, backward=mode, single_pass=own)
        assert resolve_tile("single_pass", requested, x.q, x.v, None, plain=plain) == tile


def test_a_margin_of_the_whole_gpu_is_refused_before_the_first_hop() -> None:
    x, config = inputs(SIZES), KernelConfig(SMALL, SMALL, SMALL, persistent=True, sm_margin=10_000)
    with pytest.raises(ValueError, match=r"config\.sm_margin is 10000: this GPU has"):
        fused.TritonAttention().check(x.q, x.v, scores=Scores(), block=None, config=config)


@pytest.mark.parametrize("field", ["forward", "dq", "dkdv", "single_pass"])
def test_a_tile_that_does_not_fit_is_refused_with_a_suggestion(field: str, gpu: Folders, seen: Seen) -> None:
    """The entry that launches the kernel, a whole backward, and the ring's check all raise."""
    x = inputs(Sizes(24, 30, head_dim=64, head_dim_v=64))
    config = KernelConfig(SMALL, SMALL, SMALL, backward="single_pass" if field == "single_pass" else "two_pass")
    config = replace(config, **{field: LARGE})  # type: ignore[arg-type]
    calls: list[Callable[[], object]] = [
        lambda: fused.TritonAttention().check(x.q, x.v, scores=Scores(), block=None, config=config),
        lambda: (
            attention_forward(x.q, x.k, x.v, config=config)
            if field == "forward"
            else attention_backward(x.dout, x.q, x.k, x.v, x.dout, x.dlse, config=config)
        ),
    ]
    fits = r"at least [\d,]+ bytes of shared memory, but sm_90 allows 232,448 per block\. Use Tile\(.*\)"
    for call in calls:
        with pytest.raises(ValueError, match=rf"config\.{field} is Tile\(block_q=256, .*\), which needs {fits}"):
            call()
    assert not seen
    if field != "forward":
        attention_forward(x.q, x.k, x.v, config=config)
        assert [*seen] == ["forward_kernel"], "no tile of another kernel is looked at"


def test_cached_alignment_keeps_the_slots_alive() -> None:
    """Otherwise a new tensor could reuse an id and inherit the alignment."""
    slot = torch.zeros(1, 8, 1, 64)
    bound, alive = launch_plan.QueryLauncher(torch.zeros(1, 8, 1, 64), 1.0, None), weakref.ref(slot)
    assert bound._runs_hopper("forward", slot, slot, lambda: True)
    del slot
    assert alive() is not None


@pytest.mark.parametrize(("dtype", "fits"), [(torch.float32, False), (torch.float16, True)])
def test_shared_memory_of_a_tile_depends_on_the_dtype_and_the_gpu(
    dtype: torch.dtype, fits: bool, gpu: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(1, 8, 1, 64, dtype=dtype)
    with nullcontext() if fits else pytest.raises(ValueError, match=r"config\.forward is .* at least 262,144 bytes"):
        launch_plan.check_tiles(KernelConfig(Tile(64, 256, 8, 3), SMALL, SMALL), x, x, None)
    exact = KernelConfig(SMALL, Tile(16, 64, 4, 9 if fits else 5), SMALL)  # 227 KB
    launch_plan.check_tiles(exact, x, v := torch.zeros(1, 8, 1, 163, dtype=dtype), None)
    monkeypatch.setattr(launch_plan, "gpu_specs", lambda device: assumed_gpu(86))
    with pytest.raises(ValueError, match=r"config\.dq is .* 232,448 bytes .* sm_86 allows 101,376"):
        launch_plan.check_tiles(exact, x, v, None)


def kernel(run: Callable[..., None]) -> Any:
    """Return a stand-in for a compiled kernel whose launch calls ``run``."""
    return type("forward_kernel", (), {"__name__": "forward_kernel", "__getitem__": lambda self, grid: run})()


def test_out_of_resources_is_reported_with_the_options() -> None:
    """Registers and pipeline buffers are known only after compilation."""

    def run(*arguments: object, **options: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    message = "forward_kernel with BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=2 exceeds .*: it needs 300,000"
    with pytest.raises(ValueError, match=f"{message}, and the limit is 232,448"):
        launch.launch(kernel(run), 1, torch.device("cpu"), **launch.tile_options(Tile(64, 32, 4, 2)))


def test_a_launch_runs_alone_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton itself launches on the current device, and its interpreter runs only one kernel at a time."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(device_of_launch: torch.device) -> Iterator[None]:
        current.append(device_of_launch)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    launched: list[tuple[torch.device, bool]] = []
    launch.launch(kernel(lambda: launched.append((current[-1], launch._LOCK.locked()))), 1, torch.device("cuda", 1))
    assert launched == [(torch.device("cuda", 1), True)] and len(current) == 1


def test_default_tiles_are_those_of_the_last_survey() -> None:
    """Compile all kernels with changed tiles first (``tox -e nightly``), then update the digest."""
    tiles = [
        (config.forward, config.dq, config.dkdv, single_pass_tile(arch, dtype, dim))
        for arch in (*MULTIPROCESSOR_SPECS, 75, 103)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for dim in (1, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 512)
        for config in [built_in_config(arch, dtype, dim)]
    ]
    hopper = [
        *map(hopper_forward_launch.default_forward_tile, hopper_forward_launch.FORWARD_HEAD_DIMS),
        *map(hopper_backward_launch.default_backward_tile, hopper_backward_launch.BACKWARD_HEAD_DIMS),
    ]
    assert hopper == [*(Tile(128, keys, 8, 2) for keys in (128, 128, 64)), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2)]
    assert sha256(repr(tiles).encode()).hexdigest()[:16] == "118cd8f5170db4cf"


@pytest.mark.parametrize("dims", [(16, 256), (256, 16)])
def test_the_larger_head_dim_decides_the_default_tile(dims: tuple[int, int], gpu: Folders) -> None:
    q, v = (torch.zeros(1, 1, 1, dim) for dim in dims)
    assert default_config(q, v) == built_in_config(90, q.dtype, 256) != built_in_config(90, q.dtype, 16)


def test_few_query_rows_take_all_columns_of_v() -> None:
    assert [value_columns(Tile(rows, 32, 4, 1), 512) for rows in (16, 32, 64)] == [512, 512, 256]
