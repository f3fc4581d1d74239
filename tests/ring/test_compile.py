"""``torch.compile(fullgraph=True)`` around ``ring_attention``: eager's results and errors from few graphs."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ringattn import Layout, Ring, checkpoint_policy, halo, relayout, ring_attention, roll, single_rank
from ringattn.comm import GroupLike
from ringattn.kernels import KernelConfig, Tile
from ringattn.ring import BlockMask, Intervals, bigbird, longformer, ulysses
from ringattn.ring.args import AttentionArgs
from ringattn.ring.ops import ARG_INDEX, pack_call

from ..support.nightly import rest_nightly
from ..support.rank_processes import group_results
from ..support.ring_cases import run_ranks

ROWS, HEADS = 64, 4
NO_BACKWARD = ("test_schema", "test_autograd_registration", "test_faketensor")
TILES = KernelConfig(forward=Tile(16, 16, 4, 1), dq=Tile(16, 16, 4, 1), dkdv=Tile(16, 16, 4, 1))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """Compute a layer around the call, so that the graph holds more than one op."""
    out = ring_attention(q * 2, k, v, **call)
    if isinstance(out, Tensor):
        return out.sin()
    out, lse, *max_logits = out
    result: Tensor = (out * lse.transpose(1, 2)[..., None]).sin() * (max_logits[0][:, None] if max_logits else 1.0)
    return result


def inputs(rows: int = ROWS, batch: int = 1) -> list[Tensor]:
    """Return q, k and v; with several batch rows k has ``[B, H, S, D]`` storage."""
    q, k, v = (torch.randn(batch, rows, heads, 16) for heads in (HEADS, 2, 2))
    k = k.transpose(1, 2).contiguous().transpose(1, 2) if batch > 1 else k
    return [x.requires_grad_() for x in (q, k, v)]


def inputs_of(call: dict[str, Any], rows: int = ROWS) -> list[Tensor]:
    """Return inputs with as many batch rows as the call needs."""
    return inputs(rows, len(call.get("leftpad_k", "1")))


def run(function: Callable[..., Tensor], tensors: list[Tensor], **call: Any) -> list[Tensor]:
    """Return the result and the gradients of q, k, v and of the sink if there is one."""
    out = function(*tensors, **call)
    wanted = [*tensors, *([call["learnable_sink"]] if "learnable_sink" in call else [])]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]


def compiled(function: Callable[..., Tensor] = block, backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend, **options)
    return made


def packed_call(*, ring: Ring | None = None, group: GroupLike = None, **call: Any) -> Any:
    """Return the call as arguments of the op."""
    return pack_call(AttentionArgs(**call), ring, group)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def hiding(number: int) -> dict[str, Any]:
    """Return a call whose batch rows see different keys."""
    is_key = torch.rand(3, ROWS, generator=torch.Generator().manual_seed(number)) < 0.6
    documents = [[0, ROWS], [0, 9, ROWS], [0, ROWS]]
    return {"key_mask": is_key, "leftpad_k": [number, 3, ROWS], "seqused_k": [ROWS, 20, 4], "cu_seqlens": documents}


AT = torch.arange(ROWS)
DOCUMENTS = [0, 7, 30, ROWS]
CALLS: dict[str, dict[str, Any]] = {
    "layout, documents": {
        "layout": Layout.striped(ROWS, 1), "causal": True, "cu_seqlens": DOCUMENTS, "return_lse": True,
        "return_max_logits": True,
    },
    "keys, documents as a tensor": {
        "layout": Layout([[(0, ROWS)]]), "kv_layout": Layout([[(0, ROWS, 2)]]), "seqused_k": (50,),
        "cu_seqlens": torch.tensor([0, 7, 30, 2 * ROWS - 1]),
    },
    "name, scores": {
        "layout": "zigzag", "window_size": (9, 3), "softcap": 3.0, "softmax_scale": 0.3, "align": "bottom-right",
        "alibi_slopes": torch.arange(HEADS) / HEADS,
    },
    "ring, prefix, sink": {
        "ring": Ring(chunks=2), "prefix_length": 7, "causal": True,
        "learnable_sink": torch.ones(HEADS, requires_grad=True),
    },
    "blocks, dropout": {
        "block_mask": bigbird(ROWS, 16, window=1, global_=1, random=1), "dropout_p": 0.4, "dropout_seed": 2**64 - 5,
    },
    "blocks as a tensor": {"block_mask": torch.eye(4, dtype=torch.bool)},
    "blocks of one size": {"block_mask": BlockMask(torch.ones(2, 2, dtype=torch.bool).tril(), 48)},
    "longformer": {"block_mask": longformer(8, [(0, 3), (20, 24)])},
    "islands": {"causal": True, "islands": [(3, 6), (30, 44)], "cu_seqlens": DOCUMENTS},
    "intervals": {"intervals": [(AT, AT + 1)]},
    "intervals of a path": {"intervals": Intervals([(AT * 0, AT + 1)], AT), "window_size": (3, 0)},
    "batch rows, dropout": hiding(1) | {"causal": True, "dropout_p": 0.3, "dropout_seed": 5},
    "mesh": hiding(1) | {
        "group": single_rank().mesh(1, 1), "learnable_sink": torch.ones(HEADS, requires_grad=True), "return_lse": True,
        "return_max_logits": True,
    },
    "triton": {"backend": "triton", "config": TILES, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_compiled_equals_eager_bitwise(name: str) -> None:
    tensors = inputs_of(CALLS[name])
    assert_same(run(compiled(), tensors, **CALLS[name]), run(block, tensors, **CALLS[name]))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it where a graph ends
def test_moves_run_eagerly_between_graphs() -> None:
    def moved(x: Tensor) -> Tensor:
        x = roll(relayout(x * 2, "zigzag", "contiguous"), 3, layout="contiguous")
        return torch.cat(halo(x, 1, 1, layout="contiguous"), 1).sin()

    x = torch.randn(1, ROWS, 2, requires_grad=True)
    outs = moved(x), torch.compile(moved, backend="aot_eager")(x)
    assert_same(*([out.detach(), *torch.autograd.grad(out.sum(), x)] for out in outs))


@pytest.mark.parametrize("group", [None, single_rank().mesh(1, 1)], ids=["ring", "mesh"])
def test_compiled_dropout_draws_the_seeds_of_eager(group: GroupLike) -> None:
    tensors = inputs()
    torch.manual_seed(5)
    expected = [run(block, tensors, dropout_p=0.4, group=group) for _ in range(2)]
    torch.manual_seed(5)
    function = compiled()
    for eager_result in expected:
        assert_same(run(function, tensors, dropout_p=0.4, group=group), eager_result)
    assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch's imports
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_the_default_compiler_of_torch() -> None:
    tensors, call = inputs(), {"causal": True, "cu_seqlens": torch.tensor([0, 20, ROWS])}
    got = run(compiled(backend="inductor"), tensors, **call)
    torch.testing.assert_close(got, run(block, tensors, **call), rtol=1e-5, atol=1e-5)


MOST = 2  # graphs: one for the first call's numbers and a dynamic one, as torch.compile does with every size
RINGS = [Ring() for _ in range(3)]


def documents_of(rows: int, number: int) -> dict[str, Any]:
    documents = torch.tensor([0, *range(5, rows, 9 + number), rows])
    return {"layout": Layout.zigzag(rows, 1, documents), "cu_seqlens": documents}


def intervals_of(number: int) -> dict[str, Any]:
    return {
        "causal": True,
        "islands": [(number, 3 * number + 9)],
        "intervals": [(AT // 2, AT // 2 + number), (AT // 2 + 9, AT + 1)],
    }


GRAPHS: dict[str, Callable[[int], tuple[int, dict[str, Any]]]] = {
    "lengths": lambda number: (16 + 8 * number, {"causal": True, "layout": "zigzag"}),
    "layouts and documents": lambda number: (40 + 8 * number, documents_of(40 + 8 * number, number)),
    "islands and intervals": lambda number: (ROWS, intervals_of(number)),
    "batch rows": lambda number: (ROWS, hiding(number)),
    "rings and seeds": lambda number: (ROWS, {"ring": RINGS[number], "dropout_p": 0.5, "dropout_seed": 7 * number + 1}),
}


@pytest.mark.parametrize("name", rest_nightly(GRAPHS, "layouts and documents", "batch rows"))
def test_changed_numbers_reuse_the_graph(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(backend=counter)
    for number in range(3):
        rows, call = GRAPHS[name](number)
        tensors = inputs_of(call, rows)
        assert_same(run(function, tensors, **call), run(block, tensors, **call))
    assert counter.frame_count <= MOST


def in_world(
    whole_layout: Layout,
    function: Callable[..., Tensor],
    whole: list[Tensor],
    mesh: tuple[int, int] | None = None,
    **call: Any,
) -> list[list[Tensor]]:
    def rank(group: Any) -> list[Tensor]:
        shards = [whole_layout.shard(x, group.rank()).detach().requires_grad_() for x in whole]
        own = {name: x.detach().requires_grad_(x.requires_grad) for name, x in call.items() if name == "learnable_sink"}
        where = group if mesh is None else group.mesh(*mesh)
        return run(function, shards, **{"layout": whole_layout} | call | own, group=where)

    return run_ranks(whole_layout.world, rank)


def test_virtual_ranks_share_the_graph() -> None:
    whole, layout = inputs(), Layout.zigzag(ROWS, 2)
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(backend=counter)
    for _ in range(2):  # each with a new world
        got, expected = (in_world(layout, called, whole, causal=True) for called in (function, block))
        for mine, theirs in zip(got, expected, strict=True):
            assert_same(mine, theirs)
    assert counter.frame_count <= MOST


MESH_CALLS: dict[str, dict[str, Any]] = {
    "sink, documents, lse": {
        "learnable_sink": torch.linspace(-1, 2, HEADS).requires_grad_(), "cu_seqlens": DOCUMENTS, "return_lse": True,
    },
    "name, dropout, first head, sink": {
        "layout": "zigzag", "dropout_p": 0.4, "dropout_seed": 2**64 - 5, "first_head": 7,
        "learnable_sink": torch.linspace(1, -2, HEADS).requires_grad_(),
    },
    "batch rows": hiding(1) | {"causal": True},
}  # fmt: skip


MESHES = zip(MESH_CALLS, [(2, 2), (1, 2), (2, 1)], strict=True)


@pytest.mark.parametrize(("name", "mesh"), rest_nightly(MESHES, ("name, dropout, first head, sink", (1, 2))))
def test_a_mesh_equals_eager_and_reuses_its_graphs(name: str, mesh: tuple[int, int]) -> None:
    """Threads that compile at the same time share one graph for the first sizes and one dynamic graph."""
    counter = CompileCounterWithBackend("aot_eager")
    function, call, made = compiled(backend=counter), MESH_CALLS[name], []
    for rows in (ROWS, ROWS, *((80, 96) if name == "name, dropout, first head, sink" else ())):
        layout, whole = Layout.zigzag(rows, mesh[0] * mesh[1]), inputs_of(call, rows)
        got, expected = (in_world(layout, called, whole, mesh, **call) for called in (function, block))
        for mine, theirs in zip(got, expected, strict=True):
            assert_same(mine, theirs)
        made.append(counter.frame_count)
    assert made[1] == made[0] and made[-1] == made[2 % len(made)]


def test_a_mesh_frees_the_first_exchange_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the first exchange are freed before the last one allocates."""
    to_heads, to_tokens = ulysses.heads_for_tokens, ulysses.tokens_for_heads
    arrived: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def first_exchange(*args: Any) -> tuple[Tensor, ...]:
        tensors = to_heads(*args)
        arrived[:] = map(weakref.ref, tensors)
        return tensors

    def last_exchange(*args: Any) -> tuple[Tensor, ...]:
        counts.extend([len(arrived), sum(reference() is not None for reference in arrived)])
        return to_tokens(*args)

    monkeypatch.setattr(ulysses, "heads_for_tokens", first_exchange)
    monkeypatch.setattr(ulysses, "tokens_for_heads", last_exchange)
    run(compiled(), inputs(), group=single_rank().mesh(1, 1))
    assert counts == [3, 0, 6, 0]
    with torch.no_grad():
        block(*inputs(), group=single_rank().mesh(1, 1))
    assert counts[4:] == [3, 0]


@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2)])
def test_all_ranks_use_rank_0s_seed(mesh: tuple[int, int] | None) -> None:
    whole, layout, seeds = inputs(), Layout.contiguous(ROWS, 2), torch.tensor([12345, 1])

    def draws(q: Tensor, k: Tensor, v: Tensor, *, group: Any, layout: Layout) -> Tensor:
        rank = group.rank() if mesh is None else max(group.ring.rank(), group.ulysses.rank())
        packed = packed_call(group=group, layout=layout, dropout_p=0.5)
        packed[ARG_INDEX["dropout_seed"]] = seeds[rank]
        out: Tensor = torch.ops.ringattn.ring_attention(q * 2, k, v, *packed)[0]
        return out.sin()

    got = in_world(layout, draws, whole, mesh)
    for mine, theirs in zip(got, in_world(layout, block, whole, mesh, dropout_p=0.5, dropout_seed=12345), strict=True):
        assert_same(mine, theirs)


def processes(rank: int) -> None:
    torch.manual_seed(1)
    world = dist.get_world_size()
    whole, layout = inputs(), Layout.zigzag(ROWS, world)
    shards = [layout.shard(x, rank).detach().requires_grad_() for x in whole]
    expected = run(block, shards, layout="zigzag", causal=True)
    for group in (None, dist.group.WORLD, init_device_mesh("cpu", (world,))):
        got = run(compiled(), shards, layout="zigzag", group=group, causal=True)
        assert_same(got, expected)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("ring", "ulysses"))
    for ring in (None, Ring(mesh["ring"], slots=3)):
        call: dict[str, Any] = {"layout": "zigzag", "group": mesh, "ring": ring, "causal": True}
        assert_same(run(compiled(), shards, **call), run(block, shards, **call))


@pytest.mark.nightly
def test_compiled_equals_eager_over_gloo() -> None:
    group_results(2, processes)


def test_compiled_equals_eager_under_autocast() -> None:
    tensors = inputs()

    def cast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(*tensors, causal=True)

    got, expected = run(compiled(cast), tensors), run(cast, tensors)
    assert (got[0].dtype, got[1].dtype) == (torch.bfloat16, torch.float32)
    assert_same(got, expected)


def test_checkpointing_repeats_the_dropout_mask() -> None:
    tensors = inputs()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block(q, k, v, causal=True, dropout_p=0.5)

    def saving(*tensors: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, *tensors, use_reentrant=False)
        return out

    results = []
    for function in (layer, saving, compiled(saving)):
        torch.manual_seed(2)
        results.append(run(function, tensors))
    for result in results[1:]:
        assert_same(result, results[0])


CONTEXTS = partial(create_selective_checkpoint_contexts, checkpoint_policy)


def test_selective_checkpointing_in_a_graph_skips_the_second_ring(forward_rings: list[object]) -> None:
    def saving(*tensors: Tensor, **call: Any) -> Tensor:
        out: Tensor = checkpoint(block, *tensors, use_reentrant=False, context_fn=CONTEXTS, **call)
        return out

    whole, layout, mesh = inputs(), Layout.zigzag(ROWS, 2), (1, 2)
    expected = in_world(layout, block, whole, mesh, causal=True)
    forward_rings.clear()
    for got, want in zip(in_world(layout, compiled(saving), whole, mesh, causal=True), expected, strict=True):
        assert_same(got, want)
    assert len(forward_rings) == 2


@pytest.mark.parametrize("call", [{}, hiding(1), {"mesh": (2, 2)}], ids=["plain", "batch rows", "mesh"])
def test_selective_checkpointing_runs_the_ring_once(forward_rings: list[object], call: dict[str, Any]) -> None:
    """The layer around the call runs twice, and the gradients do not change."""
    layers: list[object] = []
    world = 4 if "mesh" in call else 2
    whole, layout = inputs_of(call), Layout.zigzag(ROWS, world)

    def layer(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
        layers.append(None)
        return block(q, k, v, causal=True, dropout_p=0.4, dropout_seed=3, **call).cos()

    def saving(*tensors: Tensor, **call: Any) -> Tensor:
        out: Tensor = checkpoint(layer, *tensors, use_reentrant=False, context_fn=CONTEXTS, **call)
        return out

    expected = in_world(layout, layer, whole, **call)
    forward_rings.clear()
    layers.clear()
    for got, want in zip(in_world(layout, saving, whole, **call), expected, strict=True):
        assert_same(got, want)
    assert (len(forward_rings), len(layers)) == (world, 2 * world)


@pytest.mark.parametrize(
    "name", ["layout, documents", "ring, prefix, sink", "blocks, dropout", "batch rows, dropout", "mesh"]
)
def test_opcheck(name: str) -> None:
    q, k, v = inputs_of(CALLS[name])
    packed = packed_call(**{argument: value for argument, value in CALLS[name].items() if argument != "return_lse"})
    op = torch.ops.ringattn.ring_attention.default
    torch.library.opcheck(op, (q, k, v, *packed), test_utils=(*NO_BACKWARD, "test_aot_dispatch_dynamic"))
    out, lse, _, numbers = op(*(x.detach() for x in (q, k, v)), *packed)
    leaves = [x.detach().requires_grad_() for x in (torch.randn_like(out), q, k, v, out, lse)]
    op, args = torch.ops.ringattn.ring_attention_backward.default, (leaves[0], None, *leaves[1:], numbers, *packed)
    torch.library.opcheck(op, args, test_utils=NO_BACKWARD)


def test_ops_stay_out_of_cuda_graphs() -> None:
    """The ops wait for other ranks on the host, which a CUDA graph cannot replay."""
    for op in (torch.ops.ringattn.ring_attention, torch.ops.ringattn.ring_attention_backward):
        assert torch.Tag.cudagraph_unsafe in op.default.tags


def test_a_graph_refuses_slopes_that_need_a_gradient() -> None:
    with pytest.raises(Exception, match="alibi_slopes requires a gradient"):
        compiled()(*inputs(), alibi_slopes=torch.ones(HEADS, requires_grad=True))


def test_the_backward_op_refuses_to_be_differentiated() -> None:
    q, k, v = inputs()
    out = torch.ops.ringattn.ring_attention(q, k, v, *packed_call())[0]
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
