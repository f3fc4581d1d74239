"""One ``ring_attention`` call with any arguments on a ``LocalWorld``, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import LocalGroup
from ringattn.reference.masks import add_head_dim, evaluate_masks
from ringattn.reference.scores import AttentionOptions, alibi_bias, apply_score_options
from ringattn.reference.tensors import scale_or_default
from ringattn.ring.buffers import chunk_runs
from ringattn.ring.prepare import Layouts, mask_from_options
from ringattn.ring.schedule.intervals import Intervals
from ringattn.ring.schedule.mask import BlockMask, Longformer
from ringattn.ring.schedule.visibility import cut_keys
from ringattn.ring.wire import Wire, resolve_grad_wire, resolve_wire

from .baselines import ReferenceModifiers, Results, exact_with_sink, operator_lse, pytorch_with_sink
from .kernel_cases import Inputs, magnitudes
from .tolerance import assert_as_exact_as_pytorch

RING_ONLY_ARGUMENTS = ("backend", "config", "block_mask", "return_max_logits")
"""Arguments that the reference does not take, or takes in another form."""


@dataclass
class RingCase:
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


def store_packed(x: Tensor) -> Tensor:
    """Return ``x`` as a slice of a wider tensor, like q, k and v of one projection; the rest is NaN."""
    batch, tokens, heads, dim = x.shape
    wide = x.new_full((batch, tokens, heads + 3, dim + 5), torch.nan)
    wide[:, :, 1 : heads + 1, 3 : dim + 3] = x
    return wide[:, :, 1 : heads + 1, 3 : dim + 3]


def store_transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "packed": store_packed,
    "transposed": store_transposed,
}


def expand_to_blocks(layout: Layout, block: int, seqlen: int, first: int = 0) -> Layout:
    """Return ``layout`` with each position replaced by a block of positions.

    Args:
        layout: layout of the blocks.
        block: positions per block.
        seqlen: positions in all; the last block may be short.
        first: index of the block that replaces position 0.
    """
    blocks = [layout.positions(rank).tolist() for rank in range(layout.world)]
    return Layout([[((first + p) * block, min(block, seqlen - p * block)) for p in shard] for shard in blocks])


def reference_options(call: dict[str, Any]) -> AttentionOptions:
    """Return the call's arguments in the reference's form."""
    options = {name: value for name, value in call.items() if name not in RING_ONLY_ARGUMENTS}
    pattern = call.get("block_mask")
    if "window_size" in options:
        options["window_size"] = tuple(-1 if side is None else side for side in options["window_size"])
    if isinstance(options.get("cu_seqlens"), Tensor):
        options["cu_seqlens"] = options["cu_seqlens"].tolist()
    if isinstance(pattern, Longformer):
        options |= {"window_size": pattern.window, "global_tokens": pattern.global_tokens}
    if isinstance(options.get("intervals"), Intervals):
        options["intervals"] = [*options["intervals"].table]
    if isinstance(pattern, BlockMask):
        options |= {"block_mask": pattern.visible, "block_size": pattern.block}
    return cast(AttentionOptions, options)


def run_ring_case(case: RingCase) -> tuple[Results, Tensor | None]:
    """Return the results of a world of virtual ranks, and the sum of their parts of the sink's gradient."""
    with LocalWorld(case.layout.world) as world:
        return combine_ranks(case, world.run(lambda group: rank_results(case, group)))


def combine_ranks(case: RingCase, parts: Sequence[Sequence[Tensor | None]]) -> tuple[Results, Tensor | None]:
    """Join the ranks' results and check ``max_logits``; a gradient that was not required is None."""
    if case.call.get("return_max_logits"):
        *parts, largest = zip(*parts, strict=True)
        check_max_logits(case, largest)
        parts = [*zip(*parts, strict=True)]
    out, lse, dq, dk, dv, dsink = ([x for x in shards if x is not None] for shards in zip(*parts, strict=True))
    order = (case.layout, out, 1), (case.layout, lse, 2), (case.layout, dq, 1), (case.keys, dk, 1), (case.keys, dv, 1)
    tensors = [join_shards(layout, shards, dim) if shards else None for layout, shards, dim in order]
    total = torch.stack(dsink).double().sum(0).to(dsink[0].dtype) if dsink else None
    return Results(*tensors), total  # type: ignore[arg-type]


def rank_results(case: RingCase, group: LocalGroup) -> list[Tensor | None]:
    if case.mesh is not None:
        return start_call(case, group.rank(), group=group.mesh(*case.mesh)).finish()
    with Ring(group, **case.ring) as ring:
        return start_call(case, group.rank(), ring=ring).finish()


class StartedCall(NamedTuple):
    """A call after its forward."""

    case: RingCase
    results: tuple[Tensor, ...]
    """out, lse and, if asked for, max_logits."""
    leaves: dict[str, Tensor]
    grads: dict[str, Tensor]
    input_snapshots: list[tuple[str, Tensor, int, Tensor]]
    """Every input tensor that must not change: its name, the tensor, its version and its storage's bytes."""

    def finish(self) -> list[Tensor | None]:
        """Run the backward and return out, lse, the gradients of q, k, v and the sink, and max_logits if asked for.

        A gradient that is not required is None.
        """
        leaves = {name: x for name, x in self.leaves.items() if x.requires_grad}
        grads = [*self.grads.values()]
        copies = [storage_bytes(x) for x in self.results]
        results = torch.autograd.grad(self.results[: len(grads)], [*leaves.values()], grads) if leaves else ()
        assert all(storage_bytes(x).equal(before) for x, before in zip(self.results, copies, strict=True)), (
            "out was changed"
        )
        for name, x, version, before in self.input_snapshots:
            assert x._version == version and storage_bytes(x).equal(before), f"{name} was changed by the call"
        grad_by_name = dict(zip(leaves, results, strict=True))
        out, lse, *largest = self.results
        assert not any(x.requires_grad for x in largest), "max_logits has a gradient"
        return [out.detach(), lse.detach(), *(grad_by_name.get(name) for name in "qkvs"), *largest]


def start_call(
    case: RingCase, rank: int, *, change: Callable[[dict[str, Any]], None] = lambda arguments: None, **where: Any
) -> StartedCall:
    """Run one rank's forward; ``where`` is its ring or group, and ``change`` may edit the final arguments."""
    restride = STRIDES[case.strides]
    layouts = {"q": case.layout, "k": case.keys, "v": case.keys, "dout": case.layout}
    tensors = {name: restride(take_rank_tokens(layouts[name], case.whole[name], rank)) for name in layouts}
    leaves = {name: tensors[name] for name in "qkv"}
    if case.sink is not None:
        leaves["s"] = case.sink.clone()
    for name, x in leaves.items():
        x.requires_grad_(name in case.grads)
    grads = {"out": tensors["dout"]}
    if case.through_lse:
        grads["lse"] = take_rank_tokens(case.layout, case.whole["dlse"], rank, 2)
    pattern = case.call.get("block_mask")
    options = tensors | grads | case.call | {"block_mask": getattr(pattern, "visible", pattern)}
    options |= {"learnable_sink": leaves.get("s")}
    snapshots = [(name, x, x._version, storage_bytes(x)) for name, x in options.items() if isinstance(x, Tensor)]
    arguments = {name: x for name, x in leaves.items() if name != "s"} | case.call | where
    arguments |= {"layout": case.layout, "kv_layout": case.kv_layout, "learnable_sink": leaves.get("s")}
    change(arguments)
    return StartedCall(case, ring_attention(**arguments, return_lse=True), leaves, grads, snapshots)  # type: ignore[arg-type]


def storage_bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()  # type: ignore[no-untyped-call]


def take_rank_tokens(layout: Layout, x: Tensor, rank: int, dim: int = 1) -> Tensor:
    """Return a rank's tokens of ``x``, which holds the positions 0, 1, 2, …; the layout may leave some out."""
    return x.index_select(dim, layout.positions(rank))


def join_shards(layout: Layout, shards: list[Tensor], dim: int = 1) -> Tensor:
    """Return the tokens of all shards in the order of their positions."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).argsort()
    return torch.cat(shards, dim).index_select(dim, order)


def all_positions(layout: Layout) -> Tensor:
    return torch.cat([layout.positions(rank) for rank in range(layout.world)]).sort().values


def check_max_logits(case: RingCase, largest: Sequence[Tensor | None]) -> None:
    """Check that ``max_logits`` is equal on all ranks, and as exact as PyTorch's in fp32."""
    first, *others = largest
    assert first is not None and first.dtype == torch.float32
    assert all(x is not None and x.equal(first) for x in others), "max_logits differs between ranks"
    ranks = [rank for rank, length in enumerate(case.layout.lengths) if length]
    parts = [(all_positions(case.layout), case.whole)]
    if resolve_wire(case.ring.get("wire_dtype"), case.whole["k"].dtype) is not None:
        parts = [(case.layout.positions(rank), arrived_sequence(case, rank)) for rank in ranks]
    exact, theirs, magnitudes = (
        torch.stack(x).amax(0) for x in zip(*(_max_logits(case, *x) for x in parts), strict=True)
    )
    assert_as_exact_as_pytorch("max_logits", first, theirs, exact, magnitude=magnitudes.max().item())


def _max_logits(case: RingCase, rows: Tensor, whole: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``max_logits`` of some queries in float64 and in fp32, and the largest sum of absolute terms, ``[H]``."""
    columns, options = all_positions(case.keys), reference_options(case.call)
    heads, scale = whole["q"].shape[2], scale_or_default(whole["q"], options.get("softmax_scale"))
    hidden = ~add_head_dim(evaluate_masks(rows, columns, options))

    def largest(dtype: torch.dtype, *, absolute: bool = False) -> Tensor:
        q, k = (whole[name][:, at].transpose(1, 2).to(dtype) for name, at in (("q", rows), ("k", columns)))
        k = k.repeat_interleave(heads // k.shape[1], 1)
        scores = scale * (q.abs() @ k.abs().mT) if absolute else scale * (q @ k.mT)
        scores = scores if absolute else apply_score_options(scores, rows, columns, options)
        if scores.numel() == 0:
            return torch.full((heads,), -torch.inf, dtype=dtype)
        return scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))

    # Kernels convert a score to base 2 and back, which takes four roundings of half a step. Above a quarter of the
    # cap, the error of tanh is relative to the cap.
    terms = largest(torch.float64, absolute=True) * (12 if options.get("softcap") else 3)
    slopes = options.get("alibi_slopes")
    if slopes is not None and (bias := alibi_bias(slopes, rows, columns)).numel():
        terms = terms + 3 * bias.abs().max()
    return largest(torch.float64), largest(torch.float32), terms.clamp(min=0)


def check_case(case: RingCase) -> Results:
    """Run a case, compare it with PyTorch and return our results."""
    ours, dsink = run_ring_case(case)
    compare_with_expected(expected_results(case), ours, dsink)
    return ours


class ExpectedResults(NamedTuple):
    """Reference results and tolerances of a call."""

    exact: Results
    pytorch: Results
    magnitudes: dict[str, float]
    sinks: tuple[Tensor, Tensor, float] | None  # the sink's exact gradient, PyTorch's, and the magnitude of its terms


def compare_with_expected(right: ExpectedResults, ours: Results, dsink: Tensor | None = None) -> None:
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


def expected_results(case: RingCase) -> ExpectedResults:
    """Compute the expected results, rank by rank with the decoded keys if a wire dtype is set."""
    dtype, ranks = case.whole["k"].dtype, range(case.layout.world)
    if resolve_wire(case.ring.get("wire_dtype"), dtype) is None:
        result = expected_for_queries(case, all_positions(case.layout), case.whole)
    else:
        busy = [rank for rank in ranks if case.layout.lengths[rank]]
        result = add_ranks(
            case,
            [expected_for_queries(case, case.layout.positions(rank), arrived_sequence(case, rank)) for rank in busy],
        )
    if resolve_grad_wire(case.ring.get("grad_wire_dtype")) is not None:
        # Every hop rounds by half a step of the wire dtype.
        # The tolerance has room for two half steps of q's dtype.
        steps = torch.finfo(torch.bfloat16).eps / torch.finfo(dtype).eps * max(1.0, (len(ranks) - 1) / 2)
        result.magnitudes.update(
            {name: result.magnitudes[name] * steps for name in ("dk", "dv") if name in result.magnitudes}
        )
    return result


def add_ranks(case: RingCase, parts: list[ExpectedResults]) -> ExpectedResults:
    """Combine the ranks' queries in the order of their positions, and sum dk, dv and the sink's gradient."""

    def join_all(results: list[Results]) -> Results:
        out, lse, dq, dk, dv = ([*shards] for shards in zip(*results, strict=True))
        rows = join_shards(case.layout, out), join_shards(case.layout, lse, 2), join_shards(case.layout, dq)
        return Results(*rows, torch.stack(dk).sum(0), torch.stack(dv).sum(0))

    names = ("dk", "dv")
    sizes = {
        name: (sum if name in names else max)(part.magnitudes.get(name, 0.0) for part in parts)
        for name in parts[0].magnitudes
    }
    sinks = [part.sinks for part in parts if part.sinks is not None]
    total = (sum(x[0] for x in sinks), sum(x[1] for x in sinks), sum(x[2] for x in sinks)) if sinks else None
    exact, pytorch = (join_all([getattr(part, name) for part in parts]) for name in ("exact", "pytorch"))
    return ExpectedResults(exact, pytorch, sizes, total)  # type: ignore[arg-type]


def send_over_wire(x: Tensor, by: Wire | None) -> Tensor:
    """Return ``x`` after encoding and decoding by a wire."""
    if by is None:
        return x
    sent = tuple(torch.empty(size, dtype=dtype, device=x.device) for size, dtype in by.specs(tuple(x.shape)))
    by.encode(x, sent)
    into = torch.empty_like(x)
    by.decode(sent, into)
    return into


def arrived_sequence(case: RingCase, rank: int) -> dict[str, Tensor]:
    """Return the sequence that a rank sees: its own keys exact, the others' after the wire."""
    names = ("causal", "window_size", "cu_seqlens", "seqused_k", "prefix_length", "islands", "block_mask", "intervals")
    call = {name: value for name, value in case.call.items() if name in names}
    mask = mask_from_options(Layouts(case.layout, case.keys), case.whole["q"].shape[0], **call)
    wire = resolve_wire(case.ring["wire_dtype"], case.whole["k"].dtype)
    runs = chunk_runs(case.ring.get("chunks", 1), case.whole["k"].shape[2])
    moving = [run for _, run in cut_keys(case.layout, mask, case.keys, runs)]
    whole = case.whole | {name: case.whole[name].clone() for name in "kv"}
    for sent in (run.positions(other) for run in moving for other in range(run.world) if other != rank):
        for name in "kv":
            whole[name][:, sent] = send_over_wire(case.whole[name][:, sent], wire)
    return whole


def expected_for_queries(case: RingCase, rows: Tensor, whole: dict[str, Tensor]) -> ExpectedResults:
    """Compute the expected results for the queries at some positions and all keys."""
    columns, options = all_positions(case.keys), reference_options(case.call)
    scale = options.get("softmax_scale")
    dlse = whole["dlse"][:, :, rows] * case.through_lse
    x = Inputs(whole["q"][:, rows], whole["k"][:, columns], whole["v"][:, columns], whole["dout"][:, rows], dlse)
    visible = evaluate_masks(rows, columns, options)
    modified = ReferenceModifiers.from_scores(
        (x.q.shape[0], x.q.shape[2], len(rows), len(columns)), rows, columns, options
    )
    truth, dsink = exact_with_sink(*x, case.sink, q_positions=rows, k_positions=columns, **options)
    theirs, their_dsink = pytorch_with_sink(*x, case.sink, visible=visible, softmax_scale=scale, modified=modified)
    sinks = None
    if case.sink is not None and dsink is not None and their_dsink is not None:
        sinks = dsink, their_dsink, sink_magnitude(case.sink, truth, x, visible, scale)
    # The exponential of PyTorch's CPU operator is less exact in 16 bit.
    if case.call.get("backend", "aten") != "triton" and x.q.dtype != torch.float32:
        theirs = theirs._replace(lse=operator_lse(x.q, x.k, visible, scale, case.sink))
    return ExpectedResults(truth, theirs, magnitudes(x, truth, visible, scale, few_keys=True, modified=modified), sinks)


def sink_magnitude(sink: Tensor, truth: Results, x: Inputs, visible: Tensor, softmax_scale: float | None) -> float:
    """Return the largest sum of absolute terms behind a sink's gradient, like :func:`.kernel_cases.magnitudes`.

    The error of ``lse`` is at most that of the row's scores, which is relative to the terms of their sums. An fp32
    sink has an fp32 gradient, but it comes from an ``out`` that was rounded to the dtype of q.
    """
    logits, exponents = sink.to(torch.float64)[:, None], truth.lse.abs()
    if x.k.shape[1]:
        q, k = (t.to(torch.float64).abs().transpose(1, 2) for t in (x.q, x.k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ k.mT * (x.q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)).abs()
        exponents = exponents.maximum(scores.masked_fill(~add_head_dim(visible), 0.0).amax(-1))
    weights = torch.exp(logits - truth.lse) * (1 + logits.abs() + exponents)
    terms = weights * ((x.dout * truth.out).abs().sum(-1).transpose(1, 2) + x.dlse.abs())
    coarser = max(1.0, torch.finfo(x.q.dtype).eps / torch.finfo(sink.dtype).eps)
    return terms.nan_to_num(nan=0.0, posinf=0.0).sum((0, 2)).max().item() * coarser
