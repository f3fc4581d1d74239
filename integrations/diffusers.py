"""Attention backend ``"ringattn"`` for diffusers, on one device and under context parallelism.

The module follows ``models/attention_dispatch.py``, ``models/_modeling_parallel.py`` and
``hooks/context_parallel.py`` of diffusers 0.42.1.
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
SUPPORTED_VERSION = "0.42."
SINGLE_RANK = single_rank()  # created at import, because torch.compile cannot trace its creation


class _AnyArgName(set[str]):
    """Set of argument names that contains every name.

    diffusers silently drops the arguments that a backend does not list. With this set it passes all of them on, so an
    unsupported argument raises TypeError.
    """

    def __contains__(self, name: object) -> bool:
        return True


def register() -> None:
    """Register the backend ``"ringattn"`` for ``set_attention_backend`` and ``attention_backend``.

    ``ContextParallelConfig`` may set ``ring_degree``, ``ulysses_degree`` or both. With ``ring_anything`` or
    ``ulysses_anything`` the shards may differ in length, and the ranks gather the lengths in each call.
    ``rotate_method`` has no effect: K/V are always sent from rank to rank.

    Token positions follow the order of the ranks' shards, as the model's plan splits them. A causal mask is therefore
    right if one sequence is sharded. It is wrong if text and image tokens are sharded separately and then joined.

    A call without a parallel config is plain attention on this device. Examples are the cross-attention layers of
    models that keep the whole text on every rank.

    ``attention_kwargs`` may contain ``window_size``, ``softcap``, ``learnable_sink`` and ``return_lse``. ``lse`` is
    ``[B, S, H]``, as in diffusers.

    Raises:
        RuntimeError: The version of diffusers is not 0.42. Other versions may differ in the private registry.
    """
    version = diffusers.__version__
    if not version.startswith(SUPPORTED_VERSION):
        raise RuntimeError(
            f"diffusers is {version}: ringattn.integrations.diffusers needs {SUPPORTED_VERSION}x, because it uses the "
            "private registry of backends. Install that version, or call ringattn.ring_attention in your processor."
        )
    if NAME not in AttentionBackendName._value2member_map_:
        _add_member(NAME.upper(), NAME)
    backend = AttentionBackendName(NAME)
    _AttentionBackendRegistry.register(backend, supports_context_parallel=True)(_attention)
    _AttentionBackendRegistry._supported_arg_names[backend] = _AnyArgName(
        _AttentionBackendRegistry._supported_arg_names[backend]
    )


def _add_member(name: str, value: str) -> None:
    """Add a member to the enum in which diffusers looks up backends, because no public API does."""
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
    """Compute attention of this rank's tokens ``[B, S, H, D]`` with the arguments of ``dispatch_attention_fn``."""
    if attn_mask is not None:
        raise NotImplementedError(
            f"attn_mask is a {type(attn_mask).__name__}: it must be None for the attention backend {NAME!r}. Remove "
            "padding tokens, pass attention_kwargs={'window_size': (left, right)} for a window, or use another backend."
        )
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} heads and query has {query.shape[2]}; pass enable_gqa=True for grouped heads"
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
        return_lse=return_lse,
    )
    return results if isinstance(results, torch.Tensor) else (results[0], results[1].transpose(1, 2))


def _group(context: Any) -> GroupLike:
    """Return the ranks that share a sequence: this rank alone, a ring, or a mesh of ring x Ulysses."""
    if context is None:
        return SINGLE_RANK
    if not context.convert_to_fp32:
        raise NotImplementedError(
            f"convert_to_fp32 is False: it must be True, because the attention backend {NAME!r} accumulates in fp32"
        )
    mesh: GroupLike = context._ring_mesh if context.ulysses_degree == 1 else context._mesh["ring", "ulysses"]
    return mesh


def _layout(context: Any, tokens: int) -> LayoutLike:
    """Return a layout with one run of tokens per rank, in mesh order; runs differ only with ``*_anything``."""
    if context is not None and (context.ring_anything or context.ulysses_anything):
        return Layout.uneven(gather_size_by_comm(tokens, context._flattened_mesh.get_group()))
    return "contiguous"
