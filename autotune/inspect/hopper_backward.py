"""The Hopper backward through the gate of :mod:`.compiled`, and what it must have beside: who loads, adds, hands on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from ...kernels.device.tiles import Shape
from ...kernels.experimental.hopper_backward import hopper_backward_kernel
from ...kernels.experimental.hopper_backward_launch import HEAD_DIMS, TAKES, check_tile, default_tile, shared_bytes
from ...kernels.experimental.steps import CONSUMERS, ROWS
from .arguments import interval, strided
from .compiled import Compiled, problems
from .gluon import GLUON_DTYPES, check_kind, compile_source, described, source_of
from .hopper import handing_faults
from .variant import ROLES, Variant

OPTIONS = (("backward", "hopper"),)
"""Of a :class:`Variant` that is this kernel: what its ``KernelConfig`` says."""


def variants() -> Iterator[Variant]:
    """Every one that the default tiles launch: dtypes x head dims x roles x bounds, grouped or not the same."""
    for dtype, head_dim, role, full in product(GLUON_DTYPES, HEAD_DIMS, ROLES, (True, False)):
        tile = default_tile(head_dim)
        yield Variant("single_pass", 90, dtype, head_dim, head_dim, tile, role, full, options=OPTIONS)


def check(variant: Variant) -> None:
    """Refuse what the kernel is not written for: ValueError."""
    check_kind(variant, "single_pass", HEAD_DIMS, TAKES)
    check_tile(variant.head_dim, variant.tile)


def gluon_source(variant: Variant, *, ragged: bool = False) -> GluonASTSource:
    """The signature that a launch with 16-aligned pointers, strides and lengths specialises to."""
    role = ROLES[variant.role]
    result = strided(variant.dtype if role.final else "fp32")
    carried = strided("fp32") if role.carried else result
    rows, keys = (described(variant.dtype, length, variant.head_dim) for length in (variant.tile.block_q, ROWS))
    arguments: dict[str, Any] = {
        "dout": rows, "q": rows, "k": keys, "v": keys, "dq": described("fp32", ROWS, ROWS),
        "lse": "*fp32", "delta": "*fp32", "dk_in": carried, "dv_in": carried, "dk_out": result, "dv_out": result,
        "bounds": interval(variant), "shape": Shape("i32", "i32", "i32", None), "group": "i32",
        "softmax_scale": "fp32", "HEAD_DIM": variant.head_dim, "BLOCK_Q": variant.tile.block_q,
        "SLOTS": variant.tile.num_stages, "HAS_SUM": role.carried, "IN_PLACE": role.in_place, "RAGGED": ragged,
    }  # fmt: skip
    return source_of(hopper_backward_kernel, arguments, general=("group",))


def compile_hopper_backward(variant: Variant, source: GluonASTSource | None = None) -> tuple[Compiled, str]:
    """(what the gate and the bound read, PTX) of one variant, as :func:`gluon_source` specialises it or ``source``.

    Raises:
        ValueError: what :func:`check` refuses.
        RuntimeError: Triton or ptxas refuses it.
    """
    check(variant)
    return compile_source(source or gluon_source(variant), variant.arch)


def faults(variant: Variant, compiled: Compiled, ptx: str) -> list[str]:
    """What keeps a variant from the gate; empty where it passes."""
    found = problems(variant, compiled)
    if len(compiled.loops) != CONSUMERS:
        found.append(f"{len(compiled.loops)} main loops, there should be {CONSUMERS}")
    # S and dP over the head dim, dV and dK over the queries, dQ over the keys; wgmma multiplies 16 deep
    wanted = 2 * (variant.head_dim + variant.tile.block_q) // 16 + CONSUMERS * ROWS // 16
    found += [f"{loop.matrix} products in a loop, not {wanted}" for loop in compiled.loops if loop.matrix != wanted]
    told = shared_bytes(variant.head_dim, variant.tile)
    if not 0 <= compiled.shared - told <= 1024:
        found.append(f"{compiled.shared} bytes of shared memory, the launch counts on {told} and some for barriers")
    found += [] if "cp.reduce.async.bulk.tensor.4d" in ptx else ["dQ is not added by the copy engine"]
    # the barrier of a partition of one warp
    return found + handing_faults(ptx.replace("bar.warp.sync", "bar.sync")) + unfenced(ptx)


def unfenced(ptx: str) -> list[str]:
    """What threads store for the products or for the copy engine, and hand on without a fence for those to see it.

    That is dS, by stmatrix before an arrival, and a part of dQ, before its reduction; PTX ISA, "Async proxy".
    """
    waiting: set[str] = set()
    found = {"stmatrix": 0, "st.shared": 0}
    for word in re.findall(r"(stmatrix|st\.shared|fence\.proxy\.async|mbarrier\.arrive|cp\.reduce)\b", ptx):
        if word in found:
            waiting.add(word)
        elif word == "fence.proxy.async":
            waiting.clear()
        else:
            late = "stmatrix" if word == "mbarrier.arrive" else "st.shared"
            found[late] += late in waiting
    return [f"{count} times {word} is handed on without a fence" for word, count in found.items() if count]


def main(names: list[str]) -> int:
    """Compile the variants whose text holds all of ``names``, a line each; the number of those that do not pass."""
    from .bound import loop_bound

    failed = 0
    for variant in (one for one in variants() if {*names} <= {*str(one).split()}):
        compiled, ptx = compile_hopper_backward(variant)
        found = faults(variant, compiled, ptx)
        failed += bool(found)
        told = f"bound={loop_bound(compiled):.0f} local={[loop.local for loop in compiled.loops]} {compiled.shared} B"
        print("FAIL" if found else "ok", variant, told, *found, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
