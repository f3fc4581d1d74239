"""Tuned tables: what is believed of a file, which file serves, and what a look-up costs."""

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
    as_json,
    file_name,
    options_of,
    parse,
    read,
    tuned,
)

from ..support.tile_tables import H200, HOPPER, POINT, TILE, entry, estimate, folders, save
from ..test_house import ROOT

__all__ = ["folders"]

KEY = ("forward", torch.bfloat16, 128, 128, 4, True)
OTHER = Tile(128, 32, 8, 3)
LONG = POINT._replace(length=32768)


def table(**changed: Any) -> dict[str, Any]:
    """A good table as JSON data, with one thing changed in its first entry, by dotted name."""
    made = Table("NVIDIA H200", 90, (3, 7), (entry(), estimate(POINT._replace(length=32768))))
    data: dict[str, Any] = json.loads(json.dumps(as_json(made)))
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


# what is believed


def test_a_table_comes_back_as_it_was_written() -> None:
    made = Table(
        "NVIDIA H200", 90, (3, 7), (entry(), entry(POINT._replace(length=16384), HOPPER), estimate(LONG))
    )  # fmt: skip
    assert parse(json.loads(json.dumps(as_json(made)))) == made
    assert as_json(made)["entries"][1]["options"] == {"forward_kernel": "hopper"}


BIG = {"block_q": 128, "block_k": 512, "num_warps": 8, "num_stages": 3}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version is 2: this ringattn reads version 1"),
    ({"gpu": "sm_80"}, "gpu is sm_80 and arch 90"),
    ({"gpu": "sm_90"}, "gpu is sm_90 and arch 90: "),
    ({"triton": "3"}, "triton is '3': it must be a version"),
    ({"entries__0": []}, "entries[0] is []: it must be of type dict"),
    ({"entries__1": table()["entries"][0]}, "two entries are for the same point"),
    ({"entries__0__kernel": "rm -rf /"}, "entries[0]: 'rm -rf /' is not one of forward, dq, dkdv"),
    ({"entries__0__mask": "causal"}, "entries[0]: 'causal' is not one of full, bounded"),
    ({"entries__0__length": 0}, "length of at least 1"),
    ({"entries__0__tile": BIG}, "at least 524288 bytes of shared memory, a block has 232448"),
    ({"entries__0__tile__block_q": 48}, "entries[0].tile: block_q is 48: it must be a power of two"),
    ({"entries__0__tile__block_q": 1024}, "a block_q or block_k above 512"),
    ({"entries__0__tile": ...}, "entries[0].tile is None"),
    ({"entries__0__estimated": True}, "estimated is True and seconds 0.001"),
    ({"entries__0__seconds": 0}, "seconds 0: seconds must be null for an estimate"),
    ({"entries__0__options": {"forward_kernel": "hopper", "persistent": True}}, "entries[0]: order is 'heads'"),
    ({"entries__0__options": {"dkdv_splits": 2}}, "dkdv_splits is 2: forward has no such option or value"),
    ({"entries__0__options": {"sm_margin": 0}}, "sm_margin is 0: forward has no such option or value"),
    ({"entries__0__options": 3}, "entries[0].options is 3"),
]


def test_what_is_not_the_schema_is_refused() -> None:
    for changed, fragment in BAD:
        with pytest.raises(ValueError) as error:
            parse(table(**changed))
        message = str(error.value)
        assert fragment in message and len(message) < 300 and message.isprintable()


def test_broken_files_are_refused_with_their_path(tmp_path: Path) -> None:
    for name, content, message in (("a", "", "Expecting value"), ("b", "{}", "schema is None")):
        (path := tmp_path / name).write_text(content)
        with pytest.raises(RefusedTable, match=f"^{re.escape(str(path))} is refused: {message}"):
            read(path)


@pytest.mark.parametrize(("kernel", "rows"), [("forward", 64), ("dq", 64), ("dkdv", 16), ("single_pass", 16)])
def test_a_tile_takes_room_for_the_pair_that_its_kernel_streams(kernel: str, rows: int) -> None:
    point = POINT._replace(kernel=kernel, dtype="bf16", head_dim=128, head_dim_v=64)
    assert tables.least_shared(point, Tile(16, 64, 4, 3)) == 2 * rows * (128 + 64) * 2


def test_no_name_of_a_gpu_leaves_the_folder() -> None:
    names = {"NVIDIA H200": "nvidia-h200", "../../.ssh/id\x00": "ssh-id", "A" * 500: "a" * 80, "sm_90": "sm-90"}
    assert {gpu: file_name(gpu, (3, 7)) for gpu in names} == {
        gpu: f"{name}_triton-3.7.json" for gpu, name in names.items()
    }
    with pytest.raises(ValueError, match=r"gpu is .* must have at least one letter or digit"):
        file_name("../\x00", (3, 7))


# which file serves

Folders = tuple[Path, Path]


def found(length: int = 8192, gpu: GpuSpec = H200, **how: Any) -> Tile | None:
    return tuned(gpu, **how).tile(KEY, length)


def test_the_nearest_length_serves(folders: Folders) -> None:
    tiles = {1024: Tile(16, 16, 4, 1), 8192: Tile(32, 32, 4, 1), 32768: Tile(64, 64, 4, 1)}
    save(folders[0], *(entry(POINT._replace(length=length), tile) for length, tile in tiles.items()))
    for length in (0, 1, 1000, 2895, 2897, 8192, 16383, 16385, 10**9):
        nearest = min(tiles, key=lambda known: abs(math.log((length or 0.5) / known)))
        assert found(length) == tiles[nearest], length
    wide = (*KEY[:3], 64, *KEY[4:])
    assert tuned(H200).tile(wide, 8192) is None, "of values of another head dim"
    save(folders[1], entry(POINT._replace(head_dim_v=64), OTHER))
    tables.forget()
    assert tuned(H200).tile(wide, 8192) == OTHER and found(8192) == tiles[8192]
    for field in range(len(KEY)):  # nothing was tuned for any other kernel, dtype, head dim, group or mask
        assert tuned(H200).tile((*KEY[:field], None, *KEY[field + 1 :]), 8192) is None  # type: ignore[arg-type]


def test_folder_precedence(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's table first, where the package's fills in; a folder that is given in place of the user's."""
    user, package = folders
    save(package, entry(tile=OTHER), entry(POINT._replace(kernel="dq"), OTHER))
    assert found() == OTHER
    save(user, entry())
    tables.forget()
    assert found() == TILE
    assert tuned(H200).tile(("dq", *KEY[1:]), 8192) == OTHER
    explicit, small = tmp_path / "given", Tile(16, 16, 4, 1)
    save(explicit, entry(tile=small))
    assert found(config_dir=explicit) == small and found() == TILE
    monkeypatch.setenv(tables.CONFIG_DIR, str(explicit))
    assert found() == small and found(config_dir=user) == TILE


def test_a_missing_folder_warns(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"config_dir is '/nowhere': there is no such folder; `ringattn tune"):
        tuned(H200, "/nowhere")
    monkeypatch.setenv(tables.CONFIG_DIR, "/nowhere")
    with pytest.warns(UserWarning, match="RINGATTN_CONFIG_DIR is '/nowhere'"):
        assert found() is None


def test_estimates_are_never_the_default(folders: Folders) -> None:
    """A kernel that was never run on a GPU is there for who asks."""
    arch = assumed_gpu(90)
    save(folders[0], estimate(), gpu=arch)
    assert found() is None
    assert found(estimated=True) == TILE
    save(folders[1], entry(tile=OTHER))
    tables.forget()
    assert found() == OTHER
    assert found(estimated=True) == OTHER  # what was measured on this very GPU comes before


def test_an_older_version_serves_with_one_warning(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    user, package = folders
    save(package, entry(tile=OTHER), triton=(3, 5))
    older = save(user, entry(), triton=(3, 6))
    save(user, entry(tile=OTHER), triton=(3, 8))
    monkeypatch.setattr(tables, "triton_version", lambda: (3, 7))
    with pytest.warns(UserWarning) as warned:
        assert found() == TILE
        assert found(1024) == TILE
    (message,) = {str(warning.message) for warning in warned}
    assert len(warned) == 1
    assert f"no tuned tiles for Triton 3.7 at {user / 'nvidia-h200_triton-3.7.json'}" in message
    assert f"using those for 3.6 in {older}" in message
    monkeypatch.setattr(tables, "triton_version", lambda: (3, 4))
    tables.forget()
    assert found() is None, "newer versions do not serve"


@pytest.mark.parametrize("damage", ["broken", "gpu", "arch", "triton"])
def test_a_refused_table_warns_once_and_defaults_are_used(damage: str, folders: Folders) -> None:
    path = save(folders[0], entry())
    data = json.loads(path.read_text())
    wrong = {"gpu": "NVIDIA-H200", "arch": 80, "triton": "3.1"}  # the same file name, another GPU
    path.write_text("{" if damage == "broken" else json.dumps(data | {damage: wrong[damage]}))
    with pytest.warns(UserWarning, match="is refused: .*the built-in tiles are used") as warned:
        assert found() is None
        assert found(99) is None
    assert len(warned) == 1 and str(path) in str(warned[0].message)


def test_the_tables_that_ship_are_good() -> None:
    """They hold estimates only, which are never defaults: nothing was measured yet."""
    paths = [*(ROOT / "autotune" / "tables").glob("*.json")]
    assert paths
    for path in paths:
        shipped = read(path)
        assert path.name == file_name(shipped.gpu, shipped.triton)
        assert all(entry.estimated and entry.bound for entry in shipped.entries)
        assert not any(options_of(entry.tile) for entry in shipped.entries), "an estimate that serves nobody"
