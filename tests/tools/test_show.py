"""Tests of ``ringattn show``: its text, files and pictures agree with the schedule and the mask."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.attention import random_boundaries
from ringattn.bench.common.flags import human_count
from ringattn.bench.common.result import Result, read_result
from ringattn.comm.topology.topology import Topology
from ringattn.ring import Intervals, prefix_tree, slices
from ringattn.ring.schedule import mask as patterns
from ringattn.ring.schedule.layout import Documents, Layout
from ringattn.ring.schedule.mask import Mask, visible_pairs
from ringattn.ring.schedule.schedule import schedule
from ringattn.ring.schedule.visibility import cut_keys
from ringattn.tools import pictures, show
from ringattn.tools.call_summary import CallSummary, mask_cells

from ..support.layouts import block_layouts, block_masks, is_visible_pair, layouts, masks
from ..support.nightly import rest_nightly

pytestmark = pytest.mark.usefixtures("alone")


def run(flags: str) -> str:
    result = CliRunner().invoke(cli.app, ["show", *flags.split()])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "call.json"


def written(flags: str, target: Path) -> tuple[Result, dict[str, Any]]:
    """Return the result in the JSON and its description of the call."""
    run(f"{flags} --json {target}")
    result = read_result(target)
    return result, result.provenance["call"]


def of_ranks(call: dict[str, Any], name: str) -> list[Any]:
    return [rank[name] for rank in call["ranks"]]


def call_of(layout: Layout, mask: Mask, direction: int = 1, nodes: int = 1) -> CallSummary:
    return CallSummary(
        layout, "any", mask, direction, batch=1, heads=2, kv_heads=1, head_dim=4, dtype="bfloat16", nodes=nodes
    )


def test_text_of_a_small_ring() -> None:
    plan = schedule(Layout.zigzag(8, 2), Mask(causal=True))
    assert (
        run("--seqlen 8 --world 2 --heads 8 --kv-heads 2 --head-dim 64")
        == f"""\
zigzag, causal, 8 tokens over 2 ranks; batch 1, 8 heads (2 of K/V) of dim 64,
bfloat16

{plan}

rank  tokens  visible pairs  share %  sends forward  sends backward
   0       4             18       50  2.05 kB        6.14 kB
   1       4             18       50  2.05 kB        6.14 kB

mask: rows are queries (rank), columns are keys (shard);
0, 1, …: hop that computes, .: not visible
        0 0 1 1 1 1 0 0
rank 0  0 . . . . . . .
rank 0  0 0 . . . . . .
rank 1  1 1 0 . . . . .
rank 1  1 1 0 0 . . . .
rank 1  1 1 0 0 0 . . .
rank 1  1 1 0 0 0 0 . .
rank 0  0 0 1 1 1 1 0 .
rank 0  0 0 1 1 1 1 0 0

sent by all ranks (relative to a full mask): forward 4.10 kB (100.0%), backward
12.3 kB (100.0%)
36 visible pairs; ranks compute 100% of the time, if every hop lasts as long as
its slowest rank; over all hops the slowest rank has 1.00 times the mean
"""
    )


def test_traffic_is_relative_to_a_full_mask() -> None:
    # Causal contiguous shards go to later ranks only: 3 + 2 + 1 of 4 * 3 transfers.
    assert run("--seqlen 64 --layout contiguous").count("(50.0%)") == 2  # of the forward and the backward


def test_runs_of_tokens(target: Path) -> None:
    """The second run of a causal zigzag shard stops at rank 0 on its way down."""
    layout, mask = Layout.zigzag(4096, 4), Mask(causal=True)
    whole = schedule(layout, mask, direction=-1)
    flags = "--seqlen 4k --kv-heads 1 --chunks 2 --direction -1"
    text = run(flags)
    assert "(relative to a full mask): forward 4.72 MB (75.0%), backward\n14.2 MB (75.0%)" in text
    for number, part in enumerate(cut_keys(layout, mask, layout, 2), 1):
        assert f"run {number} of 2 of each shard's tokens:\n{whole.select_keys(layout, mask, *part)}\n" in text
    _, call = written(flags, target)
    assert (call["chunks"], sum(of_ranks(call, "sends forward"))) == (2, 4096 * 3 // 4 * 3 * 2 * 128 * 2)
    assert run("--kv-heads 2 --chunks 2").startswith("zigzag") and "run 1" not in run("--kv-heads 2 --chunks 2")


def test_defaults_and_large_rings() -> None:
    assert run("").startswith("zigzag, causal, 8,192 tokens over 4 ranks; batch 1, 32 heads (32 of K/V) of dim\n128,")
    text = run("--seqlen 4k --world 100 --layout striped --full")
    assert text.startswith("striped, full, 4,096 tokens over 100 ranks") and len(text.splitlines()) < 120
    assert "rank 99" in text and "rank 50 " not in text.partition("mask:")[0]  # ranks in the middle are left out


@pytest.mark.parametrize("flags", [
    "--world 16 --nodes 4", "--cu-seqlens 0,99,8k",
    pytest.param("--world 1k --layout contiguous", marks=pytest.mark.nightly),
])  # fmt: skip
def test_lines_fit_a_terminal(flags: str) -> None:
    text = run(flags)
    assert max(map(len, text.splitlines())) <= 80
    owners, *rows = text.partition("mask:")[2].partition("\n\n")[0].splitlines()[2:]
    assert {len(row.split()) for row in rows} == {len(owners.split()) + 2}  # including rank 1,000
    assert len(rows) == (32 if "--world" in flags else 16)


@st.composite
def calls(draw: st.DrawFn, max_seqlen: int) -> CallSummary:
    """Draw a call with any layout and mask."""
    world, block = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    mask = draw(masks(parts=True, used=True))
    if draw(st.booleans()) and type(mask) is Mask:
        blocks = max_seqlen // block
        layout = draw(block_layouts(blocks, block, world, whole=True))
        mask = replace(mask, blocks=draw(block_masks(blocks, blocks, block)))
    else:
        layout = draw(layouts(world=world, max_seqlen=max_seqlen))
    nodes = draw(st.sampled_from([1, *(nodes for nodes in range(2, world) if world % nodes == 0)]))
    return call_of(layout, mask, draw(st.sampled_from([1, -1])), nodes)


@settings(max_examples=30)
@given(calls(max_seqlen=16))
def test_pairs_and_cells_agree_with_the_mask(call: CallSummary) -> None:
    layout, mask = call.layout, call.mask
    for rank in range(layout.world):
        for hop in call.schedule.hops(rank):
            expected = visible_pairs(mask, layout.positions(rank), layout.positions(hop.shard))
            assert call.pairs[rank, hop.index] == expected
    positions = torch.arange(layout.seqlen)
    assert call.pairs.sum() == visible_pairs(mask, positions, positions)  # every visible pair belongs to a hop
    ranks, grid = mask_cells(call, cells=64)
    hop_of = {(rank, hop.shard): hop.index for rank in range(layout.world) for hop in call.schedule.hops(rank)}
    assert ranks.tolist() == [
        rank for p in range(layout.seqlen) for rank in range(layout.world) if p in layout.positions(rank)
    ]
    for query in range(layout.seqlen):
        for key in range(layout.seqlen):
            index = hop_of.get((int(ranks[query]), int(ranks[key])))
            assert grid[query, key] == (index if is_visible_pair(call.mask, query, key) else -1)


@pytest.mark.parametrize(("flags", "title", "mask"), [
    ("--full --window 4,-1", "window (4, -1)", Mask(window=(4, -1))),
    ("--full --cu-seqlens 0,5,64", "2 documents", Mask(documents=Documents([0, 5, 64]))),
    ("--documents 8 --documents-seed 3", "causal, 11 documents",
     Mask(causal=True, documents=Documents(random_boundaries(64, 8, seed=3)))),
    ("--seqused-k 40,8 --batch 2", "causal, keys used (40, 8)", Mask(causal=True, used=(40, 8))),
    ("--prefix-length 10", "causal, prefix 10", Mask(causal=True, prefix=10)),
    ("--full --block-mask bigbird,block=4,window=3,global=1,random=2,seed=7", "40.6% of blocks of 4",
     Mask(blocks=patterns.bigbird(64, 4, window=3, global_=1, random=2, seed=7))),
    ("--full --block-mask longformer,window=8,global=2", "window (4, 4), 2 global tokens",
     Mask(window=(4, 4), global_tokens=((0, 2),))),
    ('--mask {"islands":[[4,20],[30,50]]}', "causal, 2 islands", Mask(causal=True, islands=((4, 20), (30, 50)))),
    ('--mask {"parents":[-1,0,0],"lengths":[24,20,20]}', "causal, 2 intervals",
     Mask(causal=True, intervals=prefix_tree([24, 20, 20], [-1, 0, 0]).intervals)),
    ('--full --mask {"slices":[[[0,64],[0,64],"causal"]]}', "1 interval",
     Mask(intervals=slices([((0, 64), (0, 64), 1)], 64))),
    (f'--full --mask {{"intervals":[{[[9] * 64, [12] * 64]}]}}'.replace(", ", ","), "1 interval",
     Mask(intervals=Intervals([(torch.full((64,), 9), torch.full((64,), 12))]))),
])  # fmt: skip
def test_every_mask_has_its_flags(flags: str, title: str, mask: Mask, target: Path) -> None:
    flags, json, text = flags.partition("{")
    (target.parent / "mask.json").write_text(json + text)
    flags += f"{target.parent / 'mask.json'}" if json else ""
    text = run(f"--seqlen 64 --world 4 --layout contiguous {flags} --json {target}")
    assert " ".join(text.split()).startswith(f"contiguous, {title}, 64 tokens over 4 ranks; ")
    assert f"\n\n{schedule(Layout.contiguous(64, 4), mask)}\n\n" in text
    call, positions, line = read_result(target).provenance["call"], torch.arange(64), " ".join(text.split())
    assert f" visible pairs{' of all batch rows' * bool(mask.used)}; ranks compute {call['balance']:.0%} of" in line
    assert line.endswith(f" the slowest rank has {call['imbalance']:.2f} times the mean")
    shares = [float(row.split()[3]) for row in text.partition("share %")[2].splitlines()[1:5]]
    pairs = of_ranks(call, "visible pairs")
    assert sum(pairs) == visible_pairs(mask, positions, positions)
    assert shares == pytest.approx([100 * count / sum(pairs) for count in pairs], rel=0.01)
    named = ("window", "documents", "prefix", "used", "blocks", "global_tokens", "islands", "intervals")
    changed = [name for name in named if getattr(mask, name) != getattr(Mask(), name)]
    assert call["mask"]["causal"] == mask.causal and len(call["mask"]) == len(changed) + 1


@pytest.mark.parametrize(("used", "pairs", "forward"), [
    ("--seqused-k 1,0,4", 20, 20 * 32), ("", 16, 3 * 512), ("--seqused-k 0,0,0", 0, 0),
])  # fmt: skip
def test_padding_is_counted_row_by_row(used: str, pairs: int, forward: int, target: Path) -> None:
    _, call = written(f"--seqlen 4 --world 1 --heads 1 --head-dim 8 --batch 3 --full {used}", target)
    (rank,) = call["ranks"]
    assert (rank["visible pairs"], rank["forward"], rank["backward"]) == (pairs, forward, forward * 2.5)


def test_mask_cells_cover_several_tokens() -> None:
    ranks, grid = mask_cells(call_of(Layout.striped(1024, 4), Mask(window=(0, 4))), cells=8)
    assert ranks.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]  # all ranks of the stripes appear
    assert np.argwhere(grid >= 0).tolist() == sorted([*([i, i] for i in range(8)), [3, 4]])  # 511 sees 512, 124 not 129
    assert call_of(Layout.contiguous(2, 2), Mask(causal=True)).balance == 3 / 4
    apart = slices([((0, 3), (0, 3), "full"), ((3, 4), (13, 16), "full")], 16)  # two queries of one cell
    _, grid = mask_cells(call_of(Layout.contiguous(16, 1), Mask(intervals=apart)), cells=4)
    assert (grid[0] >= 0).tolist() == [True, False, False, True]


def test_a_zigzag_per_document(target: Path) -> None:
    _, call = written("--seqlen 24 --world 2 --cu-seqlens 0,8,24 --per-document", target)
    expected = Layout.zigzag(24, 2, [0, 8, 24]).spans_per_rank
    assert call["spans"] == [[[*span] for span in spans] for spans in expected]


def test_a_packed_layout(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: Any = []
    packed = Layout.packed
    monkeypatch.setattr(
        Layout, "packed", lambda *how, **named: groups.append(named["heads_per_kv_head"]) or packed(*how, **named)
    )
    flags = "--seqlen 24 --world 4 --nodes 2 --cu-seqlens 0,8,24 --window 3,0 --packed"
    _, call = written(f"{flags} --heads 6 --kv-heads 2", target)
    assert groups == [3]
    monkeypatch.undo()
    masks, topology = [(Mask(causal=True, window=(3, 0)), 1)], Topology.grid(2, 2)
    expected = Layout.packed([0, 8, 24], 4, masks=masks, topology=topology).spans_per_rank
    assert call["spans"] == [[[*span] for span in spans] for spans in expected] and call["layout"] == "packed"


def test_files_agree_with_the_schedule(target: Path) -> None:
    table = target.with_suffix(".csv")
    flags = "--lengths 4,1,3 --direction -1 --dtype float32 --batch 2 --heads 4 --kv-heads 2 --head-dim 8"
    result, call = written(f"{flags} --csv {table}", target)
    plan, per_token = schedule(Layout.uneven([4, 1, 3]), Mask(causal=True), direction=-1), 2 * 2 * 2 * 8 * 4
    assert call["spans"] == [[[0, 4, 1]], [[4, 1, 1]], [[5, 3, 1]]] and call["layout"] == "uneven"
    assert of_ranks(call, "sends forward") == [*plan.bytes(per_token)]
    assert of_ranks(call, "sends backward") == [*plan.bytes(per_token, per_token)]
    assert of_ranks(call, "visible pairs") == [10, 5, 21] and of_ranks(call, "tokens") == [4, 1, 3]
    sizes = {"seqlen": 8, "world": 3, "direction": -1, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    assert call.items() >= sizes.items() and call["dtype"] == "float32"
    # the sum over hops of the slowest rank's pairs: ranks 0, 2 and 1
    assert call["balance"] == 36 / (3 * (10 + 12 + 4)) and call["imbalance"] == 21 / 12
    rows = [(row["rank"], row["index"], row["kv_to"], row["pairs"]) for row in result.rows]
    pairs = [[10, 0, 0], [4, 1, 0], [12, 3, 6]]  # of each rank with each shard
    assert rows == [
        (rank, hop.index, hop.kv_to, pairs[rank][hop.shard]) for rank in range(3) for hop in plan.hops(rank)
    ]
    with table.open() as file:
        assert [int(row["pairs"]) for row in csv.DictReader(file)] == [row["pairs"] for row in result.rows]


def test_bytes_between_two_nodes(target: Path) -> None:
    text = run(f"--seqlen 64 --world 4 --nodes 2 --layout contiguous --heads 1 --json {target}")
    kv, dkv = 16 * 2 * 128 * 2, 16 * 2 * 128 * 4
    # Shards 0 and 1 go to the second node, and their gradients come back.
    line = " ".join(text.split())
    assert " 64 tokens over 4 ranks on 2 nodes; " in line
    assert f"({2 * kv / 1e3:.1f} kB between nodes)" in line and f"({(2 * kv + 2 * dkv) / 1e3:.1f} kB between" in line
    assert f"\n\n{schedule(Layout.contiguous(64, 4), Mask(causal=True), topology=Topology.grid(2, 2))}\n\n" in text
    call = read_result(target).provenance["call"]
    assert of_ranks(call, "by rail forward") == [kv, kv, 0, 0] and call["nodes"] == [[0, 1], [2, 3]]
    assert of_ranks(call, "by rail backward") == [kv, kv, 2 * kv, 2 * kv]


PICTURES = [
    ("--lengths 2k,0,1k --direction -1 --documents 128", "x.pdf", b"%PDF"),
    ("--world 6 --nodes 3 --seqlen 4k --layout contiguous --direction -1", "x.svg", b"<?xml"),
    ("--world 16 --seqlen 1k --layout striped --full --window 64,64", "x.png", b"\x89PNG"),
    ("--seqlen 64 --world 2 --block-mask strided,block=4,stride=8 --layout contiguous", "x.png", b"\x89PNG"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "name", "begins"), rest_nightly(PICTURES, PICTURES[0]))
def test_pictures_are_written_in_the_format_of_the_file_name(
    flags: str, name: str, begins: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(f"{flags} --out {name}").endswith(f"picture: {name}\n")
    assert Path(name).read_bytes().startswith(begins)


def test_picture_labels_every_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(pictures, "write_figure", lambda figure, out, dpi: figures.append(figure))
    layout, mask = Layout.contiguous(96, 4), Mask(causal=True, window=(40, 0))
    call = call_of(layout, mask, nodes=2)
    pictures.draw_call(call, Path("x.png"))
    (image,), (grid,) = (axes.images for axes in figures[0].axes[:2])
    assert image.get_clim() == (-0.5, call.schedule.count - 0.5) and grid.get_clim() == (0, 1)
    _, cells = mask_cells(call, pictures.CELLS)
    assert np.array_equal(image.get_array().filled(-1), cells)
    assert np.allclose(grid.get_array().filled(0), call.pairs / call.pairs.max())
    assert figures[0].get_layout_engine() is not None
    mask_axes, schedule = figures[0].axes[:2]
    assert mask_axes.get_title().startswith("mask: ") and schedule.get_title().startswith("schedule: ")
    assert ([*schedule.get_xticks()], [*schedule.get_yticks()]) == ([*range(call.schedule.count)], [*range(4)])
    kv, plan = 2 * 4 * 2, call.schedule  # bytes per token in bf16; dK/dV have twice as many
    forward, backward = (human_count(max(plan.bytes(kv, dkv)), "B") for dkv in (0, 2 * kv))
    assert f"up to {forward} forward, {backward} backward" in figures[0].get_suptitle()
    assert image.get_extent() == [0, 96, 96, 0] and schedule.get_ylim() == (3.5, -0.5)
    assert [*mask_axes.get_xticks()] == [*mask_axes.get_yticks()] == [*range(0, 97, 12)]
    for strip, shape in zip(mask_axes.child_axes, ((1, 96), (96, 1)), strict=True):
        assert np.array_equal(strip.images[0].get_array(), np.arange(96).reshape(shape) // 24)
        places = {text.get_text(): max(text.get_position()) for text in strip.texts}
        assert places == {f"{rank}": 24 * rank + 11.5 for rank in range(4)}
    texts = {(getattr(text, "xy", text.get_position()), text.get_text()) for text in schedule.texts}
    for rank in range(4):
        for hop in call.schedule.hops(rank):
            arrows = [f"→ {hop.kv_to}"] * (hop.kv_to is not None) + [f"» {hop.rail_to}"] * (hop.rail_to is not None)
            label = f"{hop.shard}" if hop.computes else f"({hop.shard})" if hop.kv_from is not None else None
            assert label is None or ((hop.index, rank), label) in texts
            assert ((hop.index + 0.5, rank + 0.5), "  ".join(arrows)) in texts
            assert not hop.computes or ((hop.index, rank), str(call.pairs[rank, hop.index])) in texts
    lines = sorted([*map(tuple, line)] for found in schedule.collections for line in found.get_segments())
    inner = call.schedule.inner
    assert lines == [[(-0.5, 1.5), (call.schedule.count - 0.5, 1.5)], [(inner - 0.5, -0.5), (inner - 0.5, 3.5)]]
    assert pictures._ticks(12) == [*range(12)] and pictures._ticks(13) == [0, 2, 4, 6, 8, 10, 12]


def test_a_picture_says_that_stripes_are_drawn_wider() -> None:
    wider = Layout.striped(1024, 4)
    for layout in (wider, Layout.contiguous(1024, 4), Layout.striped(64, 4)):
        axes: Any = Figure().add_subplot()
        pictures._draw_mask(call_of(layout, Mask(causal=True)), axes)
        assert ("stripes" in axes.get_title()) is (layout is wider)


def test_only_the_first_rank_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("--seqlen 64") == ""


def test_each_hop_number_has_one_character() -> None:
    assert [show._mark(hop) for hop in (-1, 0, 10, 35, 36)] == [".", "0", "a", "z", "+"]


@pytest.mark.parametrize(("flags", "message"), [
    ("--seqlen 100g --world 100000", "107,374,182,400 tokens over 100,000 ranks are too many"),
    ("--seqlen 1g --world 1", "1 ranks are too many: they need 107 GB, and the limits are 5.00 GB"),
    ("--world 32k", "8,192 tokens over 32,768 ranks are too many: they need 161"),
    ("--seqlen 1m --world 2k", "1,048,576 tokens over 2,048 ranks are too many"),
    ("--world 2k --json -", "over 2,048 ranks are too many: they need 18.9 GB"),
    *((f"--lengths 1k {flag}", f"{flag.split()[0]} and --lengths cannot be used together")
      for flag in ("--world 2", "--seqlen 1k", "--layout striped")),
    ("--heads 6 --kv-heads 4", "--heads is 6: it must be a multiple of --kv-heads, 4"),
    ("--direction 3", "direction is 3: it must be 1"),
    ("--world 8 --nodes 3", "nodes is 3: it must divide 8 ranks into equal nodes of at least 2"),
    ("--world 4 --nodes 4", "nodes is 4: it must divide 4 ranks into equal nodes of at least 2"),
    ("--seqlen 0", "--seqlen or --lengths gives 0 tokens; pass at least 1"),
    ("--block-mask strided,block=4", "'--block-mask': 'strided,block=4' has the wrong parameters for strided"),
    ("--layout spiral", "'--layout': 'spiral' is not valid: it must be contiguous"),
    ("--layout none.json", "--layout is none.json: No such file"),
    ("--mask none.json", "--mask is none.json: No such file"),
    ("--layout none.json --world 4", "--world and --layout cannot be used together"),
    ("--seqlen 1m --block-mask strided,block=1,stride=4", "over 4 ranks in blocks of 1 are too many"),
    *((flags, f"{flags.split()[0]} needs --documents or --cu-seqlens, and ") for flags in (
        "--per-document", "--per-document --documents 8 --lengths 4k,4k",
        "--per-document --documents 8 --layout striped", "--packed", "--packed --documents 8 --lengths 4k,4k",
        "--packed --documents 8 --layout striped", "--packed --documents 8 --per-document",
    )),
    ("--packed --world 8 --nodes 3 --documents 1k", "nodes is 3: it must divide 8 ranks into equal nodes"),
    ("--out x.gif", "x.gif is not a valid figure name: it must end with one of .png, .svg, .pdf"),
])  # fmt: skip
def test_refusals(flags: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, ["show", *flags.split()])
    assert result.exit_code == 2 and message in result.output and len(result.output.splitlines()) == 1, result.output
