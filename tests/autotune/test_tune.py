"""Tests of ``ringattn tune``: its command line, its files, and measuring on the CPU and on a simulated GPU."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn.autotune import cli_tune, device_trials, ring_search, tune
from ringattn.autotune import compile as compile_
from ringattn.autotune.candidates import CompileResult, RankedCandidates, ranking_job
from ringattn.autotune.compile import KernelVariant
from ringattn.autotune.device_trials import DeviceTrials, check_lengths
from ringattn.autotune.search import Budget, SearchResult, TimedRun
from ringattn.autotune.tile_space import ModelShape, gpu_for_arch, point_text, tile_candidates
from ringattn.autotune.tune import (
    PointResult,
    TuneConfig,
    compile_points,
    measure_points,
    open_journal,
    table_entry,
    tile_without_table,
)
from ringattn.bench.common.result import Result
from ringattn.comm.cuda_threads import HIGH_PRIORITY
from ringattn.comm.topology import nvml
from ringattn.kernels import Tile, default_config, launch_plan, tables
from ringattn.kernels.gpu import GpuSpec, assumed_gpu
from ringattn.kernels.tables import KERNELS, TUNED_KERNELS, TuningPoint, read_table, tuned_options

from ..support.tile_tables import H200, folders
from ..support.tune_cases import InlinePool, SimulatedGpu, compile_fine, ignore_progress

__all__ = ["folders"]

Folders = tuple[Path, Path]
CPU = torch.device("cpu")
SHAPE = ModelShape(2, 1, 16, 16, "fp32")
SMALL = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--dtype", "fp32", "--seqlen", "16", "--full"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Triton cache folder of the test's own; the journal of compiled results lies there, too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def config_of(folder: Path, **changed: Any) -> TuneConfig:
    return replace(TuneConfig(SHAPE, (64,), False, H200, CPU, folder, 1e9), **changed)


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(cli_tune.app, [*arguments], env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.mark.parametrize(("arguments", "message"), [
    (["--arch", "sm_91"], "arch is 'sm_91': it must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
    (["--heads", "6", "--kv-heads", "4"], "heads is 6: it must be a multiple of kv_heads, 4"),
    (["--seqlen", "0"], "seqlen is [0]"),
    (["--kernels", "dq,dk"], "--kernels has 'dk': each must be one of forward, dq, dkdv"),
    (["--save-dir", "/dev/null/x"], "--save-dir is /dev/null/x: cannot write to this folder"),
    (["--world", "5"], "--world has no effect without --ring"),
    (["--device", "cpu"], "--device has no effect without --ring"),
    (["--ring", "--value-dim", "64"], "--value-dim is 64: with --ring it must equal --head-dim"),
    (["--ring", "--arch", "sm_80", "--tiles", "2"], "--arch, --tiles cannot be used with --ring"),
    (["--ring", "--device", "cpu", "--seqlen", "8k,1g"], "--seqlen: 1,073,741,824 tokens on each of 2 ranks need"),
])  # fmt: skip
def test_invalid_arguments_are_refused(
    arguments: list[str], message: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((ring_search, "run_process_group"), (tune, "tune")):
        monkeypatch.setattr(module, name, lambda *args, **how: pytest.fail("a search was started"))
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output.replace("│", " "))


@pytest.mark.parametrize(("here", "arch", "compile_only", "gpu", "measures"), [
    (None, None, False, "sm_90", False),
    (H200, "sm_90", False, "NVIDIA H200", True),
    (H200, None, True, "NVIDIA H200", False),
    (H200, "sm_90", True, "sm_90", False),
    (H200, "sm_80", False, "sm_80", False),
])  # fmt: skip
def test_target_gpu(
    here: GpuSpec | None,
    arch: str | None,
    compile_only: bool,
    gpu: str,
    measures: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("ringattn.kernels.gpu.gpu_specs", lambda device: here)
    chosen, device, why = cli_tune.resolve_target(arch, compile_only)
    assert (chosen.name, device is not None) == (gpu, measures)
    assert ("nothing is measured" in why) != measures
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for wrong, name in ((70, "sm_70"), (0x942, "gfx942")):
        monkeypatch.setattr("ringattn.kernels.gpu.gpu_specs", lambda device, wrong=wrong: assumed_gpu(wrong, "another"))
        with pytest.raises(ValueError, match=f"arch is '{name}': it must be one of sm_80"):
            cli_tune.resolve_target(None, compile_only)


@pytest.mark.parametrize(
    ("device", "flags", "seconds"),
    [(CPU, [], cli_tune.BUDGET), (None, [], math.inf), (CPU, ["--budget", "20"], 20.0), (None, ["--budget", "9"], 9.0)],
)
def test_only_measuring_has_a_default_budget(
    device: torch.device | None, flags: list[str], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: Any = []
    monkeypatch.setattr(cli_tune, "resolve_target", lambda arch, compile_only: (H200, device, ""))
    monkeypatch.setattr(tune, "tune", lambda config, *_: configs.append(config) or Result("tune", {}))
    assert run_command(*SMALL, "--save-dir", str(tmp_path), *flags).exit_code == 0
    assert [config.budget for config in configs] == [seconds]


def test_every_option_reaches_the_search(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = []
    result = Result("tune", {})
    monkeypatch.setattr(cli_tune, "resolve_target", lambda *how: calls.append(how) or (H200, CPU, ""))
    monkeypatch.setattr("ringattn.bench.common.ranks.cores", lambda: 7)
    monkeypatch.setattr(tune, "tune", lambda config, workers, _: calls.append(config) or (workers == 7 and result))
    monkeypatch.setattr(ring_search, "ring_problems", lambda *how: how)
    monkeypatch.setattr(ring_search, "tune_rings", lambda *how: calls.append(how) or result)
    model = ["--heads", "12", "--kv-heads", "4", "--head-dim", "64", "--dtype", "fp16", "--seqlen", "32,16", "--full"]
    model += ["--save-dir", str(tmp_path), "--budget", "20"]
    tiles = ["--value-dim", "32", "--arch", "sm_80", "--kernels", "dq,single_pass", "--compile-only", "--tiles", "3"]
    done = run_command(*model, *tiles, "--csv", "-")
    assert done.exit_code == 0 and "combinations" not in done.output, "CSV alone"
    shape = ModelShape(12, 4, 64, 32, "fp16")
    assert calls == [
        ("sm_80", True), TuneConfig(shape, (32, 16), False, H200, CPU, tmp_path, 20.0, ("dq", "single_pass"), 3)
    ]  # fmt: skip
    for flags, kernels in (((), TUNED_KERNELS), (("--tiles", "1"), KERNELS)):
        assert run_command("--save-dir", str(tmp_path), *flags).exit_code == 0
        config = calls.pop()
        assert (config.kernels, config.causal, config.lengths) == (kernels, True, (8192, 32768))
        assert config.shape == ModelShape(32, 32, 128, 128, "bf16")
    for flags, budget in ((("--budget", "20"), 20.0), ((), cli_tune.BUDGET)):
        assert run_command(*model[:-2], *flags, "--ring", "--world", "4", "--device", "cpu").exit_code == 0
        problems, *rest = calls.pop()
        assert problems == (replace(shape, value_dim=64), [32, 16], False, "cpu", 4) and rest == [budget, tmp_path]
    calls.clear()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(*model).exit_code == 0 and not calls, "one process tunes tiles"
    assert run_command(*model, "--ring").exit_code == 0 and len(calls) == 1, "all processes tune a ring"
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(tables, "user_table_folder", lambda: None)
    refused = run_command(*model[:-4], "--budget", "20")
    assert refused.exit_code == 2 and "--save-dir is not given" in refused.output


@pytest.fixture
def everything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the worker pool by one that reports success for every job."""
    monkeypatch.setattr(tune, "Pool", lambda work, workers: InlinePool())


def test_tune_without_a_gpu_only_compiles(tmp_path: Path, folders: Folders, everything_compiles: None) -> None:
    result = run_command(*SMALL, "--arch", "sm_80", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    assert "no GPU on this machine: nothing is measured" in result.output
    (path,) = folders[0].glob("*.json")
    table = read_table(path)
    assert (table.gpu, table.arch, table.triton) == ("sm_80", 80, tables.triton_version())
    assert {(entry.point.kernel, entry.point.length, entry.estimated) for entry in table.entries} == {
        (kernel, 16, True) for kernel in TUNED_KERNELS
    }
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["case"] == "tune" and len(report["rows"]) == 5 and not report["failed"]
    assert f"written: {path}" in report["notes"] and report["notes"][-1].startswith("best: estimates only")
    again = json.loads(run_command(*SMALL, "--arch", "sm_80", "--compile-only", "--json", "-").output)
    assert again["rows"] == report["rows"]
    few = json.loads(run_command(*SMALL, "--arch", "sm_80", "--tiles", "2", "--json", "-").output)
    assert [(row["kernel"], row["tried"]) for row in few["rows"]] == [(kernel, 2) for kernel in KERNELS]


def test_a_compile_budget_completes_some_points_and_reports_the_others(
    tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path / "other", lengths=(16,), gpu=gpu_for_arch("sm_80"), device=None, kernels=("forward",))
    first_point, pool = len(compiled_for(config)), InlinePool()
    open_journal(config).path.unlink()
    monkeypatch.setattr(tune, "Budget", lambda seconds: Budget(seconds, lambda: float(len(pool.seen))))
    monkeypatch.setattr(tune, "Pool", lambda work, workers: pool)
    flags = [*SMALL, "--arch", "sm_80", "--compile-only", "--kernels", "forward,dq"]
    result = run_command(*flags, "--budget", str(first_point + 1), "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    first, second = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert first["left"] == 0 and first["tile"] != "none" and second["left"] > 0 and second["tile"] == "none"
    assert f"--budget ran out: 1 of 2 points still have at least {second['left']} binaries" in result.output
    again = json.loads(run_command(*flags, "--json", "-").output)
    assert all(row["left"] == 0 and row["tile"] != "none" for row in again["rows"])
    assert len(pool.seen) == len({(job, job.role, job.sizes) for job in pool.seen}), "a job is compiled twice"


def test_an_interruption_keeps_what_was_compiled(
    cache: Path, tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: KernelVariant) -> CompileResult:
        if len(pool.seen) > 3:
            raise KeyboardInterrupt
        return compile_fine(job)

    pool = InlinePool(work)
    monkeypatch.setattr(tune, "Pool", lambda work, workers: pool)
    result = run_command(*SMALL, "--compile-only", "--save-dir", str(tmp_path))
    assert result.exit_code == 130 and "interrupted; finished results are saved" in " ".join(result.output.split())
    (journal,) = cache.glob("*.jsonl")
    assert len(journal.read_text().split()) > 3


def compiled_for(config: TuneConfig) -> list[KernelVariant]:
    """Return the variants that the compile part asks for, in order."""
    compile_points(config, open_journal(config), pool := InlinePool(), ignore_progress)  # type: ignore[arg-type]
    return pool.seen


def test_the_same_variants_are_compiled_with_and_without_a_gpu(folders: Folders) -> None:
    config = config_of(folders[0], device=None, kernels=("forward",), causal=True)
    without = compiled_for(config)
    assert any(dict(job.options).get("order") for job in without)
    signatures = {job.launch.signature for job in without}
    for point in config.points:  # including the shards that check a result
        default = tile_without_table(point, 90)
        assert default is not None
        checks = [
            ranking_job(point, default, 90, 2, role, check_lengths(point)) for role in ("first", "middle", "last")
        ]
        assert {job.launch.signature for job in checks} <= signatures
    assert compiled_for(replace(config, device=CPU)) == []
    open_journal(config).path.unlink()
    assert compiled_for(replace(config, device=CPU)) == without


def test_an_estimate_chooses_a_tile_without_options(folders: Folders) -> None:
    # Options have the highest bounds here, but an estimate must not choose a schedule that never ran.
    config = config_of(folders[0], device=None, shape=ModelShape(2, 1, 64, 64), kernels=("forward", "dkdv"))
    pool: Any = InlinePool(lambda job: CompileResult((), 9e9, "%") if job.options else compile_fine(job))
    forward, dkdv = compile_points(config, open_journal(config), pool, ignore_progress)
    assert tuned_options(forward.ranked.tiles[0]) and tuned_options(dkdv.ranked.tiles[-1])
    for compiled in (forward, dkdv):
        estimate = table_entry(compiled)
        plain = [tile for tile in tile_candidates(compiled.point, 90) if not tuned_options(tile)]
        assert estimate.bound == max(
            compile_fine(ranking_job(compiled.point, tile, 90, 2)).bound or 0 for tile in plain
        )
        assert estimate.tile in plain and estimate.estimated and estimate.seconds is None


def slow(tile: Tile) -> float:
    return 1e-3 * (tile.block_q + tile.block_k / 2 + tile.num_warps)


def simulate(monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGpu, budget: float = 1e9) -> None:
    """Let tiles run on a simulated GPU, with ``budget`` seconds of its clock."""
    monkeypatch.setattr(tune, "DeviceTrials", lambda *args: gpu)
    monkeypatch.setattr(tune, "Budget", lambda seconds: Budget(budget if seconds < 1e10 else seconds, gpu.clock))


def test_every_point_gets_an_even_share_of_the_remaining_budget(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shares = config_of(folders[0], lengths=(16, 64)), list[float]()
    compiled = compile_points(config, open_journal(config), InlinePool(compile_fine), ignore_progress)  # type: ignore[arg-type]

    def search(*given: Any, on_run: object) -> SearchResult[Tile]:
        shares.append(given[-1]())
        return SearchResult(None, {}, {}, False)

    monkeypatch.setattr(tune, "search", search)
    simulate(monkeypatch, SimulatedGpu(slow), 60.0)
    measure_points(config, compiled, open_journal(config), ignore_progress)
    assert shares == pytest.approx([60.0 / points for points in range(len(compiled), 0, -1)])


def test_measured_tiles_become_the_defaults(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    config, steps = config_of(folders[0], lengths=(16, 64)), Counter[str]()

    def step(part: str, more: int | None) -> None:
        steps[part] += -1 if more is None else more

    pool: Any = InlinePool(lambda job: replace(compile_fine(job), bound=-slow(job.tile)))
    compiled = compile_points(config, open_journal(config), pool, step)
    gpu = SimulatedGpu(slow, seconds_with_transfer=lambda tile: 2.0 * slow(tile))
    simulate(monkeypatch, gpu)
    answers = measure_points(config, compiled, open_journal(config), step)
    assert not any(steps.values()), "a planned step was not reported"
    table = read_table(next(folders[0].glob("nvidia-h200*.json")))
    assert {entry.point for entry in table.entries} == {*config.points} == {answer.point for answer in answers}
    for stored in table.entries:
        default = tile_without_table(stored.point, 90)
        assert default is not None
        assert slow(stored.tile) == min(map(slow, [default, *tile_candidates(stored.point, 90)])) == stored.seconds
        assert stored.beside == 2 * stored.seconds and stored.baseline == slow(default)
        assert stored.clocks == {"sm_mhz": 1980.0, "throttled": ""}
    rows = [answer.as_row() for answer in answers]
    assert all(row["time"] <= row["default's time"] and row["beside"] == 2 * row["time"] for row in rows)
    most = min(answers, key=lambda answer: slow(answer.tile or answer.default) / slow(answer.default))
    note = tune.tuning_notes(answers, None)[-1]
    assert f" of {len(rows)} points are faster than the default" in note and note.endswith(point_text(most.point))
    monkeypatch.setattr(launch_plan, "gpu_specs", lambda device: H200)
    q, v = torch.empty(1, 64, 2, 16), torch.empty(1, 64, 1, 16)
    config_now = default_config(q, v)
    tiles = {row.point.kernel: row.tile for row in table.entries if row.point.length == 64 and row.point.mask == "full"}
    assert {*tiles} == {*TUNED_KERNELS} and all(getattr(config_now, kernel) == tiles[kernel] for kernel in KERNELS)


def test_a_point_has_a_row_and_the_run_has_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    point, default, best, plain = (
        TuningPoint("dq", "bf16", 64, 64, 2, "full", 64),
        *(Tile(n, 64, 4, 2) for n in (16, 32, 64)),
    )
    bounds = {best: 61.5, plain: 60.0, default: 50.0, Tile(128, 64, 4, 2): 40.0}
    slow_runs, fast_runs = (
        [TimedRun(factor * x, (), {}, 2 * factor * x) for x in (1e-3, 2e-3, 3e-3)] for factor in (2, 1)
    )
    ranked = RankedCandidates(
        (best, plain),
        {default: "9 x", Tile(16, 16, 4, 1): "12 x", Tile(16, 32, 4, 1): "it spills"},
        {tile: CompileResult((), bound, "%") for tile, bound in bounds.items()},
    )  # fmt: skip
    searched = SearchResult(best, {default: slow_runs, best: fast_runs}, {plain: "wrong"}, False)
    measured = PointResult(point, default, ranked, searched)
    same = {"kernel": "dq", "mask": "full", "tokens": 64, "default": "16x64 4w 2s", "left": 0}
    assert measured.as_row() == same | {
        "tile": "32x64 4w 2s", "bound": 61.5, "tried": 6, "failed": 3, "wrong": 1, "time": 2.0, "spread": 25.0,
        "default's time": 4.0, "beside": 4.0,
    }  # fmt: skip
    assert {*measured.as_row()} == {*tune.UNITS}
    unmeasured = PointResult(point, default, ranked)
    assert unmeasured.as_row() == same | {"tile": "32x64 4w 2s", "bound": 61.5, "tried": 6, "failed": 3, "wrong": 0}
    left = PointResult(point._replace(length=128), default, uncompiled_jobs=7)
    nothing = {"tile": "none", "bound": None, "tried": 0, "failed": 0, "wrong": 0, "left": 7, "tokens": 128}
    assert left.as_row() == same | nothing
    equal = replace(measured, search_result=replace(searched, best=default, is_complete=True))
    notes = tune.tuning_notes([measured, equal, left], Path("table.json"))
    assert notes == [
        "dropped: 4 x x", "dropped: 2 x it spills",
        "--budget ran out: 1 of 3 points still have at least 7 binaries to compile; run the same command again to "
        "continue",
        "--budget ran out: 1 of 3 searches are incomplete; increase --budget", "written: table.json",
        f"best: 0 of 3 points are faster than the default; largest gain 0.0% for {point_text(point)}",
    ]  # fmt: skip
    assert tune.tuning_notes([measured], None)[-1].startswith(
        "best: 1 of 1 points are faster than the default; largest gain 50.0%"
    )
    assert (
        tune.tuning_notes([left], None)[-1].startswith("--budget")
        and "estimates only" in tune.tuning_notes([unmeasured], None)[-1]
    )
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")
    entry = table_entry(measured)
    assert (entry.seconds, entry.spread, entry.beside, entry.baseline) == (2e-3, 0.25, 4e-3, 4e-3)
    assert entry.driver == "580.1"
    estimate = table_entry(unmeasured)
    assert estimate.estimated and (estimate.tile, estimate.bound, estimate.bound_by) == (best, 61.5, "%")
    for made in (entry, estimate):
        assert made.point == point and {*made.versions} == {"triton", "torch"} and made.command and made.date


@pytest.mark.parametrize(("budget", "measured"), [(0.0, 0), (100.0, 2)])
def test_unmeasured_points_keep_their_estimates(
    budget: float, measured: int, folders: Folders, everything_compiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, SimulatedGpu(slow), budget)
    outcome = tune.tune(config_of(folders[0]), 1, ignore_progress)
    table = read_table(next(folders[0].glob("nvidia*.json")))
    assert len(table.entries) == len(outcome.rows) == len(TUNED_KERNELS)
    assert sum(not entry.estimated for entry in table.entries) >= measured
    assert any(entry.estimated for entry in table.entries) and any("are incomplete" in note for note in outcome.notes)


def test_a_kernel_without_a_valid_tile_fails_the_run(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = InlinePool(lambda job: CompileResult(("it spills",)) if job.kernel == "dq" else compile_fine(job))
    monkeypatch.setattr(tune, "Pool", lambda work, workers: pool)
    monkeypatch.setattr(tune, "DeviceTrials", lambda *args: SimulatedGpu(slow))
    outcome = tune.tune(config_of(folders[0], kernels=("forward", "dq")), 1, ignore_progress)
    assert [row["kernel"] for row in outcome.rows] == ["forward", "dq"]
    assert outcome.failed == ["dq fp32 D16/16 group 2 full 64: no candidate passes"]


def test_a_tile_that_broke_the_device_is_not_tried_again(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folders[0], kernels=("forward",), lengths=(64, 128))
    point, other = compile_points(config, open_journal(config), InlinePool(), ignore_progress)  # type: ignore[arg-type]
    broken = next(tile for tile in point.ranked.tiles if tile in other.ranked.tiles)

    class Breaks(SimulatedGpu):
        def find_error(self, tile: Tile) -> str | None:
            if tile == broken:
                raise torch.AcceleratorError("an illegal memory access\nand more")
            return super().find_error(tile)

    def measured(gpu: GpuSpec, *compiled: PointResult) -> Any:
        compiled = compiled or (point,)
        return measure_points(replace(config, gpu=gpu), compiled, open_journal(config), ignore_progress)

    simulate(monkeypatch, Breaks(slow))
    with pytest.raises(torch.AcceleratorError):
        measured(H200)
    (entry,) = measured(H200)
    assert entry.search_result.errors == {broken: "AcceleratorError: an illegal memory access"}
    with pytest.raises(torch.AcceleratorError):
        measured(H200, other)  # the tile may work at another point
    with pytest.raises(torch.AcceleratorError):
        measured(assumed_gpu(90, "NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(tune, "installed_driver", lambda: "another")
    with pytest.raises(torch.AcceleratorError):
        measured(H200)


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check tiles with 70 tokens."""
    monkeypatch.setattr(device_trials, "check_lengths", lambda point: (70, 23))


@pytest.mark.parametrize(
    ("kernel", "mask"), [*zip(TUNED_KERNELS, ("full", "bounded", "full", "bounded", "full"), strict=True)]
)
def test_a_correct_tile_passes_and_is_timed(kernel: str, mask: str, small_check: None) -> None:
    # In fp16 the continued state has another dtype than the result.
    point = TuningPoint(kernel, "fp16", 16, 16, 2, mask, 40)
    trials = DeviceTrials(point, replace(SHAPE, dtype="fp16"), CPU)
    tile = Tile(32, 16, 4, 1)
    assert trials.find_error(tile) is None
    reading = trials.run(tile)
    assert reading.seconds > 0 and reading.throttled == () and reading.seconds_with_transfer is None


def add_error(results: Any, **_: Any) -> Any:
    (results if isinstance(results, torch.Tensor) else results[0])[0, 3, 0, 1] += 1e-3
    return results


def add_dq_error(results: Any, *, dq: torch.Tensor, **_: Any) -> Any:
    add_error(dq)
    return results


def break_device(results: Any, **_: Any) -> Any:
    raise torch.AcceleratorError("an illegal memory access")


def raise_out_of_resources(results: Any, **_: Any) -> Any:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(("kernel", "name", "wrong", "message"), [
    ("forward", "attention_forward", lambda results, **_: (results[0] * torch.nan, results[1]), "error of out is nan"),
    ("forward", "attention_forward", raise_out_of_resources, r"RuntimeError: out of resource: shared memory$"),
    ("dq", "attention_dq", add_error, r"error of dq is 0\.00\d*, but PyTorch's is "),
    ("dq", "attention_dq", break_device, ""),
    ("single_pass", "attention_gradients", add_error, r"error of dk is 0\.00\d*, but PyTorch's is "),
    ("single_pass", "attention_gradients", add_dq_error, r"error of dq is 0\.00\d*, but PyTorch's is "),
])  # fmt: skip
def test_wrong_results_are_reported(
    kernel: str, name: str, wrong: Callable[[Any], Any], message: str, small_check: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = getattr(compile_, name)
    monkeypatch.setattr(compile_, name, lambda *args, **how: wrong(real(*args, **how), **how))
    trials = DeviceTrials(TuningPoint(kernel, "fp32", 16, 16, 2, "full", 40), SHAPE, CPU)
    with nullcontext() if message else pytest.raises(torch.AcceleratorError):  # then the device is unusable
        assert re.match(message, str(trials.find_error(Tile(16, 16, 4, 1))))


def test_every_run_has_fresh_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    point = TuningPoint("forward", "fp32", 16, 16, 2, "full", 40)
    trials, sums_of_runs = DeviceTrials(point, SHAPE, CPU), []
    monkeypatch.setattr(
        compile_, "attention_forward", lambda q, k, v, **how: sums_of_runs.append([float(x.sum()) for x in (q, k, v)])
    )
    for _ in range(3):
        trials.run(Tile(16, 16, 4, 1))
    timed = sums_of_runs[1:]  # the first run compiles
    assert len(timed) == 3
    assert all(len({*sums}) == 3 for sums in zip(*timed, strict=True))


def test_a_gpu_times_another_run_during_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    point = TuningPoint("forward", "fp32", 16, 16, 2, "full", 40)
    log: Any = []
    trials, tile = DeviceTrials(point, SHAPE, CPU), Tile(16, 16, 4, 1)

    class Copy:
        def __init__(self, device: Any, nbytes: int) -> None:
            log.append(("copy", device.type, nbytes))

        def run_alongside(self, step: Any, stream: Any) -> Any:
            return lambda: (log.append(stream), step())

    monkeypatch.setattr(trials, "_launch", lambda tile: log.append("launch"))
    monkeypatch.setattr(trials, "_clock", lambda step: (step() and 2.5) or 0.5)
    monkeypatch.setattr(trials, "_reader", lambda: {"sm_mhz": 1200})
    monkeypatch.setattr(device_trials, "BackgroundCopy", Copy)
    monkeypatch.setattr(device_trials, "copy_bytes_for", lambda device, seconds: int(1000 * seconds))
    monkeypatch.setattr(device_trials, "new_stream", lambda device, priority: ("stream", priority))
    trials._device = torch.device("cuda")
    for _ in range(2):
        assert trials.run(tile) == TimedRun(0.5, (), {"sm_mhz": 1200.0}, 2.5)
    stream = ("stream", HIGH_PRIORITY)
    run = ["launch", stream, "launch"]
    assert log == ["launch", "launch", ("copy", "cuda", 1000), stream, "launch", *run], "one size for all"
    log.clear()
    trials.run(Tile(16, 32, 4, 1))
    assert log == ["launch", *run], "another tile is compiled before it is timed"


def test_shards_of_the_check_are_no_multiples_of_tiles_unless_the_binary_needs_them() -> None:
    for kernel in TUNED_KERNELS:
        is_single = kernel.startswith("single_pass")
        lengths = [check_lengths(TuningPoint(kernel, "bf16", 64, 64, 1, mask, 8192)) for mask in ("full", "bounded")]
        assert lengths == [(1024 if is_single else 1008, 336), (1008, 336)]
    for dims in ((64, 256), (256, 64)):
        point = TuningPoint("dq", "bf16", *dims, 1, "full", 8192)
        assert tile_without_table(point, 90) == compile_.builtin_tile("dq", 90, "bf16", 256), (
            "the larger head dim counts"
        )


def test_scores_of_timed_inputs_are_normal() -> None:
    point = TuningPoint("dq", "fp32", 16, 16, 2, "full", 40)
    trials, again = (DeviceTrials(point, SHAPE, CPU) for _ in range(2))
    assert all(map(torch.equal, trials._check_inputs, again._check_inputs)), "every tile gets the same check"  # type: ignore[arg-type]
    x, lse = trials._make("q", 2, 99), trials._make("lse", 3)
    trials._refill_inputs()
    assert lse.tolist() == pytest.approx([math.log(40) + 0.5] * 3) and 0.5 < float(x.std()) < 2.0
    assert trials._make("q", 2, 99) is x


def test_the_journal_belongs_to_one_kernel_source(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folders[0])
    open_journal(config).put("a", {"n": 1})
    assert open_journal(replace(config, shape=replace(SHAPE, heads=4))).get("a", dict)
    assert not open_journal(replace(config, gpu=gpu_for_arch("sm_80"))).get("a", dict)
    monkeypatch.setattr(tune, "compile_digest", lambda: "other kernels")
    assert not open_journal(config).get("a", dict)
