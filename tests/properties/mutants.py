"""Mutate layouts, masks, schedules and bounds with mutmut, and count the mutants that the tests miss.

Run ``python tests/properties/mutants.py`` from the root; options go to ``mutmut run``. mutmut names a mutant by its
file's path, imports it by module name, and runs the tests in a copy of the folder. In this repository the root is the
package, so path and module name would differ, and the tests would import the installed package. Therefore this script
copies the package to ``build/mutants/ringattn`` and runs mutmut there.

The exit code is 1 if fewer than 90% are caught, or if tests/properties/mutants.md has no reason for a survivor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "mutants"
REASONS = Path(__file__).with_name("mutants.md")
CONFIG = """
[tool.mutmut]
source_paths = ["ringattn/"]
only_mutate = [
    "ringattn/kernels/bounds.py",
    "ringattn/ring/schedule/visibility.py",
    "ringattn/ring/schedule/layout.py",
    "ringattn/ring/schedule/mask.py",
    "ringattn/ring/schedule/schedule.py",
    "ringattn/ring/schedule/formatting.py",
]
pytest_add_cli_args_test_selection = [
    "tests/kernels/test_bounds.py",
    "tests/kernels/test_checks.py::test_bad_forward_arguments_are_refused",
    "tests/kernels/test_checks.py::test_bad_q_k_v_are_refused_by_every_entry",
    "tests/ring/test_visibility.py",
    "tests/ring/test_args.py::test_refusals",
    "tests/ring/test_layout.py",
    "tests/ring/test_mask.py",
    "tests/ring/test_schedule.py",
    "tests/ring/test_formatting.py",
    "tests/kernels/test_tiles.py::test_every_small_range",
]
use_git_change_detection = false

[tool.pytest.ini_options]
pythonpath = ["."]
consider_namespace_packages = true
"""
# Skip shrinking: one failing example is enough, and shrinking would take most of the time.
PROFILE = """
from hypothesis import Phase
settings.register_profile("default", settings.get_profile("default"), phases=(Phase.explicit, Phase.generate))
"""
LEAST = 0.9
CAUGHT = ("killed", "timeout", "suspicious", "segfault", "caught_by_type_check")


def stage() -> None:
    """Copy the package to the layout that mutmut expects."""
    shutil.rmtree(STAGE, ignore_errors=True)
    package = STAGE / "ringattn"
    package.mkdir(parents=True)
    leave = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "tests", STAGE / "tests", ignore=leave)
    for path in ROOT.glob("*/__init__.py"):
        shutil.copytree(path.parent, package / path.parent.name, ignore=leave)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, package)
    with (STAGE / "tests" / "conftest.py").open("a") as conftest:
        conftest.write(PROFILE)
    (STAGE / "pyproject.toml").write_text(CONFIG)


def mutmut(*arguments: str) -> str:
    """Run one mutmut command in the staged folder and return its output."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    # One thread, because the workers are forks and a parent's threads do not survive a fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = None if arguments[0] == "run" else subprocess.PIPE
    result = subprocess.run(command, cwd=STAGE, env=environment, stdout=shown, text=True, check=True)
    return result.stdout or ""


def survivors() -> dict[str, str]:
    """Return name and change of every mutant that no test caught."""
    names = re.findall(r"^\s*(\S+): (?:survived|no tests)$", mutmut("results"), re.MULTILINE)
    return {name: changed(mutmut("show", name)) for name in names}


def changed(diff: str) -> str:
    """Return the lines that a mutant adds."""
    lines = [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return " ".join(lines)


def main() -> int:
    stage()
    mutmut("run", *sys.argv[1:])
    mutmut("export-cicd-stats")
    counts = json.loads((STAGE / "mutants" / "mutmut-cicd-stats.json").read_text())
    caught, total = sum(counts.get(kind, 0) for kind in CAUGHT), counts["total"]
    survived, known = survivors(), re.findall("^ {4}(.+)$", REASONS.read_text(), re.MULTILINE)
    unknown = {name: line for name, line in survived.items() if line not in known}
    gone = [line for line in known if line not in survived.values()] if caught + len(survived) == total else []
    print(f"\n{caught} of {total} mutants caught: {caught / total:.1%}, at least {LEAST:.0%} required")
    for name, line in unknown.items():
        print(f"survived, but has no reason in {REASONS.relative_to(ROOT)}: {name}\n    {line}")
    for line in gone:
        print(f"caught or gone, but listed in {REASONS.relative_to(ROOT)}:\n    {line}")
    return int(caught < LEAST * total or bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
