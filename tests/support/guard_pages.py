"""Runs of every attention kernel on tensors between guard pages.

The interpreter shows no wrong result when a kernel reads past a tensor's end and discards the value, or adds zeros
there. On a GPU that memory may belong to somebody else or not exist. Here such an access ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringattn.kernels import (
    FULL,
    BlockSparseIndex,
    Bounds,
    KernelConfig,
    Scores,
    Tile,
    attention_backward,
    attention_forward,
)

from .descriptor_stand_in import install

T = TypeVar("T")

GUARD = 16 * mmap.PAGESIZE  # more bytes than the rows of a tile past the end
ALLOCATES = (torch.empty, torch.zeros, torch.empty_like, torch.zeros_like)

TILE = Tile(32, 32, 4, 1)
TILES = KernelConfig(TILE, TILE, TILE)
CASES: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({}, ("full", "causal")),
    ({"order": "longest", "persistent": True, "sm_margin": 18, "pack_gqa": True}, ("causal", "used")),
    ({"dkdv_splits": 2}, ("full",)),
    ({"dkdv_epilogue": "descriptors"}, ("full",)),
    ({"backward": "single_pass"}, ("full", "runs")),
    ({"backward": "single_pass_deterministic"}, ("used",)),
)
"""Fields of a config, and the names of the `guard_cases` to run with."""


def guard_tensor(x: Tensor) -> Tensor:
    """Return a copy that ends at a guard page, with a second guard page before its first page."""
    if not x.numel():
        return x
    nbytes = x.numel() * x.element_size()
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * GUARD)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for begin in (address, address + GUARD + pages):
        if libc.mprotect(ctypes.c_void_p(begin), GUARD, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=GUARD + pages - nbytes).view(x.shape)
    return copy.copy_(x)


class GuardedAllocations(TorchFunctionMode):
    """Mode that also guards tensors allocated by the kernels' host code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return guard_tensor(result) if func in ALLOCATES else result


def guard_fields(value: T) -> T:
    """Return a ``Bounds`` or ``Scores`` with guarded tensors."""
    tensors = {f.name: getattr(value, f.name) for f in fields(value) if f.init}  # type: ignore[arg-type]
    guarded_tensors = {name: guard_tensor(x) for name, x in tensors.items() if isinstance(x, Tensor)}
    return replace(value, **guarded_tensors)  # type: ignore[type-var]


def guard_cases(queries: int, keys: int) -> dict[str, tuple[Bounds, Scores]]:
    rows = torch.arange(queries, dtype=torch.int32)
    causal = Bounds(torch.zeros_like(rows), rows + 1 + keys - queries)
    scores = Scores(
        alibi_slopes=torch.rand(2), dropout_p=0.3, dropout_seed=5, q_positions=rows,
        k_positions=torch.arange(keys, dtype=torch.int32),
    )  # fmt: skip
    used = Bounds(causal.lo, causal.hi, torch.tensor([keys - 3], dtype=torch.int32))
    runs = Bounds(causal.lo, causal.hi, None, BlockSparseIndex(torch.ones(2, 2, dtype=torch.bool), 32))
    return {"full": (FULL, Scores()), "causal": (causal, scores), "used": (used, Scores()), "runs": (runs, scores)}


def run_guarded(config: KernelConfig, bounds: Bounds, scores: Scores) -> None:
    """Run a forward with state and a backward with sums; no length or head dim is a multiple of the tile."""
    head_dim, head_dim_v = (16, 32) if config.dkdv_epilogue == "descriptors" else (24, 40)
    shapes = ((1, 35, 2, head_dim), (1, 45, 1, head_dim), (1, 45, 1, head_dim_v), (1, 35, 2, head_dim_v))
    q, k, v, dout = (guard_tensor(torch.randn(shape)) for shape in shapes)
    bounds, scores = guard_fields(bounds), guard_fields(scores)
    call: dict[str, Any] = {"bounds": bounds, "scores": scores, "config": config}
    state = guard_tensor(torch.zeros(dout.shape)), guard_tensor(torch.zeros(1, 2, 35))
    attention_forward(q, k, v, state=state, **call)
    out, lse = attention_forward(q, k, v, **call)
    sums: dict[str, Any] = {name: guard_tensor(torch.zeros(x.shape)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    attention_backward(dout, q, k, v, out, lse, dlse=guard_tensor(torch.randn(lse.shape)), **sums, **call)


def main() -> None:
    """Run all cases; an access past the end ends the process."""
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    with GuardedAllocations(), pytest.MonkeyPatch.context() as patch:
        install(patch)
        there = guard_cases(35, 45)
        for chosen, names in CASES:
            for name in names:
                print(chosen, name, flush=True)
                run_guarded(replace(TILES, **chosen), *there[name])
