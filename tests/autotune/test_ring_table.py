"""Tests of ``ringattn tune --ring``: candidate settings, stored tables, and a search in two processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn import Ring
from ringattn.autotune import RingEntry, RingPoint, RingSetting, ring_search, ring_settings
from ringattn.autotune.cli_tune import app
from ringattn.autotune.ring_search import ring_problems, ring_search_result, ring_table_entry
from ringattn.autotune.ring_table import (
    DEFAULT,
    candidate_settings,
    read_ring_table,
    save_ring,
    shared_ring_settings,
)
from ringattn.autotune.search import SearchResult, TimedRun
from ringattn.autotune.tile_space import ModelShape
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.errors import RESULTS, ErrorJudge
from ringattn.bench.common.ranks import LaunchedRank
from ringattn.bench.common.result import Result
from ringattn.comm import Limits
from ringattn.comm.topology import nvml
from ringattn.kernels.gpu import INTERPRETER_GPU
from ringattn.kernels.tables import RefusedTable

from ..support.tile_tables import H200, folders
from ..support.transport_cases import on_ranks

__all__ = ["folders"]

Folders = tuple[Path, Path]
POINT = RingPoint(2, 8, 4, 64, "bf16", "bounded", 1024)
CHUNKED = RingSetting("nccl", 2, 8)


def ring_entry(point: RingPoint = POINT, setting: RingSetting = CHUNKED, **changed: Any) -> RingEntry:
    return RingEntry(point, setting, 1e-3, 0.01, 1.2e-3, {"triton": "3.7.1"}, **changed)


def test_candidate_settings() -> None:
    candidates = candidate_settings(POINT, "cuda")
    assert candidates[0] == DEFAULT and len({*candidates}) == len(candidates)
    assert {(row.transport, row.chunks, row.channels) for row in candidates[1:]} == {
        *(("nccl_one_sided", chunks, None) for chunks in (1, 2, 4)),
        *(("nccl", chunks, channels) for chunks in (1, 2, 4) for channels in (None, 2, 4, 8, 16)),
    }
    assert candidate_settings(POINT._replace(kv_heads=1), "cpu") == [DEFAULT, RingSetting(chunks=2)]
    for candidate in candidates:
        with Ring(**candidate.arguments) as ring:
            assert (ring.chunks, ring.limits.channels) == (candidate.chunks, candidate.channels)
        assert {"limits": Limits()} | eval(str(candidate), {"Ring": dict, "Limits": Limits}) == candidate.arguments


def test_the_setting_of_the_nearest_length_is_used(folders: Folders) -> None:
    newer = replace(CHUNKED, chunks=4)
    for entry in (ring_entry(), ring_entry(POINT._replace(length=32768), DEFAULT), ring_entry(setting=newer)):
        path = save_ring(folders[0], H200, entry)
    assert path.name == "nvidia-h200_rings.json" and path.stat().st_mode & 0o777 == 0o600
    assert {row.point.length: row.setting for row in read_ring_table(folders[0], H200)} == {1024: newer, 32768: DEFAULT}
    assert ring_settings(POINT._replace(length=3000), H200) == newer
    assert ring_settings(POINT._replace(length=16384), H200) == DEFAULT
    others = {"world": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "fp16", "mask": "full"}
    assert [ring_settings(POINT._replace(**{name: value}), H200) for name, value in others.items()] == [None] * 6  # type: ignore[arg-type]
    assert ring_settings(POINT, None) is None
    assert save_ring(folders[0], INTERPRETER_GPU, ring_entry()).name == "cpu_rings.json"
    assert ring_settings(POINT, None) == CHUNKED


def test_damaged_files_are_skipped_with_a_warning(folders: Folders) -> None:
    user, package = folders
    path = save_ring(user, H200, ring_entry())
    data = json.loads(path.read_text())
    data["rings"][0]["point"]["length"] = 0
    path.write_text(json.dumps(data))
    reason = re.escape(f"{path} is rejected: rings[0]: length is 0")
    with pytest.warns(UserWarning, match=f"{reason}.*"):
        assert ring_settings(POINT, H200) is None
    save_ring(package, H200, ring_entry(setting=DEFAULT))
    with pytest.warns(UserWarning, match=reason):
        assert ring_settings(POINT, H200) == DEFAULT
    # an explicit folder skips the damaged file, without a warning
    assert ring_settings(POINT, H200, package) == DEFAULT
    with pytest.raises(RefusedTable, match=reason):  # the damaged file is not overwritten
        save_ring(user, H200, ring_entry())


def test_world_is_that_of_the_launcher(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ModelShape(4, 4, 64, 64), [64, 128], True, "cpu"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for world in (None, 2):
        assert [(problem.world, problem.seqlen) for problem in ring_problems(*call, world)] == [(2, 128), (2, 256)]
    with pytest.raises(typer.BadParameter, match="--world is 8: the launcher started 2 ranks; leave it out"):
        ring_problems(*call, 8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="the launcher started 1 rank"):
        ring_problems(*call, None)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [ring_problems(*call[:3], device, None)[0].world for device in ("cpu", "cuda")] == [2, 8]


@pytest.mark.nightly
def test_two_processes_choose_the_same_setting(tmp_path: Path) -> None:
    flags = "--heads 2 --kv-heads 2 --head-dim 16 --dtype fp32 --seqlen 64 --budget 600 --device cpu --ring"
    report = tmp_path / "report.json"
    done = CliRunner().invoke(
        app, [*flags.split(), "--save-dir", str(tmp_path), "--json", str(report)], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    assert "a step" in done.output and "programs read it with autotune.shared_ring_settings" in done.output
    contents = json.loads(report.read_text())
    assert contents["case"] == "tune --ring" and "best: Ring(" in contents["notes"][-1]
    assert [(row["chunks"], row["runs"]) for row in contents["rows"]] == [(1, 15), (2, 15)]
    (entry,) = read_ring_table(tmp_path, INTERPRETER_GPU)
    assert entry.point == RingPoint(2, 2, 2, 16, "fp32", "bounded", 64) and entry.setting.transport == "process_group"
    assert ring_settings(entry.point, None, tmp_path) == entry.setting


def test_every_rank_gets_the_setting_or_the_error_of_the_first(tmp_path: Path) -> None:
    save_ring(tmp_path, H200, ring_entry())

    def fn(group: Any) -> None:
        gpu = None if group.rank() else H200  # the second rank's GPU has no table
        assert shared_ring_settings(POINT, gpu, group, tmp_path) == CHUNKED
        assert shared_ring_settings(POINT._replace(world=4), gpu, group, tmp_path) is None
        with pytest.raises(ValueError, match="config_dir is 'nowhere'"):
            shared_ring_settings(POINT, None, group, tmp_path if group.rank() else "nowhere")

    on_ranks(2, fn)


class TwoRanks:
    """Stand-in for the control of two ranks; the other one has half the value, and is throttled."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather_merged(self, value: float, merge: Any, what: str) -> float:
        found: float = merge([value, value / 2][:: 1 - 2 * self.rank])
        return found

    def gather(self, value: tuple[str, ...], what: str) -> list[tuple[str, ...]]:
        return [value, ("power cap", "power brake")][:: 1 - 2 * self.rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_writes_the_table(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, tried_settings, steps = list[RingSetting](), list[Any](), list[Any]()

    def search(tried: Any, default: RingSetting, check: Any, run: Any, left: Any, on_run: Any) -> Any:
        tried_settings.append((tried, default))
        assert check(default) is None
        assert left() == pytest.approx(3600.0 if rank == 0 else 1800.0, rel=0.1), "the clock of rank 0 counts"
        reading = run(default)
        reasons = ("power brake", "power cap") if rank == 0 else ("power cap", "power brake")
        assert reading.seconds == 0.25 and reading.throttled == reasons and reading.clocks == {"sm_mhz": 900.0}
        assert steps == [1, "shards", "shards"], "one thread, a warm-up and a timed step"
        assert str(check(RingSetting(chunks=2))) == "ValueError: no such ring"
        assert str(check(RingSetting(chunks=8))) == "ImportError: no CuPy"
        assert check(RingSetting(chunks=4)) == "error of out"
        assert not closed
        return SearchResult(default, {default: [TimedRun(1e-3)] * 5}, {}, True)

    @contextmanager
    def open_ring(**arguments: Any) -> Iterator[Any]:
        if arguments["chunks"] in (2, 8):
            raise ValueError("no such ring\nand more") if arguments["chunks"] == 2 else ImportError("no CuPy")
        yield SimpleNamespace(transport="nccl", chunks=arguments["chunks"])
        closed.append(arguments["chunks"])

    readings = {"sm_mhz": 900, "throttled": ("idle", "power brake")}
    stand_ins: dict[str, Any] = {
        "resolve_group": lambda: None,
        "open_control": lambda group: SimpleNamespace(scope=lambda name: TwoRanks(rank)),
        "Ring": open_ring, "search": search, "StepTimer": lambda device, team: lambda step: (step(), 0.25)[1],
        "ring_error": lambda small, ring, *_: "error of out" if (ring.chunks, small.seqlen) == (4, 2 * 192) else None,
        "ring_candidate": lambda *_: SimpleNamespace(run=steps.append),
    }  # fmt: skip
    monkeypatch.setattr(torch, "set_num_threads", steps.append)
    monkeypatch.setattr(AttentionConfig, "random_shard", lambda self, at, device: "shards" if at == rank else "others'")
    monkeypatch.setattr(nvml, "GpuReader", lambda device: lambda: readings)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(ring_search, name, stand_in)
    problem = AttentionConfig(64, 2, heads=2, kv_heads=1, head_dim=16, dtype="float32", device="cpu")
    result = ring_search.search_ring(LaunchedRank(rank, 2, rank, 2), torch.device("cpu"), problem, 3600.0, tmp_path)
    monkeypatch.setattr(ring_search, "search", lambda *_, **__: SearchResult(None, {}, {}, False))
    place = LaunchedRank(rank, 2, rank, 2)
    spent = ring_search.search_ring(place, torch.device("cpu"), problem, 1.0, tmp_path / "none")
    assert "incomplete" in spent.notes[0] and not spent.failed and not (tmp_path / "none").exists()
    point = RingPoint(2, 2, 1, 16, "fp32", "bounded", 32)
    assert tried_settings == [(candidate_settings(point, "cpu"), DEFAULT)] and sorted(closed) == [1, 4]  # type: ignore[type-var]
    assert "best: Ring(" in result.notes[-1] and len(read_ring_table(tmp_path, INTERPRETER_GPU)) == (rank == 0)


def test_problems_share_the_budget(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, checked = list[Any](), list[Any]()

    def run(world: int, work: Any, problem: AttentionConfig, budget: float, folder: Path, *, device: str) -> Any:
        calls.append((world, work, problem, budget, folder, device))
        return Result("tune --ring", ring_search.UNITS, [{"tokens": problem.seqlen}], notes=["found"])

    monkeypatch.setattr(ring_search, "run_process_group", run)
    monkeypatch.setattr(ring_search, "check_ranks_fit", lambda *given, **how: checked.append((*given, how)))
    problems = ring_problems(ModelShape(6, 2, 16, 16, "fp16"), [64, 32], False, "cpu", 3)
    assert [(x.world, x.seqlen, x.heads, x.kv_heads, x.head_dim, x.dtype, x.causal, x.layout) for x in problems] == [
        (3, 3 * tokens, 6, 2, 16, "float16", False, "zigzag") for tokens in (64, 32)
    ]
    assert [ring_search.ring_point(x) for x in problems] == [
        RingPoint(3, 6, 2, 16, "fp16", "full", tokens) for tokens in (64, 32)
    ]
    result = ring_search.tune_rings(problems, 90.0, tmp_path / "new")
    assert calls == [(3, ring_search.search_ring, problem, 45.0, tmp_path / "new", "cpu") for problem in problems]
    assert [(flag, problem, needed.keywords, how) for flag, problem, needed, how in checked] == [
        ("--seqlen", problem, {"rings": 2}, {"per_rank": True}) for problem in problems
    ]
    assert result.notes == ["found"]
    assert [row["tokens"] for row in result.rows] == [192, 96] and result.provenance["versions"]
    (tmp_path / "new" / "cpu_rings.json").write_text("{")
    with pytest.raises(RefusedTable):
        ring_search.tune_rings(problems, 90.0, tmp_path / "new")
    assert len(calls) == 2
    with pytest.raises(ValueError, match="value-dim is 8"):
        ring_problems(ModelShape(6, 2, 16, 8), [64], False, "cpu", 3)


def test_a_wrong_ring_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    x = dict(zip(RESULTS, torch.randn(4, 1, 8, 2, 16, dtype=torch.float64), strict=True))
    judge, problem = ErrorJudge((0,), (0,), x, {}, dict.fromkeys(x, 1e-6)), AttentionConfig(16, 2)
    monkeypatch.setattr(ring_search, "ring_candidate", lambda problem, factor, device: SimpleNamespace(
        shards=lambda tensors, device: (), run=lambda shards: {name: each * factor for name, each in x.items()}
    ))  # fmt: skip
    monkeypatch.setattr(ring_search, "gather_results", lambda tensor, mine, problem, heads: mine)
    for factor, message in ((1.0, None), (1.01, "error of out is"), (torch.nan, "error of out is nan")):
        error = ring_search.ring_error(problem, factor, torch.device("cpu"), judge)  # type: ignore[arg-type]
        assert error is None if message is None else str(error).startswith(message)


def test_report_of_a_search() -> None:
    readings = {
        DEFAULT: [TimedRun(4e-3, ("power brake",), {"sm_mhz": 1200.0})] * 5,
        CHUNKED: [TimedRun(1e-3, ("power cap",), {"sm_mhz": 1300.0})] * 5,
    }
    measured = SearchResult(CHUNKED, readings, {RingSetting("nccl_one_sided"): "no such link"}, False)
    used = ring_table_entry(POINT, replace(measured, best=DEFAULT), "process_group")
    assert used.setting == replace(DEFAULT, transport="process_group") and used.seconds == used.baseline == 4e-3
    entry = ring_table_entry(POINT, measured, "nccl")
    assert (entry.setting, entry.seconds, entry.baseline) == (CHUNKED, 1e-3, 4e-3)
    assert entry.about["clocks"] == {"sm_mhz": 1300.0, "throttled": "power cap"}
    report = ring_search_result(POINT, measured, entry, Path("x.json"))
    assert [(row["transport"], row["runs"], row["note"]) for row in report.rows] == [
        ("auto", 5, "default"), ("nccl", 5, ""), ("nccl_one_sided", 0, "no such link")
    ]  # fmt: skip
    assert [(row.get("time"), row.get("spread")) for row in report.rows] == [(4.0, 0.0), (1.0, 0.0), (None, None)]
    assert "incomplete" in report.notes[0]
    assert report.notes[-1].endswith(f"best: {CHUNKED}, 1 ms ± 0.0% a step, 75.0% less than the default")
    assert ring_search_result(POINT, measured, used, Path("x.json")).notes[-1].endswith("no faster than the default")
    alone = replace(measured, readings={CHUNKED: readings[CHUNKED]})
    assert ring_table_entry(POINT, alone, "nccl").baseline == 1e-3, "the default does not run here"
    failed = ring_search_result(POINT, SearchResult(None, {}, {DEFAULT: "no such link"}, True), None, None)
    assert failed.failed == ["1024 tokens: no setting works here; see the column note for the reasons"]
