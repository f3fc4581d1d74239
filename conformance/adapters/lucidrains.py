"""Adapter of lucidrains' ``ring_attention_pytorch``: its ring in plain PyTorch, in its own order of query heads."""

from __future__ import annotations

import warnings
from importlib.metadata import version as installed
from typing import Any

import torch
from torch import Tensor

features = {"causal", "full", "contiguous", "striped", "float32", "grouped heads", "gradients"}
BUCKET = 8


def version() -> str:
    return f"ring-attention-pytorch {installed('ring-attention-pytorch')}"


def supports(call: Any) -> str:
    striped = call.layout == "striped" and not call.causal
    return "one rank has no ring over gloo" if call.world == 1 else "stripes need a causal mask" if striped else ""


def positions(call: Any) -> Any:
    """Return contiguous tokens; for stripes bucket ``j`` of ``n`` has the tokens ``j``, ``j + n``, ``j + 2 n``, …."""
    whole = torch.arange(call.tokens)
    order = whole.view(BUCKET, -1).t().reshape(-1) if call.layout == "striped" else whole
    return order.chunk(call.world)[call.rank]


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    with warnings.catch_warnings():  # beartype warns about the package's type hints
        warnings.simplefilter("ignore")
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    heads = torch.arange(call.heads).view(call.kv_heads, -1).t().reshape(-1)  # its head h reads h % kv_heads
    out: Tensor = ring_flash_attn(
        q[:, :, heads], k, v, causal=call.causal, bucket_size=BUCKET, ring_reduce_col=True,
        striped_ring_attn=call.layout == "striped", ring_size=call.world,
    )  # fmt: skip
    return out[:, :, heads.argsort()]
