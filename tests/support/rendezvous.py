"""The ring loop on rendezvous transfers, which start only when both ends are ready: the strictest model.

Every rank is a thread, and one thread runs at a time. Each level of the ring has one queue of groups per rank. The
groups of a queue run one after the other, each when the fences in its ``after`` are done. A message moves when both its
ends are in running groups. A shard has one token per run. K/V hold the number of shard and run, and dK/dV count the
ranks that added to them. A slot holds NaN from the start of its group until the message arrives, so that a late reader
of the old contents fails.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ringattn.comm import Fence, Message, Slots
from ringattn.comm.transport import DONE, Edge
from ringattn.ring import loop
from ringattn.ring.buffers import INTER_NODE, INTRA_NODE, PostKey, RingCall, Tensors, TransferKind, split_heads
from ringattn.ring.schedule.plan import HopMask, Plan, _join_runs
from ringattn.ring.schedule.schedule import Schedule

CPU = torch.device("cpu")
Pairs = list[tuple[int, int]]
Sizes = Sequence[tuple[int, int]]


@dataclass(eq=False)
class PostedGroup:
    """One post: its messages that have not moved yet, and the fences that it waits for."""

    world: RendezvousWorld
    rank: int
    sends: list[Message]
    receives: list[Message]
    after: Sequence[Fence]
    is_running: bool = False

    def done(self) -> bool:
        return self.is_running and not self.sends and not self.receives

    def wait(self) -> None:
        self.world.wait(self)

    def start(self) -> None:
        """Mark the group as running, check its sends and poison its receive buffers with NaN."""
        self.is_running = True
        assert not any(x.isnan().any() for _, x in self.sends), "a tensor was sent before its data arrived"
        for _, x in self.receives:
            x.fill_(torch.nan)


class RendezvousWorld:
    """Queues of all ranks' posts, and the group that each rank waits for."""

    def __init__(self, size: int) -> None:
        self.running = size
        self.turn = threading.Condition()
        self.queues = {
            (level, rank): deque[PostedGroup]() for level in (INTRA_NODE, INTER_NODE) for rank in range(size)
        }
        self.waits: dict[int, PostedGroup] = {}
        self.errors: list[BaseException] = []

    def run(self, body: Callable[[int], None]) -> None:
        """Run ``body(rank)`` for all ranks to their ends.

        Raises:
            AssertionError: the ranks wait for each other.
        """

        def run_rank(rank: int) -> None:
            with self.turn:
                try:
                    body(rank)
                except BaseException as error:
                    self.errors.append(error)
                self.running -= 1
                self.turn.notify_all()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.running)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        assert all(group.done() for queue in self.queues.values() for group in queue), "a message has no receiver"

    def wait(self, group: PostedGroup) -> None:
        """Wait until the messages of a group have moved; fail if all ranks wait for each other."""
        self.waits[group.rank] = group
        while not group.done():
            stuck = len(self.waits) == self.running and not any(wait.done() for wait in self.waits.values())
            assert not stuck and not self.errors, f"deadlock: ranks {sorted(self.waits)} wait for each other"
            self.turn.wait()
        del self.waits[group.rank]

    def post(self, level: int, group: PostedGroup) -> None:
        """Start every group that may run, and move every message whose two ends are running."""
        self.queues[level, group.rank].append(group)
        moved = True
        while moved:
            moved = False
            running = {key: queue[0] for key, queue in self.queues.items() if self.first_runs(queue)}
            for (level, rank), source in running.items():
                for message in [*source.sends]:
                    target = running.get((level, message.peer))
                    into = next((m for m in target.receives if m.peer == rank), None) if target else None
                    if target and into:
                        into.tensor.copy_(message.tensor)
                        source.sends = [m for m in source.sends if m is not message]
                        target.receives = [m for m in target.receives if m is not into]
                        moved = True
                        self.turn.notify_all()

    @staticmethod
    def first_runs(queue: deque[PostedGroup]) -> bool:
        """Return True if the first unfinished group of the queue is running."""
        while queue and queue[0].done():
            queue.popleft()
        if queue and not queue[0].is_running and all(fence.done() for fence in queue[0].after):
            queue[0].start()
        return bool(queue) and queue[0].is_running


class LevelTransport:
    """One rank's transport of one level of the ring, with the methods that the ring loop calls."""

    def __init__(self, world: RendezvousWorld, level: int, rank: int, edges: Sequence[Edge]) -> None:
        self.world, self.level, self.rank = world, level, rank
        self.peers = {to for source, to in edges if source == rank}

    def mark(self) -> Fence:
        return DONE

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence]) -> Fence:
        assert {peer for peer, _ in sends} <= self.peers, "a send uses an edge that was not opened"
        group = PostedGroup(self.world, self.rank, [*sends], [*receives], after)
        self.world.post(self.level, group)
        return group


@dataclass
class RecordingRank:
    """One rank that records its work; serves as the kernel of all chunks, with hops in place of bounds."""

    rank: int
    done: dict[str, Pairs] = field(default_factory=lambda: {"out": [], "dq": [], "dkdv": []})
    """Every (rank, shard) that was computed, once per group of heads; run r of a shard counts as shard + r * world."""
    dkdv_of_own: list[Counter[int]] = field(default_factory=list)
    """Per chunk, the ranks that added to dK/dV of this rank's shard."""
    lines: list[str] = field(default_factory=list)  # log of posts and launches as text
    posts: list[tuple[PostKey, list[int], list[int]]] = field(default_factory=list)
    """Every post: its key, the peers sent to and the peers received from."""

    def posted(self, key: Any, fence: Fence, after: Sequence[Fence], sent: Sizes, received: Sizes) -> None:
        assert not self.posts or self.posts[-1][0] < key, f"{key} is posted out of the order of keys"
        what = {
            TransferKind.RAIL: f"K/V {key.payload_hop} by rail",
            TransferKind.DKV: "dK/dV",
            TransferKind.RETURN: "dK/dV by rail",
        }
        chunk = f" chunk {key.chunk}" if key.chunk else ""
        self.lines.append(
            f"post {what.get(key.kind, f'K/V {key.payload_hop}')}{chunk}: {len(sent)} out, {len(received)} in"
        )
        self.posts.append((key, [peer for peer, _ in sent], [peer for peer, _ in received]))

    def compute(self, what: str, k: Tensor, v: Tensor, hop: Any, after: str) -> None:
        assert all(x.eq(hop.shard).all() for x in (k, v)), f"{what} of hop {hop.index}: its slot holds {k}, {v}"
        self.done[what] += [(self.rank, hop.shard)] if hop.computes else []
        self.lines.append(what + after)

    def fold(self, k: Tensor, v: Tensor, bounds: Any, *, final: bool, **_: Any) -> None:
        self.compute("out", k, v, bounds, " final" * final)

    def dq(self, k: Tensor, v: Tensor, bounds: Any, *, final: bool, **_: Any) -> None:
        self.compute("dq", k, v, bounds, " final" * final)

    def dkdv(
        self, k: Tensor, v: Tensor, bounds: Any, *, accum: Callable[[], Tensors] | None, out: Tensors, **_: Any
    ) -> None:
        self.compute("dkdv", k, v, bounds, " continued" * (accum is not None))
        for x, before in zip(out, accum() if accum is not None else map(torch.zeros_like, out), strict=True):
            x.copy_(before)
            x[..., self.rank] += bounds.computes

    def run(self, call: RingCall, size: int) -> None:
        tokens = torch.arange(len(call.plan.runs) or 1)[:, None, None] * size + self.rank
        k, v = (tokens.float().repeat(1, 1, len(call.heads), size) for _ in range(2))
        backends: list[Any] = [self] * len(call.heads)
        if call.phase == "forward":
            return loop.forward(call, backends, k, v)
        dkdv = tuple(x.fill_(torch.nan) for x in (k.clone(), v.clone()))
        loop.backward(call, backends, k, v, dkdv)
        assert dkdv[0].equal(dkdv[1])
        counts = [enumerate(chunk.int().tolist()) for chunk in dkdv[0][0].transpose(0, 1).flatten(0, 1)]
        self.dkdv_of_own = [Counter({rank: count for rank, count in chunk if count}) for chunk in counts]


def plan_steps(plan: Schedule, rank: int, parts: int = 1, run: int = 0) -> Plan:
    """Return a plan of one-token shards whose masks are the hops themselves, with the number of shard and run."""
    hops = plan.hops(rank)
    named = [replace(hop, shard=hop.shard + run * plan.world) for hop in hops]
    masks = [
        tuple(HopMask(hop, None, hop.shard) for _ in range(parts if hop.computes or not hop.index else 0))  # type: ignore[arg-type]
        for hop in named
    ]
    return Plan(
        rank=rank,
        hops=hops,
        inner=plan.inner,
        hop_masks=tuple(masks),
        lengths=(1,) * len(hops),
        max_shard_keys=1,
        send_index=None,
        last_launch_hop=max((hop.index for hop in hops if hop.computes), default=0),
        slots=plan.slots,
        edges=plan.edges,
        returns_early=plan.returns_early,
        dkv_returns={
            root.index + last_use_distance(plan, root.shard, root.index): root
            for root in hops[:: plan.inner]
            if root.dkv_from is not None
        },
    )


def last_use_distance(plan: Schedule, shard: int, begin: int) -> int:
    """Return how many inner steps after its root at hop ``begin`` a shard is last used."""
    return max(step for step in range(plan.inner) if not step or plan.active[shard][begin + step])


def run_ranks(
    plan: Schedule, *more_runs: Schedule, phase: str, prefetch: int = 2, groups: int = 1, parts: int = 1
) -> list[RecordingRank]:
    """Run a forward or a backward on all ranks, with ``parts`` mask parts per hop, and check the posts.

    Chunks are ``groups`` of heads, and runs of tokens if there are ``more_runs``, with a schedule for each.
    """
    world, ranks = RendezvousWorld(plan.world), [RecordingRank(rank) for rank in range(plan.world)]

    def run_rank(rank: int) -> None:
        steps = [plan_steps(run, rank, parts, number) for number, run in enumerate((plan, *more_runs))]
        own_plan = _join_runs(steps, [1] * len(steps)) if more_runs else steps[0]
        chunks = groups * len(steps)
        transports: Any = tuple(LevelTransport(world, level, rank, edges) for level, edges in enumerate(own_plan.edges))
        call = RingCall(
            plan=own_plan, phase=phase, transports=transports, kv_slots=Slots(own_plan.kv_slots * chunks, CPU),
            dkv_slots=Slots(own_plan.dkv_slots * chunks, CPU), record_span=lambda kind, hop: nullcontext(),
            heads=split_heads(groups, groups, groups), prefetch=prefetch, on_post=ranks[rank].posted,
        )  # fmt: skip
        ranks[rank].run(call, plan.world)

    world.run(run_rank)
    posts = [(rank.rank, *post) for rank in ranks for post in rank.posts]
    sends = Counter((key, rank, peer) for rank, key, to, _ in posts for peer in to)
    assert sends == Counter((key, peer, rank) for rank, key, _, source in posts for peer in source)
    assert set(sends.values()) <= {2}, "more than two tensors under one key"
    return ranks


def computed_pairs(ranks: Sequence[RecordingRank], what: str) -> Pairs:
    return [pair for rank in ranks for pair in rank.done[what]]
