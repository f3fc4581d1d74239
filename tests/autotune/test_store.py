"""Tests of the files of tuning: the journal of compiled results, and the tables."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ringattn.autotune.candidates import CompileResult
from ringattn.autotune.store import Journal, merge_entries, private_folder, save
from ringattn.kernels import Tile, tables
from ringattn.kernels.json_files import MAX_FILE_BYTES
from ringattn.kernels.tables import RefusedTable, load_tuned_tiles, read_table

from ..support.tile_tables import H200, POINT, TILE, entry, estimate, folders
from ..support.tune_cases import BASELINE

__all__ = ["folders"]

Folders = tuple[Path, Path]


def test_the_journal_is_reused_for_the_same_kernels(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "digest")
    assert journal.get("a", dict) is None
    for number in range(3):
        journal.put("a", {"n": number})
    for opened in (journal, Journal(tmp_path / "journal", "digest")):
        assert opened.get("a", dict) == {"n": 2}
    assert Journal(tmp_path / "journal", "other kernels").get("a", dict) is None


def test_a_value_that_is_not_json_is_not_stored(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "digest")
    with pytest.raises(ValueError, match="JSON"):
        journal.put("a", {"n": float("nan")})
    assert not journal.path.exists() and journal.get("a", dict) is None


def test_a_truncated_journal_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for number in range(2):
        Journal(path, "digest").put("a", {"n": number})
    path.write_bytes(path.read_bytes()[:-10])
    journal = Journal(path, "digest")
    assert journal.get("a", dict) == {"n": 0}
    journal.put("b", {"n": 2})
    again = Journal(path, "digest")
    assert (again.get("a", dict), again.get("b", dict)) == ({"n": 0}, {"n": 2})


def line_of(value: str, key: str = '"a"', digest: str = '"digest"', more: str = "") -> str:
    return f'{{"digest": {digest}, "key": {key}, "value": {value}{more}}}'


@pytest.mark.parametrize("line", [
    "{", "[]", "null", "[" * 100_000, "\xff\x00", line_of("3"), line_of("[]"), line_of("{}", key="1"),
    line_of('{"n": NaN}'), line_of('{"n": 3}', more=', "m": 3'), line_of('{"n": 3}', digest="1"),
    line_of('{"n": ' + "[" * 40 + "]" * 40 + "}"), line_of('{"n": "\\ud800"}'),
])  # fmt: skip
def test_invalid_journal_lines_are_skipped(line: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text(line + "\n")
    assert Journal(path, "digest").get("a", dict) is None
    Journal(path, "digest").put("a", {"n": 1})
    assert Journal(path, "digest").get("a", dict) == {"n": 1}


@pytest.mark.parametrize("value", [
    {},
    {"problems": "abc"},
    {"problems": [], "bound": "fast"},
    {"problems": [], "bound": True},
    {"problems": [], "a": 1},
])  # fmt: skip
def test_values_of_the_wrong_type_are_replaced(value: dict[str, object], tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "digest")
    journal.put("a", value)
    for opened in (journal, Journal(tmp_path / "journal", "digest")):
        assert opened.get("a", CompileResult) is None
        opened.put("a", asdict(good := CompileResult(("slow",), 1.5, "percent")))
        assert opened.get("a", CompileResult) == good


def test_an_unreadable_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"\n" * (MAX_FILE_BYTES + 1))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("large", "fifo", "folder"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} cannot be read"):
            Journal(tmp_path / name, "digest")


def test_tables_are_private_and_read_back(folders: Folders) -> None:
    before = os.umask(0)
    try:
        path = save(folders[0], H200, [entry()])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    created = [folders[0], *folders[0].parents][: len(folders[0].relative_to(folders[1].parent).parts)]
    assert [folder.stat().st_mode & 0o777 for folder in created] == [0o700] * 3
    key = ("forward", tables.DTYPES["bf16"], 128, 128, 4, True)
    assert load_tuned_tiles(H200).tile(key, 8192) == TILE
    save(folders[0], H200, [entry(tile=BASELINE)])
    assert load_tuned_tiles(H200).tile(key, 8192) == BASELINE
    save(folders[0], H200, [entry(POINT._replace(length=16)), estimate()])
    assert {stored.point.length: stored.estimated for stored in read_table(path).entries} == {8192: False, 16: False}


def test_estimates_never_replace_measurements() -> None:
    first, second = estimate(), estimate(tile=BASELINE)
    assert merge_entries([first], [second]) == [second]
    assert merge_entries([first], [entry()]) == [entry()]
    assert merge_entries([entry()], [second]) == [entry()]
    assert merge_entries([entry()], [entry(tile=BASELINE)]) == [entry(tile=BASELINE)]


def test_a_table_that_cannot_be_read_is_left_as_it_is(folders: Folders) -> None:
    path = save(folders[0], H200, [entry()])
    newer = json.dumps(json.loads(path.read_text()) | {"version": 2})
    path.write_text(newer)
    with pytest.raises(RefusedTable, match="version is 2: "):
        save(folders[0], H200, [entry(tile=BASELINE)])
    assert path.read_text() == newer


def test_a_failed_write_keeps_the_old_table(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folders[0], H200, [entry()])
    before = path.read_text()
    with pytest.raises(ValueError, match="bytes of shared memory"):  # a reader would refuse the entry
        save(folders[0], H200, [entry(tile=Tile(128, 512, 8, 3))])

    def interrupted(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(folders[0], H200, [entry(tile=BASELINE)])
    assert path.read_text() == before and [*folders[0].iterdir()] == [path]


def test_a_table_is_on_disk_before_it_replaces_the_old_one(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    order: Any = []
    real = os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append(f"{os.fstat(file).st_size} bytes"))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or real(*paths))
    path = save(folders[0], H200, [entry()])
    assert order == [f"{path.stat().st_size} bytes", "replace"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/inner cannot be used"):
        private_folder(tmp_path / "file" / "inner")
