"""``ringattn conformance``, its reproductions, and the pytest plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.report.command import write_report
from ringattn.conformance import reproduce
from ringattn.conformance.cases import Case
from ringattn.conformance.referee import WRONG

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
    assert "seed 1" in other.output and len((tmp_path / "out" / "journal.jsonl").read_text()) > len(lines)


@pytest.mark.usefixtures("alone")
def test_refused_arguments() -> None:
    for arguments, text in (
        ([], "Name one of"), (["a", "--model", "b"], "Name one of"), (["no.such"], "be imported"),
        (["--merge", "a:b", "--only", "c"], "--only cannot be used with --merge"),
        ([f"{BAD}:attend", "--world", "1", "--only", "nowhere"], "--only is 'nowhere'"),
    ):  # fmt: skip
        ran = CliRunner().invoke(cli.app, ["conformance", *arguments])
        assert ran.exit_code == 2 and text in ran.output


CASES = [
    Case("window", "ragged", "softcap", gradients="out and lse"), Case("padding", scores="sink", heads="6/1"),
    Case("prefix", scores="alibi", layout="zigzag"), Case("two-sided window", scores="scale", dtype="bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reproduction_has_the_same_inputs_and_the_truth_of_the_reference(case: Case, tmp_path: Path) -> None:
    positions = [[*range(case.tokens // 2)], [*range(case.tokens // 2, case.tokens)]]
    target = "lucidrains" if case.dtype == "float32" else "zhuzilin"  # whose adapter uses another file
    path = reproduce.write_reproduction(tmp_path, target, 'a "title"', case, positions)
    scope: dict[str, Any] = {"__name__": "a copy"}
    exec(compile(path.read_text(), path.name, "exec"), scope)
    call, ours = SimpleNamespace(**scope["CALL"]), case.inputs()
    whole = scope["draw_whole"](call, case.input_seed)
    assert whole.keys() == ours.keys() and all(torch.equal(whole[name], ours[name]) for name in whole)
    truth = scope["attend_plainly"](whole, call)
    q, k, v, dout, dlse = (ours[name] for name in ("q", "k", "v", "dout", "dlse"))
    exact, dsink = exact_with_sink(q, k, v, dout, dlse * call.needs_lse, call.sink, **attention_options(call))
    for name, x in (*exact._asdict().items(), *([("dsink", dsink)] if dsink is not None else [])):
        torch.testing.assert_close(truth[name], x)


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
