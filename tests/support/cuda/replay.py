"""Execution of recorded operations on other memory, in any order that the graph allows."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .graph import Graph, linear
from .memory import Ref
from .recorder import Mail, Recorder


class Replay:
    """Memory for one execution; bytes that were never written are NaN."""

    def __init__(self, recorder: Recorder) -> None:
        self._storages = recorder.memory.storages
        self._memory: dict[int, torch.Tensor] = {}
        self._mail: dict[int, list[torch.Tensor]] = {}

    def run(self, graph: Graph, seed: int, before: list[set[int]] | None = None) -> None:
        """Run all operations in an order drawn by `seed` that respects the graph, or `before` instead."""
        for number in linear(graph.before if before is None else before, _draws(seed)):
            action = graph.log[number].action
            if action is not None:
                action(self.give)

    def give(self, value: Any) -> Any:
        """Map an argument of a recorded operation to this execution."""
        if isinstance(value, Mail):
            return self._mail.setdefault(value.send, [])
        return self.tensor(value) if isinstance(value, Ref) else value

    def tensor(self, ref: Ref) -> torch.Tensor:
        memory = self._memory.get(ref.storage)
        if memory is None:
            storage = self._storages[ref.storage]
            fresh = torch.full((storage.nbytes,), 0xFF, dtype=torch.uint8)
            memory = self._memory[ref.storage] = fresh if storage.before is None else storage.before.clone()
        typed = torch.empty(0, dtype=ref.dtype)
        return typed.set_(memory.untyped_storage(), ref.offset, ref.shape, ref.strides)  # type: ignore[call-overload]


def _draws(seed: int) -> Iterator[float]:
    drawn = random.Random(seed)
    while True:
        yield drawn.random()


def without(graph: Graph, edges: Iterable[tuple[int, int]], turned: Iterable[tuple[int, int]] = ()) -> list[set[int]]:
    """Return the graph's edges without those of some waits, plus the reverse of the ``turned`` pairs."""
    before = [set(earlier) for earlier in graph.before]
    for first, second in edges:
        if first not in graph.fixed[second]:
            before[second].discard(first)
    for first, second in turned:
        before[first].add(second)
    return before
