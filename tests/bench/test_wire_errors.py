"""The ring in float64 that says what each wire adds: exact without one, and rounded where its wire rounds alone."""

from __future__ import annotations

import pytest
import torch

from ringattn import reference
from ringattn.bench.wire_errors import Shape, draw, errors, ring
from ringattn.ring.wire import grad_wire_of, wire_of

SMALL = Shape(batch=2, tokens=21, heads=4, kv_heads=2, head_dim=6)
FP8, BF16 = wire_of("float8_e4m3fn", torch.float32), grad_wire_of("bfloat16")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_without_a_wire_it_is_exact(world: int, causal: bool) -> None:
    inputs = draw(SMALL, torch.float32)
    q, k, v = leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out, _ = reference.attention(q, k, v, causal=causal)
    expected = (out, *torch.autograd.grad(out, leaves, inputs[3].double()))
    for made, exact in zip(ring(inputs, world=world, causal=causal), expected, strict=True):
        torch.testing.assert_close(made, exact, rtol=1e-12, atol=1e-12)


def test_one_rank_sends_nothing() -> None:
    inputs = draw(SMALL, torch.float32)
    for made, exact in zip(ring(inputs, wire=FP8, grad_wire=BF16, world=1), ring(inputs, world=1), strict=True):
        assert torch.equal(made, exact)


def test_what_only_its_owner_sees_is_not_rounded() -> None:
    """Causal and contiguous: the first rank sees its own keys alone, the last one's keys are seen by nobody else."""
    inputs = draw(Shape(tokens=20), torch.float32)
    made, exact = ring(inputs, wire=FP8, grad_wire=BF16), ring(inputs)
    assert torch.equal(made.out[:, :5], exact.out[:, :5])
    assert torch.equal(made.dq[:, :5], exact.dq[:, :5])
    assert not torch.equal(made.out[:, 5:], exact.out[:, 5:])
    only_sums = ring(inputs, grad_wire=BF16)
    assert torch.equal(only_sums.out, exact.out)
    assert torch.equal(only_sums.dq, exact.dq)
    assert torch.equal(only_sums.dk[:, 15:], exact.dk[:, 15:])
    assert not torch.equal(only_sums.dk[:, :15], exact.dk[:, :15])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_choice_adds_what_its_steps_do(dtype: torch.dtype) -> None:
    """Relative errors of at most half a step in K and V: 2^-4 of fp8, 2^-8 of bfloat16; roundings average out."""
    rows = {(row.wire_dtype, row.grad_wire_dtype): row.errors for row in errors(SMALL, dtype, causal=False)}
    assert (("bfloat16", "float32") in rows) == (dtype != torch.bfloat16)
    for (name, _), found in rows.items():
        step = {"as it is": 2**-8, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}[name]
        assert max(found.values()) < 2 * step  # dK and dV have the error of P beside that of V or dO
    assert rows["as it is", "bfloat16"]["dk"] > 0 == rows["as it is", "bfloat16"]["out"]
