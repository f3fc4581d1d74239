"""Calls of ``ring_attention`` with every kind of argument, run twice and compared with the float64 reference.

Ranks are virtual ranks of one device, or processes. Each call draws new inputs, equal on every rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ... import reference
from ...comm import Group, GroupLike, LocalGroup, LocalWorld, Topology, open_transport
from ...comm.groups import MESH_DIMS
from ...comm.testing import check_transport
from ...ring import Layout, Ring, longformer, prefix_tree, ring_attention
from ..common.attention import DTYPES, Tensors, forward_backward
from ..common.cases import MeasuredNumber
from ..common.launching import run_process_group
from ..common.ranks import LaunchedRank
from . import gpu_cases

SEED, TOKENS = 7, 499
BOUNDARIES = (0, 17, 130, 131, 400, TOKENS)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "uneven": lambda tokens, world: Layout.uneven([tokens - 3 * (world - 1), *[3] * (world - 1)]),
}
RESULTS = ("out", "lse", "dq", "dk", "dv", "dsink", "max_logits")
LIMITS = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 1e-4}
WIRE_LIMITS = {"bfloat16": 3e-2, "float8_e4m3fn": 0.25}
"""Limits for the error of a row, relative to the norm of the row or of the mean row, whichever is larger.

One wrong key exceeds LIMITS.
"""


@dataclass(frozen=True)
class CallCase:
    """Arguments and shapes of one call of ``ring_attention``."""

    layout: str = "zigzag"
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=lambda: {"causal": True})  # arguments of ring_attention
    ring: Mapping[str, Any] = field(default_factory=dict)  # arguments of Ring
    heads: tuple[int, int] = (4, 2)  # query heads, key/value heads
    head_dims: tuple[int, int] = (64, 64)  # head dim of q and k, of v
    nodes: int = 1  # more than 1: a two-level ring
    ulysses: int = 1  # ranks of a Ulysses group
    sink: bool = False
    max_logits: bool = False  # also make a call with return_max_logits

    def fits(self, world: int) -> bool:
        """Return True if ``world`` ranks can make this call."""
        levels = self.nodes == 1 or (world >= 2 * self.nodes and world % self.nodes == 0)
        return levels and world % self.ulysses == 0

    @property
    def limit(self) -> float:
        """The largest relative error allowed in a row."""
        wires = (self.ring.get(name) for name in ("wire_dtype", "grad_wire_dtype"))
        return max(LIMITS[self.dtype], *(WIRE_LIMITS.get(str(wire), 0.0) for wire in wires))


CAUSAL, FULL = {"causal": True}, {"causal": False}
DROPOUT = {"dropout_p": 0.3, "dropout_seed": (1 << 63) + 5}
TREE = prefix_tree([130, 70, 60, TOKENS - 300, 40], [-1, 0, 0, 2, 2])
CALL_CASES = {
    "flat": CallCase(),
    "fp16, full, reverse direction": CallCase("striped", "float16", FULL, {"direction": -1}),
    "fp32, uneven": CallCase("uneven", "float32"),
    "blocking": CallCase(ring={"prefetch": 0, "slots": 2}),
    "chunks": CallCase(ring={"chunks": 2}),
    "two levels": CallCase(nodes=2),
    "two levels, chunks": CallCase("contiguous", ring={"chunks": 2, "direction": -1}, nodes=2),
    "K/V as bf16": CallCase("contiguous", "float32", ring={"wire_dtype": "bfloat16"}),
    "K/V as fp8": CallCase("contiguous", ring={"wire_dtype": "float8_e4m3fn"}),
    "K/V as fp8, dK/dV as bf16, chunks": CallCase(
        "contiguous", ring={"wire_dtype": "float8_e4m3fn", "grad_wire_dtype": "bfloat16", "chunks": 2}
    ),
    "window": CallCase(options=CAUSAL | {"window_size": (60, None)}, dtype="float16"),
    "window to both sides": CallCase("contiguous", options=FULL | {"window_size": (60, 20)}),
    "documents": CallCase("striped", "float16", CAUSAL | {"cu_seqlens": BOUNDARIES}),
    "documents and prefix": CallCase(options=CAUSAL | {"cu_seqlens": BOUNDARIES, "prefix_length": 150}),
    "padding": CallCase("uneven", "float16", FULL | {"seqused_k": [40, 300]}),
    "padding, softcap and ALiBi": CallCase(
        options=CAUSAL | {"seqused_k": [0, 300], "softcap": 2.0, "alibi_slopes": SLOPES}
    ),
    "ALiBi of each row": CallCase(
        "contiguous", "float32", CAUSAL | {"alibi_slopes": torch.stack((SLOPES, SLOPES / 3))}
    ),
    "dropout, chunks of heads and tokens": CallCase(options=CAUSAL | DROPOUT, ring={"chunks": 4}),
    "fp32, dropout and softcap": CallCase("striped", "float32", CAUSAL | DROPOUT | {"softcap": 5.0}),
    "sinks": CallCase(sink=True),
    "fp32, sinks and a window": CallCase("contiguous", "float32", CAUSAL | {"window_size": (60, None)}, sink=True),
    "mask per row": CallCase(
        options=CAUSAL | {"cu_seqlens": [[0, 130, TOKENS], [0, 7, 300, TOKENS]], "leftpad_k": [5, 0]}
    ),
    "key mask": CallCase("contiguous", "float16", CAUSAL | {"key_mask": torch.arange(2 * TOKENS).view(2, -1) % 7 != 3}),
    "Ulysses": CallCase(ulysses=2),
    "Ulysses, striped": CallCase("striped", "float16", FULL, ulysses=2),
    "longformer": CallCase("contiguous", options=FULL | {"block_mask": longformer(64, [(0, 5), (200, 210)])}),
    "largest logits": CallCase("uneven", options=CAUSAL | {"cu_seqlens": BOUNDARIES}, max_logits=True),
    "largest logits, Ulysses": CallCase(ulysses=2, max_logits=True),
    "islands": CallCase(options=CAUSAL | {"cu_seqlens": BOUNDARIES, "islands": [(20, 60), (200, 280)]}),
    "prefix tree": CallCase("striped", options=FULL | {"intervals": TREE.intervals}),
    "D128, one head of K/V": CallCase(heads=(4, 1), head_dims=(128, 128)),
    "D40, as many K/V heads as q heads": CallCase("striped", "float16", heads=(2, 2), head_dims=(40, 40)),
    "D192 and 128": CallCase(heads=(3, 3), head_dims=(192, 128)),
}
"""Calls that a GPU run must cover, by name. Tests check that no kind of argument is missing."""


def draw_call_tensors(call: CallCase) -> dict[str, Tensor]:
    """Return q, k, v, dout, dlse and the sink of the whole sequence, on the CPU."""
    generator = torch.Generator().manual_seed(SEED)
    (heads, kv_heads), (dim, dim_v), dtype = call.heads, call.head_dims, DTYPES[call.dtype]
    shapes = {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim_v), "dout": (heads, dim_v)}
    tensors = {name: torch.randn(2, TOKENS, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    tensors["dlse"] = torch.randn(2, heads, TOKENS, generator=generator)
    return tensors | ({"sink": torch.randn(heads, generator=generator)} if call.sink else {})


def bind_sink(function: Any, **options: Any) -> Any:
    """Return ``function`` with ``options`` bound, as a function of q, k, v and an optional sink."""
    return lambda q, k, v, sink=None: function(q, k, v, learnable_sink=sink, **options)


def exact_call_results(call: CallCase, whole: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensors:
    """Return the reference's out, lse, dq, dk, dv (and dsink) in float64, for the tensors of the whole sequence."""
    options = dict(options)
    if "window_size" in options:
        options["window_size"] = tuple(-1 if side is None else side for side in options["window_size"])
    if pattern := options.pop("block_mask", None):
        options |= {"window_size": pattern.window, "global_tokens": pattern.global_tokens}
    if "intervals" in options:
        options["intervals"] = [*options["intervals"].table]
    inputs = [whole[name].double() for name in ("q", "k", "v", "sink") if name in whole]
    return forward_backward(bind_sink(reference.attention, **options), inputs, whole["dout"].double(), whole["dlse"])


def exact_max_logits(call: CallCase, whole: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """Return the largest score of each head in float64, as the limit of ``log(sum(exp(t * score))) / t``."""
    large, qkv = 1e6, (whole[name].double() for name in "qkv")
    _, lse = reference.attention(*qkv, softmax_scale=large * call.head_dims[0] ** -0.5, **options)
    return lse.amax((0, 2)) / large


def run_call(call: CallCase, transport: str, device: torch.device, group: Group) -> Tensor:
    """Make a call twice as one rank; return a vector of the largest row errors, changed elements and a checksum.

    The errors are in the order of :data:`RESULTS`, and the two others follow.
    """
    tensors = {name: x.to(device) for name, x in draw_call_tensors(call).items()}
    rank, world = group.rank(), group.size()
    layout, ring_group, mesh = LAYOUTS[call.layout](TOKENS, world), group, None
    if call.ulysses > 1:
        mesh, ring_group = split_group(group, world // call.ulysses, call.ulysses)
    levels: dict[str, Any] = {"topology": Topology.grid(call.nodes, world // call.nodes)} if call.nodes > 1 else {}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    shards = {
        name: x if name == "sink" else layout.shard(x, rank, 2 if name == "dlse" else 1) for name, x in tensors.items()
    }
    inputs = [shards[name] for name in ("q", "k", "v", "sink") if name in shards]
    with Ring(ring_group, transport=transport, **call.ring, **levels) as ring:
        function = bind_sink(ring_attention, layout=layout, ring=ring, group=mesh, return_lse=True, **options)
        first, second = (forward_backward(function, inputs, shards["dout"], shards["dlse"]) for _ in range(2))
        function = bind_sink(ring_attention, layout=layout, ring=ring, group=mesh, return_max_logits=True, **options)
        largest = function(*inputs)[1] if call.max_logits else None
    changed = sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))
    bits = zlib.crc32(b"".join(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in first))
    whole = exact_call_results(call, tensors, options)[:5]
    exact = [layout.shard(x, rank, 2 if i == 1 else 1) for i, x in enumerate(whole)]
    if call.sink:  # this rank's part of the gradient, from its rows only
        rows = torch.zeros(TOKENS, device=device).index_fill_(0, layout.positions(rank).to(device), 1.0)
        own_gradients = {"dout": tensors["dout"] * rows[:, None, None], "dlse": tensors["dlse"] * rows}
        exact.append(exact_call_results(call, tensors | own_gradients, options)[5])
    worst = [row_difference(*pair) for pair in zip(first, exact, strict=True)]
    worst += [0.0] * (len(RESULTS) - len(worst))
    if largest is not None:
        worst[-1] = row_difference(largest, exact_max_logits(call, tensors, options))
    return torch.tensor([*worst, changed, bits], dtype=torch.float64)


def row_difference(ours: Tensor, exact: Tensor) -> float:
    """Return the largest error of a row relative to the row or the mean row; infinite if a result is NaN."""
    blind = exact == -torch.inf
    if not ours.double()[blind].equal(exact[blind]):
        return math.inf
    if exact.dim() < 4:  # lse and sinks have no rows
        ours, exact = ours.masked_fill(blind, 0)[..., None], exact.masked_fill(blind, 0)[..., None]
    errors, rows = (ours - exact).norm(dim=-1), exact.norm(dim=-1)
    size = rows.clamp_min(float(rows.square().mean().sqrt())) if rows.any() else 1.0
    return float((errors / size).max().nan_to_num(math.inf, math.inf)) if errors.numel() else 0.0


def split_group(group: Group, ranks: int, ulysses: int) -> tuple[GroupLike, Any]:
    """Return a mesh of ``ranks`` x ``ulysses``, and the group of this rank's ring."""
    if isinstance(group, LocalGroup):
        local = group.mesh(ranks, ulysses)
        return local, local.ring
    mesh = init_device_mesh("cpu", (ranks, ulysses), mesh_dim_names=MESH_DIMS)
    return mesh, mesh.get_group(MESH_DIMS[0])


def measure_calls(
    device: torch.device, *, transport: str, world: int, call_names: Sequence[str] = tuple(CALL_CASES)
) -> Iterator[MeasuredNumber]:
    """Yield the errors of calls on ``world`` ranks of a transport; also run the transport's conformance suite."""
    names = [name for name in call_names if CALL_CASES[name].fits(world)]
    if transport == "local":
        with LocalWorld(world, device=device) as ranks:
            for name in names:
                rows = ranks.run(partial(run_call, CALL_CASES[name], transport, device))
                yield from judge_call(name, transport, rows)
            ranks.run(partial(check_transfers, transport, device))
        return
    gathered = run_process_group(world, run_calls, transport, names, device=device.type)
    for name, rows in zip(names, gathered, strict=True):
        yield from judge_call(name, transport, rows)


def run_calls(place: LaunchedRank, device: torch.device, transport: str, names: Sequence[str]) -> list[list[Tensor]]:
    """Run calls as one rank of several processes; return for each call what :func:`run_call` returned per rank."""
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    gathered = []
    for name in names:
        rank_results = run_call(CALL_CASES[name], transport, device, group)
        rows = [torch.empty_like(rank_results) for _ in range(place.world)]
        dist.all_gather(rows, rank_results)
        gathered.append(rows)
    check_transfers(transport, device, group)  # last, because its cases abort the transport
    return gathered


def check_transfers(transport: str, device: torch.device, group: Group) -> None:
    """Run a transport's conformance suite, and on a GPU its GPU cases; raise AssertionError if a case fails."""
    for case in gpu_cases.TRANSFER_CASES.get(transport, ()) if device.type == "cuda" else ():
        opened = open_transport(group, transport=transport, device=device)
        case(opened, device)
        opened.close()
    check_transport(transport, group, device=device)


def judge_call(name: str, transport: str, rows: Sequence[Tensor]) -> Iterator[MeasuredNumber]:
    """Yield the numbers of one call; ``rows`` has what :func:`run_call` returned on each rank."""
    results = torch.stack([*rows])
    worst = results[:, : len(RESULTS)].amax(0)
    bits = zlib.crc32(results[:, -1].numpy().tobytes())
    labels = {"call": name, "by": transport, "ranks": len(results), "of": RESULTS[int(worst.argmax())]}
    limit = CALL_CASES[name].limit
    yield MeasuredNumber("difference of a row", float(worst.max()), "relative", labels, limit, note=f"{bits:08x}")
    yield MeasuredNumber("changed in a second call", float(results[:, -2].sum()), "elements", labels, limit=0)
