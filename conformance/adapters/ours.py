"""Adapter of ``ringattn.ring_attention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import ringattn

from ..standalone import uneven_lengths

version = f"ringattn {ringattn.__version__}"


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    """Call ``ring_attention`` in the layout of the call."""
    layout = ringattn.Layout.uneven(uneven_lengths(call.world)) if call.layout == "uneven" else call.layout
    return ringattn.ring_attention(
        q, k, v, layout=layout, group=call.group, causal=call.causal, window_size=call.window_size,
        softmax_scale=call.softmax_scale, softcap=call.softcap, learnable_sink=call.sink,
        alibi_slopes=call.alibi_slopes, dropout_p=call.dropout_p, dropout_seed=call.dropout_seed,
        cu_seqlens=call.cu_seqlens, seqused_k=call.seqused_k, prefix_length=call.prefix_length or None, return_lse=True,
    )  # fmt: skip
