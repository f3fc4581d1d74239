"""The ring loop, forward and backward. One hop: post the next transfers, wait for this hop's K/V, compute.

K/V rotate through three slots (s0, s1, s2) and are posted up to two hops ahead of the compute::

    hop:      0 (own shard)      1                  2                  3
    post:     recv 1 into s1     recv 3 into s0     recv 4 into s1     recv 5 into s2
    post:     recv 2 into s2
    post:     send 0, 1          send 2             send 3             send 4
    wait:     -                  K/V in s1          K/V in s2          K/V in s0
    compute:  own K/V            K/V in s1          K/V in s2          K/V in s0

A receive waits until the slot's last compute and last send are done: hop 2 refills s1, which hop 1 has read. The
backward adds dK/dV, which follow their K/V one hop later::

    hop:      dK/dV of this shard -> post dK/dV to the next rank -> post K/V ahead -> dQ of this shard

The same loop runs every schedule: both directions, skipped hops, chunks and two-level rings are data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from .buffers import Chunk, MaskArgs, Pair, RingCall, Tensors, TransferKind
from .dkv import DkvAccumulators
from .key_values import KeyValues
from .local.protocol import LocalBackward, LocalForward
from .schedule.schedule import Hop

Backend = TypeVar("Backend", LocalForward, LocalBackward)


def forward(call: RingCall, backends: Sequence[LocalForward], k: torch.Tensor, v: torch.Tensor) -> None:
    """Run the forward: attend to every shard that this rank sees, while the next shards arrive.

    Args:
        call: plan, transports and slots of the call.
        backends: one local forward per group of heads; each keeps its own softmax state.
        k: this rank's keys ``[B, Sk, Hkv, D]``.
        v: this rank's values ``[B, Sk, Hkv, Dv]``.
    """
    kv = KeyValues(call, k, v)
    for step, chunks in zip(call.plan.hops, split_hops(call, backends), strict=True):
        kv.post_kv(step)
        for chunk, hop, backend in chunks:
            hop_masks = chunk.plan.hop_masks[hop.index]
            if not hop_masks:
                continue
            arrived_kv = wait_kv(call, kv, hop, chunk)
            with call.record_span("compute", hop):
                for hop_mask in hop_masks:
                    final = hop.index == chunk.plan.last_launch_hop and hop_mask is hop_masks[-1]
                    backend.fold(*arrived_kv, **call.mask_args(hop_mask, chunk.heads), final=final)
            kv.mark_computed(hop.kv_slot, chunk)
    call.wait_all()


def backward(
    call: RingCall, backends: Sequence[LocalBackward], k: torch.Tensor, v: torch.Tensor, dkdv: Tensors
) -> None:
    """Run the backward: compute dQ of this rank's queries, and pass partial dK/dV around the ring.

    Each outer step starts with dQ of its root shard, which hides the first K/V transfer. It ends with dK/dV of the
    root, which are added to the partial dK/dV that the other ranks of the node sent back. The first root is this rank's
    own shard; its dK/dV come last of all.

    At every other hop dK/dV come before dQ, so that dQ hides the transfer of dK/dV. K/V that a later hop needs are
    posted behind dK/dV, because a link moves transfers in posting order and the next rank needs dK/dV first.

    Args:
        call: plan, transports and slots of the call.
        backends: one local backward per group of heads.
        k: this rank's keys ``[B, Sk, Hkv, D]``.
        v: this rank's values ``[B, Sk, Hkv, Dv]``.
        dkdv: receives the gradients of ``k`` and ``v``.
    """
    kv, dkv = KeyValues(call, k, v), DkvAccumulators(call, k, v)
    chunks, posts_ahead = split_hops(call, backends), call.prefetch > 1
    for first, *remote_hops in call.plan.outer_steps:
        kv.post_kv(first)
        for chunk, root, backend in chunks[first.index]:
            compute_dq(call, kv, backend, root, chunk)
        for step in remote_hops:
            if not posts_ahead:
                kv.post_kv(step)
            for chunk, hop, backend in chunks[step.index]:
                compute_dkdv(call, kv, dkv, backend, hop, chunk)
                dkv.post(hop, chunk)
                if posts_ahead and chunk is call.chunks[-1]:
                    kv.post_kv(step, TransferKind.PREFETCH)
                compute_dq(call, kv, backend, hop, chunk)
        if call.plan.two_level:
            for chunk, root, backend in chunks[first.index]:
                dkv.add_returned(chunk)
                if root.index:
                    compute_dkdv(call, kv, dkv, backend, root, chunk)
                    dkv.send_return(root, chunk)
    for chunk, own, backend in chunks[0]:
        compute_own_dkdv(call, kv, dkv, backend, own, chunk, tuple(map(chunk.own, dkdv)))
    call.wait_all()


def split_hops(call: RingCall, backends: Sequence[Backend]) -> list[tuple[tuple[Chunk, Hop, Backend], ...]]:
    """Return for each hop its chunks, each with the hop of its own plan and the backend of its heads."""
    hops = zip(*(chunk.plan.hops for chunk in call.chunks), strict=True)
    by_chunk = [backends[chunk.heads.number] for chunk in call.chunks]
    return [tuple(zip(call.chunks, same_hop, by_chunk, strict=True)) for same_hop in hops]


def wait_kv(call: RingCall, kv: KeyValues, hop: Hop, chunk: Chunk) -> Pair:
    """Wait for K and V of one chunk and return them."""
    with call.record_span("wait", hop):
        return kv.wait_chunk(hop, chunk)


def compute_dq(call: RingCall, kv: KeyValues, backend: LocalBackward, hop: Hop, chunk: Chunk) -> None:
    """Add to dQ the part that comes from one chunk of this hop's shard."""
    hop_masks = chunk.plan.hop_masks[hop.index]
    if not hop_masks:
        return
    arrived_kv = wait_kv(call, kv, hop, chunk)
    with call.record_span("compute", hop):
        for hop_mask in hop_masks:
            final = hop.index == chunk.plan.last_launch_hop and hop_mask is hop_masks[-1]
            backend.dq(*arrived_kv, **call.mask_args(hop_mask, chunk.heads), local=hop.index == 0, final=final)
    if not call.plan.is_outer_root(hop):  # dK/dV of a root read the same slot at the end of the outer step
        kv.mark_computed(hop.kv_slot, chunk)


def compute_dkdv(
    call: RingCall, kv: KeyValues, dkv: DkvAccumulators, backend: LocalBackward, hop: Hop, chunk: Chunk
) -> None:
    """Compute this rank's part of dK/dV of another rank's shard, and add it to the sum that arrived."""
    hop_masks, incoming_dkv = chunk.plan.hop_masks[hop.index], dkv.incoming_dkv(hop, chunk)
    if hop_masks:
        out, arrived_kv = dkv.out(hop, chunk), wait_kv(call, kv, hop, chunk)
        with call.record_span("compute", hop):
            parts = [call.mask_args(hop_mask, chunk.heads) for hop_mask in hop_masks]
            for mask_args, accum, part_out in partial_sums(parts, incoming_dkv, out):
                backend.dkdv(*arrived_kv, **mask_args, local=False, accum=accum, out=part_out)
        if call.plan.is_outer_root(hop):
            kv.mark_computed(hop.kv_slot, chunk)
    elif incoming_dkv is not None and call.plan.is_outer_root(hop):
        for target, x in zip(dkv.out(hop, chunk), incoming_dkv(), strict=True):
            target.copy_(x)
    else:
        return  # dK/dV that only pass through are sent on from the slot they arrived in
    dkv.mark_added(hop, chunk)


def compute_own_dkdv(
    call: RingCall, kv: KeyValues, dkv: DkvAccumulators, backend: LocalBackward, own: Hop, chunk: Chunk, dkdv: Tensors
) -> None:
    """Compute this rank's part of dK/dV of its own shard, add the dK/dV that returned, and write them to ``dkdv``."""
    returned_dkv, out = dkv.returned_total(chunk), dkv.own_accumulator(chunk, dkdv)
    parts = [call.mask_args(hop_mask, chunk.heads) for hop_mask in chunk.plan.hop_masks[0]]
    with call.record_span("compute", own):
        own_kv = kv.wait_chunk(own, chunk)
        for mask_args, accum, part_out in partial_sums(parts, returned_dkv, out):
            backend.dkdv(*own_kv, **mask_args, local=True, accum=accum, out=part_out)
    dkv.finish_own(chunk, dkdv)


def partial_sums(
    parts: Sequence[MaskArgs], accum: Callable[[], Tensors] | None, out: Tensors
) -> Iterator[tuple[MaskArgs, Callable[[], Tensors] | None, Tensors]]:
    """Yield ``(mask_args, accum, out)`` for each part of a mask, so that the parts add up in ``out``.

    Each part adds its dK/dV to the sum of the parts before it. Sums in between are fp32, whatever the dtype of ``out``.

    Raises:
        RuntimeError: the local kernel ignored ``accum``.
    """
    for number, part in enumerate(parts, 1):
        reads: list[bool] = []
        is_last = number == len(parts)
        target = out if is_last else tuple(torch.empty_like(x, dtype=torch.float32) for x in out)
        yield part, accum and partial(_read, accum, reads), target
        if accum is not None and not reads:
            raise RuntimeError("dkdv did not call accum: it must add accum() to its dK/dV, or other sums are lost")
        accum = partial(tuple, target)


def _read(accum: Callable[[], Tensors], reads: list[bool]) -> Tensors:
    reads.append(True)
    return accum()
