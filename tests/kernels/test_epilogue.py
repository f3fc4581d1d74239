"""dK and dV stored through TMA descriptors: the same values as by pointers in every role, nothing past the end.

On a GPU of compute capability 9.0 or higher: ``TRITON_INTERPRET=0 pytest tests/kernels/test_epilogue.py``.
"""

from __future__ import annotations

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
    launch,
    launch_plan,
)
from ringattn.kernels.gpu import GpuSpec, assumed_gpu

from ..support import kernel_cases
from ..support.descriptor_stand_in import install
from ..support.kernel_cases import DEVICE, Inputs, Sizes, dkdv_of_shards, interval, tiles
from .test_compiled import compiling

pytestmark = pytest.mark.usefixtures("poison")

INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="of the interpreter, or of no GPU")
POINTERS = tiles(32, 32)
DESCRIPTORS = replace(POINTERS, dkdv_epilogue="descriptors")
SIZES = Sizes(20, 45, head_dim=16, head_dim_v=32, heads=4, kv_heads=2, batch=2)  # the last tile has 13 of 32 keys
SMALL = replace(SIZES, heads=2, kv_heads=1)
NEAR = {"rtol": 1e-3, "atol": 1e-3} if DEVICE.type == "cuda" else {"rtol": 0, "atol": 0}
"""A GPU may fuse scaling and addition into one instruction."""
CUTS = ([0, 20], [0, 9, 20], [0, 8, 8, 9, 20])
"""Query shards for the roles: only; first, last; first, two middle hops (one without queries), last."""


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set that records descriptor operations. On a GPU it stays empty."""
    return set() if DEVICE.type == "cuda" else install(monkeypatch)


def inputs(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(*(x.to(DEVICE) for x in kernel_cases.inputs(sizes, dtype)))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


@pytest.mark.parametrize(
    ("cuts", "kind"), [*((cuts, "full") for cuts in CUTS), (CUTS[1], "last rows blind"), (CUTS[2], "causal")]
)
def test_descriptors_equal_pointers_bitwise_in_every_role(cuts: list[int], kind: str, moved: set[str]) -> None:
    """New results are stored, sums in place are added, and final sums are loaded and stored."""
    x, lse, bounds = inputs(SMALL, torch.float16), numbers(2, 2, 20), interval(kind, 20, 45).to(DEVICE)
    made, same = (dkdv_of_shards(x, bounds, cuts, lse, lse / 8, config) for config in (DESCRIPTORS, POINTERS))
    torch.testing.assert_close(made, same, **NEAR)
    if DEVICE.type != "cuda":
        assert moved == {2: {"store"}, 3: {"store", "load"}, 5: {"store", "add", "load"}}[len(cuts)]


SITUATIONS: dict[str, tuple[Bounds, Scores, dict[str, Any]]] = {
    "softcap": (FULL, Scores(softcap=20.0), {}),
    "used": (Bounds(None, None, torch.tensor([45, 7], dtype=torch.int32)), Scores(), {}),
    "block_sparse": (Bounds(None, None, None, BlockSparseIndex(torch.eye(1, 2, dtype=torch.bool), 32)), Scores(), {}),
    "split": (FULL, Scores(), {"dkdv_splits": 2, "order": "longest", "persistent": True, "sm_margin": 18}),
}


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("name", SITUATIONS)
def test_descriptors_equal_pointers_with_other_features(name: str) -> None:
    bounds, scores, options = SITUATIONS[name]
    x, lse, results = inputs(SIZES, torch.float16), numbers(2, 4, 20), []
    for config in (POINTERS, DESCRIPTORS):
        sums = torch.ones(x.k.shape, device=DEVICE), torch.ones(x.v.shape, device=DEVICE)
        call: dict[str, Any] = {"bounds": bounds.to(DEVICE), "scores": scores, "config": replace(config, **options)}
        fresh = attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse / 8, **call)
        results.append((*fresh, *attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse / 8, accum=sums, out=sums, **call)))
    torch.testing.assert_close(*results, **NEAR)


@pytest.mark.nightly
def test_launches_compile() -> None:
    """Compile by the JIT from the arguments of real launches, without a GPU."""
    assert compiling("tests.support.launch_arguments", "epilogue").count("compiled") == 4


@INTERPRETED
@pytest.mark.parametrize(
    ("gpu", "sizes", "message"),
    [
        (None, {}, "q is on cpu: dkdv_epilogue='descriptors' supports only GPUs of compute capability 9.0 or higher"),
        (assumed_gpu(80), {}, "q is on cpu, sm_80: dkdv_epilogue='descriptors' supports only GPUs"),
        (assumed_gpu(90), {"head_dim_v": 8}, "v has head dim 8: dkdv_epilogue='descriptors' supports only powers of"),
        (assumed_gpu(90), {"head_dim_v": 512}, "v has head dim 512: .* supports only powers of two from 16 to 256"),
        (assumed_gpu(90), {}, "d[v] has strides .*: dkdv_epilogue='descriptors' supports only addresses"),
    ],
)
def test_unsuitable_inputs_of_descriptors_are_refused(
    gpu: GpuSpec | None, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come before any write. The forward refuses unsuitable inputs, too."""
    monkeypatch.setattr(launch, "gpu_specs", lambda device: gpu)
    x, of_sums = inputs(replace(Sizes(), **sizes)), message.startswith("d")
    out, lse = attention_forward(x.q, x.k, x.v)
    dq, dk, dv = torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros(1, 40, 1, x.v.shape[3] + 2)[..., :-2]
    with pytest.raises(ValueError, match=message):
        attention_backward(x.dout, x.q, x.k, x.v, out, lse, dq=dq, dk=dk, dv=dv, config=DESCRIPTORS)
    with pytest.raises(ValueError, match=message.replace("d[v]", r"out\[1\]")):
        attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse, out=(dk, dv), config=DESCRIPTORS)
    assert not dq.any()
    if not of_sums:
        with pytest.raises(ValueError, match=message):
            attention_forward(x.q, x.k, x.v, config=DESCRIPTORS)
    monkeypatch.setattr(launch_plan, "resolve_config", lambda config, tile, q, k: DESCRIPTORS)
    attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse, out=(dk, dv))  # a table's choice falls back to pointers


def test_tma_alignment_of_addresses_and_strides() -> None:
    """TMA takes addresses and strides in whole 16 bytes; strides of dimensions of size 1 do not count."""
    memory = torch.zeros(4096, dtype=torch.float16)
    for size, stride, offset, aligned in (
        ((2, 4, 2, 16), (128, 32, 16, 1), 0, True),
        ((2, 4, 2, 16), (128, 36, 16, 1), 0, False),
        ((2, 4, 2, 16), (128, 32, 16, 1), 4, False),
        ((1, 4, 1, 16), (3, 32, 5, 1), 0, True),
        ((2, 4, 2, 16), (0, 32, 16, 1), 0, False),
        ((0, 4, 2, 16), (3, 3, 3, 1), 1, True),
    ):
        assert launch.is_tma_aligned(memory.as_strided(size, stride, offset)) is aligned, (size, stride, offset)
    assert launch.tma_strides(memory.as_strided((1, 4, 1, 16), (3, 32, 5, 1))) == [16, 32, 16, 1]
