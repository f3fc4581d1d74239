"""Launches of each kernel against the reference: shapes, hops, propagation of NaN, and offsets past 2^31."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import (
    FULL,
    Bounds,
    KernelConfig,
    Tile,
    attention,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    attention_gradients,
)

from ..support import baselines, guard_pages
from ..support.baselines import Results
from ..support.kernel_cases import (
    DTYPES,
    KINDS,
    Inputs,
    Sizes,
    bounds_from,
    check,
    compare,
    cycle_values,
    dense_mask,
    dkdv_of_shards,
    documents,
    dq_of_shards,
    exact,
    forward_hops,
    inputs,
    interval,
    ours,
    pytorch,
    tiles,
)
from ..support.tolerance import assert_as_exact_as_pytorch

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    cycle_values(
        [(1, 1), (40, 40), (96, 96), (256, 256), (192, 128), (24, 40), (16, 1), (512, 512), (16, 300)], DTYPES
    ),
)
def test_head_dims(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    check(inputs(Sizes(head_dim=head_dim, head_dim_v=head_dim_v), dtype), interval("window", 40, 40))


@pytest.mark.parametrize(("head_dim", "dtype"), cycle_values([16, 320], DTYPES))
def test_wide_values_in_two_launches(head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch has 256 columns and leaves the carried lse to the second, which still reads it."""
    x, bounds = inputs(Sizes(head_dim=head_dim, head_dim_v=300), dtype), interval("documents", 40, 40)
    launch = attention.launch  # type: ignore[attr-defined]
    widths: list[int] = []

    def spied(*arguments: Any, **options: Any) -> None:
        widths.append(options["HEAD_DIM_V"])
        launch(*arguments, **options)

    monkeypatch.setattr(attention, "launch", spied)
    out, lse = forward_hops(x, bounds, CUTS[1], config=tiles(64, 16))
    assert widths == [256, 44] * 4
    compare(hop_gradients(x, bounds, CUTS[1], out, lse), x, bounds)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind", "scale"),
    [(2, 2, "causal", 0.01), (4, 2, "full", 0.7), (6, 2, "causal", None), (3, 1, "causal", 3.0)],
)
def test_heads_and_scales(heads: int, kv_heads: int, kind: str, scale: float | None) -> None:
    """Multi-head, grouped-query and multi-query attention."""
    x = inputs(Sizes(queries=20, keys=20, heads=heads, kv_heads=kv_heads, batch=2))
    check(x, interval(kind, 20, 20), softmax_scale=scale)


@pytest.mark.parametrize(("kind", "dtype"), cycle_values(KINDS, DTYPES))
def test_masks(kind: str, dtype: torch.dtype) -> None:
    check(inputs(Sizes(queries=70, keys=75), dtype), interval(kind, 70, 75))


def test_interval_and_position_references_agree() -> None:
    """This reference masks by intervals of keys, the public one by positions."""
    x = inputs(Sizes(heads=4, kv_heads=2))
    by_interval = exact(x, interval("causal", 40, 40))
    torch.testing.assert_close(by_interval, baselines.exact(*x, causal=True), rtol=1e-12, atol=1e-12)


LENGTHS = [(1, 33), (33, 1), (64, 32), (0, 8), (8, 0), (0, 0)]


@pytest.mark.parametrize(("queries", "keys", "kind"), cycle_values(LENGTHS, ["full", "causal", "causal"]))
def test_lengths(queries: int, keys: int, kind: str) -> None:
    check(inputs(Sizes(queries, keys, heads=2)), interval(kind, queries, keys))


@settings(max_examples=12)
@given(st.data())
def test_any_intervals_and_tiles(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    index = st.lists(st.integers(0, keys), min_size=queries, max_size=queries).map(sorted)
    lo, hi = torch.tensor(data.draw(index)), torch.tensor(data.draw(index))
    block = st.sampled_from([16, 32])
    check(
        inputs(Sizes(queries, keys)),
        bounds_from(lo, torch.maximum(lo, hi), keys),
        config=tiles(data.draw(block), data.draw(block)),
        few_keys=True,
    )


def test_scores_far_from_zero() -> None:
    """Without the running maximum, sums of exponentials would overflow or vanish in fp32."""
    x = inputs(Sizes(head_dim=8))
    for shift in (-50.0, 50.0):
        q = torch.cat([x.q, torch.full_like(x.q[..., :1], shift)], -1)
        k = torch.cat([x.k, torch.full_like(x.k[..., :1], 8.0)], -1)
        check(x._replace(q=q, k=k), interval("first rows blind", 40, 40))


def heads_first(x: Tensor) -> Tensor:
    """Return a copy with ``[B, H, S, D]`` storage."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed(x: Tensor) -> Tensor:
    """Return a slice of a packed ``[B, S, 3, H, D]`` tensor."""
    return torch.stack([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], 2)[:, :, 1]


def sliced(x: Tensor) -> Tensor:
    """Return a view of a larger tensor: every second batch row, every third token, some heads and columns."""
    batch, length, heads, head_dim = x.shape
    large = torch.full((2 * batch, 3 * length, heads + 2, head_dim + 5), torch.nan, dtype=x.dtype)
    view = large[::2, ::3, 1:-1, 3:-2]
    view.copy_(x)
    return view


VIEWS = (heads_first, packed, sliced)


@pytest.mark.parametrize("view", VIEWS)
def test_strided_tensors_are_not_copied(view: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches get the tensors themselves, and elements between those of a result stay NaN."""
    launched, launch = set[int](), attention.launch  # type: ignore[attr-defined]

    def spy(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
        launched.update(arg[0].data_ptr() for arg in args if hasattr(arg, "stride_b"))
        launch(kernel, grid, device, *args, **options)

    q, k, v, dout, _ = inputs(Sizes(20, 20, heads=2, kv_heads=2, batch=2))
    call: dict[str, Any] = {"bounds": interval("causal", 20, 20)}
    state, lse = torch.randn_like(q), torch.randn(2, 2, 20)
    sums = [torch.randn_like(t) for t in (q, k, v)]
    own, strided = [view(t) for t in (state, *sums)], [view(t) for t in (q, k, v, dout)]
    expected = attention_forward(q, k, v, state=(state, lse.clone()), **call)
    expected_sums = attention_backward(dout, q, k, v, *expected, dq=sums[0], dk=sums[1], dv=sums[2], **call)
    monkeypatch.setattr(attention, "launch", spy)
    out, lse = attention_forward(*strided[:3], state=(own[0], lse), **call)
    view_q, view_k, view_v, view_dout = strided
    gradients = attention_backward(view_dout, view_q, view_k, view_v, out, lse, dq=own[1], dk=own[2], dv=own[3], **call)
    for got, target, same in zip((out, *gradients), own, (expected[0], *expected_sums), strict=True):
        assert got is target and torch.equal(got, same)
        storage = target._base
        assert storage is not None and int(storage.isnan().sum()) == storage.numel() - target.numel()
    assert torch.equal(lse, expected[1])
    assert all(map(torch.equal, strided, (q, k, v, dout))), "inputs are left alone"
    assert {t.data_ptr() for t in (*own, *strided)} <= launched


CUTS = ([0, 17, 40], [0, 32, 32, 33, 40])
"""Key shards: two uneven ones; four with an empty one and one of a single key."""


def hop_gradients(x: Inputs, bounds: Bounds, cuts: Sequence[int], out: Tensor, lse: Tensor) -> Results:
    """Return the results of hops: dQ over key shards and dK/dV over query shards, in fp32 sums cast at the end."""
    call = x, bounds, cuts, lse, attention_delta(x.dout, out, x.dlse)
    return Results(out, lse, dq_of_shards(*call), *dkdv_of_shards(*call))


HOPS = cycle_values(["full", "causal", "documents", "first rows blind"], DTYPES, CUTS)


@pytest.mark.parametrize(("kind", "dtype", "cuts"), HOPS)
def test_hops_are_as_exact_as_one_launch(kind: str, dtype: torch.dtype, cuts: list[int]) -> None:
    x, bounds = inputs(Sizes(), dtype), interval(kind, 40, 40)
    out, lse = forward_hops(x, bounds, cuts)
    compare(hop_gradients(x, bounds, cuts, out, lse), x, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hops_without_visible_keys(dtype: torch.dtype) -> None:
    """The first writes the start state, later ones keep state and sums, the last one casts."""
    x, blind = inputs(Sizes(heads=2), dtype), interval("all rows blind", 40, 40)
    out, lse = attention_forward(x.q, x.k, x.v, bounds=blind, final=False)
    assert not out.any() and (lse == -math.inf).all()
    out, lse = attention_forward(x.q, x.k, x.v, state=(out, lse), final=False)
    before = out.clone(), lse.clone()
    assert all(map(torch.equal, attention_forward(*x[:3], bounds=blind, state=(out, lse), final=False), before))
    last, lse = attention_forward(x.q, x.k[:, :0], x.v[:, :0], state=(out, lse))
    assert torch.equal(last, before[0].to(dtype))
    torch.testing.assert_close(lse, before[1])
    assert not attention_dq(x.dout, *x[:3], lse, lse, bounds=blind).any()
    dq, *sums = (torch.randn(t.shape) for t in x[:3])
    for new in ((False, False), (True, True), (False, True), (True, False)):  # which of the two results is a new tensor
        into = [torch.empty_like(t) if fresh else t for fresh, t in zip(new, sums, strict=True)]
        made = attention_dkdv(x.dout, *x[:3], lse, lse, bounds=blind, accum=(sums[0], sums[1]), out=(into[0], into[1]))
        target = torch.empty_like(dq) if new[0] else dq
        made_dq = attention_dq(x.dout, *x[:3], lse, lse, bounds=blind, accum=dq, out=target)
        assert all(map(torch.equal, (made_dq, *made), (dq, *sums)))


def merge(first: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge (out, lse) of attention over two disjoint sets of keys.

    ``lse = log(exp(lse_1) + exp(lse_2))``, ``out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2``: the sum of two
    softmax numerators over the sum of their denominators (M. Rabe and C. Staats, "Self-attention Does Not Need O(n^2)
    Memory", 2021, arXiv:2112.05682, section 2).
    """
    lse = torch.logaddexp(first[1], other[1])
    shares = [torch.exp(part[1] - lse).transpose(1, 2)[..., None] for part in (first, other)]
    return shares[0] * first[0] + shares[1] * other[0], lse


@pytest.mark.parametrize(
    ("dtype", "level", "out"),
    [(dtype, math.log(2**20), 0.0) for dtype in DTYPES] + [(torch.float32, level, 1.0) for level in (-200.0, 200.0)],
)
def test_new_keys_are_merged_in_full_precision(dtype: torch.dtype, level: float, out: float) -> None:
    """Each new weight is about 2^-20 of a state of 2^20 keys, which fp16 would hold in 4 bits.

    With ``out = 0`` in the state, the result is the part of the new keys, so its relative error shows. At e^200 or
    e^-200 only one side remains, without NaN.
    """
    x = inputs(Sizes(), dtype)
    state = out * torch.randn(1, 40, 1, 16), torch.full((1, 1, 40), level) + torch.randn(1, 1, 40)
    before = state[0].double(), state[1].double()
    blocks = pytorch(x, FULL), exact(x, FULL)
    baseline, truth = (merge(before, (block.out.double(), block.lse.double())) for block in blocks)
    made, lse = attention_forward(x.q, x.k, x.v, state=state, final=False)
    # Relative to the largest part of each row, because rows start from different states. Rounding of lse counts, too.
    size = truth[0].abs().amax(-1, keepdim=True)
    parts = (made / size).float(), (baseline[0] / size).float(), truth[0] / size
    assert_as_exact_as_pytorch("out", *parts, magnitude=1 + abs(truth[1]).max().item())
    assert_as_exact_as_pytorch("lse", lse, baseline[1].float(), truth[1])


BLOCK, TOKENS = 16, 48
PLACE = 21  # inside a tile, with rows of the same tile on either side
MASKS = {
    "full": interval("full", TOKENS, TOKENS),
    "causal": interval("causal", TOKENS, TOKENS),
    "documents": documents([(19, 19), (5, 5), (24, 24)]),
    "window": bounds_from(torch.arange(TOKENS) - 6, torch.arange(TOKENS) + 3, TOKENS),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # raised by NumPy on NaN in the interpreter
@pytest.mark.parametrize(
    ("kind", "name"), [("full", "v"), ("causal", "k"), ("documents", "dout"), ("window", "q"), ("window", "v")]
)
def test_nan_reaches_the_rows_that_see_it(kind: str, name: str) -> None:
    """Other rows and keys may become NaN only if they share a tile with an affected pair."""
    x, bounds = inputs(Sizes(TOKENS, TOKENS)), MASKS[kind]
    clean = ours(x, bounds, config=tiles(BLOCK, BLOCK))
    visible = dense_mask(bounds, TOKENS, TOKENS)
    touched = visible.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    touched = touched.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    is_place = torch.arange(TOKENS) == PLACE
    rows, rows_at_most = (visible[:, PLACE], touched[:, PLACE]) if name in ("k", "v") else (is_place, is_place)
    keys, keys_at_most = visible[rows].any(0), touched[rows_at_most].any(0)
    none = torch.zeros_like(rows)
    reached = {"out": (rows, rows_at_most), "dq": (rows, rows_at_most), "dk": (keys, keys_at_most)}
    reached["dv"] = (none, none) if name == "v" else (keys, keys_at_most)  # dV = P^T dO does not depend on v
    if name == "dout":
        reached["out"] = none, none
    for value in (math.nan, math.inf):
        getattr(x, name)[:, PLACE] = value
        results = ours(x, bounds, config=tiles(BLOCK, BLOCK))
        for result, (certain, at_most) in reached.items():
            got, same = getattr(results, result), getattr(clean, result)
            assert not got[:, certain].isfinite().any(-1).any(), f"{result}: a row that sees it is finite"
            assert torch.equal(got[:, ~at_most], same[:, ~at_most]), f"{result}: a row that never touches it differs"
        # lse is exact and independent of v, because the mask applies after the scores
        reached_lse = rows if name in ("q", "k") else none
        assert torch.equal(results.lse.isfinite(), ~reached_lse.expand(1, 1, -1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("part", [0, 1])
def test_nan_in_the_state_stays_in_its_row(part: int) -> None:
    x, row = inputs(Sizes()), torch.arange(40) == PLACE
    state = torch.randn(1, 40, 1, 16), torch.randn(1, 1, 40)
    clean, _ = attention_forward(x.q, x.k, x.v, state=(state[0].clone(), state[1].clone()))
    (state[0][:, PLACE] if part == 0 else state[1][..., PLACE]).fill_(math.nan)
    out, _ = attention_forward(x.q, x.k, x.v, state=state)
    assert not out[:, PLACE].isfinite().any() and torch.equal(out[:, ~row], clean[:, ~row])


STEP = 2**30
"""Elements between neighbours. STEP and every index fit an int32, but the offset of the third element does not."""

Far = Callable[[Tensor], Tensor]


def spread(x: Tensor, dim: int, step: int, path: Path) -> Tensor:
    """Return a copy whose elements along one dimension lie ``step`` apart.

    The copy begins in the middle of its file, so an offset that wraps reads zeros and fails the test instead of
    crashing the process.
    """
    strides = list(torch.empty(x.shape).stride())
    strides[dim] = step
    size = 2**31 + (x.shape[dim] - 1) * step + x.numel()
    view = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype).as_strided(x.shape, strides, 2**31)
    view.copy_(x)
    assert path.stat().st_blocks * 512 < 2**24 < 2**31 < path.stat().st_size, "the file is not sparse"
    return view


@pytest.fixture(params=["batch", "sequence", "heads"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Far:
    """Copy a tensor so that its elements along one dimension lie STEP apart."""
    dim, names = {"batch": 0, "sequence": 1, "heads": 2}[request.param], count()
    return lambda x: spread(x, dim, STEP, tmp_path / str(next(names)))


def test_offsets_past_32_bits(far: Far) -> None:
    q, k, v, dout, _ = inputs(Sizes(queries=3, keys=3, heads=3, kv_heads=3, batch=3))
    state, level = torch.randn(3, 3, 3, 16), torch.randn(3, 3, 3)
    sums = [torch.randn_like(t) for t in (q, k, v)]
    far_state, *far_sums = [far(t) for t in (state, *sums)]
    far_q, far_k, far_v = far(q), far(k), far(v)
    out, lse = attention_forward(q, k, v, state=(state, level.clone()))
    got, got_lse = attention_forward(far_q, far_k, far_v, state=(far_state, level.clone()))
    assert got is far_state
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    attention_backward(dout, q, k, v, out, lse, dq=sums[0], dk=sums[1], dv=sums[2])
    into: dict[str, Any] = dict(zip(("dq", "dk", "dv"), far_sums, strict=True))
    attention_backward(far(dout), far_q, far_k, far_v, far_state, lse, **into)
    assert all(map(torch.equal, far_sums, sums))


def test_offsets_past_32_bits_in_a_single_pass(tmp_path: Path) -> None:
    """Offsets inside a tile fit 32 bits, but those of the third tile of queries do not."""
    q, k, v, dout, _ = inputs(Sizes(queries=33, keys=8))
    config = KernelConfig(backward="single_pass", single_pass=Tile(16, 16, 4, 1))
    near = (dout, q, torch.randn_like(q))
    far = [spread(x, 1, 2**26, tmp_path / str(i)) for i, x in enumerate(near)]
    ones = torch.ones(1, 1, 33)
    results = [attention_gradients(x[0], x[1], k, v, ones, ones, dq=x[2], config=config) for x in (near, far)]
    assert all(map(torch.equal, *results)) and torch.equal(far[2], near[2])


def test_kernels_do_not_access_memory_past_the_end() -> None:
    """Guard pages around the tensors would end the child process; the last line of its output names the case."""
    child = multiprocessing.get_context("fork").Process(target=guard_pages.main)
    child.start()
    child.join()
    assert child.exitcode == 0
