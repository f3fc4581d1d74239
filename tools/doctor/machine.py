"""Checks of ``ringattn doctor`` that send nothing: versions, libraries, GPUs, links, NICs and settings."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton

from ... import __version__
from ...autotune.assemblers import assembler_version, triton_assembler
from ...comm.topology import nvml
from ...comm.topology.nvml import DeviceInfo, pairs_by_link
from ...comm.topology.topology import Topology
from ...comm.transports.nccl import explain_missing_nccl, loaded_libraries
from ...kernels.gpu import arch_name, gpu_or_interpreter, is_amd
from .findings import FAIL, OK, SKIPPED, Finding, list_ranks, text_by_rank

# settings that disable a fast path and are easily forgotten in a shell
SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe peers are not used",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_SHM_DISABLE": "shared memory is not used",
    "NCCL_NET_DISABLE_INTRA": "NICs are not used inside a node",
}
IMPLICIT_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDER_HINT = (
    "if other libraries use NCCL communicators on these GPUs (such as torch's FSDP or tensor parallelism), set "
    f"{IMPLICIT_ORDER}=1 (NCCL 2.26 or later); otherwise NCCL guarantees progress for one communicator at a time only"
)
OPTIONAL_VERSIONS = ("driver", "Python")
ONE_LIBRARY_HINT = (
    "keep one: uninstall the nvidia-nccl package that torch does not use, remove the path from LD_LIBRARY_PATH, or "
    "preload the right library with LD_PRELOAD"
)
SAFE_ASSEMBLER = (13, 1)
"""First ptxas that mends the wrong code of ``ASSEMBLER_HINT``."""
ASSEMBLER_HINT = (
    "before 13.1 it may generate wrong code for sm_90 "
    "(https://github.com/fla-org/flash-linear-attention/pull/1262): check your kernels with `ringattn inspect --gate`, "
    "or set TRITON_PTXAS_PATH to a newer ptxas, such as that of the package nvidia-cuda-nvcc"
)
ProcessFacts = dict[str, Any]
"""Facts about one process as JSON: ``versions`` by name, ``libraries`` (path and version of every loaded libnccl),
``no_nccl`` (the reason why CuPy cannot use NCCL, or ""), ``c_compiler`` (path or ""), ``settings`` (all ``NCCL_*``),
and ``assembler`` (architecture of the GPU, or 90 without one, and the version of Triton's ptxas, empty for AMD).
"""


def collect_facts() -> ProcessFacts:
    """Load the libraries of all transports, and return the facts about this process."""
    no_nccl, driver = explain_missing_nccl() or "", None
    with suppress(nvml.NvmlUnavailableError):
        driver = nvml.driver_version()
    versions = {
        "ringattn": __version__,
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "CuPy": getattr(sys.modules.get("cupy"), "__version__", None),
        "torch's CUDA": torch.version.cuda,
        "torch's ROCm": torch.version.hip,
        "driver": driver,
        "Python": platform.python_version(),
    }
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    libraries = [[str(path), _library_version(path)] for path in loaded_libraries()]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    arch = gpu_or_interpreter(device).arch or 90
    facts = {"versions": versions, "libraries": libraries, "no_nccl": no_nccl, "settings": settings}
    assembler = [arch, [] if is_amd(arch) else [*assembler_version(triton_assembler(arch))]]
    return facts | {"c_compiler": find_c_compiler(), "assembler": assembler}


def find_c_compiler() -> str:
    """Return the C compiler that Triton builds its launchers with, or "" if there is none."""
    if triton.knobs.build.impl is not None:
        return "triton.knobs.build.impl"
    named = os.environ.get("CC")
    candidates = ["gcc", "clang"] if named is None else [named]
    return next(filter(None, map(shutil.which, candidates)), "")


def _library_version(path: Path) -> str:
    """Return the version of a loaded libnccl, such as ``2.29.7``."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return f"unknown version ({type(error).__name__})"
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def check_machine(everyone: Sequence[ProcessFacts], ring: Topology, *, on_gpu: bool) -> list[Finding]:
    """Return the findings of all checks that send nothing, from the facts of all ranks."""
    return [
        check_versions(everyone),
        check_assembler(everyone),
        check_libraries(everyone, on_gpu=on_gpu),
        check_cupy(everyone),
        check_c_compiler(everyone, on_gpu=on_gpu),
        check_gpus(ring.devices, on_gpu=on_gpu),
        check_links(ring.devices),
        check_nics(ring.devices),
        check_settings(everyone),
        Finding("ring order", OK, ring.describe()),
    ]


def check_versions(everyone: Sequence[ProcessFacts]) -> Finding:
    """Check that all ranks have the same versions, because different ones may give wrong results or deadlocks."""
    by_name = {name: [rank_facts["versions"][name] for rank_facts in everyone] for name in everyone[0]["versions"]}
    wrong = [name for name, values in by_name.items() if len({*values}) > 1 and name not in OPTIONAL_VERSIONS]
    listed = wrong or [name for name, values in by_name.items() if any(values)]
    text = ", ".join(f"{name} {text_by_rank(by_name[name])}" for name in listed)
    return Finding("versions", *((FAIL, text, "install the same versions on every host") if wrong else (OK, text)))


def check_assembler(everyone: Sequence[ProcessFacts]) -> Finding:
    """Report the version of the assembler, with a warning if it may miscompile kernels for sm_90."""
    texts = []
    for arch, version in (rank_facts["assembler"] for rank_facts in everyone):
        assembler = f"ptxas {'.'.join(map(str, version))}" if version else "LLVM"
        is_unsafe = arch == 90 and tuple(version) < SAFE_ASSEMBLER
        texts.append(f"{assembler} for {arch_name(arch)}{f'; {ASSEMBLER_HINT}' if is_unsafe else ''}")
    return Finding("assembler", OK, text_by_rank(texts))


def check_libraries(everyone: Sequence[ProcessFacts], *, on_gpu: bool) -> Finding:
    """Check that each process has loaded one libnccl, and all the same version.

    With two libraries in a process, torch and ringattn would create communicators in different ones.
    """
    check = "libnccl"
    for rank, rank_facts in enumerate(everyone):
        if len(rank_facts["libraries"]) > 1:
            paths = ", ".join(f"{path} ({version})" for path, version in rank_facts["libraries"])
            return Finding(
                check, FAIL, f"rank {rank} has {len(rank_facts['libraries'])} loaded: {paths}", ONE_LIBRARY_HINT
            )
    loaded = [rank_facts["libraries"][0][1] if rank_facts["libraries"] else "none" for rank_facts in everyone]
    if len({*loaded}) > 1:
        return Finding(check, FAIL, text_by_rank(loaded), "install the same version on every host")
    if not everyone[0]["libraries"]:
        reason = "torch links it statically, or was built without it" if on_gpu else "nothing on a CPU loads it"
        return Finding(check, SKIPPED, f"none is loaded: {reason}")
    return Finding(check, OK, f"{loaded[0]}, {everyone[0]['libraries'][0][0]}")


def check_cupy(everyone: Sequence[ProcessFacts]) -> Finding:
    """Check that CuPy can use NCCL."""
    missing = [rank_facts["no_nccl"] for rank_facts in everyone]
    if any(missing):
        return Finding("CuPy", SKIPPED, f"cannot use NCCL: {text_by_rank(missing)}")
    return Finding("CuPy", OK, "can use NCCL")


def check_c_compiler(everyone: Sequence[ProcessFacts], *, on_gpu: bool) -> Finding:
    """Check that Triton finds a C compiler; without one the first launch of a kernel fails."""
    if not on_gpu:
        return Finding("C compiler", SKIPPED, "needed only for launches on a GPU")
    paths = [rank_facts["c_compiler"] for rank_facts in everyone]
    if all(paths):
        return Finding("C compiler", OK, text_by_rank(paths))
    text = text_by_rank([path or "none" for path in paths])
    return Finding("C compiler", FAIL, text, "install gcc or clang, or set CC to a C compiler, on every host")


def check_gpus(devices: Sequence[DeviceInfo], *, on_gpu: bool) -> Finding:
    """Check that NVML knows torch's GPUs by UUID; indices differ, as NVML ignores CUDA_VISIBLE_DEVICES."""
    if not on_gpu:
        return Finding("GPUs", SKIPPED, "the ranks use the CPU, because torch finds no GPU")
    unknown = [f"rank {rank}: {device.unknown}" for rank, device in enumerate(devices) if device.unknown]
    if unknown:
        if not any("NVML does not know" in reason for reason in unknown):
            return Finding("GPUs", SKIPPED, unknown[0])
        todo = "run nvidia-smi -L: the container shows NVML and torch different GPUs, or the driver was replaced"
        return Finding("GPUs", FAIL, unknown[0], todo)
    sharing: dict[tuple[str, str | None], list[int]] = {}
    for rank, device in enumerate(devices):
        sharing.setdefault((device.host, device.gpu), []).append(rank)
    names = ", ".join(dict.fromkeys(str(device.name) for device in devices))
    shared = [f"; {list_ranks(ranks)} share one" for ranks in sharing.values() if len(ranks) > 1]
    return Finding("GPUs", OK, f"{len(sharing)} x {names}, matched with NVML by UUID{''.join(shared)}")


def check_links(devices: Sequence[DeviceInfo]) -> Finding:
    """Report NVLink and PCIe inside the hosts, from NVML and /sys."""
    slots = sorted({device.pcie_gigabytes for device in devices if device.pcie_gigabytes is not None})
    texts = [f"{count} pairs over {text}" for text, count in pairs_by_link(devices).items()]
    texts += [f"PCIe slots of {', '.join(f'{slot:g}' for slot in slots)} GB/s nominal"] if slots else []
    if texts:
        return Finding("NVLink, PCIe", OK, "; ".join(texts))
    return Finding("NVLink, PCIe", SKIPPED, next((str(p.unknown) for p in devices if p.unknown), "only one GPU"))


def check_nics(devices: Sequence[DeviceInfo]) -> Finding:
    """Report the network adapters of the hosts."""
    texts = {
        ", ".join(f"{nic.name} {f'{nic.gigabits:g} Gbit/s' if nic.gigabits else 'of unknown rate'}" for nic in cards)
        for cards in {device.host: device.nics for device in devices}.values()
    }
    if texts == {""}:
        return Finding("NICs", SKIPPED, "/sys shows none; a container may hide them")
    return Finding(
        "NICs", OK, min(texts) + (f"; hosts have {len(texts)} different sets of NICs" if len(texts) > 1 else "")
    )


def check_settings(everyone: Sequence[ProcessFacts]) -> Finding:
    """Report every ``NCCL_*`` that is set, with its ranks unless all have it, and the fast paths it disables."""
    texts = []
    for name in sorted({name for rank_facts in everyone for name in rank_facts["settings"]}):
        values = [rank_facts["settings"].get(name, "unset") for rank_facts in everyone]
        is_slow = name in SLOW_SETTINGS and any(value not in ("unset", "", "0") for value in values)
        texts.append(f"{name}={text_by_rank(values)}" + (f" ({SLOW_SETTINGS[name]})" if is_slow else ""))
    text = ", ".join(texts) or "none set"
    is_unordered = any(
        rank_facts["libraries"] and rank_facts["settings"].get(IMPLICIT_ORDER, "0") in ("", "0")
        for rank_facts in everyone
    )
    return Finding("NCCL_* settings", OK, f"{text}; {ORDER_HINT}" if is_unordered else text)
