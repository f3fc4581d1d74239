"""Schedules printed as text."""

from __future__ import annotations

import re

import pytest

from ringattn.comm.topology.topology import Topology
from ringattn.ring.schedule.formatting import WIDTH, printed_indices
from ringattn.ring.schedule.layout import Documents, Layout
from ringattn.ring.schedule.mask import Mask
from ringattn.ring.schedule.schedule import schedule

from ..support.layouts import Window

CAUSAL = Mask(causal=True)


def test_printed_schedules() -> None:
    assert (
        str(schedule(Layout.contiguous(6, 3), CAUSAL))
        == """\
3 ranks, K/V move to the next rank, 6 of 9 hops compute

K/V: N computes with shard N, (N) only passes it on, > sends it on, . nothing
        hop 0  hop 1  hop 2
rank 0  0 >    .      .
rank 1  1 >    0 >    .
rank 2  2      1      0

dK/dV: N holds dK/dV of shard N, > sends them on, ^ returns them to the owner,
< receives them back, . nothing
        hop 0  hop 1  hop 2
rank 0  0 <    .      .
rank 1  1 <    0 >    .
rank 2  .      1 ^    0 ^"""
    )


def test_printed_two_level_schedule_with_reordered_nodes() -> None:
    """Rows follow the ring. K/V pass through a node or outer root that does not need them."""
    mask = Window(causal=True, left=3)
    topology = Topology(((4, 1), (0, 3), (5, 2)))
    assert (
        str(schedule(Layout.contiguous(12, 6), mask, topology=topology, direction=-1))
        == """\
6 ranks (3 nodes of 2 ranks), K/V move to the previous rank, every 2 hops to the
previous node, 15 of 36 hops compute

K/V: N computes with shard N, (N) only passes it on, > sends it on,
» sends it on by rail, . nothing
               hop 0  hop 1  |  hop 2    hop 3  |  hop 4  hop 5
node 0 rank 4  4 »    .      |  (0) > »  3      |  .      2
node 0 rank 1  1 »    .      |  (3) > »  0      |  (2) >  .
node 1 rank 0  0 »    .      |  .        .      |  .      .
node 1 rank 3  3 »    .      |  2 »      .      |  1      .
node 2 rank 5  5      .      |  4        .      |  (0) >  3
node 2 rank 2  2 »    .      |  1 »      .      |  (3) >  0

dK/dV: N holds dK/dV of shard N, > sends them on, ^ returns them to the root,
< receives them back, » sends them to the owner by rail, . nothing
               hop 0  hop 1  |  hop 2  hop 3  |  hop 4  hop 5
node 0 rank 4  .      .      |  0 < »  3 ^    |  .      2 ^
node 0 rank 1  .      .      |  3 < »  0 ^    |  2 < »  .
node 1 rank 0  .      .      |  .      .      |  .      .
node 1 rank 3  .      .      |  2 »    .      |  1 »    .
node 2 rank 5  .      .      |  4 »    .      |  0 < »  3 ^
node 2 rank 2  .      .      |  1 »    .      |  3 < »  0 ^"""
    )


def test_large_tables_omit_the_middle() -> None:
    """The row of omitted hops keeps the outer steps apart, too."""
    tables = str(schedule(Layout.striped(24, 24), Mask(), topology=Topology.grid(8, 3))).split("\n\n")
    rows = tables[1].splitlines()[1:]  # the legend has two lines
    (left_out,) = (row for row in rows if row.startswith("…"))
    outers = [column for column, sign in enumerate(rows[1]) if sign == "|"]
    assert outers and outers == [column for column, sign in enumerate(left_out) if sign == "|"]
    assert set(left_out) == set("…| ")
    ranks, hops = [*map(str, range(12)), "21", "22", "23"], [*map(str, range(6)), "23"]
    assert [row.split()[3] for row in rows[2:] if row != left_out] == ranks
    assert [word for word in rows[1].replace("|", "").replace("hop", "").split() if word != "…"] == hops


@pytest.mark.parametrize(
    ("world", "nodes"),
    [(8, 1), (16, 1), (8, 4), (16, 2), (128, 32), pytest.param(1024, 128, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(documents=Documents([*range(0, 2049, 96), 2048]))])
def test_lines_fit_a_terminal(world: int, nodes: int, mask: Mask) -> None:
    """Each table keeps its first hops and its last one."""
    lines = str(schedule(Layout.zigzag(2048, world), mask, topology=Topology.grid(nodes, world // nodes))).splitlines()
    assert max(map(len, lines)) <= WIDTH
    named = [re.findall(r"hop (\d+)", line) for line in lines if line.lstrip().startswith("hop ")]
    assert len(named) == 2 and all(hops[0] == "0" and len(hops) >= 3 for hops in named)
    assert printed_indices(9, 4) == [0, 1, None, 8]


HEADERS: list[tuple[Topology, str]] = [
    (Topology.flat(8), "8 ranks, K/V move to the ranks +2, +4, -2 from the owner, 16 of 32 hops"),
    (Topology.flat(32), "+2, +4, +6, +8, +10, +12, +14, +16, -14, -12, -10, -8, -6, -4, -2 from"),
    (Topology.flat(40), "+2, +4, +6, +8, +10, +12, +14, +16, +18, +20, -18, …, -6, -4, -2 from"),
    (Topology.grid(8, 2), "the next rank, every 2 hops to the nodes +2, +4, -2 from"),
]


@pytest.mark.parametrize(("topology", "words"), HEADERS)
def test_the_header_lists_unusual_distances(topology: Topology, words: str) -> None:
    """The header lists distances if they do more than count up; here every second rank or node."""
    per_node = len(topology.nodes[0]) if topology.two_level else 1
    layout = Layout([[(rank, 1)] if rank // per_node % 2 == 0 else [] for rank in range(topology.world)])
    header = str(schedule(layout, Mask(), topology=topology)).partition("\n\n")[0]
    assert words in header.replace("\n", " ")
