"""The NCCL library that lets several ranks share a GPU: where it is, how new, and how to have it loaded first.

From 2.30 on NCCL takes several ranks of one communicator on one GPU, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. Torch
brings an older one; a process that loads a newer one before torch and CuPy has that one alone, for both take the
``libnccl.so.2`` that is there (CuPy 14.2 does, seen with 2.32.3).
`python -m tests.support.nccl_preload MODULE ARGUMENT…` runs a module like that.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "RINGATTN_NCCL_LIBRARY"
"""Names the library; without it, that of the package ``nvidia-nccl-cu12`` or ``-cu13``."""

SHARING = (2, 30, 0)
"""The first version whose ranks may share a GPU."""

ASK = "import ctypes, sys; v = ctypes.c_int(); ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v)); print(v.value)"


def library(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The library that the variable names, else the installed package's; None where there is neither."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE]).resolve(strict=True)
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # there is no package `nvidia` either
        return None
    folders = package.submodule_search_locations if package is not None else None
    paths = (Path(folder, "lib", "libnccl.so.2") for folder in folders or ())
    return next((path.resolve() for path in paths if path.is_file()), None)


def version_of(path: Path) -> tuple[int, int, int]:
    """Asked in a process of its own: in this one the library must not be loaded beside another."""
    code = int(subprocess.check_output([sys.executable, "-c", ASK, str(path)], timeout=60))  # 23003 is 2.30.3
    return code // 10_000, code // 100 % 100, code % 100


def cannot_share(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why several ranks cannot share a GPU by NCCL, with what would help; None where they can."""
    path = library(environment)
    if path is None:
        return f"no libnccl is installed: pip install nvidia-nccl-cu13, or name one in {VARIABLE}"
    version = version_of(path)
    if version >= SHARING:
        return None
    version_text = ".".join(map(str, version))
    return f"ranks that share a GPU need NCCL 2.30, {path} is {version_text}: name a newer one in {VARIABLE}"


def preload(environment: Mapping[str, str] = os.environ) -> None:
    """Load the library that the variable names, where it names one: before torch does."""
    if environment.get(VARIABLE):
        if "torch" in sys.modules:
            raise RuntimeError("torch is loaded, and has loaded its own NCCL")
        ctypes.CDLL(environment[VARIABLE], mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    preload()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
