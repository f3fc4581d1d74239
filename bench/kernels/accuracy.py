"""Every kernel on the device against float64, beside PyTorch's own attention in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import reference
from ...kernels import Bounds, KernelConfig, default_config
from ...kernels.config import config_for, is_single_pass
from ...kernels.experimental.hopper_launch import is_hopper
from ...ring import Layout, Mask, bounds
from ...ring.backends import SinglePassBackward, TritonBackward, TritonForward
from ...ring.cpu.aten import AtenBackward, AtenForward
from ..common.attention import DTYPES
from ..common.errors import tolerance
from ..suite.cases import NotHere, Number, poisoned

NO_DROPOUT = 0.0
HOPPER = "hopper"
BACKENDS = {
    HOPPER: "forward and backward of sm_90",
    "single_pass": "dQ, dK and dV by one kernel",
    "single_pass_deterministic": "the same in a fixed order",
}
"""As a backend: Triton kernels in the place of the default ones."""
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
    told = _lse_of_operator(q.detach(), k.detach(), v.detach(), causal)
    return Results(out.detach(), lse.detach() if told is None else told, *grads)


def _lse_of_operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """``lse`` as PyTorch's flash operator computes it; None where it has none for such inputs."""
    on_gpu = q.device.type == "cuda"
    if q.shape[-1] != v.shape[-1] or (on_gpu and q.dtype == torch.float32):
        return None
    name = "_scaled_dot_product_flash_attention" + ("" if on_gpu else "_for_cpu")
    lse: Tensor = getattr(torch.ops.aten, name)(q, k, v, NO_DROPOUT, causal)[1]
    return lse


def on_shards(given: Inputs, causal: bool, world: int, backend: str) -> Results:
    """What the ranks of a zigzag ring compute, in the ring's order, with nothing in between."""
    layout, mask = Layout.zigzag(given.q.shape[1], world), Mask(causal=causal)
    parts = [_of_rank(given, layout, rank) for rank in range(world)]

    def limits(rank: int, shard: int) -> Bounds:
        return bounds(mask, layout.positions(rank), layout.positions(shard)).to(given.q.device)

    outs, lses, works = [], [], []
    for rank, mine in enumerate(parts):
        work = _forward(backend, mine.q)
        for hop in range(world):
            near = parts[(rank - hop) % world]
            work.fold(near.k, near.v, limits(rank, (rank - hop) % world), final=hop == world - 1)
        out, lse = work.result()
        outs.append(out)
        lses.append(lse)
        works.append(_backward(backend, mine, out, lse))
        works[-1].dq(mine.k, mine.v, limits(rank, rank), local=True, final=world == 1)
    sums = [tuple(torch.empty_like(x, dtype=torch.float32) for x in (part.k, part.v)) for part in parts]
    for hop, rank in product(range(1, world), range(world)):
        shard = (rank - hop) % world
        near, arrived = parts[shard], partial(sums.__getitem__, shard) if hop > 1 else None
        works[rank].dkdv(near.k, near.v, limits(rank, shard), local=False, accum=arrived, out=sums[shard])
        works[rank].dq(near.k, near.v, limits(rank, shard), local=False, final=hop == world - 1)
    dkdv = [tuple(torch.empty_like(x) for x in (part.k, part.v)) for part in parts]
    for rank, mine in enumerate(parts):
        home = partial(sums.__getitem__, rank) if world > 1 else None
        works[rank].dkdv(mine.k, mine.v, limits(rank, rank), local=True, accum=home, out=dkdv[rank])
    dk, dv = (layout.unshard([pair[index] for pair in dkdv]) for index in (0, 1))
    dq = layout.unshard([work.result() for work in works])
    return Results(layout.unshard(outs), layout.unshard(lses, dim=2), dq, dk, dv)


def _of_rank(given: Inputs, layout: Layout, rank: int) -> Inputs:
    q, k, v, dout = (layout.shard(x, rank) for x in given[:4])
    return Inputs(q, k, v, dout, layout.shard(given.dlse, rank, dim=2).contiguous())


def config_of(backend: str, q: Tensor) -> KernelConfig | None:
    """Which Triton kernels; None for the default."""
    if backend not in BACKENDS:
        return None
    if backend == HOPPER:
        return replace(config_for(90, q.dtype, q.shape[-1]), forward_kernel="hopper", backward="hopper")
    tuned = default_config(q, q)
    return KernelConfig(tuned.forward, tuned.dq, tuned.dkdv, backward=backend)


def _forward(backend: str, q: Tensor) -> AtenForward | TritonForward:
    scale = q.shape[-1] ** -0.5
    if backend == "aten":
        return AtenForward(q, softmax_scale=scale)
    return TritonForward(q, softmax_scale=scale, config=config_of(backend, q))


def _backward(backend: str, mine: Inputs, out: Tensor, lse: Tensor) -> AtenBackward | TritonBackward:
    scale = mine.q.shape[-1] ** -0.5
    if backend == "aten":
        return AtenBackward(mine.dout, mine.q, out, lse, mine.dlse, softmax_scale=scale)
    config = config_of(backend, mine.q)
    kind = SinglePassBackward if is_single_pass(config) else TritonBackward
    return kind(mine.dout, mine.q, out, lse, mine.dlse, softmax_scale=scale, config=config)
