"""Tuned tables: validation of files, which file is used, and the cost of a lookup."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.kernels import Tile, tables
from ringattn.kernels.gpu import GpuSpec, assumed_gpu
from ringattn.kernels.tables import (
    RefusedTable,
    Table,
    load_tuned_tiles,
    parse_table,
    read_table,
    table_file_name,
    table_to_json,
    tuned_options,
)

from ..support.tile_tables import H200, HOPPER, POINT, TILE, entry, estimate, folders, save
from ..test_house import ROOT

__all__ = ["folders"]

KEY = ("forward", torch.bfloat16, 128, 128, 4, True)
OTHER = Tile(128, 32, 8, 3)
LONG = POINT._replace(length=32768)


def table(**changed: Any) -> dict[str, Any]:
    """Return a valid table as JSON data, with some of its fields (dotted by ``__``) replaced or removed."""
    made = Table("NVIDIA H200", 90, (3, 7), (entry(), estimate(POINT._replace(length=32768))))
    data: dict[str, Any] = json.loads(json.dumps(table_to_json(made)))
    for name, value in changed.items():
        place: Any = data
        *path, last = name.split("__")
        for part in path:
            place = place[int(part)] if part.isdigit() else place[part]
        key: Any = int(last) if last.isdigit() else last
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return data


def test_a_table_round_trips() -> None:
    entries = entry(), entry(POINT._replace(length=16384), HOPPER), estimate(LONG)
    made = Table("NVIDIA H200", 90, (3, 7), entries)
    assert parse_table(json.loads(json.dumps(table_to_json(made)))) == made
    assert table_to_json(made)["entries"][1]["options"] == {"forward_kernel": "hopper"}


BIG = {"block_q": 128, "block_k": 512, "num_warps": 8, "num_stages": 3}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version is 2: this ringattn reads only version 1"),
    ({"gpu": "sm_90"}, "gpu is sm_90 and arch 90: "),
    ({"gpu": "sm_80", "entries": table()["entries"][1:]}, "gpu is sm_80 and arch 90: "),
    ({"triton": "3"}, "triton is '3': it must be a version"),
    ({"entries__0": []}, "entries[0] is []: it must be of type dict"),
    ({"entries__1": table()["entries"][0]}, "two entries have the same kernel"),
    ({"entries__0__kernel": "rm -rf /"}, "entries[0]: 'rm -rf /' is not one of forward, dq, dkdv"),
    ({"entries__0__mask": "causal"}, "entries[0]: 'causal' is not one of full, bounded"),
    *(({f"entries__0__{x}": 0}, "head_dim, head_dim_v, group and") for x in (*POINT._fields[2:5], "length")),
    ({"entries__0__tile": BIG}, "at least 524,288 bytes of shared memory, but a block has only 232,448"),
    ({"entries__0__tile__block_q": 48}, "entries[0].tile: block_q is 48: it must be a power of two"),
    ({"entries__0__tile__block_q": 1024}, "tile.block_q and tile.block_k are 1024 and 64: they must be at most 512"),
    ({"entries__0__tile__block_k": 1024}, "tile.block_q and tile.block_k are 64 and 1024: they must be at most 512"),
    ({"entries__0__tile": ...}, "entries[0].tile is None"),
    ({"entries__0__estimated": True}, "estimated is True and seconds is 0.001"),
    ({"entries__0__seconds": None}, "estimated is False and seconds is None: "),
    ({"entries__0__seconds": 0}, "seconds is 0: seconds must be null for an estimate"),
    ({"entries__0__options": {"forward_kernel": "hopper", "persistent": True}}, "entries[0]: order is 'heads'"),
    ({"entries__0__options": {"dkdv_splits": 2}}, "dkdv_splits is 2: forward has no such option or value"),
    ({"entries__0__options": {"sm_margin": 0}}, "sm_margin is 0: forward has no such option or value"),
    ({"entries__0__options": 3}, "entries[0].options is 3"),
]


def test_data_that_violates_the_schema_is_refused() -> None:
    for changed, fragment in BAD:
        with pytest.raises(ValueError) as error:
            parse_table(table(**changed))
        message = str(error.value)
        assert fragment in message and len(message) < 300 and message.isprintable()


def test_broken_files_are_refused_with_their_path(tmp_path: Path) -> None:
    for name, content, message in (("a", "", "Expecting value"), ("b", "{}", "schema is None")):
        (path := tmp_path / name).write_text(content)
        with pytest.raises(RefusedTable, match=f"^{re.escape(str(path))} is rejected: {message}"):
            read_table(path)


@pytest.mark.parametrize(("kernel", "rows"), [("forward", 64), ("dq", 64), ("dkdv", 16), ("single_pass", 16)])
def test_shared_memory_counts_the_streamed_pair(kernel: str, rows: int) -> None:
    point = POINT._replace(kernel=kernel, dtype="bf16", head_dim=128, head_dim_v=64)
    assert tables.min_shared_bytes(point, Tile(16, 64, 4, 3)) == 2 * rows * (128 + 64) * 2
    parts = point._replace(head_dim_v=512)  # a forward of many rows takes 256 columns of V at a time
    columns = 128 + (256 if kernel == "forward" else 512)
    assert tables.min_shared_bytes(parts, Tile(64, 64, 4, 3)) == 2 * 64 * columns * 2


def test_file_names_cannot_leave_the_folder() -> None:
    names = {"NVIDIA H200": "nvidia-h200", "../../.ssh/id\x00": "ssh-id", "A" * 500: "a" * 80, "sm_90": "sm-90"}
    assert {gpu: table_file_name(gpu, (3, 7)) for gpu in names} == {
        gpu: f"{name}_triton-3.7.json" for gpu, name in names.items()
    }
    with pytest.raises(ValueError, match=r"gpu is .* must have at least one letter or digit"):
        table_file_name("../\x00", (3, 7))


Folders = tuple[Path, Path]


def found(length: int = 8192, gpu: GpuSpec = H200, **how: Any) -> Tile | None:
    return load_tuned_tiles(gpu, **how).tile(KEY, length)


def test_the_entry_with_the_nearest_length_is_used(folders: Folders) -> None:
    tiles = {1024: Tile(16, 16, 4, 1), 8192: Tile(32, 32, 4, 1), 32768: Tile(64, 64, 4, 1)}
    save(folders[0], *(entry(POINT._replace(length=length), tile) for length, tile in tiles.items()))
    for length in (0, 1, 1000, 2895, 2897, 8192, 16383, 16385, 10**9):
        nearest = min(tiles, key=lambda known: abs(math.log((length or 0.5) / known)))
        assert found(length) == tiles[nearest], length
    wide = (*KEY[:3], 64, *KEY[4:])
    assert load_tuned_tiles(H200).tile(wide, 8192) is None, "of values of another head dim"
    save(folders[1], entry(POINT._replace(head_dim_v=64), OTHER))
    tables.clear_table_cache()
    assert load_tuned_tiles(H200).tile(wide, 8192) == OTHER and found(8192) == tiles[8192]
    for field in range(len(KEY)):  # no entry for another kernel, dtype, head dim, group or mask
        assert load_tuned_tiles(H200).tile((*KEY[:field], None, *KEY[field + 1 :]), 8192) is None  # type: ignore[arg-type]


def test_folder_precedence(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's table comes first and the package's fills gaps; an explicit folder replaces the user's."""
    user, package = folders
    save(package, entry(tile=OTHER), entry(POINT._replace(kernel="dq"), OTHER))
    assert found() == OTHER
    save(user, entry())
    tables.clear_table_cache()
    assert found() == TILE
    assert load_tuned_tiles(H200).tile(("dq", *KEY[1:]), 8192) == OTHER
    explicit, small = tmp_path / "given", Tile(16, 16, 4, 1)
    save(explicit, entry(tile=small))
    assert found(config_dir=explicit) == small and found() == TILE
    monkeypatch.setenv(tables.CONFIG_DIR, str(explicit))
    assert found() == small and found(config_dir=user) == TILE


def test_the_users_folder_is_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path counts as unset, as the XDG rules say."""
    for cache, home, folder in (
        ("/cache", "/home/a", "/cache/ringattn/tiles"),
        ("cache", "/home/a", "/home/a/.cache/ringattn/tiles"),
        ("", "a", None),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        monkeypatch.setenv("HOME", home)
        assert tables.user_table_folder() == (folder and Path(folder))


def test_a_missing_folder_warns(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"config_dir is '/nowhere': there is no such folder\. `ringattn tune"):
        load_tuned_tiles(H200, "/nowhere")
    monkeypatch.setenv(tables.CONFIG_DIR, "/nowhere")
    with pytest.warns(UserWarning, match="RINGATTN_CONFIG_DIR is '/nowhere'"):
        assert found() is None


def test_estimates_are_used_on_request_only(folders: Folders) -> None:
    arch = assumed_gpu(90)
    save(folders[0], estimate(), gpu=arch)
    assert found() is None
    assert found(estimated=True) == TILE
    save(folders[1], entry(tile=OTHER))
    tables.clear_table_cache()
    assert found() == OTHER
    assert found(estimated=True) == OTHER  # a measured entry of this GPU comes first


def test_a_table_of_an_older_triton_is_used_with_one_warning(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    user, package = folders
    save(package, entry(tile=OTHER), triton=(3, 9))
    older = save(user, entry(), triton=(3, 10))
    save(user, entry(tile=OTHER), triton=(3, 12))
    monkeypatch.setattr(tables, "triton_version", lambda: (3, 11))
    with pytest.warns(UserWarning) as warned:
        assert found() == TILE
        assert found(1024) == TILE
    (message,) = {str(warning.message) for warning in warned}
    assert len(warned) == 1
    assert f"no tuned tiles for Triton 3.11 at {user / 'nvidia-h200_triton-3.11.json'}" in message
    assert f"using those for 3.10 in {older}" in message
    monkeypatch.setattr(tables, "triton_version", lambda: (3, 4))
    tables.clear_table_cache()
    assert found() is None, "newer versions do not serve"


@pytest.mark.parametrize("damage", ["broken", "gpu", "arch", "triton"])
def test_a_refused_table_warns_once_and_defaults_are_used(damage: str, folders: Folders) -> None:
    path = save(folders[0], entry())
    data = json.loads(path.read_text())
    wrong = {"gpu": "NVIDIA-H200", "arch": 80, "triton": "3.1"}  # that GPU is another one with the same file name
    path.write_text("{" if damage == "broken" else json.dumps(data | {damage: wrong[damage]}))
    with pytest.warns(UserWarning, match="is rejected: .*Using the built-in tiles") as warned:
        assert found() is None
        assert found(99) is None
    assert len(warned) == 1 and str(path) in str(warned[0].message)


def test_shipped_tables_hold_estimates_only() -> None:
    """Shipped tiles were never measured, and estimates are never defaults."""
    paths = [*(ROOT / "autotune" / "tables").glob("*.json")]
    assert paths
    for path in paths:
        shipped = read_table(path)
        assert path.name == table_file_name(shipped.gpu, shipped.triton)
        assert all(entry.estimated and entry.bound for entry in shipped.entries)
        assert not any(tuned_options(entry.tile) for entry in shipped.entries), "an estimate that serves nobody"
