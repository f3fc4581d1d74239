"""What ``ringattn doctor`` looks at before anything moves: libraries, versions, GPUs, links, NICs, settings."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton

from ... import __version__
from ...comm.topology import nvml
from ...comm.topology.nvml import DeviceInfo, pairs_by_link
from ...comm.topology.topology import Topology
from ...comm.transports.nccl import loaded_libraries, nccl_missing
from .findings import FAIL, OK, SKIPPED, Finding, by_rank, ranks_text

# settings that turn a fast path off, and that people forget in their shells
SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe peers are not used",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_SHM_DISABLE": "shared memory is not used",
    "NCCL_NET_DISABLE_INTRA": "NICs are not used inside a node",
}
IMPLICIT_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDERED = (
    "where another library's communicators share these GPUs (torch's of FSDP or tensor parallelism), set "
    f"{IMPLICIT_ORDER}=1 (NCCL 2.26 or later): without it NCCL promises progress only to one communicator at a time"
)
MAY_DIFFER = ("driver", "Python")
ONE_LIBRARY = (
    "keep one: uninstall the nvidia-nccl package that torch does not use, take the path out of LD_LIBRARY_PATH, or "
    "preload the right one with LD_PRELOAD"
)
Facts = dict[str, Any]
"""What one process knows of itself, ready for JSON: ``versions`` by name; ``libraries``, path and version of every
libnccl that is loaded; ``no_nccl``, why CuPy's NCCL cannot be used, or ""; ``settings``, every ``NCCL_*``."""


def facts() -> Facts:
    """Of this process, with everything loaded that a transport would load."""
    no_nccl, driver = nccl_missing() or "", None
    with suppress(nvml.NoNvml):
        driver = nvml.driver_version()
    versions = {
        "ringattn": __version__,
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "CuPy": getattr(sys.modules.get("cupy"), "__version__", None),
        "CUDA of torch": torch.version.cuda,
        "driver": driver,
        "Python": platform.python_version(),
    }
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    libraries = [[str(path), _version_of(path)] for path in loaded_libraries()]
    return {"versions": versions, "libraries": libraries, "no_nccl": no_nccl, "settings": settings}


def _version_of(path: Path) -> str:
    """Of a library that is loaded already: ``2.29.7``."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return f"unknown version ({type(error).__name__})"
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def machine(everyone: Sequence[Facts], ring: Topology, *, on_gpu: bool) -> list[Finding]:
    """Findings about all ranks, from what each told."""
    return [
        versions(everyone),
        libraries(everyone, on_gpu=on_gpu),
        cupy(everyone),
        gpus(ring.devices, on_gpu=on_gpu),
        links(ring.devices),
        nics(ring.devices),
        settings(everyone),
        Finding("ring order", OK, ring.describe()),
    ]


def versions(everyone: Sequence[Facts]) -> Finding:
    """The same everywhere? Ranks of two versions compute two things, or wait for each other."""
    by_name = {name: [one["versions"][name] for one in everyone] for name in everyone[0]["versions"]}
    wrong = [name for name, values in by_name.items() if len({*values}) > 1 and name not in MAY_DIFFER]
    differing = wrong or [name for name, values in by_name.items() if any(values)]
    text = ", ".join(f"{name} {by_rank(by_name[name])}" for name in differing)
    return Finding("versions", *((FAIL, text, "install the same versions on every host") if wrong else (OK, text)))


def libraries(everyone: Sequence[Facts], *, on_gpu: bool) -> Finding:
    """One libnccl in every process, of one version: two would each hold half of a process's communicators."""
    check = "libnccl"
    for rank, one in enumerate(everyone):
        if len(one["libraries"]) > 1:
            paths = ", ".join(f"{path} ({version})" for path, version in one["libraries"])
            return Finding(check, FAIL, f"rank {rank} has {len(one['libraries'])} loaded: {paths}", ONE_LIBRARY)
    loaded = [one["libraries"][0][1] if one["libraries"] else "none" for one in everyone]
    if len({*loaded}) > 1:
        return Finding(check, FAIL, by_rank(loaded), "install the same version on every host")
    if not everyone[0]["libraries"]:
        why = "torch links it statically, or was built without it" if on_gpu else "nothing on a CPU loads it"
        return Finding(check, SKIPPED, f"none is loaded: {why}")
    return Finding(check, OK, f"{loaded[0]}, {everyone[0]['libraries'][0][0]}")


def cupy(everyone: Sequence[Facts]) -> Finding:
    """Whether CuPy can reach NCCL."""
    missing = [one["no_nccl"] for one in everyone]
    if any(missing):
        return Finding("CuPy", SKIPPED, f"no transport nccl: {by_rank(missing)}")
    return Finding("CuPy", OK, "finds NCCL")


def gpus(devices: Sequence[DeviceInfo], *, on_gpu: bool) -> Finding:
    """torch's devices and NVML's are matched by UUID: NVML ignores CUDA_VISIBLE_DEVICES."""
    if not on_gpu:
        return Finding("GPUs", SKIPPED, "the ranks compute on the CPU: torch sees no GPU here")
    unknown = [f"rank {rank}: {device.unknown}" for rank, device in enumerate(devices) if device.unknown]
    if unknown:
        if not any("NVML knows no" in why for why in unknown):
            return Finding("GPUs", SKIPPED, unknown[0])
        todo = "run nvidia-smi -L: the container shows torch other GPUs than NVML, or the driver was replaced"
        return Finding("GPUs", FAIL, unknown[0], todo)
    sharing: dict[tuple[str, str | None], list[int]] = {}
    for rank, device in enumerate(devices):
        sharing.setdefault((device.host, device.gpu), []).append(rank)
    names = ", ".join(dict.fromkeys(str(device.name) for device in devices))
    shared = [f"; {ranks_text(ranks)} share one" for ranks in sharing.values() if len(ranks) > 1]
    return Finding("GPUs", OK, f"{len(sharing)} x {names}, matched with NVML by UUID{''.join(shared)}")


def links(devices: Sequence[DeviceInfo]) -> Finding:
    """NVLink and PCIe inside the hosts, as NVML and /sys tell."""
    slots = sorted({device.pcie_gigabytes for device in devices if device.pcie_gigabytes is not None})
    texts = [f"{count} pairs by {text}" for text, count in pairs_by_link(devices).items()]
    texts += [f"PCIe slots of {', '.join(f'{slot:g}' for slot in slots)} GB/s nominal"] if slots else []
    if texts:
        return Finding("NVLink, PCIe", OK, "; ".join(texts))
    return Finding("NVLink, PCIe", SKIPPED, next((str(p.unknown) for p in devices if p.unknown), "one GPU alone"))


def nics(devices: Sequence[DeviceInfo]) -> Finding:
    """The adapters of every host."""
    texts = {
        ", ".join(f"{nic.name} {f'{nic.gigabits:g} Gbit/s' if nic.gigabits else 'of unknown rate'}" for nic in cards)
        for cards in {device.host: device.nics for device in devices}.values()
    }
    if texts == {""}:
        return Finding("NICs", SKIPPED, "/sys shows none: a container may hide them")
    return Finding("NICs", OK, min(texts) + (f", one of {len(texts)} kinds of hosts" if len(texts) > 1 else ""))


def settings(everyone: Sequence[Facts]) -> Finding:
    """Every ``NCCL_*`` that is set, on which ranks if not on all, and what it turns off."""
    texts = []
    for name in sorted({name for one in everyone for name in one["settings"]}):
        values = [one["settings"].get(name, "unset") for one in everyone]
        slow = name in SLOW_SETTINGS and any(value not in ("unset", "", "0") for value in values)
        texts.append(f"{name}={by_rank(values)}" + (f" ({SLOW_SETTINGS[name]})" if slow else ""))
    text = ", ".join(texts) or "none set"
    unordered = any(one["libraries"] and one["settings"].get(IMPLICIT_ORDER, "0") in ("", "0") for one in everyone)
    return Finding("NCCL_* settings", OK, f"{text}; {ORDERED}" if unordered else text)
