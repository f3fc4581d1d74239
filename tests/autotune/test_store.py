"""What tuning leaves on the disk: a journal that survives anything, tables that are whole, private and never worse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ringattn.autotune.store import Journal, merged, private_folder, save
from ringattn.kernels import tables
from ringattn.kernels.tables import RefusedTable, read, tuned

from ..support.tile_tables import H200, POINT, TILE, entry, estimate, folders
from ..support.tune_cases import BASELINE

__all__ = ["folders"]

Folders = tuple[Path, Path]


# the journal


def test_a_journal_is_there_for_the_next_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "digest")
    assert journal.last("a") is None and journal.all("a") == []
    for number in range(3):
        journal.put("a", {"n": number})
    journal.put("b", {"n": 9})
    for one in (journal, Journal(tmp_path / "journal", "digest")):
        assert one.all("a") == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert one.last("b") == {"n": 9}


def test_of_other_kernels_a_journal_knows_nothing(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "old").put("a", {"n": 0})
    new = Journal(tmp_path / "journal", "new")
    assert new.last("a") is None
    new.put("a", {"n": 1})
    assert Journal(tmp_path / "journal", "old").last("a") == {"n": 0}
    assert Journal(tmp_path / "journal", "new").all("a") == [{"n": 1}]


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_was_cut_costs_itself_alone(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for number in range(2):
        Journal(path, "digest").put("a", {"n": number})
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path, "digest")
    if cut > 1:  # with the end of line alone gone, the value is whole
        assert journal.all("a") == [{"n": 0}]
    journal.put("b", {"n": 2})
    again = Journal(path, "digest")
    assert again.last("b") == {"n": 2} and again.all("a") == journal.all("a")


@pytest.mark.parametrize(
    "line", ["{", "[]", "null", '"x"', "[" * 100_000, "NaN", '{"digest": "digest", "key": 1, "value": {}}', "\xff\x00"]
)
def test_what_is_no_line_is_passed_over(line: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text(line + "\n")
    journal = Journal(path, "digest")
    journal.put("a", {"n": 1})
    assert Journal(path, "digest").all("a") == [{"n": 1}]


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    """Before a run that could not be kept there."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    for name, why in (("fifo", "no reg"), ("folder", "no reg"), ("link", "a symbolic link"), ("large", "at most")):
        with pytest.raises(ValueError, match=f"{name} is no journal: .*{why}.*; move it away"):
            Journal(tmp_path / name, "digest")
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_that_comes_later_is_not_followed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "digest")
    (tmp_path / "journal").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="a symbolic link"):
        journal.put("a", {})
    assert not (tmp_path / "elsewhere").exists()


def test_a_finished_journal_is_gone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "digest")
    journal.put("a", {})
    journal.forget()
    journal.forget()
    assert not (tmp_path / "journal").exists() and journal.last("a") is None


# the tables


def test_a_table_is_private_and_found(folders: Folders) -> None:
    before = os.umask(0)
    try:
        path = save(folders[0], H200, [entry()])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    made = [folders[0], *folders[0].parents][: len(folders[0].relative_to(folders[1].parent).parts)]
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700] * 3
    key = ("forward", tables.DTYPES["bf16"], 128, 128, 4, True)
    assert tuned(H200).tile(key, 8192) == TILE
    save(folders[0], H200, [entry(tile=BASELINE)])
    assert tuned(H200).tile(key, 8192) == BASELINE


def test_entries_are_added(folders: Folders) -> None:
    save(folders[0], H200, [entry()])
    path = save(folders[0], H200, [entry(POINT._replace(length=16)), estimate()])
    table = read(path)
    assert {one.point.length: one.estimated for one in table.entries} == {8192: False, 16: False}


def test_an_estimate_never_takes_the_place_of_a_measurement() -> None:
    first, second = estimate(), estimate(tile=BASELINE)
    assert merged([first], [second]) == [second]
    assert merged([first], [entry()]) == [entry()]
    assert merged([entry()], [second]) == [entry()]
    assert merged([entry()], [entry(tile=BASELINE)]) == [entry(tile=BASELINE)]


def test_a_table_that_cannot_be_read_is_left_as_it_is(folders: Folders) -> None:
    path = save(folders[0], H200, [entry()])
    newer = json.dumps(json.loads(path.read_text()) | {"version": 2})
    path.write_text(newer)
    with pytest.raises(RefusedTable, match="its schema is version 2"):
        save(folders[0], H200, [entry(tile=BASELINE)])
    assert path.read_text() == newer


def test_what_a_reader_refuses_is_not_written(folders: Folders) -> None:
    with pytest.raises(ValueError, match="command is"):
        save(folders[0], H200, [entry(command="x" * 500)])
    assert [*folders[0].iterdir()] == []


def test_an_interrupted_write_leaves_the_table_before(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folders[0], H200, [entry()])
    before = path.read_text()

    def interrupted(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(folders[0], H200, [entry(tile=BASELINE)])
    assert path.read_text() == before and [*folders[0].iterdir()] == [path]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/inner is no folder to save in"):
        private_folder(tmp_path / "file" / "inner")
