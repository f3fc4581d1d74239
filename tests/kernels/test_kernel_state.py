"""What a launch continues: the state of the forward, the sums of the backward; first, middle and last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ringattn.kernels import (
    FULL,
    Bounds,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
)

from ..support.baselines import Results
from ..support.kernel_cases import DTYPES, Inputs, Sizes, compare, exact, inputs, interval, part, pytorch, rows_of
from ..support.tolerance import assert_as_exact_as_pytorch

pytestmark = pytest.mark.usefixtures("poison")

CUTS = ([0, 40], [0, 17, 40], [0, 32, 32, 33, 40])
"""One hop; two, uneven; four with an empty one and one of a single key."""


def hops(x: Inputs, bounds: Bounds, cuts: Sequence[int], *, final: bool = True) -> tuple[Tensor, Tensor]:
    """Shard after shard, the state carried; every later launch continues it in place."""
    state = None
    for begin, end in pairwise(cuts):
        last = final and end == cuts[-1] and begin == cuts[-2]
        out, lse = attention_forward(
            x.q, x.k[:, begin:end], x.v[:, begin:end], bounds=part(bounds, begin, end), state=state, final=last
        )
        assert out.dtype == (x.q.dtype if last else torch.float32)
        if state is not None:
            assert lse is state[1]
            assert (out is state[0]) == (out.dtype == torch.float32)
        state = out, lse
    assert state is not None
    return state


def gradients(x: Inputs, bounds: Bounds, cuts: Sequence[int], out: Tensor, lse: Tensor) -> Results:
    """dQ over the key shards and dK/dV over the query shards, in fp32 sums continued in place; the last leaves."""
    q, k, v, dout, dlse = x
    delta = attention_delta(dout, out, dlse)
    shards = list(pairwise(cuts))
    dq: Tensor | None = None
    for i, (begin, end) in enumerate(shards):
        into = torch.empty_like(q) if i == len(shards) - 1 else dq if dq is not None else torch.empty_like(q).float()
        here = part(bounds, begin, end)
        made = attention_dq(dout, q, k[:, begin:end], v[:, begin:end], lse, delta, bounds=here, sums=dq, into=into)
        assert made is into
        dq = made
    sums: tuple[Tensor, Tensor] | None = None
    for i, (begin, end) in enumerate(shards):
        fresh = (torch.empty_like(k), torch.empty_like(v))
        target = fresh if i == len(shards) - 1 else sums or (fresh[0].float(), fresh[1].float())
        rows = slice(begin, end)
        dk, dv = attention_dkdv(
            dout[:, rows], q[:, rows], k, v, lse[:, :, rows].contiguous(), delta[:, :, rows].contiguous(),
            bounds=rows_of(bounds, begin, end), sums=sums, into=target,
        )  # fmt: skip
        assert dk is target[0]
        assert dv is target[1]
        sums = dk, dv
    assert dq is not None
    assert sums is not None
    return Results(out, lse, dq, *sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{len(cuts) - 1} hops")
@pytest.mark.parametrize("kind", ["full", "causal", "documents", "first rows blind"])
def test_hops_are_as_exact_as_one_launch(kind: str, cuts: list[int], dtype: torch.dtype) -> None:
    x, bounds = inputs(Sizes(), dtype), interval(kind, 40, 40)
    out, lse = hops(x, bounds, cuts)
    compare(gradients(x, bounds, cuts, out, lse), x, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hops_do_not_add_up_errors(dtype: torch.dtype) -> None:
    """A ring of eight, with enough rows to meet a bad one."""
    x, cuts = inputs(Sizes(queries=32, keys=64, heads=6), dtype), range(0, 65, 8)
    out, lse = hops(x, FULL, cuts)
    truth, baseline = exact(x), pytorch(x)
    assert_as_exact_as_pytorch("out", out, baseline.out, truth.out)
    assert_as_exact_as_pytorch("lse", lse, baseline.lse, truth.lse)


@pytest.mark.parametrize("kind", ["window", "middle rows blind", "last rows blind"])
def test_state_of_16_bit_queries_is_fp32(kind: str) -> None:
    """The hops round once, at the end: what they leave in fp32 is as exact as fp32 attention of the same inputs."""
    x, bounds = inputs(Sizes(keys=48), torch.float16), interval(kind, 40, 48)
    out, lse = hops(x, bounds, [0, 16, 48], final=False)
    last, last_lse = hops(x, bounds, [0, 16, 48])
    assert last.dtype == torch.float16
    assert torch.equal(out.half(), last)
    assert torch.equal(lse, last_lse)
    truth, baseline = exact(x, bounds), pytorch(x, bounds)
    assert_as_exact_as_pytorch("out", out, baseline.out, truth.out)
    assert_as_exact_as_pytorch("lse", lse, baseline.lse, truth.lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hops_that_see_nothing(dtype: torch.dtype) -> None:
    """First it writes the start state, later it leaves the state as it is, last it casts."""
    x = inputs(Sizes(heads=2), dtype)
    blind = interval("all rows blind", 40, 40)
    out, lse = attention_forward(x.q, x.k, x.v, bounds=blind, final=False)
    assert torch.equal(out, torch.zeros(1, 40, 2, 16))
    assert torch.equal(lse, torch.full((1, 2, 40), -math.inf))
    out, lse = attention_forward(x.q, x.k, x.v, state=(out, lse), final=False)
    before = out.clone(), lse.clone()
    out, lse = attention_forward(x.q, x.k, x.v, bounds=blind, state=(out, lse), final=False)
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    last, lse = attention_forward(x.q, x.k[:, :0], x.v[:, :0], state=(out, lse))
    assert torch.equal(last, before[0].to(dtype))
    torch.testing.assert_close(lse, before[1])


def test_a_state_that_saw_nothing_is_no_state() -> None:
    x, bounds = inputs(Sizes()), interval("causal", 40, 40)
    start = torch.zeros(1, 40, 1, 16), torch.full((1, 1, 40), -math.inf)
    for got, expected in zip(
        attention_forward(x.q, x.k, x.v, bounds=bounds, state=start),
        attention_forward(x.q, x.k, x.v, bounds=bounds),
        strict=True,
    ):
        assert torch.equal(got, expected)


def merged(state: tuple[Tensor, Tensor], block: Results) -> tuple[Tensor, Tensor]:
    """Two softmaxes over disjoint keys, in float64: the weights are the shares of the sum of exponentials."""
    out, lse = (t.to(torch.float64) for t in state)
    block_lse = block.lse.to(torch.float64)
    total = torch.logaddexp(lse, block_lse)
    old, new = ((part - total).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, block_lse))
    return out * old + block.out.to(torch.float64) * new, total


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_is_a_start_state(dtype: torch.dtype) -> None:
    """``lse = sink, out = 0``: a key that everyone sees and that has no value."""
    x, bounds = inputs(Sizes(heads=2), dtype), interval("first rows blind", 40, 40)
    sink = torch.randn(2)[None, :, None].expand(1, 2, 40)
    zero = torch.zeros(1, 40, 2, 16)
    out, lse = attention_forward(x.q, x.k, x.v, bounds=bounds, state=(zero.clone(), sink.contiguous()))
    truth, baseline = (merged((zero, sink), made(x, bounds)) for made in (exact, pytorch))
    assert_as_exact_as_pytorch("out", out, baseline[0].to(dtype), truth[0])
    assert_as_exact_as_pytorch("lse", lse, baseline[1].float(), truth[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_keys_are_weighed_in_full_precision(dtype: torch.dtype) -> None:
    """A state of 2^20 keys: each new weight is about 2^-20 of the sum, which fp16 holds in 4 bits.

    With ``out = 0`` in the state, the result is the new keys' part alone, and its error relative to itself.
    """
    x = inputs(Sizes(), dtype)
    state = torch.zeros(1, 40, 1, 16), torch.full((1, 1, 40), math.log(2**20)) + torch.randn(1, 1, 40)
    truth, baseline = (merged(state, made(x, FULL)) for made in (exact, pytorch))
    out, lse = attention_forward(x.q, x.k, x.v, state=state, final=False)
    # relative to the largest part of each row: rows differ by what they had seen before; the exponent rounds lse
    size = truth[0].abs().amax(-1, keepdim=True)
    parts = (out / size).float(), baseline[0] / size, truth[0] / size
    assert_as_exact_as_pytorch("out", *parts, magnitude=1 + truth[1].max().item())
    assert_as_exact_as_pytorch("lse", lse, baseline[1].float(), truth[1])


@pytest.mark.parametrize("level", [-200.0, 200.0])
def test_one_side_outweighs_the_other_past_the_range_of_fp32(level: float) -> None:
    """The state alone, or the new keys alone: e^200 overflows, and nothing becomes NaN."""
    x = inputs(Sizes())
    state = torch.randn(1, 40, 1, 16), torch.full((1, 1, 40), level)
    truth, baseline = (merged(state, made(x, FULL)) for made in (exact, pytorch))
    out, lse = attention_forward(x.q, x.k, x.v, state=state)
    assert_as_exact_as_pytorch("out", out, baseline[0].float(), truth[0])
    assert_as_exact_as_pytorch("lse", lse, baseline[1].float(), truth[1])


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_the_state_has_the_range_of_fp32(scale: float) -> None:
    x = inputs(Sizes())
    x = x._replace(v=x.v * scale, dout=x.dout / scale)
    cuts = [0, 17, 40]
    out, lse = hops(x, FULL, cuts)
    compare(gradients(x, FULL, cuts, out, lse), x)


def test_sums_of_attention_backward_are_continued_in_place() -> None:
    """16-bit inputs, fp32 sums: what is passed is what is returned, plus this shard's part."""
    x, bounds = inputs(Sizes(heads=2), torch.float16), interval("causal", 40, 40)
    q, k, v, dout, dlse = x
    out, lse = attention_forward(q, k, v, bounds=bounds)
    fresh = [torch.zeros(t.shape) for t in (q, k, v)]
    attention_backward(dout, q, k, v, out, lse, dlse=dlse, bounds=bounds, dq=fresh[0], dk=fresh[1], dv=fresh[2])
    sums = [torch.randn(t.shape) for t in (q, k, v)]
    before = [t.clone() for t in sums]
    made = attention_backward(dout, q, k, v, out, lse, dlse=dlse, bounds=bounds, dq=sums[0], dk=sums[1], dv=sums[2])
    for got, passed, start, added in zip(made, sums, before, fresh, strict=True):
        assert got is passed
        assert torch.equal(got, start + added)


def test_sums_stay_where_nothing_is_seen() -> None:
    """In place they are not touched; into another tensor they are copied, whichever of the two is in place."""
    x, blind = inputs(Sizes()), interval("all rows blind", 40, 40)
    lse, delta = torch.zeros(1, 1, 40), torch.zeros(1, 1, 40)
    sums = [torch.randn(1, 40, 1, 16) for _ in range(2)]
    before = [t.clone() for t in sums]
    assert torch.equal(attention_dq(x.dout, *x[:3], lse, delta, bounds=blind), torch.zeros(1, 40, 1, 16))
    for new in ((False, False), (True, True), (False, True), (True, False)):
        into = [torch.empty_like(t) if fresh else t for fresh, t in zip(new, sums, strict=True)]
        made = attention_dkdv(
            x.dout, *x[:3], lse, delta, bounds=blind, sums=(sums[0], sums[1]), into=(into[0], into[1])
        )
        dq = attention_dq(x.dout, *x[:3], lse, delta, bounds=blind, sums=sums[0], into=into[0])
        for got, expected in zip((*made, dq), (*before, before[0]), strict=True):
            assert torch.equal(got, expected)
