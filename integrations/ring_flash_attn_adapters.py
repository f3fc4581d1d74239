"""zhuzilin's adapter for Hugging Face transformers by its own names, on ``ringattn.integrations.transformers``.

``from ringattn.integrations.ring_flash_attn_adapters import substitute_hf_flash_attn, update_ring_flash_attn_params``
takes the place of the import from ring_flash_attn 0.1.8, which need not be installed; nothing of transformers is
patched. Without flash-attn, models are made with ``attn_implementation="ringattn"``. Around a forward, and for labels,
``sharded`` and ``shard_batch`` of ``ringattn.integrations.transformers`` do the same for every layout.
"""

from __future__ import annotations

import transformers
from torch import Tensor

from .. import Documents, Layout
from ..comm import GroupLike, group_rank_size
from .transformers import Sharding, _sharding, attend, mask_of, register


def substitute_hf_flash_attn(process_group: GroupLike, heads_k_stride: int) -> str:
    """Attention of models over the ranks of ``process_group``; returns the ``attn_implementation`` to make them with.

    As in theirs, models with ``flash_attention_2`` have it too, those that were made before as well. For all layers of
    decoders that ``ringattn.integrations.transformers`` takes: windows, softcap and sinks, and any number of rows.

    Args:
        process_group: the ranks that share a sequence.
        heads_k_stride: how many heads of the keys theirs gathers at once. Here keys travel, and it changes nothing.

    Raises:
        ValueError: ``heads_k_stride`` is no whole number of 1 or more.
        ImportError: as :func:`ringattn.integrations.transformers.register`.
    """
    if not isinstance(heads_k_stride, int) or isinstance(heads_k_stride, bool) or heads_k_stride < 1:
        raise ValueError(f"heads_k_stride is {heads_k_stride!r}: it must be 1 or more heads of the keys")
    name = register()
    transformers.AttentionInterface.register("flash_attention_2", attend)
    transformers.AttentionMaskInterface.register("flash_attention_2", mask_of)
    _sharding.set(Sharding(None, process_group))
    return name


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: GroupLike) -> None:
    """Before each forward, in its thread: where the documents of the packed sequence end.

    Rank r of P gives the model run r of P of the sequence (``Layout.contiguous``), ``position_ids`` counted from 0 in
    each document, and no ``attention_mask``. The forward refuses other lengths and positions. As with theirs, a loss of
    the model must be given ``shift_labels``: ``labels`` would be shifted within a rank's run.

    Raises:
        ValueError: ``process_group`` is not that of ``substitute_hf_flash_attn``, or ``cu_seqlens`` are no boundaries.
        RuntimeError: with several ranks, if no attention was ringattn's since the last update: each rank has seen its
            own tokens alone.
    """
    last = _sharding.get(None)
    if last is None or last.group is not process_group:
        raise ValueError("process_group is another one: call substitute_hf_flash_attn(process_group, ...) first")
    world = group_rank_size(process_group)[1]
    if last.layout is not None and not last.tokens and world > 1:
        raise RuntimeError(
            "no attention since the last update_ring_flash_attn_params was ringattn's: make the model with "
            f"attn_implementation={register()!r}, or leave the update out where there is no forward"
        )
    documents = Documents(cu_seqlens.tolist()).boundaries
    _sharding.set(Sharding(Layout.contiguous(documents[-1], world), process_group, cu_seqlens=documents))
