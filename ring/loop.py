"""The ring loop: post what moves next, compute on what is here, wait, go on.

One loop for every schedule: either direction, skipped hops and journeys cut short are different data.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

from ..kernels import Bounds
from .traffic import Call, KeyValues, Sums, Tensors


class ForwardWork(Protocol):
    """Folds one key shard after the other into this rank's ``(out, lse)``."""

    def fold(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, final: bool) -> None:
        """The keys of one shard; ``final`` on this rank's last."""


class BackwardWork(Protocol):
    """This rank's part of the gradients, one key shard after the other: dK/dV first, then dQ."""

    def dq(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, local: bool, final: bool) -> None:
        """Add one shard's part to dQ; ``local`` on the first, ``final`` on the last."""

    def dkdv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: Bounds,
        *,
        local: bool,
        sums: Callable[[], Tensors] | None,
        into: Tensors,
    ) -> None:
        """Write one shard's dK/dV plus ``sums()``, which waits for the network, ``into`` the given pair."""


def forward(call: Call, work: ForwardWork, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fold every shard that this rank sees, while the next one is on its way."""
    moving = KeyValues(call, k, v)
    held: Tensors = (k, v)
    for hop, following in pairwise((*call.plan.hops, None)):
        assert hop is not None
        arriving = moving.post(hop, following, held)
        limits = call.plan.bounds[hop.index]
        if limits is not None:
            with call.span("compute", hop):
                work.fold(held[0], held[1], limits, final=hop.index == call.plan.last)
            moving.computed(hop.kv_slot)
        with call.span("wait", hop):
            held = arriving.wait()
    moving.settle()


def backward(call: Call, work: BackwardWork, k: torch.Tensor, v: torch.Tensor, dkdv: Tensors) -> None:
    """dQ of every shard that this rank sees and, carried around the ring behind them, dK/dV of its own.

    The local block brackets the rest: its dQ hides the first K/V, its dK/dV continues the sums that came home. At
    every hop dK/dV comes first, so that the dQ of the same hop hides the sums' way to the next rank.
    """
    moving, sums = KeyValues(call, k, v), Sums(call, k, v)
    local, *remote = call.plan.hops
    own = call.plan.bounds[0]
    assert own is not None
    arriving = moving.post(local, remote[0] if remote else None, (k, v))
    with call.span("compute", local):
        work.dq(k, v, own, local=True, final=call.plan.last == 0)
    for hop, following in pairwise((*remote, None)):
        assert hop is not None
        with call.span("wait", hop):
            held = arriving.wait()
        arriving = moving.post(hop, following, held)
        limits, arrival = call.plan.bounds[hop.index], sums.arrival(hop)
        if limits is not None:
            with call.span("compute", hop):
                into, arrived = sums.into(hop), arrival.wait if arrival else None
                work.dkdv(held[0], held[1], limits, local=False, sums=arrived, into=into)
            sums.computed(hop.sums_slot)
        elif arrival is not None:
            arrival.wait()  # protects the sums that only pass through: they must be here before they are sent on
        sums.post(hop, following)
        if limits is not None:
            with call.span("compute", hop):
                work.dq(held[0], held[1], limits, local=False, final=hop.index == call.plan.last)
            moving.computed(hop.kv_slot)
    home = sums.arrival(local)
    with call.span("compute", local):
        work.dkdv(k, v, own, local=True, sums=home.wait if home else None, into=dkdv)
    sums.computed(local.sums_slot)
    moving.settle()
    sums.settle()
