"""Tests that every micro-benchmark runs, and that its JSON has provenance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LEAST_BENCHMARKS = 12


@pytest.mark.nightly
def test_every_benchmark_runs_and_the_json_has_provenance(tmp_path: Path) -> None:
    file = tmp_path / "micro.json"
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--rootdir={tmp_path}", "-c", "/dev/null"]
    once = ["--benchmark-only", "--benchmark-min-rounds=1", "--benchmark-max-time=0", f"--benchmark-json={file}"]
    command = [sys.executable, "-m", "pytest", "--pyargs", "ringattn.bench.micro", *options, *once]
    # pytest-benchmark disables itself in children of a pytest-xdist worker.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(file.read_text())
    assert len(written["benchmarks"]) >= LEAST_BENCHMARKS
    assert all(benchmark["stats"]["median"] > 0 for benchmark in written["benchmarks"])
    assert written["provenance"]["versions"]["torch"] == torch.__version__
    assert "ringattn.bench.micro" in written["provenance"]["command"]
