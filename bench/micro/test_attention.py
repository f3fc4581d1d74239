"""Attention itself, small: by the CPU's backend, or by the kernels on a GPU. Interpreted kernels are not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringattn import Layout, LocalWorld, ring_attention
from ringattn.bench.kernels.contender import OURS
from ringattn.bench.kernels.contender import Given as Inputs
from ringattn.bench.kernels.rivals import contenders
from ringattn.bench.kernels.shape import Shape

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ON_GPU = DEVICE.type == "cuda"
SHAPE = Shape(8192, 16, 16, 128) if ON_GPU else Shape(512, 2, 2, 64, dtype="float32")
WORLD = 4


def finished(step: Callable[[], object]) -> Callable[[], None]:
    """The step with what it left on the device."""

    def run() -> None:
        step()
        if ON_GPU:
            torch.cuda.synchronize(DEVICE)

    return run


@pytest.mark.parametrize("what", ["forward", "forward with state", "backward"])
def test_one_launch(benchmark: Any, what: str) -> None:
    ours = next(one for one in contenders(DEVICE) if one.name == OURS)
    steps = ours.make(Inputs(SHAPE, *SHAPE.inputs(DEVICE))).steps
    benchmark(finished(steps[what]))


def test_a_ring_of_virtual_ranks(benchmark: Any) -> None:
    """Forward and backward over the transport inside one process."""
    layout = Layout.zigzag(SHAPE.seqlen, WORLD)
    given = [[layout.shard(x, rank) for x in SHAPE.inputs(DEVICE)] for rank in range(WORLD)]

    def step(group: Any) -> None:
        *inputs, dout = given[group.rank()]
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ring_attention(*leaves, layout=layout, group=group, causal=True)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, leaves, dout)

    with LocalWorld(WORLD, device=DEVICE) as world:
        benchmark(finished(lambda: world.run(step)))
