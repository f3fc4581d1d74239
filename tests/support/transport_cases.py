"""The conformance suite of all transports, and cases for those that share `TransportBase`."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import DONE, Edge, Fence, LocalGroup, LocalWorld, Message, Transport, TransportError, testing
from ringattn.comm.control import Control, open_control
from ringattn.comm.testing import (
    HOST_CASES,
    CallbackFence,
    Case,
    constant_tensor,
    distinct_values,
    ring_neighbours,
    wait_until,
)

__all__ = [
    "HANGS",
    "HOST_CASES",
    "CallbackFence",
    "Case",
    "constant_tensor",
    "distinct_values",
    "ring_neighbours",
    "wait_until",
]

T = TypeVar("T")
CPU = torch.device("cpu")
# Seconds until a wait counts as a hang. Mutation runs set a smaller value, because mutants do hang.
HANGS = float(os.environ.get("RINGATTN_TEST_HANGS", testing.HANG_SECONDS))


def numbered_control(group: LocalGroup, first: int = 10) -> Control:
    """Return the control of a group whose errors number its ranks from ``first`` on, as for a part of a mesh."""
    control = open_control(group)
    control.names = range(first, first + group.size())
    return control


def on_ranks(size: int, fn: Callable[[LocalGroup], T]) -> list[T]:
    """Return the results of ``fn`` on ``size`` virtual ranks of the CPU."""
    with LocalWorld(size, device="cpu", timeout=HANGS) as world:
        return world.run(fn)


def record_sends(transport: Transport) -> list[list[Message]]:
    """Return a list that records the sends of every later post."""
    posted: list[list[Message]] = []
    post = transport.post

    def counted(*, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        posted.append([*sends])
        return post(sends=sends, receives=receives, after=after)

    transport.post = counted  # type: ignore[method-assign]
    return posted


def edges_are_warmed_up_once(transport: Transport, device: torch.device) -> None:
    ranks, posted = range(transport.size), record_sends(transport)
    everything: list[Edge] = list(itertools.permutations(ranks, 2)) + [(rank, rank) for rank in ranks]
    transport.warm_up([(0, transport.size - 1)] * 2)
    first = len([message for sends in posted for message in sends])
    assert first == (transport.rank == 0)
    transport.warm_up(everything)
    transport.warm_up(everything[::-1])
    peers = [message.peer for sends in posted for message in sends]
    assert sorted(peers) == list(ranks)
    for edge in ((0, transport.size), (-1, 0), (transport.size, 0), (0, -1)):
        with pytest.raises(ValueError, match=rf"edges has \({edge[0]}, {edge[1]}\); its ranks must be between 0 and"):
            transport.warm_up([edge])


def a_warm_up_names_wrong_bytes_everywhere(transport: Transport, device: torch.device) -> None:
    post, source = transport.post, transport.size - 1
    names = getattr(transport, "names", range(transport.size))

    def spoiled(**messages: Any) -> Fence:
        fence = post(**messages)
        fence.wait()
        for message in messages["receives"]:
            message.tensor[17:20] ^= 1
        return DONE if device.type == "cpu" else transport.mark()

    if transport.rank == 0:
        transport.post = spoiled  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=rf"rank {names[0]} got 3 wrong bytes of 4096 from rank {names[source]}$"):
        transport.warm_up([(source, 0)])
    with pytest.raises(TransportError, match=f"the warm-up of the {transport.name} transport failed"):
        transport.warm_up([(source, 0)])  # the edge is still cold
    if transport.rank == 0:
        transport.post = Mock(side_effect=ValueError("no such peer"))  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=f"rank {names[0]}: no such peer"):
        transport.warm_up([(0, 0)])


BASE_CASES = edges_are_warmed_up_once, a_warm_up_names_wrong_bytes_everywhere
CASES: dict[str, Case] = {case.__name__: case for case in BASE_CASES} | testing.CASES


def error_traceback(function: Callable[..., None], *arguments: object) -> str:
    try:
        function(*arguments)
    except BaseException:
        return traceback.format_exc()
    return ""
