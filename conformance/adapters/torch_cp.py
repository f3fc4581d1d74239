"""Adapters of PyTorch's context parallelism (``torch.distributed.tensor.experimental``) and of accelerate's use of it.

On a CPU the public ``context_parallel`` cannot replace SDPA, because it knows CUDA's operators only. The adapters call
the ring behind it with the CPU's operator. FlexAttention runs in blocks of 16 tokens and uncompiled, for small cases.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
dtypes = {"float32", "bfloat16", "float16"}


def version() -> str:
    return f"torch {torch.__version__}"


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool, scale: float | None) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        theirs._cp_options.enable_load_balance = balanced
        ctx.options = {"is_causal": causal, "dropout_p": 0.0, "scale": scale}
        out, lse = theirs._templated_ring_attention(_group(), 2, FORWARD, query=q, key=k, value=v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        named = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors, strict=True))
        grads = theirs._templated_ring_attention_backward(
            _group(), 2, BACKWARD, grad_out=dout.contiguous(), grad_out_name="grad_out", **named, **ctx.options
        )
        return *grads[:3], None, None, None


def _group() -> Any:
    return dist.group.WORLD


def _ring(q: Tensor, k: Tensor, v: Tensor, call: Any, causal: bool) -> Tensor:
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = _Ring.apply(*by_head, causal, call.layout == "zigzag", call.softmax_scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


sdpa = SimpleNamespace(
    attend=lambda q, k, v, call: _ring(q, k, v, call, call.causal), version=version,
    supports=lambda call: "load balancing needs a causal mask" if call.layout == "zigzag" and not call.causal else "",
    features={"causal", "full", "scale", "contiguous", "zigzag", "gradients"} | dtypes,
)  # fmt: skip


class _SelfAttention(torch.nn.Module):
    """Attention layer with the arguments of transformers' layers."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any, attention_mask: Any = None, is_causal: bool = False):  # type: ignore[no-untyped-def]
        if attention_mask is not None:
            raise ValueError("attention_mask is not supported by context parallelism")
        return _ring(q, k, v, call, is_causal)


def _accelerate(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """Call a layer with a mask, as transformers' models do, under the hooks that accelerate attaches."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = torch.nn.Module()
    model.self_attn = _SelfAttention()
    _attach_context_parallel_hooks(model)
    mask = torch.ones(call.tokens, call.tokens, dtype=torch.bool).tril()
    if call.cu_seqlens is not None:
        document = torch.bucketize(torch.arange(call.tokens), torch.tensor(call.cu_seqlens), right=True)
        mask &= document[:, None] == document
    out: Tensor = model.self_attn(q, k, v, call, attention_mask=mask[call.positions])
    return out


def _accelerate_version() -> str:
    from importlib.metadata import version as installed

    return f"accelerate {installed('accelerate')}, torch {torch.__version__}"


accelerate = SimpleNamespace(
    attend=_accelerate, version=_accelerate_version,
    features={"causal", "aligned documents", "ragged documents", "scale", "contiguous", "zigzag", "gradients"} | dtypes,
)  # fmt: skip


def _flex(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
    from torch.nn.attention import flex_attention as flex

    flex._DEFAULT_SPARSE_BLOCK_SIZE = 16
    theirs._compiled_create_block_mask = flex.create_block_mask  # type: ignore[assignment]
    theirs._cp_options.enable_load_balance = False
    edges = torch.tensor(call.cu_seqlens or (0,))
    document = torch.bucketize(torch.arange(call.tokens), edges, right=True)
    left, right = call.window_size

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        see = document[i] == document[j]
        see = see & ((j <= i) | (j < call.prefix_length)) if call.causal else see
        see = see & (j >= i - left) if left >= 0 else see
        return see & (j <= i + right) if right >= 0 else see

    def attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any) -> Any:
        return flex.flex_attention(q, k, v, block_mask=block_mask, scale=call.softmax_scale, enable_gqa=True)

    mesh = init_device_mesh(q.device.type, (call.world,))
    mask = theirs._create_cp_block_mask(visible, 1, 1, call.tokens, call.tokens, mesh)
    parallel = theirs._ContextParallel(2, theirs._ContextParallel.AttentionType.FLEX)
    inputs, options = parallel.flex_input_fn(
        None, tuple(x.transpose(1, 2) for x in (q, k, v)), {"block_mask": mask}, mesh
    )
    out: Tensor = attention(*inputs, **options)
    return out.transpose(1, 2)


flex = SimpleNamespace(
    attend=_flex, version=version,
    features={"causal", "full", "window", "two-sided window", "prefix", "aligned documents", "ragged documents",
              "scale", "contiguous", "grouped heads"} | dtypes,  # and gradients, but not on a CPU
)  # fmt: skip
