"""The modules of the Hopper kernel, executed with stand-ins in the place of triton's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .gluon_stand_in import Machine, load, store, tensor

KERNELS = Path(__file__).parents[2] / "kernels"


def language(machine: Machine) -> dict[str, Any]:
    """What the kernels take from ``triton.language`` and Gluon's."""

    def constexpr(value: Any) -> Any:
        return type("constexpr", (type(value),), {"value": value})(value)

    def pair(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda a, b: function(tensor(a), tensor(b))

    dtypes = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
    layouts = ("SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "SwizzledSharedLayout", "BlockedLayout")
    shared = SimpleNamespace(get_default_for=lambda block, dtype: None)
    return dtypes | {"NVMMASharedLayout": shared} | {name: lambda *a, **k: None for name in layouts} | {
        "constexpr": constexpr, "static_range": range, "load": load, "store": store,
        "program_id": lambda axis: tensor(machine.program),
        "cdiv": lambda a, b: (a + b - 1) // b,
        "arange": lambda begin, end, layout=None: tensor(torch.arange(begin, end)),
        "zeros": lambda shape, dtype, layout=None: tensor(torch.zeros(list(map(int, shape)), dtype=dtype)),
        "where": lambda condition, a, b: torch.where(tensor(condition), a, b),
        "maximum": pair(torch.maximum), "minimum": pair(torch.minimum),
        "max": lambda x, axis: x.amax(axis), "sum": lambda x, axis: x.sum(axis),
        "exp2": torch.exp2, "log2": torch.log2, "convert_layout": lambda x, layout: x,
        "allocate_shared_memory": machine.allocate,
        "warp_specialize": lambda partitions, warps, registers: machine.specialise(partitions),
    }  # fmt: skip


def same(function: Any = None, **options: Any) -> Any:
    return same if function is None else function


def stand_ins(machine: Machine) -> dict[str, ModuleType]:
    """Modules by name, in the place of triton's."""
    spoken = language(machine)
    barrier = {"MBarrierLayout": lambda: "barrier", "init": lambda made, count: setattr(made, "count", int(count)),
               "wait": machine.wait, "arrive": machine.arrive, "expect": machine.expect}  # fmt: skip
    hopper = {"fence_async_shared": lambda: None, "mbarrier": SimpleNamespace(**barrier),
              "tma": SimpleNamespace(async_load=machine.copy, async_atomic_add=machine.send, store_wait=machine.sent),
              "warpgroup_mma": machine.product,
              "warpgroup_mma_wait": machine.drain}  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "triton": {"jit": same, "constexpr_function": same},
        "triton.language": spoken,
        "triton.experimental": {},
        "triton.experimental.gluon": {"jit": same, "constexpr_function": same},
        "triton.experimental.gluon.language": spoken,
        "triton.experimental.gluon.language.nvidia": {},
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }
    made = {name: ModuleType(name) for name in contents}
    for name, values in contents.items():
        vars(made[name]).update(values, __path__=[])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    return made


@contextmanager
def in_their_place(modules: dict[str, ModuleType]) -> Iterator[None]:
    hidden = {name: module for name, module in sys.modules.items() if name == "triton" or name.startswith("triton.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(hidden)


def kernel(machine: Machine, name: str = "hopper") -> ModuleType:
    """``kernels.hopper``, or the backward's, as this machine runs it."""
    package = "stand_in_kernels"
    folders = {one: ModuleType(one) for one in (package, f"{package}.device", f"{package}.experimental")}
    for parent in folders.values():
        parent.__path__ = []
    modules = {**stand_ins(machine), **folders}
    files = "steps", "hopper", "hopper_backward"
    with in_their_place(modules):
        for folder, one in (("device", "tiles"), *(("experimental", file) for file in files)):
            made = f"{package}.{folder}.{one}"
            spec = importlib.util.spec_from_file_location(made, KERNELS / folder / f"{one}.py")
            assert spec is not None and spec.loader is not None
            modules[made] = sys.modules[made] = importlib.util.module_from_spec(spec)
            setattr(folders[f"{package}.{folder}"], one, modules[made])
            spec.loader.exec_module(modules[made])
    return modules[f"{package}.experimental.{name}"]
