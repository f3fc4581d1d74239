"""Protocols of a local kernel: attention of this rank's queries against one key shard after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...kernels import Bounds, KernelConfig, Scores
from ...kernels.checks import DTYPES, MAX_HEAD_DIM
from ...kernels.launch import Pair
from ...validators import short_repr

FEATURES = {
    "bounds": "masks with an interval of keys per query row (causal, window_size, cu_seqlens, prefix_length)",
    "seqused_k": "a different number of keys in each batch row (seqused_k)",
    "block_sparse": "block-sparse masks (block_mask)",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
    "dropout_p": "dropout_p",
    "learnable_sink": "a start state before the first key (learnable_sink)",
    "state": "a running state; without it every shard gets a new forward, and the ring merges the results",
    "return_max_logits": "return_max_logits",
    "backward": "gradients",
    "lse_gradient": "a gradient through lse",
    "nan_inputs": "NaN in q, k or v; without it a NaN in lse counts as an error of the kernel",
    "config": "config, which sets the tiles of the Triton kernels",
}
"""Features of local kernels, with the text that completes "backend does not support" in errors."""


@dataclass(frozen=True)
class Supports:
    """Capabilities of a local kernel. A call that needs more raises before anything is sent."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    head_dims: Container[int] = range(1, MAX_HEAD_DIM + 1)
    """Head dims of q and k."""
    value_dims: Container[int] | None = None
    """Head dims of v; None: the same as q and k."""
    features: Collection[str] = ()
    """Keys of :data:`FEATURES`."""

    def __post_init__(self) -> None:
        """Raise ValueError if a field has another type, or ``features`` a name that is not in :data:`FEATURES`."""
        for name, kind in (("devices", str), ("dtypes", torch.dtype), ("features", str)):
            values = getattr(self, name)
            is_collection = isinstance(values, Collection) and not isinstance(values, str)
            if not is_collection or any(type(x) is not kind for x in values):
                raise ValueError(f"{name} is {short_repr(values)}: it must be a tuple of {kind.__name__}")
        for name, dims in {"head_dims": self.head_dims, "value_dims": self.value_dims or ()}.items():
            if isinstance(dims, str) or not isinstance(dims, Container):
                raise ValueError(f"{name} is {short_repr(dims)}: it must be a container of head dims")
        object.__setattr__(self, "features", frozenset(self.features))
        if unknown := sorted({*self.features} - FEATURES.keys()):
            raise ValueError(f"features has {', '.join(unknown)}: it may contain only {', '.join(FEATURES)}")


class LocalForward(Protocol):
    """Forward of one call and one group of heads; keeps the softmax state between shards of keys."""

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, final: bool) -> None:
        """Add one shard of keys to the state.

        Called at least once per forward, and once for each shard and each part of the mask. A shard may come in
        several runs of keys.

        Args:
            k: ``[B, Sk, Hkv, D]``, any strides with a unit last one; Sk may be 0. Do not keep ``k`` or ``v``: their
                slot is overwritten after the work on the current stream.
            v: ``[B, Sk, Hkv, Dv]``.
            bounds: keys that each query row sees.
            scores: softcap, ALiBi and dropout of these heads.
            final: True for the last call of this method.
        """

    def result(self) -> Pair:
        """Return ``out [B, S, H, Dv]`` in q's dtype and ``lse [B, H, S]``, fp32, natural log, after the last shard.

        A row that has seen no key has ``out = 0`` and ``lse = -inf``.
        """


class LocalBackward(Protocol):
    """Backward of one call and one group of heads; keeps dQ between shards of keys.

    The ring first asks for dQ of this rank's own shard. Then it asks for dK/dV and dQ of every other shard, and last
    for dK/dV of the own shard. This order hides transfers behind compute. In a two-level ring the first shard of each
    node is treated like the own shard. A shard may come in several runs of keys, in the same order in both methods. A
    kernel that computes dQ, dK and dV at once may do so in either method.
    """

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, local: bool, final: bool) -> None:
        """Add one shard's part to dQ.

        Args:
            k: ``[B, Sk, Hkv, D]``, as in :meth:`LocalForward.fold`.
            v: ``[B, Sk, Hkv, Dv]``.
            bounds: keys that each query row sees.
            scores: softcap, ALiBi and dropout of these heads.
            local: True for the own shard.
            final: True for the last call of this method.
        """

    def dkdv(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, local: bool,
        accum: Callable[[], tuple[Tensor, ...]] | None, out: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Write dK and dV of one shard plus ``accum()`` to ``out``.

        ``accum`` waits for the network, so call it as late as possible. It may return ``out`` itself.
        """

    def result(self) -> Tensor:
        """Return dQ in q's dtype, after the last shard."""


@runtime_checkable
class LocalAttention(Protocol):
    """A local kernel, for ``ring_attention(..., backend=...)`` and :func:`register_backend`.

    Every call makes one forward per group of heads, and one backward from the results over all shards. Both may keep
    their arguments until the call ends.

    A kernel with the feature ``return_max_logits`` gets ``max_logits=True`` as one more argument of :meth:`forward` in
    calls that need it. Its forward then has a method ``max_logits()``, which returns the largest score of each head
    over all shards and rows, fp32 ``[H]``: after softcap and ALiBi, before dropout, and -inf for a head that sees no
    key.

    A kernel may also have two optional methods. ``check(q, v, *, scores, block, config)`` raises if a call does not
    fit; ``block`` is the block size of a block-sparse mask. ``delta(dout, out, dlse)`` returns
    ``rowsum(dout * out) - dlse``, fp32 ``[B, H, S]``.

    Example:
        >>> import torch
        >>> from ringattn import RectangleAttention, Supports, ring_attention
        >>> aten = torch.ops.aten
        >>> def forward(q, k, v, *, causal, scale):
        ...     q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ...     out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        ...     return out.transpose(1, 2), lse
        >>> def backward(dout, q, k, v, out, lse, *, causal, scale):
        ...     args = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        ...     grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, lse, 0.0, causal, scale=scale)
        ...     return tuple(x.transpose(1, 2) for x in grads)
        >>> kernel = RectangleAttention("sdpa", forward, backward, supports=Supports(devices=("cpu",)))
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4).requires_grad_()
        >>> ring_attention(q, k, v, causal=True, backend=kernel).sum().backward()
    """

    name: str
    """Name for error messages. Ranks compare it."""
    supports: Supports

    def forward(
        self, q: Tensor, *, softmax_scale: float, config: KernelConfig | None, start: Pair | None
    ) -> LocalForward:
        """Begin a forward of q ``[B, S, H, D]``.

        ``start`` is the fp32 state before the first key, ``(out [B, S, H, Dv], lse [B, H, S])``. The kernel may
        overwrite it.
        """

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *, softmax_scale: float,
        config: KernelConfig | None,
    ) -> LocalBackward:  # fmt: skip
        """Begin a backward. ``out`` and ``lse`` cover all shards; ``lse`` is -inf for a row that saw no key.

        ``dlse`` is the gradient of ``lse``, fp32 ``[B, H, S]``, or None.
        """
