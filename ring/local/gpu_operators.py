"""Backends on other projects' GPU kernels: flash and cudnn of PyTorch, fa3 and fa4 of FlashAttention.

No kernel drops weights here: dropout is 0 in every call, so seeds and offsets are only placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...kernels.checks import MAX_HEAD_DIM
from ...kernels.gpu import is_amd
from ...kernels.launch import Pair
from .operators import NO_DROPOUT, Operator, OperatorAttention, is_deterministic
from .protocol import Supports
from .rectangles import Tensors
from .registry import register_backend

aten: Any = torch.ops.aten


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    """Call PyTorch's FlashAttention-2."""
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, NO_DROPOUT, causal, scale=scale)
    return out, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Tensors:
    """Call PyTorch's FlashAttention-2. In deterministic mode PyTorch selects the deterministic kernel."""
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads: Tensors = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], NO_DROPOUT, causal, seed, seed, scale=scale
    )
    return grads


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    """Call PyTorch's cuDNN attention, whose ``lse`` is ``[B, H, S, 1]`` since PyTorch 2.9."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, NO_DROPOUT, causal, scale=scale)
    return out, lse.squeeze(-1)


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Tensors:
    """Call PyTorch's cuDNN attention."""
    seed, rows, keys = torch.empty((), dtype=torch.int64, device=q.device), q.shape[2], k.shape[2]
    grads: Tensors = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, rows, keys, NO_DROPOUT, causal, scale=scale
    )
    return grads


def load_fa3() -> Any:
    """Return the module of FlashAttention-3, or raise ImportError that says how to install it."""
    return _load("flash_attn_interface", "FlashAttention-3: build the folder hopper of Dao-AILab/flash-attention")


def load_fa4() -> Any:
    """Return the module of FlashAttention-4, or raise ImportError that says how to install it."""
    return _load("flash_attn.cute.interface", "FlashAttention-4: pip install flash-attn-4")


def _load(module: str, install: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}); install {install}") from error


def fa3_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    """Call FlashAttention-3."""
    result: Pair = load_fa3().flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
    return result


def fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Tensors:
    """Call FlashAttention-3. Arguments up to ``causal`` go by position, because their names have changed."""
    grads = tuple(x.new_empty(x.shape) for x in (q, k, v))
    whole_batch = (None,) * 6  # cu_seqlens, seqused and max_seqlen, each of q and k
    load_fa3()._flash_attn_backward(
        dout, q, k, v, out, lse, *whole_batch, *grads, scale, causal, deterministic=is_deterministic()
    )
    return grads


def fa4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    """Call FlashAttention-4."""
    result: Pair = load_fa4().flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    return result


def fa4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Tensors:
    """Call FlashAttention-4, which takes ``out`` before ``dout``."""
    grads: Tensors = load_fa4()._flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=scale, causal=causal, deterministic=is_deterministic()
    )
    return grads


def flash_accepts(arch: int, dim: int, value_dim: int, deterministic: bool) -> bool:
    return arch >= 80 and dim <= 256 and not (arch in (86, 89, 120, 121) and 192 < dim <= 224)


def cudnn_accepts(arch: int, dim: int, value_dim: int, deterministic: bool) -> bool:
    if arch < 80 or is_amd(arch) or deterministic:
        return False
    is_deepseek = arch // 10 == 10 and (dim, value_dim) == (192, 128)
    return is_deepseek or max(dim, value_dim) <= (256 if arch == 90 else 128)


def fa3_accepts(arch: int, dim: int, value_dim: int, deterministic: bool) -> bool:
    has_two_dims = arch == 90 and ((128 < dim <= 192 and 96 < value_dim <= 128) or dim <= 64)
    most = 192 if deterministic else 256
    return 80 <= arch <= 90 and max(dim, value_dim) <= most and (dim == value_dim or has_two_dims)


def fa4_accepts(arch: int, dim: int, value_dim: int, deterministic: bool) -> bool:
    family, largest = arch // 10, max(dim, value_dim)
    if family == 9:
        return largest <= 256
    if family in (10, 11):
        return largest <= 128 or (dim, value_dim) in ((192, 128), (256, 256))
    return family == 12 and largest <= 128 and not deterministic


HALF_ON_GPU = Supports(devices=("cuda",), dtypes=(torch.float16, torch.bfloat16), value_dims=range(1, MAX_HEAD_DIM + 1))
FLASH_OPERATOR = Operator(flash_forward, flash_backward, is_heads_first=True, has_one_dim=True)
# cuDNN refuses one key, and on some GPUs one row.
CUDNN_OPERATOR = Operator(cudnn_forward, cudnn_backward, is_heads_first=True, for_one_token=FLASH_OPERATOR)

GPU_BACKENDS = (
    OperatorAttention(
        "flash", FLASH_OPERATOR, supports=HALF_ON_GPU, accepts=flash_accepts,
        limits="head dims up to 256 on 8.0 and newer, except 193 to 224 on 8.6, 8.9 and 12.x",
    ),
    OperatorAttention(
        "cudnn", CUDNN_OPERATOR, supports=HALF_ON_GPU, accepts=cudnn_accepts,
        limits="head dims up to 128 (up to 256 on 9.0, and 192 with 128 on 10.x), and no deterministic mode",
    ),
    OperatorAttention(
        "fa3", Operator(fa3_forward, fa3_backward), supports=HALF_ON_GPU, accepts=fa3_accepts, load=load_fa3,
        limits="equal head dims up to 256 (deterministic: 192) on 8.0 to 9.0; on 9.0 also 192 with 128, and up to 64 "
        "for q and k with up to 256 for v",
    ),
    OperatorAttention(
        "fa4", Operator(fa4_forward, fa4_backward), supports=HALF_ON_GPU, accepts=fa4_accepts, load=load_fa4,
        limits="head dims up to 256 on 9.0; up to 128, 192 with 128, or 256 on 10.x and 11.x; and up to 128 without "
        "deterministic mode on 12.x",
    ),
)  # fmt: skip
"""Kernels that have never run here: bench/results/STATUS.md."""


def _factory(kernel: OperatorAttention) -> Callable[[], OperatorAttention]:
    return lambda: kernel


for _kernel in GPU_BACKENDS:
    register_backend(_kernel.name, _factory(_kernel))
