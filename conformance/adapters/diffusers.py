"""Adapter of diffusers' ``TemplatedRingAttention`` with the CPU's operator as its local attention."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

features = {"full", "scale", "contiguous", "uneven", "gradients", "float32", "bfloat16", "float16"}
_configs = dict[bool, Any]()


def version() -> str:
    return f"diffusers {installed('diffusers')}"


def supports(call: Any) -> str:
    return "its configuration needs at least two ranks" if call.world == 1 else ""


def _forward(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, return_lse: bool, _save_ctx: bool = True, _parallel_config: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
    by_head = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_head, 0.0, False, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _backward(ctx: Any, grad_out: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.transpose(1, 2) for x in (grad_out, *(named[name] for name in ("query", "key", "value", "out", "lse")))]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, False, scale=ctx.scale)
    return tuple(x.transpose(1, 2) for x in grads)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    anything = call.layout == "uneven"
    if anything not in _configs:
        config = ContextParallelConfig(ring_degree=call.world, ring_anything=anything)
        mesh = init_device_mesh(q.device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        config.setup(call.rank, call.world, q.device, mesh)
        _configs[anything] = ParallelConfig(context_parallel_config=config)
    return _templated_context_parallel_attention(
        q, k, v, None, 0.0, call.causal, call.softmax_scale, forward_op=_forward, backward_op=_backward,
        _parallel_config=_configs[anything],
    )  # fmt: skip
