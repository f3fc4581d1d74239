"""One ``ring_attention`` call with any arguments on a ``LocalWorld``, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import LocalGroup
from ringattn.reference.masks import pairs
from ringattn.reference.scores import Options
from ringattn.ring.prepare import Layouts, mask_of
from ringattn.ring.schedule.active import sent_keys
from ringattn.ring.schedule.mask import BlockMask, Longformer
from ringattn.ring.wire import Wire, grad_wire_of, wire_of

from .baselines import Modified, Results, exact_with_sink, operator_lse, pytorch_with_sink
from .kernel_cases import Inputs, magnitudes
from .tolerance import assert_as_exact_as_pytorch

NOT_THE_REFERENCES = ("backend", "config", "block_mask")
"""Arguments that the reference does not take, or takes in another form."""


@dataclass
class Case:
    """One call of all ranks."""

    layout: Layout
    whole: dict[str, Tensor] = field(repr=False)
    """q, k, v, dout and dlse of positions 0, 1, 2, …, as made by :func:`.ring_cases.inputs`."""
    call: dict[str, Any]  # arguments of `ring_attention`
    kv_layout: Layout | None = None
    sink: Tensor | None = None
    strides: str = "contiguous"  # a key of STRIDES
    through_lse: bool = True  # true if `lse` has a gradient
    ring: dict[str, Any] = field(default_factory=dict)  # arguments of :class:`Ring`
    grads: str = "qkvs"  # the names of q, k, v and s (the sink) that require a gradient
    mesh: tuple[int, int] | None = None  # number of ranks in the ring dimension and in the Ulysses dimension

    @property
    def keys(self) -> Layout:
        return self.layout if self.kv_layout is None else self.kv_layout


def packed(x: Tensor) -> Tensor:
    """Return ``x`` as a slice of a wider tensor, like q, k and v of one projection; the rest is NaN."""
    batch, tokens, heads, dim = x.shape
    wide = x.new_full((batch, tokens, heads + 3, dim + 5), torch.nan)
    wide[:, :, 1 : heads + 1, 3 : dim + 3] = x
    return wide[:, :, 1 : heads + 1, 3 : dim + 3]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "packed": packed,
    "transposed": transposed,
}


def in_blocks(layout: Layout, block: int, seqlen: int, first: int = 0) -> Layout:
    """Return ``layout`` with each position replaced by a block of positions.

    Args:
        layout: layout of the blocks.
        block: positions per block.
        seqlen: positions in all; the last block may be short.
        first: index of the block that replaces position 0.
    """
    blocks = [layout.positions(rank).tolist() for rank in range(layout.world)]
    return Layout([[((first + p) * block, min(block, seqlen - p * block)) for p in shard] for shard in blocks])


def said(call: dict[str, Any]) -> Options:
    """Return the call's arguments in the reference's form."""
    options = {name: value for name, value in call.items() if name not in NOT_THE_REFERENCES}
    pattern = call.get("block_mask")
    if "window_size" in options:
        options["window_size"] = tuple(-1 if side is None else side for side in options["window_size"])
    if isinstance(options.get("cu_seqlens"), Tensor):
        options["cu_seqlens"] = options["cu_seqlens"].tolist()
    if isinstance(pattern, Longformer):
        options |= {"window_size": pattern.window, "global_tokens": pattern.global_tokens}
    if isinstance(pattern, BlockMask):
        options |= {"block_mask": pattern.visible, "block_size": pattern.block}
    return cast(Options, options)


def run(case: Case) -> tuple[Results, Tensor | None]:
    """Return the results of a world of virtual ranks, and the sum of their parts of the sink's gradient."""
    with LocalWorld(case.layout.world) as world:
        return together(case, world.run(lambda group: of_rank(case, group)))


def together(case: Case, parts: Sequence[Sequence[Tensor | None]]) -> tuple[Results, Tensor | None]:
    """Join the ranks' results; a gradient that was not required is None."""
    out, lse, dq, dk, dv, dsink = ([x for x in shards if x is not None] for shards in zip(*parts, strict=True))
    order = (case.layout, out, 1), (case.layout, lse, 2), (case.layout, dq, 1), (case.keys, dk, 1), (case.keys, dv, 1)
    tensors = [joined(layout, shards, dim) if shards else None for layout, shards, dim in order]
    total = torch.stack(dsink).double().sum(0).to(dsink[0].dtype) if dsink else None
    return Results(*tensors), total  # type: ignore[arg-type]


def of_rank(case: Case, group: LocalGroup) -> list[Tensor | None]:
    if case.mesh is not None:
        return begin(case, group.rank(), group=group.mesh(*case.mesh)).finish()
    with Ring(group, **case.ring) as ring:
        return begin(case, group.rank(), ring=ring).finish()


class Begun(NamedTuple):
    """A call after its forward."""

    case: Case
    results: tuple[Tensor, Tensor]
    leaves: dict[str, Tensor]
    grads: dict[str, Tensor]
    given: list[tuple[str, Tensor, int, Tensor]]
    """Every input tensor that must not change: its name, the tensor, its version and its storage's bytes."""

    def finish(self) -> list[Tensor | None]:
        """Run the backward and return out, lse and the gradients of q, k, v and the sink, None if not required."""
        leaves = {name: x for name, x in self.leaves.items() if x.requires_grad}
        grads = [*self.grads.values()]
        copies = [stored(x) for x in self.results]
        results = torch.autograd.grad(self.results[: len(grads)], [*leaves.values()], grads) if leaves else ()
        assert all(stored(x).equal(before) for x, before in zip(self.results, copies, strict=True)), "out was changed"
        for name, x, version, before in self.given:
            assert x._version == version and stored(x).equal(before), f"{name} was changed by the call"
        grad_by_name = dict(zip(leaves, results, strict=True))
        return [*(x.detach() for x in self.results), *(grad_by_name.get(name) for name in "qkvs")]


def begin(
    case: Case, rank: int, *, change: Callable[[dict[str, Any]], None] = lambda arguments: None, **where: Any
) -> Begun:
    """Run one rank's forward; ``where`` is its ring or group, and ``change`` may edit the final arguments."""
    restride = STRIDES[case.strides]
    layouts = {"q": case.layout, "k": case.keys, "v": case.keys, "dout": case.layout}
    tensors = {name: restride(taken(layouts[name], case.whole[name], rank)) for name in layouts}
    leaves = {name: tensors[name] for name in "qkv"}
    if case.sink is not None:
        leaves["s"] = case.sink.clone()
    for name, x in leaves.items():
        x.requires_grad_(name in case.grads)
    grads = {"out": tensors["dout"]}
    if case.through_lse:
        grads["lse"] = taken(case.layout, case.whole["dlse"], rank, 2)
    pattern = case.call.get("block_mask")
    options = tensors | grads | case.call | {"block_mask": getattr(pattern, "visible", pattern)}
    options |= {"learnable_sink": leaves.get("s")}
    snapshots = [(name, x, x._version, stored(x)) for name, x in options.items() if isinstance(x, Tensor)]
    arguments = {name: x for name, x in leaves.items() if name != "s"} | case.call | where
    arguments |= {"layout": case.layout, "kv_layout": case.kv_layout, "learnable_sink": leaves.get("s")}
    change(arguments)
    return Begun(case, ring_attention(**arguments, return_lse=True), leaves, grads, snapshots)  # type: ignore[arg-type]


def stored(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()  # type: ignore[no-untyped-call]


def taken(layout: Layout, x: Tensor, rank: int, dim: int = 1) -> Tensor:
    """Return a rank's tokens of ``x``, which holds the positions 0, 1, 2, …; the layout may leave some out."""
    return x.index_select(dim, layout.positions(rank))


def joined(layout: Layout, shards: list[Tensor], dim: int = 1) -> Tensor:
    """Return the tokens of all shards in the order of their positions."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).argsort()
    return torch.cat(shards, dim).index_select(dim, order)


def held(layout: Layout) -> Tensor:
    return torch.cat([layout.positions(rank) for rank in range(layout.world)]).sort().values


def check(case: Case) -> Results:
    """Run a case, compare it with PyTorch and return our results."""
    ours, dsink = run(case)
    compare(expected(case), ours, dsink)
    return ours


class Expected(NamedTuple):
    """Reference results and tolerances of a call."""

    truth: Results
    theirs: Results
    sizes: dict[str, float]
    sinks: tuple[Tensor, Tensor, float] | None  # the sink's exact gradient, PyTorch's, and the magnitude of its terms


def compare(right: Expected, ours: Results, dsink: Tensor | None = None) -> None:
    """Check results against the expected ones; a ``dsink`` of None was not required and is not compared."""
    truth, theirs, sizes, sinks = right
    for name, actual, *others in zip(Results._fields, ours, theirs, truth, strict=True):
        if actual is not None:
            assert_as_exact_as_pytorch(name, actual, *others, magnitude=sizes.get(name))
    if sinks is not None and dsink is not None:
        assert_as_exact_as_pytorch("dsink", dsink, sinks[1], sinks[0], magnitude=sinks[2])
    blind = truth.lse == -torch.inf
    for actual in (ours.out, ours.dq):
        assert actual is None or not actual.transpose(1, 2)[blind].any(), "a row without visible keys is not zero"


def expected(case: Case) -> Expected:
    """Compute the expected results, rank by rank with the decoded keys if a wire dtype is set."""
    dtype, ranks = case.whole["k"].dtype, range(case.layout.world)
    if wire_of(case.ring.get("wire_dtype"), dtype) is None:
        result = of_queries(case, held(case.layout), case.whole)
    else:
        busy = [rank for rank in ranks if case.layout.lengths[rank]]
        result = added(case, [of_queries(case, case.layout.positions(rank), arrived(case, rank)) for rank in busy])
    if grad_wire_of(case.ring.get("grad_wire_dtype")) is not None:
        # Every hop rounds by half a step of the wire dtype.
        # The tolerance has room for two half steps of q's dtype.
        steps = torch.finfo(torch.bfloat16).eps / torch.finfo(dtype).eps * max(1.0, (len(ranks) - 1) / 2)
        result.sizes.update({name: result.sizes[name] * steps for name in ("dk", "dv") if name in result.sizes})
    return result


def added(case: Case, parts: list[Expected]) -> Expected:
    """Combine the ranks' queries in the order of their positions, and sum dk, dv and the sink's gradient."""

    def join_all(results: list[Results]) -> Results:
        out, lse, dq, dk, dv = ([*shards] for shards in zip(*results, strict=True))
        rows = joined(case.layout, out), joined(case.layout, lse, 2), joined(case.layout, dq)
        return Results(*rows, torch.stack(dk).sum(0), torch.stack(dv).sum(0))

    names = ("dk", "dv")
    sizes = {
        name: (sum if name in names else max)(part.sizes.get(name, 0.0) for part in parts) for name in parts[0].sizes
    }
    sinks = [part.sinks for part in parts if part.sinks is not None]
    total = (sum(x[0] for x in sinks), sum(x[1] for x in sinks), sum(x[2] for x in sinks)) if sinks else None
    return Expected(join_all([part.truth for part in parts]), join_all([part.theirs for part in parts]), sizes, total)  # type: ignore[arg-type]


def travelled(x: Tensor, by: Wire | None) -> Tensor:
    """Return ``x`` after encoding and decoding by a wire."""
    if by is None:
        return x
    sent = tuple(torch.empty(size, dtype=dtype, device=x.device) for size, dtype in by.specs(tuple(x.shape)))
    by.encode(x, sent)
    into = torch.empty_like(x)
    by.decode(sent, into)
    return into


def arrived(case: Case, rank: int) -> dict[str, Tensor]:
    """Return the sequence that a rank sees: its own keys exact, the others' after the wire."""
    names = ("causal", "window_size", "cu_seqlens", "seqused_k", "prefix_length", "block_mask")
    call = {name: value for name, value in case.call.items() if name in names}
    mask = mask_of(Layouts(case.layout, case.keys), case.whole["q"].shape[0], **call)
    wire = wire_of(case.ring["wire_dtype"], case.whole["k"].dtype)
    moving = sent_keys(case.layout, mask, case.keys)
    whole = case.whole | {name: case.whole[name].clone() for name in "kv"}
    for sent in (moving.positions(other) for other in range(moving.world) if other != rank):
        for name in "kv":
            whole[name][:, sent] = travelled(case.whole[name][:, sent], wire)
    return whole


def of_queries(case: Case, rows: Tensor, whole: dict[str, Tensor]) -> Expected:
    """Compute the expected results for the queries at some positions and all keys."""
    columns, options = held(case.keys), said(case.call)
    scale = options.get("softmax_scale")
    dlse = whole["dlse"][:, :, rows] * case.through_lse
    x = Inputs(whole["q"][:, rows], whole["k"][:, columns], whole["v"][:, columns], whole["dout"][:, rows], dlse)
    visible = pairs(rows, columns, options)
    modified = Modified.of((x.q.shape[0], x.q.shape[2], len(rows), len(columns)), rows, columns, options)
    truth, dsink = exact_with_sink(*x, case.sink, q_positions=rows, k_positions=columns, **options)
    theirs, their_dsink = pytorch_with_sink(*x, case.sink, visible=visible, softmax_scale=scale, modified=modified)
    sinks = None
    if case.sink is not None and dsink is not None and their_dsink is not None:
        sinks = dsink, their_dsink, size_of_sink(case.sink, truth, x)
    # The exponential of PyTorch's CPU operator is less exact in 16 bit.
    if case.call.get("backend", "aten") != "triton" and x.q.dtype != torch.float32:
        theirs = theirs._replace(lse=operator_lse(x.q, x.k, visible, scale, case.sink))
    return Expected(truth, theirs, magnitudes(x, truth, visible, scale, few_keys=True, modified=modified), sinks)


def size_of_sink(sink: Tensor, truth: Results, x: Inputs) -> float:
    """Return the largest sum of absolute terms behind a sink's gradient, like :func:`.kernel_cases.magnitudes`.

    An fp32 sink has an fp32 gradient, but it comes from an ``out`` that was rounded to the dtype of q.
    """
    logits = sink.to(torch.float64)[:, None]
    weights = torch.exp(logits - truth.lse) * (1 + logits.abs() + truth.lse.abs())
    terms = weights * ((x.dout * truth.out).abs().sum(-1).transpose(1, 2) + x.dlse.abs())
    coarser = max(1.0, torch.finfo(x.q.dtype).eps / torch.finfo(sink.dtype).eps)
    return terms.nan_to_num(nan=0.0, posinf=0.0).sum((0, 2)).max().item() * coarser
