"""dK and dV left through TMA descriptors: the same values as by pointers, in every role, and nothing past the end.

``TRITON_INTERPRET=0 pytest tests/kernels/test_epilogue.py`` on a GPU of compute capability 9.0 or higher.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels import (
    FULL,
    BlockSparseIndex,
    Bounds,
    Scores,
    attention_backward,
    attention_dkdv,
    attention_forward,
    choice,
    launch,
)
from ringattn.kernels.tables import Gpu

from ..support import kernel_cases
from ..support.descriptor_stand_in import Moved, install
from ..support.kernel_cases import DEVICE, Inputs, Sizes, dkdv_of_shards, interval, tiles
from .test_compiled import compiling

pytestmark = pytest.mark.usefixtures("poison")

INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="of the interpreter, or of no GPU")
Pair = tuple[Tensor, Tensor]
POINTERS = tiles(32, 32)
DESCRIPTORS = replace(POINTERS, dkdv_epilogue="descriptors")
SIZES = Sizes(20, 45, head_dim=16, head_dim_v=32, heads=4, kv_heads=2, batch=2)  # 13 of the last 32 keys
SMALL = replace(SIZES, heads=2, kv_heads=1)
NEAR = {"rtol": 1e-3, "atol": 1e-3} if DEVICE.type == "cuda" else {"rtol": 0, "atol": 0}
"""On a GPU what scales and what adds may be one instruction."""
TILES = 2 * 2  # of keys, batch rows
CUTS = ([0, 20], [0, 9, 20], [0, 8, 8, 9, 20])
"""The role "only"; "first" and "last"; "first", two in the middle of which one has no queries, and "last"."""


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """What went through descriptors; nothing is seen of it on a GPU."""
    return Moved() if DEVICE.type == "cuda" else install(monkeypatch)


def inputs(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(*(x.to(DEVICE) for x in kernel_cases.inputs(sizes, dtype)))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "kind"), [*((cuts, "full") for cuts in CUTS), (CUTS[1], "last rows blind"), (CUTS[2], "causal")]
)
def test_who_moves_what(cuts: list[int], kind: str, moved: Moved) -> None:
    """New results by a store, sums that stay by an addition, sums that leave by a load and a store; pointers' bits."""
    x, lse, bounds = inputs(SMALL, torch.float16), numbers(2, 2, 20), interval(kind, 20, 45).to(DEVICE)
    made, same = (dkdv_of_shards(x, bounds, cuts, lse, lse / 8, config) for config in (DESCRIPTORS, POINTERS))
    for one, other in zip(made, same, strict=True):
        torch.testing.assert_close(one, other, **NEAR)
    each = 2 * TILES  # dK and dV
    only, first, middle, last = (
        [("store", "float16")] * each,
        [("store", "float32")] * each,
        [("add", "float32")] * each,
        [("load", "float32"), ("store", "float16")] * each,
    )
    if kind == "full" and DEVICE.type != "cuda":
        assert moved == {1: only, 2: first + last, 4: first + middle + last}[len(cuts) - 1]


SITUATIONS: dict[str, tuple[Bounds, Scores, dict[str, Any]]] = {
    "all rows blind": (interval("all rows blind", 20, 45), Scores(), {}),
    "softcap": (FULL, Scores(softcap=20.0), {}),
    "used": (Bounds(None, None, torch.tensor([45, 7], dtype=torch.int32)), Scores(), {}),
    "runs": (Bounds(None, None, None, BlockSparseIndex(torch.eye(1, 2, dtype=torch.bool), 32)), Scores(), {}),
    "split": (FULL, Scores(), {"dkdv_splits": 2, "order": "longest", "persistent": True, "sm_margin": 18}),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_bits_of_pointers(name: str, moved: Moved) -> None:
    """Whatever else a launch has."""
    bounds, scores, options = SITUATIONS[name]
    x, lse = inputs(SIZES, torch.float16), numbers(2, 4, 20)
    call: dict[str, Any] = {"bounds": bounds.to(DEVICE), "scores": scores}
    for carried in (False, True):
        results = []
        for config in (POINTERS, DESCRIPTORS):
            sums = torch.ones(x.k.shape, device=DEVICE), torch.ones(x.v.shape, device=DEVICE)
            kept = sums if carried else None
            call["config"] = replace(config, **options)
            results.append(attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse / 8, accum=kept, out=kept, **call))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, **NEAR)
    assert moved or DEVICE.type == "cuda"


def test_nothing_is_written_past_the_end(moved: Moved) -> None:
    """Of rows, heads and batch: results that lie among others, which are as they were; in every role."""
    x, lse = inputs(SMALL, torch.float16), numbers(2, 2, 20)

    def among(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batch, keys, heads, head_dim = like.shape
        whole = torch.full((batch + 1, keys + 32, heads + 1, head_dim), 7.0, dtype=dtype, device=DEVICE)
        return whole, whole[:batch, :keys, :heads]

    for dtype, carried in ((torch.float16, False), (torch.float32, True)):
        (dk_all, dk), (dv_all, dv) = among(x.k, dtype), among(x.v, dtype)
        into = (dk, dv)
        attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse, accum=into if carried else None, out=into, config=DESCRIPTORS)
        for whole, part in ((dk_all, dk), (dv_all, dv)):
            assert not (part == 7.0).all()
            part.fill_(7.0)
            assert (whole == 7.0).all()
    assert {how for how, _ in moved} == {"store", "add"} or DEVICE.type == "cuda"


@pytest.mark.nightly
def test_launches_compile() -> None:
    """By the JIT, from the arguments of real launches, where there is no GPU."""
    assert compiling("tests.support.launch_arguments", "epilogue").count("compiled") == 4


# --- what is refused ----------------------------------------------------------------------------------------------


@INTERPRETED
@pytest.mark.parametrize(
    ("gpu", "sizes", "message"),
    [
        (None, {}, "q is on cpu: dkdv_epilogue='descriptors' takes GPUs of compute capability 9.0 or higher"),
        (Gpu("NVIDIA A100", 80), {}, "q is on cpu, sm_80: dkdv_epilogue='descriptors' takes GPUs"),
        (Gpu("NVIDIA H200", 90), {"head_dim": 96}, "q has head dim 96: dkdv_epilogue='descriptors' takes powers of"),
        (Gpu("NVIDIA H200", 90), {"head_dim_v": 8}, "v has head dim 8: dkdv_epilogue='descriptors' takes powers of"),
    ],
)
def test_every_call_refuses_what_does_not_fit(
    gpu: Gpu | None, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything that was passed is written, and the forward as well as the backward."""
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu)
    x = inputs(replace(Sizes(), **sizes))
    out, lse = attention_forward(x.q, x.k, x.v)
    dq = torch.zeros_like(x.q)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_forward(x.q, x.k, x.v, config=DESCRIPTORS)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_backward(x.dout, x.q, x.k, x.v, out, lse, dq=dq, config=DESCRIPTORS)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse, config=DESCRIPTORS)
    assert not dq.any()
    monkeypatch.setattr(choice, "resolve_config", lambda config, tile, q, k: DESCRIPTORS)
    attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse)  # what a table chose goes by pointers where it does not suit


@INTERPRETED
@pytest.mark.parametrize(("name", "how"), [("dk", "address"), ("dv", "stride")])
def test_sums_that_no_descriptor_takes_are_refused(name: str, how: str, moved: Moved) -> None:
    x = inputs(Sizes())
    out, lse = attention_forward(x.q, x.k, x.v)
    sums: dict[str, Any] = {one: torch.zeros(1, 40, 1, 16) for one in ("dk", "dv")}
    room = torch.zeros(1, 40, 1, 18)
    sums[name] = torch.zeros(641)[1:].view(1, 40, 1, 16) if how == "address" else room[..., :16]
    dq = torch.zeros_like(x.q)
    message = f"{name} has strides .*: dkdv_epilogue='descriptors' takes an address and positive strides .* 16 bytes"
    with pytest.raises(ValueError, match=message):
        attention_backward(x.dout, x.q, x.k, x.v, out, lse, dq=dq, **sums, config=DESCRIPTORS)
    assert not dq.any() and moved == []
    place = {"dk": 0, "dv": 1}[name]
    with pytest.raises(ValueError, match=re.escape(f"out[{place}] has strides")):
        attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse, out=(sums["dk"], sums["dv"]), config=DESCRIPTORS)
