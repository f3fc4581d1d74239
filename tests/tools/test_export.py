"""``ringattn export``: the launcher compiles, and passes what the binary and Triton's own launcher say."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

from ringattn.autotune.compile import ROLES
from ringattn.kernels import Tile
from ringattn.kernels.config import SHARED_LIMIT, config_for, single_pass_tile
from ringattn.kernels.experimental import hopper_backward_launch
from ringattn.kernels.tables import CONFIG_DIR, DTYPES, Gpu
from ringattn.tools.export import config as export_config
from ringattn.tools.export.command import app
from ringattn.tools.export.config import ExportConfig, Source, Tiles, chosen_tiles, resolved
from ringattn.tools.export.kernels import parameter_layout

from ..support.export.exports import (
    C_TYPES,
    COMPILER,
    CONFIGS,
    EXPORTED,
    NIGHTLY_CONFIGS,
    ROOT,
    STREAM,
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


def tiles_of(source: Source, arch: int, dtype: str, head_dims: tuple[int, int], **more: Any) -> Tiles:
    """Of tables as they are now."""
    return chosen_tiles.__wrapped__(
        ExportConfig(arch, dtype, *head_dims, source=source, **{"forward_kernel": None} | more)
    )


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No tiles of another test's tables."""
    yield
    chosen_tiles.cache_clear()


@pytest.fixture(scope="module", params=rest_nightly([*CONFIGS, *NIGHTLY_CONFIGS], *CONFIGS))
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return exported(request.param, tmp_path_factory)


def filled(kernel: dict[str, Any], rows: int) -> dict[str, int | float]:
    """A different value for every argument, none of which is misaligned."""
    own: dict[str, int | float] = {"rows": rows, "heads": 6, "group": 3, "softmax_scale": 0.125}
    asked = kernel["arguments"]
    others = {one["name"]: 160000 + 1000 * i * one.get("multiple_of", 1) for i, one in enumerate(asked, 1)}
    return {name: own.get(name, value) for name, value in others.items()}


@EXPORTED
@needs_compiler
def test_the_launcher_passes_what_the_binary_takes(export: Export) -> None:
    library, record = export.recording()
    for name, kernel in export.kernels.items():
        layout = parameter_layout((export.folder / kernel["cubin"]).read_bytes()).parameters
        assert layout == [(one["offset"], one["size"]) for one in kernel["parameters"]]
        record.expect([size for _, size in layout])

        rows, batch = 1000, 2
        values, before = filled(kernel, rows), record.launches
        assert export.launch(library, name, values, batch) == 0
        assert record.symbol.decode() == kernel["symbol"]
        assert record.allowed == kernel["shared_memory"] or kernel["shared_memory"] <= 48 * 1024
        assert (record.launches, record.stream) == (before + 1, STREAM)
        block = int(kernel["grid"][0].split()[2].rstrip(")"))
        grid, shape = -(-rows // block) * batch * 6, (kernel["threads"], 1, 1, kernel["shared_memory"])
        assert [*record.numbers] == [grid, 1, 1, *shape]
        for one, got in zip(kernel["parameters"], record.passed(), strict=True):
            if "value" in one:
                assert got == bytes(8), one
            elif "made_of" not in one:  # of these test_export_maps.py
                expected = values[one.get("same_as", one["name"])]
                made: Any = C_TYPES.get(one["type"], ctypes.c_uint64)(expected)  # type: ignore[arg-type]
                assert got == bytes(made), one


@EXPORTED
@needs_compiler
def test_the_launcher_refuses_what_the_binary_cannot_take(export: Export) -> None:
    library, record = export.recording()
    for name, kernel in export.kernels.items():
        values, before = filled(kernel, 100), record.launches
        aligned = {one["name"]: one["multiple_of"] for one in kernel["arguments"] if "multiple_of" in one}
        assert {one for one in values if one in ("q", "k", "v", "out", "lse", "dq", "turns_gates")} <= {*aligned}
        wrongs: list[dict[str, int | float]] = [{one: values[one] + unit // 2} for one, unit in aligned.items()]
        wrongs += [
            {"rows": -1},
            {"columns": -1},
            {"heads": -6},
            {"softmax_scale": 0.0},
            {"softmax_scale": float("nan")},
        ]
        wrongs += [{"rows": 2**31 - 1, "heads": 3 * 2**20}, {"group": 0}]
        # a multiple of 2^64 programs
        wrongs += [{"rows": 2**31 - 1, "heads": 3 * 2**29}]
        if name in ("forward", "dq"):
            wrongs += [{"group": 4}]
        for wrong in wrongs:
            if {*wrong} <= {*values}:
                batch = 2**11 if wrong.get("heads") == 3 * 2**29 else 2
                assert export.launch(library, name, values | wrong, batch) == 1, (name, wrong)
        for batch, rows in ((0, 100), (2, 0)):  # nothing to do is no error
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
    for kernel in export.manifest["kernels"]:  # nothing of the machine that made it
        assert str(ROOT).encode() not in (export.folder / kernel["cubin"]).read_bytes()


@EXPORTED
def test_the_manifest_says_whose_tiles_they_are(export: Export) -> None:
    told = {name: (kernel["tile"], kernel["tile_from"]) for name, kernel in export.kernels.items()}
    arch, dtype = int(export.manifest["arch"][3:]), DTYPES[export.manifest["dtype"]]
    most = max(export.manifest["head_dim"])
    built_in = config_for(arch, dtype, most)
    hopper = export.manifest["backward"] == "hopper"
    single = hopper_backward_launch.default_tile(most) if hopper else single_pass_tile(arch, dtype, most)
    assert told.pop("delta")[1] == "fixed"
    if export.config_dir:
        version = ".".join(triton.__version__.split(".")[:2])
        whence = f"table of NVIDIA A100-SXM4-80GB, Triton {version}, at 8192 tokens on 2026-11-21: 0.001 s"
        name = "forward" if "dq" in told else "gradients"
        tuned = TUNED[name][1]
        assert told.pop(name) == (vars(tuned), whence)
        assert f"/ {tuned.block_q})" in export.kernels[name]["grid"][0]  # as long as block_k in a single pass
    for name, found in told.items():
        tile = single if name == "gradients" else getattr(built_in, name)
        assert found == (vars(tile), "built-in default, never timed")


H200_ENTRIES = [
    entry(POINT, Tile(64, 64, 4, 2)),
    entry(POINT._replace(length=1024), Tile(32, 64, 4, 2)),
    entry(POINT._replace(group=1), Tile(64, 32, 4, 2)),
    entry(POINT._replace(mask="bounded"), HOPPER),
    estimate(POINT._replace(kernel="dq"), Tile(64, 64, 4, 1)),
    estimate(POINT._replace(group=8), HOPPER),
    entry(POINT._replace(kernel="single_pass"), Tile(32, 128, 4, 1)),
    entry(POINT._replace(kernel="single_pass", length=1024), Tile(32, 64, 4, 1)),
    entry(POINT._replace(kernel="single_pass_deterministic"), Tile(64, 128, 8, 1)),
    estimate(POINT._replace(kernel="single_pass_deterministic", group=8), Tile(16, 64, 4, 1)),
    entry(POINT._replace(kernel="single_pass", head_dim=192, head_dim_v=192), Tile(16, 32, 8, 1)),
]


@pytest.mark.parametrize(
    ("asked", "bounded", "tiles"),
    [
        ({}, False, {"forward": Tile(64, 64, 4, 2)}),
        ({"length": 1500}, False, {"forward": Tile(32, 64, 4, 2)}),
        ({"group": 1, "length": 1500}, False, {"forward": Tile(64, 32, 4, 2)}),
        ({"group": 2}, False, {}),
        ({"estimated": True}, False, {"forward": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 4, 1)}),
        ({"group": 8, "estimated": True}, False, {}),  # as of a launch: what has options was measured
        ({"gpu": None}, True, {"forward": HOPPER}),  # which that says of itself
    ],
)
def test_tiles_of_a_table(
    asked: dict[str, Any], bounded: bool, tiles: dict[str, Tile], folders: tuple[Path, Path]
) -> None:
    save(folders[0], *H200_ENTRIES)
    source = Source(**{"gpu": None, "config_dir": folders[0]} | asked)
    found = tiles_of(source, 90, "bf16", (128, 128), bounded=bounded)
    built_in = config_for(90, BF16, 128)
    for name in ("forward", "dq", "dkdv"):
        assert found[name][0] == tiles.get(name, getattr(built_in, name))
        assert found[name][1].startswith("table of NVIDIA H200" if name in tiles else "built-in default")
    assert tiles_of(Source(gpu="NVIDIA H200"), 90, "bf16", (128, 128), bounded=False)["forward"][0] == Tile(
        64, 64, 4, 2
    )


ONE, FIXED = "single_pass", "single_pass_deterministic"
AT_8192 = "at 8192 tokens on 2026-11-21: "


@pytest.mark.parametrize(
    ("backward", "asked", "tile", "whence"),
    [
        (ONE, {}, Tile(32, 128, 4, 1), f"{AT_8192}0.001 s"),
        (ONE, {"length": 1500}, Tile(32, 64, 4, 1), "at 1024 tokens on 2026-11-21: 0.001 s"),
        (ONE, {"group": 8, "estimated": True}, single_pass_tile(90, BF16, 128), "built-in default, never timed"),
        (FIXED, {}, Tile(64, 128, 8, 1), f"{AT_8192}0.001 s"),
        (FIXED, {"group": 8}, single_pass_tile(90, BF16, 128), "built-in default, never timed"),
        (FIXED, {"group": 8, "estimated": True}, Tile(16, 64, 4, 1), f"{AT_8192}estimated, never timed"),
        ("hopper", {}, hopper_backward_launch.default_tile(128), "built-in default, never timed"),  # no table has it
    ],
)
def test_the_single_pass_of_a_table(
    backward: str, asked: dict[str, Any], tile: Tile, whence: str, folders: tuple[Path, Path]
) -> None:
    save(folders[0], *H200_ENTRIES)
    source = Source(**{"config_dir": folders[0]} | asked)
    found, told = tiles_of(source, 90, "bf16", (128, 128), bounded=False, backward=backward)["gradients"]
    version = ".".join(triton.__version__.split(".")[:2])
    table = "" if whence.startswith("built-in") else f"table of NVIDIA H200, Triton {version}, "
    assert (found, told) == (tile, table + whence)


def test_a_table_has_a_single_pass_where_nothing_is_built_in(folders: tuple[Path, Path]) -> None:
    save(folders[0], *H200_ENTRIES)
    source = Source(config_dir=folders[0])
    found = tiles_of(source, 90, "bf16", (192, 192), bounded=False, backward=ONE)
    assert found["gradients"][0] == Tile(16, 32, 8, 1)
    with pytest.raises(ValueError, match="head dim 192 has no tile for a single-pass backward that fits sm_90"):
        tiles_of(source, 90, "bf16", (192, 192), bounded=False, backward=FIXED)


def forward_tile(source: Source, arch: int = 90) -> Tile:
    return tiles_of(source, arch, "bf16", (128, 128), bounded=False)["forward"][0]


def test_the_folder_of_the_environment(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a launch: before the package's tables, in place of the user's, and no reason to fail where it has none."""
    named, ours, users, packages = Source("NVIDIA H200"), Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)
    built_in = config_for(90, BF16, 128).forward
    save(folders[1], entry(tile=packages))
    assert forward_tile(named) == packages
    save(folders[0], entry(tile=users))
    assert forward_tile(named) == users
    assert forward_tile(Source()) == built_in  # which GPU's nobody says

    save(given := tmp_path / "given", entry(tile=ours))
    monkeypatch.setenv(CONFIG_DIR, str(given))
    assert forward_tile(named) == forward_tile(Source()) == forward_tile(Source(group=4)) == ours
    assert forward_tile(Source(config_dir=folders[0])) == users  # an argument comes before it
    assert forward_tile(Source(), 80) == config_for(80, BF16, 128).forward
    with pytest.raises(ValueError, match=rf"RINGATTN_CONFIG_DIR is '{given}': it has no table for sm_80"):
        forward_tile(Source(group=4), 80)
    save(given, entry(), gpu=Gpu("NVIDIA H100", 90))
    with pytest.raises(ValueError, match=r"RINGATTN_CONFIG_DIR .* NVIDIA H100, NVIDIA H200: --gpu says which"):
        forward_tile(Source())
    assert forward_tile(named) == ours

    monkeypatch.setenv(CONFIG_DIR, "")
    assert (forward_tile(named), forward_tile(Source())) == (users, built_in)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config-dir", "/nowhere"], "config_dir is '/nowhere': there is no such folder; `ringattn tune"),
        (["--gpu", "NVIDIA H100"], "there is no table of NVIDIA H100, sm_90, for this version of Triton: "),
        (["--config-dir", "{folder}", "--arch", "sm_80"], "it has no table for sm_80"),
        (["--group", "4"], "--group is 4: it chooses among the entries of a tuned table: it takes --gpu NAME, "),
        (["--seqlen", "8k"], "--seqlen is 8192: it chooses"),
        (["--estimated"], "--estimated is True: it chooses"),
        (["--seqlen", "0", "--gpu", "NVIDIA H200"], "--seqlen is 0: it must be 1 or more"),
    ],
)
def test_no_table_is_refused(arguments: list[str], expected: str, folders: tuple[Path, Path]) -> None:
    save(folders[0], *H200_ENTRIES)
    arguments = [one.format(folder=folders[0]) for one in arguments]
    done = CliRunner().invoke(app, ["--arch", "sm_90", *arguments, "--out-dir", str(folders[0] / "out")], env=WIDE)
    assert done.exit_code != 0
    assert expected in " ".join(done.output.replace("│", " ").split())


def test_the_forward_of_a_table_and_the_one_that_is_asked_for(folders: tuple[Path, Path]) -> None:
    save(folders[0], *H200_ENTRIES)
    source = Source("NVIDIA H200", folders[0])
    for bounded, kernel, other in ((True, "hopper", "portable"), (False, "portable", "hopper")):
        tile = HOPPER if bounded else Tile(64, 64, 4, 2)
        for asked in (None, kernel):
            found = tiles_of(source, 90, "bf16", (128, 128), bounded=bounded, forward_kernel=asked)
            assert found["forward"][0] == tile
        tile, whence = tiles_of(source, 90, "bf16", (128, 128), bounded=bounded, forward_kernel=other)["forward"]
        assert tile == config_for(90, BF16, 128).forward
        assert f"is for forward_kernel='{kernel}', this is '{other}'" in whence


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
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    pairs = [*zip(*[iter(map(int, told.split()))] * 2, strict=True)]
    assert pairs[:3] == [(0, 3), (0, 4), (0, 5)]
    assert pairs[3:8] == [(0, 3), (0, 3), (0, 3), (1, 3), (2, 3)]
    assert pairs[8:11] == [(0, 0), (0, 1), (0, 2)]
    assert pairs[11:] == [(1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--arch", "75"], f"it must be one of {', '.join(f'sm_{arch}' for arch in SHARED_LIMIT)}"),
        (["--arch", "sm_90a"], "arch is 'sm_90a': it must be one of sm_80, "),
        (["--arch", "sm_90", "--role", "lone"], f"role is lone: it must be one of {', '.join(ROLES)}"),
        (["--arch", "sm_90", "--head-dim", "300"], "256"),
        (["--arch", "sm_90", "--dtype", "int8"], "'int8' is no dtype: it takes fp32, bf16, fp16, float16, bfloat16"),
        (["--arch", "sm_90"], "TRITON_INTERPRET is set"),
        (["--arch", "sm_90", "--forward-kernel", "fast"], "one of None, portable, hopper"),
        (["--arch", "sm_90", "--backward", "one"], "single_pass_deterministic, hopper"),
    ],
)
def test_what_there_is_not(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--out-dir", str(tmp_path / "out")], env=WIDE)
    assert done.exit_code != 0
    assert expected in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--value-dim", "--head-dim-v"])
def test_the_flags_of_a_shape_are_those_of_other_commands(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ExportConfig] = []

    def stop(config: ExportConfig) -> ExportConfig:
        asked.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(export_config, "resolved", stop)
    CliRunner().invoke(app, ["--arch", "sm_90", "--head-dim", "192", flag, "128", "--dtype", "fp16"])
    (config,) = asked
    assert (config.dtype, config.head_dim, config.head_dim_v) == ("fp16", 192, 128)


HOPPER_CONFIG = ExportConfig(90, forward_kernel="hopper")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            ExportConfig(80, forward_kernel="hopper"),
            "arch is sm_80: forward_kernel='hopper' takes sm_90; 'portable' takes any",
        ),
        (replace(HOPPER_CONFIG, dtype="fp32"), "dtype is fp32: forward_kernel='hopper' takes bf16, fp16; 'portable'"),
        (replace(HOPPER_CONFIG, head_dim=96), "head_dim is 96: forward_kernel='hopper' takes 64, 128, 256; 'portable'"),
        (replace(HOPPER_CONFIG, head_dim_v=64), "head_dim_v is 64: forward_kernel='hopper' takes 128; 'portable'"),
        (ExportConfig(100, backward="hopper"), "arch is sm_100: backward='hopper' takes sm_90; 'two_pass' takes any"),
        (
            ExportConfig(90, head_dim=96, backward="hopper"),
            "head_dim is 96: backward='hopper' takes 64, 128; 'two_pass' takes any",
        ),
        (
            ExportConfig(90, grouped=False, backward="hopper"),
            "grouped is False: backward='hopper' takes any number of query heads",
        ),
        (
            ExportConfig(90, head_dim=192, backward="single_pass"),
            "head dim 192 has no tile for a single-pass backward that fits sm_90: it takes up to 128; "
            "backward='two_pass' takes any",
        ),
    ],
)
def test_what_a_kernel_does_not_take(config: ExportConfig, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        resolved(config)


def test_the_table_says_which_forward(folders: tuple[Path, Path]) -> None:
    save(folders[0], *H200_ENTRIES)
    config = ExportConfig(90, source=Source(config_dir=folders[0]), forward_kernel=None)
    assert resolved(config).forward_kernel == "portable"
    made = resolved(replace(config, bounded=True))
    assert (made.forward_kernel, made.prefix) == ("hopper", "ringattn_sm90_bf16_d128_bounded_hopper")
    assert resolved(ExportConfig(80, forward_kernel=None)).forward_kernel == "portable"
