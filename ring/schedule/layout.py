"""Who holds which tokens: every rank's global positions, as spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Any, Literal

import torch

from ...comm.checked import whole
from ...kernels.checks import check_tensor
from ..checked import checked
from . import balance
from .documents import Documents
from .spans import Span, ascending, at_least, refuse_overlap

__all__ = ["Layout", "LayoutLike", "Span"]

REPR_SPANS = 32  # a layout of more spans than this is shown by its size and a digest


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Which global positions each rank holds, ascending within a rank; immutable and hashable.

    Args:
        spans_per_rank: for every rank its spans ``(start, length[, step])``. Empty spans are dropped and spans that
            continue each other are joined, so that layouts of the same spans are equal however they were made.

    Raises:
        ValueError: no rank, a span that is not whole numbers in range, positions of a rank that do not ascend, or a
            position on two ranks.
    """

    spans_per_rank: tuple[tuple[Span, ...], ...]
    table: torch.Tensor = field(compare=False)
    """The spans as int64 ``[spans, 4]``, for a graph of torch.compile: rank, start, length, step."""

    def __init__(self, spans_per_rank: Iterable[Iterable[tuple[int, ...]]]) -> None:
        (given,) = checked(spans_per_rank=spans_per_rank)
        made = tuple(ascending(rank, spans) for rank, spans in enumerate(given))
        if not made:
            raise ValueError("spans_per_rank is empty: it must have a list of spans for every rank")
        refuse_overlap(made)
        object.__setattr__(self, "spans_per_rank", made)
        object.__setattr__(self, "table", _table(made))

    @classmethod
    def contiguous(cls, seqlen: int, world: int) -> Layout:
        """One run of tokens per rank, in rank order; the first ranks hold one more where ``world`` does not divide."""
        return cls.uneven(_even(seqlen, world))

    @classmethod
    def zigzag(cls, seqlen: int, world: int, cu_seqlens: Iterable[int] | torch.Tensor | None = None) -> Layout:
        """Two runs per rank, one from each end of the sequence or of every document, so that causal work is even.

        With ``2 * world`` equal chunks, rank r holds chunks r and ``2 * world - 1 - r``: where that many divide every
        document, TransformerEngine's rule for packed sequences (``thd_get_partitioned_indices``). Elsewhere nothing
        is padded: of what a document leaves when each rank has equally many, the ranks get one token each, going on in
        rank order where the document before stopped, so that the tokens of two ranks differ by one at most. And a
        rank's tokens lie at the head and at the tail of documents by turns, so that these two differ by one at most.

        Args:
            seqlen: tokens in all.
            world: ranks.
            cu_seqlens: boundaries ``[0, ..., seqlen]`` of packed documents, a list or a CPU tensor; None: one document.

        Raises:
            ValueError: a negative length, no rank, or boundaries that descend, or that do not start at 0 or end at
                ``seqlen``.
        """
        seqlen, world = checked(seqlen=seqlen, world=world)
        documents = Documents([0, seqlen] if cu_seqlens is None else cu_seqlens)
        if documents.seqlen != seqlen:
            raise ValueError(f"cu_seqlens ends at {documents.seqlen}: it must end at {seqlen}, the number of tokens")
        return cls(balance.zigzag(documents.boundaries, world))

    @classmethod
    def striped(cls, seqlen: int, world: int) -> Layout:
        """Token p on rank ``p % world``."""
        return cls([(rank, length, world)] for rank, length in enumerate(_even(seqlen, world)))

    @classmethod
    def uneven(cls, lengths: Iterable[int]) -> Layout:
        """One run of ``lengths[rank]`` tokens per rank, in rank order."""
        (given,) = checked(lengths=lengths)
        made = [at_least(0, f"lengths[{rank}]", length) for rank, length in enumerate(given)]
        if not made:
            raise ValueError("lengths is empty: it must have the number of tokens of every rank")
        return cls([(start, length)] for start, length in zip([0, *accumulate(made)], made, strict=False))

    @classmethod
    def balanced(cls, seqlen: int, speeds: Iterable[float], *, causal: bool) -> Layout:
        """Unequal shards for unequal GPUs, so that all finish together: visible pairs in proportion to speed.

        With c_r the speed of the ranks 0 to r over that of all, S tokens and round(x) = floor(x + 1/2):

        - full: one run per rank; the ranks 0 to r hold the first ``round(S c_r)`` tokens. A rank's tokens are within
          one of ``S speed / sum(speeds)``, its visible pairs within S.
        - causal: two runs per rank of one length, one from each end, as in a zigzag. A token at p and its mirror image
          at S - 1 - p together see S + 1 keys, wherever p is; the ranks 0 to r hold the outer ``round(S c_r / 2)`` of
          these couples (the token in the middle of an odd S is half of one). A rank's tokens are within two of
          ``S speed / sum(speeds)``, and its visible pairs within one couple, S + 1, of ``S (S + 1) / 2 * speed /
          sum(speeds)``.

        The backward has the same pairs on the same ranks: dK/dV are computed where the queries are.

        Args:
            seqlen: S, tokens in all.
            speeds: of every rank, in any unit, such as its tokens per second on an equal shard; 0: no tokens.
            causal: whether the mask is causal.

        Raises:
            ValueError: a negative length, or speeds that are not finite numbers of at least 0 with one above it.
        """
        seqlen, causal = checked(seqlen=seqlen, causal=causal)
        exact = balance.speeds_of(speeds)
        return cls(balance.by_causal_pairs(seqlen, exact)) if causal else cls.uneven(balance.by_tokens(seqlen, exact))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.spans_per_rank)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(span.length for span in spans) for spans in self.spans_per_rank)

    @cached_property
    def seqlen(self) -> int:
        """Tokens of all ranks together."""
        return sum(self.lengths)

    @cached_property
    def reach(self) -> int:
        """One past the last position of all ranks."""
        return max((spans[-1].stop for spans in self.spans_per_rank if spans), default=0)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, ascending; empty where it holds no token."""
        return self.spans_per_rank[self._checked(rank)]

    def positions(self, rank: int) -> torch.Tensor:
        """The positions of one rank's tokens, ascending, int64 ``[S]`` on the CPU; cached: do not write to it."""
        cache, rank = self._positions, self._checked(rank)
        if rank not in cache:
            cache[rank] = _positions(self.spans_per_rank[rank])
        return cache[rank]

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """The tokens of ``rank`` out of ``x``, which holds the whole sequence along ``dim``; a copy; differentiable.

        Raises:
            ValueError: the layout leaves out positions, ``x`` has another length, or there is no such rank or dim.
        """
        self._require_whole()
        check_tokens(x, "x", dim, self.seqlen, f"the layout is made for {self.seqlen}")
        return torch.cat([_slice(x, span, dim) for span in self.spans(rank) or (Span(0, 0),)], dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole sequence along ``dim`` from the shards of all ranks, in rank order; a copy; differentiable.

        Raises:
            ValueError: the layout leaves out positions, or the number of shards, their lengths or ``dim`` do not fit.
        """
        self._require_whole()
        (shards,) = checked(shards=shards)
        if len(shards) != self.world:
            raise ValueError(f"shards has {len(shards)} tensors, the layout is made for {self.world} ranks")
        for rank, (x, length) in enumerate(zip(shards, self.lengths, strict=True)):
            check_tokens(x, f"shards[{rank}]", dim, length, f"rank {rank} has {length}")
            like, other = ([*one.narrow(dim, 0, 0).shape, one.dtype, one.device] for one in (shards[0], x))
            if other != like:
                raise ValueError(
                    f"shards[{rank}] is {other} but for its tokens, shards[0] is {like}: they must be alike"
                )
        if all(span.step == 1 for spans in self.spans_per_rank for span in spans):
            pieces = [
                piece for x, spans in zip(shards, self.spans_per_rank, strict=True) for piece in _cut(x, spans, dim)
            ]
            return torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])] or [*shards], dim)
        held = torch.cat([self.positions(rank) for rank in range(self.world)])
        return torch.cat([*shards], dim).index_select(dim, held.argsort().to(shards[0].device))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._repr

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.spans_per_rank,)  # without the caches: a layout travels between ranks

    @cached_property
    def _positions(self) -> dict[int, torch.Tensor]:
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash(self.spans_per_rank)

    @cached_property
    def _repr(self) -> str:
        return _describe(self)

    def _checked(self, rank: int) -> int:
        made: int = whole(0, self.world - 1).of("rank", rank)
        return made

    def _require_whole(self) -> None:
        if self.reach != self.seqlen:
            raise ValueError(
                f"the layout holds {self.seqlen} of the positions 0 to {self.reach - 1}: "
                "shard and unshard need a layout that holds every position once"
            )


LayoutLike = Layout | Literal["contiguous", "zigzag", "striped"] | None
"""What ``layout=`` takes; a name means equal shards, and None one rank alone."""


def _table(spans_per_rank: tuple[tuple[Span, ...], ...]) -> torch.Tensor:
    """An empty span for a rank without any, so that it counts."""
    rows = [(rank, *span) for rank, spans in enumerate(spans_per_rank) for span in spans or (Span(0, 0),)]
    return torch.tensor(rows)


def _even(seqlen: int, world: int) -> list[int]:
    """``seqlen`` cut into ``world`` lengths that differ by at most one, longer ones first."""
    seqlen, world = checked(seqlen=seqlen, world=world)
    base, extra = divmod(seqlen, world)
    return [base + (rank < extra) for rank in range(world)]


def _positions(spans: Sequence[Span]) -> torch.Tensor:
    runs = [torch.arange(span.start, span.stop, span.step) for span in spans]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def tokens_of(x: torch.Tensor, name: str, dim: int) -> int:
    """The length of a tensor along a dimension that it has: ValueError otherwise."""
    check_tensor(name, x, may_be_meta=True)
    (dim,) = checked(dim=dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}: {name} has {x.ndim} dimensions")
    return x.shape[dim]


def check_tokens(x: torch.Tensor, name: str, dim: int, tokens: int, told: str) -> None:
    """Refuse a tensor that does not have ``tokens`` along ``dim``, and say which dimension has: ValueError."""
    found = tokens_of(x, name, dim)
    if found != tokens:
        fits = f"; dim {x.shape.index(tokens)} has {tokens}" if tokens in x.shape else ""
        raise ValueError(f"{name} has {found} tokens along dim {dim}, {told}{fits}")


def _slice(x: torch.Tensor, span: Span, dim: int) -> torch.Tensor:
    where = [slice(None)] * x.ndim
    where[dim] = slice(span.start, span.stop, span.step)
    return x[tuple(where)]


def _cut(x: torch.Tensor, spans: Sequence[Span], dim: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The pieces of a shard, each with the position where it starts."""
    offset = 0
    for span in spans:
        yield span.start, x.narrow(dim, offset, span.length)
        offset += span.length


def _describe(layout: Layout) -> str:
    if sum(map(len, layout.spans_per_rank)) <= REPR_SPANS:
        ranks = ", ".join(f"[{', '.join(str(tuple(span)) for span in spans)}]" for spans in layout.spans_per_rank)
        return f"Layout([{ranks}])"
    digest = sha256(repr(layout.spans_per_rank).encode()).hexdigest()[:16]
    return f"<Layout of {layout.seqlen} tokens over {layout.world} ranks, spans {digest}>"
