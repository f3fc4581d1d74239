"""A recorded case: what it left behind, what is wrong with it, and its execution in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringattn.ring.buffers import Key

from .case import Case, expected, seen
from .checks import Checked
from .device import Recorder
from .graph import Graph
from .memory import Ref
from .replay import Replay

ARRIVES = ("nccl recv", "engine copy", "copy")


@dataclass
class Recording:
    """The graph of a case, and what its ranks asked of their transports."""

    case: Case
    recorder: Recorder
    checked: Checked
    results: list[dict[str, Ref]]  # per rank, what the caller read
    keys: list[list[tuple[int, Key]]]  # per rank, call and key of its posts, in order

    @property
    def graph(self) -> Graph:
        """Operations and edges."""
        return self.checked.graph

    def problems(self) -> list[str]:
        """Everything that is wrong, in words."""
        found = self.checked.problems() + self.out_of_order() + self.miscounted()
        return found if self.checked.cyclic else found + self.held_up()

    def out_of_order(self) -> list[str]:
        """Where a rank does not post in the one order of keys, or two ends of a transfer have different keys."""
        found = []
        for rank, keys in enumerate(self.keys):
            places = [(call, key.phase == "backward", *_place(key)) for call, key in keys]
            for (_, first), (_, second), a, b in zip(keys, keys[1:], places, places[1:], strict=False):
                if a >= b:
                    found.append(f"rank {rank} posts '{second}' after '{first}': that is not the order of keys")
        for op in self.graph.log:
            if op.kind != "nccl recv" or op.source is None or op.label not in self._by_label:
                continue
            if self.key(op.label) != self.key(op.source.label):
                found.append(f"{op.source} is received by {op}: their keys differ")
        return found

    def held_up(self) -> list[str]:
        """Where a forward waits for K/V that it does not yet compute with: nothing would hide their transfer."""
        found = []
        arrivals = [op for op in self.graph.log if op.kind in ARRIVES and op.label in self._by_label]
        for kernel in self.graph.log:
            if kernel.detail != "forward_kernel":
                continue
            call, _, rest = kernel.label.partition(",")
            hop = int(rest.split()[2])
            for op in arrivals:
                later = op.label.startswith(f"{call}, forward") and self._by_label[op.label].brings > hop
                if later and op.rank == kernel.rank and self.graph.happens_before(op.number, kernel.number):
                    found.append(f"{kernel} waits for {op}, which it does not need")
        return found

    def miscounted(self) -> list[str]:
        """Where a rank does not launch each kernel once per shard and part of the mask that it sees, its own always."""
        launched = Counter(
            (op.rank, op.label.partition(",")[0], op.detail) for op in self.graph.log if op.kind == "kernel"
        )
        found, ranks, chunks = [], range(self.case.world), self.case.ring.get("chunks", 1)
        for number, call in enumerate(self.case.calls):
            for rank in (rank for rank in ranks if call.layout.lengths[rank]):
                wanted = chunks * sum(max(seen(call, rank, other), other == rank) for other in ranks)
                for kernel in self.case.kernels(call):
                    count = launched[rank, f"call {number}", kernel]
                    if count != wanted:
                        found.append(f"rank {rank} launches {kernel} {count} times in call {number}, not {wanted}")
        return found

    def key(self, label: str) -> tuple[int, ...]:
        """The place of a post in the one order."""
        return _place(self._by_label[label])

    @cached_property
    def _by_label(self) -> dict[str, Key]:
        return {f"call {call}, {key}": key for keys in self.keys for call, key in keys}

    def replayed(self, seed: int, before: list[set[int]] | None = None) -> list[dict[str, Tensor]]:
        """What every rank reads where the operations run in an order drawn by `seed`."""
        replay = Replay(self.recorder)
        replay.run(self.graph, seed, before)
        return [{name: replay.tensor(ref) for name, ref in results.items()} for results in self.results]

    def wrong(self, seed: int, before: list[set[int]] | None = None) -> list[str]:
        """The results that such an execution gets wrong."""
        found = []
        results = self.replayed(seed, before)
        for rank, (got, want) in enumerate(zip(results, self.wanted, strict=True)):
            assert got.keys() == want.keys()
            found += [f"{name} of rank {rank} is wrong" for name in want if not _same(got[name], want[name])]
        return found

    @cached_property
    def wanted(self) -> list[dict[str, Tensor]]:
        """The results as they should be."""
        return expected(self.case)


def _same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got, want)


def _place(key: Key) -> tuple[int, ...]:
    return key.hop, key.kind, key.brings, key.chunk
