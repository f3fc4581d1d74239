"""The error that each way of travelling adds to attention: `python -m ringattn.bench.wire_errors`.

A ring of ranks in one process in float64, so that what differs from the exact result is what the wire did: K/V of the
other ranks are encoded once and decoded, sums of dK/dV are encoded and decoded at every hop, the last one home.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..reference import visible
from ..reference.blockwise import row_delta, tile_gradients
from ..ring.wire import Wire, dtype_name, grad_wire_of, wire_of

CHOICES = ((None, "bfloat16"), ("bfloat16", None), ("float8_e4m3fn", None), ("float8_e4m3fn", "bfloat16"))
"""``(wire_dtype, grad_wire_dtype)``"""


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Shape(NamedTuple):
    """Of the whole sequence."""

    batch: int = 1
    tokens: int = 1024
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64


SMALL = Shape()


def draw(shape: Shape, dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normal ``q, k, v, dout`` as the model has them, in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.batch, shape.tokens, count, shape.head_dim) for count in heads]
    q, k, v, dout = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return q, k, v, dout


def travelled(x: Tensor, by: Wire | None) -> Tensor:
    """``x`` as it arrives, in its own dtype."""
    if by is None:
        return x
    sent = tuple(torch.empty(size, dtype=dtype, device=x.device) for size, dtype in by.specs(tuple(x.shape)))
    by.encode(x, sent)
    into = torch.empty_like(x)
    by.decode(sent, into)
    return into


def ring(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    wire: Wire | None = None,
    grad_wire: Wire | None = None,
    world: int = 4,
    causal: bool = True,
) -> Results:
    """Forward and backward over contiguous shards; float64 but for what the wires round.

    Args:
        inputs: ``q, k, v, dout`` of the whole sequence.
        wire: how K/V travel; grad_wire: how fp32 sums of dK/dV travel.
    """
    q, k, v, dout = (x.tensor_split(world, 1) for x in inputs)
    positions = torch.arange(inputs[0].shape[1]).tensor_split(world)
    near = list(zip(k, v, strict=True))
    far = [(travelled(key, wire), travelled(value, wire)) for key, value in near]
    outs, levels = [], []
    for rank in range(world):
        pairs = [near[rank] if owner == rank else far[owner] for owner in range(world)]
        keys, values = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        here, everywhere = positions[rank], torch.cat(positions)
        out, lse = reference.attention(q[rank], keys, values, causal=causal, q_positions=here, k_positions=everywhere)
        outs.append(out)
        levels.append((lse, row_delta(dout[rank], out, None)))
    dq, dk, dv = ([torch.zeros(x.shape, dtype=torch.float64) for x in shards] for shards in (q, k, v))
    for owner, hop in product(range(world), (*range(1, world), 0)):  # the owner adds last, when its sums are home
        rank = (owner + hop) % world
        pair = near[owner] if rank == owner else far[owner]
        seen = visible(positions[rank], positions[owner], causal=causal)
        scale = q[rank].shape[-1] ** -0.5
        parts = tile_gradients(dout[rank], q[rank], *pair, *levels[rank], seen=seen, scale=scale)
        dq[rank] += parts[0]
        dk[owner] += parts[1]
        dv[owner] += parts[2]
        if rank != owner and grad_wire is not None:
            dk[owner], dv[owner] = (travelled(x.float(), grad_wire).double() for x in (dk[owner], dv[owner]))
    return Results(*(torch.cat(shards, 1) for shards in (outs, dq, dk, dv)))


class Added(NamedTuple):
    """What one choice adds, per result: the root mean square of the error over that of the result."""

    wire_dtype: str
    grad_wire_dtype: str
    errors: dict[str, float]
    rounding: dict[str, float]  # to store the exact result in the model dtype


def errors(
    shape: Shape = SMALL, dtype: torch.dtype = torch.bfloat16, *, world: int = 4, causal: bool = True, seed: int = 0
) -> Iterator[Added]:
    """Every choice that changes something for tensors of ``dtype``, on normal inputs of ``shape``."""
    inputs = draw(shape, dtype, seed=seed)
    exact = ring(inputs, world=world, causal=causal)
    stored = {name: relative(x.to(dtype), x) for name, x in exact._asdict().items()}
    for name, grad_name in CHOICES:
        wire, grad_wire = wire_of(name, dtype), grad_wire_of(grad_name)
        if wire is None and name is not None:
            continue
        made = ring(inputs, wire=wire, grad_wire=grad_wire, world=world, causal=causal)
        found = {each: relative(getattr(made, each), getattr(exact, each)) for each in Results._fields}
        yield Added(name or "as it is", grad_name or "float32", found, stored)


def relative(made: Tensor, exact: Tensor) -> float:
    """``rms(made - exact) / rms(exact)``."""
    return float((made.double() - exact).norm() / exact.norm())


def main() -> int:
    print(f"{'inputs':9} {'mask':6} {'wire':14} {'grad wire':10}" + "".join(f"{x:>10}" for x in Results._fields))
    for dtype, causal in product((torch.float32, torch.bfloat16), (True, False)):
        head = f"{dtype_name(dtype):9} {'causal' if causal else 'full':6}"
        for index, added in enumerate(errors(dtype=dtype, causal=causal)):
            if index == 0:
                print(f"{head} {'(stored)':25}" + "".join(f"{x:10.2e}" for x in added.rounding.values()))
            row = f"{head} {added.wire_dtype:14} {added.grad_wire_dtype:10}"
            print(row + "".join(f"{x:10.2e}" for x in added.errors.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
