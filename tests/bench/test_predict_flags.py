"""Tests of the flags and files of ``ringattn predict``: each has an effect or is refused by name."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringattn.bench.cli import app
from ringattn.bench.common import theme
from ringattn.bench.common.result import Result, read_result
from ringattn.bench.kernels.speed import UNITS
from ringattn.bench.predict import alternatives
from ringattn.bench.predict.inputs import resolve_speed, speed_from_file
from ringattn.bench.predict.links import parse_link
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.program import PASSES
from ringattn.bench.predict.ring_time import ideal_seconds
from ringattn.bench.predict.speed import BOUNDS, DKDV, DQ, FOLD, GPUS, default_kernel_shares, full_area, gpu_speed
from ringattn.bench.timeline.events import from_chrome
from ringattn.kernels.gpu import GPU_MODELS
from ringattn.ring import Mask

from ..support.kernel_bounds import compiled_bounds

MAP = "--sweep tokens=1k..2k,gpus=2..4"
TWO = ("--gpus", "2", "--tokens", "1k", "--kv-heads", "2")


def invoke(*arguments: str, columns: str = "1000") -> Any:
    return CliRunner().invoke(app, ["predict", *arguments], env={"COLUMNS": columns, "TERM": "dumb"})


def results(*arguments: str) -> dict[str, Any]:
    """Return the JSON of a call."""
    done = invoke(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.output)
    return result


def own(*arguments: str) -> dict[str, Any]:
    """Return the row of the flat ring."""
    row: dict[str, Any] = next(row for row in results(*arguments)["rows"] if row["way"] == "flat ring")
    return row


def test_packed_documents_are_faster_than_contiguous_shards() -> None:
    call = ("--gpus", "8", "--tokens", "16k", "--kv-heads", "8", "--documents", "8k")
    assert own(*call, "--packed")["bwd"] < own(*call, "--layout", "contiguous")["bwd"]


REFUSED = {
    "--tflops nan": "--tflops is nan: it must be",
    "--tflops 0": "--tflops is 0: it must be a positive, finite number of TFLOP/s",
    "--tflops 300 --backward-tflops nan": "--backward-tflops is nan: it must be",
    "--backward-tflops 300": "--backward-tflops has no effect without --tflops",
    "--jitter nan": "jitter is nan: it must be between 0 and 1, where 0.05 is 5%",
    "--jitter 0.1 --gpus 256": "slow and jitter support rings of at most 128 GPUs, not 256",
    "--slow 3": "'3' is not RANK=FACTOR",
    "--slow 3=0.5": "slow is 3=0.5: the factor must be between 1 and 1,000",
    "--slow 3=1001": "slow is 3=1001: the factor must be between 1 and 1,000",
    "--slow 8=2": "slow has rank 8: the rank must be between 0 and 7",
    "--gpu abacus": "it must be one of h100",
    "--link warp": "--link is 'warp': it must be a preset (nvlink4",
    "--link-between ib400": "link-between and --nics need several nodes",
    "--nodes 2 --nics 99": "--nics is 99: it must be at most 4",
    "--gpus 2 --nodes 2 --link pcie5": "--link is the link inside a node, but each node has one GPU",
    "--packed": "--packed needs --documents or --cu-seqlens, and no other layout",
    "--packed --documents 1k --sweep tokens=1k..2k,gpus=2..4": "--packed and --sweep cannot be used together",
    "--gpus 8 --nodes 3": "nodes is 3: it must divide world, 8, so use one of 1, 2, 4, 8",
    "--layout none.json": "--layout is none.json: No such file",
    "--layout none.json --seqlen 8k": "--seqlen and --layout cannot be used together",
    "--layout none.json --world 4": "--world and --layout cannot be used together",
    "--layout none.json --tokens 1k": "--tokens and --layout cannot be used together",
    "--tokens 1k --seqlen 8k": "--tokens and --seqlen cannot be used together",
    "--kernels none.json --tflops 300": "--kernels and --tflops cannot be used together",
    "--memory 0": "--memory is 0: it must be a positive, finite number of GB",
    "--nodes 2 --link-between warp": "--link-between is 'warp': it must be a preset (nvlink4",
    f"--layout none.json {MAP}": "--layout and --sweep cannot be used together",
    "--slots 1 --world 4": "slots is 1: a ring of 4 ranks needs at least 2",
    "--dtype fp32 --gpu a100": "--dtype is float32: the bounds of the default kernels cover only float16 and",
    "--tokens 4m": "GB for this attention alone",
    "--seqlen 1001": "--seqlen is 1,001: it must be a multiple of --world, 8, such as 1,000",
    "--world 16385": "world is 16,385: it must be at most 16,384",
    "--gpus 2k --tokens 64 --prefix-length 4k": "world is 2048: with this layout and mask it must be at most 1024",
    "--layout striped --block-mask strided,block=128,stride=1k": "every span must be a contiguous run of whole blocks",
    "--trace t.json --gpus 256": "--trace draws every rank, so at most 128 GPUs are allowed, not 256",
    "--trace t.json --jitter 0.1": "--trace draws one run, but --jitter needs several",
    "--picture map.png": "--picture has no effect without --sweep",
    "--sweep tokens=1k..2k,gpus=8..2": "does not have the form tokens=1k..128k,gpus=2..16k",
    "--sweep tokens=1k": "does not have the form tokens=1k..128k,gpus=2..16k",
    "--sweep tokens=1k..1k,gpus=2..32k": "gpus in --sweep is 32,768: it must be at most 16,384",
    "--sweep tokens=1k..1k,gpus=2..16 --world 6": "--sweep has 8 GPUs: use a multiple of 6",
    "--sweep tokens=3..9,gpus=2..4": "zigzag shards (zigzag: even length): got zigzag, 3 tokens",
    f"{MAP} --trace t.json": "--sweep and --trace cannot be used together",
    f"{MAP} --jitter 0.1": "--jitter and --sweep cannot be used together",
    f"{MAP} --slow 1=2": "--slow and --sweep cannot be used together",
    f"{MAP} --tokens 1k": "--tokens and --sweep cannot be used together",
    f"{MAP} --picture none/map.png": "there is no folder none",
    f"{MAP} --memory 0.001": "1,024 tokens per GPU need 0.2 GB for this attention alone, but the GPU has 0.001 GB",
    f"{MAP} --picture map.gif": "it must end in .png or .svg",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_refusals(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*arguments.split())
    words = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "Traceback" not in words and REFUSED[arguments] in words, words
    assert not list(tmp_path.iterdir())


def test_a_trace_has_every_rank_of_a_ring_that_is_otherwise_extrapolated(tmp_path: Path) -> None:
    done = invoke("--gpus", "33", "--pass", "forward", "--trace", str(tmp_path / "t.json"))
    assert done.exit_code == 0, done.output
    assert from_chrome(json.loads((tmp_path / "t.json").read_text())).world == 33


def test_text_and_files_of_one_ring(tmp_path: Path) -> None:
    target, trace, rows = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "p.csv"
    files = ["--json", str(target), "--trace", str(trace), "--csv", str(rows)]
    flags = ["--gpus", "4", "--nodes", "2", "--kv-heads", "8", "--gpu", "a800", "--nics", "1", "--slow", "2=1.25"]
    done = invoke(*flags, *files)
    assert done.exit_code == 0, done.output
    result = read_result(target)
    first, second, *_ = done.output.splitlines()
    assert re.fullmatch(r".+: \d+% of ideal", first) and result.notes[-1] == f"best: {first}"
    assert second.startswith("8,192 tokens on each of 4 A800 on 2 nodes, B1, zigzag, causal")
    for fragment in (
        "47 GB/s per NIC, 1 NIC per node",
        "98 GB/s inside nodes",
        "rank 2 takes 1.25 times",
        "Layout.balanced",
    ):
        assert fragment in " ".join(done.output.split())
    assert [row["way"] for row in csv.DictReader(rows.read_text().splitlines())] == [row["way"] for row in result.rows]
    for row in result.rows:
        assert row["TFLOP/s"] * (row["fwd"] + row["bwd"]) == pytest.approx(
            1e-9 * 3.5 * 4 * 128 * 32 * full_area(4 * 8192, causal=True).pairs / 4
        )
        assert 0 < row["worst hop"] <= row["exposed"] * (1 + 1e-9) and row["exposed"] < row["fwd"] + row["bwd"]
    assert from_chrome(json.loads(trace.read_text())).world == 4
    assert result.provenance["call"]["tokens"] == 8192 and result.provenance["speed"]["name"] == "A800"
    assert result.provenance["perturbation"] == "rank 2 takes 1.25 times as long"
    slow_notes = " ".join(note for note in result.notes if note.startswith("slow GPUs"))
    even, slow, balanced = map(float, re.findall(r"([\d.]+) ms", slow_notes))
    assert even < balanced < slow


@pytest.mark.nightly
def test_text_of_a_large_ring_fits_a_terminal() -> None:
    done = invoke(*["--gpus", "16k", "--nodes", "2048", "--kv-heads", "8", "--pass", "forward"], columns="80")
    assert done.exit_code == 0 and re.match(r"Ulysses 32 x ring 512: \d\d% of ideal\n", done.output)
    assert all(len(line) <= 80 for line in done.output.splitlines()), done.output
    assert "tokens per GPU for 90% of ideal by the two-level ring: " in done.output


def test_columns_depend_on_the_flags() -> None:
    (needed,) = [note for note in results(*TWO)["notes"] if "for 90% of ideal by the flat ring" in note]
    assert re.search(r": [\d,]+$", needed)
    both, alone, jitter = own(*TWO), own(*TWO, "--pass", "forward"), own("--jitter", "0.1", *TWO)
    assert alone["fwd"] == both["fwd"] and "bwd" not in alone and alone["exposed"] < both["exposed"]
    assert alone["TFLOP/s"] * alone["fwd"] == pytest.approx(both["TFLOP/s"] * (both["fwd"] + both["bwd"]) / 3.5)
    assert "kernel rate" not in invoke(*TWO, "--tflops", "300").output  # of the default kernels
    assert 0.001 < jitter["spread"] / (jitter["fwd"] + jitter["bwd"]) < 1 and "spread" not in both
    call, speed = PredictedCall(1024, 2, kv_heads=2), gpu_speed("h100")
    ideal = sum(float(ideal_seconds(call, speed, phase)) for phase in PASSES)
    assert both["ideal"] == pytest.approx(100e3 * ideal / (both["fwd"] + both["bwd"]))


def test_other_masks_than_full_and_causal(tmp_path: Path) -> None:
    # A prefix of 1 equals a causal mask, and a prefix of all tokens a full mask.
    flags = ["--gpus", "2", "--tokens", "2k", "--layout", "contiguous", "--kv-heads", "1", "--pass", "forward"]
    masks = ("", "--prefix-length 1", "--prefix-length 3k", "--prefix-length 4k", "--full")
    causal, prefix_of_one, most, every, full = (own(*flags, *mask.split())["fwd"] for mask in masks)
    assert prefix_of_one == causal and every == full and causal < most < full
    result = results(*flags, "--prefix-length", "3k")
    assert [row["way"] for row in result["rows"]] == ["flat ring"]
    assert "other methods need at least 2 GPUs" in result["notes"][0]
    blocks = own(*flags, *["--tokens", "8k", "--full", "--block-mask", "strided,block=128,stride=1k"])
    assert blocks["fwd"] < own(*flags, "--tokens", "8k", "--full")["fwd"] / 3
    (tmp_path / "mask.json").write_text('{"slices": [[[0, 1000], [0, 1000], 1], [[1000, 4096], [1000, 4096], 1]]}')
    documents = own(*flags, "--cu-seqlens", "0,1000,4k")["fwd"]
    assert own(*flags, "--full", "--mask", str(tmp_path / "mask.json"))["fwd"] == documents
    bad = {
        '{"spans": []}': "it has spans, and may have one of", '{"intervals": null}': "Could not infer dtype",
        '{"intervals": "x"}': "",
    }  # fmt: skip
    for text, words in bad.items():
        (tmp_path / "mask.json").write_text(text)
        refused = invoke(*flags, "--mask", str(tmp_path / "mask.json"))
        assert refused.exit_code == 2 and f"mask.json: {words}" in refused.output, text


def test_memory_of_a_forward_alone() -> None:
    both, forward = (
        {row["way"]: row["memory"] for row in results(*TWO, "--kv-heads", "32", *flags)["rows"]}
        for flags in ((), ("--pass", "forward"))
    )
    assert len(both) == 4 and all(0.3 < forward[way] / memory < 0.75 for way, memory in both.items())
    largest = max(both, key=both.__getitem__)
    notes = results(*TWO, "--kv-heads", "32", "--memory", str(both[largest] - 1e-6))["notes"]
    assert notes[0].startswith(f"{largest}: does not fit: needs ")
    done = invoke(*TWO, "--pass", "forward")
    assert not re.search("gradients|dQ|dK/dV", done.output)
    assert "out of the chunks" in invoke(*TWO, "--pass", "forward", "--chunks", "2").output


@pytest.mark.parametrize(
    ("gpu", "peak"), [("B200", 2250), ("L40S", 362), ("A10", 125), ("h100-PCIe", 756), ("H100", 989)]
)
def test_presets_ignore_case(gpu: str, peak: int, tmp_path: Path) -> None:
    done = invoke(*TWO, "--gpu", gpu, "--link", "NVLink4", "--json", str(tmp_path / "p.json"))
    used = read_result(tmp_path / "p.json").provenance
    assert used["speed"]["peak"] == peak * 1e12 and used["links"]["inside"]["source"].startswith("450 GB/s")
    forward, backward = default_kernel_shares(GPU_MODELS[gpu.lower()].arch, 128)
    rate = f"{forward:.0%} of the peak of {peak} TFLOP/s forward, {backward:.0%} backward, the instruction bound of"
    assert rate in " ".join(done.output.split())


def test_default_kernels_have_a_rate_at_every_head_dim_on_every_gpu() -> None:
    table = json.loads(BOUNDS.read_text())["percent"]
    assert {*table} == {str(GPU_MODELS[key].arch) for key in GPUS}
    for arch, by_head_dim in table.items():
        assert all(0 < bound <= 100 for bounds in by_head_dim.values() for bound in bounds)
        for head_dim, (forward, dq, dkdv) in by_head_dim.items():
            # Five products are counted. dQ computes three and dK/dV four, each at its own bound.
            backward = 5 / (3 / dq + 4 / dkdv)
            for size in (int(head_dim) - 1, int(head_dim)):
                assert [*default_kernel_shares(int(arch), size)] == pytest.approx([forward / 100, backward / 100])
    forward, backward = default_kernel_shares(90, 64)
    result = results(*TWO, "--head-dim", "64")["provenance"]["speed"]
    assert [result["forward"], result["backward"]] == pytest.approx([forward * 989e12, backward * 989e12])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_recorded_bounds_are_those_of_the_compiler() -> None:
    """Compare the table with the compiler; ``python -m tests.support.kernel_bounds`` updates it."""
    recorded, compiled = json.loads(BOUNDS.read_text()), compiled_bounds()
    if recorded.pop("triton") == compiled.pop("triton"):
        assert compiled == recorded


@pytest.mark.parametrize(
    ("name", "base"),
    [("NVIDIA A10", "a10"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
     ("NVIDIA B200", "b200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie")],
)  # fmt: skip
def test_the_gpu_of_a_file_is_found_by_name(name: str, base: str, tmp_path: Path) -> None:
    about = {"name": name, "multiprocessors": 7, "memory_gib": 8.0}
    speed, _ = speed_from_file(result_file(tmp_path, ROWS, gpu=about), PredictedCall(16384, 8), None)
    assert (speed.name, speed.link, speed.memory) == (name, gpu_speed(base).link, gpu_speed(base).memory)
    speed, _ = speed_from_file(tmp_path / "results.json", PredictedCall(16384, 8), "l40s")
    assert (speed.name, speed.memory) == (name, gpu_speed("l40s").memory)


def test_text_names_the_nic_and_the_range_of_a_flat_ring() -> None:
    nodes = (*TWO[2:], "--gpus", "8", "--nodes", "2", "--tokens", "2k")
    text = invoke(*nodes).output
    assert "between nodes 47 GB/s per NIC, one NIC per GPU (assumed: 400G InfiniBand" in text.replace("\n", " ")
    with_nics = invoke(*nodes, "--link-between", "ib200", "--nics", "2").output.replace("\n", " ")
    assert "between nodes 23 GB/s per NIC, 2 NICs per node (200G InfiniBand" in with_nics
    result = results(*nodes)
    (note,) = [word for word in " ".join(result["notes"]).split("flat ring: ")[1:2]]
    slow, fast = (float(number) for number in re.findall(r"([\d.]+) ms", note)[:2])
    row = next(row for row in result["rows"] if row["way"] == "flat ring")
    assert fast < slow and slow == pytest.approx(row["fwd"] + row["bwd"], rel=1e-3)
    wide = next(row for row in results(*nodes, "--link-between", "188,20us")["rows"] if row["way"] == "flat ring")
    assert fast == pytest.approx(wide["fwd"] + wide["bwd"], rel=1e-3)
    assert re.search(r"baseline ring: [\d.]+ ms if a transfer between nodes uses one NIC", " ".join(result["notes"]))
    assert "uses one NIC" not in invoke(*TWO).output and "uses one NIC" not in invoke(*TWO, "--nodes", "2").output


QUESTIONS = Path(__file__).parents[2] / "docs" / "questions.md"


def test_the_example_of_the_faq() -> None:
    text = QUESTIONS.read_text().partition("## Why not gather")[2]
    table = {
        name.strip(): [float(word.split()[0].replace(",", "")) for word in cells]
        for name, *cells in (line.strip("|").split("|") for line in text.splitlines() if line.startswith("| "))
        if "*" not in name
    }
    flags = ["--seqlen", "1000000", "--world", "8", "--link", "200", "--tflops", "560", "--backward-tflops", "430"]
    runs = {
        "forward, causal": [*flags, "--causal", "--pass", "forward"],
        "forward, full": [*flags, "--full", "--pass", "forward"],
        "forward and backward, causal": [*flags, "--causal"],
    }
    rows = {}
    for name, arguments in runs.items():
        by_way = {row["way"]: row for row in results(*arguments)["rows"]}
        pair = rows[name] = [by_way["all-gather of K/V"], by_way["flat ring"]]
        assert table[name] == [pytest.approx(row["fwd"] + row.get("bwd", 0), abs=0.5) for row in pair]
    for name in ("forward, causal", "forward and backward, causal"):
        exposed, memory = (f"exposed communication, {name}", f"memory of a GPU, {name.removesuffix(', causal')}")
        assert table[exposed] == [pytest.approx(row["exposed"], abs=0.005) for row in rows[name]]
        assert table[memory] == [pytest.approx(row["memory"], abs=0.05) for row in rows[name]]
    ranks, tokens, width, bandwidth, flops = 8, 125_000, 4096, 200e9, 560e12
    call = PredictedCall(tokens, ranks, heads=32, kv_heads=32)
    gathered = ranks * tokens * width * 4
    slots = call.memory(backward=False)["K/V slots"]
    assert table["K and V on a GPU"] == [pytest.approx(word / 1e9, abs=0.05) for word in (gathered, slots)]
    received = (ranks - 1) * tokens * width * 4
    gather, attention = received / bandwidth, 4 * tokens * ranks * tokens * width / flops
    for number in (
        f"= {gathered / 2e9:.1f} GB.", f"K and V together have {gathered / 1e9:.1f} GB",
        f"{received / 1e9:.1f} GB received by each",
        f"{1e3 * gather:.1f} ms, not 320", f"{attention:.2f} s, {attention / 2:.2f} s if causal",
        f"{attention / gather:.0f} times as long as the gather, {attention / 2 / gather:.0f} times if causal",
        f"{0.32 / attention:.0%} and {0.64 / attention:.0%}", f"7 hops of {1e3 * gather / 7:.1f} ms",
        f"{1e3 * attention / 16:.0f} ms of causal attention ({1e3 * attention / 8:.0f} of full)",
        f"= {(ranks - 1) / ranks * flops / bandwidth:,.0f} tokens",
        f"{received * ranks / 1e9:.0f} GB are received in total",
    ):  # fmt: skip
        assert number in " ".join(text.split()), number


def test_sweep_draws_a_map(tmp_path: Path) -> None:
    target, points = tmp_path / "map.svg", tmp_path / "map.csv"
    flags = ["--sweep", "tokens=1k..4k,gpus=2..8", "--picture", str(target), "--csv", str(points), "--kv-heads", "8"]
    done = invoke(*flags, "--memory", "0.2", "--pass", "forward")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(points.read_text().splitlines()))
    assert [row.pop("GPUs") for row in rows] == ["2", "4", "8"]
    assert all([*row] == ["1k", "2k", "4k"] and 0 < float(row["1k"]) < 101 and row["4k"] == "" for row in rows)
    assert done.output.startswith("90% of ideal on 8 GPUs: at none of these lengths\n")
    assert "empty cells at 2, 4, 8 GPUs: the call does not fit into 0.2 GB" in done.output
    assert "<svg" in target.read_text()


def test_the_summary_of_a_map_is_of_its_largest_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    percents = {2: {1024: 95.0, 2048: 96.0}, 8: {1024: 50.0, 2048: 90.0}, 16: {1024: None, 2048: 91.25}}
    figures: list[Any] = []
    monkeypatch.setattr(alternatives, "sweep_percents", lambda *_: percents)
    monkeypatch.setattr(theme, "write_figure", lambda figure, target, dpi: figures.append((figure, target)))
    target = tmp_path / "map.png"
    done = invoke("--sweep", "tokens=1k..2k,gpus=2..16", "--picture", str(target), "--json", str(tmp_path / "m.json"))
    assert done.output.startswith("90% of ideal on 16 GPUs: 2k tokens per GPU\n"), done.output
    result = read_result(tmp_path / "m.json")
    assert [[*row.values()] for row in result.rows] == [["2", 95.0, 96.0], ["8", 50.0, 90.0], ["16", None, 91.25]]
    assert result.notes[0].startswith("empty cells at 16 GPUs: ") and result.notes[-1] == f"picture: {target}"
    ((figure, drawn_to),) = figures
    axes = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert drawn_to == target and cells == {
        (0.5, 0.5): "95", (1.5, 0.5): "50", (2.5, 0.5): "-", (0.5, 1.5): "96", (1.5, 1.5): "90", (2.5, 1.5): "91",
    }  # fmt: skip
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "8", "16"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1k", "2k"]


GPU = {"name": "NVIDIA H200", "multiprocessors": 132, "memory_gib": 140.0}


def number(what: str, rate: float, tokens: int, head_dim: int = 128, **labels: Any) -> dict[str, Any]:
    of = {"dtype": "bfloat16", "head_dim": head_dim, "mask": "causal", "seqlen": tokens, "heads": "16/16"}
    return {"pass": what, "rate": rate} | of | {"by": "ringattn"} | labels


ROWS = [
    number("forward", 400.0, 8192),
    number("forward", 500.0, 16384, heads="16/4"),
    number("forward", 350.0, 16384, 64),
    number("forward", 510.0, 16384, mask="full"),
    number("backward", 300.0, 16384),
    number("forward", 900.0, 8192, by="cudnn"),
    number("forward", 901.0, 8192, mask="causal, window (1, 0)"),
    number("forward", 902.0, 8192, head_dim_v=64),
    number("forward with state", 903.0, 8192),
    number("forward", 120.0, 8192, dtype="float32"),
    {"pass": "forward", "by": "flash", "rate": None, "note": "why"},
    number("forward", 250.0, 16384, heads="2/2"),
]


def result_file(folder: Path, rows: list[dict[str, Any]], **provenance: Any) -> Path:
    target = folder / "results.json"
    units = dict.fromkeys((name for row in rows for name in row), "")
    target.write_text(json.dumps(Result("bench", units, [*rows], provenance=provenance).as_json()))
    return target


@pytest.mark.parametrize(("call", "rate"), [
    (PredictedCall(8192, 8), 400), (PredictedCall(131072, 8), 500), (PredictedCall(8192, 8, head_dim=64), 350),
     # head dim before length
    (PredictedCall(8192, 8, mask=Mask()), 510), (PredictedCall(8192, 8, dtype="float32"), 120),  # mask before length
    (PredictedCall(16384, 8, heads=2, kv_heads=1), 250),
])  # fmt: skip
def test_the_nearest_row_of_a_file_is_used(call: PredictedCall, rate: float, tmp_path: Path) -> None:
    assert {*ROWS[0]} < {*UNITS}  # `bench kernels` writes these columns
    for rows in (ROWS, ROWS[::-1]):
        _, (_, forward, *_) = speed_from_file(result_file(tmp_path, rows, gpu=GPU), call, None)
        assert forward.startswith(f"forward {rate} TFLOP/s ({call.dtype}")


def test_a_launch_takes_the_time_of_its_row(tmp_path: Path) -> None:
    call, area = PredictedCall(16384, 8, heads=16, kv_heads=16), full_area(16384, causal=True)
    speed, lines = speed_from_file(result_file(tmp_path, ROWS, gpu=GPU), call, None)
    assert len(lines) == 3 and "NVIDIA H200" in lines[0]
    flops = 4 * 128 * 16 * area.pairs
    first, later = (speed.seconds(FOLD, area, call, hop=hop) for hop in (0, 1))
    assert flops / first == pytest.approx(500e12)
    by_flags = {resolve_speed(replace(call, chunks=chunks), None, 560.0, None, None) for chunks in (1, 4)}
    assert len(by_flags) == 1  # a rate is that of a whole launch
    assert later - first == pytest.approx(
        speed.memory_seconds((4 + 4) * 16384 * 16 * 128)
    )  # the state is read and written
    # The rate covers the products. The accumulators of the second kernel belong to the ring and are added.
    products = speed.launch + speed.product_seconds(area, call, backward=True)
    assert 2.5 * flops / products == pytest.approx(300e12)
    assert sum(speed.seconds(launch, area, call, hop=1) for launch in (DQ, DKDV)) > products
    assert (speed.name, speed.multiprocessors, speed.capacity) == ("NVIDIA H200", 132, 140 * 2**30)
    text = " ".join(invoke("--kernels", str(result_file(tmp_path, ROWS, gpu=GPU)), *TWO).output.split())
    assert "of 2 NVIDIA H200, B1" in text and "forward 400 TFLOP/s (bfloat16, D128, causal" in text


def transfer(nbytes: object, micros: object, **more: Any) -> dict[str, Any]:
    return {"transport": "nccl", "channels": None, "way": "ring", "edge": "all", "size": nbytes, "time": micros} | more


LINK_ROWS = [transfer(nbytes, 1e3 + nbytes / 2e3) for nbytes in (1 << 16, 1 << 20, 1 << 24)]


def test_links_of_presets_numbers_and_files(tmp_path: Path) -> None:
    # The slowest edge of a file's fastest transport counts. Virtual ranks, registered buffers and other
    # numbers of channels do not.
    for text, *expected in (("200", 200e9, 0.0), ("200,10us", 200e9, 1e-5), ("1,2", 1e9, 2e-6)):
        assert [parse_link(text).rate, parse_link(text).latency] == pytest.approx(expected)
    others = [
        transfer(1 << 20, 1e9, transport="process_group"), transfer(1 << 20, 1e-3, transport="local"),
        transfer(1 << 20, 1e-3, transport="nccl, registered"), transfer(1 << 20, 1e4, channels=4),
        transfer(1 << 20, 1e4, edge="0->0"), transfer(1 << 20, 1e-3, way="one way"),
        transfer(1 << 16, 1.0, edge="other"),
    ]  # fmt: skip
    link = parse_link(str(result_file(tmp_path, LINK_ROWS + others)))
    assert (link.rate, link.latency) == (pytest.approx(2e9), pytest.approx(1e-3))
    convex = [transfer(1 << 20, 1e2), transfer(1 << 21, 3e2)]  # a latency is not negative
    link = parse_link(str(result_file(tmp_path, convex)))
    assert link.latency == 0.0 and link.rate > 0
    bent = [transfer(1 << 10, 10.0), transfer(1 << 20, 110.0), transfer(1 << 30, 2e5)]  # small ones give the latency
    assert parse_link(str(result_file(tmp_path, bent))).latency == pytest.approx(1e-5, rel=0.2)
    one_way = [transfer(1 << 20, 1e3, way="one way")]
    assert parse_link(str(result_file(tmp_path, one_way))).rate == pytest.approx((1 << 20) / 1e-3)


def changed(place: int, **values: Any) -> list[dict[str, Any]]:
    return [row | values if number == place else row for number, row in enumerate(ROWS)]


@pytest.mark.parametrize(("rows", "about", "words"), [
    (ROWS, None, "was not measured on a GPU"),
    (ROWS, GPU | {"multiprocessors": 0}, "multiprocessors is 0"),
    ([], GPU, "it has none"),
    (ROWS[9:10], GPU, "its rows are for float32"),
    (changed(0, rate=True), GPU, "rows[0]: rate is True"),
    (changed(1, rate=1e12), GPU, "is too fast: this call would take less time"),
    (changed(0, heads="16"), GPU, "rows[0] is not a row written by `bench kernels`"),
])  # fmt: skip
def test_files_of_kernels_are_refused_by_name(
    rows: list[dict[str, Any]], about: object, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"results\.json") as refused:
        speed_from_file(result_file(tmp_path, rows, gpu=about), PredictedCall(16384, 8), None)
    assert words in str(refused.value)


@pytest.mark.parametrize(("rows", "words"), [
    ([], "has no transfers between ranks"), ([transfer(8, 1e-200)], "rows[0]: time is 1e-200"),
    ([transfer(8, 1e6), transfer(16, 5e5)], "so the rate is unknown"),
])  # fmt: skip
def test_files_of_links_are_refused_by_name(rows: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results\.json") as refused:
        parse_link(str(result_file(tmp_path, rows)))
    assert words in str(refused.value)
