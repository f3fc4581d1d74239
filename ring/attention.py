"""``ring_attention``: what a user calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack, overload

import torch

from ..comm import GroupLike
from ..kernels import KernelConfig
from ..kernels.checks import check_local
from ..kinds import FLAG
from .args import Options, take_args, unknown_keyword
from .local.protocol import LocalAttention
from .mesh import Rings, ranks_of
from .ops import RingAttention, pack_handle, traced
from .prepare import Call, autocast, check_tensors, prepare
from .ring import Ring, device_of
from .schedule.layout import LayoutLike
from .schedule.mask import BlockMask, Longformer


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> torch.Tensor: ...


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


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
    block_mask: torch.Tensor | BlockMask | Longformer | None = None,
    kv_layout: LayoutLike = None,
    align: Literal["top-left", "bottom-right"] | None = None,
    return_lse: bool = False,
    backend: str | LocalAttention = "auto",
    config: KernelConfig | None = None,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of this rank's queries over the keys of all ranks: ``softmax(scale * q k^T) v``.

    Ring Attention (Liu et al., arXiv:2310.01889): K/V visit the ranks one after the other while each computes; the
    softmax state of FlashAttention (arXiv:2205.14135, algorithm 1) is carried from hop to hop in fp32. Every rank of
    the group calls it with its own shard; the result does not depend on the number of ranks, up to rounding.

    Args:
        q: this rank's queries ``[B, S, H, D]``; float16, bfloat16 or float32; any strides with a unit last one.
        k: this rank's keys ``[B, Sk, Hkv, D]``, ``Sk = S`` without ``kv_layout``; ``H`` is a multiple of ``Hkv``. Query
            head h reads key head ``h // (H // Hkv)``, as in flash-attention. Where it is to read ``h % Hkv``, pass
            ``q.unflatten(2, (-1, Hkv)).transpose(2, 3).flatten(2, 3)``, and take ``out`` back by
            ``out.unflatten(2, (Hkv, -1)).transpose(2, 3).flatten(2, 3)``.
        v: this rank's values ``[B, Sk, Hkv, Dv]``.
        layout: which global positions each rank holds: a :class:`Layout`, or ``contiguous``, ``zigzag`` or ``striped``
            for equal shards; required with more than one rank.
        ring: keeps transport and slots between calls; by default one per group. Beside a ``group`` of two dimensions
            one of the first.
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a ``LocalWorld`` member; None is the
            default group where ``torch.distributed`` is initialised, else one device alone, which
            :func:`ringattn.single_rank` is always. A DeviceMesh of two dimensions, ``("ring", "ulysses")`` or without
            names, exchanges heads for tokens inside the second, by all-to-all, and the ring runs along the first (of
            virtual ranks ``member.mesh(ring, ulysses)``): rank ``r * U + u`` of the layouts is the one at ``[r, u]``.
            U divides ``H``, and ``Hkv`` or the other way round.
        causal: the query at position p sees the keys at positions up to p.
        window_size: ``(left, right)``: it sees the keys at positions p - left to p + right, both included; -1 or
            None: no end on that side. With ``causal`` nothing after p, whatever ``right``.
        softmax_scale: factor of ``q k^T`` before the exponential, 1e-30 to 1e30; default ``1 / sqrt(D)``. Scores far
            above 1e4 leave no gradient that means something: the backward makes weights of ``score - lse`` anew.
        softcap: ``cap``, 1e-8 to 1e30: the scaled score s becomes ``cap * tanh(s / cap)``; 0 or None: it does not.
        learnable_sink: ``[H]``, one more logit per row that takes part in the softmax and has no value; it counts in
            ``lse``. Its gradient is this rank's part, to be reduced like any replicated parameter's.
        alibi_slopes: ``[H]`` or ``[B, H]``, fp32: ``-slope * |p_q - p_k|``, of global positions, is added to the score,
            after the softcap. Without a gradient.
        dropout_p: weights that are dropped, 0 to below 1; the others are divided by ``1 - dropout_p``. ``lse`` is that
            before. Which ones is a function of seed, positions, head and batch row, by Philox4x32-10 (Salmon et al.,
            SC11): the same for every number of ranks, layout and backend.
        dropout_seed: 64 bits; None: rank 0 draws one from torch's generator and tells the others, a round trip through
            the group's store. In a graph every rank draws and rank 0's counts: virtual ranks share a generator, so
            give them a seed if it must repeat.
        first_head: number of this rank's first query head among those of the layer, 0 to 2^31 - 1, where heads are
            sharded (tensor parallelism): dropout counts them all, and with one seed no two shards drop alike. The same
            on all ranks of the group; in a mesh with ``H`` more at most 2^31.
        cu_seqlens: boundaries ``[0, ..., seqlen]`` of documents packed into the sequence, over global positions: a
            query sees keys of its own document only. A list or a CPU tensor; they need not divide by anything. Or such
            a list for each batch row (``[B][documents + 1]``, also of different lengths), or a CPU tensor ``[B, n]``.
        seqused_k: ``[B]``, host data as ``cu_seqlens``: keys at this global position and after it are padding.
        key_mask: bool ``[B, keys of all ranks]`` on the CPU, by position; False: the batch row has no key there.
        leftpad_k: ``[B]``, host data: keys before this global position are padding (flash-attention's name).
        prefix_length: positions at the start that ``causal`` hides from no query (prefix-LM).
        block_mask: bool ``[query blocks, key blocks]`` over global positions, on the CPU, whose blocks all have one
            size; a ``ring.BlockMask``, which says the size, and is made once and kept; or what one of the builders
            ``ring.strided``, ``fixed``, ``bigbird`` and ``longformer`` made. The spans of the layouts must be whole
            blocks. The kernels take blocks that are a multiple of 16, and cut their default tiles to divide them.
        kv_layout: which positions the keys of each rank have, where they are not the queries': cross-attention, or
            queries behind a cache.
        align: where there are more keys or fewer than queries, and ``layout`` and ``kv_layout`` (None: the same name)
            count both from 0: ``bottom-right``, query i is at position ``i + keys - queries`` of the keys, so that the
            last one sees all (``causal`` of flash-attention since 2.1), or ``top-left``, at position i. None: lengths
            that differ without ``kv_layout`` are refused.
        return_lse: also return ``lse``; it has a gradient.
        backend: ``triton`` (GPU; CPU tensors under Triton's interpreter alone), ``aten`` (CPU: PyTorch's own
            flash-attention operator), ``auto``, a name given to :func:`register_backend`, or a :class:`LocalAttention`.
        config: tiles of the Triton kernels; by default chosen by GPU and shape.

    Returns:
        ``out [B, S, H, Dv]`` in q's dtype; with ``return_lse`` also ``lse [B, H, S]``, fp32, natural logarithm. A row
        that sees no key has ``out = 0`` and ``lse = -inf`` (with a sink, ``lse`` is the sink). On the CPU ``lse`` of
        float16 and bfloat16 may be off by 1e-4: the exponential of PyTorch's operator is less than exact there.

    Where ``cu_seqlens``, ``key_mask`` or ``leftpad_k`` let batch rows see different keys, the rows are computed as one
    sequence, one after the other, each a document of its own, and hidden keys are not sent. ``out`` is then rounded as
    of that sequence, and dropout draws by positions in it, ``row * positions of a row + position``, of row 0: still the
    same for every number of ranks and layout. ``block_mask`` is refused there, and with more than one row
    ``prefix_length`` and ``alibi_slopes [B, H]``. What all rows share (one list of documents), and padding behind all
    keys, which is ``seqused_k``, is computed as without.

    Ranks compare what they pass, but not the values in tensors on the device: ``learnable_sink`` and ``alibi_slopes``
    must be the same on all. What several of the arguments show is what all of them show. Under autocast q, k and v are
    cast as by ``scaled_dot_product_attention``. A second derivative raises.

    Raises:
        TypeError: a keyword that there is not; the message has ours for it.
        ValueError: an argument does not fit, before anything is sent; the message names it, what it got and what it
            takes. Where the ranks disagree, every rank raises it.
        NotImplementedError: ``backend="triton"`` on the CPU without Triton's interpreter, or with bfloat16, which that
            takes for integers; a transform of ``torch.func``.
    """
    if unknown:
        raise unknown_keyword(next(iter(unknown)))
    args = take_args(locals())
    if torch.compiler.is_compiling():
        for name, value in (("q", q), ("k", k), ("v", v), *args._asdict().items()):
            check_local(name, value)
        q, k, v = autocast(q, k, v)
        out, lse = traced(q, k, v, args, ring, group)
        return (out, lse) if return_lse else out
    device = device_of(q, k, v)
    ranks = ranks_of(group, device, ring)
    with ranks._entered(device):
        check_tensors(q, k, v, args)
        return_lse = FLAG.of("return_lse", return_lse)
        q, k, v = autocast(q, k, v)
        wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, learnable_sink)]
        call = Call(args, ranks, {"gradient": any(wanted)})
        if isinstance(ranks, Rings):
            call.compare = {"gradient": (any(wanted[:3]), any(wanted)), "return_lse": return_lse}
            prepare(call, q, k, v)
        if call.exchange is not None:
            q, k, v = call.exchange.gather_tokens(call.exchange_number, q, k, v)
    # After the checks: what hooks of saved tensors raise, as checkpointing does to stop, is nothing to tell other ranks
    out, lse, _ = RingAttention.apply(None, q, k, v, *pack_handle(call))  # type: ignore[no-untyped-call]
    results: tuple[Any, ...] = (out, lse) if return_lse else (out,)
    if call.exchange is not None:
        del q, k, v  # the exchange needs memory of its own
        results = call.exchange.gather_heads(*results)
    return results if return_lse else results[0]
