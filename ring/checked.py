"""The arguments of ``ring_attention``, ``Ring`` and layouts: what each may be, wherever it is passed."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..comm import Limits, Topology
from ..comm.checked import FLAG, RANK, RANKS, SECONDS, Kind, instance, listed, narrowed, number, one_of, optional, whole
from ..comm.groups import TRANSPORTS
from ..kernels import KernelConfig
from ..kernels.checks import LARGEST, LEAST_CAP, LEAST_SCALE
from ..kernels.scores import SEEDS

MOST_POSITIONS = (1 << 62) - 1  # so that a position and a side of a window add up in 64 bits
MOST_SLOTS = 1 << 16
MOST_DIMS = 64  # that a tensor has
FIRST_HEADS = 1 << 31  # numbers that the first head may have

POSITIONS = whole(0, MOST_POSITIONS)
INTEGERS = whole(-MOST_POSITIONS, MOST_POSITIONS)
_SIDE = whole(-1, MOST_POSITIONS)
_CAP = number("a number from 1e-8 to 1e30, or 0 or None for none", lambda cap: cap == 0 or LEAST_CAP <= cap <= LARGEST)


def _window(value: Any) -> tuple[int, int]:
    left, right = sides_of(value)
    return _SIDE.read(left), _SIDE.read(right)


def sides_of(window_size: Any) -> Any:
    """A window with -1 for each side that is None, and for both where it is None itself."""
    return (-1, -1) if window_size is None else [-1 if side is None else side for side in window_size]


ARGUMENTS = {
    # ring_attention
    "causal": FLAG,
    "window_size": Kind("(left, right), whole numbers from 0 to 2^62 - 1, or -1 or None: no end on that side", _window),
    "softmax_scale": optional(number("a number from 1e-30 to 1e30", lambda value: LEAST_SCALE <= value <= LARGEST)),
    "softcap": Kind(_CAP.takes, lambda cap: 0.0 if cap is None else _CAP.read(cap)),
    "dropout_p": number("a number of at least 0 and below 1", lambda value: 0 <= value < 1),
    "dropout_seed": optional(whole(0, SEEDS - 1)),
    "first_head": whole(0, FIRST_HEADS - 1),
    "prefix_length": optional(POSITIONS),
    "align": optional(one_of("top-left", "bottom-right")),
    "return_lse": FLAG,
    "config": optional(instance("a kernels.KernelConfig", KernelConfig)),
    # Ring; its dtypes are `wire.dtype_of`'s
    "transport": one_of(*TRANSPORTS),
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
