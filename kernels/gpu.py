"""Facts about GPUs: limits and rates of one multiprocessor, GPU models, and the GPU of a device.

``arch`` is a compute capability without the dot (90 is 9.0), or for AMD the hexadecimal number of a gfx name (0x942).

Sources by NVIDIA:

- Limits of a multiprocessor and of a block: CUDA C++ programming guide, "Compute capabilities"; tuning guides of
  Ampere, Ada, Hopper and Blackwell, "Occupancy".
- Lanes per clock: CUDA C++ best practices guide, "Throughput of native arithmetic instructions" (until 12.9 in the CUDA
  C++ programming guide).
- Products per clock of the tensor cores: white papers of A100 (1,024 fused multiply-adds per multiprocessor), GA102 and
  Ada (512), H100 (2,048) and RTX Blackwell (512). For sm_100: 2.25 PFLOP/s of the Blackwell brief over 148
  multiprocessors at 1.85 GHz (4,096). GeForce cards of sm_86, 89 and 120 do half of that with fp32 sums.
- Shared memory: 32 banks of 4 bytes per clock (programming guide, "Shared memory").
- L2 throughput: 5,120 bytes per clock over the 108 multiprocessors of A100 (its white paper). The other values are not
  documented: 64 bytes per clock is a generous assumption.
- Models: their data sheets and white papers; dense rates, nominal bandwidth.

Sources by AMD (a multiprocessor is a compute unit, a warp is a wavefront, shared memory is LDS):

- White papers of CDNA 3 and CDNA 4: products, lanes, LDS, and 2,048 bytes per clock of the L2 cache of an XCD, which
  has 38 compute units in MI300X and 32 in MI355X. 128 lanes of fp32 need packed instructions.
- Registers, wavefronts and workgroups of a compute unit: LLVM's "User Guide for AMDGPU Backend" and ``GCNSubtarget``.
- Models: data sheets of MI300X and MI355X. Each XCD has 4 MB of L2 cache; the Infinity Cache does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from .compile_target import compile_target

REGISTERS = 65_536
"""32-bit registers of a multiprocessor of NVIDIA."""

SCHEDULERS = 4
"""Warp schedulers of a multiprocessor; each issues one instruction per clock."""

SHARED_BYTES_PER_CLOCK = 128
"""Bytes that the shared memory of a multiprocessor moves per clock."""

TENSOR_MEMORY_COLUMNS = 512
"""Columns of tensor memory of a multiprocessor of sm_100; ptxas turns a kernel that needs more into a trap."""


@dataclass(frozen=True)
class MultiprocessorSpec:
    """Limits of one multiprocessor, and its throughput per clock."""

    products: int  # fused multiply-adds of the tensor cores; 16-bit inputs, fp32 sums, dense
    fma: int  # lanes of fp32 add, multiply and multiply-add
    add: int  # lanes of 32-bit integer add
    minmax: int  # lanes of fp32 minimum and maximum
    l2_bytes_per_clock: float
    warps: int  # resident at a time
    blocks: int  # resident at a time
    shared_per_multiprocessor: int  # bytes
    shared_per_block: int  # bytes
    integer_multiply: int = 64  # lanes
    logic: int = 64  # lanes of bitwise operations, shift, select and compare
    special: int = 16  # lanes of exp2, log2 and reciprocal
    shuffle: int = 32  # lanes
    registers: int = REGISTERS  # of 32 bits
    register_unit: int = 256  # registers of a warp are a multiple of this number
    reserved_shared: int = 1024  # bytes of shared memory that the system takes from every block
    warp_size: int = 32


_A100_L2, _ASSUMED_L2 = 5120 / 108, 64.0
_WAVE64 = {"registers": 131_072, "register_unit": 512, "reserved_shared": 0, "warp_size": 64}

MULTIPROCESSOR_SPECS = {
    80: MultiprocessorSpec(1024, 64, 64, 64, _A100_L2, 64, 32, 164 << 10, 163 << 10),
    86: MultiprocessorSpec(512, 128, 64, 64, _ASSUMED_L2, 48, 16, 100 << 10, 99 << 10),
    89: MultiprocessorSpec(512, 128, 64, 64, _ASSUMED_L2, 48, 24, 100 << 10, 99 << 10),
    90: MultiprocessorSpec(2048, 128, 64, 64, _ASSUMED_L2, 64, 32, 228 << 10, 227 << 10),
    100: MultiprocessorSpec(4096, 128, 64, 128, _ASSUMED_L2, 64, 32, 228 << 10, 227 << 10),
    120: MultiprocessorSpec(512, 128, 128, 64, _ASSUMED_L2, 48, 24, 100 << 10, 99 << 10),
    0x942: MultiprocessorSpec(1024, 128, 64, 64, 2048 / 38, 32, 16, 64 << 10, 64 << 10, **_WAVE64),
    0x950: MultiprocessorSpec(2048, 128, 64, 64, 2048 / 32, 32, 16, 160 << 10, 160 << 10, **_WAVE64),
}
"""Specification by architecture."""


def is_amd(arch: int) -> bool:
    """Return True for an architecture of AMD."""
    return arch >= 0x600  # compute capabilities are smaller


ARCHS = tuple(arch for arch in MULTIPROCESSOR_SPECS if not is_amd(arch))
"""Compute capabilities that kernels are compiled, tuned and exported for."""

AMD_ARCHS = tuple(arch for arch in MULTIPROCESSOR_SPECS if is_amd(arch))
"""Architectures of AMD that kernels are compiled for, but not tuned or exported."""

L2_BYTES = {80: 40 << 20, 86: 6 << 20, 89: 72 << 20, 90: 50 << 20, 100: 126 << 20, 103: 126 << 20, 120: 96 << 20}
"""Size of the L2 cache by compute capability: A100, A10, RTX 4090, H100, B200, B300 and RTX 5090."""
L2_BYTES |= dict.fromkeys(AMD_ARCHS, 4 << 20)

SMALLEST_L2 = 6 << 20
"""Size of the L2 cache that is assumed for any other GPU."""


def arch_name(arch: int) -> str:
    """Return the compiler's name of an architecture: ``sm_90`` or ``gfx942``."""
    return f"gfx{arch:x}" if is_amd(arch) else f"sm_{arch}"


class GpuSpec(NamedTuple):
    """Facts about a GPU, or about any GPU of an architecture; ``name`` is then like ``sm_90``."""

    name: str
    arch: int
    multiprocessors: int
    l2_bytes: int
    memory_bytes: float | None = None
    memory_bandwidth: float | None = None  # bytes per second, nominal
    tensor_flops: float | None = None  # FLOP/s of the tensor cores; 16-bit inputs, fp32 sums, dense


def _model(name: str, arch: int, multiprocessors: int, tflops: float, tbytes: float, gbytes: float) -> GpuSpec:
    """Return the facts of a data sheet: tensor TFLOP/s, memory bandwidth in TB/s and memory in GB."""
    return GpuSpec(name, arch, multiprocessors, L2_BYTES[arch], gbytes * 1e9, tbytes * 1e12, tflops * 1e12)


GPU_MODELS = {
    "h100": _model("H100", 90, 132, 989, 3.35, 80),
    "h200": _model("H200", 90, 132, 989, 4.8, 141),
    "h800": _model("H800", 90, 132, 989, 3.35, 80),
    "h100-pcie": _model("H100 PCIe", 90, 114, 756, 2.0, 80),
    "a100": _model("A100", 80, 108, 312, 2.04, 80),
    "a800": _model("A800", 80, 108, 312, 2.04, 80),
    "a100-pcie": _model("A100 PCIe", 80, 108, 312, 1.94, 80),
    "b200": _model("B200", 100, 148, 2250, 8.0, 180),
    "l40s": _model("L40S", 89, 142, 362, 0.864, 48)._replace(l2_bytes=96 << 20),
    "a10": _model("A10", 86, 72, 125, 0.6, 24),
    "mi300x": _model("MI300X", 0x942, 304, 1307, 5.3, 192),
    "mi355x": _model("MI355X", 0x950, 256, 2517, 8.0, 288),
}
"""GPU models. The driver's name of a GPU contains all words of its key: ``h100-pcie`` has h100 and pcie."""

INTERPRETER_GPU = GpuSpec("CPU", 0, 20, SMALLEST_L2)
"""Stand-in for Triton's interpreter, which runs kernels on the CPU."""


def shared_limit(arch: int) -> int:
    """Return how many bytes of shared memory a thread block may use.

    For an unknown compute capability the result is the largest limit of the known ones, and for AMD the smallest.
    """
    if arch not in MULTIPROCESSOR_SPECS:
        arch = AMD_ARCHS[0] if is_amd(arch) else 100
    return MULTIPROCESSOR_SPECS[arch].shared_per_block


def assumed_gpu(arch: int, name: str | None = None) -> GpuSpec:
    """Return assumed facts of a GPU that is not present, with as many multiprocessors as an H100.

    ``name`` is that of the architecture by default.
    """
    multiprocessors = GPU_MODELS["h100"].multiprocessors
    return GpuSpec(name or arch_name(arch), arch, multiprocessors, L2_BYTES.get(arch, SMALLEST_L2))


def find_model(name: str) -> str | None:
    """Return the key in ``GPU_MODELS`` for the driver's name of a GPU, or None for an unknown model.

    ``NVIDIA H100 80GB HBM3`` is ``h100``, ``NVIDIA H100 PCIe`` is ``h100-pcie``.
    """
    words = set(name.lower().replace("-", " ").split())
    return max((key for key in GPU_MODELS if words.issuperset(key.split("-"))), key=len, default=None)


def gpu_specs(device: torch.device) -> GpuSpec | None:
    """Return the GPU of a device, or None if the device is no GPU.

    The meta device stands for the GPU of :func:`.compile_target.compiling_for`.
    """
    if device.type == "meta":
        compiling = compile_target()
        return None if compiling is None else compiling.gpu
    return _query_gpu(device) if device.type == "cuda" else None


@cache
def _query_gpu(device: torch.device) -> GpuSpec:
    properties = torch.cuda.get_device_properties(device)
    gfx = re.match(r"gfx([0-9a-f]+)", getattr(properties, "gcnArchName", ""))  # MI300X has capability 9.4
    arch = int(gfx[1], 16) if gfx else properties.major * 10 + properties.minor
    l2_bytes = getattr(properties, "L2_cache_size", 0) or L2_BYTES.get(arch, SMALLEST_L2)
    return GpuSpec(properties.name, arch, properties.multi_processor_count, l2_bytes, float(properties.total_memory))


def gpu_or_interpreter(device: torch.device) -> GpuSpec:
    """Return the GPU of a device, or ``INTERPRETER_GPU`` if the device is no GPU."""
    return gpu_specs(device) or INTERPRETER_GPU
