"""The mutants of the waits: what is changed, and a sample of them, all caught."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from .mutations import mutations

ROOT = Path(__file__).parents[2]
SOURCE = """
def post(self, sends, after):
    self.lane.follow(after)
    with torch.cuda.stream(self.stream):
        copy(sends)
    if self.open and slot != 2:
        self.slots.busy(slot, fence)
    return self.lane.point(keep=[x for x in sends])
"""
CHANGED = [
    "self.lane.follow(after)  ->  pass",
    "with torch.cuda.stream(self.stream):  ->  if True:",
    "with torch.cuda.stream(self.stream):  ->  with torch.cuda.stream(torch.cuda.current_stream(self._device)):",
    "copy(sends)  ->  pass",
    "if self.open and slot != 2:  ->  if True:",
    "if self.open and slot != 2:  ->  if False:",
    "if self.open and slot != 2:  ->  if self.open or slot != 2:",
    "if self.open and slot != 2:  ->  if self.open and slot == 2:",
    "if self.open and slot != 2:  ->  if self.open and slot != 3:",
    "self.slots.busy(slot, fence)  ->  pass",
    "self.slots.busy(slot, fence)  ->  self.slots.busy(slot + 1, fence)",
    "return self.lane.point(keep=[x for x in sends])  ->  return self.lane.point(keep=())",
]


def test_what_is_changed() -> None:
    """One thing at a time, and it is as it was when the next one comes."""
    tree = ast.parse(SOURCE)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert sorted(text for _, _, text in mutations(function)) == sorted(CHANGED)
    assert ast.unparse(tree).strip() == ast.unparse(ast.parse(SOURCE))


@pytest.mark.nightly
def test_a_sample_is_caught() -> None:
    """All of them: ``tox -e mutants``. A mutant that hangs is caught by its time limit, which takes long."""
    command = [sys.executable, "-m", "tests.properties.wait_mutants", "--sample", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
