"""What a call sends and receives at each hop, through which slot, and what must be over before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ..comm import Fence, Message, Slots, Transport, slot_nbytes
from .plan import Plan
from .schedule import Hop

Tensors = tuple[torch.Tensor, ...]
Span = Callable[[str, Hop], AbstractContextManager[None]]


@dataclass(frozen=True)
class Call:
    """What the loops of one call work with."""

    plan: Plan
    transport: Transport
    kv_slots: Slots
    sums_slots: Slots
    span: Span  # names what the host or the stream is at, for a trace


class Arrival:
    """Tensors that are on their way; :meth:`wait` before anything reads them."""

    def __init__(self, fence: Fence | None = None, tensors: Tensors = ()) -> None:
        self._fence = fence
        self._tensors = tensors

    def wait(self) -> Tensors:
        """Let what is issued from now on run after the arrival; returns the tensors (none where nothing comes)."""
        if self._fence is not None:
            self._fence.wait()
        return self._tensors


class Lane:
    """One pair of tensors, shaped like this rank's ``like``, moving from rank to rank through its own slots."""

    def __init__(self, call: Call, slots: Slots, like: Tensors, dtype: torch.dtype) -> None:
        self.call = call
        self.slots = slots
        self._like = like
        self._dtype = dtype
        self._fences: list[Fence] = []
        if len(call.plan.hops) > 1:
            slots.reserve(slot_nbytes(self._specs(call.plan.longest)))

    def _specs(self, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((x.shape[0], tokens, *x.shape[2:]), self._dtype) for x in self._like]

    def buffers(self, slot: int, hop: Hop) -> Tensors:
        """The slot, seen as the tensors of this hop's shard."""
        return self.slots.tensors(slot, self._specs(self.call.plan.lengths[hop.index]))

    def move(
        self, sends: Iterable[Message], receives: Iterable[Message], after: Iterable[Fence], slots: Iterable[int | None]
    ) -> Fence | None:
        """One group of transfers; ``slots`` are in use until it is over."""
        sends, receives = list(sends), list(receives)
        if not sends and not receives:
            return None
        fence = self.call.transport.post(sends=sends, receives=receives, after=tuple(after))
        self._fences.append(fence)
        for slot in slots:
            if slot is not None:
                self.slots.busy(slot, fence)
        return fence

    def computed(self, slot: int | None) -> None:
        """The compute issued so far reads or writes the slot: nothing may arrive in it before that is over."""
        if slot is not None:
            self.slots.busy(slot, self.call.transport.mark())

    def settle(self) -> None:
        """Wait for every send: after the call, the caller may do with its tensors as it likes."""
        for fence in self._fences:
            fence.wait()


def messages(peer: int | None, tensors: Tensors) -> list[Message]:
    """A tensor without elements is not sent, and its receiver knows that too."""
    return [] if peer is None else [Message(peer, x) for x in tensors if x.numel()]


class KeyValues(Lane):
    """K/V of the shards, one hop ahead of the compute."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(call, call.kv_slots, (k, v), k.dtype)

    def post(self, hop: Hop, following: Hop | None, held: Tensors) -> Arrival:
        """Send on what is here and receive what the next hop computes with; K/V group ``hop.index`` of the schedule."""
        after: list[Fence] = []
        if hop.index == 0 and hop.kv_to is not None:
            held = tuple(x.contiguous() for x in held)
            after.append(self.call.transport.mark())  # protects k and v: what produces them may still run
        sends = messages(hop.kv_to, held)
        if following is None or following.kv_slot is None:
            self.move(sends, [], after, [hop.kv_slot])
            return Arrival()
        after += self.slots.free(following.kv_slot)  # protects the slot: its last compute, and its last send
        buffers = self.buffers(following.kv_slot, following)
        fence = self.move(sends, messages(following.kv_from, buffers), after, [hop.kv_slot, following.kv_slot])
        return Arrival(fence, buffers)


class Sums(Lane):
    """fp32 partial sums of dK/dV, one hop behind the K/V they belong to, and home at the end."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(call, call.sums_slots, (k, v), torch.float32)
        self._arrivals: dict[int, Arrival] = {}

    def into(self, hop: Hop) -> Tensors:
        """Where this hop's sums are kept; where none arrive there, the compute waits until the slot is free."""
        assert hop.sums_slot is not None
        if hop.index not in self._arrivals:
            for fence in self.slots.free(hop.sums_slot):
                fence.wait()  # protects the slot: its last send
        return self.buffers(hop.sums_slot, hop)

    def arrival(self, hop: Hop) -> Arrival | None:
        """The sums of the ranks before, or None where this rank is the first to add."""
        return self._arrivals.get(hop.index)

    def post(self, hop: Hop, following: Hop | None) -> None:
        """Send this hop's sums on, receive the next hop's and, when their journey ends now, this rank's own."""
        sends = [] if hop.sums_slot is None else messages(hop.sums_to, self.buffers(hop.sums_slot, hop))
        after = [self.call.transport.mark()] if sends else []  # protects the sums: the dK/dV kernel that adds to them
        receives: list[Message] = []
        coming = [following] if following is not None and following.sums_from is not None else []
        if self.call.plan.home_after == hop.index:
            coming.append(self.call.plan.hops[0])
        tensors = {}
        for one in coming:
            assert one.sums_slot is not None
            after += self.slots.free(one.sums_slot)  # protects the slot: its last compute, and its last send
            tensors[one.index] = self.buffers(one.sums_slot, one)
            receives += messages(one.sums_from, tensors[one.index])
        used = [hop.sums_slot if sends else None, *(one.sums_slot for one in coming)]
        fence = self.move(sends, receives, after, used)
        self._arrivals |= {index: Arrival(fence, pair) for index, pair in tensors.items()}
