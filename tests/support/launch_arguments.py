"""Script that compiles launches of odd sizes up to the binary, without a GPU; the argument names a group.

Triton turns arguments equal to 1 into constants, and a descriptor of a single row or key may have any strides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ringattn.autotune.compile import CallSizes, KernelVariant, compile_launch, parse_variants
from ringattn.kernels.gpu import shared_limit

ADDS, STORES = "cp.reduce.async.bulk.tensor", "cp.async.bulk.tensor.4d.global.shared"

STEPS = re.compile(
    r"(?P<acquire>atom\.\S*acquire)|(?P<add>cp\.reduce\.async\.bulk|(?:atom|red)\.\S*\.f32)"
    r"|(?P<done>cp\.async\.bulk\.wait_group\s)|(?P<barrier>bar\.sync)|(?P<release>(?:atom|red)\.\S*release)"
)
"""The PTX steps that order additions to dQ; ``wait_group.read`` is absent because it does not wait for the sum."""

Check = Callable[[KernelVariant, str], None]


def check_nothing(variant: KernelVariant, ptx: str) -> None:
    """Check nothing beyond compilation."""


def check_epilogue(variant: KernelVariant, ptx: str) -> None:
    """Check that only TMA writes dK and dV, and that the middle hop adds in place."""
    in_place = variant.role == "middle"
    assert (ADDS in ptx, STORES in ptx) == (in_place, not in_place)
    assert ("cp.async.bulk.tensor.4d.shared" in ptx) == (variant.role == "last")
    assert "st.global" not in ptx, "dK or dV is stored through pointers"


def check_turn(variant: KernelVariant, ptx: str) -> None:
    """Check that a program waits before it adds, and releases its turn only after all additions are complete."""
    by_copy_engine = variant.head_dim == 64
    assert ("cp.reduce.async.bulk" in ptx) == by_copy_engine
    if variant.kernel != "single_pass_deterministic":
        return
    steps = [str(match.lastgroup) for match in STEPS.finditer(ptx)]
    added = [index for index, step in enumerate(steps) if step == "add"]
    begin, end = steps.index("acquire"), steps.index("release")
    assert begin < added[0] and added[-1] < end, steps
    behind = steps[added[-1] + 1 : end]
    assert behind[-1] == "barrier" and ("done" in behind) == by_copy_engine, behind


GROUPS: dict[str, tuple[Check, dict[str, tuple[int, ...]]]] = {
    "hopper": (check_nothing, {
        "90:bf16:128:hopper:full:middle:128x128x8x2": (2, 256, 384, 4, 2),
        "90:fp16:64:hopper:bounded:only:128x128x8x2": (1, 1, 1, 1, 1),
        "90:bf16:128:hopper:bounded:middle:128x128x8x2": (1, 1, 300, 2, 1),
        "90:bf16:128:hopper:full:last:128x128x8x2": (1, 130, 1, 3, 3),
        "90:fp16:256:hopper:bounded:last:128x64x8x2": (3, 77, 301, 3, 1),
    }),
    "hopper_backward": (check_nothing, {
        "90:bf16:128:hopper_backward:full:last": (2, 256, 384, 4, 2),
        "90:fp16:64:hopper_backward:bounded:only": (1, 1, 1, 1, 1),
        "90:bf16:128:hopper_backward:full:only": (1, 130, 300, 3, 3),
    }),
    "epilogue": (check_epilogue, {
        "90:bf16:128/64:dkdv:dkdv_epilogue=descriptors:full:only:32x64x4x1": (2, 256, 384, 2, 2),
        "90:bf16:32/64:dkdv:dkdv_epilogue=descriptors:full:first:32x64x4x1": (3, 77, 301, 3, 3),
        "90:bf16:64:dkdv:dkdv_epilogue=descriptors:full:middle:32x64x4x1": (1, 1, 1, 1, 1),
        "90:bf16:16/64:dkdv:dkdv_epilogue=descriptors:full:last:32x64x4x1": (1, 130, 300, 2, 2),
    }),
    "single_pass": (check_turn, {
        "90:bf16:64:single_pass:bounded:only:32x64x4x1": (2, 256, 384, 4, 2),
        "90:bf16:64:single_pass:full:only:32x64x4x1": (1, 1, 1, 1, 1),
        # head dim is no power of two, so dQ is added by atomics
        "90:bf16:96:single_pass_deterministic:full:only:32x64x4x1": (3, 77, 301, 3, 1),
        "90:bf16:64:single_pass_deterministic:bounded:only:32x64x4x1": (1, 130, 300, 2, 1),
    }),
}  # fmt: skip
"""By group: the check of the PTX, and (B, Sq, Sk, H, Hkv) by name in ``ringattn inspect``."""


def main(group: str) -> Iterator[str]:
    check, calls = GROUPS[group]
    for spec, sizes in calls.items():
        (selected,) = parse_variants(f"{spec}:mha")
        variant = replace(selected, sizes=CallSizes(*sizes))
        binary: Any = compile_launch(variant.launch, variant.arch).binary
        assert binary.metadata.shared <= shared_limit(variant.arch)
        check(variant, binary.asm["ptx"])
        yield f"compiled: {variant} {variant.sizes}"


if __name__ == "__main__":
    for line in main(sys.argv[1]):
        print(line)
