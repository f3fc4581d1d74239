"""``F.scaled_dot_product_attention`` inside ``ring_sdpa`` against one process: PyTorch's cases and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointError, checkpoint

from ringattn import Layout, LocalWorld, ring_attention
from ringattn.conformance.cases import pairwise_cases
from ringattn.integrations.torch_sdpa import load_balancer_layout, ring_sdpa

from ..support.ring_cases import run_ranks
from ..support.tolerance import assert_as_exact_as_pytorch

# warnings of torch itself, when it imports modules to compile
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without")
Attention = Callable[..., Tensor]
SDPA: Attention = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(
    tokens: int, heads: tuple[int, int] = (8, 8), *, keys: int = 0, dtype: torch.dtype = torch.float32, batch: int = 2
) -> list[Tensor]:
    """Return q, k and v of the whole sequence, ``[B, H, S, D]``."""
    shapes = [(heads[0], tokens), (heads[1], keys or tokens), (heads[1], keys or tokens)]
    return [torch.rand(batch, *shape, 32).to(dtype) for shape in shapes]


def on_ranks(
    layout: Layout, whole: Sequence[Tensor], attention: Attention, kv_layout: Layout | None = None, **call: Any
) -> list[Tensor]:
    """Return out and the gradients of q, k and v, from shards as PyTorch's context parallelism makes them."""
    layout_of_keys = kv_layout or layout
    layouts = [layout, layout_of_keys, layout_of_keys]

    def rank(group: Any) -> list[Tensor]:
        pairs = zip(layouts, whole, strict=True)
        shards = [shard_layout.shard(x, group.rank(), 2).requires_grad_() for shard_layout, x in pairs]
        with ring_sdpa(layout, group, kv_layout=kv_layout):
            out = attention(*shards, **call)
            out.sum().backward()
        return [out.detach(), *(x.grad for x in shards if x.grad is not None)]

    parts = zip(*run_ranks(layout.world, rank), strict=True)
    return [shard_layout.unshard(shards, 2) for shard_layout, shards in zip([layout, *layouts], parts, strict=True)]


def alone(whole: Sequence[Tensor], dtype: torch.dtype, **call: Any) -> list[Tensor]:
    leaves = [x.to(dtype).detach().requires_grad_() for x in whole]
    out = SDPA(*leaves, **call)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def check(ours: Sequence[Tensor], whole: Sequence[Tensor], **call: Any) -> None:
    theirs, exact = (alone(whole, dtype, **call) for dtype in (whole[0].dtype, torch.float64))
    for name, *results in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
        # Rows of weights sum to 1, so dq and dk are differences of terms as large as dv.
        magnitude = exact[3].abs().max().item() if name in ("dq", "dk") else None
        assert_as_exact_as_pytorch(name, *results, magnitude=magnitude)


@pytest.mark.parametrize(
    ("world", "causal", "balanced", "compiled", "dtype", "heads"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] if case[3] else [])
        for case in pairwise_cases(
            (2, 4), (True, False), (True, False), (True, False), (torch.bfloat16, torch.float32, torch.float16),
            [(8, 8), (8, 2)],
        )
    ],
)  # fmt: skip
def test_the_context_parallel_cases_of_pytorch(
    world: int, causal: bool, balanced: bool, compiled: bool, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    """Run ``test_ring_attention_sdpa`` of pytorch's test/distributed/tensor/test_attention.py.

    Their test balances only causal calls, has no grouped heads, and needs GPUs.
    """
    tokens = 64 * world
    whole = tensors(tokens, heads, dtype=dtype)
    balancer = _HeadTailLoadBalancer(tokens, world, "cpu")
    layout = load_balancer_layout(balancer, world) if balanced else Layout.contiguous(tokens, world)
    attention: Attention = torch.compile(SDPA, fullgraph=True, backend="aot_eager") if compiled else SDPA
    call: dict[str, Any] = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    check(on_ranks(layout, whole, attention, **call), whole, **call)


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_encoder(causal: bool) -> None:
    """Run ``test_ring_attention_native_transformer`` of the same file, and check its result."""
    layer = nn.TransformerEncoderLayer(32, 8, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    (x, dout), layout = torch.randn(2, 8, 16, 32), Layout.zigzag(16, 2)

    def run(x: Tensor, dout: Tensor, model: nn.Module) -> list[Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if causal else None
        out = model(x, mask=mask, is_causal=causal)
        return [out, *torch.autograd.grad(out, [*model.parameters()], dout)]

    def rank(group: Any) -> list[Tensor]:
        with ring_sdpa(layout, group):
            return run(layout.shard(x, group.rank()), layout.shard(dout, group.rank()), model)

    outs, *grads = zip(*run_ranks(2, rank), strict=True)
    ours = [layout.unshard(outs), *(sum(parts, torch.zeros(())) for parts in grads)]
    theirs = run(x, dout, model)
    exact = run(x.double(), dout.double(), model.double())
    for index, results in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_as_exact_as_pytorch(f"result {index}", *results)


@pytest.mark.parametrize(("queries", "keys"), [(24, 40), (40, 24)])
@pytest.mark.parametrize("causal", [True, False])
def test_different_numbers_of_queries_and_keys(queries: int, keys: int, causal: bool) -> None:
    whole = tensors(queries, keys=keys, batch=8)
    layout, kv_layout = Layout.zigzag(queries, 2), Layout.contiguous(keys, 2)
    check(on_ranks(layout, whole, SDPA, kv_layout, is_causal=causal), whole, is_causal=causal)


def test_strides_of_any_kind() -> None:
    whole = tensors(16)

    def channels_first(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
        return SDPA(*(x.mT.contiguous().mT for x in (q, k, v)), **call)

    check(on_ranks(Layout.zigzag(16, 2), whole, channels_first, is_causal=True), whole, is_causal=True)
    ones = torch.ones(()).expand(2, 8, 16, 32)
    with ring_sdpa("contiguous"):
        assert SDPA(ones, ones, ones).equal(ones)
        assert ring_attention(*(x.transpose(1, 2) for x in whole)).transpose(1, 2).equal(SDPA(*whole))


def test_nested_modes_and_other_threads() -> None:
    whole, layout = tensors(16), Layout.contiguous(16, 2)

    def rank(group: Any) -> Tensor:
        mine = [layout.shard(x, group.rank(), 2) for x in whole]
        assert_close(SDPA(*mine), outside(mine))  # in another thread than the one that entered the mode
        with ring_sdpa("striped", group), ring_sdpa(layout, group):
            inner = SDPA(*mine, is_causal=True)
        assert_close(SDPA(*mine), outside(mine))
        return inner

    def outside(mine: list[Tensor]) -> Tensor:
        q, k, v = mine
        weights: Tensor = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return weights @ v

    with LocalWorld(2) as world, ring_sdpa(Layout.zigzag(16, 4)):  # a layout for more ranks than there are
        ours = world.run(rank)
    assert_close(layout.unshard(ours, 2), SDPA(*whole, is_causal=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant: bool) -> None:
    whole, layout = tensors(16), Layout.zigzag(16, 2)

    def layer(*qkv: Tensor) -> Tensor:
        return SDPA(*(2 * x for x in qkv), is_causal=True)

    def again(*qkv: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, *qkv, use_reentrant=reentrant)
        return out

    for ours, plain in zip(on_ranks(layout, whole, again), on_ranks(layout, whole, layer), strict=True):
        assert torch.equal(ours, plain)


def test_checkpointed_layers_in_torch_autograd_functions() -> None:
    layout, whole = Layout.contiguous(8, 2), tensors(8)

    def rank(group: Any) -> list[Tensor]:
        qkv = [layout.shard(x, group.rank(), 2).requires_grad_() for x in whole]
        with ring_sdpa(layout, group):
            out = checkpoint(lambda *qkv: SDPA(*(2 * x for x in qkv)), *qkv, use_reentrant=False)
            grads = torch.autograd.grad(out.sum(), qkv, retain_graph=True)
            torch.autograd.backward(out.sum())
        assert all(grad.equal(cast(Tensor, x.grad)) for x, grad in zip(qkv, grads, strict=True))
        return [*grads]

    grads = [layout.unshard(shards, 2) for shards in zip(*run_ranks(2, rank), strict=True)]
    assert_close(grads, [2 * grad for grad in alone([2 * x for x in whole], torch.float32)[1:]])


def test_backward_of_checkpointed_layers_outside_ring_sdpa_raises() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(8))
    with ring_sdpa("contiguous"):
        out = checkpoint(lambda *qkv: SDPA(*(2 * x for x in qkv)), q, k, v, use_reentrant=False)
    with pytest.raises(CheckpointError, match="number of tensors"):
        out.sum().backward()


def test_layouts_of_load_balancers() -> None:
    assert load_balancer_layout(_HeadTailLoadBalancer(24, 3, "cpu"), 3) == Layout.zigzag(24, 3)
    assert load_balancer_layout(_PerDocumentHeadTailLoadBalancer([[24], [24]], 3, "cpu"), 3) == Layout.zigzag(24, 3)
    assert load_balancer_layout(torch.arange(12).view(4, 3).t().reshape(-1), 3) == Layout.striped(12, 3)
    assert load_balancer_layout(torch.arange(6), 1) == Layout.contiguous(6, 1)
    assert load_balancer_layout(torch.tensor([1, 4, 5, 0, 2, 3]), 2).positions(0).tolist() == [1, 4, 5]
    causal = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=16)
    balancer = _PTRRLoadBalancer(causal, 2)
    layout = load_balancer_layout(balancer, 2)
    for rank, part in enumerate(balancer._generate_indices()[0].chunk(2)):
        assert torch.equal(layout.positions(rank), part)
    whole = tensors(128)
    check(on_ranks(layout, whole, SDPA, is_causal=True), whole, is_causal=True)


@pytest.mark.parametrize(
    ("balancer", "world", "words"),
    [
        (_PerDocumentHeadTailLoadBalancer([[8, 8]], 2, "cpu"), 2, r"ascending order on rank 0.*Layout\.zigzag\("),
        (torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3]]), 2, "differ between batch rows"),
        (torch.arange(6), 4, "6 tokens.* multiple of world, 4"),
        (torch.arange(6), 0, "6 tokens.* multiple of world, 0"),
        (torch.tensor([0, 1, 1, 3]), 2, "not a permutation of 0 to 3"),
        (None, 2, "a NoneType.*'contiguous'"),
        (torch.arange(6.0), 2, r"a torch\.float32 tensor of shape \[6\]"),
        (torch.arange(6).view(1, 1, 6), 2, r"a torch\.int64 tensor of shape \[1, 1, 6\]"),
        (torch.tensor([False, True]), 2, r"a torch\.bool tensor of shape \[2\].*indices of shape \[S\]"),
        (torch.empty(0, 8, dtype=torch.int64), 2, r"a torch\.int64 tensor of shape \[0, 8\].*indices of shape \[S\]"),
    ],
)
def test_refused_load_balancers(balancer: Any, world: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_balancer_layout(balancer, world)


ENDS = torch.tensor([0, 8])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q: SDPA(q, q, q, torch.ones(8, 8)), "attn_mask is a Tensor.*is_causal.*block_mask"),
        (lambda q: SDPA(q[0], q[0], q[0]), "query has 3 dimensions"),
        (lambda q: SDPA(q, q[:, :4], q[:, :4]), "key has 4 heads and query has 8.*enable_gqa"),
        (lambda q: SDPA(q, q[:, :, :4], q[:, :, :4]), "key has 4 tokens and query has 8.*kv_layout"),
        (lambda q: SDPA(q[:, :, :4], q, q), "key has 8 tokens and query has 4.*kv_layout"),
        (lambda q: torch.ops.torch_attn._varlen_attn_out(), "varlen_attn_out is not supported"),
        (lambda q: flex_attention(q, q, q), "flex_attention is not supported inside ring_sdpa"),
        (lambda q: varlen_attn(q[0], q[0], q[0], ENDS, ENDS, 8, 8), "varlen_attn is not supported"),
        (lambda q: torch._scaled_dot_product_flash_attention_for_cpu(q, q, q), "attention_for_cpu is not supported"),
        (lambda q: torch._scaled_dot_product_attention_math(q, q, q), "attention_math is not supported"),
        (lambda q: nn.MultiheadAttention(32, 4)(q[0], q[0], q[0]), "need_weights is True.*need_weights=False"),
    ],
)
def test_refused_by_name(call: Callable[[Tensor], object], words: str) -> None:
    (q, *_) = tensors(8)
    with ring_sdpa("contiguous"), pytest.raises((NotImplementedError, ValueError, RuntimeError), match=words):
        call(q)


def test_all_other_attention_ops_of_aten_are_refused() -> None:
    """Refuse all kernels and backwards, with and without an overload, before reading arguments."""
    of_torch = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    words = "attention", "_dot_product", "transformer_encoder"
    ops = {name for space, _, name in of_torch if space == "aten" and any(word in name for word in words)}
    assert len(ops) > 20
    for name in ops:
        packet = getattr(torch.ops.aten, name)
        for op in (packet, *(getattr(packet, overload) for overload in packet.overloads())):
            with ring_sdpa("contiguous"), pytest.raises(NotImplementedError, match=f"^{name} is not supported"):
                op()
