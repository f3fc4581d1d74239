"""What ``ringattn doctor`` computes: a small ring against the reference, and what each wire dtype adds to its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...bench.common.attention import DTYPES
from ...bench.common.flags import binary
from ...bench.kernels.accuracy import Inputs, Results, by_pytorch, exactly, judged
from ...ring import Layout, Ring, ring_attention
from .findings import FAIL, OK, SKIPPED, Finding, Ranks, Skipped, examined

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64  # of the ring that is compared: the reference computes it in float64, dense
WIRES: tuple[tuple[str, dict[str, torch.dtype]], ...] = (
    ("K/V as bf16", {"wire_dtype": torch.bfloat16}),
    ("K/V as fp8 e4m3", {"wire_dtype": torch.float8_e4m3fn}),
    ("dK/dV as bf16", {"grad_wire_dtype": torch.bfloat16}),
)
AS_THEY_ARE = "K/V as they are"
NONSENSE = 0.5  # a relative error that no rounding explains
DIMS, RESULT_DIMS = (1, 1, 1, 1, 2), (1, 2, 1, 1, 1)  # along which inputs and results are sharded
REPORT_RING = (
    "bytes arrive, the result is wrong: `ringattn bench suite` says which kernel; please report it with --json"
)
LEAVE_OUT = "leave this argument of Ring out, and please report it with --json"


@dataclass(frozen=True)
class Shape:
    """What the user computes."""

    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    ring_seqlen: int = 4096
    """Tokens of the ring that is compared with the reference."""

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads


def against_reference(ranks: Ranks, shape: Shape) -> Finding:
    """Forward and backward of a causal ring over all ranks, against float64; rank 0 judges."""
    seqlen = max(shape.ring_seqlen, ranks.size)
    check = f"ring of {binary(seqlen)} tokens"
    return examined(check, REPORT_RING, lambda: _compared(ranks, shape, seqlen, check))


def _compared(ranks: Ranks, shape: Shape, seqlen: int, check: str) -> Finding:
    layout = Layout.zigzag(seqlen, ranks.size)
    given = inputs(shape, seqlen, ranks.device)

    def compute() -> str:
        with Ring(ranks.group) as ring:
            shards = [layout.shard(x, ranks.rank, dim).contiguous() for x, dim in zip(given, DIMS, strict=True)]
            leaves = [x.requires_grad_() for x in shards[:3]]
            out, lse = ring_attention(*leaves, layout=layout, ring=ring, causal=True, return_lse=True)
            results = (out, lse, *torch.autograd.grad((out, lse), leaves, shards[3:]))
            # through the store: what is being judged does not carry the evidence
            ranks.control.publish(f"part {ranks.rank}", [packed(x) for x in results])
            return ring.transport

    def judge() -> dict[str, Any] | None:
        if ranks.rank:
            return None
        told: list[Any] = [ranks.control.look(f"part {rank}") for rank in range(ranks.size)]
        parts = zip(*([unpacked(*x) for x in part] for part in told), strict=True)
        ours = Results(*(layout.unshard(list(x), dim) for x, dim in zip(parts, RESULT_DIMS, strict=True)))
        return _judged(ours, given, check, f"causal, zigzag, {shape.dtype}, transport {name}").as_json()

    name = ranks.together("a small ring", compute)[0]
    finding = ranks.together("the judgement of a small ring", judge)[0]
    assert finding is not None
    return Finding(**{**finding, "more": tuple(finding["more"])})


def packed(x: Tensor) -> list[Any]:
    """A tensor, bit by bit, for JSON."""
    held = x.detach().cpu().contiguous()
    return [str(x.dtype).removeprefix("torch."), list(x.shape), held.view(-1).view(torch.uint8).numpy().tobytes().hex()]


def unpacked(dtype: str, shape: list[int], data: str) -> Tensor:
    """The tensor that `packed` packed."""
    return torch.frombuffer(bytearray.fromhex(data), dtype=getattr(torch, dtype)).view(shape)


def _judged(ours: Results, given: Inputs, check: str, what: str) -> Finding:
    exact, pytorch = exactly(given, causal=True), by_pytorch(given, causal=True)
    errors = {
        name: judged(x.to(right.device), theirs, right)
        for name, x, theirs, right in zip(Results._fields, ours, pytorch, exact, strict=True)
    }
    wrong = [name for name, (error, _, limit) in errors.items() if not error <= limit]  # a NaN fails too
    text = ", ".join(f"{name} {error:.2g} (allowed {limit:.2g})" for name, (error, _, limit) in errors.items())
    data = {"errors": {name: dict(zip(("error", "pytorch", "limit"), x, strict=True)) for name, x in errors.items()}}
    if wrong:
        return Finding(check, FAIL, f"wrong in {', '.join(wrong)}; {what}: {text}", REPORT_RING, data=data)
    return Finding(check, OK, f"{what}: {text}", data=data)


def inputs(shape: Shape, seqlen: int, device: torch.device) -> Inputs:
    """The same on every rank: drawn on the CPU, from a generator of its own."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    q, k, v, dout = (
        draw(1, seqlen, heads, HEAD_DIM).to(device, DTYPES[shape.dtype]) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return Inputs(q, k, v, dout, draw(1, HEADS, seqlen).to(device))


def wires(ranks: Ranks, shape: Shape) -> Iterator[Finding]:
    """What each wire dtype adds to the error on the user's shapes, against the same ring that sends what it has."""
    if ranks.size == 1:
        yield Finding("wire dtypes", SKIPPED, "one rank sends nothing")
        return
    kept: list[tuple[Tensor, ...]] = []

    def plain() -> Finding:
        ranks.together("a ring that sends what it has", lambda: kept.append(run(ranks, shape)))
        return Finding(AS_THEY_ARE, OK, "")

    finding = examined(AS_THEY_ARE, REPORT_RING, plain)
    if finding.status != OK:
        yield finding
        return
    for name, given in WIRES:
        yield examined(name, LEAVE_OUT, partial(_added, ranks, shape, name, given, kept[0]))


def _added(
    ranks: Ranks, shape: Shape, name: str, given: Mapping[str, torch.dtype], plain: tuple[Tensor, ...]
) -> Finding:
    def squares() -> list[tuple[float, float]]:
        try:
            ours = run(ranks, shape, **given)
        except NotImplementedError as error:
            raise Skipped(str(error)) from None
        return [
            (float((a.double() - b.double()).square().sum()), float(b.double().square().sum()))
            for a, b in zip(ours, plain, strict=True)
        ]

    everyone = ranks.together(f"a ring that sends {name}", squares)
    added = {
        what: (sum(one[i][0] for one in everyone) / sum(one[i][1] for one in everyone)) ** 0.5
        for i, what in enumerate(("out", "dq", "dk", "dv"))
    }
    numbers = ", ".join(f"{what} {error:.2g}" for what, error in added.items())
    heads = f"{shape.group} query head{'s' * (shape.group > 1)} of one K/V head"
    what = f"{binary(shape.seqlen)} tokens, {heads}, D{shape.head_dim} {shape.dtype}, causal"
    if not all(error < NONSENSE for error in added.values()):  # NaN too
        return Finding(name, FAIL, f"adds, relative: {numbers} ({what})", LEAVE_OUT, data={"added": added})
    return Finding(name, OK, f"adds, relative: {numbers} ({what})", data={"added": added})


def run(ranks: Ranks, shape: Shape, **given: torch.dtype) -> tuple[Tensor, ...]:
    """out, dq, dk and dv of this rank: one key head and its query heads, which say as much as all."""
    layout = Layout.zigzag(shape.seqlen, ranks.size)
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    tokens = layout.lengths[ranks.rank]
    q, k, v, dout = (
        torch.randn((1, tokens, heads, shape.head_dim), generator=generator).to(ranks.device, DTYPES[shape.dtype])
        for heads in (shape.group, 1, 1, shape.group)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with Ring(ranks.group, **given) as ring:  # type: ignore[arg-type]
        out = ring_attention(*leaves, layout=layout, ring=ring, causal=True)
        assert isinstance(out, Tensor)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))
