"""K/V of the shards, received and passed on ahead of the compute."""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch

from ..comm import Fence
from .buffers import (
    INTER_NODE,
    INTRA_NODE,
    NO_PAYLOAD,
    Arrival,
    Chunk,
    Pair,
    PostKey,
    RingBuffer,
    RingCall,
    Tensors,
    TransferKind,
    build_payload,
)
from .schedule.schedule import Hop


class KeyValues(RingBuffer):
    """K/V of each hop: this rank's own pair, or a received pair.

    Each rank passes K/V on exactly as they arrived. With a wire dtype the owner encodes its pair once, into one extra
    slot after those of the schedule. If ranks write into each other's slots, the owner copies its pair into that slot
    even without a wire dtype.
    """

    def __init__(self, call: RingCall, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(call, call.kv_slots, (k, v), k.dtype, call.wire)
        self._own = (k, v)
        encoded = self._wire is not None or call.kv_slots.windows is not None
        self._own_slot = call.plan.kv_slots if encoded else None
        by_chunk = zip(*(chunk.plan.kv_posts(call.prefetch) for chunk in call.chunks), strict=True)
        pairs = partial(zip, call.chunks, strict=True)
        self._posts = [[*chain.from_iterable(map(pairs, zip(*posts, strict=True)))] for posts in by_chunk]
        self._sent_keys: dict[int, Arrival] = {}  # per chunk: the part of the own pair that is sent, encoded
        self._arrivals: dict[tuple[int, int], Arrival] = {}

    def post_kv(self, hop: Hop, kind: TransferKind = TransferKind.KV) -> None:
        """Post the K/V transfers that are due during hop ``hop``.

        Each group receives K/V of a later hop and passes on K/V of an earlier one. ``kind`` is ``KV`` if the groups are
        posted at the beginning of the hop, and ``PREFETCH`` if they are posted behind its dK/dV.
        """
        for chunk, (coming, leaving, to, by_rail, waits) in self._posts[hop.index]:
            after: list[Fence] = []
            sends, sent_slot = NO_PAYLOAD, None
            if to is not None:
                outgoing = self._outgoing(leaving, chunk)
                sent_slot = leaving.kv_slot if leaving.index else self._own_slot
                sends = build_payload(to, outgoing.tensors)
                if sent_slot is not None:
                    sends = self.slot_payload(to, sent_slot, leaving, chunk, into=self.call.plan.kv_slot(coming))
                # Protects the outgoing K/V until they are here. K/V that arrived on this level need no wait, because
                # its posts run in order.
                if outgoing.fence is not None and waits:
                    after.append(outgoing.fence)
            buffers: Tensors = ()
            if coming.kv_slot is not None:
                after += self.free(coming.kv_slot, chunk)  # protects the slot until its last compute and send are done
                buffers = self.buffers(coming.kv_slot, coming, chunk)
            key = PostKey(
                self.call.phase, hop.index, TransferKind.RAIL if by_rail else kind, coming.index, chunk.number
            )
            receives = self.slot_payload(coming.kv_from, coming.kv_slot, coming, chunk)
            fence = self.call.post(INTER_NODE if by_rail else INTRA_NODE, key, sends, receives, after)
            self.busy(sent_slot, chunk, fence)
            self.busy(coming.kv_slot, chunk, fence)
            self._arrivals[coming.index, chunk.number] = Arrival(fence, buffers)

    def wait_chunk(self, hop: Hop, chunk: Chunk) -> Pair:
        """Return K and V of a chunk in the model dtype. Work issued after this call runs after their arrival."""
        if hop.index == 0:
            return chunk.own(self._own[0]), chunk.own(self._own[1])
        pair = self._arrivals[hop.index, chunk.number].wait()
        if self._wire is not None:
            pair = self.decode(pair, self.staging(hop, chunk))
        return pair[0], pair[1]

    def _outgoing(self, hop: Hop, chunk: Chunk) -> Arrival:
        """Return the K/V of a hop that this rank sends on, with the fence after which they are ready."""
        if hop.index:
            return self._arrivals[hop.index, chunk.number]
        if chunk.number not in self._sent_keys:
            rows = chunk.plan.send_index
            own = tuple(map(chunk.own, self._own))
            own = own if rows is None else tuple(x.index_select(1, rows) for x in own)
            own = tuple(x.contiguous() for x in own) if self._own_slot is None else self._encode_own(own, hop, chunk)
            # protects k and v until the kernels that produce and encode them are done
            self._sent_keys[chunk.number] = Arrival(self.call.mark(), own)
        return self._sent_keys[chunk.number]

    def _encode_own(self, own: Tensors, hop: Hop, chunk: Chunk) -> Tensors:
        slot = self._own_slot
        assert slot is not None
        for fence in self.free(slot, chunk):
            fence.wait()  # protects the slot until the sends of the previous call are done
        return self.encode(own, self.buffers(slot, hop, chunk))
