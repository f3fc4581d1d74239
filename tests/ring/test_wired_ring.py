"""The ring in float64 that says what each wire adds: exact without one, and rounded where its wire rounds alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn import reference
from ringattn.ring.wire import grad_wire_of, wire_of

from ..support.wired_ring import ring

FP8, BF16 = wire_of("float8_e4m3fn", torch.float32), grad_wire_of("bfloat16")


def draw(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dout = (torch.randn(2, tokens, heads, 6) for heads in (4, 2, 2, 4))
    return q, k, v, dout


@pytest.mark.parametrize(("world", "causal"), [(1, True), (2, False), (4, True)])
def test_without_a_wire_it_is_exact(world: int, causal: bool) -> None:
    inputs = draw(21)
    q, k, v = leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out, _ = reference.attention(q, k, v, causal=causal)
    expected = (out, *torch.autograd.grad(out, leaves, inputs[3].double()))
    for made, exact in zip(ring(inputs, world=world, causal=causal), expected, strict=True):
        torch.testing.assert_close(made, exact, rtol=1e-12, atol=1e-12)


def test_what_only_its_owner_sees_is_not_rounded() -> None:
    """Causal and contiguous: the first rank sees its own keys alone, the last one's keys are seen by nobody else."""
    inputs = draw(20)
    made, exact, only_dkv = ring(inputs, wire=FP8, grad_wire=BF16), ring(inputs), ring(inputs, grad_wire=BF16)
    assert torch.equal(made.out[:, :5], exact.out[:, :5]) and torch.equal(made.dq[:, :5], exact.dq[:, :5])
    assert 0 < (made.out - exact.out).norm() < 2**-3 * exact.out.norm()
    assert torch.equal(only_dkv.out, exact.out) and torch.equal(only_dkv.dq, exact.dq)
    assert torch.equal(only_dkv.dk[:, 15:], exact.dk[:, 15:])
    assert 0 < (only_dkv.dk - exact.dk).norm() < 2**-7 * exact.dk.norm()
