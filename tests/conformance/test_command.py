"""``ringattn conformance``, its reproductions, and the pytest plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.result import Result
from ringattn.bench.report.command import write_report
from ringattn.conformance import command, merge, model, referee, reproduce
from ringattn.conformance.cases import Case
from ringattn.conformance.referee import RAISES, REFUSED, RIGHT, WRONG, Outcome, Referee

from ..support import bad_targets
from ..support.baselines import exact_with_sink
from .test_ours import attention_options

ROOT = Path(__file__).parents[2]
BAD = bad_targets.__name__


@pytest.mark.usefixtures("alone")
def test_the_command_writes_results_and_resumes(tmp_path: Path) -> None:
    arguments = ["conformance", f"{BAD}:changes_input", "--world", "1", "--only", "contiguous-1-float32-4/2-none"]
    command = [*arguments, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "more.json")]
    first = CliRunner().invoke(cli.app, command)
    assert first.exit_code == 1 and "it changed k" in first.output, first.output
    result = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert result["schema"] == "ringattn result" and {row["status"] for row in result["rows"]} == {WRONG}
    assert result["rows"] == json.loads((tmp_path / "more.json").read_text())["rows"]
    lines = (tmp_path / "out" / "journal.jsonl").read_text()
    again = CliRunner().invoke(cli.app, command)
    assert again.output == first.output and (tmp_path / "out" / "journal.jsonl").read_text() == lines
    assert not write_report(tmp_path / "out", tmp_path / "report.html")
    assert "it changed k" in (tmp_path / "report.html").read_text()
    other = CliRunner().invoke(cli.app, [*command, "--seed", "1"])
    assert "seed 1" in other.output and '"seed": 1' in (tmp_path / "out" / "journal.jsonl").read_text()[len(lines) :]


@pytest.mark.usefixtures("alone")
def test_refused_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arguments, text in (
        ([], "Name one of"), (["a", "--model", "b"], "Name one of"), (["no.such"], "be imported"),
        (["--merge", "a:b", "--only", "c"], "--only cannot be used with --merge"),
        (["a", "--world", "1,65"], "--world is 65: it must be at most 64"), (["a", "--world", "0"], "--world"),
        (["a", "--device", "cuda", "--world", "1,2"], "--world is 2: this machine has 1 GPUs"),
        (["a", "--device", "tpu"], "tpu"), (["a", "--out", __file__], "--out is"),
        (["--model", "a", "--minutes", "2"], "--minutes cannot be used with --model"),
        ([f"{BAD}:attend", "--world", "1", "--only", "nowhere"], "--only is 'nowhere'"),
    ):  # fmt: skip
        ran = CliRunner().invoke(cli.app, ["conformance", *arguments])
        assert ran.exit_code == 2 and text in ran.output


class ReadyReferee:
    """Stand-in for a referee with a list of verdicts."""

    def __init__(self, *outcomes: Outcome, run: int = 99) -> None:
        self.target, self.seed, self.device, self._outcomes, self._run = "a.ring", 5, "cpu", outcomes, run
        self.log = list[Any]()

    def describe(self) -> tuple[str, list[Case], dict[Case, str]]:
        return "2.0", [outcome.case for outcome in self._outcomes], {Case("prefix"): "it does not"}

    def outcomes(self, cases: list[Case], seconds: float) -> Iterator[Outcome]:
        self.log.append((cases, seconds))
        yield from [outcome for outcome in self._outcomes if outcome.case in cases][: self._run]

    def shards(self, case: Case) -> list[list[int]]:
        return [[0], [1]] if case.dtype == "float32" else []


OUTCOMES = [
    Outcome(Case(), RIGHT, error=0.5), Outcome(Case("window"), WRONG, "dk is 2 dk (4 pairs)", "dk of rank 0", inf),
    Outcome(Case("full"), WRONG, "dk is 2 dk (7 pairs)", "dk of rank 1", 3.0, "told", "noted"),
    Outcome(Case(dtype="float16"), RAISES, message="KeyError: 'a'"), Outcome(Case(world=1), REFUSED, message="rank"),
    Outcome(Case(scores="dropout"), WRONG, "dropout"), Outcome(Case(dtype="bfloat16"), RAISES, message="KeyError: 'b'"),
]  # fmt: skip


def judge_ready(judging: ReadyReferee, seconds: float, only: str, out: Path | None) -> tuple[Result, str]:
    return command.judge_cases(cast(Referee, judging), seconds, only, out)


def test_a_run_reports_every_verdict_and_continues_its_journal(tmp_path: Path) -> None:
    first = ReadyReferee(*OUTCOMES, run=2)
    result, _ = judge_ready(first, 60.0, "", tmp_path)
    assert first.log == [([outcome.case for outcome in OUTCOMES], 60.0)]
    assert result.notes[:2] == ["a.ring: 2.0, seed 5, cpu", "5 cases were not run: --minutes is over"]
    more = ReadyReferee(*OUTCOMES)
    result, text = judge_ready(more, 7.0, "", tmp_path)
    assert more.log == [([outcome.case for outcome in OUTCOMES[2:]], 7.0)]
    refused = Outcome(Case("prefix"), REFUSED, message="it does not")
    expected = [replace(outcome, error=None if outcome.error == inf else outcome.error) for outcome in OUTCOMES]
    assert result.rows == [outcome.as_row() for outcome in [*expected, refused]]
    assert result.failed == [expected[at].sentence() for at in (1, 3, 5)], "one of each kind"
    (written,) = tmp_path.glob("reproductions/*.py")
    assert f"reproduction: {written}" in result.notes and "2.0: window-" in written.read_text()
    assert result.notes[-1] == "1 right, 3 wrong, 2 raises, 1 refused" and "dk of rank 0" in result.failed[0]
    lines = {name: counts for name, *counts in (line.rsplit(maxsplit=4) for line in text.splitlines())}
    assert text.splitlines()[0].split() == ["right", "wrong", "refused", "raises"]
    table = {line[:28].strip(): line[28:] for line in text.splitlines() if len(line) == 64}
    assert lines and table["world 1"].split() == ["1"] and table["all"].split() == ["1", "3", "2", "2"]
    assert table["mask causal"].split() == ["1", "1", "1", "2"] and table["mask full"].strip() == "1"
    assert table["mask full"].index("1") == 17 and table["mask prefix"].index("1") == 26
    for judging, only, failed in ((ReadyReferee(*OUTCOMES, run=0), "", ["no case was run"]), (more, "world", None)):
        if failed is None:
            with pytest.raises(typer.BadParameter, match="--only is 'world'"):
                judge_ready(judging, 1.0, only, None)
        else:
            assert judge_ready(judging, 1.0, only, None)[0].failed == failed
    part, _ = judge_ready(ReadyReferee(*OUTCOMES), 1.0, "-1-float32", None)
    assert [row["world"] for row in part.rows] == [1, 2] and not part.failed


@pytest.mark.usefixtures("alone")
def test_the_options_reach_the_referee(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = list[Any]()

    class Opened(ReadyReferee):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__()
            calls.append((*arguments, named))

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

    def judged(kind: str) -> Any:
        def judge(referee: Any, *how: Any) -> Any:
            calls.append((kind, *how))
            result = Result(kind, {"x": ""}, [{"x": 1}])
            return (result, "text") if how else result

        return judge

    monkeypatch.setattr(referee, "Referee", Opened)
    monkeypatch.setattr(merge, "judge_merge", judged("merge"))
    monkeypatch.setattr(model, "judge_model", judged("model"))
    monkeypatch.setattr(command, "judge_cases", judged("cases"))
    some = ["--seed", "3", "--deadline", "7", "--device", "cpu"]
    named = {"worlds": [64, 1], "seed": 3, "deadline": 7.0, "device": "cpu"}
    folder = tmp_path / "new" / "out"
    for arguments, opened, judged_call in (
        (["a", "--world", "64,1", "--minutes", "2", "--only", "x", "--out", str(folder)], ("a", named),
         ("cases", 120.0, "x", folder)),
        (["--model", "b", "--world", "64,1"], ("b", named), ("model",)),
        (["--merge", "c"], ("c", named | {"worlds": [1, 2, 3, 4, 5, 6]}), ("merge",)),
        (["a"], ("a", named | {"worlds": [1, 2, 3, 4, 5, 6]}), ("cases", 600.0, "", None)),
    ):  # fmt: skip
        calls.clear()
        ran = CliRunner().invoke(cli.app, ["conformance", *arguments, *some])
        assert ran.exit_code == 0, ran.output
        assert calls == [opened, judged_call, "closed"]
    ran = CliRunner().invoke(cli.app, ["conformance", "a"], env={"RANK": "1", "WORLD_SIZE": "2"})
    assert ran.output == "" and len(calls) == 3, "rank 0 alone judges"
    assert json.loads((folder / "conformance.json").read_text())["provenance"]["versions"]


CASES = [
    Case("padding", "ragged", "softcap", gradients="out and lse"), Case("window", scores="sink", heads="6/1"),
    Case("prefix", scores="alibi", layout="zigzag"), Case("two-sided window", scores="scale", dtype="bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reproduction_has_the_same_inputs_and_the_truth_of_the_reference(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    positions = [[*range(case.tokens // 2)], [*range(case.tokens // 2, case.tokens)]]
    targets = {"padding": ("lucidrains", "attend"), "window": (f"{BAD}:prints", "prints"), "prefix": (BAD, "attend")}
    target, function = targets.get(case.mask, ("zhuzilin", "_fixed_attend"))
    path = reproduce.write_reproduction(tmp_path, target, 'a """title""" \\N', case, positions)
    scope: dict[str, Any] = {"__name__": "a copy"}
    exec(compile(path.read_text(), path.name, "exec"), scope)
    assert scope["__doc__"].startswith("a '''title''' /N\n")
    assert f"draw_whole(call, {case.input_seed})" in path.read_text() and scope["POSITIONS"] == positions
    call, ours = SimpleNamespace(**scope["CALL"]), case.inputs()
    whole = scope["draw_whole"](call, case.input_seed)
    assert whole.keys() == ours.keys() and all(torch.equal(whole[name], ours[name]) for name in whole)
    truth = scope["attend_plainly"](whole, call)
    q, k, v, dout, dlse = (ours[name] for name in ("q", "k", "v", "dout", "dlse"))
    exact, dsink = exact_with_sink(q, k, v, dout, dlse * call.needs_lse, call.sink, **attention_options(call))
    for name, x in (*exact._asdict().items(), *([("dsink", dsink)] if dsink is not None else [])):
        torch.testing.assert_close(truth[name], x)
    # Rows that see no key have an infinite lse, which is right.
    functions: Any = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for rank, at in enumerate(map(torch.tensor, positions)):
        wrong = {name: truth[name].index_select(scope["token_dim"](name), at) + 1 for name in exact._asdict()}
        scope |= {"dist": Mock(), "run_target": lambda attend, *_, wrong=wrong: functions.append(attend) or (wrong, [])}
        scope["run"](rank, "store")
    assert capsys.readouterr().out.count(" is off by 1, where the largest value is ") == 2 * len(wrong)
    assert [called.__name__ for called in functions] == [function] * 2


@pytest.mark.nightly
def test_a_reproduction_needs_only_torch_and_the_target(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def attend(q, k, v, call):\n    return q * 0 + k[:, :, :1]\n")
    path = reproduce.write_reproduction(tmp_path, "mine", "title", Case(), [[*range(16)], [*range(16, 32)]])
    assert "ringattn" not in path.read_text()
    ran = subprocess.run([sys.executable, path.name], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.count("is off by") == 8, ran.stdout + ran.stderr


@pytest.mark.nightly
def test_the_plugin_runs_every_case(tmp_path: Path) -> None:
    plugin = ["-p", "ringattn.conformance.plugin", "-p", "no:cacheprovider", "--pyargs", "ringattn.conformance"]
    options = ["--target", f"{BAD}:refuses", "--target-world", "1", "--junitxml", "out.xml", "-k", "contiguous"]
    command = [sys.executable, "-m", "pytest", *plugin, *options]
    paths = {"PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    ran = subprocess.run(command, cwd=tmp_path, env={**paths, "PATH": ""}, capture_output=True, text=True)
    assert f"{BAD}:refuses, seed 0" in ran.stdout
    xml = (tmp_path / "out.xml").read_text()
    assert "window_size is not supported" in xml and "window-none-plain-contiguous-1-float32-4/2-out" in xml
