"""K/V of the shards on their way from rank to rank, ahead of the compute."""

from __future__ import annotations

import torch

from ..comm import Fence
from .buffers import BETWEEN, INSIDE, Arrival, Call, Heads, Key, Kind, Pair, RingBuffer, Tensors, load
from .schedule.schedule import Hop

NOTHING = Arrival(None, ())


class KeyValues(RingBuffer):
    """What each hop computes with: the rank's own pair, or what arrived.

    Every rank passes on what it got as it got it: a pair that travels encoded is encoded once, by its owner, into one
    more slot after those of the schedule.
    """

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(call, call.kv_slots, (k, v), k.dtype, call.wire)
        self._own = (k, v)
        self._leaving: dict[int, Arrival] = {}  # per chunk, the own pair as it travels
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._scratch: Tensors = ()

    def advance(self, now: Hop, kind: Kind = Kind.KV) -> None:
        """Post what is due during hop ``now``: at its beginning or, as ``PREFETCH``, behind its dK/dV."""
        for coming in self.call.plan.arrivals(now.index, self.call.prefetch):
            for heads in self.call.chunks:
                self._post(now, coming, heads, kind)

    def arrived(self, hop: Hop, heads: Heads) -> Pair:
        """K and V of a chunk in the dtype of the model; what is issued from now on runs after their arrival."""
        if hop.index == 0:
            return self._own[0][:, :, heads.kv], self._own[1][:, :, heads.kv]
        travelled = self._arrivals[hop.index, heads.number].wait()
        if self._wire is None:
            return travelled[0], travelled[1]
        if not self._scratch:
            self._scratch = self.scratch()
        k, v = self.decode(travelled, self.part(self._scratch, hop, heads))
        return k, v

    def _post(self, now: Hop, coming: Hop, heads: Heads, kind: Kind) -> None:
        """One group: pass on what an earlier hop works with, and receive what ``coming`` works with."""
        plan = self.call.plan
        by_rail = plan.is_outer_root(coming)
        level, kind = (BETWEEN, Kind.RAIL) if by_rail else (INSIDE, kind)
        leaving = plan.hops[coming.index - (plan.inner if by_rail else 1)]
        to = leaving.rail_to if by_rail else leaving.kv_to
        held = NOTHING if to is None else self._held(leaving, heads)
        slot = leaving.kv_slot if leaving.index else None
        sends = load(to, held.tensors) if slot is None else self.load(to, slot, leaving, heads)
        after: list[Fence] = []
        # protects what leaves: K/V that this level brought are there in its own order, all others must be waited for
        if held.fence is not None and (leaving.index == 0 or plan.is_outer_root(leaving) != by_rail):
            after.append(held.fence)
        buffers: Tensors = ()
        if coming.kv_slot is not None:
            after += self.free(coming.kv_slot, heads)  # protects the slot: its last compute, and its last send
            buffers = self.buffers(coming.kv_slot, coming, heads)
        key = Key(self.call.phase, now.index, kind, coming.index, heads.number)
        receives = self.load(coming.kv_from, coming.kv_slot, coming, heads)
        fence = self.call.post(level, key, sends, receives, after)
        if to is not None:
            self.busy(self._slot_of(leaving), heads, fence)
        self.busy(coming.kv_slot, heads, fence)
        self._arrivals[coming.index, heads.number] = Arrival(fence, buffers)

    def _held(self, hop: Hop, heads: Heads) -> Arrival:
        if hop.index:
            return self._arrivals[hop.index, heads.number]
        if heads.number not in self._leaving:
            own = tuple(self._travelling(x[:, :, heads.kv]) for x in self._own)
            own = tuple(x.contiguous() for x in own) if self._wire is None else self._encoded(own, hop, heads)
            # protects k and v: what produces them, and what encodes them, may still run
            self._leaving[heads.number] = Arrival(self.call.mark(), own)
        return self._leaving[heads.number]

    def _travelling(self, own: torch.Tensor) -> torch.Tensor:
        rows = self.call.plan.send_index
        return own if rows is None else own.index_select(1, rows)

    def _encoded(self, own: Tensors, hop: Hop, heads: Heads) -> Tensors:
        slot = self.call.plan.kv_slots
        for fence in self.free(slot, heads):
            fence.wait()  # protects the slot: what the call before sent from it
        return self.encode(own, self.buffers(slot, hop, heads))

    def _slot_of(self, hop: Hop) -> int | None:
        return hop.kv_slot if hop.index else None if self._wire is None else self.call.plan.kv_slots
