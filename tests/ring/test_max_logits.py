"""``return_max_logits``: the largest score of each head over all ranks, against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import Layout, Ring, ring_attention
from ringattn.comm import LocalGroup, Topology
from ringattn.conformance.cases import pairwise_cases
from ringattn.kernels import Bounds, KernelConfig, Scores, Tile

from ..support.mask_cases import RingCase, check_case, combine_ranks, rank_results
from ..support.own_kernels import Dense, DenseShards
from ..support.rank_processes import group_results
from ..support.ring_cases import LAYOUTS, inputs, run_ranks
from .test_ring_masks import FEATURES, TOKENS, case_of, feature_call

pytestmark = pytest.mark.usefixtures("one_core")

MAX: dict[str, Any] = {"return_max_logits": True}
ROWS: dict[str, Any] = {
    "key_mask": torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.6,
    "leftpad_k": [5, 0],
    "cu_seqlens": [[0, 13, TOKENS], [0, TOKENS]],
    "causal": True,
}
PACKED = KernelConfig(forward=Tile(16, 16, 4, 1), dq=Tile(16, 16, 4, 1), dkdv=Tile(16, 16, 4, 1), pack_gqa=True)
OFTEN = ("islands, window, documents", "causal intervals in documents", "causal padding", "longformer", "all scores")
CALLS = {name: feature_call(name, 4) for name in FEATURES}


@pytest.mark.parametrize(("name", "layout", "world"), [
    *pairwise_cases(OFTEN, [*LAYOUTS], [1, 2, 3, 4])[::2],
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in pairwise_cases(FEATURES, [*LAYOUTS], [1, 2, 3, 4])),
])  # fmt: skip
def test_each_feature_is_exact(name: str, layout: str, world: int) -> None:
    check_case(case_of(world, layout, CALLS[name] | MAX | {"backend": "aten"}, sink=world == 2))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("all scores", {"config": PACKED}),
        pytest.param("causal documents", {}, marks=pytest.mark.nightly),
        pytest.param("causal longformer", {}, marks=pytest.mark.nightly),
        pytest.param("causal padding", {"config": PACKED}, marks=pytest.mark.nightly),
    ],
)
def test_the_kernels_are_exact(name: str, more: dict[str, Any]) -> None:
    """The sink is the largest logit of some heads, and does not count."""
    call = CALLS[name] | MAX | more | {"backend": "triton"}
    check_case(case_of(2, "zigzag", call, sink=True, grads="", ring={"chunks": 2}))


@pytest.mark.parametrize("dims", [(16, 16), (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    check_case(case_of(3, "striped", MAX | {"causal": True, "backend": "aten"}, dtype=dtype, dims=dims))


@pytest.mark.parametrize(
    ("call", "more"),
    [
        (ROWS, {}),
        (ROWS, {"mesh": (2, 2)}),
        (CALLS["causal documents"], {"mesh": (1, 4)}),
        (CALLS["causal window"], {"ring": {"chunks": 3, "topology": Topology.grid(2, 2)}}),
        (CALLS["documents"], {"ring": {"wire_dtype": torch.float8_e4m3fn}}),
    ],
    ids=["batch rows", "batch rows over a mesh", "mesh", "two levels", "wire dtype"],
)
def test_rings_and_meshes(call: dict[str, Any], more: dict[str, Any]) -> None:
    case = case_of(4, "zigzag", call | MAX, **more)
    case.whole = inputs(TOKENS, (8, 4))  # heads that differ, and one key head per Ulysses rank
    case.whole["q"] *= torch.arange(1, 9)[:, None]
    check_case(case)


def test_empty_shards_and_queries_that_see_nothing() -> None:
    queries, keys = Layout([[(40, 7)], [], [(47, 6), (55, 5)]]), Layout([[(0, 40)], [(40, 20)], []])
    check_case(RingCase(queries, inputs(TOKENS), CALLS["prefix and window"] | MAX, kv_layout=keys))


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_a_head_that_sees_nothing_or_a_nan(backend: str) -> None:
    def on_rank(group: LocalGroup) -> list[Tensor]:
        q, k, v = torch.ones(3, 2, 8, 2, 16)
        with Ring(group) as ring:
            call: dict[str, Any] = {"layout": "zigzag", "ring": ring, "backend": backend} | MAX
            blind = ring_attention(q, k, v, seqused_k=[0, 0], **call)[1]
            assert ring_attention(q[:0], k[:0], v[:0], **call)[1].equal(blind)
            if group.rank():
                q[1, 3, 0, 5] = torch.nan
            return [blind, ring_attention(q, k, v, softmax_scale=0.5, **call)[1]]

    for blind, largest in run_ranks(2, on_rank):
        assert blind.tolist() == [-torch.inf, -torch.inf]
        assert largest[0].isnan() and largest[1] == 8


def test_gloo() -> None:
    case = case_of(2, "zigzag", CALLS["causal padding"] | MAX, grads="")
    combine_ranks(case, group_results(2, partial(over_gloo, case)))


def over_gloo(case: RingCase, rank: int) -> list[Tensor | None]:
    return rank_results(case, dist.group.WORLD)  # type: ignore[arg-type]


def test_checkpointing_and_the_order_of_results() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    q.requires_grad_()
    call: dict[str, Any] = {"return_lse": True} | MAX
    out, lse, largest = ring_attention(q, k, v, **call)
    assert largest.equal(ring_attention(q, k, v, **MAX)[1]) and not largest.requires_grad
    again = checkpoint(ring_attention, q, k, v, use_reentrant=False, **call)
    assert again is not None
    for x, y in zip(again, (out, lse, largest), strict=True):
        assert x.equal(y)
    (want,), (got,) = (torch.autograd.grad(x[0].sum() + x[1].sum(), q) for x in ((out, lse), again))
    assert got.equal(want)


class DenseWithMax(Dense):
    """Kernel without a running state that returns the largest scores."""

    supports = Dense.supports.__class__(devices=("cpu",), features=("bounds", "backward", "return_max_logits"))
    shape: tuple[int, ...] = ()

    def forward(self, q: Tensor, *, softmax_scale: float, max_logits: bool = False, **_: Any) -> DenseShards:
        assert max_logits
        return ShardWithMax(q, softmax_scale)


class ShardWithMax(DenseShards):
    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, final: bool) -> None:
        super().fold(k, v, bounds, scores=scores, final=final)
        self.largest = self.scores(k, bounds).amax((0, 2, 3))

    def max_logits(self) -> Tensor:
        return self.largest


def test_kernels_of_users() -> None:
    whole = inputs(TOKENS, (2, 2))
    check_case(
        RingCase(Layout.zigzag(TOKENS, 3), whole, MAX | {"causal": True, "backend": DenseWithMax()}, through_lse=False)
    )
