"""Time small attention calls: one launch of each kernel, and a ring step of two virtual ranks.

On a GPU every kernel variant of `ringattn bench kernels` is timed; on the CPU the aten backend. Interpreted kernels are
never timed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Layout, LocalWorld, ring_attention
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.cases import UnavailableError
from ringattn.bench.kernels.contenders import BACKWARD, FORWARD, STATE, ContenderInputs, list_contenders
from ringattn.comm import GroupLike

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
CONFIG = (
    AttentionConfig(8192, heads=16, kv_heads=16, head_dim=128, dtype="bfloat16")
    if ON_GPU
    else AttentionConfig(512, heads=2, kv_heads=2, head_dim=64)
)
OURS = {one.name: one for one in list_contenders(DEVICE) if one.is_ours}
WORLD = 2


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize(DEVICE)


@pytest.mark.parametrize("step", [FORWARD, STATE, BACKWARD])
@pytest.mark.parametrize("name", OURS)
def test_one_launch(benchmark: Any, name: str, step: str) -> None:
    try:
        steps = OURS[name].make(ContenderInputs(CONFIG, *CONFIG.random_shard(0, DEVICE))).steps
    except UnavailableError as reason:
        pytest.skip(str(reason))
    if step not in steps:
        pytest.skip(f"{name} changes nothing in the {step}")

    def launch() -> None:
        steps[step]()
        synchronize()

    benchmark(launch)


def test_ring_step_of_two_virtual_ranks(benchmark: Any) -> None:
    """Time forward and backward of a causal zigzag ring over the transport inside one process."""
    layout = Layout.zigzag(CONFIG.seqlen, WORLD)
    drawn = [[layout.shard(x, rank) for x in CONFIG.random_shard(0, DEVICE)] for rank in range(WORLD)]

    def step(group: GroupLike) -> None:
        rank = group.rank()  # type: ignore[union-attr]  # a virtual rank
        *inputs, dout = drawn[rank]
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ring_attention(*leaves, layout=layout, group=group, causal=True)
        torch.autograd.grad(out, leaves, dout)

    with LocalWorld(WORLD, device=DEVICE) as world:

        def run() -> None:
            world.run(step)
            synchronize()

        benchmark(run)
