"""`PrefixTree`: sequences that share prefixes, packed into one sequence without repeated tokens.

Example: a prompt of 2 tokens, an answer, and an answer that goes on in two ways, with ``lengths=[2, 2, 1, 1, 2]`` and
``parents=[-1, 0, 0, 2, 2]``::

    position         0  1  2  3  4  5  6  7
    node             0  0  1  1  2  3  4  4
    path position    0  1  2  3  2  3  3  4
    token before     -  0  1  2  1  4  4  6
    rollouts         3  3  1  1  2  1  1  1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..comm import GroupLike
from ..kernels.checks import check_tensor
from ..validators import Validator, integer_between, short_repr
from .schedule.intervals import MAX_INTERVAL_POSITIONS, MAX_INTERVALS, Intervals
from .schedule.layout import INTEGER_DTYPES, Layout, LayoutLike, check_alike, check_tokens, whole_numbers
from .session import Session
from .shards import unshard


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Sequences that share prefixes, as :func:`prefix_tree` packs them. The tensors are on the CPU."""

    lengths: tuple[int, ...]
    """Number of tokens of each node."""
    parents: tuple[int, ...]
    """Parent of each node; -1 for a root."""
    order: tuple[int, ...]
    """Nodes in the order of their tokens: depth first, children in the order of their numbers."""
    starts: tuple[int, ...]
    """Position of the first token of each node."""
    intervals: Intervals = field(repr=False)
    """Keys that each token sees: those of its path up to itself. For ``intervals`` of ``ring_attention``."""
    positions: Tensor = field(repr=False)
    """Position of each token on its path, int64 ``[tokens]``, for rotary embedding."""
    previous: Tensor = field(repr=False)
    """Position in the packed sequence of the token before each token on its path, int64 ``[tokens]``, or -1."""
    rollouts: Tensor = field(repr=False)
    """Number of leaves below each token, int64 ``[tokens]``: in how many sequences the token occurs."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the packed sequence."""
        return len(self.positions)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in the order of their tokens. Each ends one sequence."""
        inner = {*self.parents}
        return tuple(node for node in self.order if node not in inner)

    def pack(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Return the packed sequence from the tokens of each node, along ``dim``.

        Raises:
            ValueError: there is not one part per node, a part has another number of tokens than its node, or parts
                differ in another dimension, dtype or device.
        """
        parts = Validator("the tokens of all nodes, in the order of their numbers", list).check("parts", parts)
        if len(parts) != len(self.lengths):
            raise ValueError(f"parts has {len(parts)} tensors: it must have {len(self.lengths)}, one per node")
        for node, (part, length) in enumerate(zip(parts, self.lengths, strict=True)):
            check_tokens(part, f"parts[{node}]", dim, length, f"but the node has {length}")
        check_alike("parts", parts, dim)
        return torch.cat([parts[node] for node in self.order], dim)

    def path(self, leaf: int) -> Tensor:
        """Return the positions of the tokens of the sequence that ends with node ``leaf``, int64."""
        nodes = [integer_between(0, len(self.lengths) - 1).check("leaf", leaf)]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return torch.cat([torch.arange(self.starts[n], self.starts[n] + self.lengths[n]) for n in reversed(nodes)])

    def next_tokens(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens follow those of one rank, at a branch several.

        Args:
            positions: positions of this rank's tokens, int64 ``[S]``.

        Returns:
            ``(rows, targets)``, int64 ``[n]``: the token at position ``targets[i]`` follows that at
            ``positions[rows[i]]``. Every token but the first ones of roots is a target on exactly one rank. Targets
            ascend.

        Raises:
            ValueError: ``positions`` is no such tensor, is not a position of the tree, or has a position twice.
        """
        if not isinstance(positions, Tensor) or positions.dim() != 1 or positions.dtype not in INTEGER_DTYPES:
            raise ValueError(f"positions is {short_repr(positions)}: it must be an integer tensor of shape [S]")
        own = positions.cpu().long()
        wrong = own[(own < 0) | (own >= self.tokens)]
        if len(wrong):
            raise ValueError(f"positions has {int(wrong[0])}: it must be between 0 and {self.tokens - 1}")
        if (own.sort().values.diff() == 0).any():
            raise ValueError("positions has a position twice: the positions of a rank must differ")
        index = torch.full((self.tokens + 1,), -1)  # the last element serves tokens without a previous one
        index[own] = torch.arange(len(own))
        rows = index[self.previous]
        (targets,) = torch.where(rows >= 0)
        return rows[targets], targets

    def gather_logprobs(
        self, logprobs: Tensor, *, layout: LayoutLike, group: GroupLike = None, grad: str
    ) -> list[Tensor]:
        """Return the log-probabilities of the tokens of every sequence, on every rank; differentiable.

        Args:
            logprobs: log-probability of each target of :meth:`next_tokens` for this rank's tokens, ``[n]``.
            layout: positions of the packed sequence that each rank holds.
            group: as for :func:`ring_attention`.
            grad: as for :func:`unshard`: ``slice`` if every rank computes the same loss from the result, ``sum`` if
                every rank computes a different one.

        Returns:
            For each leaf, in the order of :attr:`leaves`, the log-probabilities of its sequence after the first token.

        Raises:
            ValueError: an argument does not fit, or the ranks disagree.
        """
        session = Session(group, device=getattr(logprobs, "device", None))
        with session.call():
            check_tensor("logprobs", logprobs)
            resolved = session.resolve_layout(layout, self.tokens)
            session.agree({"call": "gather_logprobs", "layout": resolved}, {"tree": self.intervals})
            targets = self._target_layout(resolved)
            count = targets.lengths[session.rank]
            check_tokens(logprobs, "logprobs", 0, count, f"but next_tokens gives rank {session.rank} {count} targets")
        whole = unshard(logprobs, layout=targets, group=group, dim=0, grad=grad)
        return [whole[paths.to(whole.device)] for paths in self._target_paths]

    @cached_property
    def _target_numbers(self) -> Tensor:
        """Number of each token among those with a previous token."""
        return (self.previous >= 0).cumsum(0) - 1

    @cached_property
    def _target_paths(self) -> list[Tensor]:
        return [self._target_numbers[self.path(leaf)[1:]] for leaf in self.leaves]

    @cached_property
    def _target_layouts(self) -> dict[Layout, Layout]:
        return {}

    def _target_layout(self, layout: Layout) -> Layout:
        """Return which rank computes the log-probability of each target, by the target's number. Cached."""
        if layout not in self._target_layouts:
            ranks = (self.next_tokens(layout.positions(rank))[1] for rank in range(layout.world))
            self._target_layouts[layout] = Layout.from_positions(self._target_numbers[targets] for targets in ranks)
        return self._target_layouts[layout]


def prefix_tree(lengths: Iterable[int] | Tensor, parents: Iterable[int] | Tensor) -> PrefixTree:
    """Pack sequences that share prefixes, such as the rollouts of a prompt or the drafts of a decoder.

    Each node is a run of tokens, and each path from a root to a leaf is a sequence. Tokens are packed depth first, so
    that the keys of a token are one interval for each run of nodes between branching points on its path, at most 64.

    Args:
        lengths: number of tokens of each node, at least 1.
        parents: parent of each node, -1 for a root; ``parents[i] < i``.

    Returns:
        The mask for ``intervals`` of ``ring_attention``, the path positions, and what a loss needs.

    Raises:
        ValueError: the lists have different lengths or no node, a node has no token, a parent is not an earlier node,
            or a path has more than 64 branches. The message names the node.
    """
    sizes, above = whole_numbers("lengths", lengths, "[nodes]"), whole_numbers("parents", parents, "[nodes]")
    if sum(sizes) > MAX_INTERVAL_POSITIONS:
        raise ValueError(f"lengths has {sum(sizes)} tokens: a tree may have at most 2^28")
    if not sizes or len(sizes) != len(above):
        raise ValueError(
            f"lengths has {len(sizes)} nodes and parents has {len(above)}: both must have the same, at least 1"
        )
    children: list[list[int]] = [[] for _ in range(len(sizes) + 1)]  # the last list has the roots
    for node, (size, parent) in enumerate(zip(sizes, above, strict=True)):
        if size < 1:
            raise ValueError(f"lengths[{node}] is {size}: it must be at least 1")
        if not -1 <= parent < node:
            earlier = f"an earlier node, 0 to {node - 1}, or " if node else ""
            raise ValueError(f"parents[{node}] is {parent}: it must be {earlier}-1 for a root")
        children[parent].append(node)
    order, waiting = [], children[-1][::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children[order[-1]])
    ends = dict(zip(order, accumulate(sizes[node] for node in order), strict=True))
    starts = [ends[node] - size for node, size in enumerate(sizes)]
    branches: list[tuple[tuple[int, int], ...]] = []  # for each node, the runs of tokens on its path
    offsets: list[int] = []  # path position of the first token
    for node, parent in enumerate(above):
        path = branches[parent] if parent >= 0 else ()
        # an only child goes on with its parent's run
        run = path[-1][0] if parent >= 0 and len(children[parent]) == 1 else starts[node]
        path = path[:-1] if run < starts[node] else path
        if len(path) == MAX_INTERVALS:
            raise ValueError(
                f"parents[{node}] is {parent}, after {len(path)} branches: a path may have {MAX_INTERVALS}"
            )
        branches.append((*path, (run, ends[node])))
        offsets.append(offsets[parent] + sizes[parent] if parent >= 0 else 0)
    rollouts = [int(not below) for below in children[:-1]]
    for node in reversed(range(len(sizes))):
        if above[node] >= 0:
            rollouts[above[node]] += rollouts[node]

    def spread(values: Iterable[int]) -> Tensor:
        """Return a number per token from a number per node."""
        by_node = [*values]
        return torch.tensor([by_node[node] for node in order]).repeat_interleave(
            torch.tensor([sizes[n] for n in order])
        )

    at = torch.arange(sum(sizes))
    pairs = []
    for number in range(max(map(len, branches))):
        runs = [path[number] if number < len(path) else (0, 0) for path in branches]
        pairs.append((spread(run[0] for run in runs), torch.minimum(spread(run[1] for run in runs), at + 1)))
    positions = at + spread(offset - start for offset, start in zip(offsets, starts, strict=True))
    previous = at - 1
    previous[starts] = torch.tensor([ends[parent] - 1 if parent >= 0 else -1 for parent in above])
    intervals = Intervals(pairs, positions)
    return PrefixTree(sizes, above, tuple(order), tuple(starts), intervals, positions, previous, spread(rollouts))
