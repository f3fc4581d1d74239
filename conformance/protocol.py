"""Protocol of targets: how a context-parallel attention says what it supports, shards its tokens and is called.

A target is named ``package.module`` or ``package.module:name``, or by the name of a ready adapter. A complete example,
which gathers all keys and values::

    # my_adapter.py, run as `ringattn conformance my_adapter`
    import torch
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_gather

    features = {"causal", "full", "contiguous", "float32", "gradients"}

    def attend(q, k, v, call):
        if call.world > 1:
            k, v = (torch.cat(all_gather(x), 1) for x in (k, v))
        mask = call.positions[:, None] >= torch.arange(call.tokens) if call.causal else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

Only ``attend`` is required. A plain function with the arguments of ``attend`` is a target, too. This module does not
import torch, because pytest loads it through the plugin.
"""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .cases import Case

AXES: dict[str, tuple[Any, ...]] = {
    "mask": ("causal", "full", "window", "two-sided window", "prefix", "padding"),
    "documents": ("none", "aligned", "ragged"),
    "scores": ("plain", "scale", "softcap", "sink", "alibi", "dropout"),
    "layout": ("contiguous", "zigzag", "striped", "uneven"),
    "world": (2, 1, 3, 4, 5, 6),
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ("4/2", "4/4", "6/1"),
    "gradients": ("out", "out and lse", "none"),
}
"""Values of every axis, the default first. Heads are query heads and key/value heads."""

HINTS = {
    "full": ("causal", "full"), "causal": ("causal",), "window": ("window",), "two-sided window": ("window", "causal"),
    "prefix": ("prefix",), "padding": ("pad", "seqused", "key_mask", "attn_mask"),
    "aligned documents": ("cu_seqlens", "document", "varlen", "packed"),
    "ragged documents": ("cu_seqlens", "document", "varlen", "packed"), "scale": ("scale",), "softcap": ("softcap",),
    "sink": ("sink", "s_aux"), "alibi": ("alibi",), "dropout": ("dropout",), "lse": ("lse", "logsumexp"),
    "gradients": ("grad", "backward"), "grouped heads": ("head", "gqa"), "float32": ("float32", "fp32", "dtype"),
    "bfloat16": ("bfloat16", "bf16", "dtype"), "float16": ("float16", "fp16", "half", "dtype"),
    "contiguous": ("layout", "contiguous"), "zigzag": ("layout", "zigzag", "balanc"), "striped": ("layout", "strip"),
    "uneven": ("layout", "uneven", "divi", "multiple", "length", "token"),
}  # fmt: skip
"""Features that a call may use, and the words of which a refusal must contain one to name the feature."""
EVERY_CALL_HINTS = ("rank", "world", "parallel", "head", "length")
"""Words that name what every call has."""


@dataclass(frozen=True)
class TargetCall:
    """One rank's call. Tensors are ``[B, S, H, D]`` with this rank's tokens; ``lse`` is ``[B, H, S]``, natural log.

    Attributes:
        rank, world: this rank and the number of ranks; ``group`` is their process group, None for the default one.
        tokens, positions: tokens of the whole sequence, and the positions of this rank's tokens.
        layout: ``contiguous``, ``zigzag``, ``striped`` or ``uneven`` (contiguous shards of unequal lengths).
        features: the keys of :data:`HINTS` that the call uses.
        window_size: keys visible left and right of the query; -1 for no limit. All masks apply together. A query that
            sees no key has ``out = 0`` and ``lse = -inf``.
        prefix_length: number of first positions that a causal mask shows to every query.
        cu_seqlens: boundaries of packed documents in the whole sequence, the same for every batch row.
        seqused_k: valid keys of each batch row; the rest are padding.
        softmax_scale: factor of the scores; None for ``D ** -0.5``.
        softcap, alibi_slopes: if given, ``softcap * tanh(score / softcap)``, then minus ``slope[h] * |query - key|``.
        sink: one more score of every row, ``[H]``. It needs the gradient of this rank's rows, not summed over ranks.
        dropout_p, dropout_seed: weights to drop, by a rule that does not depend on the number of ranks.
        needs_lse: True if the target must return ``(out, lse)``; dropout does not change ``lse``.
    """

    rank: int
    world: int
    tokens: int
    layout: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    features: tuple[str, ...]
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    prefix_length: int = 0
    cu_seqlens: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    needs_lse: bool = False
    group: Any = None
    positions: Any = None


class Adapter(Protocol):
    """Object or module that describes a target. Every member but ``attend`` is optional.

    - ``features``: the keys of :data:`HINTS` that it says it supports; default: all.
    - ``supports(call)``: the reason why a call is outside what it says it supports, or an empty text.
    - ``positions(call)``: positions of the tokens of ``call.rank``; default: those of ``call.layout``.
    - ``version``: what is tested. An earlier run is continued only if it is the same.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: TargetCall) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``out``, or ``(out, lse)``, of this rank's tokens; raise ValueError or NotImplementedError to refuse.

        A refusal must name the feature. The referee differentiates through ``out`` and ``lse``.
        """


READY = {
    "ringattn": "ours", "lucidrains": "lucidrains", "zhuzilin": "flash_rings:fixed", "usp": "flash_rings:usp",
    "zhuzilin-varlen": "flash_rings:varlen", "torch-sdpa": "torch_rings:sdpa", "torch-flex": "torch_rings:flex",
    "transformers": "torch_rings:accelerate", "accelerate": "torch_rings:accelerate", "megatron": "megatron",
    "diffusers": "torch_rings:diffusers",
}  # fmt: skip
"""Module of :mod:`.adapters` of every ready adapter, by name."""


def resolve_path(target: str) -> str:
    """Return the import path of a target, which may be the name of a ready adapter."""
    return f"{__package__}.adapters.{READY[target]}" if target in READY else target


@dataclass(frozen=True)
class Target:
    """A loaded target with the defaults of :class:`Adapter`."""

    adapter: Any
    device: Any = "cpu"
    file: str | None = None
    """File of its module."""

    @property
    def version(self) -> str:
        """The adapter's ``version``, which may be a function; without one, a checksum of its file."""
        if hasattr(self.adapter, "version"):
            return str(self.adapter.version() if callable(self.adapter.version) else self.adapter.version)
        return f"source {zlib.crc32(Path(self.file).read_bytes()):08x}" if self.file else ""

    def refusal(self, case: Case) -> str:
        """Return why a case is outside what the target says it supports, or an empty text."""
        if missing := sorted(case.features - {*getattr(self.adapter, "features", HINTS)}):
            return f"it does not say that it supports {', '.join(missing)}"
        return str(self.adapter.supports(case.call()) or "") if hasattr(self.adapter, "supports") else ""

    def positions(self, call: TargetCall) -> Tensor:
        """Return the positions of the tokens of ``call.rank``.

        Raises:
            MisuseError: If they are not in a row, or not below ``call.tokens``.
        """
        import torch

        from .standalone import MisuseError, default_positions

        positions = torch.as_tensor(getattr(self.adapter, "positions", default_positions)(call)).long()
        if positions.dim() != 1 or not ((positions >= 0) & (positions < call.tokens)).all():
            raise MisuseError(f"positions of rank {call.rank} are not one row of numbers from 0 to {call.tokens - 1}")
        return positions


def load_target(target: str) -> Target:
    """Import a target by its path or by the name of its adapter; the current folder is searched, too.

    Raises:
        ValueError: If it cannot be imported, or if it has no ``attend`` and cannot be called.
    """
    path = resolve_path(target)
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        imported = import_module(module)
        adapter: Any = getattr(imported, name) if name else imported
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"TARGET is {target!r}: it cannot be imported: {type(error).__name__}: {error}") from None
    if not hasattr(adapter, "attend"):
        if isinstance(adapter, ModuleType) or not callable(adapter):
            raise ValueError(f"TARGET is {target!r}: {path} has no function attend and is no function.")
        adapter = SimpleNamespace(attend=adapter)
    return Target(adapter, file=imported.__file__)
