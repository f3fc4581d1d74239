"""A layout of packed documents that balances work and tokens and moves few K/V. See :meth:`.Layout.packed`.

A long document is *liquid*: ranks that are neighbours in the ring take pieces of it. A short one is a *rock*: it stays
whole on one rank, and its K/V do not move. Rocks are spread first, and the liquid then fills each rank up to its share
of the work. Candidates differ in which documents are liquid and in how they are cut, because more cuts balance better
and move more. `packed_spans` returns the candidate, or the named layout, with the lowest estimated time.

Only integers decide, so that every machine computes the same layout.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .hop_order import last_indices, order_distances

Vector = npt.NDArray[np.int64]
SpansPerRank = Sequence[Sequence[tuple[int, ...]]]  # (start, length) or (start, length, step)

LIQUID_DIVISORS = 1, 2, 4
"""A document with more than a mean rank's work or tokens, divided by this, is liquid. One round of candidates each."""
CUTS = (False, False), (True, False), (True, True)  # of a candidate: cut from both ends in turn, two streams
ROUNDS = 3  # times that rocks are spread for the tokens that the liquid leaves them
TRIMS, TRIM_ABOVE = 3, 50  # times that a rank with 1/50 more tokens than the mean leaves liquid to others
HOPELESS = 64  # give up if 1/64 of all tokens are above the limits
UNEVEN = 20  # prefer candidates in which no rank has 1/20 more work than the mean
SNAP = 24  # a cut of the second stream moves to the end of a document within 1/24 of a rank's tokens
GOOD_ENOUGH = 16  # stop if a step takes at most 1/16 longer than perfectly balanced work without transfers
MAX_TOKENS = 11, 10  # limit of a rank's tokens relative to the mean, if the caller has none
PAIRS_PER_TOKEN = 2560, 12288
"""Visible pairs that a GPU computes while K/V of a token cross a link inside a node, and between nodes.

Estimated for a step with one query head per K/V head, 500 TFLOP/s, 220 GB/s of NVLink and 47 GB/s of InfiniBand.
"""
PAIRS_PER_LAUNCH = 256
"""Visible pairs that a GPU computes in the time that a hop adds per query row, key and row of a masked tile.

A hop rewrites the state of every row, and its last programs leave multiprocessors idle while they read its keys.
"""
TILE_ROWS = 128  # a run of positions ends in one masked tile
PAIRS_PER_EXTRA_TOKEN = 8192  # about a third of the linear layers of an 8B model, because attention is balanced first
SLOWDOWN = 8  # a kernel loses 1/8 of its speed during a transfer
SENT_SHARE = 3, 4  # `visibility.MAX_SENT_SHARE`
SLOW_RANKS = 10  # also leave ranks empty that are slower than the mean divided by 1, 2, 4, … 2^9
MAX_RUN_PAIRS = 1 << 20  # a named layout with more pairs of runs is compared by a lower bound only
MAX_WORK = 1 << 60  # visible pairs of all layers
FIXED_POINT = 40  # bits of work in fixed-point comparisons


class PackedMask(NamedTuple):
    """Window inside documents, -1 for no limit on a side, and the number of layers that use it."""

    left: int
    right: int
    layers: int


class Cost(NamedTuple):
    """Estimated cost of a layout; the lowest is best."""

    excess: int
    """Tokens above the limits of the ranks."""
    step: int
    """Time of all layers: visible pairs of one rank, times ``SLOWDOWN``."""
    moved: int
    """Tokens whose K/V are sent, counted once per hop and layer."""


class Runs(NamedTuple):
    """Runs of positions that lie in one document and on one rank, ascending."""

    starts: Vector
    stops: Vector
    ranks: Vector
    documents: Vector


@dataclass(frozen=True)
class PackedProblem:
    """Documents, masks, and the ranks that share the work."""

    boundaries: Vector
    masks: tuple[PackedMask, ...]
    nodes: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    """Relative speed of every rank."""
    max_tokens: int | None = None
    crosses_nodes: bool = False
    """True if a flat ring runs through several nodes."""
    heads_per_kv_head: int = 4
    least_share: int = 1
    """Speed below which a rank gets no tokens."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Ranks that get tokens, in ring order."""
        return tuple(rank for node in self.nodes for rank in node if self.shares[rank] >= self.least_share)

    @cached_property
    def lengths(self) -> Vector:
        """Number of tokens of each document."""
        return np.diff(self.boundaries)

    @cached_property
    def limits(self) -> Vector:
        """Most tokens of each rank."""
        if self.max_tokens is not None:
            return np.full(len(self.shares), self.max_tokens)
        (over, under), total, tokens = MAX_TOKENS, sum(self.shares), int(self.boundaries[-1])
        return np.array([max(tokens * s * over // (total * under), -(-tokens * s // total)) for s in self.shares])

    def pairs(self, documents: Vector, tokens: Vector, *, masks: Sequence[PackedMask] = ()) -> Vector:
        """Return the visible pairs of the queries among the first ``tokens`` of each document, in all layers."""
        total = np.zeros_like(tokens)
        for left, right, layers in masks or self.masks:
            seen = tokens + _clipped_sum(tokens, left)
            if right:
                lengths = self.lengths[documents]
                seen = seen + _clipped_sum(lengths, right) - _clipped_sum(lengths - tokens, right)
            total = total + layers * seen
        return total

    def cost(self, runs: Runs) -> Cost:
        """Return the cost of a layout."""
        tokens, world = self._sum_by_rank(runs, runs.stops - runs.starts), len(self.shares)
        step, moved = 0, 0
        extra = max(map(self._time, tokens.tolist(), self.shares)) - int(tokens.sum()) // world
        for mask in self.masks:
            shards, ranks, pairs, lengths = self._visibility(runs, mask, tokens)
            masked = np.minimum(tokens, TILE_ROWS * np.bincount(runs.ranks, minlength=world))
            work = pairs + PAIRS_PER_LAUNCH * masked[ranks]
            work += PAIRS_PER_LAUNCH * (shards != ranks) * (lengths[shards] + tokens[ranks])
            by_rank = np.zeros(world, np.int64)
            np.add.at(by_rank, ranks, work)
            slowest = max(map(self._time, by_rank.tolist(), self.shares))
            outer, distance = self._distances(shards, ranks)
            by_hop = np.zeros((len(self.nodes), len(self.nodes[0])), np.int64)
            scale = np.array([(self._speed << 10) // max(share * world, 1) for share in self.shares])
            np.maximum.at(by_hop, (outer, distance), work * scale[ranks] >> 10)
            # ranks wait for slower ranks, but not at every hop
            compute = (slowest + int(by_hop.sum())) // 2 + extra * PAIRS_PER_EXTRA_TOKEN
            sent = self._moves(shards, outer, distance, lengths)
            busiest = (self._transfer(int(keys.max()), level) for level, keys in enumerate(sent))
            step += mask.layers * self.step(compute, max(busiest))
            moved += mask.layers * int(sum(keys.sum() for keys in sent))
        return Cost(self.excess(runs), step, moved)

    def excess(self, runs: Runs) -> int:
        """Return the number of tokens above the limits of the ranks."""
        return int(np.maximum(self._sum_by_rank(runs, runs.stops - runs.starts) - self.limits, 0).sum())

    def step(self, compute: int, transfer: int) -> int:
        """Return the time of a layer."""
        return max(SLOWDOWN * compute + transfer, SLOWDOWN * transfer)

    def least_step(self, *, all_see_all: bool = False) -> int:
        """Return a lower bound for the time of all layers.

        ``all_see_all``: for layouts in which each rank has tokens from both halves of every document.
        """
        world, every, total = len(self.shares), np.arange(len(self.lengths)), 0
        wide = self.lengths[self.lengths >= 2 * world]
        keys = int((wide - wide // (2 * world) - 1).sum()) // world  # other ranks see all but the last keys
        hops = (len(self.nodes[0]) - 1) * len(self.nodes)
        for mask in self.masks:
            work = -(-int(self.pairs(every, self.lengths, masks=[mask]).sum()) // (world * mask.layers))
            seen = keys if all_see_all and mask.left < 0 else 0
            launches = (world - 1) * 2 * seen * PAIRS_PER_LAUNCH
            total += mask.layers * self.step(work + launches, self._transfer(hops * seen, 0))
        return total

    def _transfer(self, keys: int, level: int) -> int:
        """Return the pairs that a GPU computes while these keys cross a link inside a node (0) or between nodes (1)."""
        return keys * PAIRS_PER_TOKEN[level or self.crosses_nodes] // self.heads_per_kv_head

    @cached_property
    def _speed(self) -> int:
        return sum(self.shares)

    def _time(self, pairs: int, share: int) -> int:
        """Return the pairs, or tokens, that a rank of mean speed handles in the time that this rank takes."""
        return -(-pairs * self._speed // (share * len(self.shares))) if share else pairs * MAX_WORK

    def _sum_by_rank(self, runs: Runs, values: Vector) -> Vector:
        total = np.zeros(len(self.shares), np.int64)
        np.add.at(total, runs.ranks, values)
        return total

    def _visibility(self, runs: Runs, mask: PackedMask, tokens: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return the shards, ranks and visible pairs of all hops, and the sent keys of each shard.

        Hops have a visible pair, or a shard visits its own rank.
        """
        origin, end = self.boundaries[runs.documents], self.boundaries[runs.documents + 1]
        lo = np.maximum(origin, runs.starts - mask.left) if mask.left >= 0 else origin
        hi = np.minimum(end, runs.stops + mask.right) if mask.right >= 0 else end
        first = np.searchsorted(runs.stops, lo, side="right")
        counts = np.searchsorted(runs.starts, hi) - first
        queries, keys = _series(counts)  # each run of queries, with each run of keys that it sees
        keys += first[queries]
        spans = ((at[which] - origin[queries]) for which in (queries, keys) for at in (runs.starts, runs.stops))
        pairs, own, world = _run_pairs(mask, *spans), np.arange(len(self.shares)), len(self.shares)
        visits = np.append(runs.ranks[keys] * world + runs.ranks[queries], own * world + own)
        hops, which = np.unique(visits, return_inverse=True)
        by_hop = np.zeros(len(hops), np.int64)
        np.add.at(by_hop, which, np.append(pairs, np.zeros(world, np.int64)))
        shards, ranks = np.divmod(hops, world)
        seen = (by_hop > 0) | (shards == ranks)
        foreign = runs.ranks[queries] != runs.ranks[keys]
        queries, keys = queries[foreign], keys[foreign]
        begins, ends = runs.stops.copy(), runs.starts.copy()
        np.minimum.at(begins, keys, np.maximum(lo[queries], runs.starts[keys]))
        np.maximum.at(ends, keys, np.minimum(hi[queries], runs.stops[keys]))
        lengths = self._sum_by_rank(runs, np.maximum(ends - begins, 0))
        if lengths.sum() * SENT_SHARE[1] >= tokens.sum() * SENT_SHARE[0]:
            lengths = tokens
        return shards[seen], ranks[seen], by_hop[seen], lengths

    @cached_property
    def _places(self) -> tuple[Vector, Vector]:
        """Return the node and the place inside the node of each rank."""
        node, local = np.divmod(np.argsort(np.ravel(self.nodes)), len(self.nodes[0]))
        return node, local

    def _distances(self, shards: Vector, ranks: Vector) -> tuple[Vector, Vector]:
        """Return the distances of ranks from shards, in nodes and in ranks of a node."""
        node, local = self._places
        return (node[ranks] - node[shards]) % len(self.nodes), (local[ranks] - local[shards]) % len(self.nodes[0])

    def _moves(self, shards: Vector, outer: Vector, distance: Vector, lengths: Vector) -> tuple[Vector, Vector]:
        """Return the keys that each rank sends, inside nodes and between them, as :class:`.Schedule` moves them."""
        (node, local), grid, world = self._places, np.array(self.nodes), len(lengths)
        nodes, inner = grid.shape
        rows, inside, between = shards * nodes + outer, *np.zeros((2, world), np.int64)
        outers = order_distances(shards, outer, lengths, nodes)
        steps = order_distances(rows, distance, np.repeat(lengths, nodes), inner)
        shard, index = _series(last_indices(shards, outer, outers, world))
        np.add.at(between, grid[(node[shard] + np.array(outers)[index]) % nodes, local[shard]], lengths[shard])
        row, index = _series(last_indices(rows, distance, steps, world * nodes))
        shard, outer = np.divmod(row, nodes)
        ranks = grid[(node[shard] + outer) % nodes, (local[shard] + np.array(steps)[index]) % inner]
        np.add.at(inside, ranks, lengths[shard])
        return inside, between


def _series(counts: Vector) -> tuple[Vector, Vector]:
    """Return the indices ``i`` and ``j`` of all ``j < counts[i]``, in order."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def _clipped_sum(count: Vector, limit: int | Vector) -> Vector:
    """Return the sum of ``min(i, limit)`` over ``0 <= i < count``; -1 is no limit."""
    if isinstance(limit, int) and limit < 0:
        return count * (count - 1) // 2
    limit = np.where(np.asarray(limit) < 0, count, limit)
    rising = np.minimum(count, limit + 1)
    total: Vector = rising * (rising - 1) // 2 + (count - rising) * limit
    return total


def _run_pairs(mask: PackedMask, first: Vector, last: Vector, begin: Vector, end: Vector) -> Vector:
    """Return the pairs of queries ``[first, last)`` and keys ``[begin, end)``, counted from a document's start."""

    def up_to(key: Vector) -> Vector:
        """Return the number of keys in front of ``key`` that are in front of the end of each query's window."""

        def in_front(shift: int) -> Vector:
            return _clipped_sum(np.maximum(last + shift, 0), key) - _clipped_sum(np.maximum(first + shift, 0), key)

        seen = (last - first) * key if mask.right < 0 else in_front(mask.right + 1)
        return seen if mask.left < 0 else seen - in_front(-mask.left)

    return up_to(end) - up_to(begin)


def packed_spans(
    problem: PackedProblem,
    named: Callable[[PackedProblem], Sequence[SpansPerRank]],
    fine: Sequence[Callable[[], SpansPerRank]],
) -> SpansPerRank:
    """Return the spans of every rank in the layout with the lowest cost.

    ``named`` builds more candidates. ``fine`` build layouts in which each rank has tokens from both halves of every
    document. They are built only if they might be better.
    """
    costs = [(problem.cost(_runs(problem, spans)), spans) for spans in named(problem)]
    best, chosen = min(costs, key=lambda choice: choice[0])
    for fewer in _without_slow_ranks(problem):
        more = [] if fewer is problem else named(fewer)
        for spans in chain(more, _candidates(fewer, best.excess)):
            if (cost := problem.cost(_runs(problem, spans))) < best:
                best, chosen = cost, spans
            if best <= (0, problem.least_step() * (GOOD_ENOUGH + 1) // GOOD_ENOUGH):
                return chosen
    for build in fine:
        if best > (0, problem.least_step(all_see_all=True)):
            spans = build()
            if (cost := problem.cost(_runs(problem, spans))) < best:
                best, chosen = cost, spans
    return chosen


def _without_slow_ranks(problem: PackedProblem) -> Iterator[PackedProblem]:
    """Yield the problem, and problems in which ranks that are slower than the mean by more and more get no tokens."""
    yield problem
    ranks = {len(problem.order)}
    for power in reversed(range(SLOW_RANKS)):
        least = -(-sum(problem.shares) // (len(problem.order) << power))
        fewer = replace(problem, least_share=max(least, 1))
        can_hold = int(problem.limits[list(fewer.order)].sum()) >= int(problem.boundaries[-1])
        if len(fewer.order) not in ranks and can_hold:
            ranks.add(len(fewer.order))
            yield fewer


def _candidates(problem: PackedProblem, most_excess: int) -> Iterator[SpansPerRank]:
    """Yield the spans of every rank for each candidate with at most this many tokens above the limits."""
    starts = problem.boundaries.tolist()
    for divisor in LIQUID_DIVISORS:
        for fold, two_streams in CUTS:
            excess, filled = _fill(problem, divisor, fold, two_streams, most_excess)
            if excess <= most_excess:
                spans: list[list[tuple[int, int]]] = [[] for _ in problem.shares]
                for rank, pieces in zip(problem.order, filled, strict=True):
                    spans[rank] = sorted(_piece_spans(starts, pieces, fold))
                yield spans


Piece = tuple[int, int, int]  # document, and the first token and the end in the order in which it is cut


def _piece_spans(starts: Sequence[int], pieces: Sequence[Piece], fold: bool) -> Iterator[tuple[int, int]]:
    """Yield the positions of pieces as (start, length)."""
    for document, first, last in pieces:
        if not fold:
            yield starts[document] + first, last - first
            continue
        head, head_end, tail, tail_end = (first + 1) // 2, (last + 1) // 2, first // 2, last // 2
        yield starts[document] + head, head_end - head
        yield starts[document + 1] - tail_end, tail_end - tail


class _Stream:
    """Documents in a row, which can be cut at any token. With ``fold`` the tokens come from both ends in turn."""

    def __init__(self, problem: PackedProblem, documents: Vector, fold: bool) -> None:
        self._problem, self._documents, self._fold = problem, documents, fold
        lengths = problem.lengths[documents]
        self._whole = problem.pairs(documents, lengths)
        self._works, self._ends = (np.append(0, np.cumsum(each)) for each in (self._whole, lengths))
        self.work, self.size = int(self._works[-1]), int(self._ends[-1])

    def work_before(self, tokens: Vector) -> Vector:
        """Return the work of the first ``tokens`` tokens of the stream."""
        if not self.size:
            return np.zeros_like(tokens)
        return self._work(
            np.minimum(np.searchsorted(self._ends, tokens, side="right"), len(self._documents)) - 1, tokens
        )

    def tokens_with(self, work: Vector) -> Vector:
        """Return the smallest number of tokens of the stream that have this work."""
        if not self.size:
            return np.zeros_like(work)
        index = np.maximum(np.searchsorted(self._works, work), 1) - 1
        return _search(lambda at: self._work(index, at) >= work, self._ends[index], self._ends[index + 1])

    def _work(self, index: Vector, tokens: Vector) -> Vector:
        """Return the work of the first ``tokens`` tokens, which end in the document number ``index`` of the stream."""
        documents, inside = self._documents[index], tokens - self._ends[index]
        if not self._fold:
            work: Vector = self._works[index] + self._problem.pairs(documents, inside)
            return work
        head, rest = (inside + 1) // 2, self._problem.lengths[documents] - inside // 2
        work = self._works[index + 1] + self._problem.pairs(documents, head) - self._problem.pairs(documents, rest)
        return work

    def snap(self, cuts: Vector, distance: int) -> Vector:
        """Return the cuts, with those near an end of a document moved to that end."""
        after = np.searchsorted(self._ends, cuts)
        near = after - (cuts - self._ends[after - 1] < self._ends[after] - cuts)
        return np.where(abs(self._ends[near] - cuts) <= distance, self._ends[near], cuts)

    def slices(self, cuts: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        """Yield the bin and the piece for every part of a document between two cuts."""
        documents, edges, item = self._documents.tolist(), self._ends.tolist(), 0
        for where, (first, last) in enumerate(pairwise(cuts)):
            while first < last:
                while edges[item + 1] <= first:
                    item += 1
                stop = min(last, edges[item + 1])
                yield where, (documents[item], first - edges[item], stop - edges[item])
                first = stop


def _fill(
    problem: PackedProblem, divisor: int, fold: bool, two_streams: bool, most_excess: int
) -> tuple[int, list[list[Piece]]]:
    """Spread the documents over the ranks of ``problem.order`` in proportion to their speeds.

    Returns:
        The number of tokens above the limits, and the pieces of each rank. ``MAX_WORK`` and nothing if the documents
        leave no such choice.
    """
    shares, lengths = [problem.shares[rank] for rank in problem.order], problem.lengths
    work = problem.pairs(np.arange(len(lengths)), lengths)
    total, count, size = int(work.sum()), int(lengths.sum()), len(shares) * divisor
    is_liquid = (work > total // size) | (lengths > count // size)
    order = np.argsort(-lengths, kind="stable")
    rocks, liquid = order[~is_liquid[order] & (lengths[order] > 0)], order[is_liquid[order]]
    # The second stream has the documents with less work per token than the mean, so that together the streams can give
    # each rank its work and its tokens.
    is_dense = work[liquid] // lengths[liquid] > total // count if two_streams else np.ones(len(liquid), np.bool_)
    streams = _Stream(problem, liquid[is_dense], fold), _Stream(problem, liquid[~is_dense], fold)
    if (fold and not streams[0].size) or (two_streams and not streams[1].size):
        return MAX_WORK, []  # equal to the candidate before
    bins = _Bins(_split(total, shares), _split(count, shares), problem.limits[list(problem.order)])
    rate = PAIRS_PER_EXTRA_TOKEN * sum(mask.layers for mask in problem.masks)
    excess, *_, placed, cuts = min(
        _balance(bins, streams, work[rocks], lengths[rocks], rate), key=lambda choice: choice[:4]
    )
    filled: list[list[Piece]] = [[] for _ in shares]
    if excess > most_excess:
        return excess, filled
    for rock, length, where in zip(rocks.tolist(), lengths[rocks].tolist(), placed, strict=True):
        filled[where].append((rock, 0, length))
    for stream, places in zip(streams, cuts, strict=True):
        for where, piece in stream.slices(places.tolist()):
            filled[where].append(piece)
    return excess, filled


class _Bins(NamedTuple):
    """Work and tokens that each rank should get, and the most tokens that it may get."""

    work: Vector
    tokens: Vector
    limits: Vector


Cuts = tuple[Vector, Vector]  # of each stream: 0, the tokens in front of each cut, and the size of the stream
Streams = tuple["_Stream", "_Stream"]


def _balance(
    bins: _Bins, streams: Streams, work: Vector, tokens: Vector, rate: int
) -> Iterator[tuple[int, bool, int, int, list[int], Cuts]]:
    """Yield ways to spread rocks with this work and these tokens, and to cut the streams; the smallest is best."""
    works, counts, total, count = (int(values.sum()) for values in (work, tokens, bins.work, bins.tokens))
    values = [w * counts + t * works for w, t in zip(work.tolist(), tokens.tolist(), strict=True)]
    # at first as if the rocks were liquid, too
    cuts = _cut(streams, bins.work - bins.work * works // max(total, 1), bins.tokens - bins.tokens * counts // count)
    placed: list[int] | None = None
    for number in range(ROUNDS):
        room = [2 * works * space for space in (bins.tokens - np.diff(cuts[0]) - np.diff(cuts[1])).tolist()]
        before, placed = placed, _place(values, room) if streams[0].size else _place_evenly(bins, work, tokens)
        if placed == before:
            return
        held_work, held_tokens, trim = np.zeros((3, len(room)), np.int64)
        np.add.at(held_work, placed, work)
        np.add.at(held_tokens, placed, tokens)
        for again in range(TRIMS):
            trimmed = _cut(streams, bins.work - held_work - trim, bins.tokens - held_tokens)
            cuts = cuts if again else trimmed
            load = held_tokens + np.diff(trimmed[0]) + np.diff(trimmed[1])
            done = held_work + sum(np.diff(stream.work_before(at)) for stream, at in zip(streams, trimmed, strict=True))
            excess = int(np.maximum(load - bins.limits, 0).sum())
            slowest = int((done // np.maximum(bins.work >> 10, 1)).max())
            fullest = int(((load << 10) // np.maximum(bins.tokens, 1)).max())
            time = slowest * total + fullest * count * rate
            yield excess, slowest > 1024 + 1024 // UNEVEN, time, number * TRIMS + again, placed, trimmed
            over = np.maximum(load - bins.tokens - bins.tokens // TRIM_ABOVE, 0)
            if not streams[0].size:
                return
            if not over.any() or excess > count // HOPELESS:
                break
            # a rank with too many tokens leaves the work of as many tokens to other ranks
            trim = trim + over * (streams[0].work // streams[0].size)


def _split(total: int, shares: Sequence[int]) -> Vector:
    """Split a number in proportion to the shares."""
    whole = sum(shares)
    return np.diff(np.array([0, *(total * end // whole for end in accumulate(shares))]))


def _place(values: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return a bin for each value, in order: always the one that has most room."""
    heap = [(-space, where) for where, space in enumerate(room)]
    heapq.heapify(heap)
    placed = []
    for value in values:
        space, where = heap[0]
        heapq.heapreplace(heap, (space + value, where))
        placed.append(where)
    return placed


def _place_evenly(bins: _Bins, work: Vector, tokens: Vector) -> list[int]:
    """Return a bin for each document, in order: the one whose work and tokens both stay lowest."""
    scale = max(int(bins.work.sum()).bit_length() - FIXED_POINT, 0)  # so that products fit in 64 bits
    want_work, want_tokens = np.maximum(bins.work >> scale, 1), np.maximum(bins.tokens, 1)
    done, load = np.zeros((2, len(want_work)), np.int64)
    placed = []
    for more_work, more_tokens in zip((work >> scale).tolist(), tokens.tolist(), strict=True):
        levels = np.maximum(((done + more_work) << 20) // want_work, ((load + more_tokens) << 20) // want_tokens)
        where = int(levels.argmin())
        done[where], load[where] = done[where] + more_work, load[where] + more_tokens
        placed.append(where)
    return placed


def _cut(streams: Streams, work: Vector, tokens: Vector) -> Cuts:
    """Return where to cut both streams, so that each rank gets its work, and its tokens if both have documents."""
    dense, sparse = streams
    ends = np.clip(np.cumsum(tokens)[:-1], 0, dense.size + sparse.size)
    second = np.zeros_like(ends)
    if dense.size and sparse.size:
        goals, low, high = np.cumsum(work)[:-1], np.maximum(ends - sparse.size, 0), np.minimum(ends, dense.size)
        first = _search(lambda at: dense.work_before(at) + sparse.work_before(ends - at) >= goals, low, high)
        second = np.clip(ends - np.maximum.accumulate(first), 0, sparse.size)
        second = sparse.snap(np.maximum.accumulate(second), int(tokens.sum()) // (SNAP * len(tokens)))
    second = np.concatenate([[0], second, [sparse.size]])
    need = np.maximum(work - np.diff(sparse.work_before(second)), 0).tolist()
    goals = np.cumsum(_split(dense.work, need if any(need) else [1] * len(need)))[:-1]
    return np.concatenate([[0], np.maximum.accumulate(dense.tokens_with(goals)), [dense.size]]), second


def _search(reached: Callable[[Vector], npt.NDArray[np.bool_]], low: Vector, high: Vector) -> Vector:
    """Return the first number from ``low`` to ``high`` that reaches the goal, for each element; else ``high``."""
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) // 2
        enough = reached(middle) | (low >= high)
        low, high = np.where(enough, low, middle + 1), np.where(enough, np.minimum(middle, high), high)
    return low


def _runs(problem: PackedProblem, spans_per_rank: SpansPerRank) -> Runs:
    """Return spans that cover every position once, as runs that end where documents end."""
    begins = [
        (first, rank)
        for rank, spans in enumerate(spans_per_rank)
        for start, length, *step in spans
        for first in (
            range(start, start + length * step[0], step[0]) if step and step[0] > 1 else (start,) * (length > 0)
        )
    ]
    table = np.array(sorted(begins), np.int64).reshape(-1, 2)
    starts = np.unique(np.concatenate([table[:, 0], problem.boundaries[:-1]]))
    starts = starts[starts < problem.boundaries[-1]]
    ranks = table[np.searchsorted(table[:, 0], starts, side="right") - 1, 1]
    documents = np.searchsorted(problem.boundaries, starts, side="right") - 1
    first = (np.diff(ranks, prepend=-1) != 0) | (np.diff(documents, prepend=-1) != 0)
    starts = starts[first]
    return Runs(starts, np.append(starts[1:], problem.boundaries[-1]), ranks[first], documents[first])
