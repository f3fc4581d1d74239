"""Ring attention over virtual ranks against full attention: every layout, both backends, forward and backward."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention, single_rank, unshard
from ringattn.comm import Edge, Fence, LocalGroup, LocalTransport, Message, TransportError
from ringattn.comm.topology.topology import Topology
from ringattn.comm.transport import ring_edges
from ringattn.conformance.cases import pairwise_cases
from ringattn.kernels import attention
from ringattn.ring import ring as ring_module
from ringattn.ring.args import AttentionArgs
from ringattn.ring.buffers import PostKey, RingCall
from ringattn.ring.ops import call_forward_op
from ringattn.ring.ring import default_ring

from ..support.kernel_cases import tiles
from ..support.ring_cases import LAYOUTS, SPANS, check_ring, inputs, run_ranks, run_ring
from ..support.transport_cases import CallbackFence, wait_until

pytestmark = pytest.mark.usefixtures("one_core")

GRIDS = {
    "2x2": Topology.grid(2, 2),
    "2x4": Topology.grid(2, 4),
    "4x2": Topology.grid(4, 2),
    "3x2": Topology.grid(3, 2),
    "2x3": Topology.grid(2, 3),
    "any order": Topology(((3, 1), (0, 2))),
}


def shards(layout: Layout, whole: dict[str, Tensor], group: LocalGroup) -> list[Tensor]:
    """Return q, k and v of a rank."""
    return [layout.shard(whole[name], group.rank()) for name in "qkv"]


TRITON = {"causal": True, "backend": "triton"}
TWO_LAUNCHES = tiles(64, 32)  # of the forward: 64 rows have at most 256 columns of v each
TWO_LEVELS = {"chunks": 2, "direction": -1, "topology": GRIDS["any order"]}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("layout", "more", "call"),
    [
        (Layout.zigzag(40, 2), {}, TRITON),
        pytest.param(Layout.striped(41, 3), {}, TRITON | {"causal": False}, marks=pytest.mark.nightly),
        (Layout.uneven([3, 30, 0, 5]), {"heads": (3, 3), "batch": 1}, TRITON | {"ring": TWO_LEVELS}),
        pytest.param(
            Layout.uneven([3, 30, 0, 5]),
            {"heads": (2, 1), "batch": 1},
            TRITON | {"ring": TWO_LEVELS | {"chunks": 4}},
            marks=pytest.mark.nightly,
        ),
        (Layout.zigzag(40, 2), {"dtype": torch.float16}, TRITON),
        pytest.param(SPANS, {}, TRITON | {"ring": {"direction": -1}}, marks=pytest.mark.nightly),
        (SPANS, {}, {"causal": True, "backend": "aten"}),
        pytest.param(
            Layout.zigzag(40, 2),
            {"heads": (2, 1), "dims": (320, 512)},
            TRITON | {"config": TWO_LAUNCHES},
            marks=pytest.mark.nightly,
        ),
        pytest.param(Layout.striped(40, 2), {"dims": (512, 300)}, TRITON, marks=pytest.mark.nightly),
        (Layout.striped(40, 2), {"dims": (512, 512)}, {"causal": True, "backend": "aten"}),
        (Layout.contiguous(2, 4), {}, TRITON),  # fewer tokens than ranks
        (Layout.contiguous(2, 4), {}, {"causal": True, "backend": "aten"}),
    ],
)
def test_unusual_shapes_are_exact(layout: Layout, more: dict[str, Any], call: dict[str, Any]) -> None:
    check_ring(layout, inputs(layout.seqlen, **more), **call)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("grid", "name", "direction"), pairwise_cases(GRIDS, LAYOUTS, (1, -1)))
def test_two_level_rings_are_exact(grid: str, name: str, direction: int) -> None:
    """The second call on the ring depends on how the first leaves slots, fences and counters."""
    ring = {"topology": GRIDS[grid], "direction": direction}
    layout = LAYOUTS[name](67, GRIDS[grid].world)
    check_ring(layout, inputs(67), causal=name != "striped", backend="aten", ring=ring, calls=2)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("ring", "grid", "name"),
    pairwise_cases(
        [{"chunks": 2}, {"chunks": 3, "slots": 2}, {"prefetch": 0}, {"chunks": 2, "slots": 4}],
        [None, "2x2", "3x2"],
        ["zigzag", "uneven"],
    ),
)
def test_chunks_prefetch_and_slots_are_exact(ring: dict[str, int], grid: str | None, name: str) -> None:
    """Two chunks share three key heads unevenly."""
    topology = GRIDS[grid] if grid else Topology.flat(4)
    layout, whole = LAYOUTS[name](50, topology.world), inputs(50, heads=(6, 3))
    check_ring(layout, whole, causal=True, backend="aten", ring=ring | {"topology": topology}, calls=2)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("heads", "ring", "grid", "name"),
    pairwise_cases(
        [(4, 1), (4, 2)],
        [{"chunks": 4}, {"chunks": 3, "slots": 2}, {"chunks": 5, "prefetch": 0, "direction": -1}],
        [None, "2x2", "3x2"],
        LAYOUTS,
    ),
)
def test_more_chunks_than_key_heads_are_exact(
    heads: tuple[int, int], ring: dict[str, int], grid: str | None, name: str
) -> None:
    """The tokens of a shard are cut; some shards have fewer tokens than chunks."""
    topology = GRIDS[grid] if grid else Topology.flat(4)
    layout, whole = LAYOUTS[name](50, topology.world), inputs(50, heads=heads)
    check_ring(layout, whole, causal=name != "striped", backend="aten", ring=ring | {"topology": topology}, calls=2)


def test_calls_of_different_shapes_share_one_ring() -> None:
    """Slots are reused by other batch sizes, heads, head dims, dtypes and chunks; the largest call comes first."""
    layout = Layout.contiguous(48, 3)
    calls = [
        inputs(48, (4, 4)), inputs(48, (4, 4), batch=1), inputs(48, (4, 2)), inputs(48, (4, 4), (8, 16)),
        inputs(48, (4, 4), (16, 8)), inputs(48, (4, 4), dtype=torch.bfloat16),
    ]  # fmt: skip

    def on_rank(group: LocalGroup) -> list[torch.Tensor]:
        outs, slots = list[Tensor](), None
        with Ring(group) as ring:
            for number, whole in enumerate((*calls, *calls, *calls)):
                ring.chunks = 1 if len(calls) <= number < 2 * len(calls) else 2
                outs.append(ring_attention(*shards(layout, whole, group), layout=layout, ring=ring))
                slots = slots if number else ring._kv
                assert ring._kv is slots  # the first call needs the most memory
        return outs

    results = [layout.unshard(parts) for parts in zip(*run_ranks(3, on_rank), strict=True)]
    alone = [run_ring(layout, whole, ring={"chunks": 2}).out for whole in calls]
    count = len(calls)
    assert all(map(torch.equal, results[:count], alone)) and all(map(torch.equal, results[2 * count :], alone))
    torch.testing.assert_close(results[count : 2 * count], alone)  # other chunks round differently


@pytest.mark.parametrize("topology", [None, GRIDS["2x2"]], ids=["flat", "2x2"])
def test_prefetch_and_slots_do_not_change_results(topology: Topology | None) -> None:
    layout, whole = Layout.zigzag(32, 4), inputs(32)
    changes = [{"prefetch": 0}, {"prefetch": 1}, {"slots": 2}, {"slots": 4}]
    first, *others = (
        run_ring(layout, whole, causal=True, backend="aten", ring=ring | {"topology": topology})
        for ring in ({}, *changes)
    )
    for change, other in zip(changes, others, strict=True):
        assert all(map(torch.equal, first, other)), change


def test_backwards_in_any_order_after_several_forwards() -> None:
    layout, wholes = Layout.zigzag(32, 2), [inputs(32), inputs(32)]

    def gradients(group: LocalGroup) -> list[Any]:
        leaves = [[x.requires_grad_() for x in shards(layout, whole, group)] for whole in wholes]
        outs: list[Any] = [ring_attention(*qkv, layout=layout, group=group, causal=True) for qkv in leaves]
        for out, whole in [*zip(outs, wholes, strict=True)][::-1]:
            out.backward(layout.shard(whole["dout"], group.rank()))
        return [x.grad for qkv in leaves for x in qkv]

    grads = [layout.unshard(parts) for parts in zip(*run_ranks(2, gradients), strict=True)]
    alone = [run_ring(layout, {n: x for n, x in whole.items() if n != "dlse"}, causal=True) for whole in wholes]
    assert all(map(torch.equal, grads, [grad for single in alone for grad in (single.dq, single.dk, single.dv)]))


def test_nan_in_k_and_inf_in_v_reach_only_the_rows_that_see_them() -> None:
    layout, whole = Layout.zigzag(256, 2), inputs(256)
    whole["k"][:, 100] = torch.nan
    out = run_ring(layout, whole, causal=True, backend="aten").out
    assert out[:, 100:].isnan().all() and not out[:, :100].isnan().any()
    layout, whole = Layout.contiguous(1024, 2), inputs(1024, heads=(1, 1))
    whole["v"][:, 1000] = torch.inf
    out = run_ring(layout, whole, causal=True, backend="aten").out
    assert not out[:, 1000:].isfinite().any()
    assert out[:, :512].isfinite().all()  # in another shard, hence in another tile


@pytest.mark.nightly
def test_a_world_releases_its_memory() -> None:
    layout, whole, rings = Layout.zigzag(16, 2), inputs(16), []

    def rank_ring(group: LocalGroup) -> None:
        ring_attention(*shards(layout, whole, group), layout=layout, group=group)
        rings.append(weakref.ref(default_ring(group, torch.device("cpu"))))

    with LocalWorld(2) as world:
        world.run(rank_ring)
        assert all(ring() is not None for ring in rings)
    del world
    wait_until(lambda: gc.collect() >= 0 and [ring() for ring in rings] == [None, None])


@pytest.mark.parametrize("exchanges", [False, True])
def test_every_edge_is_warmed_up_before_it_is_used(exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A two-sided window skips a rank, and an exchange uses every edge."""
    layout, whole = Layout.contiguous(32, 4), inputs(32)
    warm, used, late = Counter[Edge](), set[Edge](), set[Edge]()
    warm_up, post = LocalTransport.warm_up, LocalTransport.post

    def warming(transport: LocalTransport, edges: Sequence[Edge]) -> None:
        warm.update(edges)
        warm_up(transport, edges)

    def checking(transport: LocalTransport, *, sends: Sequence[Message], **rest: Any) -> Fence:
        edges = {(transport.rank, message.peer) for message in sends}
        used.update(edges)
        late.update(edges - warm.keys())
        return post(transport, sends=sends, **rest)

    monkeypatch.setattr(LocalTransport, "warm_up", warming)
    monkeypatch.setattr(LocalTransport, "post", checking)

    def calls(group: LocalGroup) -> None:
        with Ring(group) as ring:
            for _ in range(2 * exchanges):
                unshard(whole["q"][:, :8], layout=layout, group=group, grad="sum")
            for window in () if exchanges else ((-1, -1), (9, 9)) * 2:
                ring_attention(*shards(layout, whole, group), layout=layout, ring=ring, window_size=window)

    run_ranks(4, calls)
    later = used - set(ring_edges(range(4)))  # opening a transport warms up the edges between neighbours
    assert {warm[edge] for edge in later} == {4} and not late  # once per rank, although there are two calls


@pytest.mark.parametrize("then", ["a call that takes more slots", "close"])
def test_slots_of_a_failed_call_are_freed_after_its_transfers(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, whole = Layout.zigzag(24, 3), inputs(24)
    posted: dict[int, list[CallbackFence]] = {rank: [] for rank in range(3)}
    post = RingCall.post

    def failing(call: RingCall, level: int, key: PostKey, *rest: Any) -> Fence | None:
        if call.wire is not None:
            return post(call, level, key, *rest)
        if key.payload_hop == 2:
            raise RuntimeError("out of memory")
        fence = post(call, level, key, *rest)
        assert fence is not None
        posted[call.plan.rank].append(CallbackFence(fence.wait))
        return posted[call.plan.rank][-1]

    monkeypatch.setattr(RingCall, "post", failing)
    together = threading.Barrier(3)

    def calls(group: LocalGroup) -> None:
        parts = shards(layout, whole, group)
        with Ring(group, wire_dtype=torch.bfloat16) as ring:
            with pytest.raises(RuntimeError, match="out of memory"):
                ring_attention(*(x.bfloat16() for x in parts), layout=layout, ring=ring)
            together.wait()  # else the first rank to close would end posts of the others
            (fence,) = posted[group.rank()]
            assert not fence.waited
            if then == "close":
                ring.close()
            else:  # fp32 has to be encoded for the wire
                ring_attention(*parts, layout=layout, ring=ring)
                together.wait()  # else the first rank to close would end calls of the others
            assert fence.waited

    with LocalWorld(3, timeout=60) as world:
        world.run(calls)


def test_a_value_or_transfer_that_does_not_arrive_raises_the_failure_of_the_ring() -> None:
    ring, error = Mock(size=2, _broken=""), TransportError("no answer")
    ring._values.gather.side_effect = error
    watch = ring._watch = ring._get_watch.return_value
    watch.report_failure = lambda error: LookupError(f"rank 1 failed: {error}")
    with pytest.raises(LookupError, match="rank 1 failed: no answer"):
        Ring._gather(ring, 0, "a value")
    refused = pytest.raises(LookupError, match="rank 1 failed: no answer")
    with refused as raised, Ring._watched_call(ring, "forward", torch.device("cpu")):
        raise error
    assert raised.value.__cause__ is error and ring._broken == repr(error)
    assert [name for name, *_ in watch.method_calls] == ["begin_loop", "end_loop"]


@pytest.mark.parametrize(
    ("device", "group", "given", "expected"),
    [
        ("cuda", object(), None, GRIDS["2x2"]),
        ("cuda", object(), GRIDS["4x2"], GRIDS["4x2"]),
        ("cuda", Mock(spec=LocalGroup), None, None),
        ("cpu", object(), None, None),
    ],
)
def test_a_ring_of_gpus_discovers_its_topology(
    device: str, group: object, given: Topology | None, expected: Topology | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of slots is checked again for the topology. Virtual ranks share one GPU and discover nothing."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(ring_module, "discover_topology", lambda control, device: GRIDS["2x2"])
    monkeypatch.setattr(ring_module, "open_transports", lambda group, **given: options.update(given) or ("open",))
    ring: Any = Mock(topology=given, group=group, _transports=(), _opened=[], slots=3, limits="limits")
    ring._open_options = partial(Ring._open_options, ring)
    opened: Any = Ring.open(ring, torch.device(device))
    assert opened == ("open",) and Ring.open(ring, torch.device(device)) is opened
    assert ring._set_slots.called == (given is None and expected is not None) and ring._opened == ["open"]
    wanted = {"device": torch.device(device), "topology": expected, "limits": "limits"}
    assert options.items() > wanted.items() and options["transport"] is ring._transport


@pytest.mark.parametrize("given", ["auto", Mock()])
def test_exchanges_use_the_transport_between_nodes(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport inside a node does not reach all ranks; a factory makes one that does."""
    monkeypatch.setattr(ring_module, "open_transport", lambda group, transport, **_: ("flat", transport))
    ring = Mock(_transport=given, _flat=None, _opened=[], _open_options=lambda _: {})
    ring.open.return_value = [SimpleNamespace(name=name) for name in ("inside", "between")]
    flat: Any = Ring.open_flat(ring, torch.device("cpu"))
    assert flat == ("flat", "between" if given == "auto" else given)
    assert Ring.open_flat(ring, torch.device("cpu")) is flat and ring._opened == [flat]


@pytest.mark.parametrize("failed", ["", "mine"])
def test_closing_a_ring_releases_everything_despite_errors(failed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are drained while the watchdog can still end their transfers. Those of a failed call are aborted first."""
    ring, held = Ring(), Mock()
    ring._kv, ring._dkv, ring._watch, ring._control = held.kv, held.dkv, held.watch, held.control
    ring._opened, ring._partners, ring._broken = [held.first, held.second], {Mock(): held.partner}, failed
    for part in (held.kv.drain, held.partner.close, held.watch.close, held.second.close):
        part.side_effect = TransportError("gone")
    with monkeypatch.context() as forked:
        forked.setattr(ring_module, "os", Mock())  # getpid
        ring.close()
    assert not held.mock_calls, "these belong to the parent process"
    ring.close()
    steps = ["kv.drain", "dkv.drain", "partner.close", "watch.close", "second.close", "first.close", "control.close"]
    assert [name for name, *_ in held.mock_calls] == ["first.abort", "second.abort"] * bool(failed) + steps
    assert all(failed in args[0] for name, args, _ in held.mock_calls if "abort" in name)
    ring.close()
    assert len(held.mock_calls) == len(steps) + 2 * bool(failed)


def test_slots_that_are_too_few_are_drained_and_released() -> None:
    few, many = Mock(count=1), Mock(count=2)
    assert Ring._slots(many, 2, torch.device("cpu"), None) is many and not many.method_calls
    assert Ring._slots(few, 2, torch.device("cpu"), None).count == 2
    assert [name for name, *_ in few.method_calls] == ["drain", "release"]


def test_the_watchdog_gets_what_a_ring_opens_and_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "open_watch", lambda group, device, **given: SimpleNamespace(**given))
    monkeypatch.setattr(ring_module, "GpuReader", lambda device: ["reader", device])
    for device in map(torch.device, ("cpu", "cuda")):
        ring = Ring(deadline=7.0)
        given: Any = ring._get_watch(device)
        ring._opened.append(Mock())
        assert given.transports() == ring._opened and given.control is ring._control is not None
        reader = ["reader", device] if device.type == "cuda" else None
        assert (given.deadline, given.failure_group, given.gauges) == (7.0, ring._rings, reader)


def test_a_second_call_at_the_same_time_fails_both() -> None:
    def on_rank(group: LocalGroup) -> None:
        cpu = torch.device("cpu")
        refused = partial(pytest.raises, RuntimeError, match="in use by a call in another thread")
        with Ring(group) as ring, refused(), ring._call_guard(cpu), refused(), ring._call_guard(cpu):
            raise AssertionError("the second call began")

    run_ranks(2, on_rank)


def test_a_ring_of_one_rank_serves_several_threads_and_forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for nobody. Each device has its own default ring."""
    x, cpu = torch.ones(1, 4, 1, 8), torch.device("cpu")
    with Ring() as ring, ring._call_guard(cpu), ring._call_guard(cpu), monkeypatch.context() as forked:
        forked.setattr(ring_module, "os", Mock())  # getpid
        assert torch.equal(ring_attention(x, x, x, ring=ring), x)
    assert len({default_ring(None, torch.device("cuda", index)) for index in range(2)} | {default_ring(None, cpu)}) == 3


def test_a_sink_is_not_modified() -> None:
    """The kernels update the start state, which must not share the sink's memory even for one query of one row."""
    q, k, v = (torch.randn(1, rows, 2, 16) for rows in (1, 8, 8))
    sink = torch.tensor([0.5, -1.0])
    for backend in ("triton", "aten"):
        ring_attention(q, k, v, learnable_sink=sink, align="bottom-right", backend=backend)
        assert sink.tolist() == [0.5, -1.0]


def test_seeds_are_drawn_from_rank_0s_generator() -> None:
    layout, x = Layout.zigzag(32, 2), torch.ones(1, 16, 2, 16)

    def calls(group: LocalGroup, **more: Any) -> list[Any]:
        ring_attention(x, x, x, layout=layout, group=group)  # draws nothing
        return [ring_attention(x, x, x, layout=layout, group=group, dropout_p=0.5, **more) for _ in range(2)]

    def drawn() -> list[Tensor]:
        torch.manual_seed(5)
        return [layout.unshard(parts) for parts in zip(*run_ranks(2, calls), strict=True)]

    (first, other), (again, _) = drawn(), drawn()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))
    expected = run_ranks(2, lambda group: calls(group, dropout_seed=seed)[0])
    assert torch.equal(first, layout.unshard(expected))


@pytest.mark.parametrize("on_a_mesh", [False, True])
def test_a_gradient_of_lse_alone_may_have_any_strides(on_a_mesh: bool) -> None:
    """The op of a graph over a mesh exchanges the gradients of both results together."""
    q, k, v = leaves = [torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3)]
    call: dict[str, Any] = {"backend": "triton", "learnable_sink": torch.zeros(2)}
    if on_a_mesh:
        out, lse, _ = call_forward_op(q, k, v, AttentionArgs(**call), None, single_rank().mesh(1, 1))
    else:
        out, lse = ring_attention(q, k, v, return_lse=True, **call)
    expanded, contiguous = (
        torch.autograd.grad(lse, leaves, ones, retain_graph=True)
        for ones in (torch.ones(()).expand_as(lse), torch.ones_like(lse))
    )
    both = torch.autograd.grad((out, lse), leaves, (torch.zeros_like(out), torch.ones_like(lse)))
    assert all(map(torch.equal, expanded, contiguous)) and all(map(torch.equal, expanded, both))


def test_slopes_modified_before_the_backward_raise() -> None:
    slopes = torch.tensor([0.5])
    x = torch.randn(1, 8, 1, 16, requires_grad=True)
    out = ring_attention(x, x, x, alibi_slopes=slopes)
    assert isinstance(out, Tensor)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_captured_stream_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would query events that belong to the graph."""
    q, k, v = (inputs(32)[name] for name in "qkv")

    def on_rank(group: LocalGroup) -> None:
        with pytest.raises(NotImplementedError, match="captured into a CUDA graph"):
            ring_attention(q, k, v, layout=Layout.contiguous(64, 2), group=group)

    monkeypatch.setattr(ring_module, "_is_capturing", lambda _: True)
    run_ranks(2, on_rank)


@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2)])
def test_call_stack_depth_of_launches_and_posts(mesh: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count Python frames from a call down to a launch or a post, both included."""
    depths: dict[str, int] = {}
    module: Any = attention
    root = Path(module.__file__).parents[1]
    folders = tuple(f"{root / name}/" for name in ("ring", "kernels"))

    def counted(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            frame, names = sys._getframe(1), [kind]
            while frame is not None:
                names += [frame.f_code.co_name] * frame.f_code.co_filename.startswith(folders)
                frame = frame.f_back  # type: ignore[assignment]
            if "open" not in names:
                key = f"{kind} in a backward" if "backward" in names else kind
                depths[key] = max(depths.get(key, 0), len(names))
            return function(*args, **named)

        return called

    monkeypatch.setattr(attention, "launch", counted(module.launch, "launch"))
    monkeypatch.setattr(LocalTransport, "post", counted(LocalTransport.post, "post"))
    q, k, v = (inputs(32)[name].requires_grad_() for name in "qkv")

    def on_rank(group: LocalGroup) -> None:
        where = group if mesh is None else group.mesh(*mesh)
        out = ring_attention(q, k, v, layout=Layout.contiguous(64, 2), group=where, backend="triton")
        assert isinstance(out, torch.Tensor)
        out.sum().backward()

    run_ranks(2, on_rank)
    limits = {"launch": 6, "launch in a backward": 7, "post": 7, "post in a backward": 7}
    assert {*depths} == {*limits} and all(depths[kind] <= limits[kind] for kind in limits), depths
