"""The order in which the ring posts, waits and computes, and what never happens: seen from beneath, on both ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ringattn import Layout, LocalWorld
from ringattn.comm import Fence, LocalGroup, Message, Slots, open_transport
from ringattn.kernels import Bounds
from ringattn.ring import Hop, Mask, loop
from ringattn.ring.plan import plan
from ringattn.ring.traffic import Call, Tensors

CPU = torch.device("cpu")


class Recorder:
    """A transport around the real one that writes down what is asked of it."""

    def __init__(self, group: LocalGroup) -> None:
        self._inner = open_transport(group, device=CPU)
        self.name, self.rank, self.size = self._inner.name, self._inner.rank, self._inner.size
        self.log: list[str] = []

    def mark(self) -> Fence:
        return self._inner.mark()

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        self.log.append(f"post {len(sends)} sends {len(receives)} receives")
        return self._inner.post(sends=sends, receives=receives, after=after)

    def gather(self, value: object) -> list[object]:
        return self._inner.gather(value)

    def close(self) -> None:
        self._inner.close()


class Work:
    """Computes nothing and writes down what it was asked to."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def fold(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, final: bool) -> None:
        self.log.append("fold final" if final else "fold")

    def dq(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, local: bool, final: bool) -> None:
        self.log.append("dq final" if final else "dq")

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
        self.log.append(f"dkdv{' with sums' if sums is not None and sums() else ''}")
        for x in into:
            x.fill_(self_value(into))


def self_value(into: Tensors) -> float:
    return float(into[0].numel())


def logs(layout: Layout, causal: bool, run: Callable[[Call, Work, torch.Tensor], None]) -> list[list[str]]:
    def one(group: LocalGroup) -> list[str]:
        transport = Recorder(group)
        steps = plan(layout, Mask(causal=causal), group.rank(), 1, CPU)

        def span(kind: str, hop: Hop) -> Any:
            return torch.no_grad()

        call = Call(steps, transport, Slots(3, CPU), Slots(steps.sums_slots, CPU), span)
        k = torch.zeros(1, layout.lengths[group.rank()], 1, 4)
        run(call, Work(transport.log), k)
        transport.close()
        return transport.log

    with LocalWorld(layout.world) as world:
        return world.run(one)


def test_the_next_hop_is_posted_before_this_one_computes() -> None:
    everyone = logs(Layout.zigzag(24, 3), True, lambda call, work, k: loop.forward(call, work, k, k))
    for log in everyone:
        assert log == [
            "post 2 sends 2 receives",
            "fold",
            "post 2 sends 2 receives",
            "fold",
            "fold final",
        ]


def test_sums_travel_while_dq_computes_and_come_home_under_the_last_one() -> None:
    everyone = logs(
        Layout.zigzag(24, 3), True, lambda call, work, k: loop.backward(call, work, k, k, (torch.empty(8), k.clone()))
    )
    for log in everyone:
        assert log == [
            "post 2 sends 2 receives",  # K/V of hop 1, hidden by the local dQ
            "dq",
            "post 2 sends 2 receives",  # K/V of hop 2
            "dkdv",
            "post 2 sends 2 receives",  # sums of hop 1 on, those for hop 2 in
            "dq",
            "dkdv with sums",
            "post 2 sends 2 receives",  # sums home, hidden by the last dQ
            "dq final",
            "dkdv with sums",
        ]


def test_what_nobody_needs_is_neither_sent_nor_computed() -> None:
    first, second, third = logs(Layout.contiguous(24, 3), True, lambda call, work, k: loop.forward(call, work, k, k))
    assert first == ["post 2 sends 0 receives", "fold final"]
    assert second == ["post 2 sends 2 receives", "fold", "post 2 sends 0 receives", "fold final"]
    assert third == ["post 0 sends 2 receives", "fold", "post 0 sends 2 receives", "fold", "fold final"]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_every_post_has_its_counterpart(world: int, causal: bool) -> None:
    for make in (Layout.contiguous, Layout.zigzag, Layout.striped):
        everyone = logs(
            make(30, world), causal, lambda call, work, k: loop.backward(call, work, k, k, (k.clone(), k.clone()))
        )
        words = [line.split() for log in everyone for line in log if line.startswith("post")]
        assert sum(int(line[1]) for line in words) == sum(int(line[3]) for line in words)
