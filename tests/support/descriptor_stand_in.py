"""A stand-in for the copy engine's descriptors on a machine without a GPU: what Triton's interpreter lacks of them.

It loads and stores through descriptors, but adds nothing. Programs run one after the other there, so that an addition
is a load, an addition and a store, clipped at the end of the tensor as the other two are.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter

from ringattn.kernels import launch
from ringattn.kernels.tables import Gpu

H200 = Gpu("NVIDIA H200", 90)


class Moved(list[tuple[str, str]]):
    """What went through descriptors, in order: "load", "store" or "add", and of which NumPy dtype."""


def install(patch: pytest.MonkeyPatch) -> Moved:
    """Let the CPU pass for a GPU with a copy engine, where dK/dV's epilogue is chosen and where it is interpreted."""
    builder, moved = interpreter.InterpreterBuilder, Moved()
    load, store = builder.create_descriptor_load, builder.create_descriptor_store

    def add(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        before = load(self, desc, indices, None, None)
        moved.append(("add", before.data.dtype.name))
        store(self, desc, interpreter.TensorHandle(before.data + value.data, value.dtype), indices)

    def spied_load(self: Any, desc: Any, indices: Any, *how: Any) -> Any:
        made = load(self, desc, indices, *how)
        moved.append(("load", made.data.dtype.name))
        return made

    def spied_store(self: Any, desc: Any, value: Any, indices: Any) -> Any:
        moved.append(("store", value.data.dtype.name))
        return store(self, desc, value, indices)

    patch.setattr(builder, "create_descriptor_reduce", add, raising=False)
    patch.setattr(builder, "create_descriptor_load", spied_load)
    patch.setattr(builder, "create_descriptor_store", spied_store)
    patch.setattr(launch, "gpu_of", lambda device: H200)
    return moved
