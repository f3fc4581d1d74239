"""Adapters of rings that call ``flash_attn``: zhuzilin's ``ring_flash_attn`` and USP (``yunchang``).

Machines without a GPU get a stand-in for ``flash_attn`` in PyTorch. It follows the documentation of FlashAttention:
causal masks and windows are aligned to the bottom right corner.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version as installed
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[2], 2)


def _scores(q: Tensor, k: Tensor, softmax_scale: float, causal: bool, left: int, right: int) -> Tensor:
    back = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (back < 0 if causal else back != back) | ((back > left) & (left >= 0)) | ((-back > right) & (right >= 0))
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), _repeat_heads(k, q.shape[2])) * softmax_scale
    return scores.masked_fill(hidden, -torch.inf)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, **_: Any,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    scores = _scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, _repeat_heads(v, q.shape[2])).to(q.dtype), lse, None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    with torch.enable_grad():
        scores = _scores(leaves[0], leaves[1], softmax_scale, causal, window_size_left, window_size_right)
        weights = (scores - softmax_lse[..., None]).exp().nan_to_num(0.0)
        share = torch.einsum("bhij,bjhd,bihd->bhi", weights, _repeat_heads(leaves[2], q.shape[2]), dout.float())
        gradients = torch.autograd.grad((share - weights.sum(-1) * delta).sum(), leaves)
    for grad, x in zip((dq, dk, dv), gradients, strict=True):
        grad.copy_(x)


def _documents(edges_q: Tensor, edges_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for i, j in zip(pairwise(edges_q.tolist()), pairwise(edges_k.tolist()), strict=True):
        yield slice(*i), slice(*j)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any
) -> tuple[Tensor, Tensor, None, None]:
    documents = _documents(cu_seqlens_q, cu_seqlens_k)
    parts = [_flash_attn_forward(q[None, i], k[None, j], v[None, j], **rest) for i, j in documents]
    return torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], -1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any,
) -> None:  # fmt: skip
    for i, j in _documents(cu_seqlens_q, cu_seqlens_k):
        inputs = dout[None, i], q[None, i], k[None, j], v[None, j], out[None, i], softmax_lse[None, :, i]
        _flash_attn_backward(*inputs, dq[None, i], dk[None, j], dv[None, j], **rest)


def _install_stand_in() -> str:
    """Make the stand-in importable as ``flash_attn`` if that is not installed; return what is used."""
    if "flash_attn" not in sys.modules and find_spec("flash_attn") is None:
        functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
        interface, package = ModuleType("flash_attn.flash_attn_interface"), ModuleType("flash_attn")
        vars(interface).update({function.__name__: function for function in functions})
        vars(package).update(
            flash_attn_interface=interface, flash_attn_func=None, __version__="2.8.3", is_stand_in=True
        )
        for module in (package, interface):
            module.__spec__ = ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
    return "a stand-in for flash_attn" if hasattr(sys.modules.get("flash_attn"), "is_stand_in") else "flash_attn"


def _zhuzilin(name: str) -> Any:
    """Import a module without the package's ``__init__``, which needs transformers before 5."""
    _install_stand_in()
    if "ring_flash_attn" not in sys.modules:
        package, spec = ModuleType("ring_flash_attn"), find_spec("ring_flash_attn")
        package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
        sys.modules["ring_flash_attn"] = package
    return import_module(f"ring_flash_attn.{name}")


def _supports(call: Any) -> str:
    if call.world == 1:
        return "a ring of one rank sends to itself, which gloo cannot"
    return "" if call.layout == "contiguous" or call.causal else "its balanced layouts need a causal mask"


def _options(call: Any) -> dict[str, Any]:
    return {"causal": call.causal, "softmax_scale": call.softmax_scale, "window_size": call.window_size}


def _fixed_attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    layouts = {"contiguous": "ring", "zigzag": "zigzag_ring", "striped": "stripe"}
    name = f"{layouts[call.layout]}_flash_attn"
    return getattr(_zhuzilin(name), f"{name}_func")(q, k, v, **_options(call))


def _varlen_supports(call: Any) -> str:
    if call.layout == "zigzag" and "ragged documents" in call.features:
        return "zigzag needs documents whose lengths are multiples of twice the ranks"
    return "it takes packed documents" if call.cu_seqlens is None else _supports(call)


def _varlen_positions(call: Any) -> Any:
    """Return each document's share, for zigzag; else contiguous tokens of all (the functions ``llama3``)."""
    whole = torch.arange(call.tokens)
    if call.layout == "contiguous":
        return whole.chunk(call.world)[call.rank]
    documents = [whole[i:j].chunk(2 * call.world) for i, j in pairwise(call.cu_seqlens)]
    return torch.cat([parts[at] for parts in documents for at in (call.rank, 2 * call.world - 1 - call.rank)])


def _varlen_attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    edges, rest = torch.tensor(call.cu_seqlens, dtype=torch.int32), tuple[Any, ...]()
    if call.layout == "contiguous":
        theirs = _zhuzilin("llama3_flash_attn_varlen")
        *prepared, keys = theirs.llama3_flash_attn_prepare_cu_seqlens(edges, call.causal, call.rank, call.world)
        function, rest = theirs.llama3_flash_attn_varlen_func, (*prepared, 1, keys)
    else:
        function = _zhuzilin("zigzag_ring_flash_attn_varlen").zigzag_ring_flash_attn_varlen_func
        rest = edges // call.world, int(edges.diff().max()) // call.world
    return torch.stack([function(*row, *rest, **_options(call)) for row in zip(q, k, v, strict=True)])


def _usp_degrees(call: Any) -> tuple[int, int]:
    """Return the degrees of the ring and of Ulysses, which is 2 on 4 and 6 ranks if the heads allow it."""
    ulysses = 2 if call.world in (4, 6) and call.kv_heads % 2 == 0 else 1
    return call.world // ulysses, ulysses


def _usp_positions(call: Any) -> Any:
    """Return the tokens that its ``EXTRACT_FUNC_DICT`` gives a rank."""
    ring, ulysses = _usp_degrees(call)
    whole, at = torch.arange(call.tokens), call.rank // ulysses
    if call.layout == "contiguous":
        return whole.chunk(call.world)[call.rank]
    parts = whole.chunk(2 * ring)
    return torch.cat([parts[at], parts[2 * ring - at - 1]]).chunk(ulysses)[call.rank % ulysses]


def _usp_attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    _install_stand_in()
    from yunchang import LongContextAttention, set_seq_parallel_pg

    degrees, kinds = _usp_degrees(call), {"contiguous": "basic", "zigzag": "zigzag"}
    if degrees not in _usp_groups:
        set_seq_parallel_pg(degrees[1], degrees[0], dist.get_rank(), call.world)
        _usp_groups[degrees] = {layout: LongContextAttention(ring_impl_type=kinds[layout]) for layout in kinds}
    return _usp_groups[degrees][call.layout](q, k, v, **_options(call))


_usp_groups = dict[tuple[int, int], Any]()
_features = {
    "causal", "full", "window", "two-sided window", "scale", "contiguous", "zigzag", "bfloat16", "float16",
    "grouped heads", "gradients",
}  # fmt: skip
fixed = SimpleNamespace(
    attend=_fixed_attend, supports=_supports, features=_features | {"striped"},
    version=lambda: f"ring-flash-attn {installed('ring-flash-attn')} on {_install_stand_in()}",
)  # fmt: skip
varlen = SimpleNamespace(
    attend=_varlen_attend, positions=_varlen_positions, supports=_varlen_supports, version=fixed.version,
    features=_features | {"aligned documents", "ragged documents"},
)  # fmt: skip
usp = SimpleNamespace(
    attend=_usp_attend, positions=_usp_positions, supports=_supports, features=_features,
    version=lambda: f"yunchang {installed('yunchang')} on {_install_stand_in()}",
)  # fmt: skip
