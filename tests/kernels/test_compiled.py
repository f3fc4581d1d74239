"""Every kernel, compiled ahead of time for GPUs that are not here: it fits, and its main loop is clean."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton

from ringattn.autotune.inspect.arguments import shape
from ringattn.autotune.inspect.compiled import Compiled, problems
from ringattn.autotune.inspect.names import select
from ringattn.autotune.inspect.sass import Loop, basic_blocks, matrix_loops, natural_loops
from ringattn.autotune.inspect.variant import ATTENTION, FEATURES, FP8, SINGLE_PASS, Variant, launchable
from ringattn.kernels import KernelConfig, Tile
from ringattn.kernels.config import config_for, single_pass_tile
from ringattn.kernels.tables import Options

ARCHS = (80, 86, 89, 90, 100, 120)
SIXTEEN_BIT = (64, 128)

# python/tutorials/06-fused-attention.py of Triton 3.6: its largest BLOCK_M forward; BLOCK_M2 and BLOCK_N1 backward
TUTORIAL_ROWS = {"forward": 128, "dq": 128, "dkdv": 128}


def of_a_hop(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the gate says of every causal multi-head kernel."""
    return {row["kernel"]: row for row in rows if not row["full"] and not row["grouped"]}


def gate(variants: list[str]) -> list[dict[str, Any]]:
    """The report of ``ringattn inspect``; in a process of its own, since here kernels are interpreted, not compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ringattn", "inspect", "--gate", "--json", "-", *variants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the gate says of the variants that the test compiles."""
    return gate([*request.node.get_closest_marker("compiles").args])


# Registers, and instructions of the unmasked loop (of dK/dV: the only one), of the causal kernels in the middle of a
# ring at commit ce0569a, before there were scores, used lengths, runs and head dims in two parts; Triton 3.7.1.
BEFORE = {"forward": (254, 523), "dq": (223, 315), "dkdv": (255, 376)}


@pytest.mark.compiles("90:bf16:128:middle")
def test_what_a_ring_launches_most_is_clean_and_pays_for_nothing_that_is_off(rows: list[dict[str, Any]]) -> None:
    """The main GPU, in the role of most hops: no more registers or instructions than before there were features."""
    told = of_a_hop(rows)
    if triton.__version__.startswith("3.7."):  # whose figures they are
        for kernel, (registers, instructions) in BEFORE.items():
            assert told[kernel]["registers"] <= registers and told[kernel]["instructions"] <= instructions, kernel


# One kernel on each other family of GPUs, and the rest of them on the main one; a process for several, in which much of
# the time goes by before the first kernel is compiled
SAMPLE = [
    ["80:bf16:128:middle:dkdv", "100:bf16:64:middle:forward", "120:fp16:128:middle:dq"],
    ["90:bf16:128:last:single_pass", "100:bf16:96:middle:single_pass"],
    ["90:bf16:128:quantize", "80:fp32:256:quantize", "90:bf16:128:dequantize", "86:bf16:64:dequantize"],
]


@pytest.mark.parametrize("names", [pytest.param(one, marks=pytest.mark.compiles(*one), id=one[0]) for one in SAMPLE])
def test_a_sample_passes_the_gate(names: list[str], rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= len(names)


@pytest.mark.compiles("90:bf16:192/128:middle:forward")
def test_head_dims_in_two_parts_multiply_less(rows: list[dict[str, Any]]) -> None:
    """192 as 128 and 64: of keys 64 wide, 12 + 4 steps of 16 where padding to 256 makes 16 + 4."""
    told = of_a_hop(rows)["forward"]
    assert [loop["matrix"] for loop in told["loops"]] == [12 + 4] * 3


@pytest.mark.compiles("90:bf16:128:middle:dkdv:dkdv_epilogue=descriptors")
def test_descriptors_in_the_epilogue_end_the_spills() -> None:
    """Of the default tile in the middle of a ring, which by pointers has 120 bytes of stack outside of its loop."""
    (told,) = gate(["--kernel", "dkdv", "--arch", "sm_90", "--option", "dkdv_epilogue=descriptors"])
    assert (told["head_dim"], told["role"], told["options"]) == (128, "middle", {"dkdv_epilogue": "descriptors"})
    assert told["stack"] == 0 and told["registers"] <= 214


ORDERS = (
    "order=longest",
    "order=longest:persistent=True",
    "pack_gqa=True",
    "order=longest:pack_gqa=True",
    "dkdv_splits=2",
)
DESCRIBED = "dkdv:dkdv_epilogue=descriptors"
NIGHTLY: dict[str, list[str]] = {
    "bf16": [f"bf16:{dim}" for dim in (64, 128, 256)],
    "fp32": [f"fp32:{dim}" for dim in (64, 128, 256)],
    # the same tiles and the same code as bf16 but for the type in the matrix instruction: one role of each kernel
    "fp16": [f"fp16:{dim}:{role}" for dim in (64, 128, 256) for role in ("middle", "quantize", "dequantize")],
    "features": [f"bf16:128:middle:{kernel}:{one}" for kernel in ATTENTION for one in (*FEATURES, ":".join(FEATURES))],
    "orders": [f"bf16:{dim}:middle:{options}" for dim in SIXTEEN_BIT for options in ORDERS],
    "two parts": [f"bf16:{head_dims}" for head_dims in ("192/128", "96", "80")],
    "fp8": [f"{dtype}:{dim}:{one}" for dtype in ("bf16", "fp32") for dim in (1, 40, 96, 129) for one in FP8],
    "descriptors": [f"bf16:64:{DESCRIBED}", f"bf16:128:{DESCRIBED}", f"fp32:128:{DESCRIBED}"],
}


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("what", NIGHTLY)
def test_everything_that_can_be_launched_passes_the_gate(what: str, arch: int) -> None:
    if what == "descriptors" and arch < 90:
        return  # no copy engine
    specs = list(NIGHTLY[what])
    if (what, arch) == ("descriptors", 90):  # persistent it does not fit sm_120
        specs += [
            f"{spec}:{order}" for spec in specs[:2] for order in ("order=longest:persistent=True", "dkdv_splits=2")
        ]
    rows = gate([f"{arch}:{spec}" for spec in specs])
    assert arch != 90 or not any(row["stack"] for row in rows if row["options"].keys() == {"dkdv_epilogue"})


@pytest.mark.nightly
def test_a_pass_that_waits_for_its_turn_fits() -> None:
    (told,) = gate(["--kernel", "single_pass_deterministic", "--arch", "sm_80"])
    assert told["spills"] <= 16


def test_tiles_reuse_what_they_load_as_much_as_the_tutorial() -> None:
    """Forward and dQ stream K/V: 4 (6) * rows * keys * D operations on 4 * keys * D bytes, so operations per byte grow
    with the query rows of the tile alone. dK/dV streams Q and dO, and the same holds for its keys."""
    for arch, head_dim in product(ARCHS, SIXTEEN_BIT):
        config = config_for(arch, torch.bfloat16, head_dim)
        kept = {"forward": config.forward.block_q, "dq": config.dq.block_q, "dkdv": config.dkdv.block_k}
        assert all(kept[kernel] >= rows for kernel, rows in TUTORIAL_ROWS.items()), (arch, head_dim)


def test_launchable_covers_every_kernel_role_and_flag_once() -> None:
    variants = list(launchable(90, "bf16", 128))
    assert len(variants) == len(set(variants)) == 5 * 4 * 2 * 2 + 2 * 4 * 2 + 1 + 2
    passes = {variant.tile for variant in variants if variant.kernel in SINGLE_PASS}
    assert passes == {single_pass_tile(90, torch.bfloat16, 128)}
    assert not any(variant.kernel in SINGLE_PASS for variant in launchable(90, "bf16", 256))
    tiles = {variant.tile for variant in variants if variant.kernel in ("forward", "dq", "dkdv")}
    config = config_for(90, torch.bfloat16, 128)
    assert tiles == {config.forward, config.dq, config.dkdv}
    pairs = [(v.kernel, v.head_dim) for v in launchable(90, "bf16", 192, 128) if v.kernel in FP8]
    assert pairs == [("quantize", 192), ("quantize", 128), ("dequantize", 192), ("dequantize", 128)]


CLEAN = Compiled(registers=255, stack=0, shared=160_000, tensor_memory=0, loops=(Loop(16, 0, 1, False),))
VARIANT = Variant("forward", 90, "bf16", 128, 128, Tile(128, 128, 8, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shared": 300_000}, "300000 bytes of shared memory"),
        ({"tensor_memory": 592}, "592 columns of tensor memory"),
        ({"loops": ()}, "no loop"),
        ({"loops": (Loop(16, 3, 1, False),)}, "3 local-memory instructions"),
        ({"loops": (Loop(16, 0, 16, True),)}, "serialised wgmma"),
    ],
)
def test_the_gate_names_what_is_wrong(change: dict[str, object], told: str) -> None:
    assert problems(VARIANT, CLEAN) == []
    (problem,) = problems(VARIANT, replace(CLEAN, **change))  # type: ignore[arg-type]
    assert told in problem


@pytest.mark.parametrize(
    ("change", "told"), [({"stack": 8}, "8 bytes of local memory"), ({"flushes": True}, "flushed")]
)
def test_the_gate_names_what_is_wrong_with_a_memory_bound_kernel(change: dict[str, object], told: str) -> None:
    variant, clean = replace(VARIANT, kernel="quantize", dtype="fp32", head_dim=256), replace(CLEAN, loops=())
    assert problems(variant, clean) == []
    (problem,) = problems(variant, replace(clean, **change))  # type: ignore[arg-type]
    assert told in problem


def test_spills_are_tolerated_where_the_gate_does_not_ask_for_clean_loops() -> None:
    spilled = replace(CLEAN, loops=(Loop(16, 3, 1, False),))
    assert problems(replace(VARIANT, features=("dropout",)), spilled) == []
    assert problems(replace(VARIANT, head_dim=256), spilled) == []
    assert problems(replace(VARIANT, dtype="fp32"), spilled) == []


@pytest.mark.parametrize(
    ("kernel", "options", "passes"),
    [
        ("dkdv", (("persistent", True),), True),
        ("forward", (("persistent", True),), False),
        ("dkdv", (("order", "longest"),), False),
        ("single_pass_deterministic", (), True),
        ("single_pass", (), False),
    ],
)
def test_few_spills_are_tolerated_where_a_program_waits_or_walks(kernel: str, options: Options, passes: bool) -> None:
    variant = replace(VARIANT, kernel=kernel, options=options)
    assert (problems(variant, replace(CLEAN, loops=(Loop(16, 16, 1, False),))) == []) is passes
    assert problems(variant, replace(CLEAN, loops=(Loop(16, 17, 1, False),)))


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_end) ;
.L_head:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4] ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8] ;
        /*0040*/              @!P2 BRA `(.L_spin) ;
.L_arrived:
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   STL [R1], R2 ;
        /*0070*/               @P1 BRA `(.L_head) ;
        /*0080*/                   LDL R2, [R1] ;
        /*0090*/                   LDL R3, [R1] ;
.L_end:
        /*00a0*/                   EXIT ;
.L_spin:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4] ;
        /*00c0*/              @!P2 BRA `(.L_spin) ;
        /*00d0*/                   BRA `(.L_arrived) ;
.L_trap:
        /*00e0*/                   BRA `(.L_trap);
"""


def test_the_main_loop_is_found_by_control_flow() -> None:
    # the spin behind EXIT branches back into the loop: the epilogue's two LDL lie between, and are not in the loop
    (loop,) = matrix_loops(LISTING)
    assert loop == Loop(matrix=2, local=1, waits=1, serialised=False, instructions=9)


def test_a_loop_in_a_loop_is_the_main_loop() -> None:
    nested = LISTING.replace(".L_head:", ".L_outer:\n        /*0018*/                   NOP ;\n.L_head:").replace(
        "        /*0080*/", "        /*0078*/               @P3 BRA `(.L_outer) ;\n        /*0080*/"
    )
    assert len([body for body in natural_loops(basic_blocks(nested)) if len(body) > 1]) == 2
    assert len(list(matrix_loops(nested))) == 1


def test_one_wait_per_product_is_serialised() -> None:
    wait = "        /*0034*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    (loop,) = matrix_loops(LISTING.replace("        /*0040*/", wait + "        /*0040*/"))
    assert loop.serialised and loop.waits == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("75:bf16:64", "arch is 75: it must be one of 80"),
        ("90:fp8:64", "dtype is 'fp8'"),
        ("90:bf16:64:second", "role, kernel, feature or option is 'second'"),
        ("90:bf16:64:swath=2", "option is 'swath=2': it must be NAME=VALUE with one of forward_kernel, order"),
        ("90:bf16:64:order=best", "option order is 'best': it must be one of heads, longest"),
    ],
)
def test_what_cannot_be_compiled_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(select(spec))


def test_options_are_fields_of_a_config_by_name_and_value() -> None:
    """Of the kernels, and the heads, that have them; they are part of what a variant is called."""
    found = [*select("90:bf16:128:middle:persistent=True:order=longest")]
    assert {one.kernel for one in found} == {"forward", "dq", "dkdv"}
    assert {one.options for one in found} == {(("order", "longest"), ("persistent", True))}
    assert all(str(one).endswith(" order=longest persistent=True") for one in found)
    for variant in found:
        order = shape(variant).order
        assert (order.swath, order.heads, order.count) == ("i32", "i32", "i32")
    assert {one.kernel for one in select("90:bf16:128:pack_gqa=True")} == {"forward", "dq"}
    assert all(one.grouped and shape(one).packed for one in select("90:bf16:128:pack_gqa=True"))
    (split,) = (one for one in select("90:bf16:128:middle:dkdv_splits=2") if one.full)
    assert (split.kernel, split.grouped, shape(split).splits) == ("dkdv", True, "i32")
    assert {one.options for one in select("90:bf16:128:hopper")} == {(("forward_kernel", "hopper"),)}
    backward = [*select("90:bf16:64:hopper_backward")]
    assert {(one.kernel, one.options) for one in backward} == {("single_pass", (("backward", "hopper"),))}
    assert {one.tile for one in backward} == {Tile(128, 128, 8, 2)}, "its own, not that of the portable single pass"
    assert backward == [*select("90:bf16:64:single_pass:backward=hopper")]
    assert {one.kernel for one in select("90:bf16:128/64:dkdv_epilogue=descriptors")} == {"dkdv"}
    for without in ("80:bf16:128", "90:bf16:128/96", "90:bf16:8"):
        assert not [*select(f"{without}:dkdv_epilogue=descriptors")]
    assert {one.options for one in select("90:bf16:128:dkdv:dkdv_splits=1:order=heads")} == {(), (("dkdv_splits", 2),)}
    fields = {one.name: one.default for one in dataclasses.fields(KernelConfig)}
    assert all(fields[name] != value for one in (*found, split) for name, value in one.options)
