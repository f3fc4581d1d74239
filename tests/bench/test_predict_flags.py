"""The flags of ``ringattn predict``: each one counts, or is refused by name with what it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ringattn import LocalWorld, Ring
from ringattn.bench.cli import app
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.links import PRESETS, Link, Links, link_of
from ringattn.bench.predict.memory import memory, most_tokens
from ringattn.bench.predict.others import Times, Way, ways
from ringattn.bench.predict.ring import predicted
from ringattn.bench.predict.speed import H100
from ringattn.bench.predict.sweep import PERCENT, Point, rows_of_sweep, shown
from ringattn.bench.predict.trouble import Trouble

from ..support.predict_cases import Steady

LINKS = Links(PRESETS["nvlink4"], PRESETS["ib400"])
MAP = ("--sweep", "tokens=1k..2k,gpus=2..4")
PLAIN = Call(1024, 8, nodes=1)
runner = CliRunner()


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, ["predict", *arguments], env={"COLUMNS": "1000", "TERM": "dumb"})


def refused(*arguments: str) -> str:
    """What a call is refused with, which is no traceback."""
    found = invoke(*arguments)
    assert found.exit_code == 2 and "Traceback" not in found.output, found.output
    return " ".join(found.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tflops", "0"], "tflops is 0: it must be above 0 and finite, in TFLOP/s"),
        (["--tflops", "nan"], "tflops is nan: it must be above 0"),
        (["--tflops", "500", "--backward-tflops", "-1"], "backward-tflops is -1: it must be above 0"),
        (["--tflops", "inf"], "tflops is inf: it must be above 0 and finite"),
        (["--memory", "nan"], "memory is nan: it must be above 0 and finite, in GB"),
        (["--memory", "-3"], "memory is -3: it must be above 0"),
        (["--memory", "0"], "memory is 0: it must be above 0"),
        (["--jitter", "inf"], "jitter is inf: it must be 0 to 1, and 0.05 is 5%"),
        (["--jitter", "nan"], "jitter is nan: it must be 0 to 1"),
        (["--jitter", "-1"], "jitter is -1.0: it must be 0 to 1"),
        (["--slow", "3=inf"], "slow is '3=inf': a factor is how many times as long the rank takes, 1 to 1,000"),
        (["--slow", "3=0.5"], "slow is '3=0.5': a factor"),
        (["--slow", "3=2", "--slow", "3=4"], "slow is '3=4', and rank 3 is told before"),
        (["--link", "200,nanus"], "link is '200,nanus': it takes one of nvlink4"),
        (["--link", "inf"], "link is 'inf': it takes"),
        (["--link", "200,"], "link is '200,': it takes"),
        (["--link", ""], "link is '': it takes"),
        (["--nodes", "2", "--link-between", "warp"], "link-between is 'warp': it takes"),
        (["--slots", "1", "--world", "4"], "slots is 1: a ring of 4 ranks needs at least 2"),
        (["--prefetch", "9", "--world", "4"], "prefetch is 9: with 3 slots it must be 0 to 2"),
        (["--head-dim", "1000"], "head_dim is 1000: it must be 1 to 256"),
        (["--dtype", "fp32"], "dtype is float32: the constants of a GPU are of float16 and bfloat16; --tflops or"),
        (["--dtype", "fp32", "--gpu", "a100"], "dtype is float32"),
    ],
)
def test_bad_values_are_named(arguments: list[str], told: str) -> None:
    assert told in refused(*arguments)


@pytest.mark.parametrize("layout", ["spiral", "balanced"])
def test_layouts_are_those_with_a_name(layout: str) -> None:
    """What a flag cannot say, the speeds of Layout.balanced, is not offered."""
    told = refused("--layout", layout)
    assert all(one in told for one in ("--layout", layout, "contiguous", "zigzag", "striped"))
    assert told.count("balanced") == (layout == "balanced")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*MAP, "--trace", "t.json"], "trace and sweep are both given: it draws one ring"),
        ([*MAP, "--slow", "junk"], "slow is 'junk': it must be RANK=FACTOR"),
        ([*MAP, "--slow", "2=3"], "slow names rank 2: ranks are 0 to 1"),
        ([*MAP, "--memory", "nan"], "memory is nan"),
        ([*MAP, "--memory", "0.001"], "sweep begins at 1,024 tokens per GPU, which do not fit 0.001 GB: at most"),
        ([*MAP, "--dtype", "fp32"], "dtype is float32"),
        ([*MAP, "--picture", "map.gif"], "its name must end in .png or .svg"),
        ([*MAP, "--slots", "1"], "slots is 1: a ring of"),
        ([*MAP, "--link-between", "ib400"], "link-between is given without several nodes"),
        (["--sweep", "tokens=1k..1k,gpus=2..16", "--world", "6"], "rings of 8 GPUs: they must make whole nodes, of 6"),
        (["--sweep", "tokens=3..9,gpus=2..4"], "zigzags of 3 tokens per GPU: they must be even"),
        (["--world", "16385"], "world is 16,385: rings of up to 16,384 GPUs are predicted"),
        (["--world", "1000000"], "world is 1,000,000: rings of up to 16,384 GPUs are predicted"),
        (["--sweep", "tokens=1k..1k,gpus=2..32k"], "gpus of sweep is 32,768: rings of up to 16,384 GPUs are"),
        (["--picture", "map.png"], "picture is given without sweep: it is of the map"),
        (["--link-between", "ib400"], "link-between is given without several nodes: it joins two of them; --nodes"),
        (["--gpus", "2", "--nodes", "2", "--link", "pcie5"], "link is given without several GPUs of a node"),
        (["--full", "--prefix-length", "4k"], "prefix_length"),
        (["--layout", "striped", "--block-mask", "strided,block=128,stride=1k"], "runs of whole blocks of 128"),
        ([*MAP, "--prefix-length", "1k"], "it takes contiguous, zigzag and striped, full or causal"),
        (["--documents-seed", "3"], "documents-seed is given without documents: it draws their lengths"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in refused(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_slots_are_those_that_a_ring_takes(world: int) -> None:
    """Refused in the same words, or taken by both."""

    def refusal(make: Any, *arguments: Any, **settings: Any) -> str:
        try:
            make(*arguments, **settings)
        except ValueError as error:
            return str(error)
        return ""

    for slots in (1, 2, 3):
        for prefetch in (None, 0, 1, 2, 3):
            settings: dict[str, Any] = {"slots": slots, "prefetch": prefetch}
            with LocalWorld(world) as ranks:
                theirs = ranks.run(partial(refusal, Ring, **settings))
            assert {*theirs} == {refusal(Call, 64, world, **settings)}, (world, settings)


def test_one_slot_of_a_two_level_ring_is_not_enough_for_a_flat_one() -> None:
    found = {way.name: way.note for way in ways(Call(1024, 4, nodes=2, slots=1), H100, LINKS)}
    assert found["flat ring"] == "2 slots, which it needs" and found["two-level ring"] == ""
    assert {way.name: way.note for way in ways(Call(1024, 2, slots=1), H100, LINKS)}["flat ring"] == ""


def times_of(way: Way) -> Times:
    """Of a way that fits."""
    assert way.forward is not None and way.backward is not None and way.exposed is not None
    return Times(way.forward, way.backward, way.exposed)


@pytest.mark.parametrize("trouble", [Trouble({3: 2.0}), Trouble(jitter=0.2), Trouble({3: 2.0}, 0.2)])
def test_every_way_has_the_same_trouble(trouble: Trouble) -> None:
    """The flat ring is the one that is predicted, and whoever waits for all takes as long as the slowest."""
    call = Call(8192, 16)
    with_it, without = ({way.name: way for way in ways(call, H100, LINKS, given)} for given in (trouble, None))
    passes = predicted(call, H100, LINKS, trouble)
    assert [with_it["flat ring"].forward, with_it["flat ring"].backward] == [one.seconds for one in passes]
    for name, way in with_it.items():
        (forward, backward, exposed), before = times_of(way), times_of(without[name])
        assert forward > before.forward and backward > before.backward
        assert not trouble.slow or forward + backward > 1.7 * (before.forward + before.backward) - exposed
    assert not trouble.slow or trouble.last(16) >= 2


def test_every_number_of_ranks_that_divides_the_key_heads_exchanges_them() -> None:
    """And only the fastest of many are on the terminal."""
    found = {way.name for way in ways(Call(2048, 16, nodes=2, kv_heads=16), H100, LINKS)}
    assert {"Ulysses 2 x ring 8", "Ulysses 4 x ring 4", "Ulysses 8 x ring 2", "Ulysses"} <= found
    six = {way.name for way in ways(Call(2048, 12, heads=12, kv_heads=6), H100, LINKS) if "Ulysses" in way.name}
    assert six == {"Ulysses 2 x ring 6", "Ulysses 3 x ring 4", "Ulysses 6 x ring 2"}
    flags = ("--gpus", "64", "--nodes", "8", "--tokens", "2k")
    many = [way["name"] for way in json.loads(invoke(*flags, "--json", "-").output)["ways"]]
    mixed = [name for name in many if " x ring" in name]
    assert len(mixed) == 5
    shown_mixed = [line for line in invoke(*flags).output.splitlines() if " x ring" in line]
    assert [line.split("  ")[0] for line in shown_mixed] == mixed[:3]
    assert "2 more of Ulysses x a ring, none faster: --json has them" in invoke(*flags).output


def test_groups_over_nodes_go_over_the_slow_link() -> None:
    """A second per launch, ten per message between nodes: three messages of an exchange, then the ring's one."""
    links = Links(Link(1e30, 0.0), Link(1e30, 10.0))
    found = {way.name: way for way in ways(Call(64, 8, nodes=4, kv_heads=4), Steady(), links)}
    assert found["Ulysses 4 x ring 2"].forward == pytest.approx(3 * 10 + 10 + 1)
    assert found["Ulysses 2 x ring 4"].forward == pytest.approx(3 * 10 + 1)


def test_ways_that_do_not_fit_are_told_last() -> None:
    """The sequence on every rank is what a GPU has no room for; of what fits nothing changes."""
    call = Call(8192, 256, nodes=32)
    every = {way.name: way for way in ways(call, H100, LINKS)}
    *fitting, gathered = ways(call, H100, LINKS, capacity=10e9)
    assert gathered.name == "all-gather of K/V" and gathered.note == "does not fit: needs 34.8 GB of 10.0 GB"
    assert (gathered.forward, gathered.backward, gathered.exposed, gathered.percent) == (None,) * 4
    assert fitting == [way for way in every.values() if way.name != gathered.name] and every[gathered.name].percent
    told = invoke("--world", "256", "--nodes", "32", "--kv-heads", "8", "--memory", "10")
    assert told.exit_code == 0 and "does not fit: needs 34.8 GB of 10.0 GB" in told.output


def test_the_memory_of_ways_is_that_of_the_bench() -> None:
    """By hand, of bf16 and 4 tokens: q 512 bytes a token, k 256; what an exchange takes, and slots as of a ring."""
    call = Call(4, 16, nodes=2, heads=4, kv_heads=2, head_dim=64)
    found = {way.name: way.memory for way in ways(call, H100, LINKS)}
    in_and_out = 4 * 4 * (512 + 256)
    assert found["all-gather of K/V"] == in_and_out + 4 * 2 * 512 + 64 * (2 * 256 + 3 * 512)
    exchange = 4 * (3 * 512 + 2 * 256 + 2 * (512 + 2 * 256) + 2 * 512)
    assert found["Ulysses 2 x ring 8"] == in_and_out + exchange + 4 * 2 * (5 * 256 + 5 * 512)  # of two levels
    assert found["two-level ring"] == sum(memory(call).values()) > sum(memory(replace(call, nodes=1)).values())
    assert found["flat ring"] == sum(memory(replace(call, nodes=1)).values())


def test_a_slow_rank_slows_its_place_in_groups_that_exchange_heads() -> None:
    call = Call(8192, 64, nodes=8)
    of = [
        next(way.seconds for way in ways(call, H100, LINKS, Trouble(slow)) if way.name.startswith("Ulysses 8 x ring"))
        for slow in ({}, {63: 2.0}, {56: 2.0}, {56: 2.0, 57: 1.5})
    ]
    assert of[1] > 1.5 * of[0] and of[1] == of[2] == of[3]


def test_the_command_tells_ways_as_slow_as_the_ring(tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    assert invoke("--slow", "3=2", "--jitter", "0.1", "--json", str(target)).exit_code == 0
    told = json.loads(target.read_text())
    flat = next(way for way in told["ways"] if way["name"] == "flat ring")
    seconds = [one["seconds"] for one in told["passes"]]
    assert [flat["forward"], flat["backward"]] == seconds
    assert told["trouble"] == "rank 3 takes 2 times as long, launches vary by 0.1"
    assert told["slow"]["slow"] == pytest.approx(sum(seconds))  # with the same jitter


def column(rows: list[Point], gpus: int) -> list[float]:
    return [row[PERCENT] for row in rows if row["gpus"] == gpus]


@pytest.mark.parametrize("trouble", [Trouble({1: 3.0}), Trouble(jitter=0.2)])
def test_the_map_knows_trouble(trouble: Trouble) -> None:
    tokens, gpus = [1024, 8192], [2, 32]
    without, with_it = (rows_of_sweep(PLAIN, H100, LINKS, tokens, gpus, given) for given in (None, trouble))
    none = rows_of_sweep(PLAIN, H100, LINKS, tokens, gpus, Trouble({1: 1.0}))  # by lanes of ranks, not of tokens
    for world in gpus:
        assert np.all(np.array(column(with_it, world)) < column(without, world))
        assert column(none, world) == pytest.approx(column(without, world))


def test_the_map_leaves_out_what_fits_no_gpu(tmp_path: Path) -> None:
    """A point more than what fits is empty, in JSON, in CSV, on the terminal and in the picture."""
    most = most_tokens(PLAIN, 0.1e9)
    assert 1024 < most < 2048
    name, target, points = "map.svg", tmp_path / "map.json", tmp_path / "map.csv"
    flags = ("--memory", "0.1", "--picture", str(tmp_path / name), "--json", str(target), "--csv", str(points))
    found = invoke(*MAP, "--kv-heads", "8", *flags)
    assert found.exit_code == 0, found.output
    rows = json.loads(target.read_text())["points"]
    note = f"does not fit 0.1 GB: at most {most:,} tokens do"
    for row in rows:
        assert (row[PERCENT] is None) == (row["seconds"] is None) == (row["note"] == note) == (row["tokens"] == 2048)
    assert found.output.count(f"empty at 2, 4 GPUs: {note}") == 1 and points.read_text().count("\n") == 5
    assert (tmp_path / name).read_text().lstrip().startswith("<?xml")
    assert sum(memory(replace(PLAIN, tokens=most)).values()) <= 0.1e9


def test_a_map_that_fits_has_no_notes() -> None:
    rows = rows_of_sweep(PLAIN, H100, LINKS, [1024], [2, 4], capacity=80e9)
    assert all(row["note"] == "" and row[PERCENT] > 0 for row in rows) and "empty" not in shown(rows, "a map")


@pytest.mark.parametrize(("arguments", "why"), [
    (["--window", "4k,0"], "contiguous, zigzag (of even shards) and striped alone, full or causal"),
    (["--documents", "8k", "--documents-seed", "3"], "contiguous, zigzag (of even shards) and striped alone"),
    (["--tokens", "1001"], "zigzag (of even shards)"),
    (["--gpus", "1"], "of 2 GPUs or more"),
])  # fmt: skip
def test_what_is_left_out_says_why(arguments: list[str], why: str) -> None:
    found = invoke("--gpus", "4", *arguments)
    assert found.exit_code == 0, found.output
    assert "left out: other ways, and the tokens per GPU that hide the links" in found.output and why in found.output
    assert "left out" not in invoke("--gpus", "4").output


def test_fp32_is_told_where_its_speed_is() -> None:
    fast, slow = (
        json.loads(invoke("--dtype", "fp32", "--tflops", told, "--json", "-").output) for told in ("100", "50")
    )
    assert slow["passes"][0]["seconds"] > 1.9 * fast["passes"][0]["seconds"]
    assert invoke("--dtype", "fp16").exit_code == 0


@pytest.mark.parametrize(
    ("text", "rate", "latency"), [("200", 200e9, 0.0), ("200,10us", 200e9, 1e-5), ("1,2", 1e9, 2e-6)]
)
def test_links_are_a_rate_and_a_latency(text: str, rate: float, latency: float) -> None:
    found = link_of(text)
    assert (found.rate, found.latency) == (rate, pytest.approx(latency))
    with pytest.raises(ValueError, match="both finite"):
        Link(1e9, float("nan"))


def test_documents_are_drawn_by_their_seed() -> None:
    told = [json.loads(invoke("--documents", "2k", "--gpus", "2", *seed, "--json", "-").output)["passes"]
            for seed in ((), ("--documents-seed", "0"), ("--documents-seed", "1"))]  # fmt: skip
    assert told[0] == told[1] != told[2]


def test_a_prefix_is_seen_by_everybody() -> None:
    """Of 4k tokens over links that are hidden: a prefix of one is a causal mask, and one of all of them none at all."""
    flags = ("--gpus", "2", "--tokens", "2k", "--layout", "contiguous", "--kv-heads", "1", "--json", "-")
    told = [json.loads(invoke(*flags, *more).output) for more in (
        (), ("--prefix-length", "1"), ("--prefix-length", "3k"), ("--prefix-length", "4k"), ("--full",)
    )]  # fmt: skip
    causal, one, most, all_of_it, full = ([each["seconds"] for each in found["passes"]] for found in told)
    assert one == causal and all_of_it == full and causal[0] < most[0] < full[0]
    assert told[2]["mask"] == "causal, prefix 3,072" and "ways" not in told[2]


def test_blocks_are_what_show_takes() -> None:
    flags = ("--gpus", "2", "--tokens", "8k", "--kv-heads", "1", "--full", "--json", "-")
    told = [json.loads(invoke(*flags, *more).output) for more in ((), ("--block-mask", "strided,block=128,stride=1k"))]
    full, blocks = (found["step"]["seconds"] for found in told)
    assert blocks < full / 4 and "of blocks of 128" in told[1]["mask"]  # 11.9% of the blocks, which carry as much state
