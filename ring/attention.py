"""The public function ``ring_attention``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack, overload

import torch

from ..comm import GroupLike
from ..kernels import KernelConfig
from ..kernels.checks import check_not_dtensor
from ..validators import FLAG
from .args import IntervalsLike, Options, take_args, unknown_keyword
from .local.protocol import LocalAttention
from .mesh import Rings, resolve_call_ranks
from .ops import RingAttention, call_forward_op, pack_call_handle
from .prepare import Call, autocast_inputs, check_tensors, prepare_call
from .ring import Ring, call_device
from .schedule.layout import LayoutLike
from .schedule.mask import BlockMask, Longformer

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False, **options: Unpack[Options],
) -> torch.Tensor: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
    return_max_logits: Literal[False] = False, **options: Unpack[Options],
) -> Pair: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool,
    return_max_logits: Literal[False] = False, **options: Unpack[Options],
) -> torch.Tensor | Pair: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
    return_max_logits: Literal[True], **options: Unpack[Options],
) -> Pair: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
    return_max_logits: Literal[True], **options: Unpack[Options],
) -> Triple: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, return_max_logits: bool,
    **options: Unpack[Options],
) -> torch.Tensor | Pair | Triple: ...  # fmt: skip


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: LayoutLike = None,
    ring: Ring | None = None,
    group: GroupLike = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    first_head: int = 0,
    cu_seqlens: Iterable[int] | Sequence[Sequence[int]] | torch.Tensor | None = None,
    seqused_k: Iterable[int] | torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    leftpad_k: Iterable[int] | torch.Tensor | None = None,
    prefix_length: int | None = None,
    islands: Iterable[tuple[int, int]] | torch.Tensor | None = None,
    block_mask: torch.Tensor | BlockMask | Longformer | None = None,
    intervals: IntervalsLike | None = None,
    kv_layout: LayoutLike = None,
    align: Literal["top-left", "bottom-right"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | LocalAttention = "auto",
    config: KernelConfig | None = None,
    **unknown: object,
) -> torch.Tensor | Pair | Triple:
    """Compute exact attention of this rank's queries over the keys of all ranks: ``softmax(scale * q k^T) v``.

    Ring Attention (Liu et al., arXiv:2310.01889): K/V visit one rank after the other while each rank computes. The
    softmax state of FlashAttention (arXiv:2205.14135, algorithm 1) is carried from hop to hop in fp32. Every rank of
    the group calls this function with its own shard. Up to rounding, the result does not depend on the number of ranks.

    Args:
        q: this rank's queries ``[B, S, H, D]``; float16, bfloat16 or float32; any strides with a unit last one.
        k: this rank's keys ``[B, Sk, Hkv, D]``; ``Sk = S`` without ``kv_layout``; ``H`` is a multiple of ``Hkv``. Query
            head h reads key head ``h // (H // Hkv)``, as in FlashAttention. To read key head ``h % Hkv`` instead, pass
            ``q.unflatten(2, (-1, Hkv)).transpose(2, 3).flatten(2, 3)``, and convert the result back with
            ``out.unflatten(2, (Hkv, -1)).transpose(2, 3).flatten(2, 3)``.
        v: this rank's values ``[B, Sk, Hkv, Dv]``.
        layout: global positions that each rank holds: a :class:`Layout`, or ``contiguous``, ``zigzag`` or ``striped``
            for equal shards. Required with more than one rank.
        ring: a :class:`Ring` with its own settings, which keeps transport and slots between calls. Default: one per
            group. With a two-dimensional ``group``, a ring of the first dimension.
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a ``LocalWorld`` member. None means the
            default group if ``torch.distributed`` is initialised, and otherwise a single device, like
            :func:`ringattn.single_rank`. With a two-dimensional DeviceMesh, ``("ring", "ulysses")`` or unnamed, K/V
            move along the first dimension, and an all-to-all along the second exchanges heads for tokens. With virtual
            ranks use ``member.mesh(ring, ulysses)``. Rank ``r * U + u`` of the layouts is the rank at ``[r, u]``. U
            must divide ``H``, and one of U and ``Hkv`` must divide the other.
        causal: the query at position p sees the keys at positions up to p.
        window_size: ``(left, right)``: the query at p sees the keys at positions p - left to p + right, both included.
            -1 or None means no limit on that side. With ``causal``, no key after p is visible, whatever ``right`` is.
        softmax_scale: factor of ``q k^T`` before the exponential, 1e-30 to 1e30; default ``1 / sqrt(D)``. Scores far
            above 1e4 give meaningless gradients, because the backward recomputes ``exp(score - lse)``.
        softcap: ``cap``, 1e-8 to 1e30, replaces the scaled score s by ``cap * tanh(s / cap)``. 0 or None: off.
        learnable_sink: ``[H]``, one extra logit per head, without a value. It is part of the softmax and of ``lse``.
            Its gradient is this rank's part; reduce it over the ranks like that of any replicated parameter.
        alibi_slopes: ``[H]`` or ``[B, H]``, fp32. Adds ``-slope * |p_q - p_k|``, with global positions, to the score
            after the softcap. No gradient.
        dropout_p: probability that a weight is dropped, 0 to below 1. The other weights are divided by
            ``1 - dropout_p``. ``lse`` is computed before dropout. Philox4x32-10 (Salmon et al., SC11) chooses them from
            seed, positions, head and batch row. Therefore the choice is equal for every number of ranks, layout and
            backend.
        dropout_seed: 64 bits. None: rank 0 draws a seed from torch's generator and sends it to the others, one round
            trip through the group's store. In a torch.compile graph every rank draws a seed, and rank 0's counts.
            Virtual ranks share one generator, so pass a seed if runs must be reproducible.
        first_head: global index of this rank's first query head, 0 to 2^31 - 1, if heads are sharded (tensor
            parallelism). Dropout uses global head indices, so that shards with one seed drop different weights. Equal
            on all ranks of the group; over a mesh at most ``2^31 - H``.
        cu_seqlens: boundaries ``[0, ..., seqlen]`` of documents packed into the sequence, as global positions. A query
            sees only keys of its own document. A list or a CPU tensor; any lengths are allowed. Or one such list per
            batch row (``[B][documents + 1]``, of any lengths), or a CPU tensor ``[B, n]``.
        seqused_k: ``[B]``, on the host like ``cu_seqlens``: keys at this global position and later are padding.
        key_mask: bool ``[B, keys of all ranks]`` on the CPU, by position. False hides the key from its batch row.
        leftpad_k: ``[B]``, on the host: keys before this global position are padding (as in FlashAttention).
        prefix_length: number of positions at the start that ``causal`` hides from no query (prefix-LM).
        islands: ascending, disjoint ranges ``(begin, end)`` of global positions, on the host. ``causal`` hides no key
            inside a range, such as the tokens of an image (Gemma 3, PaliGemma). All other masks apply, so pass -1 as
            the right side of ``window_size``. A range must lie in one document.
        block_mask: bool ``[query blocks, key blocks]`` over global positions, on the CPU, with blocks of equal size. Or
            a ``ring.BlockMask``, which states the block size and can be reused between calls. Or the result of
            ``ring.strided``, ``fixed``, ``bigbird`` or ``longformer``. The spans of the layouts must be whole blocks.
            The kernels take block sizes that are multiples of 16, and shrink their default tiles to divide them.
        intervals: list of at most 64 ``(lo, hi)``, int32 or int64 CPU tensors ``[positions of the queries]``: the query
            at position p sees the keys at positions ``lo[p]`` to ``hi[p] - 1`` of each pair. The intervals of a query
            are disjoint. Neither end of a pair decreases among the queries that see a key in it. A ``ring.Intervals``
            is checked once and can be reused. ``ring.slices`` and ``ring.prefix_tree`` make it.
        kv_layout: positions of the keys of each rank, if they differ from those of the queries: cross-attention, or
            queries behind a cache.
        align: alignment of queries and keys if their numbers differ and ``layout`` and ``kv_layout`` (default: the same
            name) both count from 0. ``bottom-right``: query i is at key position ``i + keys - queries``, so that the
            last query sees all keys (``causal`` of FlashAttention since 2.1). ``top-left``: query i is at key position
            i. None: different lengths need a ``kv_layout``.
        return_lse: also return ``lse``, which is differentiable.
        return_max_logits: also return ``max_logits``, for QK-clip. It has no gradient. Ranks exchange it after the
            forward, one fp32 number per head. On the CPU, ``out`` may then differ in its last bits.
        backend: ``triton`` (GPU; on the CPU only under Triton's interpreter), ``aten`` (CPU: PyTorch's own
            flash-attention operator), ``auto``, a kernel of another project (``flash``, ``cudnn``, ``fa3``, ``fa4``:
            see docs/kernels.md), a name given to :func:`register_backend`, or a :class:`LocalAttention`.
        config: tiles of the Triton kernels; by default chosen by GPU and shape.
        **unknown: must be empty; an unknown keyword raises a TypeError that suggests the right one.

    Returns:
        ``out [B, S, H, Dv]`` in q's dtype; with ``return_lse`` also ``lse [B, H, S]``, fp32, natural logarithm. A row
        that sees no key has ``out = 0`` and ``lse = -inf`` (with a sink, ``lse`` is the sink). On the CPU ``lse`` of
        float16 and bfloat16 may be off by 1e-4, because PyTorch's operator approximates the exponential.

        With ``return_max_logits``, the last result is ``max_logits [H]``, fp32, equal on all ranks: for each head of q
        the largest score of all visible pairs, over the batch and the whole sequence. The score is that of the softmax,
        as in TransformerEngine: ``softmax_scale * q k^T``, after ``softcap`` and ALiBi, without the sink and before
        dropout. With a softcap it is therefore at most the cap. A head that sees no key has -inf, and a head with a
        NaN in ``lse`` has NaN.

    If ``cu_seqlens``, ``key_mask`` or ``leftpad_k`` let batch rows see different keys, the rows are packed into one
    sequence, each as its own document. Hidden keys are not sent. Rounding of ``out`` and the positions that dropout
    uses are then those of the packed sequence: ``row * positions of a row + position``, in batch row 0. Both are still
    equal for every number of ranks and layout. ``block_mask``, ``intervals`` and ``islands`` are not supported with
    packed rows. With more than one row, ``prefix_length`` and ``alibi_slopes [B, H]`` are not supported either.
    Documents that all rows share, and padding behind all keys (``seqused_k``), need no packing.

    Ranks compare their arguments before anything is sent, except for values in device tensors: ``learnable_sink`` and
    ``alibi_slopes`` must be equal on all ranks. If several mask arguments are given, a key is visible only if all of
    them allow it. Under autocast q, k and v are cast as in ``scaled_dot_product_attention``. A second derivative
    raises.

    Raises:
        TypeError: a keyword does not exist; the message suggests the right one.
        ValueError: an argument does not fit. Raised before anything is sent; the message names the argument, what it
            got and what it takes. If the ranks disagree, every rank raises it.
        NotImplementedError: ``backend="triton"`` on the CPU without Triton's interpreter, or with bfloat16, which the
            interpreter reads as integers; or the call is inside a torch.func transform.
    """
    if unknown:
        raise unknown_keyword(next(iter(unknown)))
    args = take_args(locals())
    if torch.compiler.is_compiling():
        for name, value in (("q", q), ("k", k), ("v", v), *args._asdict().items()):
            check_not_dtensor(name, value)
        q, k, v = autocast_inputs(q, k, v)
        traced = call_forward_op(q, k, v, args, ring, group)
        return _chosen_results(
            traced[0], traced[1] if return_lse else None, traced[2] if args.return_max_logits else None
        )
    device = call_device(q, k, v)
    ranks = resolve_call_ranks(group, device, ring)
    with ranks._call_guard(device):
        check_tensors(q, k, v, args)
        return_lse = FLAG.check("return_lse", return_lse)
        q, k, v = autocast_inputs(q, k, v)
        needs_grad = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, learnable_sink)]
        call = Call(args, ranks, {"gradient": any(needs_grad)})
        if isinstance(ranks, Rings):
            call.compared_fields = {"gradient": (any(needs_grad[:3]), any(needs_grad)), "return_lse": return_lse}
            prepare_call(call, q, k, v)
        if call.exchange is not None:
            q, k, v = call.exchange.gather_tokens(call.exchange_number, q, k, v)
    # Outside the guard, because saved-tensor hooks raise on purpose: checkpointing stops its recomputation that way.
    results: Any = RingAttention.apply(None, q, k, v, *pack_call_handle(call))  # type: ignore[no-untyped-call]
    out, lse, max_logits = results[0], results[1] if return_lse else None, results[2]
    if call.exchange is not None:
        del q, k, v, results  # free memory for the exchange
        out, lse, max_logits = call.exchange.gather_heads(out, lse, max_logits)
    return _chosen_results(out, lse, max_logits if call.args.return_max_logits else None)


def _chosen_results(
    out: torch.Tensor, lse: torch.Tensor | None, max_logits: torch.Tensor | None
) -> torch.Tensor | Pair | Triple:
    """Return the results that are not None: ``out`` alone, or a tuple."""
    results: Any = (out, *(x for x in (lse, max_logits) if x is not None))
    return results if len(results) > 1 else out
