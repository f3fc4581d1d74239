"""What a graph of torch.compile that calls ``ring_attention`` refuses: what eager does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring

from .test_compile import HEADS, ROWS, block, compiled, fresh, inputs, packed_call

__all__ = ["fresh"]


def test_a_second_derivative_raises() -> None:
    q, k, v = inputs()
    out = compiled()(q, k, v)
    with pytest.raises(RuntimeError, match=r"double backward|second derivative"):
        torch.autograd.grad(torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum(), q)


def test_refusals_are_those_of_eager() -> None:
    tensors = inputs()
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        compiled()(*tensors, softmax_scale=-1.0)
    with pytest.raises(ValueError, match="cu_seqlens ends at 60: it must end at 64"):
        compiled()(*tensors, cu_seqlens=[0, 60])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"layout": 5}, "layout is '5': it must be a Layout or one of contiguous"),
        ({"layout": ""}, "layout is '': it must be a Layout or one of contiguous"),
        ({"cu_seqlens": [0, 7.5, ROWS]}, "cu_seqlens is torch.float32 .*: it must be integers"),
        ({"dropout_p": 0.5, "dropout_seed": -3}, "dropout_seed is -3: it must be 0 to 2"),
        ({"dropout_p": 0.5, "dropout_seed": 2**64 + 5}, "dropout_seed is 18446744073709551621: it must be 0 to 2"),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed is 1.5: it must be 0 to 2"),
    ],
)
def test_what_an_op_would_take_for_something_else_is_refused(call: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=message):
        compiled()(*inputs(), **call)


def test_slopes_made_in_the_graph_that_want_a_gradient_are_refused() -> None:
    slopes = torch.rand(HEADS, requires_grad=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block(q, k, v, alibi_slopes=slopes * 2)

    with pytest.raises(Exception, match="alibi_slopes requires a gradient"):  # torch's, around ours
        compiled(layer)(*inputs())


def test_a_ring_that_is_gone_is_named() -> None:
    q, k, v = inputs()
    packed = packed_call(ring=Ring())
    with pytest.raises(RuntimeError, match="ring of a compiled call is gone"):
        torch.ops.ringattn.ring_attention(q, k, v, *packed)


def test_the_backward_op_refuses_to_be_differentiated() -> None:
    q, k, v = inputs()
    out = torch.ops.ringattn.ring_attention(q, k, v, *packed_call())[0]
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
