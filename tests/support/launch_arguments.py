"""Run as a script with the name of a group: launches of odd sizes, up to the binary, where there is no GPU.

Of numbers that are 1 Triton makes constants, and of descriptors of a single row or key it takes strides of nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ringattn.autotune.compile import HOPPER, Sizes, Variant, compiled
from ringattn.kernels import Tile
from ringattn.kernels.config import SHARED_LIMIT
from ringattn.kernels.experimental import hopper_backward_launch

ADDS, STORES = "cp.reduce.async.bulk.tensor", "cp.async.bulk.tensor.4d.global.shared"

STEPS = re.compile(
    r"(?P<acquire>atom\.\S*acquire)|(?P<add>cp\.reduce\.async\.bulk|(?:atom|red)\.\S*\.f32)"
    r"|(?P<done>cp\.async\.bulk\.wait_group\s)|(?P<barrier>bar\.sync)|(?P<release>(?:atom|red)\.\S*release)"
)
"""What orders who adds to dQ; ``wait_group.read`` waits for the room alone, not for the sum."""

Check = Callable[[Variant, str], None]


def no_more(variant: Variant, ptx: str) -> None:
    """It compiles."""


def check_epilogue(variant: Variant, ptx: str) -> None:
    """dK and dV are left by the copy engine alone, and added where they stay where they were."""
    in_place = variant.role == "middle"
    assert (ADDS in ptx, STORES in ptx) == (in_place, not in_place)
    assert ("cp.async.bulk.tensor.4d.shared" in ptx) == (variant.role == "last")
    assert "st.global" not in ptx, "something is left by pointers"


def check_turn(variant: Variant, ptx: str) -> None:
    """A program waits before it adds, and passes its turn on when all of its threads and the copy engine have added."""
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


def hopper(sizes: tuple[int, ...], head_dim: int, dtype: str, *, bounded: bool, role: str) -> Variant:
    kernel, options = HOPPER["hopper"]
    tile = Tile(128, 64 if head_dim == 256 else 128, 8, 2)
    return Variant(
        kernel, 90, dtype, head_dim, head_dim, tile, role, not bounded, options=options, sizes=Sizes(*sizes)
    )  # fmt: skip


def hopper_backward(sizes: tuple[int, ...], head_dim: int, dtype: str, *, bounded: bool, role: str) -> Variant:
    kernel, options = HOPPER["hopper_backward"]
    tile = hopper_backward_launch.default_tile(head_dim)
    return Variant(
        kernel, 90, dtype, head_dim, head_dim, tile, role, not bounded, options=options, sizes=Sizes(*sizes)
    )  # fmt: skip


def epilogue(sizes: tuple[int, ...], head_dim: int, role: str) -> Variant:
    options, tile = (("dkdv_epilogue", "descriptors"),), Tile(32, 64, 4, 1)
    return Variant("dkdv", 90, "bf16", head_dim, 64, tile, role, True, options=options, sizes=Sizes(*sizes))


def single_pass(sizes: tuple[int, ...], head_dim: int, kernel: str, *, bounded: bool) -> Variant:
    tile = Tile(32, 64, 4, 1)
    return Variant(kernel, 90, "bf16", head_dim, head_dim, tile, "only", not bounded, sizes=Sizes(*sizes))


GROUPS: dict[str, tuple[Check, list[Variant]]] = {
    "hopper": (no_more, [
        hopper((2, 256, 384, 4, 2), 128, "bf16", bounded=False, role="middle"),
        hopper((1, 1, 1, 1, 1), 64, "fp16", bounded=True, role="only"),
        hopper((1, 1, 300, 2, 1), 128, "bf16", bounded=True, role="middle"),
        hopper((1, 130, 1, 3, 3), 128, "bf16", bounded=False, role="middle"),
        hopper((3, 77, 301, 3, 1), 256, "fp16", bounded=True, role="last"),
    ]),
    "hopper_backward": (no_more, [
        hopper_backward((2, 256, 384, 4, 2), 128, "bf16", bounded=False, role="last"),
        hopper_backward((1, 1, 1, 1, 1), 64, "fp16", bounded=True, role="only"),
        hopper_backward((1, 130, 300, 3, 3), 128, "bf16", bounded=False, role="only"),
    ]),
    "epilogue": (check_epilogue, [
        epilogue((2, 256, 384, 2, 2), 128, "only"),
        epilogue((3, 77, 301, 3, 3), 32, "first"),
        epilogue((1, 1, 1, 1, 1), 64, "middle"),
        epilogue((1, 130, 300, 2, 2), 16, "last"),
    ]),
    "single_pass": (check_turn, [
        single_pass((2, 256, 384, 4, 2), 64, "single_pass", bounded=True),
        single_pass((1, 1, 1, 1, 1), 64, "single_pass", bounded=False),
        single_pass((3, 77, 301, 3, 1), 96, "single_pass_deterministic", bounded=False),  # no power of two: by atomics
        single_pass((1, 130, 300, 2, 1), 64, "single_pass_deterministic", bounded=True),
    ]),
}  # fmt: skip
"""(B, Sq, Sk, H, Hkv), D and more: by group, and what is looked at in the PTX of each."""


def main(group: str) -> Iterator[str]:
    check, variants = GROUPS[group]
    for variant in variants:
        made: Any = compiled(variant.launch, variant.arch).binary
        assert made.metadata.shared <= SHARED_LIMIT[variant.arch]
        check(variant, made.asm["ptx"])
        yield f"compiled: {variant} {variant.sizes}"


if __name__ == "__main__":
    for line in main(sys.argv[1]):
        print(line)
