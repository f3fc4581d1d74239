"""Tiles that TMA loads and stores: the same values as by pointers in every role, nothing past the end.

On a GPU of compute capability 9.0 or higher: ``TRITON_INTERPRET=0 pytest tests/kernels/test_descriptors.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels import (
    FULL,
    BlockSparseIndex,
    Bounds,
    KernelConfig,
    Scores,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    launch,
    launch_plan,
)
from ringattn.kernels.config import LOADS as LOAD_MODES
from ringattn.kernels.gpu import GpuSpec, assumed_gpu
from ringattn.kernels.tables import KERNELS

from ..support import kernel_cases
from ..support.descriptor_stand_in import install
from ..support.kernel_cases import (
    DEVICE,
    Inputs,
    Sizes,
    cycle_values,
    dkdv_of_shards,
    dq_of_shards,
    forward_hops,
    interval,
    tiles,
)
from ..support.nightly import rest_nightly
from .test_compiled import compiling

pytestmark = pytest.mark.usefixtures("poison")

INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="of the interpreter, or of no GPU")
TILES, POINTERS = tiles(32, 16), tiles(16, 32)  # with 16 keys a phase of the loop has several tiles
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


LOADS = cycle_values(
    ["full", "causal", "window", "first rows blind"], [(16, 16), (24, 40), (48, 16)], [torch.float16, torch.float32]
)
"""Masks, head dims (40 and 48 in two parts) and dtypes."""


@pytest.fixture
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TMA load tiles of every dtype and head dim."""
    monkeypatch.setattr(launch_plan, "loads_by_tma", lambda kernel, config, *_: config.loads == "descriptors")


def with_loads(loads: str, moved: set[str], call: Callable[..., Any]) -> Any:
    """Return ``call(config=…)`` with tiles that are loaded as ``loads`` says."""
    moved.clear()
    results = call(config=replace(TILES, loads=loads))
    assert DEVICE.type == "cuda" or ("load" in moved) == (loads == "descriptors")
    return results


@pytest.mark.usefixtures("any_tile")
@pytest.mark.parametrize(("kind", "head_dims", "dtype"), rest_nightly(LOADS, *LOADS[1:3]))
def test_loads_equal_pointers_bitwise_in_every_role(
    kind: str, head_dims: tuple[int, int], dtype: torch.dtype, moved: set[str]
) -> None:
    x, bounds = inputs(Sizes(35, 45, *head_dims, heads=2, kv_heads=1, batch=2), dtype), interval(kind, 35, 45)
    for cuts in ([0, 45], [0, 20, 20, 21, 45]):  # an only hop; a first, two middle (one without keys) and a last hop
        forward = partial(forward_hops, x, bounds, cuts)
        descriptors, pointers = (with_loads(loads, moved, forward) for loads in LOAD_MODES)
        torch.testing.assert_close(descriptors, pointers, **NEAR)
        dq = partial(dq_of_shards, x, bounds, cuts, pointers[1], attention_delta(x.dout, pointers[0]))
        torch.testing.assert_close(*(with_loads(loads, moved, dq) for loads in LOAD_MODES), **NEAR)


LOAD_SITUATIONS: dict[str, tuple[Bounds, Scores, dict[str, Any]]] = {
    "modified": (
        FULL,
        Scores(0.0, torch.rand(4), 0.3, 5, 0, *(torch.arange(n).int() for n in (20, 45))),
        {},
    ),
    "used": (Bounds(None, None, torch.tensor([45, 7], dtype=torch.int32)), Scores(softcap=20.0), {}),
    "block_sparse": (Bounds(None, None, None, BlockSparseIndex(torch.eye(1, 2, dtype=torch.bool), 32)), Scores(), {}),
    "packed": (FULL, Scores(), {"pack_gqa": True, "order": "longest", "persistent": True, "sm_margin": 18}),
}


@pytest.mark.usefixtures("any_tile")
@pytest.mark.parametrize("name", LOAD_SITUATIONS)
def test_loads_equal_pointers_with_other_features(name: str, moved: set[str]) -> None:
    """The tensors are slices of larger ones filled with NaN, so rows past the end must not be read."""
    bounds, scores, options = LOAD_SITUATIONS[name]
    x = inputs(replace(SIZES, head_dim=24, head_dim_v=40), torch.float16)
    views = [torch.full((3, 64, 6, t.shape[3]), torch.nan, dtype=t.dtype, device=DEVICE) for t in x[:4]]
    for number, t in enumerate(x[:4]):
        views[number] = views[number][1:, : t.shape[1], 1 : t.shape[2] + 1].copy_(t)
    moved_scores: dict[str, Any] = {name: t.to(DEVICE) for name, t in vars(scores).items() if isinstance(t, Tensor)}
    call: dict[str, Any] = {"bounds": bounds.to(DEVICE), "scores": replace(scores, **moved_scores)}

    def forward_and_dq(tensors: Sequence[Tensor], config: KernelConfig) -> Any:
        q, k, v, dout = tensors
        call["config"] = replace(config, **options)
        out, lse = attention_forward(q, k, v, **call)
        return out, lse, attention_dq(dout, q, k, v, lse, lse / 8, **call)

    expected = with_loads("pointers", moved, partial(forward_and_dq, x[:4]))
    torch.testing.assert_close(with_loads("descriptors", moved, partial(forward_and_dq, views)), expected, **NEAR)


UNFIT: dict[str, Callable[[Tensor], Tensor]] = {
    "stride": lambda x: torch.cat([x, x[..., :5]], -1)[..., :-5],
    "address": lambda x: torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x),
    "expanded": lambda x: x[:1].expand(x.shape),
    "empty": lambda x: torch.stack([x, x], -1)[:, :0, ..., 0],  # strides do not matter
}


@pytest.mark.usefixtures("any_tile")
@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_tma_cannot_load_are_loaded_by_pointers(name: str, moved: set[str]) -> None:
    """A single such tensor suffices, because TMA loads all tensors or none."""
    x = inputs(SIZES, torch.float16)
    unfit = (x.k[:, :0], UNFIT[name](x.v)) if name == "empty" else (x.k, UNFIT[name](x.v))
    fit = unfit[0].clone(), unfit[1].clone()
    made = _, lse = attention_forward(x.q, *unfit, config=TILES)
    dq = attention_dq(x.dout, x.q, *unfit, lse, lse / 8, config=TILES)
    assert "load" not in moved
    torch.testing.assert_close(made, attention_forward(x.q, *fit, config=TILES), **NEAR)
    torch.testing.assert_close(dq, attention_dq(x.dout, x.q, *fit, lse, lse / 8, config=TILES), **NEAR)


@INTERPRETED
def test_tma_loads_16_bit_tiles_where_that_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[tuple[str, int | None], tuple[int, ...]] = {("dq", 90): (96, 192)}
    served |= {("forward", arch): (64, 96, 192, 193, 256) for arch in (90, 100, 103)}
    for arch, kernel in product((None, 80, 89, 90, 100, 103, 120), (*KERNELS, "single_pass")):
        monkeypatch.setattr(launch, "gpu_specs", lambda device, arch=arch: arch and assumed_gpu(arch))
        for dtype, dims in product(
            (torch.float16, torch.bfloat16, torch.float32),
            ((64, 8), (64, 96), (192, 64), (193, 64), (8, 256), (64, 257)),
        ):
            q, v = (torch.empty(1, 0, 1, dim, dtype=dtype) for dim in dims)
            has_tma = dtype != torch.float32 and max(dims) in served.get((kernel, arch), ())
            for config in (None, KernelConfig(), KernelConfig(loads="pointers")):
                asks = config is None or config.loads == "descriptors"
                assert launch.loads_by_tma(kernel, config, q, v) == (has_tma and asks)


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
        (assumed_gpu(90), {"head_dim": 24, "head_dim_v": 16}, "q has head dim 24: .* supports only powers of two"),
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
    if of_sums:
        for accum, to in ((dv, dv.clone()), (dv.clone(), dv)):
            with pytest.raises(ValueError, match=r"\[1\] has strides"):
                attention_dkdv(x.dout, x.q, x.k, x.v, lse, lse, accum=(dk, accum), out=(dk, to), config=DESCRIPTORS)
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
    assert launch.tma_strides(memory.as_strided((1, 4, 1, 16), (3, 32, 5, 1))) == (16, 32, 16, 1)
    assert launch.tma_strides(torch.empty(128).as_strided((1, 4, 1, 5), (3, 32, 5, 1))) == (8, 32, 8, 1)
