"""``relayout``, ``roll`` and ``halo``: equal to index arithmetic on the whole, with the fewest bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from random import Random
from time import process_time
from timeit import repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout, LocalWorld, halo, relayout, roll
from ringattn.comm import LocalGroup, LocalTransport, TransportError
from ringattn.ring.schedule.exchange import Halo, Relayout, Roll, plan_exchanges
from ringattn.ring.schedule.layout import resolve_documents

from ..properties.fuzz_draw import BASE, draw_move
from ..properties.fuzz_ranks import mesh_of, move_case
from ..support.move_cases import MoveCase
from ..support.rank_processes import group_results
from ..support.ring_cases import run_ranks


def drawn(seed: int, world: int) -> tuple[MoveCase, Any]:
    """Return a drawn case and the sizes of its mesh, or None for one dimension."""
    call = BASE | draw_move(Random(seed), "threads", world, {})
    return move_case(call, world), call["mesh"]


@pytest.mark.parametrize("world", range(1, 7))
def test_drawn_calls_equal_index_arithmetic(world: int) -> None:
    cases = [drawn(seed, world) for seed in range(100 * world, 100 * world + 30)]

    def check(group: LocalGroup) -> None:
        for case, mesh in cases:
            case.run(group.rank(), mesh_of(group, mesh))

    run_ranks(world, check)


def test_positions_may_be_far_apart() -> None:
    """Neither the gaps of a layout nor a mesh column's part of the positions need a table of all positions."""
    far = 1 << 40
    source, target = Layout([[(3, 2)], [(far, 2)]]), Layout([[(4, 1), (far + 1, 1)], [(3, 1), (far, 1)]])

    def check(group: LocalGroup) -> None:
        x, expected = (layout.positions(group.rank())[None] for layout in (source, target))
        assert relayout(x, source, target, group=group).equal(expected)

    run_ranks(2, check)
    case = MoveCase("halo", [1, 1], Layout.contiguous(60, 6))
    run_ranks(6, lambda group: case.run(group.rank(), group.mesh(1, 6)))


def test_a_halo_may_be_as_long_as_the_sequence() -> None:
    tokens = (1 << 16) + 1
    (piece,) = halo(torch.ones(1, tokens), tokens, 0, layout=None)
    assert piece.shape == (1, 2 * tokens) and piece.sum() == tokens


def cases(world: int) -> dict[str, MoveCase]:
    uneven, other = (Layout.balanced(19, [1, 0, 4, 2][:world], causal=causal) for causal in (False, True))
    zigzag = Layout.zigzag(19, world, cu_seqlens=[0, 5, 19])
    return {
        "to contiguous": MoveCase("relayout", [Layout.contiguous(19, world)], zigzag),
        "uneven": MoveCase("relayout", [other], uneven),
        "roll": MoveCase("roll", [-1], zigzag, cu_seqlens=[0, 7, 7, 19]),
        "halo of striped tokens": MoveCase("halo", [3, 1], Layout.striped(19, world), cu_seqlens=[0, 7, 19]),
        "halo past the sequence": MoveCase("halo", [2, 40], uneven),
    }


@pytest.mark.parametrize("name", cases(4))
def test_each_token_is_sent_once_to_each_rank_that_lacks_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward returns as many bytes as the forward sent, in at most one message per pair of ranks."""
    case, post = cases(4)[name], LocalTransport.post
    sent: list[tuple[tuple[int, int], int]] = []

    def record(transport: LocalTransport, **messages: Any) -> Any:
        sent.extend(((transport.rank, message.peer), message.tensor.nbytes) for message in messages["sends"])
        return post(transport, **messages)

    with LocalWorld(4) as world:
        world.run(lambda group: case.run(group.rank(), group))  # opens the transports and warms them up
        monkeypatch.setattr(LocalTransport, "post", record)
        world.run(lambda group: case.run(group.rank(), group))
    row = case.tokens(1, 0).nbytes
    expected = [(pair, rows * row) for pair, rows in case.fewest_rows().items()]
    expected += [((destination, source), nbytes) for (source, destination), nbytes in expected]
    assert Counter(sent) == Counter(expected)


def moved(rank: int) -> None:
    for group in (None, init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))):
        for case in cases(2).values():
            case.run(rank, group)


def test_calls_over_processes_and_a_mesh() -> None:
    group_results(2, moved)


def test_bf16_gradients_of_overlapping_pieces_are_summed_in_fp32_by_rank() -> None:
    """Each rank sums its pieces in fp32 and rounds; the owner sums the ranks' results likewise, its own first."""
    layout, left = Layout.striped(12, 3), 9
    generator = torch.Generator().manual_seed(0)
    losses = [torch.randn(1, 4 * (left + 1), 2, generator=generator).bfloat16() for _ in range(3)]

    def call(group: LocalGroup) -> Tensor:
        x = torch.zeros(1, 4, 2, dtype=torch.bfloat16, requires_grad=True)
        pieces = halo(x, left, 0, layout=layout, group=group)
        return torch.autograd.grad(torch.cat(pieces, 1), x, losses[group.rank()])[0]

    sums = []
    for rank, loss in enumerate(losses):
        total = torch.zeros(1, 12 + left, 2)
        for piece, position in zip(loss.float().split(left + 1, 1), layout.positions(rank).tolist(), strict=True):
            total[:, position : position + left + 1] += piece
        sums.append(total[:, left:].bfloat16().float())
    for rank, gradient in enumerate(run_ranks(3, call)):
        others = [sums[other] for other in range(3) if other != rank]
        expected = sum(others, sums[rank]).bfloat16()[:, layout.positions(rank)]
        assert gradient.equal(expected)


def test_gradients_of_gradients() -> None:
    """The calls are linear, so the second derivative of a cubic loss checks both directions."""

    def second(x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(move(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad((first * x.detach()).sum(), x)[0]

    def call(group: LocalGroup) -> None:
        whole = torch.arange(8.0).view(1, 8)
        x = whole[:, 4 * group.rank() : 4 * group.rank() + 4].clone().requires_grad_()
        got = second(x, lambda x: roll(x, 3, layout="contiguous", group=group))
        assert got.equal(6 * x * x)

    run_ranks(2, call)


def test_inputs_that_need_a_gradient_do_not_matter_without_autograd() -> None:
    def call(group: LocalGroup) -> None:
        x = torch.arange(12.0).view(2, 6).requires_grad_(group.rank() == 1)
        with torch.no_grad():
            assert relayout(x, "zigzag", "zigzag", group=group).equal(x)

    run_ranks(2, call)


def halves(second: int) -> Layout:
    """Return a layout of 6 tokens from 0 and 6 tokens from ``second``."""
    return Layout([[(0, 6)], [(second, 6)]])


def test_quantized_tensors_are_refused() -> None:
    x = torch.zeros(1, 6)
    with pytest.warns():  # torch warns that quantization moves to another package
        quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match="x is a quantized tensor: it must be"):
        relayout(quantized, None, None)


def test_each_piece_of_a_halo_can_be_modified_in_place() -> None:
    x = torch.ones(1, 6, requires_grad=True)
    first, second = halo(x, 1, 0, layout=None, cu_seqlens=[0, 3, 6])
    first.mul_(2)
    second.mul_(3)
    (first.sum() + second.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2, 2, 2, 3, 3, 3]]


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (relayout, {"source": "zigzag", "target": Layout.zigzag(12, 3)}, "^target is made for 3 ranks, but the group has"),
    (relayout, {"source": Layout.zigzag(9, 3), "target": "zigzag"}, "^source is made for 3 ranks"),
    (relayout, {"source": "zigzag", "target": Layout.zigzag(10, 2)}, "^target is made for 10 tokens, but there are"),
    (relayout, {"source": "zigzag", "target": None}, "^target is None with 2 ranks"),
    (relayout, {"source": "zigzag", "target": halves(7)}, "^target does not hold position 6, which source holds"),
    (relayout, {"source": halves(9), "target": halves(8)}, "^target holds position 8, which source does not"),
    (relayout, {"source": Layout.uneven([5, 7]), "target": "zigzag"}, "x has 6 tokens along dim 1, but source has"),
    (relayout, {"source": "zigzag", "target": "zigzag", "dim": 3}, "^dim is 3, but x has 3 dimensions$"),
    (roll, {"shift": 1.5, "layout": "zigzag"}, "^shift is 1.5: it must be"),
    (roll, {"shift": 1, "layout": halves(7)}, "^the layout holds 12 of the positions 0 to 12"),
    (roll, {"shift": 1, "layout": "zigzag", "cu_seqlens": [0, 11]}, "^cu_seqlens ends at 11: it must end at 12"),
    (halo, {"left": 1, "right": 1, "layout": halves(7)}, "^the layout holds 12 of the positions 0 to 12"),
    (halo, {"left": -1, "right": 0, "layout": "zigzag"}, r"^left is -1: it must be an integer from 0 to 2\^16"),
    (halo, {"left": 0, "right": 65537, "layout": "zigzag"}, r"^right is 65537: it must be an integer from 0 to 2\^16"),
    (halo, {"left": 1 << 31, "right": 0, "layout": "zigzag"}, "^left is 2147483648: it must be"),
    (roll, {"shift": 1 << 62, "layout": "zigzag"}, r"^shift is .* from -\(2\^62 - 1\) to 2\^62 - 1$"),
    (halo, {"left": 0, "right": None, "layout": "zigzag"}, "^right is None: it must be"),
    (halo, {"left": 0, "right": 0, "layout": "rows"}, "^layout is 'rows'"),
]


@pytest.mark.parametrize(("call", "wrong", "message"), WRONG)
@pytest.mark.parametrize("mesh", [None, (1, 2)])
def test_one_rank_s_mistake_is_refused_on_both_before_anything_is_sent(
    call: Callable[..., Any], wrong: dict[str, Any], message: str, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = {"layout": "zigzag", "source": "zigzag", "target": "zigzag", "shift": 1, "left": 1, "right": 1}
    fit = {name: value for name, value in fit.items() if name in wrong}
    monkeypatch.setattr(LocalTransport, "post", None)

    def refused(group: LocalGroup) -> None:
        x = torch.zeros(2, 6, 3)
        with pytest.raises(ValueError) as raised:
            call(x, **(wrong if group.rank() else fit), group=mesh_of(group, mesh))
        text = str(raised.value).removeprefix("rank 1 refused this call: ValueError: ")
        assert re.search(message, text)

    run_ranks(2, refused)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("call", "arguments", "other", "name"),
    [
        (roll, {"shift": 1, "layout": "zigzag"}, {"shift": 2}, "shift"),
        (roll, {"shift": 1, "layout": "zigzag"}, {"layout": "striped"}, "layout"),
        (roll, {"shift": 1, "layout": "zigzag"}, {"cu_seqlens": [0, 5, 12]}, "cu_seqlens"),
        (relayout, {"source": "zigzag", "target": "contiguous"}, {"target": "striped"}, "target"),
        (relayout, {"source": "zigzag", "target": "contiguous"}, {"source": "striped"}, "source"),
        (relayout, {"source": "zigzag", "target": "contiguous"}, {"dim": 0, "x": torch.zeros(6, 2)}, "shape"),
        (relayout, {"source": "zigzag", "target": "contiguous"}, {"x": torch.zeros(2, 7)}, "tokens"),
        (relayout, {"source": "zigzag", "target": "contiguous"}, {"x": torch.zeros(2, 6).half()}, "dtype"),
        (relayout, {"source": "zigzag", "target": "contiguous"}, {"x": torch.zeros(2, 6).requires_grad_()}, "gradient"),
        (halo, {"left": 1, "right": 1, "layout": "zigzag"}, {"left": 0}, "left"),
        (halo, {"left": 1, "right": 1, "layout": "zigzag"}, {"right": 0}, "right"),
    ],
)
def test_differing_arguments_are_refused_on_both_ranks(
    call: Callable[..., Any], arguments: dict[str, Any], other: dict[str, Any], name: str, known: bool
) -> None:
    def refused(group: LocalGroup) -> None:
        fit = {"x": torch.zeros(2, 6), **arguments, "group": group}
        for _ in range(3 * known):
            call(**fit)
        with pytest.raises((ValueError, TransportError), match=f"{name} differs between ranks \\(rank 0: "):
            call(**fit | (other if group.rank() else {}))
            for _ in range(50):  # a rank that waits for nobody gets the error at its next calls
                call(**fit)

    run_ranks(2, refused)


def test_plans_of_a_million_tokens_on_64_ranks_take_a_fraction_of_a_second() -> None:
    tokens, ranks = 1 << 20, 64
    cuts = [0, *sorted(Random(0).sample(range(1, tokens), 100)), tokens]
    documents, zigzag = resolve_documents(cuts, tokens), Layout.zigzag(tokens, ranks, cu_seqlens=cuts)
    for move in (Relayout(Layout.contiguous(tokens, ranks)), Roll(-1, documents), Halo(3, 0, documents)):
        plan = lambda: plan_exchanges.__wrapped__(zigzag, move, (ranks,), 17)  # noqa: E731, B023
        seconds = min(repeat(plan, timer=process_time, repeat=3, number=1))
        assert seconds < 0.5  # 0.04 to 0.07 s on a fast core; a loop over tokens takes seconds
