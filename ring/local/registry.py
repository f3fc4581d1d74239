"""Registry of local kernels by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import KernelConfig, Scores
from ...validators import short_repr
from .protocol import FEATURES, LocalAttention, Supports

Factory = Callable[[], LocalAttention]

_FACTORIES: dict[str, Factory] = {}
_KERNELS: dict[str, LocalAttention] = {}
_DEFAULTS: dict[str, str] = {}
_CREATING = threading.RLock()  # virtual ranks are threads, and a factory runs once


def register_backend(name: str, factory: Factory, *, default_for: str | None = None) -> None:
    """Register a local kernel under a name for ``backend=name``, in this process.

    Args:
        name: any name except ``auto``. The kernel must have the same name.
        factory: creates the kernel when a call first uses the name. If it raises, the message is shown to the caller.
        default_for: type of device for which ``backend="auto"`` selects this kernel. It must not have a default yet.

    Raises:
        ValueError: the name is taken, or the device type has a default.
    """
    if not isinstance(name, str) or not name or name == "auto" or name in _FACTORIES:
        raise ValueError(f"name is {short_repr(name)}: it must be a string other than auto, {', '.join(_FACTORIES)}")
    if not callable(factory):
        raise ValueError(f"factory is {short_repr(factory)}: it must be callable and return a LocalAttention")
    if default_for in _DEFAULTS:
        raise ValueError(
            f"default_for is {default_for!r}, but backend='auto' already selects {_DEFAULTS[default_for]} for it"
        )
    _FACTORIES[name] = factory
    if default_for is not None:
        _DEFAULTS[default_for] = name


def other_backends(device: torch.device | None = None) -> list[str]:
    """Return the registered names that no device has as default, and that may support ``device``."""
    names = [name for name in _FACTORIES if name not in _DEFAULTS.values()]
    return [name for name in names if device is None or _may_support(name, device)]


def _may_support(name: str, device: torch.device) -> bool:
    """Return True if a kernel supports a device, or if its factory fails, which a call reports."""
    try:
        return device.type in resolve_backend(name, device).supports.devices
    except ValueError:
        return True


def resolve_backend(backend: Any, device: torch.device) -> LocalAttention:
    """Return the local kernel for ``backend``, a kernel or a name, and tensors on ``device``.

    Raises:
        ValueError: the name is unknown, its factory fails, or the kernel is no LocalAttention.
    """
    if not isinstance(backend, str):
        return _check_kernel("backend", backend, "a name or ")
    name = _DEFAULTS.get(device.type) if backend == "auto" else backend
    if name not in _FACTORIES:
        raise ValueError(
            f"backend is {short_repr(backend)}: it must be one of auto, {', '.join(_FACTORIES)}, or a LocalAttention "
            "(under torch.compile only its registered name)"
        )
    if name not in _KERNELS:  # without the lock, because every call comes here
        with _CREATING:
            if name not in _KERNELS:
                _KERNELS[name] = _create_kernel(name)
    return _KERNELS[name]


def _create_kernel(name: str) -> LocalAttention:
    try:
        kernel = _FACTORIES[name]()
    except Exception as error:
        raise ValueError(f"backend {name!r} cannot be used here: {type(error).__name__}: {error}") from error
    _check_kernel(f"the result of factory for backend {name!r}", kernel)
    if kernel.name != name:
        raise ValueError(
            f"the factory of backend {name!r} returned a kernel named {kernel.name!r}: the names must be equal"
        )
    return kernel


def _check_kernel(what: str, kernel: Any, others: str = "") -> LocalAttention:
    if isinstance(kernel, type) or not isinstance(kernel, LocalAttention):
        takes = f"{others}a LocalAttention, an object with name, supports, forward and backward"
        raise ValueError(f"{what} is {short_repr(kernel)}: it must be {takes}")
    if not isinstance(kernel.name, str) or not isinstance(kernel.supports, Supports):
        raise ValueError(
            f"{what} is {short_repr(kernel)}: its name must be a string, and its supports a ringattn.Supports"
        )
    return kernel


def check_supports(
    kernel: LocalAttention, q: Tensor, v: Tensor, needs: dict[str, bool], scores: Scores, block: int | None,
    config: KernelConfig | None,
) -> None:  # fmt: skip
    """Raise ValueError if a kernel does not support a call, and run the kernel's own ``check`` if it has this method.

    ``needs`` has the names of :data:`FEATURES`, True if the call needs the feature. ``block`` is the block size of a
    block-sparse mask.
    """
    supports, text = kernel.supports, f"backend {kernel.name!r} does not support"
    dim, value_dim = q.shape[3], v.shape[3]
    value_dims = (dim,) if supports.value_dims is None else supports.value_dims
    if q.device.type not in supports.devices:
        raise ValueError(f"{text} q on {q.device}: it supports {', '.join(supports.devices)}")
    if q.dtype not in supports.dtypes:
        raise ValueError(f"{text} q with dtype {q.dtype}: it supports {', '.join(map(str, supports.dtypes))}")
    if dim not in supports.head_dims:
        raise ValueError(f"{text} head dim {dim} for q and k: it supports {supports.head_dims}")
    if value_dim not in value_dims:
        raise ValueError(f"{text} head dim {value_dim} for v: it supports {value_dims} if q and k have {dim}")
    if "state" not in supports.features:
        needs = needs | {"learnable_sink": False}  # the ring merges it
    for name in (name for name, is_needed in needs.items() if is_needed and name not in supports.features):
        raise ValueError(f"{text} {FEATURES[name]}")
    check = getattr(kernel, "check", None)
    if check is not None:
        check(q, v, scores=scores, block=block, config=config)
