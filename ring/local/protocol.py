"""What a local kernel fulfils: attention of this rank's queries, one key shard after the other."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...kernels import Bounds, KernelConfig, Scores
from ...kernels.checks import DTYPES, MAX_HEAD_DIM
from ...kernels.launch import Pair

FEATURES = {
    "bounds": "masks that are an interval of keys per query row: causal, window, documents, prefix",
    "seqused_k": "a number of keys per batch row (seqused_k)",
    "block_sparse": "block-sparse masks (block_mask)",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
    "dropout_p": "dropout_p",
    "learnable_sink": "a state before the first key (learnable_sink)",
    "state": "a state that goes from fold to fold; without it every fold gets a new forward, and the ring merges",
    "backward": "gradients",
    "lse_gradient": "a gradient through lse",
    "nan_inputs": "NaN in q, k or v; without it a NaN in lse is taken for an error of the kernel",
    "config": "config, the tiles of the Triton kernels",
}


@dataclass(frozen=True)
class Supports:
    """What a local kernel computes. A call that needs more is refused before anything is sent."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    head_dims: Container[int] = range(1, MAX_HEAD_DIM + 1)
    """Head dims of q and k."""
    value_dims: Container[int] | None = None
    """Head dims of v; None: that of q and k alone."""
    features: Iterable[str] = ()
    """Keys of :data:`FEATURES`."""

    def __post_init__(self) -> None:
        """ValueError: a feature that there is not."""
        object.__setattr__(self, "features", frozenset(self.features))
        if unknown := sorted({*self.features} - FEATURES.keys()):
            raise ValueError(f"features has {', '.join(unknown)}: it may have {', '.join(FEATURES)}")


class LocalForward(Protocol):
    """The forward of one call and one chunk of heads."""

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, final: bool) -> None:
        """Add one shard of keys; at least once in a call, several times for one shard where a mask has parts.

        Args:
            k: ``[B, Sk, Hkv, D]``, any strides with a unit last one; Sk may be 0. Do not keep it, or ``v``: its slot
                is filled anew once the work on the current stream is done.
            v: ``[B, Sk, Hkv, Dv]``.
            bounds: which of these keys each query row sees.
            scores: softcap, ALiBi and dropout of these heads.
            final: True in the last fold of the call.
        """

    def result(self) -> Pair:
        """Return ``out [B, S, H, Dv]`` in q's dtype and ``lse [B, H, S]``, fp32, natural log, after the last fold.

        A row that has seen no key has ``out = 0`` and ``lse = -inf``.
        """


class LocalBackward(Protocol):
    """The backward of one call and one chunk of heads.

    The ring asks for dQ of this rank's own shard first, for dK/dV and then dQ of every other, and for dK/dV of the own
    shard last, so that transfers hide behind compute. In a two-level ring the first shard of every node is treated
    like the own one. A kernel that computes all three at once may do so in either method.
    """

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, local: bool, final: bool) -> None:
        """Add one shard's part to dQ; ``local``: the own shard, ``final``: the last."""

    def dkdv(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, local: bool,
        accum: Callable[[], tuple[Tensor, ...]] | None, out: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Write one shard's dK and dV plus ``accum()`` to ``out``.

        ``accum`` waits for the network: call it as late as possible. Its tensors may be ``out`` itself.
        """

    def result(self) -> Tensor:
        """Return dQ in q's dtype, after the last shard."""


@runtime_checkable
class LocalAttention(Protocol):
    """A local kernel, for ``ring_attention(..., backend=...)`` and :func:`register_backend`.

    Every call makes one forward, and one backward with the results over all shards, for each chunk of heads. They may
    keep what they are made of for as long as the call lasts. Besides, a kernel may have two methods: ``check(q, v, *,
    scores, block, config)``, which raises where a call does not fit (``block``: positions per block of a block-sparse
    mask), and ``delta(dout, out, dlse)``, its own ``rowsum(dout * out) - dlse``, fp32 ``[B, H, S]``.

    Example:
        >>> import torch
        >>> from ringattn import RectangleAttention, Supports, ring_attention
        >>> aten = torch.ops.aten
        >>> def forward(q, k, v, *, causal, scale):
        ...     q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ...     out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        ...     return out.transpose(1, 2), lse
        >>> def backward(dout, q, k, v, out, lse, *, causal, scale):
        ...     given = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        ...     grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse, 0.0, causal, scale=scale)
        ...     return tuple(x.transpose(1, 2) for x in grads)
        >>> kernel = RectangleAttention("sdpa", forward, backward, supports=Supports(devices=("cpu",)))
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4).requires_grad_()
        >>> ring_attention(q, k, v, causal=True, backend=kernel).sum().backward()
    """

    name: str
    """What ranks compare, and errors say."""
    supports: Supports

    def forward(
        self, q: Tensor, *, softmax_scale: float, config: KernelConfig | None, start: Pair | None
    ) -> LocalForward:
        """Begin a forward of q ``[B, S, H, D]``.

        ``start`` is the state before any key, ``(out [B, S, H, Dv], lse [B, H, S])``, fp32, which may be written to.
        """

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *, softmax_scale: float,
        config: KernelConfig | None,
    ) -> LocalBackward:  # fmt: skip
        """Begin a backward from the results over all shards; a row of ``lse`` that saw no key is -inf."""
