"""``ringattn tune``: what it is asked, what it says and writes, and its GPU's part on the CPU and on a stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn.autotune import candidates, cli_tune, measure, ring_search, tune
from ringattn.autotune import compile as compile_
from ringattn.autotune.candidates import Ranked, Verdict, job_of
from ringattn.autotune.compile import Variant
from ringattn.autotune.measure import DeviceTrials, checked_sides, in_parts
from ringattn.autotune.model import Shape, gpu_of_arch
from ringattn.autotune.search import Budget, Measured, Reading
from ringattn.autotune.space import space
from ringattn.autotune.tune import (
    PointResult,
    TuneConfig,
    backward_notes,
    compile_part,
    default_tile,
    estimated_entry,
    journals,
    measure_part,
)
from ringattn.bench.kernels.accuracy import Inputs, Results, draw, exactly
from ringattn.kernels import Tile, choice, default_config, tables
from ringattn.kernels.tables import KERNELS, TUNED, Gpu, Point, options_of, read

from ..support.tile_tables import H200, folders
from ..support.tune_cases import StandIn, no_progress, without_processes

__all__ = ["folders"]

Folders = tuple[Path, Path]
CPU = torch.device("cpu")
SHAPE = Shape(2, 1, 16, 16, "fp32")
SMALL = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--dtype", "fp32", "--seqlen", "16", "--full"]


def config_of(folder: Path, **changed: Any) -> TuneConfig:
    return replace(TuneConfig(SHAPE, (64,), False, H200, CPU, folder, 1e9, 1), **changed)


def fine(job: Variant) -> Verdict:
    """The smaller the tile, the better."""
    tile = job.tile
    return Verdict((), float(999 - tile.block_q - tile.block_k - tile.num_warps - tile.num_stages), "%")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything compiles, in this process."""
    without_processes(monkeypatch)


def asked(*arguments: str) -> Any:
    return CliRunner().invoke(cli_tune.app, [*arguments], env={"COLUMNS": "400", "NO_COLOR": "1"})


# the command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--arch", "sm_91"], "arch is 'sm_91': it must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
        (["--heads", "6", "--kv-heads", "4"], "heads is 6: it must be a multiple of the 4"),
        (["--head-dim", "512"], "head_dim is 512: it must be 1 to 256"),
        (["--dtype", "fp8"], "'fp8'"),
        (["--seqlen", "8x"], "'8x' is not a size"),
        (["--seqlen", "0"], "seqlen is [0]"),
        (["--kernels", "dq,dk"], "--kernels has 'dk': it must be one of forward, dq, dkdv"),
        (["--from-config", "/nowhere/config.json"], "/nowhere/config.json does not say an attention"),
        (["--from-config", "x", "--heads", "2"], "--heads has no say beside --from-config"),
        (["--list", "--compile-only"], "--compile-only has no say beside --list"),
        (["--list", "--budget", "9", "--workers", "2"], "--budget, --workers has no say beside --list"),
        (["--list", "--save-dir", "x"], "--save-dir has no say beside --list"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["--save-dir", "/dev/null/x"], "/dev/null/x is no folder to save in"),
        (["--ring", "--wire", "fp4"], "--wire is fp4: it takes some of bf16, fp8"),
        (["--ring", "--value-dim", "64"], "--value-dim is 64: rings are tuned with values of --head-dim"),
        (["--ring", "--device", "tpu"], "'tpu'"),
        (["--ring", "--arch", "sm_80"], "--arch has no say with --ring"),
        (["--ring", "--list", "--compile-only"], "--compile-only has no say beside --list"),
        (["--ring", "--workers", "2"], "--workers has no say with --ring"),
        (["--list", "--world", "5"], "--world is given without --ring"),
        (["--list", "--device", "tpu"], "--device is given without --ring"),
        (["--wire", "nonsense"], "--wire is given without --ring"),
        (["--ring", "--save-dir", "/dev/null/x"], "/dev/null/x is no folder to save in"),
        (["--ring", "--device", "cpu", "--seqlen", "8k,1g"], "--seqlen: 1,073,741,824 tokens on each of 2 ranks take"),
    ],
)
def test_bad_input_is_an_error_that_says_what_fits(
    arguments: list[str], told: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_search, "spawn", lambda *given, **how: pytest.fail("a search was started"))
    result = asked(*arguments)
    assert result.exit_code == 2
    assert told in re.sub(r"\s+", " ", result.output.replace("│", " "))


def test_the_space_is_listed(tmp_path: Path) -> None:
    result = asked("--list", "--seqlen", "8k,32k", "--arch", "sm_80", "--csv", str(tmp_path / "list.csv"))
    assert result.exit_code == 0, result.output
    config = TuneConfig(Shape(32, 32, 128, 128), (8192, 32768), True, gpu_of_arch("sm_80"), None, tmp_path, 1, 1)
    count = sum(len(space(point, 80)) for point in config.points)
    others = sum(len(config.schedules_at(point)) for point in config.points)
    told = f"{count} candidates for sm_80; of the best 2 of each also {others} tile schedules; not tried: "
    assert told in result.output and others == 4 * 3 * 5  # order, persistent and its margin; of three kernels
    lines = (tmp_path / "list.csv").read_text().splitlines()
    assert len(lines) == count + others + 1
    assert sum("best 2: order=longest persistent=True sm_margin=8" in line for line in lines) == 4 * 3


def test_a_models_config_and_kernels_say_what_is_tried(tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(
        '{"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "torch_dtype": "float16"}'
    )
    flags = ["--from-config", str(path), "--list", "--seqlen", "1k", "--full", "--near", "2", "--kernels", "dq,forward"]
    rows = json.loads(asked(*flags, "--json", "-").output)["rows"]
    names = ("dtype", "D", "Dv", "group", "mask", "tokens")
    assert {tuple(row[name] for name in names) for row in rows} == {("fp16", 64, 64, 4, "full", 1024)}
    assert Counter(row["kernel"] for row in rows) == {"dq": 2, "forward": 2}


@pytest.mark.parametrize(
    ("here", "arch", "compile_only", "gpu", "measures"),
    [
        (None, None, False, "sm_90", False),
        (None, "sm_120", True, "sm_120", False),
        (H200, None, False, "NVIDIA H200", True),
        (H200, "sm_90", False, "NVIDIA H200", True),
        (H200, None, True, "NVIDIA H200", False),
        (H200, "sm_90", True, "sm_90", False),
        (H200, "sm_80", False, "sm_80", False),
    ],
)
def test_what_is_tuned_for(
    here: Gpu | None, arch: str | None, compile_only: bool, gpu: str, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tables, "gpu_of", lambda device: here)
    found, device, why = cli_tune.target(arch, compile_only)
    assert (found.name, device is not None) == (gpu, measures)
    assert ("nothing is measured" in why) != measures


def test_a_gpu_that_no_tile_is_known_to_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tables, "gpu_of", lambda device: Gpu("Tesla V100", 70))
    with pytest.raises(ValueError, match="arch is 'sm_70': it must be one of sm_80"):
        cli_tune.target(None, False)


@pytest.fixture
def everything_compiles(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_part", lambda *given: compile_part(*given, work=fine))


def test_without_a_gpu_it_compiles_and_says_so(tmp_path: Path, folders: Folders, everything_compiles: None) -> None:
    result = asked(*SMALL, "--arch", "sm_80", "--json", str(tmp_path / "told.json"))
    assert result.exit_code == 0, result.output
    assert "no GPU here: compiled and ranked, nothing is measured, entries are estimates" in result.output
    (path,) = folders[0].glob("*.json")
    table = read(path)
    assert (table.gpu, table.arch, table.triton) == ("sm_80", 80, tables.triton_version())
    assert {(one.point.kernel, one.point.length, one.estimated) for one in table.entries} == {
        (kernel, 16, True) for kernel in TUNED
    }
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["case"] == "tune" and len(told["rows"]) == 5 and not told["failed"]
    assert f"written: {path}" in told["notes"] and told["notes"][-1].startswith("best: by bounds alone; estimates")
    again = asked(*SMALL, "--arch", "sm_80", "--compile-only", "--json", "-")
    assert json.loads(again.output)["rows"] == told["rows"]


def test_a_budget_to_compile_leaves_whole_points_and_says_what_is_left(
    tmp_path: Path, folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same command goes on from there."""
    spent, seen = [0.0], list[Variant]()

    def work(job: Variant) -> Verdict:
        spent[0] += 1.0
        seen.append(job)
        return fine(job)

    monkeypatch.setattr(tune, "Budget", lambda seconds: Budget(seconds, lambda: spent[0]))
    monkeypatch.setattr(tune, "compile_part", lambda *given: compile_part(*given, work=work))
    flags = [*SMALL, "--arch", "sm_80", "--compile-only", "--kernels", "forward,dq"]
    shape = {"lengths": (16,), "causal": False, "gpu": gpu_of_arch("sm_80"), "device": None, "kernels": ("forward",)}
    first_point = len(compiled_for(config_of(tmp_path / "other", **shape)))
    result = asked(*flags, "--budget", str(first_point + 1), "--json", str(tmp_path / "told.json"))
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "told.json").read_text())
    first, second = told["rows"]
    assert first["left"] == 0 and first["tile"] != "none" and second["left"] > 0 and second["tile"] == "none"
    assert f"left by --budget: 1 of 2 kernels, masks and lengths, {second['left']} binaries or more" in result.output
    again = json.loads(asked(*flags, "--json", "-").output)
    assert all(row["left"] == 0 and row["tile"] != "none" for row in again["rows"])
    assert len(seen) == len({(job, job.role, job.sizes) for job in seen}), "nothing is compiled twice"


@pytest.mark.nightly
def test_a_real_run_without_a_gpu(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really: worker processes, Triton, the gate, a table that a reader takes and a launch may ask for."""
    monkeypatch.setattr(candidates, "schedules", lambda *given: [])
    result = asked(*SMALL, "--arch", "sm_80", "--near", "1", "--kernels", ",".join(TUNED))
    assert result.exit_code == 0, result.output
    (path,) = folders[0].glob("*.json")
    assert len(read(path).entries) == len(TUNED)
    for one in read(path).entries:
        assert one.bound and one.bound_by.startswith("percent of the tensor cores' peak, limited by ") and one.versions


def test_the_users_interruption_keeps_what_was_compiled(tmp_path: Path) -> None:
    """Ctrl-C at the command, as a terminal sends it: to the whole process group."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable, "-m", "ringattn", "tune", "--seqlen", "64", "--heads", "1", "--head-dim", "16", "--full",
        "--compile-only", "--workers", "1", "--save-dir", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    ends = time.monotonic() + 120
    journal: list[Path] = []
    while not journal and time.monotonic() < ends and process.poll() is None:
        journal = [*tmp_path.glob("compiled_*.jsonl")]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: what is known is kept" in " ".join(errors.split())
    assert journal and journal[0].read_text().endswith("\n")


# the GPU's part


def slow(tile: Tile, run: int) -> float:
    return 1e-3 * (tile.block_q + tile.block_k / 2 + tile.num_warps)


def test_a_run_measures_and_is_the_default_from_then_on(
    folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, steps = config_of(folders[0], lengths=(16, 64), schedules_of=1), Counter[str]()

    def step(part: str, more: int | None) -> None:
        steps[part] += -1 if more is None else more

    compiled, measured = journals(config)
    found = compile_part(config, compiled, step, work=fine)
    gpu = StandIn(slow, besides=lambda tile: 2.0 * slow(tile, 0))
    answers = measure_part(config, found, measured, step, trials_of=lambda point: gpu, budget=Budget(1e9, gpu.clock))
    assert not any(steps.values()), "progress ends where it was planned"
    table = read(next(folders[0].glob("nvidia-h200*.json")))
    assert {one.point for one in table.entries} == {*config.points} == {one.point for one in answers}
    for one in table.entries:
        best = min([default_tile(one.point, 90), *space(one.point, 90)], key=lambda x: slow(x, 0))
        assert slow(one.tile, 0) == slow(best, 0) == one.seconds
        assert one.beside == 2 * one.seconds and one.baseline == slow(default_tile(one.point, 90), 0)
        assert one.clocks == {"sm_mhz": 1980.0, "throttled": ""}
    assert not measured.path.exists() and compiled.path.exists()
    rows = [one.as_row() for one in answers]
    assert all(row["time"] <= row["default's time"] and row["beside"] == 2 * row["time"] for row in rows)
    assert f" of {len(rows)} are faster than the default, at most " in tune.notes_of(answers, None)[-1]
    monkeypatch.setattr(choice, "gpu_of", lambda device: H200)
    q, v = torch.empty(1, 64, 2, 16), torch.empty(1, 64, 1, 16)
    made = default_config(q, v)
    tiles = {one.point.kernel: one.tile for one in table.entries if one.point.length == 64 and one.point.mask == "full"}
    assert {*tiles} == {*TUNED} and all(getattr(made, kernel) == tiles[kernel] for kernel in KERNELS)


def compiled_for(config: TuneConfig) -> list[Variant]:
    """What the compile part asks for, in order."""
    seen: list[Variant] = []

    def work(job: Variant) -> Verdict:
        seen.append(job)
        return fine(job)

    compile_part(config, journals(config)[0], no_progress, work=work)
    return seen


def test_a_budget_leaves_the_journal_and_the_next_run_goes_on(folders: Folders, compiler: None) -> None:
    config = config_of(folders[0], kernels=("forward", "dkdv"))
    found = compile_part(config, journals(config)[0], no_progress, work=fine)
    gpu, marks = StandIn(slow), []

    def trials_of(point: Point) -> StandIn:
        marks.append(len(gpu.calls))
        return gpu

    budget = Budget(10.0, gpu.clock)
    answers = measure_part(config, found, journals(config)[1], no_progress, trials_of=trials_of, budget=budget)
    assert all(here < there for here, there in pairwise([*marks, len(gpu.calls)])), "a point had no time"
    assert any(one.measured is None or not one.measured.complete for one in answers)
    journal = journals(config)[1]
    assert journal.path.exists()
    more: dict[str, Any] = {"trials_of": lambda point: gpu, "budget": Budget(1e9, gpu.clock)}
    measure_part(config, found, journal, no_progress, **more)
    whole, other = StandIn(slow), config_of(folders[1])
    more = {"trials_of": lambda point: whole, "budget": Budget(1e9, whole.clock)}
    measure_part(other, found, journals(other)[1], no_progress, **more)
    assert Counter(gpu.calls) == Counter(whole.calls)
    tiles = [
        {one.point: (one.tile, one.seconds) for one in read(next(folder.glob("nvidia*.json"))).entries}
        for folder in folders
    ]
    assert tiles[0] == tiles[1]


def test_estimates_come_first_and_stay_where_nothing_was_measured(
    folders: Folders, everything_compiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = StandIn(slow)
    monkeypatch.setattr(tune, "DeviceTrials", lambda *given: gpu)
    monkeypatch.setattr(tune, "Budget", lambda seconds: Budget(0.0 if seconds < 1e10 else seconds, gpu.clock))
    found = tune.tune(config_of(folders[0]), no_progress)
    table = read(next(folders[0].glob("nvidia*.json")))
    assert len(table.entries) == len(found.rows) == len(TUNED) and all(one.estimated for one in table.entries)


def test_without_a_gpu_as_much_is_compiled_as_with_one(folders: Folders, compiler: None) -> None:
    """So that a machine with a GPU and the same cache compiles nothing."""
    kernels = "forward", "dkdv"
    without, there = (
        compiled_for(config_of(folder, device=on, kernels=kernels, causal=True))
        for folder, on in zip(folders, (None, CPU), strict=True)
    )
    assert without == there and any(dict(job.options).get("order") for job in there)


def test_an_emptied_cache_compiles_again_what_is_launched_alone(
    folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best and the default, each as it is timed and as it is checked; the others are ranked by the journal."""
    config = config_of(folders[0], lengths=(64,), kernels=("dkdv",))
    first = compiled_for(config)
    found = compile_part(config, journals(config)[0], no_progress, work=fine)
    how = candidates.Compiler.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(how, "holds", lambda verdict: False)
    again = compiled_for(config)
    launched = [
        ("middle", None), *((role, checked_sides(one.point)) for one in found for role in ("first", "middle", "last"))
    ]  # fmt: skip
    wanted = {
        job_of(one.point, tile, 90, 2, *launch).launch.signature
        for one in found
        for tile in (*one.ranked.tiles, one.default)
        for launch in launched
    }
    assert {job.launch.signature for job in again} == wanted
    ranked = {job.tile for job in first} - {job.tile for job in again}
    assert len(again) == len({*again}) < len(first) and len(ranked) > 5


def test_the_estimate_is_the_best_bound_of_a_tile_alone(folders: Folders, compiler: None) -> None:
    """Whatever theirs, no kernel and no schedule that never ran."""
    config = config_of(folders[0], device=None)

    def work(job: Variant) -> Verdict:
        return Verdict((), 9e9, "%") if job.options else fine(job)

    for one in compile_part(config, journals(config)[0], no_progress, work=work):
        assert any(map(options_of, one.ranked.tiles)) or one.point.kernel not in KERNELS
        made = estimated_entry(one)
        most = max(fine(job_of(one.point, tile, 90, 2)).bound or 0 for tile in space(one.point, 90))
        assert made.bound == most and made.estimated and made.seconds is None


# one pass or two

WAYS = ("dq", "dkdv", "single_pass", "single_pass_deterministic")
TILE = Tile(64, 64, 4, 2)


def results_of(bounds: Mapping[str, float], seconds: Mapping[str, float]) -> list[PointResult]:
    made = []
    for kernel, bound in bounds.items():
        point = Point(kernel, "bf16", 128, 128, 4, "full", 8192)
        ranked = Ranked((TILE,), {}, {TILE: Verdict((), bound, "percent")})
        timed = Measured(TILE, {TILE: [Reading(seconds[kernel])]}, TILE, {}, True) if kernel in seconds else None
        made.append(PointResult(point, TILE, ranked, 1.0, timed))
    return made


def test_the_ways_are_compared_by_their_bounds_or_by_their_times() -> None:
    bounds = dict(zip(WAYS, (90.0, 60.0, 56.0, 54.0), strict=True))
    (line,) = backward_notes(results_of(bounds, {}))
    assert line == (
        "backward, full, 8192 tokens: dq + dkdv 50.0%, single_pass 56.0%, single_pass_deterministic 54.0% at most, in "
        "products that count"
    )
    seconds = dict(zip(WAYS, (1e-3, 2e-3, 2.2e-3, 2.5e-3), strict=True))
    (line,) = backward_notes(results_of(bounds, seconds))
    assert line.endswith(": dq + dkdv 3 ms, single_pass 2.2 ms, single_pass_deterministic 2.5 ms")
    (line,) = backward_notes(results_of(bounds, {"dq": 1e-3}))
    assert "at most" in line, "cut short: times of some say nothing"
    assert backward_notes(results_of({"dq": 90.0, "dkdv": 60.0}, {})) == []


# on a device: here the CPU under Triton's interpreter


@pytest.mark.parametrize(("kernel", "mask"), [*zip(TUNED, ("full", "bounded", "full", "bounded", "full"), strict=True)])
def test_a_right_tile_is_right_and_timed(kernel: str, mask: str) -> None:
    """In fp16, so that the dtype of what is continued differs from that of the result."""
    point = Point(kernel, "fp16", 16, 16, 2, mask, 40)
    trials = DeviceTrials(point, replace(SHAPE, dtype="fp16"), CPU, checked=70)
    tile = Tile(32, 16, 4, 1)
    assert trials.wrong(tile) is None
    reading = trials.run(tile)
    assert reading.seconds > 0 and reading.throttled == () and reading.beside is None


def off(made: Any) -> Any:
    (made if isinstance(made, torch.Tensor) else made[0])[0, 3, 0, 1] += 1e-3
    return made


def out_of_room(made: Any) -> Any:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(
    ("kernel", "name", "wrong", "told"),
    [
        ("forward", "attention_forward", lambda made: (made[0] * torch.nan, made[1]), "out errs by nan"),
        ("forward", "attention_forward", out_of_room, r"RuntimeError: out of resource: shared memory$"),
        ("dq", "attention_dq", off, r"dq errs by 0\.00\d*, PyTorch's by "),
        ("single_pass", "attention_gradients", off, r"dk errs by 0\.00\d*, PyTorch's by "),
    ],
)
def test_a_wrong_result_is_told(
    kernel: str, name: str, wrong: Callable[[Any], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(compile_, name)
    monkeypatch.setattr(compile_, name, lambda *given, **how: wrong(real(*given, **how)))
    trials = DeviceTrials(Point(kernel, "fp32", 16, 16, 2, "full", 40), SHAPE, CPU, checked=70)
    assert re.match(told, str(trials.wrong(Tile(16, 16, 4, 1))))


def test_every_run_has_fresh_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("forward", "fp32", 16, 16, 2, "full", 40)
    trials, seen = DeviceTrials(point, SHAPE, CPU), []
    monkeypatch.setattr(
        compile_, "attention_forward", lambda q, k, v, **how: seen.append([float(x.sum()) for x in (q, k, v)])
    )
    for _ in range(3):
        trials.run(Tile(16, 16, 4, 1))
    timed = seen[1:]  # the first compiles
    assert len(timed) == 3
    assert all(len({*sums}) == 3 for sums in zip(*timed, strict=True))


@pytest.mark.parametrize(("most", "heads"), [(1, [1, 1, 1]), (8 * 2 * 70 * 70 * 2, [2, 1])])
def test_a_reference_in_parts_is_the_whole(most: int, heads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many key heads at a time."""
    given = draw(CPU, torch.float32, (70, 6, 3, 16, 32), batch=1)
    monkeypatch.setattr(measure, "MOST_SCORES", most)
    parts: list[int] = []

    def of(part: Inputs, causal: bool) -> Results:
        parts.append(part.k.shape[2])
        return exactly(part, causal)

    found = in_parts(of, given, True)
    assert parts == heads
    for made, whole in zip(found, exactly(given, True), strict=True):
        assert made.shape == whole.shape and torch.allclose(made, whole, rtol=1e-12, atol=1e-12)


def test_clocks_and_throttling_are_read() -> None:
    trials = DeviceTrials(Point("forward", "fp32", 16, 16, 2, "full", 16), SHAPE, CPU)
    clocks = {"sm_mhz": 1200, "throttled": ("idle", "power cap", "clocks set by the user")}
    vars(trials).update(_clock=lambda step: 0.25, _reader=lambda: clocks)
    assert trials.run(Tile(16, 16, 4, 1)) == Reading(0.25, ("power cap",), {"sm_mhz": 1200.0})


def test_journals_are_of_one_gpu_driver_and_shape(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folders[0])
    compiled, measured = journals(config)
    compiled.put("a", {"n": 1})
    measured.put("a", {"n": 1})

    def kept(other: TuneConfig) -> list[bool]:
        return [journal.last("a") is not None for journal in journals(other)]

    assert kept(config) == [True, True]
    assert kept(replace(config, shape=replace(SHAPE, heads=4))) == [True, False]
    assert kept(replace(config, gpu=Gpu("NVIDIA H100 80GB HBM3", 90))) == [True, False]
    monkeypatch.setattr(tune, "driver", lambda: "580.1")
    assert kept(config) == [True, False]
    monkeypatch.setattr(tune, "digest", lambda: "other kernels")
    assert kept(config) == [False, False]
