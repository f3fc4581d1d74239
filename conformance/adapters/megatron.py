"""Adapter of Megatron-core's own ``DotProductAttention``; its context parallelism is Transformer Engine's, on GPUs."""

from __future__ import annotations

import warnings
from importlib.metadata import version as installed
from typing import Any

from torch import Tensor

features = {"causal", "contiguous", "zigzag", "float32", "bfloat16", "float16", "gradients", "grouped heads"}


def version() -> str:
    return f"megatron-core {installed('megatron-core')}"


def supports(call: Any) -> str:
    return "context parallelism needs at least two ranks" if call.world == 1 else ""


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    with warnings.catch_warnings():  # packages that are missing on machines without a GPU
        warnings.simplefilter("ignore")
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1, hidden_size=call.heads * call.head_dim, num_attention_heads=call.heads,
            num_query_groups=call.kv_heads, context_parallel_size=call.world, use_cpu_initialization=True,
        )  # fmt: skip
        attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return attention(q, k, v, None).unflatten(2, (call.heads, -1)).transpose(0, 1)
