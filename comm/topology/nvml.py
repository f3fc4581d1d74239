"""Devices of the ranks, the links between them and their clocks, as far as NVML and /sys tell.

Bandwidths are in GB/s (10^9 bytes) per direction. An "expected" bandwidth is the part of the nominal rate that copies
reach without other traffic. Compare measurements with it; it is not a measurement.

NVML numbers all GPUs of a host, whatever CUDA_VISIBLE_DEVICES says, so devices are matched by UUID. `pynvml`
(nvidia-ml-py, extra `cli`) is imported when it is needed. If pynvml, the driver or the GPU is missing, the fields that
depend on it are empty, and `unknown` has the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

SWITCH = "switch"  # peer of links into an NVSwitch, which reach every other GPU that is linked to the switch

# Nominal GB/s per direction of one NVLink and of one PCIe lane, by generation.
NVLINK_GB_PER_S = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50, 6: 50}
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 1, 4: 2, 5: 4, 6: 8}
BITS_PER_BYTE = 8
# Reached over nominal rate: copy engines on NVLink 4, and the middle of reported values for PCIe 5 x16 and 400G
# InfiniBand.
NVLINK_EFFICIENCY = 380 / 450
PCIE_EFFICIENCY = 52.5 / 64
NETWORK_EFFICIENCY = 47 / 50

# Path between two devices of one host, by the number of common PCIe ancestors; see `DeviceInfo.pcie`.
_SHARED = ("between sockets", "inside a socket", "host bridge")
_SWITCH_DEPTH = len(_SHARED)


@dataclass(frozen=True)
class NvLink:
    """NVLinks of one GPU to one peer."""

    peer: str
    """PCI address of the other GPU, or ``switch``."""
    links: int
    version: int | None = None
    """Generation, 1 to 6."""


@dataclass(frozen=True)
class Nic:
    """A network interface of a host."""

    name: str
    gigabits: float | None = None
    """Rate per direction; None if unknown."""
    pcie: tuple[str, ...] = ()
    """PCIe ancestors; see `DeviceInfo.pcie`."""


@dataclass(frozen=True)
class DeviceInfo:
    """Known facts about the device of one rank. All fields except the host may be unknown."""

    host: str
    """Unique name of the machine."""
    gpu: str | None = None
    """UUID."""
    index: int | None = None
    """NVML's index, which counts all GPUs of the host."""
    name: str | None = None
    nvlinks: tuple[NvLink, ...] = ()
    fabric: str | None = None
    """NVLink domain that spans several hosts. Its switches link all GPUs with the same value."""
    pcie: tuple[str, ...] = ()
    """Ancestors from the socket down to the device: NUMA node, root complex, bridges, the device's own address."""
    pcie_gigabytes: float | None = None
    """Nominal rate of the slot per direction, in GB/s."""
    nics: tuple[Nic, ...] = ()
    """All NICs of the host."""
    unknown: str | None = None
    """Reason why fields are missing."""

    @property
    def domain(self) -> str:
        """Node of the ring that the device belongs to: its NVLink fabric if that spans several hosts, else its host."""
        return self.host if self.fabric is None else self.fabric

    def to_json(self) -> dict[str, Any]:
        """Return the known fields as plain data."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceInfo:
        """Return the device that `to_json` wrote."""
        nvlinks = tuple(NvLink(**link) for link in data.get("nvlinks", ()))
        nics = tuple(Nic(**{**nic, "pcie": tuple(nic.get("pcie", ()))}) for nic in data.get("nics", ()))
        return cls(**{**data, "nvlinks": nvlinks, "nics": nics, "pcie": tuple(data.get("pcie", ()))})


class Link(NamedTuple):
    """Kind and expected bandwidth of the connection between two ranks."""

    kind: str
    """``nvlink``, ``pcie``, ``network``, ``one gpu``, ``host memory`` or ``unknown``."""
    text: str
    gigabytes_per_second: float | None
    """Expected per direction; None if unknown."""
    distance: int = 0
    """Larger if the devices share fewer PCIe ancestors; ranks links of equal bandwidth."""

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sort key; better links are smaller. NVLink comes first, even if its generation is unknown."""
        return self.kind != "nvlink", -(self.gigabytes_per_second or 0.0), self.distance


def link_between(a: DeviceInfo, b: DeviceInfo) -> Link:
    """Return the best link inside a host or an NVLink fabric, or else the network without a rate."""
    direct = _nvlink(a, b)
    if direct is not None:
        return direct
    if a.host != b.host:
        return Link("network", "network", None, _SWITCH_DEPTH + 1)
    if a.gpu is None or b.gpu is None:
        return Link("host memory", "host memory", None)
    if a.gpu == b.gpu:
        return Link("one gpu", "one GPU", None)
    depth = min(count_shared_ancestors(a.pcie, b.pcie), _SWITCH_DEPTH)
    text = "one switch" if depth == _SWITCH_DEPTH else _SHARED[depth]
    slots = [device.pcie_gigabytes for device in (a, b) if device.pcie_gigabytes is not None]
    rate = min(slots) * PCIE_EFFICIENCY if len(slots) == 2 else None
    return Link("pcie", f"PCIe, {text if a.pcie and b.pcie else 'unknown path'}", rate, _SWITCH_DEPTH - depth)


def pairs_by_link(devices: Iterable[DeviceInfo]) -> dict[str, int]:
    """Count the pairs of GPUs within one host by the text of their link, such as ``NVLink 4 x18 switch``."""
    gpus = [device for device in dict.fromkeys(devices) if device.gpu is not None]
    pairs = [link_between(a, b).text for a, b in combinations(gpus, 2) if a.host == b.host]
    return dict(Counter(pairs))


def network_link(ends: Iterable[tuple[Nic | None, int]]) -> Link:
    """Return the network link between two NICs. Each end is (NIC, number of ranks that share the NIC).

    The rate is unknown if a NIC or its rate is unknown.
    """
    ends = [*ends]
    rates = [nic.gigabits / sharers if nic is not None and nic.gigabits else None for nic, sharers in ends]
    names = " - ".join(dict.fromkeys("unknown NIC" if nic is None else nic.name for nic, _ in ends))
    known = [rate for rate in rates if rate is not None]
    all_known = len(known) == len(rates)
    rate = min(known) / BITS_PER_BYTE * NETWORK_EFFICIENCY if all_known else None
    return Link("network", names, rate, _SWITCH_DEPTH + 1)


def nearest_nics(devices: Sequence[DeviceInfo]) -> list[Nic | None]:
    """Return for each device of one host the NIC that shares most PCIe ancestors with it, or None without NICs.

    Among equals the fastest NIC wins, then the one with the fewest ranks so far. NICs below half of the fastest speed
    are left out, because they serve management or storage.
    """
    fastest = max((nic.gigabits or 0 for nic in devices[0].nics), default=0)
    nics = [nic for nic in devices[0].nics if (nic.gigabits or 0) * 2 >= fastest]
    load = [0] * len(nics)
    chosen: list[Nic | None] = []
    for device in devices if nics else ():
        best = max(
            range(len(nics)),
            key=lambda i: (count_shared_ancestors(device.pcie, nics[i].pcie), nics[i].gigabits or 0, -load[i], -i),
        )
        load[best] += 1
        chosen.append(nics[best])
    return chosen or [None] * len(devices)


def count_shared_ancestors(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the number of common ancestors, counted from the root."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _nvlink(a: DeviceInfo, b: DeviceInfo) -> Link | None:
    """Return the NVLink between two devices, direct or through switches, or None."""
    joined = a.host == b.host or (a.fabric is not None and a.fabric == b.fabric)
    if not joined or (a.gpu is not None and a.gpu == b.gpu and a.host == b.host):
        return None
    ends = [link for mine in (_links_to(a, SWITCH), _links_to(b, SWITCH)) for link in mine[:1]]
    switched = len(ends) == 2
    if not switched and a.host == b.host:  # one end is enough, because a container may hide the other's address
        ends = _links_to(a, *b.pcie[-1:]) + _links_to(b, *a.pcie[-1:])
    if not ends or (a.host != b.host and not switched):
        return None
    links = min(end.links for end in ends)
    version = min((end.version for end in ends if end.version is not None), default=None)
    nominal = None if version is None else NVLINK_GB_PER_S.get(version)
    text = f"NVLink {version or '?'} x{links}{' switch' * switched}"
    return Link("nvlink", text, None if nominal is None else nominal * links * NVLINK_EFFICIENCY)


def _links_to(device: DeviceInfo, *peers: str) -> list[NvLink]:
    return [link for link in device.nvlinks if link.peer in peers]


SYS = Path("/sys")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_NVLINKS = 36  # highest number of NVLinks of any GPU so far
# NVML's numbers of the NVLink generations 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 and 6.0, from its header.
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
REMOTE_IS_SWITCH = 2
FABRIC_READY = 3
# Reasons for reduced clocks, by bit; from NVML's header.
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
"""Readings that change while a GPU works, in MHz, watts, degrees Celsius or as names of throttle reasons."""


class NvmlUnavailableError(RuntimeError):
    """NVML cannot be used. The message has the reason and what to install."""


def load_nvml() -> Any:
    """Return the initialised `pynvml` module.

    Raises:
        NvmlUnavailableError: pynvml is not installed, or NVML found no driver.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlUnavailableError("pynvml is not installed; run pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML found no driver ({type(error).__name__}: {error})") from None
    return nvml


def nvml_handle(device: torch.device) -> tuple[Any, Any]:
    """Return `pynvml` and NVML's handle of a torch device, matched by UUID.

    Raises:
        NvmlUnavailableError: NVML is missing, the device is not a GPU, or NVML does not know the GPU.
    """
    if device.type != "cuda":
        raise NvmlUnavailableError(f"{device} is not a GPU")
    nvml = load_nvml()
    uuid = device_uuid(device)
    try:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(
            f"NVML does not know {uuid}, which torch calls {device} ({type(error).__name__})"
        ) from None


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a torch device in NVML's format."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def driver_version() -> str:
    """Return the version of the NVIDIA driver.

    Raises:
        NvmlUnavailableError: NVML cannot be used.
    """
    return _text(load_nvml().nvmlSystemGetDriverVersion())


class GpuReader:
    """Reader of the clocks, power and temperature of one device, called without arguments.

    The device is looked up once. A reading costs a few driver calls, or nothing without a driver.
    """

    def __init__(self, device: torch.device) -> None:
        self.reason: str | None = None
        """Reason why nothing can be read, or None."""
        self._queries: dict[str, Query] = {}
        try:
            self._nvml, self._gpu = nvml_handle(device)
        except NvmlUnavailableError as error:
            self.reason = str(error)
        else:
            self._queries = dict(READINGS)

    def __call__(self) -> dict[str, Any]:
        """Return the current value of each of `READINGS` that the device supports."""
        readings: dict[str, Any] = {}
        for name, query in [*self._queries.items()]:
            try:
                readings[name] = query(self._nvml, self._gpu)
            except (self._nvml.NVMLError, AttributeError):
                del self._queries[name]  # a device that does not support a reading never will
        return readings


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of NVML's throttle reasons in a bit mask."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def device_info(device: torch.device, *, sys: Path = SYS) -> DeviceInfo:
    """Return the known facts about a device of this process; ``sys`` is the root of /sys."""
    host, nics = host_name(), list_host_nics(sys)
    if device.type != "cuda":
        return DeviceInfo(host, nics=nics, unknown=f"{device} is not a GPU")
    known: dict[str, Any] = {"gpu": device_uuid(device), "name": torch.cuda.get_device_name(device)}
    try:
        nvml, gpu = nvml_handle(device)
        bus = _address(nvml.nvmlDeviceGetPciInfo(gpu).busId)
        known["index"] = _query(nvml, lambda: int(nvml.nvmlDeviceGetIndex(gpu)))
        known["nvlinks"] = tuple(_nvlinks(nvml, gpu))
        known["fabric"] = _query(nvml, lambda: _fabric(nvml, gpu))
        known["pcie_gigabytes"] = _query(nvml, lambda: _slot(nvml, gpu))
        known["pcie"] = pcie_path(sys / "bus/pci/devices" / bus) or (bus,)
    except Exception as error:  # any unexpected answer of the driver; a ring runs without these facts
        known["unknown"] = str(error) or type(error).__name__
    return DeviceInfo(host, nics=nics, **known)


def host_name() -> str:
    """Return the host's name with the start of its boot id, because several hosts may be called localhost."""
    return f"{platform.node()}/{_read(BOOT_ID)[:8]}"


def pcie_path(device: Path) -> tuple[str, ...]:
    """Return NUMA node, root complex, bridges and address of a PCI device in /sys; empty if there is no such device."""
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
    # -1 means that the machine has one NUMA node or does not tell, so all devices count as being on the same node.
    return (f"numa{node if node.isdigit() else ''}", *path)


def list_host_nics(sys: Path = SYS) -> tuple[Nic, ...]:
    """Return the InfiniBand and RoCE adapters of this host, and its other Ethernet interfaces."""
    nics = [
        Nic(entry.name, _infiniband_rate(entry), pcie_path(entry / "device"))
        for entry in _entries(sys / "class/infiniband")
    ]
    rdma_paths = {nic.pcie for nic in nics if nic.pcie}
    for entry in _entries(sys / "class/net"):
        path = pcie_path(entry / "device")
        # Loopback, bridges and tunnels have no device. Interfaces of an RDMA adapter are in the list already.
        if not (entry / "device").exists() or (path and path in rdma_paths):
            continue
        speed = _read(entry / "speed")  # Mbit/s; -1 or an error if the link is down or virtual
        nics.append(Nic(entry.name, int(speed) / 1e3 if speed.isdigit() and int(speed) else None, path))
    return tuple(nics)


def _infiniband_rate(adapter: Path) -> float | None:
    """Return the Gbit/s of all ports of an adapter together. A port's file reads ``400 Gb/sec (4X NDR)``."""
    rates = [re.match(r"([\d.]+) Gb/sec", _read(port / "rate")) for port in _entries(adapter / "ports")]
    return sum(float(rate[1]) for rate in rates if rate) or None


def _nvlinks(nvml: Any, gpu: Any) -> Iterator[NvLink]:
    """Yield one `NvLink` per peer and generation, with the number of active links."""
    links: Counter[tuple[str, int | None]] = Counter()
    for number in range(MAX_NVLINKS):
        if not _query(nvml, lambda number=number: nvml.nvmlDeviceGetNvLinkState(gpu, number)):  # type: ignore[misc]
            continue
        peer = _query(nvml, lambda number=number: _peer(nvml, gpu, number))  # type: ignore[misc]
        if peer is None:
            continue  # a link without a known peer is of no use
        version = _query(nvml, lambda number=number: nvml.nvmlDeviceGetNvLinkVersion(gpu, number))  # type: ignore[misc]
        links[peer, None if version is None else NVLINK_GENERATIONS.get(version)] += 1
    for (peer, version), count in links.items():
        yield NvLink(peer, count, version)


def _peer(nvml: Any, gpu: Any, link: int) -> str:
    """Return the PCI address of the device at the other end of an NVLink, or SWITCH."""
    kind = _query(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link))
    if kind == REMOTE_IS_SWITCH:
        return SWITCH
    return _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)


def _fabric(nvml: Any, gpu: Any) -> str | None:
    """Return cluster and clique of a GPU whose NVLink switches reach other hosts, else None."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    cluster = bytes(info.clusterUuid)
    if info.state != FABRIC_READY or info.status or not any(cluster):
        return None
    return f"{cluster.hex()}/{info.cliqueId}"


def _slot(nvml: Any, gpu: Any) -> float | None:
    """Return the nominal GB/s per direction of the GPU's PCIe slot, or None for an unknown generation.

    Uses the highest generation, because idle links run at a lower one, and the connected width.
    """
    lane = PCIE_LANE_GB_PER_S.get(nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu))
    return None if lane is None else lane * int(nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu))


def _query(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`, or None if the device, the driver or pynvml does not support the query."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return ask()
    return None


def _address(bus: str | bytes) -> str:
    """Return a PCI address in the format of /sys, whose domain has four digits and not NVML's eight."""
    domain, _, rest = _text(bus).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
