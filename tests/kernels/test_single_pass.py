"""The single-pass backward: exact, deterministic in its deterministic mode, and free of deadlocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from ringattn.kernels import (
    FULL,
    Bounds,
    KernelConfig,
    Tile,
    attention_backward,
    attention_delta,
    attention_forward,
    attention_gradients,
    single_pass,
)
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.single_pass import dq_add_order, key_tile_visits
from ringattn.kernels.warm_up import collect_launches

from ..support import descriptor_stand_in
from ..support.kernel_cases import KINDS, Inputs, Sizes, check, cycle_values, inputs, interval, narrow_keys
from . import test_scores as scored
from .test_compiled import compiling

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in (exp2|multiply|subtract)"),
]

MODES = ("single_pass", "single_pass_deterministic")
CPU = torch.device("cpu")
TWO_PASSES = KernelConfig(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def config(mode: str, block_q: int = 16, block_k: int = 32) -> KernelConfig:
    tile = Tile(32, 32, 4, 1)
    return KernelConfig(tile, tile, tile, backward=mode, single_pass=Tile(block_q, block_k, 4, 1))


@pytest.mark.parametrize(
    ("kind", "sizes", "mode"),
    cycle_values(
        [
            ("full", Sizes(40, 45, heads=2)),
            ("causal", Sizes(head_dim=96, head_dim_v=24, heads=2)),
            ("window", Sizes(head_dim=40, head_dim_v=192, heads=2)),
            ("middle rows blind", Sizes(40, 45, heads=2)),
            ("full", Sizes(33, 1)),
            ("full", Sizes(0, 8)),
        ],
        MODES,
    ),
)
def test_masks_head_dims_and_lengths_are_exact(kind: str, sizes: Sizes, mode: str) -> None:
    check(inputs(sizes), interval(kind, sizes.queries, sizes.keys), config=config(mode))


@pytest.mark.parametrize(("narrowed", "mode"), [("used", MODES[1]), ("block_sparse", MODES[0]), ("both", MODES[1])])
def test_scores_padding_and_blocks_are_exact(narrowed: str, mode: str) -> None:
    x, whole, scores = inputs(scored.SIZES), interval("causal", 40, 45), scored.scores_of("all")
    used = None if narrowed == "block_sparse" else torch.tensor([13, 45], dtype=torch.int32)
    index = None if narrowed == "used" else scored.pattern(40, 45, 32)
    bounds = Bounds(whole.lo, whole.hi, used, index)
    scored.compare(scored.ours(x, bounds, scores, config(mode)), x, bounds, scores)


def given(x: Inputs, bounds: Bounds = FULL) -> tuple[Tensor, ...]:
    """Return the inputs of a backward pass: dout, q, k, v, lse and delta."""
    out, lse = attention_forward(x.q, x.k, x.v, bounds=bounds)
    return x.dout, x.q, x.k, x.v, lse, attention_delta(x.dout, out, x.dlse)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_accumulated(mode: str) -> None:
    """Two key shards add to fp32 sums; the sums equal one call over all keys."""
    x, bounds = inputs(Sizes(queries=40, keys=48, heads=2), torch.float16), interval("causal", 40, 48)
    out, lse = attention_forward(*x[:3], bounds=bounds)
    start = [torch.randn(t.shape) for t in x[:3]]
    dq, dk, dv = (t.clone() for t in start)
    for keys in (slice(0, 32), slice(32, 48)):
        call: dict[str, Any] = {
            "bounds": narrow_keys(bounds, keys.start, keys.stop),
            "dlse": x.dlse,
            "config": config(mode),
        }
        sums = dq, dk[:, keys], dv[:, keys]
        named: dict[str, Any] = dict(zip(("dq", "dk", "dv"), sums, strict=True))
        got = attention_backward(x.dout, x.q, x.k[:, keys], x.v[:, keys], out, lse, **named, **call)
        assert all(got_sum is other for got_sum, other in zip(got, sums, strict=True))
    whole = attention_backward(x.dout, *x[:3], out, lse, dlse=x.dlse, bounds=bounds, config=config(mode))
    for made, begin, same in zip((dq, dk, dv), start, whole, strict=True):
        assert same.dtype == torch.float16
        torch.testing.assert_close(made - begin, same.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
def test_keys_past_the_end_of_the_last_tile_add_nothing(mode: str) -> None:
    """Use scores of about -150, so that a score of 0 past the end would have an infinite weight."""
    x = inputs(Sizes(40, 45, heads=2))
    check(x._replace(q=torch.full_like(x.q, 6.0), k=torch.full_like(x.k, -6.25)), FULL, config=config(mode))


@pytest.mark.parametrize(("head_dim", "mode"), [(16, MODES[0]), (32, MODES[1])])
def test_tma_adds_the_same_dq_as_atomics(head_dim: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = inputs(Sizes(20, 40, head_dim, heads=2, batch=2)), []
    moved = descriptor_stand_in.install(monkeypatch)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", lambda self, *_: Mock())  # the wait for TMA
    for gpu in (None, assumed_gpu(90)):
        monkeypatch.setattr(single_pass, "gpu_specs", lambda device, gpu=gpu: gpu)
        dq = torch.ones_like(x.q)
        results.append((dq, *attention_gradients(x.dout, *x[:3], x.dlse, x.dlse / 8, dq=dq, config=config(mode))))
        assert ("add" in moved) == (gpu is not None)
    assert all(map(torch.equal, *results))
    dq = torch.zeros(2, 20, 2, head_dim + 1)[..., :-1]
    assert single_pass.make_dq_descriptor(dq, Tile(16, 32, 4, 1)) is None, "TMA takes no odd strides"
    fit = torch.zeros(2, 20, 2, head_dim)
    assert single_pass.make_dq_descriptor(fit[:, :0], Tile(16, 32, 4, 1)) is None, "nothing to add to"
    monkeypatch.setattr(single_pass, "gpu_specs", lambda device: assumed_gpu(80))
    assert single_pass.make_dq_descriptor(fit, Tile(16, 32, 4, 1)) is None


def narrowed(kind: str, queries: int, keys: int) -> Bounds:
    if kind in KINDS:
        return interval(kind, queries, keys)
    whole = interval("window", queries, keys)
    if kind == "used":
        return Bounds(whole.lo, whole.hi, torch.tensor([keys // 48 * 16, keys], dtype=torch.int32))  # whole tiles
    lo, hi = (None, None) if kind == "blocks alone" else (whole.lo, whole.hi)
    return Bounds(lo, hi, None, scored.pattern(queries, keys, 16))


TURNS = ("full", "causal", "window", "documents", "last rows blind", "used", "block_sparse", "blocks alone")


@pytest.mark.parametrize("kind", TURNS)
def test_each_query_tile_receives_every_addition(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final gate counts equal the visits that the host computes."""
    gates: list[Any] = []
    launch = single_pass.launch  # type: ignore[attr-defined]

    def spy(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
        gates.extend(arg for arg in args if type(arg).__name__ == "AddTurns")
        launch(kernel, grid, device, *args, **options)

    monkeypatch.setattr(single_pass, "launch", spy)
    bounds = narrowed(kind, 40, 70)
    small_tile = replace(config("single_pass_deterministic"), single_pass=Tile(16, 16, 4, 1))
    x = inputs(Sizes(queries=40, keys=70, heads=2, kv_heads=1, batch=2))
    attention_gradients(*given(x, bounds), dq=torch.zeros(x.q.shape), bounds=bounds, config=small_tile)
    (turns,) = gates
    visited = key_tile_visits(bounds, 40, 70, Tile(16, 16, 4, 1), CPU).sum(1)
    assert torch.equal(turns.gates.long(), visited[:, None].expand(2, 2, -1))


@pytest.mark.parametrize("kind", [kind for kind in TURNS if kind != "full"])
def test_programs_wait_for_later_keys_only(kind: str) -> None:
    """A program waits only for programs of later keys, which are launched before, so no deadlock is possible."""
    bounds = narrowed(kind, 90, 160)
    for tile in (Tile(16, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)):  # one cached table per tile
        visits, table = key_tile_visits(bounds, 90, 160, tile, CPU), dq_add_order(bounds, 2, 90, 160, tile, CPU)
        assert table is not None and visits.any() and table.shape[1:] == visits.shape[1:]
        for row, key_tile, query_tile in visits.nonzero().tolist():
            assert table[row, key_tile, query_tile] == visits[row, key_tile + 1 :, query_tile].sum()


HEAD_DIM_256 = inputs(Sizes(head_dim=256))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": TWO_PASSES}, "config.backward is 'two_pass': it must be 'single_pass'"),
        ({"dq": torch.zeros(1, 40, 1, 16).half()}, "dq is torch.float16: it must be torch.float32"),
        ({"accum": (torch.zeros(1, 40, 1, 16).half(), torch.zeros(1, 40, 1, 16))}, r"accum\[0\] is torch.float16"),
        (
            {"bounds": Bounds(None, None, None, scored.pattern(40, 40, 48))},
            "config.single_pass has block_q=16 and block_k=32: .* block size, 48",
        ),
        (
            {"q": HEAD_DIM_256.q, "k": HEAD_DIM_256.k, "dq": torch.zeros(1, 40, 1, 256),
             "config": replace(TWO_PASSES, backward="single_pass")},
            "head dim 256 has no default tile for a single-pass backward .* up to 128",
        ),
        (
            {"v": torch.zeros(1, 40, 1, 300), "dout": torch.zeros(1, 40, 1, 300)},
            "config.backward is 'single_pass' and the head dim 300: it supports head dims up to 256",
        ),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("dout", "q", "k", "v", "lse", "delta")
    call: dict[str, Any] = dict(zip(names, given(inputs(Sizes())), strict=True))
    monkeypatch.setattr("ringattn.kernels.launch_plan.gpu_specs", lambda device: assumed_gpu(90, "NVIDIA H200"))
    with pytest.raises(ValueError, match=message):
        attention_gradients(**{**call, "dq": torch.zeros(1, 40, 1, 16), "config": config("single_pass"), **change})


@pytest.mark.parametrize("name", ["q", "dout", "dq"])
def test_strides_beyond_32_bits_are_refused(name: str) -> None:
    given = {key: torch.empty(1, 40, 1, 16, device="meta") for key in ("dout", "q", "k", "v", "dq")}
    lse, far = torch.empty(1, 1, 40, device="meta"), torch.empty(1, 40, 2**23, 16, device="meta")[:, :, :1]
    call: dict[str, Any] = given | {"lse": lse, "delta": lse, name: far, "config": config("single_pass")}
    with pytest.raises(ValueError, match=rf"{name} has strides .*: a tile of 16 queries must lie within 2\^31"):
        collect_launches(assumed_gpu(90), partial(attention_gradients, **call))
    single_pass.check_tile_span(name, far[:, :1], Tile(16, 32, 4, 1))


@pytest.mark.compiles("kernels/single_pass.py", "tests/support/launch_arguments.py")
def test_a_launch_with_descriptors_compiles() -> None:
    """Compile by the JIT from the arguments of real launches, without a GPU."""
    assert compiling("tests.support.launch_arguments", "single_pass").count("compiled") == 4
