"""Hugging Face adapter of zhuzilin's ring-flash-attention on top of ``ringattn.integrations.transformers``.

``from ringattn.integrations.ring_flash_attn_adapters import substitute_hf_flash_attn, update_ring_flash_attn_params``
replaces the import from ring_flash_attn 0.1.8, which need not be installed. Nothing in transformers is patched.
Without flash-attn, create models with ``attn_implementation="ringattn"``. New code should use ``sharded`` and
``shard_batch`` of ``ringattn.integrations.transformers``, which support every layout and shift the labels.
"""

from __future__ import annotations

import transformers
from torch import Tensor

from .. import Documents, Layout
from ..comm import GroupLike, group_rank_size
from .transformers import Sharding, _sharding, attention_interface, mask_interface, register


def substitute_hf_flash_attn(process_group: GroupLike, heads_k_stride: int) -> str:
    """Use ringattn for the attention of models, and return the ``attn_implementation`` for new models.

    As in the original, existing and new models with ``flash_attention_2`` use ringattn, too. All decoders that
    ``ringattn.integrations.transformers`` accepts work, with windows, softcap, sinks and any number of rows.

    Args:
        process_group: The ranks that share a sequence.
        heads_k_stride: Has no effect, because K/V move around the ring. The original gathers that many heads at once.

    Raises:
        ValueError: ``heads_k_stride`` is not an integer of at least 1.
        ImportError: See :func:`ringattn.integrations.transformers.register`.
    """
    if not isinstance(heads_k_stride, int) or isinstance(heads_k_stride, bool) or heads_k_stride < 1:
        raise ValueError(f"heads_k_stride is {heads_k_stride!r}: it must be a positive integer")
    name = register()
    transformers.AttentionInterface.register("flash_attention_2", attention_interface)
    transformers.AttentionMaskInterface.register("flash_attention_2", mask_interface)
    _sharding.set(Sharding(None, process_group))
    return name


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: GroupLike) -> None:
    """Set the document boundaries of the packed sequence; call it before each forward, in the same thread.

    Rank r of P passes the model run r of P of the sequence (``Layout.contiguous``), ``position_ids`` that count from 0
    in each document, and no ``attention_mask``. The forward raises for other lengths and positions. As in the original,
    pass ``shift_labels`` for a loss, because the model would shift ``labels`` within a rank's run.

    Raises:
        ValueError: ``process_group`` is not that of ``substitute_hf_flash_attn``, or ``cu_seqlens`` are not boundaries.
        RuntimeError: With several ranks, no attention has run on ringattn since the last update.
    """
    last = _sharding.get(None)
    if last is None or last.group is not process_group:
        raise ValueError("process_group is unknown. Call substitute_hf_flash_attn with this group first.")
    world = group_rank_size(process_group)[1]
    if last.layout is not None and not last.tokens and world > 1:
        raise RuntimeError(
            "no attention has used ringattn since the last update_ring_flash_attn_params. Create the model with "
            f"attn_implementation={register()!r}, and call it only before a forward."
        )
    documents = Documents(cu_seqlens.tolist()).boundaries
    _sharding.set(Sharding(Layout.contiguous(documents[-1], world), process_group, cu_seqlens=documents))
