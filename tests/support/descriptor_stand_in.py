"""TMA descriptor support that Triton's interpreter lacks, for tests on a machine without a GPU.

The interpreter supports descriptor loads and stores but no reductions. It runs programs one after the other, so a
reduction is a load, an addition and a store, clipped at the end of the tensor like the other two.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter

from ringattn.kernels import launch
from ringattn.kernels.gpu import assumed_gpu


def install(patch: pytest.MonkeyPatch) -> set[str]:
    """Make the CPU pass for a GPU with TMA, both where dK/dV's epilogue is chosen and where it is interpreted.

    Returns:
        The set of descriptor operations used since the call: "load", "store" or "add".
    """
    builder, operations = interpreter.InterpreterBuilder, set[str]()
    load, store = builder.create_descriptor_load, builder.create_descriptor_store

    def spied_load(self: Any, *args: Any) -> Any:
        operations.add("load")
        return load(self, *args)

    def spied_store(self: Any, *rest: Any) -> Any:
        operations.add("store")
        return store(self, *rest)

    def add(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        operations.add("add")
        before = load(self, desc, indices, None, None)
        store(self, desc, interpreter.TensorHandle(before.data + value.data, value.dtype), indices)

    patch.setattr(builder, "create_descriptor_reduce", add, raising=False)
    patch.setattr(builder, "create_descriptor_load", spied_load)
    patch.setattr(builder, "create_descriptor_store", spied_store)
    patch.setattr(launch, "gpu_specs", lambda device: assumed_gpu(90, "NVIDIA H200"))
    return operations
