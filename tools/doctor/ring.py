"""What ``ringattn doctor`` computes: a small ring against the reference, and what each wire dtype adds to its error."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...bench.common.attention import DTYPES
from ...bench.common.flags import binary
from ...bench.kernels.accuracy import Inputs, Results, by_pytorch, exactly, judged
from ...comm.topology.topology import device_infos, ring_topology
from ...ring import Layout, Ring, ring_attention
from .findings import FAIL, SKIPPED, Failed, Finding, Ranks, Skipped, checked, error_text
from .links import transports
from .machine import Facts, facts, machine

REFERENCE = (2, 1, 64)  # heads, K/V heads and head dim of the ring that is compared: the reference is dense, float64
REFERENCE_TOKENS = 4096  # at most
WIRES: dict[str, dict[str, torch.dtype]] = {
    "K/V as bf16": {"wire_dtype": torch.bfloat16},
    "K/V as fp8 e4m3": {"wire_dtype": torch.float8_e4m3fn},
    "dK/dV as bf16": {"grad_wire_dtype": torch.bfloat16},
}
NONSENSE = 0.5  # a relative error that no rounding explains
DIMS, RESULT_DIMS = (1, 1, 1, 1, 2), (1, 2, 1, 1, 1)  # along which inputs and results are sharded
TRY_AGAIN = (
    "a rank stopped answering: look at its own output, above; run again with fewer ranks to find which host it is"
)
REPORT_RING = (
    "bytes arrive, the result is wrong: `ringattn bench suite` says which kernel; please report it with --json"
)
LEAVE_OUT = "leave this argument of Ring out, and please report it with --json"


class Shape(NamedTuple):
    """What the user computes, by one K/V head and its query heads, which say as much as all."""

    seqlen: int
    heads: int
    head_dim: int
    dtype: str


def examine(ranks: Ranks, shape: Shape, nbytes: int) -> Iterator[Finding]:
    """Every check, in order; each rank gets the findings of all."""
    try:
        everyone = [Facts(**one) for one in ranks.together("versions and settings", lambda: asdict(facts()))]
        ranks.ring = ring_topology(device_infos(ranks.control, ranks.device))
        yield from machine(everyone, ranks.ring, ranks.device)
        yield from transports(ranks, ranks.ring, nbytes)
        seqlen = min(shape.seqlen, REFERENCE_TOKENS)
        yield checked(
            f"ring of {binary(seqlen)} tokens", REPORT_RING, partial(_against_reference, ranks, seqlen, shape.dtype)
        )
        yield from wires(ranks, shape)
    except Exception as error:  # no answer from a rank: nothing that follows could be agreed on
        yield Finding("all ranks answer", FAIL, error_text(error), TRY_AGAIN)
    if not ranks.alone:
        # the launcher ends the others when one exits: not before rank 0 has come to its end too
        ranks.together("the end of the examination", lambda: None)


def inputs(seed: int, device: torch.device, dtype: str, sizes: tuple[int, int, int, int]) -> Inputs:
    """Drawn on the CPU from a generator of their own: the same on every rank with the same seed."""
    tokens, heads, kv_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(1, tokens, count, head_dim, generator=generator).to(device, DTYPES[dtype])
        for count in (heads, kv_heads, kv_heads, heads)
    )
    return Inputs(q, k, v, dout, torch.randn(1, heads, tokens, generator=generator).to(device))


def run(ranks: Ranks, layout: Layout, shards: Inputs, **wire: Any) -> tuple[Results, str]:
    """A causal ring, forward and backward, of this rank's shards; and its transport."""
    leaves = [x.requires_grad_() for x in shards[:3]]
    with Ring(ranks.group, **wire) as ring:
        out, lse = ring_attention(*leaves, layout=layout, ring=ring, causal=True, return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, shards[3:])
        return Results(out.detach(), lse.detach(), *grads), ring.transport


def _against_reference(ranks: Ranks, seqlen: int, dtype: str) -> str:
    """A ring over all ranks, against float64; rank 0 judges."""
    layout = Layout.zigzag(seqlen, ranks.size)
    given = inputs(0, ranks.device, dtype, (seqlen, *REFERENCE))

    def compute() -> str:
        shards = (layout.shard(x, ranks.rank, dim).contiguous() for x, dim in zip(given, DIMS, strict=True))
        results, transport = run(ranks, layout, Inputs(*shards))
        file = io.BytesIO()
        torch.save([x.cpu() for x in results], file)
        # through the store: what is being judged does not carry the evidence
        ranks.control.publish(f"part {ranks.rank}", file.getvalue().hex())
        return transport

    def judge() -> tuple[bool, str]:
        if ranks.rank:
            return True, ""
        parts = zip(*(_part(ranks, rank) for rank in range(ranks.size)), strict=True)
        ours = (layout.unshard(x, dim).to(ranks.device) for x, dim in zip(parts, RESULT_DIMS, strict=True))
        exact, pytorch = exactly(given, causal=True), by_pytorch(given, causal=True)
        errors = {name: judged(*xs) for name, *xs in zip(Results._fields, ours, pytorch, exact, strict=True)}
        wrong = [name for name, (error, _, limit) in errors.items() if not error <= limit]  # a NaN fails too
        text = ", ".join(f"{name} {error:.2g} (allowed {limit:.2g})" for name, (error, _, limit) in errors.items())
        text = f"causal, zigzag, {dtype}, transport {transport}: {text}"
        return not wrong, f"wrong in {', '.join(wrong)}; {text}" if wrong else text

    transport = ranks.together("a small ring", compute)[0]
    right, text = ranks.together("the judgement of a small ring", judge)[0]
    if not right:
        raise Failed(text)
    return text


def _part(ranks: Ranks, rank: int) -> list[Tensor]:
    """The results of a rank."""
    data: Any = ranks.control.look(f"part {rank}")
    parts: list[Tensor] = torch.load(io.BytesIO(bytes.fromhex(data)), weights_only=True)
    return parts


def wires(ranks: Ranks, shape: Shape) -> Iterator[Finding]:
    """What each wire dtype adds to the error on the user's shapes, against the same ring that sends what it has."""
    if ranks.size == 1:
        yield Finding("wire dtypes", SKIPPED, "one rank sends nothing")
        return
    layout = Layout.zigzag(shape.seqlen, ranks.size)
    sizes = (layout.lengths[ranks.rank], shape.heads, 1, shape.head_dim)

    def compute(**wire: torch.dtype) -> Results:
        return run(ranks, layout, inputs(1 + ranks.rank, ranks.device, shape.dtype, sizes), **wire)[0]

    plain: list[Results] = []
    try:
        ranks.together("a ring that sends what it has", lambda: plain.append(compute()))
    except Failed as error:
        yield Finding("K/V as they are", FAIL, str(error), REPORT_RING)
        return

    def added(name: str, wire: Mapping[str, torch.dtype]) -> str:
        def squares() -> list[tuple[float, float]]:
            try:
                ours = compute(**wire)
            except NotImplementedError as error:
                raise Skipped(str(error)) from None
            pairs = [(a.double(), b.double()) for a, b in zip(ours, plain[0], strict=True)]
            return [(float((a - b).square().sum()), float(b.square().sum())) for a, b in pairs]

        everyone = ranks.together(f"a ring that sends {name}", squares)
        sums = [[sum(column) for column in zip(*pairs, strict=True)] for pairs in zip(*everyone, strict=True)]
        errors = {what: (a / b) ** 0.5 for what, (a, b) in zip(Results._fields, sums, strict=True)}
        heads = f"{shape.heads} query head{'s' * (shape.heads > 1)} of one K/V head"
        what = f"{binary(shape.seqlen)} tokens, {heads}, D{shape.head_dim} {shape.dtype}, causal"
        numbers = ", ".join(f"{what} {error:.2g}" for what, error in errors.items())
        text = f"adds, relative: {numbers} ({what})"
        if not all(error < NONSENSE for error in errors.values()):  # NaN too
            raise Failed(text)
        return text

    for name, wire in WIRES.items():
        yield checked(name, LEAVE_OUT, partial(added, name, wire))
