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
from ringattn.bench.common.call import Call, mask_cells
from ringattn.bench.common.masks import packed
from ringattn.bench.common.shapes import human
from ringattn.comm.topology.topology import Topology
from ringattn.ring.schedule import mask as patterns
from ringattn.ring.schedule.layout import Documents, Layout, Span
from ringattn.ring.schedule.mask import Mask, visible_pairs
from ringattn.ring.schedule.schedule import schedule
from ringattn.tools.show import app

from ..support.layouts import block_layouts, block_masks, layouts, masks, sees

pytestmark = pytest.mark.usefixtures("alone")

SMALL = ["--seqlen", "16", "--world", "2", "--layout", "zigzag", "--causal"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"TERMINAL_WIDTH": "200", "COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def call_of(layout: Layout, mask: Mask, direction: int = 1, nodes: int = 1) -> Call:
    return Call(layout, "any", mask, direction, batch=1, heads=2, kv_heads=1, head_dim=4, dtype="bfloat16", nodes=nodes)


def node_counts(world: int) -> st.SearchStrategy[int]:
    return st.sampled_from([1, *(nodes for nodes in range(2, world) if world % nodes == 0)])


def test_text_of_a_small_ring() -> None:
    assert (
        run(*SMALL, "--heads", "8", "--kv-heads", "2", "--head-dim", "64")
        == """\
zigzag, causal, 16 tokens over 2 ranks; batch 1, 8 heads (2 of K/V) of dim 64, bfloat16
moves in all, of a full ring: 8.19 kB (100.0%) forward, 24.6 kB (100.0%) backward
a rank sends at most: 4.10 kB (100.0%) forward, 12.3 kB (100.0%) backward
136 visible pairs; ranks compute 100% of the time, if every hop lasts as long as its slowest rank

2 ranks, K/V move to the next rank, 4 of 4 hops compute

K/V: N shard N is computed with, (N) only passes, > goes on, . nothing comes
         hop 0   hop 1
rank 0   0 >     1
rank 1   1 >     0

dK/dV sums: N of shard N, > go on, ^ go home, . none; hop 0: < come home
         hop 0   hop 1
rank 0   0 <     1 ^
rank 1   1 <     0 ^

         tokens   visible pairs   share     forward    backward   sends forward   sends backward
rank 0        8              68   50.0%   139 kFLOP   348 kFLOP         4.10 kB          12.3 kB
rank 1        8              68   50.0%   139 kFLOP   348 kFLOP         4.10 kB          12.3 kB

mask: rows are queries and their rank, columns keys and their shard; the hop that computes, . unseen
         0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0
rank 0   0 . . . . . . . . . . . . . . .
rank 0   0 0 . . . . . . . . . . . . . .
rank 0   0 0 0 . . . . . . . . . . . . .
rank 0   0 0 0 0 . . . . . . . . . . . .
rank 1   1 1 1 1 0 . . . . . . . . . . .
rank 1   1 1 1 1 0 0 . . . . . . . . . .
rank 1   1 1 1 1 0 0 0 . . . . . . . . .
rank 1   1 1 1 1 0 0 0 0 . . . . . . . .
rank 1   1 1 1 1 0 0 0 0 0 . . . . . . .
rank 1   1 1 1 1 0 0 0 0 0 0 . . . . . .
rank 1   1 1 1 1 0 0 0 0 0 0 0 . . . . .
rank 1   1 1 1 1 0 0 0 0 0 0 0 0 . . . .
rank 0   0 0 0 0 1 1 1 1 1 1 1 1 0 . . .
rank 0   0 0 0 0 1 1 1 1 1 1 1 1 0 0 . .
rank 0   0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 .
rank 0   0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0
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


@settings(max_examples=60)
@given(calls(max_seqlen=24))
def test_pairs_are_those_of_every_hop(call: Call) -> None:
    layout, mask = call.layout, call.mask
    for rank in range(layout.world):
        for hop in call.plan.hops(rank):
            expected = visible_pairs(mask, layout.positions(rank), layout.positions(hop.shard))
            assert call.pairs[rank, hop.index] == expected
    whole = torch.arange(layout.seqlen)
    assert call.pairs.sum() == visible_pairs(mask, whole, whole)  # no pair is where there is no hop


@settings(max_examples=60)
@given(calls(max_seqlen=16))
def test_cells_of_one_token_are_the_mask(call: Call) -> None:
    layout = call.layout
    ranks, grid = mask_cells(call, cells=64)
    when = {(rank, hop.shard): hop.index for rank in range(layout.world) for hop in call.plan.hops(rank)}
    assert ranks.tolist() == [
        rank for p in range(layout.seqlen) for rank in range(layout.world) if p in layout.positions(rank)
    ]
    for query in range(layout.seqlen):
        for key in range(layout.seqlen):
            hop = when.get((int(ranks[query]), int(ranks[key])))
            assert grid[query, key] == (hop if sees(call.mask, query, key) else -1)


@pytest.mark.parametrize(
    ("flags", "title", "mask"),
    [
        (["--window", "4,-1"], "window (4, -1)", Mask(window=(4, -1))),
        (["--causal", "--window", "1k,0"], "causal, window (1024, 0)", Mask(causal=True, window=(1024, 0))),
        (["--cu-seqlens", "0,5,64"], "2 documents", Mask(documents=Documents([0, 5, 64]))),
        (
            ["--documents", "8", "--documents-seed", "3", "--causal"],
            "causal, 11 documents",
            Mask(causal=True, documents=Documents(packed(64, 8, seed=3))),
        ),
        (
            ["--seqused-k", "40,8", "--batch", "2", "--causal"],
            "causal, keys used (40, 8)",
            Mask(causal=True, used=(40, 8)),
        ),
        (["--prefix-length", "10", "--causal"], "causal, prefix 10", Mask(causal=True, prefix=10)),
        (
            ["--block-mask", "strided,block=4,stride=8", "--causal"],
            "causal, 34.0% of blocks of 4",
            Mask(causal=True, blocks=patterns.strided(64, 4, stride=8)),
        ),
        (
            ["--block-mask", "fixed,block=4,stride=16,summary=4"],
            "25.0% of blocks of 4",
            Mask(blocks=patterns.fixed(64, 4, stride=16, summary=4)),
        ),
        (
            ["--block-mask", "bigbird, block=4, window=3, global=1, random=2, seed=7"],
            "40.6% of blocks of 4",
            Mask(blocks=patterns.bigbird(64, 4, window=3, global_=1, random=2, seed=7)),
        ),
        (
            ["--block-mask", "longformer,window=8,global=2"],
            "window (4, 4), 2 global tokens",
            Mask(window=(4, 4), global_tokens=((0, 2),)),
        ),
        (["--block-mask", "longformer,window=8,global=0"], "window (4, 4)", Mask(window=(4, 4))),
    ],
)
def test_every_mask_has_its_flags(flags: list[str], title: str, mask: Mask, tmp_path: Path) -> None:
    where = ["--seqlen", "64", "--world", "4", "--layout", "contiguous"]
    told = run(*where, *flags, "--out", str(tmp_path / "picture.png"))
    assert told.startswith(f"contiguous, {title}, 64 tokens over 4 ranks; ")
    plan = schedule(Layout.contiguous(64, 4), mask)
    assert f"\n\n{plan}\n\n" in told
    data: dict[str, Any] = json.loads(run(*where, *flags, "--json", "-"))
    positions = torch.arange(64)
    assert sum(data["pairs"]) == visible_pairs(mask, positions, positions)
    assert data["call"]["mask"]["causal"] == mask.causal
    named = ("window", "documents", "prefix", "used", "blocks", "global_tokens")
    changed = [name for name in named if getattr(mask, name) != getattr(Mask(), name)]
    assert len(data["call"]["mask"]) == len(changed) + 1


def test_padding_is_counted_row_by_row() -> None:
    where = ["--seqlen", "4", "--world", "1", "--heads", "1", "--head-dim", "8", "--batch", "3"]
    assert "\n28 visible pairs of all batch rows; " in run(*where, "--seqused-k", "1,2,4")
    data = json.loads(run(*where, "--seqused-k", "1,0,4", "--json", "-"))
    assert data["pairs"] == [4 * 1 + 0 + 4 * 4]
    assert data["flops_forward"] == [20 * 2 * (8 + 8)]
    alike = json.loads(run(*where, "--json", "-"))
    assert (alike["pairs"], alike["flops_forward"]) == ([16], [3 * 16 * 2 * (8 + 8)])


def test_a_zigzag_per_document() -> None:
    told = json.loads(run("--seqlen", "24", "--world", "2", "--cu-seqlens", "0,8,24", "--per-document", "--json", "-"))
    assert told["call"]["layout"] == "zigzag per document"
    assert told["call"]["mask"] == {"causal": False, "cu_seqlens": [0, 8, 24]}
    spans = [[Span(*span) for span in spans] for spans in told["call"]["spans"]]
    assert Layout(spans) == Layout.zigzag(24, 2, [0, 8, 24])


def test_documents_that_are_drawn() -> None:
    boundaries = packed(100_000, 1000, seed=0)
    assert Documents(boundaries).seqlen == 100_000
    assert boundaries == packed(100_000, 1000, seed=0) != packed(100_000, 1000, seed=1)
    lengths = np.diff(boundaries)
    assert 800 < lengths.mean() < 1250
    assert 0.8 < lengths.std() / lengths.mean() < 1.25  # of exponential lengths: as large as the mean
    assert lengths.min() >= 1


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


def test_json_says_what_the_schedule_says(tmp_path: Path) -> None:
    target = tmp_path / "call.json"
    flags = ["--lengths", "4,1,3", "--causal", "--direction", "-1", "--dtype", "float32", "--batch", "2"]
    told = run(*flags, "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--json", str(target))
    assert "uneven, causal, 8 tokens over 3 ranks" in told
    told_data: dict[str, Any] = json.loads(target.read_text())
    layout = Layout.uneven([4, 1, 3])
    plan = schedule(layout, Mask(causal=True), direction=-1)
    per_token = 2 * 2 * 2 * 8
    assert told_data["call"]["spans"] == [[[0, 4, 1]], [[4, 1, 1]], [[5, 3, 1]]]
    assert told_data["call"]["mask"] == {"causal": True}
    assert told_data["bytes_forward"] == [*plan.bytes(per_token * 4)]
    assert told_data["bytes_backward"] == [*plan.bytes(per_token * 4, per_token * 4)]
    assert told_data["pairs"] == [10, 5, 21]
    assert told_data["flops_forward"] == [4 * 8 * 4 * 2 * pairs for pairs in told_data["pairs"]]
    moved = [(hop["rank"], hop["index"], hop["kv_to"]) for hop in told_data["hops"]]
    assert moved == [(rank, hop.index, hop.kv_to) for rank in range(3) for hop in plan.hops(rank)]


def test_two_nodes() -> None:
    told = run("--seqlen", "64", "--world", "4", "--nodes", "2", "--layout", "contiguous", "--causal", "--heads", "1")
    assert told.startswith("contiguous, causal, 64 tokens over 4 ranks on 2 nodes; batch 1, 1 heads")
    kv, sums = 16 * 2 * 128 * 2, 16 * 2 * 128 * 4
    # shards 0 and 1 go to the second node; their sums come back from there
    moved = f"of it between nodes: {human(2 * kv, 'B')} forward, {human(2 * kv + 2 * sums, 'B')} backward\n"
    assert moved in told
    layout, mask = Layout.contiguous(64, 4), Mask(causal=True)
    assert f"\n\n{schedule(layout, mask, topology=Topology.grid(2, 2))}\n\n" in told
    rows = [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in told.splitlines()]
    assert next(row for row in rows if row[:1] == ["tokens"])[-2:] == ["by rail forward", "by rail backward"]
    assert [row[-2:] for row in rows if "%" in "".join(row[3:4])] == [["8.19 kB", "8.19 kB"]] * 2 + [
        ["0 B", "16.4 kB"]
    ] * 2


def test_json_of_two_nodes(tmp_path: Path) -> None:
    flags = ["--seqlen", "8", "--world", "4", "--nodes", "2", "--heads", "1", "--head-dim", "1", "--dtype", "float16"]
    told: dict[str, Any] = json.loads(run(*flags, "--json", "-"))
    plan = schedule(Layout.zigzag(8, 4), Mask(), topology=Topology.grid(2, 2))
    assert told["call"]["nodes"] == [[0, 1], [2, 3]]
    assert told["call"]["rails"] == [[0, 2], [1, 3]]
    for level, where in enumerate(("inside_nodes", "between_nodes")):
        assert told[f"bytes_forward_{where}"] == [*plan.bytes(4, level=level)]
        assert told[f"bytes_backward_{where}"] == [*plan.bytes(4, 8, level=level)]
    assert told["bytes_backward"] == [*plan.bytes(4, 8)]
    rails = [(hop["rank"], hop["index"], hop["rail_to"]) for hop in told["hops"] if hop["rail_to"] is not None]
    assert rails == [(0, 0, 2), (1, 0, 3), (2, 0, 0), (3, 0, 1)]
    flat: dict[str, Any] = json.loads(run(*SMALL, "--json", "-"))
    assert (flat["call"]["nodes"], flat["call"]["rails"]) == ([[0, 1]], [])
    assert flat["bytes_forward_between_nodes"] == [0, 0]


def test_json_to_standard_output_is_all_there_is(tmp_path: Path) -> None:
    told = json.loads(run(*SMALL, "--json", "-", "--out", str(tmp_path / "x.svg")))
    assert told["call"]["seqlen"] == 16


def test_csv(tmp_path: Path) -> None:
    target = tmp_path / "call.csv"
    run(*SMALL, "--csv", str(target))
    with target.open() as file:
        rows = [*csv.DictReader(file)]
    assert [(row["rank"], row["index"], row["shard"], row["pairs"]) for row in rows] == [
        ("0", "0", "0", "36"),
        ("0", "1", "1", "32"),
        ("1", "0", "1", "36"),
        ("1", "1", "0", "32"),
    ]


@pytest.mark.parametrize(
    "flags",
    [
        SMALL,
        ["--world", "1", "--seqlen", "1"],
        ["--world", "5", "--seqlen", "3", "--causal"],
        ["--lengths", "2k,0,1k", "--direction", "-1", "--causal"],
        ["--world", "20", "--seqlen", "4k", "--layout", "striped"],
        ["--world", "6", "--nodes", "3", "--seqlen", "4k", "--causal", "--layout", "contiguous", "--direction", "-1"],
        ["--world", "32", "--nodes", "4", "--seqlen", "4k"],
        ["--world", "8", "--seqlen", "1k", "--layout", "contiguous", "--window", "64,64", "--direction", "-1"],
        ["--world", "8", "--nodes", "2", "--seqlen", "1k", "--layout", "contiguous", "--window", "64,64"],
        ["--documents", "512", "--per-document", "--causal"],
        ["--world", "1", "--seqlen", "4k", "--documents", "2"],
        ["--seqlen", "4k", "--batch", "3", "--seqused-k", "1k,0,3k", "--layout", "contiguous"],
    ],
)
def test_pictures(flags: list[str], tmp_path: Path) -> None:
    target = tmp_path / "picture.png"
    assert f"picture: {target}" in run(*flags, "--out", str(target))
    assert target.read_bytes().startswith(b"\x89PNG")


def test_pictures_as_svg_and_pdf(tmp_path: Path) -> None:
    for suffix, start in (("svg", b"<?xml"), ("pdf", b"%PDF")):
        target = tmp_path / f"picture.{suffix}"
        run(*SMALL, "--out", str(target))
        assert target.read_bytes().startswith(start)


def test_defaults_and_sizes() -> None:
    assert run().startswith(
        "zigzag, full, 8,192 tokens over 4 ranks; batch 1, 32 heads (32 of K/V) of dim 128, bfloat16"
    )
    assert "striped, full, 2,048 tokens over 3 ranks" in run("--seqlen", "2k", "--world", "3", "--layout", "striped")


def test_large_rings_are_abridged() -> None:
    told = run("--seqlen", "4k", "--world", "100", "--layout", "contiguous", "--causal")
    assert len(told.splitlines()) < 120
    assert "rank 99" in told
    assert "rank 50 " not in told.partition("mask:")[0]


def test_only_rank_zero_of_a_launcher_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "call.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run(*SMALL, "--json", str(target)) == ""
    assert not target.exists()
    monkeypatch.setenv("RANK", "0")
    assert run(*SMALL)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seqlen", "8q"], "'8q' is not a size: it must be a whole number, with k, m or g behind it or not"),
        (["--lengths", "1k,x"], "'x' is not a size"),
        (["--lengths", "1k", "--world", "2"], "--lengths says everything: leave out --seqlen, --world and --layout"),
        (["--layout", "spiral"], "'spiral' is not one of"),
        (["--direction", "3"], "direction is 3: it must be 1"),
        (["--world", "8", "--nodes", "3"], "nodes is 3: it must cut 8 ranks into equal nodes of at least 2"),
        (["--lengths", "4,4", "--nodes", "2"], "nodes is 2: it must cut 2 ranks into equal nodes of at least 2"),
        (["--nodes", "0"], "--nodes"),
        (["--heads", "6", "--kv-heads", "4"], "--kv-heads is 4: --heads, 6, must be a multiple of it"),
        (["--world", "0"], "--world"),
        (["--seqlen", "0"], "there are 0 tokens: a call has at least one"),
        (["--window", "4"], "'4' is no window: it must be left,right, two sizes, or -1 for no end"),
        (["--window", "4,-2"], "'-2' is not a size"),
        (["--cu-seqlens", "0,5"], "cu_seqlens ends at 5: it must end at 8192, the number of tokens"),
        (
            ["--cu-seqlens", "0,8k", "--documents", "64"],
            "--cu-seqlens and --documents are both given: pass one of them",
        ),
        (["--documents-seed", "3"], "documents-seed is given without documents: it draws their lengths"),
        (["--documents", "0"], "documents is 0: it must be at least 1, their mean length"),
        (["--prefix-length", "4"], "prefix_length is 4 without causal"),
        (["--block-mask", "sparse"], "'sparse' is no pattern: it must be one of strided, fixed, bigbird, longformer"),
        (["--block-mask", "strided,block=4"], "does not say all of strided, or more: it must be strided,block=SIZE,"),
        (["--block-mask", "strided,block=4,stride=8,seed=1"], "does not say all of strided, or more"),
        (["--block-mask", "strided,block=4,stride=x"], "'x' is not a size"),
        (["--block-mask", "strided,block=4,stride=6"], "stride is 6: it must be a positive multiple of block, 4"),
        (
            ["--block-mask", "strided,block=3,stride=3", "--layout", "contiguous"],
            "the spans must be runs of whole blocks",
        ),
        (["--block-mask", "longformer,window=4,global=1", "--window", "1,1"], "window_size is (1, 1) with"),
        (["--per-document"], "--per-document is a zigzag of --documents or --cu-seqlens: pass these, and no other"),
        (
            ["--per-document", "--documents", "64", "--layout", "striped"],
            "--per-document is a zigzag of --documents or",
        ),
        (["--per-document", "--cu-seqlens", "0,4", "--lengths", "4"], "--per-document is a zigzag of --documents or"),
        (["--out", "x.gif"], "x.gif is no picture: it must end with one of .png, .svg, .pdf"),
    ],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    assert message in refused(*flags)


def test_the_command_line_knows_it() -> None:
    result = CliRunner().invoke(cli.app, ["show", *SMALL])
    assert result.exit_code == 0, result.output
    assert "4 of 4 hops compute" in result.output
