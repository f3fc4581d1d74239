"""Tests of the compile gate and of the throughput bound of a kernel's loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.autotune import gate
from ringattn.autotune import inspect as inspection
from ringattn.autotune.compile import MAX_LOGITS, KernelVariant, RecordedLaunch
from ringattn.autotune.gate import CompiledKernel, gate_problems, hopper_problems
from ringattn.autotune.inspect import variant_row
from ringattn.autotune.loop_bound import LoopBound, blocks_per_sm, busy_clocks, loop_bound, loop_bounds, main_bound
from ringattn.autotune.sass import (
    InstructionMix,
    Loop,
    basic_blocks,
    instruction_mix,
    matrix_loops,
    natural_loops,
    read_loop,
)
from ringattn.kernels import Tile, hopper_backward_launch
from ringattn.kernels.gpu import shared_limit
from ringattn.kernels.hopper.step_order import CONSUMERS

CLEAN = CompiledKernel(registers=255, stack=0, shared=160_000, tensor_memory=0, loops=(Loop(16, 0, 1, False),))
VARIANT = KernelVariant("forward", 90, "bf16", 128, 128, Tile(128, 128, 8, 2))


@pytest.mark.parametrize(("kernel", "change", "message"), [
    ("forward", {"shared": 300_000}, "300000 bytes of shared memory"),
    ("forward", {"tensor_memory": 592}, "592 columns of tensor memory"),
    ("forward", {"loops": ()}, "no loop"),
    ("forward", {"loops": (Loop(16, 0, 16, True),)}, "serialised wgmma"),
    ("forward", {"hazards": ("A is overwritten by FADD",)}, "1 instructions use registers of in-flight wgmma"),
    ("quantize", {"stack": 8}, "8 bytes of local memory"),
    ("quantize", {"flushes_subnormals": True}, "flushed"),
])  # fmt: skip
def test_gate_names_the_problem(kernel: str, change: dict[str, Any], message: str) -> None:
    variant, clean = replace(VARIANT, kernel=kernel), CLEAN if kernel == "forward" else replace(CLEAN, loops=())
    assert gate_problems(variant, clean) == []
    (problem,) = gate_problems(variant, replace(clean, **change))
    assert message in problem


def test_the_gate_allows_all_memory_of_the_gpu() -> None:
    for arch in (80, 90):
        most, variant = replace(CLEAN, shared=shared_limit(arch), tensor_memory=512), replace(VARIANT, arch=arch)
        assert gate_problems(variant, most) == []
        assert len(gate_problems(variant, replace(most, shared=most.shared + 1, tensor_memory=513))) == 2


AMDGCN = """
    s_cbranch_scc1 .LBB0_4
    v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
    .loc 1 105 0
    scratch_load_dwordx2 v[8:9], off, off offset:4 ; 8-byte Folded Reload
    scratch_store_dword off, v1, off offset:8
    s_cbranch_vccnz .LBB0_3
    v_exp_f32_e32 v4, v5
    v_exp_f32_e32 v4, v5
.LBB0_3:
    v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
    s_cbranch_scc0 .LBB0_1
.LBB0_2:
    v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
    v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
    s_cbranch_scc0 .LBB0_2
.LBB0_4:
    s_endpgm
    .amdhsa_float_denorm_mode_32 3
    .vgpr_count:     128
    .private_segment_fixed_size: 24
    .max_flat_workgroup_size: 256
"""


def test_resources_of_gpus_of_amd() -> None:
    def read(listing: str) -> CompiledKernel:
        binary = SimpleNamespace(asm={"amdgcn": listing}, metadata=SimpleNamespace(shared=4096))
        return gate.read_amdgcn(RecordedLaunch(None, 1, (), {}, binary), 0x942)

    compiled = read(AMDGCN)
    loops = compiled.loops
    assert compiled == CompiledKernel(128, 24, 4096, 0, loops, False, 0x942, 256) and len(loops) == 2
    assert read(AMDGCN.replace("mode_32 3", "mode_32 0")).flushes_subnormals
    row = variant_row(replace(VARIANT, arch=0x942), compiled, ["slow"])
    assert (row["loops"], row["matrix"], row["instructions"], row["spills"], row["exponentials"]) == ("1 2", 2, 3, 0, 0)
    assert row["bound"] is None and (row["regs"], row["stack"], row["threads"], row["blocks"]) == (128, 24, 256, 4)
    assert (row["arch"], row["tile"], row["problems"], row["kernel"]) == ("gfx942", "128x128x8x2", "slow", "forward")
    (only,) = (loop for loop in loops if loop.matrix == 1)
    row = variant_row(replace(VARIANT, arch=0x942), replace(compiled, loops=(only,)), ["slow"])
    assert (row["matrix"], row["instructions"], row["spills"], row["exponentials"]) == (1, 7, 2, 2)


@pytest.mark.parametrize("gate", [False, True])
def test_the_report_names_the_best_variant_and_the_problems(gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "slow": (10.0, "", 1), "best": (30.25, "", 2), "spills": (20.0, "it spills", 1),
        "large": (0.0, "it is large", 0), "of AMD": (None, "", 1),
    }  # fmt: skip
    assemblers, steps = list[Any](), list[Any]()

    def inspect(variant: str, assembler: Any) -> dict[str, Any]:
        assemblers.append(assembler)
        figures = dict(zip(("bound", "problems", "blocks"), rows[variant], strict=True))
        return {**dict.fromkeys(inspection.UNITS), "variant": variant, "limiter": "issue", **figures}

    monkeypatch.setattr(inspection, "inspect_variant", inspect)
    variants: Any = [*rows]
    found = inspection.inspect_variants(variants, lambda part, more: steps.append(more), Path("ptxas"), gate=gate)
    assert found.failed == ["spills: it spills"] * gate + ["large: it is large"]
    assert found.notes == ["spills: it spills"] * (not gate) + ["best: best: at most 30.2% of peak, limited by issue"]
    assert [row["variant"] for row in found.rows] == [*rows] and steps == [5, *[None] * 5]
    assert assemblers == [Path("ptxas")] * 5


@pytest.mark.parametrize("name", ["forward_kernel", "hopper_kernel", "hopper_backward_kernel"])
def test_resources_of_a_binary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tool: str, *flags: str, cubin: bytes) -> str:
        assert cubin == b"code"
        return {"nvdisasm": COUNTED, "cuobjdump": "Function x: REG:168 STACK:40 SHARED:0"}[tool]

    def read(ptx: str, **more: Any) -> CompiledKernel:
        metadata = SimpleNamespace(shared=9000, **more)
        binary = SimpleNamespace(asm={"cubin": b"code", "ptx": ptx}, metadata=metadata)
        kernel = SimpleNamespace(fn=SimpleNamespace(__name__=name))
        return gate.read_compiled(RecordedLaunch(kernel, 1, (), {}, binary), 90)

    monkeypatch.setattr(gate, "run_binary_tool", run)
    partitions, loop_threads = (1, 0) if name == "forward_kernel" else (CONSUMERS, 128)
    loops = (LISTED_LOOP,)
    assert read(".maxntid 384") == CompiledKernel(168, 40, 9000, 0, loops, False, 90, 384, partitions, loop_threads)
    other = read("add.ftz.f32\n.reqntid 64", tmem_size=256)
    assert (other.tensor_memory, other.flushes_subnormals, other.threads, other.hazards) == (256, True, 64, ())
    monkeypatch.setattr(gate, "disassemble", lambda cubin: COUNTED.replace(WAIT, "NOP"))
    assert read(".reqntid 128").hazards


@pytest.mark.parametrize(("full", "expected"), [(True, CONSUMERS), (False, 3 * CONSUMERS)])
def test_the_hopper_forward_has_three_loops_unless_it_is_full(full: bool, expected: int) -> None:
    variant = replace(VARIANT, full=full, options=(("forward_kernel", "hopper"),))
    for count in (CONSUMERS, 3 * CONSUMERS):
        failures = hopper_problems(variant, replace(CLEAN, loops=CLEAN.loops * count), "")
        message = f"{count} main loops, expected {expected}"
        assert (message in failures) is (count != expected)
        narrow = hopper_problems(
            replace(variant, tile=Tile(128, 64, 8, 2)), replace(CLEAN, loops=CLEAN.loops * count), ""
        )
        assert "16 products in a loop, expected 12" in narrow and not any("products in" in text for text in failures)


@pytest.mark.parametrize(("more", "fits"), [(-1, False), (0, True), (1024, True), (1025, False)])
def test_the_hopper_backward_takes_the_shared_memory_of_its_launch(more: int, fits: bool) -> None:
    variant = replace(VARIANT, kernel="single_pass", tile=Tile(64, 128, 8, 2), options=(("backward", "hopper"),))
    shared = hopper_backward_launch.backward_shared_bytes(128, variant.tile) + more
    failures = hopper_problems(variant, replace(CLEAN, shared=shared), "")
    products = 2 * (128 + 64) // 16 + 128 // 16  # S and dP over the head dim, dV and dK over queries, dQ over keys
    assert f"16 products in a loop, expected {products}" in failures
    assert any(why.startswith(f"{shared} bytes of shared memory") for why in failures) is not fits


FEW, MANY = 16, 17


@pytest.mark.parametrize(("changed", "most"), [
    ({}, 0),
    ({"features": ("dropout",)}, MANY),
    ({"features": (MAX_LOGITS,)}, 0),
    ({"head_dim": 256}, MANY),
    ({"head_dim": 257}, 0),
    ({"dtype": "fp32"}, MANY),
    ({"options": (("persistent", True),)}, 0),
    ({"kernel": "dkdv", "options": (("persistent", True),)}, FEW),  # its outer loop walks over tiles
    ({"kernel": "dkdv", "options": (("order", "longest"),)}, 0),
    ({"kernel": "single_pass_deterministic"}, FEW),  # waits for its turn to add
    ({"kernel": "single_pass"}, 0),
])  # fmt: skip
def test_number_of_spills_that_the_gate_tolerates(changed: dict[str, Any], most: int) -> None:
    for spills in (FEW, MANY):
        wrong = gate_problems(replace(VARIANT, **changed), replace(CLEAN, loops=(Loop(16, spills, 1, False),)))
        assert (wrong == []) is (spills <= most)


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   BRA.U !UP0, `(.L_end) ;
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
    # The spin loop behind EXIT branches back into the main loop. The epilogue's two LDL lie between them and are not
    # part of the loop.
    (loop,) = matrix_loops(LISTING)
    assert loop == Loop(matrix=2, local=1, waits=1, is_serialised=False) and len(loop.lines) == 9


def test_the_inner_of_nested_loops_is_the_main_loop() -> None:
    nested = LISTING.replace(".L_head:", ".L_outer:\n        /*0018*/                   NOP ;\n.L_head:").replace(
        "        /*0080*/", "        /*0078*/               @P3 BRA `(.L_outer) ;\n        /*0080*/"
    )
    assert len([body for body in natural_loops(basic_blocks(nested)) if len(body) > 1]) == 2
    assert len(list(matrix_loops(nested))) == 1


def test_loops_behind_a_jump_through_a_table_are_found() -> None:
    """Each partition of warps is reached by the table only, and may jump on through another one."""
    partition = LISTING.partition(".L_head:")[2].partition(".L_trap:")[0]
    parts = [f".L_head:{partition}".replace(".L_", f".L_{name}_") for name in ("a", "b")]
    listing = "        /*0000*/                   BRX R2 -0x80 ;\n" + parts[0] + parts[1]
    assert [loop.matrix for loop in matrix_loops(listing)] == [2, 2]


def test_one_wait_per_product_is_serialised() -> None:
    wait = "        /*0034*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    (loop,) = matrix_loops(LISTING.replace("        /*0040*/", wait + "        /*0040*/"))
    assert loop.is_serialised and loop.waits == 2
    assert loop_of(PRODUCT, WAIT, PRODUCT, WAIT, PRODUCT, PRODUCT, WAIT).is_serialised


COUNTED = Path(__file__).with_name("forward_sm_90.sass").read_text()
WARPS = 4


def loop_of(*instructions: str) -> Loop:
    return read_loop([f"        /*{i:04x}*/                   {text} ;" for i, text in enumerate(instructions)])


def mix(*instructions: str, warps: int = WARPS) -> InstructionMix:
    return instruction_mix(loop_of(*instructions), warps)[0]


def bound(*instructions: str, arch: int = 90) -> LoopBound:
    return loop_bound(loop_of(*instructions), WARPS, arch, blocks=1)


(LISTED_LOOP,) = matrix_loops(COUNTED)
LISTED = replace(LISTED_LOOP, is_serialised=False)  # its products are one wgmma each, and each needs its wait


def test_counts_and_clocks_match_a_hand_count() -> None:
    # Counted by hand. MUFU: 8 scores per thread (64 x 16 over 128 threads) and 2 rows to rescale. FFMA 10, FMUL 10,
    # FADD 12. FMNMX 12. IADD3 4. F2FP 4 and PLOP3 1. IMAD.MOV 5. SHFL 8. BAR 4. Two HGMMA of 64x16x16.
    counted = {
        "issued": 100, "exponentials": 10, "special": 10, "fma": 10 + 10 + 12, "integer_multiply": 5, "add": 4,
        "minmax": 12, "logic": 4 + 1, "shuffles": 8, "barriers": 4, "products": 2 * 64 * 16 * 16,
    }  # fmt: skip
    listed, exposed = instruction_mix(LISTED, WARPS)
    assert {name: getattr(listed, name) for name in counted} == counted
    assert exposed.exponentials == 10 and exposed.products == 0
    # Two STSM of one 8 x 8 matrix by each of 4 warps. The first product reads A (64 rows) and B (16), the second B.
    assert listed.shared_bytes == 2 * 128 * 4 + 32 * (64 + 16) + 32 * 16
    assert listed.global_bytes == 2 * 4 * 32 * 4  # two LDG of 4 bytes per lane
    assert busy_clocks(listed, 90) == {
        "tensor cores": 32768 / 2048,
        "exponentials": 10 * 128 / 16,
        "FMA": 32 * 128 / 128 + 5 * 128 / 64,
        "ALU": (4 + 12 + 5) * 128 / 64,
        "issue": 100 * 4 / 4,
        "shared memory": 4096 / 128 + 8 * 128 / 32,
        "memory": 1024 / 64,
    }


def test_bound_matches_a_hand_computation() -> None:
    # Two blocks fill each other's gaps: 100 clocks of issue hide the 16 clocks of products.
    packed = loop_bound(LISTED, WARPS, 90, blocks=2)
    assert (packed.percent, packed.limiter) == (16.0, "issue")
    # One block issues 8 instructions while a product runs: 7 from the first HGMMA to its wait, 1 from the second.
    # The other 92 issue after the 64 clocks that shared memory takes.
    alone = loop_bound(LISTED, WARPS, 90, blocks=1)
    assert alone.percent == pytest.approx(100 * 16 / (64 + 92))
    assert (alone.limiter, alone.ceiling) == ("issue in step", 16.0)
    # 160 clocks of hidden exponentials, longer than the 128 of the products, and 100 of exposed selections
    other = bound(PRODUCT, PRODUCT, *[EX2] * 20, WAIT, *["FSEL R4, R4, R4, P0"] * 50, "BAR.SYNC 0x0")
    assert (other.percent, other.limiter) == (100 * 128 / 260, "ALU in step")
    serialised = loop_bound(LISTED_LOOP, WARPS, 90, blocks=1)
    assert (serialised.percent, serialised.limiter) == (0, "serialised wgmma")


PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EX2, ONE_LEFT = "MUFU.EX2 R4, R4", WAIT.replace("0x0", "0x1")
ARRIVE, LOAD = "SYNCS.ARRIVE.TRANS64 RZ, [UR7+0x10000], R9", "UTMALDG.2D [UR12], [UR18]"
SHORT = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
LOGIC = ["FSETP", "FSEL", "FSET", "F2FP", "ISETP", "SEL", "LOP3", "PLOP3", "SHF", "LEA", "PRMT", "VIMNMX", "VIMNMX3"]
LOGIC += ["IMNMX", "IABS", "MOV", "SGXT", "BMSK", "P2R", "R2P", "I2FP"]
ARRIVED = "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R8"


@pytest.mark.parametrize(("instructions", "counted"), [
    ([PRODUCT], {"products": 64 * 128 * 16, "shared_bytes": 32 * (64 + 128)}),
    (["HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR16].tnspB, R88"],
     {"products": 64 * 128 * 16, "shared_bytes": 32 * 128}),
    (["HGMMA.64x64x8.F32.TF32 R24, gdesc[UR4], RZ, !UPT"],
     {"products": 2 * 64 * 64 * 8, "shared_bytes": 32 * (64 + 64)}),
    (["QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ"],
     {"products": 64 * 64 * 32 / 2, "shared_bytes": 32 * (64 + 64)}),
    ([SHORT], {"products": 4 * 16 * 8 * 16, "shared_bytes": 0}),
    (["HMMA.1688.F32.TF32 R4, R8, R12, R4"], {"products": 4 * 2 * 16 * 8 * 8}),
    (["LDSM.16.M88.4 R4, [R8]"], {"shared_bytes": WARPS * 512}),
    (["LDS.128 R4, [R8]", "STS R4, [R8]", "LDS.U16 R4, [R8]"], {"shared_bytes": WARPS * (512 + 128 + 64)}),
    # an instruction whose guard is always false only takes an issue slot
    (["@!PT LDS RZ, [RZ]", "@P0 LDS R4, [R8]"], {"issued": 2, "shared_bytes": WARPS * 128}),
    # a copy from global to shared memory counts for both
    (["LDGSTS.E.BYPASS.128 [R8], desc[UR4][R2.64]", "LDG.E.64 R4, desc[UR4][R2.64]"],
     {"shared_bytes": WARPS * 512, "global_bytes": WARPS * (512 + 256)}),
    # a TMA load has the bytes that its barrier expects
    (["MOV R9, 0x4000", ARRIVE, LOAD], {"shared_bytes": 0x4000, "global_bytes": 0x4000}),
    (["MOV R9, 0x4000", ARRIVE, ARRIVE, LOAD], {"shared_bytes": 0x8000, "global_bytes": 0x8000}),
    (["MOV R9, 0x4000", "IADD3 R9, R9, R4, RZ", ARRIVE, LOAD], {"global_bytes": 0}),
    (["FFMA2 R4, R4, R4, R4", "FADD R4, R4, R4"], {"fma": 3}),
    ([f"{name} R4, R4, R4" for name in ("FMUL", "HFMA2", "HMUL2", "HADD2", "FMUL2", "FADD2")], {"fma": 4 + 2 * 2}),
    ([f"{name} R4, R4, R4" for name in LOGIC], {"logic": len(LOGIC), "add": 0, "fma": 0}),
    (["IADD3 R4, R4, R4, RZ", "VIADD R4, R4, 0x1"], {"add": 2, "logic": 0}),
    (["QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4"], {"products": 4 * 16 * 8 * 32 / 2}),
    (["LDSM.16.M88.2 R4, [R8]", "LDS.S16 R4, [R8]", "LDS.U8 R4, [R8]"], {"shared_bytes": WARPS * (256 + 64 + 32)}),
    (["LDL.64 R4, [R1]"], {"global_bytes": WARPS * 256}),
    (["IMAD.MOV.U32 R9, RZ, RZ, 0x4000", ARRIVE, "UBLKCP.S.G [UR12], [UR18]"], {"global_bytes": 0x4000}),
])  # fmt: skip
def test_counts_of_each_instruction(instructions: list[str], counted: dict[str, float]) -> None:
    counts = mix(*instructions)
    assert {name: getattr(counts, name) for name in counted} == counted
    assert mix(*instructions, warps=8).products == 2 * counts.products


@pytest.mark.parametrize(("instructions", "exposed"), [
    # A product hides exponentials, even if it is in flight across iterations. A short product hides few.
    ([PRODUCT, EX2, ONE_LEFT, EX2, WAIT, EX2], 1),
    ([EX2, WAIT, EX2, PRODUCT], 1),
    ([SHORT, *[EX2] * 20], 20 - (8 - 1)),
    ([PRODUCT, ARRIVED, EX2, WAIT], 0),  # the barrier of a load
    (["UMOV UR25, 0x8100490", "UTCHMMA gdesc[UR22], gdesc[UR16], tmem[UR11], tmem[UR24], idesc[UR25], UPT", EX2,
      ARRIVED, EX2], 1),
])  # fmt: skip
def test_exponentials_not_hidden_by_products(instructions: list[str], exposed: int) -> None:
    assert instruction_mix(loop_of(*instructions), WARPS)[1].exponentials == exposed


def test_products_of_sm_100_by_their_descriptor() -> None:
    first = "UTCHMMA gdesc[UR22], gdesc[UR16], tmem[UR11], tmem[UR24], idesc[UR25], UPT"
    second = "UTCHMMA tmem[UR34], gdesc[UR4], tmem[UR14], tmem[UR24], idesc[UR25], UPT"
    # 0x8100490 is M128 N64 and 0x8210490 is M128 N128. An instruction takes the constant last set before it; the first
    # one takes the constant from the end of the loop.
    counts = mix(first, "UMOV UR25, 0x8210490", second, "UMOV UR25, 0x8100490", warps=8)
    assert counts.products == 128 * 64 * 16 + 128 * 128 * 16
    assert counts.shared_bytes == 32 * (128 + 64) + 32 * 128
    with pytest.raises(ValueError, match="shape of the matrix instruction"):
        mix(first)
    # M128 N64 of TF32 (2 in bits 7 to 9) has depth 8 and counts twice, of 8 bits depth 32 and half
    for name, descriptor, depth, weight in (("UTCHMMA", 0x8100510, 8, 2.0), ("UTCQMMA", 0x8100490, 32, 0.5)):
        counts = mix(f"UMOV UR25, {descriptor:#x}", first.replace("UTCHMMA", name), warps=8)
        assert (counts.products, counts.shared_bytes) == (128 * 64 * depth * weight, 32 * (128 + 64))


@pytest.mark.parametrize(("extra", "limiter"), [
    ([], "tensor cores"),
    ([EX2] * 200, "exponentials"),
    (["FFMA R4, R4, R4, R4"] * 1500, "issue"),  # 128 FMA lanes keep up with the issue rate
    (["FSEL R4, R4, R4, P0"] * 800, "ALU"),
    (["LDS.128 R4, [R8]"] * 100, "shared memory"),
    (["LDG.E.128 R4, desc[UR4][R2.64]"] * 100, "memory"),
])  # fmt: skip
def test_the_limiter_is_named(extra: list[str], limiter: str) -> None:
    limit = bound(*[PRODUCT] * 16, WAIT, *extra)
    assert limit.limiter == limiter
    assert (limit.percent == 100) == (limiter == "tensor cores")
    # sm_80 has half the FMA lanes.
    assert bound(*[SHORT] * 16, *["FFMA R4, R4, R4, R4"] * 200, arch=80).limiter == "FMA"


COMPILED = CompiledKernel(64, 0, 2560, 0, (LISTED,), arch=90, threads=128)


@pytest.mark.parametrize(("arch", "registers", "shared", "tensor_memory", "threads", "blocks"), [
    (90, 255, 163_840, 0, 256, 1),
    (90, 128, 32_768, 0, 256, 2),  # limited by registers: 64 K / (128 x 256)
    (90, 32, 100_000, 0, 128, 2),  # limited by shared memory: 228 KB per SM
    (90, 32, 116_000, 0, 128, 1),  # the system takes 1 KB more per block
    (86, 16, 0, 0, 1024, 1),  # limited by 48 warps
    (80, 16, 0, 0, 32, 32),  # limited by the number of blocks
    (90, 168, 0, 0, 384, 1),
    (100, 64, 10_000, 256, 128, 2),  # limited by tensor memory
    (100, 64, 10_000, 592, 128, 0),
    (86, 128, 120_000, 0, 256, 0),  # does not fit
    (0x942, 256, 32_768, 0, 256, 2),  # wavefronts of 64 threads: 512 registers per thread of each of 4 SIMDs
    (0x942, 257, 16_384, 0, 256, 1),
    (0x942, 32, 65_536, 0, 256, 1),
    (0x942, 32, 65_537, 0, 256, 0),
    (0x950, 32, 65_536, 0, 256, 2),
    (0x942, 32, 0, 0, 256, 8),
    (0x942, 128, 0, 0, 96, 8),  # as 128 threads
])  # fmt: skip
def test_blocks_of_an_sm(arch: int, registers: int, shared: int, tensor_memory: int, threads: int, blocks: int) -> None:
    compiled = CompiledKernel(registers, 0, shared, tensor_memory, (), arch=arch, threads=threads)
    assert blocks_per_sm(compiled) == blocks


def test_partitions_of_a_block_count_as_blocks() -> None:
    # 256 of the 384 threads run the loop, in two groups of 128, so they count as two blocks of 128 threads.
    special = replace(COMPILED, shared=200_000, threads=384, partitions=2, loop_threads=128)
    assert blocks_per_sm(special) == 1
    (as_partitions,), (as_blocks,) = loop_bounds(special), loop_bounds(replace(COMPILED, shared=100_000))
    assert as_partitions.mix.warps == 4 and as_partitions == as_blocks


def test_the_main_loop_is_the_unmasked_one() -> None:
    masked = read_loop([*LISTED.lines, "        /*2000*/                   FSEL R4, R4, R4, P0 ;"])
    compiled = replace(COMPILED, loops=(masked, LISTED, masked))
    assert main_bound(compiled) == loop_bounds(compiled)[1] and main_bound(replace(compiled, loops=())) is None
    assert [main_bound(replace(compiled, shared=shared)).percent for shared in (0, 200_000)] == [  # type: ignore[union-attr]
        16.0, pytest.approx(100 * 16 / 156)
    ]  # fmt: skip


def test_the_row_of_a_variant_has_the_figures_of_its_main_loop() -> None:
    lines = (*LISTED.lines, "        /*2000*/                   MUFU.LG2 R4, R4 ;")
    compiled = replace(COMPILED, stack=16, shared=200_000, loops=(replace(LISTED, local=3, lines=lines),))
    figures = {
        "bound": pytest.approx(1600 / 157), "limiter": "issue in step", "ceiling": 1600 / 101, "spills": 3, "blocks": 1,
        "instructions": 101, "matrix": 2, "exponentials": 10, "products": 16.0, "regs": 64, "stack": 16,
        "shared": 200_000, "threads": 128, "problems": "slow; wrong", "loops": "2", "features": "softcap dropout",
    }  # fmt: skip
    row = variant_row(replace(VARIANT, features=("softcap", "dropout")), compiled, ["slow", "wrong"])
    assert {name: row[name] for name in figures} == figures
