"""Arguments of ``Ring`` and of layouts: what each may be, wherever it is passed."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..comm import Limits, Topology
from ..comm.checked import RANK, RANKS, SECONDS, Kind, instance, listed, narrowed, one_of, optional, whole
from ..comm.registry import TRANSPORT
from ..kernels.scores import SEEDS

MOST_POSITIONS = (1 << 62) - 1  # so that a position and a side of a window add up in 64 bits
MOST_SLOTS = 1 << 16
MOST_DIMS = 64  # that a tensor has

POSITIONS = whole(0, MOST_POSITIONS)
INTEGERS = whole(-MOST_POSITIONS, MOST_POSITIONS)
ARGUMENTS = {
    # Ring; its dtypes are `wire.dtype_of`'s
    "transport": TRANSPORT,
    "slots": whole(1, MOST_SLOTS),
    "prefetch": optional(whole(0, MOST_SLOTS)),
    "chunks": whole(1, MOST_SLOTS),
    "direction": narrowed(whole(-1, 1), "1 (to the next rank) or -1 (to the one before)", bool),
    "topology": optional(instance("a comm.Topology", Topology)),
    "limits": optional(instance("comm.Limits", Limits)),
    "deadline": optional(SECONDS),
    # layouts and shards
    "spans_per_rank": listed("a list with the spans of every rank"),
    "seqlen": POSITIONS,
    "world": RANKS,
    "rank": RANK,
    "lengths": listed("a list with the number of tokens of every rank"),
    "speeds": listed("a list with the relative speed of every rank"),
    "shards": Kind("the shards of all ranks, in rank order", list),
    "seed": whole(-(1 << 63), SEEDS - 1),  # what torch.Generator takes
    "dim": whole(-MOST_DIMS, MOST_DIMS - 1),
    "grad": one_of("slice", "sum"),
}


def checked(**given: object) -> tuple[Any, ...]:
    """What is used of each argument, in order.

    Raises:
        ValueError: one is not what it may be; the message names it, what it got and what it takes.
    """
    return tuple([ARGUMENTS[name].of(name, value) for name, value in given.items()])


def check_autograd(what: str, *tensors: torch.Tensor) -> None:
    """Refuse transforms of functions, which would need rules of their own for what ranks send: NotImplementedError."""
    unpack: Any = forward_ad.unpack_dual
    if any(unpack(x).tangent is not None for x in tensors) or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{what} is called under a transform of torch.func (grad, vjp, jvp, vmap, ...) or with dual tensors of "
            "forward_ad: it takes tensors as they are, and has a backward: x.backward() or torch.autograd.grad"
        )
