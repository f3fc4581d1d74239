"""``merge``: partial attentions over disjoint keys give full attention and its gradients; ``single_rank``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, merge, ring_attention, single_rank

from ..support.baselines import Results
from ..support.mask_cases import RingCase, compare_with_expected, expected_results
from ..support.rank_processes import group_results
from ..support.ring_cases import inputs

ROWS = 24


def parts_of(q: Tensor, k: Tensor, v: Tensor, cuts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return outs and lses of causal attention over each stretch of keys."""
    made = []
    for start, end in pairwise(cuts):
        held = {"layout": Layout.contiguous(ROWS, 1), "kv_layout": Layout([[(start, end - start)]])}
        made.append(ring_attention(q, k[:, start:end], v[:, start:end], causal=True, return_lse=True, **held))  # type: ignore[call-overload]
    outs, lses = zip(*made, strict=True)
    return [*outs], [*lses]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[0, ROWS], [0, 7, ROWS], [0, 1, 9, 9, 20, ROWS]])
def test_merged_parts_equal_full_attention(dtype: torch.dtype, cuts: list[int]) -> None:
    whole = inputs(ROWS, (4, 2), dtype=dtype)
    q, k, v = leaves = [whole[name].requires_grad_() for name in "qkv"]
    out, lse = merge(*parts_of(q, k, v, cuts))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad((out, lse), leaves, (whole["dout"], whole["dlse"]))
    right = expected_results(RingCase(Layout.contiguous(ROWS, 1), whole, {"causal": True}))
    # each part and its gradient are rounded separately
    sizes = {name: x[x.isfinite()].abs().max().item() * len(cuts) for name, x in right.exact._asdict().items()}
    compare_with_expected(right._replace(magnitudes=sizes), Results(out, lse, *grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_of_outs_decides_the_precision(dtype: torch.dtype) -> None:
    outs, lses = [torch.randn(1, 3, 2, 4).bfloat16() for _ in range(3)], [torch.randn(1, 2, 3).to(dtype)] * 3
    out, lse = merge(outs, lses)
    expected, _ = merge([x.float() for x in outs], [x.float() for x in lses])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32) and torch.equal(out, expected.bfloat16())


def test_merge_gradients_by_finite_differences() -> None:
    leaves = [torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    leaves += [torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge(x[:3], x[3:]), leaves)  # type: ignore[no-untyped-call]


def test_merge_of_rows_without_keys() -> None:
    outs = [torch.randn(1, 3, 2, 4).requires_grad_() for _ in range(2)]
    lses = [torch.tensor([[[0.5, -torch.inf, -torch.inf]] * 2]).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        lses[1][..., 1] = 2.0
    out, lse = merge(outs, lses)
    assert torch.equal(lse[..., 2], torch.full((1, 2), -torch.inf)) and out[:, 2].count_nonzero() == 0
    assert torch.equal(out[:, 1], outs[1][:, 1]) and torch.equal(lse[..., 1], lses[1][..., 1])
    grads = torch.autograd.grad((out, lse), [*outs, *lses], [torch.ones_like(out), torch.ones_like(lse)])
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, 1:].count_nonzero() == 0 and grads[2][..., 1:].count_nonzero() == 0


def test_merge_in_a_graph() -> None:
    parts = [torch.randn(1, 3, 2, 4) for _ in range(2)], [torch.randn(1, 2, 3) for _ in range(2)]
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(*parts), merge(*parts)))


OUT = torch.zeros(1, 3, 2, 4)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (torch.zeros(2, 1, 3, 2, 4), torch.zeros(2, 1, 2, 3), "outs is Tensor: it must be a list"),
        ([OUT], None, "lses is NoneType: it must be a list"),
        ([], [], r"outs has 0 tensors and lses has 0\. "),
        ([OUT], [], "outs has 1 tensors and lses has 0"),
        ([5], [torch.zeros(1, 2, 3)], r"outs\[0\] is int: it must be a torch.Tensor"),
        ([OUT], [torch.zeros(1, 3, 2)], r"lses\[0\] is .* \[1, 3, 2\] .*: it must be \[B, H, S\]"),
        ([OUT], [torch.zeros(1, 2, 3, device="meta")], r"lses\[0\] is .* on meta: it must be \[B, H, S\]"),
        ([torch.zeros(3, 2, 4)], [torch.zeros(2, 3)], r"outs\[0\] is .*: it must be a floating-point tensor of shape"),
        ([OUT.int()], [torch.zeros(1, 2, 3)], r"outs\[0\] is torch.int32 .*: it must be a floating-point tensor"),
        ([OUT, OUT[:, :2]], [torch.zeros(1, 2, 3)] * 2, r"outs\[1\] is .* \[1, 2, 2, 4\] .*: it must be like"),
        ([OUT, OUT.to("meta")], [torch.zeros(1, 2, 3)] * 2, r"outs\[1\] is .* on meta: it must be like outs\[0\]"),
        ([OUT, OUT.half()], [torch.zeros(1, 2, 3)] * 2, r"outs\[1\] is torch.float16 .*: it must be like outs\[0\]"),
    ],
)
def test_refusals(outs: Any, lses: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(outs, lses)


def alone(rank: int) -> list[Tensor]:
    """Run a different number of calls of a different size on each rank."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 8 + rank, 2, 16, requires_grad=True) for _ in range(3))
    for _ in range(1 + rank):
        out = ring_attention(q, k, v, causal=True, group=single_rank())
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def test_single_rank_calls_are_independent_under_torch_distributed() -> None:
    for rank, got in enumerate(group_results(2, alone)):
        assert all(map(torch.equal, got, alone(rank)))
