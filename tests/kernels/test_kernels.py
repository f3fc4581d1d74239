"""One launch of each kernel against the reference: dtypes, head dims, heads, masks, lengths, tiles, views."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import kernels
from ringattn.kernels import (
    FULL,
    attention,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
)

from ..support import baselines
from ..support.kernel_cases import DTYPES, KINDS, Inputs, Sizes, check, exact, inputs, interval, of, ours, tiles

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 16, 40, 64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(inputs(Sizes(head_dim=head_dim), dtype), interval("causal", 40, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (40, 24), (24, 40), (16, 1), (1, 33)])
def test_values_of_another_head_dim(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    check(inputs(Sizes(head_dim=head_dim, head_dim_v=head_dim_v), dtype), interval("window", 40, 40))


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2), (3, 1)])
def test_heads(heads: int, kv_heads: int, kind: str) -> None:
    """Multi-head, grouped-query and multi-query, in two batch rows."""
    x = inputs(Sizes(queries=20, keys=20, heads=heads, kv_heads=kv_heads, batch=2))
    check(x, interval(kind, 20, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_masks(kind: str, dtype: torch.dtype) -> None:
    check(inputs(Sizes(queries=70, keys=75), dtype), interval(kind, 70, 75))


def test_the_two_ways_to_the_truth_agree() -> None:
    """Keys cut out for each row, as here, and masked by positions, as the reference does for the causal mask."""
    x = inputs(Sizes(heads=4, kv_heads=2))
    for got, expected in zip(exact(x, interval("causal", 40, 40)), baselines.exact(*x, causal=True), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 33), (33, 1), (31, 65), (64, 32), (0, 8), (8, 0), (0, 0)])
def test_lengths(queries: int, keys: int, kind: str) -> None:
    check(inputs(Sizes(queries=queries, keys=keys, heads=2)), interval(kind, queries, keys))


def test_no_batch() -> None:
    x = inputs(Sizes(batch=0))
    assert [t.shape for t in ours(x)] == [x.q.shape, x.dlse.shape, x.q.shape, x.k.shape, x.v.shape]


@pytest.mark.parametrize("kind", ["full", "causal", "documents"])
@pytest.mark.parametrize("block_q", [16, 32, 64])
@pytest.mark.parametrize("block_k", [16, 64])
def test_tiles(block_q: int, block_k: int, kind: str) -> None:
    """Every tile gives the same result within rounding."""
    x, bounds = inputs(Sizes(queries=70, keys=75)), interval(kind, 70, 75)
    check(x, bounds, config=tiles(block_q, block_k))


def test_the_same_bits_every_time() -> None:
    x, bounds = inputs(Sizes(heads=4, kv_heads=2), torch.float16), interval("causal", 40, 40)
    for first, second in zip(ours(x, bounds), ours(x, bounds), strict=True):
        assert torch.equal(first, second)


@settings(max_examples=20)
@given(st.data())
def test_any_interval(data: st.DataObject) -> None:
    """Ends that never decrease, rows that see nothing wherever they lie, any tile."""
    queries, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    index = st.lists(st.integers(0, keys), min_size=queries, max_size=queries).map(sorted)
    lo, hi = torch.tensor(data.draw(index)), torch.tensor(data.draw(index))
    block = st.sampled_from([16, 32])
    check(
        inputs(Sizes(queries, keys)),
        of(lo, torch.maximum(lo, hi), keys),
        config=tiles(data.draw(block), data.draw(block)),
        few_keys=True,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.01, 0.7, 3.0])
def test_softmax_scale(scale: float, dtype: torch.dtype) -> None:
    check(inputs(Sizes(), dtype), interval("causal", 40, 40), softmax_scale=scale)


def test_scores_far_from_zero() -> None:
    """Sums of exponentials that overflow fp32 without a pivot, upwards and downwards."""
    x = inputs(Sizes(head_dim=8))
    for shift in (-50.0, 50.0):
        q = torch.cat([x.q, torch.full_like(x.q[..., :1], shift)], -1)
        k = torch.cat([x.k, torch.full_like(x.k[..., :1], 8.0)], -1)
        check(x._replace(q=q, k=k), interval("first rows blind", 40, 40))


# --- views --------------------------------------------------------------------------------------------------------


def heads_first(x: Tensor) -> Tensor:
    """``[B, H, S, D]`` storage."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed(x: Tensor) -> Tensor:
    """A slice of a tensor that holds two others beside it: ``[B, S, 3, H, D]``."""
    return torch.stack([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], 2)[:, :, 1]


def sliced(x: Tensor) -> Tensor:
    """Every second batch row, every third token and some of the heads and columns of a larger tensor."""
    batch, length, heads, head_dim = x.shape
    large = torch.full((2 * batch, 3 * length, heads + 2, head_dim + 5), torch.nan, dtype=x.dtype)
    view = large[::2, ::3, 1:-1, 3:-2]
    view.copy_(x)
    return view


def row_padded(x: Tensor) -> Tensor:
    """Storage that ends with the last element, so that whatever is read past it is not ours."""
    return torch.cat([x.new_full((*x.shape[:3], 3), torch.nan), x], -1)[..., 3:]


VIEWS = (heads_first, packed, sliced, row_padded)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the tensors that reach a kernel."""
    seen: list[int] = []
    launch = attention.launch  # type: ignore[attr-defined]

    def spy(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
        seen.extend(arg[0].data_ptr() for arg in args if hasattr(arg, "stride_b"))
        launch(kernel, grid, device, *args, **options)

    monkeypatch.setattr(attention, "launch", spy)
    return seen


@pytest.mark.parametrize("view", VIEWS)
def test_strided_inputs_are_read_where_they_lie(view: Callable[[Tensor], Tensor], launched: list[int]) -> None:
    x, bounds = inputs(Sizes(20, 20, heads=2, kv_heads=2, batch=2)), interval("causal", 20, 20)
    expected = ours(x, bounds)
    launched.clear()
    strided = Inputs(view(x.q), view(x.k), view(x.v), view(x.dout), x.dlse)
    assert not strided.q.is_contiguous()
    for got, same in zip(ours(strided, bounds), expected, strict=True):
        assert torch.equal(got, same)
    assert {t.data_ptr() for t in strided[:4]} <= set(launched)


@pytest.mark.parametrize("view", VIEWS)
def test_strided_results_are_written_where_they_lie(view: Callable[[Tensor], Tensor], launched: list[int]) -> None:
    """State, sums and targets; what lies between their elements stays."""
    q, k, v, dout, _ = inputs(Sizes(20, 20, heads=2, kv_heads=2, batch=2))
    state = torch.randn_like(q), torch.randn(2, 2, 20)
    sums = [torch.randn_like(t) for t in (q, k, v)]
    own = [view(t) for t in (state[0], *sums)]
    out, lse = attention_forward(q, k, v, state=(own[0], state[1].clone()))
    expected = attention_forward(q, k, v, state=(state[0].clone(), state[1].clone()))
    assert out is own[0]
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    made = attention_backward(dout, q, k, v, view(out), lse, dq=own[1], dk=own[2], dv=own[3])
    expected_sums = attention_backward(dout, q, k, v, out, lse, dq=sums[0], dk=sums[1], dv=sums[2])
    for got, target, same in zip(made, own[1:], expected_sums, strict=True):
        assert got is target
        assert torch.equal(got, same)
    assert {t.data_ptr() for t in own} <= set(launched)
    for target in own:  # between their elements and past their end it is NaN, and stays so
        storage = target._base
        assert storage is not None
        assert int(storage.isnan().sum()) == storage.numel() - target.numel()


def test_heads_that_share_their_storage() -> None:
    """K and V expanded over heads, stride 0, are what MQA reads."""
    x, bounds = inputs(Sizes(20, 20, heads=3, kv_heads=1)), interval("causal", 20, 20)
    shape = (-1, -1, 3, -1)
    out, lse = attention_forward(x.q, x.k.expand(shape), x.v.expand(shape), bounds=bounds)
    assert torch.equal(out, ours(x, bounds).out)
    assert torch.equal(lse, ours(x, bounds).lse)


# --- the parts of the backward ------------------------------------------------------------------------------------


def test_backward_is_delta_then_dq_then_dkdv() -> None:
    x, bounds = inputs(Sizes(heads=4, kv_heads=2)), interval("causal", 40, 40)
    q, k, v, dout, dlse = x
    out, lse = attention_forward(q, k, v, bounds=bounds)
    delta = attention_delta(dout, out, dlse)
    parts = (
        attention_dq(dout, q, k, v, lse, delta, bounds=bounds),
        *attention_dkdv(dout, q, k, v, lse, delta, bounds=bounds),
    )
    whole = attention_backward(dout, q, k, v, out, lse, dlse=dlse, bounds=bounds)
    for got, same in zip(parts, whole, strict=True):
        assert torch.equal(got, same)


def test_no_gradient_through_lse_is_a_gradient_of_zero() -> None:
    x = inputs(Sizes())
    q, k, v, dout, dlse = x
    out, lse = attention_forward(q, k, v)
    without = attention_backward(dout, q, k, v, out, lse)
    for got, same in zip(without, attention_backward(dout, q, k, v, out, lse, dlse=dlse * 0), strict=True):
        assert torch.equal(got, same)


def test_gradient_through_lse_alone() -> None:
    x = inputs(Sizes())
    check(x._replace(dout=torch.zeros_like(x.dout)), interval("documents", 40, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta(dtype: torch.dtype) -> None:
    dout, out = (torch.randn(2, 70, 3, 40).to(dtype) for _ in range(2))
    dlse = torch.randn(2, 3, 70)
    expected = (dout.double() * out.double()).sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(attention_delta(dout, out, dlse), expected.float(), rtol=1e-5, atol=1e-5)


def test_inputs_are_left_alone() -> None:
    x = inputs(Sizes(heads=2))
    before = [t.clone() for t in x]
    ours(x, FULL)
    assert all(torch.equal(t, same) for t, same in zip(x, before, strict=True))


def test_readme_lists_every_argument() -> None:
    """`importlib` finds it where the package is installed, too."""
    readme = (files("ringattn.kernels") / "README.md").read_text()
    entries = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    calls = [node for node in ast.walk(ast.parse(entries)) if isinstance(node, ast.Call)]
    listed = {ast.unparse(call.func): [ast.unparse(arg) for arg in call.args] for call in calls}
    for call in calls:
        listed[ast.unparse(call.func)] += [str(keyword.arg) for keyword in call.keywords]
    assert {name for name in kernels.__all__ if name.startswith("attention_")} == set(listed)
    for name, arguments in listed.items():
        assert arguments == list(inspect.signature(getattr(kernels, name)).parameters)
