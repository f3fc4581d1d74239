"""Backward kernels of other kinds in a ring of virtual ranks: refused before anything moves, else exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm.topology.topology import Topology
from ringattn.kernels import KernelConfig, Tile, attention_delta
from ringattn.kernels.attention import Forward
from ringattn.kernels.experimental.single_pass import Gradients
from ringattn.ring import backends, loop

from ..kernels.test_hopper import ON_HOPPER, Launches, launches
from ..support.kernel_cases import DEVICE
from ..support.ring_cases import check_ring, inputs

__all__ = ["launches"]

TILE = Tile(32, 32, 4, 1)
CONFIG = KernelConfig(TILE, TILE, TILE, backward="hopper")
FORWARD = KernelConfig(Tile(128, 64, 8, 2), TILE, TILE, forward_kernel="hopper")
HALF = torch.float16


def refusals(dims: tuple[int, int], config: KernelConfig, **more: Any) -> list[str]:
    """Of every rank, by the call itself, without a gradient; before anything is sent."""
    layout = Layout.zigzag(40, 2)
    whole = inputs(layout.seqlen, dims=dims, dtype=HALF)

    def refused(group: Any) -> str:
        q, k, v = (layout.shard(whole[name], group.rank()).to(DEVICE) for name in "qkv")
        with Ring(group) as ring, pytest.raises(ValueError, match=r"='hopper' takes") as error:
            ring_attention(q, k, v, layout=layout, ring=ring, causal=True, backend="triton", config=config, **more)
        return str(error.value)

    def begun(*_: object) -> None:
        raise AssertionError("the first hop has begun")

    with LocalWorld(layout.world) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "forward", begun)
        return world.run(refused)


@pytest.mark.skipif(ON_HOPPER, reason="about a GPU of another kind")
@pytest.mark.parametrize("config", [CONFIG, FORWARD])
def test_another_gpu_is_refused_on_every_rank(config: KernelConfig) -> None:
    for message in refusals((64, 64), config):
        assert message.startswith("q is on ") and message.endswith("takes GPUs of compute capability 9.0")


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("config", "dims", "more", "start"),
    [
        (CONFIG, (64, 32), {}, "q has head dim 64 and v 32"),
        (FORWARD, (64, 32), {}, "q has head dim 64 and v 32"),
        (CONFIG, (64, 64), {"softcap": 5.0}, "scores have a softcap, ALiBi slopes or dropout"),
        (FORWARD, (64, 64), {"softcap": 5.0}, "scores have a softcap, ALiBi slopes or dropout"),
        (replace(FORWARD, forward=TILE), (64, 64), {}, "config.forward has 32 rows and 4 warps"),
    ],
)
def test_what_hopper_does_not_take(
    config: KernelConfig, dims: tuple[int, int], more: dict[str, Any], start: str
) -> None:
    for message in refusals(dims, config, **more):
        assert message.startswith(start)


LENT = threading.Lock()


def one_at_a_time(entry: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in lends its modules to the kernel under the names of triton's: no other rank may look there then."""

    def locked(*arguments: Any, **options: Any) -> Any:
        with LENT:
            return entry(*arguments, **options)

    return locked


@pytest.mark.usefixtures("poison")
def test_hopper_is_exact(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hop within bounds that starts dK/dV, and one without that continues them; keys past the end of a tile."""
    monkeypatch.setattr(backends, "attention_delta", one_at_a_time(attention_delta))
    for bound in (Forward, Gradients):
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
def test_single_pass_is_exact(layout: Layout, ring: dict[str, Any], mode: str) -> None:
    """Grouped heads, causal."""
    check_ring(layout, inputs(layout.seqlen), causal=True, **single_pass(mode, **ring))
