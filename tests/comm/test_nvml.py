"""Links between two ranks, and the facts from NVML and /sys, on a fake ``pynvml`` and a fake /sys."""

from __future__ import annotations

import ctypes
import platform
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.bench.common import provenance
from ringattn.comm.topology import nvml
from ringattn.comm.topology.nvml import (
    SWITCH,
    DeviceInfo,
    Nic,
    NvLink,
    link_between,
    nearest_nics,
    network_link,
    pairs_by_link,
)

from ..support.clusters import cpus, hgx, nvlink_mesh_host

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
A, B = hgx("a")[:2]
LINKED = nvlink_mesh_host("a", {(0, 1): 2}, 2)
BOX = nvlink_mesh_host("a", {}, 8)


def linked(device: DeviceInfo, **change: Any) -> DeviceInfo:
    return replace(device, nvlinks=(replace(device.nvlinks[0], **change),))


@pytest.mark.parametrize(
    ("a", "b", "kind", "text", "rate"),
    [
        (A, B, "nvlink", "NVLink 4 x18 switch", 380),
        (A, linked(B, links=9), "nvlink", "NVLink 4 x9 switch", 190),  # the weaker end decides
        (A, linked(B, version=None), "nvlink", "NVLink 4 x18 switch", 380),
        (A, linked(B, version=3), "nvlink", "NVLink 3 x18 switch", 380),
        (*LINKED, "nvlink", "NVLink 2 x2", 42.2),
        (LINKED[0], replace(LINKED[1], nvlinks=()), "nvlink", "NVLink 2 x2", 42.2),  # a container may hide an address
        (BOX[0], BOX[1], "pcie", "PCIe, one switch", 13.1),
        (BOX[0], BOX[2], "pcie", "PCIe, inside a socket", 13.1),
        (BOX[0], replace(BOX[1], pcie_gigabytes=8), "pcie", "PCIe, one switch", 6.6),
        (BOX[0], BOX[4], "pcie", "PCIe, between sockets", 13.1),
        (BOX[0], replace(BOX[1], pcie=(), pcie_gigabytes=None), "pcie", "PCIe, unknown path", None),
        (A, A, "one gpu", "one GPU", None),
        (*cpus("a", 2), "host memory", "host memory", None),
        (A, hgx("b")[0], "network", "network", None),
        (replace(A, fabric="f"), replace(hgx("b")[0], fabric="f"), "nvlink", "NVLink 4 x18 switch", 380),
        (replace(A, fabric="f"), replace(hgx("b")[0], fabric="g"), "network", "network", None),
    ],
)
def test_link_between_two_devices(a: DeviceInfo, b: DeviceInfo, kind: str, text: str, rate: float | None) -> None:
    link = link_between(a, b)
    assert link == link_between(b, a)
    assert (link.kind, link.text) == (kind, text)
    assert link.gigabytes_per_second == (None if rate is None else pytest.approx(rate, abs=0.1))


def test_pairs_by_link() -> None:
    devices = [*hgx("a"), *nvlink_mesh_host("b", {(0, 1): 2}, 3)]
    pairs = pairs_by_link([*devices, devices[0], *cpus("c", 2)])
    assert pairs.pop("NVLink 4 x18 switch") == 28 and pairs.pop("NVLink 2 x2") == 1
    assert sum(pairs.values()) == 2 and all(text.startswith("PCIe") for text in pairs)


def test_nearest_nic_of_each_gpu() -> None:
    devices = hgx("a")
    assert [nic and nic.name for nic in nearest_nics(devices)] == [f"mlx5_{i}" for i in range(8)]
    blind = [replace(device, pcie=()) for device in devices]  # assigned round robin if the paths are unknown
    assert len({nic for nic in nearest_nics(blind)}) == 8
    assert nearest_nics([replace(A, nics=())]) == [None]
    beside, far = Nic("eno1", 25, A.pcie), Nic("mlx5_9", 400)
    assert nearest_nics([replace(A, nics=(beside, far))]) == [far]
    twin, slower = Nic("mlx5_a", 400), Nic("mlx5_8", 200)
    assert nearest_nics([replace(A, nics=(slower, far, twin))] * 3) == [far, twin, far]  # the fastest take turns


def test_network_bandwidth_is_that_of_the_slower_or_shared_nic() -> None:
    fast, slow = Nic("mlx5_0", 400), Nic("mlx5_1", 200)
    assert network_link([(fast, 1), (fast, 1)]).gigabytes_per_second == 47
    assert network_link([(fast, 1), (slow, 1)])[:3] == ("network", "mlx5_0 - mlx5_1", 23.5)
    assert network_link([(fast, 4), (slow, 1)]).gigabytes_per_second == 11.75
    assert network_link([(fast, 1), (None, 1)])[1:3] == ("mlx5_0 - unknown NIC", None)


ROOT = "devices/pci0000:16/0000:16:01.0/0000:17:00.0"
BUS = "0001:19:00.0"
UUID = uuid.UUID(int=7)


class NVMLError(Exception):
    pass


class StandIn(ModuleType):
    """A ``pynvml`` with one GPU: four links to a switch, two to a neighbour, the rest down.

    ``answers`` maps function names to functions. A name that is missing is not supported.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        links = {0: None, 1: None, 2: None, 3: None, 6: "00000000:1B:00.0", 7: "00000000:1B:00.0"}
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {
            "Init": lambda: None,
            "SystemGetDriverVersion": lambda: b"580.1",
            "DeviceGetHandleByUUID": {f"GPU-{UUID}": "gpu"}.__getitem__,
            "DeviceGetIndex": lambda gpu: 5,
            "DeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=b"00000001:19:00.0"),
            "DeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
            "DeviceGetCurrPcieLinkWidth": lambda gpu: 8,
            "DeviceGetNvLinkState": lambda gpu, link: int(link in links),
            "DeviceGetNvLinkVersion": lambda gpu, link: 6,
            "DeviceGetNvLinkRemoteDeviceType": lambda gpu, link: 0 if links[link] else nvml.REMOTE_IS_SWITCH,
            "DeviceGetNvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(busId=links[link]),
            "DeviceGetClockInfo": lambda gpu, kind: 1500 * kind,
            "DeviceGetMaxClockInfo": lambda gpu, kind: 1980 * kind,
            "DeviceGetPowerUsage": lambda gpu: 650_500,
            "DeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "DeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x4 | 0x40,
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(*arguments: Any) -> Any:
            self.asked.append(name)
            try:
                return self.answers[name.removeprefix("nvml")](*arguments)
            except KeyError:
                raise NVMLError("Not Supported") from None

        return ask


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a /sys with a GPU and an InfiniBand adapter under one switch, two Ethernet cards, and a loopback."""
    adapter, virtual = f"{ROOT}/0000:18:01.0/0000:1a:00.0", "devices/pci0000:00/0000:00:03.0"
    files = {
        f"{ROOT}/0000:18:00.0/{BUS}/numa_node": "1",
        f"{adapter}/numa_node": "1",
        f"{virtual}/numa_node": "-1",
        f"{virtual}/virtio1/numa_node": "-1",
        "class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "class/infiniband/mlx5_0/ports/2/rate": "200 Gb/sec (4X HDR)",
        "class/net/ib0/speed": "400000",
        "class/net/eth0/speed": "-1",
        "class/net/eth1/speed": "25000",
        "class/net/eth1/device/vendor": "0x1",
        "class/net/eth2/speed": "0",
        "class/net/eth2/device/vendor": "0x1",
        "class/net/lo/mtu": "65536abcdef",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    links = {
        f"bus/pci/devices/{BUS}": f"{ROOT}/0000:18:00.0/{BUS}",
        "class/infiniband/mlx5_0/device": adapter,
        "class/net/ib0/device": adapter,
        "class/net/eth0/device": f"{virtual}/virtio1",
    }
    for link, target in links.items():
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / target)
    return tmp_path


def test_device_info_of_a_gpu(stand_in: StandIn, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml.device_info(GPU, sys=tree) == DeviceInfo(
        host=nvml.host_name(),
        gpu=f"GPU-{UUID}",
        index=5,
        name="H100",
        nvlinks=(NvLink(SWITCH, 4, 4), NvLink("0000:1b:00.0", 2, 4)),
        pcie=("numa1", "pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0", BUS),
        pcie_gigabytes=32,
        nics=(
            Nic("mlx5_0", 400, ("numa1", "pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:01.0", "0000:1a:00.0")),
            Nic("eth0", None, ("numa", "pci0000:00", "0000:00:03.0")),
            Nic("eth1", 25),
            Nic("eth2", None),
        ),
    )
    assert nvml.device_info(GPU, sys=tree / "nowhere").pcie == (BUS,)
    monkeypatch.setattr(nvml, "BOOT_ID", tree / "class/net/lo/mtu")
    assert nvml.host_name() == f"{platform.node()}/65536abc"  # the first characters of a longer id
    nowhere = nvml.list_host_nics(tree / "nowhere"), nvml.pcie_path(tree / "nowhere"), nvml.pcie_path(tree / "class")
    assert nowhere == ((), (), ())


def test_missing_nvml_data_is_left_out(stand_in: StandIn, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = nvml.device_info(CPU, sys=tree)
    assert (device.gpu, device.nvlinks, device.pcie, device.unknown) == (None, (), (), "cpu is not a GPU")
    assert [nic.name for nic in device.nics] == ["mlx5_0", "eth0", "eth1", "eth2"]
    del stand_in.answers["DeviceGetNvLinkRemotePciInfo"]
    device = nvml.device_info(GPU, sys=tree)
    assert (device.nvlinks, device.unknown, device.pcie[-1]) == ((NvLink(SWITCH, 4, 4),), None, BUS)
    for question in ("DeviceGetIndex", "DeviceGetNvLinkState", "DeviceGetMaxPcieLinkGeneration"):
        del stand_in.answers[question]
    device = nvml.device_info(GPU, sys=tree)
    assert (device.index, device.nvlinks, device.pcie_gigabytes, device.unknown) == (None, (), None, None)
    stand_in.answers["DeviceGetHandleByUUID"] = {}.__getitem__
    unknown = f"NVML does not know GPU-{UUID}, which torch calls cuda:1 (NVMLError)"
    assert nvml.device_info(GPU, sys=tree).unknown == unknown
    del stand_in.answers["Init"]
    device = nvml.device_info(GPU, sys=tree)
    assert (device.gpu, device.name, device.nvlinks) == (f"GPU-{UUID}", "H100", ())
    assert device.unknown == "NVML found no driver (NVMLError: Not Supported)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.device_info(GPU, sys=tree).unknown == "pynvml is not installed; run pip install nvidia-ml-py"


def test_rates_follow_the_generation(stand_in: StandIn, tree: Path) -> None:
    """Read NVML's numbers of NVLink generations, and double the rate of a PCIe lane with each generation."""
    generations = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
    nominal = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50, 6: 50}
    for number, generation in generations.items():
        stand_in.answers["DeviceGetNvLinkVersion"] = lambda gpu, link, number=number: number
        device = nvml.device_info(GPU, sys=tree)
        link = link_between(device, replace(device, gpu="GPU-2"))
        assert link.text == f"NVLink {generation} x4 switch"
        assert link.gigabytes_per_second == pytest.approx(4 * nominal[generation] * 380 / 450)
    for generation in range(1, 7):
        stand_in.answers["DeviceGetMaxPcieLinkGeneration"] = lambda gpu, generation=generation: generation
        assert nvml.device_info(GPU, sys=tree).pcie_gigabytes == 8 * 0.25 * 2 ** (generation - 1)
    stand_in.answers["DeviceGetMaxPcieLinkGeneration"] = stand_in.answers["DeviceGetNvLinkVersion"] = lambda *_: 99
    device = nvml.device_info(GPU, sys=tree)
    assert (device.pcie_gigabytes, {link.version for link in device.nvlinks}) == (None, {None})


def test_throttle_reasons_follow_the_bits_of_nvml() -> None:
    assert nvml.throttle_reasons(0x3FF) == (
        "idle", "clocks set by the user", "power cap", "hardware slowdown", "sync boost", "software thermal slowdown",
        "hardware thermal slowdown", "power brake", "display clocks",
    )  # fmt: skip


@pytest.mark.parametrize(("uuid_of_torch", "uuid_of_nvml"), [("MIG-7", "MIG-7"), ("GPU-7", "GPU-7"), ("7", "GPU-7")])
def test_uuids_have_the_format_of_nvml(
    uuid_of_torch: str, uuid_of_nvml: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid_of_torch))
    assert nvml.device_uuid(GPU) == uuid_of_nvml


def test_nvlink_fabric_across_hosts(stand_in: StandIn, tree: Path) -> None:
    class Info(ctypes.Structure):
        _fields_ = (
            ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint8),
        )  # fmt: skip

    cluster, status, ready = [0], [0], [nvml.FABRIC_READY]

    def fill(gpu: str, pointer: Any) -> None:
        pointer._obj.clusterUuid[0], pointer._obj.cliqueId, pointer._obj.state = cluster[0], 3, ready[0]
        pointer._obj.status = status[0]

    vars(stand_in).update(c_nvmlGpuFabricInfoV_t=Info, nvmlDeviceGetGpuFabricInfoV=fill)
    assert nvml.device_info(GPU, sys=tree).fabric is None  # the switches of a single host have no cluster id
    cluster[0] = 0xAB
    assert nvml.device_info(GPU, sys=tree).fabric == "ab" + "00" * 15 + "/3"
    status[0] = 1  # registration failed, so the fabric is unusable
    assert nvml.device_info(GPU, sys=tree).fabric is None
    status[0], ready[0] = 0, nvml.FABRIC_READY - 1  # registration is not over
    assert nvml.device_info(GPU, sys=tree).fabric is None


def test_slow_nics_are_not_used() -> None:
    """Use a NIC with at least half the highest speed. Slower NICs are for management or storage."""
    gpus = [replace(A, pcie=("numa0", f"pci{number}", f"gpu{number}")) for number in range(3)]
    speeds = {"fast": 400.0, "half": 200.0, "slow": 199.0}
    adapters = tuple(
        Nic(name, speed, ("numa0", f"pci{number}", name)) for number, (name, speed) in enumerate(speeds.items())
    )
    chosen = nvml.nearest_nics([replace(gpu, nics=adapters) for gpu in gpus])
    assert [nic and nic.name for nic in chosen] == ["fast", "half", "fast"]


def test_reader_of_clocks_and_power(stand_in: StandIn) -> None:
    read = nvml.GpuReader(GPU)
    expected = {
        "sm_mhz": 1500, "sm_mhz_max": 1980, "memory_mhz": 3000, "watts": 650.5, "watts_limit": 700.0,
        "throttled": ("power cap", "hardware thermal slowdown"),
    }  # fmt: skip
    assert read.reason is None
    assert read() == read() == expected
    assert stand_in.asked.count("nvmlDeviceGetTemperature") == 1  # unsupported values are queried once
    stand_in.answers["DeviceGetTemperature"] = lambda gpu, sensor: 61 + sensor
    assert nvml.GpuReader(GPU)() == {**expected, "celsius": 61}
    del stand_in.answers["DeviceGetTemperature"]
    assert provenance.gpu_clocks(GPU) == expected
    assert provenance._or_unknown(nvml.driver_version) == "580.1"
    assert (nvml.GpuReader(CPU)(), nvml.GpuReader(CPU).reason) == ({}, "cpu is not a GPU")
    del stand_in.answers["Init"]
    read = nvml.GpuReader(GPU)
    assert read() == {} and "NVML found no driver" in str(read.reason)
    assert "NVML found no driver" in provenance.gpu_clocks(GPU)["unknown"]
    assert provenance._or_unknown(nvml.driver_version) == "unknown: NvmlUnavailableError"
