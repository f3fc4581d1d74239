"""Context manager that runs ``F.scaled_dot_product_attention`` over a sharded sequence, without patching torch.

It is an alternative to ``torch.distributed.tensor.experimental.context_parallel`` and follows torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .. import Layout, LayoutLike, ring_attention
from ..comm import GroupLike
from . import unit_stride

__all__ = ["load_balancer_layout", "ring_sdpa"]

OUTSIDE_HINT = "call it outside the `with` to attend to this rank's tokens only"
OTHER_ATTENTION: dict[str, str] = {
    "flex_attention": "call ringattn.ring_attention for windows, documents and block masks",
    "_varlen_attn": "call ringattn.ring_attention with cu_seqlens",  # the ops of torch.nn.attention.varlen
    "_varlen_attn_out": "call ringattn.ring_attention with cu_seqlens",
    "scaled_dot_product_attention": "call the function of torch.nn.functional",  # the op of torch.ops.aten
}
"""Other attention functions, which would see this rank's tokens only, and what to call instead."""
KERNELS = (
    "_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_",
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_triton_multi_head_attention",
    "_triton_scaled_dot_attention",
)  # fmt: skip
"""Name prefixes of the functions of torch and torch.ops.aten behind ``scaled_dot_product_attention``."""


def _without_dispatch(function: Any) -> FunctionType:
    """Return a copy of a Python function of torch that active modes also see inside.

    A mode is inactive while it handles a function, so it would miss the attention inside ``nn.MultiheadAttention`` and
    inside layers that activation checkpointing recomputes in the backward. The copy skips the dispatch to modes, so
    that the caller can enter the mode again around it.
    """
    names = ("has_torch_function", "has_torch_function_unary")
    return FunctionType(
        function.__code__,
        function.__globals__ | dict.fromkeys(names, lambda _: False),
        argdefs=function.__defaults__,
    )


INTERCEPTED = {
    function: _without_dispatch(function)
    for function in (
        F.multi_head_attention_forward,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}


def ring_sdpa(layout: LayoutLike, group: GroupLike = None, *, kv_layout: LayoutLike = None) -> TorchFunctionMode:
    """Return a context in which ``F.scaled_dot_product_attention`` is :func:`ring_attention` over ``group``.

    ``query [B, H, S, D]``, ``key [B, Hkv, Sk, D]`` and ``value [B, Hkv, Sk, Dv]`` are this rank's tokens in layout
    order. The result is ``[B, H, S, Dv]``. ``is_causal`` compares global positions. ``dropout_p``, ``scale`` and
    ``enable_gqa`` have PyTorch's meaning, and the dropout mask does not depend on the number of ranks.

    The context is a ``TorchFunctionMode``. It applies to the thread that enters it, also inside ``torch.compile``, and
    the innermost context wins. TorchScript ignores function modes.

    With activation checkpointing, run ``backward()`` inside the context, too, because the backward recomputes the
    forward. Outside, non-reentrant checkpointing raises ``CheckpointError``, and reentrant checkpointing silently
    attends to this rank's tokens only.

    Args:
        layout: Global positions of each rank, as a :class:`Layout`, or ``contiguous``, ``zigzag`` or ``striped`` for
            equal shards. :func:`load_balancer_layout` converts a load balancer of PyTorch.
        group: The ranks, as in :func:`ring_attention`. For a mesh pass its context-parallel dimension, ``mesh["cp"]``.
        kv_layout: Global positions of the keys in cross-attention. It applies to every call in the context.

    Raises:
        NotImplementedError: A call inside has an ``attn_mask``, tensors without exactly four dimensions, or uses
            another attention of PyTorch, such as ``flex_attention`` or attention weights of ``nn.MultiheadAttention``.
        ValueError: A call inside has fewer key heads without ``enable_gqa``, or another number of keys without
            ``kv_layout``, or arguments that :func:`ring_attention` rejects.
    """
    return _RingSDPA(layout, group, kv_layout)


class _RingSDPA(TorchFunctionMode):
    def __init__(self, layout: LayoutLike, group: GroupLike, kv_layout: LayoutLike) -> None:
        super().__init__()
        self.layout, self.group, self.kv_layout = layout, group, kv_layout

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]  # without the overload of an op
        if name in OTHER_ATTENTION or name.startswith(KERNELS):
            instead = OTHER_ATTENTION.get(name, "call scaled_dot_product_attention")
            raise NotImplementedError(f"{name} is not supported inside ring_sdpa; {instead}, or {OUTSIDE_HINT}")
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            raise NotImplementedError(
                "need_weights is True inside ring_sdpa, which never materialises the attention weights; pass "
                f"need_weights=False to nn.MultiheadAttention, or {OUTSIDE_HINT}"
            )
        if func in INTERCEPTED:
            with self:
                return INTERCEPTED[func](*args, **kwargs)
        return func(*args, **kwargs)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise NotImplementedError(
                f"attn_mask is a {type(attn_mask).__name__} inside ring_sdpa; it must be None. Pass is_causal=True, or "
                "call ringattn.ring_attention with window_size, cu_seqlens, seqused_k, prefix_length or block_mask."
            )
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 4:
                raise NotImplementedError(
                    f"{name} has {x.dim()} dimensions inside ring_sdpa: it must be [batch, heads, tokens, head dim]. "
                    "Unsqueeze or flatten it to four dimensions."
                )
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"key has {key.shape[1]} heads and query has {query.shape[1]}; pass enable_gqa=True for grouped heads"
            )
        if self.kv_layout is None and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"key has {key.shape[2]} tokens and query has {query.shape[2]}; pass kv_layout to ring_sdpa for "
                f"cross-attention to a sharded sequence, or {OUTSIDE_HINT}"
            )
        q, k, v = (unit_stride(x).transpose(1, 2) for x in (query, key, value))
        out = ring_attention(
            q,
            k,
            v,
            layout=self.layout,
            kv_layout=self.kv_layout,
            group=self.group,
            causal=is_causal,
            softmax_scale=scale,
            dropout_p=dropout_p,
        )
        return out.transpose(1, 2)


def load_balancer_layout(load_balancer: Any, world: int) -> Layout:
    """Return the :class:`Layout` of the shards that PyTorch's context parallelism creates with a load balancer.

    Args:
        load_balancer: Object from ``torch.distributed.tensor.experimental._context_parallel._load_balancer``, or its
            indices ``[S]``, ``[1, S]`` or ``[B, S]`` with equal rows. Token i of the rearranged sequence has position
            ``indices[i]``, and rank r holds the r-th of ``world`` equal parts.
        world: Number of ranks.

    Raises:
        ValueError: ``load_balancer`` is neither, or its indices are not a permutation, differ between rows, do not
            divide by ``world``, or do not ascend within a rank.
    """
    generate: Callable[[], Any] | None = getattr(load_balancer, "_generate_indices", None)
    indices = generate() if generate else load_balancer
    if not isinstance(indices, torch.Tensor):
        raise _no_balancer(type(load_balancer).__name__)
    is_integer = not indices.is_floating_point() and indices.dtype != torch.bool
    if indices.dim() not in (1, 2) or not indices.numel() or not is_integer:
        raise _no_balancer(f"{indices.dtype} tensor of shape {list(indices.shape)}")
    rows = indices.reshape(-1, indices.shape[-1]).cpu()
    seqlen = rows.shape[1]
    if not rows.eq(rows[:1]).all():
        raise ValueError("the indices of load_balancer differ between batch rows: all rows must have the same layout")
    if not rows[0].sort().values.equal(torch.arange(seqlen, dtype=rows.dtype)):
        raise ValueError(f"the indices of load_balancer are not a permutation of 0 to {seqlen - 1}")
    if world < 1 or seqlen % world:
        raise ValueError(
            f"load_balancer has {seqlen} tokens: the number of tokens must be a multiple of world, {world}"
        )
    shards = rows[0].chunk(world)
    for rank, positions in enumerate(shards):
        if positions.diff().lt(1).any():
            raise ValueError(
                f"the indices of load_balancer are not in ascending order on rank {rank}. Sort the tokens within "
                "each rank, or for packed documents use Layout.zigzag(seqlen, world, cu_seqlens=...)."
            )
    return Layout.from_positions(shards)


def _no_balancer(kind: str) -> ValueError:
    """Return the error for a ``load_balancer`` that is a ``kind`` of object without indices."""
    return ValueError(
        f"load_balancer is a {kind}: it must be a PyTorch load balancer, or its indices of shape [S] or [batch, S]. "
        "Without a load balancer use the layout 'contiguous'."
    )
