"""The single-pass backward in a ring of virtual ranks: exact, whatever the order in which shards and sums come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Layout
from ringattn.comm.topology.topology import Topology
from ringattn.kernels import KernelConfig, Tile

from ..support.ring_cases import LAYOUTS, check_ring, inputs, run_ring
from ..support.tolerance import assert_as_exact_as_pytorch

pytestmark = pytest.mark.usefixtures("one_core")

MODES = ("single_pass", "single_pass_deterministic")


def call(mode: str, **ring: Any) -> dict[str, Any]:
    tile = Tile(32, 32, 4, 1)
    return {"backend": "triton", "config": KernelConfig(tile, tile, tile, backward=mode), "ring": ring}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("layout", "ring", "mode"),
    [
        (Layout.contiguous(20, 1), {}, MODES[0]),
        (Layout.zigzag(40, 2), {"chunks": 2}, MODES[0]),
        (Layout.striped(41, 3), {}, MODES[1]),
        (Layout.uneven([3, 30, 0, 5]), {"chunks": 2, "topology": Topology.grid(2, 2)}, MODES[0]),
    ],
    ids=["alone", "chunks", "deterministic", "ring of rings"],
)
def test_exact(layout: Layout, ring: dict[str, Any], mode: str) -> None:
    """Grouped heads, causal."""
    check_ring(layout, inputs(layout.seqlen), causal=True, **call(mode, **ring))


def test_exact_in_half() -> None:
    layout = Layout.zigzag(40, 2)
    check_ring(layout, inputs(40, dtype=torch.float16), causal=True, **call(MODES[0], chunks=2))


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_exact_everywhere(mode: str, world: int, name: str, chunks: int, causal: bool) -> None:
    check_ring(LAYOUTS[name](67, world), inputs(67), causal=causal, calls=2, **call(mode, chunks=chunks))


MASKS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (9, 4)},
    "documents": {"cu_seqlens": [0, 7, 30, 67], "causal": True},
    "padding": {"seqused_k": [40, 67]},
    "prefix": {"prefix_length": 20, "causal": True},
    "scores": {"softcap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3]), "dropout_p": 0.2, "dropout_seed": 5},
}


@pytest.mark.nightly
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", [Layout.zigzag(67, 2), Layout.striped(67, 3)], ids=["zigzag", "striped"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mask(mode: str, layout: Layout, mask: str) -> None:
    """The two passes are what `test_ring_masks` holds against the reference."""
    whole, both = inputs(67), call(mode, chunks=2)
    one = run_ring(layout, whole, **both, **MASKS[mask])
    two = run_ring(layout, whole, backend="triton", ring={"chunks": 2}, **MASKS[mask])
    for name, got, like in zip(one._fields, one, two, strict=True):
        assert_as_exact_as_pytorch(name, got, like, like.double())


def test_deterministic_in_a_ring() -> None:
    """The same bits twice; and with chunks of heads, since a program computes one head whatever is beside it."""
    layout, whole = Layout.zigzag(40, 2), inputs(40, heads=(2, 2))
    first, second, chunked = (
        run_ring(layout, whole, causal=True, **call(MODES[1], chunks=chunks)) for chunks in (1, 1, 2)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, chunked))
