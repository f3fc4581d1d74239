"""The ring loop: post what moves next, compute on what is here, wait, go on.

One loop for every schedule: either direction, skipped hops, active ranges cut short, chunks of heads and two levels
are different data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from .buffers import Heads, Kind, MaskArgs, Pair, RingCall, Tensors
from .dkv import DkvAccumulators
from .key_values import KeyValues
from .local.protocol import LocalBackward, LocalForward
from .schedule.schedule import Hop


def forward(call: RingCall, backends: Sequence[LocalForward], k: torch.Tensor, v: torch.Tensor) -> None:
    """Fold every shard that this rank sees, while the next ones are on their way; a backend per chunk of heads."""
    moving = KeyValues(call, k, v)
    for hop in call.plan.hops:
        moving.advance(hop)
        hop_masks = call.plan.hop_masks[hop.index]
        if not hop_masks:
            continue
        for heads, backend in zip(call.chunks, backends, strict=True):
            near = arrived(call, moving, hop, heads)
            with call.span("compute", hop):
                for hop_mask in hop_masks:
                    final = hop.index == call.plan.last and hop_mask is hop_masks[-1]
                    backend.fold(*near, **call.mask_args(hop_mask, heads), final=final)
            moving.computed(hop.kv_slot, heads)
    call.settle()


def backward(
    call: RingCall, backends: Sequence[LocalBackward], k: torch.Tensor, v: torch.Tensor, dkdv: Tensors
) -> None:
    """dQ of every shard that this rank sees and, carried around the ring behind them, dK/dV of its own.

    The root of every outer step brackets it: its dQ hides the first K/V, its dK/dV continues those that came back.
    The first root is the own shard, whose dK/dV comes last of all. At every hop dK/dV comes first, so that the dQ
    of the same hop hides their way to the next rank. K/V of a later hop than the next one are posted behind them: a
    link moves what is posted in this order, and the next rank needs the dK/dV first.
    """
    moving, dkv = KeyValues(call, k, v), DkvAccumulators(call, k, v)
    pairs = tuple(zip(call.chunks, backends, strict=True))
    ahead = call.prefetch > 1
    for root, *others in call.plan.outer_steps:
        moving.advance(root)
        for heads, backend in pairs:
            query_gradient(call, moving, backend, root, heads)
        for hop in others:
            if not ahead:
                moving.advance(hop)
            for heads, backend in pairs:
                key_gradients(call, moving, dkv, backend, hop, heads)
                dkv.post(hop, heads)
                if ahead and heads is call.chunks[-1]:
                    moving.advance(hop, Kind.PREFETCH)
                query_gradient(call, moving, backend, hop, heads)
        if call.plan.two_level:
            for heads, backend in pairs:
                dkv.absorb(heads)
                if root.index:
                    key_gradients(call, moving, dkv, backend, root, heads)
                    dkv.send_return(root, heads)
    for heads, backend in pairs:
        own_gradients(call, moving, dkv, backend, heads, tuple(x[:, :, heads.kv] for x in dkdv))
    call.settle()


def arrived(call: RingCall, moving: KeyValues, hop: Hop, heads: Heads) -> Pair:
    """K and V of a chunk, once they are here."""
    with call.span("wait", hop):
        return moving.arrived(hop, heads)


def query_gradient(call: RingCall, moving: KeyValues, backend: LocalBackward, hop: Hop, heads: Heads) -> None:
    """This hop's part of dQ."""
    hop_masks = call.plan.hop_masks[hop.index]
    if not hop_masks:
        return
    near = arrived(call, moving, hop, heads)
    with call.span("compute", hop):
        for hop_mask in hop_masks:
            final = hop.index == call.plan.last and hop_mask is hop_masks[-1]
            backend.dq(*near, **call.mask_args(hop_mask, heads), local=hop.index == 0, final=final)
    if not call.plan.is_outer_root(hop):  # a root's K/V are needed again at the end of its outer step
        moving.computed(hop.kv_slot, heads)


def key_gradients(
    call: RingCall, moving: KeyValues, dkv: DkvAccumulators, backend: LocalBackward, hop: Hop, heads: Heads
) -> None:
    """This rank's part of the dK/dV of a shard that is not its own, added to what came from the ranks before."""
    hop_masks, came = call.plan.hop_masks[hop.index], dkv.came(hop, heads)
    if hop_masks:
        out, near = dkv.out(hop, heads), arrived(call, moving, hop, heads)
        with call.span("compute", hop):
            parts = [call.mask_args(hop_mask, heads) for hop_mask in hop_masks]
            for part, accum, into in partial_sums(parts, came, out):
                backend.dkdv(*near, **part, local=False, accum=accum, out=into)
        if call.plan.is_outer_root(hop):
            moving.computed(hop.kv_slot, heads)
    elif came is not None and call.plan.is_outer_root(hop):
        for target, x in zip(dkv.out(hop, heads), came(), strict=True):
            target.copy_(x)
    else:
        return  # what only passes through is sent on from where it is
    dkv.added(hop, heads)


def own_gradients(
    call: RingCall, moving: KeyValues, dkv: DkvAccumulators, backend: LocalBackward, heads: Heads, dkdv: Tensors
) -> None:
    """dK/dV of the own shard: what all others have summed up, and this rank's own part."""
    own = call.plan.hops[0]
    came, out = dkv.total(heads), dkv.own(heads, dkdv)
    parts = [call.mask_args(hop_mask, heads) for hop_mask in call.plan.hop_masks[0]]
    with call.span("compute", own):
        near = moving.arrived(own, heads)
        for part, accum, into in partial_sums(parts, came, out):
            backend.dkdv(*near, **part, local=True, accum=accum, out=into)
    dkv.finish(heads, dkdv)


def partial_sums(
    parts: Sequence[MaskArgs], accum: Callable[[], Tensors] | None, out: Tensors
) -> Iterator[tuple[MaskArgs, Callable[[], Tensors] | None, Tensors]]:
    """Yield each part of a mask, the dK/dV that its own are added to, and where the sum goes: at last to ``out``."""
    for part in parts[:-1]:  # in fp32, whatever the dtype of out
        between = tuple(torch.empty_like(x, dtype=torch.float32) for x in out)
        yield part, accum, between
        accum = partial(tuple, between)
    yield parts[-1], accum, out
