"""The Hopper forward through the gate of :mod:`.compiled`, and what it must have beside: an order of instructions.

Its main loop is two products and a softmax. What makes it fast is not which instructions there are but where the
exponentials stand: between the wait for the scores and the wait for the product with V, which runs meanwhile.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from ...kernels.config import KernelConfig, config_for
from ...kernels.device.tiles import Shape
from ...kernels.experimental.hopper import hopper_kernel
from ...kernels.experimental.hopper_launch import HEAD_DIMS, TAKES, check_tile
from ...kernels.experimental.steps import CONSUMERS, ROWS
from .arguments import interval, strided
from .compiled import Compiled, problems
from .gluon import GLUON_DTYPES, check_kind, compile_source, described, source_of
from .variant import DTYPES, ROLES, Variant

OPTIONS = (("forward_kernel", "hopper"),)
"""Of a :class:`Variant` that is this kernel: what its ``KernelConfig`` says."""


@dataclass(frozen=True)
class Overlap:
    """What one main loop does under the product with V."""

    exponentials: int
    hidden: int
    """Of these, between the start of the product and the wait for it."""


def variants() -> Iterator[Variant]:
    """Every one that the default tiles of sm_90 launch: dtypes x head dims x roles x bounds x GQA."""
    for dtype, head_dim, role, full, grouped in product(GLUON_DTYPES, HEAD_DIMS, ROLES, (True, False), (True, False)):
        config: KernelConfig = config_for(90, DTYPES[dtype], head_dim)
        yield Variant("forward", 90, dtype, head_dim, head_dim, config.forward, role, full, grouped, options=OPTIONS)


def check(variant: Variant) -> None:
    """Refuse what the kernel is not written for: ValueError."""
    check_kind(variant, "forward", HEAD_DIMS, TAKES)
    check_tile(variant.head_dim, variant.tile)


def gluon_source(variant: Variant) -> GluonASTSource:
    """The signature that a launch with 16-aligned pointers, strides and lengths specialises to."""
    role = ROLES[variant.role]
    result = strided(variant.dtype if role.final else "fp32")
    keys = described(variant.dtype, variant.tile.block_k, variant.head_dim)
    arguments: dict[str, Any] = {
        "q": described(variant.dtype, ROWS, variant.head_dim), "k": keys, "v": keys,
        "state": strided("fp32") if role.carried else result, "out": result, "lse": "*fp32",
        "bounds": interval(variant), "shape": Shape("i32", "i32", "i32", "i32" if variant.grouped else 1),
        "softmax_scale": "fp32", "HEAD_DIM": variant.head_dim, "BLOCK_K": variant.tile.block_k,
        "SLOTS": variant.tile.num_stages, "HAS_STATE": role.carried,
    }  # fmt: skip
    return source_of(hopper_kernel, arguments)


def compile_hopper(variant: Variant, source: GluonASTSource | None = None) -> tuple[Compiled, str]:
    """(what the gate and the bound read, PTX) of one variant, as :func:`gluon_source` specialises it or ``source``.

    Raises:
        ValueError: what :func:`check` refuses.
        RuntimeError: Triton or ptxas refuses it.
    """
    check(variant)
    return compile_source(source or gluon_source(variant), variant.arch)


def listing_of(compiled: Compiled) -> str:
    """The main loops, one after the other."""
    return "\n".join(line for loop in compiled.loops for line in loop.lines)


def overlaps(listing: str) -> list[Overlap]:
    """Of every main loop, in the order of the listing.

    A step is: products start (HGMMA), ``DEPBAR gsb0, 1`` waits for the first of the two, ``DEPBAR gsb0, 0`` for the
    other; straight code but for spins on barriers, so that the order of lines is that of execution.
    """
    found = []
    for part in re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", listing)[1:]:
        under, _, after = part.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        after = re.split(r"HGMMA", after)[0]
        hidden, left = under.count("MUFU.EX2"), before_branch_back(after).count("MUFU.EX2")
        found.append(Overlap(hidden + left, hidden))
    return found


def before_branch_back(text: str) -> str:
    """What is left of a loop's body: up to the first branch."""
    return re.split(r"\bBRA\b", text)[0]


def faults(variant: Variant, compiled: Compiled, ptx: str) -> list[str]:
    """What keeps a variant from the gate; empty where it passes."""
    found = problems(variant, compiled)
    loops = CONSUMERS * (1 if variant.full else 3)  # masked tail, full middle, masked head
    if len(compiled.loops) != loops:
        found.append(f"{len(compiled.loops)} main loops, there should be {loops}")
    # `problems` lets spills pass beyond head dim 128, as the portable kernels have them there; this one has none
    found += [f"{loop.local} local-memory instructions in a main loop" for loop in compiled.loops if loop.local]
    found += ["serialised wgmma in a main loop" for loop in compiled.loops if loop.serialised]
    wanted = (variant.head_dim + variant.tile.block_k) // 16  # wgmma multiplies 16 deep
    found += [f"{loop.matrix} products in a loop, not {wanted}" for loop in compiled.loops if loop.matrix != wanted]
    return found + order_faults(listing_of(compiled), loops, variant.tile.block_k) + handing_faults(ptx)


def order_faults(listing: str, loops: int, block_k: int) -> list[str]:
    """Of the order of a listing of that many main loops: exponentials under a product."""
    found, overlapped = [], overlaps(listing)
    if len(overlapped) != loops:
        found.append(f"{len(overlapped)} of {loops} main loops start a product before the wait for the scores")
    least = ROWS * block_k // 128  # a warpgroup has 128 threads
    late = [one for one in overlapped if one.hidden < least]
    return found + [f"{one.hidden} of {one.exponentials} exponentials run under the product with V" for one in late]


def handing_faults(ptx: str) -> list[str]:
    """Of loads, registers and slots: who loads, who gives registers to whom, and when a slot is given back."""
    handed_on = {int(number) for number in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    found = [] if "cp.async.bulk.tensor.4d" in ptx else ["no TMA loads"]
    found += [] if {24, 240} <= handed_on else [f"registers are handed on as {sorted(handed_on)}"]
    # every arrival stands behind a barrier of its warpgroup, with neither product nor barrier operation between
    arrivals = re.findall(r"(bar\.sync[^\n]*\n(?:(?!mbarrier|wgmma).*\n)*?)?[^\n]*mbarrier\.arrive\.shared", ptx)
    if not arrivals:
        found.append("no slot is given back")
    return found if all(arrivals) else [*found, "a slot is given back before all warps are done with it"]


def main(names: list[str]) -> int:
    """Compile the variants whose text holds all of ``names``, a line each; the number of those that do not pass."""
    failed = 0
    for variant in (one for one in variants() if {*names} <= {*str(one).split()}):
        compiled, ptx = compile_hopper(variant)
        found = faults(variant, compiled, ptx)
        failed += bool(found)
        shown = overlaps(listing_of(compiled))
        print("FAIL" if found else "ok", variant, compiled, *shown, *found, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
