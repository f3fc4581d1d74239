"""One call of ``ring_attention`` with any arguments on every rank of a ``LocalWorld``, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import LocalGroup
from ringattn.reference.masks import pairs
from ringattn.reference.scores import Options
from ringattn.ring.block_mask import BlockMask, Longformer

from .baselines import Modified, Results, exact, exact_with_sink, operator_lse, pytorch, pytorch_with_sink
from .kernel_cases import Inputs, magnitudes
from .tolerance import assert_as_exact_as_pytorch

NOT_THE_REFERENCES = ("backend", "config", "block_mask")
"""Arguments of a call that the reference does not take, or takes in other words."""


@dataclass
class Case:
    """Everything about one call, all ranks together."""

    layout: Layout
    whole: dict[str, Tensor] = field(repr=False)
    """q, k, v, dout and dlse of the positions 0, 1, 2, …, as :func:`.ring_cases.inputs` makes them."""
    call: dict[str, Any]
    """Arguments of ``ring_attention``."""
    kv_layout: Layout | None = None
    sink: Tensor | None = None
    strides: str = "contiguous"
    """A key of STRIDES."""
    through_lse: bool = True
    """Whether there is a gradient through ``lse``."""
    ring: dict[str, Any] = field(default_factory=dict)
    """Arguments of :class:`Ring`."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis, which would print every tensor, and then warns of that."""
        printer.text(repr(self))

    @property
    def keys(self) -> Layout:
        """Who holds which keys."""
        return self.layout if self.kv_layout is None else self.kv_layout


def packed(x: Tensor) -> Tensor:
    """The same as a part of a wider tensor, as q, k and v of one projection are; around it is NaN."""
    batch, tokens, heads, dim = x.shape
    wide = x.new_full((batch, tokens, heads + 3, dim + 5), torch.nan)
    wide[:, :, 1 : heads + 1, 3 : dim + 3] = x
    return wide[:, :, 1 : heads + 1, 3 : dim + 3]


def transposed(x: Tensor) -> Tensor:
    """The same, stored ``[B, H, S, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "packed": packed,
    "transposed": transposed,
}


def in_blocks(layout: Layout, block: int, seqlen: int, first: int = 0) -> Layout:
    """``layout``, each of whose positions becomes a block of positions, ``seqlen`` in all: the last may be short.

    ``first`` is the block that position 0 becomes.
    """
    blocks = [layout.positions(rank).tolist() for rank in range(layout.world)]
    return Layout([[((first + p) * block, min(block, seqlen - p * block)) for p in own] for own in blocks])


@contextmanager
def unchanged(*tensors: object) -> Iterator[None]:
    """Whatever memory these lie in has the same bytes afterwards, and autograd knows of no change."""
    given = [x.detach() for x in tensors if isinstance(x, Tensor)]
    memory = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in given]
    before, versions = [x.clone() for x in memory], [x._version for x in given]
    yield
    assert all(map(torch.equal, memory, before))
    assert versions == [x._version for x in given]


def said(call: dict[str, Any]) -> Options:
    """The same arguments as the reference takes them."""
    options = {name: value for name, value in call.items() if name not in NOT_THE_REFERENCES}
    pattern = call.get("block_mask")
    if isinstance(pattern, Longformer):
        options |= {"window_size": pattern.window, "global_tokens": pattern.global_tokens}
    if isinstance(pattern, BlockMask):
        options |= {"block_mask": pattern.visible, "block_size": pattern.block}
    return cast(Options, options)


def run(case: Case) -> tuple[Results, Tensor | None]:
    """The results of a world of virtual ranks, and the sum of their parts of the sink's gradient."""
    with LocalWorld(case.layout.world) as world:
        parts = world.run(lambda group: of_rank(case, group))
    out, lse, dq = (joined(case.layout, [part[i] for part in parts], 2 if i == 1 else 1) for i in range(3))
    dk, dv = (joined(case.keys, [part[i] for part in parts]) for i in (3, 4))
    dsink = None if case.sink is None else torch.stack([part[5] for part in parts]).sum(0)
    return Results(out, lse, dq, dk, dv), dsink


def of_rank(case: Case, group: LocalGroup) -> list[Tensor]:
    """Out, lse and the gradients of one rank."""
    rank, restride = group.rank(), STRIDES[case.strides]
    held = {"q": case.layout, "k": case.keys, "v": case.keys, "dout": case.layout}
    q, k, v, dout = (restride(taken(held[name], x, rank)) for name, x in case.whole.items() if name in held)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given: dict[str, Any] = {}
    if case.sink is not None:
        leaves.append(case.sink.clone().requires_grad_())
        given["learnable_sink"] = leaves[3]
    dlse = taken(case.layout, case.whole["dlse"], rank, 2)
    pattern = getattr(case.call.get("block_mask"), "visible", None)
    with Ring(group, **case.ring) as ring, unchanged(*leaves, dout, dlse, pattern, *case.call.values()):
        out, lse = ring_attention(
            q, k, v, layout=case.layout, kv_layout=case.kv_layout, ring=ring, return_lse=True, **case.call, **given
        )
        results, grads = ([out, lse], [dout, dlse]) if case.through_lse else ([out], [dout])
        with unchanged(out, lse):
            return [out.detach(), lse.detach(), *torch.autograd.grad(results, leaves, grads)]


def taken(layout: Layout, x: Tensor, rank: int, dim: int = 1) -> Tensor:
    """Of a tensor that holds the positions 0, 1, 2, ..., those of a rank, also where the layout leaves some out."""
    return x.index_select(dim, layout.positions(rank))


def joined(layout: Layout, shards: list[Tensor], dim: int = 1) -> Tensor:
    """The tokens of a layout in the order of their positions."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).argsort()
    return torch.cat(shards, dim).index_select(dim, order)


def held(layout: Layout) -> Tensor:
    """All positions of a layout, ascending."""
    return torch.cat([layout.positions(rank) for rank in range(layout.world)]).sort().values


def check(case: Case) -> Results:
    """As exact as PyTorch; returns our results."""
    ours, dsink = run(case)
    compare(case, ours, dsink)
    return ours


def compare(case: Case, ours: Results, dsink: Tensor | None = None) -> None:
    """Results that are there, and the sum of the ranks' parts of the sink's gradient."""
    rows, columns = held(case.layout), held(case.keys)
    options = said(case.call)
    scale = options.get("softmax_scale")
    x = whole_inputs(case, rows, columns)
    seen = pairs(rows, columns, options)
    modified = Modified.of((x.q.shape[0], x.q.shape[2], len(rows), len(columns)), rows, columns, options)
    if case.sink is None:
        truth = exact(*x, q_positions=rows, k_positions=columns, **options)
        theirs = pytorch(*x, seen=seen, softmax_scale=scale, modified=modified)
    else:
        truth, exact_dsink = exact_with_sink(*x, case.sink, q_positions=rows, k_positions=columns, **options)
        theirs, their_dsink = pytorch_with_sink(*x, case.sink, seen=seen, softmax_scale=scale, modified=modified)
        assert dsink is not None
        size = size_of_sink(case.sink, truth, x)
        assert_as_exact_as_pytorch("dsink", dsink, their_dsink, exact_dsink, magnitude=size)
    if by_the_operator(case):
        theirs = theirs._replace(lse=operator_lse(x.q, x.k, seen, scale, case.sink))
    sizes = magnitudes(x, truth, seen, scale, few_keys=True, modified=modified)
    for name, *results in zip(Results._fields, ours, theirs, truth, strict=True):
        assert_as_exact_as_pytorch(name, *results, magnitude=sizes.get(name))


def whole_inputs(case: Case, rows: Tensor, columns: Tensor) -> Inputs:
    """Of the positions that are held, all ranks together."""
    whole = case.whole
    dlse = whole["dlse"][:, :, rows] if case.through_lse else torch.zeros_like(whole["dlse"][:, :, rows])
    return Inputs(whole["q"][:, rows], whole["k"][:, columns], whole["v"][:, columns], whole["dout"][:, rows], dlse)


def by_the_operator(case: Case) -> bool:
    """Whether ``lse`` may come from PyTorch's CPU operator, whose exponential in 16 bit is less than exact."""
    return case.call.get("backend", "aten") != "triton" and case.whole["q"].dtype != torch.float32


def size_of_sink(sink: Tensor, truth: Results, x: Inputs) -> float:
    """The largest sum of absolute terms behind a sink's gradient, as :func:`.kernel_cases.magnitudes` has it.

    A sink in fp32 has a gradient in fp32, from an ``out`` that was rounded to the dtype of q.
    """
    logits = sink.to(torch.float64)[:, None]
    weights = torch.exp(logits - truth.lse) * (1 + logits.abs() + truth.lse.abs())
    terms = weights * ((x.dout * truth.out).abs().sum(-1).transpose(1, 2) + x.dlse.abs())
    coarser = torch.finfo(x.q.dtype).eps / torch.finfo(sink.dtype).eps
    return terms.nan_to_num(nan=0.0, posinf=0.0).sum((0, 2)).max().item() * coarser
