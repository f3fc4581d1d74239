"""Selection of the tests that compile kernels: they run when their sources change, and nightly.

Such a test is marked ``compiles(SOURCE, …)``. A source is a variant by its name in ``ringattn inspect``, or a file or
folder by its path from the root. ``compiles.txt`` records the digest of the sources with which each test last passed.
A test whose digest is unchanged is nightly.

``python -m tests.support.compiles`` from the root runs all of these tests, or those of the given files. It records the
digests of the tests that pass.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("compiles.txt")
PROPERTY = "compiles"  # key of the digest among the user properties of a test report


def mark_nightly(items: Iterable[Any], *, nightly: bool) -> None:
    """Mark tests nightly that passed on the current sources; with ``nightly``, mark all that compile."""
    passed = read_record()
    for item in items:
        marker = item.get_closest_marker("compiles")
        if marker is None or item.get_closest_marker("nightly"):
            continue
        current = source_digest_of_test(item_key(item), marker.args)
        item.user_properties.append((PROPERTY, current))
        if nightly or passed.get(item_key(item)) == current:
            item.add_marker(pytest.mark.nightly)


def item_key(item: Any) -> str:
    return f"{item.path.name}::{item.name}"


def read_record() -> dict[str, str]:
    """Return the digest of the sources on which each test last passed, by test name."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {name: sha for sha, _, name in (line.partition("  ") for line in lines)}


def source_digest_of_test(name: str, sources: Iterable[str]) -> str:
    """Return a digest of the test's name, Triton's version and all sources that the test compiles."""
    parts = [version("triton"), name]
    files = {*(ROOT / "tests").rglob(name.partition("::")[0])}
    for source in sources:
        if ":" in source:
            files |= with_imports(ROOT / "autotune" / "gate.py")
            for text, file in variants(source):
                parts.append(text)
                files |= with_imports(ROOT / file)
        else:
            files |= with_imports(ROOT / source)
    texts = (file.read_text() for file in sorted(files))
    return sha256("\0".join([*parts, *texts]).encode()).hexdigest()[:32]


def variants(name: str) -> Iterator[tuple[str, str]]:
    """Yield the launch description and the kernel file of every variant that ``name`` selects."""
    from ringattn.autotune.compile import parse_variants

    for variant in parse_variants(name):
        launch = variant.launch
        kernel = launch.kernel.fn.__module__.partition(".")[2]
        yield f"{variant} {launch.signature}", kernel.replace(".", "/") + ".py"


@cache
def with_imports(path: Path) -> frozenset[Path]:
    """Return a file with its imports from the same top-level folder, or the files of a folder."""
    if path.is_dir():
        return frozenset(file for file in path.iterdir() if file.is_file())
    top = ROOT / path.relative_to(ROOT).parts[0]
    files: set[Path] = set()
    waiting = [path]
    while waiting:
        if (file := waiting.pop()) not in files:
            files.add(file)
            imports = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
            for node in imports:
                if node.level:
                    base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                    modules = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
                    waiting += [other for other in modules if other.exists() and other.is_relative_to(top)]
    return frozenset(files)


class CompileRecorder:
    """Pytest plugin that runs only the tests that compile and records the digests of those that pass."""

    def __init__(self) -> None:
        self.chosen, self.passed = set[str](), dict[str, str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if PROPERTY in dict(item.user_properties)]
        self.chosen = {item_key(item) for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed[report.nodeid.rpartition("/")[2]] = str(dict(report.user_properties)[PROPERTY])


def main(arguments: list[str]) -> int:
    recorder = CompileRecorder()
    code = pytest.main(["-m", "", "-n", "0", "--timeout", "3600", *arguments], plugins=[recorder])
    unchanged = {name: sha for name, sha in read_record().items() if arguments and name not in recorder.chosen}
    RECORD.write_text("".join(f"{sha}  {name}\n" for name, sha in sorted((unchanged | recorder.passed).items())))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
