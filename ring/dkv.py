"""Sums of partial dK/dV in fp32, which follow their K/V one hop later and end on the rank that owns the shard."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm import Fence
from .buffers import (
    INTER_NODE,
    INTRA_NODE,
    Arrival,
    Chunk,
    PostKey,
    RingBuffer,
    RingCall,
    Tensors,
    TransferKind,
    combine_payloads,
)
from .schedule.schedule import DKV_SLOTS, Hop

# Slots of a two-level ring, after the rotating ones: for dK/dV that cross between nodes.
RETURN_SEND_SLOT, RETURN_RECV_SLOT = DKV_SLOTS, DKV_SLOTS + 1


class DkvAccumulators(RingBuffer):
    """Slots for dK/dV: a sum of partial dK/dV arrives, this rank adds its part, and the new sum is sent on.

    In a two-level ring the root (first hop) of an outer step adds its part last. If the root does not own the shard, it
    adds in a separate slot. From there the node's dK/dV return to the owner over the slow link, during the next outer
    step.
    """

    def __init__(self, call: RingCall, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(call, call.dkv_slots, (k, v), torch.float32, call.grad_wire)
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._by_rail: dict[int, Arrival] = {}  # per chunk: dK/dV of the own shard that arrive from another node
        self._totals: dict[int, Tensors] = {}  # per chunk: sum of dK/dV of the own shard over the nodes so far

    def incoming_dkv(self, hop: Hop, chunk: Chunk) -> Callable[[], Tensors] | None:
        """Return a function that waits for this shard's dK/dV, summed over the ranks before this one, and returns them.

        Call that function as late as possible, because it waits for the network. None if no earlier rank has a part.
        """
        arrival = self._arrivals.get((hop.index, chunk.number))
        return None if arrival is None else lambda: self._read(arrival, hop, chunk)

    def out(self, hop: Hop, chunk: Chunk) -> Tensors:
        """Return the fp32 tensors that this hop's dK/dV are written to."""
        slot, arrival = self._slot(hop), self._arrivals.get((hop.index, chunk.number))
        if self.call.plan.is_outer_root(hop) or arrival is None:
            with self.call.record_wait(hop):
                for fence in self.free(slot, chunk):
                    fence.wait()  # protects the slot from being overwritten before its last send is done
            return self.buffers(slot, hop, chunk) if self._wire is None else self.staging(hop, chunk)
        return arrival.tensors if self._wire is None else self.staging(hop, chunk)

    def mark_added(self, hop: Hop, chunk: Chunk) -> None:
        """Encode the new sum, and mark its slots as used until the compute issued so far has added this rank's part."""
        slot = self._slot(hop)
        if self._wire is not None:
            self.encode(self.staging(hop, chunk), self.buffers(slot, hop, chunk))
        for used in {slot, hop.dkv_slot}:
            self.mark_computed(used, chunk)

    def post(self, hop: Hop, chunk: Chunk) -> None:
        """Send this hop's dK/dV to the next rank and receive those of the next hop.

        At the end of the active range, also receive the dK/dV that return to the root of the outer step.
        """
        sends = self.slot_payload(hop.dkv_to, hop.dkv_slot, hop, chunk, into=hop.dkv_into)
        # Protects the outgoing dK/dV until the kernel has added to them. dK/dV that only pass through need no fence:
        # posts of one level run in order, so they have arrived.
        after = [self.call.mark()] if sends.messages and hop.computes else []
        arrivals = chunk.plan.dkv_arrivals[hop.index]
        for coming in arrivals:
            assert coming.dkv_slot is not None
            after += self.free(coming.dkv_slot, chunk)  # protects the slot until its last compute and send are done
        receives = combine_payloads(
            [self.slot_payload(coming.dkv_from, coming.dkv_slot, coming, chunk) for coming in arrivals]
        )
        key = PostKey(self.call.phase, hop.index, TransferKind.DKV, hop.index, chunk.number)
        fence = self.call.post(INTRA_NODE, key, sends, receives, after)
        self.busy(hop.dkv_slot if sends.messages else None, chunk, fence)
        for coming in arrivals:
            assert coming.dkv_slot is not None
            self.busy(coming.dkv_slot, chunk, fence)
            self._arrivals[coming.index, chunk.number] = Arrival(fence, self.buffers(coming.dkv_slot, coming, chunk))

    def send_return(self, root: Hop, chunk: Chunk) -> None:
        """Send this node's dK/dV of the root's shard to its owner. Receive another node's dK/dV of the own shard."""
        sends = self.slot_payload(root.return_to, RETURN_SEND_SLOT, root, chunk, into=RETURN_RECV_SLOT)
        # protects the outgoing dK/dV until the kernel has added to them
        after: list[Fence] = [self.call.mark()] if sends.messages else []
        if root.return_from is not None:
            # protects the slot until its last content is added to the total
            after += self.free(RETURN_RECV_SLOT, chunk)
        key = PostKey(self.call.phase, root.index + chunk.plan.inner - 1, TransferKind.RETURN, 0, chunk.number)
        receives = self.slot_payload(root.return_from, RETURN_RECV_SLOT, chunk.plan.hops[0], chunk)
        fence = self.call.post(INTER_NODE, key, sends, receives, after)
        self.busy(None if root.return_to is None else RETURN_SEND_SLOT, chunk, fence)
        if root.return_from is not None:
            self.busy(RETURN_RECV_SLOT, chunk, fence)
            self._by_rail[chunk.number] = Arrival(fence, self.buffers(RETURN_RECV_SLOT, chunk.plan.hops[0], chunk))

    def returned_total(self, chunk: Chunk) -> Callable[[], Tensors] | None:
        """Return a function that returns the dK/dV of the own shard from other ranks; None if there are none so far."""
        if chunk.plan.returns_once:
            return self.incoming_dkv(chunk.plan.hops[0], chunk)
        return (lambda: self._totals[chunk.number]) if chunk.number in self._totals else None

    def add_returned(self, chunk: Chunk) -> None:
        """Add the dK/dV that returned since the last outer step to the total, in the order of the outer steps."""
        slot: int | None = RETURN_RECV_SLOT
        arrival = self._by_rail.pop(chunk.number, None)
        if arrival is None:
            slot, arrival = chunk.plan.hops[0].dkv_slot, self._arrivals.pop((0, chunk.number), None)
        if arrival is not None:
            self._add(self._read(arrival, chunk.plan.hops[0], chunk), chunk)
            self.mark_computed(slot, chunk)

    def own_accumulator(self, chunk: Chunk, dkdv: Tensors) -> Tensors:
        """Return the tensors in which dK/dV of the own shard are summed.

        These are the gradients ``dkdv``, or a separate fp32 total if more dK/dV return later and ``dkdv`` is not fp32.
        """
        if chunk.plan.returns_once:
            return dkdv
        if chunk.number not in self._totals:
            exact = all(x.dtype == torch.float32 for x in dkdv)
            self._totals[chunk.number] = dkdv if exact else self._own_shard(chunk)
        return self._totals[chunk.number]

    def finish_own(self, chunk: Chunk, dkdv: Tensors) -> None:
        """Finish the own shard: add the dK/dV that other nodes return, and copy the totals into ``dkdv``.

        In a flat ring that sends all keys the kernels have already written ``dkdv``. Then only the slot is marked.
        """
        if chunk.plan.returns_once:
            self.mark_computed(chunk.plan.hops[0].dkv_slot, chunk)
            return
        self.add_returned(chunk)
        for target, total in zip(dkdv, self._totals[chunk.number], strict=True):
            if target is not total:
                target.copy_(total)

    def _add(self, more: Tensors, chunk: Chunk) -> None:
        """Add dK/dV of the keys that are sent to the total of the own shard."""
        rows = chunk.plan.send_index
        if chunk.number not in self._totals:
            if rows is None:
                self._totals[chunk.number] = tuple(x.clone() for x in more)
                return
            self._totals[chunk.number] = tuple(x.zero_() for x in self._own_shard(chunk))
        for total, x in zip(self._totals[chunk.number], more, strict=True):
            total.add_(x) if rows is None else total.index_add_(1, rows, x)

    def _own_shard(self, chunk: Chunk) -> Tensors:
        """Allocate fp32 tensors for dK/dV of all own keys."""
        shapes = self._shapes(chunk.own(self._like[0]).shape[1], chunk.heads)
        return tuple(torch.empty(shape, dtype=torch.float32, device=self._like[0].device) for shape in shapes)

    def _read(self, arrival: Arrival, hop: Hop, chunk: Chunk) -> Tensors:
        """Wait for received dK/dV and return them, decoded."""
        with self.call.record_wait(hop):
            tensors = arrival.wait()
        return tensors if self._wire is None else self.decode(tensors, self.staging(hop, chunk))

    def _slot(self, hop: Hop) -> int:
        """Return the slot that this hop's sum is written to."""
        slot = RETURN_SEND_SLOT if self.call.plan.is_outer_root(hop) else hop.dkv_slot
        assert slot is not None
        return slot
