"""The table of GPU facts: consistency, lookup by name, and one query per device."""

from __future__ import annotations

from hashlib import sha256
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver

from ringattn.autotune.compile import StandInDriver
from ringattn.bench.predict.speed import GPUS, gpu_speed
from ringattn.kernels.compile_target import CompileTarget, compiling_for
from ringattn.kernels.config import built_in_config
from ringattn.kernels.device.tile_ops import dot_precision
from ringattn.kernels.gpu import (
    ARCHS,
    GPU_MODELS,
    INTERPRETER_GPU,
    L2_BYTES,
    MULTIPROCESSOR_SPECS,
    SMALLEST_L2,
    GpuSpec,
    arch_name,
    assumed_gpu,
    find_model,
    gpu_or_interpreter,
    gpu_specs,
    shared_limit,
)
from ringattn.kernels.launch import has_tma


def test_facts_are_those_of_the_sources() -> None:
    """Compare a change with the sources that ``kernels/gpu.py`` names, then update the digest."""
    facts = repr(
        (sorted(MULTIPROCESSOR_SPECS.items()), sorted(L2_BYTES.items()), sorted(GPU_MODELS.items()), SMALLEST_L2)
    )
    assert sha256(facts.encode()).hexdigest()[:16] == "714d1200883bae76"


@pytest.mark.parametrize("key", GPUS)
def test_predicted_speeds_are_below_the_peak(key: str) -> None:
    peak = GPU_MODELS[key].tensor_flops
    assert peak is not None and gpu_speed(key).backward < gpu_speed(key).forward < peak


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_model_is_found_by_whole_words_of_its_name(name: str, key: str | None) -> None:
    assert find_model(name) == key


def test_unknown_capability_has_the_smallest_l2_and_the_largest_shared_limit() -> None:
    assert assumed_gpu(75) == GpuSpec("sm_75", 75, 132, SMALLEST_L2)
    assert shared_limit(75) == max(map(shared_limit, ARCHS)) == 232_448
    assert assumed_gpu(90, "NVIDIA H200")[:2] == ("NVIDIA H200", 90)


def test_an_unknown_gpu_of_amd_gets_tiles_that_fit_every_known_one() -> None:
    assert assumed_gpu(0x90A).name == "gfx90a" and shared_limit(0x90A) == 64 << 10 < shared_limit(0x950)
    for dtype, head_dim in product((torch.bfloat16, torch.float32), (64, 128, 256)):
        assert built_in_config(0x90A, dtype, head_dim) == built_in_config(0x942, dtype, head_dim)
    assert built_in_config(0x90A, torch.bfloat16, 64) != built_in_config(75, torch.bfloat16, 64)


@pytest.mark.parametrize(("name", "l2_bytes"), [("gfx942:sramecc+:xnack-", 0), ("gfx950", 8 << 20)])
def test_a_gpu_of_amd_is_known_by_its_gfx_name(name: str, l2_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300X has capability 9.4 on ROCm, which must not count as sm_94. The driver may know the size of L2."""
    gpu = SimpleNamespace(
        name="AMD Instinct", major=9, minor=4, gcnArchName=name, multi_processor_count=304, total_memory=192 << 30,
        L2_cache_size=l2_bytes,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    found = gpu_specs(torch.device("cuda", 90 + len(name)))  # not queried by any other test
    assert found is not None and found.arch == int(name[3:6], 16) and arch_name(found.arch) == name[:6]
    assert not has_tma(found.arch) and found.l2_bytes == (l2_bytes or 4 << 20)


def test_the_precision_of_fp32_products_is_one_that_the_compiler_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, precision in ((90, "tf32x3"), (0x942, "ieee")):
        monkeypatch.setattr(driver, "_active", StandInDriver(arch, device=0))
        assert dot_precision() == precision


def test_gpu_specs_are_queried_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert [gpu_specs(device) for device in (cpu, meta)] == [None, None]
    assert gpu_or_interpreter(cpu) == gpu_or_interpreter(meta) == INTERPRETER_GPU
    with compiling_for(CompileTarget(assumed_gpu(80), print)):
        with compiling_for(CompileTarget(assumed_gpu(90), print)):
            assert gpu_specs(meta) == assumed_gpu(90)
        assert gpu_specs(meta) == gpu_or_interpreter(meta) == assumed_gpu(80)
    assert gpu_specs(meta) is None
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(name="NVIDIA L40S", major=8, minor=9, multi_processor_count=142, total_memory=48 << 30)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device = torch.device("cuda", 93)  # not queried by any other test
    for _ in range(2):
        assert gpu_specs(device) == GpuSpec("NVIDIA L40S", 89, 142, L2_BYTES[89], float(48 << 30))
    assert asked == [device]
