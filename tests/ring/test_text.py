"""Schedules as text."""

from __future__ import annotations

from ringattn.comm.topology.topology import Topology
from ringattn.ring.schedule.layout import Layout
from ringattn.ring.schedule.mask import Mask
from ringattn.ring.schedule.schedule import schedule

from ..support.layouts import Window

CAUSAL = Mask(causal=True)


def test_a_thousand_ranks_print() -> None:
    plan = schedule(Layout.contiguous(4096, 1024), CAUSAL)
    lines = str(plan).splitlines()
    assert lines[0] == "1024 ranks, K/V move to the next rank, 524800 of 1048576 hops compute"
    assert lines[3].split()[-6:] == ["hop", "1021", "hop", "1022", "hop", "1023"]
    assert lines[3].split()[24:26] == ["…", "hop"]
    assert lines[4].split()[:4] == ["rank", "0", "0", ">"]
    assert lines[4].split()[-4:] == ["…", ".", ".", "."]
    assert lines[16].split() == ["…"] * 17
    assert [line.split()[1] for line in lines[4:20] if "rank" in line] == [*map(str, range(12)), "1021", "1022", "1023"]
    assert max(map(len, lines)) < 170
    assert plan.hops(1023)[1023].kv_from == 1022


def test_text() -> None:
    assert (
        str(schedule(Layout.contiguous(6, 3), CAUSAL))
        == """\
3 ranks, K/V move to the next rank, 6 of 9 hops compute

K/V: N shard N is computed with, (N) only passes, > goes on, . nothing comes
         hop 0   hop 1   hop 2
rank 0   0 >     .       .
rank 1   1 >     0 >     .
rank 2   2       1       0

dK/dV sums: N of shard N, > go on, ^ go home, . none; hop 0: < come home
         hop 0   hop 1   hop 2
rank 0   0 <     .       .
rank 1   1 <     0 >     .
rank 2   .       1 ^     0 ^"""
    )


def test_text_of_nodes_in_any_order_the_other_way() -> None:
    """Rows are in ring order; what a node, or a turn's first rank, sees nothing of goes through it."""
    mask = Window(causal=True, left=3)
    topology = Topology(((4, 1), (0, 3), (5, 2)))
    assert (
        str(schedule(Layout.contiguous(12, 6), mask, topology=topology, direction=-1))
        == """\
6 ranks (3 nodes of 2 ranks), K/V move to the previous rank, every 2 hops to the previous node, 15 of 36 hops compute

K/V: N shard N is computed with, (N) only passes, > goes on, » leaves by rail, . nothing comes
                hop 0   hop 1   |   hop 2     hop 3   |   hop 4   hop 5
node 0 rank 4   4 »     .       |   (0) > »   3       |   .       2
node 0 rank 1   1 »     .       |   (3) > »   0       |   (2) >   .
node 1 rank 0   0 »     .       |   .         .       |   .       .
node 1 rank 3   3 »     .       |   2 »       .       |   1       .
node 2 rank 5   5       .       |   4         .       |   (0) >   3
node 2 rank 2   2 »     .       |   1 »       .       |   (3) >   0

dK/dV sums: N of shard N, > go on, ^ go back, . none; a turn's first hop: < come back, » go home by rail
                hop 0   hop 1   |   hop 2   hop 3   |   hop 4   hop 5
node 0 rank 4   .       .       |   0 < »   3 ^     |   .       2 ^
node 0 rank 1   .       .       |   3 < »   0 ^     |   2 < »   .
node 1 rank 0   .       .       |   .       .       |   .       .
node 1 rank 3   .       .       |   2 »     .       |   1 »     .
node 2 rank 5   .       .       |   4 »     .       |   0 < »   3 ^
node 2 rank 2   .       .       |   1 »     .       |   3 < »   0 ^"""
    )


def test_a_large_table_keeps_the_turns_apart() -> None:
    """Also in the row that stands for those left out."""
    rows = str(schedule(Layout.striped(24, 24), Mask(), topology=Topology.grid(3, 8))).split("\n\n")[1].splitlines()
    (left_out,) = (row for row in rows if row.startswith("…"))
    turns = [column for column, sign in enumerate(rows[1]) if sign == "|"]
    assert turns and turns == [column for column, sign in enumerate(left_out) if sign == "|"]
    assert set(left_out) == set("…| ")
