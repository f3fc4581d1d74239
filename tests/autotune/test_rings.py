"""``ringattn tune --ring``: what is tried, who wins, what is kept and believed; and a search in two real processes."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from ringattn import Ring
from ringattn.autotune import RingEntry, RingPoint, RingSetting, ring_search, ring_settings, search
from ringattn.autotune.cli_tune import app
from ringattn.autotune.model import Shape
from ringattn.autotune.ring_search import best_of
from ringattn.autotune.rings import CPU, DEFAULT, WIRES, rings_of, settings
from ringattn.autotune.search import Reading, halving, planned
from ringattn.autotune.store import known, save
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.errors import Exact
from ringattn.bench.common.launching import Member
from ringattn.comm import Limits
from ringattn.comm.topology import nvml
from ringattn.kernels import choice, default_config
from ringattn.kernels.tables import RefusedTable, Table, parse, read

from ..support.tile_tables import DATE, H200, entry, folders

__all__ = ["folders"]

POINT = RingPoint(2, 8, 4, 64, "bf16", "bounded", 1024)
CHUNKED = RingSetting("nccl", 2, 8)


def made(point: RingPoint = POINT, setting: RingSetting = CHUNKED, **changed: Any) -> RingEntry:
    return RingEntry(point, setting, DATE, 1e-3, 0.01, 1.2e-3, {"triton": "3.7.1"}, **changed)


def readings(*seconds: float) -> list[Reading]:
    return [Reading(one) for one in seconds]


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
        with Ring(**one.arguments) as ring:
            assert (ring.chunks, ring.limits.channels) == (one.chunks, one.channels)
            assert (ring.wire_dtype is None) == (one.wire_dtype is None)
        given = eval(str(one), {"Ring": dict, "Limits": Limits})
        assert {"wire_dtype": None, "limits": Limits()} | given == one.arguments


# who wins


def test_halving_always_keeps_the_default_and_is_the_same_without_it() -> None:
    players = settings(POINT, "cuda")
    speed = {one: Reading(1.0 + 0.1 * i) for i, one in enumerate(reversed(players))}
    known, complete = halving(players, DEFAULT, speed.__getitem__, lambda: 1.0)
    assert complete and best_of(known) == players[-1]
    assert len(known[players[-1]]) == len(known[DEFAULT]) == 15
    assert sum(map(len, known.values())) == planned(len(players) - 1)
    others, _ = halving(players[1:], DEFAULT, speed.__getitem__, lambda: 1.0)
    assert sum(len(runs) == 15 for runs in others.values()) == 3


def test_what_is_within_the_spread_of_the_default_is_not_chosen() -> None:
    noisy = readings(0.8, 0.9, 1.0, 1.1, 1.2)
    assert best_of({DEFAULT: noisy, CHUNKED: readings(*[0.95] * 5)}) == DEFAULT
    assert best_of({DEFAULT: noisy, CHUNKED: readings(*[0.7] * 5)}) == CHUNKED
    assert best_of({DEFAULT: readings(*[1.0] * 5), CHUNKED: readings(*[0.95] * 5)}) == CHUNKED
    # it was not in the last round
    assert best_of({DEFAULT: readings(*[1.0] * 5), CHUNKED: readings(*[0.1] * 3)}) == DEFAULT


def test_every_setting_runs_once_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank; a throttled run is repeated, and the reasons of all ranks are kept."""
    monkeypatch.setattr(ring_search, "of_rank_0", lambda value: value)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(search, "COOL_DOWN", 0.0)
    gathered = SimpleNamespace(gather=lambda mine, what: [("power brake",), mine])
    monkeypatch.setattr(ring_search, "ranks", lambda: gathered)
    monkeypatch.setattr(ring_search, "Clock", lambda device, team: lambda step: step() or 0.5)
    clocks = {"sm_mhz": 1200, "throttled": ("power cap",)}
    monkeypatch.setattr(nvml, "Reader", lambda device: lambda: clocks)
    steps: list[RingSetting] = []
    players: dict[RingSetting, Any] = {
        one: SimpleNamespace(run=lambda shards, one=one: steps.append(one)) for one in (DEFAULT, CHUNKED)
    }
    config = ring_search.RingConfig(POINT, "cpu", (), 0.0, Path("."))
    with ExitStack() as stack:
        known, complete = ring_search.timed(config, players, (), torch.device("cpu"), stack)
    assert not complete and {one: len(runs) for one, runs in known.items()} == {DEFAULT: 1, CHUNKED: 1}
    assert known[CHUNKED][0] == Reading(0.5, ("power brake", "power cap"), {"sm_mhz": 1200.0})
    assert best_of(known) == DEFAULT  # one run of each tells nothing
    found = ring_search.entry_of(POINT, CHUNKED, known[CHUNKED], None)
    assert found.clocks["throttled"] == "power brake, power cap" and found.baseline == found.seconds == 0.5


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
        rings_of(replace(table, path=Path("/there/x.json")))
    assert str(error.value).startswith("/there/x.json is refused: ") and told in str(error.value)


def damaged(path: Path) -> None:
    """One number less in its first ring."""
    told = json.loads(path.read_text())
    del told["rings"][0]["baseline"]
    path.write_text(json.dumps(told))


def test_a_damaged_table_is_told_and_passed_over(folders: tuple[Path, Path]) -> None:
    """As for kernels: a warning with the path and the reason, and what else there is serves."""
    user, package = folders
    path = save(user, H200, rings=[made()])
    damaged(path)
    with pytest.warns(UserWarning, match=re.escape(f"{path} is refused: rings[0].baseline is missing; what a ring")):
        assert ring_settings(POINT, H200) is None
    save(package, H200, rings=[made(setting=DEFAULT)])
    with pytest.warns(UserWarning, match=re.escape(f"{path} is refused")):
        assert ring_settings(POINT, H200) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ring_settings(POINT, H200, package) == DEFAULT
    for add in (lambda: known(user, H200), lambda: save(user, H200, rings=[made()])):  # it is left as it is
        with pytest.raises(RefusedTable, match=re.escape(f"{path} is refused: rings[0].baseline is missing")):
            add()


def test_a_section_of_another_kind_is_refused() -> None:
    text = {"schema": "ringattn tiles", "version": 1, "gpu": "NVIDIA H200", "arch": 90, "triton": "3.7", "entries": []}
    assert parse(json.dumps({**text, "rings": []})).rings == ()
    with pytest.raises(ValueError, match=r"rings is \{\}: it must be a list"):
        parse(json.dumps({**text, "rings": {}}))


# the command


def asked(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})


def test_a_launcher_decides_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Member(rank=0, world=4, local_rank=0, local_world=4)
    call = Shape(4, 4, 64, 64), [64], True, "cpu"
    monkeypatch.setattr(ring_search, "member", lambda: place)
    for world in (None, 4):
        (found,) = ring_search.configs_of(*call, world, "", 1.0, Path())
        assert found.point.world == 4
    with pytest.raises(typer.BadParameter, match="--world is 8: the launcher started 4 ranks; leave it out"):
        ring_search.configs_of(*call, 8, "", 1.0, Path())
    monkeypatch.setattr(ring_search, "member", lambda: replace(place, world=1))
    with pytest.raises(ValueError, match="the launcher started 1 rank: a ring to tune takes at least 2"):
        ring_search.configs_of(*call, None, "", 1.0, Path())


def test_rings_are_listed_and_nothing_else_is_done(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_search, "spawn", lambda *given, **how: pytest.fail("a search was started"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder := tmp_path / "cache"))
    flags = "--ring --list --world 4 --device cpu --heads 8 --kv-heads 4 --wire fp8 --seqlen 1k,2k --json -"
    listed = asked(*flags.split())
    assert listed.exit_code == 0, listed.output
    told = json.loads(listed.output)
    assert [(row["tokens"], row["chunks"], row["wire_dtype"]) for row in told["rows"]] == [
        (tokens, chunks, wire) for tokens in (1024, 2048) for wire in (None, "fp8") for chunks in (1, 2, 4)
    ]
    assert not folder.exists()
    assert "12 candidates for rings of 4 ranks on cpu" in asked(*flags.split()[:-2]).output
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    listed = asked("--ring", "--list", "--device", "cpu")
    assert listed.exit_code == 0 and listed.output == "", "rank 0 alone prints"


def test_two_processes_choose_as_one(tmp_path: Path) -> None:
    """Really: two processes over gloo, checked, timed in turns, one choice, in a table that is read back."""
    flags = "--heads 2 --kv-heads 2 --head-dim 16 --dtype fp32 --seqlen 64 --wire fp8 --budget 1 --device cpu --ring"
    report = tmp_path / "told.json"
    done = asked(*flags.split(), "--save-dir", str(tmp_path), "--json", str(report))
    assert done.exit_code == 0, done.output
    assert "a step" in done.output and "autotune.shared_ring_settings looks it up" in done.output
    told = json.loads(report.read_text())
    assert told["case"] == "tune --ring" and "best: Ring(" in told["notes"][-1]
    assert len(told["rows"]) == 4 and all(row["runs"] >= 1 and not row["note"] for row in told["rows"][1:])
    (kept,) = rings_of(read(next(tmp_path.glob("cpu_triton-*.json"))))
    assert kept.point == RingPoint(2, 2, 2, 16, "fp32", "bounded", 64) and kept.setting.transport == "process_group"
    assert ring_settings(kept.point, None, tmp_path) == kept.setting


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose ring is told to err: a setting says why it is left out, and one that cannot run does too."""
    x = torch.randn(4, 1, 8, 2, 16, dtype=torch.float64)
    exact = Exact((0,), (0,), tuple(x))
    monkeypatch.setattr(ring_search, "judged", lambda *args: (exact, dict.fromkeys(exact.sizes(), 1e-6)))

    class Erring:
        def __init__(self, factor: float | None) -> None:
            self.factor = factor

        def shards(self, tensors: object, device: object) -> tuple[torch.Tensor, ...]:
            return ()

        def run(self, shards: object) -> tuple[torch.Tensor, ...]:
            if self.factor is None:
                raise RuntimeError("no such link\nand more")
            return tuple(x * self.factor)

    monkeypatch.setattr(ring_search, "ring_candidate", lambda problem, ring, device: Erring(ring))
    monkeypatch.setattr(ring_search, "gathered", lambda one, mine, problem, heads: mine)
    rings: dict[RingSetting, Any] = {
        DEFAULT: 1.0,
        CHUNKED: 1.01,
        RingSetting(wire_dtype="fp8"): 1.01,
        RingSetting("nccl"): None,
    }
    found = ring_search.wrong(AttentionConfig(16, 2), rings, torch.device("cpu"))
    assert {*found} == {CHUNKED, RingSetting("nccl")}
    assert found[CHUNKED].startswith("out errs by") and found[RingSetting("nccl")] == "RuntimeError: no such link"
