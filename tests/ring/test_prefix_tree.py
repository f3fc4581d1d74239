"""Prefix trees against their definition, and against the sequences that they pack, over ranks and layouts."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, ring_attention
from ringattn.ring import Intervals, PrefixTree, prefix_tree, slices
from ringattn.ring.schedule.intervals import limit_paths
from ringattn.ring.schedule.mask import Mask, bounds

from ..support.kernel_cases import dense_mask
from ..support.mask_cases import RingCase, check_case
from ..support.ring_cases import LAYOUTS, inputs, run_ranks

pytestmark = pytest.mark.usefixtures("one_core")


def random_tree(seed: int, nodes: int = 9, longest: int = 4) -> PrefixTree:
    """Return a tree with several roots, branches and only children; nodes are not numbered depth first."""
    rng = Random(seed)
    parents = [rng.choice([-1, *range(node)] if seed % 3 else [*range(max(node, 1))][-2:]) for node in range(nodes)]
    return prefix_tree([rng.randint(1, longest) for _ in parents], [-1, *parents[1:]])


def ancestors(tree: PrefixTree, node: int) -> list[int]:
    return [] if node < 0 else [node, *ancestors(tree, tree.parents[node])]


@pytest.mark.parametrize("seed", range(60))
def test_trees_by_their_definition(seed: int) -> None:
    tree = random_tree(seed)
    parts = [tree.lengths[node] * [node] for node in range(len(tree.lengths))]
    nodes = tree.pack([torch.tensor([part]) for part in parts], 1)[0].tolist()
    assert all(nodes[start] == node and nodes[start - 1] != node for node, start in enumerate(tree.starts) if start)
    visible = [
        [key in ancestors(tree, query) and i >= j for j, key in enumerate(nodes)] for i, query in enumerate(nodes)
    ]
    at, mask = torch.arange(tree.tokens), Mask(intervals=tree.intervals)
    made = [dense_mask(bounds(part, at, at), tree.tokens, tree.tokens) for part in mask.parts]
    assert torch.stack(made).sum(0).equal(torch.tensor(visible).long())
    assert len(made) <= max(len(ancestors(tree, node)) for node in nodes)
    assert tree.positions.equal(torch.tensor(visible).sum(1) - 1)
    assert tree.previous.tolist() == [max((j for j in range(i) if row[j]), default=-1) for i, row in enumerate(visible)]
    near = torch.tensor(visible) & (tree.positions[:, None] - tree.positions <= seed % 9)
    with suppress(ValueError):  # test_windows_that_cut_branches_differently_are_refused
        limited = Mask(intervals=limit_paths(tree.intervals, seed % 9))
        made = [dense_mask(bounds(part, at, at), tree.tokens, tree.tokens) for part in limited.parts]
        assert torch.stack(made).sum(0).equal(near.long())
    ends = [tree.path(leaf).tolist() for leaf in tree.leaves]
    assert tree.rollouts.tolist() == [sum(i in path for path in ends) for i in range(tree.tokens)]
    assert [nodes[path[-1]] for path in ends] == [node for node in tree.order if node not in tree.parents]


def test_a_chain_is_one_interval_and_branches_may_be_64_deep() -> None:
    assert len(prefix_tree([1] * 99, range(-1, 98)).intervals.table) == 1
    assert len(prefix_tree([1] * 127, [-1, *(node // 2 * 2 for node in range(126))]).intervals.table) == 64


@pytest.mark.parametrize(
    ("seed", "world", "layout", "backend"),
    [
        (1, 1, "contiguous", "aten"), (3, 2, "zigzag", "aten"), (4, 3, "striped", "aten"), (5, 4, "uneven", "aten"),
        (6, 2, "zigzag", "triton"),
    ],
)  # fmt: skip
def test_attention_of_a_tree_is_exact(seed: int, world: int, layout: str, backend: str) -> None:
    tree = random_tree(seed, 7)
    heads = (2, 1) if backend == "triton" else (4, 2)
    call = {"intervals": tree.intervals, "causal": bool(seed % 2), "backend": backend}
    check_case(RingCase(LAYOUTS[layout](tree.tokens, world), inputs(tree.tokens, heads), call))


PATHS = prefix_tree([5, 3, 9, 2, 4], [-1, 0, 0, 1, 1])
NARROW = prefix_tree([5, 2, 1], [-1, -1, 1])


@pytest.mark.parametrize(
    ("tree", "window"), [(PATHS, (-1, -1)), (PATHS, (14, 0)), (NARROW, (2, -1)), (NARROW, (0, 0)), (PATHS, (-1, 0))]
)
def test_a_tree_equals_its_sequences_one_by_one(tree: PrefixTree, window: tuple[int, int]) -> None:
    """Windows count path positions. A token of several sequences gets the gradient of each."""
    whole, layout = inputs(tree.tokens, (4, 2), batch=1), Layout.zigzag(tree.tokens, 3)

    def packed(group: Any) -> tuple[Tensor, ...]:
        leaves = [layout.shard(whole[name], group.rank()).detach().requires_grad_() for name in "qkv"]
        out = ring_attention(*leaves, layout=layout, group=group, intervals=tree.intervals, window_size=window)  # type: ignore[call-overload]
        weights = layout.shard(whole["dout"] * tree.rollouts[:, None, None], group.rank())
        return out.detach(), *torch.autograd.grad(out, leaves, weights)

    ours = [layout.unshard(shards) for shards in zip(*run_ranks(3, packed), strict=True)]
    leaves = [whole[name].clone().requires_grad_() for name in "qkv"]
    for leaf in tree.leaves:
        path = tree.path(leaf)
        out = ring_attention(*(x[:, path] for x in leaves), causal=True, window_size=window)  # type: ignore[call-overload]
        torch.testing.assert_close(ours[0][:, path], out.detach())
        out.backward(whole["dout"][:, path])
    for grad, leaf_tensor in zip(ours[1:], leaves, strict=True):
        torch.testing.assert_close(grad, leaf_tensor.grad)


def test_windows_that_cut_branches_differently_are_refused() -> None:
    q = torch.zeros(1, PATHS.tokens, 1, 8)
    message = (
        r"window_size is \(6, …\), counted in path positions .* intervals\[0\] is \[2, 5\) at position 10, after \["
    )
    with pytest.raises(ValueError, match=message):
        ring_attention(q, q, q, intervals=PATHS.intervals, window_size=(6, 0))


VOCABULARY = 7


@pytest.mark.parametrize(("world", "layout"), [(1, "contiguous"), (2, "zigzag"), (3, "striped"), (4, "uneven")])
@pytest.mark.parametrize("grad", ["slice", "sum"])
def test_log_probabilities_of_each_sequence(world: int, layout: str, grad: str) -> None:
    """Compute the whole loss on every rank with ``slice``, and a share of it with ``sum``."""
    tree = random_tree(7)
    whole, layout_ = torch.randn(tree.tokens, VOCABULARY), LAYOUTS[layout](tree.tokens, world)
    tokens = torch.randint(VOCABULARY, (tree.tokens,))

    def loss(paths: list[Tensor]) -> Tensor:
        return torch.stack([(path @ torch.arange(1.0, len(path) + 1)) ** 2 for path in paths]).sum()

    def on_rank(group: Any) -> tuple[Tensor, Tensor]:
        logits = layout_.shard(whole, group.rank(), 0).detach().requires_grad_()
        rows, targets = tree.next_tokens(layout_.positions(group.rank()).byte())
        logprobs = logits[rows].log_softmax(-1)[torch.arange(len(rows)), tokens[targets]]
        paths = tree.gather_logprobs(logprobs, layout=layout_, group=group, grad=grad)
        total = loss(paths) / (world if grad == "sum" else 1)
        (grad_logits,) = torch.autograd.grad(total, logits)
        return total.detach(), grad_logits

    losses, grads = zip(*run_ranks(world, on_rank), strict=True)
    leaf = whole.clone().requires_grad_()
    paths = [tree.path(node) for node in tree.leaves]
    expected = loss([leaf[p[:-1]].log_softmax(-1).gather(1, tokens[p[1:], None])[:, 0] for p in paths])
    expected.backward()
    torch.testing.assert_close(torch.stack(losses) * (world if grad == "sum" else 1), expected.detach().expand(world))
    torch.testing.assert_close(layout_.unshard(grads, 0), leaf.grad)


def test_wrong_parts_and_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="parts has 1 tensors: it must have 5, one per node"):
        PATHS.pack([torch.zeros(5)])
    with pytest.raises(ValueError, match=r"parts\[1\] has 4 tokens along dim 0, but the node has 3"):
        PATHS.pack([torch.zeros(n) for n in (5, 4, 9, 2, 4)])
    with pytest.raises(ValueError, match="parts is None: it must be"):
        PATHS.pack(None)  # type: ignore[arg-type]
    parts = [torch.zeros(n) for n in (5, 3, 9, 2, 4)]
    for other in (torch.zeros(9, 2), torch.zeros(9).long()):
        with pytest.raises(ValueError, match=r"parts\[2\] is .*: it must be like parts\[0\]"):
            PATHS.pack([*parts[:2], other, *parts[3:]])
    with pytest.raises(ValueError, match="logprobs has 3 tokens along dim 0, but next_tokens gives rank 0 22 targets"):
        PATHS.gather_logprobs(torch.zeros(3), layout=None, grad="sum")


def test_ranks_with_different_trees_are_refused_before_log_probabilities_are_gathered() -> None:
    def on_rank(group: Any) -> None:
        tree = prefix_tree([2, 1, 1, 4], [[-1, 0, 0, -1], [-1, 0, 1, -1]][group.rank()])
        rows, _ = tree.next_tokens(Layout.contiguous(8, 2).positions(group.rank()))
        with pytest.raises(ValueError, match="tree differs between ranks"):
            tree.gather_logprobs(torch.zeros(len(rows)), layout="contiguous", group=group, grad="slice")

    run_ranks(2, on_rank)


@pytest.mark.parametrize("path", [
    "0", torch.zeros(4), torch.zeros(3).long(), torch.zeros(4).long(), torch.tensor([0, 2, 3, 4]),
    torch.tensor([0, 1, 2, 4]),
])  # fmt: skip
def test_wrong_path_positions_are_refused(path: Any) -> None:
    at = torch.arange(4)
    assert Intervals([(at * 0, at + 1)], at.int()).path_positions is not None
    with pytest.raises(ValueError, match=r"^path_positions (is|has)"):
        Intervals([(at * 0, at + 1)], path)


def test_masks_of_too_many_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths has 1099511627777 tokens: .* 2\^28"):
        prefix_tree([1 << 40, 1], [-1, 0])
    with pytest.raises(ValueError, match=r"positions is 1099511627776: .* 2\^28"):
        slices([], 1 << 40)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 9223372036854775808: it must be an integer from"):
        prefix_tree([1, 1 << 63], [-1, 0])


@pytest.mark.parametrize("call", [
    lambda tree: tree.next_tokens(torch.tensor([-1])),
    lambda tree: tree.next_tokens(torch.tensor([4])),
    lambda tree: tree.next_tokens(torch.tensor([3, 0, 3])),
    lambda tree: tree.next_tokens(torch.tensor([[0, 1]])),
    lambda tree: tree.next_tokens([0, 1]),
    lambda tree: tree.next_tokens(torch.tensor([False, True])),
    lambda tree: tree.path(3),
    lambda tree: tree.path("1"),
    lambda tree: tree.gather_logprobs([0.0], layout=None, grad="slice"),
])  # fmt: skip
def test_bad_arguments_of_a_tree_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"^(positions has|positions is|leaf is|logprobs is)"):
        call(prefix_tree([2, 1, 1], [-1, 0, 0]))
