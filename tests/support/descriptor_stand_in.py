"""A stand-in for the copy engine's descriptors on a machine without a GPU: what Triton's interpreter lacks of them.

It loads and stores through descriptors, but adds nothing. Programs run one after the other there, so that an addition
is a load, an addition and a store, clipped at the end of the tensor as the other two are.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter

from ringattn.kernels import launch
from ringattn.kernels.gpu import assumed_gpu


def install(patch: pytest.MonkeyPatch) -> set[str]:
    """Let the CPU pass for a GPU with a copy engine, where dK/dV's epilogue is chosen and where it is interpreted.

    Returns: what was done through descriptors since: "load", "store" or "add".
    """
    builder, moved = interpreter.InterpreterBuilder, set[str]()
    load, store = builder.create_descriptor_load, builder.create_descriptor_store

    def spied_load(self: Any, *args: Any) -> Any:
        moved.add("load")
        return load(self, *args)

    def spied_store(self: Any, *rest: Any) -> Any:
        moved.add("store")
        return store(self, *rest)

    def add(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        moved.add("add")
        before = load(self, desc, indices, None, None)
        store(self, desc, interpreter.TensorHandle(before.data + value.data, value.dtype), indices)

    patch.setattr(builder, "create_descriptor_reduce", add, raising=False)
    patch.setattr(builder, "create_descriptor_load", spied_load)
    patch.setattr(builder, "create_descriptor_store", spied_store)
    patch.setattr(launch, "gpu_specs", lambda device: assumed_gpu(90, "NVIDIA H200"))
    return moved
