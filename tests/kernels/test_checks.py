"""Errors of the kernel entries, one table per function: the argument, what it got and what it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringattn.kernels import (
    BlockSparseIndex,
    Bounds,
    KernelConfig,
    Scores,
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
from ringattn.kernels.compile_target import CompileTarget, compiling_for
from ringattn.kernels.device.backward import delta_kernel
from ringattn.kernels.gpu import assumed_gpu

from ..support.kernel_cases import tiles

CPU, META = torch.device("cpu"), torch.device("meta")
INDEX = torch.zeros(8, dtype=torch.int32)


def qkv(**others: Tensor) -> dict[str, Any]:
    """Return valid inputs, with ``others`` replaced."""
    return {"q": torch.randn(2, 8, 4, 16), "k": torch.randn(2, 6, 2, 16), "v": torch.randn(2, 6, 2, 24)} | others


def backward(**others: Any) -> dict[str, Any]:
    fit = {"dout": torch.randn(2, 8, 4, 24), "lse": torch.randn(2, 4, 8), "delta": torch.randn(2, 4, 8)}
    return qkv() | fit | others


def whole(**others: Any) -> dict[str, Any]:
    fit = {"dout": torch.randn(2, 8, 4, 24), "out": torch.randn(2, 8, 4, 24), "lse": torch.randn(2, 4, 8)}
    return qkv() | fit | others


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def gap(*shape: int) -> Tensor:
    """Return a tensor with a unit last stride that is not contiguous."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


def refused(call: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**arguments)


INPUTS: dict[str, dict[str, Any]] = {
    r"q has shape \[2, 8, 64\]: it must be \[B, S, H, D\]": {"q": zeros(2, 8, 64)},
    r"v is torch.float16 and q is torch.float32: .* same dtype": {"v": zeros(2, 6, 2, 24, dtype=torch.float16)},
    r"k is on meta and q is on cpu: .* same device": {"k": zeros(2, 6, 2, 16, device=META)},
    r"k has batch size 3 and q has 2: they must be equal": {"k": zeros(3, 6, 2, 16)},
    r"q has head dim 513: it must be between 1 and 512": {"q": zeros(2, 8, 4, 513)},
    r"k is None: it must be a torch.Tensor": {"k": None},
    r"k has head dim 0: it must be between 1 and 512": {"k": zeros(2, 6, 2, 0)},
    r"k has head dim 32 and q has 16: they must be equal": {"k": zeros(2, 6, 2, 32)},
    r"v has shape \[2, 6, 1, 24\] and k has \[2, 6, 2, 16\]: .* must be equal": {"v": zeros(2, 6, 1, 24)},
    "k has 3 heads and q has 4: .* must be a multiple of the heads of k$": {
        "k": zeros(2, 6, 3, 16),
        "v": zeros(2, 6, 3, 24),
    },
    "k has 2 heads and q has 0: .* must be a multiple of the heads of k$": {"q": zeros(2, 8, 0, 16)},
    "k has 0 heads and q has 4: .* of the heads of k$": {"k": zeros(2, 0, 0, 16), "v": zeros(2, 0, 0, 24)},
    r"k has 6 heads and q has 8: .* pass q\.transpose\(1, 2\)": {
        "q": zeros(2, 4, 8, 16),
        "k": zeros(2, 2, 6, 16),
        "v": zeros(2, 2, 6, 24),
    },
    "q is a torch.sparse_coo tensor: it must be a dense tensor": {"q": zeros(2, 8, 4, 16).to_sparse()},
    "q is a FakeTensor on cpu without data": {"q": FakeTensorMode().from_tensor(zeros(2, 8, 4, 16))},
    **{
        rf"softmax_scale is {value!r}: it must be a number from 1e-30 to 1e30".replace("+", r"\+"): {
            "softmax_scale": value
        }
        for value in (-1.0, 1e-31, 1e31, True)
    },
    r"^bounds has only one of lo and hi: pass both vectors, or FULL$": {"bounds": Bounds(None, INDEX)},
    r"^bounds has only one of lo and hi": {"bounds": Bounds(INDEX, None)},
}


@pytest.mark.parametrize("message", INPUTS)
def test_bad_q_k_v_are_refused_by_every_entry(message: str) -> None:
    for call, fit in (
        (attention_forward, qkv()),
        (attention_dq, backward()),
        (attention_dkdv, backward()),
        (attention_backward, whole()),
    ):
        refused(call, fit | INPUTS[message], message)


def vectors(*, lo: Tensor = INDEX, hi: Tensor = INDEX) -> Bounds:
    return Bounds(lo, hi)


def blocks(*shape: int, block: int = 16, device: torch.device = CPU) -> Bounds:
    return Bounds(None, None, None, BlockSparseIndex(torch.ones(shape).bool(), block, device))


STATE, LSE = zeros(2, 8, 4, 24), zeros(2, 4, 8)
DROPS = Scores(dropout_p=0.5)
FORWARD: list[tuple[dict[str, Any], str]] = [
    ({"state": (zeros(2, 6, 4, 24), LSE)}, r"state\[0\] has shape \[2, 6, 4, 24\]: it must be \[2, 8, 4, 24\]"),
    ({"state": (STATE, gap(2, 4, 8))}, r"state\[1\] has strides \(64, 16, 1\): it must be contiguous"),
    ({"state": (STATE, None)}, "state has only one of out and lse"),
    ({"bounds": vectors(hi=INDEX[:6])}, r"bounds\.hi is .* shape \[6\] .*, one element per query row"),
    ({"bounds": Bounds(None, None, INDEX[:3])}, r"seqused_k is .* shape \[3\] .* \[2\] .* per batch row"),
    ({"bounds": Bounds([0] * 8, INDEX)}, "bounds.lo is list: it must be a torch.Tensor"),  # type: ignore[arg-type]
    ({"bounds": Bounds(None, None, [8, 8])}, "bounds.seqused_k is list: it must be"),  # type: ignore[arg-type]
    ({"bounds": blocks(1, 2)}, r"bounds.block_sparse has \[1, 2\] blocks: .* must have \[1, 1\]"),
    ({"bounds": blocks(1, 1, device=META)}, "bounds.block_sparse is on meta"),
    ({"bounds": blocks(1, 1, block=24)}, "block size 24: it must be a multiple of 16"),
    ({"bounds": blocks(1, 1), "config": tiles(16, 32)}, "config.forward has block_q=16 and block_k=32: "),
    *(({"scores": Scores(softcap=cap)}, f"softcap is {cap}: it must be") for cap in (-1.0, True)),
    *(({"scores": Scores(softcap=cap)}, f"softcap is {cap}: it must be".replace("+", ".")) for cap in (1e-9, 1e31)),
    *(({"scores": Scores(dropout_p=p)}, f"dropout_p is {p}: it must be") for p in (1.0, -0.1, True)),
    ({"scores": Scores(dropout_seed=1 << 64)}, "dropout_seed is 18446744073709551616"),
    *(({"scores": Scores(dropout_seed=seed)}, f"dropout_seed is {seed}: it") for seed in (-1, 0.5)),  # type: ignore[arg-type]
    ({"scores": Scores(alibi_slopes=zeros(3))}, r"alibi_slopes is torch.float32 of shape \[3\] .* \[4\] or \[2, 4\]"),
    ({"scores": Scores(alibi_slopes=0.5)}, "alibi_slopes is float: it must be a torch.Tensor"),  # type: ignore[arg-type]
    ({"scores": DROPS}, "scores.q_positions is None: ALiBi"),
    ({"scores": replace(DROPS, q_positions=range(8))}, "scores.q_positions is range: it must be"),  # type: ignore[arg-type]
    ({"scores": replace(DROPS, q_positions=INDEX.long())}, r"scores.q_positions is torch.int64 of shape \[8\]"),
]
"""Errors of attention_forward, or of a check that all entries share."""


@pytest.mark.parametrize(("others", "message"), FORWARD)
def test_bad_forward_arguments_are_refused(others: dict[str, Any], message: str) -> None:
    refused(attention_forward, qkv() | others, message)


DOUT, DQ, DK, DV = zeros(2, 8, 4, 24), zeros(2, 8, 4, 16), zeros(2, 6, 2, 16), zeros(2, 6, 2, 24)
CODES = zeros(2, 8, 4, 24, dtype=torch.float8_e4m3fn)
SCALE = zeros(2, 1, 4)
SINGLE_PASS = KernelConfig(backward="single_pass")
GPU = CompileTarget(assumed_gpu(90), print)
SUMS = {"accum": (DK, DV), "out": (DK, DV)}
EVERY: list[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = [
    (
        attention_forward,
        qkv() | {"state": (STATE, LSE), "bounds": Bounds(INDEX, INDEX, INDEX[:2]),
                 "scores": replace(DROPS, alibi_slopes=zeros(2, 4), q_positions=INDEX, k_positions=INDEX[:6])},
        ("state[0]",),
    ),
    (attention_dq, backward(accum=DQ, out=DQ), ("out",)),
    (attention_dkdv, backward(**SUMS), ("out[0]", "out[1]")),
    (attention_backward, whole(dlse=LSE, dq=DQ, dk=DK, dv=DV), ("dq", "dk", "dv")),
    (attention_delta, {"dout": DOUT, "out": DOUT, "dlse": LSE}, ()),
    (attention_gradients, backward(dq=DQ, config=SINGLE_PASS, **SUMS), ("dq", "out[0]", "out[1]")),
    (quantize, {"x": DOUT, "out": CODES, "scale": SCALE}, ()),
    (dequantize, {"x": CODES, "scale": SCALE, "out": DOUT}, ()),
]  # fmt: skip
"""Entries with valid arguments, and the names of those that may not share memory between elements."""


def tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, int | str | None, Tensor]]:
    """Yield every tensor with the name of its argument, and its index or field there."""
    for name, value in arguments.items():
        parts: dict[Any, Any] = vars(value) if isinstance(value, (Bounds, Scores)) else {None: value}
        for part, x in enumerate(value) if isinstance(value, tuple) else parts.items():
            if isinstance(x, Tensor):
                yield name, part, x


def exchange(value: Any, part: int | str | None, x: Tensor) -> Any:
    """Return an argument with one of its tensors replaced."""
    if isinstance(part, str):
        return replace(value, **{part: x})
    return x if part is None else (*value[:part], x, *value[part + 1 :])


def unfit(name: str, x: Tensor, outputs: tuple[str, ...]) -> Iterator[Tensor]:
    """Yield copies of a tensor with another size, dtype, device or stride."""
    for dim, step in product(range(x.dim()), (-1, 1)):
        yield x.new_zeros(*x.shape[:dim], x.shape[dim] + step, *x.shape[dim + 1 :])
    yield x.to(torch.float64 if x.is_floating_point() else torch.int64)
    yield x.to(META)
    if x.dtype != torch.float8_e4m3fn:
        yield torch.stack([x, x], -1)[..., 0]
    if name in outputs:
        yield x[:1].expand(x.shape)
    if name.startswith(("state", "lse", "delta", "dlse", "dq", "dk", "dv", "accum", "scale")):
        yield x.half()
    if name in ("state[1]", "lse", "delta", "dlse", "scale"):
        yield gap(*x.shape)


@pytest.mark.parametrize(("call", "arguments", "outputs"), EVERY, ids=lambda x: getattr(x, "__name__", ""))
def test_every_tensor_argument_is_checked(
    call: Callable[..., Any], arguments: dict[str, Any], outputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the tensor, except if it is one that others are compared with. Nothing of the caller's changes.

    A backward may compute delta before it refuses ``lse``.
    """
    launched: list[Any] = []
    monkeypatch.setattr(sys.modules[call.__module__], "launch", lambda kernel, *_, **options: launched.append(kernel))
    call(**arguments)
    assert launched
    launched.clear()
    for argument, part, x in tensors(arguments):
        name = argument if part is None else f"{argument}[{part}]" if isinstance(part, int) else part
        other_dtype = [x.half()] if name == "dout" and "q" in arguments else []  # delta takes any
        for changed in (*unfit(name, x, outputs), *other_dtype):
            message = None if name in ("q", "v", "x", "out") else re.escape(name)
            with compiling_for(GPU), pytest.raises(ValueError, match=message):  # meta tensors stand for another GPU's
                call(**arguments | {argument: exchange(arguments[argument], part, changed)})
    assert {*launched} <= {delta_kernel}


def test_dk_and_dv_are_passed_together() -> None:
    refused(attention_backward, whole(dk=DK), "only one of dk and dv is given: pass both accumulators, or neither")


TILE = Tile(32, 32, 4, 1)
CONFIGS: list[tuple[dict[str, Any], str]] = [
    *(({x: "y"}, f"{x} is 'y': it must be one of") for x in ("backward", "dkdv_epilogue", "forward_kernel", "loads")),
    ({"order": "longst"}, "order is 'longst': it must be one of heads, longest"),
    *(({name: None}, f"{name} is None: it must be True or False") for name in ("pack_gqa", "persistent")),
    ({"dq": (64, 64, 4, 2)}, r"dq is \(64, 64, 4, 2\): it must be a Tile or None"),
    ({"single_pass": 64, "backward": "single_pass"}, "single_pass is 64: it must be a Tile or None"),
    ({"sm_margin": 4}, "sm_margin is 4 and persistent is False: "),
    ({"sm_margin": -1, "persistent": True}, "sm_margin is -1 and persistent is True: "),
    ({"forward_kernel": "hopper", "pack_gqa": True}, "pack_gqa is True: forward_kernel='hopper' needs order='heads'"),
    ({"forward_kernel": "hopper", "order": "longest"}, "order is 'longest', .* forward_kernel='hopper' needs"),
    *(({"dkdv_splits": n}, "dkdv_splits is .*: it must be 'auto' or a divisor") for n in (0, True, "2")),
    ({"dkdv_splits": 2, "backward": "single_pass"}, "dkdv_splits is 2 with backward='single_pass': it needs"),
    ({"dkdv_epilogue": "descriptors", "backward": "hopper"}, "with backward='hopper': it needs backward='two_pass'"),
    ({"single_pass": TILE}, "single_pass is Tile.*, but backward is 'two_pass'"),
]


TILES = [
    ((8, 64, 4, 1), "block_q is 8: it must be a power of two of at least 16"),
    ((64, 48, 4, 1), "block_k is 48: it must be a power of two"),
    (("64", 64, 4, 1), "block_q is '64': it must be a power of two"),
    ((64, 64, True, 1), "num_warps is True: it must be"),
    ((64, 64, 4, 1.5), "num_stages is 1.5: it must be"),
    ((64, 64, 3, 1), "num_warps is 3: it must be 1, 2, 4, 8 or 16"),
    ((64, 64, 4, 0), "num_stages is 0: it must be at least 1"),
]


def test_bad_configs_and_tiles_are_refused() -> None:
    for fields, message in CONFIGS:
        refused(KernelConfig, {"forward": TILE, "dq": TILE, "dkdv": TILE} | fields, message)
    assert KernelConfig(persistent=True, sm_margin=0, dkdv_splits="auto").sm_margin == 0
    for sides, message in TILES:
        refused(Tile, dict(zip(vars(TILE), sides, strict=True)), message)


def test_the_interpreter_refuses_bfloat16() -> None:
    x = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"tensors are torch\.bfloat16 on the CPU"):
        attention_forward(x, x, x)


def test_the_cpu_needs_the_interpreter(tmp_path: Path) -> None:
    """Even an entry that would launch nothing raises."""
    code = """
import torch
from ringattn.kernels import attention_backward, attention_delta, attention_forward, dequantize, quantize, scale_shape
for rows in (8, 0):
    x, lse = torch.zeros(1, rows, 1, 16), torch.zeros(1, 1, rows)
    fp8 = x.to(torch.float8_e4m3fn), torch.zeros(scale_shape(x.shape))
    needs = {attention_forward: (x, x, x), attention_delta: (x, x), attention_backward: (x, x, x, x, x, lse),
             quantize: (x, *fp8), dequantize: (*fp8, x)}
    for call, given in needs.items():
        try:
            call(*given)
        except NotImplementedError as error:
            assert "TRITON_INTERPRET=1" in str(error), error
        else:
            raise AssertionError(call)
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
