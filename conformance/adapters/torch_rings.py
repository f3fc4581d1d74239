"""Adapters of rings around PyTorch's operators: PyTorch's context parallelism, accelerate's use of it, and diffusers'.

On a CPU the public ``context_parallel`` cannot replace SDPA, because it knows CUDA's operators only. The adapters call
the rings with the CPU's operator. FlexAttention runs in blocks of 16 tokens and uncompiled, for small cases.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..standalone import visible_keys

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
DTYPES = {"float32", "bfloat16", "float16"}


def _swap(*tensors: Tensor) -> list[Tensor]:
    """Swap the dimensions of tokens and heads."""
    return [x.transpose(1, 2) for x in tensors]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool, scale: float | None) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        theirs._cp_options.enable_load_balance = balanced
        ctx.options = {"is_causal": causal, "dropout_p": 0.0, "scale": scale}
        group: Any = dist.group.WORLD
        out, lse = theirs._templated_ring_attention(group, 2, FORWARD, query=q, key=k, value=v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        named = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors, strict=True))
        named |= {"grad_out": dout.contiguous(), "grad_out_name": "grad_out"}
        group: Any = dist.group.WORLD
        grads = theirs._templated_ring_attention_backward(group, 2, BACKWARD, **named, **ctx.options)
        return *grads[:3], None, None, None


def _ring(q: Tensor, k: Tensor, v: Tensor, call: Any, causal: bool) -> Tensor:
    out: Tensor = _Ring.apply(*_swap(q, k, v), causal, call.layout == "zigzag", call.softmax_scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


sdpa = SimpleNamespace(
    attend=lambda q, k, v, call: _ring(q, k, v, call, call.causal), version=f"torch {torch.__version__}",
    supports=lambda call: "load balancing needs a causal mask" if call.layout == "zigzag" and not call.causal else "",
    features={"causal", "full", "scale", "contiguous", "zigzag", "gradients"} | DTYPES,
)  # fmt: skip


class _SelfAttention(torch.nn.Module):
    """Attention layer with the arguments of transformers' layers."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Any, attention_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        if attention_mask is not None:
            raise ValueError("attention_mask is not supported by context parallelism")
        return _ring(q, k, v, call, is_causal)


def _accelerate(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """Call a layer with a mask, as transformers' models do, under the hooks that accelerate attaches."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = torch.nn.Module()
    model.self_attn = _SelfAttention()
    _attach_context_parallel_hooks(model)
    mask = visible_keys(call)[0, call.positions]
    out: Tensor = model.self_attn(q, k, v, call, attention_mask=mask)
    return out


accelerate = SimpleNamespace(
    attend=_accelerate, version=lambda: f"accelerate {installed('accelerate')}, torch {torch.__version__}",
    features={"causal", "aligned documents", "ragged documents", "scale", "contiguous", "zigzag", "gradients"} | DTYPES,
)  # fmt: skip


def _flex(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
    from torch.nn.attention import flex_attention as flex

    flex._DEFAULT_SPARSE_BLOCK_SIZE = 16
    theirs._compiled_create_block_mask = flex.create_block_mask  # type: ignore[assignment]
    theirs._cp_options.enable_load_balance = False
    visible, mesh = visible_keys(call)[0], init_device_mesh(q.device.type, (call.world,))
    mask = theirs._create_cp_block_mask(lambda b, h, i, j: visible[i, j], 1, 1, call.tokens, call.tokens, mesh)
    parallel = theirs._ContextParallel(2, theirs._ContextParallel.AttentionType.FLEX)
    inputs, options = parallel.flex_input_fn(None, tuple(_swap(q, k, v)), {"block_mask": mask}, mesh)
    attention: Any = flex.flex_attention
    out: Tensor = attention(*inputs, **options, scale=call.softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


flex = SimpleNamespace(
    attend=_flex, version=sdpa.version,
    features={"causal", "full", "window", "two-sided window", "prefix", "aligned documents", "ragged documents",
              "scale", "contiguous", "grouped heads"} | DTYPES,  # and gradients, but not on a CPU
)  # fmt: skip


def _diffusers_forward(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, return_lse: bool, _save_ctx: bool = True, _parallel_config: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
    return tuple(_swap(*FORWARD(*_swap(query, key, value), 0.0, False, scale=scale)))


def _diffusers_backward(
    ctx: Any, grad_out: Tensor, *, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **_: Any
) -> tuple[Tensor, ...]:
    inputs = _swap(grad_out, query, key, value, out, lse)
    return tuple(_swap(*BACKWARD(*inputs, 0.0, False, scale=ctx.scale)))


def _diffusers(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
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
        q, k, v, None, 0.0, call.causal, call.softmax_scale, forward_op=_diffusers_forward,
        backward_op=_diffusers_backward, _parallel_config=_configs[anything],
    )  # fmt: skip


_configs = dict[bool, Any]()
diffusers = SimpleNamespace(
    attend=_diffusers, version=lambda: f"diffusers {installed('diffusers')}",
    supports=lambda call: "its configuration needs at least two ranks" if call.world == 1 else "",
    features={"full", "scale", "contiguous", "uneven", "gradients"} | DTYPES,
)  # fmt: skip
