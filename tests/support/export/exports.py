"""Exports for tests, and the recording driver that their launchers run on."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from ringattn.kernels import Tile
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.tables import CONFIG_DIR, TuningPoint

from ..tile_tables import entry, save

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent
COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
CUDA = Path(triton.__file__).parent / "backends" / "nvidia" / "include"  # cuda.h of NVIDIA, part of every Triton wheel
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-isystem", str(CUDA)]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
needs_cpp = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

A100 = assumed_gpu(80, "NVIDIA A100-SXM4-80GB")
TUNED = {
    "forward": (TuningPoint("forward", "fp16", 40, 16, 1, "full", 8192), Tile(64, 32, 4, 2)),
    "gradients": (TuningPoint("single_pass_deterministic", "bf16", 96, 96, 1, "bounded", 8192), Tile(32, 32, 4, 1)),
}
"""Table entries of the kernels that "last" and "atomics" export."""

EXPORTED = pytest.mark.compiles("kernels/attention.py", "tools/export", "autotune/gate.py", "tests/support/export")
"""Sources of every export and of its tests."""

STREAM = 77
MOST = 96  # parameter limit of the recording driver

OF_TABLE = f"--no-grouped --role last --gpu '{A100.name}' --config-dir {{tables}}"
CONFIGS = {
    "causal": "--arch sm_90 --head-dim 128 --causal",
    "last": f"--arch 80 --head-dim 40 --value-dim 16 --dtype float16 {OF_TABLE}",
    "described": "--arch sm_90 --head-dim 128 --causal --forward-kernel hopper --backward single_pass_deterministic",
}
HOPPER_FIRST = "--arch sm_90 --head-dim 64 --dtype float16 --no-grouped --role first --forward-kernel hopper"
NIGHTLY_CONFIGS = {
    "hopper 256": "--arch sm_90 --head-dim 256 --causal --role last --forward-kernel hopper",
    "hopper first": f"{HOPPER_FIRST} --backward single_pass",
    "hopper backward": "--arch sm_90 --head-dim 128 --causal --role middle --backward hopper",
    "blackwell": "--arch sm_100 --head-dim 128 --causal --backward single_pass",
    "atomics": f"--arch sm_80 --head-dim 96 --causal --backward single_pass_deterministic {OF_TABLE}",
    "float32": "--arch sm_90 --head-dim 64 --dtype float32 --causal --role last --backward single_pass",
}


def command(*arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module in a process without Triton's interpreter and without a table folder in its environment."""
    left_out = ("TRITON_INTERPRET", CONFIG_DIR)
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | variables
    line = [sys.executable, "-m", *arguments]
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def built(library: Path, *sources: Path, options: tuple[str, ...] = ()) -> Path:
    """Compile C sources to a shared library."""
    assert COMPILER is not None
    library.parent.mkdir(parents=True, exist_ok=True)
    shared = ["-shared", "-fPIC", "-Wl,-Bsymbolic"]  # bind to the recording driver even if the real one is loaded
    line = [COMPILER, *map(str, sources), "-std=c99", *WARNINGS, *shared, *options, "-o", str(library)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


class Export:
    def __init__(self, config: str, folder: Path, name: str = "") -> None:
        self.folder, self.config_name = folder, name
        save(tables := folder.parent / f"{folder.name}-tables", *(entry(*tuned) for tuned in TUNED.values()), gpu=A100)
        flags = shlex.split(config.format(tables=tables))
        self.config_dir = str(tables) if "--config-dir" in flags else None
        output = command("ringattn", "export", *flags, "--out-dir", str(folder), "--json", "-")
        self.manifest: dict[str, Any] = json.loads(output.stdout)
        self.prefix: str = self.manifest["name"]
        self.kernels = {kernel["name"]: kernel for kernel in self.manifest["kernels"]}

    def compiled(self, *more: Path, options: tuple[str, ...] = ()) -> ctypes.CDLL:
        path = self.folder / "launcher.so"
        if not path.exists():
            built(path, self.folder / f"{self.prefix}.c", *more, options=options)
        return ctypes.CDLL(str(path))

    def recording(self) -> tuple[ctypes.CDLL, Record]:
        """Return the launcher on a recording driver, and the driver's record."""
        library = self.compiled(DATA / "driver.c")
        return library, Record.in_dll(library, "record")

    def loaded(self, library: ctypes.CDLL, kernel: str) -> ctypes.c_void_p:
        """Load a kernel and return its CUfunction."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        image = ctypes.c_char_p((self.folder / self.kernels[kernel]["cubin"]).read_bytes())
        load = getattr(library, f"{self.prefix}_{kernel}_load")
        assert load(image, ctypes.byref(module), ctypes.byref(function)) == 0
        return function

    def launch(self, library: ctypes.CDLL, name: str, values: dict[str, Any], batch: int, stream: int = STREAM) -> int:
        kernel = self.kernels[name]
        arguments = arguments_type(kernel)(**{entry["name"]: values[entry["name"]] for entry in kernel["arguments"]})
        launch = getattr(library, f"{self.prefix}_{name}_launch")
        result: int = launch(self.loaded(library, name), ctypes.byref(arguments), batch, ctypes.c_void_p(stream))
        return result

    @property
    def config(self) -> dict[str, Any]:
        manifest, (head_dim, head_dim_v) = self.manifest, self.manifest["head_dim"]
        same = ("dtype", "bounded", "grouped", "role", "forward_kernel", "backward")
        dims = {"arch": int(manifest["arch"][3:]), "head_dim": head_dim, "head_dim_v": head_dim_v}
        table = {"gpu": A100.name, "config_dir": self.config_dir} if self.config_dir else {}
        return dims | {name: manifest[name] for name in same} | table


_EXPORTED: dict[str, Export] = {}


def exported(name: str, paths: pytest.TempPathFactory) -> Export:
    """Return one of CONFIGS or NIGHTLY_CONFIGS, which is created once for all tests."""
    if name not in _EXPORTED:
        _EXPORTED[name] = Export((CONFIGS | NIGHTLY_CONFIGS)[name], paths.mktemp(name.replace(" ", "-")), name)
    return _EXPORTED[name]


C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def arguments_type(kernel: dict[str, Any]) -> type[ctypes.Structure]:
    """Build the argument struct of the header from the manifest."""
    fields = [(argument["name"], C_TYPES.get(argument["type"], ctypes.c_uint64)) for argument in kernel["arguments"]]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


class Record(ctypes.Structure):
    """``struct record`` of the recording driver."""

    _fields_ = [
        ("launches", ctypes.c_int),
        ("numbers", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("allowed", ctypes.c_int),
        ("symbol", ctypes.c_char * 64),
        ("image", ctypes.c_void_p),
        ("sizes", ctypes.c_int * (MOST + 1)),
        ("values", (ctypes.c_ubyte * 128) * MOST),
        ("driver_version", ctypes.c_int),
        ("set", ctypes.c_ulonglong * 4),
    ]

    def expect(self, sizes: list[int], driver_version: int = 13020) -> None:
        """Set the sizes of the kernel's parameters and the version of the driver."""
        self.sizes[:] = sizes + [0] * (MOST + 1 - len(sizes))
        self.driver_version = driver_version

    def passed(self) -> list[bytes]:
        return [bytes(value)[:size] for size, value in zip(self.sizes, self.values, strict=False) if size]


class Map(ctypes.Structure):
    """``struct map`` of the recording driver, which it stores in place of a tensor map."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        *((name, ctypes.c_ubyte) for name in (
            "rank", "type", "always", "interleave", "swizzle", "promotion", "fill", "unused"
        )),
        ("sizes", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("steps", ctypes.c_uint32 * 4),
    ]  # fmt: skip
