"""Test of the prediction against real processes: with traced launch times it must reproduce the step time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringattn.bench.cli import app
from ringattn.bench.predict.links import LinkSpeed
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.program import COMPUTE, PASSES, Op, Program, record_program
from ringattn.bench.predict.simulator import run_programs
from ringattn.bench.predict.speed import ADD, POINT
from ringattn.bench.timeline.events import Timeline, from_chrome
from ringattn.kernels.json_files import read_object

WORLD, TOKENS, HEADS, HEAD_DIM = 3, 1024, 4, 64
LINK = LinkSpeed(1e9, 1e-3)  # gloo on one machine: short beside a hop's compute
ALLOWED = 0.1


def recorded(folder: Path, layout: str) -> Timeline:
    flags = {
        "device": "cpu", "world": WORLD, "seqlen": WORLD * TOKENS, "heads": HEADS, "head-dim": HEAD_DIM,
        "layout": layout, "repeats": 1, "trace": folder / "t.json",
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    ended = CliRunner().invoke(app, ["bench", "timeline", *words])
    assert ended.exit_code == 0, ended.output
    return from_chrome(read_object(folder / "t.json"))


def after_one_more(program: Program) -> Program:
    """Return the program with one more launch before everything else."""
    later = (replace(op, after=(0, *(number + 1 for number in op.after))) for op in program.ops)
    return replace(program, ops=(Op(COMPUTE, "forward", 0, 0, ()), *later))


@pytest.mark.nightly
@pytest.mark.idle
@pytest.mark.usefixtures("alone")
def test_predicted_step_matches_the_measured_one(tmp_path: Path) -> None:
    # Launch times come from the trace, so the test checks only who waits for what. The host itself computes. With
    # contiguous shards the ranks compute different hops, so one rank's launches decide when another's begin.
    measured = recorded(tmp_path, "contiguous")
    call = PredictedCall(TOKENS, WORLD, "contiguous", heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    spans = [event for event in measured.events if event.lane == "compute"]
    forward_ends = [0.0] * WORLD  # when each rank ends its forward and begins its backward
    for phase in PASSES:
        programs, costs = [], []
        for plan, begin in zip(call.plans(), forward_ends, strict=True):
            program = record_program(call, plan, phase, on_host=True)
            launches = [op.hop if op.stream == COMPUTE and op.what not in (ADD, POINT) else None for op in program.ops]
            spent: Counter[int | None] = Counter()
            for span in spans:
                if (span.rank, span.phase) == (plan.rank, phase):
                    spent[span.hop] += span.seconds  # type: ignore[assignment]
            assert {*launches} - {None} == {*spent}
            costs.append([begin, *(spent[hop] / launches.count(hop) for hop in launches)])
            programs.append(after_one_more(program))
        forward_ends = [
            track.seconds for track in run_programs(programs, costs, lambda a, b, nbytes: LINK.seconds(nbytes))
        ]
        ends = [max(each.end for each in spans if (each.rank, each.phase) == (rank, phase)) for rank in range(WORLD)]
        assert max(forward_ends) == pytest.approx(max(ends) - min(each.begin for each in spans), rel=ALLOWED)
