"""The CPU backend: every kind of hop, by PyTorch's operator and by the blockwise code, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import Layout
from ringattn.conformance.cases import pairwise_cases
from ringattn.kernels import FULL, Bounds
from ringattn.ring.cpu import aten
from ringattn.ring.cpu.aten import ATEN
from ringattn.ring.local import rectangles
from ringattn.ring.local import regions as cutting
from ringattn.ring.local.regions import RegionKind

from ..support.baselines import Results
from ..support.ring_cases import LAYOUTS, check_results, check_ring, inputs, run_ring
from ..support.tolerance import assert_as_exact_as_pytorch

SCALE = 0.25  # the default scale for head dim 16


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("name", "world", "causal"), pairwise_cases(LAYOUTS, (1, 2, 3, 4), (True, False)))
def test_short_shards_cut_into_regions(name: str, world: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MIN_ROWS", 4)
    # With few rows PyTorch's largest error, the measure of ours, may be small by chance.
    check_ring(LAYOUTS[name](53, world), inputs(53, batch=16), causal=causal, backend="aten")


DIMS = [(1, 1), (40, 40), (64, 64), (256, 256)]
CASES = pairwise_cases((torch.float32, torch.bfloat16, torch.float16), [(3, 3), (6, 2), (5, 1)], DIMS)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("dtype", "heads", "dims"), [*CASES, (torch.float32, (6, 2), (24, 40)), (torch.float32, (5, 1), (64, 8))]
)
def test_dtypes_heads_and_head_dims_are_exact(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    check_ring(Layout.zigzag(70, 2), inputs(70, heads, dims, dtype), causal=True, backend="aten")


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("empty", [FULL, None])
def test_empty_shards_give_zeros_and_minus_infinity(queries: int, keys: int, empty: Bounds | None) -> None:
    nothing = torch.zeros(queries, dtype=torch.int32)
    bounds_of_hop = empty or Bounds(nothing, nothing)
    q, k, dout = torch.randn(2, queries, 4, 8), torch.randn(2, keys, 2, 8), torch.randn(2, queries, 4, 8)
    backend = ATEN.forward(q, softmax_scale=SCALE)
    backend.fold(k, k, bounds_of_hop, final=True)
    out, lse = backend.result()
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (2, 4, queries) and bool((lse == -torch.inf).all())
    into = (torch.full_like(k, torch.nan), torch.full_like(k, torch.nan))
    back = ATEN.backward(dout, q, out, lse, None, softmax_scale=SCALE)
    back.dq(k, k, bounds_of_hop, local=True)
    back.dkdv(k, k, bounds_of_hop, local=True, accum=None, out=into)
    assert back.result().equal(torch.zeros_like(q))
    assert all(x.equal(torch.zeros_like(k)) for x in into)


@pytest.mark.parametrize("windowed", [False, True])
def test_rows_whose_lse_is_minus_infinity_have_no_gradient(windowed: bool) -> None:
    """Leave out rows that no rank's keys reach, whose scores minus lse would be infinite."""
    q, k, v, dout = (torch.randn(2, 9, 2, 8) for _ in range(4))
    first = torch.arange(9, dtype=torch.int32)

    def gradients(rows: slice) -> list[torch.Tensor]:
        seen = Bounds((first // 2)[rows].contiguous(), (first // 2 + 4)[rows].contiguous()) if windowed else FULL
        forward = ATEN.forward(q[:, rows], softmax_scale=SCALE)
        forward.fold(k, v, seen, final=True)
        out, lse = forward.result()
        if rows.start == 0:
            out[:, :4], lse[..., :4] = 0.0, -torch.inf
        back, grads = (
            ATEN.backward(dout[:, rows], q[:, rows], out, lse, None, softmax_scale=SCALE),
            (k.clone(), v.clone()),
        )
        back.dq(k, v, seen, local=True)
        back.dkdv(k, v, seen, local=True, accum=None, out=grads)
        return [back.result(), *grads]

    (dq, *dkv), (other_dq, *others) = gradients(slice(0, 9)), gradients(slice(4, 9))
    assert not dq[:, :4].any()
    torch.testing.assert_close([dq[:, 4:], *dkv], [other_dq, *others])


@pytest.mark.parametrize(("has_start", "hidden"), [(False, 0), (False, 4), (True, 0)])
def test_lse_keeps_its_digits_over_many_hops(has_start: bool, hidden: int) -> None:
    """Scores are 1e5, where fp32 has steps of 2^-7 and would not grow after the first 256 hops."""
    q, hops = torch.full((1, 4, 1, 10), 100.0), 400
    start = (torch.zeros(1, 4, 1, 10), torch.zeros(1, 1, 4)) if has_start else None
    forward = ATEN.forward(q, softmax_scale=1.0, start=start)
    ends = torch.tensor([4 - hidden, 4, 4, 4], dtype=torch.int32)
    forward.fold(q, q, Bounds(torch.zeros_like(ends), ends), final=False)
    for _ in range(hops):
        forward.fold(q, q, FULL, final=False)
    scores = torch.full((1, 1, 4, 4 * hops + 4), 1e5)
    scores[..., 0, :hidden] = -torch.inf
    assert_as_exact_as_pytorch("lse", forward.result()[1], scores.logsumexp(-1), scores.double().logsumexp(-1))


@pytest.mark.parametrize("more", [{}, {"window_size": (5, 0), "dropout_p": 0.3, "dropout_seed": 3}])
def test_the_state_is_fp32_whatever_the_default_dtype(more: dict[str, Any]) -> None:
    layout, whole = Layout.striped(40, 2), inputs(40)
    expected = run_ring(layout, whole, causal=True, backend="aten", **more)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours = run_ring(layout, whole, causal=True, backend="aten", **more)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    pairwise_cases(
        [(512, 0.63), (258, 0.76), (257, 1.0)],
        (torch.float32, torch.bfloat16),
        (RegionKind.CAUSAL, RegionKind.ANTICAUSAL),
    ),
)
def test_backward_of_a_square_computes_little_more_than_its_triangle(
    size: tuple[int, float], dtype: torch.dtype, kind: RegionKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rows, share), pairs, original = size, [], aten._operator_backward

    def counting(saved: tuple[Tensor, ...], *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        pairs.append(saved[1].shape[0] * saved[1].shape[1] * saved[2].shape[1])
        return original(saved, *rest, **named)

    monkeypatch.setattr(aten, "_operator_backward", counting)
    whole = inputs(rows, (2, 2), dtype=dtype) | {"dlse": torch.zeros(2, 2, rows)}
    q, k, v, dout = (whole[x].flip(1) if kind is RegionKind.ANTICAUSAL else whole[x] for x in ("q", "k", "v", "dout"))
    out, lse = ATEN.compute(q, k, v, kind, scale=SCALE)
    grads = ATEN.gradients(dout, q, k, v, out, lse, kind, scale=SCALE)
    flipped = [x.flip(1) if kind is RegionKind.ANTICAUSAL else x for x in (out, *grads)]
    ours = Results(flipped[0], lse.flip(2) if kind is RegionKind.ANTICAUSAL else lse, *flipped[1:])
    check_results(ours, whole, causal=True, backend="aten")
    assert sum(pairs) <= share * len(q) * rows * rows
    assert {x.dtype for x in grads} == {torch.float32 if len(pairs) > 1 else dtype}  # several calls are summed


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the names of torch operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("blockwise_only", [False, True])
def test_arriving_keys_are_waited_for_last(local: bool, blockwise_only: bool) -> None:
    q, k, v, dout = (torch.randn(2, 12, heads, 16) for heads in (4, 2, 2, 4))
    lo = torch.arange(12, dtype=torch.int32) // 2
    bounds_of_hop = Bounds(lo, lo + 3) if blockwise_only else FULL
    backend = ATEN.forward(q, softmax_scale=SCALE)
    backend.fold(k[:, :9], v[:, :9], bounds_of_hop, final=True)
    assert backend.result()[1].is_contiguous()  # unlike the operator's lse
    back = ATEN.backward(dout, q, *backend.result(), None, softmax_scale=SCALE)
    accum = (torch.zeros(2, 9, 2, 16), torch.zeros(2, 9, 2, 16))
    recorder = Recorder()

    def arrive() -> tuple[Tensor, ...]:
        recorder.names.clear()
        return accum

    back.dq(k[:, :9], v[:, :9], bounds_of_hop, local=local)
    with recorder:
        back.dkdv(k[:, :9], v[:, :9], bounds_of_hop, local=local, accum=arrive, out=accum)
    assert not {name for name in recorder.names if "bmm" in name or "attention" in name or "exp" in name}
    assert "aten.add.out" in recorder.names


def test_lse_gradient_in_bfloat16_columns_keeps_its_rounding_error() -> None:
    extra = torch.randn(1, 2, 5)
    columns = rectangles._widen(torch.zeros(1, 5, 2, 4, dtype=torch.bfloat16), extra)[..., 4:]
    torch.testing.assert_close(columns.float().sum(-1).transpose(1, 2), extra, rtol=2**-15, atol=0)


def test_rows_that_share_memory_are_copied() -> None:
    """BLAS needs a leading dimension of at least one row."""
    assert rectangles._rows(torch.zeros(1, 1, 2, 4).expand(1, 3, 2, 4)).is_contiguous()
