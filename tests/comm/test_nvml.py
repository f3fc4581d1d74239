"""What joins two ranks, and what NVML and /sys say: on a stand-in of `pynvml`, and folders as the kernel has them."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.bench.common import provenance
from ringattn.comm import LocalGroup, LocalWorld, Topology
from ringattn.comm.control import control_of
from ringattn.comm.topology import nvml
from ringattn.comm.topology.nvml import (
    SWITCH,
    DeviceInfo,
    Nic,
    NvLink,
    link_between,
    nearest_nics,
    network,
    pairs_by_link,
)
from ringattn.comm.topology.topology import discover

from ..support.clusters import cpus, hgx, meshed


def test_one_end_of_a_link_is_enough() -> None:
    a, b = meshed("a", {(0, 1): 2}, 2)
    assert link_between(a, replace(b, nvlinks=())) == link_between(replace(a, nvlinks=()), b) == link_between(a, b)
    assert link_between(a, b).text == "NVLink 2 x2"


def test_pairs_by_link() -> None:
    """Of two hosts, ranks of one GPU counted once, those of a CPU not at all."""
    devices = [*hgx("a"), *meshed("b", {(0, 1): 2}, 3)]
    pairs = pairs_by_link([*devices, devices[0], *cpus("c", 2)])
    assert pairs.pop("NVLink 4 x18 switch") == 28 and pairs.pop("NVLink 2 x2") == 1
    assert sum(pairs.values()) == 2 and all(text.startswith("PCIe") for text in pairs)


def test_nearest_nics() -> None:
    devices = hgx("a")
    assert [nic and nic.name for nic in nearest_nics(devices)] == [f"mlx5_{i}" for i in range(8)]
    blind = [replace(device, pcie=()) for device in devices]  # dealt out, where nothing is known
    assert len({nic for nic in nearest_nics(blind)}) == 8
    assert nearest_nics([replace(devices[0], nics=())]) == [None]
    beside, far = Nic("eno1", 25, devices[0].pcie), Nic("mlx5_9", 400)
    assert nearest_nics([replace(devices[0], nics=(beside, far))]) == [far]
    only_slow = replace(devices[0], nics=(Nic("eth0"),))
    assert nearest_nics([only_slow]) == [Nic("eth0")]


@pytest.mark.parametrize(
    ("nvlinks", "rate"),
    [((4, 18), 380), ((3, 12), 253.3), ((5, 18), 760), ((2, 6), 126.7), ((1, 4), 67.6)],
)
def test_bandwidth_of_nvlink_by_generation(nvlinks: tuple[int, int], rate: float) -> None:
    version, links = nvlinks
    a, b = (
        replace(device, nvlinks=(replace(device.nvlinks[0], links=links, version=version),)) for device in hgx("a")[:2]
    )
    assert link_between(a, b).gigabytes_per_second == pytest.approx(rate, abs=0.1)


def test_the_weaker_end_decides() -> None:
    a, b = hgx("a")[:2]
    weak = replace(b, nvlinks=(replace(b.nvlinks[0], links=9),))
    assert link_between(a, weak).gigabytes_per_second == 190
    assert link_between(a, replace(b, nvlinks=(replace(b.nvlinks[0], version=None),))).gigabytes_per_second == 380
    plain_a, plain_b = (replace(device, nvlinks=()) for device in (a, b))
    assert link_between(plain_a, replace(plain_b, pcie_gigabytes=16)).gigabytes_per_second == 13.125
    assert link_between(plain_a, replace(plain_b, pcie_gigabytes=None)).gigabytes_per_second is None


def test_ways_through_pcie() -> None:
    gpus = meshed("a", {}, 8)
    ways = [link_between(gpus[0], other) for other in gpus[1:]]
    assert [way.text for way in ways] == [
        "PCIe, one switch",
        *["PCIe, inside a socket"] * 2,
        *["PCIe, between sockets"] * 4,
    ]
    assert [way.distance for way in ways] == [0, 2, 2, 3, 3, 3, 3]
    assert link_between(gpus[0], replace(gpus[1], pcie=())).text == "PCIe, unknown path"


def test_between_hosts() -> None:
    a, b = hgx("a")[0], hgx("b")[0]
    assert link_between(a, b).kind == "network"
    assert link_between(cpus("a", 1)[0], cpus("b", 1)[0]).kind == "network"
    assert link_between(replace(a, fabric="f"), replace(b, fabric="f")).kind == "nvlink"
    assert link_between(replace(a, fabric="f"), replace(b, fabric="g")).kind == "network"


def test_rate_of_a_network() -> None:
    fast, slow = Nic("mlx5_0", 400), Nic("mlx5_1", 200)
    assert network([(fast, 1), (fast, 1)]).gigabytes_per_second == 47
    assert network([(fast, 1), (slow, 1)])[:3] == ("network", "mlx5_0 - mlx5_1", 23.5)
    assert network([(fast, 4), (slow, 1)]).gigabytes_per_second == 11.75
    assert network([(fast, 1), (None, 1)])[1:3] == ("mlx5_0 - unknown NIC", None)


def test_devices_as_json() -> None:
    for device in (*hgx("a"), *meshed("b", {(0, 1): 2}, 2), *cpus("c", 1)):
        assert DeviceInfo.from_json(device.to_json()) == device
    assert DeviceInfo.from_json({"host": "a"}) == DeviceInfo("a")


GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
ROOT = "devices/pci0000:16/0000:16:01.0/0000:17:00.0"
BUS = "0000:19:00.0"
UUID = uuid.UUID(int=7)


class NVMLError(Exception):
    pass


class NVMLErrorLibraryNotFound(NVMLError):
    pass


class StandIn(ModuleType):
    """`pynvml` of a machine with one GPU: four links to a switch, two to a neighbour, the rest down."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.driver = True
        self.uuids = [f"GPU-{UUID}"]
        self.calls: list[str] = []
        self.links: dict[int, Any] = {0: None, 1: None, 2: None, 3: None, 6: "00000000:1B:00.0", 7: "00000000:1B:00.0"}

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLErrorLibraryNotFound("NVML Shared Library Not Found")

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.uuids:
            raise NVMLError("Not Found")
        return name

    def nvmlDeviceGetIndex(self, gpu: str) -> int:
        return 5

    def nvmlDeviceGetPciInfo(self, gpu: str) -> Any:
        return SimpleNamespace(busId=b"00000000:19:00.0")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: str) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: str) -> int:
        return 8

    def nvmlDeviceGetNvLinkState(self, gpu: str, link: int) -> int:
        if link > 7:
            raise NVMLError("Invalid Argument")
        return int(link in self.links)

    def nvmlDeviceGetNvLinkVersion(self, gpu: str, link: int) -> int:
        return 6

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: str, link: int) -> int:
        return nvml.REMOTE_IS_SWITCH if self.links[link] is None else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: str, link: int) -> Any:
        return SimpleNamespace(busId=self.links[link])

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int:
        self.calls.append("clock")
        return 1500 * kind

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return 650_500

    def nvmlDeviceGetTemperature(self, gpu: str, kind: int) -> int:
        self.calls.append("temperature")
        raise NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: str) -> int:
        return 0x4 | 0x40


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A /sys with a GPU and an adapter under one switch, a card of Ethernet, and a loopback."""
    add_device(tmp_path, f"{ROOT}/0000:18:00.0/{BUS}", numa="1")
    add_device(tmp_path, f"{ROOT}/0000:18:01.0/0000:1a:00.0", numa="1")
    add_device(tmp_path, "devices/pci0000:00/0000:00:03.0/virtio1", numa="-1")
    (tmp_path / "devices/pci0000:00/0000:00:03.0/numa_node").write_text("-1\n")
    adapter = tmp_path / "class/infiniband/mlx5_0"
    (adapter / "ports/1").mkdir(parents=True)
    (adapter / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    (adapter / "device").symlink_to(tmp_path / f"{ROOT}/0000:18:01.0/0000:1a:00.0")
    for name, device, speed in (
        ("ib0", f"{ROOT}/0000:18:01.0/0000:1a:00.0", "400000"),
        ("eth0", "devices/pci0000:00/0000:00:03.0/virtio1", "-1"),
        ("eth1", None, "25000"),
        ("lo", None, None),
    ):
        entry = tmp_path / "class/net" / name
        entry.mkdir(parents=True)
        if device is not None:
            (entry / "device").symlink_to(tmp_path / device)
        if name == "eth1":
            (entry / "device").mkdir()
        if speed is not None:
            (entry / "speed").write_text(f"{speed}\n")
    return tmp_path


def add_device(root: Path, path: str, *, numa: str) -> None:
    device = root / path
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa}\n")
    link = root / "bus/pci/devices" / device.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)


def test_info_of_a_gpu(stand_in: StandIn, tree: Path) -> None:
    device = nvml.device_info(GPU, sys=tree)
    assert device == DeviceInfo(
        host=nvml.host_name(),
        gpu=f"GPU-{UUID}",
        index=5,
        name="H100",
        nvlinks=(NvLink(SWITCH, 4, 4), NvLink("0000:1b:00.0", 2, 4)),
        pcie=("numa1", "pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0", BUS),
        pcie_gigabytes=32,
        nics=nvml.nics_of(tree),
    )


def test_nics(tree: Path) -> None:
    assert nvml.nics_of(tree) == (
        Nic("mlx5_0", 400, ("numa1", "pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:01.0", "0000:1a:00.0")),
        Nic("eth0", None, ("numa", "pci0000:00", "0000:00:03.0")),
        Nic("eth1", 25),
    )
    assert nvml.nics_of(tree / "nowhere") == ()


def test_what_cannot_be_known(stand_in: StandIn, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = nvml.device_info(CPU, sys=tree)
    assert (device.gpu, device.nvlinks, device.pcie, device.unknown) == (None, (), (), "cpu is not a GPU")
    assert [nic.name for nic in device.nics] == ["mlx5_0", "eth0", "eth1"]
    stand_in.uuids = ["GPU-other"]
    unknown = f"NVML knows no GPU-{UUID}, which torch calls cuda:1 (NVMLError)"
    assert nvml.device_info(GPU, sys=tree).unknown == unknown
    stand_in.driver = False
    device = nvml.device_info(GPU, sys=tree)
    assert (device.gpu, device.name, device.nvlinks) == (f"GPU-{UUID}", "H100", ())
    assert device.unknown == "NVML finds no driver (NVMLErrorLibraryNotFound: NVML Shared Library Not Found)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.device_info(GPU, sys=tree).unknown == "pynvml is not installed: pip install nvidia-ml-py"


def test_a_driver_that_tells_less(stand_in: StandIn, tree: Path) -> None:
    """An old driver, an old pynvml, a GPU without NVLink: what is left is still told."""

    def fails(*_: object) -> None:
        raise NVMLError("Not Supported")

    for question in ("nvmlDeviceGetIndex", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkGeneration"):
        setattr(stand_in, question, fails)
    device = nvml.device_info(GPU, sys=tree)
    assert (device.index, device.nvlinks, device.pcie_gigabytes, device.unknown) == (None, (), None, None)
    assert device.pcie[-1] == BUS


def test_a_link_whose_peer_is_not_told(stand_in: StandIn, tree: Path) -> None:
    """It is left out, and nothing else is lost with it."""

    def refused(gpu: str, link: int) -> Any:
        raise NVMLError("Not Supported")

    stand_in.nvmlDeviceGetNvLinkRemotePciInfo = refused  # type: ignore[method-assign]
    device = nvml.device_info(GPU, sys=tree)
    assert (device.nvlinks, device.unknown, device.pcie[-1]) == ((NvLink(SWITCH, 4, 4),), None, BUS)


def test_a_fabric_of_many_hosts(stand_in: StandIn, tree: Path) -> None:
    import ctypes

    class Info(ctypes.Structure):
        _fields_ = (
            ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint8),
        )  # fmt: skip

    cluster = [0]

    def fill(gpu: str, pointer: Any) -> None:
        pointer._obj.clusterUuid[0], pointer._obj.cliqueId, pointer._obj.state = cluster[0], 3, nvml.FABRIC_READY

    vars(stand_in).update(c_nvmlGpuFabricInfoV_t=Info, nvmlDeviceGetGpuFabricInfoV=fill)
    assert nvml.device_info(GPU, sys=tree).fabric is None  # the switches of one host: no cluster
    cluster[0] = 0xAB
    assert nvml.device_info(GPU, sys=tree).fabric == "ab" + "00" * 15 + "/3"


def test_paths_that_are_none(tree: Path) -> None:
    assert nvml.pcie_path(tree / "bus/pci/devices/0000:ff:00.0") == ()
    assert nvml.pcie_path(tree / "class") == ()


def test_reader(stand_in: StandIn) -> None:
    read = nvml.Reader(GPU)
    expected = {
        "sm_mhz": 1500, "memory_mhz": 3000, "watts": 650.5, "throttled": ("power cap", "hardware thermal slowdown"),
    }  # fmt: skip
    assert read.reason is None
    assert read() == expected
    assert read() == expected
    # what a device does not tell is asked for once
    assert stand_in.calls.count("temperature") == 1
    assert provenance.clocks(GPU) == expected
    assert provenance._told(nvml.driver_version) == "580.1"


def test_reader_where_nothing_can_be_read(stand_in: StandIn) -> None:
    assert (nvml.Reader(CPU)(), nvml.Reader(CPU).reason) == ({}, "cpu is not a GPU")
    stand_in.driver = False
    read = nvml.Reader(GPU)
    assert read() == {}
    assert "NVML finds no driver" in str(read.reason)
    assert "NVML finds no driver" in provenance.clocks(GPU)["unknown"]
    assert provenance._told(nvml.driver_version) == "unknown: NoNvml"


def test_discover() -> None:
    """Rank 0 knows the devices, the others the order that it has found."""

    def fn(group: LocalGroup) -> Topology:
        return discover(control_of(group), CPU)

    with LocalWorld(2, device=CPU) as world:
        first, second = world.run(fn)
    assert first == second == Topology(((0, 1),))
    assert first.devices == (nvml.device_info(CPU),) * 2
    assert second.devices == ()
