"""What Triton's own launcher passes to the kernels of an export, printed as JSON. Not interpreted.

The host entries are called on tensors of this machine's memory, and what they would launch goes through the launcher
that Triton builds, by its own sources, on the driver that records. ``argv``: configs by name and cases as JSON, and the
folder of that driver.
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

from ringattn.autotune.compile import ROLES
from ringattn.kernels import Bounds, KernelConfig, attention
from ringattn.kernels.experimental import hopper_backward_launch, hopper_launch, single_pass
from ringattn.kernels.tables import DTYPES, Gpu
from ringattn.tools.export.config import ExportConfig, Source, chosen_tiles, resolved
from ringattn.tools.export.kernels import compiled_launch, field_name, parameter_layout

from .exports import STREAM, Record

SCALE = 0.125
NAMES = {"hopper_kernel": "forward", **dict.fromkeys(("single_pass_kernel", "hopper_backward_kernel"), "gradients")}
"""Of functions that are exported under another name than their own."""


class Call:
    """The arguments of the host entries in one case: ``batch``, ``rows``, ``columns``, ``key_heads``, ``group``."""

    def __init__(self, export: ExportConfig, case: dict[str, int]) -> None:
        self.export, self.case, self.made = export, case, 0
        rows, columns = case["rows"], case["columns"]
        self.heads = case["key_heads"] * (case["group"] if export.grouped else 1)
        self.bounds = Bounds(None, None)
        if export.bounded:
            ends = torch.arange(rows, dtype=torch.int32).clamp(max=columns)
            self.bounds = Bounds(torch.zeros_like(ends), ends)
        tiles = {name: tile for name, (tile, _) in chosen_tiles(export).items()}
        self.config = KernelConfig(
            forward=tiles["forward"],
            dq=tiles["dq"],
            dkdv=tiles["dkdv"],
            forward_kernel=export.forward_kernel or "portable",
            backward=export.backward,
            single_pass=tiles.get("gradients"),
        )
        self.common: dict[str, Any] = {"bounds": self.bounds, "softmax_scale": SCALE, "config": self.config}

    def tensor(self, of_keys: bool, head_dim: int, dtype: str) -> torch.Tensor:
        """Of queries or keys: no two have the same strides; that of a dimension of one element says nothing."""
        self.made += 1
        case, gap = self.case, 32 * self.made
        length, heads = (case["columns"], case["key_heads"]) if of_keys else (case["rows"], self.heads)
        row = heads * (head_dim + gap) + 16
        strides = (length * row + 16 * self.made if case["batch"] > 1 else 32, row, head_dim + gap, 1)
        room = torch.zeros(case["batch"] * (length + 1) * row + 64, dtype=DTYPES[dtype])
        return room.as_strided((case["batch"], length, heads, head_dim), strides)

    def triple(self, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Like q, k and v."""
        head_dim, head_dim_v = self.export.head_dim, self.export.head_dim_v
        return (
            self.tensor(False, head_dim, dtype),
            self.tensor(True, head_dim, dtype),
            self.tensor(True, head_dim_v, dtype),
        )

    def run(self) -> None:
        """Forward and backward."""
        export, role = self.export, ROLES[self.export.role]
        q, k, v = self.triple(export.dtype)
        dout, out = (self.tensor(False, export.head_dim_v, export.dtype) for _ in range(2))
        lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
        state = (self.tensor(False, export.head_dim_v, "fp32"), lse) if role.carried else None
        attention.attention_forward(q, k, v, state=state, final=role.final, **self.common)
        self.backward(dout, q, k, v, lse, attention.attention_delta(dout, out))

    def backward(self, *given: torch.Tensor) -> None:
        """What follows delta."""
        role, accum = ROLES[self.export.role], self.triple("fp32")
        out = accum if role.in_place else self.triple(self.export.dtype if role.final else "fp32")
        pairs: dict[str, Any] = self.common | {"out": out[1:], "accum": accum[1:] if role.carried else None}
        if self.export.backward == "two_pass":
            before: Any = accum[0] if role.carried else None
            attention.attention_dq(*given, accum=before, out=out[0], **self.common)
            attention.attention_dkdv(*given, **pairs)
        else:
            single_pass.attention_gradients(*given, dq=accum[0], **pairs)


def captured(config: ExportConfig, case: dict[str, int]) -> dict[str, tuple[int, list[Any]]]:
    """By kernel: (programs, arguments in the order of the kernel) of what the host entries launch."""
    found: dict[str, tuple[int, list[Any]]] = {}

    def launch(kernel: Any, grid: int, device: object, *args: Any, **options: Any) -> None:
        rest = [options[name] for name in kernel.arg_names[len(args) :]]
        found[NAMES.get(kernel.__name__, kernel.__name__.removesuffix("_kernel"))] = grid, [*args, *rest]

    with (
        patch.object(attention, "launch", launch),
        patch.object(single_pass, "launch", launch),
        patch.object(hopper_launch, "launch", launch),
        patch.object(hopper_backward_launch, "launch", launch),
        patch.object(hopper_launch, "is_hopper", lambda device: True),
        patch.object(single_pass, "gpu_of", lambda device: Gpu("", config.arch)),
    ):
        Call(config, case).run()
    return found


def by_name(names: list[str], given: list[Any]) -> dict[str, Any]:
    """What a caller of the launcher would say: addresses, strides and numbers by the names of its fields."""
    found: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for field, part in zip(value._fields, value, strict=True):  # type: ignore[attr-defined]
                walk(field_name(name, field), part)
        elif isinstance(value, torch.Tensor):
            found[name] = value.data_ptr()
        elif hasattr(value, "base"):  # a descriptor: as its tensor would be passed
            found[name] = value.base.data_ptr()
            found.update(
                {f"{name}_stride_{axis}": stride for axis, stride in zip("bsh", value.base.stride(), strict=False)}
            )
        elif value is not None:
            found[name] = value

    for name, value in zip(names, given, strict=True):
        walk(name, value)
    return found


def launched(library: ctypes.CDLL, made: Any, programs: int, given: list[Any], version: int) -> dict[str, Any]:
    """What arrives at the driver."""
    record = Record.in_dll(library, "record")
    record.expect([size for _, size in parameter_layout(made.asm["cubin"]).parameters], version)
    before = record.launches
    launcher = CudaLauncher(made.src, made.metadata)
    launcher(programs, 1, 1, STREAM, 2, made.packed_metadata, None, None, None, *given)
    assert record.launches == before + 1
    return {"numbers": [*record.numbers], "values": [value.hex() for value in record.passed()]}


def main() -> None:
    told, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)  # the driver that records has but the functions that are called
    library = ctypes.CDLL(str(folder / "libcuda.so.1"))
    configs = {name: config_of(**fields) for name, fields in told["configs"].items()}
    kernels = {
        name: {one: compiled_launch(config, one).binary for one in config.kernels} for name, config in configs.items()
    }
    triton.knobs.cache.dir = str(folder / "cache")  # what is built on that driver stays there
    triton.runtime.driver.set_active(CudaDriver())
    found = {
        name: [called(library, config, case, kernels[name]) for case in told["cases"]]
        for name, config in configs.items()
    }
    print(json.dumps(found))


def config_of(config_dir: str | None, **fields: Any) -> ExportConfig:
    return resolved(ExportConfig(**fields, source=Source(config_dir=Path(config_dir) if config_dir else None)))


def called(library: ctypes.CDLL, config: ExportConfig, case: dict[str, int], kernels: dict[str, Any]) -> dict[str, Any]:
    """By kernel: what the host entries say in one case, and what of it arrives at the driver."""
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
