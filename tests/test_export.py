"""``ringattn export``: the launcher compiles, and passes what the binary and Triton's own launcher say."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

from ringattn.bench.export.command import Role, app
from ringattn.bench.export.kernels import parameter_sizes
from ringattn.bench.export.tiles import Source, tiles_of
from ringattn.bench.inspect.compiled import ROLES, SHARED_LIMIT
from ringattn.kernels import Tile
from ringattn.kernels.config import config_for
from ringattn.kernels.lookup import Gpu
from ringattn.kernels.tables import Point

from .tile_tables import HOPPER, POINT, entry, estimate, folders, save

__all__ = ["folders"]

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "export"
COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
KERNELS = ("forward", "delta", "dq", "dkdv")
BF16 = torch.bfloat16
CUDA = Path(triton.__file__).parent / "backends" / "nvidia" / "include"  # NVIDIA's own cuda.h, in every wheel
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-isystem", str(CUDA)]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def command(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Of a process where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    line = [sys.executable, "-m", *arguments]
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


WISHES = {
    "causal": "--arch sm_90 --head-dim 128 --causal",
    "last": "--arch 80 --head-dim 40 --head-dim-v 16 --dtype float16 --no-grouped --role last --config-dir {tables}",
}
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80)
TUNED = Point("forward", "fp16", 40, 16, 1, "full", 8192)
"""What the table that "last" takes has an entry for."""
FIELDS: dict[str, dict[str, Any]] = {
    "sm_90": {"arch": 90, "head_dim": 128, "bounded": True},
    "sm_80": {"arch": 80, "head_dim": 40, "head_dim_v": 16, "dtype": "fp16", "grouped": False, "role": "last"},
}


class Export:
    """The files of one export."""

    def __init__(self, wish: str, folder: Path) -> None:
        self.folder = folder
        save(tables := folder.parent / f"{folder.name}-tables", entry(TUNED, Tile(64, 32, 4, 2)), gpu=A100)
        flags = wish.format(tables=tables).split()
        told = command("ringattn", "export", *flags, "--out-dir", str(folder), "--json", "-")
        self.manifest: dict[str, Any] = json.loads(told.stdout)
        self.prefix: str = self.manifest["name"]
        self.kernels = {kernel["name"]: kernel for kernel in self.manifest["kernels"]}

    def compiled(self, *more: str | Path) -> Path:
        """The launcher as a shared library."""
        library = self.folder / "launcher.so"
        sources = [str(path) for path in (self.folder / f"{self.prefix}.c", *more)]
        assert COMPILER is not None
        options = ["-std=c99", *WARNINGS, "-shared", "-fPIC", "-o", str(library)]
        done = subprocess.run([COMPILER, *sources, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return library

    def loaded(self, library: ctypes.CDLL, kernel: str) -> ctypes.c_void_p:
        """A kernel of it as a CUfunction."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        image = ctypes.c_char_p((self.folder / self.kernels[kernel]["cubin"]).read_bytes())
        load = getattr(library, f"{self.prefix}_{kernel}_load")
        assert load(image, ctypes.byref(module), ctypes.byref(function)) == 0
        return function


@pytest.fixture(scope="module", params=WISHES)
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return Export(WISHES[request.param], tmp_path_factory.mktemp(request.param))


def asked(kernel: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in kernel["parameters"] if "same_as" not in one and "value" not in one]


C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def arguments_type(kernel: dict[str, Any]) -> type[ctypes.Structure]:
    """The struct of the header, from the manifest."""
    fields = [(one["name"], C_TYPES.get(one["type"], ctypes.c_uint64)) for one in asked(kernel)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


class Record(ctypes.Structure):
    """``struct record`` of the stand-in."""

    _fields_ = [
        ("launches", ctypes.c_int),
        ("numbers", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("allowed", ctypes.c_int),
        ("symbol", ctypes.c_char * 64),
        ("image", ctypes.c_void_p),
        ("sizes", ctypes.c_int * 65),
        ("values", (ctypes.c_ubyte * 8) * 64),
    ]


def filled(kernel: dict[str, Any], rows: int) -> dict[str, int | float]:
    """A different value for every argument, none of which is misaligned."""
    own: dict[str, int | float] = {"rows": rows, "heads": 6, "group": 3, "softmax_scale": 0.125}
    others = {one["name"]: 160000 + 1000 * i * one.get("multiple_of", 1) for i, one in enumerate(asked(kernel), 1)}
    return {name: own.get(name, value) for name, value in others.items()}


@needs_compiler
def test_the_launcher_passes_what_the_binary_takes(export: Export) -> None:
    library = ctypes.CDLL(str(export.compiled(DATA / "driver.c")))
    record = Record.in_dll(library, "record")
    for name in KERNELS:
        kernel = export.kernels[name]
        sizes = parameter_sizes((export.folder / kernel["cubin"]).read_bytes())
        assert sizes == [one["size"] for one in kernel["parameters"]]
        record.sizes[:] = sizes + [0] * (65 - len(sizes))

        launch, function = getattr(library, f"{export.prefix}_{name}_launch"), export.loaded(library, name)
        assert record.symbol.decode() == kernel["symbol"]
        assert record.allowed == kernel["shared_memory"] or kernel["shared_memory"] <= 48 * 1024

        rows, batch = 1000, 2
        values = filled(kernel, rows)
        arguments, before = arguments_type(kernel)(**values), record.launches
        assert launch(function, ctypes.byref(arguments), batch, ctypes.c_void_p(77)) == 0
        assert (record.launches, record.stream) == (before + 1, 77)
        block = int(kernel["grid"][0].split()[2].rstrip(")"))
        grid, shape = -(-rows // block) * batch * 6, (kernel["threads"], 1, 1, kernel["shared_memory"])
        assert [*record.numbers] == [grid, 1, 1, *shape]
        for one, got in zip(kernel["parameters"], record.values, strict=False):
            if "value" in one:
                assert bytes(got) == bytes(8), one
                continue
            expected = values[one.get("same_as", one["name"])]
            made: Any = C_TYPES.get(one["type"], ctypes.c_uint64)(expected)  # type: ignore[arg-type]
            assert bytes(got)[: one["size"]] == bytes(made), one


@needs_compiler
def test_the_launcher_refuses_what_the_binary_cannot_take(export: Export) -> None:
    library = ctypes.CDLL(str(export.compiled(DATA / "driver.c")))
    record = Record.in_dll(library, "record")
    kernel = export.kernels["forward"]
    launch = getattr(library, f"{export.prefix}_forward_launch")
    values = filled(kernel, 100)
    aligned = [one["name"] for one in asked(kernel) if "multiple_of" in one]
    assert {"q", "k", "v", "out", "lse"} <= {*aligned}
    before = record.launches
    wrongs: list[dict[str, int | float]] = [{name: values[name] + 8} for name in aligned]
    wrongs += [{"rows": -1}, {"columns": -1}, {"heads": -6}, {"softmax_scale": 0.0}, {"softmax_scale": float("nan")}]
    wrongs += [{"rows": 2**31 - 1, "heads": 3 * 2**20}]
    if "group" in values:
        wrongs += [{"group": 0}, {"group": 4}]
    for wrong in wrongs:
        arguments = arguments_type(kernel)(**{**values, **wrong})
        assert launch(ctypes.c_void_p(2), ctypes.byref(arguments), 2, None) == 1, wrong
    most = arguments_type(kernel)(**{**values, "rows": 2**31 - 1, "heads": 3 * 2**29})
    assert launch(ctypes.c_void_p(2), ctypes.byref(most), 2**11, None) == 1  # a multiple of 2^64 programs
    for batch, rows in ((0, 100), (2, 0)):  # nothing to do is no error
        arguments = arguments_type(kernel)(**{**values, "rows": rows})
        assert launch(ctypes.c_void_p(2), ctypes.byref(arguments), batch, None) == 0
    assert record.launches == before


def test_the_order_is_that_of_tritons_own_launcher(export: Export) -> None:
    told = json.loads(command("tests.export.triton_launcher", json.dumps(FIELDS[export.manifest["arch"]])).stdout)
    for name in KERNELS:
        own = [one.get("type", "*u8") for one in export.kernels[name]["parameters"]]
        theirs = told[name]
        assert len(own) == len(theirs)
        for mine, passed in zip(own, theirs, strict=True):
            assert mine == passed or (mine[0] == passed[0] == "*" and len(passed) == 1), (name, own, theirs)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_the_header_is_also_cpp(export: Export) -> None:
    source = f'#include "{export.prefix}.h"\nint main() {{ return sizeof({export.prefix}_dkdv_args) == 0; }}\n'
    done = subprocess.run(
        ["g++", *WARNINGS, "-fsyntax-only", f"-I{export.folder}", "-xc++", "-"],
        input=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


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


def test_the_manifest_says_whose_tiles_they_are(export: Export) -> None:
    told = {name: (kernel["tile"], kernel["tile_from"]) for name, kernel in export.kernels.items()}
    built_in = config_for(80, torch.float16, 40) if export.manifest["role"] == "last" else config_for(90, BF16, 128)
    for name in KERNELS[2:]:
        assert told[name] == (vars(getattr(built_in, name)), "built-in default, never timed")
    if export.manifest["role"] == "last":
        version = ".".join(triton.__version__.split(".")[:2])
        whence = f"table of NVIDIA A100-SXM4-80GB, Triton {version}, at 8192 tokens on 2026-11-21: 0.001 s"
        assert told["forward"] == (vars(Tile(64, 32, 4, 2)), whence)
        assert "/ 64)" in export.kernels["forward"]["grid"][0]
    else:
        assert told["forward"] == (vars(built_in.forward), "built-in default, never timed")


H200_ENTRIES = [
    entry(POINT, Tile(64, 64, 4, 2)),
    entry(POINT._replace(length=1024), Tile(32, 64, 4, 2)),
    entry(POINT._replace(group=1), Tile(64, 32, 4, 2)),
    entry(POINT._replace(mask="bounded"), HOPPER),
    estimate(POINT._replace(kernel="dq"), Tile(64, 64, 4, 1)),
]


@pytest.mark.parametrize(
    ("asked", "bounded", "tiles"),
    [
        ({}, False, {"forward": Tile(64, 64, 4, 2)}),
        ({"length": 1500}, False, {"forward": Tile(32, 64, 4, 2)}),
        ({"group": 1, "length": 1500}, False, {"forward": Tile(64, 32, 4, 2)}),
        ({"group": 2}, False, {}),
        ({"estimated": True}, False, {"forward": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 4, 1)}),
        ({"gpu": None}, True, {}),  # its best is the Hopper forward
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
    if bounded:
        assert "forward_kernel='hopper', which is not exported" in found["forward"][1]
    assert tiles_of(Source(gpu="NVIDIA H200"), 90, "bf16", (128, 128), bounded=False)["forward"][0] == Tile(
        64, 64, 4, 2
    )


def test_a_table_that_is_not_there_is_an_error(folders: tuple[Path, Path]) -> None:
    save(folders[0], *H200_ENTRIES)
    with pytest.raises(ValueError, match="no table of NVIDIA H100, sm_90, for this version of Triton: `ringattn tune"):
        tiles_of(Source(gpu="NVIDIA H100"), 90, "bf16", (128, 128), bounded=False)
    with pytest.raises(ValueError, match="it has no table for sm_80"):
        tiles_of(Source(config_dir=folders[0]), 80, "bf16", (128, 128), bounded=False)
    save(folders[0], entry(), gpu=Gpu("NVIDIA H100", 90))
    with pytest.raises(ValueError, match="it has tables of NVIDIA H100, NVIDIA H200: --gpu says which"):
        tiles_of(Source(config_dir=folders[0]), 90, "bf16", (128, 128), bounded=False)


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


@needs_compiler
def test_the_bounds_of_a_causal_mask(export: Export) -> None:
    if not export.manifest["bounded"]:
        pytest.skip("no bounds")
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
        (["--arch", "sm_75"], f"it must be one of {', '.join(f'sm_{arch}' for arch in SHARED_LIMIT)}"),
        (["--arch", "sm_90a"], "it must be one of sm_80, "),
        (["--arch", "sm_90", "--role", "lone"], ", ".join(f"'{role}'" for role in ROLES)),
        (["--arch", "sm_90", "--head-dim", "300"], "256"),
        (["--arch", "sm_90", "--dtype", "int8"], "'bfloat16', 'float16', 'float32'"),
    ],
)
def test_what_there_is_not(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--out-dir", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert expected in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_the_roles_are_those_of_the_kernels() -> None:
    assert [role.value for role in Role] == [*ROLES]


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="kernels are compiled")
def test_interpreted_kernels_are_not_exported(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--arch", "sm_90", "--out-dir", str(tmp_path)])
    assert done.exit_code != 0
    assert "TRITON_INTERPRET is set" in done.output
