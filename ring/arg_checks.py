"""Values that the arguments of ``Ring`` take, and a check against torch.func transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..comm import Limits, Topology
from ..comm.arg_checks import SECONDS
from ..comm.registry import TRANSPORT
from ..validators import instance_validator, integer_between, narrow, optional

MAX_SLOTS = 1 << 16
MAX_CHUNKS = 1 << 10  # each run of tokens has a plan of its own, which takes milliseconds to make
RING_ARGS = {
    # The wire dtypes are checked by `wire.resolve_dtype`.
    "transport": TRANSPORT,
    "slots": integer_between(1, MAX_SLOTS),
    "prefetch": optional(integer_between(0, MAX_SLOTS)),
    "chunks": optional(integer_between(1, MAX_CHUNKS)),
    "direction": narrow(integer_between(-1, 1), "1 (to the next rank) or -1 (to the previous rank)", bool),
    "topology": optional(instance_validator("a comm.Topology", Topology)),
    "limits": optional(instance_validator("comm.Limits", Limits)),
    "deadline": optional(SECONDS),
}


def check_ring_args(**values: object) -> tuple[Any, ...]:
    """Check arguments of ``Ring`` by name, and return their values in normal form, in the given order.

    Raises:
        ValueError: an argument is out of range; the message names it, what it got and what it takes.
    """
    return tuple([RING_ARGS[name].check(name, value) for name, value in values.items()])


def check_autograd(what: str, *tensors: torch.Tensor) -> None:
    """Raise NotImplementedError inside torch.func transforms and for dual tensors, which the ring does not support.

    ``what`` names the called function in the message.
    """
    unpack: Any = forward_ad.unpack_dual
    if any(unpack(x).tangent is not None for x in tensors) or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{what} is called inside a torch.func transform (grad, vjp, jvp, vmap, ...) or with dual tensors of "
            "forward_ad, which are not supported. Use x.backward() or torch.autograd.grad."
        )
