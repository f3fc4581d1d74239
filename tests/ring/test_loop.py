"""The order in which the ring posts, waits and computes, and what never happens: seen from beneath, on both ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ringattn import Layout, LocalWorld
from ringattn.comm import Fence, LocalGroup, Slots
from ringattn.comm.groups import open_transports
from ringattn.comm.topology.topology import Topology
from ringattn.ring import Mask, loop
from ringattn.ring.buffers import BETWEEN, INSIDE, Call, Key, Kind, Tensors, chunks_of
from ringattn.ring.schedule.plan import plan
from ringattn.ring.schedule.schedule import schedule

from ..support.rendezvous import run_ranks

CPU = torch.device("cpu")
KV_HEADS = 2
RAILS = (Kind.RAIL, Kind.RETURN)
Sizes = Sequence[tuple[int, int]]


@dataclass
class Log:
    """What one rank did, as text, and what it posted: the key, the peers sent to, and the peers received from."""

    rank: int
    lines: list[str] = field(default_factory=list)
    posts: list[tuple[Key, list[int], list[int]]] = field(default_factory=list)

    def posted(self, key: object, fence: Fence, after: Sequence[Fence], sent: Sizes, received: Sizes) -> None:
        assert isinstance(key, Key)
        what = {Kind.RAIL: f"K/V {key.brings} by rail", Kind.DKV: "dK/dV"} | dict.fromkeys(
            (Kind.KV, Kind.PREFETCH), f"K/V {key.brings}"
        )
        chunk = f" chunk {key.chunk}" if key.chunk else ""
        moves = f"{len(sent)} out, {len(received)} in"
        self.lines.append(f"post {what.get(key.kind, 'dK/dV by rail')}{chunk}: {moves}")
        self.posts.append((key, [peer for peer, _ in sent], [peer for peer, _ in received]))


class Backend:
    """Computes nothing and writes down what it was called with."""

    def __init__(self, log: Log) -> None:
        self.log = log.lines

    def fold(self, *_: Any, final: bool, **others: Any) -> None:
        self.log.append("fold final" if final else "fold")

    def dq(self, *_: Any, final: bool, **others: Any) -> None:
        self.log.append("dq final" if final else "dq")

    def dkdv(self, *_: Any, accum: Callable[[], Tensors] | None, out: Tensors, **others: Any) -> None:
        self.log.append(f"dkdv{' continued' if accum is not None and accum() else ''}")
        for x in out:
            x.fill_(1.0)


def logs(
    layout: Layout, phase: str, *, causal: bool = True, topology: Topology | None = None,
    slots: int = 3, prefetch: int = 1, chunks: int = 1,
) -> list[Log]:  # fmt: skip
    """One pass of the real loop on virtual ranks: what each of them did."""

    def one(group: LocalGroup) -> Log:
        log = Log(group.rank())
        transports = open_transports(group, transport="local", device=CPU, topology=topology)
        steps = plan(layout, Mask(causal=causal), group.rank(), 1, CPU, topology, slots)
        call = Call(
            plan=steps,
            phase=phase,
            transports=transports,
            kv_slots=Slots(steps.kv_slots * chunks, CPU),
            dkv_slots=Slots(steps.dkv_slots * chunks, CPU),
            span=lambda kind, hop: nullcontext(),
            chunks=chunks_of(chunks, KV_HEADS, KV_HEADS),
            prefetch=prefetch,
            posted=log.posted,
        )
        k = torch.zeros(1, layout.lengths[group.rank()], KV_HEADS, 4)
        backends = [Backend(log) for _ in call.chunks]
        if phase == "forward":
            loop.forward(call, backends, k, k)
        else:
            loop.backward(call, backends, k, k, (k.clone(), k.clone()))
        for transport in transports:
            transport.close()
        return log

    with LocalWorld(layout.world) as world:
        return world.run(one)


def test_dkv_travel_while_dq_computes_and_return_under_the_last_one() -> None:
    for log in logs(Layout.zigzag(24, 3), "backward"):
        assert log.lines == [
            "post K/V 1: 2 out, 2 in",  # hidden by the local dQ
            "dq",
            "post K/V 2: 2 out, 2 in",
            "dkdv",
            "post dK/dV: 2 out, 2 in",  # of hop 1 on, those for hop 2 in
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",  # back to the owner, hidden by the last dQ
            "dq final",
            "dkdv continued",
        ]


def test_each_chunk_of_heads_goes_on_while_the_next_computes() -> None:
    for log in logs(Layout.zigzag(16, 2), "backward", chunks=2):
        assert log.lines == [
            "post K/V 1: 2 out, 2 in",
            "post K/V 1 chunk 1: 2 out, 2 in",
            "dq",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv",
            "post dK/dV chunk 1: 2 out, 2 in",
            "dq final",
            "dkdv continued",
            "dkdv continued",
        ]


def test_kv_leave_a_node_first_and_its_dkv_return_under_the_next_outer_step() -> None:
    for log in logs(Layout.zigzag(24, 6), "backward", topology=Topology.grid(3, 2)):
        assert log.lines == [
            "post K/V 2 by rail: 2 out, 2 in",  # a whole outer step to arrive
            "post K/V 1: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "post K/V 4 by rail: 2 out, 2 in",
            "post K/V 3: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "dkdv continued",  # the root adds its part last
            "post dK/dV by rail: 2 out, 2 in",
            "post K/V 5: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv continued",
            "post dK/dV by rail: 2 out, 2 in",  # hidden by the own dK/dV
            "dkdv continued",
        ]


RINGS = [Topology.flat(world) for world in (1, 2, 3, 5)] + [
    Topology.grid(2, 2),
    Topology.grid(3, 2),
    Topology(((3, 1), (0, 2))),
]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("topology", RINGS, ids=lambda topology: str(topology.nodes))
def test_every_rank_posts_in_the_one_order(topology: Topology, phase: str) -> None:
    """Ascending keys, the same at both ends of a transfer, and just those that the schedule's own tests run with."""
    world = topology.world
    for causal in (True, False):
        for slots, prefetch, chunks in ((3, 0, 1), (3, 2, 2), (2, 1, 2)):
            layout = (Layout.contiguous if slots == 2 else Layout.zigzag)(30, world)
            how = {"topology": topology, "slots": slots, "prefetch": prefetch, "chunks": chunks}
            everyone = logs(layout, phase, causal=causal, **how)  # type: ignore[arg-type]
            keys = [[key for key, _, _ in log.posts] for log in everyone]
            assert all(mine == sorted(set(mine)) for mine in keys)
            whole = schedule(layout, Mask(causal=causal), topology=topology, slots=slots)
            model = run_ranks(whole, phase, prefetch=prefetch, chunks=chunks)
            assert keys == [rank.issued for rank in model]
            check_both_ends(everyone)


def check_both_ends(everyone: list[Log]) -> None:
    posts = [(log.rank, *post) for log in everyone for post in log.posts]
    level = {kind: BETWEEN if kind in RAILS else INSIDE for kind in Kind}
    sends = Counter((level[key.kind], key, rank, peer) for rank, key, to, _ in posts for peer in to)
    receives = Counter((level[key.kind], key, peer, rank) for rank, key, _, source in posts for peer in source)
    assert sends == receives
    assert set(sends.values()) <= {2}  # K and V
