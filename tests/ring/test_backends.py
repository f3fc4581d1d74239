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
from ringattn.kernels.launch import is_tma_aligned
from ringattn.kernels.single_pass import SinglePassLauncher
from ringattn.ring import loop, ops, prepare
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
    check_ring(layout, whole, causal=True, backend="triton", config=CONFIG, device=DEVICE, ring={"chunks": 1})
    assert ON_HOPPER or len(launches.machines) == 2 * 2 * 2  # ranks, hops, batches


pytestmark = pytest.mark.usefixtures("one_core")


@pytest.mark.parametrize("is_adopted", [True, False])
def test_an_adopted_kernel_gets_an_aligned_gradient(is_adopted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adopted kernel may load by TMA, unlike the kernel that the call would get without adoption."""
    seen: list[bool] = []

    class Kernel(fused.TritonAttention):
        def backward(self, dout: torch.Tensor, *rest: Any, **more: Any) -> Any:
            seen.append(is_tma_aligned(dout))
            return super().backward(dout, *rest, **more)

    config = KernelConfig(TILE, TILE, TILE)
    monkeypatch.setattr(prepare, "find_adopted_kernel", lambda *_, **__: (Kernel(), config))
    q, k, v = (torch.randn(1, 8, 1, 16, requires_grad=True) for _ in range(3))
    call: dict[str, Any] = {} if is_adopted else {"backend": Kernel(), "config": config}
    out = ring_attention(q, k, v, **call)
    dout = torch.randn(out.numel() + 1)[1:].view(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert seen == [is_adopted]
    torch.testing.assert_close(grads, torch.autograd.grad(out, (q, k, v), dout.clone()), rtol=0, atol=0)


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
        (Layout.uneven([3, 30, 0, 5]), {"chunks": 3, "topology": Topology.grid(2, 2)}, MODES[1]),
    ],
    ids=["chunks", "deterministic", "two levels", "runs of tokens"],
)
def test_single_pass_ring_is_exact(layout: Layout, ring: dict[str, Any], mode: str) -> None:
    check_ring(layout, inputs(layout.seqlen, (2, 1), batch=1), causal=True, **single_pass(mode, **ring))


@pytest.mark.parametrize("adopted", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_single_pass_backward_makes_two_chunks(adopted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on the number, even if the backward of only one rank is a single pass."""
    single, gather, asked = single_pass(MODES[0])["config"], Ring._gather, list[str]()
    local = threading.local()

    def count(self: Ring, value: object, what: str) -> list[object]:
        asked.append(what)
        return gather(self, value, what)

    def adopt(*_: Any, needs_backward: bool, **__: Any) -> Any:
        return (fused.TritonAttention(), single) if adopted and needs_backward and local.has_single_pass else None

    def chunks(
        ring: Ring, *, has_single_pass: bool, dim: int = 16, kv_heads: int = 1, grad: bool = True, is_half: bool = False
    ) -> set[int]:
        """Return the numbers of chunks of a call's passes."""
        local.has_single_pass, local.seen = has_single_pass, set[int]()
        q, k, v = (torch.randn(1, 6, heads, dim) for heads in (2, kv_heads, kv_heads))
        q, k, v = ((x.half() if is_half else x).requires_grad_(grad) for x in (q, k, v))
        config = single if has_single_pass and not adopted else None
        backend = "auto" if adopted else "triton"
        out: Any = ring_attention(q, k, v, layout="zigzag", ring=ring, causal=True, backend=backend, config=config)
        if grad:
            out.sum().backward()
        seen: set[int] = local.seen
        return seen

    def on_rank(group: Any) -> None:
        one = group.rank() == 1
        with Ring(group) as ring:
            assert chunks(ring, has_single_pass=one, grad=False) == {1}
            for kv_heads in (1, 2):
                assert chunks(ring, has_single_pass=one, kv_heads=kv_heads) == {2}
            assert (
                chunks(ring, has_single_pass=False, dim=32) == chunks(ring, has_single_pass=False, is_half=True) == {1}
            )
        for given in (1, 3):
            with Ring(group, chunks=given) as ring:
                assert chunks(ring, has_single_pass=one) == chunks(ring, has_single_pass=one, grad=False) == {given}

    monkeypatch.setattr(Ring, "_gather", count)
    monkeypatch.setattr(ops, "compile_kernels", lambda call, running, *_: local.seen.add(len(running.chunks)))
    monkeypatch.setattr(prepare, "find_adopted_kernel", adopt)
    run_ranks(2, on_rank)
    assert len(asked) == 2 * 3  # once per rank, head dim and dtype
    with Ring() as ring:
        assert chunks(ring, has_single_pass=True) == {1}  # nothing is sent
