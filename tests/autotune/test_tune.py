"""``ringattn tune``: what it is asked, what it says and writes, and its GPU's part on the CPU and on a stand-in."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn.autotune import Budget, Job, Journal, Reading, Shape, Verdict, gpu_of_arch, nearest, ranking, space
from ringattn.autotune.inspect import command as inspect_kernel
from ringattn.autotune.inspect.rank import LEAST_CONFIGS
from ringattn.autotune.tune import command
from ringattn.autotune.tune import measure as tune_measure
from ringattn.autotune.tune import run as tune_run
from ringattn.autotune.tune.measure import CHECKED_SIDES, DeviceTrials, in_parts
from ringattn.autotune.tune.run import Wish, compile_part, default_tile, estimated_entry, journals, measure_part
from ringattn.bench.kernels.accuracy import Inputs, Results, draw, exactly
from ringattn.kernels import Tile, choice, default_config, tables
from ringattn.kernels.tables import KERNELS, TUNED, Gpu, Point, options_of, read

from ..support.tile_tables import H200, entry, folders, save
from ..support.tune_cases import StandIn, at_once

__all__ = ["folders"]

Folders = tuple[Path, Path]
CPU = torch.device("cpu")
SHAPE = Shape(2, 1, 16, 16, "fp32")
SMALL = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--dtype", "fp32", "--seqlen", "16", "--full"]


class Bars:
    """Counts what a bar would show."""

    def __init__(self) -> None:
        self.total, self.done = Counter[str](), Counter[str]()

    def more(self, part: str, count: int) -> None:
        self.total[part] += count

    def step(self, part: str) -> None:
        self.done[part] += 1


def wish_of(folder: Path, **changed: Any) -> Wish:
    wish = Wish(SHAPE, (16, 64), True, H200, CPU, folder, 1e9, 1)
    return replace(wish, **changed)


def fine(job: Job) -> Verdict:
    """The smaller the tile, the better."""
    return Verdict((), float(999 - job.tile.block_q - job.tile.block_k - job.tile.num_warps - job.tile.num_stages), "%")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything compiles, in this process."""
    monkeypatch.setattr(ranking, "run_jobs", at_once)


def asked(*arguments: str) -> Any:
    return CliRunner().invoke(command.app, [*arguments], env={"COLUMNS": "400", "NO_COLOR": "1"})


# the command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--arch", "sm_91"], "arch is 'sm_91': it must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
        (["--arch", "hopper"], "arch is 'hopper'"),
        (["--heads", "6", "--kv-heads", "4"], "heads is 6: it must be a multiple of the 4"),
        (["--head-dim", "512"], "head_dim is 512: it must be 1 to 256"),
        (["--dtype", "fp8"], "'fp8' is no dtype: it takes"),
        (["--seqlen", "8x"], "'8x' is not a size"),
        (["--seqlen", "0"], "seqlen is [0]"),
        (["--from-config", "/nowhere/config.json"], "/nowhere/config.json does not say an attention"),
        (["--from-config", "x", "--heads", "2"], "--from-config says the shape, and so does --heads"),
        (["--compile-only", "--budget", "9"], "--budget is 9.0: it has no say beside --compile-only"),
        (["--list", "--compile-only"], "--compile-only is True: it has no say beside --list"),
        (["--list", "--budget", "9"], "--budget is 9.0: it has no say beside --list"),
        (["--list", "--workers", "2"], "--workers is 2: it has no say beside --list"),
        (["--list", "--near", "2"], "--near is 2: it has no say beside --list"),
        (["--list", "--save-dir", "x"], "--save-dir is x: it has no say beside --list"),
        (["--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["--save-dir", "/dev/null/x"], "/dev/null/x is no folder to save in"),
    ],
)
def test_bad_input_is_an_error_that_says_what_fits(arguments: list[str], told: str) -> None:
    result = asked(*arguments)
    assert result.exit_code == 2
    assert told in re.sub(r"\s+", " ", result.output.replace("│", " "))


def test_the_space_is_listed(tmp_path: Path) -> None:
    result = asked("--list", "--seqlen", "8k,32k", "--arch", "sm_80", "--csv", str(tmp_path / "list.csv"))
    assert result.exit_code == 0, result.output
    points = Wish(Shape(32, 32, 128, 128), (8192, 32768), True, gpu_of_arch("sm_80"), None, tmp_path, 1, 1).points
    count, orders = (
        sum(len(space(point, 80)) for point in points),
        sum(len(command.orders_of(point, 80)) for point in points),
    )
    told = f"{count} candidates for sm_80; of the best 2 of each also {orders} orders of a launch; not tried: "
    assert told in result.output and orders == 4 * 3 * 5  # order, persistent and its margin; of three kernels
    lines = (tmp_path / "list.csv").read_text().splitlines()
    assert len(lines) == count + orders + 1
    assert sum("best 2: order=longest persistent=True sm_margin=8" in line for line in lines) == 4 * 3
    assert len(result.output.splitlines()) == count + orders + 3


@pytest.mark.nightly
def test_without_a_gpu_it_compiles_and_says_so(
    tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really: worker processes, Triton, the gate, a table that a reader takes and a launch may ask for."""
    monkeypatch.setattr(ranking, "dealt", lambda *given: [])
    monkeypatch.setattr(tune_run, "LAUNCHES", (("middle", CHECKED_SIDES),))
    monkeypatch.setattr(
        ranking,
        "space",
        lambda point, arch: [
            one
            for one in space(point, arch)
            if (one.num_stages, one.num_warps, one.block_q, one.block_k) == (1, 4, 32, 32)
        ],
    )
    result = asked(*SMALL, "--arch", "sm_80", "--json", str(tmp_path / "told.json"))
    assert result.exit_code == 0, result.output
    assert "no GPU here: compiled and ranked, nothing is measured, entries are estimates" in result.output
    (path,) = folders[0].glob("*.json")
    assert f"written: {path}" in result.output
    table = read(path)
    assert (table.gpu, table.arch, table.triton) == ("sm_80", 80, tables.triton_version())
    assert {(one.point.kernel, one.point.length, one.estimated) for one in table.entries} == {
        (kernel, 16, True) for kernel in TUNED
    }
    assert all(
        one.bound and one.bound_by.startswith("percent of the tensor cores' peak, limited by ") and one.versions
        for one in table.entries
    )
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["measured"] is False and told["table"] == str(path) and len(told["rows"]) == 5
    again = asked(*SMALL, "--arch", "sm_80", "--compile-only", "--json", "-")
    assert json.loads(again.output)["rows"] == told["rows"]


def test_a_models_config_says_the_shape(tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(
        '{"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "torch_dtype": "float16"}'
    )
    result = asked("--from-config", str(path), "--list", "--seqlen", "1k", "--full", "--json", "-")
    points = [Point(**point) for point in json.loads(result.output)["points"]]
    assert {point[1:] for point in points} == {("fp16", 64, 64, 4, "full", 1024)}


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
    monkeypatch.setattr(command, "gpu_of", lambda device: here)
    found, device, why = command.target(arch, compile_only)
    assert (found.name, device is not None) == (gpu, measures)
    assert ("nothing is measured" in why) != measures


def test_a_gpu_that_no_tile_is_known_to_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "gpu_of", lambda device: Gpu("Tesla V100", 70))
    with pytest.raises(ValueError, match="arch is 'sm_70': it must be one of sm_80"):
        command.target(None, False)


def test_a_table_from_a_newer_schema_is_told_and_left(folders: Folders, compiler: None) -> None:
    path = save(folders[0], entry(), gpu=gpu_of_arch("sm_80"))
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    before = path.read_text()
    result = asked(*SMALL, "--arch", "sm_80", "--compile-only")
    assert result.exit_code == 2 and "its schema is version 2" in result.output
    assert path.read_text() == before


# the GPU's part


def slow(tile: Tile, run: int) -> float:
    return 1e-3 * (tile.block_q + tile.block_k / 2 + tile.num_warps)


def test_a_run_measures_and_is_the_default_from_then_on(
    folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish, bars = wish_of(folders[0]), Bars()
    compiled, measured = journals(wish)
    found = compile_part(wish, compiled, bars, compile_with=fine)
    gpu = StandIn(slow, besides=lambda tile: 2.0 * slow(tile, 0))
    answers = measure_part(
        wish, found, measured, bars, trials_of=lambda point: gpu, budget=Budget(1e9, gpu.clock)
    )  # fmt: skip
    assert bars.done == bars.total
    table = read(next(folders[0].glob("nvidia-h200*.json")))
    assert {one.point for one in table.entries} == {*wish.points} == {one.point for one in answers}
    for one in table.entries:
        best = min([default_tile(one.point, 90), *(tile for tile in space(one.point, 90))], key=lambda x: slow(x, 0))
        assert slow(one.tile, 0) == slow(best, 0) == one.seconds
        assert one.beside == 2 * one.seconds and one.baseline == slow(default_tile(one.point, 90), 0)
        assert one.clocks == {"sm_mhz": 1980.0, "throttled": ""}
    assert not measured.path.exists() and compiled.path.exists()
    monkeypatch.setattr(choice, "gpu_of", lambda device: H200)
    q, v = torch.empty(1, 64, 2, 16), torch.empty(1, 64, 1, 16)
    made = default_config(q, v)
    tiles = {one.point.kernel: one.tile for one in table.entries if one.point.length == 64 and one.point.mask == "full"}
    assert {*tiles} == {*TUNED} and all(getattr(made, kernel) == tiles[kernel] for kernel in KERNELS)


def test_a_wish_for_few_tiles_compiles_the_default_and_its_neighbours(folders: Folders, compiler: None) -> None:
    wish, asked = wish_of(folders[0], near=3, orders_of=0, kernels=KERNELS), []

    def compiled(job: Job) -> Verdict:
        asked.append((job.kernel, job.full, job.tile))
        return fine(job)

    found = compile_part(wish, journals(wish)[0], Bars(), compile_with=compiled)
    assert {one.point.kernel for one in found} == {*KERNELS}
    for one in found:
        wanted = nearest(space(one.point, 90), one.default, 3)
        assert {*one.ranked.tiles} == {*wanted}
        mine = {tile for kernel, full, tile in asked if (kernel, full) == (one.point.kernel, one.point.mask == "full")}
        assert {*wanted} <= mine and len(mine) <= 2 * 3 + 2  # of both lengths; the default may lie outside the space


def test_a_run_says_what_the_bound_is_worth(
    folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The report of one run is what `inspect --correlate` takes: per kernel, mask and length, 20 timed candidates."""
    monkeypatch.setattr(command, "target", lambda arch, compile_only: (H200, CPU, "measured"))
    monkeypatch.setattr(tune_run, "compile_job", fine)
    monkeypatch.setattr(tune_run, "compile_part", lambda *given: compile_part(*given, compile_with=fine))
    stands = []

    def on_device(point: Point, shape: Shape, device: torch.device) -> StandIn:
        stands.append(StandIn(slow if point.kernel != "dq" else lambda tile, run: 1 / slow(tile, run)))
        return stands[-1]

    monkeypatch.setattr(tune_run, "DeviceTrials", on_device)
    wide = ["--heads", "2", "--kv-heads", "1", "--head-dim", "128", "--seqlen", "1k", "--full"]
    result = asked(*wide, "--json", str(tmp_path / "told.json"))
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "told.json").read_text())["timed"]
    per_kernel = Counter(row["kernel"] for row in rows)
    assert {*per_kernel} == {*TUNED} and min(per_kernel.values()) >= LEAST_CONFIGS
    assert {(row["arch"], row["length"], row["group"], row["role"]) for row in rows} == {("sm_90", 1024, 2, "middle")}
    assert all(row["seconds"] > 0 and row["bound"] > 0 for row in rows)
    assert len({(row["kernel"], row["tile"], str(row["options"])) for row in rows}) == len(rows)
    told = CliRunner().invoke(inspect_kernel.app, ["--correlate", str(tmp_path / "told.json"), "--json", "-"])
    found = {row["kernel"]: row["correlation"] for row in json.loads(told.output)["rows"]}
    assert found["forward"] > 0.5 and found["dkdv"] > 0.5 and found["dq"] < -0.5
    assert told.exit_code == 1  # of dq the bound is worth nothing


def test_a_budget_leaves_the_journal_and_the_next_run_goes_on(folders: Folders, compiler: None) -> None:
    wish = wish_of(folders[0])
    found = compile_part(wish, journals(wish)[0], Bars(), compile_with=fine)
    gpu, marks = StandIn(slow), []

    def trials_of(point: Point) -> StandIn:
        marks.append(len(gpu.calls))
        return gpu

    budget = Budget(10.0, gpu.clock)
    answers = measure_part(wish, found, journals(wish)[1], Bars(), trials_of=trials_of, budget=budget)
    assert all(here < there for here, there in pairwise([*marks, len(gpu.calls)])), "a point had no time"
    assert any(one.measured is None or not one.measured.complete for one in answers)
    journal = journals(wish)[1]
    assert journal.path.exists()
    measure_part(wish, found, journal, Bars(), trials_of=lambda point: gpu, budget=Budget(1e9, gpu.clock))
    whole = StandIn(slow)
    other = wish_of(folders[1])
    measure_part(
        other, found, journals(other)[1], Bars(), trials_of=lambda point: whole, budget=Budget(1e9, whole.clock)
    )  # fmt: skip
    assert Counter(gpu.calls) == Counter(whole.calls)
    tiles = [
        {one.point: (one.tile, one.seconds) for one in read(next(folder.glob("nvidia*.json"))).entries}
        for folder in folders
    ]
    assert tiles[0] == tiles[1]


def test_estimates_come_first_and_stay_where_nothing_was_measured(
    folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_run, "compile_job", fine)
    monkeypatch.setattr(tune_run, "compile_part", lambda *given: compile_part(*given, compile_with=fine))
    gpu = StandIn(slow)
    monkeypatch.setattr(tune_run, "DeviceTrials", lambda *given: gpu)
    monkeypatch.setattr(tune_run, "Budget", lambda seconds: Budget(0.0, gpu.clock))
    found, path = tune_run.tune(wish_of(folders[0]), Bars())
    assert path is not None and all(one.estimated for one in read(path).entries)
    assert len(read(path).entries) == len(found) == 20


def compiled_for(wish: Wish) -> list[Job]:
    """What the compile part asks for, in order."""
    seen: list[Job] = []

    def verdict(job: Job) -> Verdict:
        seen.append(job)
        return fine(job)

    compile_part(wish, journals(wish)[0], Bars(), compile_with=verdict)
    return seen


def test_without_a_gpu_as_much_is_compiled_as_with_one(folders: Folders, compiler: None) -> None:
    """So that a machine with a GPU and the same cache compiles nothing."""
    without, there = (compiled_for(wish_of(folder, device=on)) for folder, on in zip(folders, (None, CPU), strict=True))
    assert without == there and any(options_of(job.tile).get("order") for job in there)


def test_an_emptied_cache_compiles_again_what_is_launched_alone(
    folders: Folders, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best and the default, each as it is timed and as it is checked; the others are ranked by the journal."""
    wish = wish_of(folders[0], lengths=(64,), kernels=("dkdv",))
    first = compiled_for(wish)
    found = compile_part(wish, journals(wish)[0], Bars(), compile_with=fine)
    monkeypatch.setattr(tune_run, "in_cache", lambda verdict: False)
    again = compiled_for(wish)
    launches = [("middle", (64, 64)), *((role, CHECKED_SIDES) for role in ("first", "middle", "last"))]
    assert {*again} == {
        ranking.job_of(one.point, tile, 90, 2, role, sides)
        for one in found
        for tile in (*one.ranked.tiles, one.default)
        for role, sides in launches
    }
    ranked = {job.tile for job in first} - {job.tile for job in again}
    assert len(again) == len({*again}) and {*again} < {*first} and len(ranked) > 5


def test_the_estimate_is_the_best_bound_of_a_tile_alone(folders: Folders, compiler: None) -> None:
    """Whatever theirs, no kernel and no order that never ran."""
    wish = wish_of(folders[0], device=None)

    def verdict(job: Job) -> Verdict:
        return Verdict((), 9e9, "%") if options_of(job.tile) else fine(job)

    for one in compile_part(wish, journals(wish)[0], Bars(), compile_with=verdict):
        assert any(map(options_of, one.ranked.tiles)) or one.point.kernel not in KERNELS
        made = estimated_entry(one)
        most = max(fine(ranking.job_of(one.point, tile, 90, 2)).bound for tile in space(one.point, 90))  # type: ignore[type-var]
        assert made.bound == most and made.estimated and made.seconds is None


# on a device: here the CPU under Triton's interpreter


@pytest.mark.parametrize("mask", ["full", "bounded"])
@pytest.mark.parametrize("kernel", TUNED)
def test_a_right_tile_is_right_and_timed(kernel: str, mask: str) -> None:
    """In fp16, so that the dtype of what is continued differs from that of the result."""
    point = Point(kernel, "fp16", 16, 16, 2, mask, 40)
    trials = DeviceTrials(point, replace(SHAPE, dtype="fp16"), CPU, checked=70)
    tile = Tile(32, 16, 4, 1)
    assert trials.wrong(tile) is None
    reading = trials.alone(tile)
    assert reading.seconds > 0 and reading.throttled == ()
    assert trials.beside(tile) is None


@pytest.mark.parametrize("kernel", TUNED)
def test_a_wrong_result_is_told(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point(kernel, "fp32", 16, 16, 2, "full", 40)
    name = f"attention_{kernel}" if kernel in KERNELS else "attention_gradients"
    real = getattr(tune_measure, name)

    def off(*given: Any, **how: Any) -> Any:
        made = real(*given, **how)
        (made if isinstance(made, torch.Tensor) else made[0])[0, 3, 0, 1] += 1e-3
        return made

    monkeypatch.setattr(tune_measure, name, off)
    told = DeviceTrials(point, SHAPE, CPU, checked=70).wrong(Tile(16, 16, 4, 1))
    assert told is not None and re.match(r"(out|dq|dk) errs by 0\.00\d*, PyTorch's by ", told)


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.full((2, 70, 2, 16), torch.nan), torch.zeros(2, 2, 70)
    monkeypatch.setattr(tune_measure, "attention_forward", lambda *given, **how: made)
    told = DeviceTrials(Point("forward", "fp32", 16, 16, 2, "full", 40), SHAPE, CPU, checked=70).wrong(
        Tile(16, 16, 4, 1)
    )
    assert told is not None and told.startswith("out errs by nan")


def test_what_does_not_launch_is_wrong_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **how: Any) -> Any:
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(tune_measure, "attention_forward", full)
    trials = DeviceTrials(Point("forward", "fp32", 16, 16, 2, "full", 40), SHAPE, CPU, checked=70)
    assert trials.wrong(Tile(16, 16, 4, 1)) == "RuntimeError: out of resource: shared memory"


def test_every_run_has_fresh_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("forward", "fp32", 16, 16, 2, "full", 40)
    trials, seen = DeviceTrials(point, SHAPE, CPU), []
    monkeypatch.setattr(
        tune_measure, "attention_forward", lambda q, k, v, **how: seen.append([float(x.sum()) for x in (q, k, v)])
    )
    for _ in range(3):
        trials.alone(Tile(16, 16, 4, 1))
    timed = seen[1:]  # the first compiles
    assert len(timed) == 3
    assert all(len({*sums}) == 3 for sums in zip(*timed, strict=True))


@pytest.mark.parametrize(("most", "heads"), [(1, [1, 1, 1]), (8 * 2 * 70 * 70 * 2, [2, 1]), (1 << 30, [3])])
def test_a_reference_in_parts_is_the_whole(most: int, heads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many key heads at a time."""
    given = draw(CPU, torch.float32, (70, 6, 3, 16, 32), batch=1)
    monkeypatch.setattr(tune_measure, "MOST_SCORES", most)
    parts: list[int] = []

    def of(part: Inputs, causal: bool) -> Results:
        parts.append(part.k.shape[2])
        return exactly(part, causal)

    found = in_parts(of, given, True)
    assert parts == heads
    for made, whole in zip(found, exactly(given, True), strict=True):
        assert made.shape == whole.shape and torch.allclose(made, whole, rtol=1e-12, atol=1e-12)


def test_a_check_has_the_heads_of_the_point_and_lengths_that_16_divides() -> None:
    seen: list[tuple[int, ...]] = []
    for kernel, mask in (("forward", "full"), ("single_pass", "full"), ("single_pass", "bounded")):
        trials = DeviceTrials(Point(kernel, "bf16", 16, 16, 6, mask, 8192), Shape(12, 2, 16, 16), CPU)
        q, k = trials._given[:2]
        lengths = [part.stop - part.start for part in trials._shards()]
        assert (q.shape[0], q.shape[2], k.shape[2]) == (1, 12, 2) and sum(lengths) == q.shape[1]
        assert not any(length % 16 for length in lengths) and any(length % 32 for length in lengths)
        seen.append((q.shape[1], *lengths))
    assert seen == [(1008, 336, 336, 336), (1024, 336, 336, 352), (1008, 336, 336, 336)]


def test_clocks_and_throttling_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = DeviceTrials(Point("forward", "fp32", 16, 16, 2, "full", 16), SHAPE, CPU)
    monkeypatch.setattr(trials, "_clock", lambda step: 0.25)
    monkeypatch.setattr(
        trials, "_reader", lambda: {"sm_mhz": 1200, "throttled": ("idle", "power cap", "clocks set by the user")}
    )
    assert trials.alone(Tile(16, 16, 4, 1)) == Reading(0.25, ("power cap",), {"sm_mhz": 1200.0})


def test_journals_are_of_one_gpu_driver_and_shape(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = wish_of(folders[0])
    compiled, measured = journals(wish)
    compiled.put("a", {"n": 1})
    measured.put("a", {"n": 1})

    def kept(other: Wish) -> list[bool]:
        return [journal.last("a") is not None for journal in journals(other)]

    assert kept(wish) == [True, True]
    assert kept(replace(wish, shape=replace(SHAPE, heads=4))) == [True, False]
    assert kept(replace(wish, gpu=Gpu("NVIDIA H100 80GB HBM3", 90))) == [True, False]
    monkeypatch.setattr(tune_run, "driver", lambda: "580.1")
    assert kept(wish) == [True, False]
    monkeypatch.setattr(tune_run, "digest", lambda: "other kernels")
    assert kept(wish) == [False, False]
    assert isinstance(compiled, Journal)
