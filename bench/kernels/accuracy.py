"""Every kernel on the device against float64, beside PyTorch's own attention in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import reference
from ...comm import LocalGroup, LocalWorld
from ...kernels import KernelConfig
from ...kernels.experimental.hopper_launch import is_hopper
from ...ring import Layout, ring_attention
from ..common.attention import DTYPES
from ..common.errors import tolerance
from ..suite.cases import NotHere, Number, poisoned
from .contender import Variant

NO_DROPOUT = 0.0
HOPPER = "hopper"
BACKENDS = {
    HOPPER: {"forward_kernel": "hopper", "backward": "hopper"},
    "single_pass": {"backward": "single_pass"},
    "single_pass_deterministic": {"backward": "single_pass_deterministic"},
}
"""As a backend: Triton kernels in the place of the default ones, by fields of their config."""
ANY_ORDER = (HOPPER, "single_pass")  # in which dQ is added: its last bits change from run to run


class Inputs(NamedTuple):
    """Of the whole sequence; what the results are functions of."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def accuracy(
    device: torch.device,
    *,
    backend: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int | None = None,
    seqlen: int = 1024,
    heads: tuple[int, int] = (4, 2),
    causal_worlds: tuple[int, ...] = (1, 3),
    full_worlds: tuple[int, ...] = (1,),
) -> Iterator[Number]:
    """Errors of forward and backward, full and causal, in one launch and carried over the shards of several ranks.

    Three ranks have a first, a middle and a last hop, which are three launches of their own. Outputs lie in poisoned
    memory; a second run has to give the same bits, but for what is added in whatever order programs come.

    Args:
        backend: "aten", "triton", or one of :data:`BACKENDS`.

    Raises:
        NotHere: the kernels of sm_90, and the GPU is another.
    """
    if backend == HOPPER and not is_hopper(device):
        raise NotHere("the Hopper kernels take GPUs of compute capability 9.0")
    for causal in (True, False):
        given = draw(device, DTYPES[dtype], (seqlen, *heads, head_dim, head_dim_v or head_dim))
        exact, pytorch = exactly(given, causal), by_pytorch(given, causal)
        for world in causal_worlds if causal else full_worlds:
            labels = {
                "by": backend, "dtype": dtype, "head_dim": head_dim, "seqlen": seqlen,
                "mask": "causal" if causal else "full", "shards": world,
            }  # fmt: skip
            with poisoned():
                first, second = (on_shards(given, causal, world, backend) for _ in range(2))
            for name, ours, theirs, right in zip(Results._fields, first, pytorch, exact, strict=True):
                error, usual, limit = judged(ours, theirs, right)
                yield Number(f"error of {name}", error, "absolute", labels, limit, note=f"PyTorch's: {usual:.3g}")
            kept = [name for name in Results._fields if name != "dq" or backend not in ANY_ORDER]
            changed = sum(int((getattr(first, name) != getattr(second, name)).sum()) for name in kept)
            yield Number("changed in a second run", changed, "elements", labels, limit=0)


def judged(ours: Tensor, pytorch: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Largest error of ours and of PyTorch's result of the same dtype, and what ours may be at most."""
    error, usual = ((x.double() - exact).abs().max().item() for x in (ours, pytorch))
    return error, usual, tolerance(usual, exact.abs().max().item(), ours.dtype)


def draw(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], *, batch: int = 2) -> Inputs:
    """Fresh inputs, with q as a strided view, as a fused projection leaves it."""
    seqlen, heads, kv_heads, head_dim, head_dim_v = sizes
    q = torch.randn(batch, seqlen, heads, 2 * head_dim, device=device).to(dtype)[..., :head_dim]
    k, v, dout = (
        torch.randn(batch, seqlen, count, dim, device=device).to(dtype)
        for count, dim in ((kv_heads, head_dim), (kv_heads, head_dim_v), (heads, head_dim_v))
    )
    return Inputs(q, k, v, dout, torch.randn(batch, heads, seqlen, device=device))


def exactly(given: Inputs, causal: bool) -> Results:
    """The reference, and its gradients by autograd, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in given[:3]]
    out, lse = reference.attention(*leaves, causal=causal)
    grads = torch.autograd.grad((out, lse), leaves, (given.dout.double(), given.dlse.double()))
    return Results(out.detach(), lse.detach(), *grads)


def by_pytorch(given: Inputs, causal: bool) -> Results:
    """PyTorch's SDPA as it chooses its backend. It returns no lse: the gradient through it is that of ``logsumexp``."""
    leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    grads = torch.autograd.grad((out, lse), leaves, (given.dout, given.dlse))
    lse_of_operator = _lse_of_operator(q.detach(), k.detach(), v.detach(), causal)
    return Results(out.detach(), lse.detach() if lse_of_operator is None else lse_of_operator, *grads)


def _lse_of_operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """``lse`` as PyTorch's flash operator computes it; None where it has none for such inputs."""
    on_gpu = q.device.type == "cuda"
    if q.shape[-1] != v.shape[-1] or (on_gpu and q.dtype == torch.float32):
        return None
    name = "_scaled_dot_product_flash_attention" + ("" if on_gpu else "_for_cpu")
    lse: Tensor = getattr(torch.ops.aten, name)(q, k, v, NO_DROPOUT, causal)[1]
    return lse


def on_shards(given: Inputs, causal: bool, world: int, backend: str) -> Results:
    """What a zigzag ring of virtual ranks computes."""
    layout, config = Layout.zigzag(given.q.shape[1], world), config_of(backend, given.q)
    options: dict[str, Any] = {"causal": causal, "return_lse": True, "config": config}

    def of_rank(group: LocalGroup) -> Results:
        rank = group.rank()
        *leaves, dout = (layout.shard(x, rank).detach() for x in given[:4])
        leaves = [x.requires_grad_() for x in leaves]
        name = "aten" if backend == "aten" else "triton"
        out, lse = ring_attention(*leaves, layout=layout, group=group, backend=name, **options)
        grads = torch.autograd.grad((out, lse), leaves, (dout, layout.shard(given.dlse, rank, dim=2)))
        return Results(out.detach(), lse.detach(), *grads)

    with LocalWorld(world, device=given.q.device) as ranks:
        out, lse, *grads = zip(*ranks.run(of_rank), strict=True)
    return Results(layout.unshard(out), layout.unshard(lse, dim=2), *map(layout.unshard, grads))


def config_of(backend: str, q: Tensor) -> KernelConfig | None:
    """Which Triton kernels; None for the default."""
    return Variant(backend, BACKENDS.get(backend)).config(q, q, full=False)
