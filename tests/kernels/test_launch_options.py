"""Launches that the entries request: kernel, grid and every option, recorded on the meta device without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels import (
    KernelConfig,
    Tile,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    attention_gradients,
    dequantize,
    quantize,
)
from ringattn.kernels.device.tiles import LaunchShape
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.warm_up import collect_launches, meta_like


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


Q, K, V, DOUT = empty(2, 70, 4, 64), empty(2, 90, 2, 64), empty(2, 90, 2, 128), empty(2, 70, 4, 128)
QKV, LSE = (Q, K, V), floats(2, 4, 70)
GIVEN = (DOUT, *QKV, LSE, LSE)
STATE = floats(*DOUT.shape), LSE
DQ, SUMS = floats(*Q.shape), (floats(*K.shape), floats(*V.shape))
SQUARE = (Q, K, K)  # Hopper's kernels need equal head dims
LONG = empty(2, 2048, 2, 64), empty(2, 2048, 2, 128)
CONFIG = KernelConfig(Tile(16, 32, 1, 2), Tile(32, 64, 2, 3), Tile(64, 128, 8, 4))
SPLIT = replace(CONFIG, dkdv_splits=2)
SINGLE = replace(CONFIG, backward="single_pass", single_pass=Tile(128, 32, 4, 5))
HOPPER = KernelConfig(Tile(128, 64, 8, 3), forward_kernel="hopper", backward="hopper", single_pass=Tile(128, 128, 8, 1))

DIMS = {"HEAD_DIM": 64, "HEAD_DIM_V": 128}
FORWARD = DIMS | {"BLOCK_Q": 16, "BLOCK_K": 32, "num_warps": 1, "num_stages": 2}
DQ_TILE = DIMS | {"BLOCK_Q": 32, "BLOCK_K": 64, "num_warps": 2, "num_stages": 3}
DKDV_TILE = DIMS | {"BLOCK_Q": 64, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4}
SINGLE_TILE = DIMS | {"BLOCK_Q": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 5}
HOPPER_FORWARD = {"HEAD_DIM": 64, "BLOCK_K": 64, "SLOTS": 3, "num_warps": 4, "maxnreg": 168}
HOPPER_BACKWARD = {"HEAD_DIM": 64, "BLOCK_Q": 128, "SLOTS": 1, "num_warps": 4, "maxnreg": 168}
DELTA = {"HEAD_DIM_V": 128, "BLOCK_Q": 64, "num_warps": 4}
REDUCE = DIMS | {"BLOCK_Q": 64, "BLOCK_K": 128, "BLOCK_ROWS": 16, "num_warps": 8}
WARPS = {5: 1, 80: 8, 512: 16}
"""Warps of the fp8 kernels by head dim."""
FRESH, TO_CAST, IN_PLACE = (
    {"HAS_SUM": add, "IN_PLACE": same} for add, same in ((False, False), (True, False), (True, True))
)


def fp8(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty(1, 130, 3, head_dim), empty(1, 130, 3, head_dim, dtype=torch.float8_e4m3fn), floats(1, 2, 3)


Run = Callable[[], object]
CASES: dict[str, tuple[Run, list[tuple[str, int, dict[str, Any]]]]] = {
    "forward": (
        lambda: [
            attention_forward(*QKV, state=state, final=final, config=CONFIG)
            for state, final in ((None, False), (STATE, False), (STATE, True))
        ],
        [
            ("forward_kernel", 40, FORWARD | {"HAS_STATE": has_state, "IN_PLACE": in_place})
            for has_state, in_place in ((False, False), (True, True), (True, False))
        ],
    ),
    "backward": (
        lambda: attention_backward(DOUT, *QKV, DOUT, LSE, config=CONFIG),
        [
            ("delta_kernel", 16, DELTA),
            ("dq_kernel", 24, DQ_TILE | FRESH),
            ("dkdv_kernel", 4, DKDV_TILE | FRESH),
        ],
    ),
    "dq": (
        lambda: [attention_dq(*GIVEN, accum=DQ, out=out, config=CONFIG) for out in (DQ, Q)],
        [("dq_kernel", 24, DQ_TILE | IN_PLACE), ("dq_kernel", 24, DQ_TILE | TO_CAST)],
    ),
    "dkdv": (
        lambda: [attention_dkdv(*GIVEN, accum=SUMS, out=out, config=CONFIG) for out in (SUMS, (K, V))],
        [("dkdv_kernel", 4, DKDV_TILE | IN_PLACE), ("dkdv_kernel", 4, DKDV_TILE | TO_CAST)],
    ),
    "splits": (
        lambda: [attention_dkdv(*GIVEN, accum=sums, out=SUMS, config=SPLIT) for sums in (None, SUMS)],
        [
            ("dkdv_kernel", 8, DKDV_TILE | FRESH),
            ("reduce_kernel", 24, REDUCE | FRESH),
            ("dkdv_kernel", 8, DKDV_TILE | {"HAS_SUM": False, "IN_PLACE": True}),
            ("reduce_kernel", 24, REDUCE | IN_PLACE),
        ],
    ),
    "automatic splits": (
        lambda: attention_dkdv(*GIVEN[:2], *LONG, LSE, LSE, config=replace(CONFIG, dkdv_splits="auto")),
        [("dkdv_kernel", 128, DKDV_TILE | FRESH), ("reduce_kernel", 512, REDUCE | FRESH)],  # 64 key tiles, 132 SMs
    ),
    "single pass": (
        lambda: [
            attention_gradients(*GIVEN, dq=DQ, accum=sums, out=out, config=SINGLE)
            for sums, out in ((None, None), (SUMS, (K, V)), (SUMS, (SUMS[0], V)), (SUMS, (K, SUMS[1])), (SUMS, SUMS))
        ],
        [
            ("single_pass_kernel", 12, SINGLE_TILE | sums | {"RAGGED": True})
            for sums in (FRESH, *(TO_CAST,) * 3, IN_PLACE)
        ],
    ),
    "whole key tiles": (
        lambda: [
            attention_gradients(*GIVEN[:2], K[:, :64], V[:, :64], LSE, LSE, dq=DQ, config=SINGLE),
            attention_gradients(Q, Q, *(LONG[0],) * 2, LSE, LSE, dq=DQ, config=HOPPER),
        ],
        [
            ("single_pass_kernel", 8, SINGLE_TILE | FRESH | {"RAGGED": False}),
            ("hopper_backward_kernel", 64, HOPPER_BACKWARD | FRESH | {"RAGGED": False}),
        ],
    ),
    "hopper": (
        lambda: [
            attention_forward(*SQUARE, config=HOPPER),
            attention_forward(*SQUARE, state=(DQ, LSE), final=False, config=HOPPER),
            attention_gradients(Q, *SQUARE, LSE, LSE, dq=DQ, config=HOPPER),
            attention_gradients(Q, *SQUARE, LSE, LSE, dq=DQ, accum=(SUMS[0],) * 2, out=(SUMS[0],) * 2, config=HOPPER),
        ],
        [
            ("hopper_kernel", 8, HOPPER_FORWARD | {"HAS_STATE": False}),
            ("hopper_kernel", 8, HOPPER_FORWARD | {"HAS_STATE": True}),
            ("hopper_backward_kernel", 4, HOPPER_BACKWARD | FRESH | {"RAGGED": True}),
            ("hopper_backward_kernel", 4, HOPPER_BACKWARD | IN_PLACE | {"RAGGED": True}),
        ],
    ),
    "delta": (
        lambda: [attention_delta(*(empty(1, 8, 1, dim),) * 2) for dim in (256, 257)],
        [
            ("delta_kernel", 1, DELTA | {"HEAD_DIM_V": 256}),
            ("delta_kernel", 1, DELTA | {"HEAD_DIM_V": 257, "num_warps": 8}),
        ],
    ),
    "quantize": (
        lambda: [quantize(*fp8(dim)) for dim in WARPS],
        [("quantize_kernel", 6, {"HEAD_DIM": dim, "BLOCK": 128, "num_warps": WARPS[dim]}) for dim in WARPS],
    ),
    "dequantize": (
        lambda: [dequantize(*fp8(dim)[1:], fp8(dim)[0]) for dim in WARPS],
        [("dequantize_kernel", 6, {"HEAD_DIM": dim, "BLOCK": 128, "num_warps": WARPS[dim]}) for dim in WARPS],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_launches_have_the_options_of_the_call(name: str) -> None:
    run, expected = CASES[name]
    launches = collect_launches(assumed_gpu(90), run)
    assert [(launch.kernel.__name__, launch.grid, launch.options) for launch in launches] == expected


def test_longest_tiles_first_counts_all_bytes_that_a_program_streams() -> None:
    """K and V of 4 key heads fit into half of L2, or Q and dO of the 4 query heads of 2 key heads."""
    q, k, v, dout = (empty(1, 2**14, heads, dim) for heads, dim in ((32, 64), (16, 64), (16, 128), (32, 128)))
    given, config = (dout, q, k, v, *(floats(1, 32, 2**14),) * 2), replace(CONFIG, order="longest")
    calls: list[tuple[Any, Any, int]] = [(attention_forward, (q, k, v), 8), (attention_dq, given, 8)]
    for call, inputs, heads in (*calls, (attention_dkdv, given, 2)):
        (launch,) = collect_launches(assumed_gpu(90), partial(call, *inputs, config=config))
        (shape,) = (argument for argument in launch.arguments if isinstance(argument, LaunchShape))
        assert shape.order.l2_group == heads, call


def test_recorded_tensors_have_the_strides_of_the_call() -> None:
    x = torch.empty(2, 3, dtype=torch.float16).T
    made = meta_like(x)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((3, 2), (1, 3), x.dtype, "meta")
