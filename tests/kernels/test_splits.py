"""dK/dV cut over query heads: how many parts, and that their sum is dK/dV whatever the launch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.kernels import (
    FULL,
    KernelConfig,
    attention,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_forward,
    order,
)
from ringattn.kernels.config import INTERPRETER
from ringattn.kernels.order import Chip, efficiency, splits_for

from ..support.kernel_cases import DTYPES, Sizes, check, inputs, interval, ours, tiles

pytestmark = pytest.mark.usefixtures("poison")

H200 = 132  # multiprocessors


def split(parts: int | str, config: KernelConfig = INTERPRETER) -> KernelConfig:
    return replace(config, dkdv_splits=parts)


# --- how many parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "group", "parts"),
    [
        (64, 16, 2),  # B1 8k MQA, tiles of 128 keys: 128 programs keep 97% busy, and no split does better
        (64, 3, 3),  # 192 programs are two waves, 73% busy; 64 keep 48%
        (32, 8, 4),
        (8, 16, 16),
        (1, 7, 7),
        (1, 1, 1),
        (106, 8, 1),  # four in five are busy: the parts would cost more
        (106, 6, 1),  # although six parts would keep 96%
        (105, 8, 1),  # 80% against 97% of eight parts: within 15%
        (70, 8, 8),  # 53%, and two parts 53% too, of two waves; four 71%, eight 85%
        (1024, 8, 1),
        (0, 8, 1),
    ],
)
def test_the_least_parts_that_use_the_gpu(programs: int, group: int, parts: int) -> None:
    assert splits_for(programs, group, H200) == parts


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 200))
def test_parts_are_a_divisor_and_nearly_the_best(programs: int, group: int, multiprocessors: int) -> None:
    parts = splits_for(programs, group, multiprocessors)
    assert group % parts == 0
    best = max(efficiency(programs * n, multiprocessors) for n in range(1, group + 1) if group % n == 0)
    full = programs >= 0.8 * multiprocessors
    assert parts == 1 if full else efficiency(programs * parts, multiprocessors) >= 0.85 * best
    assert full or all(
        efficiency(programs * n, multiprocessors) < 0.85 * best for n in range(1, parts) if group % n == 0
    )


class Launches(list[tuple[str, int]]):
    """Names and grids of what was launched."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    seen, run = Launches(), attention.launch  # type: ignore[attr-defined]

    def spy(kernel: Any, grid: int, *args: Any, **options: Any) -> None:
        seen.append((kernel.__name__, grid))
        run(kernel, grid, *args, **options)

    monkeypatch.setattr(attention, "launch", spy)
    yield seen


def test_a_config_says_how_many(launches: Launches) -> None:
    x = inputs(Sizes(queries=1, heads=12, kv_heads=2))
    for config in (None, split(1), split("auto")):
        ours(x, config=config)
        assert launches[-1:] == [("dkdv_kernel", 4)]
    ours(x, config=split(3))
    assert launches[-2:] == [("dkdv_kernel", 12), ("reduce_kernel", 6)]


class There:
    """What a launch asks of a tensor on a GPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.device = x.shape, torch.device("cuda")


def test_a_gpu_is_asked_for_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "chip_of", lambda device: Chip(H200, 50 << 20))
    q, k = (torch.empty(1, 8192, heads, 128, device="meta") for heads in (16, 1))
    assert order.splits_of(split("auto"), There(q), There(k), 128) == 2  # type: ignore[arg-type]
    assert order.splits_of(split("auto"), There(q), There(k), 16) == 1  # type: ignore[arg-type]
    assert order.splits_of(split(4), There(q), There(k), 16) == 4  # type: ignore[arg-type]
    assert order.splits_of(split("auto"), There(k), There(k), 128) == 1  # type: ignore[arg-type]
    assert order.splits_of(split("auto"), q, k, 128) == 1, "no GPU"


def test_no_launch_is_split_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction was never run on a GPU: it is nobody's default, however few the programs."""
    monkeypatch.setattr(order, "chip_of", lambda device: Chip(H200, 50 << 20))
    q, k = (torch.empty(1, 128, heads, 128, device="meta") for heads in (16, 1))
    for config in (None, KernelConfig(INTERPRETER.forward, INTERPRETER.dq, INTERPRETER.dkdv)):
        assert order.splits_of(config, There(q), There(k), 128) == 1  # type: ignore[arg-type]


# --- the sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "parts"), [(3, 1, 3), (8, 2, 2)])
def test_parts_add_up(heads: int, kv_heads: int, parts: int, dtype: torch.dtype) -> None:
    """In two batch rows, with a value's head dim of its own and one in two parts."""
    sizes = Sizes(20, 35, head_dim=24, head_dim_v=96, heads=heads, kv_heads=kv_heads, batch=2)
    check(inputs(sizes, dtype), interval("causal", 20, 35), config=split(parts))


@pytest.mark.parametrize("kind", ["window", "documents", "last rows blind"])
def test_masks(kind: str) -> None:
    check(inputs(Sizes(40, 45, heads=4)), interval(kind, 40, 45), config=split(2, tiles(16, 32)))


@pytest.mark.parametrize(("queries", "keys"), [(1, 33), (33, 1), (0, 8), (8, 0)])
def test_lengths(queries: int, keys: int) -> None:
    check(inputs(Sizes(queries, keys, heads=4, kv_heads=2)), interval("causal", queries, keys), config=split(2))


@pytest.mark.parametrize("kind", ["full", "first rows blind", "all rows blind"])
def test_sums_in_place_and_cast(kind: str) -> None:
    """As without a split, but for the order of the sum; what nobody sees stays as it is, in place."""
    x, bounds = inputs(Sizes(24, 40, heads=4), torch.float16), interval(kind, 24, 40)
    q, k, v, dout, dlse = x
    out, lse = attention_forward(q, k, v, bounds=bounds)
    given = (dout, q, k, v, lse, attention_delta(dout, out, dlse))
    before = torch.randn(k.shape), torch.randn(v.shape)
    for fresh in (False, True):
        results = []
        for parts in (1, 2):
            sums = before[0].clone(), before[1].clone()
            into = (torch.empty_like(k), torch.empty_like(v)) if fresh else sums
            made = attention_dkdv(*given, bounds=bounds, sums=sums, into=into, config=split(parts, tiles(32, 16)))
            assert made[0] is into[0]
            assert made[1] is into[1]
            results.append(made)
            if kind == "all rows blind":
                assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(made, before, strict=True))
        for made in results[1:]:
            for got, whole in zip(made, results[0], strict=True):
                torch.testing.assert_close(got, whole, rtol=1e-3 if fresh else 1e-5, atol=1e-3 if fresh else 1e-5)


def test_the_same_bits_every_time() -> None:
    x, bounds = inputs(Sizes(20, 40, heads=4), torch.float16), interval("causal", 20, 40)
    for first, second in zip(ours(x, bounds, config=split(2)), ours(x, bounds, config=split(2)), strict=True):
        assert torch.equal(first, second)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [0, -1, True, 1.0, "2", None])
def test_no_number_of_parts(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"dkdv_splits is .*: it must be 'auto' or a divisor"):
        split(parts)


def test_parts_that_do_not_divide_are_refused_before_anything_is_written() -> None:
    x = inputs(Sizes(heads=6, kv_heads=2))
    out, lse = attention_forward(x.q, x.k, x.v)
    dq = torch.zeros_like(x.q)
    told = "config.dkdv_splits is 2: it must divide the 3 query heads per key head"
    with pytest.raises(ValueError, match=re.escape(told)):
        attention_backward(x.dout, x.q, x.k, x.v, out, lse, dq=dq, bounds=FULL, config=split(2))
    assert not dq.any()
    with pytest.raises(ValueError, match=re.escape(told)):
        attention_forward(x.q, x.k, x.v, config=split(2))
