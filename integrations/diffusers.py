"""diffusers: attention backend ``"ringattn"``, for models on one device and under context parallelism.

Read in diffusers 0.42.1: ``models/attention_dispatch.py``, ``models/_modeling_parallel.py`` and
``hooks/context_parallel.py``.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models._modeling_parallel import gather_size_by_comm
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from .. import Layout, LayoutLike, ring_attention, single_rank
from ..comm import GroupLike
from . import unit_stride

__all__ = ["register"]

NAME = "ringattn"
KNOWN = "0.42."
ALONE = single_rank()  # made here: torch.compile does not trace how


class _EveryName(set[str]):
    """diffusers drops arguments that a backend does not name; of these none is dropped, and an unknown one raises."""

    def __contains__(self, name: object) -> bool:
        return True


def register() -> None:
    """Add the backend ``"ringattn"``, for ``set_attention_backend``, ``attention_backend`` and context parallelism.

    ``ContextParallelConfig(ring_degree=, ulysses_degree=)`` with either or both, ``ring_anything`` and
    ``ulysses_anything`` for shards that are not equal, whose lengths the ranks gather in each call. Tokens are counted
    in the order of the ranks' shards, as the model's plan cuts them; with a causal mask that is the order of the
    sequence where one sequence is sharded, and not where text and image tokens are, each by itself. A call without a
    parallel config, as the cross-attention of models that keep the whole text on every rank, is attention on this
    device alone. K/V travel from rank to rank; what ``rotate_method`` says has no effect on that.

    Of ``attention_kwargs`` it takes ``window_size``, ``softcap``, ``learnable_sink`` and ``return_lse`` (``lse`` is
    ``[B, S, H]``, as diffusers has it).

    Raises:
        RuntimeError: the version of diffusers is not 0.42: what is added to is private there, and may have changed.
    """
    version = diffusers.__version__
    if not version.startswith(KNOWN):
        raise RuntimeError(
            f"diffusers is {version}: ringattn.integrations.diffusers is written for {KNOWN}x, whose registry of "
            "backends is private; install that, or call ringattn.ring_attention in an attention processor of your own"
        )
    if NAME not in AttentionBackendName._value2member_map_:
        _add_member(NAME.upper(), NAME)
    backend = AttentionBackendName(NAME)
    _AttentionBackendRegistry.register(backend, supports_context_parallel=True)(_attention)
    _AttentionBackendRegistry._supported_arg_names[backend] = _EveryName(
        _AttentionBackendRegistry._supported_arg_names[backend]
    )


def _add_member(name: str, value: str) -> None:
    """One more member of the enumeration by which diffusers looks backends up; it has no public way to add one."""
    member = str.__new__(AttentionBackendName, value)
    member._name_, member._value_ = name, value
    AttentionBackendName._member_names_.append(name)
    AttentionBackendName._member_map_[name] = member
    AttentionBackendName._value2member_map_[value] = member


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``[B, S, H, D]`` of this rank, as ``dispatch_attention_fn`` calls every backend."""
    if attn_mask is not None:
        raise NotImplementedError(
            f"attn_mask is a {type(attn_mask).__name__} with the attention backend {NAME!r}: it must be None. Leave "
            "padding out of the tokens, or use another backend; a window is attention_kwargs={'window_size': (l, r)}"
        )
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} heads, query has {query.shape[2]}: pass enable_gqa=True for grouped heads"
        )
    context = None if _parallel_config is None else _parallel_config.context_parallel_config
    results = ring_attention(
        unit_stride(query),
        unit_stride(key),
        unit_stride(value),
        layout=_layout(context, query.shape[1]),
        kv_layout=_layout(context, key.shape[1]),
        group=_group(context),
        causal=is_causal,
        window_size=window_size,
        softmax_scale=scale,
        softcap=softcap,
        learnable_sink=learnable_sink,
        dropout_p=dropout_p,
        return_lse=return_lse,  # over a mesh it is exchanged, too
    )
    return results if isinstance(results, torch.Tensor) else (results[0], results[1].transpose(1, 2))


def _group(context: Any) -> GroupLike:
    """The ranks that share a sequence: a ring, or a mesh of rings and of ranks that exchange heads for tokens."""
    if context is None:
        return ALONE
    if not context.convert_to_fp32:
        raise NotImplementedError(
            f"convert_to_fp32 is False with the attention backend {NAME!r}: partial results are kept in fp32 always; "
            "leave it True"
        )
    mesh: GroupLike = context._ring_mesh if context.ulysses_degree == 1 else context._mesh["ring", "ulysses"]
    return mesh


def _layout(context: Any, tokens: int) -> LayoutLike:
    """One run of tokens per rank, in the order of the mesh; of other lengths only where the plan cuts unevenly."""
    if context is not None and (context.ring_anything or context.ulysses_anything):
        return Layout.uneven(gather_size_by_comm(tokens, context._flattened_mesh.get_group()))
    return "contiguous"
