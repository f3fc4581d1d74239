"""``ringattn tune --ring``: what is tried, who wins, what is kept and believed; and a search in two real processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from ringattn import Ring
from ringattn.autotune import Journal, Reading, RingEntry, RingPoint, RingSetting, known, ring_settings
from ringattn.autotune.rings import CPU, DEFAULT, WIRES, best_of, halved, planned_runs, rings_of, settings
from ringattn.autotune.search import COOL_DOWN, RETRIES
from ringattn.autotune.store import save
from ringattn.autotune.tune import command, ring_command
from ringattn.autotune.tune import ring as tune_ring
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.errors import Exact
from ringattn.bench.common.launching import Member
from ringattn.comm import Limits
from ringattn.kernels import choice, default_config
from ringattn.kernels.table_files import parse, read
from ringattn.kernels.tables import RefusedTable, Table

from ..support.tile_tables import DATE, H200, entry, folders

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


def readings(*seconds: float) -> list[Reading]:
    return [Reading(one) for one in seconds]


def test_halving_spends_its_runs_on_the_best_and_on_the_default() -> None:
    players = settings(POINT, "cuda")
    speed = {one: Reading(1.0 + 0.1 * i) for i, one in enumerate(reversed(players))}
    calls: list[RingSetting] = []
    known, complete = halved(players, lambda one: calls.append(one) or speed[one], lambda: 1.0)  # type: ignore[func-returns-value]
    assert complete and best_of(known) == players[-1]
    counts = Counter(calls)
    assert counts[players[-1]] == counts[DEFAULT] == 15 and min(counts.values()) == 3
    assert sum(count == 15 for count in counts.values()) == 4  # three finalists, and what they are compared with
    assert calls[: len(players)] == players  # in turns
    assert len(calls) == planned_runs(players)


def test_a_budget_ends_the_search_after_one_run_of_each() -> None:
    players = settings(POINT, "cuda")
    draw = random.Random(0)
    known, complete = halved(players, lambda one: Reading(draw.random()), lambda: 0.0)
    assert not complete and all(len(runs) == 1 for runs in known.values())
    assert best_of(known) == DEFAULT  # one run of each tells nothing


def test_without_the_default_the_others_are_halved_too() -> None:
    players = settings(POINT, "cuda")[1:]
    known, _ = halved(players, lambda one: Reading(1.0), lambda: 1.0)
    assert sum(len(runs) == 15 for runs in known.values()) == 4


@pytest.mark.parametrize("end", [1, 20, 75, 110])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(end: int) -> None:
    """Nothing that is known is run again, and the same wins: a run's time depends on how many there were alone."""
    players = settings(POINT, "cuda")

    def machine(kept: dict[RingSetting, list[Reading]]) -> Callable[[RingSetting], Reading]:
        def run(one: RingSetting) -> Reading:
            count = len(kept.setdefault(one, []))
            kept[one].append(Reading(random.Random(f"{one} {count}").random()))
            return kept[one][-1]

        return run

    whole, _ = halved(players, machine({}), lambda: 1.0)
    journal: dict[RingSetting, list[Reading]] = {}
    go = machine(journal)

    def dying(one: RingSetting) -> Reading:
        if sum(map(len, journal.values())) == end:
            raise KeyboardInterrupt
        return go(one)

    with pytest.raises(KeyboardInterrupt):
        halved(players, dying, lambda: 1.0)
    kept = {one: [*runs] for one, runs in journal.items()}
    again, complete = halved(players, go, lambda: 1.0, kept)
    assert complete and again == whole
    assert sum(map(len, journal.values())) == planned_runs(players)


def test_what_is_within_the_spread_of_the_default_is_not_chosen() -> None:
    noisy = readings(0.8, 0.9, 1.0, 1.1, 1.2)
    assert best_of({DEFAULT: noisy, CHUNKED: readings(*[0.95] * 5)}) == DEFAULT
    assert best_of({DEFAULT: noisy, CHUNKED: readings(*[0.7] * 5)}) == CHUNKED
    assert best_of({DEFAULT: readings(*[1.0] * 5), CHUNKED: readings(*[0.95] * 5)}) == CHUNKED
    # it was not in the last round
    assert best_of({DEFAULT: readings(*[1.0] * 5), CHUNKED: readings(*[0.1] * 3)}) == DEFAULT


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one rank."""
    monkeypatch.setattr(tune_ring, "of_rank_0", lambda value: value)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def alone(told: list[object], mine: object) -> None:
        told[:] = [mine]

    monkeypatch.setattr(dist, "all_gather_object", alone)


def test_runs_are_kept_and_repeated_while_throttled(lone: None, tmp_path: Path) -> None:
    clocks: list[dict[str, Any]] = [
        {"sm_mhz": 1200, "throttled": ("power cap",)}, {"sm_mhz": 1980, "throttled": ("idle",)},
        *[{"sm_mhz": 1200, "throttled": ("power cap",)}] * (1 + RETRIES),
    ]  # fmt: skip
    told, steps, pauses = iter(clocks), list[int](), list[float]()
    path = tmp_path / "journal"

    def clock(step: Callable[[], object]) -> float:
        step()
        return 0.5

    def runs(point: RingPoint = POINT) -> tune_ring.Runs:
        return tune_ring.Runs(
            point, {CHUNKED: lambda: steps.append(1)}, clock, lambda: next(told), lambda: 1.0,
            Journal(path, "digest"), pause=pauses.append,
        )  # fmt: skip

    going = runs()
    assert going.kept() == {}
    assert going(CHUNKED) == Reading(0.5, (), {"sm_mhz": 1980.0})
    assert pauses == [COOL_DOWN] and len(steps) == 3  # one that compiles, and two timed
    assert going(CHUNKED) == Reading(0.5, ("power cap",), {"sm_mhz": 1200.0})
    assert len(pauses) == 1 + RETRIES
    assert [one.throttled for one in runs().kept()[CHUNKED]] == [(), ("power cap",)]
    assert runs(POINT._replace(length=2048)).kept() == {}
    made_ = tune_ring.entry_of(POINT, CHUNKED, runs().kept()[CHUNKED], None)
    assert made_.clocks == {"sm_mhz": 1590.0, "throttled": "power cap"} and made_.baseline == made_.seconds == 0.5


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


def test_clocks_are_kept_and_tables_without_them_are_read() -> None:
    clocked = made(clocks={"sm_mhz": 1980.0, "throttled": ""})
    table = Table("NVIDIA H200", 90, (3, 7), (), (clocked.as_json(),))
    assert rings_of(table) == (clocked,)
    older = clocked.as_json()
    del older["clocks"]
    assert rings_of(replace(table, rings=(older,))) == (made(),)


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


def test_a_folder_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="config_dir is '/nowhere': there is no such folder"):
        ring_settings(POINT, H200, "/nowhere")


def test_a_section_of_another_kind_is_refused() -> None:
    text = {"schema": "ringattn tiles", "version": 1, "gpu": "NVIDIA H200", "arch": 90, "triton": "3.7", "entries": []}
    assert parse(json.dumps({**text, "rings": []})).rings == ()
    with pytest.raises(ValueError, match=r"rings is \{\}: it must be a list"):
        parse(json.dumps({**text, "rings": {}}))


# the command


def asked(*arguments: str) -> Any:
    return CliRunner().invoke(command.app, [*arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ring", "--wire", "fp4"], "--wire is fp4: it takes some of bf16, fp8"),
        (["--ring", "--value-dim", "64"], "--value-dim is 64: rings are tuned with values of --head-dim"),
        (["--ring", "--device", "tpu"], "--device is 'tpu': it takes cpu or cuda"),
        (["--ring", "--arch", "sm_80"], "--arch is sm_80: it is for tiles, which --ring does not search"),
        (["--ring", "--list", "--compile-only"], "--compile-only is True: it is for tiles"),
        (["--ring", "--workers", "2"], "--workers is 2: it is for tiles"),
        (["--list", "--world", "5"], "--world is 5: it is for rings; add --ring, or leave it out"),
        (["--list", "--device", "tpu"], "--device is tpu: it is for rings"),
        (["--wire", "nonsense"], "--wire is nonsense: it is for rings"),
        (["--ring", "--save-dir", "/dev/null/x"], "/dev/null/x is no folder to save in"),
        (["--ring", "--device", "cpu", "--seqlen", "8k,1g"], "--seqlen: 1,073,741,824 tokens on each of 2 ranks take"),
    ],
)
def test_bad_input_is_told_what_fits(
    arguments: list[str], told: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_command, "searched", lambda wish: pytest.fail("a search was started"))
    result = asked(*arguments)
    assert result.exit_code == 2 and told in " ".join(result.output.replace("│", " ").split())


def test_a_launcher_decides_how_many_ranks() -> None:
    place = Member(rank=0, world=4, local_rank=0, local_world=4)
    assert ring_command.ranks_of(place, None, "cpu") == ring_command.ranks_of(place, 4, "cpu") == 4
    with pytest.raises(typer.BadParameter, match="--world is 8: the launcher started 4 ranks; leave it out"):
        ring_command.ranks_of(place, 8, "cpu")
    with pytest.raises(ValueError, match="the launcher started 1 rank: a ring to tune takes at least 2"):
        ring_command.ranks_of(replace(place, world=1), None, "cpu")


def test_rings_are_listed_and_nothing_else_is_done(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_command, "searched", lambda wish: pytest.fail("a search was started"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder := tmp_path / "cache"))
    flags = "--ring --list --world 4 --device cpu --heads 8 --kv-heads 4 --wire fp8 --seqlen 1k,2k --json -"
    listed = asked(*flags.split())
    assert listed.exit_code == 0, listed.output
    told = json.loads(listed.output)
    assert [RingPoint(**point) for point in told["points"]] == [
        RingPoint(4, 8, 4, 128, "bf16", "bounded", tokens) for tokens in (1024, 2048)
    ]
    assert [(row["tokens"], row["chunks"], row["wire_dtype"]) for row in told["rows"]] == [
        (tokens, chunks, wire) for tokens in (1024, 2048) for wire in (None, "fp8") for chunks in (1, 2, 4)
    ]
    assert not folder.exists()
    assert "12 candidates for rings of 4 ranks on cpu" in asked(*flags.split()[:-2]).output


def test_rings_are_listed_on_rank_0_alone(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    listed = asked("--ring", "--list", "--device", "cpu")
    assert listed.exit_code == 0 and listed.output == ""


def test_two_processes_choose_as_one(tmp_path: Path) -> None:
    """Really: two processes over gloo, checked, timed in turns, one choice, in a table that is read back."""
    flags = "--heads 2 --kv-heads 2 --head-dim 16 --dtype fp32 --seqlen 64 --wire fp8 --budget 1 --device cpu --ring"
    report = tmp_path / "told.json"
    done = CliRunner().invoke(command.app, [*flags.split(), "--save-dir", str(tmp_path), "--json", str(report)])
    assert done.exit_code == 0, done.output
    assert "a step" in done.output and "autotune.shared_ring_settings looks it up" in done.output
    told = json.loads(report.read_text())
    assert len(told["rows"]) == 4 and all(row["runs"] >= 1 and not row["note"] for row in told["rows"][1:])
    path = next(tmp_path.glob("cpu_triton-*.json"))
    (kept,) = rings_of(read(path))
    assert [kept.as_json()] == told["rings"]
    assert kept.point == RingPoint(2, 2, 2, 16, "fp32", "bounded", 64) and kept.setting.transport == "process_group"
    found = ring_settings(kept.point, None, tmp_path)
    assert found == kept.setting


@pytest.mark.nightly
def test_an_interrupted_command_keeps_its_runs_and_goes_on(tmp_path: Path, alone: None) -> None:
    """Really: a process of its own, Ctrl-C in the middle of the search, and the same command again."""
    sizes = "--ring --device cpu --heads 2 --kv-heads 2 --head-dim 32 --dtype fp32 --seqlen 1k --wire fp8"
    flags = [*sizes.split(), "--save-dir", str(tmp_path)]
    going = subprocess.Popen(
        [sys.executable, "-m", "ringattn", "tune", *flags], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        ends = time.monotonic() + 120
        while len(lines_of(tmp_path)) < 5 and going.poll() is None and time.monotonic() < ends:
            time.sleep(0.02)
        os.killpg(going.pid, signal.SIGINT)
        out, _ = going.communicate(timeout=60)
    finally:
        if going.poll() is None:
            os.killpg(going.pid, signal.SIGKILL)
    assert going.returncode == 130, out
    assert "interrupted: what is known is kept, and the same command goes on from there" in " ".join(out.split())
    runs = len(lines_of(tmp_path))
    assert runs >= 5 and not [*tmp_path.glob("*.json")]
    again = asked(*flags, "--budget", "1")
    assert again.exit_code == 0, again.output
    assert f"{runs} runs were known from before" in again.output
    assert ("the same command goes on" in again.output) == bool(lines_of(tmp_path))  # once it is over none are needed


def lines_of(folder: Path) -> list[str]:
    """Of the journal."""
    return [line for path in folder.glob("rings_cpu_*.jsonl") for line in path.read_text().splitlines()]


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose ring is told to err: a setting says why it is left out, and one that cannot run does too."""
    x = torch.randn(4, 1, 8, 2, 16, dtype=torch.float64)
    exact = Exact((0,), (0,), tuple(x))
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
    found = tune_ring.wrong(AttentionConfig(16, 2), rings, torch.device("cpu"))
    assert {*found} == {CHUNKED, RingSetting("nccl")}
    assert found[CHUNKED].startswith("out errs by") and found[RingSetting("nccl")] == "RuntimeError: no such link"
