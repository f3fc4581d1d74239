"""``ringattn tune --ring``: what is tried, what is kept and believed; and a search in two real processes."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
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
from ringattn.autotune.ring_search import entry_of, problems_of, result_of
from ringattn.autotune.rings import DEFAULT, read_rings, save_ring, settings
from ringattn.autotune.search import Measured, Reading
from ringattn.autotune.space import Shape
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.errors import RESULTS, Judge
from ringattn.bench.common.ranks import Member
from ringattn.comm import Limits
from ringattn.kernels.gpu import INTERPRETER_GPU
from ringattn.kernels.tables import RefusedTable

from ..support.tile_tables import H200, folders

__all__ = ["folders"]

Folders = tuple[Path, Path]
POINT = RingPoint(2, 8, 4, 64, "bf16", "bounded", 1024)
CHUNKED = RingSetting("nccl", 2, 8)


def made(point: RingPoint = POINT, setting: RingSetting = CHUNKED, **changed: Any) -> RingEntry:
    return RingEntry(point, setting, 1e-3, 0.01, 1.2e-3, {"triton": "3.7.1"}, **changed)


def test_what_is_tried() -> None:
    tried = settings(POINT, "cuda")
    assert tried[0] == DEFAULT and len({*tried}) == len(tried)
    assert {(row.transport, row.chunks, row.channels) for row in tried[1:]} == {
        *(("nccl_one_sided", chunks, None) for chunks in (1, 2, 4)),
        *(("nccl", chunks, channels) for chunks in (1, 2, 4) for channels in (None, 2, 4, 8, 16)),
    }
    assert settings(POINT._replace(kv_heads=1), "cpu") == [DEFAULT]
    for candidate in tried:
        with Ring(**candidate.arguments) as ring:
            assert (ring.chunks, ring.limits.channels) == (candidate.chunks, candidate.channels)
        assert {"limits": Limits()} | eval(str(candidate), {"Ring": dict, "Limits": Limits}) == candidate.arguments


def test_the_nearest_length_serves(folders: Folders) -> None:
    newer = replace(CHUNKED, chunks=4)
    for entry in (made(), made(POINT._replace(length=32768), DEFAULT), made(setting=newer)):
        path = save_ring(folders[0], H200, entry)
    assert path.name == "nvidia-h200_rings.json" and path.stat().st_mode & 0o777 == 0o600
    assert {row.point.length: row.setting for row in read_rings(folders[0], H200)} == {1024: newer, 32768: DEFAULT}
    assert ring_settings(POINT._replace(length=3000), H200) == newer
    assert ring_settings(POINT._replace(length=16384), H200) == DEFAULT
    assert ring_settings(POINT._replace(world=4), H200) is None
    assert ring_settings(POINT, None) is None
    assert save_ring(folders[0], INTERPRETER_GPU, made()).name == "cpu_rings.json"
    assert ring_settings(POINT, None) == CHUNKED


def test_damaged_files_are_skipped_with_a_warning(folders: Folders) -> None:
    """The warning has the path and the reason; other files are used."""
    user, package = folders
    path = save_ring(user, H200, made())
    data = json.loads(path.read_text())
    data["rings"][0]["point"]["length"] = 0
    path.write_text(json.dumps(data))
    reason = re.escape(f"{path} is refused: rings[0]: length is 0")
    with pytest.warns(UserWarning, match=f"{reason}.*"):
        assert ring_settings(POINT, H200) is None
    save_ring(package, H200, made(setting=DEFAULT))
    with pytest.warns(UserWarning, match=reason):
        assert ring_settings(POINT, H200) == DEFAULT
    assert ring_settings(POINT, H200, package) == DEFAULT  # without a warning
    with pytest.raises(RefusedTable, match=reason):  # it is left as it is
        save_ring(user, H200, made())


# the command


def test_a_launcher_decides_how_many_ranks(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Shape(4, 4, 64, 64), [64, 128], True, "cpu"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for world in (None, 4):
        assert [(problem.world, problem.seqlen) for problem in problems_of(*call, world)] == [(4, 256), (4, 512)]
    with pytest.raises(typer.BadParameter, match="--world is 8: the launcher started 4 ranks; leave it out"):
        problems_of(*call, 8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="the launcher started 1 rank"):
        problems_of(*call, None)


def test_two_processes_choose_the_same_setting(tmp_path: Path) -> None:
    """Really: two processes over gloo, checked, timed in turns, one choice, in a table that is read back."""
    flags = "--heads 2 --kv-heads 2 --head-dim 16 --dtype fp32 --seqlen 64 --budget 600 --device cpu --ring"
    report = tmp_path / "told.json"
    done = CliRunner().invoke(
        app, [*flags.split(), "--save-dir", str(tmp_path), "--json", str(report)], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    assert "a step" in done.output and "autotune.shared_ring_settings looks it up" in done.output
    contents = json.loads(report.read_text())
    assert contents["case"] == "tune --ring" and "best: Ring(" in contents["notes"][-1]
    assert [(row["chunks"], row["runs"]) for row in contents["rows"]] == [(1, 15), (2, 15)]
    (kept,) = read_rings(tmp_path, INTERPRETER_GPU)
    assert kept.point == RingPoint(2, 2, 2, 16, "fp32", "bounded", 64) and kept.setting.transport == "process_group"
    assert ring_settings(kept.point, None, tmp_path) == kept.setting


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_writes_the_table(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of one rank, on a stand-in for the ring and for what is timed."""

    def search(tried: Any, default: RingSetting, check: Any, *_: Any, done: Any) -> Measured[RingSetting]:
        assert check(default) is None
        return Measured(default, {default: [Reading(1e-3)] * 5}, {}, True)

    stand_ins = {
        "resolve_group": lambda: None, "control_of": lambda group: SimpleNamespace(scope=lambda name: None),
        "Ring": lambda **arguments: nullcontext(SimpleNamespace(transport="nccl")), "error_of": lambda *_: None,
        "candidate_of": lambda *_: SimpleNamespace(run=lambda shards: None), "search": search,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(ring_search, name, stand_in)
    problem = AttentionConfig(64, 2, heads=2, kv_heads=1, head_dim=16, dtype="float32", device="cpu")
    result = ring_search.search_ring(Member(rank, 2, rank, 2), torch.device("cpu"), problem, 60.0, tmp_path)
    assert "best: Ring(" in result.notes[-1] and len(read_rings(tmp_path, INTERPRETER_GPU)) == (rank == 0)


def test_a_wrong_ring_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result off by a factor, above and below PyTorch's error."""
    x = dict(zip(RESULTS, torch.randn(4, 1, 8, 2, 16, dtype=torch.float64), strict=True))
    judge, problem = Judge((0,), (0,), x, {}, dict.fromkeys(x, 1e-6)), AttentionConfig(16, 2)
    monkeypatch.setattr(ring_search, "candidate_of", lambda problem, factor, device: SimpleNamespace(
        shards=lambda tensors, device: (), run=lambda shards: {name: each * factor for name, each in x.items()}
    ))  # fmt: skip
    monkeypatch.setattr(ring_search, "gathered", lambda tensor, mine, problem, heads: mine)
    for factor, message in ((1.0, None), (1.01, "error of out is"), (torch.nan, "error of out is nan")):
        error = ring_search.error_of(problem, factor, torch.device("cpu"), judge)  # type: ignore[arg-type]
        assert error is None if message is None else str(error).startswith(message)


def test_what_a_search_says() -> None:
    readings = {
        DEFAULT: [Reading(4e-3, ("power brake",), {"sm_mhz": 1200.0})] * 5,
        CHUNKED: [Reading(1e-3, ("power cap",), {"sm_mhz": 1300.0})] * 5,
    }
    measured = Measured(CHUNKED, readings, {RingSetting("nccl_one_sided"): "no such link"}, False)
    kept = entry_of(POINT, measured, "nccl")
    assert (kept.setting, kept.seconds, kept.baseline) == (CHUNKED, 1e-3, 4e-3)
    assert kept.about["clocks"] == {"sm_mhz": 1300.0, "throttled": "power cap"}
    report = result_of(POINT, measured, kept, Path("x.json"))
    assert [(row["transport"], row["runs"], row["note"]) for row in report.rows] == [
        ("auto", 5, "default"), ("nccl", 5, ""), ("nccl_one_sided", 0, "no such link")
    ]  # fmt: skip
    assert "incomplete" in report.notes[0] and "75.0% less than the default" in report.notes[-1]
    nothing = result_of(POINT, Measured(None, {}, {DEFAULT: "no such link"}, True), None, None)
    assert nothing.failed == ["1024 tokens: no setting runs here; see the notes of the rows"]
