"""Ulysses x ring: meshes of virtual ranks against the reference with every mask and score, and their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention, roll, shard, unshard
from ringattn.comm import Limits, LocalGroup, group_rank_size, open_transport
from ringattn.comm.transports.local import LocalTransport
from ringattn.comm.world import DEFAULT_TIMEOUT, LocalMesh
from ringattn.conformance.cases import pairwise_cases
from ringattn.ring import prepare
from ringattn.ring.mesh import resolve_mesh_rings, ring_layout, ulysses_layout
from ringattn.ring.ring import default_ring

from ..support.mask_cases import RingCase, check_case
from ..support.nightly import rest_nightly
from ..support.rank_processes import call_outcome
from ..support.ring_cases import LAYOUTS, inputs, run_ranks
from ..support.transport_cases import HANGS
from .test_ring_masks import FEATURES, MASKS, SCORES, TOKENS, feature_call, layout_for

pytestmark = pytest.mark.usefixtures("one_core")

HEADS = 12
KV_HEADS = {(2, 2): 2, (1, 4): 2, (4, 1): 3, (2, 3): 3}
"""Key heads by mesh: one per rank, one per two ranks, all on each rank, one per rank."""
MESHES = [*KV_HEADS]
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
SOON = 1.0  # seconds; a deadline that is meant to pass
SINK = torch.linspace(-2, 3, HEADS).index_fill(0, torch.tensor([1]), -torch.inf)


def case_of(mesh: tuple[int, int], call: dict[str, Any], layout: Layout, **more: Any) -> RingCase:
    tensors = {name: more.pop(name) for name in ("dims", "dtype") if name in more}
    whole = inputs(TOKENS, (HEADS, more.pop("kv_heads", KV_HEADS[mesh])), **tensors)
    if "alibi_slopes" in call:
        by_row = call["alibi_slopes"].dim() == 2
        call = call | {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)]) if by_row else SLOPES}
    if "first_head" in call:
        call = call | {"first_head": 2**31 - HEADS}
    return RingCase(layout, whole, call | {"backend": "aten"}, mesh=mesh, **more)


ON_MESHES = pairwise_cases(FEATURES, MESHES, LAYOUTS)
EACH_ONCE = [row for row in ON_MESHES if MESHES.index(row[1]) == FEATURES.index(row[0]) % len(MESHES)]


@pytest.mark.parametrize(("name", "mesh", "layout"), rest_nightly(ON_MESHES, *EACH_ONCE))
def test_each_feature_is_exact_over_a_mesh(name: str, mesh: tuple[int, int], layout: str) -> None:
    call = feature_call(name, 4)
    sink = SINK if layout in ("zigzag", "uneven") else None
    check_case(case_of(mesh, call, layout_for(layout, mesh[0] * mesh[1], call), sink=sink))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 12])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)])
def test_key_heads_that_do_not_divide_among_ranks(mesh: tuple[int, int], kv_heads: int) -> None:
    check_case(case_of(mesh, MASKS["causal documents"], Layout.zigzag(TOKENS, 4), kv_heads=kv_heads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mesh", MESHES)
def test_dtypes_and_different_head_dims(mesh: tuple[int, int], dtype: torch.dtype) -> None:
    layout = Layout.striped(TOKENS, mesh[0] * mesh[1])
    check_case(case_of(mesh, SCORES["all scores"], layout, sink=SINK, dtype=dtype, dims=(8, 24), strides="packed"))


@pytest.mark.parametrize("through_lse", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_keys_with_another_layout(mesh: tuple[int, int], through_lse: bool) -> None:
    """Some ranks have no queries, some no keys, and in a longer ring some places have neither."""
    empty: list[list[tuple[int, ...]]] = [[]] * (mesh[0] * mesh[1] - 3)
    queries = Layout([*empty, [(40, 7)], [], [(47, 6), (55, 5)]])
    keys = Layout([[(0, 20, 2)], [(1, 10, 2)], [(40, 20)], *empty])
    call = MASKS["padding" if through_lse else "prefix and window"]
    check_case(case_of(mesh, call, queries, kv_layout=keys, through_lse=through_lse, sink=SINK))


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), None])
def test_an_empty_batch(mesh: tuple[int, int] | None, backend: str) -> None:
    """Empty tensors and their gradients have arbitrary strides."""

    def on_rank(group: LocalGroup) -> list[torch.Size]:
        ranks = group.size()
        leaves = [torch.randn(0, TOKENS // ranks, 4, 8, requires_grad=True) for _ in range(3)]
        out, lse = ring_attention(
            *leaves, group=group if mesh is None else group.mesh(*mesh), layout="zigzag", return_lse=True,
            backend=backend, causal=True,
        )  # fmt: skip
        assert len(out) == len(lse) == 0
        grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
        return [x.shape for x in grads] + [x.shape for x in leaves]

    for shapes in run_ranks(2 if mesh is None else mesh[0] * mesh[1], on_rank):
        assert shapes[:3] == shapes[3:]


def test_boundaries_as_iterators() -> None:
    def on_rank(group: LocalGroup) -> bool:
        leaves, mesh, documents = qkv(group), group.mesh(2, 2), [0, 5, 24]
        given = {"cu_seqlens": iter(documents), "seqused_k": iter([17])}
        once = attend(mesh, *leaves, **given)
        return torch.equal(once, attend(mesh, *leaves, cu_seqlens=documents, seqused_k=[17]))

    assert all(run_ranks(4, on_rank))


@pytest.mark.parametrize("grads", ["q", "kv", "s"])
def test_gradients_of_some_inputs(grads: str) -> None:
    check_case(case_of((2, 2), MASKS["causal window"], Layout.zigzag(TOKENS, 4), sink=SINK, grads=grads))


@pytest.mark.parametrize("make", [*LAYOUTS.values()])
@pytest.mark.parametrize("ulysses", [1, 2, 3, 6])
@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 29, 48])
def test_layouts_of_joined_ranks(make: Any, ulysses: int, tokens: int) -> None:
    layout = make(tokens + 15, 6)  # the uneven layout has three tokens on each of the other ranks
    whole = ring_layout(layout, ulysses)
    for place in range(6 // ulysses):
        ranks = range(place * ulysses, (place + 1) * ulysses)
        held = torch.cat([layout.positions(rank) for rank in ranks]).sort().values
        assert whole.positions(place).equal(held)
        assert whole.spans(place) == Layout.from_positions([held]).spans(0)
        for u, rank in enumerate(ranks):
            assert held[ulysses_layout(layout, ulysses, place).positions(u)].equal(layout.positions(rank))


def qkv(group: LocalGroup, heads: int = 4, kv_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group.rank())
    return [torch.randn(1, 6, n, 8, generator=generator).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def attend(mesh: LocalMesh, *tensors: Tensor, **call: Any) -> Tensor:
    out = ring_attention(*tensors, group=mesh, layout="zigzag", **call)
    assert isinstance(out, Tensor)
    return out


def test_one_rank_draws_the_seed() -> None:
    """Virtual ranks share torch's generator, so a second draw could get the first draw's number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        seed, state = int(torch.randint(2**63 - 1, (), dtype=torch.int64)), torch.get_rng_state()
        for shape in ((3, 2), (1, 6), (6, 1)):
            torch.manual_seed(5)
            assert run_ranks(6, partial(drawn, shape)) == [seed] * 6
            assert torch.equal(torch.get_rng_state(), state)


def drawn(shape: tuple[int, int], group: LocalGroup) -> int:
    mesh = group.mesh(*shape)
    rings = resolve_mesh_rings((mesh.ring, mesh.ulysses), torch.device("cpu"))
    with rings._call_guard(torch.device("cpu")):
        rings._agree({"call": "a seed"}, torch.device("cpu"))
        seed: int = rings._draw_seed()
        return seed


def test_a_mesh_uses_the_ring_it_is_given() -> None:
    def on_rank(group: LocalGroup) -> bool:
        leaves, mesh = qkv(group), group.mesh(2, 2)
        with Ring(mesh.ring, chunks=2, slots=2) as ring:
            out = attend(mesh, *leaves, ring=ring)
            assert ring.telemetry()
        for wrong in (Ring(mesh.ulysses), Ring(group)):
            with pytest.raises(ValueError, match="ring has a different group from the mesh"):
                attend(mesh, *leaves, ring=wrong)
        with Ring(mesh.ring, chunks=3) as ring:  # more than this rank's two key heads
            torch.testing.assert_close(attend(mesh, *leaves, ring=ring), out)
        return torch.equal(out, attend(mesh, *leaves))

    assert all(run_ranks(4, on_rank))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message"),
    [
        (6, 6, r"4 ranks in the Ulysses dimension, .* 6 heads of q and 6 of k .* can have 1, 2, 3, 6 ranks\.$"),
        (12, 3, r"12 heads of q and 3 of k .* can have 1, 3, 6, 12 ranks\.$"),
        (4, 8, "k has 8 heads and q has 4"),
    ],
)
def test_head_numbers_that_do_not_divide_are_refused(heads: int, kv_heads: int, message: str) -> None:
    def on_rank(group: LocalGroup) -> None:
        mesh = group.mesh(1, 4)
        with pytest.raises(ValueError, match=message):
            attend(mesh, *qkv(group, heads, kv_heads))
        attend(mesh, *qkv(group))

    run_ranks(4, on_rank)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learnable_sink": torch.zeros(2)}, r"learnable_sink has shape \[2\] on cpu: it must have shape \[4\]"),
        ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes"),
        ({"cu_seqlens": [0, 12]}, "cu_seqlens ends at 12: it must end at 36"),
        ({"return_lse": 2}, "return_lse is 2"),
        ({"first_head": 2**31 - 3}, f"first_head is {2**31 - 3}: with 4 heads of q .* between 0 and {2**31 - 4}, "),
        ({"kv_layout": Layout.contiguous(36, 2)}, "kv_layout is made for 2 ranks, but the group has 6"),
    ],
)
def test_bad_arguments_of_one_rank_are_refused_on_all_ranks(wrong: dict[str, Any], message: str) -> None:
    def on_rank(group: LocalGroup) -> None:
        mesh = group.mesh(3, 2)
        with pytest.raises(ValueError, match=message):
            attend(mesh, *qkv(group, kv_heads=2), **(wrong if group.rank() == 3 else {}))
        attend(mesh, *qkv(group, kv_heads=2))

    run_ranks(6, on_rank)


@pytest.mark.parametrize("field", ["causal", "return_lse", "dropout_seed", "gradient"])
def test_differing_arguments_are_refused_on_the_whole_mesh(field: str) -> None:
    """The error names ranks in rank 3's row, and that row as refusing in other rows."""

    def on_rank(group: LocalGroup) -> None:
        call: dict[str, Any] = {"causal": False, "return_lse": False, "dropout_seed": 5, "dropout_p": 0.5}
        call["learnable_sink"], leaves = torch.zeros(4).requires_grad_(), qkv(group)
        if group.rank() == 3 and field == "gradient":
            leaves = [x.detach() for x in leaves]
        elif group.rank() == 3:
            call[field] = 6 if field == "dropout_seed" else True
        with pytest.raises(ValueError, match=f"{field} differs between ranks"):
            attend(group.mesh(3, 2), *leaves, **call)

    run_ranks(6, on_rank)


def test_a_refusal_in_the_ring_cancels_the_exchange() -> None:
    """Otherwise ranks whose exchange had agreed would run it with the next call. Errors number ranks in the mesh."""
    cpu = torch.device("cpu")

    def on_rank(group: LocalGroup) -> object:
        mesh = group.mesh(2, 2)
        rings = resolve_mesh_rings((mesh.ring, mesh.ulysses), cpu)
        watch, number = rings.ulysses._get_watch(cpu), list[object]()
        told = (
            "causal differs" if group.rank() > 1 else f"rank {group.rank() + 2} refused this call: ValueError: causal"
        )
        with pytest.raises(ValueError, match=rf"^{told}.* \(rank 2: False, rank 3: True\)"), rings._call_guard(cpu):
            try:
                rings._agree({"causal": group.rank() == 3}, cpu)
            finally:
                number.append(watch._agreed_call)
        return number

    assert run_ranks(4, on_rank) == [[None]] * 4


def test_a_failing_rank_ends_all_rows_and_columns() -> None:
    def on_rank(group: LocalGroup) -> None:
        leaves, mesh = qkv(group), group.mesh(2, 2)
        attend(mesh, *leaves)
        if group.rank() == 2:
            raise LookupError("right")
        attend(mesh, *leaves)

    with LocalWorld(4, timeout=60) as world:
        with pytest.raises(LookupError, match="right"):
            world.run(on_rank)
        world.run(lambda group: attend(group.mesh(2, 2), *qkv(group)))


def test_meshes_of_a_local_world() -> None:
    with LocalWorld(4) as world:
        for wrong in ((3, 2), (4, 4), (0, 4), (2, "2")):
            with pytest.raises(ValueError, match=r"ring is|ulysses is"):
                world.run(lambda group, wrong=wrong: group.mesh(*wrong))  # type: ignore[misc]
        assert all(world.run(lambda group: group.mesh(2, 2) is group.mesh(2, 2)))
        assert world.run(lambda group: group_rank_size(group.mesh(2, 2))) == [(rank, 4) for rank in range(4)]
        with pytest.raises(ValueError, match=r"group is a .*LocalMesh"):
            world.run(lambda group: Ring(group.mesh(2, 2)))


def test_adopted_kernels_are_chosen_by_the_layouts_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring computes the tokens of joined ranks, which may have more spans than those of one rank, or fewer."""
    seen: list[tuple[Layout, ...]] = []
    monkeypatch.setattr(prepare, "find_adopted_kernel", lambda q, k, v, args, layouts, *_, **__: seen.append(layouts))
    run_ranks(4, lambda group: attend(group.mesh(2, 2), *qkv(group)))
    assert seen == [(ring_layout(Layout.zigzag(24, 4), 2),) * 2] * 4


def test_two_meshes_over_the_same_ranks() -> None:
    """The ring of one mesh and the exchange of the other use the same ranks, but not the same messages."""

    def on_rank(group: LocalGroup) -> None:
        for mesh in (group.mesh(3, 1), group.mesh(1, 3)):
            attend(mesh, *qkv(group, heads=3, kv_heads=3))

    with LocalWorld(3) as world:
        world.run(on_rank)
        begun = time.monotonic()
    assert time.monotonic() - begun < DEFAULT_TIMEOUT / 10


def test_columns_of_a_mesh_may_make_calls_of_their_own() -> None:
    """A backward names its forward by the number that the forward had in the same ring."""

    def on_rank(group: LocalGroup) -> None:
        leaves, mesh = qkv(group), group.mesh(2, 2)
        call: dict[str, Any] = {"layout": "contiguous", "group": mesh}
        if group.rank() % 2:
            shard(torch.ones(1, 4), layout="contiguous", group=mesh.ring)
        moved = roll(leaves[0], 1, **call), unshard(leaves[0], grad="sum", **call)
        for result in (*moved, attend(mesh, *leaves)):
            result.sum().backward()  # type: ignore[no-untyped-call]

    run_ranks(4, on_rank)


def test_the_exchange_takes_the_transport_and_limits_of_the_ring() -> None:
    def on_rank(group: LocalGroup) -> None:
        opened: list[Any] = []

        def open_recorded(group: Any, device: torch.device, control: Any, limits: Limits, **_: Any) -> Any:
            opened.append((group, limits))
            return open_transport(group, transport="local", device=device, control=control)

        mesh, limits = group.mesh(2, 2), Limits(ctas=4)
        with Ring(mesh.ring, transport=open_recorded, limits=limits) as ring:
            attend(mesh, *qkv(group), ring=ring)
        assert sorted(opened, key=lambda entry: entry[0] is mesh.ulysses) == [
            (mesh.ring, limits),
            (mesh.ulysses, limits),
        ]

    run_ranks(4, on_rank)


def test_the_exchange_takes_the_deadline_of_the_ring() -> None:
    """Without a ring argument, the last open ring with a deadline counts."""

    def on_rank(group: LocalGroup) -> None:
        mesh, cpu = group.mesh(3, 2), torch.device("cpu")
        lines = mesh.ring, mesh.ulysses
        first, second = Ring(mesh.ring, deadline=50.0), Ring(mesh.ring, deadline=70.0)
        assert first._get_control().names == [0, 1, 2]  # not part of a mesh yet
        for ring, others in (
            (first, resolve_mesh_rings(lines, cpu, first)),
            (second, resolve_mesh_rings(lines, cpu, second)),
        ):
            assert others.ring is ring and others.ulysses.deadline == ring.deadline
            assert others == resolve_mesh_rings(lines, cpu, ring)
        assert [ring.deadline for ring in resolve_mesh_rings(lines, cpu)] == [70.0, 70.0]
        column, row = group.rank() % 2, group.rank() // 2
        names = [ring._get_control().names for ring in resolve_mesh_rings(lines, cpu, first)]
        assert names == [[column, column + 2, column + 4], [2 * row, 2 * row + 1]]
        assert default_ring(mesh.ring, cpu).deadline == 70.0 and default_ring(mesh.ulysses, cpu).deadline is None
        leaves = qkv(group)
        out = attend(mesh, *leaves, ring=second)
        exchange = resolve_mesh_rings(lines, cpu, second).ulysses
        assert {*second._rings.watches} == {second._watch, exchange._watch}  # they fail together
        first.close()  # not the ring with the latest deadline
        assert default_ring(mesh.ring, cpu).deadline == 70.0
        second.close()
        assert [ring.deadline for ring in resolve_mesh_rings(lines, cpu)] == [None, None]
        assert exchange._closed
        assert out.equal(attend(mesh, *leaves))

    run_ranks(6, on_rank)


@pytest.mark.parametrize("moment", ["a new call", "a known call", "shard", "unshard"])
def test_a_missing_virtual_rank_ends_the_others_by_the_deadline(moment: str) -> None:
    """The ring's deadline is far below the world's."""
    ended = threading.Barrier(4)

    def on_rank(group: LocalGroup) -> str:
        leaves, mesh = qkv(group), group.mesh(2, 2)
        lines = mesh.ring, mesh.ulysses
        ring = Ring(mesh.ring, deadline=HANGS)
        calls: dict[str, Callable[[], object]] = {
            "a new call": lambda: attend(mesh, *leaves, ring=ring, causal=True),
            "a known call": lambda: attend(mesh, *leaves, ring=ring),
            "shard": lambda: shard(torch.ones(1, 8), layout="contiguous", group=mesh),
            "unshard": lambda: unshard(leaves[0], layout="contiguous", group=mesh, grad="slice"),
        }
        for name in ("a known call", "shard", "unshard", "a known call"):
            calls[name]()
        for opened in (
            *resolve_mesh_rings(lines, leaves[0].device, ring),
            *resolve_mesh_rings(lines, leaves[0].device),
        ):
            shorten(opened)
        ended.wait(HANGS)
        end = "" if group.rank() == 1 else call_outcome(calls[moment])[0]
        ended.wait(HANGS)
        return end

    assert run_ranks(4, on_rank) == ["TransportError", "", "TransportError", "TransportError"]


def shorten(ring: Ring) -> None:
    """Lower the deadline once compilation and connection are done."""
    assert ring.deadline == HANGS and ring._control is not None
    ring._control.patience = SOON
    for transport in ring._opened:
        assert isinstance(transport, LocalTransport) and transport._patience == HANGS
        transport._patience = SOON
