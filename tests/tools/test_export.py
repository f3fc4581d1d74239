"""Tests of ``ringattn export``: the launcher compiles, and its argument checks match the binary."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from ringattn.autotune.compile import ROLES
from ringattn.kernels import Tile, hopper_backward_launch, hopper_forward_launch
from ringattn.kernels.config import built_in_config
from ringattn.kernels.gpu import ARCHS, MULTIPROCESSOR_SPECS
from ringattn.tools.export import kernels
from ringattn.tools.export.command import app
from ringattn.tools.export.config import ExportConfig, Tiles, chosen_tiles

from ..support.export.exports import (
    COMPILER,
    CONFIGS,
    EXPORTED,
    NIGHTLY_CONFIGS,
    ROOT,
    TUNED,
    WARNINGS,
    Export,
    exported,
    needs_compiler,
    needs_cpp,
)
from ..support.nightly import rest_nightly
from ..support.tile_tables import HOPPER, POINT, entry, estimate, folders, save

__all__ = ["folders"]

BF16 = torch.bfloat16
WIDE = {"COLUMNS": "300", "NO_COLOR": "1"}


@pytest.fixture(scope="module", params=rest_nightly([*CONFIGS, *NIGHTLY_CONFIGS], *CONFIGS))
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return exported(request.param, tmp_path_factory)


def filled(kernel: dict[str, Any], rows: int) -> dict[str, int | float]:
    """Return a different, aligned value for every argument of a kernel."""
    own: dict[str, int | float] = {"rows": rows, "heads": 6, "group": 3, "softmax_scale": 0.125}
    parameters = kernel["arguments"]
    others = {entry["name"]: 160000 + 1000 * i * entry.get("multiple_of", 1) for i, entry in enumerate(parameters, 1)}
    return {name: own.get(name, value) for name, value in others.items()}


@EXPORTED
@needs_compiler
def test_the_launcher_refuses_what_the_binary_cannot_take(export: Export) -> None:
    library, record = export.recording()
    for name, kernel in export.kernels.items():
        values, before = filled(kernel, 100), record.launches
        aligned = {entry["name"]: entry["multiple_of"] for entry in kernel["arguments"] if "multiple_of" in entry}
        assert {key for key in values if key in ("q", "k", "v", "out", "lse", "dq", "turns_gates")} <= {*aligned}
        invalid: list[dict[str, int | float]] = [{key: values[key] + unit // 2} for key, unit in aligned.items()]
        invalid += [{"rows": -1}, {"columns": -1}, {"heads": -6}, {"softmax_scale": 0.0}, {"softmax_scale": math.nan}]
        invalid += [{"rows": 2**31 - 1, "heads": 3 * 2**20}, {"group": 4 if name in ("forward", "dq") else 0}]
        invalid += [{"rows": 2**31 - 1, "heads": 3 * 2**29}]  # the number of programs overflows to a multiple of 2^64
        for change in invalid:
            if {*change} <= {*values}:
                batch = 2**11 if change.get("heads") == 3 * 2**29 else 2
                assert export.launch(library, name, values | change, batch) == 1, (name, change)
        for batch, rows in ((0, 100), (2, 0)):  # an empty launch is no error
            assert export.launch(library, name, values | {"rows": rows}, batch) == 0
        assert record.launches == before


@EXPORTED
@needs_cpp
def test_header_and_launcher_are_also_cpp(export: Export) -> None:
    for source in (export.folder / f"{export.prefix}.h", export.folder / f"{export.prefix}.c"):
        line = ["g++", *WARNINGS, "-fsyntax-only", "-xc++", str(source)]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@EXPORTED
def test_the_manifest_says_what_and_whence(export: Export) -> None:
    for name, digest in export.manifest["sha256"].items():
        assert hashlib.sha256((export.folder / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in export.folder.iterdir()} - {"launcher.so"} == {
        *export.manifest["sha256"],
        f"{export.prefix}.json",
    }
    assert (export.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert {"ringattn", "triton", "sources", "commit"} <= {*export.manifest["versions"]}
    assert json.loads((export.folder / f"{export.prefix}.json").read_text()) == export.manifest
    for name, (point, tile) in TUNED.items() if export.config_dir else ():
        if name in export.kernels and export.manifest["head_dim"] == [point.head_dim, point.head_dim_v]:
            kernel = export.kernels[name]
            assert kernel["tile"] == vars(tile) and kernel["tile_from"].startswith("table of NVIDIA A100-SXM4-80GB")
    for kernel in export.manifest["kernels"]:  # the binary names no path of this machine
        assert str(ROOT).encode() not in (export.folder / kernel["cubin"]).read_bytes()


ENTRIES = [
    entry(POINT, Tile(64, 64, 4, 2)),
    entry(POINT._replace(length=1024, group=16), Tile(32, 64, 4, 2)),
    entry(POINT._replace(group=1), Tile(64, 32, 4, 2)),
    entry(POINT._replace(mask="bounded"), HOPPER),
    estimate(POINT._replace(kernel="dq"), Tile(64, 64, 4, 1)),
    entry(POINT._replace(kernel="single_pass"), Tile(32, 128, 4, 1)),
    entry(POINT._replace(kernel="single_pass", head_dim=192, head_dim_v=192), Tile(16, 32, 8, 1)),
]
CONFIG = ExportConfig(90, gpu="NVIDIA H200")
AT_8192 = "at 8192 tokens on 2026-11-21: 0.001 s"
NEVER = "built-in default, never timed"


def tiles_of(config: ExportConfig) -> Tiles:
    """Return the tiles of the tables as they are now, without the cache."""
    return chosen_tiles.__wrapped__(config)


@pytest.mark.parametrize(("changed", "name", "tile", "source"), [
    ({}, "forward", Tile(64, 64, 4, 2), AT_8192),  # the longest point with the largest group
    ({}, "dq", None, NEVER),  # an estimate is not a default
    ({"gpu": None}, "forward", None, NEVER),
    ({"bounded": True}, "forward", None, "is for forward_kernel='hopper', not exported"),
    ({"bounded": True, "forward_kernel": "hopper"}, "forward", HOPPER, AT_8192),
    (
        {"forward_kernel": "hopper"}, "forward", hopper_forward_launch.default_forward_tile(128),
        "is for forward_kernel='portable', not exported",
    ),
    ({"backward": "single_pass"}, "gradients", Tile(32, 128, 4, 1), AT_8192),
    ({"backward": "hopper"}, "gradients", hopper_backward_launch.default_backward_tile(128), NEVER),  # not in a table
    ({"backward": "single_pass", "head_dim": 192, "head_dim_v": 192}, "gradients", Tile(16, 32, 8, 1), AT_8192),
])  # fmt: skip
def test_tiles_of_a_table(
    changed: dict[str, Any], name: str, tile: Tile | None, source: str, folders: tuple[Path, Path]
) -> None:
    save(folders[0], *ENTRIES)
    chosen, reported = tiles_of(replace(CONFIG, **changed))[name]
    assert chosen == (tile or getattr(built_in_config(90, BF16, 128), name)) and reported.endswith(source)


@pytest.mark.parametrize("over", [0, 1])
def test_shared_memory_beyond_the_chips_is_refused(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # `size_symbols` raises, so the test sees whether the check runs before the binary is read.
    limit = MULTIPROCESSOR_SPECS[90].shared_per_block
    binary = SimpleNamespace(metadata=SimpleNamespace(shared=limit + over), asm={"cubin": b""})
    monkeypatch.setattr(kernels, "compiled_launch", lambda *_: SimpleNamespace(binary=binary))
    monkeypatch.setattr(kernels, "size_symbols", Mock(side_effect=LookupError))
    words = f"the dq kernel needs {limit + over} bytes of shared memory, but sm_90 has {limit}"
    with pytest.raises(ValueError if over else LookupError, match=words if over else None):
        kernels.export(ExportConfig(90), "dq")


BOUNDS = """
#include <stdio.h>
#include "{header}"
int main(void) {{
  int32_t lo[8], hi[8];
  ringattn_causal_bounds(lo, hi, 3, 5, 2);
  for (int i = 0; i < 3; ++i) printf("%d %d ", lo[i], hi[i]);
  ringattn_causal_bounds_by_key(lo, hi, 3, 5, 2);
  for (int i = 0; i < 5; ++i) printf("%d %d ", lo[i], hi[i]);
  ringattn_causal_bounds(lo, hi, 3, 2, -1);
  for (int i = 0; i < 3; ++i) printf("%d %d ", lo[i], hi[i]);
  ringattn_causal_bounds_by_key(lo, hi, 3, 2, -1);
  for (int i = 0; i < 2; ++i) printf("%d %d ", lo[i], hi[i]);
  return 0;
}}
"""


@EXPORTED
@needs_compiler
def test_the_bounds_of_a_causal_mask(export: Export) -> None:
    if not export.manifest["bounded"]:
        assert "causal_bounds" not in (export.folder / f"{export.prefix}.h").read_text()
        return
    program, source = export.folder.parent / "bounds", export.folder.parent / "bounds.c"
    source.write_text(BOUNDS.format(header=f"{export.prefix}.h"))
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c99", *WARNINGS, f"-I{export.folder}", source, "-o", program], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    pairs = [*zip(*[iter(map(int, output.split()))] * 2, strict=True)]
    assert pairs[:3] == [(0, 3), (0, 4), (0, 5)]
    assert pairs[3:8] == [(0, 3), (0, 3), (0, 3), (1, 3), (2, 3)]
    assert pairs[8:11] == [(0, 0), (0, 1), (0, 2)]
    assert pairs[11:] == [(1, 3), (2, 3)]


@pytest.mark.parametrize(("arguments", "expected"), [
    ("--arch 75", f"it must be one of {', '.join(f'sm_{arch}' for arch in ARCHS)}"),
    ("--role lone", f"role is lone: it must be one of {', '.join(ROLES)}"),
    ("", "TRITON_INTERPRET is set"),
    ("--forward-kernel fast", "forward_kernel is fast: it must be one of portable, hopper"),
    ("--backward one", "single_pass_deterministic, hopper"),
    ("--arch 80 --forward-kernel hopper", "supports only GPUs of compute capability 9.0"),
    ("--forward-kernel hopper --head-dim 96", "only head dim 64 or 128 or 256"),
    ("--backward hopper --no-grouped", "grouped is False: with backward='hopper' it must be True"),
    ("--backward single_pass --head-dim 192", "no tile for a single-pass backward fits sm_90. "),
    ("--gpu x --config-dir /nowhere", "config_dir is '/nowhere': there is no such folder. `ringattn tune"),
    ("--config-dir .", "--config-dir has no effect without --gpu"),
    ("--gpu NVIDIA-H100", "there is no table for NVIDIA-H100, sm_90"),
])  # fmt: skip
def test_unsupported_exports(arguments: str, expected: str, tmp_path: Path, folders: tuple[Path, Path]) -> None:
    flags = ["--arch", "sm_90", *arguments.split(), "--out-dir", str(tmp_path / "out")]
    done = CliRunner().invoke(app, flags, env=WIDE)
    assert done.exit_code != 0
    assert expected in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
