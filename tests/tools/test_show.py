"""``ringattn show``: what it prints, writes and draws agrees with the schedule and with every pair."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.attention import packed
from ringattn.bench.common.flags import human
from ringattn.bench.common.result import read
from ringattn.comm.topology.topology import Topology
from ringattn.ring.schedule import mask as patterns
from ringattn.ring.schedule.layout import Documents, Layout, Span
from ringattn.ring.schedule.mask import Mask, visible_pairs
from ringattn.ring.schedule.schedule import schedule
from ringattn.tools.call import Call, mask_cells

from ..support.layouts import block_layouts, block_masks, layouts, masks, sees

pytestmark = pytest.mark.usefixtures("alone")

SMALL = ["--seqlen", "16", "--world", "2"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["show", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def call_in(*arguments: str) -> dict[str, Any]:
    """The call as the JSON says it."""
    told = json.loads(run(*arguments, "--json", "-"))
    return dict(told["provenance"]["call"])


def of_ranks(call: dict[str, Any], name: str) -> list[Any]:
    return [rank[name] for rank in call["ranks"]]


def call_of(layout: Layout, mask: Mask, direction: int = 1, nodes: int = 1) -> Call:
    return Call(layout, "any", mask, direction, batch=1, heads=2, kv_heads=1, head_dim=4, dtype="bfloat16", nodes=nodes)


def node_counts(world: int) -> st.SearchStrategy[int]:
    return st.sampled_from([1, *(nodes for nodes in range(2, world) if world % nodes == 0)])


def test_text_of_a_small_ring() -> None:
    told = run("--seqlen", "8", "--world", "2", "--heads", "8", "--kv-heads", "2", "--head-dim", "64")
    plan = schedule(Layout.zigzag(8, 2), Mask(causal=True))
    assert (
        told
        == f"""\
zigzag, causal, 8 tokens over 2 ranks; batch 1, 8 heads (2 of K/V) of dim 64, bfloat16

{plan}

         tokens   visible pairs   share      forward     backward   sends forward   sends backward
rank 0        4              18   50.0%   36.9 kFLOP   92.2 kFLOP         2.05 kB          6.14 kB
rank 1        4              18   50.0%   36.9 kFLOP   92.2 kFLOP         2.05 kB          6.14 kB

mask: rows are queries and their rank, columns keys and their shard; the hop that computes, . unseen
         0 0 1 1 1 1 0 0
rank 0   0 . . . . . . .
rank 0   0 0 . . . . . .
rank 1   1 1 0 . . . . .
rank 1   1 1 0 0 . . . .
rank 1   1 1 0 0 0 . . .
rank 1   1 1 0 0 0 0 . .
rank 0   0 0 1 1 1 1 0 .
rank 0   0 0 1 1 1 1 0 0

moves in all, of a full ring: 4.10 kB (100.0%) forward, 12.3 kB (100.0%) backward
a rank sends at most: 2.05 kB (100.0%) forward, 6.14 kB (100.0%) backward
36 visible pairs; ranks compute 100% of the time, if every hop lasts as long as its slowest rank
"""
    )


@st.composite
def calls(draw: st.DrawFn, max_seqlen: int) -> Call:
    """Any layout with any mask that is made of intervals, or blocks of both."""
    world, block = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    mask = draw(masks(global_tokens=True, used=True))
    if draw(st.booleans()) and type(mask) is Mask:
        blocks = max_seqlen // block
        layout = draw(block_layouts(blocks, block, world, whole=True))
        mask = replace(mask, blocks=draw(block_masks(blocks, blocks, block)))
    else:
        layout = draw(layouts(world=world, max_seqlen=max_seqlen))
    return call_of(layout, mask, draw(st.sampled_from([1, -1])), draw(node_counts(world)))


@settings(max_examples=30)
@given(calls(max_seqlen=16))
def test_pairs_and_cells_are_those_of_the_mask(call: Call) -> None:
    layout, mask = call.layout, call.mask
    for rank in range(layout.world):
        for hop in call.plan.hops(rank):
            expected = visible_pairs(mask, layout.positions(rank), layout.positions(hop.shard))
            assert call.pairs[rank, hop.index] == expected
    whole = torch.arange(layout.seqlen)
    assert call.pairs.sum() == visible_pairs(mask, whole, whole)  # no pair is where there is no hop
    ranks, grid = mask_cells(call, cells=64)
    when = {(rank, hop.shard): hop.index for rank in range(layout.world) for hop in call.plan.hops(rank)}
    assert ranks.tolist() == [
        rank for p in range(layout.seqlen) for rank in range(layout.world) if p in layout.positions(rank)
    ]
    for query in range(layout.seqlen):
        for key in range(layout.seqlen):
            index = when.get((int(ranks[query]), int(ranks[key])))
            assert grid[query, key] == (index if sees(call.mask, query, key) else -1)


@pytest.mark.parametrize(
    ("flags", "title", "mask"),
    [
        ("--full --window 4,-1", "window (4, -1)", Mask(window=(4, -1))),
        ("--full --cu-seqlens 0,5,64", "2 documents", Mask(documents=Documents([0, 5, 64]))),
        (
            "--documents 8 --documents-seed 3", "causal, 11 documents",
            Mask(causal=True, documents=Documents(packed(64, 8, seed=3))),
        ),
        ("--seqused-k 40,8 --batch 2", "causal, keys used (40, 8)", Mask(causal=True, used=(40, 8))),
        ("--prefix-length 10", "causal, prefix 10", Mask(causal=True, prefix=10)),
        (
            "--block-mask strided,block=4,stride=8", "causal, 34.0% of blocks of 4",
            Mask(causal=True, blocks=patterns.strided(64, 4, stride=8)),
        ),
        (
            "--full --block-mask bigbird,block=4,window=3,global=1,random=2,seed=7", "40.6% of blocks of 4",
            Mask(blocks=patterns.bigbird(64, 4, window=3, global_=1, random=2, seed=7)),
        ),
        (
            "--full --block-mask longformer,window=8,global=2", "window (4, 4), 2 global tokens",
            Mask(window=(4, 4), global_tokens=((0, 2),)),
        ),
    ],
)  # fmt: skip
def test_every_mask_has_its_flags(flags: str, title: str, mask: Mask, tmp_path: Path) -> None:
    where = ["--seqlen", "64", "--world", "4", "--layout", "contiguous", *flags.split()]
    target = tmp_path / "call.json"
    told = run(*where, "--json", str(target))
    assert told.startswith(f"contiguous, {title}, 64 tokens over 4 ranks; ")
    assert f"\n\n{schedule(Layout.contiguous(64, 4), mask)}\n\n" in told
    call, positions = read(target).provenance["call"], torch.arange(64)
    assert sum(of_ranks(call, "visible pairs")) == visible_pairs(mask, positions, positions)
    named = ("window", "documents", "prefix", "used", "blocks", "global_tokens")
    changed = [name for name in named if getattr(mask, name) != getattr(Mask(), name)]
    assert call["mask"]["causal"] == mask.causal and len(call["mask"]) == len(changed) + 1


def test_padding_is_counted_row_by_row() -> None:
    where = ["--seqlen", "4", "--world", "1", "--heads", "1", "--head-dim", "8", "--batch", "3", "--full"]
    assert "\n28 visible pairs of all batch rows; " in run(*where, "--seqused-k", "1,2,4")
    (rank,) = call_in(*where, "--seqused-k", "1,0,4")["ranks"]
    assert (rank["visible pairs"], rank["forward"]) == (4 * 1 + 0 + 4 * 4, 20 * 2 * (8 + 8))
    (rank,) = call_in(*where)["ranks"]
    assert (rank["visible pairs"], rank["forward"], rank["backward"]) == (16, 3 * 512, 3 * 512 * 2.5)


def test_a_zigzag_per_document() -> None:
    told = call_in("--seqlen", "24", "--world", "2", "--cu-seqlens", "0,8,24", "--per-document")
    assert told["layout"] == "zigzag per document" and told["mask"] == {"causal": True, "cu_seqlens": [0, 8, 24]}
    spans = [[Span(*span) for span in spans] for spans in told["spans"]]
    assert Layout(spans) == Layout.zigzag(24, 2, [0, 8, 24])


def test_documents_that_are_drawn() -> None:
    boundaries = packed(100_000, 1000, seed=0)
    assert Documents(boundaries).seqlen == 100_000
    assert boundaries == packed(100_000, 1000, seed=0) != packed(100_000, 1000, seed=1)
    lengths = np.diff(boundaries)
    assert lengths.min() >= 1 and 800 < lengths.mean() < 1250
    assert 0.8 < lengths.std() / lengths.mean() < 1.25  # of exponential lengths: as large as the mean


def test_cells_of_many_tokens() -> None:
    ranks, grid = mask_cells(call_of(Layout.striped(1024, 4), Mask(causal=True)), cells=8)
    assert ranks.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]  # stripes stay visible
    assert np.array_equal(grid >= 0, np.tri(8, dtype=bool))
    ranks, _ = mask_cells(call_of(Layout.contiguous(1024, 4), Mask()), cells=8)
    assert ranks.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_balance() -> None:
    assert call_of(Layout.zigzag(64, 4), Mask(causal=True)).balance == 1
    assert call_of(Layout.contiguous(2, 2), Mask(causal=True)).balance == 3 / 4
    assert call_of(Layout.contiguous(0, 2), Mask(causal=True)).balance == 1


def test_files_say_what_the_schedule_says(tmp_path: Path) -> None:
    target, table = tmp_path / "call.json", tmp_path / "call.csv"
    flags = "--lengths 4,1,3 --direction -1 --dtype float32 --batch 2 --heads 4 --kv-heads 2 --head-dim 8"
    assert "uneven, causal, 8 tokens over 3 ranks" in run(*flags.split(), "--json", str(target), "--csv", str(table))
    result, plan = read(target), schedule(Layout.uneven([4, 1, 3]), Mask(causal=True), direction=-1)
    call, per_token = result.provenance["call"], 2 * 2 * 2 * 8 * 4
    assert call["spans"] == [[[0, 4, 1]], [[4, 1, 1]], [[5, 3, 1]]] and call["mask"] == {"causal": True}
    assert of_ranks(call, "sends forward") == [*plan.bytes(per_token)]
    assert of_ranks(call, "sends backward") == [*plan.bytes(per_token, per_token)]
    assert of_ranks(call, "visible pairs") == [10, 5, 21]
    moved = [(row["rank"], row["index"], row["kv_to"]) for row in result.rows]
    assert moved == [(rank, hop.index, hop.kv_to) for rank in range(3) for hop in plan.hops(rank)]
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    assert [int(row["pairs"]) for row in rows] == [row["pairs"] for row in result.rows] and len(rows) == len(moved)


def test_two_nodes() -> None:
    flags = ["--seqlen", "64", "--world", "4", "--nodes", "2", "--layout", "contiguous", "--heads", "1"]
    told = run(*flags)
    assert told.startswith("contiguous, causal, 64 tokens over 4 ranks on 2 nodes; batch 1, 1 heads")
    kv, dkv = 16 * 2 * 128 * 2, 16 * 2 * 128 * 4
    # shards 0 and 1 go to the second node; their gradients come back from there
    moved = f"of it between nodes: {human(2 * kv, 'B')} forward, {human(2 * kv + 2 * dkv, 'B')} backward\n"
    assert moved in told
    plan = schedule(Layout.contiguous(64, 4), Mask(causal=True), topology=Topology.grid(2, 2))
    assert f"\n\n{plan}\n\n" in told
    call = call_in(*flags)
    assert of_ranks(call, "by rail forward") == [kv, kv, 0, 0]
    assert of_ranks(call, "by rail backward") == [kv, kv, 2 * kv, 2 * kv]
    assert (call["nodes"], call["rails"]) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    flat = call_in(*SMALL)
    assert (flat["nodes"], flat["rails"]) == ([[0, 1]], []) and "by rail forward" not in flat["ranks"][0]


@pytest.mark.parametrize(
    ("flags", "name", "begins"),
    [
        ("--world 5 --seqlen 3", "x.svg", b"<?xml"),
        ("--lengths 2k,0,1k --direction -1 --documents 128", "x.pdf", b"%PDF"),
        ("--world 6 --nodes 3 --seqlen 4k --layout contiguous --direction -1", "x.png", b"\x89PNG"),
        ("--world 8 --seqlen 1k --layout contiguous --full --window 64,64 --direction -1", "x.png", b"\x89PNG"),
        ("--seqlen 4k --batch 3 --seqused-k 1k,0,3k --layout contiguous", "x.png", b"\x89PNG"),
        ("--seqlen 64 --world 2 --block-mask strided,block=4,stride=8 --layout contiguous", "x.png", b"\x89PNG"),
    ],
)
def test_pictures(flags: str, name: str, begins: bytes, tmp_path: Path) -> None:
    target = tmp_path / name
    assert run(*flags.split(), "--out", str(target)).endswith(f"picture: {target}\n")
    assert target.read_bytes().startswith(begins)


def test_defaults_and_large_rings() -> None:
    title = "zigzag, causal, 8,192 tokens over 4 ranks; batch 1, 32 heads (32 of K/V) of dim 128, bfloat16"
    assert run().startswith(title)
    told = run("--seqlen", "4k", "--world", "100", "--layout", "striped", "--full")
    assert "striped, full, 4,096 tokens over 100 ranks" in told and len(told.splitlines()) < 120
    assert "rank 99" in told and "rank 50 " not in told.partition("mask:")[0]  # abridged


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seqlen 100g --world 100000", "107,374,182,400 tokens over 100,000 ranks are too many to count one by one"),
        ("--lengths 1k,x", "'x' is not a size"),
        ("--lengths 1k --world 2", "--lengths and --world are both given: pass one of them"),
        ("--direction 3", "direction is 3: it must be 1"),
        ("--world 8 --nodes 3", "nodes is 3: it must cut 8 ranks into equal nodes of at least 2"),
        ("--seqlen 0", "there are 0 tokens: a call has at least one"),
        ("--window 4", "'4' is no window: it must be left,right, two sizes, or -1 for no end"),
        ("--cu-seqlens 0,5", "cu_seqlens ends at 5: it must end at 8192, the number of tokens"),
        ("--documents-seed 3", "--documents-seed is given without --documents: it draws their lengths"),
        ("--prefix-length 4 --full", "prefix_length is 4 without causal"),
        ("--block-mask sparse", "'sparse' is no pattern: it must be one of strided, fixed, bigbird, longformer"),
        ("--block-mask strided,block=4", "does not say all of strided, or more: it must be strided,block=SIZE,"),
        ("--block-mask strided,block=4,stride=6", "stride is 6: it must be a positive multiple of block, 4"),
        ("--block-mask strided,block=3,stride=3 --layout contiguous", "the spans must be runs of whole blocks"),
        ("--block-mask longformer,window=4,global=1 --window 1,1", "window_size is (1, 1) with"),
        ("--per-document", "--per-document is a zigzag of --documents or --cu-seqlens: pass these, and no other"),
        ("--out x.gif", "x.gif is no picture: it must end with one of .png, .svg, .pdf"),
    ],
)
def test_refusals(flags: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, ["show", *flags.split()])
    assert result.exit_code == 2 and message in result.output and len(result.output.splitlines()) == 1, result.output
