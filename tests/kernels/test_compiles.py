"""Which tests that compile kernels run with every change: those whose sources are not what they passed on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ..support import compiles


class Item:
    """As pytest has one."""

    def __init__(self, name: str, *sources: str) -> None:
        self.path, self.name, self.user_properties = Path(__file__), name, list[tuple[str, str]]()
        self.marks = {"compiles": pytest.mark.compiles(*sources).mark} if sources else {}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks[marker.name] = marker.mark


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        (None, set()),
        ("kernels/ops.py", set()),  # host code that neither imports
        ("kernels/device/parts.py", {"dq", "launches"}),  # which backward.py imports
        ("kernels/tables.py", {"launches"}),
        ("autotune/sass.py", {"dq"}),
    ],
)
def test_what_compiles_runs_where_its_sources_changed(
    changed: str | None, runs: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("kernels", "autotune"):
        shutil.copytree(compiles.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    shutil.copy(__file__, tmp_path / "tests" / "kernels")

    def tests() -> dict[str, Item]:
        sources = {"dq": ["90:bf16:128:middle:dq"], "launches": ["kernels/experimental/single_pass.py"], "none": []}
        return {name: Item(name, *given) for name, given in sources.items()}

    compiles.settle((before := tests()).values(), nightly=False, root=tmp_path)
    monkeypatch.setattr(
        compiles,
        "recorded",
        lambda: {compiles.name_of(one): made for one in before.values() for _, made in one.user_properties},
    )
    if changed is not None:
        with (tmp_path / changed).open("a") as file:
            file.write("# changed\n")
    compiles.settle((after := tests()).values(), nightly=False, root=tmp_path)
    assert {name for name, one in after.items() if "nightly" not in one.marks} == runs | {"none"}
    compiles.settle((after := tests()).values(), nightly=True, root=tmp_path)
    assert {name for name, one in after.items() if "nightly" in one.marks} == {"dq", "launches"}
