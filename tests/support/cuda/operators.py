"""Torch functions and operators on the recorder.

A tensor that was created for a GPU claims to be on one, so that our code takes its CUDA paths. Every operator on such a
tensor is an operation of the current stream. Host tensors behave as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .recorder import GPU, HOST, Give, Recorder


@contextmanager
def acting(recorder: Recorder, rank: int) -> Iterator[None]:
    """Act as `rank` in this thread, and record torch's calls."""
    before, recorder.thread.rank = recorder.thread.rank, rank
    try:
        with _Functions(recorder), _Operators(recorder):
            yield
    finally:
        recorder.thread.rank = before


class _Functions(TorchFunctionMode):
    """Torch functions that report a tensor's claimed device and record host synchronization."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        get = {name: getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")}
        tensor: Any = torch.Tensor
        self._special: dict[Any, Any] = {
            get["device"]: lambda x: GPU if recorder.on_device(x) else HOST,
            get["is_cuda"]: recorder.on_device,
            get["is_cpu"]: lambda x: not recorder.on_device(x),
            **{tensor.__dict__.get(name, getattr(tensor, name)): self._moved for name in ("to", "cuda", "cpu")},
        }
        self._reads = {
            getattr(tensor, name) for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__")
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special == self._moved:
            return self._moved(func, *args, **kwargs)
        if special is not None:
            return special(*args, **kwargs)
        if func in self._reads and self.recorder.on_device(args[0]):
            self.recorder.read_back(func.__name__, args[0])
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        kind = torch.device(kwargs["device"])
        if kind.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        return self._made(kind, lambda: func(*args, **{**kwargs, "device": HOST}))

    def _made(self, kind: torch.device, make: Callable[[], Any]) -> Any:
        thread = self.recorder.thread
        before, thread.makes = thread.makes, kind
        try:
            return make()
        finally:
            thread.makes = before

    def _moved(self, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Emulate `to`, `cuda` and `cpu` with a copy if the tensor is on the other side."""
        to: Any = torch.Tensor.to
        wanted, rest = self._wanted(func.__name__, args, kwargs)
        if wanted is not None and wanted.type not in ("cpu", "cuda"):
            return to(x, wanted, *rest, **kwargs)
        on_device = self.recorder.on_device(x)
        if wanted is not None and (wanted.type == "cuda") != on_device:
            if on_device:
                self.recorder.read_back(func.__name__, x)
            x = self._made(wanted, lambda: torch.clone(x))
        return to(x, *rest, **kwargs) if rest or kwargs else x

    def _wanted(self, name: str, args: Any, kwargs: Any) -> tuple[torch.device | None, list[Any]]:
        """Return the requested device and the other arguments."""
        wanted = {"cpu": HOST, "cuda": GPU}.get(name)
        rest = []
        for value in (*args, *([kwargs.pop("device")] if kwargs.get("device") is not None else [])):
            if isinstance(value, (torch.device, str)):
                wanted = torch.device(value)
            elif isinstance(value, torch.Tensor):
                wanted = GPU if self.recorder.on_device(value) else HOST
                rest.append(value.dtype)
            else:
                rest.append(value)
        return wanted, rest


EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
SYNCHRONIZES = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero")


class _Operators(TorchDispatchMode):
    """Mode that records every operator on device memory as one operation of the current stream."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        with self:  # below autograd, composite operators arrive here undecomposed
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.is_view:
            return func(*args, **kwargs)  # views allocate no memory
        tensors = _tensors((args, kwargs))
        override, touches = recorder.thread.makes, any(map(recorder.on_device, tensors))
        on_device = override.type == "cuda" if override is not None else touches
        if not touches and not on_device:
            return func(*args, **kwargs)  # host only
        recorded_args, written = tree_map(recorder.replay_argument, (args, kwargs)), _written(func, args, kwargs)
        result = func(*args, **kwargs)
        new_tensors = [x for x in _tensors(result) if recorder.memory.find(x) is None]
        for x in new_tensors:
            recorder.allocated(x, on_device)
        name = func._schema.name
        if (not new_tensors and not written and name not in SYNCHRONIZES) or name in EMPTY:
            return result
        outputs = [*written, *new_tensors]
        # A copy of bytes is a transfer.
        if name == "aten::copy_" and args[0].dtype == torch.uint8 and recorder.on_device(args[0]):
            recorder.start_transfer("copy", recorder.current(), "copy_", recorder.replay_argument(args[0]))
        op = recorder.add(
            "copy" if name == "aten::copy_" else "op",
            recorder.current(),
            detail=name.removeprefix("aten::"),
            reads=recorder.uses([x for x in tensors if not any(x is y for y in written)]),
            writes=recorder.uses(outputs),
        )
        results = [recorder.replay_argument(x) for x in new_tensors]
        op.action = _replay_action(func, recorded_args, results)
        if name in SYNCHRONIZES or (
            name == "aten::copy_" and recorder.on_device(args[1]) > recorder.on_device(args[0])
        ):
            recorder.add("synchronize", recorder.current())
        return result


def _replay_action(func: Any, recorded_args: Any, results: list[Any]) -> Callable[[Give], None]:
    """Return the action that repeats an operator on other memory and stores its results there."""

    def act(give: Give) -> None:
        args, kwargs = tree_map(give, recorded_args)
        result = func(*args, **kwargs)
        for target, value in zip(results, _tensors(result) if results else (), strict=bool(results)):
            give(target).copy_(value)

    return act


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [x for item in inner for x in _tensors(item)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
            written += _tensors(value)
    return written
