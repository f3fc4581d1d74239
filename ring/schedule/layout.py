"""`Layout`: the global positions that each rank holds, as spans. `Documents`: boundaries of packed documents.

Example: 16 tokens on 4 ranks::

    position:   0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    contiguous: 0  0  0  0  1  1  1  1  2  2  2  2  3  3  3  3
    zigzag:     0  0  1  1  2  2  3  3  3  3  2  2  1  1  0  0
    striped:    0  1  2  3  0  1  2  3  0  1  2  3  0  1  2  3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate, pairwise
from math import floor, inf, lcm
from numbers import Integral, Rational
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from ...kernels.checks import check_not_dtensor, check_tensor
from ...kernels.shared_cache import SharedCache
from ...validators import FLAG, RANKS, Validator, integer_between, list_like, real_number, short_repr
from .packed_layout import MAX_RUN_PAIRS, MAX_WORK, PackedMask, PackedProblem, packed_spans

if TYPE_CHECKING:
    from ...comm.topology.topology import Topology
    from .mask import Mask

MAX_POSITIONS = (1 << 62) - 1  # a position plus one side of a window must fit in 64 bits
MAX_DIMS = 64  # dimensions of a tensor
POSITIONS, INTEGERS = integer_between(0, MAX_POSITIONS), integer_between(-MAX_POSITIONS, MAX_POSITIONS)
DIM = integer_between(-MAX_DIMS, MAX_DIMS - 1)


class Span(NamedTuple):
    """Evenly spaced positions: ``start, start + step, start + 2 step, …``, in all ``length`` of them."""

    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        """End of the span: its last position plus one."""
        return self.start + (self.length - 1) * self.step + 1 if self.length else self.start


def _join_spans(rank: int, spans: Iterable[tuple[int, ...]]) -> tuple[Span, ...]:
    """Return the checked spans of one rank, without empty spans, and with adjacent spans joined."""
    joined: list[Span] = []
    for index, given in enumerate(list_like("a list of spans").check(f"spans_per_rank[{rank}]", spans)):
        name = f"spans_per_rank[{rank}][{index}]"
        span = _span(name, given)
        if not span.length:
            continue
        before = joined[-1] if joined else Span(0, 0)
        if span.start < before.stop:
            raise ValueError(
                f"{name} starts at {span.start}, but the span before it ends at {before.stop - 1}. "
                "The positions of a rank must ascend."
            )
        if joined and span.step == before.step and span.start == before.start + before.length * before.step:
            span = Span(before.start, before.length + span.length, before.step)
            joined.pop()
        joined.append(span)
    return tuple(joined)


def _span(name: str, given: tuple[int, ...]) -> Span:
    """Return ``(start, length[, step])`` as a span, or raise ValueError with ``name``."""
    try:
        span = Span(*map(POSITIONS.convert, given))
    except (TypeError, ValueError):
        span = Span(0, 0, 0)
    if span.step < 1 or span.stop > MAX_POSITIONS:
        raise ValueError(
            f"{name} is {short_repr(given)}: it must be a Span(start, length, step=1) of integers. Start and "
            "length must be at least 0, step at least 1, and all positions below 2^62."
        )
    return span if span.length > 1 else span._replace(step=1)


class _Run(NamedTuple):
    """Positions ``p`` of one rank with ``p % period == residue`` and ``first <= p // period <= last``."""

    residue: int
    first: int
    last: int
    rank: int


def _refuse_overlap(spans_per_rank: Iterable[Iterable[Span]]) -> None:
    """Raise ValueError if two spans share a position.

    Modulo the least common multiple of all steps, every span is a few runs of consecutive numbers. Therefore the cost
    grows with the number of spans, not with the number of positions.
    """
    spans = [(rank, span) for rank, spans in enumerate(spans_per_rank) for span in spans]
    period = lcm(*(span.step for _, span in spans))
    ascending = sorted(span for _, span in spans)
    if period == 1 and all(before[0] + before[1] <= after[0] for before, after in pairwise(ascending)):
        return  # fast path for many spans, such as documents cut into chunks
    runs = sorted(run for rank, span in spans for run in _runs(span, period, rank))
    for before, after in pairwise(runs):
        if before.residue == after.residue and after.first <= before.last:
            ranks = sorted((before.rank, after.rank))
            raise ValueError(
                f"spans_per_rank holds position {after.first * period + after.residue} on rank {ranks[0]} "
                f"and on rank {ranks[1]}. A position may be on one rank only."
            )


def _runs(span: Span, period: int, rank: int) -> Iterator[_Run]:
    """Yield the runs of a span; its step divides ``period``."""
    stride = period // span.step
    for offset in range(min(stride, span.length)):
        first, residue = divmod(span.start + offset * span.step, period)
        yield _Run(residue, first, first + (span.length - 1 - offset) // stride, rank)


def check_at_least(least: int, name: str, value: int) -> int:
    """Return ``value`` as an integer of at least ``least``, or raise ValueError."""
    number: int = integer_between(least, MAX_POSITIONS).check(name, value)
    return number


REPR_BOUNDARIES = 16  # repr() shows a digest of longer lists


class Documents:
    """Boundaries of packed documents; immutable and hashable.

    Args:
        cu_seqlens: boundaries as in FlashAttention's ``cu_seqlens``: document i holds the positions
            ``[cu_seqlens[i], cu_seqlens[i + 1])``, and the first boundary is 0. A list, or a one-dimensional integer
            tensor on the CPU, because schedules are built on the host. Empty documents are allowed.
        name: argument name in error messages.

    Raises:
        ValueError: the boundaries are not whole numbers, do not start at 0, descend, or are on a GPU.
    """

    __slots__ = ("__dict__", "boundaries")

    def __init__(self, cu_seqlens: Iterable[int] | torch.Tensor, name: str = "cu_seqlens") -> None:
        boundaries = whole_numbers(name, cu_seqlens, "[documents + 1]")
        if len(boundaries) < 2:
            raise ValueError(f"{name} is {list(boundaries)}: it must have at least one document, such as [0, length]")
        if boundaries[0] != 0:
            raise ValueError(f"{name} starts at {boundaries[0]}: it must start at 0")
        for index, (start, end) in enumerate(pairwise(boundaries)):
            if end < start:
                raise ValueError(f"{name}[{index + 1}] is {end} after {start}: boundaries must not decrease")
        self.boundaries = boundaries

    @property
    def seqlen(self) -> int:
        """Number of tokens of all documents together."""
        return self.boundaries[-1]

    def document_bounds(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return start and end of the document of each position. Positions past the last document get its end twice."""
        after = torch.searchsorted(self._tensor, positions, right=True)
        last = len(self.boundaries) - 1
        return self._tensor[after - 1], self._tensor[after.clamp(max=last)]

    @cached_property
    def _tensor(self) -> torch.Tensor:
        return torch.tensor(self.boundaries)

    @cached_property
    def _hash(self) -> int:
        return hash(self.boundaries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self.boundaries == other.boundaries

    def __reduce__(self) -> tuple[Any, ...]:
        return Documents, (self.boundaries,)

    def __repr__(self) -> str:
        if len(self.boundaries) <= REPR_BOUNDARIES:
            return f"Documents({list(self.boundaries)})"
        digest = sha256(repr(self.boundaries).encode()).hexdigest()[:16]
        return f"<{len(self.boundaries) - 1} documents of {self.seqlen} tokens, boundaries {digest}>"


def resolve_documents(cu_seqlens: Iterable[int] | torch.Tensor | None, seqlen: int) -> Documents:
    """Return the documents of ``seqlen`` tokens; None means a single one.

    Raises:
        ValueError: the boundaries are not valid or do not end at ``seqlen``.
    """
    documents = Documents([0, seqlen] if cu_seqlens is None else cu_seqlens)
    if documents.seqlen != seqlen:
        raise ValueError(f"cu_seqlens ends at {documents.seqlen}: it must end at {seqlen}, the number of tokens")
    return documents


def whole_numbers(name: str, given: Iterable[int] | torch.Tensor, shape: str) -> tuple[int, ...]:
    """Return the argument ``name``, a list or an integer CPU tensor ``[n]``, as a tuple of integers.

    ``shape`` is the expected shape in the message.

    Raises:
        ValueError: the argument is anything else.
    """
    check_not_dtensor(name, given)
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise ValueError(
                f"{name} is on {given.device}: it must be a list or a CPU tensor, because schedules are built on the "
                "host"
            )
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(
                f"{name} is {given.dtype} of shape {list(given.shape)}: it must be an integer tensor of shape {shape}"
            )
        return tuple(given.tolist())
    try:
        values = [*given]
        numbers = all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)
    except TypeError:
        numbers = False
    if not numbers:
        raise ValueError(f"{name} is {short_repr(given)}: it must be a list of integers or a CPU tensor")
    return tuple(INTEGERS.check(f"{name}[{index}]", value) for index, value in enumerate(values))


_SPEED = real_number("a finite number, at least 0", lambda speed: 0 <= speed < inf)


def _zigzag(boundaries: Sequence[int], world: int) -> list[list[Span]]:
    """Return the spans of every rank: two runs per document, one from each end. See :meth:`Layout.zigzag`."""
    spans: list[list[Span]] = [[] for _ in range(world)]
    counts, first = [0] * world, 0
    for start, end in pairwise(boundaries):
        each, extra = divmod(end - start, world)
        lengths = [each + ((rank - first) % world < extra) for rank in range(world)]
        heads = [-(-(count + length) // 2) - -(-count // 2) for count, length in zip(counts, lengths, strict=True)]
        for rank, runs in enumerate(_from_both_ends(start, end, heads, lengths)):
            spans[rank] += runs
        counts = [count + length for count, length in zip(counts, lengths, strict=True)]
        first = (first + extra) % world
    return spans


def _by_causal_pairs(seqlen: int, speeds: Sequence[Fraction]) -> list[list[Span]]:
    """Return one run from each end of the sequence for every rank. See :meth:`Layout.balanced`."""
    # The middle token of an odd length is its own mirror image, so it goes to the innermost run at the head.
    heads = [_nearest(Fraction(seqlen, 2) * share) for share in _shares(speeds)]
    tails = [min(head, seqlen // 2) for head in heads]
    head_runs, tail_runs = _differences(heads), _differences(tails)
    lengths = [head + tail for head, tail in zip(head_runs, tail_runs, strict=True)]
    return [[*runs] for runs in _from_both_ends(0, seqlen, head_runs, lengths)]


def _exact_speeds(given: Iterable[float]) -> list[Fraction]:
    """Return relative speeds as exact fractions, so that every machine computes the same layout.

    Raises:
        ValueError: the list is empty, a speed is not a finite number of at least 0, or all speeds are 0.
    """
    speeds = list_like("a list with the relative speed of every rank").check("speeds", given)
    numbers = [(speed, _SPEED.check(f"speeds[{rank}]", speed)) for rank, speed in enumerate(speeds)]
    exact = [Fraction(speed if isinstance(speed, Rational) else as_float) for speed, as_float in numbers]
    if not exact:
        raise ValueError("speeds is empty: it must have the relative speed of every rank")
    if not any(exact):
        raise ValueError(f"speeds is {[*map(float, exact)]}: at least one speed must be above 0")
    return exact


def _packed_masks(given: Iterable[tuple[Mask, int]] | None) -> tuple[PackedMask, ...]:
    """Return the checked masks of :meth:`Layout.packed`."""
    if given is None:
        return (PackedMask(-1, 0, 1),)
    masks = []
    for index, pair in enumerate(list_like("a list of pairs of a Mask and a number of layers").check("masks", given)):
        try:
            mask, layers = pair
            plain = mask == type(mask)(mask.causal, mask.window)
        except (AttributeError, TypeError, ValueError):
            plain = False
        if not plain:
            raise ValueError(
                f"masks[{index}] is {short_repr(pair)}: it must be (Mask, layers), with a causal or full mask, "
                "with or without a window"
            )
        layers = check_at_least(1, f"masks[{index}][1]", layers)
        masks.append(PackedMask(mask.window[0], 0 if mask.causal else mask.window[1], layers))
    if not masks:
        raise ValueError("masks is empty: it must have at least one pair of a Mask and a number of layers")
    return tuple(masks)


def _from_both_ends(start: int, end: int, heads: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Span, Span]]:
    """Yield two runs per rank: ``heads[rank]`` tokens from the start, and the rest of its tokens from the end."""
    for head, length in zip(heads, lengths, strict=True):
        tail = length - head
        yield Span(start, head), Span(end - tail, tail)
        start, end = start + head, end - tail


def _shares(speeds: Sequence[Fraction]) -> list[Fraction]:
    """Return the share of the total speed that ranks 0 to r have together, for every r."""
    whole = sum(speeds)
    return [part / whole for part in accumulate(speeds)]


def _nearest(x: Fraction) -> int:
    """Round to the nearest integer, halves up."""
    return floor(x + Fraction(1, 2))


def _differences(ends: Iterable[int]) -> list[int]:
    """Return the lengths of consecutive runs from 0 with these ends."""
    return [after - before for before, after in pairwise([0, *ends])]


__all__ = ["Layout", "LayoutLike", "Span"]

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MAX_SPEED_RATIO = 1 << 10  # between the fastest and the slowest rank of a packed layout
REPR_SPANS = 32  # repr() shows a digest of larger layouts


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Global positions that each rank holds, ascending within a rank; immutable and hashable.

    Args:
        spans_per_rank: for every rank its spans ``(start, length[, step])``. Empty spans are dropped and adjacent spans
            are joined, so that layouts with equal positions compare equal.

    Raises:
        ValueError: there is no rank, a span is not whole numbers in range, the positions of a rank do not ascend, or
            two ranks hold the same position.
    """

    spans_per_rank: tuple[tuple[Span, ...], ...]
    table: torch.Tensor = field(compare=False)
    """The spans as int64 ``[spans, 4]`` (rank, start, length, step), an input of torch.compile graphs."""

    def __init__(self, spans_per_rank: Iterable[Iterable[tuple[int, ...]]]) -> None:
        given = list_like("a list with the spans of every rank").check("spans_per_rank", spans_per_rank)
        checked = tuple(_join_spans(rank, spans) for rank, spans in enumerate(given))
        if not checked:
            raise ValueError("spans_per_rank is empty: it must have one list of spans per rank")
        _refuse_overlap(checked)
        object.__setattr__(self, "spans_per_rank", checked)
        object.__setattr__(self, "table", _table(checked))

    @classmethod
    def from_positions(cls, positions_per_rank: Iterable[torch.Tensor]) -> Layout:
        """Return the layout in which rank r holds ``positions_per_rank[r]``.

        Args:
            positions_per_rank: for every rank its ascending global positions, an integer CPU tensor ``[S]``.

        Raises:
            ValueError: a tensor has another dtype, shape or device, the positions of a rank do not ascend, or two ranks
                hold the same position.
        """
        spans = []
        for rank, positions in enumerate(positions_per_rank):
            name = f"positions_per_rank[{rank}]"
            if not isinstance(positions, torch.Tensor):
                raise ValueError(f"{name} is {short_repr(positions)}: it must be an integer CPU tensor of shape [S]")
            if positions.device.type != "cpu" or positions.dim() != 1 or positions.dtype not in INTEGER_DTYPES:
                got = f"{positions.dtype} of shape {list(positions.shape)} on {positions.device}"
                raise ValueError(f"{name} is {got}: it must be an integer CPU tensor of shape [S]")
            positions = positions.long()  # a difference of uint8 would wrap around
            if (positions.diff() < 1).any():
                raise ValueError(f"{name} is not in ascending order. Sort the rank's positions.")
            spans.append(_spans(positions))
        return cls(spans)

    @classmethod
    def contiguous(cls, seqlen: int, world: int) -> Layout:
        """Return one run of tokens per rank, in order; the first ranks get one more if ``world`` does not divide."""
        return cls.uneven(_even(seqlen, world))

    @classmethod
    def zigzag(cls, seqlen: int, world: int, cu_seqlens: Iterable[int] | torch.Tensor | None = None) -> Layout:
        """Return two runs per rank, one from each end of the sequence or document, so that causal work is even.

        With ``2 * world`` equal chunks, rank r holds chunks r and ``2 * world - 1 - r``. If ``2 * world`` divides every
        document, the layout equals that of TransformerEngine for packed sequences (``thd_get_partitioned_indices``).

        Otherwise nothing is padded. Each rank gets ``length // world`` tokens of a document. The remaining tokens go to
        one rank each, in rank order, starting after the rank that got the last extra token of the document before. So
        the token counts of two ranks differ by at most one. A rank's counts at the heads and at the tails of documents
        also differ by at most one.

        Args:
            seqlen: number of tokens of all ranks.
            world: number of ranks.
            cu_seqlens: boundaries ``[0, ..., seqlen]`` of packed documents, a list or a CPU tensor; None: one document.

        Raises:
            ValueError: ``seqlen`` is negative, ``world`` is below 1, or the boundaries descend, do not start at 0 or do
                not end at ``seqlen``.
        """
        seqlen, world = POSITIONS.check("seqlen", seqlen), RANKS.check("world", world)
        return cls(_zigzag(resolve_documents(cu_seqlens, seqlen).boundaries, world))

    @classmethod
    def striped(cls, seqlen: int, world: int) -> Layout:
        """Return the layout with token p on rank ``p % world``."""
        return cls([(rank, length, world)] for rank, length in enumerate(_even(seqlen, world)))

    @classmethod
    def uneven(cls, lengths: Iterable[int]) -> Layout:
        """Return one run of ``lengths[rank]`` tokens per rank, in rank order."""
        given = list_like("a list with the number of tokens of every rank").check("lengths", lengths)
        counts = [check_at_least(0, f"lengths[{rank}]", length) for rank, length in enumerate(given)]
        if not counts:
            raise ValueError("lengths is empty: it must have the number of tokens of every rank")
        return cls([(start, length)] for start, length in zip([0, *accumulate(counts)], counts, strict=False))

    @classmethod
    def balanced(cls, seqlen: int, speeds: Iterable[float], *, causal: bool) -> Layout:
        """Return unequal shards for unequal GPUs, so that the visible pairs of each rank are proportional to its speed.

        Let c_r be the speed of ranks 0 to r divided by the speed of all ranks, S the number of tokens, and round(x) =
        floor(x + 1/2).

        - full: one run per rank. Ranks 0 to r hold the first ``round(S c_r)`` tokens. A rank's tokens are within one of
          ``S speed / sum(speeds)``, and its visible pairs within S.
        - causal: two runs per rank, one from each end, as in a zigzag. Tokens p and S - 1 - p together see S + 1 keys,
          for every p. Ranks 0 to r hold the outer ``round(S c_r / 2)`` such couples. The middle token of an odd S is
          half a couple. A rank's tokens are within two of ``S speed / sum(speeds)``. Its visible pairs are within S + 1
          of ``S (S + 1) / 2 * speed / sum(speeds)``.

        The backward has the same pairs on the same ranks, because dK/dV are computed on the rank of the queries.

        Args:
            seqlen: S, number of tokens of all ranks.
            speeds: relative speed of every rank in any unit, such as tokens per second on an equal shard; 0: no tokens.
            causal: True for a causal mask.

        Raises:
            ValueError: ``seqlen`` is negative, or ``speeds`` are not finite numbers of at least 0 with one above 0.
        """
        seqlen, causal = POSITIONS.check("seqlen", seqlen), FLAG.check("causal", causal)
        exact = _exact_speeds(speeds)
        if causal:
            return cls(_by_causal_pairs(seqlen, exact))
        return cls.uneven(_differences(_nearest(seqlen * share) for share in _shares(exact)))

    @classmethod
    def packed(
        cls,
        cu_seqlens: Iterable[int] | torch.Tensor,
        world: int,
        *,
        masks: Iterable[tuple[Mask, int]] | None = None,
        topology: Topology | None = None,
        speeds: Iterable[float] | None = None,
        max_tokens: int | None = None,
        heads_per_kv_head: int = 4,
    ) -> Layout:
        """Return a layout of packed documents that balances work and tokens and moves few K/V.

        A document that fits a rank stays whole on it, so that its K/V do not move. Longer documents are cut among ranks
        that are neighbours in the ring. The choice minimises an estimate of the time of a step: the slowest rank's
        visible pairs and hops, and the busiest link inside and between nodes. By this estimate no named layout
        (contiguous, zigzag, balanced, zigzag per document, striped) is better. With windows, the last two are compared
        only for up to 2^20 pairs of spans. If shards are short, few hops count more than even work, and a rank of less
        than mean speed may stay empty. The estimate uses integers, so that all ranks compute the same layout.

        Args:
            cu_seqlens: boundaries of the documents, a list or a CPU tensor.
            world: number of ranks.
            masks: masks of the layers, which share the layout, as pairs of a :class:`Mask` and its number of layers.
                They may be causal and have a window; the documents are added. None: causal.
            topology: order and nodes of the ranks, as for the ring. None: one node, in rank order.
            speeds: relative speed of every rank, such as :meth:`.Ring.speeds`; 0: no tokens. None: equal.
            max_tokens: most tokens of a rank. None: 1.1 times the mean, or its share by ``speeds``, if possible.
            heads_per_kv_head: number of query heads divided by that of key heads; 1 for multi-head attention. With
                more, transfers count less beside the work.

        Raises:
            ValueError: an argument is invalid, ``speeds`` or ``topology`` have another number of ranks, or the ranks
                cannot hold the tokens within ``max_tokens``.
        """
        documents, world = Documents(cu_seqlens), RANKS.check("world", world)
        exact = _exact_speeds([1] * world if speeds is None else speeds)
        if len(exact) != world:
            raise ValueError(f"speeds has {len(exact)} entries: it must have one per rank, {world}")
        if topology is not None and getattr(topology, "world", None) != world:
            got = f"has {topology.world} ranks" if hasattr(topology, "world") else f"is {short_repr(topology)}"
            raise ValueError(f"topology {got}: it must be a Topology of {world} ranks, like world")
        slowest = max(exact) / MAX_SPEED_RATIO
        for rank, speed in enumerate(exact):
            if 0 < speed < slowest:
                raise ValueError(
                    f"speeds[{rank}] is {float(speed)}: it must be 0 or at least 1/{MAX_SPEED_RATIO} of the largest "
                    "speed"
                )
        unit = lcm(*(speed.denominator for speed in exact))
        nodes = (tuple(range(world)),) if topology is None else topology.nodes
        two_level = topology is not None and topology.two_level
        problem = PackedProblem(
            np.array(documents.boundaries),
            _packed_masks(masks),
            nodes if two_level else (tuple(rank for node in nodes for rank in node),),
            tuple(int(speed * unit) for speed in exact),
            None if max_tokens is None else check_at_least(0, "max_tokens", max_tokens),
            len(nodes) > 1 and not two_level,
            check_at_least(1, "heads_per_kv_head", heads_per_kv_head),
        )
        seqlen, ranks = documents.seqlen, len(problem.order)
        if seqlen * int(problem.lengths.max()) * sum(mask.layers for mask in problem.masks) > MAX_WORK:
            raise ValueError("cu_seqlens and masks have more than 2^60 pairs of tokens: use shorter documents")
        if problem.max_tokens is not None and ranks * problem.max_tokens < seqlen:
            raise ValueError(
                f"max_tokens is {max_tokens}: {ranks} ranks with a speed above 0 cannot hold {seqlen} tokens. "
                f"It must be at least {-(-seqlen // ranks)}."
            )

        def place(layout: Layout, order: Sequence[int] = problem.order) -> list[tuple[Span, ...]]:
            spans: list[tuple[Span, ...]] = [()] * world
            for rank, own in zip(order, layout.spans_per_rank, strict=True):
                spans[rank] = own
            return spans

        def named(ranks: PackedProblem) -> list[list[tuple[Span, ...]]]:
            own = [exact[rank] for rank in ranks.order]
            layouts = [cls.contiguous(seqlen, len(own)), cls.zigzag(seqlen, len(own))]
            if len({*own}) > 1:
                layouts += [cls.balanced(seqlen, map(float, own), causal=causal) for causal in (False, True)]
            return [place(layout, ranks.order) for layout in layouts]

        fine = [
            lambda: place(cls.zigzag(seqlen, ranks, documents.boundaries)),
            lambda: place(cls.striped(seqlen, ranks)),
        ]
        run_pairs = len(documents.boundaries) * (2 * ranks) ** 2, seqlen * int(problem.lengths.max())
        few = [build for build, count in zip(fine, run_pairs, strict=True) if count <= MAX_RUN_PAIRS]
        return cls(packed_spans(problem, named, few) if seqlen else named(problem)[0])

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.spans_per_rank)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(span.length for span in spans) for spans in self.spans_per_rank)

    @cached_property
    def seqlen(self) -> int:
        """Number of tokens of all ranks."""
        return sum(self.lengths)

    @cached_property
    def reach(self) -> int:
        """End of the layout: the last position of all ranks plus one."""
        return max((spans[-1].stop for spans in self.spans_per_rank if spans), default=0)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank, ascending; empty if it holds no token."""
        return self.spans_per_rank[self._checked(rank)]

    def positions(self, rank: int) -> torch.Tensor:
        """Return the positions of one rank's tokens, ascending, int64 ``[S]`` on the CPU. Do not write to them."""
        cache, rank = self._positions, self._checked(rank)
        if rank not in cache:
            cache[rank] = _positions(self.spans_per_rank[rank])
        return cache[rank]

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the tokens of ``rank`` from ``x``, which holds the whole sequence along ``dim``. Differentiable copy.

        Raises:
            ValueError: the layout skips positions, ``x`` has another length, or there is no such rank or dim.
        """
        self.require_whole()
        check_tokens(x, "x", dim, self.seqlen, f"but the layout is made for {self.seqlen}")
        before = (slice(None),) * (dim % x.ndim)
        spans = self.spans(rank) or (Span(0, 0),)
        return torch.cat([x[(*before, slice(span.start, span.stop, span.step))] for span in spans], dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Return the whole sequence along ``dim`` from the shards of all ranks, in rank order. Differentiable copy.

        Raises:
            ValueError: the layout skips positions, or the number of shards, their lengths or ``dim`` do not fit.
        """
        self.require_whole()
        shards = Validator("the shards of all ranks, in rank order", list).check("shards", shards)
        if len(shards) != self.world:
            raise ValueError(f"shards has {len(shards)} tensors: it must have one per rank, {self.world}")
        for rank, (x, length) in enumerate(zip(shards, self.lengths, strict=True)):
            check_tokens(x, f"shards[{rank}]", dim, length, f"but rank {rank} has {length}")
        check_alike("shards", shards, dim)
        if all(span.step == 1 for spans in self.spans_per_rank for span in spans):
            pieces = [
                piece for x, spans in zip(shards, self.spans_per_rank, strict=True) for piece in _cut(x, spans, dim)
            ]
            return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])] or [*shards], dim)
        return torch.cat([*shards], dim).index_select(dim, self._order(shards[0].device))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._repr

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.spans_per_rank,)  # without the caches, because layouts are sent between ranks

    @cached_property
    def _positions(self) -> dict[int, torch.Tensor]:
        return {}

    @cached_property
    def _orders(self) -> SharedCache[torch.Tensor]:
        return SharedCache()

    @torch.inference_mode(False)
    def _order(self, device: torch.device) -> torch.Tensor:
        """Return where positions 0, 1, 2, ... are in the concatenated shards. Cached on ``device``."""

        def make() -> torch.Tensor:
            return torch.cat([self.positions(rank) for rank in range(self.world)]).argsort().to(device)

        return self._orders.get(device, make, lambda made: (made,))

    @cached_property
    def _hash(self) -> int:
        return hash(self.spans_per_rank)

    @cached_property
    def _repr(self) -> str:
        if sum(map(len, self.spans_per_rank)) <= REPR_SPANS:
            ranks = ", ".join(f"[{', '.join(str(tuple(span)) for span in spans)}]" for spans in self.spans_per_rank)
            return f"Layout([{ranks}])"
        digest = sha256(repr(self.spans_per_rank).encode()).hexdigest()[:16]
        return f"<Layout of {self.seqlen} tokens over {self.world} ranks, spans {digest}>"

    def _checked(self, rank: int) -> int:
        checked: int = integer_between(0, self.world - 1).check("rank", rank)
        return checked

    def require_whole(self) -> None:
        """Raise ValueError unless the layout holds every position from 0 to its last one."""
        if self.reach != self.seqlen:
            raise ValueError(
                f"the layout holds {self.seqlen} of the positions 0 to {self.reach - 1}: "
                "it must hold every position once"
            )


LayoutLike = Layout | Literal["contiguous", "zigzag", "striped"] | None
"""Type of ``layout`` arguments. A name means equal shards, None a single rank."""


@lru_cache(maxsize=64)
def shift_layout(layout: Layout, by: int) -> Layout:
    """Return ``layout`` with ``by`` added to all positions."""
    return Layout([[(start + by, length, step) for start, length, step in spans] for spans in layout.spans_per_rank])


def _table(spans_per_rank: tuple[tuple[Span, ...], ...]) -> torch.Tensor:
    """Build :attr:`Layout.table`. A rank without tokens gets an empty span, so that the table has every rank."""
    rows = [(rank, *span) for rank, spans in enumerate(spans_per_rank) for span in spans or (Span(0, 0),)]
    return torch.tensor(rows)


def _even(seqlen: int, world: int) -> list[int]:
    """Split ``seqlen`` into ``world`` lengths that differ by at most one, longer ones first."""
    seqlen, world = POSITIONS.check("seqlen", seqlen), RANKS.check("world", world)
    base, extra = divmod(seqlen, world)
    return [base + (rank < extra) for rank in range(world)]


@torch.inference_mode(False)  # cached, and a later call may need it for autograd
def _positions(spans: Sequence[Span]) -> torch.Tensor:
    runs = [torch.arange(span.start, span.stop, span.step) for span in spans]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def _spans(positions: torch.Tensor) -> list[Span]:
    """Return ascending positions as spans."""
    steps, counts = torch.unique_consecutive(positions.diff(), return_counts=True)
    runs = zip(steps.tolist(), counts.tolist(), strict=True)
    spans: list[Span] = []
    first = done = 0  # first token of the run of equal steps; number of tokens that have a span
    for step, count in runs:
        tokens = first + count + 1 - done
        if tokens > 1:  # otherwise the run is a gap between two spans, and its last token begins the next span
            spans.append(Span(int(positions[done]), tokens, step))
            done += tokens
        first += count
    return spans + [Span(int(p), 1) for p in positions[done:]]


def token_count(x: torch.Tensor, name: str, dim: int) -> int:
    """Return the length of ``x`` along ``dim``, or raise ValueError if ``x`` has no such dimension."""
    check_tensor(name, x, may_be_meta=True)
    dim = DIM.check("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}, but {name} has {x.ndim} dimensions")
    return x.shape[dim]


def check_tokens(x: torch.Tensor, name: str, dim: int, tokens: int, reason: str) -> None:
    """Raise ValueError if ``x`` does not have ``tokens`` along ``dim``.

    The message consists of the length of ``x``, ``reason``, and another dimension that has ``tokens``, if any.
    """
    length = token_count(x, name, dim)
    if length != tokens:
        fits = f". Dim {x.shape.index(tokens)} has {tokens}." if tokens in x.shape else ""
        raise ValueError(f"{name} has {length} tokens along dim {dim}, {reason}{fits}")


def check_alike(name: str, tensors: Sequence[torch.Tensor], dim: int) -> None:
    """Raise ValueError if the tensors differ in dtype, in device, or in shape except along ``dim``."""
    for number, x in enumerate(tensors):
        like, other = ([*t.narrow(dim, 0, 0).shape, t.dtype, t.device] for t in (tensors[0], x))
        if other != like:
            got, first = (f"{t.dtype} of shape {list(t.shape)} on {t.device}" for t in (x, tensors[0]))
            raise ValueError(f"{name}[{number}] is {got}: it must be like {name}[0], {first}, except along dim {dim}")


def _cut(x: torch.Tensor, spans: Sequence[Span], dim: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield ``(first position, tokens)`` for every span of a shard."""
    offset = 0
    for span in spans:
        yield span.start, x.narrow(dim, offset, span.length)
        offset += span.length
