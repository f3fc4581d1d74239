"""Descriptions of machines (GPUs, links, NICs) as data, for topology tests without the hardware."""

from __future__ import annotations

from collections.abc import Iterable

from ringattn.comm.topology.nvml import SWITCH, DeviceInfo, Nic, NvLink

# NVLinks of a DGX-1 with V100, as `nvidia-smi topo -m` prints them: a hypercube mesh with six links per GPU.
DGX1 = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def pcie_ancestors(index: int, *, gpus: int = 8, per_switch: int = 1, device: str = "gpu") -> tuple[str, ...]:
    """Return the PCIe ancestors of a GPU or NIC in a two-socket machine with ``per_switch`` GPUs per switch."""
    switch = index // per_switch
    return (f"numa{2 * index // gpus}", f"pci{switch}", f"port{switch}", f"{device}{index}")


def nics(count: int = 8, *, gpus: int = 8, per_switch: int = 1, gigabits: float = 400) -> tuple[Nic, ...]:
    """Return one adapter next to every ``gpus / count``-th GPU, and a slow management NIC."""
    step = gpus // count
    nearest = [
        Nic(f"mlx5_{i}", gigabits, pcie_ancestors(i * step, gpus=gpus, per_switch=per_switch, device="nic"))
        for i in range(count)
    ]
    return (*nearest, Nic("eno1", 25, ("numa0", "pci9", "nic9")))


def hgx(host: str, order: Iterable[int] = range(8), *, adapters: int = 8) -> list[DeviceInfo]:
    """Return H100s on NVSwitch with ``adapters`` NICs; ``order`` lists the GPU of each local rank."""
    per_switch, links = 8 // adapters, (NvLink(SWITCH, 18, 4),)
    beside = nics(adapters, per_switch=per_switch)
    return [
        DeviceInfo(
            host, f"GPU-{host}-{i}", i, "H100", links, None, pcie_ancestors(i, per_switch=per_switch), 64, beside
        )
        for i in order
    ]


def nvlink_mesh_host(host: str, links: dict[tuple[int, int], int], count: int, *, version: int = 2) -> list[DeviceInfo]:
    """Return GPUs with direct NVLinks and PCIe 3, two GPUs per switch."""
    paths = [pcie_ancestors(i, gpus=count, per_switch=2) for i in range(count)]
    beside = nics(4, gpus=count, per_switch=2, gigabits=100) if count == 8 else ()

    def ends(i: int) -> tuple[NvLink, ...]:
        return tuple(NvLink(paths[sum(pair) - i][-1], number, version) for pair, number in links.items() if i in pair)

    return [DeviceInfo(host, f"GPU-{host}-{i}", i, "V100", ends(i), None, paths[i], 16, beside) for i in range(count)]


def cpus(host: str, count: int) -> list[DeviceInfo]:
    return [DeviceInfo(host, unknown="cpu is not a GPU") for _ in range(count)]
