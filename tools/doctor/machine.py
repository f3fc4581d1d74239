"""What ``ringattn doctor`` looks at before anything moves: libraries, versions, GPUs, links, NICs, settings."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from ... import __version__
from ...comm.topology import nvml
from ...comm.topology.nvml import DeviceInfo, pairs_by_link
from ...comm.topology.topology import Topology
from ...comm.transports.nccl import loaded_libraries, nccl_missing
from .findings import FAIL, OK, SKIPPED, Finding, by_rank, differing, ranks_text

# settings that turn a fast path off, and that people forget in their shells
SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe peers are not used",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_SHM_DISABLE": "shared memory is not used",
    "NCCL_NET_DISABLE_INTRA": "NICs are not used inside a node",
}
IMPLICIT_ORDER = (2, 26)  # of NCCL: from here on it can order the kernels of all communicators of a GPU
ORDERED = (
    "where another library's communicators share these GPUs (torch's of FSDP or tensor parallelism), set "
    "NCCL_LAUNCH_ORDER_IMPLICIT=1: without it NCCL promises progress only to one communicator at a time"
)


@dataclass(frozen=True)
class Facts:
    """What one process knows of itself."""

    versions: Mapping[str, str | None]
    libraries: tuple[tuple[str, str], ...]
    """Path and version of every libnccl that is loaded."""
    no_nccl: str | None
    """Why CuPy's NCCL cannot be used; None where it can."""
    settings: Mapping[str, str]
    """Every ``NCCL_*`` of the environment."""


def facts() -> Facts:
    """Of this process, with everything loaded that a transport would load."""
    no_nccl, driver = nccl_missing(), None
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
    here = tuple((str(path), _version_of(path)) for path in loaded_libraries())
    return Facts(versions, here, no_nccl, settings)


def _version_of(path: Path) -> str:
    """Of a library that is loaded already: ``2.29.7``."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return f"unknown version ({type(error).__name__})"
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def machine(everyone: Sequence[Facts], ring: Topology, device: torch.device) -> list[Finding]:
    """Findings about all ranks, from what each told."""
    on_gpu = device.type == "cuda"
    first, *rest = ring.describe().splitlines()
    return [
        versions(everyone),
        libraries(everyone, on_gpu=on_gpu),
        cupy(everyone),
        gpus(ring.devices, on_gpu=on_gpu),
        links(ring.devices),
        nics(ring.devices),
        settings(everyone),
        Finding("ring order", OK, first, more=tuple(rest)),
    ]


def versions(everyone: Sequence[Facts]) -> Finding:
    """The same everywhere? Ranks of two versions compute two things, or wait for each other."""
    mine = everyone[0].versions
    different = {name: differing([one.versions[name] for one in everyone]) for name in mine}
    wrong = [f"{name} is {text}" for name, text in different.items() if text and name not in ("driver", "Python")]
    if wrong:
        return Finding("versions", FAIL, "; ".join(wrong), "install the same versions on every host")
    text = ", ".join(f"{name} {different[name] or value}" for name, value in mine.items() if value is not None)
    return Finding("versions", OK, text)


def libraries(everyone: Sequence[Facts], *, on_gpu: bool) -> Finding:
    """One libnccl in every process, of one version: two would each hold half of a process's communicators."""
    check = "libnccl"
    for rank, one in enumerate(everyone):
        if len(one.libraries) > 1:
            paths = ", ".join(f"{path} ({version})" for path, version in one.libraries)
            todo = (
                "keep one: uninstall the nvidia-nccl package that torch does not use, take the path out of "
                "LD_LIBRARY_PATH, or preload the right one with LD_PRELOAD"
            )
            return Finding(check, FAIL, f"rank {rank} has {len(one.libraries)} loaded: {paths}", todo)
    different = differing([one.libraries[0][1] if one.libraries else "none" for one in everyone])
    if different:
        return Finding(check, FAIL, different, "install the same version on every host")
    if not everyone[0].libraries:
        why = "torch links it statically, or was built without it" if on_gpu else "nothing on a CPU loads it"
        return Finding(check, SKIPPED, f"none is loaded: {why}")
    path, version = everyone[0].libraries[0]
    return Finding(check, OK, f"{version}, {path}")


def cupy(everyone: Sequence[Facts]) -> Finding:
    """Whether CuPy can reach NCCL."""
    if not any(one.no_nccl for one in everyone):
        return Finding("CuPy", OK, "finds NCCL")
    return Finding("CuPy", SKIPPED, f"no transport nccl: {by_rank([one.no_nccl or '' for one in everyone])}")


def gpus(devices: Sequence[DeviceInfo], *, on_gpu: bool) -> Finding:
    """torch's devices and NVML's are matched by UUID: NVML ignores CUDA_VISIBLE_DEVICES."""
    check = "GPUs"
    if not on_gpu:
        return Finding(check, SKIPPED, "the ranks compute on the CPU: torch sees no GPU here")
    unknown = [(rank, device.unknown) for rank, device in enumerate(devices) if device.unknown]
    if unknown:
        rank, why = unknown[0]
        unmatched = any("NVML knows no" in str(why) for _, why in unknown)
        todo = "run nvidia-smi -L: the container shows torch other GPUs than NVML, or the driver was replaced"
        return Finding(check, FAIL if unmatched else SKIPPED, f"rank {rank}: {why}", todo * unmatched)
    sharing: dict[tuple[str, str | None], list[int]] = {}
    for rank, device in enumerate(devices):
        sharing.setdefault((device.host, device.gpu), []).append(rank)
    shared = "; ".join(f"{ranks_text(ranks)} share one" for ranks in sharing.values() if len(ranks) > 1)
    names = ", ".join(dict.fromkeys(str(device.name) for device in devices))
    first = ", ".join(f"rank {rank} is NVML's {device.index}" for rank, device in enumerate(devices[:2]))
    text = f"{len(sharing)} x {names}, matched with NVML by UUID ({first}{', …' * (len(devices) > 2)})"
    return Finding(check, OK, "; ".join(filter(None, [text, shared])))


def links(devices: Sequence[DeviceInfo]) -> Finding:
    """NVLink and PCIe inside the hosts, as NVML and /sys tell."""
    kinds = pairs_by_link(devices)
    slots = sorted({device.pcie_gigabytes for device in devices if device.pcie_gigabytes is not None})
    told = [f"{count} pairs by {text}" for text, count in kinds.items()]
    told += [f"PCIe slots of {', '.join(f'{slot:g}' for slot in slots)} GB/s nominal"] if slots else []
    if not told:
        return Finding("NVLink, PCIe", SKIPPED, next((str(p.unknown) for p in devices if p.unknown), "one GPU alone"))
    return Finding("NVLink, PCIe", OK, "; ".join(told))


def nics(devices: Sequence[DeviceInfo]) -> Finding:
    """The adapters of every host."""
    hosts = {device.host: device.nics for device in devices}
    told = {
        ", ".join(f"{nic.name} {f'{nic.gigabits:g} Gbit/s' if nic.gigabits else 'of unknown rate'}" for nic in found)
        for found in hosts.values()
    }
    if told == {""}:
        return Finding("NICs", SKIPPED, "/sys shows none: a container may hide them")
    several = f", one of {len(told)} kinds of hosts" if len(told) > 1 else ""
    return Finding("NICs", OK, f"{min(told)}{several}")


def settings(everyone: Sequence[Facts]) -> Finding:
    """Every ``NCCL_*`` that is set, on which ranks if not on all, and what it turns off."""
    names = sorted({name for one in everyone for name in one.settings})
    told = []
    for name in names:
        values = [one.settings.get(name) for one in everyone]
        told.append(f"{name}={differing(values) or values[0]}")
        if name in SLOW_SETTINGS and any(value not in (None, "", "0") for value in values):
            told[-1] += f" ({SLOW_SETTINGS[name]})"
    more = (ORDERED,) if any(_unordered(one) for one in everyone) else ()
    return Finding("NCCL_* settings", OK, ", ".join(told) or "none set", more=more)


def _unordered(one: Facts) -> bool:
    """Whether kernels of several communicators may start in any order, though this NCCL could order them."""
    known = [re.match(r"(\d+)\.(\d+)\.", version) for _, version in one.libraries]
    able = any(tuple(map(int, found.groups())) >= IMPLICIT_ORDER for found in known if found)
    return able and one.settings.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") in ("", "0")
