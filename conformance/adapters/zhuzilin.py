"""Adapters of zhuzilin's ``ring_flash_attn``: its fixed-length functions, and its functions for packed documents."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version as installed
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .flash_stand_in import install_flash_stand_in

features = {
    "causal", "full", "window", "two-sided window", "scale", "contiguous", "zigzag", "striped", "bfloat16", "float16",
    "grouped heads", "gradients",
}  # fmt: skip
FUNCTIONS = {"contiguous": "ring", "zigzag": "zigzag_ring", "striped": "stripe"}


def version() -> str:
    return f"ring-flash-attn {installed('ring-flash-attn')} on {install_flash_stand_in()}"


def _theirs(name: str) -> Any:
    """Import a module without the package's ``__init__``, which needs transformers before 5."""
    install_flash_stand_in()
    if "ring_flash_attn" not in sys.modules:
        package, spec = ModuleType("ring_flash_attn"), find_spec("ring_flash_attn")
        package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
        sys.modules["ring_flash_attn"] = package
    return import_module(f"ring_flash_attn.{name}")


def supports(call: Any) -> str:
    if call.world == 1:
        return "a ring of one rank sends to itself, which gloo cannot"
    return "" if call.layout == "contiguous" or call.causal else "its balanced layouts need a causal mask"


def _options(call: Any) -> dict[str, Any]:
    return {"causal": call.causal, "softmax_scale": call.softmax_scale, "window_size": call.window_size}


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    name = f"{FUNCTIONS[call.layout]}_flash_attn"
    return getattr(_theirs(name), f"{name}_func")(q, k, v, **_options(call))


def _varlen_supports(call: Any) -> str:
    if call.layout == "zigzag" and "ragged documents" in call.features:
        return "zigzag needs documents whose lengths are multiples of twice the ranks"
    return "it takes packed documents" if call.cu_seqlens is None else supports(call)


def _varlen_positions(call: Any) -> Any:
    """Return each document's share, for zigzag; else contiguous tokens of all (the functions ``llama3``)."""
    whole = torch.arange(call.tokens)
    if call.layout == "contiguous":
        return whole.chunk(call.world)[call.rank]
    documents = [whole[i:j].chunk(2 * call.world) for i, j in zip(call.cu_seqlens, call.cu_seqlens[1:], strict=False)]
    return torch.cat([parts[at] for parts in documents for at in (call.rank, 2 * call.world - 1 - call.rank)])


def _varlen_attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    name = "llama3_flash_attn_varlen" if call.layout == "contiguous" else "zigzag_ring_flash_attn_varlen"
    theirs = _theirs(name)
    edges = torch.tensor(call.cu_seqlens, dtype=torch.int32)
    if call.layout == "contiguous":
        prepared = theirs.llama3_flash_attn_prepare_cu_seqlens(edges, call.causal, call.rank, call.world)
        rows = [theirs.llama3_flash_attn_varlen_func(*row, *prepared[:4], 1, prepared[4], **_options(call))
                for row in zip(q, k, v, strict=True)]  # fmt: skip
    else:
        longest = int((edges[1:] - edges[:-1]).max()) // call.world
        rows = [theirs.zigzag_ring_flash_attn_varlen_func(*row, edges // call.world, longest, **_options(call))
                for row in zip(q, k, v, strict=True)]  # fmt: skip
    return torch.stack(rows)


varlen = SimpleNamespace(
    attend=_varlen_attend, positions=_varlen_positions, supports=_varlen_supports, version=version,
    features=features - {"striped"} | {"aligned documents", "ragged documents"},
)  # fmt: skip
