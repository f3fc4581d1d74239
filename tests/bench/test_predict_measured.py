"""What a prediction is given: files of measured kernels and links, this machine, and flags."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench.cli import app
from ringattn.bench.common.flops import BACKWARD_FLOPS
from ringattn.bench.kernels import command as kernel_bench
from ringattn.bench.predict import calibrate, command, given
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.host import Body, HostSpeed
from ringattn.bench.predict.launch import whole
from ringattn.bench.predict.links import PRESETS, Link, Links, link_of
from ringattn.bench.predict.measured import KERNELS, base_of, kernels_of, speed_of
from ringattn.bench.predict.program import DKDV, DQ, FOLD
from ringattn.bench.predict.ring import ideal_seconds
from ringattn.bench.predict.speed import GPUS, H100, form_of
from ringattn.bench.suite import result_file
from ringattn.ring import Mask
from ringattn.ring.schedule.layout import Documents

CPU = torch.device("cpu")
runner = CliRunner()
GPU = {"name": "NVIDIA H200", "multiprocessors": 132, "memory_gib": 140.0}


def number(what: str, rate: float, tokens: int, head_dim: int = 128, **labels: Any) -> dict[str, Any]:
    of = {"dtype": "bfloat16", "head_dim": head_dim, "mask": "causal", "seqlen": tokens, "heads": "16/16"}
    return {"name": what, "value": rate, "unit": "TFLOP/s", "labels": of | {"by": "ringattn"} | labels}


NUMBERS = [
    number("forward", 400.0, 8192),
    number("forward", 500.0, 16384),
    number("forward", 350.0, 16384, 64),
    number("forward", 510.0, 16384, mask="full"),
    number("backward", 300.0, 16384),
    number("forward", 900.0, 8192, by="cudnn"),
    number("forward", 901.0, 8192, mask="causal, window (1, 0)"),
    number("forward", 902.0, 8192, head_dim_v=64),
    number("forward with state", 903.0, 8192),
    number("forward", 120.0, 8192, dtype="float32"),
    {"name": "error of out", "value": 1e-3, "unit": "absolute", "labels": {"by": "ringattn"}, "limit": 1.0},
    {"name": "not there", "value": None, "unit": "", "labels": {"by": "flash"}, "note": "why"},
]
COPY = {"name": "copy, bytes read and written", "value": 4000.0, "unit": "GB/s", "labels": {"bytes": 1 << 32}}
FILE = {"schema": "ringattn bench kernels 1", "provenance": {"gpu": GPU}, "timer": "events", "numbers": NUMBERS}
SUITE = {
    "schema": "ringattn bench suite 1",
    "provenance": {"gpu": GPU},
    "cases": [{"name": "ceilings", "numbers": [COPY]}, {"name": "speed", "numbers": NUMBERS}],
}


def written(folder: Path, data: object) -> Path:
    target = folder / "results.json"
    if isinstance(data, bytes):
        target.write_bytes(data)
    else:
        target.write_text(data if isinstance(data, str) else json.dumps(data))
    return target


@pytest.mark.parametrize(
    ("call", "rate"),
    [
        (Call(8192, 8), 400.0),
        (Call(10000, 8), 400.0),
        (Call(131072, 8), 500.0),
        (Call(8192, 8, head_dim=64), 350.0),  # head dim before length
        (Call(8192, 8, head_dim=96), 400.0),
        (Call(8192, 8, mask=Mask()), 510.0),  # and the mask before length
        (Call(8192, 8, dtype="float32"), 120.0),
    ],
)
@pytest.mark.parametrize(
    "data", [FILE, SUITE, FILE | {"numbers": NUMBERS[::-1]}], ids=["kernels", "suite", "in another order"]
)
def test_the_nearest_row_of_ours_is_taken(call: Call, rate: float, data: object, tmp_path: Path) -> None:
    row = kernels_of(written(tmp_path, data)).nearest(call, "forward")
    assert row is not None and row.flops == rate * 1e12


def test_the_schema_is_the_one_that_is_written() -> None:
    assert kernel_bench.SCHEMA == KERNELS == FILE["schema"] and SUITE["schema"] == result_file.SCHEMA


def test_a_launch_takes_what_its_row_says(tmp_path: Path) -> None:
    found, call = kernels_of(written(tmp_path, FILE)), Call(16384, 8)
    speed, rows = speed_of(found, call, base_of(found, None), "a file")
    assert [row.what for row in rows] == ["forward", "backward"]
    area, form = whole(16384, causal=True), form_of(tokens=16384, heads=16)
    flops = 4 * 128 * 16 * area.pairs
    assert flops / speed.seconds(FOLD, area, form, hop=0) == pytest.approx(500e12)
    # the rate is that of the products; the sums that the second kernel keeps are the ring's, and come on top
    products = speed.launch + speed.products(area, form, backward=True)
    assert BACKWARD_FLOPS * flops / products == pytest.approx(300e12)
    assert sum(speed.seconds(one, area, form, hop=1) for one in (DQ, DKDV)) > products


def test_a_backward_that_was_not_measured_is_slower_as_usual(tmp_path: Path) -> None:
    numbers = [one for one in NUMBERS if one["name"] != "backward"]
    found = kernels_of(written(tmp_path, FILE | {"numbers": numbers}))
    speed, rows = speed_of(found, Call(16384, 8), H100, "a file")
    assert len(rows) == 1 and speed.backward / speed.forward == pytest.approx(H100.backward / H100.forward)


def test_the_gpu_is_the_files(tmp_path: Path) -> None:
    found = kernels_of(written(tmp_path, FILE))
    speed = base_of(found, None)
    assert (speed.memory, speed.multiprocessors, speed.capacity) == (GPUS["h200"].memory, 132, 140 * 2**30)
    assert base_of(found, "a100").memory == GPUS["a100"].memory
    other = FILE | {"provenance": {"gpu": GPU | {"name": "Some GPU", "multiprocessors": 64}}}
    assert base_of(kernels_of(written(tmp_path, other)), None) == replace(
        H100, multiprocessors=64, capacity=140 * 2**30
    )
    copied = base_of(kernels_of(written(tmp_path, SUITE)), None)
    assert copied.memory * copied.passes == pytest.approx(4e12)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(FILE)
    change(data)
    return data


def of_first(**labels: Any) -> dict[str, Any]:
    return changed(lambda data: data["numbers"][0]["labels"].update(labels))


BAD_FILES = [
    ("{", "cannot be read"),
    ("[" * 100_000, "cannot be read"),
    ("[1]", "it is [1]: it must be an object"),
    (b"\xff\xfe", "cannot be read"),
    ({"schema": "ringattn bench links 1"}, "has schema 'ringattn bench links 1'"),
    ({"schema": ["ringattn bench kernels 1"]}, "has schema ['ringattn bench kernels 1']"),
    ({"schema": None}, "schema 'ringattn bench kernels 1' or 'ringattn bench suite 1'"),
    (FILE | {"provenance": {"gpu": None}}, "was not measured on a GPU"),
    (FILE | {"provenance": 3}, "was not measured on a GPU"),
    (FILE | {"provenance": {"gpu": GPU | {"multiprocessors": 0}}}, "multiprocessors is 0"),
    (FILE | {"provenance": {"gpu": GPU | {"multiprocessors": 1.5}}}, "multiprocessors is 1.5"),
    (FILE | {"provenance": {"gpu": GPU | {"memory_gib": "much"}}}, "memory_gib is 'much'"),
    (FILE | {"provenance": {"gpu": GPU | {"name": 5}}}, "name is 5"),
    (FILE | {"numbers": "none"}, "it must be a list of objects"),
    (FILE | {"numbers": [3]}, "it must be a list of objects"),
    (FILE | {"numbers": []}, "there are none"),
    (FILE | {"numbers": NUMBERS[9:10]}, "there are rows of float32"),
    (changed(lambda data: data["numbers"][0].update(value="fast")), "numbers[0].value is 'fast'"),
    (changed(lambda data: data["numbers"][0].update(value=True)), "numbers[0].value is True"),
    (changed(lambda data: data["numbers"][0].update(value=-1)), "numbers[0].value is -1"),
    (changed(lambda data: data["numbers"][0].update(value=float("nan"))), "NaN is not a number"),
    (changed(lambda data: data["numbers"][0].update(value=10**40)), "numbers[0].value is 1000"),
    (changed(lambda data: data["numbers"][1].update(value=1e12)), "is no speed of this launch"),
    (of_first(seqlen=0), "seqlen is 0"),
    (of_first(seqlen=1 << 60), "at most"),
    (of_first(seqlen="8k"), "seqlen is '8k'"),
    (of_first(head_dim=None), "head_dim is None"),
    (of_first(heads="16"), "heads is '16'"),
    (of_first(heads="0/1"), "heads is '0/1'"),
    (of_first(dtype="int4"), "dtype is 'int4'"),
    (of_first(dtype=["bfloat16"]), "dtype is ['bfloat16']"),
    (SUITE | {"cases": [{"numbers": 1}]}, "cases[0].numbers is 1: it must be"),
]


@pytest.mark.parametrize(("data", "told"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_files_of_kernels_are_refused_by_name(data: object, told: str, tmp_path: Path) -> None:
    target = written(tmp_path, data)
    found = invoke("--kernels", str(target), "--tokens", "16k")
    assert found.exit_code == 2, found.output
    assert told in flat(found.output)
    assert "results.json" in flat(found.output)


BAD_LINKS = [
    ("null", "it is None: it must be an object"),
    ({"schema": "ringattn bench kernels 1"}, "has schema 'ringattn bench kernels 1'"),
    ({"schema": "ringattn bench links 1"}, "it must be a list of objects"),
    ({"schema": "ringattn bench links 1", "links": []}, "has no transfers between two ranks"),
    ({"schema": "ringattn bench links 1", "links": [{"way": "ring", "nbytes": 0}]}, "links[0].nbytes is 0"),
    ({"schema": "ringattn bench links 1", "links": [{"way": "ring", "nbytes": 8}]}, "links[0].seconds is None"),
    (
        {"schema": "ringattn bench links 1", "links": [{"way": "ring", "nbytes": 8, "seconds": 1e-200}]},
        "links[0].seconds is 1e-200",
    ),
    (
        {
            "schema": "ringattn bench links 1",
            "links": [{"way": "ring", "nbytes": 8, "seconds": 1.0}, {"way": "ring", "nbytes": 16, "seconds": 0.5}],
        },
        "that tells no rate",
    ),
]


@pytest.mark.parametrize(("data", "told"), BAD_LINKS, ids=range(len(BAD_LINKS)))
def test_files_of_links_are_refused_by_name(data: object, told: str, tmp_path: Path) -> None:
    target = written(tmp_path, data)
    found = invoke("--link", str(target))
    assert found.exit_code == 2, found.output
    assert told in flat(found.output) and "results.json" in flat(found.output)


def test_virtual_ranks_are_no_link(tmp_path: Path) -> None:
    rows = [
        {"transport": name, "way": way, "edge": "all", "nbytes": 1 << 20, "seconds": seconds}
        for name, way, seconds in (("local", "ring", 1e-9), ("nccl", "one way", 1e-3))
    ]
    target = written(tmp_path, {"schema": "ringattn bench links 1", "links": rows})
    assert link_of(str(target)).rate == pytest.approx((1 << 20) / 1e-3)


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, ["predict", *arguments], env={"COLUMNS": "1000", "TERM": "dumb"})


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_the_command_says_which_rows(tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    found = invoke("--kernels", str(written(tmp_path, FILE)), "--seqlen", "64k", "--world", "8", "--json", str(target))
    assert found.exit_code == 0, found.output
    assert "NVIDIA H200; forward 400 TFLOP/s of bfloat16 D128 causal, 8,192 tokens, 16/16 heads" in found.output
    told = json.loads(target.read_text())
    assert told["call"]["tokens"] == 8192 and len(told["measured"]) == 3


def test_tokens_per_rank_or_in_all() -> None:
    same = [json.loads(invoke(*flags, "--json", "-").output) for flags in (
        ("--tokens", "4k", "--world", "4"), ("--seqlen", "16k", "--world", "4"), ("--tokens", "4k", "--gpus", "4"),
    )]  # fmt: skip
    for told in same:
        del told["provenance"]  # the minute of the run and the command as typed
    assert same[0] == same[1] == same[2] and same[0]["call"]["tokens"] == 4096


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "4k", "--seqlen", "8k"], "tokens and seqlen are both given"),
        (["--seqlen", "1000", "--world", "3"], "seqlen is 1,000: 3 ranks have equal shards of it, as of 999"),
        (["--seqlen", "2", "--world", "3"], "as of 3"),
        (["--world", "0"], "both must be at least 1"),
        (["--kernels", "nothing.json"], "nothing.json cannot be read"),
        (["--kernels", "nothing.json", "--tflops", "500"], "kernels and tflops are both given"),
        (["--calibrate", "--tflops", "500"], "tflops and calibrate are both given"),
        (["--calibrate", "--kernels", "a.json"], "kernels and calibrate are both given"),
        (["--calibrate", "--gpu", "h100"], "gpu and calibrate are both given"),
        (["--sweep", "tokens=1k..2k,gpus=2..4", "--seqlen", "8k"], "the map has lengths of its own"),
        (["--beside", "2"], "beside is 2"),
    ],
)
def test_bad_input_is_named(arguments: list[str], told: str) -> None:
    found = invoke(*arguments)
    assert found.exit_code == 2, found.output
    assert told in flat(found.output)


BODY = Body(1e-9, 1e-9, 1e-9, 0.0, 1e-9, 0.0, 0.0)
HOST = HostSpeed(BODY, BODY, 0.0, 64)


def test_calibrating_a_cpu_measures_processes_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(ranks: int, entry: Any, *arguments: Any) -> Any:
        asked.append((ranks, entry, arguments))
        return HOST

    monkeypatch.setattr(calibrate, "started", measure)
    monkeypatch.setattr(calibrate, "between_processes", lambda *_: Link(1e9, 0.0))
    monkeypatch.setattr(calibrate, "cores", lambda: 2)
    call = Call(4096, 8, heads=32, kv_heads=8, head_dim=64, dtype="float32")
    found = calibrate.here(call, CPU, None, None)
    # as many as run at once, two key heads of eight with the queries that share them
    assert asked == [(2, calibrate.host_spawned, (2048, 8, 2, 64, "float32"))]
    assert found.device == HOST and found.links == Links(Link(1e9, 0.0), Link(1e9, 0.0))
    assert calibrate.here(call, CPU, PRESETS["pcie5"], None).links.inside == PRESETS["pcie5"]


def test_the_command_calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    told = given.Given(HOST, Links(Link(1e9, 0.0), Link(1e9, 0.0)), 1e12, ("some CPU",))
    monkeypatch.setattr(calibrate, "here", lambda *_: told)
    monkeypatch.setattr(command, "device_here", lambda _: CPU)
    arguments = ("--calibrate", "--seqlen", "8k", "--world", "4", "--heads", "2", "--head-dim", "64", "--dtype", "fp32")
    found = invoke(*arguments)
    assert found.exit_code == 0, found.output
    assert "speed: some CPU" in found.output and "Ulysses" not in found.output
    assert "are told of GPUs alone, and this is a CPU's speed" in found.output
    assert "at most 128" in flat(invoke(*arguments, "--world", "256").output)
    assert "beside is 1.0: the part of its speed" in flat(invoke(*arguments, "--beside", "1").output)
    assert "sweep is of GPUs" in flat(invoke(*arguments[:1], "--sweep", "tokens=1k..2k,gpus=2..4").output)


def test_calibrating_a_gpu_times_its_kernels_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU's own kernels: what is timed is read as a file's rows are."""
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    call = Call(256, 2, "contiguous", Mask(causal=True), 2, 1, 16, dtype="float32")
    speed, told = calibrate.gpu_speed(call, CPU, GPU)
    assert told[0] == "measured here, NVIDIA H200" and told[1].startswith("forward ") and told[2].startswith("backward")
    assert speed.memory != GPUS["h200"].memory and speed.capacity == 140 * 2**30
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="one GPU here, which tells no link"):
        calibrate.here(call, torch.device("cuda", 0), None, None)


@pytest.mark.nightly
def test_this_cpu_is_calibrated() -> None:
    found = invoke(
        "--calibrate", "--seqlen", "1k", "--world", "2", "--heads", "2", "--head-dim", "16", "--dtype", "fp32"
    )
    assert found.exit_code == 0, found.output
    assert "one-thread processes" in found.output


@pytest.mark.parametrize(
    "mask", [Mask(causal=True, window=(63, 0)), Mask(causal=True, documents=Documents([0, 512, 1024]))]
)
def test_ideal_is_of_what_is_visible(mask: Mask) -> None:
    """A window and documents take a part of the whole triangle, on a GPU and on a CPU."""
    part = Call(512, 2, "contiguous", mask, 2, 2, 64, dtype="float32")
    all_of_it = replace(part, mask=Mask(causal=True))
    big = replace(H100, launch=0.0, multiprocessors=1)
    for device in (big, HOST):
        ratio = ideal_seconds(part, device, "forward") / ideal_seconds(all_of_it, device, "forward")
        assert 0.05 < ratio < 0.9
    # a CPU's operator computes the triangle, not the square
    square = ideal_seconds(replace(part, mask=Mask()), HOST, "forward")
    assert ideal_seconds(all_of_it, HOST, "forward") == pytest.approx(square / 2, rel=0.01)
