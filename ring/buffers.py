"""What a call's transfers have in common: their order, the slots they go through, and what must be over before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypedDict

import torch

from ..comm import Fence, Message, Placed, Slots, Transport, slot_nbytes
from ..kernels import PLAIN, Bounds, Scores
from .schedule.plan import HopMask, Plan
from .schedule.schedule import Hop
from .wire import Wire

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
Span = Callable[[str, Hop], AbstractContextManager[None]]
INSIDE, BETWEEN = 0, 1  # levels: inside a node or a flat ring, and between nodes


class Kind(IntEnum):
    """What a group of transfers carries, in the order in which the groups of one hop are posted."""

    RAIL = 0
    KV = 1
    DKV = 2
    PREFETCH = 3  # K/V that a later hop than the next one works with, in the backward
    RETURN = 4


KEY_VALUES = (Kind.RAIL, Kind.KV, Kind.PREFETCH)


class Key(NamedTuple):
    """The place of a group of transfers in the one order in which every rank posts.

    A group waits only for compute that depends on groups of smaller keys, so that no two ranks can wait for each other.
    """

    phase: str
    hop: int  # during which it is posted
    kind: Kind
    brings: int  # the hop whose K/V arrive with it; of dK/dV the hop that sends them: the same at both ends
    chunk: int

    def __str__(self) -> str:
        coming = f" for hop {self.brings}"
        what = {
            Kind.RAIL: f"K/V by rail{coming}",
            Kind.KV: f"K/V{coming}",
            Kind.DKV: "dK/dV",
            Kind.PREFETCH: f"K/V{coming}",
            Kind.RETURN: "dK/dV by rail",
        }[self.kind]
        return f"{self.phase} hop {self.hop}: {what}, chunk {self.chunk}"


class Heads(NamedTuple):
    """One chunk of a hop: the key heads and the query heads that belong to them."""

    number: int
    kv: slice
    q: slice


def chunks_of(count: int, heads: int, kv_heads: int) -> tuple[Heads, ...]:
    """``kv_heads`` cut into ``count`` runs whose lengths differ by one at most; none is longer than the first."""
    edges = [-(-kv_heads * i // count) for i in range(count + 1)]
    group = heads // kv_heads
    return tuple(
        Heads(i, slice(start, end), slice(start * group, end * group)) for i, (start, end) in enumerate(pairwise(edges))
    )


class MaskArgs(TypedDict):
    """What a kernel takes besides tensors: who sees whom, and what becomes of the scores."""

    bounds: Bounds
    scores: Scores


Posted = Callable[[object, Fence, Sequence[Fence], Sequence[tuple[int, int]], Sequence[tuple[int, int]]], None]
"""Notes a post: what it is, its fence, what it waits for, and (peer, bytes) of what is sent and received."""


def ignore_post(key: object, fence: Fence, after: Sequence[Fence], sent: object, received: object) -> None:
    """Nobody watches this call's transfers."""


@dataclass(frozen=True)
class RingCall:
    """What the loops of one call work with."""

    plan: Plan
    phase: str
    transports: tuple[Transport, ...]  # one per level
    kv_slots: Slots
    dkv_slots: Slots
    span: Span  # names what the host or the stream is at, for a trace
    chunks: tuple[Heads, ...]
    prefetch: int
    wire: Wire | None = None  # how K/V travel; None: as they are
    grad_wire: Wire | None = None
    posted: Posted = ignore_post
    waiting: Callable[[Hop], AbstractContextManager[object]] = nullcontext  # around waits that no span names
    scores: Scores = PLAIN  # what becomes of q k^T, all heads
    posts: list[Fence] = field(default_factory=list)

    @cached_property
    def _scores(self) -> tuple[Scores, ...]:
        return tuple(self.scores.of_heads(heads.q) for heads in self.chunks)

    def mask_args(self, hop_mask: HopMask, heads: Heads) -> MaskArgs:
        """What the kernels take of one part of a hop's mask, for a chunk of heads."""
        scores = self._scores[heads.number]
        return {"bounds": hop_mask.bounds, "scores": scores if scores is PLAIN else hop_mask.place(scores)}

    def mark(self) -> Fence:
        """The point that compute has reached."""
        return self.transports[INSIDE].mark()

    def post(self, level: int, key: Key, sends: Load, receives: Load, after: Sequence[Fence]) -> Fence | None:
        """One group of transfers; None where there is nothing to move."""
        if not sends.messages and not receives.messages:
            return None
        fence = self.transports[level].post(sends=sends.messages, receives=receives.messages, after=after)
        self.posts.append(fence)
        self.posted(key, fence, after, sends.sizes, receives.sizes)
        return fence

    def settle(self) -> None:
        """Wait for everything posted: after the call, the caller may do with its tensors as it likes.

        The newest first: where the posts of a level run in order on one stream, it speaks for those before it, and
        waiting for them is nothing. Between virtual ranks what was sent is read on the receiver's stream: no later
        post speaks for that.
        """
        with self.waiting(self.plan.hops[-1]):
            for fence in reversed(self.posts):
                fence.wait()


class Load(NamedTuple):
    """What goes to one peer, or comes from it, in one group of transfers."""

    messages: tuple[Message, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()  # (peer, bytes)


NO_LOAD = Load()


def load(peer: int | None, tensors: Tensors, into: Tensors = ()) -> Load:
    """A tensor without elements is not sent, and its receiver knows that too.

    ``into`` are this rank's tensors in the place where the peer's receive, if all ranks map the slots.
    """
    if peer is None:
        return NO_LOAD
    moved = tuple(x for x in tensors if x.numel())
    messages: list[Message] = [Message(peer, x) for x in moved]
    if into:
        messages = [Placed(peer, x, place) for x, place in zip(tensors, into, strict=True) if x.numel()]
    return Load(tuple(messages), tuple((peer, x.nbytes) for x in moved))


def together(loads: Sequence[Load]) -> Load:
    """Several in one group of transfers."""
    if len(loads) == 1:
        return loads[0]
    return Load(tuple(one for x in loads for one in x.messages), tuple(one for x in loads for one in x.sizes))


class Arrival(NamedTuple):
    """Tensors that are on their way, and the point where they are here (None: nothing moved)."""

    fence: Fence | None
    tensors: Tensors

    def wait(self) -> Tensors:
        """Let what is issued from now on run after the arrival; returns the tensors."""
        if self.fence is not None:
            self.fence.wait()
        return self.tensors


class RingBuffer:
    """One pair of tensors, shaped like this rank's ``like``, moving from rank to rank through its own slots.

    Every slot is cut into the chunks of a hop, each filled and freed on its own.
    """

    def __init__(self, call: RingCall, slots: Slots, like: Tensors, dtype: torch.dtype, wire: Wire | None) -> None:
        self.call = call
        self._slots = slots
        self._like = like
        self._dtype = dtype
        self._wire = wire
        self._chunks = len(call.chunks)
        self._staging: dict[tuple[int, int], Tensors] = {}
        if len(call.plan.hops) > 1:
            longest = self._shapes(call.plan.longest, call.chunks[0])
            slots.reserve(slot_nbytes([spec for shape in longest for spec in self._specs(shape)]))
        shapes = tuple(x.shape for x in like)
        self._kept = slots.kept((shapes, dtype, wire and wire.name, self._chunks, call.plan.lengths))

    def _shapes(self, tokens: int, heads: Heads) -> list[tuple[int, ...]]:
        return [(x.shape[0], tokens, heads.kv.stop - heads.kv.start, x.shape[3]) for x in self._like]

    def _specs(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(shape, self._dtype)] if self._wire is None else self._wire.specs(shape)

    def buffers(self, slot: int, hop: Hop, heads: Heads) -> Tensors:
        """A chunk of a slot, seen as what travels for the shard of a hop; the same tensors from call to call."""
        key = slot, self.call.plan.lengths[hop.index], heads.number
        if key not in self._kept:
            specs = [spec for shape in self._shapes(key[1], heads) for spec in self._specs(shape)]
            self._kept[key] = self._slots.tensors(slot * self._chunks + heads.number, specs)
        tensors: Tensors = self._kept[key]
        return tensors

    def load(self, peer: int | None, slot: int | None, hop: Hop, heads: Heads, into: int | None = None) -> Load:
        """:meth:`buffers` as messages from a peer, or to one that receives them in the slot ``into``."""
        if slot is None:
            return NO_LOAD
        key = peer, slot, self.call.plan.lengths[hop.index], heads.number, into
        if key not in self._kept:
            mapped = self._slots.windows is not None
            places = self.buffers(into, hop, heads) if mapped and into is not None else ()
            self._kept[key] = load(peer, self.buffers(slot, hop, heads), places)
        messages: Load = self._kept[key]
        return messages

    def staging(self, hop: Hop, heads: Heads) -> Tensors:
        """Memory for a chunk of the shard of a hop as the kernels take it, the same for all of them: the compute
        stream alone writes and reads it."""
        key = self.call.plan.lengths[hop.index], heads.number
        if key not in self._staging:
            whole = zip(self._scratch, self._shapes(key[0], heads), strict=True)
            self._staging[key] = tuple(x[: prod(shape)].view(shape) for x, shape in whole)
        return self._staging[key]

    @cached_property
    def _scratch(self) -> Tensors:
        sizes = [prod(shape) for shape in self._shapes(self.call.plan.longest, self.call.chunks[0])]
        return tuple(torch.empty(size, dtype=self._dtype, device=self._like[0].device) for size in sizes)

    def encode(self, given: Tensors, into: Tensors) -> Tensors:
        """Write a pair as it travels."""
        if self._wire is None:
            for x, place in zip(given, into, strict=True):
                place.copy_(x)
            return into
        half = len(into) // 2
        for x, wire in zip(given, (into[:half], into[half:]), strict=True):
            self._wire.encode(x, wire)
        return into

    def decode(self, travelled: Tensors, into: Tensors) -> Tensors:
        """The pair that ``travelled`` stands for."""
        assert self._wire is not None
        half = len(travelled) // 2
        for x, wire in zip(into, (travelled[:half], travelled[half:]), strict=True):
            self._wire.decode(wire, x)
        return into

    def free(self, slot: int, heads: Heads) -> tuple[Fence, ...]:
        """What must be over before the chunk of the slot may be overwritten."""
        return self._slots.free(slot * self._chunks + heads.number)

    def busy(self, slot: int | None, heads: Heads, fence: Fence | None) -> None:
        """The chunk of the slot is in use until ``fence``."""
        if slot is not None and fence is not None:
            self._slots.busy(slot * self._chunks + heads.number, fence)

    def computed(self, slot: int | None, heads: Heads) -> None:
        """The compute issued so far reads or writes the slot: nothing may arrive in it before that is over."""
        if slot is not None:
            self._slots.busy(slot * self._chunks + heads.number, self.call.mark())
