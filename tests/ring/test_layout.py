"""Layouts: each token on one rank in ascending order, shard and unshard, and packed documents."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.ring.schedule.exchange import find_missing_position
from ringattn.ring.schedule.layout import Documents, Layout, Span

from ..support.layouts import layouts, small_layouts


def positions(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world)]


def expand(spans: list[tuple[int, int, int]]) -> list[int]:
    return [start + i * step for start, length, step in spans for i in range(length)]


FLOAT32: Any = np.array([3, 1], dtype=np.float32)
SIXTHS: list[Any] = [Fraction(1, 6), Fraction(5, 6)]
HELD: list[tuple[Callable[[], Layout], list[list[int]]]] = [
    (lambda: Layout.contiguous(8, 3), [[0, 1, 2], [3, 4, 5], [6, 7]]),
    (lambda: Layout.contiguous(2, 3), [[0], [1], []]),
    (lambda: Layout.zigzag(12, 3), [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    (lambda: Layout.zigzag(10, 3), [[0, 1, 8, 9], [2, 3, 7], [4, 5, 6]]),
    (lambda: Layout.striped(7, 3), [[0, 3, 6], [1, 4], [2, 5]]),
    (lambda: Layout.zigzag(8, 2, [0, 4, 4, 8]), [[0, 3, 4, 7], [1, 2, 5, 6]]),
    # the remainder continues at the rank where the previous document stopped
    (lambda: Layout.zigzag(4, 2, [0, 1, 2, 3, 4]), [[0, 2], [1, 3]]),
    # a rank's odd token alternates between the head and the tail of documents
    (lambda: Layout.zigzag(4, 2, [0, 2, 4]), [[0, 3], [1, 2]]),
    (lambda: Layout.zigzag(5, 2, [0, 3, 5]), [[0, 2, 3], [1, 4]]),
    (lambda: Layout.balanced(8, [3, 1], causal=False), [[0, 1, 2, 3, 4, 5], [6, 7]]),
    (lambda: Layout.balanced(8, [3, 1], causal=True), [[0, 1, 2, 5, 6, 7], [3, 4]]),
    (lambda: Layout.balanced(7, [0, 1, 0, 2.0], causal=True), [[], [0, 6], [], [1, 2, 3, 4, 5]]),
    (lambda: Layout.balanced(4, [1, 1e-9], causal=True), [[0, 1, 2, 3], []]),
    (lambda: Layout.balanced(0, [1, 2], causal=True), [[], []]),
    (lambda: Layout.packed([0, 0], 3), [[], [], []]),
    (lambda: Layout.balanced(8, [*FLOAT32], causal=False), [[0, 1, 2, 3, 4, 5], [6, 7]]),
    # exact: a sixth of three tokens is half a token, rounded up
    (lambda: Layout.balanced(3, SIXTHS, causal=False), [[0], [1, 2]]),
]


@pytest.mark.parametrize(("layout", "expected"), HELD)
def test_named_layouts_by_hand(layout: Callable[[], Layout], expected: list[list[int]]) -> None:
    assert positions(layout()) == expected


def test_every_token_is_on_one_rank_in_order() -> None:
    for layout in small_layouts(20, 8):
        held = positions(layout)
        assert sorted(chain.from_iterable(held)) == list(range(layout.seqlen))
        assert held == [sorted(positions) for positions in held]
        assert layout.lengths == tuple(map(len, held))
        assert max(layout.lengths) - min(layout.lengths) <= 1
        assert len(held) == layout.world


@given(st.integers(1, 6), st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_zigzag_of_any_documents(world: int, lengths: list[int]) -> None:
    boundaries = [*accumulate(lengths, initial=0)]
    layout = Layout.zigzag(boundaries[-1], world, boundaries)
    held = positions(layout)
    assert sorted(chain.from_iterable(held)) == list(range(layout.seqlen))
    assert max(layout.lengths) - min(layout.lengths) <= 1
    at_the_tail = [False] * world  # end at which a rank's next odd token lies
    for start, end in pairwise(boundaries):
        inside = [[p for p in positions if start <= p < end] for positions in held]
        assert max(map(len, inside)) - min(map(len, inside)) <= 1
        for rank, own in enumerate(inside):  # a run from each end of the tokens that earlier ranks left
            head = (len(own) + (not at_the_tail[rank])) // 2
            tail = len(own) - head
            assert own == [*range(start, start + head), *range(end - tail, end)]
            start, end = start + head, end - tail
            at_the_tail[rank] ^= head != tail
        assert start == end


SPEEDS = st.lists(st.integers(0, 100) | st.floats(0, 1e6) | st.fractions(0, 50), min_size=1, max_size=8).filter(any)


@given(st.integers(0, 300), SPEEDS, st.booleans())
def test_balanced_shards_take_equal_time(seqlen: int, speeds: list[float], causal: bool) -> None:
    layout = Layout.balanced(seqlen, speeds, causal=causal)
    held, exact = positions(layout), [Fraction(speed) for speed in speeds]
    assert sorted(chain.from_iterable(held)) == list(range(seqlen))
    for own, speed in zip(held, exact, strict=True):
        share = speed / sum(exact)
        pairs = sum(p + 1 for p in own) if causal else len(own) * seqlen
        whole = seqlen * (seqlen + 1) // 2 if causal else seqlen * seqlen
        assert abs(pairs - whole * share) <= seqlen + causal
        assert abs(len(own) - seqlen * share) <= 1 + causal
        assert own == [] or speed > 0


@given(layouts())
def test_spans_of_any_layout_give_its_positions(layout: Layout) -> None:
    for rank in range(layout.world):
        spans = layout.spans(rank)
        assert expand([*spans]) == layout.positions(rank).tolist()
        assert all(span.length >= 1 and span.step >= 1 for span in spans)
        assert all(before.stop <= after.start for before, after in pairwise(spans))
        assert [span.stop for span in spans] == [expand([span])[-1] + 1 for span in spans]
    assert Layout([layout.spans(rank) for rank in range(layout.world)]) == layout
    rows = [[rank, *span] for rank in range(layout.world) for span in layout.spans(rank) or [(0, 0, 1)]]
    assert layout.table.tolist() == rows


JOINED: list[tuple[list[tuple[int, ...]], list[Span]]] = [
    ([(0, 2), (2, 3), (9, 0), (7, 1)], [Span(0, 5), Span(7, 1)]),
    ([(0, 2, 3), (6, 2, 3)], [Span(0, 4, 3)]),
    ([(0, 2, 3), (6, 2, 2)], [Span(0, 2, 3), Span(6, 2, 2)]),
    ([(0, 2, 3), (7, 2, 3)], [Span(0, 2, 3), Span(7, 2, 3)]),
    ([(4, 1, 3)], [Span(4, 1, 1)]),
    ([(3, 0, 1)], []),
    ([(2**62 - 2, 1)], [Span(2**62 - 2, 1)]),
]


@pytest.mark.parametrize(("spans", "joined"), JOINED)
def test_spans_are_joined_and_empty_ones_dropped(spans: list[tuple[int, ...]], joined: list[Span]) -> None:
    assert Layout([spans]).spans(0) == tuple(joined)
    assert Span(3, 0).stop == 3


@pytest.mark.parametrize(
    ("positions", "spans"),
    [
        ([0, 1, 2, 8, 9, 10, 16, 17], [(0, 3, 1), (8, 3, 1), (16, 2, 1)]),
        ([3, 7, 11, 12, 13, 20], [(3, 3, 4), (12, 2, 1), (20, 1, 1)]),
        ([], []),
    ],
)
def test_positions_become_few_spans(positions: list[int], spans: list[tuple[int, int, int]]) -> None:
    assert list(Layout.from_positions([torch.tensor(positions, dtype=torch.int32)]).spans_per_rank[0]) == spans


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([0, 2, 2]), r"positions_per_rank\[1\] is not in ascending order"),
        (torch.tensor([0, 2]), "position 0 on rank 0 and on rank 1"),
        (torch.tensor([1.0]), r"positions_per_rank\[1\] is torch.float32 of shape \[1\] on cpu"),
        (torch.tensor([[1]]), r"positions_per_rank\[1\] is torch.int64 of shape \[1, 1\]"),
        ([1], r"positions_per_rank\[1\] is \[1\]: it must be an integer CPU tensor"),
        (torch.zeros(1, device="meta").long(), r"positions_per_rank\[1\] is torch.int64 of shape \[1\] on meta"),
        (torch.tensor([3, 1], dtype=torch.uint8), r"positions_per_rank\[1\] is not in ascending order"),
    ],
)
def test_wrong_positions_are_refused(positions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.from_positions([torch.tensor([0]), positions])


def test_a_layout_is_a_value() -> None:
    """Equal layouts compare equal however they were made, and pickle without their caches."""
    same = [Layout.contiguous(8, 1), Layout.zigzag(8, 1), Layout.striped(8, 1), Layout([[(0, 3), (3, 5)]])]
    assert len({*same}) == 1 and len({Layout.contiguous(8, 2), Layout.zigzag(8, 2)}) == 2
    layout = Layout.contiguous(100_000, 2)
    before = pickle.dumps(layout)
    layout.positions(0)
    hash(layout)
    assert pickle.dumps(layout) == before and len(before) < 1000
    assert pickle.loads(before) == layout


def test_repr_evaluates_to_the_layout_or_shows_a_digest() -> None:
    assert repr(Layout([[(0, 2), (5, 2, 2)], [(2, 3)]])) == "Layout([[(0, 2, 1), (5, 2, 2)], [(2, 3, 1)]])"
    for layout in (Layout.zigzag(64, 16), Layout.contiguous(32, 32)):  # 31 and 32 spans
        assert eval(repr(layout)) == layout
    large = [Layout.zigzag(1024, 64), Layout.zigzag(1024, 64), Layout.contiguous(1024, 64), Layout.striped(1024, 64)]
    assert len({repr(layout) for layout in large}) == 3
    assert re.fullmatch("<Layout of 1024 tokens over 64 ranks, spans [0-9a-f]{16}>", repr(large[0]))
    assert repr(Layout.contiguous(33, 33)).startswith("<Layout of")


@given(layouts(max_seqlen=20), st.sampled_from([0, 1, 2, -1, -2, -3]))
@example(Layout([[(0, 2), (4, 1), (6, 3)], [(2, 2), (5, 1)]]), 1)
@example(Layout.striped(8, 2), 1)
def test_shard_and_unshard(layout: Layout, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = layout.seqlen
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    shards = [layout.shard(x, rank, dim) for rank in range(layout.world)]
    for rank, piece in enumerate(shards):
        torch.testing.assert_close(piece, x.index_select(dim, layout.positions(rank)), rtol=0, atol=0)
    torch.testing.assert_close(layout.unshard(shards, dim), x, rtol=0, atol=0)
    assert layout.shard(x.to("meta"), 0, dim).shape == shards[0].shape


def test_layouts_of_other_positions_are_told_apart() -> None:
    source, target = Layout([[(0, 6)], [(9, 6)]]), Layout([[(0, 5)], [(8, 7)]])
    assert find_missing_position(source, target) == "target does not hold position 5, which source holds"
    assert find_missing_position(target, source) == "target holds position 5, which source does not hold"
    assert find_missing_position(source, Layout([[(9, 6)], [(0, 6)]])) == ""


class _Copies(TorchDispatchMode):
    """Dispatch mode that counts copies between devices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **kwargs or {})


def test_the_index_of_a_layout_is_copied_to_a_device_once() -> None:
    """Each copy would make the host wait for the GPU."""
    layout, shards = Layout.striped(8, 2), [torch.zeros(1, 4, device="meta")] * 2
    with _Copies() as copies:
        for _ in range(3):
            layout.unshard(shards)
    assert copies.count == 1
    on_cpu = layout.unshard([torch.zeros(1, 4), torch.ones(1, 4)])
    assert on_cpu.tolist() == [[0.0, 1.0] * 4]  # with an index of its own


def test_caches_filled_under_inference_mode_serve_training() -> None:
    layout, shards = Layout.striped(8, 2), [torch.zeros(1, 4).requires_grad_() for _ in range(2)]
    with torch.inference_mode():
        layout.positions(1)
        layout.unshard(shards)
    whole = layout.unshard(shards)[:, layout.positions(1)]
    (grad,) = torch.autograd.grad(whole.sum(), shards[1])
    assert grad.tolist() == [[1.0] * 4]


def test_a_layout_with_gaps_has_no_whole_sequence() -> None:
    for call in (lambda layout, x: layout.unshard([x]), lambda layout, x: layout.shard(x, 0)):
        with pytest.raises(ValueError, match=r"^the layout holds 2 of the positions 0 to 2: it must hold every"):
            call(Layout([[(1, 2)]]), torch.zeros(1, 2))


def test_shards_differ_only_in_their_tokens() -> None:
    first = torch.zeros(2, 4, 3)
    for other in (torch.zeros(1, 4, 3), torch.zeros(2, 4, 4), first.half(), first.to("meta")):
        with pytest.raises(ValueError, match=r"^shards\[1\] is .*: it must be like shards\[0\]"):
            Layout.contiguous(8, 2).unshard([first, other])


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 5)), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_spans_are_refused_exactly_if_they_descend_or_overlap(spans: list[list[tuple[int, int, int]]]) -> None:
    held = [expand(span) for span in spans]
    is_ascending = all(positions == sorted({*positions}) for positions in held)
    if is_ascending and len({*chain.from_iterable(held)}) == sum(map(len, held)):
        assert positions(Layout(spans)) == held
    else:
        with pytest.raises(ValueError, match=r"must ascend|may be on one rank"):
            Layout(spans)


def test_overlap_check_is_linear_in_the_spans() -> None:
    Layout([[(rank, 2**40, 64)] for rank in range(64)])
    with pytest.raises(ValueError, match="position 66 on rank 2 and on rank 3"):
        Layout([[(rank, 2**40, 64)] for rank in (0, 1, 2)] + [[(66, 1)]])
    with pytest.raises(ValueError, match=f"position {2**54 + 1} on rank 0 and on rank 1"):
        Layout([[(0, 2**54 + 2)], [(2**54 + 1, 1)]])  # integers only, because a float would round


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_ranks_and_indices_of_positions(lengths: list[int]) -> None:
    documents = Documents([*accumulate(lengths, initial=0)])
    whole = documents.seqlen
    assert whole == sum(lengths)
    starts, ends = documents.document_bounds(torch.arange(whole + 3))
    assert starts.dtype == ends.dtype == torch.int64
    for position, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        inside = [bounds for bounds in pairwise(documents.boundaries) if bounds[0] <= position < bounds[1]]
        assert (start, end) == (inside[0] if inside else (whole, whole))


def test_documents_are_a_value() -> None:
    """Documents accept any integers, and show a digest if there are many."""
    numbers = [0, 3, 3, 8]
    forms: list[Any] = [numbers, (*numbers,), torch.tensor(numbers), torch.tensor(numbers).int(), np.array(numbers)]
    made = [Documents(form) for form in forms]
    assert len({*made}) == 1 and {repr(documents) for documents in made} == {"Documents([0, 3, 3, 8])"}
    assert Documents([0, 3, 8]) != made[0] != numbers
    with pytest.raises(ValueError, match=r"^cu_seqlens is \[False, True\]: it must be a list of integers"):
        Documents([False, True])
    made[0].document_bounds(torch.arange(3))
    pickled = pickle.dumps(made[0])
    assert pickle.loads(pickled) == made[0] and len(pickled) < 200  # no caches
    long, other = Documents(range(100)), Documents([0, 0, *range(2, 100)])
    assert re.fullmatch("<99 documents of 99 tokens, boundaries [0-9a-f]{16}>", repr(long))
    assert repr(long) != repr(other)
    assert repr(Documents(range(16))).startswith("Documents([0, 1,")
    assert repr(Documents(range(17))).startswith("<16 documents")
