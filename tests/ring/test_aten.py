"""The CPU backend: every kind of hop, by the operator and by the blockwise body, against the exact result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.kernels import FULL, Bounds
from ringattn.ring.cpu import aten, blockwise
from ringattn.ring.cpu import regions as cutting
from ringattn.ring.cpu.aten import DOT_ROWS, AtenBackward, AtenForward, row_dot
from ringattn.ring.cpu.regions import Kind

from ..support.baselines import Results, exact, pytorch
from ..support.tolerance import assert_as_exact_as_pytorch

LAYOUTS = ("contiguous", "zigzag", "striped", "uneven", "scattered")
SCALE = 0.3
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
COPIES = "copies of [B, S, H, D]"
OPERATOR = "aten._scaled_dot_product_flash_attention_for_cpu.default"
OPERATOR_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def shards(layout: str, seqlen: int, world: int) -> list[Tensor]:
    """Ascending positions of each rank, by hand."""
    everything = torch.arange(seqlen)
    match layout:
        case "contiguous":
            return list(everything.tensor_split(world))
        case "zigzag":
            chunks = everything.tensor_split(2 * world)
            return [torch.cat([chunks[rank], chunks[2 * world - 1 - rank]]) for rank in range(world)]
        case "striped":
            return [everything[rank::world] for rank in range(world)]
        case "uneven":
            cuts = [seqlen * (rank * rank + rank) // (world * world + world) for rank in range(1, world)]
            return list(everything.tensor_split(cuts))
        case _:  # no interval of it is regular
            owner = (everything * 7 // 3 + everything // 5) % world
            return [everything[owner == rank] for rank in range(world)]


def hop_bounds(q_positions: Tensor, k_positions: Tensor, *, causal: bool, window: int | None = None) -> Bounds:
    """Who sees whom as an interval of key indices, by counting pairs."""
    seen = visible(q_positions, k_positions, causal=causal, window=window)
    if seen.all():
        return FULL
    first = torch.zeros_like(q_positions) if window is None else q_positions - window
    lo = (k_positions[None] < first[:, None]).sum(1)
    return Bounds(lo.to(torch.int32), (lo + seen.sum(1)).to(torch.int32))


def visible(q_positions: Tensor, k_positions: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    distance = q_positions[:, None] - k_positions[None]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance <= window)


def pairs_of(bounds: Bounds, rows: int, keys: int) -> Tensor:
    if bounds.lo is None or bounds.hi is None:
        return torch.ones(rows, keys, dtype=torch.bool)
    at = torch.arange(keys)
    return (at >= bounds.lo[:, None]) & (at < bounds.hi[:, None])


class Ring:
    """A whole ring in this process: each rank's objects, called in the order of the ring loop."""

    def __init__(self, positions: list[Tensor], q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any]) -> None:
        self.world = len(positions)
        self.positions = positions
        self.q, self.k, self.v = ([x[:, at] for at in positions] for x in (q, k, v))
        self.bounds = [[hop_bounds(at, keys, **mask) for keys in positions] for at in positions]

    def sees(self, rank: int, shard: int) -> bool:
        bounds = self.bounds[rank][shard]
        return bool(pairs_of(bounds, len(self.positions[rank]), len(self.positions[shard])).any())

    def forward(self, rank: int) -> tuple[Tensor, Tensor]:
        work = AtenForward(self.q[rank], softmax_scale=SCALE)
        for hop in range(self.world):
            shard = (rank - hop) % self.world
            if hop == 0 or self.sees(rank, shard):
                work.fold(self.k[shard], self.v[shard], self.bounds[rank][shard], final=hop == self.world - 1)
        return work.result()

    def backward(
        self, dout: Tensor, out: list[Tensor], lse: list[Tensor], dlse: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        work = []
        for rank, at in enumerate(self.positions):
            through = None if dlse is None else dlse[..., at]
            args = dout[:, at], self.q[rank], out[rank], lse[rank], through
            work.append(AtenBackward(*args, softmax_scale=SCALE))
            work[rank].dq(self.k[rank], self.v[rank], self.bounds[rank][rank], local=True, final=self.world == 1)
        travelling: list[tuple[Tensor, ...] | None] = [None] * self.world
        for hop in range(1, self.world):
            for rank in range(self.world):
                shard = (rank - hop) % self.world
                if self.sees(rank, shard):
                    self._visit(work[rank], rank, shard, travelling)
        dk, dv = ([torch.full_like(x, torch.nan) for x in shards] for shards in (self.k, self.v))
        for rank, sums in enumerate(travelling):
            own, bounds, into = (self.k[rank], self.v[rank]), self.bounds[rank][rank], (dk[rank], dv[rank])
            work[rank].dkdv(*own, bounds, local=True, sums=_returning(sums), into=into)
        return [one.result() for one in work], dk, dv

    def _visit(self, work: AtenBackward, rank: int, shard: int, travelling: list[tuple[Tensor, ...] | None]) -> None:
        """In place in a slot that holds the sums, or into a fresh one that holds rubbish."""
        sums = travelling[shard]
        like = self.k[shard], self.v[shard]
        into = sums or tuple(torch.full(x.shape, torch.nan, dtype=torch.float32) for x in like)
        bounds = self.bounds[rank][shard]
        work.dkdv(*like, bounds, local=False, sums=_returning(sums), into=into)
        work.dq(*like, bounds, local=False)
        travelling[shard] = into


def _returning(sums: tuple[Tensor, ...] | None) -> Callable[[], tuple[Tensor, ...]] | None:
    return None if sums is None else lambda: sums


def run(
    positions: list[Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **mask: Any
) -> Results:
    """Forward and backward of a ring, put back in global order."""
    ring = Ring(positions, q, k, v, mask)
    out, lse = zip(*(ring.forward(rank) for rank in range(ring.world)), strict=True)
    dq, dk, dv = ring.backward(dout, list(out), list(lse), dlse)
    order = torch.cat(positions).argsort()
    whole = [
        torch.cat(list(x), dim)[(slice(None),) * dim + (order,)]
        for x, dim in ((out, 1), (lse, 2), (dq, 1), (dk, 1), (dv, 1))
    ]
    return Results(*whole)


def inputs(
    seqlen: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, value_dim: int | None = None,
    *, batch: int = 2, dtype: torch.dtype = torch.float32,
) -> Inputs:  # fmt: skip
    """q, k, v, dout."""
    value_dim = dim if value_dim is None else value_dim
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
    q, k, v, dout = (torch.randn(batch, seqlen, *shape).to(dtype) for shape in shapes)
    return q, k, v, dout


def compare(
    ours: Results, args: Inputs, *, causal: bool, window: int | None = None, dlse: Tensor | None = None
) -> None:
    """Every output against the dense formula, by PyTorch's own error."""
    at = torch.arange(args[0].shape[1])
    seen = visible(at, at, causal=causal, window=window)
    theirs = pytorch(*args, dlse, seen=seen, softmax_scale=SCALE)
    if args[0].dtype != torch.float32 and args[1].shape == args[2].shape:
        theirs = theirs._replace(lse=operator_lse(*args[:3], causal=causal))
    truth = exact(*args, dlse, causal=causal, softmax_scale=SCALE, q_positions=at, k_positions=at)
    if window is not None:
        q, k, v, dout = (x.double() for x in args)
        truth = pytorch(q, k, v, dout, dlse, seen=seen, softmax_scale=SCALE)
    for name, a, b, c in zip(Results._fields, ours, theirs, truth, strict=True):
        assert_as_exact_as_pytorch(name, a, b, c)


def operator_lse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's own lse in 16 bit: its quicker exponential there leaves an error of 6e-5."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    lse: Tensor = operator(*by_head, 0.0, causal, scale=SCALE)[1]
    return lse


@pytest.fixture(params=[128, 4], ids=["isolated", "cut"])
def min_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short shards as they are, and cut as long ones are."""
    monkeypatch.setattr(cutting, "MIN_ROWS", request.param)


@pytest.mark.usefixtures("min_rows", "poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_every_layout_is_as_exact_as_pytorch(layout: str, world: int, causal: bool) -> None:
    args = inputs(53)
    compare(run(shards(layout, 53, world), *args, causal=causal), args, causal=causal)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (5, 1)])
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (40, 40), (64, 64), (256, 256), (24, 40), (64, 8)])
def test_every_dtype_head_count_and_head_dim(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, value_dim: int
) -> None:
    args = inputs(70, heads, kv_heads, dim, value_dim, dtype=dtype)
    compare(run(shards("zigzag", 70, 2), *args, causal=True), args, causal=True)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("small", [True, False])
def test_windows_go_blockwise_tile_by_tile(
    layout: str, world: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(blockwise, "SMALL", -1.0)
    for name, value in {"FOLDED_ROWS": 16, "MIN_BLOCK_ROWS": 4, "TILE_KEYS": 8, "TILE_SCORES": 128}.items():
        monkeypatch.setattr(blockwise, name, value)
    args = inputs(90)
    compare(run(shards(layout, 90, world), *args, causal=True, window=20), args, causal=True, window=20)


@pytest.mark.parametrize(("score", "value"), [(59.0, 1.0), (61.0, 1.0), (200.0, 1.0), (59.0, 1e19), (200.0, 1e30)])
def test_windows_of_large_scores_and_values(score: float, value: float) -> None:
    """No maximum is subtracted where scores are small; they are in units of the base-2 logarithm here."""
    q, k, v = torch.zeros(1, 180, 1, 8), torch.zeros(1, 180, 1, 8), torch.full((1, 180, 1, 8), value / 8)
    q[..., 0], k[..., 0], v[..., 0] = score / math.log2(math.e), 1.0, value
    hi = torch.arange(1, 181, dtype=torch.int32)
    work = AtenForward(q, softmax_scale=1.0)
    work.fold(k, v, Bounds(hi.sub(90).clamp(min=0), hi), final=True)
    out, lse = work.result()
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse[0, 0], score / math.log2(math.e) + hi.clamp(max=90).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "scattered"])
def test_gradient_through_lse(layout: str, dtype: torch.dtype) -> None:
    args, dlse = inputs(60, dtype=dtype), torch.randn(2, 4, 60)
    compare(run(shards(layout, 60, 3), *args, dlse, causal=True), args, causal=True, dlse=dlse)


def test_long_shards_are_cut_and_merged() -> None:
    args = inputs(900, 2, 1, 8, batch=1)
    positions = [torch.cat([torch.arange(0, 150), torch.arange(450, 900)]), torch.arange(150, 450)]
    compare(run(positions, *args, causal=True), args, causal=True)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("bounds", [FULL, None])
def test_empty_shards(queries: int, keys: int, bounds: Bounds | None) -> None:
    nothing = torch.zeros(queries, dtype=torch.int32)
    bounds = bounds or Bounds(nothing, nothing)
    q, k, dout = torch.randn(2, queries, 4, 8), torch.randn(2, keys, 2, 8), torch.randn(2, queries, 4, 8)
    work = AtenForward(q, softmax_scale=SCALE)
    work.fold(k, k, bounds, final=True)
    out, lse = work.result()
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (2, 4, queries) and bool((lse == -torch.inf).all())
    into = (torch.full_like(k, torch.nan), torch.full_like(k, torch.nan))
    back = AtenBackward(dout, q, out, lse, None, softmax_scale=SCALE)
    back.dq(k, k, bounds, local=True)
    back.dkdv(k, k, bounds, local=True, sums=None, into=into)
    assert back.result().equal(torch.zeros_like(q))
    assert all(x.equal(torch.zeros_like(k)) for x in into)


@pytest.mark.parametrize("rows", [0, 1, DOT_ROWS, DOT_ROWS + 3])
def test_row_dot_of_any_number_of_rows(rows: int) -> None:
    x, y = (torch.randn(2, rows, 3, 8, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(row_dot(x, y), (x * y).sum(-1).float())


@pytest.mark.usefixtures("poison")
def test_rows_that_see_nothing_stay_empty_and_make_no_nan() -> None:
    q, k, v, dout = inputs(9)
    bounds = hop_bounds(torch.arange(9), torch.arange(4, 13), causal=True)
    work = AtenForward(q, softmax_scale=SCALE)
    work.fold(k, v, bounds, final=True)
    out, lse = work.result()
    assert not out[:, :4].any() and bool((lse[..., :4] == -torch.inf).all())
    back = AtenBackward(dout, q, out, lse, torch.randn_like(lse), softmax_scale=SCALE)
    into = (torch.empty_like(k), torch.empty_like(v))
    back.dq(k, v, bounds, local=True)
    back.dkdv(k, v, bounds, local=True, sums=None, into=into)
    assert not back.result()[:, :4].any() and back.result().isfinite().all()
    assert all(x.isfinite().all() and not x[:, 5:].any() for x in into)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_key_reaches_exactly_the_rows_that_see_it(layout: str, value: float) -> None:
    q, k, v, _ = inputs(41, batch=1)
    q[..., 0] = 1.0
    k[0, 20, :, 0] = value
    positions = shards(layout, 41, 3)
    ring = Ring(positions, q, k, v, {"causal": True})
    for rank, at in enumerate(positions):
        out, lse = ring.forward(rank)
        assert out.isnan().any(-1)[0].all(-1).equal(at >= 20)
        assert (~lse.isfinite())[0].all(0).equal(at >= 20)


def test_nan_in_a_value_or_a_query_stays_in_its_tile() -> None:
    q, k, v, dout = inputs(40, batch=1)
    v[0, 30] = torch.nan
    q[0, 25] = torch.nan
    ours = run(shards("contiguous", 40, 2), q, k, v, dout, causal=True)
    assert ours.out[:, 30:].isnan().all() and ours.out[:, 25].isnan().all()
    assert ours.out[:, :20].isfinite().all() and ours.dq[:, :20].isfinite().all()


def counts(call: Callable[[], object]) -> dict[str, int]:
    """How often each operator of torch runs inside; one name for those that copy something as large as q."""
    found: dict[str, int] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies = func.name().startswith(("aten::clone", "aten::_to_copy", "aten::copy_")) and args[0].dim() == 4
            name = COPIES if copies else str(func)
            found[name] = found.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Recorder():
        call()
    return found


@pytest.mark.parametrize(
    ("layout", "hops", "merges"),
    [("zigzag", (2, 2), (1, 1)), ("contiguous", (1, 2), (0, 1)), ("striped", (2, 2), (1, 1))],
)
def test_one_operator_call_per_hop_and_no_merge_that_is_not_needed(
    layout: str, hops: tuple[int, int], merges: tuple[int, int]
) -> None:
    ring = Ring(shards(layout, 512, 2), *inputs(512, batch=1)[:3], {"causal": True})
    for rank in range(2):
        seen = counts(lambda rank=rank: ring.forward(rank))  # type: ignore[misc]
        assert seen[OPERATOR] == hops[rank]
        assert seen.get("aten.lerp_.Tensor", 0) == merges[rank]
        assert COPIES not in seen


@pytest.mark.parametrize(
    ("layout", "threads", "calls"), [("zigzag", 1, 10), ("contiguous", 1, 9), ("zigzag", 2, 6), ("contiguous", 2, 5)]
)
def test_backward_calls_the_operator_once_per_remote_hop_and_half_of_the_local_one(
    layout: str, threads: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads are one region of the local hop where two threads share them; a square of 256 rows takes two calls."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, k, v, dout = inputs(512, batch=1)
    ring = Ring(shards(layout, 512, 2), q, k, v, {"causal": True})
    out, lse = zip(*(ring.forward(rank) for rank in range(2)), strict=True)
    seen = counts(lambda: ring.backward(dout, list(out), list(lse), None))
    assert seen[OPERATOR_BACKWARD] == calls
    assert not any("bmm" in name for name in seen)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("rows", "share"), [(512, 0.63), (258, 0.76), (257, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Kind.CAUSAL, Kind.ANTICAUSAL], ids=str)
def test_backward_of_a_square_computes_little_more_than_its_triangle(
    rows: int, share: float, dtype: torch.dtype, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, original = [], aten._operator_backward

    def counted(given: tuple[Tensor, ...], *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        pairs.append(given[1].shape[0] * given[1].shape[1] * given[2].shape[1])
        return original(given, *rest, **named)

    monkeypatch.setattr(aten, "_operator_backward", counted)
    args = inputs(rows, heads=2, dtype=dtype)
    q, k, v, dout = (x.flip(1) if kind is Kind.ANTICAUSAL else x for x in args)
    out, lse = aten.operator_forward(q, k, v, kind, scale=SCALE)
    grads = aten.operator_backward(dout, q, k, v, out, lse, kind, scale=SCALE)
    found = [x.flip(1) if kind is Kind.ANTICAUSAL else x for x in (out, *grads)]
    compare(Results(found[0], lse.flip(2) if kind is Kind.ANTICAUSAL else lse, *found[1:]), args, causal=True)
    assert sum(pairs) <= share * len(q) * rows * rows


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("blockwise_only", [False, True])
def test_sums_are_asked_for_last(local: bool, blockwise_only: bool) -> None:
    q, k, v, dout = inputs(12)
    lo = torch.arange(12, dtype=torch.int32) // 2
    bounds = Bounds(lo, lo + 3) if blockwise_only else FULL
    work = AtenForward(q, softmax_scale=SCALE)
    work.fold(k[:, :9], v[:, :9], bounds, final=True)
    back = AtenBackward(dout, q, *work.result(), None, softmax_scale=SCALE)
    sums = (torch.zeros(2, 9, 2, 16), torch.zeros(2, 9, 2, 16))
    after: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            after.append(str(func))
            return func(*args, **(kwargs or {}))

    def arrive() -> tuple[Tensor, ...]:
        after.clear()
        return sums

    back.dq(k[:, :9], v[:, :9], bounds, local=local)
    with Recorder():
        back.dkdv(k[:, :9], v[:, :9], bounds, local=local, sums=arrive, into=sums)
    assert not {name for name in after if "bmm" in name or "attention" in name or "exp" in name}
    assert "aten.add.out" in after


@pytest.mark.usefixtures("poison")
def test_strided_and_expanded_inputs() -> None:
    packed = torch.randn(2, 34, 3, 4, 8)
    q, k, v = packed.unbind(2)
    wide = torch.randn(2, 34, 4, 16)[..., ::2]  # no unit last stride
    for args in (
        (q, k, v, torch.ones(()).expand(2, 34, 4, 8)),
        (q, k, v, torch.randn(8).expand(2, 34, 4, 8)),
        (wide, wide, wide, wide),
        (q.transpose(0, 1)[:2].transpose(0, 1)[:, :1], k[:, :1], v[:, :1], torch.randn(2, 1, 4, 8)),
    ):
        q_positions = torch.arange(args[0].shape[1])
        compare(run([q_positions], *args, causal=True), args, causal=True)


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
@pytest.mark.parametrize("causal", [True, False])
def test_many_hops_are_as_exact_as_one(layout: str, causal: bool) -> None:
    args, dlse = inputs(67), torch.randn(2, 4, 67)
    compare(run(shards(layout, 67, 16), *args, dlse, causal=causal), args, causal=causal, dlse=dlse)


@pytest.mark.parametrize("layout", ["zigzag", "scattered"])
def test_the_state_is_fp32_whatever_the_default_dtype(layout: str) -> None:
    args = inputs(40)
    expected = run(shards(layout, 40, 2), *args, causal=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours = run(shards(layout, 40, 2), *args, causal=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))


def test_threads_do_not_idle_when_the_local_block_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = inputs(64, 4, 2, batch=1)
    calls = {1: 2, 2: 1, 4: 1}
    for threads, expected in calls.items():
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        ring = Ring([torch.arange(64)], q, k, v, {"causal": True})
        out, lse = ring.forward(0)
        seen = counts(lambda ring=ring, out=out, lse=lse: ring.backward(dout, [out], [lse], None))  # type: ignore[misc]
        assert seen[OPERATOR_BACKWARD] == expected
