"""Adapter of USP (``yunchang``): ``LongContextAttention`` with a Ulysses degree of 2 on 4 and 6 ranks, else 1."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .flash_stand_in import install_flash_stand_in

features = {
    "causal", "full", "window", "two-sided window", "scale", "contiguous", "zigzag", "bfloat16", "float16",
    "grouped heads", "gradients",
}  # fmt: skip


def version() -> str:
    return f"yunchang {installed('yunchang')} on {install_flash_stand_in()}"


def _degrees(call: Any) -> tuple[int, int]:
    ulysses = 2 if call.world in (4, 6) and call.kv_heads % 2 == 0 else 1
    return call.world // ulysses, ulysses


def supports(call: Any) -> str:
    if call.world == 1:
        return "a ring of one rank sends to itself, which gloo cannot"
    return "zigzag needs a causal mask" if call.layout == "zigzag" and not call.causal else ""


def positions(call: Any) -> Any:
    """Return the tokens that its ``EXTRACT_FUNC_DICT`` gives a rank."""
    ring, ulysses = _degrees(call)
    whole = torch.arange(call.tokens)
    if call.layout == "contiguous":
        return whole.chunk(call.world)[call.rank]
    parts, at = whole.chunk(2 * ring), call.rank // ulysses
    return torch.cat([parts[at], parts[2 * ring - at - 1]]).chunk(ulysses)[call.rank % ulysses]


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
    install_flash_stand_in()
    from yunchang import LongContextAttention, set_seq_parallel_pg

    ring, ulysses = _degrees(call)
    key = (ring, ulysses)
    if key not in _groups:
        set_seq_parallel_pg(ulysses, ring, dist.get_rank(), call.world)
        kinds = {"contiguous": "basic", "zigzag": "zigzag"}
        _groups[key] = {layout: LongContextAttention(ring_impl_type=kinds[layout]) for layout in kinds}
    attention = _groups[key][call.layout]
    return attention(q, k, v, causal=call.causal, softmax_scale=call.softmax_scale, window_size=call.window_size)


_groups = dict[tuple[int, int], Any]()
