"""Script that prints, as JSON, what Triton's own launcher passes to the kernels of an export.

The host entries run on tensors in host memory. Their launches go through the launcher that Triton builds from its own
sources, on the recording driver. Triton's interpreter is off. ``argv`` has configs by name and cases as JSON, and the
folder of the driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

from ringattn.autotune.compile import CallSizes, call_entry
from ringattn.kernels import FULL, Bounds, attention, hopper_backward_launch, hopper_forward_launch, single_pass
from ringattn.kernels import launch as launching
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.tables import DTYPES
from ringattn.tools.export.config import ExportConfig
from ringattn.tools.export.kernels import compiled_launch, export_variant, field_name, read_parameter_layout

from .exports import STREAM, Record


class Strided:
    """Allocator of host tensors with unique strides; strides of size-1 dimensions do not matter."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if len(shape) != 4:
            return torch.zeros(shape, dtype=dtype)
        self.made += 1
        batch, length, heads, head_dim = shape
        gap = 32 * self.made
        row = heads * (head_dim + gap) + 16
        strides = (length * row + 16 * self.made if batch > 1 else 32, row, head_dim + gap, 1)
        return torch.zeros(batch * (length + 1) * row + 64, dtype=dtype).as_strided(shape, strides)


def captured(config: ExportConfig, case: dict[str, int]) -> dict[str, tuple[int, list[Any]]]:
    """Return what the host entries launch, by kernel: programs and arguments in kernel order."""
    by_kernel: dict[str, list[tuple[int, list[Any]]]] = {name: [] for name in config.kernels}
    heads = case["key_heads"] * (case["group"] if config.grouped else 1)
    sizes, make = CallSizes(case["batch"], case["rows"], case["columns"], heads, case["key_heads"]), Strided()
    ends = torch.arange(sizes.queries, dtype=torch.int32).clamp(max=sizes.keys)
    bounds = Bounds(torch.zeros_like(ends), ends) if config.bounded else FULL
    values = sizes.batch, sizes.queries, heads, config.head_dim_v

    for name, launches in by_kernel.items():

        def launch(
            kernel: Any, grid: int, device: object, *args: Any,
            launches: list[tuple[int, list[Any]]] = launches, **options: Any,
        ) -> None:  # fmt: skip
            rest = [options[name] for name in kernel.arg_names[len(args) :]]
            launches.append((grid, [*args, *rest]))

        with (
            patch.object(attention, "launch", launch),
            patch.object(single_pass, "launch", launch),
            patch.object(hopper_forward_launch, "launch", launch),
            patch.object(hopper_backward_launch, "launch", launch),
            patch.object(hopper_forward_launch, "is_hopper_device", lambda device: True),
            patch.object(single_pass, "gpu_specs", lambda device: assumed_gpu(config.arch)),
            patch.object(launching, "gpu_specs", lambda device: assumed_gpu(config.arch)),
        ):
            if name == "delta":
                attention.attention_delta(*(make(name, *values, dtype=DTYPES[config.dtype]) for _ in range(2)))
            else:
                call_entry(export_variant(config, name, sizes), make, bounds)
    assert all(len(launches) == 1 for launches in by_kernel.values())
    return {name: launches[0] for name, launches in by_kernel.items()}


def by_name(names: list[str], values: list[Any]) -> dict[str, Any]:
    """Return addresses, strides and numbers by the launcher's field names."""
    named: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for field, part in zip(value._fields, value, strict=True):  # type: ignore[attr-defined]
                walk(field_name(name, field), part)
        elif isinstance(value, torch.Tensor):
            named[name] = value.data_ptr()
        elif hasattr(value, "base"):  # a descriptor is passed like its tensor
            named[name] = value.base.data_ptr()
            named.update(
                {f"{name}_stride_{axis}": stride for axis, stride in zip("bsh", value.base.stride(), strict=False)}
            )
        elif value is not None:
            named[name] = value

    for name, value in zip(names, values, strict=True):
        walk(name, value)
    return named


def launched(library: ctypes.CDLL, made: Any, programs: int, arguments: list[Any], version: int) -> dict[str, Any]:
    """Launch on the recording driver and return what arrives there."""
    record = Record.in_dll(library, "record")
    record.expect([size for _, size in read_parameter_layout(made.asm["cubin"])[1]], version)
    before = record.launches
    launcher = CudaLauncher(made.src, made.metadata)
    launcher(programs, 1, 1, STREAM, 2, made.packed_metadata, None, None, None, *arguments)
    assert record.launches == before + 1
    return {"numbers": [*record.numbers], "values": [value.hex() for value in record.passed()]}


def main() -> None:
    request, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)  # the recording driver has only the functions that are called
    library = ctypes.CDLL(str(folder / "libcuda.so.1"))
    configs = {name: ExportConfig(**fields) for name, fields in request["configs"].items()}
    kernels = {
        name: {of: compiled_launch(config, of).binary for of in config.kernels} for name, config in configs.items()
    }
    triton.knobs.cache.dir = str(folder / "cache")  # keep launchers that were built on this driver
    triton.runtime.driver.set_active(CudaDriver())
    results = {
        name: [called(library, config, case, kernels[name]) for case in request["cases"]]
        for name, config in configs.items()
    }
    print(json.dumps(results))


def called(library: ctypes.CDLL, config: ExportConfig, case: dict[str, int], kernels: dict[str, Any]) -> dict[str, Any]:
    """Return what the host entries pass in one case and what arrives at the driver, by kernel."""
    calls = captured(config, case)
    assert set(calls) == set(kernels)
    return {
        name: {
            "arguments": by_name(made.src.fn.arg_names, calls[name][1]),
            **launched(library, made, *calls[name], case["driver"]),
        }
        for name, made in kernels.items()
    }


if __name__ == "__main__":
    main()
