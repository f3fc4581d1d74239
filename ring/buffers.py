"""Data shared by all transfers of a call: their posting order, their slots, and the fences that protect the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise, product
from math import gcd, prod
from typing import NamedTuple, TypedDict

import torch

from ..comm import Fence, Message, Placed, Slots, Transport, slot_nbytes
from ..kernels import PLAIN, Bounds, Scores
from .schedule.plan import HopMask, Plan
from .schedule.schedule import Hop
from .wire import Wire

Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
SpanHook = Callable[[str, Hop], AbstractContextManager[None]]
INTRA_NODE, INTER_NODE = 0, 1  # levels: inside a node (or a flat ring), and between nodes


class TransferKind(IntEnum):
    """Content of a group of transfers. The values are the posting order within one hop."""

    RAIL = 0
    KV = 1
    DKV = 2
    PREFETCH = 3  # K/V for a later hop than the next, in the backward
    RETURN = 4


KV_KINDS = (TransferKind.RAIL, TransferKind.KV, TransferKind.PREFETCH)


class PostKey(NamedTuple):
    """Sort key of a group of transfers. Every rank posts its groups in ascending order of their keys.

    A group waits only for compute that depends on groups with smaller keys. Therefore no two ranks wait for each other.
    """

    phase: str
    hop: int  # hop during which the group is posted
    kind: TransferKind
    payload_hop: int  # K/V: the hop that they arrive for; dK/dV: the hop that sends them. Equal at both ends
    chunk: int

    def __str__(self) -> str:
        coming = f" for hop {self.payload_hop}"
        what = {
            TransferKind.RAIL: f"K/V by rail{coming}",
            TransferKind.KV: f"K/V{coming}",
            TransferKind.DKV: "dK/dV",
            TransferKind.PREFETCH: f"K/V{coming}",
            TransferKind.RETURN: "dK/dV by rail",
        }[self.kind]
        return f"{self.phase} hop {self.hop}: {what}, chunk {self.chunk}"


class Heads(NamedTuple):
    """A group of key heads and their query heads."""

    number: int
    kv: slice
    q: slice


def split_heads(count: int, heads: int, kv_heads: int) -> tuple[Heads, ...]:
    """Split the heads into ``count`` groups of almost equal size; the first group is one of the largest."""
    edges = [-(-kv_heads * i // count) for i in range(count + 1)]
    group = heads // kv_heads
    return tuple(
        Heads(i, slice(start, end), slice(start * group, end * group)) for i, (start, end) in enumerate(pairwise(edges))
    )


class Chunk(NamedTuple):
    """Part of a hop that is sent and computed separately: a group of heads and a run of every shard's tokens."""

    number: int
    heads: Heads
    plan: Plan  # of the run of tokens

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the chunk of this rank's own shard from its keys, values or their gradients."""
        return x[:, self.plan.own_keys, self.heads.kv]


def chunk_runs(chunks: int, kv_heads: int) -> int:
    """Return how many runs of tokens each shard is cut into for a number of chunks.

    Chunks are groups of heads if there are enough key heads, and otherwise also runs of tokens.
    """
    return 1 if chunks <= kv_heads else chunks // gcd(chunks, kv_heads)


class MaskArgs(TypedDict):
    """Mask and score arguments of a local kernel."""

    bounds: Bounds
    scores: Scores


PostHook = Callable[[object, Fence, Sequence[Fence], Sequence[tuple[int, int]], Sequence[tuple[int, int]]], None]
"""Callback for each posted group: key, fence, fences it waits for, and ``(peer, bytes)`` of its sends and receives."""


def ignore_post(key: object, fence: Fence, after: Sequence[Fence], sent: object, received: object) -> None:
    """Ignore a post: the default if nobody watches the transfers of a call."""


@dataclass(frozen=True)
class RingCall:
    """State that the loops of one call share: plan, transports, slots, heads and encodings."""

    plan: Plan
    phase: str
    transports: tuple[Transport, ...]  # one per level
    kv_slots: Slots
    dkv_slots: Slots
    record_span: SpanHook  # context manager around compute and waits, for telemetry and traces
    heads: tuple[Heads, ...]  # groups of heads, each with its own local kernel
    prefetch: int
    wire: Wire | None = None  # encoding of K/V; None: sent unchanged
    grad_wire: Wire | None = None
    on_post: PostHook = ignore_post
    record_wait: Callable[[Hop], AbstractContextManager[object]] = nullcontext  # around waits outside any span
    scores: Scores = PLAIN  # softcap, ALiBi and dropout of all heads
    posts: list[Fence] = field(default_factory=list)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks of every hop, in the order in which they are sent and computed."""
        pairs = product(self.heads, self.plan.runs or (self.plan,))
        return tuple(Chunk(number, *pair) for number, pair in enumerate(pairs))

    @cached_property
    def _scores(self) -> tuple[Scores, ...]:
        return tuple(self.scores.slice_heads(heads.q) for heads in self.heads)

    def mask_args(self, hop_mask: HopMask, heads: Heads) -> MaskArgs:
        """Return the mask and score arguments of one part of a hop's mask, for one group of heads."""
        scores = self._scores[heads.number]
        return {"bounds": hop_mask.bounds, "scores": scores if scores is PLAIN else hop_mask.with_positions(scores)}

    def mark(self) -> Fence:
        """Return a fence for the compute issued so far."""
        return self.transports[INTRA_NODE].mark()

    def post(self, level: int, key: PostKey, sends: Payload, receives: Payload, after: Sequence[Fence]) -> Fence | None:
        """Post a group of transfers that waits for ``after``; return its fence, or None if there is nothing to move."""
        if not sends.messages and not receives.messages:
            return None
        fence = self.transports[level].post(sends=sends.messages, receives=receives.messages, after=after)
        self.posts.append(fence)
        self.on_post(key, fence, after, sends.sizes, receives.sizes)
        return fence

    def wait_all(self) -> None:
        """Wait for everything posted, so that the caller may reuse its tensors after the call.

        The newest fence comes first. If the posts of a level run in order on one stream, it covers all earlier ones.
        Between virtual ranks the receiver's stream reads what was sent, so every fence must be waited for.
        """
        with self.record_wait(self.plan.hops[-1]):
            for fence in reversed(self.posts):
                fence.wait()


class Payload(NamedTuple):
    """Messages to or from peers in one group of transfers."""

    messages: tuple[Message, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()  # (peer, bytes)


NO_PAYLOAD = Payload()


def build_payload(peer: int | None, tensors: Tensors, into: Tensors = ()) -> Payload:
    """Build the messages for one peer. Empty tensors are skipped on both sides.

    ``into`` are given if the sender may write into the peer's slot: the same part of this rank's own slots, one tensor
    per message (see :class:`comm.transport.Placed`).
    """
    if peer is None:
        return NO_PAYLOAD
    nonempty = tuple(x for x in tensors if x.numel())
    messages: list[Message] = [Message(peer, x) for x in nonempty]
    if into:
        messages = [Placed(peer, x, place) for x, place in zip(tensors, into, strict=True) if x.numel()]
    return Payload(tuple(messages), tuple((peer, x.nbytes) for x in nonempty))


def combine_payloads(loads: Sequence[Payload]) -> Payload:
    """Combine the messages of several peers into one group of transfers."""
    if len(loads) == 1:
        return loads[0]
    return Payload(tuple(m for x in loads for m in x.messages), tuple(size for x in loads for size in x.sizes))


class Arrival(NamedTuple):
    """Tensors that are being received, with the fence of their arrival (None if nothing moves)."""

    fence: Fence | None
    tensors: Tensors

    def wait(self) -> Tensors:
        """Order all later work after the arrival and return the tensors."""
        if self.fence is not None:
            self.fence.wait()
        return self.tensors


class RingBuffer:
    """Slots for a pair of tensors (K/V or dK/dV) that moves from rank to rank.

    All sizes but the number of tokens are those of ``like``, this rank's own pair. ``dtype`` is that of the decoded
    pair, and ``wire`` its encoding (None: sent unchanged). Each slot is divided into the chunks of a hop; every chunk
    is filled and freed separately.
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
            longest = self._shapes(call.plan.max_shard_keys, call.heads[0])
            slots.reserve(slot_nbytes([spec for shape in longest for spec in self._specs(shape)]))
        shapes = tuple(x.shape for x in like)
        self._views = slots.form_cache((shapes, dtype, wire and wire.name, self._chunks, call.plan.lengths))

    def _shapes(self, tokens: int, heads: Heads) -> list[tuple[int, ...]]:
        """Return the two shapes of a pair with ``tokens`` tokens and one group of heads."""
        return [(x.shape[0], tokens, heads.kv.stop - heads.kv.start, x.shape[3]) for x in self._like]

    def _specs(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and dtypes of the tensors that are sent for a tensor of ``shape``."""
        return [(shape, self._dtype)] if self._wire is None else self._wire.specs(shape)

    def buffers(self, slot: int, hop: Hop, chunk: Chunk) -> Tensors:
        """Return views of one chunk of a slot, as the tensors that are sent for the shard of ``hop``. Cached."""
        key = slot, chunk.plan.lengths[hop.index], chunk.number
        if key not in self._views:
            specs = [spec for shape in self._shapes(key[1], chunk.heads) for spec in self._specs(shape)]
            self._views[key] = self._slots.tensors(slot * self._chunks + chunk.number, specs)
        tensors: Tensors = self._views[key]
        return tensors

    def slot_payload(
        self, peer: int | None, slot: int | None, hop: Hop, chunk: Chunk, into: int | None = None
    ) -> Payload:
        """Return :meth:`buffers` as messages to or from ``peer``; no messages if there is no peer or slot.

        ``into`` is the slot in which the receiver of a send puts them.
        """
        if slot is None:
            return NO_PAYLOAD
        key = peer, slot, chunk.plan.lengths[hop.index], chunk.number, into
        if key not in self._views:
            mapped = self._slots.windows is not None
            places = self.buffers(into, hop, chunk) if mapped and into is not None else ()
            self._views[key] = build_payload(peer, self.buffers(slot, hop, chunk), places)
        messages: Payload = self._views[key]
        return messages

    def staging(self, hop: Hop, chunk: Chunk) -> Tensors:
        """Return memory for one decoded chunk. All slots share it, because only the compute stream uses it."""
        key = chunk.plan.lengths[hop.index], chunk.number
        if key not in self._staging:
            pairs = zip(self._scratch, self._shapes(key[0], chunk.heads), strict=True)
            self._staging[key] = tuple(x[: prod(shape)].view(shape) for x, shape in pairs)
        return self._staging[key]

    @cached_property
    def _scratch(self) -> Tensors:
        sizes = [prod(shape) for shape in self._shapes(self.call.plan.max_shard_keys, self.call.heads[0])]
        return tuple(torch.empty(size, dtype=self._dtype, device=self._like[0].device) for size in sizes)

    def encode(self, pair: Tensors, into: Tensors) -> Tensors:
        """Write a pair of tensors to ``into``, encoded if there is a wire dtype, and return ``into``."""
        if self._wire is None:
            for x, place in zip(pair, into, strict=True):
                place.copy_(x)
            return into
        half = len(into) // 2
        for x, wire in zip(pair, (into[:half], into[half:]), strict=True):
            self._wire.encode(x, wire)
        return into

    def decode(self, encoded: Tensors, into: Tensors) -> Tensors:
        """Decode a received pair into ``into``, and return ``into``."""
        assert self._wire is not None
        half = len(encoded) // 2
        for x, wire in zip(into, (encoded[:half], encoded[half:]), strict=True):
            self._wire.decode(wire, x)
        return into

    def free(self, slot: int, chunk: Chunk) -> tuple[Fence, ...]:
        """Return the fences to wait for before this chunk of the slot may be overwritten."""
        return self._slots.pop_uses(slot * self._chunks + chunk.number)

    def busy(self, slot: int | None, chunk: Chunk, fence: Fence | None) -> None:
        """Mark this chunk of the slot as used until ``fence``."""
        if slot is not None and fence is not None:
            self._slots.add_use(slot * self._chunks + chunk.number, fence)

    def mark_computed(self, slot: int | None, chunk: Chunk) -> None:
        """Mark this chunk of the slot as used by the compute issued so far, which no receive may overwrite earlier."""
        if slot is not None:
            self._slots.add_use(slot * self._chunks + chunk.number, self.call.mark())
