"""What NVML and /sys know of a GPU and its host: where it sits, what it is linked with, how fast its clocks run.

NVML counts all GPUs of a host, whatever CUDA_VISIBLE_DEVICES says: a device of torch's is found by its UUID, never by
its number. `pynvml` (nvidia-ml-py, extra `cli`) is imported when it is needed; where it, the driver or the GPU is
missing, what it would have told is empty, with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import torch

from ..control import Control
from .places import PCIE_LANE_GB_PER_S, SWITCH, Nic, NvLink, Place
from .topology import Topology, ring_topology

SYS = Path("/sys")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MOST_LINKS = 36  # of any GPU so far
# the numbers by which NVML tells NVLink generations (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0), from its header
GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
REMOTE_IS_SWITCH = 2
FABRIC_READY = 3
# why clocks are lower than they could be, by bit; from NVML's header
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")

Query = Callable[[Any, Any], Any]  # (pynvml, device handle) -> value

READINGS: dict[str, Query] = {
    "sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "sm_mhz_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "watts_limit": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "throttled": lambda nvml, gpu: throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}
"""What changes while a GPU works, each with its unit: MHz, watts, degrees Celsius, names of reasons."""


class NoNvml(RuntimeError):
    """NVML cannot tell; the message says why, and what to install."""


def library() -> Any:
    """The `pynvml` module, initialised.

    Raises:
        NoNvml: it is not installed, or finds no driver.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NoNvml("pynvml is not installed: pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML finds no driver ({type(error).__name__}: {error})") from None
    return nvml


def handle(device: torch.device) -> tuple[Any, Any]:
    """(`pynvml`, NVML's handle of one of torch's devices), matched by UUID.

    Raises:
        NoNvml: no NVML, not a GPU, or a GPU that NVML does not know.
    """
    if device.type != "cuda":
        raise NoNvml(f"{device} is not a GPU")
    nvml = library()
    uuid = uuid_of(device)
    try:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML knows no {uuid}, which torch calls {device} ({type(error).__name__})") from None


def uuid_of(device: torch.device) -> str:
    """The UUID of one of torch's devices, as NVML writes it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def driver_version() -> str:
    """Of the NVIDIA driver.

    Raises:
        NoNvml: NVML cannot tell.
    """
    return _text(library().nvmlSystemGetDriverVersion())


class Reader:
    """Reads the clocks of one device: `reader()` is a dict of `READINGS`, without those that the device does not tell.

    The device is looked up once; a reading costs a few calls into the driver, and nothing without one.
    """

    def __init__(self, device: torch.device) -> None:
        self.reason: str | None = None
        """Why nothing can be read; None where it can."""
        self._queries: dict[str, Query] = {}
        try:
            self._nvml, self._gpu = handle(device)
        except NoNvml as error:
            self.reason = str(error)
        else:
            self._queries = dict(READINGS)

    def __call__(self) -> dict[str, Any]:
        """What the device tells now."""
        told: dict[str, Any] = {}
        for name, query in [*self._queries.items()]:
            try:
                told[name] = query(self._nvml, self._gpu)
            except (self._nvml.NVMLError, AttributeError):
                del self._queries[name]  # what a device does not support now, it does not support later
        return told


def reader(device: torch.device) -> Reader:
    """What reads clocks, power, temperature and throttle reasons of a device at every call; {} where nothing can."""
    return Reader(device)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of NVML's reasons for clocks that are lower than they could be."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def discover(control: Control, device: torch.device) -> Topology:
    """The ring through all ranks, which every rank asks for together; rank 0 knows the places, too.

    It decides, and the others hear of the order alone: their places are a megabyte at 1,024 ranks.
    """
    places: list[Place] = []

    def ordered(told: list[object]) -> tuple[list[int], list[int]]:
        places.extend(Place.from_json(place) for place in told)  # type: ignore[arg-type]
        ring = ring_topology(places)
        # as steps, which are much the same: at 1,024 ranks a tenth of the bytes, deflated
        return [len(node) for node in ring.nodes], [b - a for a, b in pairwise((0, *ring.order))]

    found: Any = control.merged(place_of(device).to_json(), ordered, what="the places of the ranks")
    sizes, order = found[0], accumulate(found[1])
    return Topology(tuple(tuple(islice(order, size)) for size in sizes), tuple(places))


def places_of(control: Control, device: torch.device) -> tuple[Place, ...]:
    """The place of every rank, by rank; every rank calls it together."""
    told = control.gather(place_of(device).to_json(), what="the places of the ranks")
    return tuple(Place.from_json(place) for place in told)  # type: ignore[arg-type]


def place_of(device: torch.device, *, sys: Path = SYS) -> Place:
    """Where a device of this process sits, as far as NVML and /sys tell."""
    host, nics = host_name(), nics_of(sys)
    if device.type != "cuda":
        return Place(host, nics=nics, unknown=f"{device} is not a GPU")
    known: dict[str, Any] = {"gpu": uuid_of(device), "name": torch.cuda.get_device_name(device)}
    try:
        nvml, gpu = handle(device)
        bus = _address(nvml.nvmlDeviceGetPciInfo(gpu).busId)
        known["index"] = _asked(nvml, lambda: int(nvml.nvmlDeviceGetIndex(gpu)))
        known["nvlinks"] = tuple(_nvlinks(nvml, gpu))
        known["fabric"] = _asked(nvml, lambda: _fabric(nvml, gpu))
        known["pcie_gigabytes"] = _asked(nvml, lambda: _slot(nvml, gpu))
        known["pcie"] = pcie_path(sys / "bus/pci/devices" / bus) or (bus,)
    except Exception as error:  # the driver's answers are not ours to trust: a ring runs without them
        known["unknown"] = str(error) or type(error).__name__
    return Place(host, nics=nics, **known)


def host_name() -> str:
    """This host's name and the start of its boot id: hosts that are all called localhost are not one."""
    return f"{platform.node()}/{_read(BOOT_ID)[:8]}"


def pcie_path(device: Path) -> tuple[str, ...]:
    """NUMA node, root complex, bridges and address of a PCI device of /sys; empty where it is none, or not there."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ()
    root = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
    if root is None:
        return ()
    path = [part for part in parts[root:] if part.startswith("pci") or PCI_ADDRESS.fullmatch(part)]
    if len(path) < 2:
        return ()
    node = _read(Path(*parts[: root + len(path)]) / "numa_node")
    # -1: the machine has one node, or does not tell; then nothing says that two devices are on different ones
    return (f"numa{node if node.isdigit() else ''}", *path)


def nics_of(sys: Path = SYS) -> tuple[Nic, ...]:
    """The InfiniBand and RoCE adapters of this host, and the Ethernet interfaces that are none of those."""
    found = [
        Nic(entry.name, _infiniband_rate(entry), pcie_path(entry / "device"))
        for entry in _entries(sys / "class/infiniband")
    ]
    taken = {nic.pcie for nic in found if nic.pcie}
    for entry in _entries(sys / "class/net"):
        path = pcie_path(entry / "device")
        # loopback, bridges and tunnels have no device; what an RDMA adapter shows as an interface is that adapter
        if not (entry / "device").exists() or (path and path in taken):
            continue
        speed = _read(entry / "speed")  # Mbit/s; -1, or an error, where the link is down or virtual
        found.append(Nic(entry.name, int(speed) / 1e3 if speed.isdigit() and int(speed) else None, path))
    return tuple(found)


def _infiniband_rate(adapter: Path) -> float | None:
    """Gbit/s of its ports together: ``400 Gb/sec (4X NDR)``."""
    rates = [re.match(r"([\d.]+) Gb/sec", _read(port / "rate")) for port in _entries(adapter / "ports")]
    return sum(float(rate[1]) for rate in rates if rate) or None


def _nvlinks(nvml: Any, gpu: Any) -> Iterator[NvLink]:
    """The active links, counted by peer."""
    links: Counter[tuple[str, int | None]] = Counter()
    for number in range(MOST_LINKS):
        if not _asked(nvml, lambda number=number: nvml.nvmlDeviceGetNvLinkState(gpu, number)):  # type: ignore[misc]
            continue
        peer = _asked(nvml, lambda number=number: _peer(nvml, gpu, number))  # type: ignore[misc]
        if peer is None:
            continue  # a link to nobody knows where joins nobody
        version = _asked(nvml, lambda number=number: nvml.nvmlDeviceGetNvLinkVersion(gpu, number))  # type: ignore[misc]
        links[peer, None if version is None else GENERATIONS.get(version)] += 1
    for (peer, version), count in links.items():
        yield NvLink(peer, count, version)


def _peer(nvml: Any, gpu: Any, link: int) -> str:
    kind = _asked(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link))
    if kind == REMOTE_IS_SWITCH:
        return SWITCH
    return _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)


def _fabric(nvml: Any, gpu: Any) -> str | None:
    """Cluster and clique of a GPU whose NVLink switches reach other hosts; None for one host's own."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    cluster = bytes(info.clusterUuid)
    if info.state != FABRIC_READY or info.status or not any(cluster):
        return None
    return f"{cluster.hex()}/{info.cliqueId}"


def _slot(nvml: Any, gpu: Any) -> float | None:
    """Nominal GB/s of its slot: the best generation, for idle links are slow ones, and the width that is connected."""
    lane = PCIE_LANE_GB_PER_S.get(nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu))
    return None if lane is None else lane * int(nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu))


def _asked(nvml: Any, ask: Callable[[], Any]) -> Any:
    """What NVML tells; None where this device, driver or pynvml does not support the question."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return ask()
    return None


def _address(bus: str | bytes) -> str:
    """A PCI address as /sys writes it: NVML's domain has eight digits, that of /sys four."""
    domain, _, rest = _text(bus).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
