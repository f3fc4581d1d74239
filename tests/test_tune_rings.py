"""``ringattn tune --ring``: what is tried, who wins, what is kept and believed; and a search in two real processes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn import Ring
from ringattn.autotune import RingEntry, RingPoint, RingSetting, ring_settings
from ringattn.autotune.rings import CPU, DEFAULT, WIRES, best_of, halved, rings_of, settings
from ringattn.autotune.store import save
from ringattn.bench.exact import Judge
from ringattn.bench.ring.candidates import Problem
from ringattn.bench.tune import command
from ringattn.bench.tune import ring as tune_ring
from ringattn.comm import Limits
from ringattn.kernels import choice, default_config
from ringattn.kernels.tables import RefusedTable, Table, parse, read

from .tile_tables import DATE, H200, entry, folders

__all__ = ["folders"]

POINT = RingPoint(2, 8, 4, 64, "bf16", "bounded", 1024)
CHUNKED = RingSetting("nccl", 2, 8)


def made(point: RingPoint = POINT, setting: RingSetting = CHUNKED, **changed: Any) -> RingEntry:
    return RingEntry(point, setting, DATE, 1e-3, 0.01, 1.2e-3, {"triton": "3.7.1"}, **changed)


# what is tried


def test_what_is_tried_on_a_gpu() -> None:
    found = settings(POINT, "cuda")
    assert found[0] == DEFAULT and len({*found}) == len(found)
    assert {(one.transport, one.chunks) for one in found[1:]} == {
        (transport, chunks) for transport in ("nccl", "copy_engine") for chunks in (1, 2, 4)
    }
    assert {one.channels for one in found if one.transport == "copy_engine"} == {None}
    assert {one.channels for one in found if one.transport == "nccl"} == {None, 2, 4, 8, 16}
    assert {one.wire_dtype for one in found} == {None}


def test_other_wires_are_for_who_asks() -> None:
    assert {one.wire_dtype for one in settings(POINT, "cpu", WIRES)} == {None, "fp8"}  # it is bf16 already
    wide = settings(POINT._replace(dtype="fp32", kv_heads=1), "cpu", WIRES)
    assert [(one.transport, one.chunks, one.wire_dtype) for one in wide] == [
        ("auto", 1, None), ("auto", 1, "bf16"), ("auto", 1, "fp8")
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_ring_takes_every_setting(device: str) -> None:
    for one in settings(POINT._replace(dtype="fp32"), device, WIRES):
        with Ring(**one.arguments, limits=Limits(**one.limits)) as ring:
            assert (ring.chunks, ring.limits.channels) == (one.chunks, one.channels)
            assert (ring.wire_dtype is None) == (one.wire_dtype is None)
        names: dict[str, Any] = {"Ring": lambda **given: given, "Limits": lambda **given: given}
        given = eval(str(one), names)
        assert given.pop("limits", {}) == one.limits
        assert given == {name: value for name, value in one.arguments.items() if value is not None}


# who wins


def test_halving_spends_its_runs_on_the_best_and_on_the_default() -> None:
    players = settings(POINT, "cuda")
    speed = {one: 1.0 + 0.1 * i for i, one in enumerate(reversed(players))}
    calls: list[RingSetting] = []
    known = halved(players, lambda one: calls.append(one) or speed[one], lambda: 1.0)  # type: ignore[func-returns-value]
    assert best_of(known) == players[-1]
    counts = Counter(calls)
    assert counts[players[-1]] == counts[DEFAULT] == 15 and min(counts.values()) == 3
    assert sum(count == 15 for count in counts.values()) == 4  # three finalists, and what they are compared with
    assert calls[: len(players)] == players  # in turns


def test_a_budget_ends_the_search_after_one_run_of_each() -> None:
    players = settings(POINT, "cuda")
    known = halved(players, lambda one: 1.0, lambda: 0.0)
    assert all(len(seconds) == 1 for seconds in known.values())
    assert best_of(known) == DEFAULT


def test_what_is_within_the_spread_of_the_default_is_not_chosen() -> None:
    noisy = [0.8, 0.9, 1.0, 1.1, 1.2]
    assert best_of({DEFAULT: noisy, CHUNKED: [0.95] * 5}) == DEFAULT
    assert best_of({DEFAULT: noisy, CHUNKED: [0.7] * 5}) == CHUNKED
    assert best_of({DEFAULT: [1.0] * 5, CHUNKED: [0.95] * 5}) == CHUNKED
    assert best_of({DEFAULT: [1.0] * 5, CHUNKED: [0.1] * 3}) == DEFAULT  # it was not in the last round


# what is kept and believed


def test_settings_live_beside_the_tiles(folders: tuple[Path, Path]) -> None:
    path, newer = save(folders[0], H200, [entry()]), replace(CHUNKED, chunks=4)
    assert save(folders[0], H200, rings=[made(), made(POINT._replace(length=32768), DEFAULT)]) == path
    save(folders[0], H200, [entry(entry().point._replace(length=1024))], rings=[made(setting=newer)])
    found = read(path)
    assert len(found.entries) == 2
    assert {one.point.length: one.setting for one in rings_of(found)} == {1024: newer, 32768: DEFAULT}
    assert ring_settings(POINT._replace(length=3000), H200) == newer
    assert ring_settings(POINT._replace(length=16384), H200) == DEFAULT
    assert ring_settings(POINT._replace(world=4), H200) is None
    assert ring_settings(POINT, None) is None
    with pytest.MonkeyPatch.context() as patch:  # what reads tiles reads them as before
        patch.setattr(choice, "gpu_of", lambda device: H200)
        q, v = torch.empty(1, 8, 8, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
        assert default_config(q, v).forward == entry().tile


def test_the_cpu_has_rings_and_no_tiles(folders: tuple[Path, Path]) -> None:
    path = save(folders[0], CPU, rings=[made()])
    assert path.name.startswith("cpu_triton-")
    assert ring_settings(POINT, None) == CHUNKED
    with pytest.raises(ValueError, match="arch is 0, no GPU: such a table has settings of rings alone"):
        save(folders[0], CPU, [entry()])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"world": 1}, "rings[0].world is 1: it must be a whole number from 2"),
        ({"setting": []}, "rings[0].setting is []"),
        ({"setting": {"transport": "rm -rf /", "chunks": 1, "channels": None, "wire_dtype": None}}, "transport is 'rm"),
        ({"setting": {"transport": "nccl", "chunks": 1, "channels": 3, "wire_dtype": None}}, "channels is 3"),
        (
            {"setting": {"transport": "nccl", "chunks": 8, "channels": 2, "wire_dtype": None}},
            "chunks is 8: there are 4",
        ),
        ({"setting": {"transport": "nccl"}}, "rings[0].setting.channels is missing"),
        ({"seconds": None}, "seconds is None"),
        ({"deadline": 3}, "rings[0].deadline is not known"),
    ],
)
def test_what_is_not_the_schema_is_refused(changed: dict[str, Any], told: str) -> None:
    table = Table("NVIDIA H200", 90, (3, 7), (), ({**made().as_json(), **changed},))
    with pytest.raises(RefusedTable) as error:
        rings_of(table)
    assert told in str(error.value)


def test_a_section_of_another_kind_is_refused() -> None:
    text = {"schema": "ringattn tiles", "version": 1, "gpu": "NVIDIA H200", "arch": 90, "triton": "3.7", "entries": []}
    assert parse(json.dumps({**text, "rings": []})).rings == ()
    with pytest.raises(ValueError, match=r"rings is \{\}: it must be a list"):
        parse(json.dumps({**text, "rings": {}}))


# the command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--wire", "fp4"], "--wire is fp4: it takes some of bf16, fp8"),
        (["--value-dim", "64"], "--value-dim is 64: rings are tuned with values of --head-dim"),
        (["--device", "tpu"], "--device is 'tpu': it takes cpu or cuda"),
    ],
)
def test_bad_input_is_told_what_fits(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(command.app, ["--ring", *arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == 2 and told in " ".join(result.output.replace("│", " ").split())


def test_two_processes_choose_as_one(tmp_path: Path) -> None:
    """Really: two processes over gloo, checked, timed in turns, one choice, in a table that is read back."""
    flags = "--heads 2 --kv-heads 2 --head-dim 16 --dtype fp32 --seqlen 64 --wire fp8 --budget 1 --device cpu --ring"
    report = tmp_path / "told.json"
    done = CliRunner().invoke(command.app, [*flags.split(), "--save-dir", str(tmp_path), "--json", str(report)])
    assert done.exit_code == 0, done.output
    assert "a step" in done.output and "autotune.ring_settings looks it up" in done.output
    told = json.loads(report.read_text())
    assert len(told["rows"]) == 4 and all(row["runs"] >= 1 and not row["note"] for row in told["rows"][1:])
    (kept,) = rings_of(read(next(tmp_path.glob("cpu_triton-*.json"))))
    assert [kept.as_json()] == told["rings"]
    assert kept.point == RingPoint(2, 2, 2, 16, "fp32", "bounded", 64) and kept.setting.transport == "process_group"
    found = ring_settings(kept.point, None, tmp_path)
    assert found == kept.setting


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose ring is told to err: a setting says why it is left out, and one that cannot run does too."""
    x = torch.randn(4, 1, 8, 2, 16, dtype=torch.float64)
    exact = Judge((0,), (0,), tuple(x))
    monkeypatch.setattr(tune_ring, "judged", lambda *args: (exact, dict.fromkeys(exact.sizes(), 1e-6)))

    class Erring:
        def __init__(self, factor: float | None) -> None:
            self.factor = factor

        def shards(self, tensors: object, device: object) -> tuple[torch.Tensor, ...]:
            return ()

        def run(self, shards: object) -> tuple[torch.Tensor, ...]:
            if self.factor is None:
                raise RuntimeError("no such link\nand more")
            return tuple(x * self.factor)

    monkeypatch.setattr(tune_ring, "ring_candidate", lambda problem, ring, device: Erring(ring))
    monkeypatch.setattr(tune_ring, "gathered", lambda one, mine, problem, heads: mine)
    rings: dict[RingSetting, Any] = {
        DEFAULT: 1.0,
        CHUNKED: 1.01,
        RingSetting(wire_dtype="fp8"): 1.01,
        RingSetting("nccl"): None,
    }
    found = tune_ring.wrong(Problem(16, 2), rings, torch.device("cpu"))
    assert {*found} == {CHUNKED, RingSetting("nccl")}
    assert found[CHUNKED].startswith("out errs by") and found[RingSetting("nccl")] == "RuntimeError: no such link"
