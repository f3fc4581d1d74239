"""fp32 accumulators of dK/dV: one hop behind the K/V they belong to, and back on their owner's rank at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm import Fence
from .buffers import BETWEEN, INSIDE, Arrival, Heads, Key, Kind, RingBuffer, RingCall, Tensors, together
from .schedule.schedule import DKV_SLOTS, Hop

# of a two-level ring, after the slots that rotate
LEAVING_SLOT, ARRIVING_SLOT = DKV_SLOTS, DKV_SLOTS + 1


class DkvAccumulators(RingBuffer):
    """What arrived from the ranks before, where this rank's part is added to it, and where it goes.

    An outer step's root adds its part last and, where it is not the owner, in a slot of its own, from which the node's
    dK/dV return to their owner over the slow link while the next outer step computes.
    """

    def __init__(self, call: RingCall, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(call, call.dkv_slots, (k, v), torch.float32, call.grad_wire)
        self._own = call.plan.hops[0]
        # whether dK/dV of the own shard return once, and of all its keys
        self._is_plain = not call.plan.two_level and call.plan.send_index is None
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._by_rail: dict[int, Arrival] = {}  # per chunk, of the own shard, another node's
        self._totals: dict[int, Tensors] = {}  # per chunk, of the own shard, those of all nodes so far

    def came(self, hop: Hop, heads: Heads) -> Callable[[], Tensors] | None:
        """Waits for the dK/dV of the ranks before and returns them; None where this rank is the first to add."""
        arrival = self._arrivals.get((hop.index, heads.number))
        return None if arrival is None else lambda: self._read(arrival, hop, heads)

    def out(self, hop: Hop, heads: Heads) -> Tensors:
        """Where this rank's part of a hop's dK/dV is added, in fp32."""
        slot, arrival = self._slot(hop), self._arrivals.get((hop.index, heads.number))
        if self.call.plan.is_outer_root(hop) or arrival is None:
            with self.call.waiting(hop):
                for fence in self.free(slot, heads):
                    fence.wait()  # protects the slot: its last send
            return self.buffers(slot, hop, heads) if self._wire is None else self.staging(hop, heads)
        return arrival.tensors if self._wire is None else self.staging(hop, heads)

    def added(self, hop: Hop, heads: Heads) -> None:
        """This rank's part is in: what arrived is read, and what leaves is written."""
        slot = self._slot(hop)
        if self._wire is not None:
            self.encode(self.staging(hop, heads), self.buffers(slot, hop, heads))
        for used in {slot, hop.dkv_slot}:
            self.computed(used, heads)

    def post(self, hop: Hop, heads: Heads) -> None:
        """Send this hop's dK/dV on; receive the next hop's and, when their active range ends now, the root's."""
        sends = self.load(hop.dkv_to, hop.dkv_slot, hop, heads, into=hop.dkv_into)
        # protects what leaves: the dK/dV kernel that adds to it; what only passes through is there in posting order
        after = [self.call.mark()] if sends.messages and hop.computes else []
        arrivals = self.call.plan.dkv_arrivals[hop.index]
        for coming in arrivals:
            assert coming.dkv_slot is not None
            after += self.free(coming.dkv_slot, heads)  # protects the slot: its last compute, and its last send
        receives = together([self.load(coming.dkv_from, coming.dkv_slot, coming, heads) for coming in arrivals])
        key = Key(self.call.phase, hop.index, Kind.DKV, hop.index, heads.number)
        fence = self.call.post(INSIDE, key, sends, receives, after)
        self.busy(hop.dkv_slot if sends.messages else None, heads, fence)
        for coming in arrivals:
            assert coming.dkv_slot is not None
            self.busy(coming.dkv_slot, heads, fence)
            self._arrivals[coming.index, heads.number] = Arrival(fence, self.buffers(coming.dkv_slot, coming, heads))

    def send_return(self, root: Hop, heads: Heads) -> None:
        """After an outer step: this node's dK/dV to their owner, and another node's of the own shard from its rank."""
        sends = self.load(root.return_to, LEAVING_SLOT, root, heads, into=ARRIVING_SLOT)
        # protects what leaves: the dK/dV kernel that adds to it
        after: list[Fence] = [self.call.mark()] if sends.messages else []
        if root.return_from is not None:
            after += self.free(ARRIVING_SLOT, heads)  # protects the slot: the addition of what came before
        key = Key(self.call.phase, root.index + self.call.plan.inner - 1, Kind.RETURN, self._own.index, heads.number)
        receives = self.load(root.return_from, ARRIVING_SLOT, self._own, heads)
        fence = self.call.post(BETWEEN, key, sends, receives, after)
        self.busy(None if root.return_to is None else LEAVING_SLOT, heads, fence)
        if root.return_from is not None:
            self.busy(ARRIVING_SLOT, heads, fence)
            self._by_rail[heads.number] = Arrival(fence, self.buffers(ARRIVING_SLOT, self._own, heads))

    def total(self, heads: Heads) -> Callable[[], Tensors] | None:
        """The dK/dV of the own shard that have returned; None while there are none."""
        if self._is_plain:
            return self.came(self._own, heads)
        return (lambda: self._totals[heads.number]) if heads.number in self._totals else None

    def absorb(self, heads: Heads) -> None:
        """Add what returned since the last outer step to the total, in the order of the outer steps."""
        slot: int | None = ARRIVING_SLOT
        arrival = self._by_rail.pop(heads.number, None)
        if arrival is None:
            slot, arrival = self._own.dkv_slot, self._arrivals.pop((self._own.index, heads.number), None)
        if arrival is not None:
            self._add(self._read(arrival, self._own, heads), heads)
            self.computed(slot, heads)

    def own(self, heads: Heads, dkdv: Tensors) -> Tensors:
        """Where the own block's part is added: the gradients themselves or, where more is to come, the total."""
        if self._is_plain:
            return dkdv
        if heads.number not in self._totals:
            exact = all(x.dtype == torch.float32 for x in dkdv)
            self._totals[heads.number] = dkdv if exact else self._own_shard(heads)
        return self._totals[heads.number]

    def finish(self, heads: Heads, dkdv: Tensors) -> None:
        """The own block's part is in; what is still to come is added under its cover."""
        if self._is_plain:
            self.computed(self._own.dkv_slot, heads)
            return
        self.absorb(heads)
        for target, total in zip(dkdv, self._totals[heads.number], strict=True):
            if target is not total:
                target.copy_(total)

    def _add(self, more: Tensors, heads: Heads) -> None:
        rows = self.call.plan.send_index
        if heads.number not in self._totals:
            if rows is None:
                self._totals[heads.number] = tuple(x.clone() for x in more)
                return
            self._totals[heads.number] = tuple(x.zero_() for x in self._own_shard(heads))
        for total, x in zip(self._totals[heads.number], more, strict=True):
            total.add_(x) if rows is None else total.index_add_(1, rows, x)

    def _own_shard(self, heads: Heads) -> Tensors:
        """fp32 memory for dK/dV of all own keys."""
        shapes = self._shapes(self._like[0].shape[1], heads)
        return tuple(torch.empty(shape, dtype=torch.float32, device=self._like[0].device) for shape in shapes)

    def _read(self, arrival: Arrival, hop: Hop, heads: Heads) -> Tensors:
        with self.call.waiting(hop):
            tensors = arrival.wait()
        return tensors if self._wire is None else self.decode(tensors, self.staging(hop, heads))

    def _slot(self, hop: Hop) -> int:
        slot = LEAVING_SLOT if self.call.plan.is_outer_root(hop) else hop.dkv_slot
        assert slot is not None
        return slot
