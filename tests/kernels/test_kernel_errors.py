"""What the kernels refuse, and that the message names the argument, what it got and what it takes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels import (
    Bounds,
    KernelConfig,
    Tile,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    default_config,
)
from ringattn.kernels.config import config_for

META = torch.device("meta")


def qkv(**others: Tensor) -> dict[str, Any]:
    """Inputs that fit, but for ``others``."""
    return {"q": torch.randn(2, 8, 4, 16), "k": torch.randn(2, 6, 2, 16), "v": torch.randn(2, 6, 2, 24)} | others


def backward(**others: Any) -> dict[str, Any]:
    fit = {"dout": torch.randn(2, 8, 4, 24), "lse": torch.randn(2, 4, 8), "delta": torch.randn(2, 4, 8)}
    return qkv() | fit | others


def whole(**others: Any) -> dict[str, Any]:
    fit = {"dout": torch.randn(2, 8, 4, 24), "out": torch.randn(2, 8, 4, 24), "lse": torch.randn(2, 4, 8)}
    return qkv() | fit | others


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def unaligned(*shape: int) -> Tensor:
    """Of that shape, the last stride 2."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def gap(*shape: int) -> Tensor:
    """Of that shape, a unit last stride, not contiguous."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


def refused(call: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**arguments)


INPUTS: dict[str, dict[str, Any]] = {
    r"q has shape \[2, 8, 64\]: it must be \[B, S, H, D\]": {"q": zeros(2, 8, 64)},
    r"k has shape \[6, 2, 16\]: it must be \[B, S, H, D\]": {"k": zeros(6, 2, 16)},
    r"v has shape \[2, 6, 2, 4, 6\]: it must be \[B, S, H, D\]": {"v": zeros(2, 6, 2, 4, 6)},
    r"q is torch.int64: it must be float16, bfloat16 or float32": {"q": zeros(2, 8, 4, 16, dtype=torch.int64)},
    r"k is torch.float64: it must be float16, bfloat16 or float32": {"k": zeros(2, 6, 2, 16, dtype=torch.float64)},
    r"v is torch.float16, q is torch.float32: .* one dtype": {"v": zeros(2, 6, 2, 24, dtype=torch.float16)},
    r"k is on meta, q on cpu: .* one device": {"k": zeros(2, 6, 2, 16, device=META)},
    r"k has batch size 3, q has 2: they must be equal": {"k": zeros(3, 6, 2, 16)},
    r"v has batch size 1, q has 2: they must be equal": {"v": zeros(1, 6, 2, 24)},
    r"q has head dim 257: it must be 1 to 256": {"q": zeros(2, 8, 4, 257)},
    r"v has head dim 0: it must be 1 to 256": {"v": zeros(2, 6, 2, 0)},
    r"q has strides \(1024, 128, 32, 2\): the last stride must be 1": {"q": unaligned(2, 8, 4, 16)},
    r"v has strides \(576, 96, 48, 2\): the last stride must be 1": {"v": unaligned(2, 6, 2, 24)},
    r"k has head dim 32, q has 16: they must be equal": {"k": zeros(2, 6, 2, 32)},
    r"v is \[2, 7, 2, 24\], k is \[2, 6, 2, 16\]: .* must be equal": {"v": zeros(2, 7, 2, 24)},
    r"v is \[2, 6, 1, 24\], k is \[2, 6, 2, 16\]: .* must be equal": {"v": zeros(2, 6, 1, 24)},
    r"k has 3 heads, q has 4: .* must be a multiple of": {"k": zeros(2, 6, 3, 16), "v": zeros(2, 6, 3, 24)},
    r"k has 0 heads, q has 4: .* must be a multiple of": {"k": zeros(2, 6, 0, 16), "v": zeros(2, 6, 0, 24)},
    r"k has 2 heads, q has 0: .* must be a multiple of": {"q": zeros(2, 8, 0, 16)},
    r"softmax_scale is 0.0: it must be a positive number, 1e30 at most": {"softmax_scale": 0.0},
    r"softmax_scale is -1.0: ": {"softmax_scale": -1.0},
    r"softmax_scale is inf: ": {"softmax_scale": math.inf},
    r"softmax_scale is nan: ": {"softmax_scale": math.nan},
    r"bounds.lo is torch.int32 \[6\] on cpu: it must be int32 \[8\] on cpu": {
        "bounds": Bounds(zeros(6, dtype=torch.int32), zeros(6, dtype=torch.int32))
    },
    r"bounds has only one of lo and hi": {"bounds": Bounds(None, zeros(8, dtype=torch.int32))},
}


@pytest.mark.parametrize("message", INPUTS)
def test_inputs(message: str) -> None:
    """The same in every entry that takes q, k and v."""
    for call, fit in (
        (attention_forward, qkv()),
        (attention_dq, backward()),
        (attention_dkdv, backward()),
        (attention_backward, whole()),
    ):
        refused(call, fit | INPUTS[message], message)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((zeros(2, 6, 4, 24), zeros(2, 4, 8)), r"state\[0\] has shape \[2, 6, 4, 24\]: it must be \[2, 8, 4, 24\]"),
        ((zeros(2, 8, 4, 24, dtype=torch.float16), zeros(2, 4, 8)), r"state\[0\] is torch.float16: .* torch.float32"),
        ((zeros(2, 8, 4, 24, device=META), zeros(2, 4, 8)), r"state\[0\] is on meta: it must be on cpu"),
        ((unaligned(2, 8, 4, 24), zeros(2, 4, 8)), r"state\[0\] has strides .*: the last stride must be 1"),
        ((zeros(1, 8, 4, 24).expand(2, 8, 4, 24), zeros(2, 4, 8)), r"state\[0\] has strides .*: it is written to"),
        ((zeros(2, 8, 4, 24), zeros(2, 8, 4)), r"state\[1\] has shape \[2, 8, 4\]: it must be \[2, 4, 8\]"),
        ((zeros(2, 8, 4, 24), zeros(2, 4, 8, dtype=torch.float64)), r"state\[1\] is torch.float64: .* torch.float32"),
        ((zeros(2, 8, 4, 24), gap(2, 4, 8)), r"state\[1\] has strides \(64, 16, 1\): it must be contiguous"),
    ],
)
def test_state(state: tuple[Tensor, Tensor], message: str) -> None:
    refused(attention_forward, qkv() | {"state": state}, message)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"dout": zeros(2, 8, 4, 16)}, r"dout has shape \[2, 8, 4, 16\]: it must be \[2, 8, 4, 24\]"),
        ({"dout": zeros(2, 8, 4, 24, dtype=torch.float16)}, "dout is torch.float16: it must be torch.float32"),
        ({"dout": unaligned(2, 8, 4, 24)}, "dout has strides .*: the last stride must be 1"),
        ({"lse": zeros(2, 8, 4)}, r"lse has shape \[2, 8, 4\]: it must be \[2, 4, 8\]"),
        ({"lse": zeros(2, 4, 8, dtype=torch.float16)}, "lse is torch.float16: it must be torch.float32"),
        ({"lse": gap(2, 4, 8)}, r"lse has strides \(64, 16, 1\): it must be contiguous"),
        ({"delta": zeros(2, 4, 6)}, r"delta has shape \[2, 4, 6\]: it must be \[2, 4, 8\]"),
        ({"delta": zeros(2, 4, 8, dtype=torch.float64)}, "delta is torch.float64: it must be torch.float32"),
        ({"delta": gap(2, 4, 8)}, r"delta has strides \(64, 16, 1\): it must be contiguous"),
    ],
)
def test_what_the_backward_reads(others: dict[str, Tensor], message: str) -> None:
    refused(attention_dq, backward(**others), message)
    refused(attention_dkdv, backward(**others), message)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"out": zeros(2, 8, 96)}, r"out has shape \[2, 8, 96\]"),
        ({"out": unaligned(2, 8, 4, 24)}, "out has strides .*: the last stride must be 1"),
        ({"out": zeros(2, 8, 4, 24, dtype=torch.int32)}, "out is torch.int32: it must be float16, bfloat16 or float32"),
        ({"dout": zeros(2, 8, 4, 16)}, r"dout has shape \[2, 8, 4, 16\]: it must be \[2, 8, 4, 24\]"),
        ({"dout": zeros(2, 8, 4, 24, dtype=torch.int64)}, "dout is torch.int64: it must be float16"),
        ({"dout": unaligned(2, 8, 4, 24)}, "dout has strides .*: the last stride must be 1"),
        ({"dlse": zeros(2, 8, 4)}, r"dlse has shape \[2, 8, 4\]: it must be \[2, 4, 8\]"),
        ({"dlse": zeros(2, 4, 8, dtype=torch.float16)}, "dlse is torch.float16: it must be torch.float32"),
        ({"dlse": gap(2, 4, 8)}, r"dlse has strides \(64, 16, 1\): it must be contiguous"),
    ],
)
def test_what_delta_reads(others: dict[str, Tensor], message: str) -> None:
    fit = {"dout": zeros(2, 8, 4, 24), "out": zeros(2, 8, 4, 24)}
    refused(attention_delta, fit | others, message)
    refused(attention_backward, whole(**others), message)


def test_out_of_another_length_is_named() -> None:
    refused(
        attention_backward, whole(out=zeros(2, 6, 4, 24)), r"^out has shape \[2, 6, 4, 24\]: it must be \[2, 8, 4, 24\]"
    )


SUMS = {
    "dq": (2, 8, 4, 16),
    "dk": (2, 6, 2, 16),
    "dv": (2, 6, 2, 24),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    """By the names of attention_backward, and by those of the two passes."""
    shape = SUMS[name]
    inner = {"dq": "sums", "dk": r"sums\[0\]", "dv": r"sums\[1\]"}[name]
    for wrong, message in (
        (zeros(*shape[:-1], 5), rf"has shape \[2, \d, \d, 5\]: it must be \[{', '.join(map(str, shape))}\]"),
        (zeros(*shape, dtype=torch.float16), "is torch.float16: it must be torch.float32"),
        (unaligned(*shape), "has strides .*: the last stride must be 1"),
        (zeros(1, *shape[1:]).expand(shape), "has strides .*: it is written to"),
    ):
        sums = {key: zeros(*fit) for key, fit in SUMS.items()} | {name: wrong}
        refused(attention_backward, whole(**sums), f"^{name} {message}")
        if 0 in wrong.stride():  # there the sums are only read
            continue
        if name == "dq":
            refused(attention_dq, backward(sums=wrong), f"^{inner} {message}")
        else:
            refused(attention_dkdv, backward(sums=(sums["dk"], sums["dv"])), f"^{inner} {message}")


@pytest.mark.parametrize(
    ("call", "into", "message"),
    [
        (attention_dq, zeros(2, 8, 4, 5), r"into has shape \[2, 8, 4, 5\]: it must be \[2, 8, 4, 16\]"),
        (attention_dq, zeros(2, 8, 4, 16, dtype=torch.int32), "into is torch.int32: it must be float16"),
        (attention_dq, unaligned(2, 8, 4, 16), "into has strides"),
        (attention_dq, zeros(2, 1, 4, 16).expand(2, 8, 4, 16), "into has strides .*: it is written to"),
        (attention_dkdv, (zeros(2, 6, 2, 5), zeros(2, 6, 2, 24)), r"into\[0\] has shape \[2, 6, 2, 5\]"),
        (attention_dkdv, (zeros(2, 6, 2, 16), zeros(2, 6, 2, 24, device=META)), r"into\[1\] is on meta"),
    ],
)
def test_targets(call: Callable[..., Any], into: Any, message: str) -> None:
    refused(call, backward(into=into), message)


def test_one_of_two_sums() -> None:
    for name in ("dk", "dv"):
        refused(attention_backward, whole(**{name: zeros(*SUMS[name])}), "dk and dv: pass both sums, or neither")


def test_nothing_is_written_before_everything_is_checked() -> None:
    """A bad dv is refused while dq is still as it was."""
    dq = torch.randn(SUMS["dq"])
    before = dq.clone()
    refused(attention_backward, whole(dq=dq, dk=zeros(*SUMS["dk"]), dv=zeros(1, 1, 1, 1)), "dv has shape")
    assert torch.equal(dq, before)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ((8, 64, 4, 1), "block_q is 8: a tile side is a power of two of at least 16"),
        ((64, 48, 4, 1), "block_k is 48: a tile side is a power of two"),
        ((64, 0, 4, 1), "block_k is 0: a tile side"),
        ((64, 64, 3, 1), "num_warps is 3: it must be 1, 2, 4, 8 or 16"),
        ((64, 64, 32, 1), "num_warps is 32"),
        ((64, 64, 4, 0), "num_stages is 0: it must be at least 1"),
    ],
)
def test_tiles(tile: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tile(*tile)


def test_default_configs() -> None:
    """One for every GPU, dtype and head dim; small tiles where the interpreter runs them."""
    for arch in (75, 80, 86, 89, 90, 100, 103, 120):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for head_dim in (1, 64, 65, 128, 256):
                assert isinstance(config_for(arch, dtype, head_dim), KernelConfig)
    assert config_for(75, torch.float16, 64) == config_for(120, torch.float16, 64)
    assert default_config(zeros(1, 1, 1, 16), zeros(1, 1, 1, 256)).forward.block_q == 32


def test_the_cpu_needs_the_interpreter(tmp_path: Path) -> None:
    """Every entry says so, also where there would be nothing to launch."""
    code = """
import torch
from ringattn.kernels import attention_backward, attention_delta, attention_forward
for rows in (8, 0):
    x, lse = torch.zeros(1, rows, 1, 16), torch.zeros(1, 1, rows)
    for call in (attention_forward, attention_delta, attention_backward):
        needs = {attention_forward: (x, x, x), attention_delta: (x, x), attention_backward: (x, x, x, x, x, lse)}
        try:
            call(*needs[call])
        except NotImplementedError as error:
            assert "TRITON_INTERPRET=1" in str(error), error
        else:
            raise AssertionError(call)
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_half_a_state_is_refused() -> None:
    q, k, v = (torch.zeros(1, 8, 2, 16) for _ in range(3))
    with pytest.raises(ValueError, match="state has only one of out and lse"):
        attention_forward(q, k, v, state=(torch.zeros(1, 8, 2, 16), None))  # type: ignore[arg-type]
