"""The checks of the predictor against what is measured: virtual ranks that take turns, and ranks that do not come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn.bench.common.launching import started
from ringattn.bench.common.timing import Samples, Step, Team
from ringattn.bench.predict import calibrate, check, turns
from ringattn.bench.predict.call import NAMED, Call
from ringattn.bench.predict.links import Link
from ringattn.bench.predict.rows import MASKS, Row, Shape, cases
from ringattn.bench.predict.turns import one_core, predicted_turns
from ringattn.ring import Mask

from ..support import predict_cases
from ..support.predict_cases import Steady

CPU = torch.device("cpu")
TINY = Shape(2, 2, 2, 16)
NOWHERE = Link(1e30, 0.0)
ROWS = list(cases((256,), NAMED, MASKS))


def test_turns_are_the_sum_of_all_launches() -> None:
    """Four ranks of four hops, forward and backward; a causal ring of contiguous shards has ten of sixteen."""
    call = Call(16, 4, "zigzag", Mask(), 4, 4, 8)
    assert predicted_turns(call, Steady(), NOWHERE) == pytest.approx(4 * 4 * 2)
    causal = replace(call, layout="contiguous", mask=Mask(causal=True))
    launched = predicted_turns(causal, Steady(), NOWHERE)
    assert 10 * 2 <= launched < 16 * 2  # ranks without a key still write their state


def test_copies_take_what_launches_lose_beside_them() -> None:
    """Forward three shards arrive at each of four ranks; backward as many, and three or more of sums."""
    call, device = Call(16, 4, "striped", Mask(), 4, 4, 8), Steady()
    alone = predicted_turns(call, device, Link(1e30, 1.0))
    device.beside = 0.5
    with_copies = predicted_turns(call, device, Link(1e30, 1.0))
    groups = 2 * (with_copies - alone)
    assert groups == round(groups) >= 4 * (3 + 3 + 3)


def test_virtual_ranks_are_measured_and_predicted() -> None:
    """A stand-in for one GPU: threads on one core."""
    found = list(turns.rows_of(Shape(2, 2, 1, 16, "float32"), ROWS, CPU, 256, 2))
    assert {(row.layout, row.mask) for row in found} == {(layout, mask) for layout, mask, _ in ROWS}
    assert len(found) == len(NAMED) * len(MASKS) - 1  # stripes are no runs of blocks
    assert all(row.measured > 0 and row.predicted > 0 for row in found)


@pytest.mark.parametrize("timer", ["", "clock"])
def test_virtual_ranks_are_timed_by_what_was_asked_for(timer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row; what it is predicted by is not."""
    used: list[str] = []

    def timed(steps: dict[str, Step], clock: SimpleNamespace, repeats: int) -> dict[str, Samples]:
        used.append(clock.timer)
        return dict.fromkeys(steps, Samples((1.0,)))

    monkeypatch.setattr(turns, "Clock", lambda device, timer="": SimpleNamespace(timer=timer))
    monkeypatch.setattr(turns, "interleaved", timed)
    monkeypatch.setattr(turns, "calibrated_here", lambda *given: (Steady(), NOWHERE))
    tiny = list(turns.rows_of(Shape(2, 2, 1, 16, "float32"), [*cases((64,), ("zigzag",), MASKS)], CPU, 64, 2, timer))
    assert used == [timer] * len(tiny) and len(tiny) > 1


@pytest.mark.parametrize(("of_round", "of_step", "rounds"), [(2.0, 1.0, 1 + 5), (0.1, 5.0, 1 + 1 + 4 * 4)])
def test_short_pieces_are_measured_more_often_beside_long_rings(
    of_round: float, of_step: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a clock goes on by what runs alone."""
    now, done = [0.0], []

    def runs(name: str, seconds: float) -> None:
        done.append(name)
        now[0] += seconds

    def clock(step: Step) -> float:
        before = now[0]
        step()
        return now[0] - before

    monkeypatch.setattr(calibrate, "Named", lambda deadline: Team())
    monkeypatch.setattr(calibrate, "Clock", lambda device, team: clock)
    found = calibrate.Rounds(64, 2, 1, 8, "float32", 1.0)
    monkeypatch.setattr(found, "_round", lambda: runs("round", of_round))
    (samples,) = found.beside([lambda: runs("step", of_step)], 5)
    assert samples.seconds == pytest.approx((of_step,) * 5)
    assert (done.count("round"), done.count("step")) == (rounds, 6)
    assert done[:4] == ["round", "step"] * 2 and done[-1] == "step"


def test_one_core_is_given_back() -> None:
    before = os.sched_getaffinity(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("predicted", "right"), [(1.14, True), (1.16, False), (0.86, True), (0.84, False)])
def test_a_row_is_right_within_a_tenth_and_its_spread(predicted: float, right: bool) -> None:
    assert Row("zigzag", "full", 4096, 1.0, 0.05, predicted).is_right is right


def test_the_command_tells_rows_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(shape: Shape, wanted: Any, device: torch.device, calibrate: int, repeats: int) -> Any:
        assert (shape.world, device, calibrate, repeats) == (3, CPU, 2048, 1)
        return (Row(a, b, c, 1.0, 0.0, 1.0 if a == "zigzag" else 2.0) for a, b, c in wanted)

    monkeypatch.setattr(check, "rows_of", measured)
    target = tmp_path / "check.json"
    arguments = ["--local-world", "3", "--device", "cpu", "--calibrate", "2k", "--repeats", "1", "--json", str(target)]
    runner = CliRunner()
    found = runner.invoke(check.app, [*arguments, "--seqlen", "4k,8k"])
    assert found.exit_code == 1
    assert "12 of 34 within 10%" in found.output
    assert len(json.loads(target.read_text())["rows"]) == 34
    assert runner.invoke(check.app, [*arguments, "--layout", "zigzag"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layout", "spiral"], "--layout has 'spiral'"),
        (["--mask", "none"], "--mask is 'none'"),
        (["--device", "cpu"], "--device is of --local-world"),
    ],
)
def test_bad_input_is_named(arguments: list[str], told: str) -> None:
    found = CliRunner().invoke(check.app, arguments, env={"COLUMNS": "1000", "TERM": "dumb"})
    assert found.exit_code == 2 and told in " ".join(found.output.replace("│", " ").split())


@pytest.mark.nightly
def test_a_process_that_hangs_is_ended_with_its_stack(tmp_path: Path) -> None:
    """In a process of its own, which sleeps for longer than it may."""
    code = (
        "import time\nfrom ringattn.bench.predict.team import ends_within\n"
        "def stuck():\n    time.sleep(600)\nwith ends_within(0.2):\n    stuck()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1 and "in stuck" in found.stderr


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (predict_cases.rank_one_raises, ["rank 1 has had enough"]),
        pytest.param(predict_cases.rank_one_dies, ["exitcode  : 9"], marks=pytest.mark.nightly),
        pytest.param(
            predict_cases.rank_one_hangs, ["rank      : 0", "Ranks 1 failed to pass"], marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rank_that_does_not_come_ends_it(entry: Any, told: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    rows = [("zigzag", "causal", 256)]
    with pytest.raises(typer.Exit) as ended:
        started(2, entry, TINY, rows, Link(1e9, 0.0), 64, 1, 8.0)
    assert ended.value.exit_code == 1
    errors = capfd.readouterr().err
    assert all(one in errors for one in told)
