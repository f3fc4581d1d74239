"""Stand-in for ``flash_attn`` in plain PyTorch, for machines without a GPU: the functions that rings call.

It follows FlashAttention's documentation: causal masks and windows are aligned to the bottom right corner.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float().repeat_interleave(groups, 2)) * scale
    back = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (back < 0 if causal else back != back) | ((back > left) & (left >= 0)) | ((-back > right) & (right >= 0))
    return scores.masked_fill(hidden, -torch.inf)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.float().repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out.to(q.dtype), lse, None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Any, deterministic: bool, rng_state: Any = None,
) -> None:  # fmt: skip
    groups = q.shape[2] // k.shape[2]
    keys, values = (x.float().repeat_interleave(groups, 2) for x in (k, v))
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    weights = (scores - softmax_lse[..., None]).exp().nan_to_num(0.0)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = weights * (torch.einsum("bihd,bjhd->bhij", dout.float(), values) - delta) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, keys))
    for into, left, right in ((dk, ds, q), (dv, weights, dout)):
        grad = torch.einsum("bhij,bihd->bjhd", left, right.float())
        into.copy_(grad.reshape(*into.shape[:3], groups, into.shape[3]).sum(3))


def _documents(edges: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(edges.tolist())]


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    rest: Any = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, False)
    pairs = zip(_documents(cu_seqlens_q), _documents(cu_seqlens_k), strict=True)
    parts = [_flash_attn_forward(q[None, i], k[None, j], v[None, j], *rest) for i, j in pairs]
    return torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], -1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Any, deterministic: bool, rng_state: Any = None,
) -> None:  # fmt: skip
    rest: Any = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, False)
    for i, j in zip(_documents(cu_seqlens_q), _documents(cu_seqlens_k), strict=True):
        tensors: Any = (dout[None, i], q[None, i], k[None, j], v[None, j], out[None, i], softmax_lse[None, :, i])
        arguments: list[Any] = [*tensors, dq[None, i], dk[None, j], dv[None, j], *rest]
        _flash_attn_backward(*arguments)


def install_flash_stand_in() -> str:
    """Make the stand-in importable as ``flash_attn`` if that is not installed; return what is used."""
    if "flash_attn" not in sys.modules and find_spec("flash_attn") is None:
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
        interface.__dict__.update({function.__name__: function for function in functions})
        package.__dict__.update(
            flash_attn_interface=interface, flash_attn_func=None, __version__="2.8.3", is_stand_in=True
        )
        for module in (package, interface):
            module.__spec__ = ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
    return "a stand-in for flash_attn" if hasattr(sys.modules.get("flash_attn"), "is_stand_in") else "flash_attn"
