"""Errors of every kernel against float64, next to PyTorch's attention in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm import LocalGroup, LocalWorld
from ...kernels import KernelConfig
from ...kernels.hopper_forward_launch import is_hopper_device
from ...reference.masks import MaskOptions
from ...ring import Layout, ring_attention
from ..common.attention import DTYPES, Tensors, forward_backward
from ..common.cases import MeasuredNumber, UnavailableError, poison_allocations
from ..common.errors import RESULTS_WITH_LSE, AttentionInputs, build_judge
from .contenders import TritonVariant

HOPPER = "hopper"
BACKENDS = {
    HOPPER: {"forward_kernel": "hopper", "backward": "hopper"},
    "single_pass": {"backward": "single_pass"},
    "single_pass_deterministic": {"backward": "single_pass_deterministic"},
}
"""Backend names for non-default Triton kernels, with fields of their config."""
UNORDERED_BACKENDS = (HOPPER, "single_pass")  # dQ is accumulated in any order, so its last bits vary


def accuracy_case(
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
) -> Iterator[MeasuredNumber]:
    """Yield errors of forward and backward, full and causal, on zigzag rings of virtual ranks.

    ``backend`` is "aten", "triton", or one of :data:`BACKENDS`. ``heads`` are those of q and of k. Causal rings
    have ``causal_worlds`` ranks, full ones ``full_worlds``: three ranks cover the first, middle and last hop. Outputs
    lie in memory filled with NaN. A second run must give the same bits, except where programs accumulate in any order.
    Hopper kernels raise ``UnavailableError`` on other GPUs.
    """
    if backend == HOPPER and not is_hopper_device(device):
        raise UnavailableError("the Hopper kernels need a GPU of compute capability 9.0")
    for causal in (True, False):
        inputs = draw_inputs(device, DTYPES[dtype], (seqlen, *heads, head_dim, head_dim_v or head_dim))
        judge, config = build_judge(inputs, MaskOptions(causal=causal)), backend_config(backend, inputs.q)
        options = {"causal": causal, "backend": "aten" if backend == "aten" else "triton", "config": config}
        for world in causal_worlds if causal else full_worlds:
            labels = {
                "by": backend, "dtype": dtype, "head_dim": head_dim, "seqlen": seqlen,
                "mask": "causal" if causal else "full", "shards": world,
            }  # fmt: skip
            with poison_allocations():
                first, second = (ring_results(inputs, world, **options) for _ in range(2))
            for name, error in judge.head_errors(first).items():
                note = f"PyTorch's: {judge.pytorch_errors[name]:.3g}"
                yield MeasuredNumber(f"error of {name}", error, "absolute", labels, judge.limits[name], note=note)
            repeatable = [name for name in first if name != "dq" or backend not in UNORDERED_BACKENDS]
            changed = sum(int((first[name] != second[name]).sum()) for name in repeatable)
            yield MeasuredNumber("changed in a second run", changed, "elements", labels, limit=0)


def draw_inputs(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], *, batch: int = 2
) -> AttentionInputs:
    """Draw inputs of the sizes S, H, Hkv, D and Dv; q is a strided view, as a fused projection produces it."""
    seqlen, heads, kv_heads, head_dim, head_dim_v = sizes
    q = torch.randn(batch, seqlen, heads, 2 * head_dim, device=device).to(dtype)[..., :head_dim]
    k, v, dout = (
        torch.randn(batch, seqlen, count, dim, device=device).to(dtype)
        for count, dim in ((kv_heads, head_dim), (kv_heads, head_dim_v), (heads, head_dim_v))
    )
    return AttentionInputs(q, k, v, dout, torch.randn(batch, heads, seqlen, device=device))


def ring_results(given: AttentionInputs, world: int, **options: Any) -> dict[str, Tensor]:
    """Return out, lse, dq, dk and dv by name from a zigzag ring of ``world`` virtual ranks.

    ``options`` are arguments of ``ring_attention``.
    """
    layout = Layout.zigzag(given.q.shape[1], world)

    def of_rank(group: LocalGroup) -> Tensors:
        q, k, v, *gradients = shard_inputs(given, layout, group.rank())
        attend = partial(ring_attention, layout=layout, group=group, return_lse=True, **options)
        return forward_backward(attend, (q, k, v), *gradients)

    with LocalWorld(world, device=given.q.device) as ranks:
        return unshard_results(layout, ranks.run(of_rank))


def shard_inputs(given: AttentionInputs, layout: Layout, rank: int) -> Tensors:
    """Return a rank's tokens of q, k, v, dout and dlse."""
    return tuple(layout.shard(x, rank, 2 if name == "dlse" else 1) for name, x in given._asdict().items())


def unshard_results(layout: Layout, parts: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return out, lse, dq, dk and dv of the whole sequence by name, from those of every rank."""
    named = zip(RESULTS_WITH_LSE, zip(*parts, strict=True), strict=True)
    return {name: layout.unshard(shards, 2 if name == "lse" else 1) for name, shards in named}


def backend_config(backend: str, q: Tensor) -> KernelConfig | None:
    """Return the config of a backend in :data:`BACKENDS`; None for other names, which need no config."""
    return TritonVariant(backend, BACKENDS.get(backend)).config(q, q, full=False)
