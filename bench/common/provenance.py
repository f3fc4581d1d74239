"""Provenance of a number: the command, the code, the machine and the date."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...comm.topology import nvml
from ...comm.topology.nvml import pairs_by_link
from .ranks import cores

ROOT = Path(__file__).resolve().parents[2]
CODE = ("kernels", "comm", "autotune", "ring", "reference", "conformance", "bench")
PACKAGES = ("torch", "triton", "numpy", "cupy-cuda12x", "cupy-cuda13x", "ring-attention-pytorch")


def provenance(device: torch.device) -> dict[str, Any]:
    """Return what a number measured on ``device`` depends on, as JSON data: command, date, code, versions, machine."""
    return {
        "command": typed_command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ringattn": {"version": __version__, "sources": source_digest(), **git()},
        "versions": package_versions(),
        "cpu": cpu(),
        "gpu": gpu(device) if device.type == "cuda" else None,
        "topology": _or_unknown(lambda: topology(device)),
    }


def typed_command() -> str:
    """Return the typed command, without the folder of the executable."""
    program = Path(sys.argv[0]).name
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if program == "__main__.py":  # a child of such a process has no spec
        program = "python -m ringattn"
    elif spec is not None and spec.origin == sys.argv[0]:
        program = f"python -m {spec.name}"
    # File names can hold any bytes; the record is text.
    return f"{program} {shlex.join(sys.argv[1:])}".strip().encode(errors="replace").decode()


def source_digest() -> str:
    """Return a digest of the package's Python files, which identifies the code if there is no git."""
    digest = hashlib.sha256()
    inner = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    for path in sorted([*ROOT.glob("*.py"), *inner]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def git() -> dict[str, Any]:
    """Return ``commit`` and whether files are ``modified``; both None if the package is not in its own checkout."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if (ROOT / ".git").exists():
            return {"commit": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"commit": None, "modified": None}


def package_versions() -> dict[str, Any]:
    """Return the versions of Python, of installed packages, and of the libraries in torch."""
    by_name: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        cudnn: Callable[[], int | None] = torch.backends.cudnn.version
        by_name |= {"cuda": torch.version.cuda, "cudnn": cudnn()}
        nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
        by_name["nccl"] = _or_unknown(lambda: ".".join(map(str, nccl())))
    return by_name


def cpu() -> dict[str, Any]:
    """Return the CPU's model, the cores that this process may use, memory and load."""
    info, memory = (_read(path) for path in ("/proc/cpuinfo", "/proc/meminfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+) kB", memory, re.MULTILINE)
    return {
        "model": model[1] if model else platform.machine(),
        "cores": cores(),
        "memory_gib": round(int(total[1]) / 2**20, 1) if total else None,
        "load": _read("/proc/loadavg").partition(" ")[0] or None,
        "system": f"{platform.system()} {platform.release()}",
    }


def gpu(device: torch.device) -> dict[str, Any]:
    """Return the GPU, its driver and its current clocks."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _or_unknown(nvml.driver_version),
        "clocks": _or_unknown(lambda: gpu_clocks(device)),
    }


def topology(device: torch.device) -> dict[str, Any]:
    """Return the network adapters; for a GPU also the number of GPUs and the links between them, from NVML."""
    nics = {nic.name: None if nic.gigabits is None else f"{nic.gigabits:g} Gbit/s" for nic in nvml.list_host_nics()}
    if device.type != "cuda":
        return {"nics": nics}
    devices = [nvml.device_info(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return {"gpus": len(devices), "pairs": pairs_by_link(devices), "nics": nics}


def gpu_clocks(device: torch.device) -> dict[str, Any]:
    """Return current clocks, power, temperature and throttle reasons, or the reason why NVML gives none."""
    read = nvml.GpuReader(device)
    return read() if read.reason is None else {"unknown": read.reason}


def _or_unknown(query: Callable[[], Any]) -> Any:
    """Return the answer of ``query``, or its error's name, because a missing clock must not fail a measurement."""
    try:
        return query()
    except Exception as error:
        return f"unknown: {type(error).__name__}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
