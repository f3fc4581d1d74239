"""Tiles past 2^31 elements, in sparse files: what is never touched takes neither memory nor disk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn.kernels import attention_backward, attention_forward

from ..support.kernel_cases import Sizes, inputs, interval

STEP = 2**30
"""Elements between neighbours: it fits an int32, and so does every index, but the offset of the third one does not."""

Far = Callable[[Tensor], Tensor]


@pytest.fixture(params=["batch", "sequence", "heads"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Far:
    """A copy of a tensor whose elements along one dimension lie STEP apart.

    It begins in the middle of its file, so that an offset that wraps reads zeros from the beginning and fails a test,
    rather than the process.
    """
    dim, names = {"batch": 0, "sequence": 1, "heads": 2}[request.param], count()

    def copy(x: Tensor) -> Tensor:
        strides = list(torch.empty(x.shape).stride())
        strides[dim] = STEP
        path = tmp_path / str(next(names))
        storage = torch.from_file(str(path), shared=True, size=2 * 2 * STEP + x.numel(), dtype=x.dtype)
        view = storage.as_strided(x.shape, strides, 2 * STEP)
        view.copy_(x)
        assert path.stat().st_blocks * 512 < 2**24 < 2**31 < path.stat().st_size, "the file is not sparse"
        return view

    return copy


SIZES = Sizes(queries=3, keys=3, heads=3, kv_heads=3, batch=3)


def test_inputs(far: Far) -> None:
    q, k, v, dout, _ = inputs(SIZES, torch.float16)
    bounds = interval("causal", 3, 3)
    out, lse = attention_forward(q, k, v, bounds=bounds)
    got = attention_forward(far(q), far(k), far(v), bounds=bounds)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    expected = attention_backward(dout, q, k, v, out, lse, bounds=bounds)
    gradients = attention_backward(far(dout), far(q), far(k), far(v), far(out), lse, bounds=bounds)
    for made, same in zip(gradients, expected, strict=True):
        assert torch.equal(made, same)


def test_state_and_sums(far: Far) -> None:
    q, k, v, dout, _ = inputs(SIZES)
    state, level = torch.randn(3, 3, 3, 16), torch.randn(3, 3, 3)
    sums = [torch.randn_like(t) for t in (q, k, v)]
    there, *sums_there = [far(t) for t in (state, *sums)]
    out, lse = attention_forward(q, k, v, state=(state, level.clone()))
    got, got_lse = attention_forward(q, k, v, state=(there, level.clone()))
    assert got is there
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)
    attention_backward(dout, q, k, v, out, lse, dq=sums[0], dk=sums[1], dv=sums[2])
    attention_backward(dout, q, k, v, out, lse, dq=sums_there[0], dk=sums_there[1], dv=sums_there[2])
    for made, same in zip(sums_there, sums, strict=True):
        assert torch.equal(made, same)
