"""Ring attention as Megatron-core's core attention, tested with 0.16.1 (later versions keep that interface).

One line replaces the attention of every layer of a model::

    spec = with_ring_attention(get_gpt_layer_local_spec())

A custom provider defines ``def core_attention(self): return RingCoreAttention``.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from .. import single_rank
from .formats import Boundaries, attend_format, check_comm_type, check_softmax_type, softmax_sink

UNSUPPORTED_CONFIG = {
    "fp8_dot_product_attention": "attention runs in the dtype of its inputs",
    "fp8_multi_head_attention": "attention runs in the dtype of its inputs",
    "batch_invariant_mode": "the kernels of that mode are not used",
    "flash_decode": "it bypasses core attention",
}
"""Config fields that must be off, with the reason."""


class RingCoreAttention(MegatronModule):  # type: ignore[misc]
    """``softmax(scale * q k^T) v`` over the tokens of all ranks of the context-parallel group.

    The arguments are those of Megatron-core's ``DotProductAttention`` and ``TEDotProductAttention``, with
    ``k_channels`` and ``v_channels`` for multi-latent attention. The config fields ``context_parallel_size``,
    ``window_size``, ``window_attn_skip_freq``, ``softmax_type``, ``attention_dropout`` and ``num_query_groups`` apply.

    The softmax always runs in fp32, so ``attention_softmax_in_fp32`` and ``apply_query_key_layer_scaling`` change
    nothing. The dropout mask depends on the global head index over all tensor-parallel ranks, and on a seed that the
    first context-parallel rank draws from torch's CPU generator.

    With ``qk_clip`` or ``log_max_attention_logit``, ``current_max_attn_logits`` keeps the largest score of each head
    over all ranks of the context-parallel group, as in ``TEDotProductAttention``.

    The module supports training only. Inference contexts raise where the module can see them. Dynamic batching
    bypasses the module.

    Raises:
        ValueError: An argument or a config field has a wrong value.
        NotImplementedError: An argument or a config field asks for something that is not supported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        for field, reason in UNSUPPORTED_CONFIG.items():
            if getattr(config, field, False):
                raise NotImplementedError(f"config.{field} is on: it must be off, because {reason}")
        check_comm_type(cp_comm_type)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.config, self.layer_number = config, max(1, layer_number)
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.tp_group = _collection_group(pg_collection, "tp")  # `sharded_state_dict` reads it, too
        # ignore the cp group if context_parallel_size is 1: other modules may use it
        cp_size = config.context_parallel_size
        self.cp_group = _collection_group(pg_collection, "cp") if cp_size > 1 else None
        if self.cp_group is not None and self.cp_group.size() != cp_size:
            raise ValueError(
                f"config.context_parallel_size is {cp_size}, but the cp group of pg_collection has "
                f"{self.cp_group.size()} ranks. They must be equal."
            )
        key_dim = config.kv_channels if k_channels is None else k_channels
        self.head_dims = (key_dim, config.kv_channels if v_channels is None else v_channels)
        self.softmax_scale = key_dim**-0.5 if softmax_scale is None else softmax_scale
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = config.window_size if has_window else None
        self.has_max_logits = any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit"))
        self.current_max_attn_logits: Tensor | None = None  # since the last `clip_qk`
        self.softmax_offset: nn.Parameter | None = None
        if check_softmax_type(config.softmax_type) == "learnable":
            on_host = config.use_cpu_initialization or not torch.cuda.is_available()
            device = "cpu" if on_host else torch.cuda.current_device()
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return ``[s, b, h * dv]`` for this rank's tokens ``[s, b, h, d]``, or ``[t, h * dv]`` for ``[t, h, d]``.

        ``attention_mask`` is None or the causal mask of this rank's rows, ``[1 or b, 1, s, s * cp]``.
        ``packed_seq_params`` has the document boundaries of the whole sequence. The length of each document with its
        padding is a multiple of ``2 * cp``. Boundaries on a GPU cost one synchronisation per layer.
        """
        if attention_bias is not None:
            raise NotImplementedError(
                "attention_bias is given: it must be None, because the kernels add no bias to the scores"
            )
        if self.attention_type == "self" and query.shape[0] != key.shape[0]:
            raise NotImplementedError(
                f"query has {query.shape[0]} tokens and key has {key.shape[0]}. Self-attention needs equal numbers; "
                "inference_context must be None."
            )
        dims = (query.shape[-1], value.shape[-1])
        if dims != self.head_dims:
            raise ValueError(
                f"query and value have head dims {dims}: they must equal k_channels and v_channels, {self.head_dims}"
            )
        qkv_format, boundaries, group = "sbhd", Boundaries(), self.cp_group
        name = (attn_mask_type or self.attn_mask_type).name
        if (packed := packed_seq_params) is not None:
            qkv_format = packed.qkv_format or "sbhd"
            boundaries = Boundaries(
                packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
            )
            group = _micro_batch_group(packed, group)
        if qkv_format == "thd":  # as Megatron-core does for TransformerEngine
            name = {"causal": "padding_causal", "no_mask": "padding"}.get(name, name)
        result = attend_format(
            query,
            key,
            value,
            group=single_rank() if group is None else group,
            qkv_format=qkv_format,
            attn_mask_type=name,
            window_size=self.window_size,
            attention_mask=attention_mask,
            boundaries=boundaries,
            softmax_scale=self.softmax_scale,
            learnable_sink=softmax_sink(self.config.softmax_type, self.softmax_offset, query),
            dropout_p=self.attention_dropout if self.training else 0.0,
            first_head=self.tp_group.rank() * query.shape[-2],
            return_max_logits=self.has_max_logits,
        )
        if not self.has_max_logits:
            return cast(Tensor, result)
        out, largest = result
        earlier = self.current_max_attn_logits
        self.current_max_attn_logits = largest if earlier is None else torch.maximum(earlier, largest)
        return cast(Tensor, out)

    sharded_state_dict = DotProductAttention.sharded_state_dict


def _collection_group(pg_collection: ProcessGroupCollection, name: str) -> Any:
    """Return the group ``name`` ("tp" or "cp") of ``pg_collection``, or raise ValueError if it has none."""
    group = getattr(pg_collection, name, None)
    if not hasattr(group, "rank"):
        raise ValueError(
            f"pg_collection.{name} is {group!r}: it must be a process group; initialise parallel_state or pass one"
        )
    return group


def _micro_batch_group(packed: PackedSeqParams, group: Any) -> Any:
    """Return the context-parallel group of a packed micro-batch, by default the layer's ``group``.

    None means that this rank holds all tokens of the micro-batch.
    """
    cp_group, size = getattr(packed, "cp_group", None), getattr(packed, "local_cp_size", None)
    if cp_group is not None:
        return cp_group
    if size not in (None, 1):
        raise ValueError(
            f"packed_seq_params.local_cp_size is {size} and cp_group is None. Pass cp_group for a size above 1."
        )
    return group if size is None else None


def with_ring_attention(spec: Any) -> Any:
    """Return a copy of a layer's or a block's ``ModuleSpec`` with :class:`RingCoreAttention` in all attention modules.

    Raises:
        ValueError: No module of the spec has a ``core_attention``.
    """
    replaced = copy.deepcopy(spec)
    if not _replace(replaced):
        raise ValueError(
            f"spec is a {type(spec).__name__} without core_attention: it must be the spec of a layer or block"
        )
    return replaced


def _replace(spec: Any) -> int:
    """Replace the core attention in place, and return the number of modules that had one."""
    submodules = getattr(spec, "submodules", spec)
    if hasattr(submodules, "core_attention"):
        submodules.core_attention = RingCoreAttention
        return 1
    layers = getattr(submodules, "layer_specs", None) or []
    inner = (getattr(submodules, name, None) for name in ("self_attention", "cross_attention"))
    return sum(_replace(part) for part in [*layers, *inner] if part is not None)
