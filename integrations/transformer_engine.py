"""Drop-in replacement for TransformerEngine's ``DotProductAttention`` with the arguments of version 2.20.2.

Use ``ringattn.integrations.transformer_engine.DotProductAttention`` in place of
``transformer_engine.pytorch.DotProductAttention``. The module does not import TransformerEngine, which needs CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import single_rank
from .formats import Boundaries, attend_format, check_comm_type, check_softmax_type, softmax_sink

STRATEGIES = {"DUAL_CHUNK_SWAP": False, "NO_LOAD_BALANCE": True}
"""Member name of ``CPLoadBalancingStrategy``: True if each rank holds one contiguous run of tokens."""

MASK_TYPE_ALIASES = {"causal_padding": "padding_causal"}  # TransformerEngine accepts both spellings


class DotProductAttention(nn.Module):
    """``softmax(scale * q k^T) v`` over the tokens of all ranks of ``cp_group``.

    The arguments are those of ``transformer_engine.pytorch.DotProductAttention``. A context-parallel group works with
    every ``qkv_format`` and with windows, sinks (``softmax_type``), ``softcap``, ALiBi, dropout, padding, GQA, and
    values whose head dim differs from that of the keys.

    The dropout mask depends on the global head index over ``tp_group``, and on a seed that the first rank of
    ``cp_group`` draws from torch's CPU generator. Therefore ``get_rng_state_tracker`` and ``sequence_parallel`` change
    nothing. ``cp_stream`` changes nothing either, because the ring has its own streams. Attention never runs in FP8.

    Attributes:
        softmax_offset: Parameter of ``softmax_type="learnable"``, fp32 ``[heads of this rank]``, else None. Its
            gradient is this rank's part; sum the parts over ``cp_group``.

    Raises:
        ValueError: An argument has a wrong value.
        NotImplementedError: An argument asks for something that is not supported.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type is {attention_type!r}: it must be 'self' or 'cross'")
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.kv_channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.tp_size = tp_size
        self.set_tensor_parallel_group(tp_group)
        sizes = {"num_attention_heads": num_attention_heads, "num_gqa_groups": groups, "tp_size": self.tp_size}
        for argument, size in (*sizes.items(), *(("kv_channels", dim) for dim in self.kv_channels)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{argument} is {size!r}: it must be a positive integer")
        if groups % self.tp_size:
            raise ValueError(f"num_gqa_groups is {groups}: it must be a multiple of tp_size, {self.tp_size}")
        if num_attention_heads % groups:
            raise ValueError(f"num_gqa_groups is {groups}: it must divide num_attention_heads, {num_attention_heads}")
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal, self.softcap = window_size, bottom_right_diagonal, softcap
        self.attention_type, self.layer_number, self.name = attention_type, layer_number, name
        self.softmax_scale = self.kv_channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_type, self.return_max_logit = check_softmax_type(softmax_type), bool(return_max_logit)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        offset = torch.zeros(num_attention_heads // self.tp_size, device=device)
        self.softmax_offset = nn.Parameter(offset) if softmax_type == "learnable" else None
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks that share the heads; with None, ``tp_size`` keeps its value."""
        self.tp_group = tp_group
        self.tp_size = self.tp_size if tp_group is None else tp_group.size()

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: Any = "DUAL_CHUNK_SWAP",
    ) -> None:
        """Set the ranks that share the tokens; with None, this rank holds all tokens."""
        check_comm_type(cp_comm_type)
        if isinstance(cp_group, (list, tuple)):
            raise NotImplementedError(
                "cp_group is a list of groups: it must be one group, because 'a2a+p2p' is not supported"
            )
        if cp_group is not None and not hasattr(cp_group, "rank"):
            raise ValueError(
                f"cp_group is a {type(cp_group).__name__}: it must be a ProcessGroup, a LocalWorld member or None. "
                "For a DeviceMesh pass mesh.get_group()."
            )
        ranks = dist.get_process_group_ranks(cp_group) if isinstance(cp_group, dist.ProcessGroup) else None
        if cp_global_ranks is not None and ranks is not None and list(cp_global_ranks) != ranks:
            raise ValueError(f"cp_global_ranks is {cp_global_ranks}: it must be {ranks}, the ranks of cp_group")
        strategy = getattr(load_balancing_strategy, "name", load_balancing_strategy)
        if strategy not in STRATEGIES:
            raise ValueError(f"load_balancing_strategy is {strategy!r}: it must be one of {', '.join(STRATEGIES)}")
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type, self.load_balancing_strategy = cp_comm_type, load_balancing_strategy
        self._contiguous = STRATEGIES[strategy]

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``[..., h * dv]`` for this rank's tokens ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``.

        ``cu_seqlens_*`` are boundaries of the whole sequence. On a GPU they cost one synchronisation per call, CPU
        tensors cost none. ``max_seqlen_q``, ``max_seqlen_kv`` and ``fast_zero_fill`` are hints for TransformerEngine's
        kernels and change nothing. Rows of padding are 0. With ``return_max_logit`` the result is a tuple with the
        largest score of each head over all ranks of ``cp_group``, fp32 ``[h]``.
        """
        refused = {
            "core_attention_bias": core_attention_bias, "inference_params": inference_params, "fp8_output": fp8_output,
            "bf16_backward": bf16_backward, "score_mod": score_mod, "score_mod_bprop": score_mod_bprop,
            "score_mod_tensors": score_mod_tensors, "score_mod_bprop_tensors": score_mod_bprop_tensors,
            "thd_attention_policies": thd_attention_policies, "num_splits": None if num_splits == 1 else num_splits,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch != "auto",
        }  # fmt: skip
        for argument, value in refused.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"{argument} is given, but ringattn does not support it; leave it out")
        if core_attention_bias_type != ("no_bias" if alibi_slopes is None else "alibi"):
            raise NotImplementedError(
                f"core_attention_bias_type is {core_attention_bias_type!r}: it must be 'alibi' with alibi_slopes and "
                "'no_bias' without"
            )
        if pad_between_seqs is False and not (cu_seqlens_q_padded is None or cu_seqlens_q_padded is cu_seqlens_q):
            raise ValueError("pad_between_seqs is False, but cu_seqlens_q_padded is given; leave one of them out")
        query, key, value = unpack_qkv(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        self._check_heads(query, key, value)
        mask_type = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        attention = partial(
            attend_format,
            group=single_rank() if self.cp_group is None else self.cp_group,
            qkv_format=qkv_format or self.qkv_format,
            attn_mask_type=MASK_TYPE_ALIASES.get(mask_type, mask_type),
            window_size=fit_window(self.window_size if window_size is None else window_size, mask_type),
            attention_mask=attention_mask,
            boundaries=Boundaries(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            bottom_right=self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            contiguous=self._contiguous,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap if softcap is None else softcap,
            learnable_sink=softmax_sink(self.softmax_type, self.softmax_offset, query),
            alibi_slopes=alibi_slopes,
            dropout_p=self.attention_dropout if self.training else 0.0,
            first_head=0 if self.tp_group is None else self.tp_group.rank() * query.shape[-2],
            return_max_logits=self.return_max_logit,
        )
        if checkpoint_core_attention:
            return cast(Tensor, checkpoint(attention, query, key, value, use_reentrant=False))
        return cast(Tensor, attention(query, key, value))

    def _check_heads(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        heads, groups = self.num_attention_heads // self.tp_size, self.num_gqa_groups // self.tp_size
        (key_dim, value_dim), shapes = self.kv_channels, [tuple(x.shape[-2:]) for x in (query, key, value)]
        if shapes != (expected := [(heads, key_dim), (groups, key_dim), (groups, value_dim)]):
            raise ValueError(f"query, key and value have (heads, head dim) {shapes}: they must have {expected}")
        if self.training and self.attention_dropout and self.tp_size > 1 and self.tp_group is None:
            raise ValueError(
                f"tp_group is None with attention_dropout {self.attention_dropout} and tp_size {self.tp_size}. Pass "
                "tp_group, because dropout depends on global head indices."
            )


def fit_window(window_size: Any, mask_type: str) -> Any:
    """Adapt the window to the mask type with a warning, as TransformerEngine's ``check_set_window_size`` does."""
    match window_size:
        case (int(left), int(right)) if "causal" in mask_type and left >= 0 and right > 0:
            adapted = (left, 0)
        case (-1, 0) if "causal" not in mask_type:
            adapted = (-1, -1)
        case _:
            return window_size
    warnings.warn(f"window_size {window_size} does not fit attn_mask_type {mask_type!r}; using {adapted}", stacklevel=4)
    return adapted


def unpack_qkv(
    query: Tensor | None, key: Tensor | None, value: Tensor | None, qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, ...]:
    """Return query, key and value, unpacked from ``qkv`` or ``kv`` along ``dim`` (-3 or -2) if those are given."""
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim is {dim}: it must be -3 or -2")
    parts = [query, key, value] if kv is None else [query, *kv.unbind(dim)]
    parts = [query, key, value, *qkv.unbind(dim)] if qkv is not None else parts
    tensors = tuple(x for x in parts if x is not None)
    if len(tensors) != 3 or (kv is not None and (key is not None or value is not None)):
        raise ValueError("pass query_layer, key_layer and value_layer, or qkv_layer alone, or query_layer and kv_layer")
    return tensors
