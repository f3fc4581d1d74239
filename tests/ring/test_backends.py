"""Hopper and single-pass backward kernels in a ring of virtual ranks: exact, or refused before a transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringattn import Layout, Ring, ring_attention
from ringattn.comm.topology.topology import Topology
from ringattn.kernels import KernelConfig, Tile, attention_delta
from ringattn.kernels.attention import ForwardLauncher
from ringattn.kernels.single_pass import SinglePassLauncher
from ringattn.ring import loop
from ringattn.ring.local import fused

from ..kernels.test_hopper import ON_HOPPER, Launches, launches
from ..support.kernel_cases import DEVICE
from ..support.ring_cases import check_ring, inputs, run_ranks

__all__ = ["launches"]

TILE = Tile(32, 32, 4, 1)
CONFIG = KernelConfig(TILE, TILE, TILE, backward="hopper")
FORWARD = KernelConfig(Tile(128, 64, 8, 2), TILE, TILE, forward_kernel="hopper")
HALF = torch.float16


@pytest.mark.skipif(ON_HOPPER, reason="about a GPU of another kind")
@pytest.mark.parametrize("config", [CONFIG, FORWARD])
def test_hopper_kernels_on_another_gpu_are_refused_on_every_rank(
    config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, whole = Layout.zigzag(40, 2), inputs(40, dims=(64, 64), dtype=HALF)

    def refused(group: Any) -> None:
        q, k, v = (layout.shard(whole[name], group.rank()).to(DEVICE) for name in "qkv")
        with Ring(group) as ring, pytest.raises(ValueError, match=r"^q is on .* of compute capability 9.0$"):
            ring_attention(q, k, v, layout=layout, ring=ring, causal=True, backend="triton", config=config)

    def begun(*_: object) -> None:
        raise AssertionError("the first hop has begun")

    monkeypatch.setattr(loop, "forward", begun)
    run_ranks(layout.world, refused)


LENT = threading.Lock()


def one_at_a_time(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Serialize an entry across ranks: the stand-in replaces Triton's modules while a kernel runs."""

    def locked(*arguments: Any, **options: Any) -> Any:
        with LENT:
            return entry(*arguments, **options)

    return locked


@pytest.mark.usefixtures("poison")
def test_hopper_ring_is_exact(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hop with bounds starts dK/dV, the one without continues them, and the last tile is partial."""
    monkeypatch.setattr(fused, "attention_delta", one_at_a_time(attention_delta))
    for bound in (ForwardLauncher, SinglePassLauncher):
        monkeypatch.setattr(bound, "__call__", one_at_a_time(bound.__call__))
    layout, whole = Layout.zigzag(152, 2), inputs(152, (2, 1), (64, 64), HALF)
    check_ring(layout, whole, causal=True, backend="triton", config=CONFIG, device=DEVICE)
    assert ON_HOPPER or len(launches.machines) == 2 * 2 * 2  # ranks, hops, batches


pytestmark = pytest.mark.usefixtures("one_core")

MODES = ("single_pass", "single_pass_deterministic")


def single_pass(mode: str, **ring: Any) -> dict[str, Any]:
    tile = Tile(32, 32, 4, 1)
    return {"backend": "triton", "config": KernelConfig(tile, tile, tile, backward=mode), "ring": ring}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("layout", "ring", "mode"),
    [
        (Layout.zigzag(40, 2), {"chunks": 2}, MODES[0]),
        (Layout.striped(41, 3), {}, MODES[1]),
        (Layout.uneven([3, 30, 0, 5]), {"chunks": 2, "topology": Topology.grid(2, 2)}, MODES[0]),
    ],
    ids=["chunks", "deterministic", "two levels"],
)
def test_single_pass_ring_is_exact(layout: Layout, ring: dict[str, Any], mode: str) -> None:
    check_ring(layout, inputs(layout.seqlen), causal=True, **single_pass(mode, **ring))
